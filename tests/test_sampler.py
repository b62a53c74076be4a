"""The sampler against a plain twin in Python, and its random numbers against Philox written out."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import SamplingParams
from engine.errors import EngineError
from engine.sampler import Sampler, exp_negative, largest, log_probabilities, uniform

MASK = 2**64 - 1


def philox(key: int, counter: int) -> int:
    """First word of Philox 4x64-10 (Salmon et al. 2011, Random123)."""
    words, k0, k1 = [counter & MASK, counter >> 64 & MASK, 0, 0], key & MASK, key >> 64
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * words[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * words[2], 2**64)
        words = [high1 ^ words[1] ^ k0, low1, high0 ^ words[3] ^ k1, low0]
        k0, k1 = k0 + 0x9E3779B97F4A7C15 & MASK, k1 + 0xBB67AE8584CAA73B & MASK
    return words[0]


def plain_choice(logits: Sequence[float], params: SamplingParams, seed: int, position: int, recent: list[int]) -> int:
    """What SamplingParams says, with lists, a full sort and the C library's exp."""
    f32 = np.float32
    scores = [f32(x) for x in logits]
    for i, bias in params.logit_bias.items():
        scores[i] = scores[i] + f32(bias)
    window = recent[-params.penalty_window :] if params.penalty_window else []
    for i, count in Counter(window).items():
        repeat = f32(params.repeat_penalty)
        scores[i] = scores[i] / repeat if scores[i] > 0 else scores[i] * repeat
        scores[i] = scores[i] - f32(params.presence_penalty) - f32(params.frequency_penalty) * f32(count)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if params.temperature == 0:
        return order[0]
    weights = [math.exp((float(s) - float(scores[order[0]])) / params.temperature) for s in scores]
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        goal, mass = params.top_p * math.fsum(weights[i] for i in order), 0.0
        for kept, i in enumerate(order, start=1):
            mass += weights[i]
            if mass >= goal:
                order = order[:kept]
                break
    if params.min_p:
        order = [i for i in order if weights[i] >= params.min_p]
    if not params.top_k and params.top_p == 1 and not params.min_p:
        order.sort()  # nothing needs ranks, so ids stay in their own order
    target = uniform(seed, position) * math.fsum(weights[i] for i in order)
    mass = 0.0
    for i in order:
        mass += weights[i]
        if mass > target:
            return i
    return order[-1]


def bell(size: int, seed: int = 0, width: float = 3.0) -> np.ndarray:
    """Logits like a model's."""
    return (np.random.default_rng(seed).standard_normal(size) * width).astype(np.float32)


some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 10_000]),
    top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repeat_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    penalty_window=st.sampled_from([0, 3, 64]),
    logit_bias=st.dictionaries(st.integers(0, 9), st.sampled_from([-100.0, -1.0, 2.5]), max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(
    params=some_params,
    size=st.sampled_from([10, 63, 64, 129, 700, 5_003]),
    tied=st.booleans(),
    logit_seed=st.integers(0, 10_000),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 100_000),
    recent=st.lists(st.integers(0, 9), max_size=80),
)
def test_every_choice_is_the_plain_twin_s(
    params: SamplingParams, size: int, tied: bool, logit_seed: int, seed: int, position: int, recent: list[int]
) -> None:
    logits = bell(size, logit_seed)
    if tied:
        logits = np.round(logits)  # many equal logits: ids must decide
    before = logits.copy()
    chosen = Sampler(params, seed).sample(logits, position, recent)
    assert chosen == plain_choice(logits.tolist(), params, seed, position, recent)
    assert np.array_equal(logits, before)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.array([1, 5, 2, 5, 5], np.float32)
    assert Sampler(SamplingParams(temperature=0), 0).sample(logits, 0, []) == 1


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40))
def test_the_draw_is_philox_with_the_seed_as_key_and_the_position_as_counter(seed: int, position: int) -> None:
    # NumPy steps the counter before its first output.
    assert uniform(seed, position) == (philox(seed, position + 1) >> 11) / 2**53


def test_philox_written_out_here_is_the_published_one() -> None:
    assert philox(0, 0) == 0x16554D9ECA36314C  # Random123's known answer for an all-zero counter and key


def test_the_draw_of_a_position_does_not_depend_on_what_was_drawn_before() -> None:
    logits = bell(1000)
    sampler = Sampler(SamplingParams(temperature=1.5, top_k=0), 99)
    forwards = [sampler.sample(logits, position, []) for position in range(50)]
    backwards = [sampler.sample(logits, position, []) for position in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) > 10
    assert forwards != [Sampler(sampler.params, 98).sample(logits, position, []) for position in range(50)]


@pytest.mark.parametrize("top_k", [0, 8])
def test_draws_follow_the_distribution(top_k: int) -> None:
    logits = bell(8, seed=3, width=1.0)
    sampler = Sampler(SamplingParams(temperature=0.8, top_k=top_k, top_p=1.0), 4)
    draws = 20_000
    seen = np.bincount([sampler.sample(logits, position, []) for position in range(draws)], minlength=8)
    wanted = np.exp(logits.astype(float) / 0.8)
    wanted *= draws / wanted.sum()
    chi_square = float(((seen - wanted) ** 2 / wanted).sum())
    assert chi_square < 24.3  # 7 degrees of freedom: exceeded once in a thousand seeds


