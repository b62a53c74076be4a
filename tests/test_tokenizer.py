"""Text to ids and back: llama.cpp's ids, the reference pipelines of `tokenizers`, and SentencePiece by brute force."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_vocab import CONTROL, NORMAL, USER_DEFINED, bpe_metadata, gemma4_metadata, spm_metadata
from tokenizer_metadata import add_tokens, ids_of
from tokenizers import normalizers, pre_tokenizers

from engine.bpe import PRE_TOKENIZERS
from engine.errors import ModelFileError, UsageError
from engine.tokenizer import Spellings, Tokenizer

MODELS = [
    "smollm2-135m",
    pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.slow),
    pytest.param("qwen2.5-coder-1.5b", marks=pytest.mark.slow),
    pytest.param("gemma-3-270m", marks=pytest.mark.slow),
]
AWKWARD_TEXTS = [
    "->",
    "(x):\n",
    "12345",
    "3.14e-10",
    "don't DON'T we'Ll",
    "   \n\t",
    " leading",
    "\u00e9",
    "e\u0301",
    "हिन्दी में लिखना",
    "한국어 \u1112\u1161\u11ab",
    "\u200d",
    "<|im_start|>x<|im_end|><tool_call></tool_call>",
    "\x00\x7f\x80\ufffd\ufeff\U0010ffff",
    "a  b   c\n\n\n\nd\r\n\r\n e",
]


def random_texts(count: int) -> list[str]:
    """Unicode strings of all planes, lengths 0 to 40; the same ones each time."""
    rng = random.Random(7)
    ranges = [
        (0x20, 0x7F),
        (0x20, 0x7F),
        (0xA0, 0x250),
        (0x300, 0x370),
        (0x900, 0x980),
        (0x4E00, 0x9FFF),
        (1, 0x10FFFF),
    ]

    def character() -> str:
        code = rng.randint(*rng.choice(ranges))
        return chr(code) if not 0xD800 <= code < 0xE000 else " "

    return ["".join(character() for _ in range(rng.randint(0, 40))) for _ in range(count)]


# -- the ids of llama.cpp ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_ids_equal_those_of_llama_cpp_with_control_tokens_parsed_and_as_text(
    name: str, metadata_of: Callable[[str], dict[str, Any]], golden: Callable[[str], dict[str, Any]]
) -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of(name))
    cases = golden(name)["tokenize"]
    assert len(cases) >= 19
    for case in cases:
        assert tokenizer.encode(case["text"], control=True) == case["special"], case["text"]
        assert tokenizer.encode(case["text"]) == case["plain"], case["text"]


@pytest.mark.parametrize("name", MODELS)
def test_replies_decode_to_the_text_of_llama_cpp(
    name: str, metadata_of: Callable[[str], dict[str, Any]], golden: Callable[[str], dict[str, Any]]
) -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of(name))
    for case in golden(name)["greedy"]:
        assert tokenizer.decode(case["ids"]) == case["text"]


# -- the reference pipelines of the models' own tokenizer.json -----------------------------------------------------


def reference(
    metadata: dict[str, Any], pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None
) -> tokenizers.Tokenizer:
    tokens, types = metadata["tokenizer.ggml.tokens"], list(metadata["tokenizer.ggml.token_type"])
    vocab = {text: id for id, text in enumerate(tokens) if types[id] == NORMAL}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({**vocab, **{t: i for i, t in enumerate(tokens)}}, merges))
    made.pre_tokenizer = pre
    if normalizer is not None:
        made.normalizer = normalizer
    added = [(text, kind) for text, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    made.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text, kind in added if kind == CONTROL])
    made.add_tokens([tokenizers.AddedToken(text, normalized=False) for text, kind in added if kind == USER_DEFINED])
    return made


def check_against(reference: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    for text in AWKWARD_TEXTS + random_texts(200):
        reference.encode_special_tokens = False
        assert tokenizer.encode(text, control=True) == reference.encode(text).ids, text
        reference.encode_special_tokens = True
        assert tokenizer.encode(text) == reference.encode(text).ids, text


def smollm_pipeline() -> pre_tokenizers.PreTokenizer:
    """As the model's tokenizer.json has it: single digits, then GPT-2's own splitting."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def qwen2_pipeline() -> pre_tokenizers.PreTokenizer:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )


