"""How many tokens are guessed: many where it pays, none where it does not, and it finds out by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.drafters import Acceptance, match_kind
from engine.speculate import SIZES, Guard, History, Speculation, StepCosts, StepTime


def timed(costs: StepCosts, ratio: Callable[[int], float], rounds: int = 12) -> StepCosts:
    """Costs that have seen steps of all sizes on a machine where they take `ratio(rows)` plain ones."""
    for _ in range(rounds):
        costs.measured(1, 0, 100, 0.01)
        for rows in SIZES[1:]:
            costs.measured(rows, rows - 1, 100, 0.01 * ratio(rows))
    costs.measured(1, 0, 100, 0.01)
    return costs


def count_after(text: bytes, costs: StepCosts, history: History | None = None) -> int:
    return len(Speculation(history or History(), costs, frozenset()).draft(list(text), 63))


def test_a_longer_match_deserves_a_longer_draft() -> None:
    costs = timed(StepCosts(), lambda rows: 1 + rows * 0.06)
    source = bytes(range(40, 130))
    counts = [count_after(source + source[: length + 1], costs) for length in (0, 1, 3, 7, 15, 31, 63)]
    assert counts == sorted(counts)
    assert counts[0] < 4
    assert counts[-1] >= 31


def test_nothing_is_guessed_where_each_row_costs_as_much_as_a_step() -> None:
    assert count_after(b"abcd" * 30, timed(StepCosts(), lambda rows: rows)) == 0


def test_each_of_several_guesses_less_than_one_alone_would() -> None:
    costs = timed(StepCosts(), lambda rows: 1 + rows * 0.06)
    ids = list(b"abcdefgh" * 4)
    counts = [len(Speculation(History(), costs, frozenset()).draft(ids, 64 // n - 1, n)) for n in (1, 2, 4, 8)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 2 * counts[2]


def test_nothing_is_guessed_without_a_match_or_room_or_a_plain_step_to_compare_with() -> None:
    costs = timed(StepCosts(), lambda rows: 1.0)
    assert count_after(b"abcd", costs) == 0
    assert count_after(b"abcd" * 9, StepCosts()) == 0
    assert Speculation(History(), costs, frozenset()).draft(list(b"abcd" * 9), 0) == []
    assert count_after(b"abcd" * 9, costs) > 20


def test_plain_steps_are_timed_again_after_a_while_and_at_another_depth() -> None:
    costs = timed(StepCosts(), lambda rows: 1.0)
    assert not costs.due(100)
    assert costs.due(1000)
    for _ in range(StepCosts.REMEASURE):
        costs.measured(64, 63, 100, 0.01)
    assert costs.due(100)
    costs.measured(1, 0, 100, 0.01)
    assert not costs.due(100)


def test_one_slow_step_is_no_reason_to_stop_and_an_old_measurement_does_not_count_for_ever() -> None:
    costs = timed(StepCosts(), lambda rows: 1 + rows * 0.05)
    before = costs.drafted(6)
    costs.measured(32, 31, 100, 5.0)
    costs.measured(1, 0, 100, 5.0)
    assert costs.drafted(6) == pytest.approx(before)
    slow = timed(StepCosts(), lambda rows: rows)
    assert count_after(b"abcd" * 30, slow) == 0
    for _ in range(512 * 6):
        slow.measured(1, 0, 100, 0.01)
    assert count_after(b"abcd" * 30, slow) > 0  # tried again


def test_odds_are_learned_from_tokens_that_nobody_guessed() -> None:
    history, costs = History(), StepCosts()  # no plain step was timed: nothing is guessed
    ids = list(b"abc" * 3)
    for _ in range(60):
        speculation = Speculation(history, costs, frozenset())
        assert speculation.draft(ids, 63) == []
        speculation.learn([120], 0, StepTime(0.01, 1, 1))  # never what the match promises
    assert history.acceptance.chance(match_kind(6)) < 0.3
    assert history.acceptance.chance(match_kind(1)) == Acceptance().chance(match_kind(1))


def test_drafts_that_come_true_make_the_next_ones_longer() -> None:
    acceptance = Acceptance()
    for kind in map(match_kind, (3, 12, 50, 1000)):
        for right in (True, False):
            before = acceptance.chance(kind)
            for _ in range(100):
                acceptance.observe(kind, right)
            assert (acceptance.chance(kind) > before) == right
    assert match_kind(1000) == match_kind(64)


def test_guessing_stops_for_a_while_when_it_loses_time_and_longer_when_it_does_again() -> None:
    guard = Guard()

    def pause() -> int:
        for _ in range(Guard.WINDOW - 1):
            assert not guard.drafted(-0.1, 1.0)
        assert guard.drafted(-0.1, 1.0)
        length = 0
        while guard.pausing:
            guard.undrafted()
            length += 1
        return length

    assert [pause() for _ in range(3)] == [32, 64, 128]
    for _ in range(Guard.WINDOW):
        assert not guard.drafted(0.5, 1.0)
    assert pause() == 32


def test_a_reply_that_guessing_makes_slower_says_so_and_goes_on_plainly() -> None:
    history, costs = History(), timed(StepCosts(), lambda rows: 1 + rows * 0.01)
    speculation = Speculation(history, costs, frozenset())
    ids, drafted = list(b"abcd" * 9), []
    for _ in range(Guard.WINDOW + 40):
        draft = speculation.draft(ids, 63)
        drafted.append(len(draft))
        speculation.learn(ids[-4:-3], len(draft), StepTime(0.1 if draft else 0.01, 1 + len(draft), 1))
        ids.append(ids[-4])
        history.acceptance = Acceptance()
    assert all(drafted[: Guard.WINDOW])
    assert drafted[Guard.WINDOW : Guard.WINDOW + 32] == [0] * 32
    assert any(drafted[Guard.WINDOW + 32 :])
    assert speculation.num_pauses == 1
    assert speculation.saved_seconds < 0
