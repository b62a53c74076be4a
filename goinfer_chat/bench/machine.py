"""What this machine is and what it can do at most, measured with the kernels of `engine/kernels/probe.py`."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cpu import usable_threads
from engine.kernels.build import CompiledKernels
from engine.kernels.probe import CHAINS, READ_BYTES, probe_module
from engine.kernels.target import detect
from engine.memory import available_memory
from engine.pages import zeroed
from goinfer_chat.amounts import counted

BUFFER_BYTES = 1 << 30
"""What a pass reads: many times a large cache, so that little of it is still there from the pass before."""
PASSES = 8
ROUNDS = 4_000_000
"""Of products in a pass: some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What stands beside every figure."""

    cpu: str
    system: str
    cores: int
    """Physical cores this process may use."""
    memory_bytes: int | None
    kernels: str

    @property
    def title(self) -> str:
        memory = f", {self.memory_bytes / 2**30:.1f} GiB of memory" if self.memory_bytes else ""
        return f"{self.cpu}, {counted(self.cores, 'core')}{memory}, {self.system}"

    def lines(self, threads: int) -> list[str]:
        """For the head of a table."""
        return [self.title, f"{self.kernels}, {counted(threads, 'thread')}"]

    def as_object(self) -> dict[str, Any]:
        return asdict(self)


def describe() -> Machine:
    """This machine. Raises UnsupportedModelError when the CPU cannot run the kernels."""
    return Machine(
        cpu=_cpu_name(),
        system=f"{platform.system()} {platform.machine()}",
        cores=usable_threads(),
        memory_bytes=_memory_bytes(),
        kernels=detect().title,
    )


def peak_resident_bytes() -> int | None:
    """The most memory this process has held so far, mapped files included; None where the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@dataclass(frozen=True, slots=True)
class Peaks:
    """Multiply-adds per second of all threads together, with operands in registers."""

    integer: float
    """Of bytes."""
    floating: float
    """Of f32 numbers."""

    def seconds(self, integer: float, floating: float) -> float:
        """The least time these products take: both kinds are made by the same units, one after the other."""
        return integer / self.integer + floating / self.floating


class Probe:
    """Measures the limits with as many threads as the engine uses. Holds `buffer_bytes` of memory until closed."""

    def __init__(self, threads: int, buffer_bytes: int | None = None) -> None:
        target = detect()
        self.threads = threads
        self._compiled = CompiledKernels(target)
        self._compiled.load({"probe": partial(probe_module, target)})
        self._chains = CHAINS[target.dot]
        unit = READ_BYTES * threads
        self._buffer = zeroed(max(1, (buffer_bytes or _buffer_bytes()) // unit) * unit)
        # Pages that were never written are all the same page of zeros.
        self._buffer.fill(1)
        self._read_sums = np.zeros((threads, 16), np.int32)

    def bandwidth(self) -> float:
        """Bytes per second that can be read from memory: the best of some passes over the buffer."""
        read = self._kernel("read_stream", 3)
        part = self._buffer.nbytes // self.threads
        start = self._buffer.ctypes.data

        def work(thread: int) -> None:
            read(start + thread * part, part, self._read_sums[thread].ctypes.data)

        return self._buffer.nbytes / min(self._seconds(work) for _ in range(PASSES))

    def peaks(self, rounds: int = ROUNDS) -> Peaks:
        """Products per second: the best of some passes."""
        ones = np.ones(64, np.uint8), np.ones((self._chains, 64), np.int8), np.int32
        # Zeros: sums that grow until they are infinite might take another time on some CPU.
        zeros = np.zeros(16, np.float32), np.zeros((self._chains, 16), np.float32), np.float32
        return Peaks(
            64 * self._products("dot_products", rounds, *ones), 16 * self._products("float_products", rounds, *zeros)
        )

    def _products(self, kernel: str, rounds: int, x: NDArray[Any], y: NDArray[Any], kind: type[np.generic]) -> float:
        """Instructions of 16 lanes per second."""
        multiply = self._kernel(kernel, 4)
        sums = np.zeros((self.threads, self._chains, 16), kind)

        def work(thread: int) -> None:
            multiply(x.ctypes.data, y.ctypes.data, rounds, sums[thread].ctypes.data)

        return self.threads * rounds * self._chains / min(self._seconds(work) for _ in range(PASSES))

    def close(self) -> None:
        """Give the buffer's memory back."""
        self._buffer = zeroed(0)

    def _kernel(self, name: str, num_args: int) -> Callable[..., None]:
        # CFUNCTYPE releases the GIL for the length of the call.
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_args)(self._compiled.address("probe", name))

    def _seconds(self, work: Callable[[int], None]) -> float:
        """Time from the first thread's start to the last one's end."""
        together = threading.Barrier(self.threads)
        times = [(0.0, 0.0)] * self.threads

        def run(thread: int) -> None:
            together.wait()
            started = perf_counter()
            work(thread)
            times[thread] = started, perf_counter()

        helpers = [threading.Thread(target=run, args=(t,)) for t in range(1, self.threads)]
        for helper in helpers:
            helper.start()
        run(0)
        for helper in helpers:
            helper.join()
        return max(end for _, end in times) - min(start for start, _ in times)


def _buffer_bytes() -> int:
    free = available_memory()
    return BUFFER_BYTES if free is None else max(64 << 20, min(BUFFER_BYTES, free // 4))


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        if done.stdout.strip():
            return done.stdout.strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
