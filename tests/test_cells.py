"""Text as cells: no row is wider than it may be, nothing is lost, borders rely on no width that is in doubt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goinfer_chat.view.cells import DIM, Run, cut, cut_line, is_certain, line_width, plain, width, wrap

ODD = ["❤️", "👩‍🚀", "日本語", "🇯🇵", "e\u0301", "שלום", "각", "नि", " ", "  ", "a", "word", "\n", "-", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "👍🏽"]
TEXTS = st.lists(st.sampled_from(ODD), max_size=30).map("".join)


@pytest.mark.parametrize(
    ("text", "cells"),
    [("abc", 3), ("日本", 4), ("e\u0301", 1), ("❤️", 2), ("👩‍🚀", 4), ("🇯🇵", 4), ("👍🏽", 4), ("שלום", 4), ("", 0)],
)
def test_a_width_is_the_largest_that_a_terminal_uses(text: str, cells: int) -> None:
    assert width(text) == cells


def test_where_terminals_disagree_is_known() -> None:
    assert all(map(is_certain, ("abc", "日本", "e\u0301", "é")))
    assert not any(map(is_certain, ("❤️", "👩‍🚀", "🇯🇵", "שלום")))


@given(TEXTS, st.integers(1, 20), st.integers(0, 40))
def test_rows_fit_and_lose_nothing_but_blanks_at_breaks(text: str, columns: int, split: int) -> None:
    runs = [Run(text[:split]), Run(text[split:], DIM)]
    rows = wrap(runs, columns)
    assert all(line_width(row.line) <= columns for row in rows)
    shown = "".join(plain(row.line) for row in rows)
    if columns >= 4:  # on less a wide character has no place
        assert shown.replace(" ", "") == text.replace(" ", "").replace("\n", "")
    assert [row.end for row in rows] == sorted(row.end for row in rows)
    assert rows[-1].end == len(text)


@given(TEXTS, st.integers(4, 20), st.integers(0, 5))
def test_what_is_left_at_the_end_of_a_row_wraps_like_the_whole(text: str, columns: int, row: int) -> None:
    rows = wrap([Run(text)], columns)
    if row + 1 < len(rows):
        assert wrap([Run(text)], columns, rows[row].end) == rows[row + 1 :]


def test_words_stay_whole_where_they_fit() -> None:
    assert [plain(row.line) for row in wrap([Run("one two three four")], 9)] == ["one two", "three", "four"]
    assert [plain(row.line) for row in wrap([Run("abcdefgh ij")], 3)] == ["abc", "def", "gh", "ij"]
    assert [plain(row.line) for row in wrap([Run("日本語です")], 5)] == ["日本", "語で", "す"]


@given(TEXTS.map(lambda text: text.replace("\n", "")), st.integers(0, 20))
def test_a_cut_fits_and_says_that_something_is_missing(text: str, columns: int) -> None:
    shown = cut(text, columns)
    assert width(shown) <= columns
    assert shown == text or columns == 0 or shown.endswith("…")


def test_a_cut_keeps_styles() -> None:
    assert cut_line([Run("abc", DIM), Run("def")], 5) == (Run("abc", DIM), Run("d"), Run("…"))
    assert cut_line([Run("abc", DIM), Run("def")], 6) == (Run("abc", DIM), Run("def"))
