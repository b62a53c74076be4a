"""What is shown of a turn while it runs: true figures, as many as fit, never more than the screen holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.api import PrefillProgress, TurnStats
from goinfer_chat.view.cells import Line, line_width, plain
from goinfer_chat.view.panels import (
    ToolRow,
    TurnFigures,
    figures_line,
    figures_panel,
    gauge,
    prefill_bar,
    seconds_text,
)

STATS = TurnStats(
    prompt_tokens=3000,
    prefill_reused_tokens=1000,
    prefill_tokens=2000,
    completion_tokens=56,
    ttft_ms=1045.2,
    decode_tok_s=38.23,
    context_used=3056,
    context_size=8192,
    kv_bytes=70_000_000,
    draft_tokens=20,
    draft_accepted=14,
    acceptance=0.7,
    tokens_per_step=1.8,
)


def reading() -> TurnFigures:
    """At 3.0: two thirds of what has to be read are read, at 500 tokens a second."""
    figures = TurnFigures(started=1.0, context_size=8192, kv_bytes_per_token=23_040)
    figures.take_prefill(PrefillProgress(1500, 3000, 1000), 2.0)
    figures.take_prefill(PrefillProgress(2000, 3000, 1000), 3.0)
    return figures


def replying() -> TurnFigures:
    figures = reading()
    figures.take_prefill(PrefillProgress(3000, 3000, 1000), 5.0)
    figures.take_stats(STATS, 6.0)
    return figures


def everything() -> TurnFigures:
    figures = replying()
    figures.tools["a"] = ToolRow("read_file", "ok", 5.0, 0.3)
    figures.tools["b"] = ToolRow("run\x1b[2J_command", "runs", 5.5)
    return figures


def text(lines: list[Line]) -> list[str]:
    return [plain(line) for line in lines]


def test_the_bar_tells_what_was_there_from_what_was_read() -> None:
    assert plain(prefill_bar(PrefillProgress(2000, 3000, 1000), 24)) == "▒" * 8 + "█" * 8 + "░" * 8
    assert plain(prefill_bar(PrefillProgress(3000, 3000, 3000), 10)) == "▒" * 10
    assert plain(prefill_bar(PrefillProgress(0, 0, 0), 10)) == "░" * 10


def test_a_gauge_is_never_empty_when_something_is_used_and_warns_near_the_end() -> None:
    assert plain(gauge(0.001, 10)) == "█" + "░" * 9
    assert plain(gauge(2.0, 10)) == "█" * 10
    assert (gauge(0.5, 10)[0].style.role, gauge(0.95, 10)[0].style.role) == ("bar", "bad")


def test_a_prefill_has_its_rate_and_the_time_left() -> None:
    figures = reading()
    assert figures.prefill_rate() == 500
    assert figures.prefill_left(3.0) == 2.0
    assert figures.prefill_left(4.5) == 0.5
    assert figures.prefill_left(99.0) == 0.0


def test_what_is_reused_is_no_work_and_has_no_rate() -> None:
    figures = TurnFigures(started=0.0)
    figures.take_prefill(PrefillProgress(100, 200, 100), 1.0)
    assert figures.prefill_rate() is None
    assert figures.prefill_left(1.0) is None


def test_the_line_shows_the_prompt_then_the_reply() -> None:
    assert plain(figures_line(reading(), 200, 3.0)) == (
        "reading the prompt: 2,000 of 3,000 tokens, 1,000 of them reused (67%) | ▒▒▒▒▒██████░░░░░ | 500 tok/s"
        " | 2.0 s left | context 24% | cache 46.1 MB"
    )
    assert plain(figures_line(replying(), 200, 6.0)) == (
        "38.2 tok/s | 56 tokens | TTFT 1,045 ms | 70% of guesses right | context 37% | cache 70.0 MB"
    )


@pytest.mark.parametrize(
    ("columns", "shown"),
    [(39, "reading: 2,000 of 3,000 (67%)"), (20, "2,000 of 3,000 (67%)"), (19, "2,000 of 3,000"), (8, "2,000 o…")],
)
def test_a_narrow_line_shows_how_far_the_prompt_is_read(columns: int, shown: str) -> None:
    assert plain(figures_line(reading(), columns, 3.0)).startswith(shown)


def test_a_tool_that_runs_is_the_first_thing_in_the_line() -> None:
    assert plain(figures_line(everything(), 60, 7.0)).startswith("run␛[2J_command: runs, 1.5 s | 38.2 tok/s")


def test_what_is_not_known_is_not_shown() -> None:
    figures = TurnFigures(started=0.0)
    assert plain(figures_line(figures, 80, 2.0)) == "waiting, 2.0 s"
    figures.take_stats(TurnStats(prompt_tokens=3, prefill_reused_tokens=0, prefill_tokens=3), 2.0)
    assert plain(figures_line(figures, 80, 2.0)) == "0 tokens"
    rows = text(figures_panel(figures, 80, 20, 2.0))
    assert not any(word in row for row in rows for word in ("guesses", "context", "TTFT", "None", "cache"))


def test_the_panel_has_every_figure() -> None:
    rows = text(figures_panel(everything(), 80, 20, 7.0))
    assert rows[0] == "╭─ working, 6.0 s"
    assert [row[0] for row in rows[1:]] == ["│"] * 5 + ["╰"]
    assert [row[2:] for row in rows[1:]] == [
        "prompt   3,000 tokens, 1,000 reused, 2,000 prefilled",
        "reply    38.2 tok/s, 56 tokens, TTFT 1,045 ms",
        "tool     run␛[2J_command: runs, 1.5 s",
        "tool     read_file: ok, 0.3 s",
        "guesses  14 of 20 right, 70%, 1.80 tokens a step",
        "context  █████████░░░░░░░░░░░░░░░  3,056 of 8,192, 37%, cache 70.0 MB",
    ]


def test_the_panel_of_a_prompt_being_read() -> None:
    rows = text(figures_panel(reading(), 80, 20, 3.0))
    assert [row[2:] for row in rows[1:]] == [
        "prompt   ▒▒▒▒▒▒▒▒████████░░░░░░░░  2,000 of 3,000, 1,000 reused",
        "         500 tok/s, 2.0 s left",
        "context  ██████░░░░░░░░░░░░░░░░░░  2,000 of 8,192, 24%, cache 46.1 MB",
    ]


def test_no_row_of_a_narrow_panel_is_a_label_alone() -> None:
    rows = [row.rstrip() for row in text(figures_panel(replying(), 20, 4, 7.0))]
    assert rows == ["prompt   3,000 toke…", "reply    38.2 tok/s", "guesses  70%", "context  ██░░░  37%"]


@pytest.mark.parametrize("columns", [1, 5, 19, 20, 21, 33, 40, 79, 200, 300])
@pytest.mark.parametrize("max_rows", [0, 1, 2, 3, 4, 5, 6, 24])
@pytest.mark.parametrize("figures", [TurnFigures(started=0.0), reading(), replying(), everything()])
def test_a_panel_fits_whatever_the_size(columns: int, max_rows: int, figures: TurnFigures) -> None:
    rows = figures_panel(figures, columns, max_rows, 7.0)
    assert len(rows) <= max_rows
    assert all(line_width(row) <= columns for row in rows)
    assert line_width(figures_line(figures, columns, 7.0)) <= columns


def test_a_second_prompt_in_a_turn_is_timed_by_itself() -> None:
    figures = replying()
    figures.take_prefill(PrefillProgress(3200, 3300, 3100), 8.0)
    assert figures.prefill_rate() == 50  # since the reply ended, at 6.0
    assert figures.stats is None
    assert not figures.replying


def test_the_memory_of_the_cache_is_known_before_the_reply() -> None:
    assert reading().kv_bytes == 2000 * 23_040
    assert replace(replying()).kv_bytes == 70_000_000


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.9, "59 s"), (119.9, "1:59 min"), (3600, "60:00 min")]
)
def test_seconds_are_short(seconds: float, shown: str) -> None:
    assert seconds_text(seconds) == shown
