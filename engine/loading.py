"""From a GGUF file to an engine: settings are checked, what fits into memory is planned, then weights are loaded."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from engine.api import KVType, SpeculationMode
from engine.backend import Backend, open_backend
from engine.chat_template import ChatTemplate
from engine.config import ModelConfig
from engine.cpu import MAX_THREADS
from engine.draft_model import DraftModel, check_vocabulary
from engine.errors import ModelError, ModelFileError, UsageError
from engine.gguf_file import GGUFFile, open_gguf
from engine.kv_folder import prepare
from engine.local import LocalEngine, check_draft_model
from engine.memory import MemoryPlan, plan_memory
from engine.model import LoadOptions, Progress
from engine.scheduler import MAX_CONCURRENT
from engine.step import MAX_ROWS
from engine.tokenizer import Tokenizer

DEFAULT_SPECULATION: SpeculationMode = "ngram"
"""Measured: copies several times as fast, ordinary questions no slower (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What `engine.load` is given, and says of each. Raises UsageError for what cannot be obeyed."""

    context_size: int | None
    threads: int | None
    kv_sessions: int
    chat_template: str | None
    progress: Progress | None
    speculation: SpeculationMode | None
    kv_folder: Path | None
    kv_cap_bytes: int
    kv_type: KVType
    max_concurrent: int
    prefill_chunk: int | None
    draft: Path | None
    from_disk: bool
    backend: str
    device: str

    def __post_init__(self) -> None:
        if self.kv_sessions < 0:
            raise UsageError(f"kv_sessions must be 0 (keep none) or more, not {self.kv_sessions}")
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise UsageError(f"threads must be between 1 and {MAX_THREADS}, not {self.threads}")
        if self.kv_cap_bytes < 0:
            raise UsageError(f"the bytes of kept caches must be 0 or more, not {self.kv_cap_bytes}")
        if not 1 <= self.max_concurrent <= MAX_CONCURRENT:
            raise UsageError(f"max_concurrent must be between 1 and {MAX_CONCURRENT}, not {self.max_concurrent}")
        if self.prefill_chunk is not None and not 1 <= self.prefill_chunk <= MAX_ROWS:
            raise UsageError(f"prefill_chunk must be between 1 and {MAX_ROWS}, not {self.prefill_chunk}")
        _check_choice("speculation", self.speculation, get_args(SpeculationMode))
        _check_choice("type of K and V", self.kv_type, get_args(KVType))
        check_draft_model(self.speculation, self.draft is not None)

    @property
    def kept_in(self) -> Path | None:
        """The folder of conversations' caches, where any are kept."""
        return self.kv_folder if self.kv_sessions > 0 else None


def load_engine(path: Path, options: EngineOptions) -> LocalEngine:
    """See `engine.load`."""
    if options.kept_in is not None:
        prepare(options.kept_in)
    with ExitStack() as undo:
        files = _Files.open(path, options, undo)
        place = open_backend(
            options.backend, options.device, files.gguf, options.kv_type, from_disk=options.from_disk, draft=files.draft
        )
        plan = _plan(files, place, options)
        model = place.load(
            files.gguf,
            LoadOptions(
                threads=options.threads,
                max_rows=MAX_ROWS,
                max_positions=plan.context_size,
                kv_type=options.kv_type,
                from_disk=plan.from_disk,
                progress=options.progress,
            ),
        )
        undo.callback(model.close)
        draft_model = _load_draft(files, place, plan, options)
        if draft_model is not None:
            undo.callback(draft_model.close)
        engine = LocalEngine(
            files.gguf,
            files.tokenizer,
            files.template,
            model,
            plan,
            options.kv_sessions,
            options.speculation or ("model" if draft_model is not None else DEFAULT_SPECULATION),
            max_concurrent=options.max_concurrent,
            prefill_chunk=options.prefill_chunk,
            draft_model=draft_model,
            backend=place,
        )
        if options.kept_in is not None:
            engine.keep_in(options.kept_in, engine.identity(), options.kv_cap_bytes)
        undo.pop_all()
        if not plan.from_disk:  # where memory is short, 40 MB wait until they are asked for
            engine.prepare_grammars()
        return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """What is read before anything large is loaded."""

    gguf: GGUFFile
    tokenizer: Tokenizer
    template: ChatTemplate
    config: ModelConfig
    draft: GGUFFile | None
    """Of the model that guesses."""

    @classmethod
    def open(cls, path: Path, options: EngineOptions, undo: ExitStack) -> _Files:
        """`undo` closes what was opened. Raises ModelError or UsageError."""
        gguf = undo.enter_context(open_gguf(path))
        tokenizer = _read_tokenizer(gguf)
        template = ChatTemplate.from_gguf(gguf.metadata, tokenizer, options.chat_template)
        config = _read_config(gguf, tokenizer)
        draft = None
        if options.draft is not None:
            draft = undo.enter_context(open_gguf(options.draft))
            _check_draft_file(draft, gguf)
        return cls(gguf=gguf, tokenizer=tokenizer, template=template, config=config, draft=draft)


def _plan(files: _Files, place: Backend, options: EngineOptions) -> MemoryPlan:
    """What fits into the memory of a backend. Raises OutOfMemoryError, and UsageError for a context below 2."""
    weight_bytes, block_bytes = place.estimate(files.gguf, options.kv_type)
    draft_bytes, draft_block_bytes = (0, 0) if files.draft is None else place.estimate(files.draft, "f16")
    return plan_memory(
        name=files.gguf.path.name,
        weight_bytes=weight_bytes + draft_bytes,
        block_bytes=block_bytes + draft_block_bytes,
        context_size=options.context_size,
        train_context_size=files.config.train_context_size,
        kv_sessions=options.kv_sessions,
        available=place.available_memory(),
        from_disk=options.from_disk,
        token_bytes=place.token_bytes(files.gguf) + draft_bytes,  # a draft model is in memory whole
        state_bytes=files.config.state_bytes,
    )


def _load_draft(files: _Files, place: Backend, plan: MemoryPlan, options: EngineOptions) -> DraftModel | None:
    if files.draft is None:
        return None
    return DraftModel.load(
        place,
        files.draft,
        vocab_size=files.tokenizer.vocab_size,
        threads=options.threads,
        num_blocks=plan.num_blocks,
        kv_sessions=max(1, options.kv_sessions),
        context_size=plan.context_size,
        progress=options.progress,
    )


def _check_choice(what: str, chosen: str | None, choices: tuple[str, ...]) -> None:
    if chosen is not None and chosen not in choices:
        raise UsageError(f"unknown {what} {chosen!r}; choose from: {', '.join(choices)}")


def _read_tokenizer(gguf: GGUFFile) -> Tokenizer:
    """Its errors name the file, of which the tokenizer sees only the metadata."""
    try:
        return Tokenizer.from_gguf(gguf.metadata)
    except ModelError as error:
        raise type(error)(f"{gguf.path.name}: {error}") from error


def _read_config(gguf: GGUFFile, tokenizer: Tokenizer) -> ModelConfig:
    config = ModelConfig.from_gguf(gguf)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelFileError(
            f"{gguf.path.name}: the tokenizer has {tokenizer.vocab_size:,} tokens and the model only "
            f"{config.vocab_size:,}: the file's parts do not belong together"
        )
    return config


def _check_draft_file(draft: GGUFFile, gguf: GGUFFile) -> None:
    """Raises ModelError or UsageError where one model cannot guess for the other."""
    check_vocabulary(draft, gguf)
    if ModelConfig.from_gguf(draft).state_bytes:
        raise UsageError(
            f"{draft.path.name} cannot guess for another model: it has layers with a running state, "
            "which would have to be taken back after every guess"
        )