def test_the_settings_drop_tokens_in_the_stated_order() -> None:
    # Probabilities .4 .3 .2 .1; top-k 3 leaves 4/9 3/9 2/9, of which top-p 0.75 keeps two; of all four it keeps three.
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)

    def possible(**settings: float) -> set[int]:
        params = SamplingParams(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings})
        return {Sampler(params, 5).sample(logits, position, []) for position in range(400)}

    assert possible() == {0, 1, 2, 3}
    assert possible(top_k=3) == {0, 1, 2}
    assert possible(top_p=0.75) == {0, 1, 2}
    assert possible(top_k=3, top_p=0.75) == {0, 1}
    assert possible(min_p=0.6) == {0, 1}
    assert possible(min_p=1.0) == {0}
    assert possible(temperature=0.5, top_p=0.8) == {0, 1}  # after temperature: .53 .30 .13 .03
    assert possible(logit_bias={3: 50.0}) == {3}


def test_penalties_look_only_at_the_window() -> None:
    logits = np.array([2.0, 1.9, -1.0], np.float32)

    def greedy(recent: list[int], **settings: float) -> int:
        return Sampler(SamplingParams(temperature=0, **settings), 0).sample(logits, 9, recent)

    assert greedy([0], repeat_penalty=1.2) == 1
    assert greedy([0, 2, 2], repeat_penalty=1.2, penalty_window=2) == 0
    assert greedy([0], repeat_penalty=1.2, penalty_window=0) == 0
    assert greedy([0, 0, 1], presence_penalty=0.5) == 0
    assert greedy([0, 0, 1], frequency_penalty=0.5) == 1
    assert greedy([2], repeat_penalty=0.01) == 0  # a negative logit is multiplied: -0.01 is still less than 2


def test_biases_can_force_and_ban() -> None:
    logits = bell(100)
    best = int(logits.argmax())
    force = SamplingParams(temperature=5, logit_bias={7: math.inf})
    assert {Sampler(force, 1).sample(logits, position, []) for position in range(50)} == {7}
    ban = SamplingParams(temperature=1, top_k=0, top_p=1, logit_bias={i: -math.inf for i in range(100) if i != 3})
    assert {Sampler(ban, 1).sample(logits, position, []) for position in range(50)} == {3}
    assert Sampler(SamplingParams(temperature=0, logit_bias={best: -1e300}), 1).sample(logits, 0, []) != best


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_nothing_can_be_chosen_from_are_an_error(temperature: float) -> None:
    logits = bell(70)
    logits[50] = np.nan
    with pytest.raises(EngineError, match="position 12: a logit is not a number"):
        Sampler(SamplingParams(temperature=temperature), 0).sample(logits, 12, [])
    ban_all = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(3), -math.inf))
    with pytest.raises(EngineError, match="bans every token"):
        Sampler(ban_all, 0).sample(np.zeros(3, np.float32), 0, [])


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-9])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    logits = bell(500)
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0)
    assert Sampler(params, 0).sample(logits, 1, []) == int(logits.argmax())


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 3_000), count=st.integers(1, 3_500), seed=st.integers(0, 1000), tied=st.booleans())
def test_the_largest_are_those_of_a_full_sort(size: int, count: int, seed: int, tied: bool) -> None:
    values = bell(size, seed)
    if tied:
        values = np.round(values)
    expected = sorted(range(size), key=lambda i: (-values[i], i))[:count]
    assert largest(values, count).tolist() == expected


def test_the_exponential_is_right_to_the_last_bits() -> None:
    x = -np.concatenate([np.random.default_rng(0).random(20_000) * 699.9, np.geomspace(1e-20, 1, 500), [0.0]])
    exact = np.array([math.exp(value) for value in x])
    assert np.max(np.abs(exp_negative(x) / exact - 1)) < 1e-15
    assert exp_negative(np.array([0.0]))[0] == 1.0
    assert not exp_negative(np.array([-700.0, -1e300, -math.inf])).any()


def test_the_bits_of_the_exponential_are_recorded() -> None:
    x = np.array([-0.5, -1.0, -3.25, -17.125, -250.75, -699.0])
    assert [value.hex() for value in exp_negative(x).tolist()] == [
        "0x1.368b2fc6f960ap-1",
        "0x1.78b56362cef38p-2",
        "0x1.3da368521902dp-5",
        "0x1.39d4ec6b9f3d3p-25",
        "0x1.2f382e00922a7p-362",
        "0x1.78694fe9f73ccp-1009",
    ]


def test_log_probabilities_are_the_model_s_own() -> None:
    logits = bell(2_000)
    exact = logits.astype(float) - math.log(math.fsum(math.exp(x) for x in logits.tolist()))
    chosen, top = log_probabilities(logits, 77, 5)
    assert chosen == pytest.approx(exact[77], abs=1e-12)
    assert [i for i, _ in top] == np.argsort(-exact)[:5].tolist()
    assert [value for _, value in top] == pytest.approx(np.sort(exact)[::-1][:5].tolist(), abs=1e-12)
    assert log_probabilities(logits, 77, 0) == (chosen, [])


@pytest.mark.parametrize(("size", "limit_us"), [(50_000, 150), (150_000, 400)])
def test_the_default_settings_cost_microseconds(size: int, limit_us: float) -> None:
    logits, sampler = bell(size), Sampler(SamplingParams(), 0)
    best = math.inf
    for position in range(200):  # the best of many: other programs use this machine too
        started = time.perf_counter()
        sampler.sample(logits, position, [])
        best = min(best, time.perf_counter() - started)
    assert best * 1e6 < limit_us
