"""Guessing ahead changes the speed of a reply and nothing else: same words, same figures, same cache, same next turn.

Guesses come from three sources here: the real drafter and controller; the same with costs under which guessing always
pays; and an oracle that knows the reply and spoils some of its guesses, so that every pattern of right and wrong
guesses, and every way for a reply to end inside a draft, comes up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loop import run
from stand_in import END, VOCAB, StandInModel
from test_generate import Bench, after_steps, finished, says, thought
from tiny_models import write_tiny_model

from engine import generate, load
from engine.api import Event, Finished, Reply, Request, SamplingParams, SpeculationMode, TextDelta
from engine.buffers import MAX_WANTED
from engine.drafters import Guess
from engine.errors import EngineError, UsageError
from engine.generate import Generation
from engine.kv_cache import KVPool
from engine.kv_layout import Identity
from engine.local import LocalEngine
from engine.sessions import Sessions
from engine.speculate import Guard, History, Speculation, Speculator, StepCosts
from engine.step import step

GREEDY = SamplingParams(temperature=0, seed=1)
WARM = SamplingParams(temperature=0.7, seed=5)


class Cheap(StepCosts):
    """As if a step of any number of rows took the same time: every match is worth the longest draft."""

    def due(self, depth: int) -> bool:
        return False

    def plain(self, num_rows: int) -> float:
        return 1.0

    def drafted(self, size: int) -> float:
        return 1.0

    def measured(self, num_rows: int, num_drafted: int, depth: int, seconds: float) -> None:
        pass


class Eager(Speculator):
    def __init__(self) -> None:
        super().__init__()
        self.costs = Cheap()

    def begin(self, table, end_ids, model_for=None) -> Speculation:
        speculation = super().begin(table, end_ids, model_for)
        speculation._history.guard = Guard()  # the times of Cheap are not real ones
        speculation._history.guard.WINDOW = 10**9
        return speculation


class Oracle(Speculation):
    """Guesses the reply itself, of a drawn length, and with a wrong token in some places."""

    def __init__(self, truth: Sequence[int], seed: int, share_right: float) -> None:
        super().__init__(History(), Cheap(), frozenset())
        self._truth = list(truth)
        self._random = random.Random(seed)
        self._share_right = share_right

    def draft(self, ids: Sequence[int], limit: int, num_running: int = 1, check=None) -> list[int]:
        coming = self._truth[len(ids) :][:limit]
        right = [self._random.random() < self._share_right for _ in coming]
        draft = [token if ok else self._random.randrange(VOCAB) for token, ok in zip(coming, right)]
        self._guesses = [Guess(token, 0) for token in draft]
        return draft[: self._random.randint(0, len(draft))] if self._random.random() < 0.3 else draft


class Swayed(StandInModel):
    """Says a text again and again, but what is in the cache sways it: one wrong slot, and other words follow."""

    def __init__(self, text: Sequence[int], strength: float) -> None:
        super().__init__()
        self.text, self.strength = list(text), strength

    def _logits(self, stored: np.ndarray) -> np.ndarray:
        logits = super()._logits(stored)
        logits[self.text[len(stored) % len(self.text)]] += self.strength
        return logits


class SpeculatingBench(Bench):
    """A bench whose generations guess ahead as `begin(table)` says."""

    def __init__(self, model: StandInModel, context_size: int = 512, blocks: int | None = None) -> None:
        super().__init__(context_size=context_size)
        if blocks is not None:
            self.pool = KVPool(StandInModel.kv_block_bytes, blocks)
            self.sessions = Sessions(self.pool, 4)
        self.model = model
        model.bind_pool(self.pool)
        self.begin: Callable[[object], Speculation | None] = lambda table: None

    def start(self, request: Request) -> Generation:
        generation = super().start(request)
        generation.speculation = self.begin(generation.table)
        return generation

    def stored(self, conversation: str = "default") -> list[int]:
        table = self.sessions._tables[conversation]
        return self.model._stored(np.array(table.blocks, np.int32), len(table)).tolist()

    def eager(self) -> SpeculatingBench:
        speculator = Eager()
        self.begin = lambda table: speculator.begin(table, frozenset({END}))
        return self


def texts(events: Sequence[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, TextDelta)]


def words(reply: Reply) -> tuple[object, ...]:
    """Everything about a reply that guessing must not change."""
    stats = reply.stats
    counts = (stats.prompt_tokens, stats.prefill_reused_tokens, stats.prefill_tokens, stats.completion_tokens)
    sizes = (stats.context_used, stats.context_size, stats.kv_bytes, stats.seed)
    return reply.text, reply.ids, reply.prompt_ids, reply.finish_reason, reply.logprobs, counts, sizes


class Turn:
    """Everything that can be seen of one request."""

    def __init__(self, bench: SpeculatingBench, request: Request) -> None:
        self.events = bench.events(request)
        self.reply = finished(self.events)
        self.seen = (words(self.reply), texts(self.events), bench.stored(request.conversation))
        self.ids = list(bench.sessions._tables[request.conversation].ids)


def sampling_settings() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.5]),
        top_k=st.sampled_from([0, 3, 40]),
        top_p=st.sampled_from([0.8, 1.0]),
        min_p=st.sampled_from([0.0, 0.1]),
        repeat_penalty=st.sampled_from([1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 2.0]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        penalty_window=st.sampled_from([0, 7, 64]),
        logit_bias=st.sampled_from([{}, {97: 3.0}, {98: -1e9}]),
        seed=st.integers(0, 2**64 - 1),
    )


requests = st.builds(
    Request,
    prompt_ids=st.lists(st.integers(97, 100), min_size=1, max_size=80).map(tuple),
    sampling=sampling_settings(),
    max_tokens=st.one_of(st.none(), st.integers(1, 50)),
    stop=st.sampled_from([(), (), ("ab",), ("abc", "ddd"), ("zzz",), ("c",)]),
    top_logprobs=st.sampled_from([None, None, 0, 3]),
)
saying = st.lists(st.sampled_from([97, 98, 99, 100, 100, 195, 169, END]), min_size=1, max_size=9)


# ---------------------------------------------------------------- whatever is guessed, nothing changes
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    request=requests,
    text=saying,
    strength=st.sampled_from([4.0, 9.0, 30.0]),
    seed=st.integers(0, 2**32),
    share_right=st.sampled_from([0.0, 0.7, 0.95, 1.0]),
    context_size=st.sampled_from([90, 140]),
)
def test_any_guesses_leave_words_figures_and_cache_as_they_are(
    request: Request, text: list[int], strength: float, seed: int, share_right: float, context_size: int
) -> None:
    plain = SpeculatingBench(Swayed(text, strength), context_size)
    guessing = SpeculatingBench(Swayed(text, strength), context_size)
    expected = Turn(plain, request)
    truth = [*expected.reply.prompt_ids, *expected.reply.ids, END, *text]  # also past the end of the reply
    guessing.begin = lambda table: Oracle(truth, seed, share_right)
    found = Turn(guessing, request)
    assert found.seen == expected.seen
    assert found.ids == expected.ids == [*expected.reply.prompt_ids, *expected.reply.ids]
    follow_up = Request(prompt_ids=(*expected.ids, 97, 98), sampling=request.sampling, max_tokens=9)
    if len(expected.ids) + 2 < context_size:
        guessing.begin = lambda table: None
        assert Turn(guessing, follow_up).seen == Turn(plain, follow_up).seen


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(request=requests, text=saying, strength=st.sampled_from([9.0, 12.0, 30.0]))
def test_the_drafter_s_guesses_leave_two_turns_as_they_are(request: Request, text: list[int], strength: float) -> None:
    plain, guessing = (SpeculatingBench(Swayed(text, strength), 160) for _ in range(2))
    guessing.eager()
    for _ in range(2):
        expected, found = Turn(plain, request), Turn(guessing, request)
        assert found.seen == expected.seen
        longer = (*expected.ids, *text)
        if len(longer) >= 160:
            break
        request = Request(prompt_ids=longer, sampling=request.sampling, max_tokens=30, stop=request.stop)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0]))
def test_no_clock_can_change_a_word(seed: int, temperature: float) -> None:
    request = Request(
        prompt_ids=(*b"abcdabcdabcd",), max_tokens=150, sampling=SamplingParams(temperature=temperature, seed=1)
    )
    clock = random.Random(seed)
    now = [0.0]

    def tick() -> float:
        now[0] += clock.choice([0.0, 1e-6, 1e-3, 1.0, 100.0])
        return now[0]

    guessing = SpeculatingBench(Swayed(b"abcd", 11.0))
    speculator = Speculator()
    guessing.begin = lambda table: speculator.begin(table, frozenset({END}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "perf_counter", tick)
        found = Turn(guessing, request)
    assert found.seen == Turn(SpeculatingBench(Swayed(b"abcd", 11.0)), request).seen


def test_right_guesses_save_steps_and_are_counted() -> None:
    plain, guessing = (SpeculatingBench(Swayed(b"abcdefgh", 100.0)) for _ in range(2))
    guessing.eager()
    request = Request(prompt_ids=tuple(b"abcdefgh" * 3), max_tokens=101, sampling=GREEDY)
    assert Turn(guessing, request).seen == Turn(plain, request).seen
    stats = finished(guessing.events(request)).stats
    assert max(guessing.model.wanted_per_step) == MAX_WANTED
    assert len(guessing.model.rows_per_step) < 10
    assert stats.draft_tokens == stats.draft_accepted == 100 - (1 + (100 - MAX_WANTED > 1))
    assert (stats.acceptance, stats.tokens_per_step, stats.undrafted_steps) == (1.0, 50.0, 0)
    assert stats.draft_pauses == 0
    off = finished(plain.events(request)).stats
    assert (off.draft_tokens, off.acceptance, off.tokens_per_step, off.undrafted_steps) == (None,) * 4
    assert (off.draft_accepted, off.draft_saved_ms, off.draft_pauses) == (None,) * 3


# ---------------------------------------------------------------- how a reply ends inside a draft
@pytest.mark.parametrize("max_tokens", range(1, 24))
def test_max_tokens_is_exact_and_the_last_token_has_k_and_v(max_tokens: int) -> None:
    plain, guessing = (SpeculatingBench(Swayed(b"abcd", 100.0)) for _ in range(2))
    guessing.eager()
    prompt = tuple(b"abcd" * 4)
    first = Request(prompt_ids=prompt, max_tokens=max_tokens, sampling=GREEDY)
    expected, found = Turn(plain, first), Turn(guessing, first)
    assert found.seen == expected.seen
    assert len(found.reply.ids) == max_tokens
    assert found.reply.stats.context_used == len(prompt) + max_tokens
    second = Request(prompt_ids=(*prompt, *found.reply.ids, 65), max_tokens=12, sampling=WARM)
    assert Turn(guessing, second).seen == Turn(plain, second).seen
    assert finished(guessing.events(second)).stats.prefill_reused_tokens == len(prompt) + max_tokens


@pytest.mark.parametrize("share_right", [1.0, 0.8])
@pytest.mark.parametrize("stop", ["lo wor", "d", "hello world again", "world, world", "\u00e9"])
def test_a_stop_string_inside_a_draft_ends_the_reply_where_it_would_have(stop: str, share_right: float) -> None:
    said = "hello world again and again, caf\u00e9 world, world without end"
    request = Request(prompt_ids=tuple(range(97, 117)), max_tokens=200, sampling=GREEDY, stop=(stop,), top_logprobs=2)
    script = says(said, start=20)
    plain, guessing = (SpeculatingBench(StandInModel(script=script)) for _ in range(2))
    guessing.begin = lambda table: Oracle([*request.prompt_ids, *said.encode(), END, 0, 0], 3, share_right)
    expected, found = Turn(plain, request), Turn(guessing, request)
    assert found.seen == expected.seen
    assert found.reply.text == said[: said.index(stop)]
    again = Request(prompt_ids=(*found.ids, 1), max_tokens=5, sampling=GREEDY)
    assert Turn(guessing, again).seen == Turn(plain, again).seen


def test_an_end_token_inside_a_draft_ends_the_reply_and_leaves_no_trace_of_what_was_guessed_behind_it() -> None:
    request = Request(prompt_ids=tuple(range(97, 117)), sampling=GREEDY)
    guessing = SpeculatingBench(StandInModel(script=says("hello", start=20)))
    guessing.begin = lambda table: Oracle([*request.prompt_ids, *b"hello", END, *b"hello" * 20], 0, 1.0)
    reply = Turn(guessing, request).reply
    assert max(guessing.model.wanted_per_step) == MAX_WANTED
    assert (reply.text, reply.finish_reason, reply.stats.context_used) == ("hello", "stop", 25)
    assert reply.stats.kv_bytes == StandInModel.kv_block_bytes


def test_an_end_token_that_is_expected_ends_the_draft() -> None:
    ids = [*b"abcdefgh", END, *b"abcd"]
    speculation = Speculation(History(), Cheap(), frozenset({END}))
    assert speculation.draft(ids, 63) == [*b"efgh"]
    assert Speculation(History(), Cheap(), frozenset({END})).draft([*ids, *b"efgh"], 63) == []


@pytest.mark.parametrize("prompt_tokens", [118, 126, 127])
@pytest.mark.parametrize("max_tokens", [None, 64])
def test_the_context_is_filled_to_its_end_and_not_further(prompt_tokens: int, max_tokens: int | None) -> None:
    plain, guessing = (SpeculatingBench(Swayed(b"a", 100.0), 128) for _ in range(2))
    guessing.eager()
    request = Request(prompt_ids=(97,) * prompt_tokens, max_tokens=max_tokens, sampling=GREEDY)
    found = Turn(guessing, request)
    assert found.seen == Turn(plain, request).seen
    assert (len(found.ids), found.reply.finish_reason) == (128, "length")


def test_a_cancelled_reply_is_a_beginning_of_the_plain_one_and_goes_on_the_same() -> None:
    request = Request(prompt_ids=tuple(b"abcd" * 20), max_tokens=200, sampling=WARM)
    whole = Turn(SpeculatingBench(Swayed(b"abcd", 12.0)), request)
    for steps in range(1, 12):
        guessing = SpeculatingBench(Swayed(b"abcd", 12.0)).eager()
        guessing.cancelled = after_steps(guessing, steps)
        cut = Turn(guessing, request)
        assert cut.reply.finish_reason == "cancelled"
        assert whole.reply.ids[: len(cut.reply.ids)] == cut.reply.ids
        assert cut.ids == [*request.prompt_ids, *cut.reply.ids][: len(cut.ids)]
        assert cut.seen[2] == whole.seen[2][: len(cut.ids)]
        guessing.cancelled = lambda: False
        rest = Request(prompt_ids=(*request.prompt_ids, *cut.reply.ids), max_tokens=200 - len(cut.reply.ids))
        rest = Request(prompt_ids=rest.prompt_ids, max_tokens=rest.max_tokens, sampling=WARM)
        assert cut.reply.ids + Turn(guessing, rest).reply.ids == whole.reply.ids


def test_a_step_or_a_draw_that_fails_leaves_ids_and_cache_in_agreement() -> None:
    request = Request(prompt_ids=tuple(b"abcd" * 20), max_tokens=100, sampling=GREEDY)
    whole = Turn(SpeculatingBench(Swayed(b"abcd", 100.0)), request)

    class Broken(Swayed):
        """One row in the middle of a draft has no usable logits."""

        def _logits(self, stored: np.ndarray) -> np.ndarray:
            logits = super()._logits(stored)
            return logits * np.nan if len(stored) == self.bad_position else logits

    guessing = SpeculatingBench(Broken(b"abcd", 100.0)).eager()
    guessing.model.bad_position = 110
    with pytest.raises(EngineError, match="position 110: a logit is not a number"):
        guessing.events(request)
    assert guessing.stored() == whole.seen[2][:110]
    guessing.model.bad_position = -1
    assert Turn(guessing, request).reply.ids == whole.reply.ids


def test_the_iterator_may_be_closed_at_any_event() -> None:
    request = Request(prompt_ids=tuple(b"abcd" * 20), max_tokens=60, sampling=WARM)
    whole = Turn(SpeculatingBench(Swayed(b"abcd", 12.0)), request)
    for taken in range(1, len(whole.events), 3):
        guessing = SpeculatingBench(Swayed(b"abcd", 12.0)).eager()
        generation = guessing.start(request)
        events = run(generation, guessing.model, guessing.sessions, guessing.pace, guessing.cancelled)
        for _ in range(taken):
            next(events)
        events.close()
        guessing.sessions.end("default")
        guessing.check_ids(generation)
        assert Turn(guessing, request).reply.ids == whole.reply.ids


# ---------------------------------------------------------------- several conversations, little memory
def test_generations_that_share_steps_say_what_each_says_alone() -> None:
    prompts = {name: tuple(name.encode() * 9) for name in ("abcd", "bcd", "cdab", "dddc")}
    asked = {
        name: Request(prompt_ids=prompt, max_tokens=50 + 9 * i, sampling=(GREEDY, WARM)[i % 2], conversation=name)
        for i, (name, prompt) in enumerate(prompts.items())
    }
    bench = SpeculatingBench(Swayed(b"abcd", 13.0)).eager()
    generations = [bench.start(request) for request in asked.values()]
    while running := [generation for generation in generations if not generation.done]:
        step(bench.model, bench.sessions, running, bench.pace)
    assert max(bench.model.wanted_per_step) <= MAX_WANTED
    assert sum(generation.reply().stats.draft_accepted or 0 for generation in generations) > 50
    for generation, (name, request) in zip(generations, asked.items()):
        alone = Turn(SpeculatingBench(Swayed(b"abcd", 13.0)), request)
        assert words(generation.reply()) == words(alone.reply)
        assert bench.stored(name) == alone.seen[2]


def test_guesses_take_no_room_that_plain_decoding_would_not_have() -> None:
    said = b"abcd" * 10  # 80 + 40 positions: two of the three blocks, and guesses go on as if the reply did too
    request = Request(prompt_ids=tuple(b"abcd" * 20), max_tokens=300, sampling=GREEDY)
    kept = Request(prompt_ids=(1, 2, 3), max_tokens=2, sampling=GREEDY, conversation="kept")
    for guesses in (False, True):
        bench = SpeculatingBench(StandInModel(script=says(said, start=80)), blocks=3)
        bench.events(kept)
        reply = finished((bench.eager() if guesses else bench).events(request))
        assert bytes(reply.ids) == said
        assert bench.sessions.kept == ("kept", "default")
    assert reply.stats.draft_accepted


def test_a_conversation_keeps_its_index_and_another_gets_its_own() -> None:
    speculator = Eager()
    bench = SpeculatingBench(Swayed(b"abcd", 100.0))
    bench.begin = lambda table: speculator.begin(table, frozenset({END}))
    first = Turn(bench, Request(prompt_ids=tuple(b"abcd" * 5), max_tokens=9, sampling=GREEDY))
    table = bench.sessions._tables["default"]
    index = speculator._histories[table].index
    assert index.ids == first.ids[: len(index)]
    prompts = [(*first.ids, 65, 66), (*first.ids[:22], 67), tuple(b"xyz")]  # longer, another way, nothing in common
    for prompt in prompts:
        turn = Turn(bench, Request(prompt_ids=prompt, max_tokens=9, sampling=GREEDY))
        assert speculator._histories[table].index is index
        assert index.ids == turn.ids[: len(index)]
    Turn(bench, Request(prompt_ids=prompts[0], max_tokens=9, sampling=GREEDY, conversation="other"))
    assert len(speculator._histories) == 2
    del table, turn
    for name in ("default", "other"):
        bench.sessions.forget(name)
    assert len(speculator._histories) == 0


# ---------------------------------------------------------------- real steps: tiny models and the default one
@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], LocalEngine]]:
    """A tiny model of an architecture, under costs that make every guess worth its while."""
    folder, engines = tmp_path_factory.mktemp("models"), {}

    def engine_of(architecture: str) -> LocalEngine:
        if architecture not in engines:
            path = write_tiny_model(folder / f"{architecture}.gguf", architecture, num_layers=4)
            engines[architecture] = load(path, context_size=256, threads=1)
            engines[architecture]._speculator = Eager()
        return engines[architecture]

    yield engine_of
    for engine in engines.values():
        engine.close()


def ask(engine: LocalEngine, mode: SpeculationMode, request: dict[str, object], *, cold: bool = True) -> Reply:
    """The reply, with a cache of its own for each mode."""
    if cold:
        for name in ("off", "ngram"):
            engine.forget(name)
    *_, last = engine.generate(Request(**request, speculation=mode, conversation=mode))
    assert isinstance(last, Finished)
    return last.reply


def cache_of(engine: LocalEngine, conversation: str) -> tuple[list[int], list[bytes]]:
    """Ids of a kept conversation, and the K/V of exactly their positions, block by block."""
    table = engine._sessions._tables[conversation]
    layout = Identity.of(engine._model.config, "00" * 32).layout
    ends = [min(64, len(table) - start) for start in range(0, len(table), 64)]
    return table.ids, [
        layout.gather(engine._pool.memory[block], 0, end).tobytes() for block, end in zip(table.blocks, ends)
    ]


def assert_same_two_turns(engine: LocalEngine, request: dict[str, object], more: Sequence[int]) -> Reply:
    """The same reply, cache and next reply with guesses as without."""
    seen = []
    for mode in ("off", "ngram"):
        reply = ask(engine, mode, request)
        ids, cache = cache_of(engine, mode)
        assert ids == [*reply.prompt_ids, *reply.ids]
        seen.append([words(reply), cache])
        follow_up = {**request, "prompt_ids": (*ids, *more), "max_tokens": 12}
        if len(ids) + len(more) < engine.info.context_size:
            second = ask(engine, mode, follow_up, cold=False)
            assert second.stats.prefill_tokens == len(more)
            seen[-1] += [words(second), cache_of(engine, mode)[1]]
    assert seen[0] == seen[1]
    return reply


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    piece=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    repeats=st.integers(1, 9),
    sampling=sampling_settings(),
    max_tokens=st.integers(1, 90),
)
@example(piece=[5, 6, 7], repeats=9, sampling=GREEDY, max_tokens=90)
@example(piece=[8], repeats=1, sampling=GREEDY, max_tokens=90)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "gemma4"])
def test_tiny_models_say_and_keep_the_same(
    architecture: str,
    tiny: Callable[[str], LocalEngine],
    piece: list[int],
    repeats: int,
    sampling: SamplingParams,
    max_tokens: int,
) -> None:
    request = {"prompt_ids": tuple(piece * repeats), "sampling": sampling, "max_tokens": max_tokens}
    assert_same_two_turns(tiny(architecture), request, [1, 2, 3])


def test_repetition_across_the_edge_of_a_sliding_window_changes_nothing(tiny: Callable[[str], LocalEngine]) -> None:
    engine = tiny("gemma3")
    assert engine._model.config.window == 32
    for length in (20, 31, 32, 60, 96):
        request = {"prompt_ids": tuple([7, 8, 9, 10] * 40)[:length], "sampling": GREEDY, "max_tokens": 80}
        reply = assert_same_two_turns(engine, request, [7, 8])
        assert len(reply.ids) == 80
    assert reply.stats.draft_accepted


@pytest.mark.parametrize("prompt_tokens", [118, 250, 255])
def test_the_context_of_a_real_model_is_filled_to_its_end(
    prompt_tokens: int, tiny: Callable[[str], LocalEngine]
) -> None:
    request = {"prompt_ids": (9,) * prompt_tokens, "sampling": GREEDY, "max_tokens": 200}
    reply = assert_same_two_turns(tiny("llama"), request, [1])
    assert (len(reply.prompt_ids) + len(reply.ids), reply.finish_reason) == (256, "length")


def test_the_engine_s_choice_counts_unless_the_request_says_otherwise(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", "llama")
    request = {"prompt_ids": (5, 6, 7) * 4, "max_tokens": 5}
    with load(path, threads=1) as engine:
        assert finished(list(engine.generate(Request(**request)))).stats.draft_tokens is not None
        assert finished(list(engine.generate(Request(**request, speculation="off")))).stats.draft_tokens is None
    with load(path, threads=1, speculation="off") as engine:
        assert finished(list(engine.generate(Request(**request)))).stats.draft_tokens is None
        assert (
            finished(list(engine.generate(Request(**request, speculation="ngram")))).stats.undrafted_steps is not None
        )
    with pytest.raises(UsageError, match="unknown speculation 'fast'; choose from: off, ngram, model"):
        load(path, speculation="fast")
    with pytest.raises(UsageError, match="unknown speculation 'fast'; choose from: off, ngram, model"):
        Request(**request, speculation="fast")


LIST = "\n".join(f"{number}. {'pears' if number == 17 else 'apples'} and plums" for number in range(1, 41))
CODE = "def area(x, y):\n    total = x * y\n    for x in range(x):\n        total += x\n    return total\n"
PROMPTS = {
    "one word": "serving " * 48,
    "ones": "1 1 1",
    "list": f"{LIST}\n\nRepeat the list, with line 20 changed to bananas.\n\n",
    "code": f"{CODE}\nRepeat it with x renamed to y:\n\n",
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_default_model_says_and_keeps_the_same(temperature: float, model_path: Callable[[str], Path]) -> None:
    with load(model_path("smollm2-135m"), context_size=1024) as engine:
        engine._speculator = Eager()
        accepted = 0
        for prompt in PROMPTS.values():
            ids = tuple(engine.tokenizer.encode(prompt))
            request = {
                "prompt_ids": ids,
                "sampling": SamplingParams(temperature=temperature, seed=7, repeat_penalty=1.05),
                "max_tokens": 32,
                "top_logprobs": 3,
            }
            reply = assert_same_two_turns(engine, request, engine.tokenizer.encode(" and"))
            accepted += reply.stats.draft_accepted or 0
        assert accepted > 15


def test_a_budget_of_reasoning_gives_the_same_reply_with_guesses() -> None:
    for budget in (1, 4, 7, 20):
        speculation = Speculation(History(), Cheap(), frozenset({END}))
        guessed = thought(budget, speculation=speculation)
        assert guessed.ids == thought(budget).ids
        assert guessed.stats.draft_accepted
