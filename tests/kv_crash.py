"""Processes that are killed while they save a conversation: run by test_kv_file.py, in a process without threads.

`python kv_crash.py FOLDER calls` dies at every system call that writes, halfway and after it; `... FOLDER times N` is
killed from outside at N random moments. What a child has reported as saved must be in the file, and the file must hold
nothing else than a state on the way to the next save. Prints how many deaths were survived.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kv_conversations import ODD, Conversation, restored

from engine.kv_file import KVFile, KVLayout
from engine.kv_folder import prepare

WIDE = KVLayout(layers=(((64, 2), (2, 64)),) * 8)
CALLS = ("pwritev", "ftruncate", "fsync", "fdatasync", "replace", "open", "unlink")


def turns(seed: int, count: int) -> list[list[int]]:
    """A conversation's ids at each save: it grows, goes back, and starts anew, so that the file is also rewritten."""
    rng = random.Random(seed)
    ids: list[int] = []
    states = []
    for turn in range(count):
        if rng.random() < 0.4:
            del ids[rng.choice([0, rng.randint(0, len(ids)), rng.randint(0, len(ids))]) :]
        room = 600 - len(ids)
        ids = ids + [1000 * turn + i for i in range(min(room, rng.choice([1, 20, 130])))]
        states.append(ids)
    return states


def child(path: Path, layout: KVLayout, states: Sequence[Sequence[int]], report: int) -> None:
    """Save state after state, and say so."""
    conversation = Conversation(path, layout)
    with KVFile.open(path, conversation.identity) as file:
        for number, ids in enumerate(states):
            keep = next((i for i, (a, b) in enumerate(zip(conversation.table.ids, ids)) if a != b), len(ids))
            conversation.table.truncate(min(keep, len(conversation.table)))
            conversation.add(ids[len(conversation.table) :])
            file.save(conversation.table, conversation.pool, sync=number % 3 == 0)
            os.write(report, bytes([number]))


def fork(run: Callable[[int], None], reports: str, kill_after: float | None = None) -> tuple[int, bool]:
    """Run in a child; the number of its last report (-1: none), and whether it was killed."""
    with open(reports, "wb"):
        pass
    pid = os.fork()
    if pid == 0:
        try:
            run(os.open(reports, os.O_WRONLY | os.O_APPEND))
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a child must not go on as its parent
            import traceback

            traceback.print_exc()
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    said = Path(reports).read_bytes()
    return (said[-1] if said else -1), os.WIFSIGNALED(status)


def check(path: Path, layout: KVLayout, states: Sequence[Sequence[int]], last: int) -> None:
    ids, _ = restored(path, layout)
    before = list(states[last]) if last >= 0 else []
    after = list(states[min(last + 1, len(states) - 1)])
    common = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
    assert ids == before or (common <= len(ids) and ids == after[: len(ids)]), (last, len(ids), len(before), len(after))
    conversation = Conversation(path, layout)
    conversation.add(states[-1])
    conversation.save().close()  # life goes on
    assert restored(path, layout) == (list(states[-1]), None)
    prepare(path.parent)  # as every start does
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    path.unlink()


def dying(calls: list[int], die_at: int, halfway: bool) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    """Wrap a function so that the process dies at the `die_at`-th call of all wrapped ones."""

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] - 1 != die_at:
                return function(*args, **kwargs)
            if name == "pwritev" and halfway:
                descriptor, views, offset = args
                data = b"".join(views)
                os.pwrite(descriptor, data[: len(data) // 2], offset)
            elif not halfway:
                function(*args, **kwargs)
            return os.kill(os.getpid(), signal.SIGKILL)

        return call

    return wrap


def at_every_call(folder: Path) -> int:
    path, states = folder / "kv" / "work.giw-kv", turns(5, 14)
    path.parent.mkdir()
    deaths = 0
    for halfway in (False, True):
        number = 0
        while True:

            def run(report: int, number: int = number, halfway: bool = halfway) -> None:
                wrap = dying([0], number, halfway)
                for name in CALLS:
                    setattr(os, name, wrap(name, getattr(os, name)))
                child(path, ODD, states, report)

            last, killed = fork(run, str(folder / "reports"))
            check(path, ODD, states, last)
            if not killed:
                break
            deaths += 1
            number += 1
    return deaths


def at_random_times(folder: Path, count: int) -> int:
    path, rng = folder / "kv" / "work.giw-kv", random.Random(7)
    path.parent.mkdir()
    deaths = 0
    for seed in range(count):
        states = turns(seed, 60)
        last, killed = fork(
            lambda report, states=states: child(path, WIDE, states, report),  # type: ignore[misc]
            str(folder / "reports"),
            kill_after=rng.uniform(0.005, 0.08),
        )
        check(path, WIDE, states, last)
        deaths += killed
    return deaths


if __name__ == "__main__":
    place, how = Path(sys.argv[1]), sys.argv[2]
    print(at_every_call(place) if how == "calls" else at_random_times(place, int(sys.argv[3])))
