"""Perplexity: which tokens are scored, given which, and what comes out."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.perplexity import perplexity


class Recorder:
    """Scores every token with the same probability and remembers what it was asked."""

    def __init__(self, probability: float) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self._logprob = math.log(probability)

    def __call__(self, ids: Sequence[int], first: int) -> list[float]:
        self.asked.append((list(ids), first))
        return [self._logprob] * (len(ids) - first)


def test_the_second_half_of_each_whole_chunk_is_scored() -> None:
    score = Recorder(1 / 20)
    result = perplexity(range(8 * 3 + 7), score, bos_id=None, chunk_tokens=8)
    assert score.asked == [(list(range(start, start + 8)), 5) for start in (0, 8, 16)]
    assert (result.num_chunks, result.num_tokens) == (3, 9)
    assert result.value == pytest.approx(20)


def test_the_first_token_of_each_chunk_gives_way_to_the_bos() -> None:
    score = Recorder(0.5)
    perplexity([99, *range(1, 16)], score, bos_id=99, chunk_tokens=8)
    assert [ids for ids, _ in score.asked] == [[99, *range(1, 8)], [99, *range(9, 16)]]


def test_the_value_is_the_mean_over_tokens_not_over_chunks() -> None:
    logprobs = iter([[-1.0, -2.0, -3.0], [-4.0, -5.0, -9.0]])
    result = perplexity(range(16), lambda ids, first: next(logprobs), bos_id=None, chunk_tokens=8)
    assert result.value == pytest.approx(math.exp(24 / 6))


def test_progress_is_told_for_each_chunk() -> None:
    told: list[tuple[int, int]] = []
    perplexity(range(1024), Recorder(0.5), bos_id=None, progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 2), (1, 2)]


def test_a_text_shorter_than_two_chunks_is_refused() -> None:
    with pytest.raises(UsageError, match="has 1,023 tokens; its perplexity needs at least 1,024"):
        perplexity(range(1023), Recorder(0.5), bos_id=None)


def check(model: Path, text: str) -> float:
    file = Path(__file__).parent / "data" / "goldens" / text
    command = ["check", "--perplexity", str(file), "--model", str(model), "--json", "--quiet"]
    done = subprocess.run([sys.executable, "-m", "goinfer_chat", *command], capture_output=True, check=True)
    value: float = json.loads(done.stdout)["value"]
    return value


def test_perplexity_of_the_default_model_is_that_of_llama_cpp(model_path: Callable[[str], Path]) -> None:
    assert check(model_path("smollm2-135m"), "ppl-code.txt") == pytest.approx(6.5782, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "text", "value"),
    [
        ("smollm2-135m", "ppl-text.txt", 45.4044),
        ("qwen2.5-coder-0.5b", "ppl-text.txt", 33.0358),
        ("qwen2.5-coder-0.5b", "ppl-code.txt", 3.1659),
        ("qwen2.5-coder-1.5b", "ppl-text.txt", 20.2058),
        ("qwen2.5-coder-1.5b", "ppl-code.txt", 1.9545),
        ("gemma-3-270m", "ppl-text.txt", 40.2182),
        ("gemma-3-270m", "ppl-code.txt", 5.1938),
    ],
)
def test_perplexities_are_those_of_llama_cpp(
    model_path: Callable[[str], Path], model: str, text: str, value: float
) -> None:
    assert check(model_path(model), text) == pytest.approx(value, rel=0.005)
