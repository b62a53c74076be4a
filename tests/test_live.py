"""The live region on a screen: every final line once, whatever the sizes are, and the cursor as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_screen import XTERM, FakeScreen

from goinfer_chat.view.cells import Line, Run, line_width, num_pieces
from goinfer_chat.view.live import CALM_SECONDS, LiveRegion, last_that_survive, reflows, survives
from goinfer_chat.view.themes import theme_for


def line(text: str) -> Line:
    return (Run(text),)


def region_on(
    screen: FakeScreen, environ: dict[str, str] | None = None, clock: Callable[[], float] | None = None
) -> LiveRegion:
    """On a screen whose size is never a new one, unless there is a clock."""
    never_new = iter(range(1_000_000)).__next__
    return LiveRegion(screen.stream(), theme_for("none", XTERM), XTERM | (environ or {}), clock or never_new)


def test_final_lines_stay_and_live_ones_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeScreen(monkeypatch)
    region = region_on(screen)
    region.show([line("one")], [line("live 1"), line("live 2")])
    assert screen.lines == ["one", "live 1", "live 2"]
    region.show([line("two")], [line("live 3")])
    assert screen.lines == ["one", "two", "live 3"]
    region.show([], [line("a"), line("b"), line("c")])
    assert screen.lines == ["one", "two", "a", "b", "c"]
    region.close()
    assert screen.lines == ["one", "two"]
    assert not screen.screen.cursor.hidden
    assert (screen.screen.cursor.x, screen.screen.cursor.y) == (0, 2)


def test_the_cursor_is_hidden_only_while_something_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeScreen(monkeypatch)
    region = region_on(screen)
    region.show([], [line("live")])
    assert screen.screen.cursor.hidden
    region.show([line("final")], [])
    assert not screen.screen.cursor.hidden


def test_a_region_with_nothing_to_show_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeScreen(monkeypatch)
    region_on(screen).show([], [])
    region_on(screen).close()
    assert screen.raw == ""


@pytest.mark.parametrize(("columns", "rows"), [(80, 10), (20, 8), (300, 50), (8, 3)])
def test_a_region_taller_than_the_screen_prints_no_line_twice(
    monkeypatch: pytest.MonkeyPatch, columns: int, rows: int
) -> None:
    screen = FakeScreen(monkeypatch, columns, rows)
    region = region_on(screen)
    done = 0
    for number in range(1, 61):
        final = [line(f"n{n}") for n in range(done, number - number % 20)]
        done = max(done, number - number % 20)
        region.show(final, [line(f"n{n}") for n in range(done, number)] + [line("panel " * 60)])
    region.show([line(f"n{n}") for n in range(done, 60)], [])
    assert screen.lines == [f"n{n}" for n in range(60)]


@pytest.mark.parametrize(("columns", "rows"), [(1, 24), (5, 24), (7, 24), (80, 1), (80, 2), (1, 1)])
def test_a_screen_too_small_for_a_region_gets_the_final_lines(
    monkeypatch: pytest.MonkeyPatch, columns: int, rows: int
) -> None:
    screen = FakeScreen(monkeypatch, columns, rows)
    region = region_on(screen)
    for number in range(5):
        region.show([line(str(number))], [line("live"), line("panel")])
    region.close()
    assert screen.lines == ["0", "1", "2", "3", "4"]
    assert "live" not in screen.raw


def test_a_screen_that_becomes_narrower_and_wider_keeps_every_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeScreen(monkeypatch, 80, 24)
    region = region_on(screen)
    for number, columns in enumerate([80, 20, 20, 80, 40, 80]):
        screen.resize(columns, 24)
        region.show([line(f"final {number}")], [line("live " * 15), line("panel")])
    region.close()
    assert screen.lines == [f"final {number}" for number in range(6)]


def test_where_rows_are_broken_anew_all_pieces_of_the_region_are_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeScreen(monkeypatch, 80, 24)
    region = region_on(screen, {"VTE_VERSION": "7600"})
    region.show([], [line("x" * 79), line("y" * 41), line("z")])
    screen.raw = ""
    screen.resize(20, 24)
    region.show([], [line("z")])
    assert "\r\x1b[K" + "\x1b[A\x1b[K" * 7 in screen.raw  # 4 + 3 + 1 rows


def test_nothing_is_live_while_the_size_goes_on_changing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    screen = FakeScreen(monkeypatch, 80, 24)
    region = region_on(screen, clock=lambda: now)
    region.show([], [line("live")])
    assert not region.is_out_of_place
    for columns in (70, 60, 50):
        now += CALM_SECONDS / 2
        screen.resize(columns, 24)
        assert region.is_out_of_place == (columns == 70)
        region.show([line(f"final {columns}")], [line("live")])
        assert screen.lines[-1] == f"final {columns}"
        assert region.max_rows == 0
    now += CALM_SECONDS
    region.show([], [line("live")])
    assert screen.lines == ["final 70", "final 60", "final 50", "live"]


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (80, 10), (200, 50), (20, 8), (40, 12)])
def test_live_rows_survive_that_the_screen_becomes_much_smaller(columns: int, rows: int) -> None:
    lines = [line("x" * (columns - 1))] * 60
    num = next(number for number in range(60, -1, -1) if survives(lines[:number], (columns, rows), rows))
    assert num > 0
    for width, height in ((max(columns // 4, 20), rows), (max(columns // 2, 20), max(rows * 2 // 3, 8))):
        assert num * num_pieces(lines[0], width) < height
    assert last_that_survive(lines, (columns, rows), rows) == max(num, max(rows // 3, 2) if rows < 24 else 8)
    assert survives([line("x")] * 3, (columns, rows), 0)
    assert not survives([line("x" * (columns - 1))] * 3, (columns, rows), 0) or columns == 20


def test_what_a_narrower_screen_pushes_out_is_above_the_live_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeScreen(monkeypatch)
    stream = screen.stream()
    region = LiveRegion(stream, theme_for("none", XTERM), XTERM)
    rows = [line("x" * 79), line("x" * 60)]
    assert not region.survives(rows)
    stream.write("a\nb\n")
    region.show([line(str(number)) for number in range(4)], rows[1:])
    assert stream.rows_above == 6
    assert region.survives(rows)
    stream.lost_track()
    assert not region.survives(rows)


def test_a_region_at_the_top_of_the_screen_is_erased_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeScreen(monkeypatch)
    region = region_on(screen)
    region.show([], [line("one"), line("two")])
    screen.raw = ""
    region.close()
    assert "\x1b[J" not in screen.raw
    assert screen.lines == []


def test_wide_characters_are_broken_as_a_terminal_does() -> None:
    assert num_pieces(line("日本語日本語"), 5) == 3
    assert num_pieces(line("ab日"), 3) == 2
    assert num_pieces(line(""), 5) == 1
    assert num_pieces(line("x" * 11), 5) == 3


def test_a_final_line_longer_than_the_screen_is_left_to_the_terminal_to_break(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeScreen(monkeypatch, 20, 8)
    region = region_on(screen)
    region.show([], [line("live"), line("panel"), line("more"), line("and more")])
    region.show([line("word " * 9 + "end.")], [line("panel")])
    assert screen.lines == ["word word word word", "word word word word", "word end.", "panel"]
    assert "word " * 9 in screen.raw


def test_a_row_as_wide_as_the_screen_loses_no_character(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeScreen(monkeypatch, 20, 8)
    region = region_on(screen)
    region.show([line("a" * 20), line("b" * 19)], [line("c" * 40)])
    assert screen.lines == ["a" * 20, "b" * 19, "c" * 18 + "…"]


@pytest.mark.parametrize("text", ["❤️", "👩‍🚀", "🇯🇵", "日本", "e\u0301", "שלום", "👍🏽"])
def test_a_border_behind_text_of_doubtful_width_stands_where_the_others_do(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    screen = FakeScreen(monkeypatch, 30, 8)
    region = region_on(screen)
    rows = [
        (Run("│ "), Run(cell), Run(" " * (10 - line_width([Run(cell)]))), Run(" "), Run("│")) for cell in (text, "x")
    ]
    region.show(rows, [])
    borders = [[i for i, cell in enumerate(row) if cell == "│"] for row in screen.cells[:2]]
    assert borders == [[0, 13], [0, 13]]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TERM": "tmux-256color", "TMUX": "/tmp/x"}, True),
        ({"TERM": "tmux-256color"}, True),
        ({"TERM": "screen"}, False),
        ({"TERM": "xterm-256color", "TMUX": "/tmp/x"}, False),
        ({"TERM": "xterm-256color", "VTE_VERSION": "7600"}, True),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, True),
        ({"TERM": "xterm-kitty"}, True),
        ({"TERM": "xterm-256color"}, False),
        ({}, False),
    ],
)
def test_what_is_not_known_to_break_rows_anew_is_taken_not_to(environ: dict[str, str], expected: bool) -> None:
    assert reflows(environ) is expected