def test_smollm_ids_equal_the_reference_pipeline(metadata_of: Callable[[str], dict[str, Any]]) -> None:
    metadata = metadata_of("smollm2-135m")
    check_against(reference(metadata, smollm_pipeline(), None), Tokenizer.from_gguf(metadata))


@pytest.mark.slow
def test_qwen_ids_equal_the_reference_pipeline(metadata_of: Callable[[str], dict[str, Any]]) -> None:
    metadata = metadata_of("qwen2.5-coder-0.5b")
    check_against(reference(metadata, qwen2_pipeline(), normalizers.NFC()), Tokenizer.from_gguf(metadata))


def test_small_vocabularies_split_as_the_reference_pipelines() -> None:
    smollm, qwen = bpe_metadata("smollm"), bpe_metadata("qwen2")
    check_against(reference(smollm, smollm_pipeline(), None), Tokenizer.from_gguf(smollm))
    check_against(reference(qwen, qwen2_pipeline(), normalizers.NFC()), Tokenizer.from_gguf(qwen))


def test_long_texts_have_the_ids_that_short_ones_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take another way through `tokenizers`."""
    for pre in ("smollm", "qwen2", "llama-bpe"):
        coder = Tokenizer.from_gguf(bpe_metadata(pre))._coder
        for text in AWKWARD_TEXTS + random_texts(100):
            ids = coder.encode(text, continues=False)
            with monkeypatch.context() as patch:
                patch.setattr("engine.bpe._SHORT_TEXT", 0)
                assert coder.encode(text, continues=False) == ids


def test_qwen_normalizes_to_nfc_and_smollm_does_not() -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    qwen, smollm = Tokenizer.from_gguf(bpe_metadata("qwen2")), Tokenizer.from_gguf(bpe_metadata("smollm"))
    assert qwen.encode(decomposed) == qwen.encode(composed)
    assert smollm.encode(decomposed) != smollm.encode(composed)
    assert smollm.decode(smollm.encode(decomposed)) == decomposed


def test_llama3_takes_a_word_that_is_a_token_before_any_merge() -> None:
    # "ello" cannot be reached: "he" and "ll" are joined first.
    metadata = add_tokens(bpe_metadata("llama-bpe"), ("ello", NORMAL))
    (ello,) = ids_of(metadata, "ello")
    assert Tokenizer.from_gguf(metadata).encode("ello") == [ello]
    assert Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": "qwen2"}).encode("ello") != [ello]


def test_numbers_are_grouped_as_the_pre_tokenizer_says() -> None:
    metadata = bpe_metadata("x")
    metadata["tokenizer.ggml.tokens"] = metadata["tokenizer.ggml.tokens"] + ["12", "123", "1234"]
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"] + [NORMAL] * 3
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"] + ["1 2", "12 3", "123 4"]
    expected = {"gpt-2": ["1234"], "llama-bpe": ["123", "4"], "smollm": list("1234"), "qwen2": list("1234")}
    for pre, pieces in expected.items():
        tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": pre})
        assert tokenizer.encode("1234") == ids_of(metadata, *pieces), pre


# -- SentencePiece -------------------------------------------------------------------------------------------------


def merged_by_brute_force(text: str, metadata: dict[str, Any]) -> list[int]:
    """The definition: of all neighbours that are a piece together join the best, the leftmost of equals, and repeat."""
    types = metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    tokens = metadata["tokenizer.ggml.tokens"]
    pieces = {text: id for id, text in enumerate(tokens) if types[id] == NORMAL}
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[pieces[a + b]], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in pieces]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    bytes_of = [tokens.index(f"<0x{byte:02X}>") for byte in range(256)]
    return [id for part in parts for id in ([pieces[part]] if part in pieces else [bytes_of[b] for b in part.encode()])]


@example("a> the >  t")
@example("eeee he eee eeeee")
@given(st.text(st.sampled_from("the world >is\té日本") | st.characters(exclude_categories=["Cs"]), max_size=40))
def test_sentencepiece_joins_the_best_pair_first_and_the_leftmost_of_equals(text: str) -> None:
    metadata = spm_metadata(gemma=True)
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    # Equal scores, a piece that overlaps itself, and a piece that spans the start of a word.
    extra = {"ll": scores["he"], "ee": -1.0, "eee": -0.5, ">▁": -0.2, ">▁t": -0.1}
    metadata["tokenizer.ggml.tokens"] = [t for t in scores if t not in extra] + list(extra)
    by_text = dict.fromkeys(metadata["tokenizer.ggml.tokens"], -1000.0) | scores | extra
    metadata["tokenizer.ggml.scores"] = [by_text[text] for text in metadata["tokenizer.ggml.tokens"]]
    kinds = dict(zip(scores, metadata["tokenizer.ggml.token_type"], strict=True))
    metadata["tokenizer.ggml.token_type"] = [kinds.get(text, NORMAL) for text in metadata["tokenizer.ggml.tokens"]]
    text = text.replace("\n\n", "")  # a user-defined token, cut out before anything is joined
    assert Tokenizer.from_gguf(metadata).encode(text) == merged_by_brute_force(text, metadata)


@pytest.mark.slow
def test_gemma_ids_equal_the_brute_force_definition(metadata_of: Callable[[str], dict[str, Any]]) -> None:
    metadata = metadata_of("gemma-3-270m")
    tokenizer = Tokenizer.from_gguf(metadata)
    texts = ["</a> </b>", "aaaaaaaaaa", "the  quick", "日本語のテキスト", *random_texts(20)]
    plain = {
        **metadata,
        "tokenizer.ggml.token_type": metadata["tokenizer.ggml.token_type"].tolist(),
        "tokenizer.ggml.scores": metadata["tokenizer.ggml.scores"].tolist(),
    }
    user_defined = Spellings(
        (t, 0) for t, k in zip(plain["tokenizer.ggml.tokens"], plain["tokenizer.ggml.token_type"]) if k == 4
    )
    checked = 0
    for text in texts:
        if not list(user_defined.find(text)):
            assert tokenizer.encode(text) == merged_by_brute_force(text, plain), text
            checked += 1
    assert checked > 10


def test_a_space_is_put_in_front_of_text_that_starts_or_follows_a_control_token() -> None:
    metadata = spm_metadata(gemma=False)
    tokenizer = Tokenizer.from_gguf(metadata)
    hello, world, end, he, llo = ids_of(metadata, "▁hello", "▁world", "</s>", "he", "ll")
    assert tokenizer.encode("hello") == [hello]
    assert tokenizer.encode("hello</s>world", control=True) == [hello, end, world]
    assert tokenizer.encode("hello", continues=True)[:2] == [he, llo]
    assert tokenizer.encode("</s>world", control=True, continues=True) == [end, world]
    assert tokenizer.encode("") == []
    assert Tokenizer.from_gguf(spm_metadata(gemma=True)).encode("hello")[0] != hello


def test_without_byte_tokens_a_character_that_is_no_piece_is_the_unknown_token() -> None:
    metadata = spm_metadata(gemma=False)
    kept = [id for id, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind != 6]
    for key in ("tokens", "scores", "token_type"):
        metadata[f"tokenizer.ggml.{key}"] = [metadata[f"tokenizer.ggml.{key}"][id] for id in kept]
    unknown, hello, space = ids_of(metadata, "<unk>", "▁hello", "▁")
    assert Tokenizer.from_gguf(metadata).encode("hello ☃") == [hello, space, unknown]
    del metadata["tokenizer.ggml.unknown_token_id"]
    metadata["tokenizer.ggml.tokens"] = ["<none>", *metadata["tokenizer.ggml.tokens"][1:]]
    with pytest.raises(ModelFileError, match="0 of 256 byte tokens"):
        Tokenizer.from_gguf(metadata)


# -- Gemma 4: pieces and ranked merges -----------------------------------------------------------------------------


def test_gemma4_ids_and_text_equal_those_of_llama_cpp() -> None:
    """Of llama-cpp-python 0.3.36 with this vocabulary; `control_ids` with control tokens parsed."""
    tokenizer = Tokenizer.from_gguf(gemma4_metadata())
    cases = json.loads((Path(__file__).parent / "data" / "gemma4-ids.json").read_text())
    assert len(cases) > 15
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["text_ids"], case["text"]
        assert tokenizer.encode(case["text"], control=True) == case["control_ids"], case["text"]
        assert tokenizer.decode(case["text_ids"]) == case["decoded"]


def test_gemma4_joins_in_the_order_of_the_merges_and_no_score_counts() -> None:
    metadata = gemma4_metadata()
    others = [merge for merge in metadata["tokenizer.ggml.merges"] if merge != "h e"]
    tokenizer = Tokenizer.from_gguf(metadata)
    late = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.merges": [*others, "h e"]})
    assert tokenizer.encode("her") == ids_of(metadata, "he", "r")
    assert late.encode("her") == ids_of(metadata, "h", "er")
    del metadata["tokenizer.ggml.scores"]
    assert Tokenizer.from_gguf(metadata).encode("hello world") == tokenizer.encode("hello world")


def test_gemma4_ends_its_turns_and_its_calls_and_always_wants_bos() -> None:
    metadata = gemma4_metadata()
    for stated in (True, False):
        tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.add_bos_token": stated})
        assert tokenizer.add_bos
        assert set(ids_of(metadata, "<eos>", "<turn|>", "<|tool_response>")) == tokenizer.end_ids


# -- control tokens and user-defined tokens ------------------------------------------------------------------------


def tool_vocabulary() -> dict[str, Any]:
    return add_tokens(bpe_metadata("qwen2"), ("<tool_call>", USER_DEFINED), ("<tool_call>x", USER_DEFINED))


def all_vocabularies() -> list[dict[str, Any]]:
    spm = [spm_metadata(gemma=True), spm_metadata(gemma=False), gemma4_metadata()]
    return [tool_vocabulary(), bpe_metadata("llama-bpe"), *spm]


SPELLINGS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<tool_call>",
    "<s>",
    "</s>",
    "<bos>",
    "<end_of_turn>",
    "<unk>",
    "<0x0A>",
    "<|",
    "|>",
]


@pytest.mark.parametrize("metadata", all_vocabularies(), ids=["qwen2", "llama3", "gemma", "llama2", "gemma4"])
def test_text_never_becomes_a_control_token(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.control_ids

    @given(st.lists(st.sampled_from(SPELLINGS) | st.text(max_size=4), max_size=8).map("".join))
    def check(text: str) -> None:
        assert tokenizer.control_ids.isdisjoint(tokenizer.encode(text))

    check()


def test_a_merge_does_not_make_a_control_token_of_text() -> None:
    metadata = add_tokens(spm_metadata(gemma=False), ("he\u200b", CONTROL))
    # An end of turn is one whatever its type.
    metadata = add_tokens(metadata, *[("<|end|>"[:length], NORMAL) for length in range(2, 8)])
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in ("he\u200b", "<|end|>"):
        (control,) = ids_of(metadata, text)
        assert control not in tokenizer.encode(text)
        assert control in tokenizer.encode(text, control=True)


def test_user_defined_tokens_are_found_in_text_the_longest_first() -> None:
    metadata = tool_vocabulary()
    tokenizer = Tokenizer.from_gguf(metadata)
    short, long = ids_of(metadata, "<tool_call>", "<tool_call>x")
    (x, y) = ids_of(metadata, "x", "y")
    for control in (False, True):
        assert tokenizer.encode("<tool_call>y<tool_call>xy", control=control) == [short, y, long, y]
    assert tokenizer.encode("x<tool_call>") == [x, short]


def test_a_mark_keeps_a_spelling_text_and_is_dropped() -> None:
    metadata = tool_vocabulary()
    tokenizer = Tokenizer.from_gguf(metadata)
    end, call = ids_of(metadata, "<|im_end|>", "<tool_call>")
    marked = "<\ufdd0|im_end|> <|im_end|><\ufdd0tool_call>"
    ids = tokenizer.encode(marked, control=True, mark="\ufdd0")
    assert ids.count(end) == 1
    assert call not in ids
    assert tokenizer.decode(ids) == "<|im_end|> <tool_call>"


@example(["||", "||<"], "||")
@given(
    st.lists(st.text("ab<|>", min_size=1, max_size=4), max_size=6, unique=True),
    st.text("ab<|>", max_size=30),
)
def test_spellings_are_found_leftmost_and_longest(texts: list[str], text: str) -> None:
    expected, at = [], 0
    while at < len(text):
        found = max((t for t in texts if text.startswith(t, at)), key=len, default=None)
        if found is not None:
            expected.append((at, at + len(found), texts.index(found)))
        at += len(found) if found else 1
    assert list(Spellings((t, id) for id, t in enumerate(texts)).find(text)) == expected


# -- there and back ------------------------------------------------------------------------------------------------


def test_gpt_4o_ends_words_before_capitals_and_keeps_contractions() -> None:
    (pattern,) = PRE_TOKENIZERS["gpt-4o"].patterns
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    found = [word for word, _ in split.pre_tokenize_str("helloWorld HTTPServer don't 12345 a/b//\n\nx")]
    assert found == ["hello", "World", " HTTPServer", " don't", " ", "123", "45", " a", "/b", "//\n\n", "x"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_text_comes_back_from_its_ids_with_every_pre_tokenizer(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(bpe_metadata(pre))
    normalize = normalizers.NFC().normalize_str if PRE_TOKENIZERS[pre].nfc else str

    @given(st.text(max_size=40))
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == normalize(text)

    check()


@pytest.mark.parametrize("metadata", all_vocabularies()[2:], ids=["gemma", "llama2", "gemma4"])
def test_text_comes_back_from_its_ids_with_sentencepiece(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata)

    # U+2581 stands for the space itself, so it comes back as one.
    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁") | st.just("\n"), max_size=40))
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


def test_text_comes_back_from_the_ids_of_the_default_model(metadata_of: Callable[[str], dict[str, Any]]) -> None:
    """Where each of its bytes has a token: 21 have none (0x04, 0xF1 ...), and the reference leaves them out too."""
    tokenizer = Tokenizer.from_gguf(metadata_of("smollm2-135m"))
    known = b"".join({piece for id in range(tokenizer.vocab_size) if len(piece := tokenizer.piece(id)) == 1})
    assert len(known) == 256 - 21
    texts = [text for text in AWKWARD_TEXTS + random_texts(200) if set(text.encode()) <= set(known)]
    assert len(texts) > 50
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"


@pytest.mark.parametrize("metadata", all_vocabularies(), ids=["qwen2", "llama3", "gemma", "llama2", "gemma4"])
def test_each_of_the_256_bytes_is_the_piece_of_a_token(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata)
    pieces = {tokenizer.piece(id) for id in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= pieces


def test_control_tokens_have_no_text_and_user_defined_ones_have() -> None:
    metadata = tool_vocabulary()
    tokenizer = Tokenizer.from_gguf(metadata)
    end, call = ids_of(metadata, "<|im_end|>", "<tool_call>")
    assert tokenizer.piece(end) == b""
    assert tokenizer.piece(call) == b"<tool_call>"
    assert tokenizer.decode([end, call, end]) == "<tool_call>"
    assert tokenizer.token_text(end) == "<|im_end|>"


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    tokenizer = Tokenizer.from_gguf(bpe_metadata("smollm"))
    for id in (-1, tokenizer.vocab_size):
        with pytest.raises(UsageError, match="not in the vocabulary"):
            tokenizer.decode([id])
        with pytest.raises(UsageError, match="not in the vocabulary"):
            tokenizer.token_text(id)


def test_a_lone_surrogate_counts_as_a_replacement_character() -> None:
    tokenizer = Tokenizer.from_gguf(bpe_metadata("smollm"))
    assert tokenizer.encode("a\udc80b") == tokenizer.encode("a\ufffdb")
