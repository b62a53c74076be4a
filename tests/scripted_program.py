"""The program with a scripted engine, for tests that need a process of its own.

python scripted_program.py TURNS.json [arguments of goinfer-chat]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripted_engine import ScriptedEngine

from goinfer_chat.cli import main

data = json.loads(Path(sys.argv.pop(1)).read_text(encoding="utf-8"))
main(lambda settings, side: ScriptedEngine.from_json(data))
