"""From IR to machine code, kept in a cache so that it is made once for each CPU.

A module is compiled to an object file; later starts only load it, which takes milliseconds and imports neither Numba
nor the generators. The key of the cache is everything the code depends on: the sources of this package, the versions
of the compilers and the target. The folder belongs to its user alone, since what is in it is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from engine.kernels.target import Target

Emit = Callable[[], str]
"""Makes the text of an LLVM module; only called when its object is not in the cache."""

_lock = threading.Lock()
_OLD_SECONDS = 60 * 86400


@cache
def _source_digest() -> str:
    """Hash of the sources of this package and of what it imports from the engine, and of the compilers' versions."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*here.rglob("*.py"), here.parent / "quant.py"]):
        if path.parent.name == "twins":  # never compiled
            continue
        digest.update(path.name.encode() + path.read_bytes())
    for package in ("llvmlite", "numba"):
        digest.update(importlib.metadata.version(package).encode())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return platformdirs.user_cache_path("goinfer-chat") / "kernels"


def _private_folder(path: Path) -> bool:
    """Create `path` for this user alone. False if others could write there, so that nothing in it may be run."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.name == "nt":
            return True
        info = path.stat()
        if info.st_uid == os.getuid() and stat.S_IMODE(info.st_mode) & 0o022:
            path.chmod(0o700)
            info = path.stat()
        return info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o022
    except OSError:
        return False


_COMPILING = "compiling kernels for this CPU, once: some ten seconds"


class CompiledKernels:
    """Machine code of the modules asked for. Addresses stay valid as long as this object lives."""

    def __init__(self, target: Target, progress: Callable[[str, float], None] | None = None) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.target = target
        self._loaded: dict[str, Any] = {}
        self._progress = progress or (lambda text, fraction: None)
        folder = cache_folder()
        self._folder = folder if _private_folder(folder) else None
        key = hashlib.sha256(repr((_source_digest(), llvm.llvm_version_info, target)).encode())
        self._key = key.hexdigest()[:24]

    def _machine(self) -> Any:
        """A code generator for the target. One for each use: what links with it owns and frees it."""
        import llvmlite.binding as llvm

        return llvm.Target.from_triple(self.target.triple).create_target_machine(
            cpu=self.target.cpu, features=self.target.features, opt=3, jit=True
        )

    def load(self, modules: Mapping[str, Emit]) -> None:
        """Make the functions of these modules callable, compiling what is not in the cache."""
        with _lock:
            missing = [name for name in modules if name not in self._loaded]
            objects = {name: self._read(name) for name in missing}
            todo = [name for name, code in objects.items() if code is None]
            for n, name in enumerate(todo):
                self._progress(_COMPILING, n / len(todo))
                objects[name] = self._compile(modules[name]())
                self._keep(name, objects[name])
            if todo:
                self._progress(_COMPILING, 1.0)
            for name in missing:
                self._link(name, objects[name])

    def address(self, module: str, function: str) -> int:
        """Address of a function of a loaded module."""
        found: int = self._loaded[module].get_function_address(function)
        assert found, f"module {module} has no function {function}"
        return found

    def _path(self, name: str) -> Path | None:
        return self._folder / f"{name}-{self._key}.o" if self._folder else None

    def _read(self, name: str) -> bytes | None:
        path = self._path(name)
        try:
            data = path.read_bytes() if path else b""
            if path:
                os.utime(path)  # loaded now
        except OSError:
            return None
        # The last 32 bytes are the checksum of what comes before: a cut file is compiled again.
        code, digest = data[:-32], data[-32:]
        return code if code and hashlib.sha256(code).digest() == digest else None

    def _keep(self, name: str, code: bytes | None) -> None:
        path = self._path(name)
        if path is None or code is None:
            return
        self._forget_old(path.parent)
        # A full or read-only disk costs the next start some seconds, not this one its kernels.
        with contextlib.suppress(OSError):
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as f:
                    f.write(code + hashlib.sha256(code).digest())
                os.replace(temporary, path)
            except OSError:
                os.unlink(temporary)

    @staticmethod
    def _forget_old(folder: Path) -> None:
        """Remove code that nothing has loaded for two months: of earlier versions, or of another CPU."""
        for old in folder.iterdir():
            with contextlib.suppress(OSError):
                if old.stat().st_mtime < time.time() - _OLD_SECONDS:
                    old.unlink()

    def _compile(self, text: str) -> bytes:
        import llvmlite.binding as llvm

        module = llvm.parse_assembly(text)
        module.verify()
        machine = self._machine()
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(module, builder)
        code: bytes = machine.emit_object(module)
        return code

    def _link(self, name: str, code: bytes | None) -> None:
        import llvmlite.binding as llvm

        empty = llvm.parse_assembly(f'target triple = "{self.target.triple}"')
        linker = llvm.create_mcjit_compiler(empty, self._machine())
        linker.add_object_file(llvm.ObjectFileRef.from_data(code))
        linker.finalize_object()
        self._loaded[name] = linker
