"""What the next prompt would cost after a command, worked out before the command changes anything.

The engine knows how much of a prompt it has in memory and in files. This module decides which prompt that will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from engine.api import Message, Prospect
from engine.errors import UsageError
from goinfer_chat.agent import Agent, Ask
from goinfer_chat.amounts import counted
from goinfer_chat.conversations import of_today
from goinfer_chat.request import prompt_request
from goinfer_chat.settings import Settings
from goinfer_chat.store import Conversation, StoredMessage
from goinfer_chat.store.records import for_model

if TYPE_CHECKING:
    from engine.unloaded import UnloadedModel
    from tools import Tool

GLUE_TOKENS: Final = 8
"""What a template puts between messages is evaluated with every turn, and not worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a conversation stands, or would stand."""

    path: Sequence[StoredMessage] = ()
    said: Sequence[Message] = ()
    """What is asked behind the path, if it is known already."""
    is_asked: bool = False
    """Whether the reply comes next, without another message."""
    conversation: Conversation | None = None
    """None: it has not begun."""


def standing(agent: Agent) -> Standing:
    """Where it stands now."""
    return Standing() if agent.live is None else Standing(path=agent.live.path(), conversation=agent.live.info)


def about_to_ask(agent: Agent, ask: Ask) -> Standing:
    """Where the agent stands when it asks this."""
    said = () if ask.text is None else (Message(role="user", content=ask.text),)
    if agent.live is None:
        return Standing(said=said, is_asked=True)
    return Standing(path=agent.live.path(ask.after), said=said, is_asked=True, conversation=agent.live.info)


def undone(agent: Agent, turns: int) -> Standing:
    """Where it would stand before the question so many turns back. Raises UsageError."""
    now = standing(agent)
    questions = [number for number, stored in enumerate(now.path) if stored.message.role == "user"]
    if not 1 <= turns <= len(questions):
        raise UsageError(f"{turns} turns cannot be undone")
    return replace(now, path=now.path[: questions[-turns]])


def foresee(
    agent: Agent,
    there: Standing,
    *,
    settings: Settings | None = None,
    tools: Sequence[Tool] | None = None,
    forgotten: str | None = None,
    model: UnloadedModel | None = None,
) -> Prospect | None:
    """What the next prompt would cost there; None where there is nothing to read before the person writes.

    settings, tools   None: those of the moment
    forgotten         a conversation whose cache goes before
    model             what will answer; None: the engine of the moment

    Raises what the store raises, TemplateError, and EngineError where only a server knows.
    """
    settings = settings or agent.settings
    if tools is None:
        tools = agent.toolbox.offered() if agent.toolbox is not None else []
    identity = agent.model.identity if model is None else model.identity
    messages = [*for_model(there.path, identity), *there.said]
    if not messages:
        if settings.system is None and not tools:
            return None
        messages = [Message(role="user", content="")]  # templates want one
    begun = there.conversation
    name, about = ("new", of_today()) if begun is None else (begun.id, begun.settings)
    request = prompt_request(name, messages, tools, settings, about)
    if not there.is_asked:
        request = replace(request, template_kwargs={**request.template_kwargs, "add_generation_prompt": False})
    return agent.engine.foresee(request, forgotten) if model is None else model.foresee(request)


def foresee_model(agent: Agent, name: str) -> Prospect | None:
    """What switching to another model would cost. One that is not here yet is counted with this one's tokenizer."""
    there, model = standing(agent), agent.look_at_model(name)
    with model or nullcontext():
        prospect = foresee(agent, there, model=model)
    return prospect if model or prospect is None else replace(prospect, reused_tokens=0, tok_s=None)


def sentence(agent: Agent, prospect: Prospect | None, *, with_problem: bool = False) -> str:
    """The line shown before the command; empty where the next turn costs no more than any turn.

    `with_problem`: what is wrong with the kept cache, where the command itself is no reason to read again. The agent
    is told what has been said of it.
    """
    if prospect is None or prospect.prefill_tokens <= GLUE_TOKENS:
        return ""
    text = f"The next turn prefills {counted(prospect.prefill_tokens, 'token')}"
    if prospect.seconds is not None:
        text += f", about {_seconds(prospect.seconds)}"
    if with_problem and prospect.problem:
        agent.told_problem = prospect.problem
        text += f"; the kept cache: {prospect.problem}"
    return text + "."


def _seconds(seconds: float) -> str:
    return f"{max(seconds, 0.1):,.{1 if seconds < 2 else 0}f} s"
