"""A mixture of experts of real layer sizes with random weights, written in pieces: for measurements by hand.

`python tests/large_mixture.py FILE [LAYERS [EXPERTS]]` writes one in the shape of Qwen3 30B A3B, which has 48 layers of
128 experts (17 GB in Q4_K); `measure` writes it, runs tokens from the disk and says what that took.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_models import random_blocks
from tiny_vocab import bpe_metadata

from engine.quant import TensorType

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, CHOSEN = 2048, 32, 4, 128, 768, 8


def _tensors(layers: int, experts: int, vocab: int) -> list[tuple[str, tuple[int, ...], TensorType]]:
    q4, f32 = TensorType.Q4_K, TensorType.F32
    found: list[tuple[str, tuple[int, ...], TensorType]] = [("token_embd.weight", (vocab, HIDDEN), q4)]
    for n in range(layers):
        block: dict[str, tuple[tuple[int, ...], TensorType]] = {
            "attn_norm": ((HIDDEN,), f32),
            "attn_q": ((HEADS * HEAD_DIM, HIDDEN), q4),
            "attn_k": ((KV_HEADS * HEAD_DIM, HIDDEN), q4),
            "attn_v": ((KV_HEADS * HEAD_DIM, HIDDEN), TensorType.Q6_K),
            "attn_q_norm": ((HEAD_DIM,), f32),
            "attn_k_norm": ((HEAD_DIM,), f32),
            "attn_output": ((HIDDEN, HEADS * HEAD_DIM), q4),
            "ffn_norm": ((HIDDEN,), f32),
            "ffn_gate_inp": ((experts, HIDDEN), f32),
            "ffn_gate_exps": ((experts, FFN, HIDDEN), q4),
            "ffn_up_exps": ((experts, FFN, HIDDEN), q4),
            "ffn_down_exps": ((experts, HIDDEN, FFN), q4),
        }
        found += [(f"blk.{n}.{name}.weight", shape, kind) for name, (shape, kind) in block.items()]
    return [*found, ("output_norm.weight", (HIDDEN,), f32), ("output.weight", (vocab, HIDDEN), TensorType.Q6_K)]


def write_large_mixture(path: Path, layers: int = 48, experts: int = 128, vocab: int = 32_000) -> Path:
    """Write the model. Each kind of tensor is drawn once and turned by some rows for each layer."""
    metadata = bpe_metadata("qwen2")
    words = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = words + [f"unused {n}" for n in range(len(words), vocab)]
    metadata["tokenizer.ggml.token_type"] += [5] * (vocab - len(words))
    arch = "qwen3moe"
    keys: dict[str, Any] = {
        "context_length": 32768,
        "embedding_length": HIDDEN,
        "block_count": layers,
        "feed_forward_length": 6144,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "expert_count": experts,
        "expert_used_count": CHOSEN,
        "expert_feed_forward_length": FFN,
    }
    writer = gguf.GGUFWriter(path, arch)
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    values = {"general.name": "Large mixture", **{f"{arch}.{k}": v for k, v in keys.items()}, **metadata}
    for key, value in values.items():
        writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])
    rng = np.random.default_rng(0)
    drawn: dict[tuple[tuple[int, ...], TensorType, str], np.ndarray] = {}
    tensors = _tensors(layers, experts, vocab)

    def data(name: str, shape: tuple[int, ...], kind: TensorType, n: int) -> np.ndarray:
        key = (shape, kind, name.rpartition(".")[0].rpartition(".")[2])
        if key not in drawn:
            if len(shape) == 1:
                drawn[key] = rng.normal(1, 0.1, shape).astype("<f4").view(np.uint8)
            else:
                drawn[key] = random_blocks(kind, shape, rng, std=shape[-1] ** -0.5)
        return drawn[key] if len(shape) == 1 else np.roll(drawn[key], 7 * n, axis=-2)

    for n, (name, shape, kind) in enumerate(tensors):
        some = data(name, shape, kind, n) if len(shape) < 3 else data(name, shape, kind, 0)
        writer.add_tensor_info(name, some.shape, some.dtype, some.nbytes, gguf.GGMLQuantizationType(int(kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for n, (name, shape, kind) in enumerate(tensors):
        writer.write_tensor_data(data(name, shape, kind, n))
    writer.close()
    return path


def resident(kind: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(kind))
    return int(line.split()[1]) * 1024


def run_tokens(path: Path, weights: Path, count: int = 8) -> str:
    """Load from the disk, run tokens one by one, say what it took."""
    from forward_runner import Runner, tokens

    from engine import giw_file
    from engine.gguf_file import open_gguf
    from engine.kv_cache import KVPool
    from engine.model import LoadOptions, Model

    giw_file.folder = lambda: weights  # type: ignore[assignment]
    before, start = resident("RssAnon"), time.perf_counter()
    with open_gguf(path) as file:
        touched = Model.token_bytes(file)
        model = Model.load(file, LoadOptions(threads=2, max_positions=4096, max_rows=64, from_disk=True))
        loaded = time.perf_counter() - start
        pool = KVPool(model.kv_block_bytes, 64)
        model.bind_pool(pool)
        runner = Runner(model, pool)
        table, steps = runner.table(), []
        for token in tokens(count):
            start = time.perf_counter()
            runner.step((table, [int(token)]))
            steps.append(time.perf_counter() - start)
    private = resident("RssAnon") - before
    seconds = " ".join(f"{s:.2f}" for s in steps)
    return (
        f"{model.weight_bytes / 1e9:.1f} GB of weights, {touched / 1e9:.2f} GB a token; loaded in {loaded:.1f} s, "
        f"private memory {private / 1e6:.0f} MB, peak {resident('VmHWM') / 1e9:.1f} GB with what is mapped; "
        f"seconds of each token: {seconds}"
    )


def measure(folder: Path) -> str:
    """Write the 30 B shape below a folder and run tokens, at the start that lays it out and at one after it."""
    home = folder / "goinfer-30b"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    path = write_large_mixture(home / "large.gguf")
    return "\n".join(run_tokens(path, home / "weights") for _ in range(2))


if __name__ == "__main__":
    write_large_mixture(Path(sys.argv[1]), *map(int, sys.argv[2:]))
