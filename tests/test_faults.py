"""The real program where the system is short of everything, and where it is killed, stopped or not alone.

A tiny model answers; what it says makes no sense and is always the same.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

from goinfer_chat.store import Store

TESTS = Path(__file__).parent
ROOT = TESTS.parent
FLAGS = ["--temperature", "0", "--max-tokens", "12", "--ctx", "1024"]
Done = subprocess.CompletedProcess[str]
Limits = Mapping[int, int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "llama", context_size=2048)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GOINFER_CHAT_")}
    return kept | {"GOINFER_CHAT_SESSION_DIR": str(tmp_path / "sessions"), "PYTHONWARNINGS": "error"}


@pytest.fixture
def program(model: Path, environ: dict[str, str]) -> Callable[..., Done]:
    """`program(flag, ..., stdin="a\\nb\\n", limits={resource.RLIMIT_AS: ...})`: runs it to its end."""

    def run(*arguments: str, stdin: str = "hello\n", limits: Limits | None = None, **env: str) -> Done:
        def limit() -> None:
            for number, value in (limits or {}).items():
                resource.setrlimit(number, (value, value))

        return subprocess.run(
            [sys.executable, "-m", "goinfer_chat", "--model", str(model), *FLAGS, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environ | env,
            timeout=120,
            preexec_fn=limit,
        )

    return run


def assert_one_line(done: Done, *codes: int) -> None:
    """Ended by itself, with one line that says why."""
    assert done.returncode in codes, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: ")


# -- kills, stops ------------------------------------------------------------------------------------------------------


def kill_often(tmp_path: Path, times: int, seed: int = 0) -> None:
    command = [sys.executable, TESTS / "kill_anytime.py", tmp_path, "--times", str(times), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 20 * times)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{times} kills, ")
    assert "none lost" in done.stdout


def test_a_program_killed_at_any_moment_has_kept_what_it_said_was_saved(tmp_path: Path) -> None:
    kill_often(tmp_path, 2)


@pytest.mark.slow
def test_a_program_killed_very_often_has_kept_what_it_said_was_saved(tmp_path: Path) -> None:
    kill_often(tmp_path, 100, seed=time.time_ns() % 2**30)


def test_a_program_that_was_stopped_goes_on_where_it_was(model: Path, environ: dict[str, str]) -> None:
    def answers(stops: int) -> list[str]:
        command = [sys.executable, "-m", "goinfer_chat", "--model", str(model), *FLAGS, "--save", f"stopped {stops}"]
        process = subprocess.Popen(
            [*command, "--quiet"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("".join(f"question {number}\n" for number in range(12)))
            process.stdin.close()
            for _ in range(stops):
                time.sleep(0.15)
                process.send_signal(signal.SIGSTOP)
                time.sleep(0.1)
                process.send_signal(signal.SIGCONT)
            said = process.stdout.read().splitlines()
        assert process.returncode == 0
        return said

    assert answers(5) == answers(0)


# -- memory, open files, the clock -------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a limit on address space is not obeyed")
def test_a_limit_on_memory_ends_in_a_reply_or_in_one_line(program: Callable[..., Done]) -> None:
    replies = 0
    for megabytes in (300, 700, 2500):
        # A thread of OpenBLAS for each CPU would reserve addresses that nothing here uses.
        done = program("--quiet", limits={resource.RLIMIT_AS: megabytes * 10**6}, OPENBLAS_NUM_THREADS="1")
        replies += done.returncode == 0
        if done.returncode:
            assert_one_line(done, 1, 3)
    assert 0 < replies < 3


@pytest.mark.skipif(sys.platform != "linux", reason="fewer files than these stop Python itself elsewhere")
def test_few_open_files_end_in_a_reply_or_in_one_line(program: Callable[..., Done], tmp_path: Path) -> None:
    for files in (6, 12, 24):
        done = program("--quiet", "--save", f"with {files}", limits={resource.RLIMIT_NOFILE: files})
        if done.returncode:
            assert_one_line(done, 1, 3)
        else:
            with Store(tmp_path / "sessions") as store:
                assert len(store.path(store.find(f"with {files}").id)) == 2
    assert done.returncode == 0


def test_a_file_may_not_grow_and_the_words_that_were_saved_stay(program: Callable[..., Done], tmp_path: Path) -> None:
    """As a quota does it: the system refuses to make a file larger."""
    said = program("--save", "work", stdin="first\nsecond\n")
    assert said.returncode == 0
    for limit in (0, 60_000):
        done = program("--resume", "work", stdin="third\n", limits={resource.RLIMIT_FSIZE: limit})
        assert "Traceback" not in done.stderr
        assert done.returncode in (0, 1), done.stderr
        with Store(tmp_path / "sessions") as store:
            words = [stored.message.content for stored in store.path(store.find("work").id)]
        assert words[0::2][:2] == ["first", "second"]
        assert words[1::2][:2] == said.stdout.splitlines()[:2]
    assert program("--resume", "work", stdin="fourth\n").returncode == 0


@pytest.mark.parametrize("damage", ["empty", "cut to 60 %", "counts without end"])
def test_a_damaged_model_is_one_line_and_code_3(
    program: Callable[..., Done], model: Path, tmp_path: Path, damage: str
) -> None:
    raw = model.read_bytes()
    bad = tmp_path / "bad.gguf"
    endless = raw[:16] + b"\xff" * 8 + raw[24:]
    bad.write_bytes({"empty": b"", "cut to 60 %": raw[: len(raw) * 6 // 10]}.get(damage, endless))
    done = program("--model", str(bad))
    assert_one_line(done, 3)
    assert "bad.gguf" in done.stderr


CLOCK = """
import random, sys, time
real, rng, offset = time.time, random.Random(5), [0.0]
def earlier():
    offset[0] -= rng.choice([0, 0, 5, 3600, 86400 * 400])
    return max(1.0, real() + offset[0])
