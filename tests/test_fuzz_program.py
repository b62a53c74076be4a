"""Whatever a script, a slash command, a reply, a settings file or an export holds: an error of ours at most.

Each test tries a few dozen cases that are the same in every run; `-m slow` tries many more, drawn anew.
"""

from __future__ import annotations

import io
import json
import threading
import time
import tomllib
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, ScriptedTurn
from test_fuzz_engine import JSON, SECONDS, few, many

from engine.errors import MAX_MESSAGE, GoinferError
from goinfer_chat.agent import Agent
from goinfer_chat.conversations import Conversations
from goinfer_chat.engines import Engines
from goinfer_chat.script import CommandLine, Item, Turn, read_script
from goinfer_chat.settings import Settings
from goinfer_chat.settings_file import read_servers, read_settings_file, save_settings, template
from goinfer_chat.slash.commands import COMMANDS
from goinfer_chat.store.exports import from_json
from goinfer_chat.terminal import Stream
from goinfer_chat.view.cells import line_width, plain
from goinfer_chat.view.markdown_stream import MarkdownStream
from goinfer_chat.view.render import report_error

SHORT = [
    "",
    "0",
    "1",
    "-1",
    "1e999",
    "nan",
    "none",
    "on",
    "off",
    "auto",
    "all",
    "..",
    "/",
    "a.txt",
    "no/such/x",
    "work",
]
NAMES = [
    "a.txt#1-2",
    "a.txt#9-1",
    "read_file",
    "read_file x",
    "hello",
    "2 out.txt",
    "json out.json",
    "{",
    "\x00",
    "\ud800",
]
LONG = ["9" * 5000, "a.txt#" + "9" * 30, '{"type":"object"}', "[" * 20_000, "\x1b]0;x\x07", "e\u0301" * 300, "x" * 300]
TEXTS = st.text(max_size=8) | st.sampled_from([*SHORT, *NAMES, *LONG])


def assert_one_line(error: GoinferError) -> None:
    """As a person sees it."""
    out = io.StringIO()
    report_error(error, Stream(out))
    assert len(out.getvalue()) <= MAX_MESSAGE + 20
    assert out.getvalue()[-1] == "\n"
    assert [character for character in out.getvalue()[:-1] if unicodedata.category(character) == "Cc"] == []


# -- scripts and slash commands ----------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, whose surroundings nobody touches."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("one\ntwo\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("GOINFER_CHAT_MODELS", str(folder / "models"))
    return folder


@pytest.fixture
def agent(place: Path) -> Iterator[Agent]:
    """A kept conversation with a model that says one word; there is no other model."""

    def find(settings: Settings) -> None:
        raise GoinferError(f"there is no model {settings.model}")

    settings = Settings(session_dir=str(place / "sessions"), save="work")
    with ExitStack() as stack:
        conversations = stack.enter_context(Conversations.start(settings, at_prompt=False))
        engines = Engines(lambda _: ScriptedEngine([ScriptedTurn(pieces=["word"])]), find, settings)
        agent = Agent(engines.current, settings, conversations, engines)
        stack.callback(agent.close)
        yield agent


def play(agent: Agent, item: Item) -> None:
    """A turn or a command, as a script has it."""
    try:
        ask = agent.asked(item.text) if isinstance(item, Turn) else None
        if isinstance(item, CommandLine):
            COMMANDS.foresee(agent, item)
            outcome = COMMANDS.run(agent, item)
            outcome.shown(100)
            ask = outcome.ask
        if ask is not None:
            for _ in agent.ask(ask, threading.Event()):
                pass
    except GoinferError as error:
        assert_one_line(error)


COMMAND = st.sampled_from([command.name for command in COMMANDS.commands if command.name != "quit"])
LINES = st.lists(st.tuples(COMMAND, TEXTS | st.tuples(TEXTS, TEXTS).map(" ".join)), min_size=1, max_size=6)


def check_commands(agent: Agent, place: Path, lines: list[tuple[str, str]]) -> None:
    started = time.monotonic()
    for name, argument in lines:
        play(agent, CommandLine(name, argument.strip()))
        COMMANDS.completions(agent, f"/{name} {argument}")
    play(agent, Turn("after it"))
    assert agent.live is not None
    assert [path.name for path in place.parent.iterdir()] == ["work"]
    assert time.monotonic() - started < SECONDS


