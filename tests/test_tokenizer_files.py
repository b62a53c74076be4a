"""What a tokenizer takes from its file: which tokens end a reply and begin a text; and files that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiny_vocab import NORMAL, USER_DEFINED, bpe_metadata, gemma4_metadata, spm_metadata
from tokenizer_metadata import add_tokens, ids_of

from engine.errors import ModelFileError, UnsupportedModelError
from engine.tokenizer import Tokenizer

# -- the ends of a reply -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("smollm2-135m", {"<|im_end|>", "<|endoftext|>"}),
        pytest.param("qwen2.5-coder-0.5b", {"<|im_end|>", "<|endoftext|>"}, marks=pytest.mark.slow),
        pytest.param("gemma-3-270m", {"<end_of_turn>", "<eos>"}, marks=pytest.mark.slow),
    ],
)
def test_the_end_tokens_of_real_models(name: str, ends: set[str], metadata_of: Callable[[str], dict[str, Any]]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of(name))
    assert {tokenizer.token_text(id) for id in tokenizer.end_ids} == ends
    assert tokenizer.notices == ()


def test_the_end_of_turn_ends_a_reply_also_where_eos_is_only_the_end_of_text() -> None:
    metadata = bpe_metadata("qwen2")
    end_of_text, end_of_turn = ids_of(metadata, "<|endoftext|>", "<|im_end|>")
    tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.eos_token_id": end_of_text})
    assert tokenizer.eos_id == end_of_text
    assert end_of_turn in tokenizer.end_ids


def test_an_end_of_turn_that_the_file_calls_a_normal_token_is_a_control_token() -> None:
    metadata = bpe_metadata("qwen2")
    (end,) = ids_of(metadata, "<|im_end|>")
    metadata["tokenizer.ggml.token_type"] = [NORMAL] * len(metadata["tokenizer.ggml.tokens"])
    tokenizer = Tokenizer.from_gguf(metadata)
    assert end in tokenizer.end_ids
    assert tokenizer.piece(end) == b""
    assert end not in tokenizer.encode("<|im_end|>")
    assert tokenizer.encode("<|im_end|>", control=True) == [end]


def test_strike_through_is_no_end_token_where_it_is_text() -> None:
    metadata = add_tokens(spm_metadata(gemma=True), ("</s>", USER_DEFINED))
    (strike,) = ids_of(metadata, "</s>")
    tokenizer = Tokenizer.from_gguf(metadata)
    assert strike not in tokenizer.end_ids
    assert tokenizer.decode(tokenizer.encode("</s>")) == "</s>"


def test_id_0_is_an_id() -> None:
    metadata = bpe_metadata("smollm")
    metadata |= {
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert (tokenizer.eos_id, tokenizer.bos_id) == (0, 0)
    assert 0 in tokenizer.end_ids
    assert tokenizer.notices == ()


def test_all_end_keys_of_a_file_count() -> None:
    metadata = bpe_metadata("llama-bpe") | {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert {7, 9, metadata["tokenizer.ggml.eos_token_id"]} <= tokenizer.end_ids


@pytest.mark.parametrize(
    ("template", "end"),
    [("{{ 'x<|endoftext|>' }}", "<|endoftext|>"), ("{{ 'x<|im_end|>' }}", "<|im_end|>"), ("", "<|im_end|>")],
)
def test_without_any_end_key_the_end_comes_from_the_template_or_the_vocabulary_with_a_notice(
    template: str, end: str
) -> None:
    metadata = bpe_metadata("smollm")
    del metadata["tokenizer.ggml.eos_token_id"]
    tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.chat_template": template})
    assert tokenizer.eos_id == ids_of(metadata, end)[0]
    assert set(ids_of(metadata, "<|im_end|>", "<|endoftext|>")) == tokenizer.end_ids
    (notice,) = tokenizer.notices
    assert end in notice


def test_a_vocabulary_without_any_end_says_so() -> None:
    metadata = spm_metadata(gemma=False)
    del metadata["tokenizer.ggml.eos_token_id"]
    metadata["tokenizer.ggml.tokens"] = ["<unk>", "<s>", "<nothing>", *metadata["tokenizer.ggml.tokens"][3:]]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.eos_id is None
    assert tokenizer.end_ids == frozenset()
    assert "no end token" in tokenizer.notices[0]


def test_bos_is_wanted_as_the_file_or_else_the_kind_of_tokenizer_says() -> None:
    for metadata, wanted in [
        (bpe_metadata("qwen2"), False),
        (bpe_metadata("llama-bpe"), True),
        (spm_metadata(gemma=True), True),
    ]:
        del metadata["tokenizer.ggml.add_bos_token"]
        assert Tokenizer.from_gguf(metadata).add_bos is wanted
        for stated in (True, False):
            assert Tokenizer.from_gguf({**metadata, "tokenizer.ggml.add_bos_token": stated}).add_bos is stated


# -- files that cannot be used -------------------------------------------------------------------------------------


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'klingon'.*llama-bpe.*qwen2"):
        Tokenizer.from_gguf(bpe_metadata("klingon"))


def test_an_unknown_kind_of_tokenizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'t5'.*gpt2.*llama"):
        Tokenizer.from_gguf(bpe_metadata("qwen2") | {"tokenizer.ggml.model": "t5"})


def test_a_missing_pre_tokenizer_is_llama_cpps_default_with_a_notice() -> None:
    metadata = bpe_metadata("default")
    named = Tokenizer.from_gguf(metadata)
    del metadata["tokenizer.ggml.pre"]
    unnamed = Tokenizer.from_gguf(metadata)
    text = "x=1234; hello!!"
    assert unnamed.encode(text) == named.encode(text)
    assert named.notices == ()
    assert "pre-tokenizer" in unnamed.notices[0]


BROKEN: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "no kind": (lambda: bpe_metadata("qwen2"), {"model": None}),
    "kind is a number": (lambda: bpe_metadata("qwen2"), {"model": 3}),
    "no tokens": (lambda: bpe_metadata("qwen2"), {"tokens": None}),
    "tokens empty": (lambda: bpe_metadata("qwen2"), {"tokens": []}),
    "tokens are numbers": (lambda: bpe_metadata("qwen2"), {"tokens": [1, 2]}),
    "tokens are a text": (lambda: bpe_metadata("qwen2"), {"tokens": "abc"}),
    "a token twice": (lambda: bpe_metadata("qwen2"), {"tokens": ["a", "a"], "token_type": [1, 1]}),
    "types too short": (lambda: bpe_metadata("qwen2"), {"token_type": [1, 1]}),
    "types are fractions": (lambda: bpe_metadata("qwen2"), {"token_type": np.ones(308, np.float32)}),
    "types are a number": (lambda: bpe_metadata("qwen2"), {"token_type": 1}),
    "types are ragged": (lambda: bpe_metadata("qwen2"), {"token_type": np.ones((2, 2), np.int32)}),
    "no merges": (lambda: bpe_metadata("qwen2"), {"merges": None}),
    "a merge of unknown tokens": (lambda: bpe_metadata("qwen2"), {"merges": ["he llo", "QQ ZZ"]}),
    "a merge of one": (lambda: bpe_metadata("qwen2"), {"merges": ["he"]}),
    "pre is a list": (lambda: bpe_metadata("qwen2"), {"pre": ["qwen2"]}),
    "eos past the end": (lambda: bpe_metadata("qwen2"), {"eos_token_id": 308}),
    "bos negative": (lambda: bpe_metadata("qwen2"), {"bos_token_id": -1}),
    "eos is a text": (lambda: bpe_metadata("qwen2"), {"eos_token_id": "2"}),
    "eos is true": (lambda: bpe_metadata("qwen2"), {"eos_token_id": True}),
    "BOS wanted but not named": (lambda: bpe_metadata("qwen2"), {"bos_token_id": None, "add_bos_token": True}),
    "add_bos is a number": (lambda: bpe_metadata("qwen2"), {"add_bos_token": 1}),
    "no merges of pieces": (gemma4_metadata, {"merges": None}),
    "a merge of one piece": (gemma4_metadata, {"merges": ["he"]}),
    "no scores": (lambda: spm_metadata(gemma=True), {"scores": None}),
    "scores too long": (lambda: spm_metadata(gemma=True), {"scores": [0.0] * 1000}),
    "a score that is no number": (lambda: spm_metadata(gemma=True), {"scores": [float("nan")] * 380}),
    "scores are texts": (lambda: spm_metadata(gemma=True), {"scores": ["0"] * 380}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_tables_that_contradict_each_other_are_refused(case: str) -> None:
    make, changes = BROKEN[case]
    metadata = make() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\."):
        Tokenizer.from_gguf(metadata)


def test_the_tables_may_be_arrays_of_any_integer_type() -> None:
    metadata = bpe_metadata("qwen2")
    plain = Tokenizer.from_gguf(metadata)
    for dtype in (np.uint8, np.int32, np.uint64):
        array = np.array(metadata["tokenizer.ggml.token_type"], dtype)
        tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.token_type": array})
        assert tokenizer.control_ids == plain.control_ids
