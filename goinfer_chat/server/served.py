"""The models behind the server, by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Protocol, runtime_checkable

from engine.api import Engine, SamplingParams, SpeculationMode
from goinfer_chat.server.admission import Admission
from goinfer_chat.server.errors import ApiError
from goinfer_chat.server.transcripts import Transcripts


class Tokens(Protocol):
    """What of a tokenizer routes about tokens need."""

    bos_id: int | None
    add_bos: bool
    vocab_size: int

    def encode(self, text: str, *, control: bool = False) -> list[int]: ...

    def piece(self, token: int) -> bytes: ...


@runtime_checkable
class HasTokens(Protocol):
    @property
    def tokenizer(self) -> Tokens: ...


@dataclass(slots=True)
class Served:
    """A loaded model under the name that clients call it."""

    name: str
    engine: Engine
    admission: Admission
    texts: Admission = field(default_factory=lambda: Admission(1, 20))
    """Places for texts that are only tokenized: one at a time, beside the replies, which it slows down."""
    sampling: SamplingParams = SamplingParams()
    """What holds where a request says nothing."""
    speculation: SpeculationMode | None = None
    """None: what the engine was loaded with."""
    transcripts: Transcripts = field(default_factory=Transcripts)
    created: int = field(default_factory=lambda: int(time()))

    @property
    def tokenizer(self) -> Tokens:
        """Raises ApiError where the engine does not show one."""
        if not isinstance(self.engine, HasTokens):
            raise ApiError(400, f"the model {self.name} does not show its tokens")
        return self.engine.tokenizer


class Models:
    """Models by name; the first answers where a request names none."""

    def __init__(self, models: Sequence[Served]) -> None:
        assert models
        self._models = {model.name: model for model in models}
        self._first = models[0]

    def __iter__(self) -> Iterator[Served]:
        return iter(self._models.values())

    def find(self, name: str | None) -> Served:
        """Raises ApiError 404."""
        if name is None:
            return self._first
        if name not in self._models:
            shown = name if name.isprintable() and len(name) <= 200 else "of this name"
            known = ", ".join(self._models)
            raise ApiError(
                404, f"model: there is no model {shown}; choose from: {known}", param="model", code="model_not_found"
            )
        return self._models[name]
