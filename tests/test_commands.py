"""Slash commands: each changes what it says, and a wrong one changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from scripted_engine import ScriptedEngine, ScriptedTurn

from engine.api import Finished, Message
from engine.errors import TemplateError, UsageError
from goinfer_chat.agent import Agent, Ask
from goinfer_chat.script import CommandLine
from goinfer_chat.settings import SETTINGS, Settings
from goinfer_chat.slash.commands import COMMANDS


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine([ScriptedTurn(pieces=["Hel", "lo"])])


@pytest.fixture
def agent(engine: ScriptedEngine) -> Iterator[Agent]:
    agent = Agent(engine, Settings())
    with agent.conversations:
        yield agent


def run(agent: Agent, line: str) -> str:
    name, _, argument = line.partition(" ")
    return COMMANDS.run(agent, CommandLine(name, argument)).shown(100)


def ask(agent: Agent, text: str) -> None:
    for _ in agent.ask(Ask(text=text), threading.Event()):
        pass


def said(agent: Agent) -> list[Message]:
    assert agent.live is not None
    return agent.live.messages(agent.model.identity)


def test_the_next_request_holds_the_conversation_with_the_ids_of_each_reply(
    agent: Agent, engine: ScriptedEngine
) -> None:
    ask(agent, "first")
    run(agent, "system Be brief.")
    ask(agent, "second")
    assert engine.requests[1].messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="first"),
        Message(role="assistant", content="Hello", ids=(0, 1)),
        Message(role="user", content="second"),
    )


def test_a_turn_that_fails_is_not_kept() -> None:
    engine = ScriptedEngine([ScriptedTurn(error="template"), ScriptedTurn(pieces=["ok"])])
    agent = Agent(engine, Settings())
    with agent.conversations:
        with pytest.raises(TemplateError):
            ask(agent, "refused")
        ask(agent, "taken")
    assert [message.content for message in engine.requests[1].messages] == ["taken"]


def test_a_turn_stopped_before_its_first_token_is_not_kept(agent: Agent, engine: ScriptedEngine) -> None:
    stopped = threading.Event()
    stopped.set()
    *_, last = agent.ask(Ask(text="never answered"), stopped)
    assert isinstance(last, Finished)
    assert last.reply.finish_reason == "cancelled"
    assert said(agent) == []


def test_a_turn_stopped_in_the_middle_keeps_what_was_said(agent: Agent) -> None:
    cancel = threading.Event()
    for event in agent.ask(Ask(text="go on"), cancel):
        if getattr(event, "text", "") == "Hel":
            cancel.set()
    assert [(message.content, message.ids) for message in said(agent)] == [
        ("go on", None),
        ("Hel", (0,)),
    ]


def test_reset_forgets_the_words_and_the_cache_but_not_the_system_prompt(agent: Agent, engine: ScriptedEngine) -> None:
    run(agent, "system Be brief.")
    ask(agent, "first")
    run(agent, "reset")
    ask(agent, "second")
    assert [message.content for message in engine.requests[1].messages] == ["Be brief.", "second"]
    assert engine.forgotten == [engine.requests[0].conversation]


def test_the_system_prompt_can_be_shown_and_taken_away(agent: Agent, engine: ScriptedEngine) -> None:
    assert run(agent, "system") == "There is no system prompt."
    assert run(agent, "system Be brief.") == run(agent, "system") == "System prompt: Be brief."
    assert run(agent, "system none") == "There is no system prompt."
    ask(agent, "first")
    assert [message.role for message in engine.requests[0].messages] == ["user"]


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("temperature 0.2", "temperature", 0.2),
        ("top-k 5", "top_k", 5),
        ("top-p 0.5", "top_p", 0.5),
        ("min-p 0.1", "min_p", 0.1),
        ("repeat-penalty 1.1", "repeat_penalty", 1.1),
        ("presence-penalty 0.3", "presence_penalty", 0.3),
        ("frequency-penalty 0.3", "frequency_penalty", 0.3),
        ("penalty-window 8", "penalty_window", 8),
        ("seed 42", "seed", 42),
        ("max-tokens 3", "max_tokens", 3),
        ("stop ###", "stop", ("###",)),
        (r'stop ["a", "\n"]', "stop", ("a", "\n")),
    ],
)
def test_every_sampling_value_has_a_command_that_reaches_the_request(
    agent: Agent, engine: ScriptedEngine, line: str, name: str, value: object
) -> None:
    run(agent, line)
    ask(agent, "go")
    request = engine.requests[0]
    assert (getattr(request, name) if hasattr(request, name) else getattr(request.sampling, name)) == value


def test_settings_that_can_be_none_go_back_to_none(agent: Agent) -> None:
    for line in ("seed 42", "max-tokens 3", "stop x", "seed none", "max-tokens none", "stop none"):
        run(agent, line)
    assert agent.settings == Settings()


@pytest.mark.parametrize(
    "line", ["temperature hot", "temperature -1", "top-p 0", "max-tokens 0", "top-k 1.5", "seed -3"]
)
def test_a_value_that_cannot_be_obeyed_changes_nothing(agent: Agent, line: str) -> None:
    with pytest.raises(UsageError):
        run(agent, line)
    assert agent.settings == Settings()


def test_a_value_that_cannot_be_read_is_told_with_the_name_of_its_setting(agent: Agent) -> None:
    for line in ("seed 5 6", "set seed 5 6"):
        with pytest.raises(UsageError, match=r"^seed: '5 6' is not a whole number$"):
            run(agent, line)


def test_params_shows_every_setting_with_its_value(agent: Agent) -> None:
    run(agent, "temperature 0.25")
    shown = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in run(agent, "params").splitlines()}
    assert {setting.flag for setting in SETTINGS if setting.in_chat} <= shown.keys()
    assert shown["temperature"] == "0.25"
    assert shown["tool-timeout"] == "120"
    assert shown["context"] == "0 of 8,192 tokens used"


def test_help_names_every_command_and_explains_one(agent: Agent) -> None:
    named = [line.split()[0] for line in run(agent, "help").splitlines() if line.startswith("  /")]
    assert [name for name in named if name != "//"] == [
        f"/{command.name}" for commands in COMMANDS.topics.values() for command in commands
    ]
    assert run(agent, "help /top-k") == run(agent, "help top-k")
    assert "likeliest tokens" in run(agent, "help top-k")


def test_help_is_by_topic_and_lists_one_topic_alone(agent: Agent) -> None:
    headings = [line for line in run(agent, "help").splitlines() if not line.startswith(" ")]
    assert headings == [*COMMANDS.topics, "a message"]
    assert [line.split()[0] for line in run(agent, "help prompt").splitlines()] == ["/keys", "/toolbar"]


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("tools", ["/tools", "/call", "/json", "/approvals", "/parallel-calls"]),
        ("model", ["/model", "/spec"]),
    ],
)
def test_help_of_a_word_that_is_a_topic_and_a_command_shows_both(agent: Agent, word: str, named: list[str]) -> None:
    shown = [line.split()[0] for line in run(agent, f"help {word}").splitlines() if line.startswith("  /")]
    assert shown[: len(named)] == named
    assert len(set(shown)) == len(shown)


@pytest.mark.parametrize("columns", [300, 80, 41, 20])
def test_help_never_breaks_a_word(agent: Agent, columns: int) -> None:
    outcome = COMMANDS.run(agent, CommandLine("help", ""))
    words = {word for row in outcome.rows for text in row for word in text.split()}
    lines = outcome.shown(columns).splitlines()
    assert {word for line in lines for word in line.split()} == words
    assert columns < 60 or all(len(line) <= columns for line in lines)


def test_a_near_miss_is_suggested(agent: Agent) -> None:
    with pytest.raises(UsageError, match="no command /temprature; did you mean /temperature"):
        run(agent, "temprature 1")
    with pytest.raises(UsageError, match="no command /sess; did you mean /sessions"):
        run(agent, "sess")
    with pytest.raises(UsageError, match="/help lists the commands"):
        run(agent, "xyzzy")
    with pytest.raises(UsageError, match="topics: program, conversations"):
        run(agent, "help xyzzy")


def test_a_command_without_arguments_refuses_one(agent: Agent) -> None:
    with pytest.raises(UsageError, match="/new takes no argument"):
        run(agent, "reset everything")


def test_completion_offers_names_then_arguments(agent: Agent) -> None:
    assert [found.text for found in COMMANDS.completions(agent, "/top")] == ["/top-k", "/top-p"]
    assert [found.text for found in COMMANDS.completions(agent, "/help res")] == ["resume"]
    assert COMMANDS.completions(agent, "hello /top") == COMMANDS.completions(agent, "//top") == []


def test_set_shows_and_changes_what_a_chat_can_change(agent: Agent) -> None:
    assert run(agent, "set top_k 5") == run(agent, "set --top-k") == "top-k 5"
    assert "top-k" in run(agent, "set")
    assert run(agent, "set system Be brief.") == "System prompt: Be brief."
    assert run(agent, "set toolbar off") == "toolbar off"
    assert (agent.settings.sampling.top_k, agent.settings.toolbar) == (5, False)
    with pytest.raises(UsageError, match="no setting temprature; did you mean temperature"):
        run(agent, "set temprature 1")
    with pytest.raises(UsageError, match="ctx cannot be changed in a chat; start with --ctx"):
        run(agent, "set ctx 100")


def test_thinking_is_asked_of_the_template_where_it_is_chosen(agent: Agent, engine: ScriptedEngine) -> None:
    for value in ("auto", "on", "off"):
        run(agent, f"think {value}")
        ask(agent, "go")
    asked = [request.template_kwargs.get("enable_thinking") for request in engine.requests]
    assert asked == [None, True, False]
    with pytest.raises(UsageError, match="'maybe' is not one of: auto, on, off"):
        run(agent, "think maybe")
