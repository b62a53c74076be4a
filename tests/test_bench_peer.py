"""The peer: another program in another process, that gets the same tokens and keeps the same cache.

Its library is played by a small module of the same name, which writes down what it is asked; the real one is used
where GOINFER_CHAT_PEER_PYTHON names a Python that has it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.errors import EngineError, UsageError
from goinfer_chat.bench.peer_process import Peer, PeerChoice

LIBRARY = """
import ctypes, json, os
__version__ = "1.2.3"
llama_token = ctypes.c_int32
cache = []

def log(*words):
    with open(os.environ["PEER_LOG"], "a") as file:
        file.write(json.dumps(words) + "\\n")

class Settings:
    pass

def llama_log_callback(function): return function
def llama_log_set(function, data): pass
def llama_backend_init(): pass
def llama_model_default_params(): return None
def llama_model_load_from_file(path, settings): return None if b"bad" in path else "model"
def llama_context_default_params(): return Settings()
def llama_init_from_model(model, settings):
    log("context", settings.n_ctx, settings.n_batch, settings.n_threads, settings.n_threads_batch)
    return "context"
def llama_print_system_info(): return b"CPU : AVX2 = 1 | "
def llama_get_memory(context): return "memory"
def llama_memory_seq_rm(memory, sequence, start, end):
    assert (memory, sequence, end) == ("memory", 0, -1) and start <= len(cache)
    del cache[start:]
    return True
def llama_batch_get_one(array, count): return list(array)[:count]
def llama_decode(context, batch):
    if 666 in batch:
        return 1
    log("run", len(cache), batch)
    cache.extend(batch)
    return 0
def llama_synchronize(context): pass
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[object]]]:
    """Puts the module where the peer's Python finds it; calling it gives what it was asked since the last call."""
    (tmp_path / "llama_cpp.py").write_text(LIBRARY)
    log = tmp_path / "log"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PEER_LOG", str(log))

    def asked() -> list[list[object]]:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        log.write_text("")
        return lines

    return asked


@pytest.fixture
def peer(library: Callable[[], list[list[object]]]) -> Iterator[Peer]:
    with Peer(PeerChoice(), Path("model.gguf"), threads=3, num_positions=2000) as peer:
        assert library() == [["context", 2064, 512, 3, 3]]
        yield peer


def test_the_peer_says_what_it_is(peer: Peer) -> None:
    assert (peer.name, peer.version, peer.system) == ("llama.cpp", "1.2.3", "CPU : AVX2 = 1 |")


def test_a_prompt_is_read_whole_in_batches_unless_its_start_may_be_reused(
    peer: Peer, library: Callable[[], list[list[object]]]
) -> None:
    ids = list(range(1000, 1700))
    assert peer.prompt(ids) > 0
    assert library() == [["run", 0, ids[:512]], ["run", 512, ids[512:]]]
    peer.prompt([*ids[:600], 5, 6], reuse=True)
    assert library() == [["run", 600, [5, 6]]]
    # Of a prompt that is cached whole, the last token is evaluated: its logits are asked for.
    peer.prompt([*ids[:600], 5, 6], reuse=True)
    assert library() == [["run", 601, [6]]]
    peer.prompt([1, 2])
    assert library() == [["run", 0, [1, 2]]]


def test_decoding_runs_one_token_at_a_time_behind_what_is_cached(
    peer: Peer, library: Callable[[], list[list[object]]]
) -> None:
    peer.decode([1, 2, 3], [8, 9])
    assert library() == [["run", 0, [1, 2, 3]], ["run", 3, [8]], ["run", 4, [9]]]
    peer.decode([1, 2, 3], [8, 9])
    assert library() == [["run", 3, [8]], ["run", 4, [9]]]


def test_what_the_peer_cannot_do_is_said_in_its_words(peer: Peer) -> None:
    with pytest.raises(EngineError, match=r"llama\.cpp: RuntimeError: llama\.cpp could not run a batch"):
        peer.prompt([666])
    with pytest.raises(EngineError, match=r"llama\.cpp has ended"):
        peer.prompt([1])


def test_a_model_that_the_peer_cannot_load_is_an_error(library: object) -> None:
    with pytest.raises(EngineError, match=r"cannot load bad\.gguf"):
        Peer(PeerChoice(), Path("bad.gguf"), threads=1, num_positions=10)


def test_a_peer_that_dies_is_an_error_with_its_last_words(library: object, tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("import sys; sys.exit('no such instruction')")
    with pytest.raises(EngineError, match=r"llama\.cpp has ended: no such instruction"):
        Peer(PeerChoice(), Path("model.gguf"), threads=1, num_positions=10)


def test_a_python_without_the_peer_is_named(library: object, tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'llama_cpp'\")"
    (tmp_path / "llama_cpp.py").write_text(missing)
    with pytest.raises(UsageError, match="has no llama-cpp-python; pip install it there, or name another Python"):
        Peer(PeerChoice(), Path("model.gguf"), threads=1, num_positions=10)


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="/no/such/python cannot be run: No such file or directory"):
        Peer(PeerChoice(python="/no/such/python"), Path("model.gguf"), threads=1, num_positions=10)


def test_modules_beside_the_peers_script_are_not_its_own(library: Callable[[], list[list[object]]]) -> None:
    # goinfer_chat/bench has modules with plain names, which a library may have too.
    (Path(os.environ["PYTHONPATH"]) / "llama_cpp.py").write_text(
        LIBRARY + "\nimport sys\nlog('path', [p for p in sys.path if p.endswith('bench')])\n"
    )
    with Peer(PeerChoice(), Path("model.gguf"), threads=1, num_positions=10):
        assert library()[0] == ["path", []]


def test_the_real_peer_reads_what_it_is_told(model_path: Callable[[str], Path]) -> None:
    python = os.environ.get("GOINFER_CHAT_PEER_PYTHON")
    if not python:
        pytest.skip("GOINFER_CHAT_PEER_PYTHON names no Python with llama-cpp-python")
    with Peer(PeerChoice(python=python), model_path("smollm2-135m"), threads=1, num_positions=100) as peer:
        assert peer.version[0].isdigit()
        assert peer.prompt(range(500, 530)) > 0
        assert peer.prompt(range(500, 535), reuse=True) > 0
        assert peer.decode(range(500, 520), [1000, 1001]) > 0


def test_this_python_is_the_peers_unless_another_is_named() -> None:
    assert PeerChoice().python == sys.executable
