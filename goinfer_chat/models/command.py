"""`goinfer-chat models` and `goinfer-chat pull`."""

from __future__ import annotations

import json
import time

from engine import giw_file
from goinfer_chat.amounts import size
from goinfer_chat.listing import columns
from goinfer_chat.loading import fetch_model
from goinfer_chat.models import catalogue
from goinfer_chat.terminal import Stream, sanitize


def show_models(out: Stream) -> int:
    """A table of what is here and what can be had. Returns the exit code."""
    rows = [("name", "size", "where", "licence", "what it is")]
    for model in catalogue.list_models():
        where = "here" if model.path else "can be pulled"
        rows.append((model.name, size(model.num_bytes), where, model.licence or "see its page", model.about))
    for line in columns(rows):
        out.line(line)
    kept = giw_file.list_kept()
    if kept:
        total, cap = sum(k.num_bytes for k in kept), giw_file.cap_bytes()
        out.line(f"\nweights laid out for this CPU: {size(total)} of at most {size(cap)}, in {giw_file.folder()}")
        for line in columns(
            [
                (
                    f"  {sanitize(k.name, terminal=out.terminal)}",
                    size(k.num_bytes),
                    time.strftime("last used %Y-%m-%d", time.localtime(k.used_at)),
                )
                for k in kept
            ]
        ):
            out.line(line)
    return 0


def show_supported(out: Stream, *, as_json: bool = False) -> int:
    """What kinds of models run, out of the engine's own tables. Returns the exit code."""
    from goinfer_chat.models import supported

    room = out.size[0] if out.terminal else None
    out.line(json.dumps(supported.as_json(), indent=2) if as_json else supported.as_text(room))
    return 0


def pull_model(model: str, out: Stream, side: Stream) -> int:
    """Fetch a model and print the path of its file. Returns the exit code; raises what catalogue.pull raises."""
    out.line(str(fetch_model(model, side)))
    return 0
