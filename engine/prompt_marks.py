"""Marks: characters put into texts before they are rendered, to be found in what was rendered.

One mark goes into each spelling of a token that a text must not become. Another, with a number, says where in the
rendered text something is. Both are removed again, and no text of the prompt has them itself.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.tokenizer import Spellings


@dataclass(frozen=True, slots=True)
class Marks:
    """Four characters that the texts of a prompt do not have."""

    split: str
    """Stands inside a spelling."""
    anchor: str
    """Stands in front of a number in binary `digits`."""
    digits: str

    @classmethod
    def unused_in(cls, texts: Sequence[str]) -> Marks:
        """Noncharacters (U+FDD0 to U+FDEF), or characters for private use where the texts have those."""
        candidates = map(chr, itertools.chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE)))
        free = (mark for mark in candidates if not any(mark in text for text in texts))
        split, anchor, zero, one = itertools.islice(free, 4)
        return cls(split, anchor, zero + one)

    def anchor_of(self, number: int) -> str:
        return self.anchor + "".join(self.digits[int(digit)] for digit in f"{number:b}")

    def without_anchors(self, text: str) -> str:
        return re.sub(f"[{self.anchor}{self.digits}]", "", text) if self.anchor in text else text

    def removed_from(self, text: str) -> str:
        return self.without_anchors(text).replace(self.split, "")

    def split_at(self, marked: str, anchors: Iterable[str]) -> list[str]:
        """The text cut around these anchors: text, anchor, text, ..."""
        if not (anchors := list(anchors)):
            return [marked]
        return re.split(f"((?:{'|'.join(anchors)})(?![{self.digits}]))", marked)

    def anchors_in(self, marked: str) -> tuple[list[tuple[int, int]], Callable[[int], int]]:
        """(position, number) of each anchor, in order, and a function from a position to one in `marked`.

        Positions are those in the text without marks.
        """
        anchors: list[tuple[int, int]] = []
        positions: list[int] = []
        removed = [0]  # characters, up to each of the positions
        for match in re.finditer(f"{self.split}|{self.anchor}([{self.digits}]+)", marked):
            position = match.start() - removed[-1]
            if match[1] is not None:
                bits = "".join(str(self.digits.index(digit)) for digit in match[1])
                anchors.append((position, int(bits, 2)))
            positions.append(position)
            removed.append(removed[-1] + len(match[0]))
        return anchors, lambda position: position + removed[bisect.bisect_left(positions, position)]


class Guard:
    """Keeps the spellings of some tokens in a text from being these tokens."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # A token of one character has no inside to put a mark into.
        texts = {text for text in tokens if len(text) > 1}
        self._spellings = Spellings((text, 0) for text in texts)
        self._longest = max(map(len, texts), default=1)
        self._starts = {text[:length] for text in texts for length in range(1, len(text))}
        self._ends = {text[length:] for text in texts for length in range(1, len(text))}
        # Most texts are ruled out by two characters: a prompt with tools has hundreds, looked at for each turn.
        self._last_two = {start[-2:] for start in self._starts}
        self._first_two = {end[:2] for end in self._ends}

    def finds(self, text: str) -> bool:
        return next(self._spellings.find(text), None) is not None or self._edges(text) != (False, False)

    def protected(self, text: str, mark: str) -> str:
        """The text with a mark in each spelling, and at an end where a spelling could go on in the text beside it."""
        starts, ends = self._edges(text)
        # Again, since one spelling can lie inside another.
        while found := [start for start, _, _ in self._spellings.find(text)]:
            cuts = [0, *(start + 1 for start in found), len(text)]
            text = mark.join(text[start:end] for start, end in itertools.pairwise(cuts))
        return mark * starts + text + mark * ends

    def _edges(self, text: str) -> tuple[bool, bool]:
        """Whether a spelling could end with the start of the text, and whether one could start with its end."""
        lengths = range(1, min(self._longest, len(text) + 1))
        first, last = text[:2], text[-2:]
        return (
            (first in self._first_two or first[:1] in self._first_two)
            and any(text[:length] in self._ends for length in lengths),
            (last in self._last_two or last[-1:] in self._last_two)
            and any(text[-length:] in self._starts for length in lengths),
        )