@pytest.mark.parametrize("command", [command.name for command in COMMANDS.commands if command.name != "quit"])
def test_no_odd_argument_is_more_than_one_line(agent: Agent, place: Path, command: str) -> None:
    odd = [*SHORT, *NAMES, *LONG]
    check_commands(agent, place, [(command, argument) for argument in [*odd, *(f"1 {text}" for text in odd)]])


@few(40)
@given(lines=LINES)
def test_any_slash_commands_end_in_an_answer_or_one_line(
    agent: Agent, place: Path, lines: list[tuple[str, str]]
) -> None:
    check_commands(agent, place, lines)


@pytest.mark.slow
@many(3000)
@given(lines=LINES)
def test_many_slash_commands_end_in_an_answer_or_one_line(
    agent: Agent, place: Path, lines: list[tuple[str, str]]
) -> None:
    check_commands(agent, place, lines)


SCRIPTS = st.lists(
    st.binary(max_size=12)
    | st.sampled_from(
        [b'"""\n', b'""""\n', b"/undo\n", b"/help\n", b"//x\n", b"\n", b"\r\n", b"\xef\xbb\xbf", b"\x00\n", b"/"]
    )
    | st.tuples(COMMAND, TEXTS).map(lambda parts: f"/{parts[0]} {parts[1]}\n".encode("utf-8", "surrogatepass")),
    max_size=12,
).map(b"".join)


def check_script(agent: Agent, script: bytes) -> None:
    try:
        for item in read_script(io.BytesIO(script)):
            if not (isinstance(item, CommandLine) and item.name in ("quit", "exit")):
                play(agent, item)
    except GoinferError as error:
        assert_one_line(error)


@few(40)
@given(script=SCRIPTS)
def test_a_script_of_any_bytes_ends_in_an_answer_or_one_line(agent: Agent, script: bytes) -> None:
    check_script(agent, script)


@pytest.mark.slow
@many(3000)
@given(script=SCRIPTS)
def test_scripts_of_many_kinds_end_in_an_answer_or_one_line(agent: Agent, script: bytes) -> None:
    check_script(agent, script)


# -- replies as Markdown -----------------------------------------------------------------------------------------------

MARKS = [
    *"*_`~#>|-+=!()[]<>\\&:;$^\"'.\n\t ",
    "\n\n",
    "```",
    "~~~",
    "|--|",
    "1.",
    "- ",
    "> ",
    "![",
    "](",
    "</b>",
    "&amp;",
]
REPLIES = st.lists(
    st.sampled_from(MARKS)
    | st.text(max_size=4)
    | st.sampled_from(["日本", "👩‍🚀", "e\u0301", "\r", "\u202e", "\x1b[2J", "\x9b31m", "\u2028"]),
    max_size=40,
)


def check_markdown(pieces: list[str], columns: int) -> None:
    stream = MarkdownStream()
    rows = []
    for piece in pieces:
        stream.push(piece)
        rows += stream.take(columns)
        live = stream.live(columns)
        rows += live
        # A smaller screen has no live rows; final rows of code are the terminal's to break.
        assert columns < 8 or all(line_width(row) <= columns for row in live)
    rows += stream.finish(columns)
    for row in rows:
        text = plain(row)
        assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in text), repr(text)


@example(pieces=["</b>", "\n", "0\t"], columns=8)
@example(pieces=["\r", "\r0"], columns=20)
@few(100)
@given(pieces=REPLIES, columns=st.sampled_from([1, 2, 5, 8, 20, 80]))
def test_a_reply_of_any_text_fits_the_screen_and_steers_nothing(pieces: list[str], columns: int) -> None:
    check_markdown(pieces, columns)


@pytest.mark.slow
@many(5000)
@given(pieces=REPLIES, columns=st.integers(1, 100))
def test_replies_of_many_kinds_fit_the_screen_and_steer_nothing(pieces: list[str], columns: int) -> None:
    check_markdown(pieces, columns)


