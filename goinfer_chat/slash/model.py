"""The slash command about the model: which one goes on with the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from goinfer_chat.agent import Agent
from goinfer_chat.foresight import foresee_model
from goinfer_chat.models import catalogue
from goinfer_chat.slash.registry import Command, Outcome
from goinfer_chat.view.render import banner, notices


def _model(agent: Agent, argument: str) -> Outcome:
    if not argument:
        others = [name for name in _here(agent) if name != agent.settings.model]
        more = f"\nAlso on this machine: {', '.join(others)}." if others else ""
        return Outcome(f"{banner(agent.engine.info)[0]}{more}")
    agent.use_model(argument)
    info = agent.engine.info
    return Outcome("\n".join([f"Switched to {banner(info)[0]}.", *notices(info)]))


def _here(_agent: Agent) -> Sequence[str]:
    return [row.name for row in catalogue.list_models() if row.path is not None]


MODEL_COMMANDS: Final = (
    Command(
        name="model",
        arguments="[NAME]",
        help="Switch to another model, which rereads the conversation; without a name, show the present one.",
        topic="model",
        run=_model,
        costs=lambda agent, argument: foresee_model(agent, argument) if argument else None,
        complete=_here,
    ),
)
