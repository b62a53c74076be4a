"""From a GGUF file to an engine: settings are checked, what fits into memory is planned, then weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

from engine.api import KVType, SpeculationMode
from engine.backend import open_backend
from engine.chat_template import ChatTemplate
from engine.config import ModelConfig
from engine.cpu import MAX_THREADS
from engine.draft_model import DraftModel, check_vocabulary
from engine.errors import ModelError, ModelFileError, UsageError
from engine.gguf_file import GGUFFile, open_gguf
from engine.kv_folder import prepare
from engine.local import LocalEngine, check_draft_model
from engine.memory import plan_memory
from engine.scheduler import MAX_CONCURRENT
from engine.step import MAX_ROWS
from engine.tokenizer import Tokenizer

DEFAULT_SPECULATION: SpeculationMode = "ngram"
"""Measured: copies several times as fast, ordinary questions no slower (docs/benchmarks.md)."""


def load_engine(
    path: Path,
    *,
    context_size: int | None,
    threads: int | None,
    kv_sessions: int,
    chat_template: str | None,
    progress: Callable[[str, float], None] | None,
    speculation: SpeculationMode | None,
    kv_folder: Path | None,
    kv_cap_bytes: int,
    kv_type: KVType,
    max_concurrent: int,
    prefill_chunk: int | None,
    draft: Path | None,
    from_disk: bool,
    backend: str,
    device: str,
) -> LocalEngine:
    """See `engine.load`."""
    _check_counts(kv_sessions, threads, kv_cap_bytes, max_concurrent, prefill_chunk)
    _check_choice("speculation", speculation, get_args(SpeculationMode))
    _check_choice("type of K and V", kv_type, get_args(KVType))
    check_draft_model(speculation, draft is not None)
    if kv_folder is not None and kv_sessions > 0:
        prepare(kv_folder)
    with ExitStack() as undo:
        gguf = undo.enter_context(open_gguf(path))
        tokenizer = _read_tokenizer(gguf)
        template = ChatTemplate.from_gguf(gguf.metadata, tokenizer, chat_template)
        config = _read_config(gguf, tokenizer)
        draft_gguf = None if draft is None else undo.enter_context(open_gguf(draft))
        if draft_gguf is not None:
            _check_draft_file(draft_gguf, gguf)
        place = open_backend(backend, device, gguf, kv_type, from_disk=from_disk, draft=draft_gguf)
        weight_bytes, block_bytes = place.estimate(gguf, kv_type)
        draft_bytes, draft_block_bytes = (0, 0) if draft_gguf is None else place.estimate(draft_gguf, "f16")
        plan = plan_memory(
            name=path.name,
            weight_bytes=weight_bytes + draft_bytes,
            block_bytes=block_bytes + draft_block_bytes,
            context_size=context_size,
            train_context_size=config.train_context_size,
            kv_sessions=kv_sessions,
            available=place.available_memory(),
            from_disk=from_disk,
            token_bytes=place.token_bytes(gguf) + draft_bytes,  # a draft model is in memory whole
            state_bytes=config.state_bytes,
        )
        model = place.load(
            gguf,
            threads=threads,
            max_rows=MAX_ROWS,
            max_positions=plan.context_size,
            kv_type=kv_type,
            progress=progress,
            from_disk=plan.from_disk,
        )
        undo.callback(model.close)
        draft_model = None
        if draft_gguf is not None:
            draft_model = DraftModel.load(
                place,
                draft_gguf,
                vocab_size=tokenizer.vocab_size,
                threads=threads,
                num_blocks=plan.num_blocks,
                kv_sessions=max(1, kv_sessions),
                context_size=plan.context_size,
                progress=progress,
            )
            undo.callback(draft_model.close)
        engine = LocalEngine(
            gguf,
            tokenizer,
            template,
            model,
            plan,
            kv_sessions,
            speculation or ("model" if draft_model is not None else DEFAULT_SPECULATION),
            max_concurrent=max_concurrent,
            prefill_chunk=prefill_chunk,
            draft_model=draft_model,
            backend=place,
        )
        if kv_folder is not None and kv_sessions > 0:
            engine.keep_in(kv_folder, engine.identity(), kv_cap_bytes)
        undo.pop_all()
        if not plan.from_disk:  # where memory is short, 40 MB wait until they are asked for
            engine.prepare_grammars()
        return engine


def _check_counts(
    kv_sessions: int, threads: int | None, kv_cap_bytes: int, max_concurrent: int, prefill_chunk: int | None
) -> None:
    if kv_sessions < 0:
        raise UsageError(f"kv_sessions must be 0 (keep none) or more, not {kv_sessions}")
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise UsageError(f"threads must be between 1 and {MAX_THREADS}, not {threads}")
    if kv_cap_bytes < 0:
        raise UsageError(f"the bytes of kept caches must be 0 or more, not {kv_cap_bytes}")
    if not 1 <= max_concurrent <= MAX_CONCURRENT:
        raise UsageError(f"max_concurrent must be between 1 and {MAX_CONCURRENT}, not {max_concurrent}")
    if prefill_chunk is not None and not 1 <= prefill_chunk <= MAX_ROWS:
        raise UsageError(f"prefill_chunk must be between 1 and {MAX_ROWS}, not {prefill_chunk}")


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
