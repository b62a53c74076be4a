"""Runs one program and ends all that comes from it, as a program of its own (Linux): `process` starts it.

Whatever a process leaves behind becomes the warden's child, also where it has left its group and session and emptied
its environment. Takes a descriptor to report to, then the command; imports nothing of ours: it runs alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # of <linux/prctl.h>
_POLITE_SECONDS = 0.3
"""Between SIGTERM for the program's group and SIGKILL."""
_END_SECONDS = 0.7
"""For processes that go on starting others while they are ended; then it is left to who started the warden."""


class _Asked(Exception):  # noqa: N818 - not an error
    """SIGTERM: the time is up, or who started the warden has died."""


def main(report: int, command: list[str]) -> None:
    """Report `exit CODE LEFT`: CODE as subprocess has it, LEFT 1 where processes were ended; before it `errno NUMBER`
    where the program cannot be started."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    os.set_inheritable(report, False)
    os.set_blocking(report, False)  # somebody may have filled it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program, code, asked = 0, None, False
    try:
        signal.signal(signal.SIGTERM, _asked)
        program = _started(report, command)
        while code is None:
            code = _waited_for(program, 0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except _Asked:
        asked = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if asked and program:
        code = _end_politely(program)
    left = _lives()
    _end_all()
    with suppress(BlockingIOError):
        os.write(report, f"exit {-signal.SIGKILL if code is None else code} {int(left)}".encode())


def _asked(_number: int, _frame: object) -> None:
    raise _Asked


def _started(report: int, command: list[str]) -> int:
    """In a group of its own: what it sends to its group (`kill 0`) is not for the warden."""
    program = os.fork()
    if program:
        with suppress(OSError):  # it was the first to do so
            os.setpgid(program, program)
        return program
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # ignored here, and that is inherited
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)  # noqa: S606 - to start it is what the warden is for
    except OSError as error:
        os.write(report, f"errno {error.errno} ".encode())
    finally:
        os._exit(127)


def _end_politely(program: int) -> int | None:
    """SIGTERM for its group, and time to follow. The program's exit code if it did."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(program, signal.SIGTERM)
    code = None
    until = time.monotonic() + _POLITE_SECONDS
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            ended = _waited_for(program, os.WNOHANG)
            code = code if ended is None else ended
            time.sleep(0.01)
    return code


def _waited_for(program: int, options: int) -> int | None:
    """Take off one child that has ended. Its exit code if it is the program. Raises ChildProcessError."""
    ended, status = os.waitpid(-1, options)
    return os.waitstatus_to_exitcode(status) if ended == program else None


def _lives() -> bool:
    """Whether a child lives; those that do not are taken off."""
    with suppress(ChildProcessError):
        while True:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if not ended:
                return True
    return False


def _end_all() -> None:
    until = time.monotonic() + _END_SECONDS
    while _lives() and time.monotonic() < until:
        for child in _children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.001)


def _children() -> list[int]:
    own = os.getpid()
    with suppress(OSError), open(f"/proc/self/task/{own}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]
    found = []
    for name in os.listdir("/proc"):
        with suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat", encoding="utf-8", errors="replace") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == own:
                found.append(int(name))
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
