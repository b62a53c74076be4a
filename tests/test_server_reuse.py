"""Text that comes back is matched to what is kept: who reuses what over HTTP, and after a restart."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from http_server import Running, running_server
from tiny_models import write_tiny_model

from engine.api import Message, Reply, TurnStats
from goinfer_chat.server.transcripts import Transcripts

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}},
    }
    for name in ("zeta", "alpha", "mid")
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "qwen2", context_size=4096)


class Client:
    """A conversation that sends all its words each time, as HTTP clients do."""

    def __init__(self, server: Running, name: str, system: str = "You are brief.", **fields: Any) -> None:
        self.server = server
        self.name = name
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self.fields = fields
        self.figures: list[dict[str, int]] = []

    def say(self, text: str, max_tokens: int = 12) -> str:
        self.messages.append({"role": "user", "content": f"{self.name}: {text}"})
        answer = self.server.chat(self.messages, max_tokens, **self.fields)
        assert answer.status == 200, answer.body
        self.figures.append(answer.json["usage"])
        content: str = answer.json["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": content.strip()})
        return content

    @property
    def prefilled(self) -> list[int]:
        return [usage["prefill_tokens"] for usage in self.figures]


def results(server: Running) -> dict[str, float]:
    lines = server.ask("/metrics").body.decode().splitlines()
    found = (line.split() for line in lines if line.startswith("goinfer_cache_requests_total{"))
    return {labels.split('result="')[1].split('"')[0]: float(value) for labels, value in found}


def test_the_same_words_again_reuse_all_but_the_last_token(tiny: Path) -> None:
    with running_server(tiny) as server:
        texts = [server.chat("word " * 190, 10).json for _ in range(3)]
        assert len({text["choices"][0]["message"]["content"] for text in texts}) == 1
        assert [text["usage"]["prefill_tokens"] for text in texts[1:]] == [1, 1]
        assert len(server.engine._sessions.kept) == 1
        client = Client(server, "a")
        for turn in range(5):
            client.say(f"turn {turn}")
        for before, now in zip(client.figures, client.figures[1:]):
            assert now["prefill_reused_tokens"] == before["prompt_tokens"] + before["completion_tokens"]
        assert results(server) == {"miss": 1, "hit": 2 + 4, "shared": 1}


def test_the_first_half_of_a_prompt_is_not_influenced_by_its_cached_end(tiny: Path) -> None:
    half = "some words that are said " * 8
    with running_server(tiny) as server:
        server.ask("/v1/completions", {"prompt": half + "Z Z Z Z Z Z Z Z", "max_tokens": 4, "temperature": 0})
        short = server.ask("/v1/completions", {"prompt": half, "max_tokens": 8, "temperature": 0}).json
        assert short["usage"]["prefill_tokens"] == 1
    with running_server(tiny) as server:
        cold = server.ask("/v1/completions", {"prompt": half, "max_tokens": 8, "temperature": 0}).json
    assert short["choices"] == cold["choices"]


@pytest.mark.parametrize("concurrently", [False, True])
def test_clients_that_take_turns_prefill_what_one_alone_prefills(tiny: Path, concurrently: bool) -> None:
    """Six turns at 1, 2 and 4 clients."""
    counts: list[list[int]] = []
    texts: list[list[str]] = []
    for number in (1, 2, 4):
        with running_server(tiny, kv_sessions=4) as server:
            clients = [Client(server, f"c{n}") for n in range(number)]
            said: list[list[str]] = [[] for _ in clients]
            with ThreadPoolExecutor(number if concurrently else 1) as pool:
                for turn in range(6):
                    line = f"turn {turn} of six, with some more words"
                    for n, text in enumerate(pool.map(lambda client, line=line: client.say(line), clients)):
                        said[n].append(text)
            counts += [client.prefilled[1:] for client in clients]
            texts.append(said[0])
    assert all(count == counts[0] for count in counts)
    assert max(counts[0]) < 80
    assert texts[0] == texts[1] == texts[2]


def test_more_conversations_than_slots_evict_the_oldest_and_answer_right(tiny: Path, tmp_path: Path) -> None:
    with running_server(tiny, kv_sessions=2, max_concurrent=2, folder=tmp_path / "kv") as server:
        clients = [Client(server, name) for name in "abc"]
        said = {client.name: [client.say(f"round {n}") for n in range(1)] for client in clients}
        for n in range(1, 3):
            for client in clients:
                said[client.name].append(client.say(f"round {n}"))
        assert len(server.engine._sessions.kept) == 2
        assert all(usage["prefill_reused_tokens"] > 40 for client in clients for usage in client.figures[1:])
        assert results(server)["restore"] >= 3
        assert server.metric("goinfer_cache_requests_total") == 9
    for name, texts in said.items():
        with running_server(tiny) as server:
            alone = Client(server, name)
            assert [alone.say(f"round {n}") for n in range(3)] == texts


def test_one_that_talks_much_leaves_another_warm(tiny: Path) -> None:
    with running_server(tiny, kv_sessions=2) as server:
        idle, busy = Client(server, "idle"), Client(server, "busy")
        idle.say("first")
        for n in range(12):
            busy.say(f"call {n}", 3)
        idle.say("second")
        before = idle.figures[0]
        assert idle.figures[1]["prefill_reused_tokens"] == before["prompt_tokens"] + before["completion_tokens"]


def test_a_branch_takes_nothing_from_where_it_came(tiny: Path) -> None:
    with running_server(tiny) as server:
        trunk = Client(server, "t")
        trunk.say("start")
        branch = Client(server, "t")
        branch.messages = [*trunk.messages]
        for n in range(3):
            trunk.say(f"left {n}")
            branch.say(f"right {n}")
        for client in (trunk, branch):
            assert max(client.prefilled[1:]) < 60


def test_the_order_of_tools_and_keys_is_the_clients(tiny: Path) -> None:
    with running_server(tiny) as server:

        def ask(tools: list[Any]) -> dict[str, Any]:
            answer: dict[str, Any] = server.chat("use a tool " * 10, 4, tools=tools).json
            return answer

        first, again = ask(TOOLS), ask(json.loads(json.dumps(TOOLS)))
        assert again["usage"]["prefill_tokens"] == 1
        swapped = ask([TOOLS[1], TOOLS[0], TOOLS[2]])
        assert 0 < swapped["usage"]["prefill_reused_tokens"] < first["usage"]["prompt_tokens"] / 2
    with running_server(tiny) as server:
        assert (
            server.chat("use a tool " * 10, 4, tools=[TOOLS[1], TOOLS[0], TOOLS[2]]).json["choices"]
            == swapped["choices"]
        )


def test_after_a_restart_the_words_find_their_file(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with running_server(tiny, folder=folder) as server:
        client = Client(server, "a")
        client.say("before", 30)
    for path in folder.iterdir():
        assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600, path
    with running_server(tiny, folder=folder) as server:
        client.server = server
        told = client.say("after")
        assert results(server) == {"restore": 1}
        before = client.figures[0]
        assert client.figures[1]["prefill_reused_tokens"] == before["prompt_tokens"] + before["completion_tokens"]
    with running_server(tiny) as server:
        cold = Client(server, "a")
        cold.say("before", 30)
        assert cold.say("after") == told


def test_further_choices_leave_no_file_and_any_of_them_may_be_gone_on_with(tiny: Path, tmp_path: Path) -> None:
    with running_server(tiny, folder=tmp_path / "kv") as server:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "three of them"}]
        choices = server.chat(messages, 9, n=3, seed=5, temperature=1.0).json["choices"]
        server.wait_until(lambda: server.is_idle)
        assert len(list((tmp_path / "kv").glob("*.giw-kv"))) == 1
        messages += [choices[2]["message"], {"role": "user", "content": "go on"}]
        assert server.chat(messages, 3).json["usage"]["prefill_reused_tokens"] >= 13


def test_replies_kept_on_the_disk_survive_a_cut_line_and_are_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    question = [Message(role="user", content="hi")]
    stats = TurnStats(prompt_tokens=1, prefill_reused_tokens=0, prefill_tokens=1)

    def reply(text: str) -> Reply:
        return Reply(text=text, ids=(1, 2), prompt_ids=(0,), finish_reason="stop", stats=stats)

    kept = Transcripts(path)
    turn = kept.begin(question)
    turn.end(reply("hello "))
    for _ in range(3):
        kept.begin(question).end(reply("hello "))
    with path.open("ab") as file:
        file.write(b'{"name": "http-')
    again = Transcripts(path)
    assert len(path.read_bytes().splitlines()) == 1
    further = again.begin([*question, Message(role="assistant", content="hello"), Message(role="user", content="and")])
    assert (further.name, further.goes_on) == (turn.name, True)
    assert further.messages[1].ids == (1, 2)
    beside = again.begin([*question, Message(role="assistant", content="hello"), Message(role="user", content="and")])
    assert beside.name != turn.name
    assert beside.messages[1].ids == (1, 2)
    other = again.begin([*question, Message(role="assistant", content="Hello"), Message(role="user", content="and")])
    assert other.messages[1].ids is None


THINKING = """\
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last and message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def test_a_template_that_drops_old_reasoning_costs_the_last_answer_only(tmp_path: Path) -> None:
    path = write_tiny_model(
        tmp_path / "thinks.gguf", "qwen3", context_size=4096, metadata={"tokenizer.chat_template": THINKING}
    )
    with running_server(path) as server:
        client = Client(server, "a")
        for turn in range(3):
            client.say(f"turn {turn} with some words", 30)
        for before, now in zip(client.figures, client.figures[1:]):
            assert now["prefill_reused_tokens"] >= before["prompt_tokens"] - 8
        plain = Client(server, "b", chat_template_kwargs={"enable_thinking": False})
        plain.say("hello", 5)
        told = Client(server, "b")
        told.say("hello", 5)
        assert plain.figures[0]["prompt_tokens"] > told.figures[0]["prompt_tokens"]


