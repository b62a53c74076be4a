"""The loop over a stand-in model whose output depends on every position in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop import run
from stand_in import CONTROL, END, StandInModel, StandInTokenizer

from engine import generate
from engine.api import Event, Finished, PrefillProgress, Progress, Reply, Request, SamplingParams, TextDelta, TurnStats
from engine.errors import EngineError, UsageError
from engine.generate import Generation
from engine.kv_cache import KVPool
from engine.reply_plan import ReplyPlan
from engine.sessions import Sessions
from engine.step import PrefillPace, step
from engine.stop_strings import StopStrings

GREEDY = SamplingParams(temperature=0)
HOT = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, seed=11)
PROMPT = tuple(range(97, 122)) * 8  # 200 tokens


class Bench:
    """Pool, sessions, model and pace; `ask` runs one request as an engine does."""

    def __init__(self, script: Callable[[int], int | None] | None = None, *, context_size: int = 2048) -> None:
        self.pool = KVPool(StandInModel.kv_block_bytes, 4 * context_size // 64)
        self.sessions = Sessions(self.pool, 4)
        self.model = StandInModel(self.pool, script)
        self.pace = PrefillPace()
        self.context_size = context_size
        self.cancelled: Callable[[], bool] = lambda: False

    def start(self, request: Request) -> Generation:
        assert request.prompt_ids
        return Generation(
            request,
            request.prompt_ids,
            self.sessions.begin(request.conversation, request.prompt_ids),
            StandInTokenizer(),
            seed=request.sampling.seed or 0,
            context_size=self.context_size,
            submitted=0.0,
        )

    def events(self, request: Request) -> list[Event]:
        generation = self.start(request)
        try:
            return list(run(generation, self.model, self.sessions, self.pace, self.cancelled))
        finally:
            self.sessions.end(request.conversation)
            self.check_ids(generation)

    def check_ids(self, generation: Generation) -> None:
        """Recorded ids and K/V positions agree."""
        length = len(generation.table)
        assert generation.table.ids == generation.ids[:length]
        if generation.done and length >= generation._num_prompt:
            assert length == len(generation.ids)

    def ask(self, prompt: Sequence[int] = PROMPT, max_tokens: int | None = 8, **settings: object) -> Reply:
        sampling = settings.pop("sampling", GREEDY)
        return finished(
            self.events(Request(prompt_ids=tuple(prompt), max_tokens=max_tokens, sampling=sampling, **settings))
        )


def finished(events: list[Event]) -> Reply:
    assert isinstance(events[-1], Finished)
    reply = events[-1].reply
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == reply.text
    assert all(event.text for event in events if isinstance(event, TextDelta))
    return reply


def says(text: str | bytes, start: int = len(PROMPT), end: bool = True) -> Callable[[int], int | None]:
    """A script that replies with these bytes after a prompt of `start` tokens, then END."""
    ids = [*(text.encode() if isinstance(text, str) else text), *([END] if end else [])]
    return lambda position: ids[position - start] if start <= position < start + len(ids) else ord("~")


def test_two_turns_with_a_warm_cache_say_what_a_cold_one_says() -> None:
    bench = Bench()
    first = bench.ask(sampling=HOT)
    second_prompt = [*PROMPT, *first.ids, 65, 66]
    warm = bench.ask(second_prompt, sampling=HOT)
    cold = Bench().ask(second_prompt, sampling=HOT)
    assert warm.ids == cold.ids
    assert warm.stats.prefill_reused_tokens == len(PROMPT) + len(first.ids)
    assert warm.stats.prefill_tokens == 2
    assert cold.stats.prefill_tokens == len(second_prompt)


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_the_same_long_request_three_times_gives_the_same_tokens(sampling: SamplingParams) -> None:
    prompt = [i * 7 % 250 for i in range(1000)]
    bench = Bench()
    replies = [bench.ask(prompt, sampling=sampling) for _ in range(3)]
    assert len({reply.ids for reply in replies}) == 1
    assert [reply.stats.prefill_tokens for reply in replies] == [1000, 1, 1]


def test_a_reply_goes_on_the_same_from_any_of_its_tokens() -> None:
    whole = Bench().ask(max_tokens=12, sampling=HOT)
    for cut in range(1, 12):
        rest = Bench().ask([*PROMPT, *whole.ids[:cut]], max_tokens=12 - cut, sampling=HOT)
        assert whole.ids[:cut] + rest.ids == whole.ids


def test_a_shorter_prompt_is_not_influenced_by_the_cached_tail() -> None:
    half = [i * 7 % 250 for i in range(100)]
    bench = Bench()
    bench.ask([*half, *b" Z Z Z Z Z Z Z Z"])
    short = bench.ask(half)
    assert short.ids == Bench().ask(half).ids
    assert short.stats.prefill_tokens == 1


def test_conversations_in_any_order_answer_like_cold_ones() -> None:
    prompts = {name: [*range(90), *name.encode() * 60] for name in "ABC"}
    bench = Bench()
    for name in "ABCABBA":
        reply = bench.ask(prompts[name], conversation=name, sampling=HOT)
        assert reply.ids == Bench().ask(prompts[name], sampling=HOT).ids
        prompts[name] += [*reply.ids, 10]


@pytest.mark.parametrize("fits", [8, 24, 64, 512])
def test_the_size_of_prefill_chunks_never_changes_a_token(fits: int) -> None:
    bench = Bench()
    bench.pace = PrefillPace(target_seconds=1e9, max_rows=fits)
    reply = bench.ask([i * 3 % 251 for i in range(777)], sampling=HOT)
    assert reply.ids == Bench().ask([i * 3 % 251 for i in range(777)], sampling=HOT).ids
    assert max(bench.model.rows_per_step) <= fits
    assert sum(bench.model.rows_per_step) == 777 + 8


def test_two_generations_in_one_step_say_what_each_says_alone() -> None:
    bench = Bench()
    requests = [
        Request(prompt_ids=PROMPT, max_tokens=9, sampling=HOT, conversation="a"),
        Request(prompt_ids=(*PROMPT[:130], 5, 6, 7), max_tokens=30, sampling=HOT, conversation="b"),
    ]
    generations = [bench.start(request) for request in requests]
    while running := [generation for generation in generations if not generation.done]:
        step(bench.model, bench.sessions, running, bench.pace)
    for generation, request in zip(generations, requests):
        bench.check_ids(generation)
        assert generation.reply().ids == finished(Bench().events(request)).ids


@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_max_tokens_is_exact_and_the_last_token_has_k_and_v(max_tokens: int) -> None:
    bench = Bench()
    reply = bench.ask(max_tokens=max_tokens)
    assert len(reply.ids) == reply.stats.completion_tokens == max_tokens
    assert reply.finish_reason == "length"
    assert reply.stats.context_used == len(PROMPT) + max_tokens
    assert bench.ask([*PROMPT, *reply.ids, 1]).stats.prefill_tokens == 1


def test_only_the_rows_that_are_drawn_from_have_logits() -> None:
    bench = Bench()
    bench.ask(range(200), max_tokens=3)
    assert bench.model.wanted_per_step == [0] * (len(bench.model.wanted_per_step) - 4) + [1, 1, 1, 0]


def test_an_end_token_stops_and_is_neither_text_nor_id_nor_cached() -> None:
    bench = Bench(says("hello"))
    reply = bench.ask(max_tokens=64)
    assert (reply.text, reply.ids, reply.finish_reason) == ("hello", tuple(b"hello"), "stop")
    assert reply.stats.context_used == len(PROMPT) + 5


def test_an_end_token_at_once_is_an_empty_reply() -> None:
    reply = Bench(says("")).ask()
    assert (reply.text, reply.ids, reply.finish_reason) == ("", (), "stop")
    assert reply.stats.decode_tok_s is None
    assert reply.stats.ttft_ms is not None


def test_a_control_token_inside_a_reply_has_no_text() -> None:
    script = [72, CONTROL, 105, END]
    reply = Bench(lambda position: script[position - len(PROMPT)]).ask()
    assert (reply.text, reply.ids) == ("Hi", (72, CONTROL, 105))


def test_the_context_is_filled_to_the_last_position() -> None:
    bench = Bench(context_size=210)
    reply = bench.ask(max_tokens=None)
    assert (len(reply.ids), reply.finish_reason, reply.stats.context_used) == (10, "length", 210)
    one = Bench(context_size=201).ask(max_tokens=64)
    assert (len(one.ids), one.finish_reason) == (1, "length")


@pytest.mark.parametrize(
    ("stop", "text", "num_ids"),
    [
        ((" wor",), "hello", 5),
        (("hello world",), "", 0),
        (("d", "wor"), "hello ", 6),
        (("wor", "hello wo"), "", 0),  # ends first, so it counts, though it began earlier
        (("world!",), "hello world", 11),
        (("zzz",), "hello world", 11),
    ],
)
def test_stop_strings_end_the_reply_across_tokens(stop: tuple[str, ...], text: str, num_ids: int) -> None:
    bench = Bench(says("hello world"))
    reply = bench.ask(max_tokens=64, stop=stop)
    assert (reply.text, len(reply.ids), reply.finish_reason) == (text, num_ids, "stop")
    assert bytes(reply.ids).decode() == text
    assert bench.ask([*PROMPT, *reply.ids, 1], max_tokens=1).stats.prefill_tokens == 1


def test_text_that_may_become_a_stop_string_is_held_back_until_it_is_decided() -> None:
    bench = Bench(says("a<b<|c"))
    events = bench.events(Request(prompt_ids=PROMPT, max_tokens=64, sampling=GREEDY, stop=("<|end|>",)))
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["a", "<b", "<|c"]


def test_a_stop_string_beats_max_tokens_at_the_same_token() -> None:
    assert Bench(says("abc")).ask(max_tokens=3, stop=("c",)).finish_reason == "stop"
    assert Bench(says("abc")).ask(max_tokens=3).finish_reason == "length"


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=2, max_size=6), max_size=3),
    data=st.data(),
)
def test_stop_strings_do_not_depend_on_how_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    def feed(pieces: Sequence[str]) -> tuple[str, bool]:
        matcher, shown = StopStrings(stops), ""
        for piece in pieces:
            out, stopped = matcher.push(piece)
            shown += out
            assert not any(stop in shown for stop in stops)
            if stopped:
                return shown, True
        return shown + matcher.finish(), False

    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)])]
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    expected = (
        text if not ends else min((text[: text.find(s)] for s in stops if text[: min(ends)].endswith(s)), key=len)
    )
    assert feed(pieces) == feed(list(text)) == (expected, bool(ends))


FLAGS = "😀🇯🇵 👩‍🚀 é 한국어 «щ»"


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_a_cut_character_is_shown_once_and_bytes_are_kept(max_tokens: int) -> None:
    reply = Bench(says(FLAGS)).ask(max_tokens=max_tokens, top_logprobs=2)
    assert reply.text == FLAGS.encode()[:max_tokens].decode(errors="replace")
    assert reply.logprobs is not None
    assert b"".join(entry.chosen.piece for entry in reply.logprobs) == FLAGS.encode()[:max_tokens]


def test_characters_that_span_tokens_are_whole_in_the_stream() -> None:
    events = Bench(says(FLAGS)).events(Request(prompt_ids=PROMPT, sampling=GREEDY))
    assert finished(events).text == FLAGS
    assert not any("\ufffd" in event.text for event in events if isinstance(event, TextDelta))


def test_logprobs_come_one_for_each_id_with_the_best_first() -> None:
    reply = Bench().ask(max_tokens=6, top_logprobs=3, sampling=HOT)
    assert reply.logprobs is not None
    assert [entry.chosen.id for entry in reply.logprobs] == list(reply.ids)
    for entry in reply.logprobs:
        values = [top.logprob for top in entry.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert values[0] >= entry.chosen.logprob
    assert Bench().ask().logprobs is None
    cut = Bench(says("hello world")).ask(max_tokens=64, stop=("lo",), top_logprobs=0)
    assert cut.logprobs is not None
    assert [entry.chosen.piece for entry in cut.logprobs] == [b"h", b"e", b"l"]
    assert all(entry.top == () for entry in cut.logprobs)


def test_progress_counts_reused_tokens_and_reaches_the_total() -> None:
    bench = Bench()
    bench.ask(PROMPT[:50])
    bench.pace = PrefillPace(max_rows=32)
    events = bench.events(Request(prompt_ids=PROMPT, sampling=GREEDY, max_tokens=1))
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert len(progress) > 1
    assert [event.done for event in progress] == sorted({event.done for event in progress})
    assert progress[-1].done == progress[-1].total == len(PROMPT)
    assert {event.reused for event in progress} == {50}


def progress_of(monkeypatch: pytest.MonkeyPatch, seconds: float) -> tuple[list[TurnStats], TurnStats]:
    """The figures told during a reply of eight tokens, and those at its end."""
    monkeypatch.setattr(generate, "PROGRESS_SECONDS", seconds)
    events = Bench().events(Request(prompt_ids=PROMPT, sampling=GREEDY, max_tokens=8))
    return [event.stats for event in events if isinstance(event, Progress)], finished(events).stats


def test_the_figures_are_told_while_the_reply_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    told, last = progress_of(monkeypatch, 0.0)
    assert [stats.completion_tokens for stats in told] == [2, 3, 4, 5, 6, 7]
    assert [stats.context_used for stats in told] == [len(PROMPT) + n - 1 for n in range(2, 8)]
    assert all(stats.ttft_ms == last.ttft_ms and stats.decode_tok_s for stats in told)


def test_the_figures_are_told_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    told, _ = progress_of(monkeypatch, 1e9)
    assert told == []


def after_steps(bench: Bench, count: int) -> Callable[[], bool]:
    return lambda: len(bench.model.rows_per_step) >= count


def test_cancelling_a_prefill_ends_after_the_running_chunk_and_keeps_it() -> None:
    bench = Bench()
    bench.cancelled = after_steps(bench, 1)
    reply = bench.ask()
    assert (reply.finish_reason, reply.text, reply.ids) == ("cancelled", "", ())
    assert (reply.stats.prefill_tokens, reply.stats.context_used) == (32, 32)
    assert (reply.stats.ttft_ms, reply.stats.decode_tok_s) == (None, None)
    bench.cancelled = lambda: False
    again = bench.ask()
    assert again.stats.prefill_reused_tokens == 32
    assert again.ids == Bench().ask().ids


def test_a_request_cancelled_before_it_starts_evaluates_nothing() -> None:
    bench = Bench()
    bench.cancelled = lambda: True
    reply = bench.ask()
    assert reply.finish_reason == "cancelled"
    assert bench.model.rows_per_step == []
    assert reply.stats.prefill_tok_s is None


def test_cancelling_a_reply_keeps_what_was_said() -> None:
    bench = Bench(says("hello world"))
    bench.ask(max_tokens=1)  # the prompt is cached: then each step is one token
    bench.model.rows_per_step.clear()
    bench.cancelled = after_steps(bench, 4)
    reply = bench.ask(max_tokens=64, stop=("o wo",))
    assert (reply.finish_reason, reply.text, reply.ids) == ("cancelled", "hell", tuple(b"hell"))
    assert reply.stats.context_used == len(PROMPT) + 4


def test_text_held_back_is_part_of_a_cancelled_reply() -> None:
    bench = Bench(says("hello world"))
    bench.ask(max_tokens=1)
    bench.model.rows_per_step.clear()
    bench.cancelled = after_steps(bench, 5)
    assert bench.ask(max_tokens=64, stop=("o wo",)).text == "hello"


def test_the_iterator_may_be_closed_at_any_event_and_the_cache_stays_right() -> None:
    cold = Bench().ask(sampling=HOT)
    request = Request(prompt_ids=PROMPT, max_tokens=8, sampling=HOT)
    for taken in range(len(Bench().events(request))):
        bench = Bench()
        generation = bench.start(request)
        events = run(generation, bench.model, bench.sessions, bench.pace, bench.cancelled)
        for _ in range(taken):
            next(events)
        events.close()
        bench.sessions.end(request.conversation)
        bench.check_ids(generation)
        assert bench.ask(sampling=HOT).ids == cold.ids


def test_a_step_that_fails_leaves_the_cache_right() -> None:
    bench = Bench()
    generation = bench.start(Request(prompt_ids=PROMPT, max_tokens=8, sampling=HOT))

    def fail_on_the_third_step() -> None:
        if len(bench.model.rows_per_step) == 2:
            raise EngineError("broken")

    bench.model.before_step = fail_on_the_third_step
    with pytest.raises(EngineError, match="broken"):
        list(run(generation, bench.model, bench.sessions, bench.pace, bench.cancelled))
    bench.sessions.end("default")
    bench.check_ids(generation)
    bench.model.before_step = lambda: None
    assert bench.ask(sampling=HOT).ids == Bench().ask(sampling=HOT).ids


def test_figures_are_measured_or_not_known() -> None:
    stats = Bench().ask(max_tokens=8).stats
    assert stats.ttft_ms is not None
    assert stats.prefill_tok_s is not None
    assert stats.decode_tok_s is not None
    assert (stats.prompt_tokens, stats.prefill_tokens, stats.prefill_reused_tokens) == (200, 200, 0)
    assert stats.context_size == 2048
    assert stats.kv_bytes == 4 * StandInModel.kv_block_bytes
    assert stats.draft_tokens is None
    assert Bench().ask(max_tokens=1).stats.decode_tok_s is None


def test_penalties_see_the_prompt_and_the_reply() -> None:
    banned = Bench().ask(
        max_tokens=30, sampling=SamplingParams(temperature=0, presence_penalty=1e9, penalty_window=500)
    )
    assert len(set(banned.ids)) == 30
    assert not set(banned.ids) & set(PROMPT)


def test_a_pace_learns_how_many_rows_fit_its_time() -> None:
    pace = PrefillPace(target_seconds=0.25, max_rows=512)
    assert pace.rows(10_000) == 32
    pace.measured(32, 0.01)
    assert pace.rows(10_000) == 512
    assert pace.rows(600) == 320  # two chunks of about the same size, not 512 and 88
    pace.measured(512, 1.0)
    assert pace.rows(10_000) == 128
    assert pace.rows(192) == 192  # the last go in one, where that takes half as long again
    assert pace.rows(193) == 128
    pace.measured(5, 0.02)
    pace.measured(20, 0.06)
    assert pace.rows(10_000) == 128  # few rows say nothing, as long as they are quick
    pace.measured(20, 0.5)
    assert pace.rows(10_000) == 8
    assert pace.rows(3) == 3


# Reasoning


def thought(think_tokens: int | None, **settings: object) -> Reply:
    """The reply of a model that thinks without end, and of which the prompt has begun to."""
    bench = Bench(lambda position: ord("a"))
    request = Request(
        prompt_ids=PROMPT, max_tokens=40, sampling=GREEDY, think_tokens=think_tokens, **settings.pop("request", {})
    )
    generation = Generation(
        request,
        PROMPT,
        bench.sessions.begin(request.conversation, PROMPT),
        StandInTokenizer(),
        seed=0,
        context_size=bench.context_size,
        submitted=0.0,
        plan=ReplyPlan(thinks=True, thinking=True),
        **settings,
    )
    events = list(run(generation, bench.model, bench.sessions, bench.pace, bench.cancelled))
    bench.check_ids(generation)
    return finished(events)


def test_a_budget_of_reasoning_makes_the_model_answer() -> None:
    assert thought(None).thinking == "a" * 40
    for budget in (1, 7, 20):
        reply = thought(budget)
        closing = len("\n</think>\n\n")
        assert (reply.thinking, reply.text) == ("a" * budget, "a" * (40 - closing - budget))
        assert bytes(reply.ids) == b"a" * budget + b"\n</think>\n\n" + b"a" * (40 - closing - budget)


def test_a_budget_of_reasoning_gives_the_same_reply_with_log_probabilities() -> None:
    for budget in (1, 4, 7, 20):
        plain = thought(budget)
        told = thought(budget, request={"top_logprobs": 1})
        assert told.ids == plain.ids
        assert told.logprobs is not None
        assert len(told.logprobs) == len(told.ids)


def test_a_budget_of_reasoning_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="think_tokens must be 1 or more, not 0"):
        Request(prompt_ids=PROMPT, think_tokens=0)
