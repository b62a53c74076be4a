"""How models mark their reasoning, told by the template or the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Reasoning stands at the start of a reply, between `begin` and `end`."""

    begin: str
    end: str
    after: str = "\n\n"
    """Between the end of reasoning and the answer, where it is ended in place of the model."""

    @property
    def texts(self) -> str:
        return self.begin + self.end

    @property
    def first_token(self) -> str:
        """What is looked for: templates write line ends as `\\n`."""
        return self.begin.split("\n")[0]

    def is_opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends within the reasoning."""
        return re.search(rf"{re.escape(self.begin.rstrip())}\s*$", prompt) is not None

    def removed_from(self, text: str) -> str:
        """A text without the reasoning that it begins with, or ends."""
        return text.rpartition(self.end)[2].lstrip() if self.end in text else text


THINK = ReasoningMarks("<think>", "</think>")
_KNOWN = (
    ReasoningMarks("<|channel>thought\n", "<channel|>", ""),  # Gemma 4
    ReasoningMarks("<seed:think>", "</seed:think>", "\n"),
    ReasoningMarks("<mm:think>", "</mm:think>", ""),  # MiniMax M3
    ReasoningMarks("<think:opensource>", "</think:opensource>", ""),  # Hunyuan 3
    ReasoningMarks("[THINK]", "[/THINK]", ""),  # Magistral, Ministral 3
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>", ""),  # Command
    ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>", ""),  # Apertus
    ReasoningMarks("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]", "\n"),  # Apriel
    THINK,
)


def find_marks(source: str, markers: Collection[str]) -> ReasoningMarks | None:
    """Those that the template writes or the vocabulary has; None for a model that is not known to reason."""

    def has(text: str) -> bool:
        return text in source or text in markers

    found = next((marks for marks in _KNOWN if has(marks.first_token) and has(marks.end)), None)
    return found or (THINK if has(THINK.begin) else None)
