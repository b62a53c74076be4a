"""/stats: a chart of every figure that is known, and what the turns come to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_render import STATS

from engine.api import TurnStats
from goinfer_chat.view.cells import width
from goinfer_chat.view.stats_panel import stats_panel, totals_of

FIRST = replace(
    STATS, prompt_tokens=1000, prefill_reused_tokens=0, prefill_tokens=1000, prefill_tok_s=500.0, ttft_ms=2000.0
)
SECOND = replace(
    STATS, prompt_tokens=1100, prefill_reused_tokens=1000, prefill_tokens=100, prefill_tok_s=250.0, ttft_ms=400.0
)


def test_the_seconds_saved_are_what_reading_again_would_have_taken() -> None:
    totals = totals_of([FIRST, SECOND])
    assert totals.saved_seconds == pytest.approx(1000 * (1000 / 500 + 100 / 250) / 1100)
    assert (totals.prompt_tokens, totals.reused_tokens, totals.read_tokens, totals.reply_tokens) == (
        2100,
        1000,
        1100,
        4,
    )


def test_what_is_not_known_is_not_guessed() -> None:
    unknown = TurnStats(prompt_tokens=3, prefill_reused_tokens=2, prefill_tokens=1)
    totals = totals_of([unknown])
    assert (totals.saved_seconds, totals.guessed) == (None, None)
    shown = stats_panel([unknown], 80)
    assert not any(word in shown for word in ("TTFT", "tok/s", "guesses", "None", "saved", "context"))


def test_each_figure_has_a_chart_with_a_column_for_each_turn() -> None:
    guessed = replace(SECOND, draft_tokens=20, draft_accepted=14, acceptance=0.7)
    assert stats_panel([FIRST, SECOND, guessed], 71).splitlines() == [
        "           turns 1 to 3                low / high / last",
        "TTFT       █▂▂                         400 ms / 2,000 ms / 400 ms",
        "reused, %  ▁██                         0% / 91% / 91%",
        "reused     ▁██                         0 / 1,000 / 1,000",
        "prefilled  █▁▁                         100 / 1,000 / 100",
        "tok/s      ███                         38.2 / 38.2 / 38.2",
        "acceptance ··█                         70% / 70% / 70%",
        "prompts    3,200 tokens, 2,000 reused (62%), about 4.7 s saved",
        "prefilled  1,200 tokens",
        "replies    6 tokens in 3 turns",
        "guesses    14 of 20 right (70%)",
        "context    3,022 of 8,192 (37%), cache 0.0 MB",
    ]


def test_of_a_long_conversation_the_last_turns_are_charted() -> None:
    lines = stats_panel([FIRST] * 500, 80).splitlines()
    assert "turns 466 to 500" in lines[0]
    assert lines[1].count("█") == 35


@pytest.mark.parametrize("columns", [1, 20, 40, 80, 300])
def test_no_line_is_wider_than_the_screen(columns: int) -> None:
    assert all(width(line) <= columns for line in stats_panel([FIRST, SECOND] * 50, columns).splitlines())
