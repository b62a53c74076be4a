"""A cache written by the first version that kept any is still used, or said to be of no use.

data/kept-1.* are of that version, with the stand-in as the model: three questions, of which one was put in place of
another that was taken back, and a sampled reply.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from kv_chats import GREEDY, Chat, added_by, make

from engine.api import Message
from engine.kv_folder import path_of, prepare
from engine.kv_layout import NUMERICS_VERSION

DATA = Path(__file__).parent / "data"
KEPT = json.loads((DATA / "kept-1.json").read_text())


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    prepare(folder)
    path = path_of(folder, "work")
    path.touch(mode=0o600)
    path.write_bytes(gzip.decompress((DATA / "kept-1.giw-kv.gz").read_bytes()))
    return folder


def conversation() -> Chat:
    messages = [
        Message(role=m["role"], content=m["content"], ids=None if m["ids"] is None else tuple(m["ids"]))
        for m in KEPT["messages"]
    ]
    return Chat(messages=messages)


def test_a_file_of_the_first_version_resumes_whole_or_says_why_not(kept: Path) -> None:
    old, new = conversation(), conversation()
    with make(None) as anew:
        expected = new.ask(anew, "go on", sampling=GREEDY)
    with make(kept) as engine:
        reply = old.ask(engine, "go on", sampling=GREEDY)
    if NUMERICS_VERSION == 1:
        assert reply.stats.restored_tokens == KEPT["positions"]
        assert old.said[0].startswith(f"resumed {KEPT['positions']} of {KEPT['positions']} tokens")
    else:
        assert reply.stats.restored_tokens in (None, 0)
        assert "made with version 1 of the numerics" in old.said[0]
    assert reply.ids == expected.ids
    with make(kept) as engine:  # what was added to it is a file of this version
        again = old.ask(engine, "and on")
    assert again.stats.prefill_tokens == added_by("and on")
