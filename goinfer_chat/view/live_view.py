"""A turn at a prompt: the reply as Markdown while it streams, and below it what the engine is doing.

Text that is final goes to the scrollback; the rest of it and the figures are drawn again, fifteen times a second at
most and less often where drawing is slow: the engine needs the interpreter too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from engine.api import (
    Finished,
    ModelInfo,
    Notice,
    PrefillProgress,
    Progress,
    Reply,
    TextDelta,
    ThinkingDelta,
    ToolCallReady,
)
from goinfer_chat.calls.events import (
    ApprovalAsked,
    RepeatAsked,
    StepEnded,
    ToolEnded,
    ToolStarted,
    TurnEnded,
    TurnEvent,
)
from goinfer_chat.settings import PanelSize
from goinfer_chat.terminal import Stream, sanitize
from goinfer_chat.view.cells import DIM, Line, Run, Style, wrap
from goinfer_chat.view.live import NARROWEST, LiveRegion
from goinfer_chat.view.markdown_stream import MarkdownStream, RawStream, ReplyStream
from goinfer_chat.view.panels import ToolRow, ToolStatus, TurnFigures, figures_line, figures_panel, seconds_text
from goinfer_chat.view.render import PROGRESS_AFTER_SECONDS, closing_line
from goinfer_chat.view.themes import Theme
from goinfer_chat.view.tool_lines import end_line, ended_line, started_line, step_line

FRAME_SECONDS: Final = 1 / 15
DRAWING_SHARE: Final = 0.05
"""Of the time: a frame that took 5 ms of work is followed by 100 ms without one, though not by more than this:"""

LONGEST_FRAME_SECONDS: Final = 0.3

THINKING_ROWS: Final = 3


class LiveView:
    def __init__(
        self,
        screen: Stream,
        theme: Theme,
        info: ModelInfo,
        *,
        size: Callable[[], PanelSize] = lambda: "line",
        raw: bool = False,
        quiet: bool = False,
        at_prompt: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """On a screen that `moves`; `size` is asked for each frame. `at_prompt`: whether commands can be given."""
        self._region = LiveRegion(screen, theme, clock=clock)
        self._size = size
        self._quiet = quiet
        self._at_prompt = at_prompt
        self._clock = clock
        self._reply: ReplyStream = RawStream() if raw else MarkdownStream(keep_marks=not theme.has_styles)
        self._thinking = ""
        self._thinking_since = 0.0
        self._figures = TurnFigures(
            started=clock(), context_size=info.context_size, kv_bytes_per_token=info.kv_bytes_per_token
        )
        self._next_frame = 0.0
        self._ended = False

    def event(self, event: TurnEvent) -> None:
        now = self._clock()
        self._ended = isinstance(event, Finished | TurnEnded)
        figures = self._figures
        match event:
            case PrefillProgress():
                if figures.replying:
                    self._end_round()
                figures.take_prefill(event, now)
            case Progress():
                figures.take_stats(event.stats, now)
            case TextDelta():
                if not figures.replying or figures.thinking:
                    figures.replying, figures.thinking = True, False
                    self._fold_thinking()
                self._reply.push(event.text)
            case ThinkingDelta():
                if not self._thinking:
                    self._thinking_since = now
                figures.replying = figures.thinking = True
                self._thinking += event.text
            case ToolCallReady():
                self.tool(event.call.id, event.call.name, "waits")
            case Notice() if not self._quiet:
                self._say(event.text)
            case ToolStarted(call=call):
                self.tool(call.id, call.name, "runs")
                self._say_unless_quiet(started_line(event))
            case ToolEnded(call=call, result=result):
                self.tool(call.id, call.name, result.status)
                self._say_unless_quiet(ended_line(event))
            case StepEnded():
                self._say_unless_quiet(step_line(event))
            case TurnEnded():
                self._say_unless_quiet(end_line(event))
                self._region.close()
                return
            case ApprovalAsked() | RepeatAsked():
                self._ended = True  # the terminal belongs to the question
                self.pause()
                return
            case Finished():
                figures.take_stats(event.reply.stats, now)  # a call that a grammar gave whole shows no progress
                self._finish(event.reply)
                return
            case _:
                pass
        self.tick()

    def tick(self) -> None:
        if not self._ended and (self._region.is_out_of_place or self._clock() >= self._next_frame):
            self._draw()

    def tool(self, call: str, name: str, status: ToolStatus) -> None:
        """A tool call comes into a state; the time is taken from when it began to wait or to run."""
        now, row = self._clock(), self._figures.tools.get(call)
        if status in ("waits", "runs"):
            self._figures.tools[call] = ToolRow(name, status, now)
        elif row is not None:
            row.status, row.seconds = status, now - row.since
            self._figures.prefill_seen = now  # what a tool took is no part of reading the next prompt

    def pause(self) -> None:
        """Take the live rows away, for whoever gets the terminal next; the next tick draws them again."""
        self._region.close()

    def close(self) -> None:
        try:
            self._end_round()
        finally:
            self._region.close()

    def _end_round(self) -> None:
        """What was said stands; what follows begins below it."""
        self._fold_thinking()
        rows = self._reply.finish(self._region.columns)
        if rows:
            self._region.show(rows, ())

    def _fold_thinking(self) -> None:
        if self._thinking and not self._quiet:
            num_words = len(self._thinking.split())
            seconds = seconds_text(self._clock() - self._thinking_since)
            hint = "; /thinking shows them" if self._at_prompt else ""
            self._say(f"thought for {seconds}, {num_words:,} words{hint}")
        self._thinking = ""

    def _say(self, text: str) -> None:
        """A line of its own, above what is live."""
        clean = sanitize(text, terminal=True)
        self._region.show([row.line for row in wrap([Run(clean, DIM)], self._region.columns)], ())

    def _say_unless_quiet(self, text: str | None) -> None:
        if text is not None and not self._quiet:
            self._say(text)

    def _finish(self, reply: Reply) -> None:
        self._end_round()
        if not self._quiet and not reply.tool_calls:  # after those the line of the step stands
            self._say(closing_line(reply, self._region.columns))
        self._region.close()

    def _draw(self) -> None:
        began = time.thread_time()
        columns, max_rows = self._region.columns, self._region.max_rows
        final = self._reply.take(columns)
        text = [*self._thinking_rows(columns), *self._reply.live(columns)]
        panel = self._panel(columns, max_rows, text)
        self._region.show(final, [*text, *panel])
        pause = (time.thread_time() - began) / DRAWING_SHARE
        self._next_frame = self._clock() + min(max(FRAME_SECONDS, pause), LONGEST_FRAME_SECONDS)

    def _thinking_rows(self, columns: int) -> Sequence[Line]:
        if not self._thinking:
            return ()
        text = sanitize(" ".join(self._thinking[-columns * (THINKING_ROWS + 1) :].split()), terminal=True)
        rows = wrap([Run(text, Style("faint", italic=True))], columns)
        return [row.line for row in rows[-THINKING_ROWS:]]

    def _panel(self, columns: int, max_rows: int, text: Sequence[Line]) -> list[Line]:
        """Below `text`; at most half of the screen. What is done at once shows none: it would only flicker."""
        now, size = self._clock(), self._size()
        if size == "off" or self._quiet or now - self._figures.started < PROGRESS_AFTER_SECONDS or not max_rows:
            return []
        panel: list[Line] = []
        for part in (1, 2, 4):  # shorter rows where the others would not survive that the screen becomes narrower
            panel = self._figures_in(max(columns // part, min(columns, NARROWEST - 1)), max_rows, now, size)
            if self._region.survives([*text[-1:], *panel]):
                break
        return panel

    def _figures_in(self, columns: int, max_rows: int, now: float, size: PanelSize) -> list[Line]:
        if size == "line":
            return [figures_line(self._figures, columns, now)]
        return figures_panel(self._figures, columns, max(max_rows // 2, 1), now)
