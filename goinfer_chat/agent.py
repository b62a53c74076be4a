"""One turn of a conversation: what a person wrote goes in, events come out, and the words are kept.

Nothing here knows a terminal. A turn that fails leaves the conversation as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.api import Engine, Event, Finished, Message, Reply, Request
from goinfer_chat.settings import Settings


@dataclass(slots=True)
class Conversation:
    """The messages so far, without the system prompt, which may change between turns."""

    name: str = "default"
    messages: list[Message] = field(default_factory=list)


class Agent:
    """A conversation with a loaded model under the settings of the moment."""

    def __init__(self, engine: Engine, settings: Settings, conversation: Conversation | None = None) -> None:
        self.engine = engine
        self.settings = settings
        self.conversation = conversation or Conversation()
        self.last_reply: Reply | None = None

    def request(self, text: str, cancel: threading.Event) -> Request:
        """What the engine is asked when `text` is said next. Raises UsageError."""
        system = self.settings.system
        return Request(
            messages=(
                *([Message(role="system", content=system)] if system is not None else []),
                *self.conversation.messages,
                Message(role="user", content=text),
            ),
            sampling=self.settings.sampling,
            max_tokens=self.settings.max_tokens,
            stop=self.settings.stop,
            conversation=self.conversation.name,
            cancel=cancel,
        )

    def ask(self, text: str, cancel: threading.Event) -> Iterator[Event]:
        """Events of the reply to `text`; with Finished, question and reply are in the conversation.

        A reply that was cancelled before its first token leaves nothing behind: a question without an answer
        would stand beside the next one, which many chat templates refuse. Raises what Engine.generate raises.
        """
        for event in self.engine.generate(self.request(text, cancel)):
            if isinstance(event, Finished):
                self._keep(text, event.reply)
            yield event

    def reset(self) -> None:
        """Forget what was said; the system prompt stays."""
        self.conversation.messages.clear()
        self.last_reply = None
        self.engine.forget(self.conversation.name)

    def _keep(self, text: str, reply: Reply) -> None:
        self.last_reply = reply
        if reply.finish_reason == "cancelled" and not reply.ids:
            return
        self.conversation.messages += [
            Message(role="user", content=text),
            Message(role="assistant", content=reply.text, ids=reply.ids),
        ]
