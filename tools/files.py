"""Built-in tools that read and list files, and those that change them."""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Final

from tools.errors import ToolError
from tools.journal import Change, digest
from tools.replacing import Content, current, put
from tools.root import Place, explained
from tools.tool import ToolContext, tool

MAX_SCAN_BYTES: Final = 256_000_000
"""Of a file in which lines are looked for."""
MAX_ENTRIES: Final = 500
MAX_DEPTH: Final = 100
"""Folders within each other: each that is listed is held open."""
BINARY_SAMPLE: Final = 8192
_FOLDERS: Final = """
    .git .hg .svn .venv venv node_modules __pycache__ .mypy_cache .ruff_cache .pytest_cache .tox target dist build
"""
SKIPPED: Final = frozenset(_FOLDERS.split())
"""Folders of programs, not of people: neither listed nor searched unless they are named."""


# -- reading -----------------------------------------------------------------------------------------------------------


@tool(risk="reads")
def read_file(
    context: ToolContext,
    path: Annotated[str, "Path of the file, from the project's folder"],
    first_line: Annotated[int, "First line wanted, counted from 1", {"minimum": 1}] = 1,
    last_line: Annotated[int | None, "Last line wanted; the rest of the file if left out"] = None,
) -> str:
    """Read a text file of the project, or some of its lines."""
    if last_line is not None and last_line < first_line:
        raise ToolError(f"last_line {last_line} is before first_line {first_line}")
    with context.root.place(path) as place, os.fdopen(place.open_file(), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if b"\0" in file.read(BINARY_SAMPLE):
            raise ToolError(f"{place.path} is a binary file of {size:,} bytes")
        file.seek(0)
        lines: list[str] = []
        number, scanned, more = 0, 0, False
        room = context.output_limit
        while raw := file.readline(context.output_limit * 4):
            number += 1
            scanned += len(raw)
            if scanned > MAX_SCAN_BYTES:
                raise ToolError(f"{place.path} has {size:,} bytes; lines this far from its start are not searched for")
            if number < first_line:
                continue
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            if (last_line is not None and number > last_line) or (lines and len(line) >= room):
                more = True
                break
            if len(line) >= room:
                line = f"{line[: room - 1]} [... the rest of this line is left out]"
            lines.append(line)
            room -= len(line) + 1
        if not lines:
            if size == 0:
                return f"{place.path} is empty"
            raise ToolError(f"{place.path} has {number:,} lines, so there is no line {first_line:,}")
        end = first_line + len(lines) - 1
        if not more:
            about = f"{place.path}, lines {first_line}-{end}, to the end"
        elif last_line is not None and end >= last_line:
            about = f"{place.path}, lines {first_line}-{end}"
        else:
            about = f"{place.path}, lines {first_line}-{end}; for more call again with first_line {end + 1}"
        return "\n".join([about, *lines])


@tool(risk="reads")
def list_files(
    context: ToolContext,
    path: Annotated[str, "Folder to list; the project's folder if left out"] = ".",
    pattern: Annotated[str | None, "Only files whose name or path matches, such as *.py or src/*.c"] = None,
) -> str:
    """List the files of a folder and of all folders below it."""
    lines: list[str] = []
    skipped: set[str] = set()
    with context.root.place(path) as place:
        descriptor = place.open_folder()
        try:
            for line in walk(descriptor, "", skipped):
                if pattern is None or matches(line, pattern):
                    lines.append(line)
                if len(lines) > MAX_ENTRIES:
                    break
        finally:
            os.close(descriptor)
        where = place.path
    if not lines:
        return f"no file in {where}" + (f" matches {pattern}" if pattern else "")
    notes = []
    if len(lines) > MAX_ENTRIES:
        notes.append(f"[more than {MAX_ENTRIES} files; name a folder below, or give a pattern]")
    if skipped:
        notes.append(f"[not listed: {', '.join(sorted(skipped))}]")
    return "\n".join([f"files in {where}:", *lines[:MAX_ENTRIES], *notes])


def walk(descriptor: int, prefix: str, skipped: set[str]) -> Iterator[str]:
    """Paths of the files below an open folder, sorted, folders after files; links are named and not followed.

    Names of folders that are left out are added to `skipped`.
    """
    with os.scandir(descriptor) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    folders = []
    for entry in entries:
        name = entry.name.encode("utf-8", "replace").decode()
        if entry.is_symlink():
            yield f"{prefix}{name} -> {os.readlink(entry.name, dir_fd=descriptor)}"
        elif entry.is_dir(follow_symlinks=False):
            if entry.name in SKIPPED or prefix.count("/") >= MAX_DEPTH:
                skipped.add(f"{prefix}{name}/")
            else:
                folders.append(entry.name)
        else:
            yield f"{prefix}{name}"
    for folder in folders:
        flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
        try:
            inner = os.open(folder, flags, dir_fd=descriptor)
        except OSError as error:
            yield f"{prefix}{folder}/ ({error.strerror})"
            continue
        try:
            yield from walk(inner, f"{prefix}{folder}/", skipped)
        finally:
            os.close(inner)


def matches(path: str, pattern: str) -> bool:
    """Whether a file's name, or its path, matches a pattern with * and ?."""
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(PurePosixPath(path).name, pattern)


# -- changing ----------------------------------------------------------------------------------------------------------


def _show_edit(arguments: Mapping[str, Any], context: ToolContext) -> str | None:
    with context.root.place(arguments["path"]) as place:
        before = _existing(place).content
        return diff(place.path, before, edited(place.path, before, arguments["old"], arguments["new"]))


@tool(risk="writes", preview=_show_edit)
def edit_file(
    context: ToolContext,
    path: Annotated[str, "Path of the file, from the project's folder"],
    old: Annotated[str, "Text to be replaced, exactly as it stands in the file; it must occur exactly once"],
    new: Annotated[str, "Text to stand in its place"],
) -> str:
    """Replace one piece of text in a file by another."""
    with context.root.place(path) as place:
        found = _existing(place)
        content = edited(place.path, found.content, old, new)
        _change(place, context, found, content)
        return f"{place.path}: replaced; {_lines_changed(found.content, content)}"


def edited(path: str, content: bytes, old: str, new: str) -> bytes:
    """The content with `old`, which must occur exactly once, replaced. Raises ToolError.

    In a file whose lines end with CR LF, line ends in `old` and `new` are such too.
    """
    if not old:
        raise ToolError("old is empty; to make a new file use write_file")
    if old == new:
        raise ToolError("old and new are the same, so there is nothing to change")
    ways = [(old, new)]
    if b"\r\n" in content and "\n" in old + new:
        ways.insert(0, tuple(re.sub(r"\r?\n", "\r\n", text) for text in (old, new)))  # type: ignore[arg-type]
    for before, after in ways:
        wanted = before.encode("utf-8", "replace")
        places = _places(content, wanted)
        if len(places) == 1:
            start = places[0]
            return content[:start] + after.encode("utf-8", "replace") + content[start + len(wanted) :]
        if places:
            lines = ", ".join(str(content.count(b"\n", 0, place) + 1) for place in places[:10])
            raise ToolError(
                f"old occurs {len(places)} times in {path}, at lines {lines}; include more of the text around the "
                "place that is meant"
            )
    raise ToolError(f"old does not occur in {path}{_near(content, old)}")


def _places(content: bytes, wanted: bytes) -> list[int]:
    """Where it begins, overlapping places too."""
    places: list[int] = []
    start = content.find(wanted)
    while start >= 0 and len(places) < 1000:
        places.append(start)
        start = content.find(wanted, start + 1)
    return places


def _near(content: bytes, old: str) -> str:
    """A hint at lines that differ from the first line of `old` in their spaces only."""
    first = next((line for line in old.splitlines() if line.strip()), "")
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        if first and line.split() == first.split():
            return f"; line {number} has its first line with other spaces, or what follows differs: {line!r}"
    return "; read the file and copy the text exactly"


def _show_write(arguments: Mapping[str, Any], context: ToolContext) -> str | None:
    try:
        with context.root.place(arguments["path"]) as place:
            found, path = current(place), place.path
    except ToolError:  # a folder that is to be made
        found, path = None, arguments["path"]
    return diff(path, found.content if found else None, written(found, arguments["content"]))


@tool(risk="writes", preview=_show_write)
def write_file(
    context: ToolContext,
    path: Annotated[str, "Path of the file, from the project's folder; missing folders are made"],
    content: Annotated[str, "All that the file is to hold"],
) -> str:
    """Make a file, or replace all that a file holds. For a small change use edit_file."""
    with context.root.place(path, make_folders=True) as place:
        found = current(place)
        data = written(found, content)
        _change(place, context, found, data)
        size = f"{_counted(len(data.splitlines()), 'line')}, {_counted(len(data), 'byte')}"
        return f"{place.path}: {'replaced' if found else 'made'}, {size}"


def written(found: Content | None, content: str) -> bytes:
    """A file that had CR LF at the end of every line keeps them."""
    data = content.encode("utf-8", "replace")
    if found and b"\r\n" in found.content and found.content.count(b"\r\n") == found.content.count(b"\n"):
        data = re.sub(rb"\r?\n", b"\r\n", data)
    return data


def diff(path: str, before: bytes | None, after: bytes) -> str:
    """A unified diff; `before` None: a new file."""
    old = [] if before is None else before.decode("utf-8", "replace").splitlines()
    new = after.decode("utf-8", "replace").splitlines()
    if before is not None and old == new:
        return f"{path}: only line ends, or nothing at all, would change"
    source = "/dev/null" if before is None else f"a/{path}"
    return "\n".join(difflib.unified_diff(old, new, source, f"b/{path}", lineterm=""))


def _existing(place: Place) -> Content:
    found = current(place)
    if found is None:
        os.close(place.open_file())  # raises what is wrong
        raise ToolError(f"{place.path} was created meanwhile; read it")
    return found


def _change(place: Place, context: ToolContext, found: Content | None, content: bytes) -> None:
    if context.journal is not None:
        change = Change(
            root=str(context.root.path),
            path=place.path,
            key=context.key,
            existed=found is not None,
            mode=found.mode if found else 0,
            after=digest(content),
            made=place.made,
        )
        context.journal.keep(change, found.content if found else b"")
    with explained(place.path):
        put(place, content, mode=found.mode if found else None, expected=found)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def _lines_changed(before: bytes, after: bytes) -> str:
    change = after.count(b"\n") - before.count(b"\n")
    if change == 0:
        return "as many lines as before"
    return f"{_counted(abs(change), 'line')} {'more' if change > 0 else 'fewer'}"
