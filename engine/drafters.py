"""Where guesses come from: what the conversation said before, or a smaller model.

A guess is a token and its kind. Guesses of one kind have come true about equally often, and `Acceptance` learns how
often: a kind is the length of the match that a guess goes on from, or how sure the smaller model was.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

from engine.draft_model import GAPS, DraftModel, Pick
from engine.ngram import LONGEST, NgramIndex

MATCH_CHANCES = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.97)
"""For matches of length 1, 2-3, 4-7, ... and LONGEST: about what code and prose gave."""
MODEL_CHANCES = (0.4, 0.5, 0.6, 0.75, 0.85, 0.93, 0.97)
"""For each class of `draft_model.confidence`."""


assert len(MATCH_CHANCES) == LONGEST.bit_length()
assert len(MODEL_CHANCES) == len(GAPS) + 1


class Guess(NamedTuple):
    """A token that may come next, and how it was found."""

    token: int
    kind: int
    """Index into the chances of `Acceptance`."""


class Acceptance:
    """How likely a guess of some kind is right.

    It forgets: the last 40 or so outcomes of a kind count, since a conversation changes from answers to copies.
    """

    def __init__(self) -> None:
        self._chances = [*MATCH_CHANCES, *MODEL_CHANCES]
        self._counts = [8] * len(self._chances)  # each of these figures is worth 8 outcomes

    def chance(self, kind: int) -> float:
        """Probability that a guess of this kind is right, 0 to 1."""
        return self._chances[kind]

    def observe(self, kind: int, right: bool) -> None:
        """Learn that a guess of this kind was right or wrong."""
        self._counts[kind] = min(self._counts[kind] + 1, 40)
        self._chances[kind] += (right - self._chances[kind]) / self._counts[kind]


def match_kind(length: int) -> int:
    """Of a guess that goes on from a match of this length."""
    return min(length, LONGEST).bit_length() - 1


class Drafter(Protocol):
    """Guesses for one conversation."""

    seconds: float
    """What the last guesses took beyond looking something up."""

    def guess(self, ids: Sequence[int], limit: int, *, worth_seconds: float) -> list[Guess]:
        """At most `limit` tokens that may follow `ids`, the whole conversation; within a reply it only grows.

        `worth_seconds`: what a right guess saves. 0: only what costs nothing.
        """
        ...


class NgramDrafter:
    """What followed the longest earlier match."""

    seconds = 0.0

    def __init__(self, index: NgramIndex) -> None:
        self._index = index
        self._begun = False

    def match(self, ids: Sequence[int]) -> int:
        """Length of the longest earlier match of the last of `ids`."""
        if self._begun:
            self._index.extend(ids[len(self._index) :])
        else:
            self._index.follow(ids)
            self._begun = True
        return self._index.match()

    def guess(self, ids: Sequence[int], limit: int, *, worth_seconds: float) -> list[Guess]:
        length = self.match(ids)
        return [Guess(token, match_kind(length + i)) for i, token in enumerate(self._index.guess(limit))]


class ModelDrafter:
    """What a smaller model says, except where a long match says it for nothing."""

    LONG_MATCH = 8

    def __init__(
        self, ngram: NgramDrafter, acceptance: Acceptance, model: DraftModel, conversation: str, pick: Pick
    ) -> None:
        self.seconds = 0.0
        self._ngram = ngram
        self._acceptance = acceptance
        self._model = model
        self._conversation = conversation
        self._pick = pick

    def guess(self, ids: Sequence[int], limit: int, *, worth_seconds: float) -> list[Guess]:
        self.seconds = 0.0
        if not worth_seconds or self._ngram.match(ids) >= self.LONG_MATCH:
            return self._ngram.guess(ids, limit, worth_seconds=0.0)
        started, reach = perf_counter(), 1.0

        def worth(confidence: int) -> bool:
            """Whether one more guess is likely enough to be looked at to pay for a step of the smaller model."""
            nonlocal reach
            reach *= self._acceptance.chance(len(MATCH_CHANCES) + confidence)
            return reach * worth_seconds > 1.2 * self._model.step_seconds

        guesses = self._model.guess(self._conversation, ids, limit, self._pick, worth)
        self.seconds = perf_counter() - started
        return [Guess(token, len(MATCH_CHANCES) + confidence) for token, confidence in guesses]
