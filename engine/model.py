"""A model in memory and its forward step: rows of tokens in, logits out.

`Model` has what a step needs for as long as it lives: weights, buffers, and the list of operations (`operations.py`).
A step takes rows, not a sequence: each has a token, a position and the block table of its conversation, so that chunks
of a prompt, decode steps and several conversations mix freely. By the numerics contract the mix changes nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.api import KVType
from engine.buffers import MAX_WANTED, Buffers
from engine.config import ModelConfig
from engine.cpu import usable_threads
from engine.gguf_file import GGUFFile
from engine.kernels.attention import PART
from engine.kernels.build import CompiledKernels
from engine.kernels.formats import WeightFormat
from engine.kernels.layout import compiled
from engine.kernels.matmul import matmul_module
from engine.kernels.program import CONTEXT, Stored
from engine.kernels.target import detect
from engine.kernels.workers import Workers
from engine.kv_cache import BLOCK_SIZE, KVPool, StatePool
from engine.kv_layout import NUMERICS_VERSION, KVLayout
from engine.matrices import ModelMatrices
from engine.operations import Program
from engine.weights import Matrix, Weights

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is loaded, wherever it is computed."""

    threads: int | None = None
    """Of the CPU; None: the physical cores this process may use."""
    max_rows: int = 512
    """Of a step."""
    max_positions: int | None = None
    """Of a conversation; None: the trained context."""
    kv_type: KVType = "f16"
    from_disk: bool = False
    """Weights stay in a file, which is mapped: a model may be larger than memory."""
    progress: Progress | None = None

    def __post_init__(self) -> None:
        assert self.threads is None or self.threads > 0
        assert self.max_rows > 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step. Rows of one conversation are adjacent and ascend by position.

    The K/V of a row is written to block tables[table_rows[row], position // 64], slot position % 64; positions
    before it must have been written, by this step or an earlier one.
    """

    ids: NDArray[np.int32]
    """Token ids [T]."""
    positions: NDArray[np.int32]
    """[T]."""
    tables: NDArray[np.int32]
    """Block tables [C, B], one row a conversation, padded at the end."""
    table_rows: NDArray[np.int32]
    """Which table a row uses [T]."""
    want: NDArray[np.int32]
    """Rows whose logits are wanted [W], ascending, at most MAX_WANTED."""
    states: NDArray[np.int32] | None = None
    """Of a model with running states [C, S, 2]: each table's slots, and up to which of the table's rows each of them
    runs. The first slot has the state before these rows, and each one after it begins as a copy of the one before."""


class Model:
    """Made by `Model.load`. `forward` is for one thread at a time."""

    config: ModelConfig

    @classmethod
    def load(cls, gguf: GGUFFile, options: LoadOptions = LoadOptions()) -> Model:
        """Load the weights and compile the kernels that are not in the cache yet.

        Raises UnsupportedModelError, ModelFileError or OutOfMemoryError.
        """
        return cls(gguf, options)

    @staticmethod
    def estimate(gguf: GGUFFile, kv_type: KVType = "f16") -> tuple[int, int]:
        """(bytes of weights in memory, bytes of a KV block) of a model that is not loaded yet.

        Bytes of a running state are in its `ModelConfig`.
        """
        layers = ModelMatrices(gguf, ModelConfig.from_gguf(gguf))
        return sum(m.num_bytes for m in layers.all), KVLayout.of(layers.config, kv_type).block_bytes

    @staticmethod
    def token_bytes(gguf: GGUFFile) -> int:
        """Bytes of weights that a single row touches: of the experts only those that it passes."""
        return ModelMatrices(gguf, ModelConfig.from_gguf(gguf)).token_bytes

    def __init__(self, gguf: GGUFFile, options: LoadOptions) -> None:
        """For `load`."""
        config = ModelConfig.from_gguf(gguf)
        progress = options.progress or (lambda text, share: None)
        self.max_positions = options.max_positions or config.train_context_size
        self.config = config.for_context(self.max_positions)
        self.kv_type: KVType = options.kv_type
        self.kv_layout = KVLayout.of(self.config, self.kv_type)
        self.threads = threads = options.threads or usable_threads()
        self.max_rows = options.max_rows
        self._compiled = CompiledKernels(detect(), progress)
        self.matrices = ModelMatrices(gguf, self.config)
        self._load_kernels()
        self.weights = Weights(gguf, self.matrices.all, threads, progress, compiled(self._lay_out), options.from_disk)
        self.buffers = Buffers(self.config, self.max_rows, self.max_positions, threads)
        self._program = Program(self, gguf)
        self._context = self._make_context()
        self._workers = Workers(self._compiled.address("core", "goinfer_step"), self._context.ctypes.data, threads)

    @property
    def state_bytes(self) -> int:
        """Bytes of the running state of a conversation; 0: the model has none."""
        return self.config.state_bytes

    @property
    def kernels(self) -> str:
        """The instruction set in use, for people."""
        return self._compiled.target.title

    @property
    def weight_bytes(self) -> int:
        return self.weights.memory.nbytes

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block of the KV cache: keys and values of 64 positions of all layers."""
        return self.kv_layout.block_bytes

    def _load_kernels(self) -> None:
        def core() -> str:
            from engine.kernels.walk.step import module_text  # Numba is only needed to compile

            return module_text(self._compiled.target)

        formats = {f"matmul_{m.fmt.type.name}": m.fmt for m in self.matrices.all}
        modules = {name: partial(matmul_module, fmt, self._compiled.target) for name, fmt in formats.items()}
        self._compiled.load({"core": core, **modules})

    def _lay_out(self, fmt: WeightFormat) -> int:
        return self._compiled.address(f"matmul_{fmt.type.name}", "lay_out")

    def kernel_address(self, m: Matrix, function: str) -> int:
        """Address of `matmul` or `dequantize_row` for a matrix's format."""
        return self._compiled.address(f"matmul_{m.fmt.type.name}", function)

    def _make_context(self) -> NDArray[np.void]:
        c, b = self.config, self.buffers
        context = np.zeros(1, CONTEXT)
        values = {
            "operations": self._program.operations.ctypes.data,
            "num_operations": len(self._program.operations),
            "matrices": self._program.matrices.ctypes.data,
            "activations": self._program.activations.ctypes.data,
            "hidden": c.hidden_size,
            "num_heads": c.num_heads,
            "eps": b.constants[0:].ctypes.data,
            "scale": b.constants[1:].ctypes.data,
            "kv_block_bytes": self.kv_block_bytes,
            "kv_stored": Stored[self.kv_type.upper()],
            "one": b.constants[6:].ctypes.data,
            "delta_scale": b.constants[7:].ctypes.data,
            "inner_eps": b.constants[9:].ctypes.data,
            "state_bytes": self.state_bytes,
            "ids": b.ids.ctypes.data,
            "positions": b.positions.ctypes.data,
            "table_rows": b.table_rows.ctypes.data,
            "wanted": b.wanted.ctypes.data,
            "x": b.x.ctypes.data,
            "x_bytes": b.x.strides[0],
            "qkv": b.qkv.ctypes.data,
            "qkv_bytes": b.qkv.strides[0],
            "attention": b.attention.ctypes.data,
            "attention_bytes": b.attention.strides[0],
            "given": 0 if b.given is None else b.given.ctypes.data,
            "given_bytes": 0 if b.given is None else b.given.strides[0],
            "states": b.states.ctypes.data,
            "state_slots": b.num_parts,
            "scratch": b.scratch.ctypes.data,
            "scratch_bytes": b.scratch.strides[0],
            "products": b.products.ctypes.data,
            "strip_groups": b.strip_groups.ctypes.data,
            "num_experts": c.experts.count if c.experts else 0,
            "num_chosen": c.experts.chosen if c.experts else 0,
            "expert_sum": int(c.experts.is_normed) if c.experts else 0,
            "even_experts": int(c.experts.is_even) if c.experts else 0,
            "expert_scale": b.constants[5:].ctypes.data,
            "choices": b.choices.ctypes.data,
            "choice_weights": b.choice_weights.ctypes.data,
            "expert_slots": b.expert_slots.ctypes.data,
            "expert_ends": b.expert_ends.ctypes.data,
            "busy_experts": b.busy_experts.ctypes.data,
            "slot_rows": b.slot_rows.ctypes.data,
            "slot_weights": b.slot_weights.ctypes.data,
            "page_bytes": mmap.PAGESIZE if self.weights.from_disk and hasattr(mmap, "MADV_WILLNEED") else 0,
            "num_threads": self.threads,
            "generation": b.generation.ctypes.data,
            "counters": b.counters.ctypes.data,
        }
        if c.delta is not None:
            values |= {"key_heads": c.delta.num_key_heads, "value_heads": c.delta.num_value_heads}
            values |= {"delta_dim": c.delta.head_dim, "key_dim": c.delta.head_dim}
        if c.scan is not None:
            values |= {"key_heads": c.scan.num_groups, "value_heads": c.scan.num_heads}
            values |= {"delta_dim": c.scan.head_dim, "key_dim": c.scan.key_dim}
        for name, value in values.items():
            context[name] = value
        return context

    @property
    def numerics(self) -> int:
        """What the bits of K and V depend on beside model and ids (`kv_layout.Identity`)."""
        return NUMERICS_VERSION

    def new_pool(self, num_blocks: int, num_states: int = 0, num_checkpoints: int = 0) -> KVPool:
        """Memory for keys and values, and for running states, in use from here on. Raises OutOfMemoryError."""
        pool = KVPool(self.kv_block_bytes, num_blocks)
        if self.state_bytes:
            pool.states = StatePool(self.state_bytes, num_states, num_checkpoints)
        self.bind_pool(pool)
        return pool

    def bind_pool(self, pool: KVPool) -> None:
        """Use this memory for keys and values."""
        assert pool.block_bytes == self.kv_block_bytes
        self._pool = pool
        self._context["kv_memory"] = pool.memory.ctypes.data
        if self.state_bytes:
            assert pool.states is not None
            assert pool.states.block_bytes == self.state_bytes
            self._context["state_memory"] = pool.states.memory.ctypes.data

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """Run the rows; logits [W, V] f32 of the wanted ones: a view that the next call overwrites."""
        rows, wanted, b = len(batch.ids), len(batch.want), self.buffers
        tables = np.ascontiguousarray(batch.tables, np.int32)
        states = None if batch.states is None else np.ascontiguousarray(batch.states, np.int32)
        last = self._check(batch, tables, states)
        b.ids[:rows], b.positions[:rows] = batch.ids, batch.positions
        b.table_rows[:rows], b.wanted[:wanted] = batch.table_rows, batch.want
        context = self._context[0]
        context["num_rows"], context["num_wanted"] = rows, wanted
        context["num_parts"] = last // PART + 1
        # Known before a step starts: the rows move while it runs.
        if 0 < wanted < rows:
            last = int(batch.positions[batch.want].max())
        context["wanted_parts"] = last // PART + 1 if wanted else 0
        context["tables"], context["table_blocks"] = tables.ctypes.data, tables.shape[1]
        if states is not None:
            context["state_table"], context["num_segments"] = states.ctypes.data, states.shape[1]
        self._workers.run()
        return b.logits[:wanted, : self.config.vocab_size]

    def _check(self, batch: Batch, tables: NDArray[np.int32], states: NDArray[np.int32] | None) -> int:
        """What compiled code trusts. These are our own mistakes, and would be silent corruption there.

        Returns the largest position.
        """

        def within(numbers: NDArray[np.int32], limit: int, what: str) -> int:
            largest = int(numbers.view(np.uint32).max())  # one below 0 is beyond all limits
            if largest >= limit:
                low = int(numbers.min())
                raise AssertionError(f"{what} {low if low < 0 else largest} is out of range, limit {limit}")
            return largest

        rows, wanted = len(batch.ids), len(batch.want)
        assert 0 < rows <= self.max_rows, f"{rows} rows"
        assert wanted <= MAX_WANTED, f"{wanted} rows of logits"
        assert len(batch.positions) == len(batch.table_rows) == rows
        within(batch.ids, self.config.vocab_size, "token id")
        last = within(batch.positions, min(self.max_positions, tables.shape[1] * BLOCK_SIZE), "position")
        within(tables, self._pool.num_blocks, "block")
        within(batch.table_rows, tables.shape[0], "table")
        if wanted:
            within(batch.want, rows, "wanted row")
        assert (states is not None) == bool(self.state_bytes), "running states"
        if states is not None:
            assert self._pool.states is not None
            assert states.shape[0] == len(tables)
            assert states.shape[2] == 2
            within(states[:, :, 0], self._pool.states.num_blocks, "state")
        return last

    def close(self) -> None:
        """End the threads and free the memory. The model cannot be used after this."""
        self._workers.close()
        self.weights.close()
