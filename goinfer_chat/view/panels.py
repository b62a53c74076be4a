"""What is shown of a turn while it runs: figures gathered from its events, as one line or as a panel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from engine.api import PrefillProgress, TurnStats
from goinfer_chat.amounts import size
from goinfer_chat.terminal import sanitize
from goinfer_chat.view.cells import DIM, PLAIN, Line, Run, Style, cut_line, line_width, merged, width

MAX_COLUMNS: Final = 100
MIN_BORDERED_ROWS: Final = 5
"""With less room the row of the title is better spent on figures."""

LABEL: Final = 9
BAR: Final = 24

ToolStatus = Literal["waits", "runs", "ok", "error", "timeout", "refused", "cancelled"]


@dataclass(slots=True)
class ToolRow:
    """A tool call of this turn. Times are those of the clock the figures are asked with."""

    name: str
    status: ToolStatus
    since: float
    """When it came to wait or to run."""
    seconds: float | None = None
    """How long it ran, once it has ended."""


@dataclass(slots=True)
class TurnFigures:
    """All that is known so far; what is not known is None and not shown."""

    started: float
    prefill: PrefillProgress | None = None
    prefill_started: float = 0.0
    """When this prompt began to be read: a turn with tool calls reads several."""
    prefill_seen: float = 0.0
    """When `prefill` came, or what came last after it: the next prompt is read from then on."""
    replying: bool = False
    thinking: bool = False
    stats: TurnStats | None = None
    context_size: int = 0
    kv_bytes_per_token: int = 0
    tools: dict[str, ToolRow] = field(default_factory=dict)
    """By the id of the call, in order."""

    def __post_init__(self) -> None:
        self.prefill_started = self.started

    def take_prefill(self, progress: PrefillProgress, now: float) -> None:
        if self.replying:
            self.prefill_started, self.stats = self.prefill_seen, None
        self.replying = self.thinking = False
        self.prefill, self.prefill_seen = progress, now

    def take_stats(self, stats: TurnStats, now: float) -> None:
        self.stats, self.prefill_seen, self.replying = stats, now, True

    @property
    def context_used(self) -> int:
        if self.stats is not None:
            return self.stats.context_used or 0
        return self.prefill.done if self.prefill is not None else 0

    @property
    def kv_bytes(self) -> int:
        if self.stats is not None:
            return self.stats.kv_bytes or 0
        return self.context_used * self.kv_bytes_per_token

    def prefill_rate(self) -> float | None:
        """Prompt tokens evaluated a second."""
        if self.prefill is None or self.prefill_seen <= self.prefill_started:
            return None
        return (self.prefill.done - self.prefill.reused) / (self.prefill_seen - self.prefill_started) or None

    def prefill_left(self, now: float) -> float | None:
        """Seconds until the prompt is read."""
        rate = self.prefill_rate()
        if self.prefill is None or rate is None:
            return None
        return max((self.prefill.total - self.prefill.done) / rate - (now - self.prefill_seen), 0.0)


# -- one line ----------------------------------------------------------------------------------------------------------


def figures_line(figures: TurnFigures, columns: int, now: float) -> Line:
    """As many figures as fit, the most telling first."""
    parts = list(_now(figures, columns, now))
    line: Line = ()
    for part in parts:
        longer = (*line, Run(" | ", DIM), *part) if line else part
        if line_width(longer) <= columns:
            line = longer
    return line or cut_line(parts[0], columns)


def _now(figures: TurnFigures, columns: int, now: float) -> Iterator[Line]:
    stats = figures.stats
    for tool in figures.tools.values():
        if tool.seconds is None:
            yield _tool(tool, now)
    if figures.prefill is not None and not figures.replying:
        yield (Run(_read(figures.prefill, columns), DIM),)
        if columns >= 70:
            yield prefill_bar(figures.prefill, 16)
        yield from ((Run(text, DIM),) for text in _pace(figures, now))
    elif not figures.replying:
        yield (Run(f"waiting, {seconds_text(now - figures.started)}", DIM),)
    if stats is not None:
        if stats.decode_tok_s is not None:
            yield (Run(f"{stats.decode_tok_s:.1f} tok/s", DIM),)
        yield (Run(f"{stats.completion_tokens or 0:,} tokens", DIM),)
        if stats.ttft_ms is not None:
            yield (Run(f"TTFT {stats.ttft_ms:,.0f} ms", DIM),)
        if stats.acceptance is not None:
            yield (Run(f"{stats.acceptance:.0%} of guesses right", DIM),)
    elif figures.replying:
        yield (Run("thinking" if figures.thinking else "replying", DIM),)
    if figures.context_size and figures.context_used:
        yield (Run(f"context {figures.context_used / figures.context_size:.0%}", DIM),)
    if figures.kv_bytes:
        yield (Run(f"cache {size(figures.kv_bytes)}", DIM),)


def _read(progress: PrefillProgress, columns: int) -> str:
    """How far the prompt is read, with as many figures as fit."""
    counts, share = f"{progress.done:,} of {progress.total:,}", f"({progress.done / max(progress.total, 1):.0%})"
    reused = f", {progress.reused:,} of them reused" if progress.reused else ""
    texts = (f"reading the prompt: {counts} tokens{reused} {share}", f"reading: {counts} {share}", f"{counts} {share}")
    return next((text for text in texts if len(text) <= columns), counts)


def _pace(figures: TurnFigures, now: float) -> Iterator[str]:
    rate, left = figures.prefill_rate(), figures.prefill_left(now)
    if rate is not None and left is not None:
        yield f"{rate:,.0f} tok/s"
        yield f"{seconds_text(left)} left"


# -- the panel ---------------------------------------------------------------------------------------------------------


def figures_panel(figures: TurnFigures, columns: int, max_rows: int, now: float) -> list[Line]:
    """Rows of a panel with a title and an edge, or without them where that leaves too few; at most `max_rows`.

    The edge is on the left alone: rows that end where their text ends are not broken when the screen becomes narrower.
    """
    if max_rows < 2 or columns < 16:
        return [figures_line(figures, columns, now)] if max_rows else []
    columns = min(columns, MAX_COLUMNS)
    if max_rows < MIN_BORDERED_ROWS:
        return [cut_line(row, columns) for row in _rows(figures, columns, now)][:max_rows]
    rows = list(_rows(figures, columns - 2, now))[: max_rows - 1]
    head = cut_line((Run(f"╭─ {_doing(figures)}, {seconds_text(now - figures.started)}", DIM),), columns)
    edges = ["│ "] * (len(rows) - 1) + ["╰ "]
    return [head, *((Run(edge, DIM), *cut_line(row, columns - 2)) for edge, row in zip(edges, rows, strict=True))]


def _doing(figures: TurnFigures) -> str:
    if any(tool.status == "runs" for tool in figures.tools.values()):
        return "working"
    if not figures.replying:
        return "working" if figures.tools else "reading"
    return "thinking" if figures.thinking else "replying"


def _rows(figures: TurnFigures, columns: int, now: float) -> Iterator[Line]:
    """The most telling first: rows behind the last that fits are left out."""
    stats, prefill = figures.stats, figures.prefill
    if prefill is None:
        yield _row("prompt", "waiting for the engine")
    elif not figures.replying:
        bar = prefill_bar(prefill, max(min(BAR, columns - LABEL - 16), 5))
        yield _fitted("prompt", columns, bar, f"{prefill.done:,} of {prefill.total:,}", _reused(prefill))
        pace = list(_pace(figures, now))
        if pace:
            yield _fitted("", columns, (), *pace)
    else:
        evaluated = f"{prefill.total - prefill.reused:,} prefilled"
        yield _fitted("prompt", columns, (), f"{prefill.total:,} tokens", _reused(prefill), evaluated)
    if figures.replying and stats is not None:
        rate = "" if stats.decode_tok_s is None else f"{stats.decode_tok_s:.1f} tok/s"
        ttft = "" if stats.ttft_ms is None else f"TTFT {stats.ttft_ms:,.0f} ms"
        yield _fitted("reply", columns, (), rate, f"{stats.completion_tokens or 0:,} tokens", ttft)
    running = [tool for tool in figures.tools.values() if tool.seconds is None]
    ended = [tool for tool in figures.tools.values() if tool.seconds is not None]
    for tool in [*running, *ended[-3:]]:
        yield (Run(f"{'tool':<{LABEL}}", DIM), *_tool(tool, now))
    if stats is not None and stats.draft_tokens is not None:
        yield _fitted("guesses", columns, (), *_guesses(stats))
    if figures.context_size:
        share = figures.context_used / figures.context_size
        bar = gauge(share, max(min(BAR, columns - LABEL - 16), 5))
        used = f"{figures.context_used:,} of {figures.context_size:,}"
        memory = f"cache {size(figures.kv_bytes)}" if figures.kv_bytes else ""
        yield _fitted("context", columns, bar, used, f"{share:.0%}", memory)


def _guesses(stats: TurnStats) -> Iterator[str]:
    yield f"{stats.draft_accepted or 0:,} of {stats.draft_tokens or 0:,} right"
    if stats.acceptance is not None:
        yield f"{stats.acceptance:.0%}"
    if stats.tokens_per_step is not None:
        yield f"{stats.tokens_per_step:.2f} tokens a step"


def _reused(prefill: PrefillProgress) -> str:
    return f"{prefill.reused:,} reused" if prefill.reused else ""


def _row(label: str, text: str) -> Line:
    return Run(f"{label:<{LABEL}}", DIM), Run(text)


def _fitted(label: str, columns: int, bar: Line, *parts: str) -> Line:
    """A row with as many of its parts as fit; without a bar the first one at least, for the caller to cut."""
    line: Line = (Run(f"{label:<{LABEL}}", DIM), *bar)
    left = columns - line_width(line)
    mark = "  " if bar else ""
    for part in parts:
        if part and width(mark + part) <= left:
            line = (*line, Run(mark + part))
            left -= width(mark + part)
            mark = ", "
    if len(line) == 1:
        line = (*line, Run(next(filter(None, parts), "")))
    return merged(line)


def _tool(tool: ToolRow, now: float) -> Line:
    name = sanitize(tool.name, terminal=True)
    seconds = now - tool.since if tool.seconds is None else tool.seconds
    words = {"waits": "waits for an answer", "runs": "runs"}
    role = {"ok": "good", "waits": "", "runs": ""}.get(tool.status, "bad")
    return (
        Run(f"{name}: ", PLAIN),
        Run(words.get(tool.status, tool.status), Style(role)),
        Run(f", {seconds_text(seconds)}"),
    )


def prefill_bar(progress: PrefillProgress, columns: int) -> Line:
    """What was already there, what was read, what is left."""
    total = max(progress.total, 1)
    reused = round(columns * progress.reused / total)
    done = max(round(columns * progress.done / total), reused)
    return (
        Run("▒" * reused, Style("reused")),
        Run("█" * (done - reused), Style("bar")),
        Run("░" * (columns - done), Style("faint")),
    )


def gauge(share: float, columns: int) -> Line:
    """A bar that turns to the colour of a warning when little room is left."""
    full = min(round(columns * share), columns)
    if share > 0:
        full = max(full, 1)
    return Run("█" * full, Style("bad" if share >= 0.9 else "bar")), Run("░" * (columns - full), Style("faint"))


def seconds_text(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, whole = divmod(int(seconds), 60)
    return f"{minutes}:{whole:02} min" if minutes else f"{whole} s"
