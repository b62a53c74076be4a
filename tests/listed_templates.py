"""Chat templates that write the arguments of a call one by one, and others whose form has its own ways; with a small
vocabulary that has the control tokens of each. Written for these tests; what is here of a format is what its makers
document.
"""

from __future__ import annotations

from collections.abc import Mapping

_MESSAGES = """{%- if tools %}{{ '<|system|>' + tools | tojson + '<|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|assistant|>' + (LEAD) + (message.content or '') }}
{%- if message.tool_calls %}CALLS{% endif %}{{ END }}
{%- elif message.role == 'tool' %}RESULT
{%- else %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' + OPENED }}{% endif %}"""


def _written(
    calls: str,
    *,
    lead: str = "''",
    opened: str = "''",
    end: str = "'<|end|>'",
    result: str = "{{ '<|tool|>' + message.content + '<|end|>' }}",
) -> str:
    source = _MESSAGES.replace("CALLS", calls).replace("RESULT", result).replace("LEAD", lead)
    return source.replace("OPENED", opened).replace("END", end)


_EACH = "{%- for call in message.tool_calls %}{% set call = call.function %}"
_EACH_ARGUMENT = "{%- for name, value in call.arguments.items() %}"
_PYTHON_TEXT = (
    "{%- if value is mapping or value is sequence and value is not string %}{% set value = value | tojson %}"
    "{% else %}{% set value = value | string %}{% endif %}"
)
_JSON_TEXT = "{%- set value = value if value is string else value | tojson %}"

QWEN3_CODER = _written(
    _EACH + "{{ ('\\n' if not loop.first else '') + '<tool_call>\\n<function=' + call.name + '>\\n' }}"
    f"{_EACH_ARGUMENT}{_PYTHON_TEXT}"
    "{{ '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}{% endfor %}"
)
"""Also Qwen 3.5, Nemotron 3, StepFun."""

QWEN35 = _written(
    QWEN3_CODER[QWEN3_CODER.index("{%- for call") : QWEN3_CODER.index("{% endif %}{{ '<|end|>' }}")],
    lead="'<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n'",
    opened="'<think>\\n'",
)
"""Writes a block of reasoning for every turn, and opens one in its prompts."""

GLM = _written(
    _EACH + "{{ '\\n<tool_call>' + call.name + '\\n' }}"
    f"{_EACH_ARGUMENT}{_JSON_TEXT}"
    "{{ '<arg_key>' + name + '</arg_key>\\n<arg_value>' + value + '</arg_value>\\n' }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}",
    lead="'\\n<think></think>\\n'",
)
"""GLM 4.5 and 4.6: an empty block of reasoning in every turn, none in the prompt."""

GLM_TIGHT = GLM.replace("\\n", "")
"""GLM 4.7."""

MINIMAX = _written(
    "{{ '\\n<minimax:tool_call>\\n' }}" + _EACH + "{{ '<invoke name=\"' + call.name + '\">\\n' }}"
    f"{_EACH_ARGUMENT}{_JSON_TEXT}"
    "{{ '<parameter name=\"' + name + '\">' + value + '</parameter>\\n' }}{% endfor %}"
    "{{ '</invoke>\\n' }}{% endfor %}{{ '</minimax:tool_call>' }}"
)
"""MiniMax M2: several calls in one block."""

DSML = _written(
    "{{ '\\n\\n<｜DSML｜function_calls>\\n' }}" + _EACH + "{{ '<｜DSML｜invoke name=\"' + call.name + '\">\\n' }}"
    f"{_EACH_ARGUMENT}"
    "{%- set kind, value = ('true', value) if value is string else ('false', value | tojson) %}"
    "{{ '<｜DSML｜parameter name=\"' + name + '\" string=\"' + kind + '\">' + value + '</｜DSML｜parameter>\\n' }}"
    "{% endfor %}{{ '</｜DSML｜invoke>\\n' }}{% endfor %}{{ '</｜DSML｜function_calls>' }}"
)
"""DeepSeek V3.2: the mark in front of a value says whether it is a text."""

SEED = _written(
    _EACH + "{{ '\\n<seed:tool_call>\\n<function=' + call.name + '>\\n' }}"
    f"{_EACH_ARGUMENT}"
    "{{ '<parameter=' + name + '>' + value | string + '</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</seed:tool_call>' }}{% endfor %}",
    lead="'<seed:think>' + message.reasoning_content + '</seed:think>\\n' if message.reasoning_content else ''",
)
"""Lists as Python writes them, and reasoning in marks of its own."""

