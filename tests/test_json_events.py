"""What --json prints is what its schema says: real output of the program, line by line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.api import TurnStats

PROGRAM = Path(__file__).parent / "scripted_program.py"
SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "events.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
THINKS = {"thinking": ["Let me ", "see."], "pieces": ["Hel", "lo"], "guesses": True, "notice": "a fallback"}
CALLS = {"calls": [{"name": "read_file", "arguments": {"path": "notes.txt"}}]}


def printed(folder: Path, turns: list[dict[str, Any]], *arguments: str, stdin: str = "hi\n") -> list[dict[str, Any]]:
    """The objects of a script, each valid under the schema."""
    script = folder / "turns.json"
    script.write_text(json.dumps({"turns": turns}), encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GOINFER_CHAT_")}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(script), "--json", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=folder,
        env=kept | {"PYTHONWARNINGS": "error"},
        timeout=30,
    )
    assert "Traceback" not in done.stderr
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    for shown in objects:
        VALIDATOR.validate(shown)
    return objects


def test_the_schema_is_one_and_names_every_figure() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    figures = {field.name for field in fields(TurnStats)}
    for name in ("turn", "reply", "progress"):
        assert figures <= set(SCHEMA["$defs"][name]["properties"])
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate({"event": "text", "text": "x", "more": 1})


def test_json_alone_is_one_object_a_turn(tmp_path: Path) -> None:
    [turn] = printed(tmp_path, [THINKS], "--ids")
    assert (turn["text"], turn["thinking"]) == ("Hello", "Let me see.")
    assert "event" not in turn


def test_events_are_told_as_they_happen_and_their_texts_make_the_reply(tmp_path: Path) -> None:
    objects = printed(tmp_path, [THINKS], "--events")
    kinds = [shown["event"] for shown in objects]
    assert kinds == ["notice", "prefill", "thinking", "thinking", "text", "progress", "text", "progress", "reply"]
    for kind, key in (("text", "text"), ("thinking", "thinking")):
        said = "".join(shown["text"] for shown in objects if shown["event"] == kind)
        assert said == objects[-1][key]


def test_a_turn_with_tools_is_told_call_by_call(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("noted")
    objects = printed(tmp_path, [CALLS, {"pieces": ["done"]}], "--tools", "on", "--events")
    kinds = [shown["event"] for shown in objects]
    assert kinds == ["prefill", "reply", "call", "result", "prefill", "text", "reply", "end"]
    [result] = [shown for shown in objects if shown["event"] == "result"]
    assert (result["status"], "noted" in result["text"]) == ("ok", True)


def test_errors_are_in_the_schema_too(tmp_path: Path) -> None:
    [error] = printed(tmp_path, [{"error": "context"}])
    assert error["error"]["prompt_tokens"] == 9000
    [error] = printed(tmp_path, [], "--no-such-flag")
    assert error["error"]["exit_code"] == 2


def test_thinking_is_kept_out_of_what_is_piped(tmp_path: Path) -> None:
    script = tmp_path / "turns.json"
    script.write_text(json.dumps({"turns": [THINKS]}), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(script), "run", "hi"], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "Hello\n"
    assert "see" not in done.stderr


@pytest.mark.parametrize("number", ["1e999", "NaN"])
def test_arguments_that_json_cannot_say_are_shown_as_their_text(tmp_path: Path, number: str) -> None:
    arguments = f'{{"path": {number}}}'
    turns = [{"calls": [{"name": "read_file", "arguments": arguments}]}, {"pieces": ["done"]}]
    shown = json.dumps(printed(tmp_path, turns, "--events", "--tools", "read_file"))
    assert json.dumps(arguments) in shown
    assert '"error":' not in shown
