"""A smaller model guesses for a larger one, and the larger one says what it would have said without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import write_tiny_model

from engine import load
from engine.api import Finished, Message, Reply, Request, SamplingParams, SpeculationMode
from engine.draft_model import GAPS, confidence
from engine.drafters import MODEL_CHANCES, Acceptance
from engine.errors import UsageError
from engine.local import LocalEngine
from engine.speculate import StepCosts


class Cheap(StepCosts):
    """As if a step of any number of rows took the same time, long enough for any number of guesses."""

    def due(self, depth: int) -> bool:
        return False

    def plain(self, num_rows: int) -> float:
        return 1e3

    def drafted(self, size: int) -> float:
        return 1e3

    def measured(self, num_rows: int, num_drafted: int, depth: int, seconds: float) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_tiny_model(folder / "large.gguf", "llama", seed=1)


@pytest.fixture(scope="module", params=["itself", "another"])
def engine(request: pytest.FixtureRequest, folder: Path, model: Path) -> Iterator[LocalEngine]:
    """It guesses everything right, or next to nothing."""
    draft = model if request.param == "itself" else write_tiny_model(folder / "small.gguf", "llama", seed=2)
    with load(model, draft=draft, context_size=256, threads=1) as engine:
        engine._speculator.costs = Cheap()
        yield engine


def ask(engine: LocalEngine, mode: SpeculationMode, **request: object) -> Reply:
    *_, last = engine.generate(Request(**request, speculation=mode, conversation=mode))
    assert isinstance(last, Finished)
    return last.reply


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    seed=st.integers(0, 2**32),
    max_tokens=st.integers(1, 60),
    more=st.lists(st.integers(0, 300), min_size=1, max_size=9),
)
def test_the_words_are_those_of_plain_decoding_in_the_first_turn_and_the_next(
    engine: LocalEngine, prompt: list[int], temperature: float, seed: int, max_tokens: int, more: list[int]
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=seed, repeat_penalty=1.05)
    for mode in ("off", "model"):
        engine.forget(mode)
    for turn in range(2):
        plain, guessed = (
            ask(engine, mode, prompt_ids=tuple(prompt), sampling=sampling, max_tokens=max_tokens)
            for mode in ("off", "model")
        )
        assert (plain.ids, plain.text, plain.finish_reason) == (guessed.ids, guessed.text, guessed.finish_reason)
        if turn == 1:  # the cache holds all that was said
            assert max(plain.stats.prefill_tokens, guessed.stats.prefill_tokens) <= len(more)
        prompt = [*prompt, *plain.ids, *more]


def test_a_model_that_guesses_for_itself_is_always_right_at_any_temperature(model: Path) -> None:
    with load(model, draft=model, context_size=256, threads=1) as engine:
        engine._speculator.costs = Cheap()
        sampling = SamplingParams(temperature=1.0, seed=11)
        stats = ask(engine, "model", prompt_ids=(5, 6, 7), sampling=sampling, max_tokens=100).stats
        assert stats.draft_tokens
        assert stats.draft_accepted == stats.draft_tokens
        assert stats.tokens_per_step is not None
        assert stats.tokens_per_step > 2


def test_a_long_prompt_is_read_in_parts_before_anything_is_guessed(model: Path) -> None:
    with load(model, draft=model, context_size=1024, threads=1) as engine:
        engine._speculator.costs = Cheap()
        rng = np.random.default_rng(3)
        prompt = tuple(rng.integers(0, 300, 700).tolist())
        request = {"prompt_ids": prompt, "sampling": SamplingParams(temperature=1.0, seed=4), "max_tokens": 30}
        guessed = ask(engine, "model", **request)
        assert guessed.stats.undrafted_steps == 2  # 700 rows, 256 at a time
        assert guessed.ids == ask(engine, "off", **request).ids


def test_a_smaller_model_that_is_loaded_guesses_unless_the_request_says_otherwise(model: Path) -> None:
    with load(model, draft=model, context_size=128, threads=1) as engine:
        request = Request(messages=(Message(role="user", content="abc"),), max_tokens=3)
        *_, last = engine.generate(request)
        assert isinstance(last, Finished)
        assert last.reply.stats.draft_tokens is not None
        engine.forget("default")


def test_what_cannot_guess_is_refused(folder: Path, model: Path) -> None:
    other = write_tiny_model(folder / "other.gguf", "gemma3", seed=2)
    with pytest.raises(UsageError, match=r"other\.gguf cannot guess for large\.gguf: .*; choose a smaller model"):
        load(model, draft=other)
    with pytest.raises(UsageError, match="needs a smaller model that guesses"):
        load(model, speculation="model")
    with load(model, threads=1) as engine, pytest.raises(UsageError, match="needs a smaller model that guesses"):
        engine.generate(Request(prompt_ids=(1,), speculation="model"))


def test_confidence_grows_with_the_distance_of_the_second_best() -> None:
    classes = [confidence(np.array([0.0, gap, -9.0], np.float32)) for gap in (0.0, *GAPS, 100.0)]
    assert classes == sorted(classes)
    assert set(classes) == set(range(len(MODEL_CHANCES)))
    assert len({Acceptance().chance(7 + kind) for kind in classes}) == len(MODEL_CHANCES)
