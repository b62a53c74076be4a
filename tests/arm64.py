"""arm64 under qemu: objects for it, and whole steps of a model: within `emulated(runner, build)` they are run there.

The model is loaded here as always. Its compiled code is made for arm64 too, and a small program runs it on a file that
both map: before a step everything that the code reaches is copied there, and after it what the step has written is
copied back. Addresses lie in records of integers (`engine/kernels/program.py`); those that point into one of the arrays
are changed to where its copy lies.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from forward_runner import Runner

from engine.kernels.formats import FORMATS
from engine.kernels.matmul import matmul_module
from engine.kernels.target import neon
from engine.kernels.workers import Workers
from engine.quant import TensorType

ARM64 = neon("aarch64-unknown-linux-gnu", "generic", "+neon,+dotprod")
QEMU, GCC = "qemu-aarch64", "aarch64-linux-gnu-gcc"
needs_qemu = pytest.mark.skipif(
    not (shutil.which(QEMU) and shutil.which(GCC)), reason=f"running code of arm64 wants {QEMU} and {GCC}"
)
BASE = 1 << 40
"""Address of the file in the program."""
PAGE = 4096
LARGE = 1 << 32
"""An integer as large as that is an address: counts and sizes are smaller."""
FUNCTIONS = ("matmul", "dequantize_row")

PROGRAM = """
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
typedef long long I;
I goinfer_step(I, I, I);
static I context, seen;
static void *help(void *thread) { goinfer_step(context, (I)thread, seen); return 0; }
int main(int argc, char **argv) {
    I base = atoll(argv[2]), size = atoll(argv[3]), threads = atoll(argv[4]);
    pthread_t helpers[64];
    int file = open(argv[1], O_RDWR);
    void *memory = mmap((void *)base, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    if (memory != (void *)base) return 2;
    ADDRESSES
    fflush(stdout);
    while (scanf("%lld %lld", &context, &seen) == 2) {
        for (I t = 1; t < threads; t++) if (pthread_create(&helpers[t], 0, help, (void *)t)) return 3;
        I number = goinfer_step(context, 0, 0);
        for (I t = 1; t < threads; t++) pthread_join(helpers[t], 0);
        printf("%lld\\n", number);
        fflush(stdout);
    }
    return 0;
}
"""
"""Prints the addresses of the kernels; then runs a step for each address of a context and number of the step before it,
and prints the step's number."""


def compiled(text: str, level: int = 0) -> tuple[str, bytes]:
    """Assembly and object of a module."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(ARM64.triple).create_target_machine(
        cpu=ARM64.cpu, features=ARM64.features, opt=level, reloc="static"
    )
    module = llvm.parse_assembly(text)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=level))
    builder.getModulePassManager().run(module, builder)
    return machine.emit_assembly(module), machine.emit_object(module)


def step_text() -> str:
    """IR of the walk and its kernels. Numba makes the walk for the CPU it runs on, which shows in three lines of it."""
    from engine.kernels.walk.step import module_text  # brings Numba

    text = re.sub(r"(?m)^target datalayout = .*\n", "", module_text(ARM64))
    text = re.sub(r"(?m)^target triple = .*$", f'target triple = "{ARM64.triple}"', text)
    text = re.sub(r"(?m)^declare void @llvm.x86.sse2.pause\(\)", "declare void @llvm.aarch64.hint(i32)", text)
    text = text.replace("@llvm.x86.sse2.pause()", "@llvm.aarch64.hint(i32 1)")
    assert "@llvm.x86" not in text
    return text


class Build:
    """Objects for arm64 in a folder, each compiled once, and the programs linked of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def program(self, types: list[TensorType]) -> Path:
        """One that has the step and the products of these types, whose addresses it prints in this order."""
        program = self.folder / "-".join(["step", *(t.name for t in types)])
        if program.exists():
            return program
        names = [f"{function}_{t.name}" for t in types for function in FUNCTIONS]
        prints = "".join(f'extern void {n}(void); printf("%lld\\n", (I){n}); ' for n in names)
        source = program.with_suffix(".c")
        source.write_text(PROGRAM.replace("ADDRESSES", prints))
        objects = [self._object("core", step_text), *(self._object(t.name, partial(_products, t)) for t in types)]
        subprocess.run([GCC, "-static", "-O1", source, *objects, "-lpthread", "-o", program], check=True)
        return program

    def _object(self, name: str, text: Callable[[], str]) -> Path:
        path = self.folder / f"{name}.o"
        if not path.exists():
            path.write_bytes(compiled(text(), 2)[1])
        return path


def _products(type: TensorType) -> str:
    """IR of a type's products, under names that another type's do not have."""
    return re.sub(r'@"(matmul|dequantize_row|lay_out)"', rf'@"\1_{type.name}"', matmul_module(FORMATS[type], ARM64))


class EmulatedWorkers(Workers):
    """The same steps as the model's `Workers` run, in the program."""

    def __init__(self, runner: Runner, build: Build) -> None:
        model, program = runner.model, runner.model._program
        self._model = model
        self.num_steps = 0
        self._constants = [model.weights.memory, *program._at._kept]
        buffers = [array for array in vars(model.buffers).values() if isinstance(array, np.ndarray)]
        states = [] if runner.pool.states is None else [runner.pool.states.memory]
        self._data = [*buffers, runner.pool.memory, *states]
        records = [program.operations, program.matrices, program.activations]
        self._places: list[tuple[int, int, int]] = []
        self._size = 0
        for array in (*self._constants, *self._data, *records):
            self._place(array.ctypes.data, max(array.nbytes, 1))  # an empty array has an address too
        self._own = BASE + self._size  # the context, then tables
        self._size += 64 * PAGE
        image = build.folder / "image"
        self._image = np.memmap(image, np.uint8, "w+", shape=(self._size,))
        formats = {m.fmt.type: m for m in model.matrices.all}
        command = [QEMU, "-cpu", "max", build.program(sorted(formats)), image, BASE, self._size, model.threads]
        self._process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        pairs = [(formats[type], function) for type in sorted(formats) for function in FUNCTIONS]
        self._kernels = {model.kernel_address(m, function): int(self._answer()) for m, function in pairs}
        for array in self._constants:
            self._write(self._moved(array.ctypes.data), array)
        for array in records:
            self._write(self._moved(array.ctypes.data), self._moved_words(array))

    def run(self) -> None:
        for array in self._data:
            self._write(self._moved(array.ctypes.data), array)
        context = self._model._context.copy()
        self._write_tables(context)
        self._write(self._own, self._moved_words(context))
        number = int(self._model.buffers.generation[0])
        assert self._process.stdin
        self._process.stdin.write(f"{self._own} {number}\n")
        self._process.stdin.flush()
        assert int(self._answer()) == number + 1
        for array in self._data:
            at = self._moved(array.ctypes.data) - BASE
            array.reshape(-1).view(np.uint8)[:] = self._image[at : at + array.nbytes]
        self.num_steps += 1

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(60) == 0

    def _answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()

    def _place(self, address: int, size: int) -> None:
        """Find room for an array, unless it lies within another one."""
        if any(start <= address and address + size <= start + n for start, n, _ in self._places):
            return
        self._places.append((address, size, BASE + self._size))
        self._size += -(-size // PAGE) * PAGE + PAGE

    def _moved(self, word: int) -> int:
        """Where in the program the array or kernel is that the integer is an address in. Others stay as they are."""
        if word < LARGE or BASE <= word < BASE + self._size:
            return word
        for start, size, place in self._places:
            if start <= word < start + size:
                return place + word - start
        return self._kernels[word]

    def _moved_words(self, records: np.ndarray) -> np.ndarray:
        return np.array([self._moved(int(word)) for word in records.view(np.int64).reshape(-1)], np.int64)

    def _write(self, place: int, array: np.ndarray) -> None:
        raw = array.reshape(-1).view(np.uint8)
        self._image[place - BASE : place - BASE + raw.size] = raw

    def _write_tables(self, context: np.ndarray) -> None:
        """Copy the tables of this step, which its caller made for it, and say where they are."""
        c, num_rows = context[0], int(context["num_rows"][0])
        num_tables = int(self._model.buffers.table_rows[:num_rows].max()) + 1
        place = self._own + PAGE
        for name, width in (("tables", int(c["table_blocks"])), ("state_table", 2 * int(c["num_segments"]))):
            if not c[name]:
                continue
            numbers = (ctypes.c_int32 * (num_tables * width)).from_address(int(c[name]))
            self._write(place, np.array(numbers, np.int32))
            c[name] = place
            place += -(-4 * num_tables * width // PAGE) * PAGE
        assert place <= BASE + self._size


@contextmanager
def emulated(runner: Runner, build: Build) -> Iterator[EmulatedWorkers]:
    """Within, the model's steps are run in the program."""
    ours, workers = runner.model._workers, EmulatedWorkers(runner, build)
    runner.model._workers = workers
    try:
        yield workers
    finally:
        runner.model._workers = ours
        workers.close()
