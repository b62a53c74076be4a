"""A model's words and files without its weights: what a prompt would cost, before the model is loaded for it."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from engine.api import KVType, Prospect, Request
from engine.chat_template import ChatTemplate
from engine.config import ModelConfig
from engine.gguf_file import GGUFFile, open_gguf
from engine.kept_files import kept_start
from engine.kv_layout import Identity
from engine.memory import DEFAULT_CONTEXT
from engine.prefill_speed import PrefillSpeed
from engine.tokenizer import Tokenizer


class UnloadedModel:
    """A model of which only the metadata is read, in a fraction of the time of loading. Usable as a context manager.

    identity   as in `ModelInfo`
    """

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        context_size: int | None = None,
        chat_template: str | None = None,
        kv_folder: Path | None = None,
        kv_type: KVType = "f16",
    ) -> Self:
        """The arguments mean what they mean to `engine.load`. Raises ModelError."""
        gguf = open_gguf(path)
        try:
            return cls(gguf, context_size, chat_template, kv_folder, kv_type)
        except BaseException:
            gguf.close()
            raise

    def __init__(
        self,
        gguf: GGUFFile,
        context_size: int | None,
        chat_template: str | None,
        kv_folder: Path | None,
        kv_type: KVType,
    ) -> None:
        """For `open`."""
        config = ModelConfig.from_gguf(gguf)
        config = config.for_context(min(context_size or DEFAULT_CONTEXT, config.train_context_size))
        self.identity = gguf.content_hash()
        self._gguf = gguf
        self._template = ChatTemplate.from_gguf(gguf.metadata, Tokenizer.from_gguf(gguf.metadata), chat_template)
        self._folder = kv_folder
        self._kv_identity = Identity.of(config, self.identity, kv_type)

    def foresee(self, request: Request) -> Prospect:
        """What the prompt of these messages would cost, were it the first after loading. Raises TemplateError."""
        ids = self._template.encode_foreseen(request.messages, request.tools, **request.template_kwargs)
        found, problem, tok_s = 0, None, None
        if self._folder is not None:
            name, goes_on = request.conversation, request.goes_on
            found, problem = kept_start(self._folder, name, self._kv_identity, ids, goes_on=goes_on)
            tok_s = PrefillSpeed(self._folder, self.identity).tok_s
        return Prospect(prompt_tokens=len(ids), reused_tokens=found, tok_s=tok_s, problem=problem)

    def close(self) -> None:
        self._gguf.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
