"""How the families of models write tools, calls and results: their chat templates cut down to that, with a small
vocabulary that has the control tokens of each.

What is here of a format is what its makers document; templates that refuse messages do so here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import listed_templates as listed
from tiny_vocab import CHATML_TEMPLATE, CONTROL, USER_DEFINED, bpe_metadata

from engine.chat_template import ChatTemplate
from engine.tokenizer import Tokenizer

QWEN25 = """{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}{{ 'You are helpful.' }}{% endif %}
{{- '\n\n# Tools\n\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
{{- '\n</tools>\n\nCall as\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant' }}
{%- if message.content %}{{ '\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}{% set call = call.function %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN3 = """{%- if tools %}{{ '<|im_start|>system\n# Tools\n\n<tools>' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
{{- '\n</tools>\n\nCall as\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{{- '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last_query=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role in ('user', 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set content, thinking = message.content, '' %}
{%- if message.reasoning_content is string %}{% set thinking = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last_query and (loop.last or thinking) %}
{{- '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or content %}{{ '\n' }}{% endif %}{% set call = call.function %}
{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

LLAMA32 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system, messages = messages[0].content, messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{% if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{- system + '<|eot_id|>' }}
{%- if tools %}{% set first, messages = messages[0].content | trim, messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\n\nRespond in the format {"name": ..., "parameters": ...}.\n\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}{{ first + '<|eot_id|>' }}{% endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

MISTRAL3 = """{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and message.tool_calls is not defined) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and (loop.last or message == (messages | selectattr('role', 'equalto', 'user') | list)[-1]) %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{%- set text = call.function | tojson %}{{ text[:-1] + ', "id": "' + call.id + '"}' }}
{{- ', ' if not loop.last else ']' + eos_token }}{% endfor %}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}
{%- endif %}{% endfor %}"""

MISTRAL11 = """{{- bos_token }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'system' %}{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'assistant' %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}{% endfor %}{{ eos_token }}
{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- endif %}{% endfor %}"""

DEEPSEEK = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}{{ '<|User|>' + message.content }}
{%- elif message.role == 'assistant' %}{{ '<|Assistant|>' }}
{%- if message.tool_calls %}{{ message.content + '<|tool_calls_begin|>' }}
{%- for call in message.tool_calls %}{% if not loop.first %}{{ '\n' }}{% endif %}
{{- '<|tool_call_begin|>function<|tool_sep|>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments | tojson + '\n```<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_end|>' + eos_token }}
{%- else %}{{ message.content.split('</think>')[-1] + eos_token }}{% endif %}
{%- elif message.role == 'tool' %}{{ '<|tool_output_begin|>' + message.content + '<|tool_output_end|>' }}
{%- endif %}{% endfor %}
{%- if tools %}{# told elsewhere #}{% endif %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""

GEMMA3 = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set lead, messages = messages[0].content + '\n\n', messages[1:] %}
{%- else %}{% set lead = '' %}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{{- (lead if loop.first else '') + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

GPT_OSS = """{{- '<|start|>system<|message|>Reasoning: medium\n\n# Valid channels: analysis, commentary, final.' }}
{%- if tools %}{{ "\nCalls to these tools must go to the commentary channel: 'functions'." }}{% endif %}{{ '<|end|>' }}
{%- if messages[0].role in ('system', 'developer') %}{% set lead, messages = messages[0].content, messages[1:] %}
{%- else %}{% set lead = '' %}{% endif %}
{%- if lead or tools %}{{ '<|start|>developer<|message|>' }}
{%- if lead %}{{ '# Instructions\n\n' + lead + '\n\n' }}{% endif %}
{%- if tools %}{{ '# Tools\n\n## functions\n\nnamespace functions {\n\n' }}
{%- for tool in tools %}{{ 'type ' + tool.function.name + ' = (_: any) => any;\n' }}
{%- endfor %}{{ '\n} // namespace functions' }}{% endif %}{{ '<|end|>' }}{% endif %}
{%- set last = namespace(name='') %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('content and thinking with tool calls') }}
{%- elif message.content or message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}{% endif %}
{%- set call = message.tool_calls[0].function %}{% set last.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson }}
{{- '<|end|>' }}
{%- else %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

_TURNS = """{%- if tools %}{{ '<|system|>' + tools | tojson + '<|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}{{ '<|assistant|>' + message.content }}CALLS
{%- elif message.role == 'tool' %}RESULT
{%- else %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def _turns(calls: str, result: str = "{{ '<|tool|>' + message.content + '<|end|>' }}") -> str:
    return _TURNS.replace("CALLS", calls).replace("RESULT", result)


APRIEL = _turns("""{{ '\n\n<tool_calls>[' }}
{%- for call in message.tool_calls %}{% set call = call.function %}
{{- '{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}' + (', ' if not loop.last else '') }}
{%- endfor %}{{ ']</tool_calls>\n<|end|>' }}""")
"""Line breaks in front of calls, after a prompt that ends without one."""

COMMAND_R7B = _turns("""{{ '<|start_action|>[' }}
{%- for call in message.tool_calls %}{% set number, call = loop.index0 | string, call.function %}
{{- '\n    {"tool_call_id": "' + number + '", "tool_name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}' + (',' if not loop.last else '') }}
{%- endfor %}{{ '\n]<|end_action|><|end|>' }}""")
"""Numbers its calls, in front of the name."""

KIMI_K2 = _turns("""{{ '<|calls_begin|>' }}
{%- for call in message.tool_calls %}{% set number, call = loop.index0 | string, call.function %}
{{- '<|call_begin|>functions.' + call.name + ':' + number + '<|argument_begin|>' }}
{{- call.arguments | tojson + '<|call_end|>' }}
{%- endfor %}{{ '<|calls_end|><|end|>' }}""")
"""Numbers its calls, behind the name."""

COMMAND_R_PLUS = _turns(
    """{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- 'Action:\n[{"tool_name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}]\n' }}""",
    "{{ '<|system|><results>\n' + message.content + '</results><|end|>' }}",
)
"""Does not end the turn of a call, so that the result stands in front of the next end of a turn."""

NO_CALLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML_TEMPLATE
"""Tells of tools, and writes no call."""

PYTHON_CALLS = QWEN25.replace("call.arguments | tojson", "call.arguments | string")
"""Writes arguments as Python does, which is no JSON."""

COMPACT = QWEN25.replace("call.arguments | tojson", "call.arguments | tojson(separators=(',', ':'))")


def vocabulary(
    *controls: str, user_defined: tuple[str, ...] = (), eos: str = "<|im_end|>", bos: bool = False
) -> dict[str, Any]:
    """The small vocabulary of the tests with more control tokens, of which one ends a turn."""
    metadata = bpe_metadata("qwen2")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokens = [*tokens, *controls, *user_defined]
    return {
        **metadata,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*types, *[CONTROL] * len(controls), *[USER_DEFINED] * len(user_defined)],
        "tokenizer.ggml.eos_token_id": tokens.index(eos),
        "tokenizer.ggml.add_bos_token": bos,
    }


@dataclass(frozen=True)
class Family:
    template: ChatTemplate
    tokenizer: Tokenizer


def family(source: str, metadata: Mapping[str, Any]) -> Family:
    tokenizer = Tokenizer.from_gguf(metadata)
    return Family(ChatTemplate.from_gguf({**metadata, "tokenizer.chat_template": source}, tokenizer), tokenizer)


_QWEN = vocabulary(user_defined=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"))
_QWEN3 = vocabulary(
    user_defined=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
)
_LLAMA = vocabulary(
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    eos="<|eot_id|>",
    bos=True,
)
_MISTRAL = vocabulary(
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[ARGS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "</s>"),
    eos="</s>",
    bos=True,
)
_DEEPSEEK = vocabulary(
    *("<|User|>", "<|Assistant|>", "<|tool_calls_begin|>", "<|tool_call_begin|>", "<|tool_sep|>", "<|tool_call_end|>"),
    *("<|tool_calls_end|>", "<|tool_output_begin|>", "<|tool_output_end|>", "<|end_of_sentence|>"),
    eos="<|end_of_sentence|>",
    bos=True,
)
GPT_OSS_VOCABULARY = vocabulary(
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"), eos="<|return|>"
)
_TURN_TOKENS = vocabulary(
    *("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|start_action|>", "<|end_action|>", "<|calls_begin|>"),
    *("<|call_begin|>", "<|argument_begin|>", "<|call_end|>", "<|calls_end|>", "<|end|>"),
    eos="<|end|>",
)


def _listed(name: str = "", *user_defined: str) -> dict[str, Any]:
    controls = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", *listed.CONTROLS.get(name, ()))
    return vocabulary(*controls, user_defined=user_defined, eos="<|end|>")


_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_GEMMA = vocabulary("<start_of_turn>", "<end_of_turn>", eos="<end_of_turn>", bos=True)

FAMILIES: Mapping[str, Family] = {
    "qwen2.5": family(QWEN25, _QWEN),
    "qwen3": family(QWEN3, _QWEN3),
    "llama3.2": family(LLAMA32, _LLAMA),
    "mistral-v3": family(MISTRAL3, _MISTRAL),
    "mistral-v11": family(MISTRAL11, _MISTRAL),
    "deepseek-r1": family(DEEPSEEK, _DEEPSEEK),
    "gemma3": family(GEMMA3, _GEMMA),
    "gpt-oss": family(GPT_OSS, GPT_OSS_VOCABULARY),
    "apriel": family(APRIEL, _TURN_TOKENS),
    "command-r7b": family(COMMAND_R7B, _TURN_TOKENS),
    "command-r+": family(COMMAND_R_PLUS, _TURN_TOKENS),
    "kimi-k2": family(KIMI_K2, _TURN_TOKENS),
    "chatml": family(CHATML_TEMPLATE, bpe_metadata("qwen2")),
    "no calls": family(NO_CALLS, _QWEN),
    "python calls": family(PYTHON_CALLS, _QWEN),
    "compact": family(COMPACT, _QWEN),
    "qwen3-coder": family(listed.QWEN3_CODER, _listed("", *_TAGS[:2])),
    "qwen3.5": family(listed.QWEN35, _listed("", *_TAGS)),
    "glm-4.6": family(listed.GLM, _listed("glm", *_TAGS)),
    "glm-4.7": family(listed.GLM_TIGHT, _listed("", *_TAGS)),
    "minimax-m2": family(listed.MINIMAX, _listed()),
    "deepseek-v3.2": family(listed.DSML, _listed()),
    "seed-oss": family(listed.SEED, _listed()),
    "gemma4": family(listed.GEMMA4, _listed("gemma4")),
    "gemma4 in turn": family(listed.GEMMA4_IN_TURN, _listed("gemma4")),
    "lfm2.5": family(listed.LFM25, _listed("lfm")),
    "lfm2": family(listed.LFM2, _listed("lfm")),
    "granite-3.3": family(listed.LFM2, _listed("granite3")),
    "phi-4-mini": family(listed.PHI4_MINI, _listed("phi4")),
    "apertus": family(listed.APERTUS, _listed("apertus")),
    "solar": family(listed.SOLAR, _listed("solar")),
    "deepseek-v3.1": family(listed.DEEPSEEK_V31, _listed("deepseek", "<think>", "</think>")),
    "text arguments": family(listed.TEXT_ARGUMENTS, _listed("text arguments")),
}
