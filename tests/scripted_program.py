"""The program with a scripted engine, for tests that need a process of its own.

python scripted_program.py TURNS.json [arguments of goinfer-chat]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripted_engine import ScriptedEngine

from goinfer_chat.cli import main
from goinfer_chat.settings import Settings
from goinfer_chat.store import live
from goinfer_chat.terminal import Stream

data = json.loads(Path(sys.argv.pop(1)).read_text(encoding="utf-8"))


def make_engine(settings: Settings, side: Stream, kv_folder: Path | None = None) -> ScriptedEngine:
    side.status("loading")
    time.sleep(data.get("load_seconds", 0))
    side.clear_status()
    return ScriptedEngine.from_json(data)


if data.get("patience_seconds"):
    from goinfer_chat import turn

    turn.PATIENCE_SECONDS = data["patience_seconds"]  # type: ignore[misc]
if data.get("save_seconds"):
    write = live.queries.finish

    def write_slowly(*arguments: object, **named: object) -> None:
        """In the midst of the transaction that makes a draft the reply."""
        time.sleep(data["save_seconds"])
        write(*arguments, **named)  # type: ignore[arg-type]
        time.sleep(data["save_seconds"])

    live.queries.finish = write_slowly


main(make_engine)
