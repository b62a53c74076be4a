"""Several replies at once: each says what it says alone, whoever comes, leaves, fails or needs room beside it."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_local import GREEDY, in_thread, make, raw, reply_of
from tiny_models import write_tiny_model

from engine import load
from engine.api import Event, Finished, Notice, PrefillProgress, Reply, Request, SamplingParams
from engine.errors import EngineError, UsageError
from engine.kv_cache import CacheFullError
from engine.local import LocalEngine

HOT = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, seed=11)
NOTHING = SamplingParams(logit_bias=dict.fromkeys(range(258), float("-inf")))
"""Nothing can be drawn."""


def alone(request: Request, **made: int | None) -> Reply:
    with make(**made) as engine:
        return reply_of(engine.generate(request))


def in_turn(iterators: Sequence[Iterator[Event]]) -> list[list[Event]]:
    """The events of each, one from each in turn."""
    events: list[list[Event]] = [[] for _ in iterators]
    going = set(range(len(iterators)))
    while going:
        for n in sorted(going):
            event = next(iterators[n], None)
            if event is None:
                going.remove(n)
            else:
                events[n].append(event)
    return events


def together(engine: LocalEngine, requests: Sequence[Request]) -> list[Reply | BaseException]:
    """Replies, or what was raised, of requests that each have a thread."""
    results: list[Reply | BaseException | None] = [None] * len(requests)

    def ask(n: int) -> None:
        try:
            results[n] = reply_of(engine.generate(requests[n]))
        except BaseException as error:  # noqa: BLE001 - what was raised is the result
            results[n] = error

    threads = [in_thread(lambda n=n: ask(n)) for n in range(len(requests))]
    for thread in threads:
        thread.join(60)
    assert None not in results, "a caller was never told"
    return results


def words(reply: Reply) -> tuple[object, ...]:
    return reply.ids, reply.text, reply.finish_reason, reply.logprobs


def assert_nothing_leaks(engine: LocalEngine) -> None:
    for name in engine._sessions.kept:
        assert len(engine._sessions._tables[name].ids) <= len(engine._sessions._tables[name].blocks) * 64
        engine.forget(name)
    assert engine._pool.num_free == engine._pool.num_blocks


# ---------------------------------------------------------------- the same words
@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "qwen2", context_size=512)


@pytest.mark.parametrize("threads", [True, False])
def test_four_replies_at_once_are_those_of_each_alone(tiny: Path, threads: bool) -> None:
    prompts = ["a b a b a b a b " * 9, "once upon a time " * 30, "x = [1, 2, 3]\n" * 12, "why?"]
    kinds = [(GREEDY, "ngram"), (HOT, "off"), (HOT, "ngram"), (GREEDY, "off")]
    with load(tiny, context_size=512, threads=2) as engine:
        requests = [
            Request(
                prompt_ids=tuple(engine.tokenizer.encode(prompt)),
                sampling=sampling,
                speculation=speculation,
                max_tokens=40 + 7 * n,
                conversation=f"c{n}",
                top_logprobs=1,
            )
            for n, (prompt, (sampling, speculation)) in enumerate(zip(prompts, kinds))
        ]
        if threads:
            replies = together(engine, requests)
        else:
            replies = [reply_of(iter(events)) for events in in_turn([engine.generate(r) for r in requests])]
        rows = [len(engine._sessions._tables[f"c{n}"]) for n in range(4)]
    for n, request in enumerate(requests):
        with load(tiny, context_size=512, threads=1) as other:
            reply = reply_of(other.generate(request))
            assert words(replies[n]) == words(reply)
            assert rows[n] == len(other._sessions._tables[f"c{n}"])


def test_replies_share_steps() -> None:
    with make() as engine:
        requests = [raw(name * 20, max_tokens=30, conversation=name) for name in "abcd"]
        in_turn([engine.generate(request) for request in requests])
        assert engine._model.wanted_per_step.count(4) > 20


def test_a_start_that_runs_beside_is_shared_and_stays_its_own() -> None:
    """A fork from a conversation in the middle of its reply."""
    first, second = raw("same " * 30, 60, conversation="a"), raw("same " * 30 + "\0other", 60, conversation="b")
    with make() as engine:
        events = engine.generate(first)
        for _ in range(10):
            next(events)
        replies = [reply_of(iter(got)) for got in in_turn([events, engine.generate(second)])]
        assert replies[1].stats.prefill_reused_tokens == len("same " * 30)
        assert [reply.ids for reply in replies] == [alone(first).ids, alone(second).ids]
        assert_nothing_leaks(engine)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_whoever_leaves_or_is_cancelled_leaves_the_others_alone(seed: int) -> None:
    dice = random.Random(seed)
    with make(max_concurrent=dice.choice([2, 3, 4]), kv_sessions=dice.choice([0, 1, 4]), context_size=256) as engine:
        requests, iterators, left = [], [], set()
        for n in range(6):
            sampling = dice.choice([GREEDY, HOT])
            prompt = "same start " + dice.choice("ab") * dice.randrange(1, 90)
            speculation = dice.choice(["off", "ngram"])
            cancel = threading.Event()
            requests.append(
                raw(prompt, dice.randrange(1, 40), sampling=sampling, conversation=f"c{n}", cancel=cancel)
                if speculation == "off"
                else raw(prompt, 30, sampling=sampling, conversation=f"c{n}", cancel=cancel, speculation="ngram")
            )
            iterators.append(engine.generate(requests[-1]))
        replies: dict[int, Reply] = {}
        going = set(range(6))
        while going:
            n = dice.choice(sorted(going))
            action = dice.random()
            if action < 0.02:
                iterators[n].close()
                going.remove(n)
                left.add(n)
            elif action < 0.04:
                requests[n].cancel.set()
            else:
                event = next(iterators[n], None)
                if isinstance(event, Finished):
                    replies[n] = event.reply
                elif event is None:
                    going.remove(n)
        for n, reply in replies.items():
            whole = alone(
                Request(
                    prompt_ids=requests[n].prompt_ids,
                    sampling=requests[n].sampling,
                    max_tokens=requests[n].max_tokens,
                )
            )
            if reply.finish_reason == "cancelled":
                assert whole.ids[: len(reply.ids)] == reply.ids
            else:
                assert words(reply) == words(whole)
        assert set(replies) | left == set(range(6))
        # What is kept is right: going on from it says what a cold engine says.
        for name in engine._sessions.kept:
            ids = (*engine._sessions._tables[name].ids, 65)
            if len(ids) < 250:
                again = raw(conversation=name, prompt_ids=ids)
                assert reply_of(engine.generate(again)).ids == alone(again).ids
        assert_nothing_leaks(engine)


# ---------------------------------------------------------------- who drives
def test_a_caller_that_is_alone_runs_its_steps_itself() -> None:
    with make() as engine:
        seen: set[int] = set()
        engine._model.before_step = lambda: seen.add(threading.get_ident())
        before = threading.active_count()
        reply_of(engine.generate(raw()))
        assert seen == {threading.get_ident()}
        assert threading.active_count() == before


def test_a_reply_goes_on_while_its_caller_does_something_else() -> None:
    with make() as engine:
        first = engine.generate(raw("first", 30, conversation="a"))
        next(first)
        reply_of(engine.generate(raw("second", 60, conversation="b")))
        steps = len(engine._model.rows_per_step)
        assert reply_of(first).ids == alone(raw("first", 30)).ids
        assert len(engine._model.rows_per_step) == steps


def test_more_than_there_are_places_for_wait_in_order() -> None:
    with make(max_concurrent=2) as engine:
        engine._model.seconds_per_row = 0.0002
        results = together(engine, [raw(f"{n} says", 20, conversation=f"c{n}") for n in range(7)])
        assert max(engine._model.wanted_per_step) == 2
        assert [r.ids for r in results] == [alone(raw(f"{n} says", 20)).ids for n in range(7)]


def test_two_requests_of_one_conversation_run_one_after_the_other() -> None:
    with make() as engine:
        events = in_turn([engine.generate(raw("hello", 20)), engine.generate(raw("hello", 20))])
        assert max(engine._model.wanted_per_step) == 1
        first, second = (reply_of(iter(got)) for got in events)
        assert first.ids == second.ids
        assert second.stats.prefill_reused_tokens == len("hello") - 1


def test_a_conversation_that_waits_for_itself_holds_up_nobody_else() -> None:
    with make() as engine:
        engine._model.seconds_per_row = 0.001
        order: list[str] = []

        def ask(name: str, number: int, max_tokens: int) -> None:
            reply_of(engine.generate(raw(name, max_tokens, conversation=name)))
            order.append(f"{name}{number}")

        threads = []
        for name, number, max_tokens in (("a", 1, 200), ("a", 2, 1), ("b", 1, 10)):
            threads.append(in_thread(lambda n=name, i=number, m=max_tokens: ask(n, i, m)))
            time.sleep(0.02)
        for thread in threads:
            thread.join(20)
        assert order == ["b1", "a1", "a2"]


def test_a_request_cancelled_while_it_waits_ends_without_having_run() -> None:
    with make(max_concurrent=1) as engine:
        engine._model.seconds_per_row = 0.005
        running = in_thread(lambda: reply_of(engine.generate(raw(max_tokens=300))))
        while not engine._model.rows_per_step:
            time.sleep(0.001)
        cancel, got = threading.Event(), []
        waiting = in_thread(lambda: got.append(reply_of(engine.generate(raw("something", cancel=cancel)))))
        while not engine._scheduler._waiting:
            time.sleep(0.001)
        cancel.set()
        waiting.join(0.5)
        assert (got[0].finish_reason, got[0].ids, got[0].stats.prefill_tokens) == ("cancelled", (), 0)
        assert running.is_alive()


@pytest.mark.parametrize("way", ["close", "drop", "cancel"])
def test_who_leaves_is_run_no_further(way: str) -> None:
    with make() as engine:
        cancel = threading.Event()
        leaving = engine.generate(raw("leaving", 400, conversation="a", cancel=cancel))
        staying = engine.generate(raw("staying", 200, conversation="b"))
        for _ in range(20):
            next(leaving)
            next(staying)
        if way == "close":
            leaving.close()  # type: ignore[attr-defined]
            assert list(leaving) == []
        elif way == "drop":
            del leaving
            gc.collect()
        else:
            cancel.set()
        steps = len(engine._model.rows_per_step)
        assert reply_of(staying).ids == alone(raw("staying", 200)).ids
        assert max(engine._model.rows_per_step[steps + 2 :]) == 1
        kept = engine._sessions._tables["a"].ids
        assert kept == [*b"leaving", *alone(raw("leaving", 400)).ids][: len(kept)]
        assert len(kept) > len("leaving") + 5


def test_an_iterator_collected_as_garbage_inside_a_step_ends_all_the_same() -> None:
    with make() as engine:
        held = [engine.generate(raw("held", 400, conversation="a"))]
        next(held[0])
        engine._model.before_step = held.clear
        assert reply_of(engine.generate(raw("other", 50, conversation="b"))).ids == alone(raw("other", 50)).ids
        assert engine._model.rows_per_step[-1] == 1
        assert max(engine._model.wanted_per_step[3:]) == 1


# ---------------------------------------------------------------- nobody starves
def test_a_long_prompt_is_read_between_the_tokens_of_others() -> None:
    with make(context_size=2048, prefill_chunk=16) as engine:
        talking = engine.generate(raw("talk", 400, conversation="a"))
        next(talking)
        next(talking)
        steps = len(engine._model.rows_per_step)
        reading = engine.generate(raw("x" * 900, 3, conversation="b"))
        events = in_turn([talking, reading])
        during = engine._model.rows_per_step[steps + 1 : steps + 40]
        assert set(during) == {17}
        assert sum(isinstance(event, PrefillProgress) for event in events[1]) == 57
        assert reply_of(iter(events[1])).ids == alone(raw("x" * 900, 3), context_size=2048).ids


def test_without_a_chunk_asked_for_a_shared_step_takes_a_tenth_of_a_second() -> None:
    with make(context_size=2048) as engine:
        engine._model.seconds_per_row = 0.0005
        reply_of(engine.generate(raw("y" * 600, 1, conversation="pace")))  # how fast this machine is
        talking = engine.generate(raw("talk", 60, conversation="a"))
        next(talking)
        steps = len(engine._model.rows_per_step)
        in_turn([talking, engine.generate(raw("x" * 900, 1, conversation="b"))])
        during = [rows for rows in engine._model.rows_per_step[steps:] if rows > 1]
        assert max(during) <= 0.15 / 0.0005
        assert sum(during) >= 900


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    with make(context_size=2048) as engine:
        long, short = raw("x" * 1500, 1, conversation="a"), raw("hi", 1, conversation="b")
        iterators = [engine.generate(long), engine.generate(short)]
        next(iterators[0])
        steps = len(engine._model.rows_per_step)
        reply_of(iterators[1])
        assert len(engine._model.rows_per_step) - steps <= 3
        assert reply_of(iterators[0]).ids == alone(long, context_size=2048).ids


# ---------------------------------------------------------------- memory
def test_the_youngest_gives_way_where_memory_is_short_and_says_the_same_later() -> None:
    requests = [raw(name * 60, 240, conversation=name, sampling=HOT) for name in "abc"]
    with make(context_size=320, num_blocks=8, prefill_chunk=64) as engine:
        events = in_turn([engine.generate(request) for request in requests])
        replies = [reply_of(iter(got)) for got in events]
        assert len(engine._model.rows_per_step) > 300  # they could not all run at once
        assert sum(engine._model.rows_per_step) < 3 * 300 + 200  # and little was read twice
        assert_nothing_leaks(engine)
    for request, reply, got in zip(requests, replies, events):
        assert words(reply) == words(alone(request, context_size=320))
        assert reply.stats.prompt_tokens == reply.stats.prefill_reused_tokens + reply.stats.prefill_tokens
        done = [event.done for event in got if isinstance(event, PrefillProgress)]
        assert done == sorted(set(done))
        assert done[-1] == 60


def test_idle_conversations_go_before_those_that_run_give_way() -> None:
    with make(context_size=320, num_blocks=10) as engine:
        reply_of(engine.generate(raw("idle" * 60, 60, conversation="idle")))
        in_turn([engine.generate(raw(name * 60, 200, conversation=name)) for name in "ab"])
        assert "idle" not in engine._sessions.kept
        assert sum(engine._model.rows_per_step) == 300 + 2 * 260  # nothing was read twice


def test_a_reply_that_finds_no_room_at_all_fails_and_the_next_goes_on() -> None:
    with make(context_size=512, num_blocks=3) as engine:
        with pytest.raises(CacheFullError, match="the KV cache is full"):
            reply_of(engine.generate(raw("x" * 300, conversation="a")))
        assert reply_of(engine.generate(raw("x" * 100, conversation="b"))).ids == alone(raw("x" * 100)).ids


# ---------------------------------------------------------------- failures
def test_what_fails_in_one_reply_is_raised_there_and_nowhere_else() -> None:
    with make() as engine:
        requests = [raw("a", 60, conversation="a"), raw("b", 60, conversation="b", sampling=NOTHING)]
        requests.append(raw("c", 60, conversation="c"))
        results = together(engine, requests)
        assert isinstance(results[1], EngineError)
        assert "the logit bias bans every token" in str(results[1])
        assert [results[n].ids for n in (0, 2)] == [alone(requests[n]).ids for n in (0, 2)]
        assert reply_of(engine.generate(raw("b", conversation="b"))).ids == alone(raw("b")).ids
        assert_nothing_leaks(engine)


def test_a_step_that_fails_ends_those_in_it_and_the_loop_goes_on() -> None:
    with make() as engine:

        def fail_once() -> None:
            time.sleep(0.002)  # the others come in
            if len(engine._scheduler._running) == 3:
                engine._model.before_step = lambda: None
                raise RuntimeError("a broken machine")

        engine._model.before_step = fail_once
        results = together(engine, [raw(name, 200, conversation=name) for name in "abc"])
        assert [str(result) for result in results if isinstance(result, RuntimeError)] == ["a broken machine"] * 3
        assert reply_of(engine.generate(raw("a", conversation="a"))).ids == alone(raw("a")).ids
        assert_nothing_leaks(engine)


def test_an_interrupt_of_one_caller_leaves_the_others_running() -> None:
    with make() as engine:
        first, second = (engine.generate(raw(name, 60, conversation=name)) for name in "ab")
        next(first)
        next(second)

        def interrupt() -> None:
            engine._model.before_step = lambda: None
            raise KeyboardInterrupt

        engine._model.before_step = interrupt
        with pytest.raises(KeyboardInterrupt):
            list(first)
        assert reply_of(second).ids == alone(raw("b", 60)).ids
        assert len(engine._scheduler._running) == 0
        assert reply_of(engine.generate(raw("a", 60, conversation="a"))).ids == alone(raw("a", 60)).ids


def test_closing_ends_all_that_run_and_wait() -> None:
    engine = make(max_concurrent=2)
    engine._model.seconds_per_row = 0.005
    results: list[list[Reply | BaseException]] = []
    asking = in_thread(lambda: results.append(together(engine, [raw(name, 900, conversation=name) for name in "abcd"])))
    while len(engine._model.rows_per_step) < 8:
        time.sleep(0.001)
    started = time.perf_counter()
    engine.close()
    asking.join(5)
    assert time.perf_counter() - started < 0.5
    ended = [result for result in results[0] if isinstance(result, Reply)]
    assert [reply.finish_reason for reply in ended] == ["cancelled"] * 2
    assert all(reply.ids for reply in ended)
    assert [str(result) for result in results[0] if isinstance(result, EngineError)] == [
        "the engine is closed; load the model again"
    ] * 2


@pytest.mark.parametrize("wrong", [{"max_concurrent": 0}, {"max_concurrent": 33}, {"prefill_chunk": 0}])
def test_what_cannot_be_obeyed_is_refused_before_anything_is_loaded(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        load(tmp_path / "no such file.gguf", **wrong)


# ---------------------------------------------------------------- files
def test_several_conversations_are_saved_while_they_run_and_come_back(tiny: Path, tmp_path: Path) -> None:
    def ask(engine: LocalEngine, name: str, ids: Sequence[int], max_tokens: int = 30) -> Iterator[Event]:
        request = Request(prompt_ids=tuple(ids), max_tokens=max_tokens, sampling=GREEDY, conversation=name)
        return engine.generate(request)

    names = ["a", "b", "c"]
    with load(tiny, context_size=512, threads=1, kv_folder=tmp_path / "kv") as engine:
        prompts = {name: engine.tokenizer.encode(f"{name} tale " * 20) for name in names}
        first = in_turn([ask(engine, name, prompts[name]) for name in names])
        replies = {name: reply_of(iter(got)) for name, got in zip(names, first)}
        assert all(reply.stats.kv_saved_bytes for reply in replies.values())
        dropped = ask(engine, "d", prompts["a"], 100)
        for _ in range(5):
            next(dropped)
    with load(tiny, context_size=512, threads=1, kv_folder=tmp_path / "kv", kv_sessions=2) as engine:
        further = {name: [*prompts[name], *replies[name].ids, *engine.tokenizer.encode(" and")] for name in names}
        events = in_turn([ask(engine, name, further[name]) for name in names])
        for name, got in zip(names, events):
            assert any(isinstance(event, Notice) and event.text.startswith("resumed") for event in got)
            reply = reply_of(iter(got))
            assert reply.stats.prefill_reused_tokens == len(prompts[name]) + len(replies[name].ids)
            with load(tiny, context_size=512, threads=1) as cold:
                assert reply.ids == reply_of(ask(cold, name, further[name])).ids


def test_what_gave_way_is_not_cut_off_in_its_file(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kept_files.SAVE_SECONDS", 0.0)
    texts: dict[str, list[int]] = {}
    with load(tiny, context_size=512, threads=1, kv_folder=tmp_path / "kv", kv_sessions=2) as engine:
        spare = [engine._pool.allocate() for _ in range(engine._pool.num_free - 9)]  # room for 576 positions
        requests = {
            name: Request(
                prompt_ids=tuple(engine.tokenizer.encode(f"{name} goes on " * 16)),
                max_tokens=250,
                sampling=GREEDY,
                conversation=name,
            )
            for name in "ab"
        }
        for name, got in zip("ab", in_turn([engine.generate(request) for request in requests.values()])):
            reply = reply_of(iter(got))
            texts[name] = [*reply.prompt_ids, *reply.ids]
            size = (tmp_path / "kv" / f"{name}.giw-kv").stat().st_size
            assert size * 0.9 < (reply.stats.kv_saved_bytes or 0) < size * 1.1  # nothing was written twice
        for block in spare:
            engine._pool.release(block)
    with load(tiny, context_size=512, threads=1, kv_folder=tmp_path / "kv", kv_sessions=2) as engine:
        for name, ids in texts.items():
            request = Request(prompt_ids=(*ids, 1), max_tokens=1, sampling=GREEDY, conversation=name)
            assert reply_of(engine.generate(request)).stats.prefill_reused_tokens == len(ids)
