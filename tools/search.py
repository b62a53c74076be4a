"""The built-in tool `search`: with ripgrep where it is installed, else with Python.

Both run as a program of their own: a regular expression that takes for ever then ends with its time, not never.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from typing import Annotated, Final

from tools.errors import ToolError
from tools.files import SKIPPED
from tools.process import Ended, run_program
from tools.tool import ToolContext, ToolResult, tool

MAX_MATCHES: Final = 200
MAX_LINE: Final = 300
"""Characters of a line that are shown."""
_FALLBACK: Final = Path(__file__).with_name("grep.py")


@tool(risk="reads")
def search(
    context: ToolContext,
    pattern: Annotated[str, "Regular expression"],
    path: Annotated[str, "Folder or file to search; the project's folder if left out"] = ".",
    files: Annotated[str | None, "Only files whose name matches, such as *.py"] = None,
) -> ToolResult | str:
    """Find lines that match a regular expression. Gives path, line number and line."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError) as error:
        raise ToolError(f"{pattern!r} is not a regular expression: {error}") from error
    with context.root.place(path) as place:
        info = place.info()
        is_folder = info is not None and stat.S_ISDIR(info.st_mode)
        descriptor = place.open_folder() if is_folder else place.open_file()
        try:
            ended = _run(pattern, files, descriptor, is_folder, context)
        finally:
            os.close(descriptor)
        where = place.path
    if ended.how == "timeout":
        return ToolResult("timeout", f"the search took longer than {context.timeout_seconds:g} s; narrow it down")
    if ended.how == "cancelled":
        return ToolResult("cancelled", "the search was stopped")
    prefix = "" if where == "." else f"{where}/" if is_folder else f"{where}:"
    return _shown(ended, pattern, where, prefix)


def _run(pattern: str, files: str | None, descriptor: int, is_folder: bool, context: ToolContext) -> Ended:
    """Search what is open: a folder becomes the program's own, a file its input, so neither can be exchanged."""
    program = shutil.which("rg", path=context.environment.get("PATH"))
    folder = Path(f"/proc/self/fd/{descriptor}") if is_folder and os.path.isdir("/proc/self/fd") else None
    where = "." if is_folder else "-"
    return run_program(
        _ripgrep(program, pattern, where, files) if program else _ours(pattern, where, files),
        folder=folder or context.root.path,
        environment=context.environment,
        timeout_seconds=context.timeout_seconds,
        cancel=context.cancel,
        output_limit=MAX_MATCHES * (MAX_LINE + 1000),
        stdin=None if is_folder else descriptor,
    )


def _ripgrep(program: str, pattern: str, where: str, files: str | None) -> list[str]:
    """Links are not followed, which is its default, and no settings of the person's are read."""
    options = ["--no-config", "--no-heading", "--line-number", "--color=never", "--sort=path", "--hidden"]
    options += [f"--max-columns={MAX_LINE}", "--max-columns-preview", f"--max-count={MAX_MATCHES + 1}"]
    options += ["--with-filename"] if where == "." else ["--no-filename"]
    options += [part for name in sorted(SKIPPED) for part in ("--glob", f"!**/{name}/**")]
    options += [f"--glob={files}"] if files else []
    return [program, *options, f"--regexp={pattern}", "--", where]


def _ours(pattern: str, where: str, files: str | None) -> list[str]:
    request = {"pattern": pattern, "path": where, "files": files, "skipped": sorted(SKIPPED), "max": MAX_MATCHES + 1}
    return [sys.executable, "-I", "-S", str(_FALLBACK), json.dumps(request)]


def _shown(ended: Ended, pattern: str, where: str, prefix: str) -> str:
    lines = ended.output.splitlines()
    if ended.code not in (0, 1) and not any(re.match(r"(.+?:)?\d+:", line) for line in lines):
        raise ToolError(f"the search failed with exit code {ended.code}: {' '.join(lines[:5])}")
    if not lines:
        return f"nothing in {where} matches {pattern}"
    most = MAX_LINE + 200
    shown = [prefix + line.removeprefix("./") for line in lines[:MAX_MATCHES]]
    shown = [line if len(line) <= most else f"{line[:most]} [...]" for line in shown]
    more = [f"[more than {MAX_MATCHES} lines match; narrow it down]"] if len(lines) > MAX_MATCHES else []
    return "\n".join([*shown, *more])
