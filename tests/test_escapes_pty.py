"""What others wrote, from wherever it comes, on a real pty: it is shown, and nothing of it is obeyed."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pty_terminal import Terminal

PROGRAM = Path(__file__).with_name("scripted_program.py")
ENTER, CTRL_C, CTRL_D, UP = "\r", "\x03", "\x04", "\x1b[A"
PASTE, PASTE_END = "\x1b[200~", "\x1b[201~"

EVIL = "\x1b]0;EVIL\x07\x1b[2J\x9b31m\u202eEVIL"
"""A title, a screen that is cleared, a colour begun by one character, text that runs backwards."""


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"calls": [{"name": name, "arguments": arguments}]}


TURNS: list[dict[str, Any]] = [
    {
        "thinking": [f"hm {EVIL}"],
        "pieces": [f"# {EVIL}\n\n[{EVIL}](http://x/{EVIL})\n\n| {EVIL} |\n|---|\n| {EVIL} |\n\n"],
    },
    {"pieces": [f"```{EVIL}\n{EVIL}\n```\n\n- {EVIL}\n\n> {EVIL}\n"], "notice": f"notice {EVIL}"},
    call("list_files"),
    call("read_file", path="evil.txt"),
    call("read_file", path=f"no {EVIL}"),
    call("search", pattern="EVIL"),
    call(f"none {EVIL}", **{EVIL: EVIL}),
    call("run_command", command=f"printf '%b' '\\033[2J' # {EVIL}"),
    {"pieces": ["All done."]},
]


@pytest.fixture
def terminal(tmp_path: Path) -> Any:
    """The program in a folder of evil files, with a conversation and a history somebody tampered with."""
    project, kept = tmp_path / "project", tmp_path / "kept"
    project.mkdir()
    (project / "evil.txt").write_text(f"one\n{EVIL}\n")
    (project / f"n{EVIL}.txt").write_text("x")
    script = tmp_path / "turns.json"
    script.write_text(json.dumps({"turns": TURNS, "name": f"Model {EVIL}", "notices": [f"model says {EVIL}"]}))
    program = [sys.executable, str(PROGRAM), str(script), "--session-dir", str(kept)]
    subprocess.run([*program, "run", "--save", "old", "question"], check=True, capture_output=True, cwd=project)
    [file] = kept.glob("*.db")
    with sqlite3.connect(file) as database:
        database.execute("UPDATE conversations SET name = ?, model_name = ?", (f"name {EVIL}", EVIL))
        database.execute("UPDATE messages SET content = content || ?", (f" words {EVIL}",))
    database.close()
    with (kept / "typed.jsonl").open("a") as typed:
        typed.write(json.dumps({"text": f"typed {EVIL}"}) + "\n")
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_DATA_HOME": str(tmp_path / "data")}
    command = [*program, "--tools", "on", "--yes", "--root", str(project), "--continue"]
    with Terminal(["/bin/sh", "-c", f'cd "{project}" && exec "$@"', "sh", *command], env=env, rows=40) as shown:
        yield shown


def assert_nothing_was_obeyed(terminal: Terminal) -> None:
    assert "\x1b]" not in terminal.raw
    assert "\x1b[2J" not in terminal.raw
    assert not set(terminal.raw) & {"\x9b", "\u202e", "\x07"}


def test_nothing_of_what_others_wrote_is_obeyed(terminal: Terminal) -> None:
    terminal.wait_for_prompt()
    terminal.send(UP)
    terminal.settle(0.2)
    terminal.send(CTRL_C)
    for line in ("go on", "look at @evil.txt", "tools"):
        terminal.wait_for_prompt()
        terminal.send(line + ENTER)
        terminal.settle(0.2)
    terminal.wait("All done.")
    for line in (
        "/sessions",
        "/search EVIL",
        "/resume",
        "/thinking",
        "/stats",
        "/params",
        "/approvals",
        "/raw",
        "/tools",
    ):
        terminal.wait_for_prompt()
        terminal.send(line + ENTER)
        terminal.settle(0.03)
    for name in (
        "model",
        "resume",
        "help",
        "set",
        "tools",
        "theme",
        "export",
        "copy",
        "attach",
        "delete",
        "rename",
        EVIL,
    ):
        terminal.wait_for_prompt()
        terminal.send(f"/{name} {PASTE}{EVIL}{PASTE_END}{ENTER}")
        terminal.settle(0.03)
    terminal.wait_for_prompt()
    assert_nothing_was_obeyed(terminal)
    assert terminal.text.count("EVIL") > 60
    terminal.send(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert_nothing_was_obeyed(terminal)
