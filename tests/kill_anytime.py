"""Kill the real program again and again, and count what was lost of what it had said to be saved.

    python tests/kill_anytime.py FOLDER [--times 500] [--seed 0] [--model MODEL] [--seconds 0.5]

Each round starts the program anew on the same conversations, gives it a script of questions, `/retry`, `/undo`, `/fork`
and `/new`, and ends it with SIGKILL at a random moment: while it starts, restores, reads, replies or saves. A turn is
said to be saved when its line of JSON is there. After each kill the store must be sound and hold every such turn, the
next round must go on, and each reply must be what an engine without any cache says to the same ids. Prints one line of
figures; ends with code 1 when anything was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tiny_models import write_tiny_model

from engine import load
from engine.api import Finished, Request, SamplingParams
from engine.local import LocalEngine
from goinfer_chat.store import Store

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 2048
KILLS_A_STORE = 25


def script(rng: random.Random, round: int) -> list[str]:
    def line(number: int) -> str:
        kinds = (f"question {round}.{number}", "/retry", "/undo", "/fork", "/new")
        return rng.choices(kinds, [16, 2, 2, 1, 1])[0]

    return [f"question {round}.0", *(line(number) for number in range(1, 200))]


@dataclass
class Round:
    """What one process was asked and what it said before its end."""

    turns: list[str]
    """Lines of the script that make a turn, in order."""
    replies: list[dict[str, Any]] = field(default_factory=list)
    killed: bool = False
    code: int = 0
    stderr: str = ""

    @property
    def answered(self) -> list[tuple[str, tuple[int, ...]]]:
        """(question, ids of the reply) of those that are no repetition of another question."""
        pairs = zip(self.turns, self.replies)
        return [(line, tuple(reply["reply_ids"])) for line, reply in pairs if not line.startswith("/")]


def play(command: list[str], env: dict[str, str], lines: list[str], rng: random.Random, seconds: float) -> Round:
    """Run the program until it ends or is killed, between its start and `seconds` after its first reply."""
    round = Round([line for line in lines if not line.startswith("/") or line == "/retry"])
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write("".join(f"{line}\n" for line in lines).encode())
    process.stdin.close()
    early = rng.random() < 0.2
    kill_at = time.monotonic() + (rng.uniform(0, 1.5) if early else 60)
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := kill_at - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            part = os.read(process.stdout.fileno(), 65536)
            if not part:
                break
            if not received and not early:
                kill_at = time.monotonic() + rng.uniform(0, seconds)
            received += part
    process.send_signal(signal.SIGKILL)
    received += process.stdout.read()
    round.stderr = process.stderr.read().decode()
    round.code = process.wait()
    round.killed = round.code == -signal.SIGKILL
    objects = [json.loads(line) for line in received.decode().split("\n")[:-1]]
    round.replies = [object for object in objects if "reply_ids" in object]
    process.stdout.close()
    process.stderr.close()
    return round


def lost(folder: Path, rounds: list[Round]) -> list[str]:
    """What was said to be saved and is not in the store."""
    with sqlite3.connect(folder / "conversations.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    connection.close()
    pairs: set[tuple[str, tuple[int, ...]]] = set()
    replies: Counter[tuple[int, ...]] = Counter()
    with Store(folder) as store:
        for conversation in store.recent():
            tree = {stored.id: stored for stored in store.tree(conversation.id)}
            for stored in tree.values():
                if stored.message.role == "assistant":
                    ids = stored.message.ids or ()
                    replies[ids] += 1
                    if stored.parent in tree:
                        pairs.add((tree[stored.parent].message.content, ids))
    said = Counter(tuple(reply["reply_ids"]) for round in rounds for reply in round.replies)
    gone = [f"{ids} {count - replies[ids]} times" for ids, count in said.items() if replies[ids] < count]
    return gone + [f"{pair}" for round in rounds for pair in round.answered if pair not in pairs]


def differs_from_cold(engine: LocalEngine, reply: dict[str, Any]) -> bool:
    request = Request(
        prompt_ids=tuple(reply["prompt_ids"]),
        sampling=SamplingParams(temperature=0),
        max_tokens=max(1, len(reply["reply_ids"])),
        speculation="off",
    )
    *_, last = engine.generate(request)
    assert isinstance(last, Finished)
    return bool(last.reply.ids != tuple(reply["reply_ids"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seconds", type=float, default=0.5, help="most seconds after the first reply")
    flags = parser.parse_args()
    model = flags.model or write_tiny_model(flags.folder / "tiny.gguf", "llama", context_size=CONTEXT)
    command = [sys.executable, "-m", "goinfer_chat", "--json", "--ids", "--model", str(model), "--temperature", "0"]
    command += ["--max-tokens", "24", "--ctx", str(CONTEXT)]
    figures: Counter[str] = Counter()
    with load(model, context_size=CONTEXT, kv_sessions=0) as engine:
        for start in range(0, flags.times, KILLS_A_STORE):
            folder, rng = flags.folder / f"sessions-{start}", random.Random(flags.seed + start)
            kills = min(KILLS_A_STORE, flags.times - start)
            if trouble := survive(kills, folder, command, engine, rng, flags.seconds, figures):
                print(f"{trouble} in {folder}; {dict(figures)}", file=sys.stderr)
                return 1
    print(", ".join(f"{count} {what}" for what, count in figures.items()))
    return 0


def survive(
    kills: int,
    folder: Path,
    command: list[str],
    engine: LocalEngine,
    rng: random.Random,
    seconds: float,
    figures: Counter[str],
) -> str:
    """Kill that often, with one store; what was lost, or nothing."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GOINFER_CHAT_")}
    env |= {"GOINFER_CHAT_SESSION_DIR": str(folder), "PYTHONWARNINGS": "error"}
    rounds: list[Round] = []
    fresh = True
    while sum(round.killed for round in rounds) < kills:
        how = ["--save", f"begun in {len(rounds)}"] if fresh or not folder.exists() else ["--continue"]
        round = play(command + how, env, script(rng, len(rounds)), rng, seconds)
        rounds.append(round)
        # Too much for the context, no conversation yet, or the end of the script: another one is begun.
        if "Traceback" in round.stderr or not (round.killed or round.code in (0, 2, 4)):
            return f"code {round.code}: {round.stderr}"
        fresh = not round.killed
        if (folder / "conversations.db").exists() and (gone := lost(folder, rounds)):
            return f"lost: {gone[:3]}"
        figures["kills"] += round.killed
        figures["turns said to be saved, none lost"] += len(round.replies)
        figures["starts that resumed a cache"] += bool(round.replies and round.replies[0]["restored_tokens"])
        for reply in rng.sample(round.replies, min(3, len(round.replies))):
            figures["replies compared with a cold engine"] += 1
            if differs_from_cold(engine, reply):
                return f"differs from a cold engine: {reply}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
