"""Messages to the prompt's ids, by the model's own chat template.

Two things a template cannot know are kept. Text is not structure: a control token is in the prompt only where the
template wrote it, never because a user, a tool or a file spelled it. And a reply keeps the ids it was generated with
(prompt_ids.py).
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jinja2

from engine.api import Message
from engine.call_probe import find_form
from engine.call_stated import stated
from engine.errors import ModelFileError, TemplateError, UsageError, one_line
from engine.kv_cache import common_start
from engine.prompt_ids import PromptIds
from engine.prompt_values import (
    PLAIN,
    Dialect,
    Marking,
    Prompt,
    forms_of,
    leaves_out,
    with_calls_apart,
    with_object_arguments,
    with_short_ids,
)
from engine.reasoning import ReasoningMarks, find_marks
from engine.template_sandbox import LimitExceeded, Refused, make_environment, render
from engine.tokenizer import Tokenizer
from engine.tool_calls import CallForm

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
        self._ids = PromptIds(self, tokenizer)
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
        return self._accepted(Prompt(tuple(messages), tuple(tools), arguments, dialect))

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
        ids = self._ids.of(prompt, text)
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

    @property
    def sources(self) -> tuple[str, str]:
        """The texts of the template without tools and with some."""
        return self._source, self._tool_source

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
        form, dialect = self._calls if with_calls else (None, PLAIN)
        if form is not None and (form.stated or form.placed):
            messages, tools = stated(messages, tools, form), () if form.stated else tools
        if dialect.only_objects:
            messages = [with_object_arguments(message) for message in messages]
        if self._short_call_ids:
            messages = [with_short_ids(message) for message in messages]
        return Prompt(tuple(messages), tuple(tools), arguments, dialect)

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
                    text = self.rendered(tried)
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
    def _tells_system(self) -> bool:
        """Whether a system prompt in front reaches the model, or is refused."""
        word = "GTQXV"  # which no template has
        probe = (Message(role="system", content=word), Message(role="user", content="x"))
        try:
            return word in self.rendered(Prompt(probe, (), {"add_generation_prompt": True}))
        except TemplateError:
            return True

    def _accepted(self, prompt: Prompt) -> str:
        """The text of the prompt in the first form that the template accepts."""
        forms = forms_of(prompt.messages, knows_developer="developer" in self._source)
        for messages in forms[:-1]:
            try:
                return self.rendered(replace(prompt, messages=messages))
            except TemplateError as error:
                if not isinstance(error.__cause__, Refused):
                    raise
        return self.rendered(replace(prompt, messages=forms[-1]))

    def rendered(self, prompt: Prompt, marking: Marking | None = None) -> str:
        """What the template makes of a prompt as it is. Raises TemplateError and UsageError."""
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
            raise TemplateError(f"the chat template refuses these messages: {one_line(error)}") from error
        except LimitExceeded as error:
            raise TemplateError(f"the chat template was stopped: {error}") from error
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template cannot be read, line {error.lineno}: {one_line(error.message)}; "
                "give another one in its place (--chat-template FILE, chat_template= in the library)"
            ) from error
        except RecursionError as error:
            raise TemplateError(
                "the chat template was stopped: it or what it was given is nested too deeply"
            ) from error
        except Exception as error:
            raise TemplateError(f"the chat template fails with {type(error).__name__}: {one_line(error)}") from error

    def _template(self, with_tools: bool) -> jinja2.Template:
        source = self._tool_source if with_tools else self._source
        with self._lock:
            if source not in self._compiled:
                self._compiled[source] = self._environment.from_string(source)
            return self._compiled[source]


def _template_text(metadata: Mapping[str, Any], key: str) -> str | None:
    text = metadata.get(key)
    if text is not None and not isinstance(text, str):
        raise ModelFileError(f"{key} is not a text")
    return text if text and not text.isspace() else None
