"""Saves a conversation under every limit on the size of files: run by test_kv_file.py in a process of its own.

The kernel writes up to the limit and then refuses, as a full disk does. Prints how many saves failed, and how many
limits there were.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kv_conversations import Conversation, restored

from engine.kv_file import KVFile, KVFileError


def error_under(limit: int, file: KVFile, conversation: Conversation) -> str | None:
    """What a save said that could not make the file larger than the limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        file.save(conversation.table, conversation.pool)
    except KVFileError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return None


def save_under(limit: int, path: Path) -> bool:
    """Whether a second turn of three records found no room; whatever it was, the file is good and goes on."""
    conversation = Conversation(path)
    conversation.add_some(50)
    with conversation.save() as file:
        first_bytes = path.stat().st_size
        conversation.add_some(100)
        error = error_under(limit, file, conversation)
        kept = len(file.ids)
        if error is not None:
            assert kept < 150
            assert error.startswith(f"{path.name}: not saved: "), error
            assert error.endswith(f"; {kept} of 150 tokens are kept"), error
        size = path.stat().st_size
        copy = path.with_name("copy.giw-kv")
        copy.write_bytes(path.read_bytes())
        ids, problem = restored(copy)
        assert problem is None
        assert ids == list(range(150 if error is None else kept))
        assert size == file.num_bytes >= first_bytes
        conversation.add_some(3)
        file.save(conversation.table, conversation.pool)
    assert restored(path) == (list(range(153)), None)
    return error is not None


def new_file_under(limit: int, path: Path) -> bool:
    """Whether a new file found no room; then nothing of it is left."""
    conversation = Conversation(path)
    conversation.add_some(150)
    with KVFile.open(path, conversation.identity) as file:
        error = error_under(limit, file, conversation)
        assert error is None or error.endswith("; 0 of 150 tokens are kept"), error
        assert [entry.name for entry in path.parent.iterdir()] == ([path.name] if error is None else [])
        file.save(conversation.table, conversation.pool)
    assert restored(path) == (list(range(150)), None)
    return error is not None


def main(folder: Path) -> None:
    outcomes = []
    for test, limits in ((save_under, range(700, 1800, 7)), (new_file_under, range(0, 1800, 31))):
        for limit in limits:
            place = folder / f"{test.__name__}-{limit}"
            place.mkdir()
            outcomes.append(test(limit, place / "work.giw-kv"))
            for entry in place.iterdir():
                os.unlink(entry)
    print(sum(outcomes), len(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
