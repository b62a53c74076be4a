"""Lines that match a regular expression, as a program of its own: `search` runs it where there is no ripgrep.

Takes one argument, a JSON object, and imports nothing of ours: it runs alone.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from typing import Any

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_MAX_LINE = 300
_MAX_BYTES = 100_000_000
_MAX_DEPTH = 100


def main(request: dict[str, Any]) -> int:
    """Prints `path:line:text`; the path "-" is standard input and is not printed.

    Returns the exit code: 1 when nothing matches, as with grep.
    """
    pattern = re.compile(request["pattern"])
    left = request["max"]
    for path in _files(request["path"], frozenset(request["skipped"]), request["files"]):
        for number, line in _matches(path, pattern):
            where = "" if path == "-" else f"{path}:"
            sys.stdout.buffer.write(f"{where}{number}:{line[:_MAX_LINE]}\n".encode("utf-8", "replace"))
            left -= 1
            if left == 0:
                return 0
    return 0 if left < request["max"] else 1


def _files(path: str, skipped: frozenset[str], files: str | None) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, names in os.walk(path):
        deep = os.path.relpath(folder, path).count(os.sep) >= _MAX_DEPTH - 1
        folders[:] = [] if deep else sorted(name for name in folders if name not in skipped)
        for name in sorted(names):
            if files is None or fnmatch.fnmatchcase(name, files):
                yield os.path.join(folder, name)


def _matches(path: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    try:
        descriptor = 0 if path == "-" else os.open(path, _FLAGS)
    except OSError:
        return
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or b"\0" in file.read(8192):
            return
        file.seek(0)
        for number, raw in enumerate(file.read(_MAX_BYTES).splitlines(), 1):
            line = raw.decode("utf-8", "replace")
            if pattern.search(line):
                yield number, line


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
