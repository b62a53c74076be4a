"""Messages to the prompt's ids, by the model's own chat template.

Two things a template cannot know are kept here. Text is not structure: a control token is in the prompt only where the
template wrote it, never because a user, a tool or a file spelled it. And a reply keeps the ids it was generated with:
it is not tokenized again, so the next prompt starts with exactly what the cache holds.

Both are done with marks (prompt_marks.py). A template may look into what an assistant said, as those of reasoning
models do, and a mark may change what it finds; then that message goes without.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jinja2

from engine.api import Message, tool_function
from engine.call_probe import find_form
from engine.call_schema import kind_of
from engine.call_stated import STATED_MARKERS, TOLD_MARKERS, stated
from engine.errors import ModelFileError, TemplateError, UsageError
from engine.kv_cache import common_start
from engine.prompt_leads import Leads
from engine.prompt_marks import Guard, Marks
from engine.prompt_values import (
    ALL,
    AS_CALL,
    CONTROLS_AND_ANCHOR,
    CONTROLS_ONLY,
    PLAIN,
    WHOLE,
    Dialect,
    Marking,
    Prompt,
    arguments_of,
    forms_of,
    leaves_out,
    name_of,
    name_of_first_call,
    with_calls_apart,
    with_object_arguments,
    with_short_ids,
)
from engine.reasoning import THINK, ReasoningMarks, find_marks
from engine.template_sandbox import LimitExceeded, Refused, make_environment, render
from engine.tokenizer import Tokenizer
from engine.tool_calls import CallForm, read_objects

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PLAIN = (
    "{% for message in messages %}{{ message.role + ': ' + message.content | trim + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


class ChatTemplate:
    """The chat template of one model; safe to share between threads.

    notices  what a user should see once: that the file has no template, and what is used instead
    stop     texts that end a reply where nothing else does; empty but for the plain fallback
    """

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
        """`override`: the text of a template to use in place of the file's own.

        A template that cannot be read raises where it is used, not here. Raises ModelFileError for one that is no text.
        """
        return cls(metadata, tokenizer, override)

    def __init__(self, metadata: Mapping[str, Any], tokenizer: Tokenizer, override: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.notices: tuple[str, ...] = ()
        self.stop: tuple[str, ...] = ()
        source, tool_source = override, None
        if source is None:
            tool_source = _template_text(metadata, "tokenizer.chat_template.tool_use")
            source = _template_text(metadata, "tokenizer.chat_template")
        if source is None:
            source = tool_source if tool_source is not None else self._fallback()
        self._source = source
        self._tool_source = tool_source if tool_source is not None else source
        self.is_gemma = "<start_of_turn>" in self._source
        self._short_call_ids = re.search(r"length\s*!=\s*9", self._tool_source) is not None
        self._environment = make_environment()
        self._compiled: dict[str, jinja2.Template] = {}
        self._lock = threading.Lock()
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        self._token_texts = {name: tokenizer.token_text(id) for name, id in ids.items() if id is not None}

    def _fallback(self) -> str:
        texts = {self._tokenizer.token_text(id) for id in self._tokenizer.special_ids}
        if {"<|im_start|>", "<|im_end|>"} <= texts:
            self.notices = ("the model file has no chat template: ChatML is used, whose tokens its vocabulary has",)
            return _CHATML
        notice = "the model file has no chat template: messages are given as plain 'role: text' lines"
        self.notices = (f"{notice}, and replies may be poor",)
        self.stop = ("\nuser:", "\nsystem:")
        return _PLAIN

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        /,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt as text, for people. Forms and errors are those of `encode`."""
        arguments = {**template_kwargs, "add_generation_prompt": add_generation_prompt}
        return self._told(self._prompt(messages, tools, arguments))[1]

    def render_as_given(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        dialect: Dialect = PLAIN,
    ) -> str:
        """What the template makes of messages and tools, also if it cannot write calls."""
        arguments = {"add_generation_prompt": add_generation_prompt}
        return self._accepted(Prompt(tuple(messages), tuple(tools), arguments, dialect))[1]

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        /,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of the prompt, with BOS once and in front where the model wants one.

        Messages that the template refuses are rendered in the first of these forms that it accepts:
        1. as given; but `developer` is `system`, unless the template knows that role;
        2. neighbours of the same role joined, with a blank line between;
        3. and `system` as `user` behind the first other message;
        4. or `system` as `user` everywhere, so that a system prompt becomes the start of the first user message;
        5. these again, with each call, and what is said with it, in a message of its own.
        A form in which the template leaves out a system message or a call (`leaves_out`) is taken only if it leaves
        something out in all.

        Raises TemplateError, one line with the template's own words where it has any, and UsageError for an argument
        that is no JSON value or is given already.
        """
        arguments = {**template_kwargs, "add_generation_prompt": add_generation_prompt}
        prompt, text = self._told(self._prompt(messages, tools, arguments))
        texts = prompt.texts()
        marks = Marks.unused_in([self._source, self._tool_source, *texts])
        spelled = any(map(self._guard.finds, texts))
        marked, levels = self._marked(prompt, text, marks, spelled=spelled)
        ids = self._ids(marked, prompt.messages, marks, levels)
        if not ids:
            raise TemplateError(
                "the chat template makes an empty prompt of these messages; give another one (--chat-template FILE)"
            )
        return ids

    def encode_foreseen(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), /, **template_kwargs: Any
    ) -> list[int]:
        """Ids of the prompt that comes next; with `add_generation_prompt=False` as far as they are known before its
        question is. Raises as `encode` does.

        Usually that is the prompt of these messages. But a template may show the reasoning of a reply only as long as
        no question follows it, and then it is no start of the next prompt.
        """
        ids = self.encode(messages, tools, **template_kwargs)
        if template_kwargs.get("add_generation_prompt", True):
            return ids
        one, other = (
            self.encode(
                [*messages, Message(role="user", content=text)],
                tools,
                **{**template_kwargs, "add_generation_prompt": True},
            )
            for text in "ab"
        )
        return ids if one[: len(ids)] == ids else one[: common_start(one, other)]

    @property
    def source(self) -> str:
        """The text of the template."""
        return self._source

    @functools.cached_property
    def markers(self) -> frozenset[str]:
        """The special tokens of the vocabulary."""
        return frozenset(map(self._tokenizer.token_text, self._tokenizer.special_ids))

    @property
    def thinks(self) -> bool:
        """Whether the model may reason, in a block or on a channel of its own."""
        return self.has_channels or self.reasoning is not None

    @functools.cached_property
    def reasoning(self) -> ReasoningMarks | None:
        """What the model's reasoning stands between; None where it does not reason, or on a channel of its own."""
        return None if self.has_channels else find_marks(self._source, self.markers)

    @functools.cached_property
    def has_channels(self) -> bool:
        """Whether a reply is messages on channels (channel_parts.py)."""
        return "<|channel|>" in self._source and "<|channel|>" in self.markers

    @property
    def call_form(self) -> CallForm:
        """How this model calls tools."""
        return self._calls[0]

    @functools.cached_property
    def _calls(self) -> tuple[CallForm, Dialect]:
        return find_form(self, self._tokenizer)

    def without_reasoning(self, text: str) -> str:
        """What a template writes for a reply, without the (empty) block of reasoning it begins with."""
        return text if self.reasoning is None else self.reasoning.removed_from(text)

    # -- rendering -----------------------------------------------------------------------------------------------------

    def _prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> Prompt:
        """What the template is given: tools in words where it knows none, ids of calls as short as it wants them."""
        with_calls = tools or any(message.role == "tool" or message.tool_calls for message in messages)
        form = self.call_form if with_calls else None
        if form is not None and (form.stated or form.placed):
            messages, tools = stated(messages, tools, form), () if form.stated else tools
        if form is not None and self._wants_objects:
            messages = [with_object_arguments(message) for message in messages]
        if self._short_call_ids:
            messages = [with_short_ids(message) for message in messages]
        return Prompt(tuple(messages), tuple(tools), arguments, PLAIN if form is None else self._calls[1])

    def _told(self, prompt: Prompt) -> tuple[Prompt, str]:
        """The prompt in the first form that the template accepts and in which it leaves nothing out, and its text."""
        forms = [prompt]
        if any(message.tool_calls for message in prompt.messages):
            forms.append(replace(prompt, messages=with_calls_apart(prompt.messages)))
        accepted, refusals = [], []
        for form in forms:
            for messages in forms_of(form.messages, knows_developer="developer" in self._source):
                tried = replace(form, messages=messages)
                try:
                    text = self._render(tried)
                except TemplateError as error:
                    if not isinstance(error.__cause__, Refused):
                        raise
                    refusals.append(error)
                    continue
                if not leaves_out(text, prompt.messages, tells_system=self._tells_system):
                    return tried, text
                accepted.append((tried, text))
        if not accepted:
            raise refusals[-1]
        return accepted[0]

    @functools.cached_property
    def _wants_objects(self) -> bool:
        """Whether the template fails with arguments that are no object, as small models may write them."""
        call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": "x"}}
        probe = (Message(role="user", content="x"), Message(role="assistant", content="", tool_calls=(call,)))
        try:
            self._render(Prompt(probe, (), {"add_generation_prompt": True}, self._calls[1]))
        except TemplateError as error:
            return not isinstance(error.__cause__, Refused)
        return False

    @functools.cached_property
    def _tells_system(self) -> bool:
        """Whether a system prompt in front reaches the model, or is refused."""
        word = "GTQXV"  # which no template has
        probe = (Message(role="system", content=word), Message(role="user", content="x"))
        try:
            return word in self._render(Prompt(probe, (), {"add_generation_prompt": True}))
        except TemplateError:
            return True

    def _accepted(self, prompt: Prompt) -> tuple[Prompt, str]:
        """The prompt in the first form that the template accepts, and its text."""
        forms = forms_of(prompt.messages, knows_developer="developer" in self._source)
        for messages in forms[:-1]:
            form = replace(prompt, messages=messages)
            try:
                return form, self._render(form)
            except TemplateError as error:
                if not isinstance(error.__cause__, Refused):
                    raise
        form = replace(prompt, messages=forms[-1])
        return form, self._render(form)

    def _render(self, prompt: Prompt, marking: Marking | None = None) -> str:
        try:
            values = {**self._token_texts, **prompt.variables(marking)}
            template = self._template(bool(prompt.tools))
            try:
                return render(template, values)
            except TypeError:  # some take it for granted that there are tools
                if values["tools"] is not None:
                    raise
                return render(template, {**values, "tools": []})
        except UsageError:
            raise
        except Refused as error:
            raise TemplateError(f"the chat template refuses these messages: {_one_line(error)}") from error
        except LimitExceeded as error:
            raise TemplateError(f"the chat template was stopped: {error}") from error
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template cannot be read, line {error.lineno}: {_one_line(error.message)}; "
                "give another one in its place (--chat-template FILE, chat_template= in the library)"
            ) from error
        except RecursionError as error:
            raise TemplateError(
                "the chat template was stopped: it or what it was given is nested too deeply"
            ) from error
        except Exception as error:
            raise TemplateError(f"the chat template fails with {type(error).__name__}: {_one_line(error)}") from error

    def _template(self, with_tools: bool) -> jinja2.Template:
        source = self._tool_source if with_tools else self._source
        with self._lock:
            if source not in self._compiled:
                self._compiled[source] = self._environment.from_string(source)
            return self._compiled[source]

    # -- marks ---------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _control_guard(self) -> Guard:
        tokenizer = self._tokenizer
        return Guard(map(tokenizer.token_text, tokenizer.special_ids - tokenizer.user_defined_ids))

    @functools.cached_property
    def _guard(self) -> Guard:
        """Control tokens, and those user-defined tokens that the template writes (`<tool_call>`), since these are its
        structure, or that calls are stated with. Others, such as Gemma's line ends and HTML tags, are how the model
        reads text."""
        tokenizer, source = (
            self._tokenizer,
            self._source + self._tool_source + "".join((*STATED_MARKERS, *TOLD_MARKERS)),
        )
        user_defined = set(map(tokenizer.token_text, tokenizer.user_defined_ids))
        control = set(map(tokenizer.token_text, tokenizer.special_ids)) - user_defined
        return Guard(control | {text for text in user_defined if text.strip() and text in source})

    def _marked(self, prompt: Prompt, text: str, marks: Marks, *, spelled: bool) -> tuple[str, Mapping[int, int]]:
        """The rendered text with marks, and the level of each reply. `spelled`: a text has something to be marked.

        What people and tools wrote is marked, whatever the template would have found in it. What an assistant said is
        marked as far as the template renders the same around it.
        """
        replies = [number for number, message in enumerate(prompt.messages) if message.role == "assistant"]
        levels = dict.fromkeys(replies, CONTROLS_ONLY)
        if not spelled and not any(prompt.messages[number].ids for number in replies):
            return text, levels

        def marked(levels: Mapping[int, int]) -> str:
            return self._render(prompt, Marking(marks, self._guard, self._control_guard, levels))

        best = marked(levels) if spelled else text
        plain = marks.removed_from(best)

        def attempt(wanted: dict[int, int]) -> bool:
            nonlocal best, levels
            try:
                result = marked(wanted)
            except TemplateError:
                return False
            if not self._agrees(plain, result, marks, prompt.messages, wanted):
                return False
            best, levels = result, wanted
            return True

        known = {number for number in replies if self._stands_for(prompt.messages[number])}
        for call in (WHOLE, AS_CALL):
            wanted = {n: ALL if n not in known else call if prompt.messages[n].tool_calls else WHOLE for n in replies}
            if attempt(wanted):
                return self._with_glue(prompt, plain, best, marks, levels), levels
        if attempt(dict.fromkeys(replies, ALL)):
            return best, levels
        attempt(dict.fromkeys(replies, CONTROLS_AND_ANCHOR))
        for number in replies:
            message = prompt.messages[number]
            for level in (WHOLE, AS_CALL, ALL, CONTROLS_AND_ANCHOR):
                if level >= AS_CALL and (number not in known or (level == AS_CALL and not message.tool_calls)):
                    continue
                now, then = (
                    Marking(marks, self._guard, self._control_guard, {number: tried}).message(number, message)
                    for tried in (levels[number], level)
                )
                if now == then or attempt({**levels, number: level}):
                    break
        return self._with_glue(prompt, plain, best, marks, levels), levels

    @functools.cached_property
    def _turn_ids(self) -> frozenset[int]:
        """Control tokens that begin and end turns.

        No reply that ended by itself holds one. Ids that do may have come with an imported conversation: they would say
        what nobody sees, in another role.
        """
        found: set[int] = set()
        for roles in (("system", "user"), ("user",)):
            with contextlib.suppress(TemplateError):
                found.update(
                    self.encode([Message(role=role, content="x") for role in roles], add_generation_prompt=False)
                )
        # A template's own system prompt may speak of reasoning and calls.
        spoken = [] if self.reasoning is None else [self.reasoning.texts]
        spoken += [] if self.has_channels else self.call_form.texts
        found -= {part for text in spoken for part in self._tokenizer.parts(text) if isinstance(part, int)}
        return self._tokenizer.end_ids | (found & self._tokenizer.control_ids)

    def _stands_for(self, message: Message) -> bool:
        """Whether the ids of a reply say what the message says: it may have been edited."""
        if not message.ids:
            return False
        try:
            text = self._tokenizer.spelled(message.ids)
        except UsageError:  # ids of another model
            return False
        if not self._turn_ids.isdisjoint(message.ids):
            return False
        if message.content.strip() not in text:
            return False
        if not message.tool_calls:
            return True
        form = self.call_form
        names = [name for name in map(name_of, message.tool_calls) if name is not None]
        wanted = [(name, arguments_of(tool_function(call))) for name, call in zip(names, message.tool_calls)]
        schemas = {name: _schema_like([each for other, each in wanted if other == name]) for name in names}
        calls = form.read(form.from_opener(text, names), schemas)[0]
        found = [(name, arguments_of({"arguments": arguments})) for name, arguments in calls or read_objects(text)]
        return found == wanted

    def _agrees(
        self, plain: str, result: str, marks: Marks, messages: Sequence[Message], levels: Mapping[int, int]
    ) -> bool:
        """Whether a marked text is the plain one everywhere but within the replies that are replaced as a whole."""
        position = last = 0
        text = marks.removed_from(result)
        # Then the blanks around it differ too, and the lead of the prompt is put there.
        leads_differ = self.reasoning is not None and self.reasoning.end in plain
        plain = self._without_reasoning(plain)
        seen: set[int] = set()
        for anchor, number in marks.anchors_in(result)[0]:
            if levels.get(number, 0) < AS_CALL or number in seen:
                continue
            seen.add(number)
            place = self._whole_place(text, anchor, messages[number], levels[number])
            if place is None:
                return False
            part = self._without_reasoning(text[last : place[0]])
            part = part.rstrip() if leads_differ else part
            found = plain.find(part, position) if last else (0 if plain.startswith(part) else -1)
            if found < 0:
                return False
            position, last = found + len(part), place[1]
        rest = self._without_reasoning(text[last:])
        return plain == rest if not last else plain.endswith(rest) and len(plain) - len(rest) >= position

    def _without_reasoning(self, text: str) -> str:
        """Without blocks of reasoning, which a template may write or not where the ids of a reply have them."""
        if self.reasoning is None or self.reasoning.end not in text:
            return text
        return self._reasoning_block.sub("", text)

    @functools.cached_property
    def _reasoning_block(self) -> re.Pattern[str]:
        begin, end = (
            re.escape(mark.strip()) for mark in ((self.reasoning or THINK).begin, (self.reasoning or THINK).end)
        )
        return re.compile(rf"\s*(?:{begin}(?:(?!{begin}).)*?)?{end}\s*", re.DOTALL)

    def _whole_place(self, text: str, anchor: int, message: Message, level: int) -> tuple[int, int] | None:
        """(start, end) of what is replaced by the ids of a reply."""
        if level == WHOLE:
            return anchor, anchor
        ends = (text.find(self._tokenizer.token_text(id), anchor) for id in self._tokenizer.end_ids)
        names = [name_of(call) or "" for call in message.tool_calls]
        return self.call_form.place_of_empty(text, anchor, names, min((end for end in ends if end >= 0), default=None))

    def _with_glue(self, prompt: Prompt, plain: str, marked: str, marks: Marks, levels: Mapping[int, int]) -> str:
        """With what stood before each reply that is replaced by its ids (prompt_leads.py)."""
        if self.reasoning is None or not prompt.arguments.get("add_generation_prompt"):
            return marked
        numbers = {marks.anchor_of(number): number for number, level in levels.items() if level >= AS_CALL}
        spelled = self._tokenizer.spelled
        leads = Leads(self._render, lambda m: spelled(m.ids or ()), self.reasoning, self.markers, prompt, plain)
        pieces = marks.split_at(marked, numbers)
        for i in range(0, len(pieces) - 1, 2):
            number = numbers[pieces[i + 1]]
            end = self.call_form.head_before(pieces[i]) if levels[number] == AS_CALL else len(pieces[i])
            if end is not None:
                pieces[i] = leads.put_into(pieces[i][:end], number) + pieces[i][end:]
            if levels[number] == WHOLE:
                pieces[i + 2] = leads.taken_from(pieces[i + 2], number)
        return "".join(pieces)

    # -- ids -----------------------------------------------------------------------------------------------------------

    def _ids(self, marked: str, messages: Sequence[Message], marks: Marks, levels: Mapping[int, int]) -> list[int]:
        tokenizer = self._tokenizer
        ids: list[int] = []

        def add_text(start: int, end: int, continues: bool) -> None:
            part = marks.without_anchors(marked[start:end])
            found = tokenizer.encode(part, control=True, mark=marks.split, continues=continues)
            # Some templates write BOS for every turn.
            ids.extend(id for id in found if not (tokenizer.add_bos and id == tokenizer.bos_id))

        if tokenizer.add_bos and tokenizer.bos_id is not None:
            ids.append(tokenizer.bos_id)
        position = 0
        for start, end, kept in self._kept(marked, messages, marks, levels):
            add_text(position, start, continues=position > 0)
            ids.extend(kept)
            position = end
        add_text(position, len(marked), continues=position > 0)
        return ids

    def _kept(
        self, marked: str, messages: Sequence[Message], marks: Marks, levels: Mapping[int, int]
    ) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """(start, end, ids) of the stretches of the marked text that are replies whose ids are known, in order."""
        anchors, in_marked = marks.anchors_in(marked)
        text = marks.removed_from(marked)
        position = 0
        seen: set[int] = set()  # templates may write the name of a call again with its result
        for anchor, number in anchors:
            message, level = messages[number], levels[number]
            if level >= AS_CALL:
                place = None if number in seen else self._whole_place(text, anchor, message, level)
                seen.add(number)
            else:
                place = next((place for place in self._places(text, anchor, message) if place[0] >= position), None)
            if place is not None and message.ids is not None:
                position = place[1]
                start = place[0] - (level == WHOLE and self._doubles_space(text, place[0], message.ids))
                yield in_marked(start), in_marked(place[1]), message.ids

    def _doubles_space(self, text: str, start: int, ids: Sequence[int]) -> bool:
        """Whether a template writes a space in front of what was said that the model said itself (Mistral 7B)."""
        said = self._tokenizer.piece(ids[0]) if ids else b""
        return text[:start].endswith(" ") and not text.endswith(" ") and said.startswith(b" ")

    def _places(self, text: str, anchor: int, message: Message) -> Iterator[tuple[int, int]]:
        """(start, end) where the reply can be in the text. The anchor stands before the name of its first tool call,
        or else after its content; the reply may have reasoning before that and calls after it."""
        try:
            raw = b"".join(map(self._tokenizer.piece, message.ids or ())).decode("utf-8", errors="replace")
            replies = dict.fromkeys((raw, self._tokenizer.decode(message.ids or ())))
        except UsageError:  # ids of another model
            return
        name = name_of_first_call(message)
        known = message.content if name is None else name
        before_anchor = len(known) if name is None else 0
        for reply in replies:
            offset = reply.rfind(known) if known else -1
            while offset >= 0:
                start = anchor - before_anchor - offset
                if start >= 0 and text.startswith(reply, start):
                    yield start, start + len(reply)
                offset = reply.rfind(known, 0, offset + len(known) - 1)


def _schema_like(values: Sequence[Any]) -> dict[str, Any] | None:
    """A schema that says of which type the arguments of the first of these calls are."""
    first = next((each for each in values if isinstance(each, dict)), None)
    if first is None:
        return None
    return {"properties": {name: {"type": kind_of(value)} for name, value in first.items()}}


def _template_text(metadata: Mapping[str, Any], key: str) -> str | None:
    text = metadata.get(key)
    if text is not None and not isinstance(text, str):
        raise ModelFileError(f"{key} is not a text")
    return text if text and not text.isspace() else None


def _one_line(message: object) -> str:
    """Without control characters, and not too long to read."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(message)).split())
    return text if len(text) <= 500 else f"{text[:500]}..."
