"""Token ids and text, from the tables that a GGUF file carries.

Three kinds of tokens matter: normal ones make up text; user-defined ones (an HTML tag of Gemma's, a tool marker of
Qwen's) are one token wherever their spelling occurs; control tokens (end of turn, start of a role) are the model's
punctuation and have no text. Text never becomes a control token unless the caller says that it may.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from engine.bpe import ByteLevelBPE, pre_tokenizer
from engine.errors import ModelFileError, UnsupportedModelError, UsageError
from engine.memo import Memo
from engine.spm import RankedPieceBPE, SentencePieceBPE

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_MESSAGE_END = "<|end|>"
"""Ends a turn, but only a message where a reply is messages on channels and may have several."""
_CHANNEL_ENDS = ("<|return|>", "<|call|>")
"""What ends a reply of models that send messages on channels (channel_parts.py)."""
_END_MARKERS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|end|>",
    "<|eom_id|>",
    "<end_of_utterance>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<｜end▁of▁sentence｜>",
    "[EOT]",
    "<EOT>",
    "</s>",
    "<eos>",
)
"""Tokens that end a turn or a text in the chat formats there are, the more specific first."""

_AMBIGUOUS_MARKERS = {"[EOT]", "<EOT>", "</s>", "<eos>"}
"""Ends only where the file says that they are control tokens: `</s>` is strike-through to Gemma."""

_BOS_MARKERS = ("<s>", "<bos>", "<|begin_of_text|>")

State = tuple[tuple[bytes, int], bool]
"""Where a `StreamDecoder` stands; opaque."""


class Tokenizer:
    """ids <-> text of one model; safe to share between threads.

    vocab_size  number of ids, which are 0 to vocab_size - 1
    bos_id, eos_id  None where the model has none
    add_bos     the model wants BOS in front of a prompt
    end_ids     every id that ends a reply
    control_ids the tokens that text never becomes and that have no text
    user_defined_ids  the tokens that are found in any text, whatever stands around them
    special_ids both, and the unknown token: all that are found whole where control tokens are parsed
    notices     what a user should see once: a guessed end token, an assumed pre-tokenizer
    """

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Raises ModelFileError for tables that are missing or contradict each other, UnsupportedModelError for a
        tokenizer of a kind or with a pre-tokenizer that is not known."""
        return cls(metadata)

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        table = _Metadata(metadata)
        model = table.text("model")
        if model not in ("gpt2", "llama", "gemma4"):
            raise UnsupportedModelError(
                f"tokenizer {model!r} (tokenizer.ggml.model) is not supported; supported: gpt2 (byte-level BPE), "
                "llama (SentencePiece), gemma4 (SentencePiece with merges)"
            )
        tokens = table.strings("tokens")
        types = table.numbers("token_type", len(tokens), "iu")
        ids = {text: id for id, text in enumerate(tokens)}
        if len(ids) < len(tokens) and (twice := next((t for id, t in enumerate(tokens) if t and ids[t] != id), "")):
            raise ModelFileError(f"tokenizer.ggml.tokens has the token {twice!r} twice")
        notices: list[str] = []
        self.vocab_size = len(tokens)
        self._tokens = tokens
        self._types = types if types is not None else [_NORMAL] * len(tokens)
        ends = self._read_ends(table, ids, types, notices)

        # What text is merged into: never a token that is found whole or not at all. Some byte-level vocabularies have
        # merges that make user-defined tokens.
        excluded = {_UNKNOWN, _CONTROL, _UNUSED} | ({_BYTE, _USER_DEFINED} if model == "llama" else set())
        vocab = {
            text: id
            for (text, id), kind in zip(ids.items(), self._types)
            if text and kind not in excluded and id not in ends
        }
        self._coder, wants_bos = self._make_coder(model, table, vocab, ids, types, notices)
        self._read_bos(model, table, ids, wants_bos)

        self.user_defined_ids = self._ids_of(_USER_DEFINED) - self.control_ids
        self.special_ids = self.user_defined_ids | self.control_ids | self._ids_of(_UNKNOWN)
        self._user_defined = Spellings((tokens[id], id) for id in self.user_defined_ids)
        self._special = Spellings((tokens[id], id) for id in self.special_ids)
        self._pieces: dict[int, bytes] = {}
        coder = self._coder
        self._memo: Memo[tuple[str, bool], list[int]] = Memo(
            lambda key: coder.encode(key[0], continues=key[1]), size_of=lambda key: len(key[0])
        )
        self.notices = tuple(notices)

    def _read_ends(
        self, table: _Metadata, ids: Mapping[str, int], types: Sequence[int] | None, notices: list[str]
    ) -> Mapping[int, str]:
        """Take in which tokens end a reply, and which are control tokens. Returns `_ends_in`."""
        has_channels = "<|channel|>" in ids and "<|return|>" in ids
        ends = _ends_in(ids, types, has_channels)
        self.control_ids = self._ids_of(_CONTROL) | frozenset(ends)
        self.eos_id = table.id("eos_token_id", len(ids))
        stated = {self.eos_id, table.id("eot_token_id", len(ids)), table.id("eom_token_id", len(ids))} - {None}
        self.end_ids = frozenset(id for id in (*stated, *ends) if id is not None)
        if has_channels:
            self.end_ids -= {ids.get(_MESSAGE_END)}
        if not stated:
            self.eos_id, notice = _guess_end(ends, table.chat_template)
            notices.append(notice)
        return ends

    def _make_coder(
        self,
        model: str,
        table: _Metadata,
        vocab: dict[str, int],
        ids: Mapping[str, int],
        types: Sequence[int] | None,
        notices: list[str],
    ) -> tuple[ByteLevelBPE | SentencePieceBPE, bool]:
        """What merges text into the tokens of `vocab`, and whether prompts begin with BOS where the file is silent."""
        unknown_id = table.id("unknown_token_id", self.vocab_size)
        if model == "gpt2":
            if not table.has("pre"):
                notices.append("the file names no pre-tokenizer: text is split as llama.cpp's default does")
            pre = pre_tokenizer(table.text("pre", default="default"))
            return ByteLevelBPE(vocab, table.strings("merges"), pre), pre.add_bos
        bytes_of = _byte_tokens(self._tokens, types)
        if model == "gemma4":
            return RankedPieceBPE(vocab, table.strings("merges"), bytes_of, unknown_id=unknown_id), True
        scores = table.numbers("scores", self.vocab_size, "iuf")
        if scores is None:
            raise ModelFileError("tokenizer.ggml.scores is missing: SentencePiece cannot merge without scores")
        if any(map(math.isnan, scores)):
            raise ModelFileError("tokenizer.ggml.scores has a value that is not a number")
        coder = SentencePieceBPE(
            vocab,
            scores,
            bytes_of,
            space_prefix=table.flag("add_space_prefix", True),
            unknown_id=unknown_id if unknown_id is not None else ids.get("<unk>"),
        )
        return coder, True

    def _read_bos(self, model: str, table: _Metadata, ids: Mapping[str, int], wants_bos: bool) -> None:
        """Take in the BOS token, and whether prompts begin with it: `wants_bos` where the file does not say."""
        self.bos_id = table.id("bos_token_id", self.vocab_size)
        if self.bos_id is None and model == "llama":
            self.bos_id = next((ids[text] for text in _BOS_MARKERS if ids.get(text) in self.control_ids), None)
        self.add_bos = table.flag("add_bos_token", wants_bos and self.bos_id is not None)
        if model == "gemma4":  # some of its files say that it wants none, and it talks nonsense without one
            self.add_bos = self.bos_id is not None
        if self.add_bos and self.bos_id is None:
            raise ModelFileError("tokenizer.ggml.add_bos_token is true, but the file names no BOS token")

    def _ids_of(self, kind: int) -> frozenset[int]:
        return frozenset(id for id, other in enumerate(self._types) if other == kind)

    def encode(self, text: str, *, control: bool = False, mark: str = "", continues: bool = False) -> list[int]:
        """Ids of a text; no BOS is added. A lone surrogate counts as U+FFFD.

        control: spellings of control tokens become these tokens; otherwise they are text.
        mark: a character that is dropped, and keeps the spelling it stands in from being a token.
        continues: the text follows other text, so no leading space is added where the model adds one.
        """
        ids: list[int] = []
        for part in self._parts(_without_surrogates(text), self._special if control else self._user_defined):
            if isinstance(part, int):
                ids.append(part)
                continues = False
                continue
            if mark:
                part = part.replace(mark, "")
            if part:
                ids += self._memo.get((part, continues))
                continues = True
        return ids

    def parts(self, text: str) -> Iterator[str | int]:
        """The text cut at the spellings of control and user-defined tokens: stretches of text and ids, in order."""
        return self._parts(text, self._special)

    @staticmethod
    def _parts(text: str, spellings: Spellings) -> Iterator[str | int]:
        """The text cut at the spellings: stretches of text (not empty) and ids, in order."""
        position = 0
        for start, end, id in spellings.find(text):
            if start > position:
                yield text[position:start]
            yield id
            position = end
        if position < len(text):
            yield text[position:]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, control tokens left out; bytes that are no UTF-8 are U+FFFD. Raises UsageError for an id
        that is not in the vocabulary."""
        data = b"".join(map(self.piece, ids))
        if self._strips_first_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def spelled(self, ids: Sequence[int]) -> str:
        """Text of the ids with the control tokens in it. Raises UsageError for an id that is not in the vocabulary."""
        parts = (self.token_text(id).encode() if id in self.control_ids else self.piece(id) for id in ids)
        return b"".join(parts).decode("utf-8", errors="replace")

    def piece(self, id: int) -> bytes:
        """A token's own bytes, which need not be whole characters; nothing for a control token.

        Raises UsageError for an id that is not in the vocabulary.
        """
        piece = self._pieces.get(id)
        if piece is None:
            piece = self._pieces[id] = self._piece(id)
        return piece

    def _piece(self, id: int) -> bytes:
        text = self.token_text(id)
        kind = self._types[id]
        if id in self.control_ids or kind in (_UNKNOWN, _UNUSED):
            return b""
        if kind == _USER_DEFINED:
            return text.encode()
        if isinstance(self._coder, SentencePieceBPE):
            byte = _byte_of(text) if kind == _BYTE else None
            if byte is not None:
                return bytes([byte])
        return self._coder.piece(text)

    def token_text(self, id: int) -> str:
        """The token as the vocabulary writes it, for showing. Raises UsageError for an id that is not in it."""
        if not 0 <= id < self.vocab_size:
            raise UsageError(f"token id {id} is not in the vocabulary, which has 0 to {self.vocab_size - 1}")
        return self._tokens[id]

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self)

    @property
    def _strips_first_space(self) -> bool:
        """Text gets a space in front on its way in, so it loses one on its way out."""
        return isinstance(self._coder, SentencePieceBPE) and self._coder.space_prefix


class StreamDecoder:
    """Text of ids as they come, in whole characters: what `push` and `finish` return joined is `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._strips_space = tokenizer._strips_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The characters that this id completes. Raises UsageError for an id that is not in the vocabulary."""
        data = self._piece(id)
        if self._strips_space and data:
            self._strips_space = False
            data = data[1:] if data.startswith(b" ") else data
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is held back: nothing, or U+FFFD for a character that was cut."""
        return self._utf8.decode(b"", True)

    def state(self) -> State:
        return self._utf8.getstate(), self._strips_space

    def rewind(self, state: State) -> None:
        """Back to where `state` was taken."""
        utf8, self._strips_space = state
        self._utf8.setstate(utf8)


class Spellings:
    """Texts to be found whole in other text: the leftmost first, of those that start there the longest."""

    def __init__(self, texts: Iterable[tuple[str, int]]) -> None:
        self._ids = {text: id for text, id in texts if text}
        # One search for the first two characters finds the few places where a text may start. A regular expression
        # of all texts would try each of Gemma's 6,414 in turn at every "<".
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        for head in lengths:
            if head[0] in self._ids:
                lengths[head].add(1)
        self._lengths = {head: sorted(found, reverse=True) for head, found in lengths.items()}
        heads = sorted(lengths, key=len, reverse=True)
        self._heads = re.compile("|".join(map(re.escape, heads))) if heads else None

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, id) of each text found, in order, none overlapping another."""
        position = 0
        while self._heads is not None and (match := self._heads.search(text, position)) is not None:
            start = match.start()
            position = start + 1
            for length in self._lengths[match[0]]:
                found = text[start : start + length]  # shorter at the end of the text
                id = self._ids.get(found)
                if id is not None:
                    position = start + len(found)
                    yield start, position, id
                    break


class _Metadata:
    """The `tokenizer.ggml.*` keys, each checked for its type before it is used."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def _get(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def has(self, key: str) -> bool:
        return f"tokenizer.ggml.{key}" in self._metadata

    @property
    def chat_template(self) -> str:
        """As it stands in the file, to look for tokens in it; "" where there is none."""
        return str(self._metadata.get("tokenizer.chat_template", ""))

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key)
        if value is None:
            value = default
        if not isinstance(value, str):
            what = "is missing" if value is None else "is not a text"
            raise ModelFileError(f"tokenizer.ggml.{key} {what}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelFileError(f"tokenizer.ggml.{key} is not true or false")
        return value

    def strings(self, key: str) -> list[str]:
        value = self._get(key)
        if value is None:
            raise ModelFileError(f"tokenizer.ggml.{key} is missing")
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise ModelFileError(f"tokenizer.ggml.{key} is not a list of texts")
        return value

    def numbers(self, key: str, length: int, kinds: str) -> list[Any] | None:
        """A list of `length` numbers of NumPy's `kinds`, or None where the file has no such key."""
        value = self._get(key)
        if value is None:
            return None
        array = np.asarray(value) if isinstance(value, (list, np.ndarray)) else np.empty(0, object)
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise ModelFileError(f"tokenizer.ggml.{key} is not a list of numbers")
        if len(array) != length:
            raise ModelFileError(
                f"tokenizer.ggml.{key} has {len(array)} entries for the {length} tokens of tokenizer.ggml.tokens"
            )
        numbers: list[Any] = array.tolist()
        return numbers

    def id(self, key: str, vocab_size: int) -> int | None:
        """0 is an id like any other, None says that the file names none."""
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise ModelFileError(f"tokenizer.ggml.{key} is {value!r}, not the id of one of {vocab_size} tokens")
        return value


def _ends_in(ids: Mapping[str, int], types: Sequence[float] | None, has_channels: bool) -> dict[int, str]:
    """The tokens of a vocabulary that end a reply, id -> spelling, the more specific first; `types` of each id."""
    markers = [*_END_MARKERS, *_CHANNEL_ENDS] if has_channels else _END_MARKERS
    return {
        ids[marker]: marker
        for marker in markers
        if marker in ids
        and not (has_channels and marker == _MESSAGE_END)
        and (types is None or marker not in _AMBIGUOUS_MARKERS or types[ids[marker]] == _CONTROL)
    }


def _guess_end(ends: Mapping[int, str], template: str) -> tuple[int | None, str]:
    """The end token of a file that names none, and what to tell the user: the one the chat template writes, else the
    most specific one the vocabulary has."""
    if not ends:
        return None, "the file names no end token and its vocabulary has none: a reply ends at the token limit only"
    id = next((id for id, marker in ends.items() if marker in template), next(iter(ends)))
    source = "chat template" if ends[id] in template else "vocabulary"
    return id, f"the file names no end token: {ends[id]} is taken from its {source}"


def _byte_of(token: str) -> int | None:
    """0x41 for `<0x41>`."""
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    return int(match[1], 16) if match else None


def _byte_tokens(tokens: Sequence[str], types: Sequence[int] | None) -> dict[int, int]:
    """byte -> id; by type where the file has types, else by spelling."""
    candidates = (id for id in range(len(tokens)) if types is None or types[id] == _BYTE)
    return {byte: id for id in candidates if (byte := _byte_of(tokens[id])) is not None}


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
