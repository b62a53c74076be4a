"""The index of what a conversation has said, against a search through all of it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from engine.ngram import LONGEST, ORDERS, NgramIndex

ids_of_few = st.lists(st.integers(0, 2), max_size=90)
ids_of_many = st.lists(st.integers(0, 150_000), max_size=40)


def longest_match(ids: Sequence[int]) -> int:
    """Length of the longest run that ends at the last id and also earlier, by trying all."""
    n = len(ids)
    return max(
        (next((k for k in range(end) if ids[end - 1 - k] != ids[n - 1 - k]), end) for end in range(1, n)), default=0
    )


def contents(index: NgramIndex) -> object:
    return index.ids, index._hashes, index._orders


def built(ids: Sequence[int]) -> NgramIndex:
    index = NgramIndex()
    index.extend(ids)
    return index


@given(ids=st.one_of(ids_of_few, ids_of_many), asked=st.sets(st.integers(0, 90)))
def test_a_match_is_real_and_as_long_as_an_indexed_run_can_tell(ids: list[int], asked: set[int]) -> None:
    index = NgramIndex()
    for position, token in enumerate(ids):
        index.extend([token])
        if position not in asked:  # a match is looked for now and then, in between it goes on by itself
            continue
        known, found = ids[: position + 1], index.match()
        longest = min(longest_match(known), LONGEST)
        assert found <= longest
        assert found >= max((order for order in ORDERS if order <= longest), default=0)
        if found:
            source = index._source
            assert source <= position
            assert known[source - found : source] == known[len(known) - found :]


@given(ids=ids_of_few)
def test_of_several_occurrences_of_an_indexed_run_the_most_recent_is_taken(ids: list[int]) -> None:
    found = built(ids).match()
    index = built(ids)
    assert index.match() == found
    if found:
        run, order = ids[len(ids) - found :], max(order for order in ORDERS if order <= found)
        last = max(end for end in range(order, len(ids)) if ids[end - order : end] == run[found - order :])
        assert index._source == last


@given(ids=ids_of_few, count=st.integers(1, 40))
def test_a_guess_is_what_followed_and_past_the_end_goes_on_from_itself(ids: list[int], count: int) -> None:
    index = built(ids)
    found = index.match()
    guess, whole = index.guess(count), list(ids)
    assert len(guess) == (count if found else 0)
    for token in guess:
        assert token == whole[index._source + len(whole) - len(ids)]
        whole.append(token)


def test_a_long_copy_is_followed_beyond_the_longest_indexed_run() -> None:
    source = [*range(200)]
    index = built([*source, *source[:5]])
    assert index.match() == 5
    for position in range(5, 150):
        assert index.guess(1) == [source[position]]
        index.extend([source[position]])
    assert index.match() == LONGEST
    assert index.guess(60) == [*source[150:], *source[:10]]


def test_a_source_that_differs_further_back_does_not_count_over_one_that_agrees() -> None:
    index = built([1, 2, 3, 4, 9, 8, 3, 4, 7, 7, 1, 2, 3])
    index.match()
    index.extend([4])  # 3 4 was seen last before 7, but 1 2 3 4 before 9
    assert index.match() == 4
    assert index.guess(1) == [9]


@given(ids=ids_of_few, others=ids_of_few, kept=st.integers(0, 90))
def test_what_was_taken_out_leaves_no_trace(ids: list[int], others: list[int], kept: int) -> None:
    index = built([*ids[:kept], *others])
    index.match()
    index.follow(ids)
    assert contents(index) == contents(built(ids))
    assert index.match() == built(ids).match()


def test_an_empty_index_guesses_nothing() -> None:
    index = NgramIndex()
    assert (index.match(), index.guess(5), len(index)) == (0, [], 0)
    index.follow([])
    index.extend([7])
    assert (index.match(), index.guess(5)) == (0, [])
