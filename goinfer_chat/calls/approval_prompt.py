"""A person is asked about a call, on the terminal and in one line; what would change is shown before."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any, Final

from engine.errors import GoinferError
from engine.json_schema import validator
from goinfer_chat.calls.approval_rules import Rule
from goinfer_chat.calls.events import Answer, ApprovalAsked, RepeatAsked
from goinfer_chat.editor import edited
from goinfer_chat.terminal import QuietTerminal, Stream, in_rows, true_text
from goinfer_chat.view.tool_lines import call_line, diff_lines, is_cut
from tools.errors import ToolError
from tools.validation import check_arguments, parse_arguments

_STOP: Final = Answer(allowed=False, stop=True)
_ANSWER_COLUMNS: Final = 10
"""Left of a question's last row for the word that answers it."""


class PersonAsker:
    """Asks on one terminal, from the thread that has it."""

    def __init__(self, screen: Stream, terminal: QuietTerminal) -> None:
        self._screen = screen
        self._terminal = terminal

    def __call__(self, event: ApprovalAsked | RepeatAsked) -> Answer:
        """Ctrl-C and Ctrl-D refuse, and end the turn."""
        try:
            return self._repeat(event) if isinstance(event, RepeatAsked) else self._approval(event)
        except (KeyboardInterrupt, EOFError):
            return _STOP

    def _repeat(self, event: RepeatAsked) -> Answer:
        self._screen.line(f"{event.call.name} was called {event.times} times with the same result.")
        return Answer(allowed=self._line("Continue? yes / no: ").lower() in ("y", "yes"), stop=False)

    def _approval(self, event: ApprovalAsked) -> Answer:
        self._screen.line(call_line(event.tool.name, event.arguments))
        if event.preview is None:
            for key, value in event.arguments.items():
                if is_cut(value):  # whoever says yes has seen all of it
                    whole = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)
                    self._screen.line(f"{key}:\n{whole}")
        else:
            for line in diff_lines(event.preview):
                self._screen.line(line)
        prefix = f" / prefix (always `{event.prefix}`)" if event.prefix else ""
        question = f"Allow {event.tool.name} ({event.tool.risk})? yes / no / always{prefix} / edit: "
        while True:
            word, _, rest = self._line(question).partition(" ")
            match word.lower():
                case "y" | "yes":
                    return Answer(allowed=True)
                case "n" | "no":
                    return Answer(allowed=False, reason=rest.strip() or self._line("Why not? (the model reads it) "))
                case "a" | "always":
                    return self._always(Rule(event.tool.name))
                case "p" | "prefix" if event.prefix:
                    return self._always(Rule.parse(f"{event.tool.name}:{event.prefix}"))
                case "e" | "edit":
                    with suppress(GoinferError, ToolError):
                        if (arguments := self._edited(event)) is not None:
                            return Answer(allowed=True, arguments=arguments)
                case _:
                    begins = "y, n, a, p or e" if event.prefix else "y, n, a or e"
                    self._screen.line(f"answer with {begins}; Ctrl-C refuses the call and ends the turn")

    def _always(self, rule: Rule) -> Answer:
        self._screen.line(f"allowed in this folder from here on: {rule}; /approvals lists and clears", dim=True)
        return Answer(allowed=True, always=rule)

    def _edited(self, event: ApprovalAsked) -> dict[str, Any] | None:
        """The arguments as a person changed them; None, and a line why, where they do not fit."""
        try:
            with self._terminal.lent():
                text = edited(json.dumps(dict(event.arguments), indent=2, ensure_ascii=False))
            arguments = parse_arguments(text)
            check_arguments(event.tool.parameters, arguments, validator)
        except (GoinferError, ToolError) as error:
            self._screen.line(f"error: {error}")
            return None
        return arguments

    def _line(self, question: str) -> str:
        """What is typed from here on; what was typed before the question was no answer to it."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import create_app_session
        from prompt_toolkit.output.plain_text import PlainTextOutput

        from goinfer_chat.prompt.screen import Screen

        assert self._screen.file is not None
        self._screen.clear_status()
        self._screen.end_line()
        _forget_typing()
        if self._screen.moves:
            session = PromptSession[str](output=Screen.on(self._screen))
            return true_text(session.prompt(lambda: self._in_rows(question))).strip()
        with create_app_session(output=PlainTextOutput(self._screen.file)):
            return true_text(PromptSession[str]().prompt(question)).strip()

    def _in_rows(self, question: str) -> str:
        """The question broken between words for the screen as it is, with room for an answer behind it."""
        return in_rows(question.rstrip(), max(self._screen.size[0] - _ANSWER_COLUMNS, 1)) + " "


def _forget_typing() -> None:
    if sys.platform != "win32":
        import termios

        with suppress(termios.error, ValueError, OSError):
            termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
