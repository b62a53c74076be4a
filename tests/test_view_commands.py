"""Commands about the screen: the exact text of a reply, its code, its figures; and what is remembered."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from threading import Event

import pytest
from scripted_engine import ScriptedEngine, ScriptedTurn

from engine.api import Message
from engine.errors import UsageError
from goinfer_chat.agent import Agent
from goinfer_chat.clipboard import MAX_OSC_BYTES, copy_with_program, osc52
from goinfer_chat.prompt.toolbar import MIN_COLUMNS, toolbar
from goinfer_chat.remembered import recall, remember
from goinfer_chat.script import CommandLine
from goinfer_chat.settings import Settings
from goinfer_chat.slash.commands import COMMANDS
from goinfer_chat.slash.conversation import called
from goinfer_chat.slash.registry import Outcome
from goinfer_chat.terminal import Stream
from goinfer_chat.views import Views, recalled_panel

REPLY = "Text with **marks**\n\n```python\nx = 1\n\n\ty\n```\n\n~~~\nsecond\n~~~\n"


@pytest.fixture(autouse=True)
def _own_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def asked(text: str = REPLY) -> Agent:
    agent = Agent(ScriptedEngine([ScriptedTurn(pieces=[text], guesses=True)]), Settings())
    for _ in agent.ask(agent.asked("hi"), Event()):
        pass
    return agent


def run(agent: Agent, name: str, argument: str = "") -> Outcome:
    return COMMANDS.run(agent, CommandLine(name, argument))


def test_a_reply_is_copied_exactly_and_so_is_a_block_of_its_code() -> None:
    agent = asked()
    assert run(agent, "copy").copy == REPLY
    assert run(agent, "copy", "1").copy == "x = 1\n\n\ty\n"
    assert run(agent, "copy", "2").copy == "second\n"


def test_what_cannot_be_copied_is_said() -> None:
    with pytest.raises(UsageError, match=re.escape("there is no block of code 3 in the last reply; it has 2")):
        run(asked(), "copy", "3")
    with pytest.raises(UsageError, match="it has none"):
        run(asked("plain"), "copy", "1")
    with pytest.raises(UsageError, match="no reply"):
        run(Agent(ScriptedEngine([ScriptedTurn()]), Settings()), "copy")


def test_a_copy_may_go_to_a_file_which_is_never_replaced(tmp_path: Path) -> None:
    agent, file = asked(), tmp_path / "a file.py"
    assert run(agent, "copy", f"1 {file}").copy is None
    assert file.read_text() == "x = 1\n\n\ty\n"
    with pytest.raises(UsageError, match="already exists"):
        run(agent, "copy", str(file))
    assert file.read_text() == "x = 1\n\n\ty\n"


def test_the_terminal_is_asked_to_take_a_text_as_base64_and_no_more_than_it_can() -> None:
    sequence = osc52("a\x1b]é")
    assert sequence is not None
    assert base64.b64decode(sequence.removeprefix("\x1b]52;c;").removesuffix("\x07")).decode() == "a\x1b]é"
    assert osc52("x" * MAX_OSC_BYTES) is not None
    assert osc52("x" * (MAX_OSC_BYTES + 1)) is None


@pytest.mark.skipif(os.name == "nt", reason="the program is a shell script")
def test_a_program_of_the_desktop_is_used_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "xclip").write_text(f"#!/bin/sh\ncat > {tmp_path}/clipboard\n")
    (tmp_path / "xclip").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.defpath}", "DISPLAY": ":0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", environ["PATH"])
        assert copy_with_program("tëxt", environ) == "xclip"
    assert (tmp_path / "clipboard").read_text() == "tëxt"
    assert copy_with_program("text", environ | {"SSH_CONNECTION": "1"}) is None
    assert copy_with_program("text", {"PATH": environ["PATH"]}) is None


def test_stats_show_the_turns_of_this_conversation() -> None:
    agent = asked()
    for _ in agent.ask(agent.asked("again"), Event()):
        pass
    shown = run(agent, "stats").text
    assert "turns 1 to 2" in shown
    assert "replies    2 tokens in 2 turns" in shown
    with pytest.raises(UsageError, match="no figures yet"):
        run(Agent(ScriptedEngine([ScriptedTurn()]), Settings()), "stats")


def test_what_was_thought_before_the_last_reply_can_be_seen() -> None:
    agent = asked()
    with pytest.raises(UsageError, match="no thinking"):
        run(agent, "thinking")
    assert agent.live is not None
    draft = agent.live.reply_to([Message(role="user", content="why")], model=agent.model)
    with draft:
        draft.finish(Message(role="assistant", content="so", thinking="hm\nwell"))
    assert run(agent, "thinking").text == "hm\nwell"


def test_raw_is_turned_over_and_the_panel_is_set() -> None:
    agent = asked()
    assert run(agent, "raw").text == "raw on"
    assert run(agent, "raw").text == "raw off"
    assert run(agent, "raw", "on").text == "raw on"
    assert run(agent, "panel", "panel").text == "panel panel"
    with pytest.raises(UsageError, match="not one of: off, line, panel"):
        run(agent, "panel", "large")


def test_the_size_of_the_panel_is_remembered_when_it_was_changed_here() -> None:
    agent = asked()
    views = Views(agent, Stream(None), Stream(None), at_prompt=True)
    assert agent.settings.panel == "line"
    views.keep()
    assert recall("panel") is None
    run(agent, "panel", "off")
    views()
    assert recalled_panel() == "off"
    chosen = Agent(ScriptedEngine([ScriptedTurn()]), Settings(panel="panel"))
    Views(chosen, Stream(None), Stream(None), at_prompt=True).keep()
    assert chosen.settings.panel == "panel"
    assert recalled_panel() == "off"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_what_is_remembered_is_for_its_owner_alone() -> None:
    remember("panel", "off")
    [file] = Path(os.environ["XDG_DATA_HOME"]).rglob("remembered.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_row_below_the_prompt_leaves_out_what_has_no_room_and_marks_what_was_cut() -> None:
    agent = asked()

    def row(columns: int) -> str:
        return "".join(part[1] for part in toolbar(agent, columns))

    whole = row(300)
    keys, used, name = whole.split("| ")
    assert (used.endswith(" tokens "), name) == (True, called(agent))
    fits = len(f"{keys}| {used}")
    assert row(fits + MIN_COLUMNS - 1) == f"{keys}| {used}"
    assert row(fits + MIN_COLUMNS).endswith("…")
    assert row(len(keys) + MIN_COLUMNS - 1) == keys


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"panel": 3}', '{"panel": "huge"}', "[" * 100_000, "\udcff"])
def test_a_damaged_memory_is_no_memory(content: str) -> None:
    remember("panel", "off")
    [file] = Path(os.environ["XDG_DATA_HOME"]).rglob("remembered.json")
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert recalled_panel() == "line"
    remember("panel", "panel")
    assert recalled_panel() == "panel"


def test_where_nothing_can_be_written_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    remember("panel", "off")
    assert recall("panel") is None
