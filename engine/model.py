"""A model in memory and its forward step: rows of tokens in, logits out.

`Model` turns an architecture into a list of operations (`kernels/program.py`) over buffers that live as long as it
does. A step takes rows, not a sequence: each has a token, a position and the block table of its conversation, so that
chunks of a prompt, decode steps and several conversations mix freely. By the numerics contract the mix changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.api import KVType
from engine.arch import ModelConfig
from engine.cpu import usable_threads
from engine.errors import UnsupportedModelError
from engine.gguf_file import GGUFFile
from engine.kernels.attention import PART, STATE
from engine.kernels.build import CompiledKernels
from engine.kernels.dot import ActivationLayout, layout_for
from engine.kernels.kv_types import runs_of
from engine.kernels.matmul import matmul_module
from engine.kernels.program import ACTIVATION, CONTEXT, MATRIX, OPERATION, Op, Stored
from engine.kernels.target import detect
from engine.kernels.workers import Workers
from engine.kv_cache import BLOCK_SIZE, KVPool
from engine.kv_layout import KVLayout
from engine.weights import Matrix, Weights, load_vector, zeroed

MAX_WANTED = 64
"""Rows of logits one step can return."""
LINE = 64
_NUMBER_BYTES: dict[KVType, int] = {"f16": 2, "f32": 4, "q8_0": 1}

Progress = Callable[[str, float], None]


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


class Model:
    """Made by `Model.load`. `forward` is for one thread at a time."""

    config: ModelConfig

    @classmethod
    def load(
        cls,
        gguf: GGUFFile,
        *,
        threads: int | None = None,
        max_rows: int = 512,
        max_positions: int | None = None,
        kv_type: KVType = "f16",
        progress: Progress | None = None,
    ) -> Model:
        """Load the weights and compile the kernels that are not in the cache yet.

        `threads` defaults to the physical cores this process may use, `max_positions` to the trained context.
        Raises UnsupportedModelError, ModelFileError or OutOfMemoryError.
        """
        said = progress or (lambda text, share: None)
        return cls(gguf, threads or usable_threads(), max_rows, max_positions, kv_type, said)

    @staticmethod
    def estimate(gguf: GGUFFile, kv_type: KVType = "f16") -> tuple[int, int]:
        """(bytes of weights in memory, bytes of a KV block) of a model that is not loaded yet."""
        layers = _Layers(gguf, ModelConfig.from_gguf(gguf))
        return sum(m.num_bytes for m in layers.matrices), KVLayout.of(layers.config, kv_type).block_bytes

    def __init__(
        self,
        gguf: GGUFFile,
        threads: int,
        max_rows: int,
        max_positions: int | None,
        kv_type: KVType,
        progress: Progress,
    ) -> None:
        assert threads > 0
        assert max_rows > 0
        config = ModelConfig.from_gguf(gguf)
        self.max_positions = max_positions or config.train_context_size
        self.config = config.for_context(self.max_positions)
        self.kv_type: KVType = kv_type
        self.kv_layout = KVLayout.of(self.config, kv_type)
        self.threads = threads
        self.max_rows = max_rows
        self._compiled = CompiledKernels(detect(), progress)
        self._layers = _Layers(gguf, self.config)
        self._load_kernels()
        self._weights = Weights(gguf, self._layers.matrices, threads, progress)
        self._buffers = _Buffers(self)
        self._program = _Program(self, gguf)
        self._context = self._make_context()
        self._workers = Workers(self._compiled.address("core", "goinfer_step"), self._context.ctypes.data, threads)

    @property
    def kernels(self) -> str:
        """The instruction set in use, for people."""
        return self._compiled.target.title

    @property
    def weight_bytes(self) -> int:
        return self._weights.memory.nbytes

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block of the KV cache: keys and values of 64 positions of all layers."""
        return self.kv_layout.block_bytes

    def _load_kernels(self) -> None:
        def core() -> str:
            from engine.kernels.walk import module_text  # Numba is only needed to compile

            return module_text(self._compiled.target)

        formats = {f"matmul_{m.fmt.type.name}": m.fmt for m in self._layers.matrices}
        modules = {name: partial(matmul_module, fmt, self._compiled.target) for name, fmt in formats.items()}
        self._compiled.load({"core": core, **modules})

    def kernel_address(self, m: Matrix, function: str) -> int:
        """Address of `matmul` or `dequantize_row` for a matrix's format."""
        return self._compiled.address(f"matmul_{m.fmt.type.name}", function)

    def _make_context(self) -> NDArray[np.void]:
        c, b = self.config, self._buffers
        context = np.zeros(1, CONTEXT)
        values = {
            "operations": self._program.operations.ctypes.data,
            "num_operations": len(self._program.operations),
            "matrices": self._program.matrices.ctypes.data,
            "activations": self._program.activations.ctypes.data,
            "hidden": c.hidden_size,
            "num_heads": c.num_heads,
            "num_kv_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "eps": b.constants[0:].ctypes.data,
            "scale": b.constants[1:].ctypes.data,
            "kv_block_bytes": self.kv_block_bytes,
            "kv_stored": Stored[self.kv_type.upper()],
            "kv_head_bytes": BLOCK_SIZE * c.head_dim * _NUMBER_BYTES[self.kv_type],
            "kv_scale_bytes": BLOCK_SIZE * 2 * runs_of(c.head_dim) if self.kv_type == "q8_0" else 0,
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
            "states": b.states.ctypes.data,
            "state_slots": b.num_parts,
            "scratch": b.scratch.ctypes.data,
            "scratch_bytes": b.scratch.strides[0],
            "num_threads": self.threads,
            "generation": b.generation.ctypes.data,
            "counters": b.counters.ctypes.data,
        }
        for name, value in values.items():
            context[name] = value
        return context

    def bind_pool(self, pool: KVPool) -> None:
        """Use this memory for keys and values."""
        assert pool.block_bytes == self.kv_block_bytes
        self._pool = pool
        self._context["kv_memory"] = pool.memory.ctypes.data

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """Run the rows; logits [W, V] f32 of the wanted ones: a view that the next call overwrites."""
        rows, wanted, b = len(batch.ids), len(batch.want), self._buffers
        tables = np.ascontiguousarray(batch.tables, np.int32)
        self._check(batch, tables)
        b.ids[:rows], b.positions[:rows] = batch.ids, batch.positions
        b.table_rows[:rows], b.wanted[:wanted] = batch.table_rows, batch.want
        context = self._context[0]
        context["num_rows"], context["num_wanted"] = rows, wanted
        context["num_parts"] = int(batch.positions.max()) // PART + 1
        # Known before a step starts: the rows move while it runs.
        context["wanted_parts"] = int(batch.positions[batch.want].max()) // PART + 1 if wanted else 0
        context["tables"], context["table_blocks"] = tables.ctypes.data, tables.shape[1]
        self._workers.run()
        return b.logits[:wanted, : self.config.vocab_size]

    def _check(self, batch: Batch, tables: NDArray[np.int32]) -> None:
        """What compiled code trusts. These are our own mistakes, and would be silent corruption there."""

        def within(numbers: NDArray[np.int32], limit: int, what: str) -> None:
            low, high = int(numbers.min()), int(numbers.max())
            assert 0 <= low <= high < limit, f"{what} {low if low < 0 else high} is out of range, limit {limit}"

        rows, wanted = len(batch.ids), len(batch.want)
        assert 0 < rows <= self.max_rows, f"{rows} rows"
        assert wanted <= MAX_WANTED, f"{wanted} rows of logits"
        assert len(batch.positions) == len(batch.table_rows) == rows
        within(batch.ids, self.config.vocab_size, "token id")
        within(batch.positions, min(self.max_positions, tables.shape[1] * BLOCK_SIZE), "position")
        within(tables, self._pool.num_blocks, "block")
        within(batch.table_rows, tables.shape[0], "table")
        if wanted:
            within(batch.want, rows, "wanted row")

    def close(self) -> None:
        """End the threads and free the memory. The model cannot be used after this."""
        self._workers.close()
        self._weights.close()


