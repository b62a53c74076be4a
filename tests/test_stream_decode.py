"""Text of a reply while it comes: never a torn character, and in the end the text of all ids."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_vocab import bpe_metadata, spm_metadata

from engine.errors import UsageError
from engine.tokenizer import Tokenizer

TEXT = "😀🇯🇵 👩\u200d🚀 é 한국어 «щ»"

TOKENIZERS = {
    "byte-level": Tokenizer.from_gguf(bpe_metadata("smollm")),
    "gemma": Tokenizer.from_gguf(spm_metadata(gemma=True)),
    "llama2": Tokenizer.from_gguf(spm_metadata(gemma=False)),
}
kinds = pytest.mark.parametrize("kind", TOKENIZERS)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*map(stream.push, ids), stream.finish()]


@kinds
def test_the_deltas_joined_are_the_text_of_all_ids(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]

    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    def check(ids: list[int]) -> None:
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)

    check()


@kinds
def test_characters_of_several_tokens_are_never_torn(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(TEXT)
    assert len(ids) > len(TEXT)
    deltas = streamed(tokenizer, ids)
    assert "".join(deltas) == TEXT
    assert all("\ufffd" not in delta for delta in deltas)
    assert b"".join(map(tokenizer.piece, ids)).removeprefix(b" ") == TEXT.encode()


@kinds
def test_a_reply_cut_inside_a_character_ends_with_one_replacement_character(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(TEXT)
    cut = 0
    for length in range(1, len(ids)):
        deltas = streamed(tokenizer, ids[:length])
        text = "".join(deltas)
        assert text == tokenizer.decode(ids[:length])
        assert "\ufffd" not in "".join(deltas[:-1])
        assert TEXT.startswith(text.removesuffix("\ufffd"))
        cut += text.endswith("\ufffd")
    assert cut >= 12


@kinds
def test_every_character_is_released_as_soon_as_it_is_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    stream = tokenizer.stream()
    so_far, data = "", b""
    for id in tokenizer.encode(TEXT):
        data += tokenizer.piece(id)
        so_far += stream.push(id)
        whole = data.decode("utf-8", errors="ignore")
        assert so_far == (whole.removeprefix(" ") if kind == "llama2" else whole)


@kinds
def test_rewinding_forgets_what_came_since(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)

    @given(ids, ids, ids)
    def check(kept: list[int], rejected: list[int], after: list[int]) -> None:
        stream = tokenizer.stream()
        start = "".join(map(stream.push, kept))
        state = stream.state()
        for id in rejected:
            stream.push(id)
        stream.rewind(state)
        assert stream.state() == state
        assert start + "".join(map(stream.push, after)) + stream.finish() == tokenizer.decode(kept + after)

    check()


def test_control_tokens_inside_a_character_do_not_tear_it() -> None:
    metadata: dict[str, Any] = bpe_metadata("smollm")
    tokenizer = TOKENIZERS["byte-level"]
    first, second = tokenizer.encode("Ж")
    end = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    stream = tokenizer.stream()
    assert [stream.push(first), stream.push(end), stream.push(second)] == ["", "", "Ж"]


def test_only_the_first_space_of_a_reply_is_the_models_own() -> None:
    tokenizer = TOKENIZERS["llama2"]
    assert "".join(streamed(tokenizer, tokenizer.encode(" the  world"))) == " the  world"
    hello = tokenizer.encode("hello")
    assert streamed(tokenizer, hello + hello) == ["hello", " hello", ""]


def test_an_id_outside_the_vocabulary_is_refused_and_changes_nothing() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    stream = tokenizer.stream()
    first, second = tokenizer.encode("Ж")
    stream.push(first)
    with pytest.raises(UsageError, match="not in the vocabulary"):
        stream.push(tokenizer.vocab_size)
    assert stream.push(second) == "Ж"
