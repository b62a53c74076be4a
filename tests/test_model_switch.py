"""Another model goes on with a conversation: its own template, tokens and cache, and nothing of the last one's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

from engine import load
from engine.api import Finished, Message, Notice, Reply, Request
from engine.errors import EngineError, ModelFileError, ModelNotFoundError, UsageError
from engine.local import LocalEngine
from goinfer_chat.agent import Agent, Ask
from goinfer_chat.conversations import Conversations
from goinfer_chat.engines import Engines
from goinfer_chat.loading import load_engine
from goinfer_chat.modes import engines_of
from goinfer_chat.script import CommandLine
from goinfer_chat.settings import Settings
from goinfer_chat.slash.commands import COMMANDS
from goinfer_chat.terminal import Stream

ROOT = Path(__file__).parent.parent
OPENS = "{% endfor %}{% if add_generation_prompt %}"
SQUARE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n" + OPENS + "[assistant]{% endif %}"
ROUND = "{% for m in messages %}({{ m.role }}: {{ m.content }})" + OPENS + "(assistant: {% endif %}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models with other tokens and another template each."""
    folder = tmp_path_factory.mktemp("models")
    first = write_tiny_model(folder / "first.gguf", "llama", metadata={"tokenizer.chat_template": SQUARE})
    second = write_tiny_model(folder / "second.gguf", "gemma3", metadata={"tokenizer.chat_template": ROUND})
    return first, second


@contextmanager
def chatting(model: str | Path, folder: Path, **flags: object) -> Iterator[Agent]:
    """An agent as a program at a prompt has it."""
    chosen: dict[str, object] = {"model": str(model), "session_dir": str(folder), "threads": 1, "context_size": 1024}
    settings = Settings().changed({**chosen, "temperature": 0.0, "max_tokens": 12, **flags})
    with ExitStack() as stack:
        conversations = stack.enter_context(Conversations.start(settings, at_prompt=True))
        engines = stack.enter_context(engines_of(load_engine, settings, Stream(None), conversations))
        yield Agent(engines.current, settings, conversations, engines)


def run(agent: Agent, line: str) -> str:
    name, _, argument = line.partition(" ")
    return COMMANDS.run(agent, CommandLine(name, argument)).text


def before(agent: Agent, line: str) -> int:
    """Tokens that the next turn will prefill, as is said before the command; it changes nothing."""
    name, _, argument = line.partition(" ")
    engine = agent.engine
    match = re.match(r"The next turn prefills ([\d,]+) tokens", COMMANDS.foresee(agent, CommandLine(name, argument)))
    assert agent.engine is engine
    return int(match[1].replace(",", "")) if match else 0


def ask(agent: Agent, text: str) -> tuple[Reply, list[str]]:
    """The reply, and what was said beside it."""
    events = list(agent.ask(Ask(text=text), threading.Event()))
    last = events[-1]
    assert isinstance(last, Finished)
    return last.reply, [event.text for event in events if isinstance(event, Notice)]


def fresh(model: Path, agent: Agent, num_messages: int, identity: str) -> Reply:
    """What a program that knows nothing else answers to the first messages of the conversation."""
    assert agent.live is not None
    messages = tuple(agent.live.messages(identity)[:num_messages])
    with load(model, threads=1, context_size=1024) as engine:
        *_, last = engine.generate(
            Request(messages=messages, sampling=agent.settings.sampling, max_tokens=agent.settings.max_tokens)
        )
    assert isinstance(last, Finished)
    return last.reply


def there_and_back(first: Path, second: Path, folder: Path) -> None:
    with chatting(first, folder) as agent:
        identity, engine = agent.model.identity, agent.engine
        ask(agent, "What is your name?")
        last, _ = ask(agent, "And how are you?")

        num_tokens = tokens_in(second, agent, 4)
        assert before(agent, f"model {second}") == num_tokens
        run(agent, f"model {second}")
        with pytest.raises(EngineError, match="closed"):
            engine.generate(Request(messages=(Message(role="user", content="hi"),)))
        other, said = ask(agent, "What did I ask?")
        assert said == ["not resumed: made with another model"]
        assert other.stats.prefill_reused_tokens == 0
        expected = fresh(second, agent, 5, agent.model.identity)
        assert (other.prompt_ids, other.ids, other.text) == (expected.prompt_ids, expected.ids, expected.text)
        added, _ = ask(agent, "Go on.")
        assert added.stats.prefill_reused_tokens == other.stats.context_used

        kept = last.stats.context_used
        num_tokens = tokens_in(first, agent, 8) - kept
        assert before(agent, f"model {first}") == num_tokens
        run(agent, f"model {first}")
        back, said = ask(agent, "And before that?")
        assert said[0].startswith(f"resumed {kept:,} of {kept:,} tokens, ")
        assert back.stats.prefill_reused_tokens == kept
        expected = fresh(first, agent, 9, identity)
        assert (back.prompt_ids, back.ids, back.text) == (expected.prompt_ids, expected.ids, expected.text)

        assert agent.live is not None
        kept_files = list(folder.glob(f"{agent.live.id}.giw-kv*"))
        assert len(kept_files) == 2  # one of each model
        run(agent, f"delete {agent.live.info.name}")
        assert not any(path.exists() for path in kept_files)


