"""Colours: what each role of text looks like on a light, a dark or an unknown background.

Nothing asks the terminal what its background is. COLORFGBG says it in some; for all others the colours of `auto` are
those in the middle, which can be read on white and on black.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from goinfer_chat import settings
from goinfer_chat.view.cells import Line, Run, Style
from goinfer_chat.view.colours import Colour, Depth, depth_of, nearest

ROLES: Final = (
    "heading",
    "code",
    "link",
    "faint",
    "bar",
    "reused",
    "good",
    "bad",
    "keyword",
    "string",
    "number",
    "name",
)


def _palette(colours: str) -> Mapping[str, Colour]:
    """In the order of ROLES. All are colours of the palette of 256, so both depths show the same."""
    return MappingProxyType({role: _parse(colour) for role, colour in zip(ROLES, colours.split(), strict=True)})


def _parse(colour: str) -> Colour:
    return int(colour[0:2], 16), int(colour[2:4], 16), int(colour[4:6], 16)


PALETTES: Final[Mapping[str, Mapping[str, Colour]]] = MappingProxyType(
    {
        "light": _palette("5f00af 005f5f 005faf 5f5f5f 005faf 5f8787 005f00 af0000 8700af 005f00 875f00 005faf"),
        "dark": _palette("d7afff 87d7d7 87afff a8a8a8 5fafff 5f8787 87d787 ff8787 d787ff afd787 ffd787 87d7ff"),
        "auto": _palette("875fd7 008787 5f5fff 767676 5f5fff 5f8787 008700 d7005f d700af 008700 af5f00 5f5fff"),
    }
)


@dataclass(frozen=True, slots=True)
class Theme:
    """How styles become sequences of the terminal."""

    palette: Mapping[str, Colour]
    depth: Depth

    @property
    def has_styles(self) -> bool:
        """Without styles, Markdown keeps its own marks."""
        return self.depth > 0

    def painted(self, line: Line) -> str:
        """The line with its styles; the text itself must be clean."""
        return "".join(self._run(run) for run in line)

    def _run(self, run: Run) -> str:
        codes = _codes(run.style, self.palette.get(run.style.role), self.depth)
        return f"\x1b[{codes}m{run.text}\x1b[0m" if codes and run.text else run.text


@lru_cache(maxsize=512)
def _codes(style: Style, colour: Colour | None, depth: Depth) -> str:
    if depth == 0:
        return ""
    flags = {"1": style.bold, "2": style.dim, "3": style.italic, "4": style.underline, "9": style.strike}
    codes = [code for code, on in flags.items() if on]
    if colour is not None and depth == 24:
        codes.append("38;2;{};{};{}".format(*colour))
    elif colour is not None and depth == 8:
        codes.append(f"38;5;{nearest(colour)}")
    return ";".join(codes)


def theme_for(name: settings.Theme, environ: Mapping[str, str]) -> Theme:
    """The theme of that name on a terminal with this environment. `none` has bold and the like, but no colours."""
    depth = depth_of(environ)
    if name == "none":
        return Theme(MappingProxyType({}), 1 if depth else 0)
    if name == "auto":
        name = _background(environ)
    return Theme(PALETTES[name], depth)


def _background(environ: Mapping[str, str]) -> settings.Theme:
    """From COLORFGBG, such as "15;0": the last number is the background, of 16 colours."""
    last = environ.get("COLORFGBG", "").rpartition(";")[2]
    if not last.isdecimal() or len(last) > 2 or int(last) > 15:
        return "auto"
    return "dark" if int(last) in (0, 1, 2, 3, 4, 5, 6, 8) else "light"
