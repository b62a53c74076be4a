"""Memo: what is kept, within which bound, and that a tokenizer says the same with it."""

from __future__ import annotations

from call_templates import FAMILIES
from hypothesis import given
from hypothesis import strategies as st

from engine.memo import Memo
from engine.prompt_marks import Guard


def test_what_is_asked_again_is_made_once_and_the_longest_unused_goes_first() -> None:
    made: list[str] = []

    def make(key: str) -> str:
        made.append(key)
        return key.upper()

    memo: Memo[str, str] = Memo(make, len, limit=6)
    assert [memo.get(key) for key in ("aa", "bb", "cc", "aa", "dd")] == ["AA", "BB", "CC", "AA", "DD"]
    assert made == ["aa", "bb", "cc", "dd"]
    memo.get("aa")  # was asked for after bb
    memo.get("bb")
    assert made == ["aa", "bb", "cc", "dd", "bb"]
    assert memo.num_kept == 3


def test_what_is_larger_than_the_bound_is_made_and_not_kept() -> None:
    memo: Memo[str, str] = Memo(str.upper, len, limit=6)
    memo.get("aa")
    assert memo.get("a" * 7) == "A" * 7
    assert memo.num_kept == 1


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_ids_are_the_same_when_a_text_comes_again(texts: list[str]) -> None:
    tokenizer = FAMILIES["qwen2.5"].tokenizer
    first = [tokenizer.encode(text) for text in texts]
    for ids in first:
        ids.append(0)  # a caller's list is its own
    assert [[*tokenizer.encode(text), 0] for text in texts] == first


TOKENS = ("<|im_end|>", "</s>", "[X]", "ab", "ba")


@given(st.text(alphabet="<|im_end>/s[X]ab ", max_size=14))
def test_a_guard_sees_every_spelling_that_an_end_of_a_text_could_begin_or_end(text: str) -> None:
    ends = any(text.startswith(token[n:]) for token in TOKENS for n in range(1, len(token)))
    starts = any(text.endswith(token[:n]) for token in TOKENS for n in range(1, len(token)))
    inside = any(token in text for token in TOKENS)
    guard = Guard(TOKENS)
    assert guard.finds(text) == (ends or starts or inside)
    marked = guard.protected(text, "#")
    assert (marked.startswith("#"), marked.endswith("#")) == ((ends, starts) if text else (False, False))
