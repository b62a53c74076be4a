"""Programs that are started for a model: without a terminal, without input, ended with everything they started.

A program gets a session of its own, so it has no terminal to wait for, and an empty standard input. When it ends, or
its time is up, or the call is cancelled, its process group is ended. On Linux so are processes that left the group: a
warden (warden.py) inherits them, and should somebody end the warden, their session or a mark in their environment tells
whose they are.
"""

from __future__ import annotations

import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from tools.errors import ToolError
from tools.output import HeadAndTail

MARK: Final = "GOINFER_CHAT_TOOL_CALL"
POLL_SECONDS: Final = 0.02
POLITE_SECONDS: Final = 1.2
"""Between SIGTERM and SIGKILL: the warden takes 0.3 before it ends what is left, and 0.7 for that at most."""
_WARDEN: Final = Path(__file__).with_name("warden.py")
_LONGEST_REPORT: Final = 64
_REPORT: Final = re.compile(rb"(errno (?P<errno>\d{1,5}) )?exit (?P<code>-?\d{1,5}) (?P<left>[01])")
DRAIN_SECONDS: Final = 0.2
"""For output that is still in the pipe when all is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended, and what it wrote to standard output and standard error, in the order of writing."""

    how: Literal["exited", "timeout", "cancelled"]
    code: int
    """The exit code; -n: by signal n."""
    output: str
    left_running: bool
    """Whether it left processes behind, which were ended."""


def run_program(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    timeout_seconds: float,
    cancel: threading.Event,
    output_limit: int,
    stdin: int | None = None,
) -> Ended:
    """Run a program to its end. `stdin`: a descriptor that it reads; None: nothing to read.

    Raises ToolError when it cannot be started.
    """
    mark = secrets.token_hex(16)
    reports, to_report = os.pipe()
    warden = (
        [sys.executable, "-I", "-S", str(_WARDEN), str(to_report)] if sys.platform == "linux" and sys.executable else []
    )
    os.set_blocking(reports, False)  # somebody else may hold the other end, and for ever
    with open(reports, "rb", buffering=0) as report:
        try:
            process = subprocess.Popen(
                [*warden, *command],
                cwd=folder,
                env={**environment, MARK: mark},
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                restore_signals=True,
                pass_fds=(to_report,) if warden else (),
            )
        except (OSError, ValueError) as error:
            raise _cannot_start(command[0], error) from error
        finally:
            os.close(to_report)
        output = HeadAndTail(output_limit)
        assert process.stdout is not None
        with process.stdout as pipe:
            os.set_blocking(pipe.fileno(), False)
            how = _follow(process, pipe.fileno(), output, time.monotonic() + timeout_seconds, cancel)
            left = _end_all(process, mark, pipe.fileno(), output, polite=how != "exited")
            code = process.wait()
            _drain(pipe.fileno(), output, time.monotonic() + DRAIN_SECONDS)
        said = report.read(_LONGEST_REPORT) or b""
        return _as_reported(said, command[0], Ended(how=how, code=code, output=output.text(), left_running=left))


def _cannot_start(program: str, error: OSError | ValueError) -> ToolError:
    match error:
        case FileNotFoundError():
            return ToolError(f"there is no program {program!r} here")
        case PermissionError():
            return ToolError(f"{program!r} is not a program that may be run")
        case _:
            return ToolError(f"{program!r} cannot be run: {error}")


def _as_reported(report: bytes, program: str, ended: Ended) -> Ended:
    """What the warden says of the program; the warden's own end where it says nothing, or somebody else speaks for it.

    Raises ToolError.
    """
    said = _REPORT.fullmatch(report)
    if said is None:
        return ended
    if said["errno"]:
        number = int(said["errno"])
        raise _cannot_start(program, OSError(number, os.strerror(number)))  # which makes the subclass of the number
    return replace(ended, code=int(said["code"]), left_running=ended.left_running or said["left"] == b"1")


def _follow(
    process: subprocess.Popen[bytes], pipe: int, output: HeadAndTail, deadline: float, cancel: threading.Event
) -> Literal["exited", "timeout", "cancelled"]:
    """Collect output until the program itself has ended, whoever else holds the pipe."""
    while True:
        _read(pipe, output, POLL_SECONDS)
        if _has_ended(process):
            return "exited"
        if cancel.is_set():
            return "cancelled"
        if time.monotonic() >= deadline:
            return "timeout"


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Not waited for yet: its number stays its group's until then, and nobody else's."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_all(process: subprocess.Popen[bytes], mark: str, pipe: int, output: HeadAndTail, *, polite: bool) -> bool:
    """End everything that the program started. Whether there was something besides itself."""
    others = bool(_marked(mark, process.pid)) if _has_ended(process) else True
    if polite:
        _signal_group(process.pid, signal.SIGTERM)
        until = time.monotonic() + POLITE_SECONDS
        while time.monotonic() < until and not (_has_ended(process) and not _marked(mark, process.pid)):
            _read(pipe, output, POLL_SECONDS)
    _signal_group(process.pid, signal.SIGKILL)
    for _ in range(10):  # one that is forking meanwhile is found the next time
        found = _marked(mark, process.pid)
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return others


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses where only a zombie is left
        os.killpg(group, number)


def _marked(mark: str, leader: int) -> list[int]:
    """Processes in the leader's session or with this mark in their environment, besides the leader. Empty where the
    system does not show it."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == leader:
                continue
            with suppress(OSError):
                if wanted in Path("/proc", name, "environ").read_bytes() or _is_of_session(name, leader):
                    found.append(int(name))
    return found


def _is_of_session(name: str, leader: int) -> bool:
    """Whether a process belongs to the leader's session and has not ended."""
    if os.getsid(int(name)) != leader:
        return False
    return Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"


def _read(pipe: int, output: HeadAndTail, seconds: float) -> bool:
    """Take in what comes within that time; False at the end of the pipe."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        if not selector.select(seconds):
            return True
    try:
        data = os.read(pipe, 1 << 16)
    except BlockingIOError:
        return True
    output.add(data)
    if not data:
        time.sleep(seconds)  # closed, though the program goes on
    return bool(data)


def _drain(pipe: int, output: HeadAndTail, deadline: float) -> None:
    while _read(pipe, output, 0) and time.monotonic() < deadline:
        pass
