"""The edges of the program: text that goes out, text that comes in, and the terminal as it was found.

Everything that a model, a file or a tool wrote passes through `sanitize` before it reaches a stream, so nothing
of it can move the cursor, change a colour or answer a question the terminal never asked.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType, MappingProxyType
from typing import Final, NoReturn, TextIO

from engine.errors import GoinferError
from goinfer_chat.view.colours import depth_of

_KEPT = "\n\t"
_C0 = [*range(0x20), 0x7F]
_C1 = range(0x80, 0xA0)
_SURROGATES = range(0xD800, 0xE000)
# Overrides, embeddings and isolates let text show in another order than it has (CVE-2021-42574). Plain marks
# (U+200E, U+200F) and joiners stay: right-to-left text and emoji need them.
_BIDI = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
# Terminals do not agree on whether these end a line.
_SEPARATORS = [0x2028, 0x2029]


def _removed() -> dict[int, str]:
    table = {code: "" for code in [*_C0, *_C1] if chr(code) not in _KEPT}
    return table | dict.fromkeys(_SURROGATES, "�")


def _shown() -> dict[int, str]:
    table = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421", ord("\r"): ""}
    table |= {code: f"<U+{code:04X}>" for code in [*_C1, *_BIDI, *_SEPARATORS]}
    table |= dict.fromkeys(_SURROGATES, "�")
    return {code: text for code, text in table.items() if chr(code) not in _KEPT}


_FOR_FILES: Final = MappingProxyType(_removed())
_FOR_TERMINALS: Final = MappingProxyType(_shown())

_PICTURES: Final = "─━│┃┌┐└┘├┤┬┴┼╭╮╰╯▌█▓▒░▁▂▃▄▅▆▇•◦▪…✓✗"
_IN_ASCII: Final = MappingProxyType(str.maketrans(_PICTURES, "--||+++++++++++++|##=.1234567*o*.+x"))
"""For a locale that cannot write the borders and bars of tables and panels."""


ENDING_SIGNALS: Final = tuple(
    number for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if (number := getattr(signal, name, None)) is not None
)
"""Those that ask for the end while a terminal is not as it was found. Windows has not all of them."""


def sanitize(text: str, *, terminal: bool) -> str:
    r"""Text without control characters, but for \n and \t.

    For a terminal a control character is shown as its picture (ESC as U+241B) and a bidirectional override as its
    code, so that a reader sees that something was there; for files and pipes control characters are left out and
    everything else goes out as it is. CR is left out in both: CR LF becomes LF. One character at a time, so a
    sequence cut into two pieces is caught too.
    """
    return text.translate(_FOR_TERMINALS if terminal else _FOR_FILES)


def true_text(text: str) -> str:
    """An argument, variable or typed line as UTF-8 text, whatever the locale; bytes that are not UTF-8 become U+FFFD.

    In a locale without UTF-8 Python hands over each such byte as a lone surrogate. Others, as JSON can spell them,
    become U+FFFD too.
    """
    return _as_bytes(text).decode("utf-8", "replace") if not text.isascii() else text


def _as_bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


class OutputError(GoinferError):
    """A stream that cannot be written to."""


class ReaderGoneError(OutputError):
    """Whoever read a stream has closed it: there is nobody left to say anything to. The code is that of SIGPIPE."""

    exit_code = 141


class Stream:
    """Standard output or standard error, and what it can do.

    `terminal`: a person reads it. `colour`: styles may be used. `moves`: the cursor may be moved, which passing lines
    need. `pictures`: the locale can write borders and bars. A stream that is closed takes everything, shows nothing.
    """

    def __init__(self, file: TextIO | None, environ: Mapping[str, str] = os.environ) -> None:
        self.file = file
        self.terminal = file is not None and file.isatty()
        self.moves = self.terminal and environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
        self.colour = self.terminal and depth_of(environ) > 0
        self.pictures = _can_write(file, _PICTURES)
        self._status = ""
        self._at_line_start = True
        self._rows_above, self._counted_on = 0, (0, 0)
        # A character the locale cannot write becomes "?" and never an error.
        if file is not None and hasattr(file, "reconfigure"):
            file.reconfigure(errors="replace")

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows: as the terminal says, else as COLUMNS and LINES do, else 80 x 24."""
        with suppress(OSError, ValueError, AttributeError):
            size = os.get_terminal_size(self.file.fileno())  # type: ignore[union-attr]
            if size.columns > 0 and size.lines > 0:
                return size.columns, size.lines
        size = shutil.get_terminal_size()
        return size.columns, size.lines

    def write(self, text: str) -> None:
        """Write sanitized text at once. Raises OutputError, as everything here that writes does."""
        if not text:
            return
        self.clear_status()
        self._emit(sanitize(text, terminal=self.terminal))
        self._at_line_start = text.endswith("\n")
        if self.moves:
            self.went_down(text.count("\n"))

    def end_line(self) -> None:
        """Finish the line when something stands in it."""
        if not self._at_line_start:
            self.write("\n")

    def line(self, text: str, *, dim: bool = False) -> None:
        """A line of its own, dim where the terminal has styles; on a terminal it is broken between words."""
        self.end_line()
        self.clear_status()
        clean = sanitize(text, terminal=self.terminal)
        if self.terminal:
            clean = "\n".join(in_rows(line, self.size[0]) for line in clean.split("\n"))
        self._emit(f"\x1b[2m{clean}\x1b[22m\n" if dim and self.colour else clean + "\n")
        if self.moves:
            self.went_down(clean.count("\n") + 1)

    def frame(self, sequences: str, rows: int = 0) -> None:
        """Write what draws a part of the screen, which only `live.LiveRegion` makes: every text in it is clean.

        `rows`: how many of them stay above the cursor for good.
        """
        self.clear_status()
        self._emit(sequences)
        self._at_line_start = True
        self.went_down(rows)

    @property
    def rows_above(self) -> int:
        """Rows of the screen above the cursor, as far as it is known: at least so many."""
        size = self.size
        if size != self._counted_on:  # rows were broken or joined, and nobody tells how
            self._rows_above, self._counted_on = 0, size
        return min(self._rows_above, size[1] - 1)

    def went_down(self, rows: int) -> None:
        """So many rows more were finished."""
        self._rows_above = self.rows_above + rows

    def lost_track(self) -> None:
        """Somebody else has used the screen, or it was cleared: the cursor may be anywhere."""
        self._rows_above = 0

    def status(self, text: str) -> None:
        """Show a passing line, in place of the last one; nothing unless the cursor may be moved.

        Cut to the width, because a line that wraps could not be erased.
        """
        if not self.moves or not self._at_line_start:
            return
        width = self.size[0]
        text = sanitize(text, terminal=True).replace("\n", " ")[: max(width - 1, 0)]
        if text == self._status:
            return
        self._emit(f"\r{text}\x1b[K")
        self._status = text

    def clear_status(self) -> None:
        if self._status:
            self._status = ""
            self._emit("\r\x1b[K")

    def _emit(self, text: str) -> None:
        if self.file is None:
            return
        if not self.pictures:
            text = text.translate(_IN_ASCII)
        try:
            self.file.write(text)
            self.file.flush()
        except OSError as error:
            _drop_buffer(self.file)
            if isinstance(error, BrokenPipeError):
                raise ReaderGoneError("the reader has gone") from None
            raise OutputError(f"the output cannot be written: {error.strerror}") from None


