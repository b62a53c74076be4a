"""Forms of calls that no chat template writes: stated in the system prompt, or told of by the template alone."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.api import Message, tool_function
from engine.call_arguments import ListedArguments
from engine.tool_calls import CallForm

STATED = CallForm(
    head='<tool_call>\n{"name": "',
    between='", "arguments": ',
    tail="}\n</tool_call>",
    middle='}\n</tool_call>\n<tool_call>\n{"name": "',
    opener="<tool_call>",
    stated=True,
    placed=True,
)

_CODE = ListedArguments(next=", ", colon="=", quotes=('"', '"'), escapes="json", takes_object=True)

STATED_AS_CODE = CallForm(
    head="```tool_code\n",
    between="(",
    tail=")\n```",
    middle=")\n",
    opener="```tool_code",
    arguments=_CODE,
    stated=True,
    placed=True,
)
"""What Gemma 3 is prompted with for calls."""

STATED_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True, slots=True)
class _Told:
    """A form that templates tell of, or leave to what the model has learned, and do not write."""

    markers: tuple[str, ...]
    """The tokens, or words of the template, that say so."""
    form: CallForm


_LIST_OF_CALLS = CallForm(
    head='<|tool_call|>[{"name": "',
    between='", "arguments": ',
    tail="}]",
    middle='}, {"name": "',
    opener="<|tool_call|>",
    placed=True,
)
_TOLD = (
    # Phi-4-mini
    _Told(("<|tool_call|>", "<|/tool_call|>"), replace(_LIST_OF_CALLS, tail="}]<|/tool_call|>")),
    # Granite 3
    _Told(("<|tool_call|>",), _LIST_OF_CALLS),
    # LFM2
    _Told(
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        CallForm(
            head="<|tool_call_start|>[",
            between="(",
            tail=")]<|tool_call_end|>",
            middle="), ",
            opener="<|tool_call_start|>",
            arguments=replace(_CODE, words=("True", "False", "None")),
            placed=True,
        ),
    ),
    # SmolLM3 and others that tell of tools in Qwen's words
    _Told(("<tool_call>", "</tool_call>"), replace(STATED, stated=False)),
)


TOLD_MARKERS = tuple(marker for row in _TOLD for marker in row.markers)


def told_form(source: str, markers: Collection[str], *, told: bool) -> CallForm | None:
    """The form for a template that writes no calls; None where neither it nor the vocabulary speaks of one.

    `markers`: the special tokens of the vocabulary. `told`: the template tells of tools.
    """
    for row in _TOLD:
        if all(marker in markers or (told and marker in source) for marker in row.markers):
            return replace(row.form, stated=not told)
    return None


def stated(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], form: CallForm) -> tuple[Message, ...]:
    """The messages for a template that lacks something: descriptions of tools go into the system prompt where it tells
    of none, calls into texts of the assistant where it writes none, and their results into texts of the user where it
    does neither."""
    plain: list[Message] = []
    for message in messages:
        if message.role == "tool" and form.stated and form.placed:
            as_code = form.opener == STATED_AS_CODE.opener
            begin, end = ("```tool_output\n", "\n```") if as_code else ("<tool_response>\n", "\n</tool_response>")
            result = f"{begin}{message.content}{end}"
            if plain and plain[-1].role == "user" and plain[-1].content.startswith(begin):
                plain[-1] = replace(plain[-1], content=f"{plain[-1].content}\n{result}")
            else:
                plain.append(Message(role="user", content=result))
        elif message.tool_calls and form.placed:
            calls = form.write(*map(_call_text, message.tool_calls))
            content = f"{message.content}\n{calls}" if message.content else calls
            plain.append(replace(message, content=content, tool_calls=()))
        else:
            plain.append(message)
    if not tools or not form.stated:
        return tuple(plain)
    told = _told(tools, form)
    if plain and plain[0].role in ("system", "developer"):
        plain[0] = replace(plain[0], content=f"{plain[0].content}\n\n{told}")
    else:
        plain.insert(0, Message(role="system", content=told))
    return tuple(plain)


def _told(tools: Sequence[Mapping[str, Any]], form: CallForm) -> str:
    lines = "\n".join(json.dumps(tool_function(tool), ensure_ascii=False) for tool in tools)
    example, values = (
        ("NAME(first=VALUE, second=VALUE)", "arguments by name, each value as JSON")
        if form.arguments == _CODE
        else (f"NAME{form.between}ARGUMENTS", "arguments as a JSON object")
    )
    call = f"{form.head}{example}{form.tail.removeprefix(')') if form.arguments == _CODE else form.tail}"
    return (
        f"You can call these tools:\n{lines}\n\nTo call one, reply with nothing but its name and its {values}, in this "
        f"form:\n{call}\n\nThe result comes in the next message. Without a need for a tool, answer in plain words."
    )


def _call_text(call: Mapping[str, Any]) -> tuple[str, str]:
    """(name, arguments as JSON text)."""
    function = tool_function(call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return str(function.get("name", "")), text