@dataclass(frozen=True, slots=True)
class _Layer:
    """The matrices of one layer."""

    qkv: tuple[Matrix, ...]
    """Of q, k and v, or one for all."""
    output: Matrix
    gate_up: tuple[Matrix, Matrix]
    down: Matrix


class _Layers:
    """All matrices of a model, checked against its sizes."""

    def __init__(self, gguf: GGUFFile, c: ModelConfig) -> None:
        self.config = c
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def matrix(name: str, rows: int, columns: int, part: tuple[int, int] = (0, 1)) -> Matrix:
            return Matrix(gguf, f"{name}.weight", (rows, columns), part)

        def qkv(block: str) -> tuple[Matrix, ...]:
            if f"{block}.attn_qkv.weight" in gguf.tensors:
                return (matrix(f"{block}.attn_qkv", queries + 2 * keys, c.hidden_size),)
            rows = {"attn_q": queries, "attn_k": keys, "attn_v": keys}
            return tuple(matrix(f"{block}.{name}", rows[name], c.hidden_size) for name in rows)

        def gate_up(block: str) -> tuple[Matrix, Matrix]:
            # One tensor has both, the gate first, where there is none for the gate.
            fused = f"{block}.ffn_gate.weight" not in gguf.tensors
            gate = "ffn_up" if fused else "ffn_gate"
            first, second = ((0, 2), (1, 2)) if fused else ((0, 1), (0, 1))
            return (
                matrix(f"{block}.{gate}", c.ffn_size, c.hidden_size, first),
                matrix(f"{block}.ffn_up", c.ffn_size, c.hidden_size, second),
            )

        self.embedding = matrix("token_embd", c.vocab_size, c.hidden_size)
        self.layers = [
            _Layer(
                qkv(f"blk.{n}"),
                matrix(f"blk.{n}.attn_output", c.hidden_size, queries),
                gate_up(f"blk.{n}"),
                matrix(f"blk.{n}.ffn_down", c.hidden_size, c.ffn_size),
            )
            for n in range(c.num_layers)
        ]
        tied = "output.weight" not in gguf.tensors
        self.head = self.embedding if tied else matrix("output", c.vocab_size, c.hidden_size)
        self._check_all_is_read(gguf)

    def _check_all_is_read(self, gguf: GGUFFile) -> None:
        """Raise UnsupportedModelError for a tensor that a step would pass over: its results would silently be wrong."""
        arch = self.config.arch
        vectors = ["attn_rot_embd.weight", "attn_q_norm.weight", "attn_k_norm.weight"]
        vectors += ["attn_norm.weight", "ffn_norm.weight"] if arch.pre_norms else []
        vectors += ["post_attention_norm.weight", "post_ffw_norm.weight"] if arch.post_norms else []
        vectors += [] if arch.whole_head_norms else ["attn_q.bias", "attn_k.bias", "attn_v.bias"]
        read = {m.name for m in self.matrices} | {
            f"blk.{n}.{v}" for n in range(self.config.num_layers) for v in vectors
        }
        read |= {"output_norm.weight", "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
        for name in gguf.tensors:
            if name not in read:
                shown = "".join(x for x in name if x.isprintable())[:64]
                raise UnsupportedModelError(
                    f"{gguf.path.name}: tensor {shown} is of a form of {arch.name} that is not supported"
                )

    @property
    def matrices(self) -> list[Matrix]:
        found = [self.embedding] if self.head is self.embedding else [self.embedding, self.head]
        for layer in self.layers:
            found += [*layer.qkv, layer.output, *layer.gate_up, layer.down]
        return found


class _Buffers:
    """The memory a step works in. Compiled code holds its addresses, so it must not be replaced."""

    def __init__(self, model: Model) -> None:
        from engine.kernels.attention import BLOCK
        from engine.kernels.plan import GATED_ROWS, QUERY_TILE, SPLIT_ROWS

        c, rows, threads = model.config, model.max_rows, model.threads
        self.num_parts = model.max_positions // PART + 1
        state = STATE + c.head_dim

        def floats(*shape: int) -> NDArray[np.float32]:
            return zeroed(4 * math.prod(shape)).view(np.float32).reshape(shape)

        def line(n: int) -> int:
            return -(-n // 16) * 16

        self.ids, self.positions, self.table_rows, self.wanted = (np.zeros(rows, np.int32) for _ in range(4))
        self.x = floats(rows, line(c.hidden_size))
        self.qkv = floats(rows, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim)
        self.attention = floats(rows, c.num_heads * c.head_dim)
        self.branch = floats(rows, line(c.hidden_size)) if c.arch.post_norms else self.x
        self.states = floats(max(rows, SPLIT_ROWS * self.num_parts) * c.num_heads * state)
        attention = 4 * (QUERY_TILE * (PART + state) + BLOCK * c.head_dim) + 16 * QUERY_TILE
        gated = GATED_ROWS * 2 * 256 * 4
        self.scratch = zeroed(threads * line(max(attention, gated))).reshape(threads, -1)
        self.logits = floats(MAX_WANTED, line(c.vocab_size))
        self.generation = zeroed(LINE).view(np.int64)
        self.counters = zeroed(LINE * (16 + 14 * c.num_layers)).view(np.int64)
        numbers = [c.norm_eps, c.attention_scale, c.embedding_factor, c.attention_cap, c.logit_cap]
        self.constants = np.array(numbers, np.float32)


class _Program:
    """The operations of a step, and the arrays they point to."""

    def __init__(self, model: Model, gguf: GGUFFile) -> None:
        self._model, self._gguf = model, gguf
        self._config, self._layers, self._buffers = model.config, model._layers, model._buffers
        self._kept: list[NDArray[Any]] = []
        c, layers = self._config, self._layers
        self._numbers = {id(m): n for n, m in enumerate(layers.matrices)}
        self.matrices = np.array([self._matrix(m) for m in layers.matrices], MATRIX)
        readers_hidden = [layers.head] + [m for y in layers.layers for m in (*y.qkv, *y.gate_up)]
        self._activations: list[tuple[int, ...]] = []
        self._hidden = self._activation(c.hidden_size, readers_hidden)
        self._attended = self._activation(c.num_heads * c.head_dim, [y.output for y in layers.layers])
        self._gated = self._activation(c.ffn_size, [y.down for y in layers.layers])
        self.activations = np.array(self._activations, ACTIVATION)
        self._rope = {local: self._rope_tables(local) for local in {c.is_local(n) for n in range(c.num_layers)}}
        self._operations: list[dict[str, int]] = []
        self._build()
        self.operations = np.zeros(len(self._operations), OPERATION)
        for i, operation in enumerate(self._operations):
            for name, value in operation.items():
                self.operations[i][name] = value
        assert len(self.operations) * LINE <= self._buffers.counters.nbytes

    # ------------------------------------------------------------------ what operations point to
    def _keep(self, array: NDArray[Any]) -> int:
        """Address of an array that lives as long as the program."""
        self._kept.append(array)
        return int(array.ctypes.data)

    def _matrix(self, m: Matrix) -> tuple[int, ...]:
        c = self._config
        name = m.name.removesuffix(".weight").rpartition(".")[2]
        offset = {
            "attn_k": c.num_heads * c.head_dim,
            "attn_v": (c.num_heads + c.num_kv_heads) * c.head_dim,
        }.get(name, 0)
        return (
            self._model._weights.memory.ctypes.data + m.offset,
            self._model.kernel_address(m, "matmul"),
            self._model.kernel_address(m, "dequantize_row"),
            m.group_bytes,
            m.num_groups,
            m.num_blocks,
            layout_for(m.fmt).span,
            4 * offset,
        )

    def _activation(self, num_values: int, readers: list[Matrix]) -> int:
        """Number of a new activation in every layout that its readers multiply with."""
        spans = {layout_for(m.fmt).span for m in readers}
        unit = next(u for u in (256, 64, 32) if num_values % u == 0)
        record: list[int] = [num_values, unit]
        for span in (256, 32, 1):
            size = ActivationLayout(span).row_bytes(num_values)
            record += [self._keep(zeroed(self._model.max_rows * size)) if span in spans else 0, size]
        self._activations.append(tuple(record))
        return len(self._activations) - 1

    def _rope_tables(self, local: bool) -> tuple[int, int]:
        cos, sin = self._config.rope_tables(self._model.max_positions, local)
        return self._keep(cos), self._keep(sin)

    def _vector(self, name: str, size: int) -> int:
        return self._keep(load_vector(self._gguf, f"{name}.weight", size))

    def _bias(self, layer: int) -> int:
        """Address of the biases of q, k and v in a row, or 0 if there are none."""
        c = self._config
        sizes = {"q": c.num_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim, "v": c.num_kv_heads * c.head_dim}
        names = {x: f"blk.{layer}.attn_{x}.bias" for x in sizes}
        if not any(name in self._gguf.tensors for name in names.values()):
            return 0
        return self._keep(np.concatenate([load_vector(self._gguf, names[x], sizes[x]) for x in sizes]))

    def _head_norm(self, layer: int, which: str) -> int:
        name = f"blk.{layer}.attn_{which}_norm"
        if self._config.arch.whole_head_norms:
            return 0
        return self._vector(name, self._config.head_dim) if f"{name}.weight" in self._gguf.tensors else 0

    # ------------------------------------------------------------------ the operations
    def _add(self, code: Op, **values: int) -> None:
        self._operations.append({"code": int(code), "wanted": int(self._wanted), **values})

    def _build(self) -> None:
        c, b = self._config, self._buffers
        self._wanted = False
        factor = b.constants[2:].ctypes.data if c.embedding_factor != 1 else 0
        self._add(Op.EMBED, matrix=self._numbers[id(self._layers.embedding)], factor=factor)
        for n, layer in enumerate(self._layers.layers):
            self._layer(n, layer)
        weight = load_vector(self._gguf, "output_norm.weight", c.hidden_size) * np.float32(c.logit_factor)
        self._add(Op.NORM, activation=self._hidden, weight=self._keep(weight))
        self._multiply(self._hidden, (self._layers.head,), b.logits)
        if c.logit_cap:
            cap, out = b.constants[4:].ctypes.data, b.logits
            self._add(Op.CAP, cap=cap, out=out.ctypes.data, out_bytes=out.strides[0], count=out.shape[1])

    def _layer(self, n: int, layer: _Layer) -> None:
        c, b = self._config, self._buffers
        self._take(f"blk.{n}.attn_norm")
        self._multiply(self._hidden, layer.qkv, b.qkv)
        if c.arch.whole_head_norms:
            self._whole_norm(f"blk.{n}.attn_q_norm", 0, c.num_heads)
            self._whole_norm(f"blk.{n}.attn_k_norm", c.num_heads, c.num_kv_heads)
        local = c.is_local(n)
        kv_offset = n * (self._model.kv_block_bytes // c.num_layers)
        cos, sin = self._rope[local]
        self._add(
            Op.HEADS,
            bias=self._bias(n),
            q_norm=self._head_norm(n, "q"),
            k_norm=self._head_norm(n, "k"),
            cos=cos,
            sin=sin,
            half=c.rope_dim // 2 if c.is_rotated(n) else 0,
            neox=int(c.arch.neox_rope),
            kv_offset=kv_offset,
        )
        if n == c.num_layers - 1:
            # K and V of every row are in the cache; only the wanted rows need what comes after.
            self._wanted = True
            self._add(Op.KEEP)
        window = c.window if local else 0
        cap = b.constants[3:].ctypes.data if c.attention_cap else 0
        self._add(Op.ATTEND, kv_offset=kv_offset, window=window, cap=cap)
        unit = self._activations[self._attended][1]
        whole = math.lcm(unit, c.head_dim)
        width = c.num_heads * c.head_dim
        share = whole if width % whole == 0 else width
        self._add(Op.MERGE, activation=self._attended, window=window, share=share)
        self._into_stream(self._attended, layer.output, f"blk.{n}.post_attention_norm")
        self._take(f"blk.{n}.ffn_norm")
        self._add(
            Op.GATED,
            activation=self._hidden,
            second=self._gated,
            matrix=self._numbers[id(layer.gate_up[0])],
            gelu=int(c.arch.activation == "gelu"),
        )
        self._into_stream(self._gated, layer.down, f"blk.{n}.post_ffw_norm")

    def _take(self, norm: str) -> None:
        """activation = x, through a norm where the architecture has one there."""
        weight = self._vector(norm, self._config.hidden_size) if self._config.arch.pre_norms else 0
        self._add(Op.NORM, activation=self._hidden, weight=weight)

    def _whole_norm(self, name: str, first: int, heads: int) -> None:
        """A norm over some heads of q, k and v together."""
        qkv, dim = self._buffers.qkv, self._config.head_dim
        self._add(
            Op.ROW_NORM,
            out=qkv.ctypes.data + 4 * first * dim,
            out_bytes=qkv.strides[0],
            count=heads * dim,
            weight=self._vector(name, heads * dim),
        )

    def _multiply(self, activation: int, matrices: tuple[Matrix, ...], out: NDArray[np.float32], add: int = 0) -> None:
        first = self._numbers[id(matrices[0])]
        self._add(
            Op.MATMUL,
            activation=activation,
            matrix=first,
            num_matrices=len(matrices),
            out=out.ctypes.data,
            out_bytes=out.strides[0],
            add=add,
        )

    def _into_stream(self, activation: int, matrix: Matrix, post_norm: str) -> None:
        """x += matrix . activation, through a norm where the architecture has one."""
        b = self._buffers
        if not self._config.arch.post_norms:
            self._multiply(activation, (matrix,), b.x, add=1)
            return
        self._multiply(activation, (matrix,), b.branch)
        weight = self._vector(post_norm, self._config.hidden_size)
        self._add(Op.ADD_NORM, out=b.branch.ctypes.data, out_bytes=b.branch.strides[0], weight=weight)
