"""Colours as numbers: how many a terminal has, and which of them is nearest."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal

Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""

Depth = Literal[0, 1, 8, 24]
"""Bits of colour: 0 no styles at all, 1 bold and the like without colours, 8 the palette of 256, 24 all."""


def depth_of(environ: Mapping[str, str]) -> Depth:
    """NO_COLOR counts first, then FORCE_COLOR (0 to 3), then what COLORTERM and TERM say."""
    if environ.get("NO_COLOR"):
        return 0
    forced = environ.get("FORCE_COLOR")
    if forced in ("0", "false"):
        return 0
    if forced in ("2", "3"):
        return 8 if forced == "2" else 24
    term = environ.get("TERM", "dumb")
    if environ.get("COLORTERM") in ("truecolor", "24bit") or term.endswith("-direct"):
        return 24
    if "256" in term or term.startswith(("xterm-kitty", "xterm-ghostty", "alacritty", "foot", "wezterm")):
        return 8
    # What 8 or 16 colours look like is up to the terminal's own scheme, so nothing can be said about their contrast.
    return 1 if forced or term not in ("dumb", "unknown", "") else 0


_STEPS: Final = (0, 95, 135, 175, 215, 255)


def of_index(index: int) -> Colour:
    """The colour of an index 16 to 255 of xterm's palette: a cube of 6 x 6 x 6, then 24 greys."""
    if index >= 232:
        grey = 8 + 10 * (index - 232)
        return grey, grey, grey
    index -= 16
    return _STEPS[index // 36], _STEPS[index // 6 % 6], _STEPS[index % 6]


@lru_cache(maxsize=128)
def nearest(colour: Colour) -> int:
    """The index of xterm's palette that is nearest."""
    return min(range(16, 256), key=lambda index: sum((a - b) ** 2 for a, b in zip(of_index(index), colour)))
