"""Where the program begins: before anything is imported, so that Ctrl-C in the imports is an end like any other.

Not even `signal` and `typing` are, which take 30 ms, and longer on a busy machine.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Final, NoReturn
else:
    import _signal as signal  # what `signal` stands on, built into Python

INTERRUPTED: Final = 130
"""The exit code after Ctrl-C, as shells count it."""


def main() -> NoReturn:
    """The console script."""
    interrupts_end_the_program()
    from goinfer_chat.cli import main as run

    run()


def interrupts_end_the_program() -> None:
    """SIGINT ends the process at once, and without a traceback; a shell sees code 130.

    Right while there is nothing to tidy up: during imports, and at the very end. Where SIGINT is ignored, as in the
    background of a script, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupts_raise() -> None:
    """SIGINT is KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
