"""Built-in tools that run programs: a command, and the project's tests."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

from tools.errors import ToolError
from tools.process import Ended, run_program
from tools.tool import ToolContext, ToolResult, tool

_SHELL_WORDS: Final = frozenset(("|", "||", "&", "&&", ";", ">", ">>", "<", "<<", "2>", "2>&1", "&>"))


@tool(risk="runs", command="command")
def run_command(
    context: ToolContext,
    command: Annotated[str, "Program and arguments, as on a command line"],
    shell: Annotated[bool, "Whether a shell is needed, for pipes, redirections, variables or several commands"] = False,
) -> ToolResult:
    """Run a program in the project's folder and give its exit code and what it prints. It gets no input."""
    return _result(_run(_words(command, shell), context), context)


@tool(risk="runs")
def run_tests(
    context: ToolContext,
    path: Annotated[str | None, "A test file or folder; all tests if left out"] = None,
) -> ToolResult:
    """Run the project's tests and give what they print."""
    where = []
    if path is not None:
        name, colons, test = path.partition("::")
        with context.root.place(name) as place:
            if place.info() is None:
                os.close(place.open_file())  # raises what is wrong
            where = [f"{place.path}{colons}{test}"]
    command = shlex.split(context.test_command) if context.test_command else test_command(context.root.path)
    ended = _run([*command, *where], context)
    if "No module named pytest" in ended.output and command[1:3] == ["-m", "pytest"]:
        ended = _run([command[0], "-m", "unittest", *(where or ["discover"])], context)
    return _result(ended, context)


def test_command(folder: Path) -> list[str]:
    """How the tests of a project are run, from the files that are there."""
    if (folder / "Cargo.toml").is_file():
        return ["cargo", "test"]
    if (folder / "go.mod").is_file():
        return ["go", "test", "./..."]
    with suppress(OSError):
        if '"test"' in (folder / "package.json").read_text(encoding="utf-8", errors="replace"):
            return ["npm", "test", "--silent"]
    for python in (folder / ".venv/bin/python", folder / "venv/bin/python"):
        if os.access(python, os.X_OK):
            return [str(python), "-m", "pytest", "-q"]
    return [sys.executable, "-m", "pytest", "-q"]


def _words(command: str, shell: bool) -> list[str]:
    if not command.strip():
        raise ToolError("the command is empty")
    if shell:
        return ["/bin/sh", "-c", command]
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ToolError(f"the command cannot be split into words: {error}") from error
    needing = next((word for word in words if word in _SHELL_WORDS), None)
    if needing is not None:
        raise ToolError(f"{needing} means something to a shell only; run it with shell true, or without {needing}")
    return words


def _run(command: list[str], context: ToolContext) -> Ended:
    return run_program(
        command,
        folder=context.root.path,
        environment=context.environment,
        timeout_seconds=context.timeout_seconds,
        cancel=context.cancel,
        output_limit=context.output_limit,
    )


def _result(ended: Ended, context: ToolContext) -> ToolResult:
    printed = bool(ended.output.strip())
    output = ended.output if printed else "(it printed nothing)"
    until_then = f"until then it printed:\n{ended.output}" if printed else "until then it printed nothing"
    left = "\n[processes that it left running were ended]" if ended.left_running and ended.how == "exited" else ""
    match ended.how:
        case "timeout":
            why = f"it was ended, because it ran longer than {context.timeout_seconds:g} s"
            return ToolResult("timeout", f"{why}; {until_then}")
        case "cancelled":
            return ToolResult("cancelled", f"it was stopped by the user; {until_then}")
        case _:
            how = f"exit code {ended.code}" if ended.code >= 0 else f"ended by signal {-ended.code}"
            return ToolResult("ok", f"{how}\n{output}{left}")
