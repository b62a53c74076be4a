"""Figures of repeated measurements: medians, spreads, paired ratios, and how they are shown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Summary:
    """One figure measured several times. The values stay in the order of measuring."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.values

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def scaled(self, factor: float) -> Summary:
        return Summary(tuple(factor * value for value in self.values))

    def over(self, other: Summary) -> Summary:
        """Each value over the one measured beside it. On a machine whose speed drifts, pairs tell more than medians."""
        return Summary(tuple(mine / theirs for mine, theirs in zip(self.values, other.values, strict=True)))

    def percent(self) -> str:
        """Such as "92 % (90-93)"."""
        return self.scaled(100).text(0, " %")

    def text(self, decimals: int = 1, unit: str = "") -> str:
        """Such as "501.2 (480.1-512.0)"; one value stands alone."""
        median = f"{self.median:,.{decimals}f}{unit}"
        return median if len(self.values) == 1 else f"{median} ({self.low:,.{decimals}f}-{self.high:,.{decimals}f})"

    def as_object(self, digits: int = 6) -> dict[str, Any]:
        """For JSON, rounded to `digits` significant digits."""
        return {
            "median": significant(self.median, digits),
            "low": significant(self.low, digits),
            "high": significant(self.high, digits),
            "values": [significant(value, digits) for value in self.values],
        }


def significant(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns: the first to the left, the others to the right. Columns without a figure are left out."""
    columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for cells in zip(*columns, strict=True):
        first, *others = [
            cell.ljust(width) if n == 0 else cell.rjust(width) for n, (cell, width) in enumerate(zip(cells, widths))
        ]
        lines.append("  ".join([first, *others]).rstrip())
    return lines
