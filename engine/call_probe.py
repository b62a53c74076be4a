"""The form in which a model writes calls, found from its chat template.

The template is shown calls and looked at: what it writes in front of the name, between name and arguments, after them,
and between two calls. Where the arguments are no JSON object it is shown one value of each type, two values, and none:
what changes from one to the other are the marks of an argument. So no table of families is needed for templates that
write calls; a short one has the forms that some tell of and leave to the model (call_stated.py).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from engine.api import Message
from engine.call_arguments import Arguments, JsonArguments, ListedArguments, json_end
from engine.call_stated import STATED, STATED_AS_CODE, told_form
from engine.errors import TemplateError, UsageError
from engine.grammar import JsonStyle
from engine.prompt_values import Dialect
from engine.template_sandbox import Refused
from engine.tool_calls import NUMBER, CallForm

if TYPE_CHECKING:
    from engine.chat_template import ChatTemplate
    from engine.tokenizer import Tokenizer

Values = Mapping[str, Any]

_NAMES = ("probe_first", "probe_second")
_TEXT, _OTHER_TEXT, _NUMBER = "first value", "second value", 27182
_VALUES: Values = {"first_key": _TEXT, "second_key": _NUMBER}
_ID = "probe0id9"
_RESULT = "probe result"
_ANY_ID = "[A-Za-z0-9_-]{1,64}"
_SAMPLES: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "number": (_NUMBER, (str(_NUMBER),)),
    "boolean": (True, ("true", "True")),
    "null": (None, ("null", "None")),
}
"""A value of each type, and how it may be spelled."""
_LIST = [7, {"inner": "deep"}]
_LIST_AS_JSON = re.compile(r'\[7(,\s*)\{"inner"(:\s*)"deep"\}\]')
_ESCAPES: Mapping[str, Literal["json", "python"]] = {"'": "python", '"': "json"}
_DIALECTS = tuple(Dialect(*each) for each in itertools.product((False, True), repeat=2))


def find_form(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[CallForm, Dialect]:
    """The form of calls and how the template wants to be given them; a stated form where none can be read."""
    form, dialect = _form_in_dialect(template, tokenizer)
    return form, replace(dialect, only_objects=_fails_without_objects(template, dialect))


def _form_in_dialect(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[CallForm, Dialect]:
    told = next((in_system for in_system in (False, True) if _tells_of_tools(template, in_system)), None)
    dialects = [replace(dialect, tools_in_system=bool(told)) for dialect in _DIALECTS]
    probes = [_Probe(template, tokenizer, dialect) for dialect in dialects]
    for probe in probes:
        if (form := _found(probe)) is not None:
            return replace(form, stated=told is None), probe.dialect
    fallback = STATED_AS_CODE if template.is_gemma else STATED
    if any(_NAMES[0] in probe.written(_NAMES[:1], _VALUES) for probe in probes):
        return fallback, dialects[0]  # it writes calls that cannot be read
    return told_form(template.source, template.markers, told=told is not None) or fallback, dialects[0]


def _fails_without_objects(template: ChatTemplate, dialect: Dialect) -> bool:
    """Whether arguments that are no object end the template otherwise than by its own refusal."""
    call = {"id": _ID, "type": "function", "function": {"name": _NAMES[0], "arguments": _TEXT}}
    messages = [
        Message(role="user", content="probe question"),
        Message(role="assistant", content="", tool_calls=(call,)),
    ]
    try:
        template.render_as_given(messages, (), dialect=dialect)
    except TemplateError as error:
        return not isinstance(error.__cause__, Refused)
    return False


def _tells_of_tools(template: ChatTemplate, in_system: bool) -> bool:
    """Whether a tool's name is in a prompt because the tool is given, as a field of the system message or not."""
    question = Message(role="user", content="probe question")
    try:
        dialect = Dialect(tools_in_system=in_system)
        return _NAMES[0] in template.render_as_given([question], _tools(), dialect=dialect)
    except (TemplateError, UsageError):
        return False


