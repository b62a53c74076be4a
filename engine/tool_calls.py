"""How a model writes calls of tools: the form, found from its chat template, and reading calls written in it.

A template that knows tools is shown a call and looked at: what it writes in front of the name, between name and
arguments, after them, and between two calls. So `<tool_call>` JSON of Qwen, the bare object of Llama 3, `[TOOL_CALLS]`
of Mistral, and others that give arguments as JSON, need no table of families. Models whose template knows no tools are
told of them, and of a form to call them in, in the system prompt.

The pieces of a form make a grammar (`CallForm.rules`) and are what a finished call is read by (`CallForm.read`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.api import Message, tool_function, tool_name
from engine.code_calls import code_rules, read_code, write_code
from engine.errors import TemplateError, UsageError
from engine.grammar import GrammarCompiler, JsonStyle

if TYPE_CHECKING:
    from engine.chat_template import ChatTemplate
    from engine.tokenizer import Tokenizer

CallText = tuple[str, str]
"""Name and arguments as written."""

_STYLE = JsonStyle()
PYTHON_TAG = "<|python_tag|>"
_SPACE = "/[ \\t\\n]{0,4}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """Calls as text: `head` NAME `between` ARGUMENTS, then `middle` NAME ... for each further one, then `tail`."""

    head: str
    between: str
    tail: str
    middle: str | None = None
    """None: a reply has one call at most."""
    opener: str = ""
    """The marker that `head` begins with, and that stands in no other text; "" for a bare object."""
    style: JsonStyle = _STYLE
    stated: bool = False
    """Stated in the system prompt, since the template knows no tools."""
    code: bool = False
    """Arguments as code writes them (code_calls.py), not as a JSON object."""

    @property
    def quotes_names(self) -> bool:
        return self.head.endswith('"')

    @property
    def has_bare_form(self) -> bool:
        """Models that write a JSON object with name and arguments also write it without the marker."""
        return self.head.endswith('{"name": "')

    def rules(
        self, compiler: GrammarCompiler, tools: Sequence[Mapping[str, Any]], *, several: bool, lead: str = ""
    ) -> str:
        """A grammar of calls of these tools, from `lead` and the head on. Raises SchemaError."""
        literal = compiler.literal
        again = f"({literal(self.middle)} call)*" if several and self.middle is not None else ""
        calls, rules = self._calls(compiler, tools)
        return f"start: {literal(lead + self.head)} call {again} {literal(self.tail)}\ncall: {calls}\n{rules}"

    def rules_after_opener(
        self, compiler: GrammarCompiler, tools: Sequence[Mapping[str, Any]], *, several: bool
    ) -> str:
        """The same for a model that has begun by itself, which may put another space behind the marker."""
        literal = compiler.literal
        rest = self.head[len(self.opener) :].lstrip()
        again = f"({literal(self.middle)} call)*" if several and self.middle is not None else ""
        calls, rules = self._calls(compiler, tools)
        start = f"{literal(self.opener)} {_SPACE} {literal(rest)} call {again} {literal(self.tail)}"
        return f"start: {start}\ncall: {calls}\n{rules}"

    def write(self, name: str, arguments: str) -> str:
        """One call."""
        arguments = write_code(arguments) if self.code else arguments or "{}"
        return f"{self.head}{self._written(name)}{self.between}{arguments}{self.tail}"

    def bare_rules(self, compiler: GrammarCompiler, tool: Mapping[str, Any]) -> str:
        """What follows `{"name": ..., "arguments":` of a bare object."""
        return f'start: {_SPACE} {compiler.json_rule(parameters(tool), _what(tool), self.style)} {_SPACE} "}}"'

    def argument_rules(self, compiler: GrammarCompiler, tool: Mapping[str, Any]) -> str:
        """The arguments alone, of a call whose name has been said."""
        return f"start: {compiler.json_rule(parameters(tool), _what(tool), self.style)}"

    def _calls(self, compiler: GrammarCompiler, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        lines = []
        for i, tool in enumerate(tools):
            arguments, rules = self._arguments(compiler, tool, f"c{i}")
            name = compiler.literal(self._written(tool_name(tool)) + self.between)
            lines.append(f"c{i}: {name} {arguments}\n{rules}")
        return " | ".join(f"c{i}" for i in range(len(tools))), "".join(lines)

    def _arguments(self, compiler: GrammarCompiler, tool: Mapping[str, Any], prefix: str) -> tuple[str, str]:
        """(start, rules) of the grammar of a tool's arguments."""
        schema = parameters(tool)

        def json_rule(value: Mapping[str, Any] | bool) -> str:
            return compiler.json_rule(value, _what(tool), self.style)

        whole = json_rule(schema)
        return (self.code and code_rules(prefix, schema, json_rule)) or (whole, "")

    def _written(self, name: str) -> str:
        return json.dumps(name, ensure_ascii=False)[1:-1] if self.quotes_names else name

    def read(self, text: str, names: Sequence[str]) -> tuple[list[CallText], bool]:
        """Whole calls in a text that begins with the head, and whether the text is nothing else."""
        calls: list[CallText] = []
        rest = self.head[len(self.opener) :].lstrip()
        start = re.match(re.escape(self.opener) + r"\s*" + re.escape(rest), text)
        position = start.end() if start else -1
        while position >= 0:
            found = self._read_one(text, position, names)
            if found is None:
                break
            name, arguments, end = found
            # One may begin with the other: the longer one is meant.
            ends = sorted({self.tail, self.tail if self.middle is None else self.middle}, key=len, reverse=True)
            last = next((piece for piece in ends if text.startswith(piece, end)), None)
            if last is None:
                break
            position = -1 if last == self.tail else end + len(last)
            calls.append((name, arguments))
            if position < 0:
                return calls, not text[end + len(self.tail) :].strip()
        return calls, False

    def _read_one(self, text: str, start: int, names: Sequence[str]) -> tuple[str, str, int] | None:
        for name in sorted(names, key=len, reverse=True):
            written = self._written(name) + self.between
            if text.startswith(written, start):
                begin = start + len(written)
                if self.code:
                    found = read_code(text, begin, _json_end)
                    return None if found is None else (name, *found)
                end = _json_end(text, begin)
                return None if end is None else (name, text[begin:end], end)
        return None


