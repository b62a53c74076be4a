"""Whole engines of a model with running states: whatever is reused, guessed, undone or restored, the words stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from test_running_state import SIZES
from tiny_models import write_tiny_model

from engine import load, running_state
from engine.api import Finished, Message, Notice, Reply, Request, SamplingParams, SpeculationMode
from engine.errors import UsageError
from engine.local import LocalEngine
from engine.unloaded import UnloadedModel

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\\n' }}"
)
Start = Callable[..., LocalEngine]
SYSTEM = Message(role="system", content="You answer in the words of the question, over and over, without an end.")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return write_tiny_model(path, "qwen35", metadata={"tokenizer.chat_template": TEMPLATE}, **SIZES)


@pytest.fixture(params=["cpu", pytest.param("torch", marks=pytest.mark.slow)])
def start(request: pytest.FixtureRequest, model: Path) -> Iterator[Start]:
    if request.param == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'goinfer-chat[torch]'")
    place = {"backend": request.param, "device": "cpu"}
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(load(model, threads=1, context_size=1024, **place, **settings))


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(reply: Reply) -> Message:
    return Message(role="assistant", content=reply.text, ids=reply.ids)


def answer(engine: LocalEngine, messages: Sequence[Message], conversation: str = "work", **settings: Any) -> Reply:
    values: dict[str, Any] = {"max_tokens": 12, "sampling": SamplingParams(temperature=0), "speculation": "off"}
    request = Request(messages=tuple(messages), conversation=conversation, **{**values, **settings})
    *_, last = engine.generate(request)
    assert isinstance(last, Finished)
    return last.reply


def cold(start: Start, messages: Sequence[Message], **settings: Any) -> Reply:
    return answer(start(kv_sessions=0), messages, **settings)


def talk(engine: LocalEngine, questions: Sequence[str], conversation: str = "work") -> list[Message]:
    messages = [SYSTEM]
    for question in questions:
        messages.append(user(question))
        messages.append(said(answer(engine, messages, conversation)))
    return messages


def test_a_turn_reads_what_is_new_and_a_retry_one_token(start: Start) -> None:
    engine = start()
    messages = [*talk(engine, ["one", "two"]), user("three")]
    reply = answer(engine, messages)
    assert reply.stats.recomputed_tokens == 0
    assert reply.stats.prefill_tokens < 40
    again = answer(engine, messages)
    assert (again.stats.prefill_tokens, again.stats.recomputed_tokens) == (1, 0)
    assert reply.ids == again.ids == cold(start, messages).ids


def test_an_undone_turn_goes_back_to_where_the_turn_before_ended(start: Start) -> None:
    engine = start()
    messages = talk(engine, ["one", "two and a half", "three", "four"])
    for kept in (7, 5, 3):
        other = [*messages[:kept], user("another way")]
        reply = answer(engine, other)
        assert reply.ids == cold(start, other).ids
        assert reply.stats.prefill_tokens is not None
        assert reply.stats.prefill_tokens < 45
        assert reply.stats.recomputed_tokens == 5  # what follows a reply in both, and asks for the question


def test_another_conversation_with_the_same_start_goes_on_from_the_end_of_its_first_message(start: Start) -> None:
    engine = start()
    talk(engine, ["one"])
    reply = answer(engine, [SYSTEM, user("quite another question")], "other")
    assert reply.stats.prefill_reused_tokens is not None
    assert reply.stats.prefill_reused_tokens > 40
    assert reply.ids == cold(start, [SYSTEM, user("quite another question")]).ids
    # The first one still has all it had.
    messages = [SYSTEM, user("one")]
    assert answer(engine, messages).stats.prefill_tokens == 1


def test_what_had_to_be_evaluated_again_is_told_and_the_next_time_it_need_not(start: Start) -> None:
    engine = start()
    long = "word " * 60
    answer(engine, [user(long + "one")])
    for conversation, question, reused in (("b", "two", 0), ("c", "three", 124), ("d", "four", 124)):
        messages = [user(long + question)]
        reply = answer(engine, messages, conversation)
        assert reply.stats.prefill_reused_tokens == reused
        assert reply.stats.recomputed_tokens is not None
        assert (reply.stats.recomputed_tokens == 124) if not reused else (reply.stats.recomputed_tokens <= 1)
        assert reply.ids == cold(start, messages).ids


def test_what_a_restart_had_to_evaluate_again_need_not_be_the_next_time(start: Start, tmp_path: Path) -> None:
    """The file has no state where the other question begins; the turn that finds that out keeps one."""
    engine = start(kv_folder=tmp_path / "kept")
    long = "word " * 60
    answer(engine, [user(long + "one")])
    engine.close()
    engine = start(kv_folder=tmp_path / "kept")
    for question, reused, again in (("two", 0, (124,)), ("three", 124, (0, 1))):
        reply = answer(engine, [user(long + question)])
        assert reply.stats.prefill_reused_tokens == reused
        assert reply.stats.recomputed_tokens in again
        assert reply.ids == cold(start, [user(long + question)]).ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_right_and_wrong_leave_every_token(
    start: Start, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_state, "INTERVAL", 32)
    sampling = SamplingParams(temperature=temperature, seed=7)
    messages = [SYSTEM, user("say it again: " + "a b c d e f " * 12)]
    settings: dict[str, Any] = {"sampling": sampling, "max_tokens": 120}
    plain = answer(start(), messages, **settings)
    engine = start()
    # A clock that promises much for guesses, so that many are made, and wrong.
    monkeypatch.setattr(engine._speculator.costs, "plain", lambda rows: 1.0)
    monkeypatch.setattr(engine._speculator.costs, "drafted", lambda size: 1.0 + 0.01 * size)
    monkeypatch.setattr(engine._speculator.costs, "due", lambda depth: False)
    guessed = answer(engine, messages, **{**settings, "speculation": "ngram"})
    assert guessed.ids == plain.ids
    stats = guessed.stats
    assert stats.draft_tokens is not None
    assert stats.draft_accepted is not None
    assert stats.draft_tokens > stats.draft_accepted
    if temperature == 0.0:
        assert stats.draft_accepted > 0
    follow = [*messages, said(guessed), user("and now?")]
    assert answer(engine, follow).ids == cold(start, follow).ids


@pytest.mark.parametrize("guesses", ["ngram", "off"])
def test_a_stop_string_leaves_a_cache_to_go_on_from(start: Start, guesses: SpeculationMode) -> None:
    """Without guesses each token is a step of its own: what stop strings cut off goes back to before the reply."""
    engine = start()
    messages = [SYSTEM, user("a b c a b c a b c a b c")]
    whole = answer(engine, messages, "other", max_tokens=60)
    stop = whole.text[20:24]
    assert stop
    reply = answer(engine, messages, stop=(stop,), max_tokens=60, speculation=guesses)
    assert reply.text == whole.text[: whole.text.index(stop)]
    assert reply.stats.context_used == len(reply.prompt_ids) + len(reply.ids)
    follow = [*messages, said(reply), user("more")]
    more = answer(engine, follow)
    assert more.ids == cold(start, follow).ids
    assert more.stats.recomputed_tokens == 0


def test_conversations_that_take_turns_have_the_words_they_have_alone(start: Start) -> None:
    engine = start(kv_sessions=3)
    talks: dict[str, list[Message]] = {name: [SYSTEM] for name in "abc"}
    for turn in range(3):
        running = []
        for name, messages in talks.items():
            messages.append(user(f"{name} asks {turn}"))
            request = Request(
                messages=tuple(messages), conversation=name, max_tokens=9, sampling=SamplingParams(temperature=0)
            )
            running.append((messages, engine.generate(request)))
        replies: dict[int, Reply] = {}
        for events in itertools.zip_longest(*(events for _, events in running)):
            replies |= {n: event.reply for n, event in enumerate(events) if isinstance(event, Finished)}
        for n, (messages, _) in enumerate(running):
            assert replies[n].ids == cold(start, messages, max_tokens=9).ids
            messages.append(said(replies[n]))


def test_a_restart_goes_on_where_the_conversation_stood_and_undo_works_there_too(start: Start, tmp_path: Path) -> None:
    engine = start(kv_folder=tmp_path / "kept")
    messages = talk(engine, ["one", "two", "three"])
    engine.close()
    engine = start(kv_folder=tmp_path / "kept")
    assert engine.info.kept_tokens
    follow = [*messages, user("four")]
    reply = answer(engine, follow)
    assert reply.ids == cold(start, follow).ids
    assert reply.stats.restored_tokens == reply.stats.prefill_reused_tokens
    assert reply.stats.recomputed_tokens == 0
    engine.close()
    engine = start(kv_folder=tmp_path / "kept")
    other = [*messages[:5], user("another way")]
    reply = answer(engine, other)
    assert reply.ids == cold(start, other).ids
    assert reply.stats.prefill_tokens is not None
    assert reply.stats.prefill_tokens < 45


def test_what_a_prompt_would_cost_is_known_before_the_model_is_loaded(
    start: Start, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["start"] != "cpu":
        pytest.skip("without PyTorch nobody can say which file of a conversation is its own")
    engine = start(kv_folder=tmp_path / "kept")
    follow = [*talk(engine, ["one", "two"]), user("three")]
    engine.close()
    with UnloadedModel.open(model, context_size=1024, kv_folder=tmp_path / "kept") as unloaded:
        foreseen = unloaded.foresee(Request(messages=tuple(follow), conversation="work"))
    stats = answer(start(kv_folder=tmp_path / "kept"), follow).stats
    assert foreseen.reused_tokens == stats.prefill_reused_tokens == stats.restored_tokens


def test_few_slots_cost_what_was_kept_and_no_words(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.memory.STATE_BYTES", 0)
    engine = start(kv_sessions=2)
    assert engine.info.state_slots == 3
    assert engine.info.session_reuse.startswith("session reuse: on (1 of 2 conversations")
    for name in ("a", "b", "a", "c"):
        messages = [
            SYSTEM,
            user(f"{name} says one"),
        ]
        reply = answer(engine, messages, name, speculation="ngram")
        assert reply.ids == cold(start, messages).ids
        follow = [*messages, said(reply), user("two")]
        assert answer(engine, follow, name, speculation="ngram").ids == cold(start, follow).ids


def test_a_cancelled_reply_and_an_iterator_that_is_dropped_leave_a_cache_to_go_on_from(start: Start) -> None:
    engine = start()
    messages = [SYSTEM, user("one " * 50)]
    greedy = SamplingParams(temperature=0)
    for count in (1, 4):
        request = Request(messages=tuple(messages), conversation="work", max_tokens=50, sampling=greedy)
        events = engine.generate(request)
        for _ in range(count):
            next(events)
        del events
    reply = answer(engine, messages)
    assert reply.ids == cold(start, messages).ids


def test_a_model_with_running_states_does_not_guess_for_another(model: Path) -> None:
    with pytest.raises(UsageError, match="it has layers with a running state"):
        load(model, draft=model)


def test_scores_are_those_of_any_cut(start: Start) -> None:
    engine = start()
    ids = engine.tokenizer.encode("a text that is scored " * 20)
    scores = engine.score(ids, 1)
    assert engine.score(ids, 100) == scores[99:]
    assert not any(isinstance(event, Notice) for event in engine.generate(Request(prompt_ids=tuple(ids), max_tokens=1)))
    pool = engine._pool.states
    assert pool is not None
    assert engine.score(ids, 100) == scores[99:]
