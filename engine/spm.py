"""SentencePiece BPE: text to ids and ids to bytes with the tables of a GGUF whose `tokenizer.ggml.model` is "llama", or
"gemma4", whose file has ranks of merges in place of scores.

A space is the character U+2581, and of all neighbours that together are a piece of the vocabulary the pair with the
best score is joined, the leftmost of equals, until none is left (Kudo and Richardson 2018; the order of equals as in
SentencePiece's own queue). What is then no piece becomes its UTF-8 bytes.

`tokenizers` is not used: its merges need one rank for every way to split each piece. For Gemma's 262,144 pieces these
take seconds to derive, and the rank decides between equals before the position does, which is another tokenizer.
"""

from __future__ import annotations

import functools
import heapq
import re
import threading
from collections.abc import Iterable, Iterator, Sequence

from engine.errors import ModelFileError

_SPACE = "\u2581"
_WORD_CACHE_SIZE = 1 << 15
_LONGEST_CACHED_WORD = 64


class SentencePieceBPE:
    """Text without any control token -> ids, and a token's text -> its bytes."""

    def __init__(
        self,
        vocab: dict[str, int],
        scores: Sequence[float],
        bytes_of: dict[int, int],
        *,
        space_prefix: bool,
        unknown_id: int | None,
    ) -> None:
        """`vocab`: the pieces that text may become; `scores`: of each id; `bytes_of`: byte -> id of its byte token.

        Raises ModelFileError where some text would have no ids.
        """
        if len(bytes_of) < 256 and unknown_id is None:
            raise ModelFileError(
                f"tokenizer.ggml.tokens has {len(bytes_of)} of 256 byte tokens and no unknown token: "
                "some text could not be encoded"
            )
        self.space_prefix = space_prefix
        self._ids = vocab
        self._scores = scores
        self._byte_ids = bytes_of
        self._unknown_id = unknown_id
        self._long_words = threading.Lock()
        self._merge_cached = functools.lru_cache(_WORD_CACHE_SIZE)(self._merge)
        # A piece that spans the start of a word ("a" and "b" in "a b") keeps the words around it together.
        # A lone surrogate is in no piece, since pieces are UTF-8.
        joints = set(re.findall(f"([^{_SPACE}\ud800]){_SPACE}", "\ud800".join(vocab)))
        kept = "".join(map(re.escape, sorted(joints | {_SPACE})))
        self._word_starts = re.compile(f"(?<=[^{kept}])(?={_SPACE})")

    def encode(self, text: str, *, continues: bool) -> list[int]:
        """Ids of a stretch of text; the model's leading space is added unless it `continues` other text."""
        text = text.replace(" ", _SPACE)
        if self.space_prefix and not continues:
            text = _SPACE + text
        ids: list[int] = []
        for word in self._words(text):
            if len(word) <= _LONGEST_CACHED_WORD:
                ids += self._merge_cached(word)
            else:
                with self._long_words:  # one at a time, since each takes some hundred times its size
                    ids += self._merge(word)
        return ids

    def _words(self, text: str) -> Iterable[str]:
        """The text cut where no piece reaches across."""
        return self._word_starts.split(text)

    def _rank(self, left: str, right: str) -> float | None:
        """The pair with the lowest one is joined first; None: these two are no piece together."""
        id = self._ids.get(left + right)
        return None if id is None else -self._scores[id]

    def _merge(self, word: str) -> list[int]:
        """Ids of a word, in O(n log n) for n characters."""
        parts = list(word)
        before = list(range(-1, len(parts) - 1))
        after = [*range(1, len(parts)), -1]
        queue: list[tuple[float, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            rank = self._rank(parts[left], parts[right])
            if rank is not None:
                heapq.heappush(queue, (rank, left, right, len(parts[left]) + len(parts[right])))

        for left in range(len(parts) - 1):
            offer(left, left + 1)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            # One of the two has been joined with another since.
            if not parts[left] or not parts[right] or len(parts[left]) + len(parts[right]) != length:
                continue
            parts[left] += parts[right]
            parts[right] = ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
                offer(left, after[left])
            if before[left] >= 0:
                offer(before[left], left)
        return [id for part in parts if part for id in self._ids_of_part(part)]

    def _ids_of_part(self, part: str) -> list[int]:
        id = self._ids.get(part)
        if id is not None:
            return [id]
        data = part.encode()
        if all(byte in self._byte_ids for byte in data):
            return [self._byte_ids[byte] for byte in data]
        assert self._unknown_id is not None
        return [self._unknown_id]

    @staticmethod
    def piece(token: str) -> bytes:
        return token.replace(_SPACE, " ").encode()


class RankedPieceBPE(SentencePieceBPE):
    """The same pieces, joined in the order of a list of merges (Gemma 4).

    A run of line ends that is a piece is that piece; llama.cpp's src/llama-vocab.cpp does so too.
    """

    def __init__(
        self, vocab: dict[str, int], merges: Sequence[str], bytes_of: dict[int, int], *, unknown_id: int | None
    ) -> None:
        """`merges`: "left right", the first to be joined first; one that makes no token of `vocab` joins nothing.

        Raises ModelFileError for one that is no pair.
        """
        if single := next((merge for merge in merges if " " not in merge[1:-1]), None):
            raise ModelFileError(f"tokenizer.ggml.merges: {single!r} does not join two tokens into a third")
        super().__init__(vocab, (), bytes_of, space_prefix=False, unknown_id=unknown_id)
        self._ranks = {merge: rank for rank, merge in enumerate(merges)}

    def _words(self, text: str) -> Iterator[str]:
        for run in re.findall(r"\n+|[^\n]+", text):
            yield from (run,) if run[0] == "\n" else super()._words(run)

    def _rank(self, left: str, right: str) -> float | None:
        return self._ranks.get(f"{left} {right}") if left + right in self._ids else None

    def _merge(self, word: str) -> list[int]:
        return [self._ids[word]] if word[0] == "\n" and word in self._ids else super()._merge(word)
