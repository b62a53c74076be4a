"""The root folder: every path a model writes is resolved inside it, and cannot leave it.

Paths are walked folder by folder through open descriptors, never by a whole path, so what is found cannot be exchanged
for a link between the check and the use. Links are followed as long as they stay inside; `..` steps back to the folder
that is held open. Only plain files and folders are opened: a pipe would block, and opening a device can do things.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Final, Self

from tools.errors import ToolError, ToolSetupError

MAX_LINKS: Final = 40
_FOLDER: Final = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_FILE: Final = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
# A pipe or a terminal that took the place of a file neither blocks nor becomes ours.
_CAREFUL: Final = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a path leads: a name in a folder that is held open. The name is no link, and need not exist."""

    folder: int
    """Descriptor of the folder."""
    name: str
    path: str
    """From the root, with `/`, links resolved; "." is the root itself."""
    made: tuple[str, ...] = ()
    """Folders that were made on the way, from the root, outermost first."""

    def info(self) -> os.stat_result | None:
        """None where nothing is."""
        try:
            return os.stat(self.name, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open_file(self) -> int:
        """A descriptor of the plain file. Raises ToolError for anything else."""
        info = self.info()
        if info is None:
            raise ToolError(f"there is no file {self.path}{self._near()}")
        _expect_file(info, self.path)
        descriptor = os.open(self.name, _FILE | _CAREFUL, dir_fd=self.folder)
        try:
            _expect_file(os.fstat(descriptor), self.path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def open_folder(self) -> int:
        """A descriptor of the folder. Raises ToolError for anything else."""
        info = self.info()
        if info is None:
            raise ToolError(f"there is no folder {self.path}{self._near()}")
        if not stat.S_ISDIR(info.st_mode):
            raise ToolError(f"{self.path} is not a folder")
        return os.open(self.name, _FOLDER, dir_fd=self.folder)

    def _near(self) -> str:
        with suppress(OSError):
            names = os.listdir(self.folder)
            near = get_close_matches(self.name, names, n=3, cutoff=0.5)
            folder = str(PurePosixPath(self.path).parent)
            if near:
                return f"; near it: {', '.join(str(PurePosixPath(folder) / name) for name in near)}"
        return "; list_files shows what there is"


class Root:
    """A folder that tools work in. Raises ToolSetupError when it cannot be used. A context manager."""

    def __init__(self, path: Path) -> None:
        self._given = os.path.abspath(path)
        self.path = Path(os.path.realpath(path))
        try:
            self._descriptor = os.open(self.path, _FOLDER)
        except OSError as error:
            raise ToolSetupError(f"{path} cannot be the folder of the tools: {error.strerror}") from error

    @contextmanager
    def place(self, path: str, *, make_folders: bool = False) -> Iterator[Place]:
        """Where a path leads. Raises ToolError, also for OSErrors of the block.

        With `make_folders`, folders that are missing on the way are made.
        """
        with explained(path):
            walk = _Walk(self, make_folders)
            try:
                yield walk.to(self._parts(path))
            finally:
                walk.close()

    def close(self) -> None:
        """May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()

    def _parts(self, path: str) -> list[str]:
        """The names of a path from the root. Raises ToolError for an absolute one that is not inside."""
        if "\0" in path or not path:
            raise ToolError(f"{path!r} is not a path")
        if not path.startswith("/"):
            return path.split("/")
        for root in (str(self.path), self._given):
            if path == root or path.startswith(root.rstrip("/") + "/"):
                return path[len(root) :].split("/")
        raise ToolError(f"{path} is outside the folder of this project; give paths from it, such as src/main.py")


class _Walk:
    """Folder by folder from the root to a place; holds them open."""

    def __init__(self, root: Root, make_folders: bool) -> None:
        self._root = root
        self._make_folders = make_folders
        self._folders: list[tuple[int, str]] = []
        self._made: list[str] = []

    def to(self, names: list[str]) -> Place:
        parts = deque(name for name in names if name not in ("", "."))
        num_links = 0
        while parts:
            name = parts.popleft()
            if name == "..":
                self._back()
                continue
            target = self._link(name)
            if target is not None:
                num_links += 1
                if num_links > MAX_LINKS:
                    raise ToolError(f"{self._path(name)}: too many links")
                if target.startswith("/"):
                    self.close()
                parts.extendleft(part for part in reversed(self._root._parts(target)) if part not in ("", "."))
            elif parts:
                self._enter(name)
            else:
                return Place(folder=self._top, name=name, path=self._path(name), made=tuple(self._made))
        path = self._path("").rstrip("/") or "."
        return Place(folder=self._top, name=".", path=path, made=tuple(self._made))

    @property
    def _top(self) -> int:
        return self._folders[-1][0] if self._folders else self._root._descriptor

    def _path(self, name: str) -> str:
        return "/".join([*(folder for _, folder in self._folders), name])

    def _back(self) -> None:
        if not self._folders:
            raise ToolError("the path leads out of the folder of this project; give paths from it")
        os.close(self._folders.pop()[0])

    def _link(self, name: str) -> str | None:
        """Where a link leads; None for anything else."""
        try:
            info = os.stat(name, dir_fd=self._top, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return os.readlink(name, dir_fd=self._top) if stat.S_ISLNK(info.st_mode) else None

    def _enter(self, name: str) -> None:
        path = self._path(name)
        try:
            descriptor = os.open(name, _FOLDER, dir_fd=self._top)
        except FileNotFoundError:
            if not self._make_folders:
                raise ToolError(f"there is no folder {path}; list_files shows what there is") from None
            os.mkdir(name, dir_fd=self._top)
            self._made.append(path)
            descriptor = os.open(name, _FOLDER, dir_fd=self._top)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise ToolError(f"{path} is not a folder") from None
            raise
        self._folders.append((descriptor, name))

    def close(self) -> None:
        """Stand at the root again."""
        while self._folders:
            os.close(self._folders.pop()[0])


@contextmanager
def explained(path: str) -> Iterator[None]:
    """The system's errors as ToolError."""
    try:
        yield
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror or error}") from error
    except UnicodeEncodeError as error:
        raise ToolError(f"{path!r} is not a path") from error


def _expect_file(info: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(info.st_mode):
        raise ToolError(f"{path} is a folder; list_files shows what is in it")
    if not stat.S_ISREG(info.st_mode):
        raise ToolError(f"{path} is not a plain file")
