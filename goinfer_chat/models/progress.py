"""How a download looks: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console

from goinfer_chat.amounts import size
from goinfer_chat.models.fetch import Progress

LINE_SECONDS = 10.0
"""Between two lines where there is no terminal: a log stays short."""


@contextmanager
def download_progress(console: Console, name: str = "model") -> Iterator[Progress]:
    """A callback (bytes here, bytes of all) that shows bytes, rate and time left on `console`.

    Nothing is shown before it is first called. A bar goes away at the end, so what follows starts on a clean line.
    """
    if console.is_terminal and not console.is_dumb_terminal:
        yield from _bar(console, name)
    else:
        yield _lines(console, name)


def _bar(console: Console, name: str) -> Iterator[Progress]:
    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True) as bar:
        tasks: list[bars.TaskID] = []

        def show(done: int, total: int) -> None:
            if not tasks:
                # What an earlier try brought is where this one starts; it must not count as speed.
                tasks.append(bar.add_task(name, total=total, completed=done))
            bar.update(tasks[0], completed=done, total=total)

        yield show


def _lines(console: Console, name: str) -> Progress:
    started = last = time.monotonic()
    first: int | None = None

    def show(done: int, total: int) -> None:
        nonlocal started, last, first
        now = time.monotonic()
        if first is None:
            first, started = done, now
        elif now - last < LINE_SECONDS and done < total:
            return
        last = now
        line = f"{name}: {size(done)} of {size(total)}"
        if (rate := (done - first) / (now - started) if now > started else 0.0) > 0:
            line += f", {size(int(rate))}/s, {(total - done) / rate:.0f} s left"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return show
