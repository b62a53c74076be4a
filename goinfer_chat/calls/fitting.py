"""Results of tools that the context has no room for: cut in the middle, as long output of a program is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from engine.api import Message
from engine.errors import ContextExceededError
from tools.output import bounded

MIN_CHARACTERS: Final = 200
"""Of a result; with less of it the model could do nothing."""
REPLY_SHARE: Final = 1 / 8
"""Of the context, left for the reply."""


def fitted(
    said: Sequence[Message], error: ContextExceededError, count_text: Callable[[str], int]
) -> tuple[Message, ...] | None:
    """The results, the longest of them cut, for a prompt that was refused; None where that cannot help.

    How many tokens a part of a text has is not known before it is cut, so the prompt may be refused once more.
    """
    texts = [message.content for message in said if message.role == "tool"]
    num_characters = sum(map(len, texts))
    num_tokens = count_text("\n".join(texts)) if texts else 0
    over = error.prompt_tokens - error.context_size + int(error.context_size * REPLY_SHARE)
    if over >= num_tokens:
        return None
    room = int(num_characters * (1 - over / num_tokens))
    if room < MIN_CHARACTERS * len(texts):
        return None
    most = _most(sorted(map(len, texts)), room)
    cut = tuple(replace(message, content=bounded(message.content, most)) for message in said)
    return cut if sum(len(message.content) for message in cut) < num_characters else None


def _most(lengths: Sequence[int], room: int) -> int:
    """How long a text may be for all together to have room; those that are shorter leave theirs to the others."""
    for index, length in enumerate(lengths):
        left = len(lengths) - index
        if length * left >= room:
            return room // left
        room -= length
    return max(lengths)