_GEMMA4_VALUE = """{%- macro quoted(value) -%}
{%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is boolean %}{{ 'true' if value else 'false' }}
{%- elif value is mapping %}{{ '{' }}
{%- for name, item in value | dictsort %}{{ name + ':' + quoted(item) + (',' if not loop.last else '') }}{% endfor %}
{{- '}' }}
{%- elif value is sequence %}{{ '[' }}
{%- for item in value %}{{ quoted(item) + (',' if not loop.last else '') }}{% endfor %}{{ ']' }}
{%- else %}{{ value }}{% endif %}
{%- endmacro -%}
"""
_GEMMA4_CALLS = (
    _EACH + "{{ '<|tool_call>call:' + call.name + '{' }}"
    "{%- for name, value in call.arguments | dictsort %}"
    "{{ name + ':' + quoted(value) + (',' if not loop.last else '') }}{% endfor %}"
    "{{ '}<tool_call|>' }}{% endfor %}"
)
_GEMMA4_THOUGHT = (
    "'<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' if message.reasoning_content else ''"
)
GEMMA4 = _GEMMA4_VALUE + _written(_GEMMA4_CALLS, lead=_GEMMA4_THOUGHT)
"""Texts in quotes of their own, names without any, in alphabetical order."""

GEMMA4_IN_TURN = _GEMMA4_VALUE + _written(
    _GEMMA4_CALLS,
    end="'' if message.tool_calls else '<|end|>'",
    result="{{ '<|tool_response>response:' + message.name }}{{ '{value:' + quoted(message.content) + '}' }}",
).replace(
    "{%- if add_generation_prompt %}",
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}",
)
"""The result stands in the turn of the call, which the model goes on with; the prompt closes a block of reasoning."""
GEMMA4_IN_TURN = GEMMA4_IN_TURN.replace(
    "'<|assistant|>' + ''", "'<|assistant|><|channel>thought\\n<channel|>'"
).replace("{{ '<|assistant|>' + (", "{{ ('' if messages[loop.index0 - 1].role == 'tool' else '<|assistant|>') + (")

LFM25 = _written(
    "{{ '<|tool_call_start|>[' }}" + _EACH + "{{ call.name + '(' }}"
    f"{_EACH_ARGUMENT}"
    "{%- if value is string %}{{ name + \"='\" + value + \"'\" }}{% else %}{{ name + '=' + value | string }}{% endif %}"
    "{{- ', ' if not loop.last else '' }}{% endfor %}{{ ')' + (', ' if not loop.last else '') }}{% endfor %}"
    "{{ ']<|tool_call_end|>' }}"
)
"""Calls as Python."""

_TELLS = "{%- if tools %}{{ '<|system|>' + tools | tojson + '<|end|>' }}{% endif %}"
LFM2 = _TELLS + (
    "{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Tells of tools and writes no calls: what the vocabulary has says how they are written. Also Granite 3."""

PHI4_MINI = (
    "{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{%- if message.tools %}{{ '<|tool|>' + message.tools + '<|/tool|>' }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Is given tools with the system message."""

APERTUS = _written(
    "{{ '<|tools_prefix|>[' }}" + _EACH + "{{ '{\"' + call.name + '\": ' + call.arguments | tojson + '}' }}"
    "{{ ', ' if not loop.last else '' }}{% endfor %}{{ ']<|tools_suffix|>' }}",
    end="'' if message.tool_calls else '<|end|>'",
    result="{{ '[' + message.content + ']' }}",
)
"""The name is the key of the arguments, and the result stands in the turn of the call."""

SOLAR = _written(
    "{{ '<|tool_calls|>' }}{%- for call in message.tool_calls %}"
    "{{ '<|tool_call:begin|>' + call.id + '<|tool_call:name|>' + call.function.name + '<|tool_call:args|>' }}"
    "{{ call.function.arguments | tojson + '<|tool_call:end|>' }}{% endfor %}{{ '<|calls|>' }}"
)
"""Gives each call its id."""

DEEPSEEK_V31 = _written(
    "{{ '<|tool_calls_begin|>' }}" + _EACH + "{{ '<|tool_call_begin|>' + call.name + '<|tool_sep|>' }}"
    "{{ call.arguments | tojson + '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_end|>' }}",
    lead="'</think>'",
    opened="'<think>'",
).replace("{%- if tools %}{{ '<|system|>' + tools | tojson + '<|end|>' }}{% endif %}", "")
"""Writes calls and tells of no tools."""

TEXT_ARGUMENTS = _written(
    "{%- if message.content is not none %}{{ raise_exception('a call has no text') }}{% endif %}"
    + _EACH
    + "{{ '<|call_begin|>' + call.name + '<|tool_sep|>' + call.arguments + '<|call_end|>' }}{% endfor %}"
)
"""Wants arguments as JSON text and no content, as DeepSeek R1's own template does."""

CONTROLS: Mapping[str, tuple[str, ...]] = {
    "glm": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tool_response>"),
    "lfm": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "granite3": ("<|tool_call|>",),
    "phi4": ("<|tool_call|>", "<|/tool_call|>"),
    "apertus": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "solar": (
        *("<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
        "<|calls|>",
    ),
    "deepseek": (
        *("<|tool_calls_begin|>", "<|tool_call_begin|>", "<|tool_sep|>", "<|tool_call_end|>"),
        "<|tool_calls_end|>",
    ),
    "text arguments": ("<|call_begin|>", "<|tool_sep|>", "<|call_end|>"),
}
"""Of each vocabulary, besides those of the turns."""
