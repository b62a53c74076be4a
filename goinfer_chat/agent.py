"""One turn of a conversation: what a person wrote goes in, events come out, and the words are kept.

Nothing here knows a terminal. A turn that fails leaves the conversation where it stood.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.api import Engine, Event, Finished, Message, NamedTool, Notice, Request, TextDelta, ToolCall
from engine.errors import ContextExceededError, GoinferError, UsageError
from goinfer_chat.attachments import Attachment, with_attachments
from goinfer_chat.calls.events import Step, TurnEvent
from goinfer_chat.conversations import Conversations
from goinfer_chat.request import prompt_request
from goinfer_chat.settings import Settings
from goinfer_chat.store import (
    HEAD,
    Fork,
    LiveConversation,
    ModelRef,
    StoredMessage,
    session_folder,
)

if TYPE_CHECKING:
    from engine.unloaded import UnloadedModel
    from goinfer_chat.calls.approval import Asker
    from goinfer_chat.calls.toolbox import Toolbox
    from goinfer_chat.engines import Engines
    from tools import Journal, TakenBack

Turn = Generator[Event, None, Step | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What the model is to answer next."""

    text: str | None
    """The question; None: `after` is the question, and it is answered once more."""
    after: int | None = HEAD
    """The message this one follows; where that is not the last one, a branch begins."""
    tool: str | None = None
    """The tool that the reply must call."""


def tools_of(settings: Settings) -> AbstractContextManager[Toolbox | None]:
    """The tools that the settings name, opened; None if they name none.

    Called before a model is loaded, so that a mistake in them is reported at once. Raises UsageError.
    """
    if not settings.tools:
        return nullcontext()
    from goinfer_chat.calls.toolbox import Toolbox

    return Toolbox.chosen(settings)


