"""Slash commands that put something into the next message: files, and what a command printed."""

from __future__ import annotations

from typing import Final

from engine.errors import UsageError
from goinfer_chat.agent import Agent
from goinfer_chat.amounts import counted
from goinfer_chat.attachments import Attachment, read_attachment
from goinfer_chat.slash.registry import Command, Outcome, ShellCommand


def attached(agent: Agent, attachment: Attachment, where: str = "the next message") -> str:
    """Put it into the next message; returns the line that says so. Raises UsageError."""
    num_tokens = agent.attach(attachment)
    lines, tokens = counted(attachment.num_lines, "line"), counted(num_tokens, "token")
    return f"{attachment.name}: {lines}, {tokens}; in {where}."


def _attach(agent: Agent, argument: str) -> Outcome:
    if argument == "none":
        agent.attachments.clear()
        return Outcome("Nothing is attached.")
    if argument:
        return Outcome(attached(agent, read_attachment(argument.strip('"'))))
    names = [attachment.name for attachment in agent.attachments]
    return Outcome("In the next message: " + "; ".join(names) if names else "Nothing is attached.")


def _shell(_agent: Agent, argument: str) -> Outcome:
    hand_over = argument.startswith("!")
    line = argument.removeprefix("!").strip()
    if not line:
        raise UsageError("/shell needs a command; /shell !COMMAND hands its output over to the next message")
    return Outcome(shell=ShellCommand(line, hand_over))


MESSAGE_COMMANDS: Final = (
    Command(
        name="attach",
        arguments="[FILE[#10-40] | none]",
        help="Attach a file, or some lines of it, to the next message, as @FILE in a message does. "
        "Without FILE, show what is attached.",
        topic="files and commands",
        takes_file=True,
        run=_attach,
    ),
    Command(
        name="shell",
        arguments="COMMAND",
        help="Run a shell command, as !COMMAND does; !!COMMAND also attaches its output to the next message.",
        topic="files and commands",
        run=_shell,
    ),
)
