"""From a rendered prompt to its ids, in which a reply keeps the ids it was generated with.

It is not tokenized again, so the next prompt starts with exactly what the cache holds. Where a reply stands in what was
rendered is found by marks (prompt_marks.py). A template may look into what an assistant said, as those of reasoning
models do, and a mark may change what it finds; then that message goes without.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.api import Message, tool_function
from engine.call_schema import kind_of
from engine.call_stated import STATED_MARKERS, TOLD_MARKERS
from engine.errors import TemplateError, UsageError
from engine.prompt_leads import Leads
from engine.prompt_marks import Guard, Marks
from engine.prompt_values import (
    ALL,
    AS_CALL,
    CONTROLS_AND_ANCHOR,
    CONTROLS_ONLY,
    WHOLE,
    Marking,
    Prompt,
    arguments_of,
    name_of,
    name_of_first_call,
)
from engine.reasoning import THINK
from engine.tokenizer import Tokenizer
from engine.tool_calls import read_objects

if TYPE_CHECKING:
    from engine.chat_template import ChatTemplate


class PromptIds:
    """Makes the ids of the prompts of one template."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def of(self, prompt: Prompt, text: str) -> list[int]:
        """The ids of a prompt, of which `text` is rendered."""
        texts = prompt.texts()
        marks = Marks.unused_in([*self._template.sources, *texts])
        spelled = any(map(self._guard.finds, texts))
        marked, levels = self._marked(prompt, text, marks, spelled=spelled)
        return self._ids(marked, prompt.messages, marks, levels)

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
        tokenizer = self._tokenizer
        source = "".join((*self._template.sources, *STATED_MARKERS, *TOLD_MARKERS))
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
            return self._template.rendered(prompt, Marking(marks, self._guard, self._control_guard, levels))

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
            messages = [Message(role=role, content="x") for role in roles]
            with contextlib.suppress(TemplateError):
                found.update(self._template.encode(messages, add_generation_prompt=False))
        # A template's own system prompt may speak of reasoning and calls.
        spoken = [] if self._template.reasoning is None else [self._template.reasoning.texts]
        spoken += [] if self._template.has_channels else self._template.call_form.texts
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
        form = self._template.call_form
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
        leads_differ = self._template.reasoning is not None and self._template.reasoning.end in plain
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
        if self._template.reasoning is None or self._template.reasoning.end not in text:
            return text
        return self._reasoning_block.sub("", text)

    @functools.cached_property
    def _reasoning_block(self) -> re.Pattern[str]:
        marks = self._template.reasoning or THINK
        begin, end = (re.escape(mark.strip()) for mark in (marks.begin, marks.end))
        return re.compile(rf"\s*(?:{begin}(?:(?!{begin}).)*?)?{end}\s*", re.DOTALL)

    def _whole_place(self, text: str, anchor: int, message: Message, level: int) -> tuple[int, int] | None:
        """(start, end) of what is replaced by the ids of a reply."""
        if level == WHOLE:
            return anchor, anchor
        ends = (text.find(self._tokenizer.token_text(id), anchor) for id in self._tokenizer.end_ids)
        names = [name_of(call) or "" for call in message.tool_calls]
        end = min((end for end in ends if end >= 0), default=None)
        return self._template.call_form.place_of_empty(text, anchor, names, end)

    def _with_glue(self, prompt: Prompt, plain: str, marked: str, marks: Marks, levels: Mapping[int, int]) -> str:
        """With what stood before each reply that is replaced by its ids (prompt_leads.py)."""
        template, spelled = self._template, self._tokenizer.spelled
        if template.reasoning is None or not prompt.arguments.get("add_generation_prompt"):
            return marked
        numbers = {marks.anchor_of(number): number for number, level in levels.items() if level >= AS_CALL}
        leads = Leads(
            template.rendered, lambda m: spelled(m.ids or ()), template.reasoning, template.markers, prompt, plain
        )
        pieces = marks.split_at(marked, numbers)
        for i in range(0, len(pieces) - 1, 2):
            number = numbers[pieces[i + 1]]
            end = template.call_form.head_before(pieces[i]) if levels[number] == AS_CALL else len(pieces[i])
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
