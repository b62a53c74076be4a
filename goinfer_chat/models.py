"""`goinfer-chat models` and `goinfer-chat pull`."""

from __future__ import annotations

from goinfer_chat import catalogue
from goinfer_chat.fetch import size
from goinfer_chat.loading import fetch_model
from goinfer_chat.terminal import Stream


def show_models(out: Stream) -> int:
    """A table of what is here and what can be had. Returns the exit code."""
    rows = [("name", "size", "where", "licence", "what it is")]
    for model in catalogue.list_models():
        where = "here" if model.path else "can be pulled"
        rows.append((model.name, size(model.num_bytes), where, model.licence or "see its page", model.about))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        out.line("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def pull_model(model: str, out: Stream, side: Stream) -> int:
    """Fetch a model and print the path of its file. Returns the exit code; raises what catalogue.pull raises."""
    out.line(str(fetch_model(model, side)))
    return 0
