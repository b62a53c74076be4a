"""The engine as callers see it, over a stand-in model: errors first, scoring, closing and forgetting."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from stand_in import END, StandInModel, StandInTemplate, StandInTokenizer

from engine.api import Event, Finished, Message, PrefillProgress, Progress, Reply, Request, SamplingParams, TextDelta
from engine.errors import ContextExceededError, EngineError, TemplateError, UsageError
from engine.local import LocalEngine
from engine.memory import MemoryPlan

GREEDY = SamplingParams(temperature=0)


def make(
    script: Callable[[int], int | None] | None = None,
    *,
    context_size: int = 1024,
    kv_sessions: int = 4,
    num_blocks: int | None = None,
    **settings: int | None,
) -> LocalEngine:
    tokenizer = StandInTokenizer()
    gguf = SimpleNamespace(
        metadata={"general.file_type": 3}, tensors={}, close=lambda: None, content_hash=lambda: "5a" * 32
    )
    num_blocks = num_blocks or 4 * context_size // 64
    plan = MemoryPlan(context_size=context_size, num_blocks=num_blocks, notices=("a smaller context",))
    model = StandInModel(script=script)
    return LocalEngine(gguf, tokenizer, StandInTemplate(tokenizer), model, plan, kv_sessions, **settings)


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with make() as engine:
        yield engine


def raw(prompt: str = "once upon a time", max_tokens: int = 6, **settings: object) -> Request:
    return Request(**{"prompt_ids": tuple(prompt.encode()), "max_tokens": max_tokens, "sampling": GREEDY, **settings})


def reply_of(events: Iterator[Event]) -> Reply:
    *_, last = events
    assert isinstance(last, Finished)
    return last.reply


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_conversation_prefills_only_what_each_turn_adds(engine: LocalEngine) -> None:
    messages = [Message(role="user", content="hello")]
    prefilled = []
    for _ in range(4):
        reply = engine.chat(messages, sampling=GREEDY, max_tokens=10)
        prefilled.append(reply.stats.prefill_tokens)
        messages += [
            Message(role="assistant", content=reply.text, ids=reply.ids),
            Message(role="user", content="more"),
        ]
    added = 1 + len("user:more") + 1 + len("assistant:")  # the end of the reply, the new message, the next start
    assert prefilled == [len("user:hello") + 1 + len("assistant:"), added, added, added]


def test_text_streams_and_joins_to_the_reply(engine: LocalEngine) -> None:
    reply = engine.chat("hello", sampling=GREEDY, max_tokens=20)
    assert "".join(engine.stream("hello", sampling=GREEDY, max_tokens=20)) == reply.text
    events = list(engine.generate(Request(messages=(Message(role="user", content="hello"),), max_tokens=3)))
    assert {type(event) for event in events} <= {PrefillProgress, Progress, TextDelta, Finished}


def test_tokens_are_counted_without_being_evaluated(engine: LocalEngine) -> None:
    request = Request(messages=(Message(role="user", content="hello"),))
    assert engine.count_tokens(request) == len("user:hello") + 1 + len("assistant:")
    assert engine._model.rows_per_step == []


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers_before_anything_changes() -> None:
    with make(context_size=128) as engine:
        before = reply_of(engine.generate(raw()))
        for length in (128, 129, 1000):
            with pytest.raises(ContextExceededError) as caught:
                engine.generate(raw("x" * length))
            assert (caught.value.prompt_tokens, caught.value.context_size) == (length, 128)
        steps = len(engine._model.rows_per_step)
        again = reply_of(engine.generate(raw()))
        assert len(engine._model.rows_per_step) - steps == 1 + 6
        assert again.stats.prefill_reused_tokens == before.stats.prompt_tokens - 1
        longest = reply_of(engine.generate(raw("x" * 127)))
        assert (len(longest.ids), longest.finish_reason) == (1, "length")


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (Request(prompt_ids=()), UsageError, "prompt_ids is empty"),
        (Request(prompt_ids=(1, 258)), UsageError, "token id 258; the model's ids are 0 to 257"),
        (Request(prompt_ids=(-1,)), UsageError, "token id -1"),
        (raw(sampling=SamplingParams(logit_bias={300: 1.0})), UsageError, "the logit bias has token id 300"),
        (Request(messages=(Message(role="tool", content=""),)), TemplateError, "no tools here"),
    ],
)
def test_a_request_that_cannot_be_obeyed_raises_before_the_first_event(
    engine: LocalEngine, request_: Request, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        engine.generate(request_)
    assert engine._model.rows_per_step == []


def test_a_seed_that_was_not_given_is_drawn_and_reported(engine: LocalEngine) -> None:
    hot = SamplingParams(temperature=2.0, top_k=0, top_p=1.0)
    first = engine.chat("hi", sampling=hot, max_tokens=12)
    second = engine.chat("hi", sampling=hot, max_tokens=12)
    assert first.stats.seed != second.stats.seed
    assert first.ids != second.ids
    repeated = SamplingParams(temperature=2.0, top_k=0, top_p=1.0, seed=first.stats.seed)
    assert engine.chat("hi", sampling=repeated, max_tokens=12).ids == first.ids


def test_scores_are_the_log_probabilities_that_generating_reports(engine: LocalEngine) -> None:
    prompt = bytes(i % 200 for i in range(150)).decode("latin-1").encode()[:150]
    reply = reply_of(engine.generate(Request(prompt_ids=tuple(prompt), max_tokens=90, sampling=GREEDY, top_logprobs=0)))
    assert reply.logprobs is not None
    assert len(reply.ids) == 90
    assert engine.score([*prompt, *reply.ids], 150) == [entry.chosen.logprob for entry in reply.logprobs]
    assert engine.score([*prompt, *reply.ids], 151) == [entry.chosen.logprob for entry in reply.logprobs[1:]]
    assert engine.score([65], 1) == []


def test_scoring_keeps_conversations_and_gives_its_blocks_back(engine: LocalEngine) -> None:
    reply_of(engine.generate(raw()))
    free = engine._pool.num_free
    engine.score(list(range(200)), 100)
    assert engine._pool.num_free == free
    assert reply_of(engine.generate(raw())).stats.prefill_tokens == 1
    with pytest.raises(ContextExceededError):
        engine.score([1] * 1025, 1)


def test_cancelling_a_long_prefill_is_obeyed_within_half_a_second() -> None:
    with make() as engine:
        engine._model.seconds_per_row = 0.002
        cancel = threading.Event()
        times: list[float] = []

        def stop() -> None:
            times.append(time.perf_counter())
            cancel.set()

        threading.Timer(0.7, stop).start()
        reply = reply_of(engine.generate(raw("x" * 900, cancel=cancel)))
        assert time.perf_counter() - times[0] < 0.5
        assert reply.finish_reason == "cancelled"
        assert 0 < reply.stats.prefill_tokens < 900


def test_an_iterator_dropped_half_way_frees_the_engine(engine: LocalEngine) -> None:
    events = engine.generate(raw())
    next(events)
    del events
    gc.collect()
    assert reply_of(engine.generate(raw())).finish_reason == "length"


def test_an_iterator_that_was_never_started_holds_nothing(engine: LocalEngine) -> None:
    unused = engine.generate(raw())
    assert reply_of(engine.generate(raw())).finish_reason == "length"
    assert reply_of(unused).finish_reason == "length"


def test_closing_ends_an_iterator_that_nobody_goes_on_with() -> None:
    engine = make()
    model = engine._model
    events = engine.generate(raw())
    next(events)
    closing = in_thread(engine.close)
    closing.join(5)
    assert not closing.is_alive()
    assert model.closed
    assert reply_of(events).finish_reason == "cancelled"


def test_closing_cancels_a_request_that_runs_in_another_thread() -> None:
    engine = make()
    engine._model.seconds_per_row = 0.01
    replies: list[Reply] = []
    running = in_thread(lambda: replies.append(reply_of(engine.generate(raw(max_tokens=500)))))
    while not engine._model.rows_per_step:
        time.sleep(0.001)
    engine.close()
    running.join(5)
    assert not running.is_alive()
    assert [reply.finish_reason for reply in replies] == ["cancelled"]


def test_closing_tells_requests_that_still_wait() -> None:
    engine = make(max_concurrent=1)
    engine._model.seconds_per_row = 0.02
    running = engine.generate(raw(max_tokens=500))
    next(running)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            list(engine.generate(raw()))
        except EngineError as error:
            errors.append(error)

    waiting = in_thread(wait)
    while not engine._scheduler._waiting:
        time.sleep(0.001)
    engine.close()
    waiting.join(5)
    assert "the engine is closed" in str(errors[0])


def test_a_closed_engine_says_so_and_may_be_closed_again() -> None:
    engine = make()
    unused = engine.generate(raw())
    pool = weakref.ref(engine._pool)
    engine.close()
    engine.close()
    gc.collect()
    assert pool() is None  # the memory is free though the engine object is still there
    engine.forget("default")
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.generate(raw())
    with pytest.raises(EngineError, match="the engine is closed"):
        next(unused)
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.score([1, 2], 1)


def test_forgetting_drops_the_cache_of_that_conversation_only(engine: LocalEngine) -> None:
    reply_of(engine.generate(raw("a" * 50, conversation="a")))
    reply_of(engine.generate(raw("b" * 50, conversation="b")))
    engine.forget("a")
    engine.forget("unknown")
    assert reply_of(engine.generate(raw("a" * 50, conversation="a"))).stats.prefill_reused_tokens == 0
    assert reply_of(engine.generate(raw("b" * 50, conversation="b"))).stats.prefill_reused_tokens == 49


def test_forgetting_the_conversation_that_is_running_waits_for_its_end(engine: LocalEngine) -> None:
    events = engine.generate(raw())
    next(events)
    engine.forget("default")
    assert reply_of(events).finish_reason == "length"
    events.close()
    assert engine._pool.num_free == engine._pool.num_blocks
    assert reply_of(engine.generate(raw())).stats.prefill_reused_tokens == 0


def test_info_names_the_model_and_every_notice(engine: LocalEngine) -> None:
    info = engine.info
    assert (info.name, info.quantization, info.backend, info.kernels) == ("stand-in", "Q4_1", "cpu", "stand-in")
    assert (info.context_size, info.train_context_size, info.kv_bytes_per_token) == (1024, 4096, 8)
    assert info.notices == ("a template of the tests", "a smaller context")


def test_texts_that_end_a_turn_of_the_template_end_replies_to_messages_only() -> None:
    start = len("user:hi") + 1 + len("assistant:")
    script = [*b"fine\nuser: and", END]
    with make(lambda position: script[position - start] if start <= position < start + len(script) else 65) as engine:
        engine.template.stop = ("\nuser:",)
        assert engine.chat("hi", stop=("zzz",)).text == "fine"
        prompt = "x" * start
        assert reply_of(engine.generate(raw(prompt, max_tokens=64))).text == "fine\nuser: and"


def test_the_end_token_of_a_reply_is_left_to_the_template() -> None:
    script = [*b"fine", END]
    start = len("user:how are you") + 1 + len("assistant:")
    with make(lambda position: script[position - start] if start <= position < start + len(script) else 65) as engine:
        reply = engine.chat("how are you")
        assert (reply.text, reply.finish_reason, reply.stats.context_used) == ("fine", "stop", start + 4)
