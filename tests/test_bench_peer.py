"""The peer: another program in another process, that gets the same tokens and keeps the same cache.

Its library is played by small modules of the same names, which write down what they are asked; the real ones are used
where GOINFER_CHAT_PEER_PYTHON and GOINFER_CHAT_OPENVINO_PYTHON name a Python that has them.
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


OPENVINO = """
import json, os
from types import SimpleNamespace

class Core:
    def get_property(self, device, name):
        return {"FULL_DEVICE_NAME": "CPU of " + device, "INFERENCE_PRECISION_HINT": "<Type: 'float32'>"}.get(name, 7)

def Tensor(array):
    assert array.dtype == "int64"
    return array.tolist()

class LLMPipeline:
    def __init__(self, path, device, **settings):
        if "bad" in path:
            raise RuntimeError("[load_gguf] gguf_tensor_to_f16 failed")
        assert settings.pop("scheduler_config").enable_prefix_caching is False
        log("pipeline", device, settings)

    def generate(self, inputs, config):
        log("generate", *inputs, vars(config))
        durations = [250_000.0] * (config.max_new_tokens - 1)
        return SimpleNamespace(perf_metrics=SimpleNamespace(raw_metrics=SimpleNamespace(m_durations=durations)))

def TokenizedInputs(ids, mask): return ids, mask
class GenerationConfig(SimpleNamespace): pass
class SchedulerConfig(SimpleNamespace): pass

__version__ = "2026.1"
def log(*words):
    with open(os.environ["PEER_LOG"], "a") as file:
        file.write(json.dumps(words) + "\\n")
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[object]]]:
    """Puts the module where the peer's Python finds it; calling it gives what it was asked since the last call."""
    (tmp_path / "llama_cpp.py").write_text(LIBRARY)
    for module in ("openvino", "openvino_genai"):
        (tmp_path / f"{module}.py").write_text(OPENVINO)
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


# ---------------------------------------------------------------- OpenVINO
@pytest.fixture
def openvino(library: Callable[[], list[list[object]]]) -> Iterator[Peer]:
    with Peer(PeerChoice(name="openvino"), Path("model.gguf"), threads=3, num_positions=2000) as peer:
        assert library() == [["pipeline", "CPU", {"INFERENCE_NUM_THREADS": 3}]]
        yield peer


def test_openvino_says_what_it_is_and_how_exact(openvino: Peer) -> None:
    assert (openvino.name, openvino.version) == ("openvino", "2026.1")
    precisions = "INFERENCE_PRECISION_HINT = float32 | DYNAMIC_QUANTIZATION_GROUP_SIZE = 7 | KV_CACHE_PRECISION = 7"
    assert openvino.system == f"CPU of CPU : {precisions}"


def test_openvino_reads_a_prompt_to_its_first_token_and_decodes_as_many_as_are_asked_for(
    openvino: Peer, library: Callable[[], list[list[object]]]
) -> None:
    greedy = {"do_sample": False, "ignore_eos": True}
    openvino.prompt([5, 6, 7])
    assert library() == [["generate", [[5, 6, 7]], [[1, 1, 1]], {"max_new_tokens": 1, **greedy}]]
    assert openvino.decode([5, 6], [8, 9, 10]) == 0.75  # the first token is the prompt's
    assert library() == [["generate", [[5, 6]], [[1, 1]], {"max_new_tokens": 4, **greedy}]]


def test_openvino_is_not_measured_with_reuse(openvino: Peer) -> None:
    with pytest.raises(EngineError, match="openvino: RuntimeError: prompts are measured without reuse here"):
        openvino.prompt([1, 2], reuse=True)


def test_a_model_that_openvino_cannot_load_is_an_error_in_its_words(library: object) -> None:
    with pytest.raises(EngineError, match=r"openvino: RuntimeError: \[load_gguf\] gguf_tensor_to_f16 failed"):
        Peer(PeerChoice(name="openvino"), Path("bad.gguf"), threads=1, num_positions=10)


def test_a_python_without_openvino_is_named(library: object, tmp_path: Path) -> None:
    (tmp_path / "openvino_genai.py").write_text("raise ModuleNotFoundError(\"No module named 'openvino_genai'\")")
    with pytest.raises(UsageError, match="has no openvino-genai; pip install it there, or name another Python"):
        Peer(PeerChoice(name="openvino"), Path("model.gguf"), threads=1, num_positions=10)


def test_the_real_openvino_reads_what_it_is_told(model_path: Callable[[str], Path]) -> None:
    python = os.environ.get("GOINFER_CHAT_OPENVINO_PYTHON")
    if not python:
        pytest.skip("GOINFER_CHAT_OPENVINO_PYTHON names no Python with openvino-genai")
    choice = PeerChoice(name="openvino", python=python)
    with Peer(choice, model_path("smollm2-135m"), threads=1, num_positions=100) as peer:
        assert peer.version[0].isdigit()
        assert peer.prompt(range(500, 530)) > 0
        assert peer.decode(range(500, 520), [1000, 1001]) > 0


def test_this_python_is_the_peers_unless_another_is_named() -> None:
    assert PeerChoice().python == sys.executable
