"""Colours: every one can be read on its background, and the terminal is believed, never asked."""

from __future__ import annotations

import pytest

from goinfer_chat.terminal import Stream
from goinfer_chat.view.cells import Run, Style
from goinfer_chat.view.colours import Colour, depth_of, nearest, of_index
from goinfer_chat.view.themes import PALETTES, ROLES, theme_for

WHITE, PAPER, BLACK, CHARCOAL = (255, 255, 255), (250, 250, 245), (0, 0, 0), (30, 30, 30)
BARS = ("bar", "reused")
XTERM = {"TERM": "xterm-256color"}


def luminance(colour: Colour) -> float:
    """Relative luminance, 0 to 1 (WCAG 2.2)."""

    def linear(value: int) -> float:
        share = value / 255
        return share / 12.92 if share <= 0.04045 else float(((share + 0.055) / 1.055) ** 2.4)

    red, green, blue = map(linear, colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Colour, other: Colour) -> float:
    """1 to 21; text needs 4.5 (WCAG 2.2, level AA), large text and bars 3."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def needed(role: str, text: float) -> float:
    return 3.0 if role in BARS else text


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("theme", "backgrounds", "text"),
    [("light", (WHITE, PAPER), 4.5), ("dark", (BLACK, CHARCOAL), 4.5), ("auto", (WHITE, BLACK), 4.0)],
)
def test_every_colour_can_be_read_on_its_backgrounds(
    theme: str, backgrounds: tuple[Colour, ...], text: float, quantized: bool
) -> None:
    for role, colour in PALETTES[theme].items():
        shown = of_index(nearest(colour)) if quantized else colour
        for background in backgrounds:
            assert contrast(shown, background) >= needed(role, text), (role, background)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast(WHITE, BLACK) == pytest.approx(21)
    assert contrast((119, 119, 119), WHITE) == pytest.approx(4.48, abs=0.01)


def test_each_palette_has_every_role() -> None:
    assert all(tuple(palette) == ROLES for palette in PALETTES.values())


@pytest.mark.parametrize(
    ("environ", "depth"),
    [
        (XTERM, 8),
        (XTERM | {"COLORTERM": "truecolor"}, 24),
        (XTERM | {"NO_COLOR": "1", "FORCE_COLOR": "3"}, 0),
        (XTERM | {"NO_COLOR": ""}, 8),
        (XTERM | {"FORCE_COLOR": "0"}, 0),
        (XTERM | {"FORCE_COLOR": "3"}, 24),
        ({"TERM": "xterm"}, 1),
        ({"TERM": "linux"}, 1),
        ({"TERM": "dumb"}, 0),
        ({}, 0),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, 1),
        ({"TERM": "dumb", "FORCE_COLOR": "2"}, 8),
    ],
)
def test_the_environment_says_how_many_colours_there_are(environ: dict[str, str], depth: int) -> None:
    assert depth_of(environ) == depth


@pytest.mark.parametrize(
    ("background", "theme"),
    [("15;0", "dark"), ("0;15", "light"), ("0;default;7", "light"), ("", "auto"), ("x", "auto")],
)
def test_the_background_is_what_the_terminal_says(background: str, theme: str) -> None:
    assert theme_for("auto", XTERM | {"COLORFGBG": background}).palette == PALETTES[theme]


def test_no_theme_has_styles_without_colours_and_no_color_has_neither() -> None:
    line = (Run("a", Style("heading", bold=True)), Run("b"))
    assert theme_for("none", XTERM).painted(line) == "\x1b[1ma\x1b[0mb"
    assert theme_for("dark", XTERM).painted(line) == "\x1b[1;38;5;183ma\x1b[0mb"
    assert theme_for("dark", XTERM | {"COLORTERM": "truecolor"}).painted(line) == "\x1b[1;38;2;215;175;255ma\x1b[0mb"
    assert theme_for("dark", XTERM | {"NO_COLOR": "1"}).painted(line) == "ab"


def test_forced_colour_gives_a_dumb_terminal_styles_but_no_movement(monkeypatch: pytest.MonkeyPatch) -> None:
    from fake_screen import FakeScreen

    stream = FakeScreen(monkeypatch).stream({"TERM": "dumb", "FORCE_COLOR": "1"})
    assert (stream.colour, stream.moves) == (True, False)


def test_forced_colour_gives_a_file_no_styles() -> None:
    import io

    assert not Stream(io.StringIO(), XTERM | {"FORCE_COLOR": "3"}).colour
