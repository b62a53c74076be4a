"""A process that dies in its second turn: run and killed by test_kv_disk.py.

Prints the ids of the first reply, then a line for each piece of the second one, which it has saved up to there.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kv_chats import GREEDY, Chat, make

from engine import kept_files
from engine.api import Message, Request, TextDelta


def main(folder: Path) -> None:
    kept_files.SAVE_SECONDS = 0.0
    with make(folder) as engine:
        chat = Chat()
        print(*chat.ask(engine, "first question " * 20).ids, flush=True)
        messages = (*chat.messages, Message(role="user", content="second question " * 20))
        for event in engine.generate(Request(messages=messages, sampling=GREEDY, conversation="work")):
            if isinstance(event, TextDelta):
                print("piece", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
