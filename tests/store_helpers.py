"""What the tests of the store share: short ways to say something in a conversation, and processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.api import Message, TurnStats
from goinfer_chat.store import (
    HEAD,
    LiveConversation,
    ModelRef,
    NewConversation,
    Store,
    StoredMessage,
)

MODEL = ModelRef(identity="1f" * 32, name="tiny")
OTHER = ModelRef(identity="2e" * 32, name="other")
STATS = TurnStats(
    prompt_tokens=20, prefill_reused_tokens=12, prefill_tokens=8, completion_tokens=3, ttft_ms=1.5, context_used=23
)
NEW = NewConversation(name="new", model=None, system=None, settings={}, messages=(), head=None)
ROOT = Path(__file__).parent.parent


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, ids: tuple[int, ...] | None = None) -> Message:
    return Message(role="assistant", content=text, ids=ids)


def say(live: LiveConversation, question: str, answer: str, *, after: int | None = HEAD) -> StoredMessage:
    ids = tuple(answer.encode())
    with live.reply_to([user(question)], after=after, model=MODEL) as draft:
        draft.add(answer)
        return draft.finish(assistant(answer, ids), stats=STATS)


def kept(store: Store, *turns: tuple[str, str], name: str | None = None) -> str:
    """The id of a conversation with these turns."""
    with store.create(name=name, model=MODEL) as live:
        for question, answer in turns:
            say(live, question, answer)
        return live.id


def words(path: list[StoredMessage]) -> list[str]:
    return [stored.message.content for stored in path]


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def run_code(code: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    """A process of its own in which `folder`, these helpers and the names of the store are known."""
    prelude = "from pathlib import Path; import sys; from store_helpers import *; from goinfer_chat.store import *\n"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", prelude + "folder = Path(sys.argv[1])\n" + textwrap.dedent(code), str(folder)],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
