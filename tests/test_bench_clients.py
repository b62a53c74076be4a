"""`bench clients`: what it counts, in which order it measures, and that it notices a reply that differs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

from engine import load
from engine.local import LocalEngine
from goinfer_chat.bench.clients import lines, measure


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "goinfer_chat", "bench", *arguments, "--quiet"]
    return subprocess.run(command, capture_output=True, text=True)


def measured(
    engine: LocalEngine, clients: int, repeat: int = 1, seen: list[str] | None = None
) -> list[dict[str, object]]:
    told: list[str] = [] if seen is None else seen
    rows = measure(
        engine, ("off", "ngram"), clients, max_tokens=5, repeat=repeat, progress=lambda text, share: told.append(text)
    )
    assert len(lines(rows)) == 5
    return [row.as_object() for row in rows]


def test_one_client_and_several_take_turns_and_say_the_same(tmp_path: Path) -> None:
    path, told = write_tiny_model(tmp_path / "tiny.gguf", "llama"), []
    with load(path, threads=1, context_size=512) as engine:
        rows = measured(engine, 4, 2, told)
    assert [(row["decode"], row["clients"]) for row in rows] == [("plain", 1), ("plain", 4), ("ngram", 1), ("ngram", 4)]
    assert [row["ratio"] is None for row in rows] == [True, False, True, False]
    assert all(row["same_replies"] for row in rows)
    assert [text.split(",")[:2] for text in told[:5]] == [
        ["plain", " 1 at once"],
        ["plain", " 4 at once"],
        ["ngram", " 1 at once"],
        ["ngram", " 4 at once"],
        ["plain", " 1 at once"],
    ]


def test_a_reply_that_differs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", "llama")
    with load(path, threads=1, context_size=512) as engine:
        generate, asked = engine.generate, count(1)
        # The first 8 are the requests of one client, decoding plainly.
        shorter = lambda request: replace(request, max_tokens=4) if next(asked) == 9 else request  # noqa: E731
        monkeypatch.setattr(engine, "generate", lambda request: generate(shorter(request)))
        assert not all(row["same_replies"] for row in measured(engine, 4))


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", "llama")
    arguments = ["clients", "--model", str(path), "--clients", "2", "--repeat", "1", "--max-tokens", "3"]
    assert "of one client" in bench(*arguments, "--threads", "1", "--ctx", "512").stdout
    result = json.loads(bench(*arguments, "--threads", "1", "--ctx", "512", "--json").stdout)
    assert [way["clients"] for way in result["ways"]] == [1, 2]


@pytest.mark.parametrize("clients", ["0", "1", "33"])
def test_a_number_of_clients_that_cannot_be_is_refused(clients: str) -> None:
    done = bench("clients", "--clients", clients)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: clients must be between 2 and 32")
