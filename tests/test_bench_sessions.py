"""`bench replay`, `bench copy`, `bench chat` and `check`: whole requests to an engine, and what their figures say."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, ScriptedTurn
from tiny_models import write_tiny_model

from engine import load
from engine.api import Message, Reply, Request, TurnStats, tool_name
from engine.chat_template import ChatTemplate
from engine.errors import UsageError
from engine.gguf_file import open_gguf
from engine.local import LocalEngine
from engine.tokenizer import Tokenizer
from goinfer_chat.bench.asking import ask
from goinfer_chat.bench.check import DECODE_TOKENS, WORDS, Phase, decode_phase, prefill_phase
from goinfer_chat.bench.machine import Peaks
from goinfer_chat.bench.replay import Replay, Restarts, beside_no_reuse, tools_of
from goinfer_chat.bench.report import Summary
from goinfer_chat.bench.texts import CODE, plain_text
from goinfer_chat.bench.traffic import CHAT, COPY, Way, copied_share, measure, rate_of, ways_of
from goinfer_chat.bench.transcript import STEPS, SYSTEM, TASK, TOOLS
from goinfer_chat.bench.work import Work


def quiet(what: str, share: float) -> None:
    assert 0 <= share <= 1


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("bench") / "tiny.gguf", num_layers=1, context_size=16_384)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[LocalEngine]:
    with load(tiny_model, context_size=16_384, threads=1) as engine:
        yield engine


# ---------------------------------------------------------------- the session of the replay
def test_a_turn_reads_only_what_came_after_the_reply(engine: LocalEngine) -> None:
    rows = Replay(engine, num_turns=4, reuse=True).play(1, quiet)
    assert [row.turn for row in rows] == [1, 2, 3, 4]
    assert rows[0].reused_tokens == 0
    for step, before, row in zip(STEPS, rows, rows[1:]):
        assert row.reused_tokens == before.prompt_tokens + len(engine.tokenizer.encode(step.reply))
    assert all(row.reused_tokens + row.prefilled_tokens == row.prompt_tokens for row in rows)


def test_without_reuse_every_turn_reads_everything(engine: LocalEngine) -> None:
    rows = Replay(engine, num_turns=2, reuse=False).play(2, quiet)
    assert [row.reused_tokens for row in rows] == [0, 0]
    assert [row.prefilled_tokens for row in rows] == [row.prompt_tokens for row in rows]
    assert all(len(row.wall_ms.values) == len(row.ttft_ms.values) == 2 for row in rows)
    # The wall clock has the last token's own step in it too.
    assert all(wall > ttft for row in rows for wall, ttft in zip(row.wall_ms.values, row.ttft_ms.values))


def test_an_engine_that_is_started_anew_before_each_turn_reads_no_more(engine: LocalEngine, tiny_model: Path) -> None:
    expected = Replay(engine, num_turns=3, reuse=True).play(1, quiet)
    started: list[Path] = []

    def make(folder: Path) -> LocalEngine:
        started.append(folder)
        return load(tiny_model, context_size=16_384, threads=1, kv_folder=folder)

    with Restarts(make) as restarts:
        rows = Replay(engine, num_turns=3, reuse=True, restarts=restarts).play(2, quiet)
    for row, other in zip(rows, expected, strict=True):
        assert (row.prompt_tokens, row.reused_tokens, row.prefilled_tokens) == (
            other.prompt_tokens,
            other.reused_tokens,
            other.prefilled_tokens,
        )
    assert [row.restore_ms is not None for row in rows] == [False, True, True]
    assert len(started) == 6
    assert started[0] == started[2] != started[3] == started[5]
    assert not any(folder.exists() for folder in started)


def test_each_turn_is_a_forced_call_and_further_tools_are_read_with_it(engine: LocalEngine) -> None:
    class Recording:
        info, tokenizer = engine.info, engine.tokenizer
        count_tokens, forget = engine.count_tokens, engine.forget
        requests: list[Request] = []  # noqa: RUF012

        def generate(self, request: Request) -> Any:
            self.requests.append(request)
            return engine.generate(request)

    recording = Recording()
    few = Replay(recording, num_turns=2, reuse=True).play(1, quiet)  # type: ignore[arg-type]
    timed = [request for request in recording.requests if request.messages]
    assert [request.tool_choice.name for request in timed] == [STEPS[n].tool for n in (0, 0, 0, 1)]
    many = Replay(engine, num_turns=2, reuse=True, num_tools=25).play(1, quiet)
    assert many[0].prompt_tokens > few[0].prompt_tokens + 1000
    assert many[1].prefilled_tokens == few[1].prefilled_tokens
    assert len({tool_name(tool) for tool in tools_of(25)}) == 25
    for number in (3, 26):
        with pytest.raises(UsageError, match="4 to 25 tool schemas"):
            tools_of(number)


def test_turns_without_reuse_stand_beside_those_with_it(engine: LocalEngine) -> None:
    rows = Replay(engine, num_turns=2, reuse=True).play(2, quiet)
    without = Replay(engine, num_turns=2, reuse=False).play(2, quiet)
    for row, other, joined in zip(rows, without, beside_no_reuse(rows, without), strict=True):
        assert joined.without_ms == other.wall_ms
        assert joined.saved is not None
        assert joined.saved.values == pytest.approx(
            [cold / warm for cold, warm in zip(other.wall_ms.values, row.wall_ms.values)]
        )
        assert {"without_ms", "saved"} <= joined.as_object().keys()


def test_a_replay_leaves_nothing_behind(engine: LocalEngine) -> None:
    Replay(engine, num_turns=1, reuse=True).play(1, quiet)
    assert engine._sessions.kept == ()


class RecordingPeer:
    name = "llama.cpp"

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], bool]] = []

    def prompt(self, ids: Sequence[int], *, reuse: bool = False) -> float:
        self.asked.append((tuple(ids), reuse))
        return 3.0


def test_the_peer_gets_the_same_prompts_and_replies(engine: LocalEngine) -> None:
    peer = RecordingPeer()
    rows = Replay(engine, num_turns=2, reuse=True, peer=peer).play(2, quiet)  # type: ignore[arg-type]
    warm_up, *sessions = peer.asked
    assert sessions[:3] == sessions[3:]
    (first, cold), (with_reply, kept), (second, reused) = sessions[:3]
    assert (warm_up, cold, kept, reused) == ((first, False), False, True, True)
    assert with_reply == first + tuple(engine.tokenizer.encode(STEPS[0].reply))
    assert second[: len(with_reply)] == with_reply
    assert (len(first), len(second)) == tuple(row.prompt_tokens for row in rows)
    for row in rows:
        assert row.peer_ms == Summary((3000.0, 3000.0))
        assert row.ratio is not None
        assert row.ratio.values == pytest.approx([3000 / wall for wall in row.wall_ms.values])


@pytest.mark.parametrize("num_turns", [0, 11])
def test_a_session_has_ten_turns(engine: LocalEngine, num_turns: int) -> None:
    with pytest.raises(UsageError, match=f"the session has 10 turns; play 1 to 10 of them, not {num_turns}"):
        Replay(engine, num_turns=num_turns, reuse=True)


def test_an_engine_that_shows_no_tokens_cannot_replay() -> None:
    with pytest.raises(UsageError, match="the backend cpu does not show its token ids"):
        Replay(ScriptedEngine([ScriptedTurn(pieces=["x"])]), num_turns=1, reuse=True)


def test_every_call_of_the_session_names_a_tool_and_gives_it_what_it_asks_for() -> None:
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    assert len(STEPS) == 10
    for step in STEPS:
        opener, call, closer = step.reply.splitlines()
        assert (opener, closer) == ("<tool_call>", "</tool_call>")
        assert json.loads(call) == {"name": step.tool, "arguments": step.arguments}
        assert set(parameters[step.tool]["required"]) <= set(step.arguments) <= set(parameters[step.tool]["properties"])


def test_the_session_has_the_size_of_a_coding_agents(model_path: Callable[[str], Path]) -> None:
    with open_gguf(model_path("qwen2.5-coder-1.5b")) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf.metadata)
        template = ChatTemplate.from_gguf(gguf.metadata, tokenizer)
    messages = [Message(role="system", content=SYSTEM), Message(role="user", content=TASK)]
    sizes, replies = [], []
    for step in STEPS:
        sizes.append(len(template.encode(messages, TOOLS)))
        replies.append(tuple(tokenizer.encode(step.reply)))
        messages += [
            Message(role="assistant", content=step.reply, ids=replies[-1]),
            Message(role="tool", content=step.result),
        ]
    assert 710 <= sizes[0] <= 750
    assert 1890 <= sizes[8] <= 1950
    assert 190 <= sizes[8] - sizes[7] - len(replies[7]) <= 250


# ---------------------------------------------------------------- copy and chat
def reply(ids: Sequence[int], rate: float | None, **stats: Any) -> Reply:
    figures = TurnStats(
        prompt_tokens=1,
        prefill_reused_tokens=0,
        prefill_tokens=1,
        completion_tokens=len(ids),
        decode_tok_s=rate,
        **stats,
    )
    return Reply(text="x" * len(ids), ids=tuple(ids), prompt_ids=(1,), finish_reason="stop", stats=figures)


def test_the_rate_of_several_replies_is_all_tokens_over_all_time() -> None:
    assert rate_of([reply(range(10), 10.0), reply(range(30), 60.0)]) == pytest.approx(40 / 1.5)
    assert rate_of([reply([1], None), reply(range(30), 60.0)]) == pytest.approx(60)


def test_ways_to_decode_take_turns_and_are_compared_round_by_round() -> None:
    asked: list[str] = []

    def way(name: str, rates: list[float], ids: list[int], **stats: Any) -> Way:
        answers = iter(rates)

        def answer(request: Request) -> Reply:
            asked.append(name)
            return reply(ids, next(answers), **stats)

        return Way(name, answer)

    plain = way("plain", [10.0, 20.0], [1, 2, 3])
    spec = way("ngram", [30.0, 30.0], [1, 2, 3], draft_tokens=8, draft_accepted=6, tokens_per_step=4.0)
    wrong = way("wrong", [10.0, 10.0], [1, 2, 4])
    rows = measure(COPY, [plain, spec, wrong], lambda name: None, max_tokens=3, repeat=2, progress=quiet)
    assert asked == ["plain", "ngram", "wrong"] * 2
    assert rows[0].as_object() == {
        "decode": "plain",
        "tok_s": {"median": 15.0, "low": 10.0, "high": 20.0, "values": [10.0, 20.0]},
        "completion_tokens": 3,
        "draft_tokens": None,
        "draft_accepted": None,
        "acceptance": None,
        "tokens_per_step": None,
        "undrafted_steps": None,
        "draft_pauses": None,
        "ratio": None,
        "same_replies": None,
        "copied": None,
    }
    assert rows[1].ratio == Summary((3.0, 1.5))
    assert (rows[1].acceptance, rows[1].tokens_per_step, rows[1].same_replies) == (0.75, 4.0, True)
    assert (rows[2].acceptance, rows[2].same_replies) == (None, False)


def test_speculation_is_asked_of_the_engine_and_plain_decoding_too(engine: LocalEngine) -> None:
    rows = measure(COPY, ways_of(engine, ("off", "ngram")), engine.forget, max_tokens=4, repeat=1, progress=quiet)
    assert [row.name for row in rows] == ["plain", "ngram"]
    assert (rows[0].draft_tokens, rows[1].same_replies) == (None, True)
    assert rows[1].draft_tokens is not None
    assert rows[1].tokens_per_step is not None


def test_a_conversation_goes_on_with_the_ids_of_its_replies() -> None:
    requests: list[Request] = []
    forgotten: list[str] = []

    def answer(request: Request) -> Reply:
        requests.append(request)
        return reply([len(requests), 9], 10.0)

    rounds = measure(CHAT, [Way("plain", answer)], forgotten.append, max_tokens=7, repeat=1, progress=quiet)
    assert rounds[0].num_tokens == 2 * len(requests) == 12
    first, second = requests[:2]
    assert [message.content for message in first.messages] == [CHAT[0][0]]
    assert [message.role for message in second.messages] == ["user", "assistant", "user"]
    assert second.messages[1].ids == (1, 9)
    assert {(r.sampling.temperature, r.max_tokens) for r in requests} == {(0, 7)}
    assert forgotten == [name for n in range(3) for name in [f"bench {n}"] * 2]
    assert [r.conversation for r in requests] == [f"bench {n}" for n in range(3) for _ in range(2)]


def test_copies_are_judged_by_their_worst_reply() -> None:
    texts = iter([CODE, CODE[:10] + "?" + CODE[11:20]])

    def answer(request: Request) -> Reply:
        return replace(reply([1, 2], 10.0), text=next(texts))

    (row,) = measure(
        COPY, [Way("plain", answer)], lambda name: None, max_tokens=7, repeat=2, progress=quiet, judge=copied_share
    )
    assert row.copied == 0.5


def test_a_copy_is_judged_to_its_first_wrong_character() -> None:
    assert copied_share(CODE) == 1
    assert copied_share("```python\n" + CODE[:100]) == 1
    assert copied_share(CODE[:30] + "?" + CODE[31:60]) == 0.5
    assert copied_share("") == 0


def test_the_code_to_copy_is_python_of_the_size_that_edits_have() -> None:
    compile(CODE, "code", "exec")
    assert 3400 <= len(CODE) <= 3600
    assert CODE in COPY[0][0]


# ---------------------------------------------------------------- check
def test_a_text_has_as_many_words_as_it_is_asked_for() -> None:
    assert [len(plain_text(n).split()) for n in (1, 13, WORDS)] == [1, 13, WORDS]
    sentences = plain_text(WORDS).split(". ")
    assert len(set(sentences)) == len(sentences)


@pytest.mark.parametrize(
    ("arithmetic", "memory", "limit"),
    [
        (0.8, 0.1, "arithmetic"),
        (0.1, 0.9, "memory"),
        (0.6, 0.7, "memory"),
        (0.3, 0.49, "neither"),
        (0.5, 0, "arithmetic"),
    ],
)
def test_what_limits_a_phase_is_what_it_is_nearest_to(arithmetic: float, memory: float, limit: str) -> None:
    phase = Phase(arithmetic=arithmetic, memory=memory)
    assert phase.limit == limit
    assert phase.text().startswith(f"{100 * arithmetic:.0f} % of the arithmetic, {100 * memory:.0f} % of the memory")


def test_the_phases_stand_beside_the_work_they_did(engine: LocalEngine, tiny_model: Path) -> None:
    with open_gguf(tiny_model) as gguf:
        work = Work.of(gguf)
    ids = tuple(engine.tokenizer.encode(plain_text(20)))
    long = ask(engine, Request(prompt_ids=ids, max_tokens=2))
    stats = replace(long.reply.stats, prefill_tok_s=2.0 * len(ids), decode_tok_s=4.0)
    long = replace(long, reply=replace(long.reply, stats=stats), num_chunks=3)
    peaks = Peaks(integer=1e9, floating=1e8)
    prefill, decode = prefill_phase(long, work, peaks, 1e6), decode_phase(long, work, peaks, 1e6)
    matrices, attention = work.matrices(len(ids), 1).integer, work.prompt_attention(len(ids)).integer
    assert prefill.arithmetic == pytest.approx((matrices + attention) / 1e9 / 0.5)
    assert prefill.memory == pytest.approx(3 * work.weight_bytes / 1e6 / 0.5)
    assert decode.arithmetic == pytest.approx(4 * work.matrices(1, 1).integer / 1e9)
    assert decode.memory == pytest.approx(4 * (work.weight_bytes + work.kv_bytes(len(ids))) / 1e6)


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "goinfer_chat", *arguments, "--threads", "1", "--quiet"]
    return subprocess.run(command, capture_output=True, text=True)


def test_check_of_the_default_model_says_what_to_expect(model_path: Callable[[str], Path]) -> None:
    done = program("check", "--model", str(model_path("smollm2-135m")), "--ctx", "512")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [(line[:13].strip(), line[13:]) for line in done.stdout.splitlines()]
    assert [name for name, _ in rows] == [
        *("model", "machine", "kernels", "loading", "first token", "decode", "memory", "limits", "prefill", "decode"),
    ]
    assert "MB of weights" in dict(rows)["memory"]
    assert "of the memory bandwidth: " in rows[-1][1]


def test_a_prompt_that_is_too_long_for_the_context_is_cut(tiny_model: Path) -> None:
    done = program("check", "--model", str(tiny_model), "--ctx", "320", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert 0 < result["prompt_words"] < WORDS
    assert 200 < result["prompt_tokens"] <= 320 - DECODE_TOKENS
    assert result["threads"] == 1
    for phase in ("prefill", "decode"):
        assert result[phase]["limit"] in ("arithmetic", "memory", "neither")
        assert all(math.isfinite(result[phase][name]) and result[phase][name] > 0 for name in ("arithmetic", "memory"))
    assert result["peak_bytes"] > result["weight_bytes"]


def test_a_context_without_room_for_any_prompt_is_refused(tiny_model: Path) -> None:
    done = program("check", "--model", str(tiny_model), "--ctx", str(DECODE_TOKENS))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: a context of 64 tokens has no room for the check; give a larger --ctx\n"


# ---------------------------------------------------------------- the commands
def test_replay_of_the_default_model_prints_its_turns(model_path: Callable[[str], Path]) -> None:
    command = ["bench", "replay", "--model", str(model_path("smollm2-135m")), "--turns", "2", "--repeat", "1"]
    done = program(*command, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert (result["reuse"], result["threads"], result["peer"]) == (True, 1, None)
    first, second = result["turns"]
    assert (first["turn"], first["prefill_reused_tokens"]) == (1, 0)
    assert second["prefill_reused_tokens"] > first["prompt_tokens"]
    assert second["prompt_tokens"] == second["prefill_reused_tokens"] + second["prefill_tokens"]


def test_replay_without_reuse_is_a_table(tiny_model: Path) -> None:
    done = program("bench", "replay", "--model", str(tiny_model), "--turns", "1", "--repeat", "1", "--no-reuse")
    assert (done.returncode, done.stderr) == (0, "")
    title, _, _, _, head, row = done.stdout.splitlines()
    assert title == "Tiny llama, without reuse, 4 tools in the prompt"
    assert head.split() == ["turn", "prompt", "reused", "prefilled", "one", "token,", "ms", "known", "after,", "ms"]
    assert row.split()[0] == "1"
    assert row.split()[2] == "0"


@pytest.mark.parametrize("kind", ["copy", "chat"])
def test_traffic_is_a_table_or_an_object(tiny_model: Path, kind: str) -> None:
    command = ["bench", kind, "--model", str(tiny_model), "--max-tokens", "3", "--repeat", "2"]
    title, *_, head, row = program(*command).stdout.splitlines()
    assert title == f"Tiny llama, {kind}"
    assert head.split() == ["decoding", "tok/s", "tokens", *(["copied"] if kind == "copy" else [])]
    assert row.startswith("plain ")
    done = program(*command, "--json", "--spec", "ngram")
    plain, ngram = json.loads(done.stdout)["ways"]
    assert (ngram["decode"], ngram["same_replies"], len(ngram["ratio"]["values"])) == ("ngram", True, 2)
    assert (plain["decode"], len(plain["tok_s"]["values"])) == ("plain", 2)
    assert (plain["copied"] is not None) == (kind == "copy")
    assert 0 < plain["completion_tokens"] <= 3 * (1 if kind == "copy" else 6)