def in_rows(line: str, columns: int) -> str:
    """The line in rows; a word that is longer than a row, such as a path, is left to the terminal."""
    if len(line) <= columns // 2 or "\t" in line:  # no character is wider than two cells
        return line
    from goinfer_chat.view.cells import Run, plain, width, wrap

    if width(line) <= columns or any(width(word) > columns for word in line.split(" ")):
        return line
    return "\n".join(plain(row.line) for row in wrap([Run(line)], columns))


def _can_write(file: TextIO | None, text: str) -> bool:
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def open_closed_descriptors() -> None:
    """Give 0, 1 and 2 to the null device where they are closed.

    Otherwise the next file that is opened gets such a number, and what was meant for a stream goes into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _drop_buffer(file: TextIO) -> None:
    """Let what could not be written go to the null device, or Python would try it again at exit and complain."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file.fileno())
        os.close(null)


class QuietTerminal:
    """A terminal that is quiet, and can be lent to another program as it was found."""

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Without a terminal this does nothing."""
        yield


@contextmanager
def quiet_terminal(file: TextIO, *, keep_typing: bool = False) -> Iterator[QuietTerminal]:
    """Typing is not echoed and waits for the next prompt; the terminal is left as it was found.

    `keep_typing`: whether what was typed before Ctrl-C is kept, which terminals forget otherwise.

    Ctrl-C still makes a signal. Ctrl-Z gives the shell its terminal back and takes it again afterwards. The
    signals that ask for the end unwind the program by SystemExit. Ctrl-\\ is off: a slip of the hand ends nothing.
    Without a terminal this does nothing.
    """
    if sys.platform == "win32" or not file.isatty():
        yield QuietTerminal()
        return
    import termios

    descriptor = file.fileno()
    found = termios.tcgetattr(descriptor)
    quiet = termios.tcgetattr(descriptor)
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    quiet[3] |= termios.NOFLSH if keep_typing else 0
    quiet[6][termios.VMIN], quiet[6][termios.VTIME] = 1, 0
    quiet[6][termios.VQUIT] = b"\x00"

    def suspend(_signal: int, _frame: FrameType | None) -> None:
        current = termios.tcgetattr(descriptor)
        termios.tcsetattr(descriptor, termios.TCSANOW, found)
        os.kill(0, signal.SIGSTOP)
        termios.tcsetattr(descriptor, termios.TCSANOW, current)

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    class Quieted(QuietTerminal):
        @contextmanager
        def lent(self) -> Iterator[None]:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, found)
            try:
                yield
            finally:
                termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)

    handlers = {signal.SIGTSTP: suspend, **dict.fromkeys(ENDING_SIGNALS, end)}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield Quieted()
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, found)
        for number, handler in previous.items():
            signal.signal(number, handler)