time.time, time.time_ns = earlier, lambda: int(earlier() * 1e9)
from goinfer_chat.cli import main
main()
"""


def test_a_clock_that_goes_backwards_changes_no_order(model: Path, environ: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLOCK, "--model", str(model), *FLAGS]
    for how in (["--save", "work"], ["--resume", "work"], ["--continue"]):
        questions = "".join(f"{how[0]} {number}\n" for number in range(4))
        done = subprocess.run(
            [*command, *how], input=questions, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=60
        )
        assert done.returncode == 0, done.stderr
    with Store(tmp_path / "sessions") as store:
        path = store.path(store.find("work").id)
    asked = [stored.message.content for stored in path[0::2]]
    assert asked == [f"{how} {number}" for how in ("--save", "--resume", "--continue") for number in range(4)]
    assert "resumed" in done.stderr


# -- disks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mounting(tmp_path: Path) -> Callable[..., Done]:
    """`mounting("mount ...; goinfer ...")`: a shell that may mount in a name space of its own."""
    unshare = shutil.which("unshare")
    namespace = [unshare or "unshare", "--user", "--map-root-user", "--mount"]
    if unshare is None or subprocess.run([*namespace, "mount", "-t", "tmpfs", "x", tmp_path], check=False).returncode:
        pytest.skip("this system lets nobody mount in a name space of their own")

    def run(script: str, env: Mapping[str, str]) -> Done:
        command = [*namespace, "sh", "-c", textwrap.dedent(script)]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)

    return run


LOOK = """
import pathlib, sys
from goinfer_chat.store import Store
with Store(pathlib.Path(sys.argv[1])) as store:
    print(len(store.path(store.find("work").id)))