@pytest.mark.parametrize(("architecture", "bos"), [("gemma3", 1), ("qwen2", 0)])
def test_there_is_one_beginning_of_text_where_the_model_wants_one(tmp_path: Path, architecture: Any, bos: int) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture)
    for folder in (tmp_path / "kv", tmp_path / "kv"):  # the second time after a restart
        with running_server(path, folder=folder, context_size=1024) as server:
            client = Client(server, "a", system="")
            client.messages = []
            for turn in range(3):
                client.say(f"turn {turn}", 4)
            completion = server.ask("/v1/completions", {"prompt": "hello", "max_tokens": 1})
            assert completion.status == 200
            for name in server.engine._sessions.kept:
                ids = server.engine._sessions._tables[name].ids
                assert ids.count(server.engine.tokenizer.bos_id) == bos
                assert not bos or ids[0] == server.engine.tokenizer.bos_id


def test_with_a_sliding_window_clients_that_take_turns_say_what_each_says_alone(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "gemma.gguf", "gemma3", context_size=1024, sliding_window=32)
    lines = ["a first line of some length " * 3, "again " * 9, "and at last"]
    with running_server(path, context_size=1024) as server:
        clients = [Client(server, name, system="") for name in "abc"]
        for client in clients:
            client.messages = []
        said = [[client.say(line, 20) for client in clients] for line in lines]
        undone = Client(server, "a", system="")
        undone.messages = clients[0].messages[:2]
        other = undone.say("another way", 20)
    with running_server(path, context_size=1024, kv_sessions=0) as server:
        for n, name in enumerate("abc"):
            client = Client(server, name, system="")
            client.messages = []
            assert [client.say(line, 20) for line in lines] == [texts[n] for texts in said]
        client = Client(server, "a", system="")
        client.messages = undone.messages[:2]
        assert client.say("another way", 20) == other


def test_nothing_of_another_conversation_is_ever_in_a_reply(tiny: Path) -> None:
    with running_server(tiny) as server:
        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(lambda n: server.chat(f"client {n % 8}", 20).json["choices"], range(32)))
        for n in range(8):
            assert all(text == texts[n] for text in texts[n::8])
            assert server.chat(f"client {n}", 20).json["choices"] == texts[n]
