"""What each family's chat template makes of a conversation: its own templates, cut down to how they write turns.

Whatever orders of roles a template refuses or passes over, nothing that was said is missing in the prompt; and each
prompt begins with the last one and its reply, so that the cache is used right through.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from call_templates import FAMILIES as CALLING
from call_templates import Family, family, vocabulary

from engine.api import Message, ToolCall
from engine.errors import TemplateError

GEMMA2 = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{{- message.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

PHI3 = """{%- for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

PHI4 = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

GRANITE3 = """{%- if messages[0].role == 'system' %}{% set lead, messages = messages[0].content, messages[1:] %}
{%- else %}{% set lead = 'You are Granite.' + (' Think first.' if thinking else '') %}{% endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + lead + '<|end_of_text|>\n' }}
{%- for message in messages %}
{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\n' }}
{%- if loop.last and add_generation_prompt %}{{ '<|start_of_role|>assistant' }}
{%- if thinking %}{{ ' {"thinking": true}' }}{% endif %}{{ '<|end_of_role|>' }}{% endif %}{% endfor %}"""

SMOLLM3 = """{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
{%- set lead, mode = '', '/think' if enable_thinking else '/no_think' %}
{%- if messages[0].role == 'system' %}{% set lead, messages = messages[0].content, messages[1:] %}{% endif %}
{{- '<|im_start|>system\n## Metadata\n\nReasoning Mode: ' + mode + '\n\n## Custom Instructions\n\n' + lead }}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{% if enable_thinking %}
{{- '<|im_start|>assistant\n' + message.content.lstrip('\n') + '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n' + message.content.lstrip('\n') + '<|im_end|>\n' }}
{%- endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if not enable_thinking %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}"""
"""Takes notice of a system prompt in front only."""

OLMO2 = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|assistant|>\n' + message.content }}
{{- eos_token if loop.last else eos_token + '\n' }}
{%- else %}{{ '<|' + message.role + '|>\n' + message.content + '\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

COMMAND_R = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set lead, messages = messages[0].content, messages[1:] %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + lead + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<|START_OF_TURN_TOKEN|>' + ('<|USER_TOKEN|>' if message.role == 'user' else '<|CHATBOT_TOKEN|>') }}
{{- message.content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

GLM4 = """[gMASK]<sop>
{%- for message in messages %}
{{- '<|' + message.role + '|>\n' + message.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
"""A turn ends where the next one begins."""

LLAMA4 = """{{ bos_token }}
{%- for message in messages %}
{{- '<|header_start|>' + message.role + '<|header_end|>\n\n' + message.content | trim + '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}"""

EXAONE4 = """{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '[|assistant|]\n' }}
{%- if '</think>' in message.content %}{{ message.content.split('</think>')[-1].strip() }}
{%- else %}{{ message.content }}{% endif %}{{ '[|endofturn|]\n' }}
{%- else %}{{ '[|' + message.role + '|]\n' + message.content.strip() + '[|endofturn|]\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '[|assistant|]\n' }}
{%- if enable_thinking is defined and enable_thinking %}{{ '<think>\n' }}{% else %}{{ '<think>\n\n</think>\n\n' }}
{%- endif %}{% endif %}"""

LFM2 = """{{ bos_token }}
{%- for message in messages %}{% set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content %}{% set content = content.split('</think>')[-1] | trim %}
{%- endif %}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LAST_SYSTEM = """{{ bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}{% set ns.system = message.content %}{% endfor %}
{{- ns.system }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|User|>' + message.content }}
{%- elif message.role == 'assistant' %}
{{- '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""
"""Of several system prompts the last one counts, wherever it stands (DeepSeek R1)."""

COMMAND_R7B = """{{ bos_token }}
{%- for message in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}
{%- if message.role == 'assistant' %}
{{- '<|CHATBOT_TOKEN|><|START_RESPONSE|>' + message.content + '<|END_RESPONSE|>' }}
{%- else %}{{ '<|SYSTEM_TOKEN|>' if message.role == 'system' else '<|USER_TOKEN|>' }}{{ message.content }}{% endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}{% endfor %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>' }}"""
"""Writes marks around an answer that the model says itself, and always the start of a next one."""

TAKES_TOOLS = """{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Takes it for granted that there are tools (Hermes 2 and 3)."""

_THINK = ("<think>", "</think>")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHATTING: dict[str, Family] = {
    "gemma2": family(GEMMA2, vocabulary("<start_of_turn>", "<end_of_turn>", eos="<end_of_turn>", bos=True)),
    "phi3": family(PHI3, vocabulary(*_ROLES, "<|end|>", eos="<|end|>")),
    "phi4": family(PHI4, vocabulary("<|im_sep|>")),
    "granite3": family(
        GRANITE3, vocabulary("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", eos="<|end_of_text|>")
    ),
    "smollm3": family(SMOLLM3, vocabulary(user_defined=_THINK)),
    "olmo2": family(OLMO2, vocabulary(*_ROLES, eos="<|endoftext|>", bos=True)),
    "command-r": family(
        COMMAND_R,
        vocabulary(
            *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
            "<|SYSTEM_TOKEN|>",
            eos="<|END_OF_TURN_TOKEN|>",
            bos=True,
        ),
    ),
    "command-r7b chat": family(
        COMMAND_R7B,
        vocabulary(
            *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
            *("<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>"),
            eos="<|END_OF_TURN_TOKEN|>",
            bos=True,
        ),
    ),
    "glm4": family(GLM4, vocabulary("[gMASK]", "<sop>", *_ROLES, eos="<|user|>")),
    "llama4": family(LLAMA4, vocabulary("<|header_start|>", "<|header_end|>", "<|eot|>", eos="<|eot|>", bos=True)),
    "exaone4": family(
        EXAONE4,
        vocabulary(
            "[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]", user_defined=_THINK, eos="[|endofturn|]"
        ),
    ),
    "lfm2": family(LFM2, vocabulary(user_defined=_THINK, bos=True)),
    "last system": family(
        LAST_SYSTEM, vocabulary("<|User|>", "<|Assistant|>", "<|eos|>", user_defined=_THINK, eos="<|eos|>", bos=True)
    ),
    "takes tools": family(TAKES_TOOLS, vocabulary()),
}
ALL = {**CALLING, **CHATTING}
TOOLS = [{"type": "function", "function": {"name": "get_file", "description": "Reads.", "parameters": {}}}]
every_family = pytest.mark.parametrize("name", ALL)


def said(role: Any, text: str) -> Message:
    return Message(role=role, content=text)


def spelled_ids(family: Family, text: str) -> tuple[int, ...]:
    """Ids of a reply, each text character by character, as no tokenizer would write it."""
    ids: list[int] = []
    for part in family.tokenizer.parts(text):
        ids += [part] if isinstance(part, int) else [id for c in part for id in family.tokenizer.encode(c)]
    return tuple(ids)


def assert_tells(family: Family, messages: Sequence[Message], *texts: str, tools: Sequence[Any] = ()) -> None:
    """The prompt has these texts, in this order; as ids too."""
    prompt = family.template.render(messages, tools)
    spelled = family.tokenizer.spelled(family.template.encode(messages, tools))
    for text in (prompt, spelled):
        position = -1
        for part in texts:
            position = text.find(part, position + 1)
            assert position >= 0, f"{part} is not in its place in {text!r}"


@every_family
def test_a_system_prompt_is_told_also_where_the_template_has_no_such_role(name: str) -> None:
    assert_tells(ALL[name], [said("system", "Be brief."), said("user", "First?")], "Be brief.", "First?")


@every_family
def test_two_questions_in_a_row_are_both_told(name: str) -> None:
    assert_tells(ALL[name], [said("user", "First?"), said("user", "Second?")], "First?", "Second?")


@every_family
def test_several_system_prompts_are_all_told_in_order(name: str) -> None:
    messages = [said("system", "Be brief."), said("system", "Be kind."), said("user", "First?")]
    assert_tells(ALL[name], messages, "Be brief.", "Be kind.", "First?")


@every_family
def test_what_the_system_says_later_is_told_where_it_was_said(name: str) -> None:
    messages = [said("system", "Be brief."), said("user", "First?"), said("assistant", "Yes.")]
    messages += [said("system", "Be kind."), said("user", "Second?")]
    assert_tells(ALL[name], messages, "Be brief.", "First?", "Yes.", "Be kind.", "Second?")


def test_a_later_system_prompt_leaves_the_first_one_a_system_prompt() -> None:
    messages = [said("system", "Be brief."), said("user", "First?"), said("assistant", "Yes.")]
    messages += [said("system", "Be kind."), said("user", "Second?")]
    text = ALL["smollm3"].template.render(messages)
    assert "Custom Instructions\n\nBe brief.<|im_end|>" in text
    assert "<|im_start|>user\nBe kind.\n\nSecond?<|im_end|>" in text


def test_a_system_prompt_that_the_template_rewrites_stays_one() -> None:
    """Nothing else says more of it."""
    source = "{{ messages[0].content | upper }}{% for m in messages[1:] %}{{ m.content }}{% endfor %}"
    one = family(source, vocabulary())
    assert one.template.render([said("system", "brief"), said("user", "x")]) == "BRIEFx"
    two = [said("system", "brief"), said("user", "x"), said("assistant", "y"), said("system", "kind")]
    assert one.template.render(two) == "BRIEFxykind"


# ---------------------------------------------------------------- calls
def call(number: int, path: str) -> ToolCall:
    return ToolCall(id=f"call_{number:024d}", name="get_file", arguments=json.dumps({"path": path}))


@every_family
def test_calls_at_once_and_their_results_are_all_told(name: str) -> None:
    one, other = call(1, 'first "file".txt'), call(2, "second.txt")
    messages = [
        said("user", "Read both."),
        Message(role="assistant", content="", tool_calls=(one.as_json(), other.as_json())),
        Message(role="tool", content="result one", tool_call_id=one.id, name="get_file"),
        Message(role="tool", content="result two", tool_call_id=other.id, name="get_file"),
    ]
    family = ALL[name]
    text = family.template.render(messages, TOOLS)
    assert family.tokenizer.spelled(family.template.encode(messages, TOOLS)).count("result") == text.count("result")
    for part in ("get_file", "second.txt", "result one", "result two"):
        assert part in text
    assert 'first "file".txt' in text or 'first \\"file\\".txt' in text
    if name in ("llama3.2", "gpt-oss"):  # which write one call a message: each before its result
        assert text.index("file") < text.index("result one") < text.index("second.txt") < text.index("result two")


@every_family
def test_what_is_said_with_a_call_is_told_beside_it(name: str) -> None:
    one, family = call(1, "first.txt"), ALL[name]
    messages = [
        said("user", "Read it."),
        Message(role="assistant", content="Let me look.", tool_calls=(one.as_json(),)),
        Message(role="tool", content="result one", tool_call_id=one.id, name="get_file"),
        said("assistant", "It is short."),
        said("user", "And now?"),
    ]
    beside = () if name == "mistral-v3" else ("Let me look.",)  # which refuses it in any place
    assert_tells(family, messages, "Read it.", *beside, "result one", "It is short.", "And now?", tools=TOOLS)
    assert_tells(family, messages, "Read it.", "first.txt", "result one", tools=TOOLS)


@every_family
@pytest.mark.parametrize("arguments", ['{"path": "a.py', "[1]", "7", ""])
def test_arguments_that_are_no_object_break_no_prompt(name: str, arguments: str) -> None:
    """A small model may write them; the tool then says what is wrong."""
    one = ToolCall(id=f"call_{1:024d}", name="get_file", arguments=arguments)
    wrong = Message(role="tool", content="no object", tool_call_id=one.id, name="get_file")
    messages = [said("user", "Read it."), Message(role="assistant", content="", tool_calls=(one.as_json(),)), wrong]
    assert_tells(ALL[name], messages, "Read it.", "get_file", "no object", tools=TOOLS)


def test_a_single_call_is_refused_as_the_template_says() -> None:
    source = "{% if messages[-1].tool_calls %}{{ raise_exception('no calls at all') }}{% endif %}{{ tools }}"
    messages = [said("user", "x"), Message(role="assistant", content="", tool_calls=(call(1, "a").as_json(),))]
    with pytest.raises(TemplateError, match="no calls at all"):
        family("{# tool_calls #}" + source + "{{ tool_calls }}", vocabulary()).template.render_as_given(messages, TOOLS)


# ---------------------------------------------------------------- prompts go on where the last one ended
THINKING = ("qwen3", "smollm3", "exaone4", "lfm2", "last system", "deepseek-r1")
OPENS = {"exaone4": (True,), "last system": (None, True, False), "deepseek-r1": (None, True, False)}
"""For which settings the prompt itself opens the reasoning."""


@pytest.mark.parametrize(
    ("name", "enabled"),
    [(name, None) for name in ALL if name not in ("gpt-oss", "takes tools")]
    + [(name, enabled) for name in THINKING for enabled in (True, False)],
)
def test_each_prompt_begins_with_the_last_one_and_its_reply(name: str, enabled: bool | None) -> None:
    family, before = ALL[name], list[int]()
    opened = enabled in OPENS.get(name, ())
    thinks = enabled is True or opened
    arguments = {} if enabled is None else {"enable_thinking": enabled}
    messages = [said("system", "Be brief."), said("user", "First? <|im_end|>")]
    for turn in range(4):
        prompt = family.template.encode(messages, **arguments)
        assert prompt[: len(before)] == before, f"turn {turn}"
        answer = f"{' ' if name == 'mistral-v3' else ''}Answer  {turn}."  # which says a space first
        marks = ("<|START_RESPONSE|>", "<|END_RESPONSE|>") if name == "command-r7b chat" else ("", "")
        text = f"<think>\nhm\n</think>\n\n{answer}" if thinks else answer.join(marks)
        ids = spelled_ids(family, text.removeprefix("<think>\n") if opened else text)
        messages.append(Message(role="assistant", content=answer, ids=ids, thinking="hm" if thinks else None))
        messages.append(said("user", f"And {turn}?"))
        before = [*prompt, *ids]


@pytest.mark.parametrize("name", ["qwen3", "smollm3", "exaone4"])
def test_thinking_is_turned_on_and_off_by_the_prompt(name: str) -> None:
    template, messages = ALL[name].template, [said("user", "First?")]
    assert template.thinks
    on, off = (template.render(messages, enable_thinking=enabled) for enabled in (True, False))
    assert not on.rstrip().endswith("</think>")
    assert off.rstrip().endswith("</think>")


@pytest.mark.parametrize("name", ["gemma2", "phi3", "granite3", "olmo2", "llama4", "llama3.2", "mistral-v11"])
def test_a_family_that_does_not_think_is_not_said_to(name: str) -> None:
    template, messages = ALL[name].template, [said("user", "First?")]
    assert not template.thinks
    assert template.render(messages, enable_thinking=True) == template.render(messages, enable_thinking=False)


def test_a_turn_changed_to_think_or_not_keeps_what_was_cached() -> None:
    for name in ("qwen3", "smollm3"):
        family = ALL[name]
        messages, before = [said("system", "Be brief."), said("user", "First?")], list[int]()
        for turn, enabled in enumerate((True, True, True)):
            prompt = family.template.encode(messages, enable_thinking=enabled)
            assert prompt[: len(before)] == before
            ids = spelled_ids(family, f"<think>\nhm\n</think>\n\nAnswer {turn}.")
            before = [*prompt, *ids]
            messages.append(Message(role="assistant", content=f"Answer {turn}.", ids=ids, thinking="hm"))
            messages.append(said("user", f"And {turn}?"))
