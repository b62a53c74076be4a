"""What the program shows about a loaded model: its facts, and how many conversations stay in memory."""

from __future__ import annotations

import math
from collections import Counter

from engine.api import ModelInfo
from engine.backend import Backend, StepModel
from engine.chat_template import ChatTemplate
from engine.gguf_file import GGUFFile
from engine.kv_cache import BLOCK_SIZE, blocks_for
from engine.memory import MemoryPlan
from engine.tokenizer import Tokenizer

# `general.file_type` of a GGUF by number: LlamaFileType in gguf-py's constants.py.
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 21: "Q2_K_S",
    25: "IQ4_NL", 30: "IQ4_XS", 32: "BF16", 38: "MXFP4",
}  # fmt: skip


def describe(
    gguf: GGUFFile,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    model: StepModel,
    plan: MemoryPlan,
    backend: Backend,
    kv_sessions: int,
) -> ModelInfo:
    """What a program shows of a model that `backend` has loaded, when `kv_sessions` conversations are to be kept."""
    config = model.config
    return ModelInfo(
        name=config.name,
        architecture=config.architecture,
        quantization=_quantization(gguf),
        num_parameters=sum(math.prod(tensor.shape) for tensor in gguf.tensors.values()),
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        context_size=plan.context_size,
        train_context_size=config.train_context_size,
        kv_bytes_per_token=model.kv_block_bytes // BLOCK_SIZE,
        state_bytes=config.state_bytes,
        state_slots=plan.num_states,
        weight_bytes=model.weight_bytes,
        backend=backend.name,
        kernels=model.kernels,
        threads=model.threads,
        kv_type=model.kv_type,
        identity=gguf.content_hash(),
        thinks=template.thinks,
        session_reuse=_session_reuse(kv_sessions, plan),
        fewer_sessions=_num_fitting(kv_sessions, plan) < kv_sessions,
        notices=(*tokenizer.notices, *template.notices, *backend.notices, *plan.notices),
    )


def _session_reuse(kv_sessions: int, plan: MemoryPlan) -> str:
    """How many conversations stay in memory; both numbers where not so many full ones fit."""
    if kv_sessions == 0:
        return "session reuse: off"
    fit = _num_fitting(kv_sessions, plan)
    if fit < kv_sessions:
        return (
            f"session reuse: on ({fit} of {kv_sessions} conversations kept prefilled; "
            f"memory has no room for more of {plan.context_size:,} tokens)"
        )
    return f"session reuse: on ({_count(fit)} kept prefilled)"


def _num_fitting(kv_sessions: int, plan: MemoryPlan) -> int:
    """Conversations of a full context that memory has room for, at most as many as are wanted."""
    fit = min(kv_sessions, plan.num_blocks // blocks_for(plan.context_size))
    return min(fit, plan.num_states - 2) if plan.num_states else fit  # the one that runs has two


def _count(conversations: int) -> str:
    return "1 conversation" if conversations == 1 else f"{conversations} conversations"


def _quantization(gguf: GGUFFile) -> str:
    """What the file says it is, else the type that most of its bytes have."""
    named = gguf.metadata.get("general.file_type")
    if isinstance(named, int) and named in _FILE_TYPES:
        return _FILE_TYPES[named]
    sizes: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        sizes[tensor.type.name] += tensor.nbytes
    return sizes.most_common(1)[0][0]
