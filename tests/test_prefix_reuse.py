"""What of a prompt is reused when templates, tools and models make that hard: whole engines, tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from call_templates import GPT_OSS, GPT_OSS_VOCABULARY
from test_chat_template import THINKING_TEMPLATE, TOOL_TEMPLATE
from tiny_models import write_tiny_model

from engine import load
from engine.api import Finished, Message, Reply, Request, SamplingParams
from engine.local import LocalEngine

GREEDY = SamplingParams(temperature=0)
Start = Callable[..., LocalEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("qwen3", template, flag=value)`: an engine of a tiny model; those before it go on."""
    with ExitStack() as stack:

        def begin(
            architecture: Any, template: str | None = None, *, vocabulary: Any = None, **settings: Any
        ) -> LocalEngine:
            metadata = (vocabulary or {}) | ({} if template is None else {"tokenizer.chat_template": template})
            path = tmp_path / f"{architecture}.gguf"
            if not path.exists():
                sizes = {"num_layers": 4} if architecture == "qwen35" else {}  # some layers of each kind
                write_tiny_model(path, architecture, metadata=metadata, **sizes)
            return stack.enter_context(load(path, threads=1, context_size=1024, **settings))

        yield begin


def user(text: str) -> Message:
    return Message(role="user", content=text)


def answer(engine: LocalEngine, messages: Sequence[Message], conversation: str = "work", **settings: Any) -> Reply:
    request = Request(
        messages=tuple(messages),
        max_tokens=8,
        sampling=GREEDY,
        conversation=conversation,
        speculation="off",
        **settings,
    )
    foreseen = engine.foresee(request)
    *_, last = engine.generate(request)
    assert isinstance(last, Finished)
    assert (foreseen.prompt_tokens, foreseen.prefill_tokens) == (
        len(last.reply.prompt_ids),
        last.reply.stats.prefill_tokens,
    )
    return last.reply


def cold(engine: LocalEngine, messages: Sequence[Message], **settings: Any) -> Reply:
    """The same from an empty cache."""
    for name in engine._sessions.kept:
        engine.forget(name)
    return answer(engine, messages, **settings)


def test_reasoning_that_the_template_drops_costs_no_prefill(start: Start) -> None:
    """Three turns of a model that thinks: each prompt and the reasoning behind it are there in the next turn."""
    engine = start("qwen3", THINKING_TEMPLATE)
    messages, known = [user("What is 2 + 2?")], 0
    for question in ("And 3 + 3?", "And the sum of both?", ""):
        reply = answer(engine, messages)
        assert reply.stats.prefill_reused_tokens >= known
        assert cold(start("qwen3", THINKING_TEMPLATE), messages).ids == reply.ids
        # What a model that thinks would have said, put into the cache as if it had.
        text = f"<think>\nhm, question {len(messages)}\n</think>\n\nIt is {len(messages)}."
        ids = tuple(engine.tokenizer.encode(text, control=True))
        said = Request(prompt_ids=(*reply.prompt_ids, *ids), max_tokens=1, conversation="work")
        known = next(e.reply.stats.prompt_tokens for e in engine.generate(said) if isinstance(e, Finished))
        messages.append(Message(role="assistant", content=text.rpartition("\n\n")[2], thinking="hm", ids=ids))
        messages.append(user(question))


OPENED = THINKING_TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
SHOWN_WHILE_LAST = THINKING_TEMPLATE.replace("loop.last and thinking", "loop.last")


@pytest.mark.parametrize("template", [THINKING_TEMPLATE, OPENED, SHOWN_WHILE_LAST])
def test_what_a_template_shows_of_reasoning_only_at_the_end_is_not_foreseen_as_prefill(
    template: str, start: Start
) -> None:
    assert len({THINKING_TEMPLATE, OPENED, SHOWN_WHILE_LAST}) == 3
    engine = start("qwen3", template)
    messages = [user("one")]
    for question in ("two", "three"):
        reply = answer(engine, messages)
        messages.append(Message(role="assistant", content=reply.text, thinking=reply.thinking, ids=reply.ids))
        before = Request(
            messages=tuple(messages), conversation="work", template_kwargs={"add_generation_prompt": False}
        )
        foreseen = engine.foresee(before)
        assert 0 < foreseen.prefill_tokens <= 8  # what the template puts between messages
        messages.append(user(question))
    assert answer(engine, messages).stats.prefill_reused_tokens == foreseen.reused_tokens


