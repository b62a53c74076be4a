"""A turn on a screen: the reply once, figures below it while it runs, one line after it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fake_screen import XTERM, FakeScreen
from test_render import INFO, STATS, reply

from engine.api import (
    Event,
    Finished,
    Notice,
    PrefillProgress,
    Progress,
    TextDelta,
    ThinkingDelta,
    ToolCall,
    ToolCallReady,
)
from goinfer_chat.calls.events import ToolStarted
from goinfer_chat.view.live_view import FRAME_SECONDS, LiveView
from goinfer_chat.view.render import stats_line
from goinfer_chat.view.themes import theme_for


@dataclass
class Turn:
    """A view on a screen in memory, with a clock that goes a second on after each event."""

    screen: FakeScreen
    view: LiveView
    now: list[float]

    def play(self, *events: Event, seconds: float = 1.0) -> None:
        for event in events:
            self.view.event(event)
            self.now[0] += seconds
            self.view.tick()


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Any:
    def begin(columns: int = 80, rows: int = 24, environ: dict[str, str] | None = None, **options: Any) -> Turn:
        now = [0.0]
        screen = FakeScreen(monkeypatch, columns, rows)
        environ = XTERM if environ is None else environ
        stream, theme = screen.stream(environ), theme_for("dark", environ)
        stream.went_down(rows)  # as after some turns
        return Turn(screen, LiveView(stream, theme, INFO, clock=lambda: now[0], **options), now)

    return begin


def words(count: int) -> list[Event]:
    return [TextDelta(f"line {number}\n") for number in range(count)]


def test_a_reply_ends_with_one_line_of_figures(turn: Any) -> None:
    running = turn()
    running.play(PrefillProgress(3, 3, 0), TextDelta("Hel"), TextDelta("lo."), Progress(STATS), Finished(reply()))
    running.view.close()
    assert running.screen.lines == ["Hello.", stats_line(reply())]
    assert not running.screen.screen.cursor.hidden


def test_the_figures_are_below_the_reply_while_it_runs(turn: Any) -> None:
    running = turn()
    running.play(PrefillProgress(1500, 3000, 1000))
    assert running.screen.lines[-1].startswith("reading the prompt: 1,500 of 3,000 tokens, 1,000 of them reused (50%)")
    running.play(PrefillProgress(3000, 3000, 1000), TextDelta("Hello"), Progress(STATS))
    assert running.screen.lines == ["Hello", "38.2 tok/s | 2 tokens | TTFT 45 ms | context 37% | cache 0.0 MB"]


@pytest.mark.parametrize(("size", "rows"), [("off", 1), ("line", 2), ("panel", 5)])
def test_the_panel_has_three_sizes(turn: Any, size: str, rows: int) -> None:
    running = turn(size=lambda: size)
    running.play(PrefillProgress(3, 3, 0), TextDelta("Hello"), Progress(STATS))
    assert len(running.screen.lines) == rows
    running.play(Finished(reply()))
    assert running.screen.lines == ["Hello", stats_line(reply())]


def test_what_is_done_at_once_shows_no_panel(turn: Any) -> None:
    running = turn(size=lambda: "panel")
    running.play(PrefillProgress(3, 3, 0), TextDelta("Hello"), Progress(STATS), Finished(reply()), seconds=0.1)
    assert "╭" not in running.screen.raw


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("columns", "rows"), [(80, 10), (20, 8), (300, 50), (40, 3), (1, 10), (5, 24)])
def test_a_long_reply_on_a_small_screen_shows_every_line_once(turn: Any, columns: int, rows: int, raw: bool) -> None:
    running = turn(columns, rows, size=lambda: "panel", raw=raw)
    running.play(*words(40), Progress(STATS), TextDelta("\n```\n"), *words(40), TextDelta("```\n"), Finished(reply()))
    text = " ".join(running.screen.lines) if columns >= 8 else "".join(running.screen.lines)
    for number in range(40):
        wanted = f"line {number} " if columns >= 8 else f"line{number}line"
        assert (text + " ").count(wanted) == 2 or columns < 8, (number, running.screen.lines)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (20, 8), (200, 50), (33, 12)])
def test_borders_of_a_table_are_straight_whatever_stands_in_it(turn: Any, columns: int, rows: int) -> None:
    running = turn(columns, rows)
    cells = ["❤️", "👩‍🚀", "日本語", "🇯🇵", "e\u0301", "שלום", "plain"]
    table = "| a | b |\n|---|---|\n" + "".join(f"| {cell} | {cell} {cell} |\n" for cell in cells)
    running.play(TextDelta(table), Finished(reply()))
    rows_of_it = [row for row in running.screen.cells if row[0] in "┌├└│"]
    edges = [
        tuple(i for i, cell in enumerate(row) if cell in ("│", "├", "┌", "└", "┼", "┬", "┴", "┤", "┐", "┘"))
        for row in rows_of_it
    ]
    assert len(rows_of_it) >= 11
    assert len(set(edges)) == 1


def test_the_screen_may_change_while_the_reply_streams(turn: Any) -> None:
    running = turn(80, 24, size=lambda: "panel")
    for number, columns in enumerate([80, 20, 20, 80, 40, 80]):
        running.screen.resize(columns, 24)
        running.play(TextDelta(f"paragraph {number}\n\n"), Progress(STATS))
    running.play(Finished(reply()))
    lines = [line for line in running.screen.lines if line.startswith("paragraph")]
    assert lines == [f"paragraph {number}" for number in range(6)]
    assert not any(set(line) & set("╭│╰") for line in running.screen.lines)


def test_frames_are_rare_however_many_tokens_come(turn: Any) -> None:
    running = turn()
    running.play(*(TextDelta("word ") for _ in range(440)), seconds=1 / 440)
    assert running.screen.raw.count("\x1b[?2026h") <= 1 / FRAME_SECONDS + 1


def test_what_was_not_drawn_yet_is_there_at_the_end(turn: Any) -> None:
    running = turn()
    running.play(TextDelta("a"), TextDelta("b"), TextDelta("c"), Finished(reply()), seconds=0)
    assert running.screen.lines[0] == "abc"


def test_a_turn_that_fails_leaves_what_was_said_and_nothing_live(turn: Any) -> None:
    running = turn(size=lambda: "panel")
    running.play(TextDelta("half a "), TextDelta("reply"))
    running.view.close()
    assert running.screen.lines == ["half a reply"]
    assert not running.screen.screen.cursor.hidden


def test_a_pause_takes_the_live_rows_away_and_the_next_frame_brings_them_back(turn: Any) -> None:
    running = turn(size=lambda: "panel")
    running.play(TextDelta("half a reply"), Progress(STATS))
    before = running.screen.lines
    running.view.pause()
    assert running.screen.lines == []
    assert not running.screen.screen.cursor.hidden
    running.now[0] += 1
    running.view.tick()
    assert running.screen.lines[0] == "half a reply"
    assert len(running.screen.lines) == len(before)


def test_a_notice_stands_above_what_is_live(turn: Any) -> None:
    running = turn()
    running.play(Notice("a fallback\x1b[2J"), TextDelta("Hello"), Finished(reply()))
    assert running.screen.lines == ["a fallback␛[2J", "Hello", stats_line(reply())]


def test_quiet_leaves_the_reply_alone(turn: Any) -> None:
    running = turn(size=lambda: "panel", quiet=True)
    running.play(PrefillProgress(3, 3, 0), Notice("a fallback"), TextDelta("Hello"), Progress(STATS), Finished(reply()))
    assert running.screen.lines == ["Hello"]
    assert "╭" not in running.screen.raw


def test_thinking_is_shown_while_it_lasts_and_folded_after_it(turn: Any) -> None:
    running = turn()
    running.play(PrefillProgress(3, 3, 0), ThinkingDelta("What could "), ThinkingDelta("they mean?\n\x1b[2J"))
    assert running.screen.lines[0] == "What could they mean? ␛[2J"
    running.play(TextDelta("Hello"))
    assert running.screen.lines[:2] == ["thought for 2.0 s, 5 words; /thinking shows them", "Hello"]
    running.play(Finished(reply()))
    assert running.screen.lines == ["thought for 2.0 s, 5 words; /thinking shows them", "Hello", stats_line(reply())]


def test_a_call_that_came_in_one_piece_shows_the_figures_of_its_reply_while_the_tool_runs(turn: Any) -> None:
    running = turn(size=lambda: "panel")
    call = ToolCall(id="a", name="grep", arguments="{}")
    running.play(PrefillProgress(3, 3, 0), ToolCallReady(call))
    running.play(Finished(replace(reply(), tool_calls=(call,))))
    running.play(ToolStarted(call=call, arguments={}))
    shown = " ".join(running.screen.lines)
    assert "prompt   3 tokens, 3 prefilled" in shown
    assert f"reply    {STATS.decode_tok_s:.1f} tok/s, {STATS.completion_tokens} tokens" in shown
    assert "left" not in shown


def test_the_time_that_a_tool_took_is_no_part_of_the_rate_of_the_next_prompt(turn: Any) -> None:
    running = turn(size=lambda: "panel")
    running.play(PrefillProgress(3, 3, 0), TextDelta("I look."))
    running.view.tool("a", "grep", "runs")
    running.now[0] += 60
    running.view.tool("a", "grep", "ok")
    running.now[0] += 1
    running.play(PrefillProgress(203, 1003, 3))
    assert any("200 tok/s, 3.0 s left" in line for line in running.screen.lines)


def test_a_turn_with_a_tool_call_shows_its_state_and_its_time(turn: Any) -> None:
    running = turn(size=lambda: "panel")
    running.play(
        PrefillProgress(3, 3, 0), TextDelta("I look."), ToolCallReady(ToolCall(id="a", name="grep", arguments="{}"))
    )
    assert any("tool     grep: waits for an answer, 1.0 s" in line for line in running.screen.lines)
    running.view.tool("a", "grep", "runs")
    running.play(seconds=2.0)
    running.now[0] += 2
    running.view.tool("a", "grep", "ok")
    running.play(PrefillProgress(9, 9, 5), TextDelta("Found."))
    assert running.screen.lines[:3] == ["I look.", "", "Found."]
    assert any("tool     grep: ok, 2.0 s" in line for line in running.screen.lines)
    running.play(Finished(reply()))
    assert running.screen.lines == ["I look.", "", "Found.", stats_line(reply())]


def test_no_color_draws_without_styles_and_keeps_marks(turn: Any) -> None:
    running = turn(environ=XTERM | {"NO_COLOR": "1"})
    running.play(TextDelta("# Head\n\n**bold**\n"), Progress(STATS), Finished(reply()))
    assert running.screen.lines[:3] == ["# Head", "", "**bold**"]
    assert not re.search(r"\x1b\[[0-9;]*m", running.screen.raw)


def test_a_fault_while_drawing_leaves_the_cursor_below_what_was_shown(
    turn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = turn()
    running.play(TextDelta("half a line"))

    def fail(*_: object) -> None:
        raise KeyError

    monkeypatch.setattr(running.view._reply, "finish", fail)
    with pytest.raises(KeyError):
        running.view.close()
    running.view._region._stream.write("error: unexpected\n")
    assert running.screen.lines[-1] == "error: unexpected"
