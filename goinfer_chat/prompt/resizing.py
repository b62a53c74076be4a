"""A prompt whose screen becomes narrower: prompt_toolkit counts the rows that it has drawn, and a terminal that breaks
rows anew has made more of them."""

from __future__ import annotations

from typing import Any

from prompt_toolkit.application import Application
from prompt_toolkit.layout.screen import Screen


def mend_resizing(app: Application[Any]) -> None:
    """On a terminal that breaks rows anew (`view.live.reflows`) the cursor goes up to where the prompt begins."""
    redraw = app._on_resize

    def resized() -> None:
        drawn = app.renderer.last_rendered_screen
        if drawn is not None:
            cursor = drawn.get_cursor_position(app.layout.current_window)
            app.output.cursor_up(rows_more(drawn, cursor.x, cursor.y, max(app.output.get_size().columns, 1)))
        redraw()

    # There is no event for it that comes before the prompt is erased.
    setattr(app, "_on_resize", resized)  # noqa: B010 - mypy takes no other assignment to a method


def rows_more(drawn: Screen, x: int, y: int, columns: int) -> int:
    """How many rows more than `y` are above the cursor at column x, now that a row has so many columns."""
    ends = (
        max((column + cell.width for column, cell in drawn.data_buffer[row].items() if cell.char != " "), default=0)
        for row in range(y)
    )
    return sum(max(-(-end // columns) - 1, 0) for end in ends) + x // columns