@pytest.mark.parametrize(
    "mark", [*MARKS, "[a](", "**a ", "_a_", "| a ", "- a\n", "> ", ">", "<a", "`a", "[]: ", "a\\\n", "\n> -"]
)
def test_no_mark_however_often_takes_for_ever(mark: str) -> None:
    started = time.monotonic()
    stream = MarkdownStream()
    for start in range(0, 2000, 400):
        stream.push((mark * 2000)[start : start + 400])
        stream.take(60)
        stream.live(60)
    stream.finish(60)
    assert time.monotonic() - started < SECONDS


# -- settings files and exports ----------------------------------------------------------------------------------------

TABLES = ["[profile.x]", "[mcp.a]", "[[profile]]", "[profile]", "[", "x = {a = 1", "a.b.c = 1", "mcp = 1"]
KEYS = ["command = ['x']", "temperature = 0.5", "temperature = 'hot'", "model = 'm'", "top-k = 1", "stop = ['a', 1]"]
WRONG = [
    "ctx = 99999999999999999999",
    "temperature = nan",
    "seed = -1",
    "model = '''",
    "'''",
    "= 1",
    "seed = 1979-05-27",
]
TOML_LINES = st.sampled_from([*TABLES, *KEYS, *WRONG]) | st.text(max_size=10)
TOMLS = st.lists(TOML_LINES, max_size=8).map("\n".join).map(
    lambda text: text.encode("utf-8", "surrogatepass")
) | st.binary(max_size=20)


def check_settings(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    for profile in (None, "x"):
        try:
            read_settings_file(str(path), profile)
            read_servers(str(path))
        except GoinferError as error:
            assert_one_line(error)
    try:
        save_settings(path, {"temperature": 0.25})
    except GoinferError as error:
        assert_one_line(error)
        assert path.read_bytes() == data
    else:
        assert tomllib.loads(path.read_text(encoding="utf-8"))["temperature"] == 0.25


@few(100)
@given(data=TOMLS)
def test_a_settings_file_of_any_bytes_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    check_settings(tmp_path / "settings.toml", data)


@pytest.mark.slow
@many(5000)
@given(data=TOMLS)
def test_settings_files_of_many_kinds_are_read_or_refused(tmp_path: Path, data: bytes) -> None:
    check_settings(tmp_path / "settings.toml", template().encode() + b"\n" + data)
    check_settings(tmp_path / "settings.toml", data)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b"a" * 100_000,
        b"[a" + b".a" * 20_000 + b"]",
        b"a = " + b"{b = " * 5000,
        b"ctx = " + b"9" * 9999,
        b"ctx = 0x" + b"f" * 9999,
    ],
)
def test_a_settings_file_of_any_depth_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    check_settings(tmp_path / "settings.toml", data)


EXPORT = st.fixed_dictionaries(
    {"format": st.just("goinfer-chat conversation") | JSON, "version": st.sampled_from([1, 2, 0, -1]) | JSON},
    optional={
        "messages": JSON
        | st.lists(
            st.fixed_dictionaries(
                {"id": st.integers(-1, 3) | JSON, "role": st.sampled_from(["user", "assistant", "tool", "x"]) | JSON},
                optional=dict.fromkeys(
                    ("parent", "created", "content", "thinking", "ids", "tool_calls", "stats", "model", "name"), JSON
                ),
            ),
            max_size=4,
        ),
        **dict.fromkeys(("name", "created", "updated", "model", "system", "settings", "head"), JSON),
    },
).map(lambda value: json.dumps(value).encode())


@few(100)
@given(data=EXPORT | st.binary(max_size=30))
def test_an_import_of_any_file_is_taken_in_or_refused(data: bytes) -> None:
    try:
        from_json(data)
    except GoinferError as error:
        assert_one_line(error)


@pytest.mark.parametrize(
    "data", [b"[" * 200_000, b'{"a":' * 200_000, b"9" * 10_000, b'{"format": ' + b"9" * 10_000 + b"}"]
)
def test_an_import_of_any_depth_is_refused(data: bytes) -> None:
    with pytest.raises(GoinferError) as caught:
        from_json(data)
    assert_one_line(caught.value)
