"""`goinfer-chat check --perplexity FILE`: how well a model predicts a text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, runtime_checkable

from engine.errors import UsageError
from engine.perplexity import CHUNK_TOKENS, perplexity
from goinfer_chat.files import reason_of
from goinfer_chat.modes import EngineFactory
from goinfer_chat.settings import Settings
from goinfer_chat.terminal import Stream, true_text
from goinfer_chat.view.render import to_json


class Tokens(Protocol):
    """What a text is cut with; engine.tokenizer.Tokenizer is one."""

    @property
    def add_bos(self) -> bool: ...

    @property
    def bos_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...


@runtime_checkable
class Scorer(Protocol):
    """An engine that can say how likely given tokens are. Not every backend can."""

    @property
    def tokenizer(self) -> Tokens: ...

    def score(self, ids: Sequence[int], first: int) -> Sequence[float]:
        """Natural-log probabilities of ids[first:], each given all ids before it."""
        ...


def check_perplexity(settings: Settings, make_engine: EngineFactory, file: str) -> int:
    """Print the perplexity of a text file, read as UTF-8. Returns the exit code; raises UsageError or ModelError."""
    try:
        text = Path(file).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{true_text(file)} cannot be read: {reason_of(error)}") from None
    out, side = Stream(sys.stdout), Stream(None if settings.quiet else sys.stderr)
    with closing(make_engine(settings, side)) as engine:
        if not isinstance(engine, Scorer):
            raise UsageError(f"the backend {settings.backend} cannot score a text; perplexity needs --backend cpu")
        tokens = engine.tokenizer
        bos_id = tokens.bos_id if tokens.add_bos else None
        result = perplexity(
            [*([bos_id] if bos_id is not None else []), *tokens.encode(text)],
            engine.score,
            bos_id=bos_id,
            progress=lambda done, total: side.status(f"scoring: {done} of {total} chunks"),
        )
    side.clear_status()
    if settings.json:
        out.write(to_json(asdict(result)))
    else:
        out.line(f"perplexity {result.value:.4f} ({result.num_chunks} chunks of {CHUNK_TOKENS} tokens)")
    return 0