def _tools() -> list[dict[str, Any]]:
    properties = {key: {"type": "string", "description": "d"} for key in _VALUES}
    schema = {"type": "object", "properties": properties, "required": []}
    return [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}} for name in _NAMES
    ]


@dataclass(frozen=True, slots=True)
class _Probe:
    """Shows calls to a template."""

    template: ChatTemplate
    tokenizer: Tokenizer
    dialect: Dialect

    def written(self, names: Sequence[str], values: Values) -> str:
        """What it writes for an assistant that calls these tools, without the end of the turn; "" if nothing."""
        calls = tuple(
            {"id": _ID, "type": "function", "function": {"name": name, "arguments": dict(values)}} for name in names
        )
        results = [Message(role="tool", content=_RESULT, tool_call_id=_ID, name=name) for name in names]
        messages = [
            Message(role="user", content="probe question"),
            Message(role="assistant", content="", tool_calls=calls),
        ]
        before, text = self._rendered(messages[:1], True), self._rendered([*messages, *results], False)
        if not before or not text:
            return ""
        start = self._shared(before, text)
        result = text.find(_RESULT, start)
        last = max((text.rfind(key, start, result) for key in values), default=text.find(names[-1], start, result))
        ends = (text.find(self.tokenizer.token_text(id), last, result) for id in self.tokenizer.end_ids)
        end = min((end for end in ends if end >= 0), default=-1)
        if last < 0 or result < 0:
            return ""
        if end < 0:  # the result stands in the turn of the call
            alone = self._rendered(messages, False)
            end = self._shared(alone, text) if alone else 0
        # Mistral's templates give calls their ids, which the model does not write.
        return re.sub(rf',\s*"id":\s*"{_ID}"|\[CALL_ID\]{_ID}', "", text[start:end])

    def _rendered(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return self.template.render_as_given(
                messages, _tools(), add_generation_prompt=add_generation_prompt, dialect=self.dialect
            )
        except (TemplateError, UsageError):
            return ""

    def says(self, text: str) -> str:
        """What the template makes of an answer with this text."""
        question = Message(role="user", content="probe question")
        rendered = self._rendered([question, Message(role="assistant", content=text)], False)
        return rendered.rpartition(question.content)[2]  # before it are tools, and how to call them

    def _shared(self, before: str, text: str) -> int:
        """How much both begin with, in whole tokens where they part: some prompts open a `<think>` that no history
        has."""
        shared = len(_shared_start(before, text))
        if shared == len(before):
            return shared
        start, boundary = 0, 0
        for part in self.tokenizer.parts(before):
            start += len(part if isinstance(part, str) else self.tokenizer.token_text(part))
            if start <= shared:
                boundary = start
        return boundary


def _shared_start(one: str, other: str) -> str:
    """What both begin with."""
    length = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return one[:length]


def _found(probe: _Probe) -> CallForm | None:
    one = probe.written(_NAMES[:1], _VALUES)
    arguments, text = _json_arguments(one) or _listed_arguments(probe, one) or (None, "")
    if arguments is None:
        return None
    several = probe.written((*_NAMES, _NAMES[0]), _VALUES)
    around = [one.split(text), several.split(text) if several else []]
    # Where several differ from one and from each other, there is one at most.
    form = _with_marks(probe, arguments, *around) or _with_marks(probe, arguments, around[0], [])
    if form is None or (not form.opener and not form.has_bare_form and not probe.template.has_channels):
        return None
    marks = "".join(form.texts)
    if any(word in marks for word in (_ID, _RESULT, _TEXT, *_NAMES, *_VALUES)):
        return None
    # A marker that stands in other replies too says nothing of calls.
    return None if form.opener and form.opener in probe.says("probe answer") else form


def _with_marks(probe: _Probe, arguments: Arguments, one: Sequence[str], several: Sequence[str]) -> CallForm | None:
    """The form, from what stands around the arguments of one call and of three."""
    if len(one) != 2 or (len(several) not in (0, 1, 2, 4)):
        return None
    called = several if len(several) == 4 else one
    pieces = [piece.partition(name) for piece, name in zip(called, (*_NAMES, _NAMES[0]))][: len(called) - 1]
    tail = called[-1].rstrip()
    if not all(found for _, found, _ in pieces) or one[1].rstrip() != tail:
        return None
    head = probe.template.without_reasoning(pieces[0][0])
    head = head.lstrip("\n" if probe.template.has_channels else None)
    between, _ = _counted([after for _, _, after in pieces])
    middle, other = _counted([before for before, _, _ in pieces[1:]])
    if between is None or middle is None:
        return None
    if NUMBER in middle or _ID in head:
        head = _replaced_last(head, other)
    by_id = _ID in "".join((head, between, middle))
    head, between, middle = (mark.replace(_ID, NUMBER) for mark in (head, between, middle))
    form = CallForm(
        head=head,
        between=between,
        tail=tail,
        middle=middle if len(pieces) > 1 else None,
        opener=_opener(head, probe.tokenizer),
        arguments=arguments,
    )
    return replace(form, number=_ANY_ID) if by_id else form


def _counted(marks: Sequence[str]) -> tuple[str | None, str]:
    """The one text that all these are, with NUMBER for what counts in it, and the number of the first but one.

    None where they differ otherwise.
    """
    if len(set(marks)) <= 1:
        return (marks[0] if marks else ""), ""
    cut = [re.split(r"(\d+)", mark) for mark in marks]
    if len({len(parts) for parts in cut}) != 1:
        return None, ""
    whole, first = [], ""
    for column in zip(*cut):
        if len(set(column)) == 1:
            whole.append(column[0])
        elif all(part.isdigit() for part in column) and len({int(p) - i for i, p in enumerate(column)}) == 1:
            whole.append(NUMBER)
            first = column[0]
        else:
            return None, ""
    return "".join(whole), first


def _replaced_last(head: str, second: str) -> str:
    """The head with NUMBER for the number of the first call, where the second has `second`."""
    if not second:
        return head
    before, found, after = head.rpartition(str(int(second) - 1))
    return f"{before}{NUMBER}{after}" if found else head


def _opener(head: str, tokenizer: Tokenizer) -> str:
    first = next(tokenizer.parts(head), "")
    if isinstance(first, int):
        return tokenizer.token_text(first)
    marker = re.match(r"<[^<>\s\"{}]+>|\[[A-Z_]+\]|```\w+|<\w+=|<\w+ \w+=\"", head)
    return marker[0] if marker else ""


# -- arguments as JSON -------------------------------------------------------------------------------------------------


def _json_arguments(one: str) -> tuple[Arguments, str] | None:
    """The form of arguments, and what the probe's are in it; None where they are no JSON object."""
    start = one.find('"first_key"')
    start = one.rfind("{", 0, start) if start >= 0 else -1
    end = json_end(one, start) if start >= 0 else None
    if end is None or one.find(_NAMES[0]) > start or json.loads(one[start:end]) != _VALUES:
        return None
    found = re.fullmatch(rf'\{{"first_key"(\s*:\s*)"{_TEXT}"(\s*,\s*)"second_key"\1 ?{_NUMBER}\}}', one[start:end])
    return JsonArguments(JsonStyle(found[2], found[1]) if found else JsonStyle()), one[start:end]


# -- arguments one by one ----------------------------------------------------------------------------------------------


def _listed_arguments(probe: _Probe, one: str) -> tuple[Arguments, str] | None:
    """The same for arguments that stand one by one with their names."""
    marks = _marks_of_two(probe)
    if marks is None:
        return None
    begin, text_colon, following, text_rest = marks
    after = {kind: _after_key(probe, {"first_key": value}) for kind, (value, _) in _SAMPLES.items()}
    number = after["number"].partition(str(_NUMBER))
    if not number[1]:
        return None
    colon, rest = number[0], number[2]
    if not text_rest.endswith(rest):
        return None
    quote = text_rest[: len(text_rest) - len(rest)]
    quotes = (text_colon.removeprefix(colon), quote) if quote and text_colon.startswith(colon) else ("", "")
    if bool(quote) != bool(quotes[0]) or not following.startswith(quote):
        return None
    words, colons = _words_and_colons(after, rest)
    colons |= {"string": text_colon.removesuffix(quotes[0]), "number": colon}
    nothing = _after(_NAMES[0], probe.written(_NAMES[:1], {}))
    split = _split_marks(begin, following[len(quote) :], rest, nothing)
    if split is None:
        return None
    style, bare = _style_of_lists(_after_key(probe, {"first_key": _LIST}), rest, quotes)
    form = ListedArguments(
        **split,
        colon=colon,
        colons=colons if len(set(colons.values())) > 1 else {},
        quotes=quotes,
        escapes=_ESCAPES.get(quotes[0], "none"),
        words=words,
        style=style,
        bare=bare,
        sorts=_sorts(probe),
        takes_object=colon == "=" and bool(quotes[0]),
    )
    text = form.write(json.dumps(_VALUES))
    return (form, text) if form.text_end and text in one else None


def _after(word: str, text: str) -> str:
    return text.partition(word)[2]


def _after_key(probe: _Probe, values: Values) -> str:
    return _after("first_key", probe.written(_NAMES[:1], values))


def _marks_of_two(probe: _Probe) -> tuple[str, str, str, str] | None:
    """What stands before, between and after two arguments that are texts: before the first name, between name and
    value, between a value and the next name, after the last value."""
    rest = _after(_NAMES[0], probe.written(_NAMES[:1], {"first_key": _TEXT, "second_key": _OTHER_TEXT}))
    words = ("first_key", _TEXT, "second_key", _OTHER_TEXT)
    found = re.fullmatch("(.*)".join(("", *words, "")), rest, re.DOTALL)
    if found is None or found[2] != found[4]:
        return None
    return found[1], found[2], found[3], found[5]


def _words_and_colons(after: Mapping[str, str], rest: str) -> tuple[tuple[str, str, str], dict[str, str]]:
    """How `true`, `false` and `null` are spelled, and what stands before them."""
    spelled, colons = {"boolean": "true", "null": "null"}, {}
    for kind in spelled:
        for word in _SAMPLES[kind][1]:
            if after[kind].endswith(word + rest):
                spelled[kind] = word
                colons[kind] = after[kind][: -len(word + rest)]
    return (spelled["boolean"], "False" if spelled["boolean"] == "True" else "false", spelled["null"]), colons


def _split_marks(begin: str, following: str, rest: str, nothing: str) -> dict[str, str] | None:
    """The marks of the arguments alone, without what stands around them whether or not there are any.

    `begin` stands before the first name, `following` after a value that has a next one, `rest` after the last value,
    `nothing` in place of all where there are no arguments.
    """
    close = _whole_tags(_shared_start(following, rest))
    last = rest[len(close) :]
    tail = _shared_start(last[::-1], nothing[::-1])[::-1] if nothing else last
    none = nothing[: len(nothing) - len(tail)]
    shared = _shared_start(begin, none) if nothing else ""
    return {
        "first": begin[len(shared) :],
        "next": following[len(close) :],
        "last": last[: len(last) - len(tail)],
        "none": none[len(shared) :] if nothing else begin,
        "close": close,
    }


def _whole_tags(text: str) -> str:
    """The text up to its last `>`, if it has one; a `<` that begins a tag is none."""
    return text[: text.rfind(">") + 1] if ">" in text else text.partition("<")[0]


def _style_of_lists(after: str, rest: str, quotes: tuple[str, str]) -> tuple[JsonStyle, bool]:
    """How lists and objects are written, and whether their names have no quotes."""
    if found := _LIST_AS_JSON.search(after):
        return JsonStyle(found[1], found[2]), False
    opened, closed = map(re.escape, quotes)
    if quotes[0] and (found := re.search(rf"\[7(,\s*)\{{inner(:\s*){opened}deep{closed}\}}\]", after)):
        return JsonStyle(found[1], found[2]), True
    return JsonStyle(), False


def _sorts(probe: _Probe) -> bool:
    text = probe.written(_NAMES[:1], {"second_key": _NUMBER, "first_key": _TEXT})
    return 0 <= text.find("first_key") < text.find("second_key")
