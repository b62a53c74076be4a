"""The prompt: one line in, one turn or command out, until Ctrl-D."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from engine.errors import ContextExceededError, UsageError
from goinfer_chat.agent import Agent, Ask
from goinfer_chat.amounts import counted
from goinfer_chat.attachments import mentioned
from goinfer_chat.clipboard import copy_with_program, osc52
from goinfer_chat.editor import edited
from goinfer_chat.listing import excerpt
from goinfer_chat.prompt.ending import PromptEnded, ending_on_signals
from goinfer_chat.prompt.keys import LineCleared
from goinfer_chat.prompt.line_editor import LineEditor
from goinfer_chat.script import CommandLine, Turn, read_item
from goinfer_chat.shell import how_it_ended, run_shell, run_shell_captured
from goinfer_chat.slash.commands import COMMANDS
from goinfer_chat.slash.conversation import cost, recent, resumed
from goinfer_chat.slash.message import attached
from goinfer_chat.slash.registry import ShellCommand
from goinfer_chat.store import StoreError
from goinfer_chat.terminal import OutputError, QuietTerminal, Stream
from goinfer_chat.turn import play_turn
from goinfer_chat.view.render import View, banner, report_error

LEAVE = ("exit", "quit")
"""Whole lines that end the program as /quit does: what shells and other prompts have taught."""


def run_repl(agent: Agent, terminal: QuietTerminal, screen: Stream, make_view: Callable[[], View]) -> int:
    """Turns and commands until Ctrl-D or /quit; an error is one line and costs only its turn. Returns the exit code.

    The caller has made the terminal quiet (`terminal.quiet_terminal`).
    """
    repl = Repl(agent, terminal, screen, make_view)
    repl.begin()
    with ending_on_signals() as ending:
        while ending.exit_code is None:
            try:
                if not repl.step():
                    return 0
            except PromptEnded:
                break
            except EOFError:
                return 0
            except LineCleared:
                screen.line("Ctrl-D or /quit leaves the program", dim=True)
            except OutputError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a turn does, the next one can be tried
                report_error(error, screen, repl.advice(error))
        return ending.exit_code or 0


class Repl:
    """A person at a terminal, and the conversation that goes on there."""

    def __init__(self, agent: Agent, terminal: QuietTerminal, screen: Stream, make_view: Callable[[], View]) -> None:
        self._agent = agent
        self._terminal = terminal
        self._screen = screen
        self._make_view = make_view
        self._editor = LineEditor(agent, screen, self._edit, lambda error: report_error(error, screen))
        self._last_shell = ""

    def begin(self) -> None:
        """What a person should see before the first prompt."""
        agent, screen = self._agent, self._screen
        if not agent.settings.quiet:
            for line in banner(agent.engine.info, screen.size[0] - 1):
                screen.line(line, dim=True)
            self._say(agent.doubt)
        if agent.conversations.problem is not None:
            report_error(agent.conversations.problem, screen)
            screen.line("nothing of this chat is kept", dim=True)
        if agent.settings.quiet:
            return
        if agent.live is not None and agent.live.info.has_words:
            screen.line(resumed(agent), dim=True)
            self._say(cost(agent))
        elif agent.live is None:
            with suppress(StoreError):  # the first turn says it
                for line in recent(agent):
                    screen.line(line, dim=True)

    def advice(self, error: Exception) -> str:
        """What can be done about it at a prompt, beside what the error says."""
        live = self._agent.live
        if isinstance(error, ContextExceededError) and live is not None and live.info.has_words:
            return "/new begins a new conversation"
        return ""

    def step(self) -> bool:
        """Read a line, a block or a message of several lines, and do it. False when the program ends."""
        item = read_item(self._next_line)
        if isinstance(item, CommandLine):
            return self._run(item)
        if item is not None:
            self._ask(self._agent.asked(self._with_files(item)))
        return True

    def _next_line(self, inside_block: bool) -> str:
        line = self._editor(inside_block)
        if inside_block or "\n" in line:
            return line
        if line.startswith("!!"):
            return f"/shell !{line[2:].strip() or self._last_shell}"
        if line in LEAVE:
            return "/quit"
        return f"/shell {line[1:]}" if line.startswith("!") else line.removeprefix("\\") if line[:2] == "\\!" else line

    def _with_files(self, turn: Turn) -> str:
        """The message, once the files it mentions are attached."""
        if turn.literal:
            return turn.text
        text, files = mentioned(turn.text, self._editor.pasted)
        for file in files:
            self._screen.line(attached(self._agent, file, "this message"), dim=True)
        return text

    def _run(self, command: CommandLine) -> bool:
        self._say(COMMANDS.foresee(self._agent, command))
        outcome = COMMANDS.run(self._agent, command)
        if text := outcome.shown(shutil.get_terminal_size().columns):
            self._screen.line(text)
        if outcome.copy is not None:
            self._copy(outcome.copy)
        if outcome.shell is not None:
            self._shell(outcome.shell)
        ask = outcome.ask
        if outcome.edit is not None:
            text = self._edit(outcome.edit.text or "")
            if not text.strip() or text == outcome.edit.text:
                raise UsageError("the message was not changed, so nothing was asked")
            ask = replace(outcome.edit, text=text)
            self._screen.line(f"> {excerpt(text)}")
            self._say(cost(self._agent, ask))
        if ask is not None:
            self._ask(ask)
        return not outcome.quit

    def _say(self, line: str) -> None:
        if line:
            self._screen.line(line, dim=True)

    def _ask(self, ask: Ask) -> None:
        with self._editor.during_reply() as take_keys:
            play_turn(self._agent, ask, self._make_view(), take_keys)

    def _copy(self, text: str) -> None:
        screen, characters = self._screen, counted(len(text), "character")
        if (program := copy_with_program(text)) is not None:
            screen.line(f"Copied {characters} with {program}.", dim=True)
        elif screen.moves and (sequence := osc52(text)) is not None:
            screen.frame(sequence)
            screen.line(f"Sent {characters} to the terminal's clipboard. If it takes none: /copy FILE", dim=True)
        else:
            screen.line(text)

    def _edit(self, text: str) -> str:
        self._screen.lost_track()
        with self._terminal.lent():
            return edited(text)

    def _shell(self, command: ShellCommand) -> None:
        self._last_shell = command.line
        self._screen.lost_track()
        with self._terminal.lent():
            if command.hand_over:
                output, code = run_shell_captured(command.line, self._screen.write)
            else:
                output, code = None, run_shell(command.line)
        if how := how_it_ended(code):
            self._screen.line(how, dim=True)
        if output is not None:
            self._screen.line(attached(self._agent, output), dim=True)
