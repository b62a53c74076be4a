"""Perplexity of a text under a model, as `llama-perplexity -c 512 -b 512` computes it.

The tokens of the text are cut into chunks of 512; what is left over at the end is not used. Each chunk starts with an
empty cache, and only its second half is scored, so every scored token has at least 256 tokens before it. Where the
model wants a BOS, it takes the place of the first token of each chunk.
Source: tools/perplexity/perplexity.cpp of llama.cpp, function `perplexity`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from engine.errors import UsageError

CHUNK_TOKENS: Final = 512

Score = Callable[[Sequence[int], int], Sequence[float]]
"""`score(ids, first)`: natural-log probabilities of ids[first:], each given all ids before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """What a text gave, and how much of it was scored."""

    value: float
    """exp of the mean negative log probability of the scored tokens."""
    num_chunks: int
    num_tokens: int
    """How many tokens were scored."""


def perplexity(
    ids: Sequence[int],
    score: Score,
    *,
    bos_id: int | None,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Perplexity of the text whose tokens are `ids`, its BOS included where `bos_id` is not None.

    `progress` is called with (chunks done, chunks in all). Raises UsageError when the text has less than two chunks,
    which says too little about a model.
    """
    num_chunks = len(ids) // chunk_tokens
    if num_chunks < 2:
        raise UsageError(
            f"the text has {len(ids):,} tokens; its perplexity needs at least {2 * chunk_tokens:,}, two chunks"
        )
    first = chunk_tokens // 2 + 1
    total = 0.0
    for index in range(num_chunks):
        progress(index, num_chunks)
        chunk = list(ids[index * chunk_tokens : (index + 1) * chunk_tokens])
        if bos_id is not None:
            chunk[0] = bos_id
        total -= math.fsum(score(chunk, first))
    num_tokens = num_chunks * (chunk_tokens - first)
    return Perplexity(value=math.exp(total / num_tokens), num_chunks=num_chunks, num_tokens=num_tokens)
