"""Weights in memory: every matrix of a model laid out for the kernels (`kernels/formats.py`)."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from engine import giw_file
from engine.errors import ModelFileError, OutOfMemoryError
from engine.gguf_file import GGUFFile
from engine.kernels.formats import FORMATS, ROWS, WeightFormat
from engine.kernels.layout import LayOut
from engine.kernels.matmul import PREFETCH_BYTES
from engine.pages import PRIVATE, REFUSED, zeroed
from engine.quant import dequantize, row_bytes

PAGE = 4096


def _check_addresses(gguf: GGUFFile, num_bytes: int) -> None:
    """Raise OutOfMemoryError if a file of this size cannot be mapped, before it is written."""
    try:
        if hasattr(mmap, "PROT_READ"):
            mmap.mmap(-1, num_bytes, prot=mmap.PROT_READ, **PRIVATE).close()
    except REFUSED as error:
        raise OutOfMemoryError(
            f"{gguf.path.name}: its weights, {num_bytes / 1e9:.1f} GB, cannot be mapped: {error}; a limit on address "
            "space (ulimit -v) counts what is mapped too"
        ) from error


class Matrix:
    """A weight matrix [num_rows, num_columns], or one for each of `count` experts, one after the other: where its
    groups lie and in which format."""

    def __init__(
        self,
        gguf: GGUFFile,
        name: str,
        shape: tuple[int, int],
        part: tuple[int, int] = (0, 1),
        experts: int = 0,
        run: int = 0,
    ) -> None:
        """Check the tensor against the shape the architecture asks for. Raises ModelFileError.

        part (i, n): the matrix is the i-th of n equal stretches of rows of the tensor, or of each expert's share of it;
        or, of n runs of `run` rows that take turns, it has the i-th.
        """
        info = gguf.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{gguf.path.name}: tensor {name} is missing")
        whole: tuple[int, ...] = (part[1] * shape[0], shape[1])
        if experts:
            whole = (experts, *whole)
        elif shape[0] == 1 and info.shape == shape[1:]:
            whole = info.shape  # a single row may be written as a vector
        if info.shape != whole:
            raise ModelFileError(
                f"{gguf.path.name}: tensor {name} is {info.shape}, and the other sizes in the file ask for {whole}"
            )
        self.name = name
        self.fmt: WeightFormat = FORMATS[info.type]
        self.count = experts or 1
        self.num_rows, self.num_columns = shape
        self.part, self.run = part, run or shape[0]
        if self.num_columns % self.fmt.span:
            raise ModelFileError(
                f"{gguf.path.name}: tensor {name} has rows of {self.num_columns} values, which are not whole blocks of "
                f"{self.fmt.span}"
            )
        self.num_blocks = self.num_columns // self.fmt.span
        self.num_groups = -(-self.num_rows // ROWS)
        """Of one expert, where there are several."""
        self.group_bytes = self.fmt.group_bytes(self.num_blocks)
        self.offset = 0

    @property
    def num_bytes(self) -> int:
        return self.count * self.num_groups * self.group_bytes


class Weights:
    """All matrices of a model in one stretch of memory, each at its `offset`.

    `memory` is a mapping of the model's `.giw` file, or, the first time, laid out here; then the file is written beside
    whatever comes next, until `close` waits for it.

    With `from_disk` they are never in memory together: the file is written piece by piece and then mapped, so that the
    system reads what a step touches and may let go of it again. Such a file is not checked whole at a start.
    """

    def __init__(
        self,
        gguf: GGUFFile,
        matrices: list[Matrix],
        threads: int,
        progress: Callable[[str, float], None],
        lay_out: LayOut,
        from_disk: bool = False,
    ) -> None:
        """Raises OutOfMemoryError, also where the file of `from_disk` cannot be written."""
        total = 0
        for m in matrices:
            m.offset = total
            total += -(-m.num_bytes // PAGE) * PAGE
        # Kernels prefetch past the last group, panels by two groups more; no prefetch fails, but most should hit ours.
        total += 2 * PREFETCH_BYTES
        self.from_disk = from_disk
        self._lay_out_rows = lay_out
        self._writer: threading.Thread | None = None
        places = repr([(m.name, m.fmt.type.name, m.offset, m.num_bytes) for m in matrices])
        key = b""
        if from_disk or total >= giw_file.WORTH_KEEPING:
            key = giw_file.key_of(gguf.content_hash(), places)
        kept = giw_file.open_kept(key, total, threads, whole=not from_disk) if key else None
        if kept is None and from_disk:
            _check_addresses(gguf, total)
            kept = self._written(gguf, matrices, threads, progress, key, total)
        if kept is not None:
            self.memory = kept
            return
        self.memory = zeroed(total)

        def put(offset: int, piece: NDArray[np.uint8]) -> None:
            self.memory[offset : offset + piece.size] = piece.reshape(-1)

        self._lay_out(gguf, matrices, threads, progress, put)
        if key:
            # Not a daemon: a program that ends at once still leaves the file behind.
            self._writer = threading.Thread(
                target=giw_file.keep, args=(key, gguf.path.stem, self.memory, 1), name="goinfer-giw"
            )
            self._writer.start()

    def _written(
        self,
        gguf: GGUFFile,
        matrices: list[Matrix],
        threads: int,
        progress: Callable[[str, float], None],
        key: bytes,
        total: int,
    ) -> NDArray[np.uint8]:
        """A mapping of the file, which is written first."""
        try:
            giw_file.write(
                key, gguf.path.stem, total, lambda put: self._lay_out(gguf, matrices, threads, progress, put)
            )
        except OSError as error:
            raise OutOfMemoryError(
                f"{gguf.path.name}: its weights, {total / 1e9:.1f} GB, cannot be laid out in {giw_file.folder()}: "
                f"{error.strerror or error}; {giw_file.CAP_ENVIRONMENT} sets the cap, {giw_file.cap_bytes() / 1e9:g} GB"
            ) from error
        kept = giw_file.open_kept(key, total, threads, whole=False)
        if kept is None:
            raise OutOfMemoryError(f"{gguf.path.name}: what was just written to {giw_file.folder()} is not there")
        return kept

    def _lay_out(
        self,
        gguf: GGUFFile,
        matrices: list[Matrix],
        threads: int,
        progress: Callable[[str, float], None],
        put: Callable[[int, NDArray[np.uint8]], None],
    ) -> None:
        def place(m: Matrix) -> int:
            whole = gguf.data(m.name).reshape(m.count, -1, row_bytes(m.fmt.type, m.num_columns))
            # In strips that stay in the cache between being read and being written.
            strip = np.empty((max(1, (1 << 19) // m.group_bytes), m.group_bytes), np.uint8)
            offset = m.offset
            for expert in whole:
                runs = expert.reshape(m.num_rows // m.run, m.part[1], m.run, -1)
                raw = runs[:, m.part[0]].reshape(m.num_rows, -1)
                for g in range(0, m.num_groups, len(strip)):
                    groups = strip[: m.num_groups - g]
                    self._lay_out_rows(m.fmt, raw[g * ROWS : (g + len(groups)) * ROWS], groups)
                    put(offset, groups)
                    offset += groups.size
            gguf.forget(m.name)
            return m.num_bytes

        done, total = 0, sum(m.num_bytes for m in matrices)
        with ThreadPoolExecutor(threads) as pool:
            for placed in pool.map(place, matrices):
                done += placed
                progress("loading weights", done / total)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.join()


def load_vector(gguf: GGUFFile, name: str, *shape: int) -> NDArray[np.float32]:
    """A norm's weights or a bias [size] f32. Raises ModelFileError if it is missing or of another shape."""
    info = gguf.tensors.get(name)
    if info is None:
        raise ModelFileError(f"{gguf.path.name}: tensor {name} is missing")
    if info.shape != shape:
        raise ModelFileError(f"{gguf.path.name}: tensor {name} is {info.shape}, and should be {shape}")
    return np.ascontiguousarray(dequantize(info.type, gguf.data(name)).reshape(-1))