def read_objects(text: str) -> list[CallText]:
    """Calls written as JSON objects with a name and arguments, whatever stands around them."""
    calls: list[CallText] = []
    position = text.find("{")
    while position >= 0:
        end = _json_end(text, position)
        if end is None:
            return calls
        value = json.loads(text[position:end])
        function = tool_function(value) if isinstance(value, dict) else {}
        arguments = function.get("arguments", function.get("parameters"))
        name = function.get("name")
        if isinstance(name, str) and name:
            if not isinstance(arguments, str):
                arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
            calls.append((name, arguments))
        position = text.find("{", end)
    return calls


def _json_end(text: str, start: int) -> int | None:
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


class BareCall:
    """Whether a reply begins as a bare call of a tool that is given, however it is spaced."""

    def __init__(self, names: Sequence[str]) -> None:
        self._starts = {
            _squeezed(f'{tag}{fence}{{"name":{json.dumps(name, ensure_ascii=False)},"{key}":'): name
            for tag in ("", PYTHON_TAG)
            for fence in ("", "```", "```json")
            for name in names
            for key in ("arguments", "parameters")
        }

    def find(self, text: str) -> tuple[str, int] | None:
        """The tool's name, and where its arguments begin."""
        squeezed = _squeezed(text)
        for start, name in self._starts.items():
            if squeezed.startswith(start):
                missing = len(start)
                for position, character in enumerate(text):
                    missing -= not character.isspace()
                    if not missing:
                        return name, position + 1
        return None

    def possible(self, text: str) -> bool:
        """Whether more text could make it one."""
        squeezed = _squeezed(text)
        return any(start.startswith(squeezed) for start in self._starts)


def _squeezed(text: str) -> str:
    return "".join(text.split())


# -- parameters --------------------------------------------------------------------------------------------------------


def parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments, an object; objects that do not speak of further properties have none.

    A schema leaves those open by default, where a function takes none. What is valid under the narrower schema is
    valid under the tool's own.
    """
    schema = tool_function(tool).get("parameters")
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping):
        raise UsageError(f"{_what(tool)} must be a JSON object, not a {type(schema).__name__}")
    closed: dict[str, Any] = _closed(schema if _COMBINED & schema.keys() else {"type": "object", **schema}, 0)
    return closed


_COMBINED = {"$ref", "anyOf", "oneOf", "allOf"}
_OPEN = _COMBINED | {"additionalProperties", "patternProperties", "minProperties", "unevaluatedProperties"}


def _closed(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > 50:
        return schema
    closed = dict(schema)
    named = schema.get("properties")
    if isinstance(named, Mapping) and not _COMBINED & schema.keys():
        closed["properties"] = {name: _closed(value, depth + 1) for name, value in named.items()}
        required = schema.get("required", ())
        if not _OPEN & schema.keys() and isinstance(required, (list, tuple)) and set(required) <= set(named):
            closed["additionalProperties"] = False
    if isinstance(schema.get("items"), Mapping) and not _COMBINED & schema.keys():
        closed["items"] = _closed(schema["items"], depth + 1)
    return closed


def _what(tool: Mapping[str, Any]) -> str:
    return f"the schema of the tool {tool_name(tool)!r}"


# -- found from the template -------------------------------------------------------------------------------------------

_NAMES = ("probe_first", "probe_second")
_VALUES: Mapping[str, Any] = {"first_key": "first value", "second_key": 2}
_ID = "probe0id9"
_RESULT = "probe result"

STATED = CallForm(
    head='<tool_call>\n{"name": "',
    between='", "arguments": ',
    tail="}\n</tool_call>",
    middle='}\n</tool_call>\n<tool_call>\n{"name": "',
    opener="<tool_call>",
    stated=True,
)

STATED_AS_CODE = CallForm(
    head="```tool_code\n",
    between="(",
    tail=")\n```",
    middle=")\n",
    opener="```tool_code",
    stated=True,
    code=True,
)
"""What Gemma 3 is prompted with for calls."""

STATED_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def find_form(template: ChatTemplate, tokenizer: Tokenizer) -> CallForm:
    """The form in which a template writes calls; a stated one where it writes none that can be read."""
    form = _found(template, tokenizer) if template.knows_tools else None
    if form is not None:
        return form
    return STATED_AS_CODE if template.is_gemma else STATED


def _found(template: ChatTemplate, tokenizer: Tokenizer) -> CallForm | None:
    one = _written(template, tokenizer, _NAMES[:1])
    name, cut = one.find(_NAMES[0]), _json_at(one)
    if name < 0 or cut is None or cut[0] < name:
        return None
    start, end = cut
    head, arguments, tail = one[:name].lstrip("\n"), one[start:end], one[end:].rstrip()
    between, opener = one[name + len(_NAMES[0]) : start], _opener(head, tokenizer)
    form = CallForm(head=head, between=between, tail=tail, opener=opener, style=_style(arguments))
    names = (*_NAMES, _NAMES[0])
    several = _written(template, tokenizer, names)
    second = several.find(_NAMES[1], end)
    if second > 0:
        form = replace(form, middle=several[end:second])
        calls = several[end:second].join(f"{each}{between}{arguments}" for each in names)
        # Calls that have numbers differ: no fixed text is their form.
        if several.lstrip("\n").rstrip() != f"{head}{calls}{tail}":
            return None
    pieces = (form.head, form.between, form.tail, form.middle or "")
    return None if any(word in piece for piece in pieces for word in (_ID, _RESULT, *_NAMES)) else form


def _written(template: ChatTemplate, tokenizer: Tokenizer, names: Sequence[str]) -> str:
    """What the template writes for an assistant that calls these tools, without the end of the turn; "" if nothing."""
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": "d", "parameters": {"type": "object", "properties": {}}},
        }
        for name in _NAMES
    ]
    calls = tuple(
        {"id": _ID, "type": "function", "function": {"name": name, "arguments": dict(_VALUES)}} for name in names
    )
    messages = [
        Message(role="user", content="probe question"),
        Message(role="assistant", content="", tool_calls=calls),
        *(Message(role="tool", content=_RESULT, tool_call_id=_ID, name=name) for name in names),
    ]
    try:
        before = template.render_as_given(messages[:1], tools)
        text = template.render_as_given(messages, tools, add_generation_prompt=False)
    except (TemplateError, UsageError):
        return ""
    text = text[_shared(before, text, tokenizer) :]
    last = max(text.rfind("}", 0, text.find(_RESULT)), 0)
    ends = (text.find(tokenizer.token_text(id), last) for id in tokenizer.end_ids)
    end = min((end for end in ends if end >= 0), default=0)
    # Mistral's templates give calls their ids, which the model does not write.
    return re.sub(rf',\s*"id":\s*"{_ID}"|\[CALL_ID\]{_ID}', "", text[:end])


def _shared(before: str, text: str, tokenizer: Tokenizer) -> int:
    """How much both begin with, in whole tokens where they part: some prompts open a `<think>` that no history has."""
    shared = next((i for i, (a, b) in enumerate(zip(before, text)) if a != b), min(len(before), len(text)))
    if shared == len(before):
        return shared
    start, boundary = 0, 0
    for part in tokenizer.parts(before):
        start += len(part if isinstance(part, str) else tokenizer.token_text(part))
        if start <= shared:
            boundary = start
    return boundary


def _json_at(text: str) -> tuple[int, int] | None:
    """Where the arguments stand."""
    start = text.find('"first_key"')
    start = text.rfind("{", 0, start) if start >= 0 else -1
    end = _json_end(text, start) if start >= 0 else None
    return None if end is None or json.loads(text[start:end]) != _VALUES else (start, end)


def _style(arguments: str) -> JsonStyle:
    found = re.fullmatch(r'\{"first_key"(\s*:\s*)"first value"(\s*,\s*)"second_key"\1 ?2\}', arguments)
    return JsonStyle(found[2], found[1]) if found else _STYLE


def _opener(head: str, tokenizer: Tokenizer) -> str:
    first = next(tokenizer.parts(head), "")
    if isinstance(first, int):
        return tokenizer.token_text(first)
    marker = re.match(r"<[^<>\s\"{}]+>|\[[A-Z_]+\]|```\w+", head)
    return marker[0] if marker else ""


# -- stated in the system prompt ---------------------------------------------------------------------------------------


def stated(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], form: CallForm) -> tuple[Message, ...]:
    """The messages for a template that knows no tools: descriptions go into the system prompt, calls and results into
    texts of assistant and user."""
    plain: list[Message] = []
    for message in messages:
        if message.role == "tool":
            begin, end = ("```tool_output\n", "\n```") if form.code else ("<tool_response>\n", "\n</tool_response>")
            result = f"{begin}{message.content}{end}"
            if plain and plain[-1].role == "user" and plain[-1].content.startswith(begin):
                plain[-1] = replace(plain[-1], content=f"{plain[-1].content}\n{result}")
            else:
                plain.append(Message(role="user", content=result))
        elif message.tool_calls:
            calls = "\n".join(_call_text(call, form) for call in message.tool_calls)
            content = f"{message.content}\n{calls}" if message.content else calls
            plain.append(replace(message, content=content, tool_calls=()))
        else:
            plain.append(message)
    if not tools:
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
        if form.code
        else (f"NAME{form.between}ARGUMENTS", "arguments as a JSON object")
    )
    call = f"{form.head}{example}{form.tail.removeprefix(')') if form.code else form.tail}"
    return (
        f"You can call these tools:\n{lines}\n\nTo call one, reply with nothing but its name and its {values}, in this "
        f"form:\n{call}\n\nThe result comes in the next message. Without a need for a tool, answer in plain words."
    )


def _call_text(call: Mapping[str, Any], form: CallForm) -> str:
    function = tool_function(call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return form.write(str(function.get("name", "")), text)
