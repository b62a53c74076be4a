"""A command of the person's own, in the person's own shell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping
from typing import Final

from engine.errors import UsageError
from goinfer_chat.attachments import Attachment
from goinfer_chat.files import reason_of
from goinfer_chat.terminal import sanitize

MAX_OUTPUT_BYTES: Final = 100_000
_SEQUENCE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def run_shell(line: str, environ: Mapping[str, str] = os.environ) -> int:
    """Run it with the terminal as it is. Returns its exit code, or minus the signal that ended it."""
    return _started(line, environ, None).wait()


def run_shell_captured(
    line: str, show: Callable[[str], None], environ: Mapping[str, str] = os.environ
) -> tuple[Attachment, int]:
    """Run it without input and show what it prints, as it comes. Returns that as well, and the exit code.

    Of a long output the first and the last part are kept, MAX_OUTPUT_BYTES in all.
    """
    process = _started(line, environ, subprocess.PIPE)
    first, last, num_bytes = bytearray(), bytearray(), 0
    assert process.stdout is not None
    with process:
        while piece := os.read(process.stdout.fileno(), 65536):
            show(piece.decode("utf-8", "replace"))
            num_bytes += len(piece)
            room = MAX_OUTPUT_BYTES // 2 - len(first)
            first += piece[:room]
            last = (last + piece[room:])[-MAX_OUTPUT_BYTES // 2 :]
    left_out = num_bytes - len(first) - len(last)
    middle = f"\n[... {left_out:,} bytes left out ...]\n".encode() if left_out else b""
    text = _plain(bytes(first + middle + last).decode("utf-8", "replace"))
    code = process.returncode
    return Attachment(f"$ {line}" + (f" (exit code {code})" if code else ""), text), code


def _plain(text: str) -> str:
    """Without colours, titles and other things said to a terminal, which are no words."""
    return sanitize(_SEQUENCE.sub("", text), terminal=False).removesuffix("\n")


def how_it_ended(code: int) -> str:
    """Empty when the command succeeded."""
    if code < 0:
        try:
            return f"ended by {signal.Signals(-code).name}"
        except ValueError:  # most of the real-time signals have no name
            return f"ended by signal {-code}"
    return f"exit code {code}" if code else ""


def _started(line: str, environ: Mapping[str, str], output: int | None) -> subprocess.Popen[bytes]:
    shell = environ.get("SHELL") or "/bin/sh"
    try:
        return subprocess.Popen(
            [shell, "-c", line],
            stdin=None if output is None else subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"{shell} cannot be run: {reason_of(error)}; set SHELL") from None
