"""Slash commands about what is on the screen: its figures in full, and how a reply leaves it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from engine.errors import UsageError
from goinfer_chat.agent import Agent
from goinfer_chat.files import write_new
from goinfer_chat.slash.registry import Command, Outcome
from goinfer_chat.terminal import true_text


def _stats(agent: Agent, _argument: str) -> Outcome:
    from goinfer_chat.view.stats_panel import stats_panel

    turns = [stored.stats for stored in agent.live.path() if stored.stats is not None] if agent.live else []
    if not turns:
        raise UsageError("there are no figures yet: nothing was answered in this conversation")
    return Outcome(stats_panel(turns, shutil.get_terminal_size().columns))


def _thinking(agent: Agent, _argument: str) -> Outcome:
    path = agent.live.path() if agent.live is not None else []
    thoughts = [stored.message.thinking for stored in path if stored.message.role == "assistant"]
    if not thoughts or not thoughts[-1]:
        raise UsageError("there was no thinking before the last reply")
    return Outcome(thoughts[-1])


def _copy(agent: Agent, argument: str) -> Outcome:
    number, file = _which(argument)
    text = _last_reply(agent)
    if number is not None:
        text = _code_block(text, number)
    if not file:
        return Outcome(copy=text)
    write_new(Path(file).expanduser(), text)
    return Outcome(f"Written to {true_text(file)}: {len(text):,} characters.")


def _which(argument: str) -> tuple[int | None, str]:
    first, _, rest = argument.partition(" ")
    return (int(first), rest.strip()) if first.isdecimal() and len(first) < 10 else (None, argument)


def _last_reply(agent: Agent) -> str:
    path = agent.live.path() if agent.live is not None else []
    for stored in reversed(path):
        if stored.message.role == "assistant" and stored.message.content:
            return stored.message.content
    raise UsageError("there is no reply to copy yet")


def _code_block(text: str, number: int) -> str:
    from goinfer_chat.view.markdown_parser import code_blocks

    blocks = code_blocks(text)
    if not 1 <= number <= len(blocks):
        there = f"it has {len(blocks)}" if blocks else "it has none"
        raise UsageError(f"there is no block of code {number} in the last reply; {there}")
    return blocks[number - 1]


VIEW_COMMANDS: Final = (
    Command(
        name="copy",
        arguments="[N] [FILE]",
        help="Copy the last reply, or its code block N, to the clipboard or into FILE.",
        topic="screen",
        run=_copy,
    ),
    Command(
        name="thinking",
        help="Show the model's reasoning before its last reply.",
        topic="screen",
        run=_thinking,
    ),
    Command(
        name="stats", help="Show the figures of this conversation, turn by turn, as charts.", topic="screen", run=_stats
    ),
)