@pytest.mark.parametrize("thought", ["", "<|channel|>analysis<|message|>hm, one<|end|><|start|>assistant"])
def test_an_answer_behind_reasoning_on_a_channel_is_read_again_as_foreseen_and_one_without_is_not(
    thought: str, start: Start
) -> None:
    engine = start("gpt-oss", GPT_OSS, vocabulary=GPT_OSS_VOCABULARY)
    messages, known, foreseen = [user("one")], 0, 0
    for question in ("two", "three", ""):
        reply = answer(engine, messages)
        assert reply.stats.prefill_reused_tokens == known == foreseen
        # What such a model would have said, put into the cache as if it had.
        ids = tuple(engine.tokenizer.encode(thought + "<|channel|>final<|message|>It is so.", control=True))
        list(engine.generate(Request(prompt_ids=(*reply.prompt_ids, *ids), max_tokens=1, conversation="work")))
        messages.append(Message(role="assistant", content="It is so.", thinking=thought and "hm, one", ids=ids))
        # Up to where the reply began: both messages begin with the mark of a channel.
        known = len(reply.prompt_ids) + (1 if thought else len(ids))
        before = Request(
            messages=tuple(messages), conversation="work", template_kwargs={"add_generation_prompt": False}
        )
        foreseen = engine.foresee(before).reused_tokens
        messages.append(user(question))
    said = answer(engine, messages)
    assert said.ids == cold(engine, messages).ids


@pytest.mark.parametrize(("architecture", "bos"), [("gemma3", 2), ("qwen2", None), ("qwen3", None)])
def test_there_is_one_bos_in_front_in_every_turn_and_after_a_restart(
    architecture: str, bos: int | None, start: Start, tmp_path: Path
) -> None:
    messages = [user("one")]
    for question in ("two", "three", ""):
        engine = start(architecture, kv_folder=tmp_path / "kept")  # a new one each turn
        reply = answer(engine, messages)
        assert (reply.stats.restored_tokens or 0) == reply.stats.prefill_reused_tokens
        if bos is None:
            assert reply.prompt_ids[0] == engine.tokenizer.encode("<|im_start|>", control=True)[0]
            assert engine.tokenizer.bos_id not in reply.prompt_ids
        else:
            assert engine.tokenizer.bos_id == bos
            assert [at for at, token in enumerate(reply.prompt_ids) if token == bos] == [0]
        messages += [Message(role="assistant", content=reply.text, ids=reply.ids), user(question)]
        engine.close()
    assert reply.stats.prefill_reused_tokens > 0


def test_tools_in_another_order_are_reused_up_to_the_first_and_answered_as_if_cold(start: Start) -> None:
    engine = start("qwen3", TOOL_TEMPLATE)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in ("read_file", "list_files", "grep")
    ]
    first = answer(engine, [user("x")], tools=tuple(tools))
    again = answer(engine, [user("x")], tools=tuple(tools))
    assert again.stats.prefill_tokens == 1
    assert (again.prompt_ids, again.ids) == (first.prompt_ids, first.ids)
    swapped = (tools[1], tools[0], tools[2])
    other = answer(engine, [user("x")], tools=swapped)
    same = next(n for n, (a, b) in enumerate(zip(first.prompt_ids, other.prompt_ids, strict=False)) if a != b)
    assert other.stats.prefill_reused_tokens == same
    assert "read_file" not in engine.tokenizer.decode(other.prompt_ids[:same])
    assert cold(engine, [user("x")], tools=swapped).ids == other.ids


def test_what_a_model_with_running_states_reads_again_is_known_before(start: Start, tmp_path: Path) -> None:
    """Its cache is cut back to where a state was kept, which `answer` compares with what was foreseen."""
    engine = start("qwen35", kv_folder=tmp_path / "kept")
    messages = [user("one " * 30)]
    for question in ("two " * 30, "three " * 30):
        reply = answer(engine, messages)
        messages += [Message(role="assistant", content=reply.text, ids=reply.ids), user(question)]
    answer(engine, messages)
    answer(engine, [*messages[:-1], user("another " * 20)])
    answer(engine, [*messages[:-1], user("another " * 10 + "way")])
    assert answer(engine, messages[:1]).stats.prefill_reused_tokens > 0
    assert answer(engine, messages, "beside").stats.prefill_reused_tokens > 0


def test_a_conversation_of_many_tool_calls_leaves_the_others_in_memory(start: Start) -> None:
    engine = start("qwen2", kv_sessions=2)
    idle = [user("I am another one")]
    reply = answer(engine, idle, "idle")
    idle += [Message(role="assistant", content=reply.text, ids=reply.ids), user("still there?")]
    calls = [user("work")]
    for number in range(12):
        said = answer(engine, calls, "busy")
        calls.append(Message(role="assistant", content=said.text, ids=said.ids))
        calls.append(Message(role="tool", content=f"result {number}", tool_call_id=str(number), name="f"))
    assert set(engine._sessions.kept) == {"idle", "busy"}
    assert answer(engine, idle, "idle").stats.prefill_reused_tokens == reply.stats.context_used
