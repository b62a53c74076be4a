"""The engine as a library, on real files: tiny random models of each architecture, and the guide's own example."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny_model

from engine import load
from engine.api import Message, Reply, Request, SamplingParams
from engine.errors import GoinferError, ModelNotFoundError, OutOfMemoryError, UnsupportedModelError, UsageError
from engine.local import LocalEngine
from engine.quant import TensorType

ROOT = Path(__file__).parent.parent
GREEDY = SamplingParams(temperature=0)
HOT = SamplingParams(temperature=1.2, seed=5)
ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3", "gemma4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for architecture in ARCHITECTURES:
        write_tiny_model(folder / f"{architecture}.gguf", architecture)
    return folder


@pytest.fixture
def engine(folder: Path) -> Iterator[LocalEngine]:
    with load(folder / "llama.gguf", context_size=1024) as engine:
        yield engine


def cold(path: Path, prompt: tuple[int, ...], sampling: SamplingParams, max_tokens: int = 32) -> tuple[int, ...]:
    """What a fresh engine without a cache says."""
    with load(path, kv_sessions=0, threads=1) as engine:
        return raw(engine, prompt, sampling, max_tokens).ids


def raw(engine: LocalEngine, prompt: tuple[int, ...], sampling: SamplingParams, max_tokens: int = 32) -> Reply:
    request = Request(prompt_ids=prompt, sampling=sampling, max_tokens=max_tokens)
    *_, last = engine.generate(request)
    return last.reply  # type: ignore[union-attr]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_a_warm_conversation_says_what_a_fresh_engine_says_on_the_same_ids(
    folder: Path, architecture: str, sampling: SamplingParams
) -> None:
    path = folder / f"{architecture}.gguf"
    with load(path) as engine:
        messages = [Message(role="user", content="Tell me about rivers and " + "lakes, " * 30)]
        kept: tuple[int, ...] = ()
        for turn in range(3):
            reply = engine.chat(messages, sampling=sampling, max_tokens=40)
            assert reply.stats.prefill_reused_tokens == len(kept)
            kept = reply.prompt_ids + reply.ids
            assert reply.ids == cold(path, reply.prompt_ids, sampling, 40)
            messages += [
                Message(role="assistant", content=reply.text, ids=reply.ids),
                Message(role="user", content=f"And {turn}?"),
            ]
        assert raw(engine, kept, GREEDY).ids == cold(path, kept, GREEDY)


def test_going_back_and_asking_again_says_what_a_fresh_engine_says(folder: Path) -> None:
    path = folder / "gemma3.gguf"  # its windows of 32 positions have long passed what is asked again
    with load(path) as engine:
        first = engine.chat("word " * 60, sampling=GREEDY, max_tokens=100)
        again = raw(engine, first.prompt_ids[:70], GREEDY)
        assert again.stats.prefill_tokens == 1
        assert again.ids == cold(path, first.prompt_ids[:70], GREEDY)


def test_equal_and_shorter_prompts_are_evaluated_at_their_last_token_only(engine: LocalEngine, folder: Path) -> None:
    path = folder / "llama.gguf"
    prompt = tuple(engine.tokenizer.encode("the sea and the sky " * 40))
    fresh = cold(path, prompt, GREEDY)
    assert len(prompt) > 200
    for repeat in range(3):
        reply = raw(engine, prompt, GREEDY)
        assert reply.ids == fresh
        assert reply.stats.prefill_tokens == (1 if repeat else len(prompt))
    tail = prompt + tuple(engine.tokenizer.encode(" Z" * 8))
    raw(engine, tail, GREEDY)
    half = raw(engine, prompt[: len(prompt) // 2], GREEDY)
    assert half.stats.prefill_tokens == 1
    assert half.ids == cold(path, prompt[: len(prompt) // 2], GREEDY)


def test_conversations_in_the_order_a_b_c_a_do_not_mix(engine: LocalEngine, folder: Path) -> None:
    start = engine.tokenizer.encode("You are a helpful assistant. " * 20)
    for name in "ABCA":
        prompt = (*start, *engine.tokenizer.encode(f"This is {name}. " * 20))
        request = Request(prompt_ids=prompt, sampling=GREEDY, max_tokens=16, conversation=name)
        *_, last = engine.generate(request)
        assert last.reply.ids == cold(folder / "llama.gguf", prompt, GREEDY, 16)


def test_scores_add_up_to_what_generating_reports(engine: LocalEngine) -> None:
    reply = engine.chat("hello", sampling=GREEDY, max_tokens=70, top_logprobs=1)
    ids = [*reply.prompt_ids, *reply.ids]
    assert reply.logprobs is not None
    assert engine.score(ids, len(reply.prompt_ids)) == [entry.chosen.logprob for entry in reply.logprobs]
    assert all(entry.chosen == entry.top[0] for entry in reply.logprobs)


def test_arguments_that_cannot_be_obeyed_are_usage_errors(folder: Path) -> None:
    for arguments in ({"threads": 0}, {"kv_sessions": -1}, {"context_size": 1}):
        with pytest.raises(UsageError):
            load(folder / "llama.gguf", **arguments)  # type: ignore[arg-type]
    with pytest.raises(ModelNotFoundError):
        load(folder / "none.gguf")


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    whole = write_tiny_model(tmp_path / "whole.gguf", "llama")
    with load(whole) as engine:
        vocab_size = engine.info.vocab_size
    small = np.zeros((vocab_size - 16, 256), np.float32)
    path = write_tiny_model(tmp_path / "small.gguf", "llama", tensors={"token_embd.weight": small})
    with pytest.raises(GoinferError, match="do not belong together"):
        load(path)


def test_memory_that_is_not_there_refuses_the_model_before_it_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.backend.available_memory", lambda: 2**10)
    with pytest.raises(OutOfMemoryError, match=r"llama\.gguf needs .* and 0 MiB are free"):
        load(folder / "llama.gguf")


def test_loading_reports_progress(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", tensor_types=TensorType.F16)
    seen: list[tuple[str, float]] = []
    with load(path, progress=lambda what, share: seen.append((what, share))):
        pass
    assert seen
    assert all(what and 0 <= share <= 1 for what, share in seen)


def test_importing_the_engine_is_cheap() -> None:
    code = (
        "import engine, sys; print(*{m.split('.')[0] for m in sys.modules} & {'numpy', 'numba', 'llvmlite', 'jinja2'})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_example_of_the_guide_runs(folder: Path, tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    (code,) = [part.split("```")[0] for part in guide.split("```python\n")[1:]]
    example = tmp_path / "example.py"
    example.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, example, folder / "qwen2.gguf"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert "Tiny qwen2" in done.stdout
    assert "tokens reused" in done.stdout
    assert done.stderr == ""


def test_a_tokenizer_that_cannot_be_used_is_said_with_the_name_of_the_file(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "strange.gguf", metadata={"tokenizer.ggml.pre": "foo"})
    with pytest.raises(UnsupportedModelError, match=r"^strange\.gguf: .*'foo'"):
        load(path)


def test_the_name_of_a_model_is_one_line(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", metadata={"general.name": " A\nerror: B\r\n"})
    with load(path, context_size=64) as engine:
        assert engine.info.name == "A error: B"
