"""Byte-level BPE: text to ids and ids to bytes with the tables of a GGUF whose `tokenizer.ggml.model` is "gpt2".

Each byte of the text is one printable character (GPT-2's table), a pre-tokenizer splits the text into words, and
inside a word the pair with the lowest merge rank is joined until none is left. `tokenizers` does all of it; the
file only names the pre-tokenizer, and `PRE_TOKENIZERS` says what that name means.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from engine.errors import ModelFileError, UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """What one value of `tokenizer.ggml.pre` means."""

    patterns: tuple[str, ...]
    """Each splits what the one before left, keeping both matches and what is between them."""
    nfc: bool = False
    """Text is brought into Unicode form NFC first, as the model's own tokenizer does. llama.cpp leaves this out."""
    ignore_merges: bool = False
    """A word that is a token is that token, whatever the merges would make of it."""
    add_bos: bool = False
    """Prompts start with BOS where the file does not say."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
_SEED_CODER = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_SPACES}"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}"
)

_GPT2_SPLIT = PreTokenizer(patterns=(_GPT2,))
_DIGITS_GPT2_SPLIT = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_LLAMA3_SPLIT = PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True)
_CL100K_SPLIT = PreTokenizer(patterns=(_LLAMA3,))
_O200K_SPLIT = PreTokenizer(patterns=(_O200K,))
_DEEPSEEK3_SPLIT = PreTokenizer(patterns=(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3))
_BAILING_SPLIT = PreTokenizer(patterns=(_BAILING,))
_QWEN2_SPLIT = PreTokenizer(patterns=(_QWEN2,), nfc=True)

PRE_TOKENIZERS = {
    "default": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_SPLIT,
    "olmo": _GPT2_SPLIT,
    "mellum": _GPT2_SPLIT,
    "phi-2": _GPT2_SPLIT,
    "exaone4": _GPT2_SPLIT,
    "smollm": _DIGITS_GPT2_SPLIT,
    "starcoder": _DIGITS_GPT2_SPLIT,
    "refact": _DIGITS_GPT2_SPLIT,
    "mellum2": _DIGITS_GPT2_SPLIT,
    "command-r": _DIGITS_GPT2_SPLIT,
    "exaone": _DIGITS_GPT2_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "lfm2": _LLAMA3_SPLIT,
    "dbrx": _CL100K_SPLIT,
    "smaug-bpe": _CL100K_SPLIT,
    "glm4": _CL100K_SPLIT,
    "chatglm-bpe": _CL100K_SPLIT,
    "gpt-4o": _O200K_SPLIT,
    "llama4": _O200K_SPLIT,
    "minimax-m2": _O200K_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "stablelm2": PreTokenizer(patterns=(_QWEN2,)),
    "megrez": PreTokenizer(patterns=(_QWEN2,)),
    "hunyuan": PreTokenizer(patterns=(_QWEN2,)),
    "exaone-moe": PreTokenizer(patterns=(_EXAONE_MOE,)),
    "bailingmoe": _BAILING_SPLIT,
    "bailingmoe2": _BAILING_SPLIT,
    "qwen35": PreTokenizer(patterns=(_QWEN35,), nfc=True),
    "tekken": PreTokenizer(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
    "seed-coder": PreTokenizer(patterns=(_SEED_CODER,)),
    "deepseek-coder": PreTokenizer(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-v3": _DEEPSEEK3_SPLIT,
    "hunyuan-dense": _DEEPSEEK3_SPLIT,
}
"""`tokenizer.ggml.pre` -> how text is split. Sources: the models' own tokenizer.json, and llama.cpp's
src/llama-vocab.cpp for which name means which; "default" is llama.cpp's own."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """Raises UnsupportedModelError for a name that is not known, since a guess would change ids in silence."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise UnsupportedModelError(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        ) from None


def _byte_characters() -> str:
    """Character of each byte: printable Latin-1 stands for itself, the others get U+0100 and on, in order (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


_BYTE_OF = {character: byte for byte, character in enumerate(_byte_characters())}


_SHORT_TEXT = 4096
"""Characters, about a millisecond's worth. `Tokenizer.encode` keeps all other Python threads waiting, a batch does not;
and a batch of a short text would only be handed to another thread."""


class ByteLevelBPE:
    """Text without any control token -> ids, and a token's text -> its bytes."""

    def __init__(self, vocab: dict[str, int], merges: Sequence[str], pre: PreTokenizer) -> None:
        """`vocab`: the tokens that text may become. Raises ModelFileError when the tables do not fit together."""
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        for merge, (left, right) in zip(merges, pairs):
            if not (left in vocab and right in vocab and left + right in vocab):
                raise ModelFileError(f"tokenizer.ggml.merges: {merge!r} does not join two tokens into a third")
        tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre.ignore_merges))
        if pre.nfc:
            tokenizer.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        to_byte_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_byte_characters])
        self._tokenizer = tokenizer
        self._long_texts = threading.Lock()

    def encode(self, text: str, *, continues: bool) -> list[int]:
        """Ids of a stretch of text; `continues` (the text follows other text) makes no difference here.

        Of long texts one is in work at a time, since each takes some hundred times its size.
        """
        if len(text) <= _SHORT_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        with self._long_texts:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @staticmethod
    def piece(token: str) -> bytes:
        """A character outside the table is taken as it is: some converters leave added tokens unmapped."""
        try:
            return bytes(map(_BYTE_OF.__getitem__, token))
        except KeyError:
            return token.encode()