"""


def test_a_full_disk_costs_nothing_that_was_saved(
    mounting: Callable[..., Done], environ: dict[str, str], model: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    chat = f'"{sys.executable}" -m goinfer_chat --model "{model}" {" ".join(FLAGS)} --quiet'
    done = mounting(
        f"""
        mount -t tmpfs -o size=600k none {disk}
        export GOINFER_CHAT_SESSION_DIR={disk}/s
        printf 'one\\ntwo\\n' | {chat} --save work > {tmp_path}/first || exit 9
        dd if=/dev/zero of={disk}/filling bs=4k 2> {tmp_path}/dd
        for n in 1 2; do printf 'more\\nand more\\n' | {chat} --resume work; echo "code $?"; done
        rm {disk}/filling
        printf 'last\\n' | {chat} --resume work || exit 8
        "{sys.executable}" -c '{LOOK}' {disk}/s
        """,
        environ,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert "code 1" in done.stdout
    for line in done.stderr.splitlines():
        assert "disk" in line or "space" in line or "saved" in line, line
    assert int(done.stdout.splitlines()[-1]) >= 6


@pytest.mark.parametrize("what", ["sessions", "home", pytest.param("caches too", marks=pytest.mark.slow)])
def test_what_cannot_be_written_costs_no_answer(
    mounting: Callable[..., Done], environ: dict[str, str], model: Path, tmp_path: Path, what: str
) -> None:
    home = tmp_path / "home"
    for folder in (".local/share", ".config", ".cache"):
        (home / folder).mkdir(parents=True)
    sessions = home / "sessions"
    sessions.mkdir(mode=0o700)
    chat = f'"{sys.executable}" -m goinfer_chat --model "{model}" {" ".join(FLAGS)} --quiet'
    place = sessions if what == "sessions" else home
    asks = "printf 'one\\ntwo\\n'"
    env = {name: value for name, value in environ.items() if not name.startswith("XDG_")} | {"HOME": str(home)}
    if what != "caches too":  # without them the kernels are compiled at every start
        env |= {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
    done = mounting(
        f"""
        export GOINFER_CHAT_SESSION_DIR={sessions}
        mount --bind {place} {place}
        mount -o remount,bind,ro {place}
        {asks} | {chat}; echo "asked $?"
        {asks} | {chat} --save work; echo "kept $?"
        """,
        env,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "asked 0" in done.stdout
    assert "kept 1" in done.stdout
    assert str(sessions) in done.stderr
    assert "read-only" in done.stderr.lower()


# -- not alone ---------------------------------------------------------------------------------------------------------


def test_several_programs_at_once_keep_everything_of_each(model: Path, environ: dict[str, str], tmp_path: Path) -> None:
    """Chats in one folder, while others list, search, export and rename there."""
    (tmp_path / "sessions").mkdir(mode=0o700)
    base = [sys.executable, "-m", "goinfer_chat"]
    chats = [
        subprocess.Popen(
            [*base, "--model", str(model), *FLAGS, "--save", f"chat {number}", "--json"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environ,
        )
        for number in range(3)
    ]
    for number, chat in enumerate(chats):
        assert chat.stdin is not None
        chat.stdin.write("".join(f"question {number}.{turn}\n" for turn in range(8)))
        chat.stdin.close()
        chat.stdin = None
    commands = (["list", "--json"], ["search", "question"], ["export", "chat 0"], ["rename", "chat 1", "renamed"])
    others = [
        subprocess.run([*base, "sessions", *command], capture_output=True, text=True, cwd=ROOT, env=environ)
        for command in commands
    ]
    for chat in chats:
        out, err = chat.communicate(timeout=60)
        assert chat.returncode == 0, err
        assert len([json.loads(line) for line in out.splitlines()]) == 8
    for other in others:
        assert "Traceback" not in other.stderr
        assert other.returncode in (0, 1, 2), other.stderr
    with Store(tmp_path / "sessions") as store:
        kept = [[stored.message.content for stored in store.path(found.id)] for found in store.recent()]
    assert sorted(words[0::2] for words in kept) == [[f"question {n}.{turn}" for turn in range(8)] for n in range(3)]
