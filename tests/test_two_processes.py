"""Two processes and one conversation, with a real engine: what becomes of words and cache, and who is told what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

from goinfer_chat.store import Store

ROOT = Path(__file__).parent.parent
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    return write_tiny_model(path, "llama", metadata={"tokenizer.chat_template": TEMPLATE})


class Programs:
    """Runs of goinfer-chat on one folder."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self._command = [sys.executable, "-m", "goinfer_chat", "--model", str(model), "--threads", "1", "--json"]
        self._command += ["--temperature", "0", "--max-tokens", "6"]
        self._environ = os.environ | {"GOINFER_CHAT_SESSION_DIR": str(folder), "PYTHONWARNINGS": "error"}

    def run(self, *flags: str, said: list[str]) -> tuple[list[dict[str, object]], str]:
        """Its replies, and what it says beside them; it must end well."""
        text = "".join(f"{line}\n" for line in said)
        done = subprocess.run(
            [*self._command, *flags], input=text, capture_output=True, text=True, cwd=ROOT, env=self._environ
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    @contextmanager
    def running(self, *flags: str) -> Iterator[subprocess.Popen[str]]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [*self._command, *flags], stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=self._environ
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def questions(self, name: str) -> list[str]:
        with Store(self.folder) as store:
            path = store.path(store.find(name).id)
        return [stored.message.content for stored in path if stored.message.role == "user"]


@pytest.fixture
def programs(model: Path, folder: Path) -> Programs:
    return Programs(model, folder)


def test_of_two_that_send_five_messages_at_once_one_is_told_and_all_of_the_other_s_are_kept(programs: Programs) -> None:
    programs.run("--save", "work", said=["first"])
    with programs.running("--resume", "work") as one, programs.running("--resume", "work") as other:
        for process, name in ((one, "one"), (other, "other")):
            assert process.stdin is not None
            process.stdin.write("".join(f"{name} {number}\n" for number in range(5)))
            process.stdin.flush()
        # Whoever has the conversation keeps it as long as its input is open, so the other one cannot come later.
        until = time.monotonic() + 60
        while one.poll() is None and other.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.02)
        lost, kept, name = (one, other, "other") if one.poll() is not None else (other, one, "one")
        replies, said = kept.communicate(timeout=60)
        answer, told = lost.communicate()
    assert lost.returncode == 1
    told += json.loads(answer)["error"]["message"]
    assert f"conversation 'work' is open in another process (pid {kept.pid})" in told
    assert "Traceback" not in told + said
    assert (kept.returncode, len(replies.splitlines())) == (0, 5)
    assert programs.questions("work") == ["first", *(f"{name} {number}" for number in range(5))]
    context = json.loads(replies.splitlines()[-1])["context_used"]
    (last,), said = programs.run("--resume", "work", said=["and on"])
    assert f"resumed {context} of {context} tokens" in said
    assert last["prefill_reused_tokens"] == context


def test_of_two_that_begin_the_same_conversation_at_once_one_is_told(programs: Programs) -> None:
    with programs.running("--save", "work") as one, programs.running("--save", "work") as other:
        for process in (one, other):
            assert process.stdin is not None
            process.stdin.write("".join(f"{number}\n" for number in range(5)))
            process.stdin.flush()
        ended = [process.communicate(timeout=60) for process in (one, other)]
    codes = [one.returncode, other.returncode]
    assert sorted(codes) == [0, 2]
    assert "'work'" in json.loads(ended[codes.index(2)][0])["error"]["message"]
    assert programs.questions("work") == [str(number) for number in range(5)]


def test_after_kill_9_in_the_middle_of_a_save_a_start_works_and_has_every_turn_that_was_answered(
    programs: Programs,
) -> None:
    programs.run("--save", "work", said=["first"])
    answered = 1
    for number in range(2):
        (file,) = programs.folder.glob("*.giw-kv")
        before = file.stat().st_size
        with programs.running("--resume", "work") as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{number} {'x' * 100}\n" * 20)
            process.stdin.flush()
            for _ in range(number):
                assert process.stdout.readline()
            until = time.monotonic() + 60
            while not number and file.stat().st_size == before:  # then: as soon as the file grows
                assert time.monotonic() < until
            process.kill()
            rest, said = process.communicate()
        assert "Traceback" not in said
        answered += number + len(rest.splitlines())
        assert len(programs.questions("work")) >= answered  # one may be kept and not be printed yet
        (last,), said = programs.run("--resume", "work", said=["on"])
        assert "resumed " in said
        assert last["prefill_reused_tokens"]
        answered = len(programs.questions("work"))
