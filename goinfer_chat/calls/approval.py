"""Whether a call may run: what the rules say, else what a person says, else no."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.api import Notice, ToolCall
from engine.errors import UsageError
from goinfer_chat.calls.approval_rules import KeptRules, Rule, command_prefix
from goinfer_chat.calls.events import Answer, ApprovalAsked, RepeatAsked
from tools import Tool, ToolContext, ToolResult

NOBODY: Final = "refused: this needs a person's approval, and nobody can be asked"

Asker = Callable[[ApprovalAsked | RepeatAsked], Answer]
"""Asks a person, on the thread that owns the terminal."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`refusal` None: it may run, with these arguments."""

    arguments: Mapping[str, Any]
    refusal: ToolResult | None = None
    nobody: bool = False
    """Whether it was refused because there was nobody to ask."""
    stop: bool = False


class Approvals:
    """The rules of a session in one folder.

    What is denied never runs, whatever else allows it. Reading runs. `yes` lets everything else run too.
    """

    def __init__(
        self,
        folder: Path,
        *,
        allow: tuple[Rule, ...] = (),
        deny: tuple[Rule, ...] = (),
        yes: bool = False,
        kept: KeptRules | None = None,
    ) -> None:
        self.folder = folder
        self.allow = list(allow)
        self.deny = deny
        self.yes = yes
        self.kept = kept
        self.kept_rules = list(kept.of(folder)) if kept else []
        self.asker: Asker | None = None
        """None: nobody can be asked."""

    def decide(
        self, call: ToolCall, tool: Tool, arguments: Mapping[str, Any], context: ToolContext
    ) -> Generator[ApprovalAsked | Notice, None, Decision]:
        """The decision, after a question where one is needed: whoever gets it must answer it."""
        if any(rule.denies(tool, arguments) for rule in self.deny):
            return Decision(arguments, ToolResult("refused", f"refused: the user does not allow this {tool.name} call"))
        if self.yes or tool.risk == "reads" or any(r.allows(tool, arguments) for r in [*self.allow, *self.kept_rules]):
            return Decision(arguments)
        if self.asker is None:
            return Decision(arguments, ToolResult("refused", NOBODY), nobody=True)
        asked = ApprovalAsked(
            call=call,
            tool=tool,
            arguments=arguments,
            preview=tool.preview(arguments, context),
            prefix=command_prefix(tool, arguments),
        )
        yield asked
        answer = asked.question.wait(context.cancel)
        if answer.always is not None:
            try:
                self.remember(answer.always)
            except UsageError as error:
                yield Notice(f"allowed for this session only: {error}")
        return _decision(answer, arguments)

    def remember(self, rule: Rule) -> None:
        """Allow it from here on, also in later sessions in this folder. Raises UsageError where it cannot be kept."""
        self.kept_rules.append(rule)
        if self.kept is not None:
            self.kept.add(self.folder, rule)

    def forget(self) -> int:
        """Forget what was allowed for this folder. Returns how many rules that were. Raises UsageError."""
        num_rules = len(self.kept_rules)
        self.kept_rules.clear()
        if self.kept is not None:
            self.kept.clear(self.folder)
        return num_rules

    def ask_about_repeat(
        self, call: ToolCall, times: int, cancel: threading.Event
    ) -> Generator[RepeatAsked, None, bool]:
        """Whether a turn that repeats itself is to go on; it is not where nobody can be asked."""
        if self.asker is None:
            return False
        asked = RepeatAsked(call=call, times=times)
        yield asked
        return asked.question.wait(cancel).allowed


def _decision(answer: Answer, arguments: Mapping[str, Any]) -> Decision:
    if answer.allowed:
        return Decision(arguments if answer.arguments is None else answer.arguments)
    reason = f": {answer.reason}" if answer.reason else ""
    return Decision(arguments, ToolResult("refused", f"the user refused this call{reason}"), stop=answer.stop)
