"""The inference engine: a GGUF file in, replies out, no terminal in it. `docs/engine.md` is its guide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.api import KVType, SpeculationMode
    from engine.local import LocalEngine

__all__ = ["load"]


def load(
    model_path: str | Path,
    *,
    context_size: int | None = None,
    threads: int | None = None,
    kv_sessions: int = 4,
    chat_template: str | None = None,
    progress: Callable[[str, float], None] | None = None,
    speculation: SpeculationMode | None = None,
    kv_folder: str | Path | None = None,
    kv_cap_bytes: int = 8_000_000_000,
    kv_type: KVType = "f16",
    max_concurrent: int = 4,
    prefill_chunk: int | None = None,
    draft: str | Path | None = None,
    from_disk: bool = False,
    backend: str = "cpu",
    device: str = "auto",
) -> LocalEngine:
    """Load a GGUF model. What is heavy is imported here, so `import engine` stays cheap.

    context_size   positions of a conversation; None: the smaller of 8,192 and what the model was trained for
    threads        None: one for each physical core this process may use
    kv_sessions    conversations whose cache is kept between requests; 0 keeps none
    chat_template  a Jinja template to use instead of the file's own
    progress       called with what is being done and the share of it that is done, 0 to 1
    speculation    guess tokens ahead: the same replies, faster where they repeat text; a request may say otherwise.
                   None: from a smaller model if there is one, else from the conversation (`ngram`)
    kv_folder      where conversations' caches are kept as files, to go on after a restart; None: nowhere
    kv_cap_bytes   bytes of all these files; beyond it those not used for longest are removed, and a notice says so
    kv_type        how keys and values are kept: `f16`, `q8_0` (about half of it, other words), `f32` (twice as much)
    max_concurrent how many replies share a step; further requests wait
    prefill_chunk  rows of prompts in a step while others decode; None: as many as take about a tenth of a second
    draft          a smaller model of the same vocabulary, which guesses for this one
    from_disk      read weights from the disk when they are needed: the model may be larger than memory
    backend        `cpu`: this engine's own kernels; `torch`: PyTorch, the same files and the same cache
    device         of torch: `cuda`, `mps`, `cpu`, or `auto`: a GPU that holds the model, if there is one

    Raises ModelNotFoundError, ModelFileError, UnsupportedModelError, OutOfMemoryError, or UsageError for an argument
    that cannot be obeyed.
    """
    from engine.loading import EngineOptions, load_engine

    options = EngineOptions(
        context_size=context_size,
        threads=threads,
        kv_sessions=kv_sessions,
        chat_template=chat_template,
        progress=progress,
        speculation=speculation,
        kv_folder=None if kv_folder is None else Path(kv_folder),
        kv_cap_bytes=kv_cap_bytes,
        kv_type=kv_type,
        max_concurrent=max_concurrent,
        prefill_chunk=prefill_chunk,
        draft=None if draft is None else Path(draft),
        from_disk=from_disk,
        backend=backend,
        device=device,
    )
    return load_engine(Path(model_path), options)