class Agent:
    """A conversation with a loaded model under the settings of the moment."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        conversations: Conversations | None = None,
        engines: Engines | None = None,
        *,
        asker: Asker | None = None,
        toolbox: Toolbox | None = None,
    ) -> None:
        """`engines`: where `engine` comes from, if another one can take its place. `toolbox`: if it is open already.

        Raises UsageError for tools that are not there.
        """
        self.engine = engine
        self.settings = settings
        self._engines = engines
        self._started = settings
        self.conversations = conversations or Conversations(session_folder(settings.session_dir), keep=False)
        self.attachments: list[Attachment] = []
        """What goes into the next message."""
        self.toolbox = toolbox
        """The tools, once they are needed: see `open_toolbox`."""
        self.asker = asker
        """Who asks a person about calls; None: nobody."""
        self.next_tool: str | None = None
        """The tool that the next reply must call."""
        self.must_look = False
        """Whether the next reply must call some tool."""
        self.runs_calls = True
        """Whether calls of a reply are run; if not, the turn ends with the reply that makes them."""
        self.schema: Mapping[str, Any] | bool | None = None
        """What replies must be valid under; None: any text."""
        if toolbox is not None:
            toolbox.approvals.asker = asker
        self.told_problem: str | None = None
        """What was said to be wrong with the kept cache of the turn that comes next."""
        self._unanswered: Ask | None = None
        self._answer_with(engine)
        if self.live is not None:
            self._enter(self.live)
            if settings.system is not None:
                self.set_system(settings.system)
        if settings.tools:
            self.open_toolbox()

    @property
    def live(self) -> LiveConversation | None:
        """The current conversation; None until a new one has its first message."""
        return self.conversations.live

    @property
    def doubt(self) -> str:
        """A warning about what the settings ask of this model and it may not be able to do; empty for none."""
        vain = self.settings.think == "on" and not self.engine.info.thinks
        return "think on; this model is not known to think" if vain else ""

    # -- a turn --------------------------------------------------------------------------------------------------------

    def ask(self, ask: Ask, cancel: threading.Event) -> Iterator[TurnEvent]:
        """Events of the turn: of a reply, and with tools of the calls and replies that follow from it.

        With each Finished the reply is saved, and the conversation stands at it. A reply that was cancelled before its
        first token leaves nothing behind: a question without an answer would stand beside the next one, which many chat
        templates refuse. Raises what Engine.generate raises, and StoreError.
        """
        live = self.live or self.conversations.begin(system=self.settings.system)
        if ask.after == HEAD:
            ask = replace(ask, after=live.info.head)
        forced, self.next_tool = ask.tool or self.next_tool, None
        must_look, self.must_look = self.must_look, False
        told, self.told_problem = self.told_problem, None
        if self.settings.events:
            told = None  # a program reads the events, a person what was said
        toolbox = self.open_toolbox() if forced is not None else self.toolbox
        if toolbox is not None:
            toolbox.settings = self.settings
        self._unanswered = ask
        said = () if ask.text is None else (Message(role="user", content=ask.text),)

        def step(messages: Sequence[Message], after: int | None = HEAD, force: bool = False) -> Turn:
            def request_of(messages: Sequence[Message]) -> Request:
                request = self._request(live, messages, after=after, cancel=cancel, forced=forced, force=force)
                if force:
                    request = replace(request, told=told)
                if force and must_look and request.tools and request.tool_choice == "auto":
                    request = replace(request, tool_choice="required", parallel_tool_calls=False)
                return request

            return self._step(live, messages, after, request_of)

        first = step(said, ask.after, force=True)
        if toolbox is None or not (forced or toolbox.in_use) or not self.runs_calls:
            yield from first
            return

        from goinfer_chat.calls.loop import ToolLoop

        loop = ToolLoop(toolbox, self._journal(live), cancel, forced=forced)
        yield from loop.run((yield from first), step, lambda results: self._keep_results(live, results))

    def _step(
        self,
        live: LiveConversation,
        said: Sequence[Message],
        after: int | None,
        request_of: Callable[[Sequence[Message]], Request],
    ) -> Turn:
        """One reply, and how it was kept; None where it was stopped before its first token."""
        asked = said
        said, events = self._begin(live, said, request_of)
        if said is not asked:
            yield Notice("the context has no room for all that the tools gave, so the middle of it is left out")
        step: Step | None = None
        with live.reply_to(said, after=after, model=self.model) as draft:
            for event in events:
                match event:
                    case TextDelta():
                        draft.add(event.text)
                    case Finished(reply=reply) if reply.finish_reason != "cancelled" or reply.ids or reply.text:
                        late = draft.error
                        stored = draft.finish(reply.as_message(), finish_reason=reply.finish_reason, stats=reply.stats)
                        self._unanswered = None
                        step = Step(reply=reply, key=str(stored.id))
                        if late is not None:
                            yield Notice(f"the reply is saved, but while it ran that failed for a time: {late}")
                    case _:
                        pass
                yield event
        return step

    def _begin(
        self, live: LiveConversation, said: Sequence[Message], request_of: Callable[[Sequence[Message]], Request]
    ) -> tuple[Sequence[Message], Iterator[Event]]:
        """The messages as they are in the prompt, and the reply's events. Raises what Engine.generate raises."""
        while True:
            try:
                return said, self.engine.generate(request_of(said))
            except GoinferError as error:
                results = any(message.role == "tool" for message in said)
                if results and isinstance(error, ContextExceededError):
                    from goinfer_chat.calls.fitting import fitted

                    if (shorter := fitted(said, error, self.count_text)) is not None:
                        said = shorter
                        continue
                # What it refuses is not saved, but for what tools answered, because it happened.
                if results:
                    self._keep_results(live, said)
                raise

    def _keep_results(self, live: LiveConversation, results: Sequence[Message]) -> None:
        """Keep results of tools that no reply follows."""
        with live.reply_to(results, model=self.model):
            pass

    def _request(
        self,
        live: LiveConversation,
        said: Sequence[Message],
        *,
        after: int | None = HEAD,
        cancel: threading.Event | None = None,
        forced: str | None = None,
        force: bool = False,
    ) -> Request:
        """`forced`: a tool that is among those offered; with `force` the reply must call it."""
        settings = self.settings
        offered = self.toolbox.offered(forced) if self.toolbox is not None else []
        named = NamedTool(name=forced) if forced is not None and force else None
        messages = (*live.messages(self.model.identity, at=after), *said)
        return replace(
            prompt_request(live.id, messages, offered, settings, live.info.settings),
            tool_choice=named or ("none" if self.schema is not None else "auto"),
            parallel_tool_calls=settings.parallel_calls,
            json_schema=None if named else self.schema,
            sampling=settings.sampling,
            max_tokens=settings.max_tokens,
            think_tokens=settings.think_tokens,
            stop=settings.stop,
            speculation=None if settings.speculation == "auto" else settings.speculation,
            cancel=cancel or threading.Event(),
        )

    # -- what goes into a message --------------------------------------------------------------------------------------

    def attach(self, attachment: Attachment) -> int:
        """Put it into the next message. Returns its tokens. Raises UsageError where the context has no room for it."""
        num_tokens = self.count_text(attachment.text)
        context_size = self.engine.info.context_size
        if num_tokens > context_size > 0:
            raise UsageError(
                f"{attachment.name} has {num_tokens:,} tokens, the context only {context_size:,}; attach fewer lines"
            )
        self.attachments.append(attachment)
        return num_tokens

    def count_text(self, text: str) -> int:
        """About how many tokens a text adds to a message; 0 where the model's template refuses to say."""
        with suppress(GoinferError):
            alone, empty = (
                self.engine.count_tokens(Request(messages=(Message(role="user", content=content),)))
                for content in (f".\n{text}", ".")
            )
            return max(alone - empty, 0)
        return 0

    def asked(self, text: str) -> Ask:
        """A question made of this text and the attachments, of which none are left afterwards."""
        attachments, self.attachments = self.attachments, []
        return Ask(text=with_attachments(text, attachments))

    # -- tools ---------------------------------------------------------------------------------------------------------

    def open_toolbox(self) -> Toolbox:
        """The tools there are; loaded when they are first needed. Raises UsageError."""
        if self.toolbox is None:
            from goinfer_chat.calls.toolbox import Toolbox

            self.toolbox = Toolbox.chosen(self.settings)
            self.toolbox.approvals.asker = self.asker
        return self.toolbox

    def run_call(self, call: ToolCall) -> Iterator[TurnEvent]:
        """Run a call of the last reply, and keep its result; no further reply follows."""
        from goinfer_chat.calls.loop import ToolLoop

        assert self.live is not None
        toolbox, live = self.open_toolbox(), self.live
        loop = ToolLoop(toolbox, self._journal(live), threading.Event(), forced=call.name)
        yield from loop.run_alone(call, str(live.info.head), lambda results: self._keep_results(live, results))

    def close(self) -> None:
        """End what tools have started. May be called again."""
        if self.toolbox is not None:
            self.toolbox.close()

    def _journal(self, live: LiveConversation) -> Journal:
        from tools import Journal

        if self.conversations.is_kept:
            return Journal(self.conversations.store.changes_path(live.id))
        return self.open_toolbox().unkept_journal(live.id)

    # -- what to ask ---------------------------------------------------------------------------------------------------

    def retry(self) -> Ask:
        """The last question once more: the one that got no answer, else the last one. Raises UsageError."""
        return self._unanswered or Ask(text=None, after=self._last_question().id)

    def edit(self, text: str | None = None) -> Ask:
        """Another text in place of the last question; without one, that question's own. Raises UsageError."""
        question = self._last_question()
        return Ask(text=question.message.content if text is None else text, after=question.parent)

    def _last_question(self) -> StoredMessage:
        if self.live is None:
            raise UsageError("nothing has been said yet")
        return self.live.last_question()

    # -- conversations -------------------------------------------------------------------------------------------------

    def new(self) -> None:
        """Begin a new conversation with the same system prompt. An old one that was not kept is gone."""
        live, kept = self.live, self.conversations.is_kept
        self.conversations.leave()
        self._unanswered = None
        if live is not None and not kept:
            self.engine.forget(live.id)

    def resume(self, key: str | None) -> LiveConversation:
        """Continue another one, under its own system prompt; None: the one used last. Raises what Store.open does."""
        live = self.conversations.resume_latest() if key is None else self.conversations.resume(key)
        self._enter(live)
        return live

    def fork(self, name: str | None) -> Fork:
        """Continue in a copy. Raises UsageError."""
        with self._moving():
            return self.conversations.fork(name)

    def rename(self, name: str) -> str:
        """Returns the name as it is kept. What was not kept is from here on. Raises UsageError."""
        with self._moving():
            return self.conversations.rename(name)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Inside, a copy may take the place of the conversation; a question that got no answer moves to the copy.

        It moves as text, because ids of messages are valid in one conversation only.
        """
        was, ask = self.live, self._unanswered
        text, head = None, None if was is None else was.info.head
        if was is not None and ask is not None:
            question = next((stored for stored in was.tree() if stored.id == ask.after), None)
            if ask.text is not None and ask.after in (HEAD, head):
                text = ask.text
            elif ask.text is None and question is not None and question.parent == head:
                text = question.message.content
        yield
        if self.live is not was:
            self._unanswered = None if ask is None or text is None else Ask(text=text, tool=ask.tool)

    def delete(self, key: str) -> tuple[str, bool]:
        """The name of what was deleted, and whether nothing is left of it: see Store.delete. Raises UsageError."""
        conversation = self.conversations.store.find(key)
        if self.live is not None and self.live.id == conversation.id:
            self.new()
        self.engine.forget(conversation.id)
        return conversation.name or conversation.id, self.conversations.store.delete(conversation.id)

    def undo(self, turns: int) -> tuple[list[StoredMessage], list[TakenBack]]:
        """Go back by this many questions, and take back the files that tools have changed since.

        Returns what is left behind, and what became of the files. Raises UsageError.
        """
        if self.live is None:
            raise UsageError("nothing has been said yet")
        self._unanswered = None
        left = self.live.undo(turns)
        if not any(stored.message.tool_calls for stored in left):
            return left, []
        return left, self._journal(self.live).take_back(str(stored.id) for stored in left)

    def set_system(self, system: str | None) -> None:
        """The system prompt of this conversation, and of those that begin after it."""
        self.settings = self.settings.changed({"system": system})
        if self.live is not None and self.live.info.system != system:
            self.live.set_system(system)

    # -- the model -----------------------------------------------------------------------------------------------------

    def use_model(self, name: str) -> None:
        """Switch to another model, which reads all again. Raises what loading it raises; then nothing changes.

        What the engine of the last one had in memory is gone, and its files stay. A template and a draft model that
        were given at the start are for the model of the start.
        """
        engines, settings = self._switchable(), self._with_model(name)
        try:
            engines.switch(settings)
            self.settings = settings
        finally:
            if engines.current is not self.engine:
                self._answer_with(engines.current)

    def look_at_model(self, name: str) -> UnloadedModel | None:
        """The model that `use_model` would load, to foresee with; None where it must be fetched first.

        Raises ModelError or UsageError.
        """
        return self._switchable().look(self._with_model(name))

    def _switchable(self) -> Engines:
        if self._engines is None:
            raise UsageError("the model cannot be changed here; start with --model")
        return self._engines

    def _with_model(self, name: str) -> Settings:
        same = name == self._started.model
        own = {field: self._started.value(field) if same else None for field in ("chat_template", "draft")}
        return self.settings.changed({"model": name, **own})

    def _answer_with(self, engine: Engine) -> None:
        self.engine = engine
        self.model = ModelRef(identity=engine.info.identity, name=engine.info.name)

    def _enter(self, live: LiveConversation) -> None:
        self.settings = self.settings.changed({"system": live.info.system})
        self._unanswered = None
        if live.recovered and live.recovered[-1].message.role == "user":
            self._unanswered = Ask(text=None, after=live.recovered[-1].id)