def tokens_in(model: Path, agent: Agent, num_messages: int) -> int:
    assert agent.live is not None
    with load(model, threads=1, context_size=1024) as engine:
        messages = tuple(agent.live.messages(engine.info.identity)[:num_messages])
        return engine.count_tokens(Request(messages=messages, template_kwargs={"add_generation_prompt": False}))


def test_another_model_reads_the_words_and_the_first_one_finds_its_cache_when_it_is_back(
    models: tuple[Path, Path], folder: Path
) -> None:
    there_and_back(*models, folder)


@pytest.mark.slow
def test_real_models_go_on_with_each_other_s_conversation(model_path: Callable[[str], Path], folder: Path) -> None:
    there_and_back(model_path("qwen2.5-coder-0.5b"), model_path("smollm2-135m"), folder)


def test_a_template_that_was_given_is_for_the_model_of_the_start(models: tuple[Path, Path], folder: Path) -> None:
    template = models[0].with_name("template.jinja")
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
    with chatting(models[0], folder, chat_template=str(template)) as agent:
        ask(agent, "hello")
        for model, given in ((models[1], False), (models[0], True)):
            run(agent, f"model {model}")
            prompt = agent.engine.tokenizer.decode(ask(agent, "again")[0].prompt_ids)  # type: ignore[attr-defined]
            assert ("<user>" in prompt) == given


def test_what_a_switch_back_costs_is_known_of_a_reply_that_was_cut_by_a_crash(
    models: tuple[Path, Path], folder: Path
) -> None:
    first, second = models
    with chatting(first, folder) as agent:
        ask(agent, "hello")
        assert agent.live is not None
        with agent.conversations.store._database.writing() as connection:  # as it is found after a crash
            connection.execute(
                "UPDATE messages SET stats = NULL, finish_reason = 'interrupted' WHERE role = 'assistant'"
            )
        run(agent, f"model {second}")
        ask(agent, "go on")
        foreseen = before(agent, f"model {first}")
        run(agent, f"model {first}")
        again, _ = ask(agent, "")
        question = len(agent.engine.tokenizer.encode("[user]\n[assistant]"))  # type: ignore[attr-defined]
        assert again.stats.prefill_tokens == foreseen + question


def test_a_name_that_is_no_model_costs_nothing(models: tuple[Path, Path], folder: Path) -> None:
    with chatting(models[0], folder) as agent:
        first, _ = ask(agent, "hello")
        engine = agent.engine
        with pytest.raises(ModelNotFoundError):
            run(agent, f"model {folder / 'no-such.gguf'}")
        assert agent.engine is engine
        assert agent.settings.model == str(models[0])
        assert before(agent, f"model {folder / 'no-such.gguf'}") == 0  # the command says what is wrong
        again, said = ask(agent, "again")
        assert (again.stats.prefill_reused_tokens, said) == (first.stats.context_used, [])


def test_a_model_that_cannot_be_loaded_leaves_the_last_one(models: tuple[Path, Path], folder: Path) -> None:
    damaged = models[0].with_name("damaged.gguf")
    damaged.write_bytes(models[0].read_bytes()[:5000])
    with chatting(models[0], folder) as agent:
        first, _ = ask(agent, "hello")
        with pytest.raises(ModelFileError):
            run(agent, f"model {damaged}")
        again, said = ask(agent, "again")
        assert again.stats.prefill_reused_tokens == first.stats.context_used
        assert said[0].startswith("resumed ")


def test_model_without_a_name_shows_which_one_answers(models: tuple[Path, Path], folder: Path) -> None:
    with chatting(models[0], folder) as agent:
        assert run(agent, "model").startswith("Tiny llama (")
        alone = Agent(agent.engine, agent.settings)
        with pytest.raises(UsageError, match="start with --model"):
            run(alone, f"model {models[1]}")


def test_an_engine_is_closed_before_the_next_one_is_loaded(models: tuple[Path, Path]) -> None:
    """There may be memory for one model only."""
    loaded: list[LocalEngine] = []

    def load_one(settings: Settings) -> LocalEngine:
        assert all(engine._scheduler.closing for engine in loaded)
        loaded.append(load(settings.model, threads=1, context_size=256))
        return loaded[-1]

    first, second = (Settings(model=str(path)) for path in models)
    with Engines(load_one, lambda settings: None, first) as engines:
        engines.switch(second)
        assert engines.current.info.name == "Tiny gemma3"
    assert len(loaded) == 2
    assert all(engine._scheduler.closing for engine in loaded)


def test_scripts_switch_the_model_too(models: tuple[Path, Path], folder: Path) -> None:
    first, second = models
    script = f"one\n/model {second}\ntwo\n/model {first}\nthree\n"
    arguments = ["--model", str(first), "--save", "work", "--json", "--threads", "1", "--max-tokens", "5"]
    done = subprocess.run(
        [sys.executable, "-m", "goinfer_chat", *arguments],
        input=script,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"GOINFER_CHAT_SESSION_DIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert [reply["prefill_reused_tokens"] for reply in replies] == [0, 0, replies[0]["context_used"]]
    assert "Switched to Tiny gemma3 (" in done.stderr
