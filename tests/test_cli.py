"""The program from outside: streams, exit codes, flags, scripts, closed and broken pipes, poor locales.

The engine is scripted: what a model says is not the point here.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny_model

from engine.arch import ARCHITECTURES
from engine.errors import OutOfMemoryError
from engine.kernels.formats import FORMATS
from goinfer_chat.loading import load_engine
from goinfer_chat.models.supported import as_markdown, as_text
from goinfer_chat.settings import SETTINGS, Settings
from goinfer_chat.terminal import Stream

PROGRAM = Path(__file__).parent / "scripted_program.py"
ASCII_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """`program(turns, *arguments, stdin=b"")`: runs it to its end, standard streams in pipes."""

    def run(
        turns: Sequence[dict[str, Any]], *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            command(tmp_path, turns, *arguments), input=stdin, capture_output=True, env=environment(env), timeout=30
        )

    return run


def command(
    tmp_path: Path, turns: Sequence[dict[str, Any]], *arguments: str | bytes, log: Path | None = None
) -> list[str | bytes]:
    """`log`: gets a line when the engine is asked."""
    script = tmp_path / "turns.json"
    script.write_text(json.dumps({"turns": turns} | ({"log": str(log)} if log else {})), encoding="utf-8")
    return [sys.executable, str(PROGRAM), str(script), *arguments]


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GOINFER_CHAT_")}
    return kept | {"PYTHONWARNINGS": "error"} | (more or {})


HELLO = [{"pieces": ["Hel", "lo"]}]


# Streams


def test_a_question_puts_only_the_reply_on_standard_output(program) -> None:
    done = program(HELLO, "run", "hi")
    assert (done.returncode, done.stdout) == (0, b"Hello\n")
    assert done.stderr.decode().startswith("prompt 3 (0 reused, 3 prefilled) | TTFT ")


def test_nothing_that_is_piped_holds_a_control_sequence(program) -> None:
    turns = [
        {"pieces": ["\x1b[31mred\x1b[0m\x07", "\x9b2J \r\nend\b"], "prefill_chunks": 8, "chunk_delay": 0.1},
        {"notice": "\x1b]0;title\x07", "pieces": ["ok"]},
    ]
    done = program(turns, stdin=b"one\ntwo\n/params\n", env={"TERM": "xterm-256color", "FORCE_COLOR": "1"})
    assert done.stdout.decode() == "[31mred[0m2J \nend\nok\n"
    assert not set((done.stdout + done.stderr).decode()) & set("\x1b\x07\x08\r\x9b")


def test_the_turns_of_a_script_are_one_conversation(program) -> None:
    turns = [{"pieces": ["first"]}, {"pieces": ["second"]}, {"pieces": ["third\n"]}]
    done = program(turns, stdin=b'a b c\n\n"""\nd\ne\n"""\n/top-k 3\nf\n')
    assert (done.returncode, done.stdout) == (0, b"first\nsecond\nthird\n")
    assert [line.split(" |")[0] for line in done.stderr.decode().splitlines()] == [
        "prompt 5 (0 reused, 5 prefilled)",
        "prompt 12 (6 reused, 6 prefilled)",
        "top-k 3",
        "prompt 18 (13 reused, 5 prefilled)",
    ]


def test_run_without_a_question_reads_the_script_too_and_a_dash_reads_all_as_one_question(program) -> None:
    turns = [{"pieces": ["first"]}, {"pieces": ["second"]}]
    assert program(turns, "run", stdin=b"a\nb\n").stdout == b"first\nsecond\n"
    assert program(turns, "run", "-", stdin=b"a\n/b\n").stdout == b"first\n"
    assert program(turns, "run", "/reset is a command, what is /reset?").stdout == b"first\n"


def test_quit_ends_a_script(program) -> None:
    done = program(HELLO, stdin=b"a\n/quit\nb\n")
    assert (done.returncode, done.stdout) == (0, b"Hello\n")


def test_a_turn_is_answered_while_the_script_is_still_being_written(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, HELLO, "--quiet"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    )
    with process:
        for _ in range(2):
            process.stdin.write(b"hi\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"Hello\n"
        process.stdin.close()
        assert process.wait(5) == 0


def test_quiet_leaves_standard_error_empty(program) -> None:
    done = program([{"notice": "a fallback", "pieces": ["ok"]}], "--quiet", stdin=b"/params\nhi\n")
    assert (done.stdout, done.stderr) == (b"ok\n", b"")


@pytest.mark.parametrize("arguments", [("run", "hi"), ("run", "--json", "hi"), ()])
def test_what_loading_had_to_change_is_said_before_the_first_turn(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    invocation = command(tmp_path, HELLO, *arguments)
    (tmp_path / "turns.json").write_text(json.dumps({"turns": HELLO, "notices": ["a fallback", "less context"]}))
    done = subprocess.run(invocation, input=b"hi\n", capture_output=True, env=environment(), timeout=30)
    assert done.stderr.splitlines()[:2] == [b"a fallback", b"less context"]
    assert b"fallback" not in done.stdout


# JSON


def test_json_gives_one_object_a_turn(program) -> None:
    turns = [{"pieces": ["first"]}, {"pieces": ["sec", "ond"]}]
    done = program(turns, "--json", "--ids", "--max-tokens", "1", stdin=b"a\n/params\nb\n")
    first, second = [json.loads(line) for line in done.stdout.splitlines()]
    assert (first["text"], first["finish_reason"]) == ("first", "stop")
    assert (second["text"], second["finish_reason"], second["reply_ids"]) == ("sec", "length", [0])
    assert (second["prompt_tokens"], second["prefill_reused_tokens"]) == (len(second["prompt_ids"]), 4)
    assert first["acceptance"] is None


def test_a_question_that_is_too_long_is_not_answered_with_what_only_a_chat_can_do(program) -> None:
    done = program([{"error": "context"}], "run", "a")
    said = "error: the prompt has 9,000 tokens, which is 809 more than fit into the context of 8,192 (one is kept for "
    assert done.stderr.decode() == said + "the reply); shorten it, or start with a larger --ctx\n"
    assert done.returncode == 4


def test_json_makes_an_error_an_object_and_keeps_the_exit_code(program) -> None:
    done = program([*HELLO, {"error": "context"}], "--json", "--quiet", stdin=b"a\nb\nc\n")
    first, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert first["text"] == "Hello"
    assert (last["error"]["type"], last["error"]["prompt_tokens"]) == ("ContextExceededError", 9000)
    assert (done.returncode, done.stderr) == (4, b"")


@pytest.mark.parametrize("arguments", [["--json", "--no-such-flag"], ["--json", "--top-p", "9"], ["--json", "run", ""]])
def test_json_makes_wrong_usage_an_object_too(program, arguments: list[str]) -> None:
    done = program(HELLO, *arguments)
    assert json.loads(done.stdout)["error"]["exit_code"] == done.returncode == 2


# Exit codes


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("context", 4, "error: the prompt has 9,000 tokens"),
        ("template", 1, "error: the template of this model says: roles must alternate"),
        ("engine", 1, "error: the engine cannot go on"),
        ("bug", 1, "error: unexpected ZeroDivisionError: a bug (GOINFER_CHAT_DEBUG=1 shows where)"),
    ],
)
def test_the_first_turn_that_fails_ends_the_script_with_one_line(program, error: str, code: int, message: str) -> None:
    done = program([*HELLO, {"error": error}], "--quiet", stdin=b"a\nb\nc\n")
    assert (done.returncode, done.stdout) == (code, b"Hello\n")
    assert done.stderr.decode().startswith(message)
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-flag"],
        ["no-such-command"],
        ["run", "a", "b"],
        ["run", " "],
        ["--temperature", "hot", "run", "a"],
        ["run", "a", "--temperature", "-1"],
        ["run", "a", "--ctx", "0"],
        ["run", "a", "--stop", ""],
        ["run", "a", "--backend", "abacus"],
        ["run", "a", "--ids"],
        ["--seed", "1", "models"],
        ["check", "--perplexity", "no-such-file"],
    ],
)
def test_wrong_usage_is_one_line_and_code_2(program, arguments: list[str]) -> None:
    done = program(HELLO, *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: ")
    assert done.stderr.count(b"\n") == 1


def test_a_wrong_command_in_a_script_is_wrong_usage(program) -> None:
    done = program(HELLO, "--quiet", stdin=b"/temprature 1\na\n")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"did you mean /temperature" in done.stderr


def test_a_block_left_open_is_wrong_usage(program) -> None:
    done = program(HELLO, "--quiet", stdin=b'a\n"""\nb\n')
    assert (done.returncode, done.stdout) == (2, b"Hello\n")
    assert b"line 3" in done.stderr


def test_a_model_that_is_not_there_is_code_3(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "goinfer_chat", "run", "hi", "--model", "no-such-model"],
        capture_output=True,
        env=environment({"HOME": str(tmp_path)}),
    )
    assert (done.returncode, done.stdout) == (3, b"")
    assert b"no-such-model" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_interrupted_is_code_130_and_what_was_said_is_there(tmp_path: Path) -> None:
    turns = [{"pieces": ["word "] * 400, "delay": 0.05}]
    for flags, shown in (([], b"word "), (["--json"], b'"finish_reason": "cancelled"')):
        log = tmp_path / f"asked{len(flags)}"
        process = subprocess.Popen(
            command(tmp_path, turns, "run", "go on", *flags, log=log),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        with process:
            begun = _when_begun(process, log, read=not flags)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=10)
        assert process.returncode == 130
        assert shown in begun + output
        # Twenty seconds of words: it does not go on for one, but a busy machine may let a second pass.
        assert (begun + output).count(b"word ") < 80
        assert b"Traceback" not in errors


def _when_begun(process: subprocess.Popen[bytes], log: Path, *, read: bool) -> bytes:
    """Waits until the engine is asked and, where the reply comes piece by piece, for the first: what came of it."""
    while not log.exists():
        assert process.poll() is None
        time.sleep(0.01)
    return os.read(process.stdout.fileno(), 100) if read else b""


# Pipes that end


def test_no_input_ends_at_once_with_code_0_and_no_model_loaded(tmp_path: Path) -> None:
    for stdin in (subprocess.DEVNULL, None):
        used = _seconds_of_children()
        # The program's own engine: were it asked for, this would fail for want of a model.
        done = subprocess.run(
            ["/bin/sh", "-c", '"$0" -m goinfer_chat --model no-such-model 0<&-', sys.executable]
            if stdin is None
            else [sys.executable, "-m", "goinfer_chat", "--model", "no-such-model"],
            stdin=stdin,
            capture_output=True,
            env=environment(),
            timeout=30,
        )
        assert _seconds_of_children() - used < 1.0
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_ends_the_program_without_a_word(tmp_path: Path, unbuffered: str) -> None:
    turns = [{"pieces": [f"{number}\n" for number in range(4000)], "delay": 0.01}]
    process = subprocess.Popen(
        command(tmp_path, turns, "run", "count"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment({"PYTHONUNBUFFERED": unbuffered}),
    )
    with process:
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        closed = time.monotonic()
        assert process.stderr.read() == b""
        assert process.wait(10) == 141
        assert time.monotonic() - closed < 10  # of 40 seconds


@pytest.mark.skipif(os.name == "nt", reason="needs `head`")
@pytest.mark.parametrize("flags", [("run", "count"), ("--json", "--events"), ("--raw",)])
def test_a_conversation_keeps_what_was_said_before_its_reader_went_away(tmp_path: Path, flags: tuple[str, ...]) -> None:
    turns = [{"pieces": [f"{number}\n" for number in range(2000)], "delay": 0.01}, *HELLO]
    kept = ["--session-dir", str(tmp_path / "kept")]
    line = 'said=$1; shift; printf "$said" | { "$@"; echo "code $?" >&2; } | head -c 5 >/dev/null'
    said = "" if "run" in flags else "count\nand again\n"
    whole = command(tmp_path, turns, *flags, *kept, "--save", "cut", "--quiet")
    done = subprocess.run(["/bin/sh", "-c", line, "sh", said, *whole], capture_output=True, env=environment())
    assert done.stderr == b"code 141\n"
    shown = subprocess.run(
        command(tmp_path, turns, "sessions", "show", "cut", "--json", *kept), capture_output=True, env=environment()
    )
    question, reply = map(json.loads, shown.stdout.splitlines())
    assert (question["content"], reply["finish_reason"]) == ("count", "cancelled")
    assert reply["content"].startswith("0\n")


def test_a_help_text_nobody_reads_is_no_error(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command(tmp_path, HELLO, "--help"), stdout=write, stderr=subprocess.PIPE, env=environment())
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line_and_code_1(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command(tmp_path, HELLO, "run", "hi"), stdout=full, stderr=subprocess.PIPE, env=environment()
        )
    assert done.returncode == 1
    assert done.stderr == b"error: the output cannot be written: No space left on device\n"


def test_standard_output_that_is_closed_is_an_error(tmp_path: Path) -> None:
    shell = ["/bin/sh", "-c", '"$@" >&-', "sh", *command(tmp_path, HELLO, "run", "hi")]
    done = subprocess.run(shell, capture_output=True, env=environment())
    assert done.returncode == 1
    assert done.stderr == b"error: standard output is closed, so a reply has nowhere to go\n"


def test_standard_error_that_is_closed_does_no_harm(tmp_path: Path) -> None:
    shell = ["/bin/sh", "-c", '"$@" 2>&-', "sh", *command(tmp_path, HELLO, "run", "hi")]
    done = subprocess.run(shell, capture_output=True, env=environment())
    assert (done.returncode, done.stdout) == (0, b"Hello\n")


# Locales


def test_an_ascii_locale_replaces_what_it_cannot_write(tmp_path: Path) -> None:
    turns = [{"pieces": ["caf\u00e9 \U0001f600"], "notice": "\u2554 box \u2557"}]
    done = subprocess.run(
        command(tmp_path, turns, "run", b"caf\xc3\xa9 \xff", "--stop", b"\xc3\xa9"),
        capture_output=True,
        env=environment(ASCII_LOCALE),
    )
    assert (done.returncode, done.stdout) == (0, b"caf? ?\n")
    assert b"? box ?" in done.stderr


def test_an_ascii_locale_gets_the_true_text_as_json(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, [{"pieces": ["caf\u00e9 \U0001f600"]}], "run", "hi", "--json"),
        capture_output=True,
        env=environment(ASCII_LOCALE),
    )
    assert json.loads(done.stdout)["text"] == "caf\u00e9 \U0001f600"


def test_bytes_that_are_no_utf8_are_answered_too(program) -> None:
    done = program(HELLO, "--quiet", stdin=bytes(range(0x80, 0x100)) + b"\n", env=ASCII_LOCALE)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello\n", b"")


# Flags and variables


def test_flags_before_and_after_the_name_of_a_command_both_count(program) -> None:
    turns = [{"pieces": ["a", "b", "c"]}]
    assert program(turns, "--max-tokens", "1", "--quiet", "run", "go").stdout == b"a\n"
    assert program(turns, "--max-tokens", "1", "--quiet", "run", "go", "--max-tokens", "2").stdout == b"ab\n"
    assert program(turns, "chat", "--max-tokens", "1", stdin=b"go\n").stdout == b"a\n"
    done = program(turns, stdin=b"go\n", env={"GOINFER_CHAT_MAX_TOKENS": "1", "GOINFER_CHAT_QUIET": "on"})
    assert (done.stdout, done.stderr) == (b"a\n", b"")


def test_a_mistyped_variable_is_told_once_with_the_one_that_was_meant(program) -> None:
    mistyped = {"GOINFER_CHAT_TOPK": "3", "GOINFER_CHAT_XYZ": "1", "GOINFER_CHAT_NOTHING": ""}
    done = program(HELLO, "run", "hi", env=mistyped)
    assert (done.returncode, done.stdout) == (0, b"Hello\n")
    assert [line for line in done.stderr.decode().splitlines() if "GOINFER" in line] == [
        "the variable GOINFER_CHAT_TOPK sets nothing; did you mean GOINFER_CHAT_TOP_K?",
        "the variable GOINFER_CHAT_XYZ sets nothing",
    ]
    assert program(HELLO, "run", "--quiet", "hi", env=mistyped).stderr == b""


def test_stop_can_be_given_several_times(program) -> None:
    turns = [{"pieces": ["a", "b", "c", "d"]}]
    assert program(turns, "run", "hi", "--quiet", "--stop", "x", "--stop", "c").stdout == b"ab\n"
    assert program(turns, "run", "hi", "--quiet", "--stop", '["b", "c"]').stdout == b"a\n"


# Models


def test_models_supported_lists_every_architecture_and_tensor_type(program) -> None:
    done = program(HELLO, "models", "--supported")
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0
    assert [line.split()[0] for line in lines[1 : 1 + len(ARCHITECTURES)]] == list(ARCHITECTURES)
    assert next(line for line in lines if line.startswith("gemma2")).endswith("soft caps, scaled embeddings")
    types = next(line for line in lines if line.startswith("tensor types")).split()[2:]
    assert set(types) == {kind.name for kind in FORMATS}


def test_models_supported_has_all_of_the_matrix_on_a_narrow_terminal_too() -> None:
    found = as_text(60)
    rows = found.partition("\n\n")[0].splitlines()
    assert max(map(len, rows)) <= 60
    assert rows[0] == "all: reuse yes, speculation yes, tools template, thinking"
    assert [row.split(":")[0] for row in rows if not row.startswith((" ", "all:"))] == list(ARCHITECTURES)
    words = " ".join(" ".join(rows).split())
    for spec in ARCHITECTURES.values():
        assert f"{spec.name}: {spec.models} checkpoints {'yes' if spec.is_recurrent else 'not needed'}; " in words
        assert ", ".join(spec.traits) in words
    assert as_text(1000) == as_text()


def test_models_supported_as_json_has_the_same_matrix(program) -> None:
    found = json.loads(program(HELLO, "models", "--supported", "--json").stdout)
    assert [row["name"] for row in found["architectures"]] == list(ARCHITECTURES)
    assert all(row["reuse"] and row["speculation"] and row["models"] for row in found["architectures"])
    assert set(found["tensor_types"]) == {kind.name for kind in FORMATS}
    assert found["kv_types"] == ["f16", "q8_0", "f32"]
    refused = program(HELLO, "models", "--json")
    assert refused.returncode == 2
    assert b"models --json needs --supported" in refused.stdout + refused.stderr


def test_the_page_of_architectures_is_what_the_program_writes() -> None:
    page = Path(__file__).parents[1] / "docs" / "architectures.md"
    assert page.read_text() == as_markdown(), "write it anew: python -m goinfer_chat.models.supported"


def test_models_lists_the_catalogue_and_where_each_is(program, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.gguf").write_bytes(b"GGUF")
    lines = program(HELLO, "models", env={"GOINFER_CHAT_MODELS": str(tmp_path / "models")}).stdout.decode().splitlines()
    assert lines[0].split() == ["name", "size", "where", "licence", "what", "it", "is"]
    assert lines[1].startswith("smollm2-135m        98.4 MB   can be pulled  Apache-2.0    ")
    (mine,) = [line for line in lines if line.startswith("mine ")]
    assert "here" in mine


def test_pull_puts_a_file_into_the_folder_and_prints_where(program, tmp_path: Path) -> None:
    env = {"GOINFER_CHAT_MODELS": str(tmp_path / "models")}
    model = write_tiny_model(tmp_path / "tiny.gguf")
    done = program(HELLO, "pull", str(model), env=env)
    assert (done.returncode, done.stdout.decode().strip()) == (0, str(tmp_path / "models" / "tiny.gguf"))
    assert (tmp_path / "models" / "tiny.gguf").read_bytes() == model.read_bytes()
    assert program(HELLO, "pull", "no-such-model", env=env).returncode == 3


def test_memory_that_runs_out_while_loading_is_an_error_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("engine.load", no_memory)
    settings = replace(Settings(), model=str(write_tiny_model(tmp_path / "tiny.gguf")))
    with pytest.raises(OutOfMemoryError, match=r"^tiny\.gguf: memory ran out"):
        load_engine(settings, Stream(None))


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    ("terminal", "seconds", "tells"), [(True, 30, False), (True, 0.05, True), (False, 0.05, False)]
)
def test_a_quiet_start_that_takes_long_says_so_on_a_terminal_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, seconds: float, tells: bool
) -> None:
    def slowly(*_: object, progress: Callable[[str, float], None], **__: object) -> None:
        progress("compiling", 0)
        time.sleep(0.2)
        progress("compiling", 0.5)

    monkeypatch.setattr("engine.load", slowly)
    monkeypatch.setattr("goinfer_chat.loading.PATIENCE", seconds)
    settings = replace(Settings(), model=str(write_tiny_model(tmp_path / "tiny.gguf")), quiet=True)
    screen = Screen(terminal)
    load_engine(settings, Stream(screen, {"TERM": "xterm"}))
    shown = "\rcompiling\x1b[K\rcompiling (50%)\x1b[K\r\x1b[K"  # and nothing of it stays
    assert screen.getvalue() == (shown if tells else "")


# Help


def test_help_imports_nothing_heavy_and_answers_at_once() -> None:
    probe = (
        "import sys; sys.argv = ['goinfer-chat', *sys.argv[1:]]\n"
        "from goinfer_chat.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'numba', 'numpy', 'huggingface_hub', 'prompt_toolkit'} & set(sys.modules)))"
    )
    for arguments in (["--help"], ["run", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, env=environment())
        assert done.returncode == 0
        assert done.stdout.decode().splitlines()[-1] == "[]"
    fastest = min(_seconds([sys.executable, "-m", "goinfer_chat", "--help"]) for _ in range(3))
    assert fastest < 0.5


def _seconds(arguments: list[str]) -> float:
    """What a program that waits for nothing takes on a machine of its own: its time on a CPU."""
    used = _seconds_of_children()
    subprocess.run(arguments, stdout=subprocess.DEVNULL, check=True, env=environment())
    return _seconds_of_children() - used


def _seconds_of_children() -> float:
    """Time on a CPU of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("name", [[], ["chat"], ["run"]])
def test_help_lists_every_flag(program, name: list[str]) -> None:
    shown = program(HELLO, *name, "--help").stdout.decode()
    assert all(f"--{setting.flag} " in shown for setting in SETTINGS)


# The very beginning


def test_ctrl_c_during_the_imports_is_no_traceback(tmp_path: Path) -> None:
    seen = b""
    for delay in (0.02, 0.06, 0.1, 0.15):
        command = [sys.executable, "-c", "print('up', flush=True); from goinfer_chat.start import main; main()"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        ) as process:
            assert process.stdout.readline() == b"up\n"
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=10)
        assert process.returncode in (-signal.SIGINT, 130)
        seen += errors
    assert seen == b""


def test_a_models_folder_that_is_none_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "goinfer_chat", "run", "hi"],
        capture_output=True,
        env=environment({"GOINFER_CHAT_MODELS": "/dev/null", "HF_ENDPOINT": "http://127.0.0.1:9"}),
    )
    assert done.returncode == 3
    assert b"/dev/null: it is not a folder; name a folder that can be written to in GOINFER_CHAT_MODELS" in done.stderr


# Files and commands in scripts


def test_a_script_attaches_files_and_takes_no_mention(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("a\nb\nc\n")
    invocation = command(tmp_path, HELLO, "--quiet")
    log = tmp_path / "log"
    (tmp_path / "turns.json").write_text(json.dumps({"turns": HELLO, "log": str(log)}))
    script = b"/attach notes.md#2-3\nexplain @notes.md\n!ls\n"
    done = subprocess.run(invocation, input=script, capture_output=True, env=environment(), cwd=tmp_path, timeout=30)
    assert (done.returncode, done.stderr) == (0, b"")
    attached = "explain @notes.md\n\nnotes.md, lines 2 to 3:\n```\nb\nc\n```"
    assert [json.loads(line) for line in log.read_text().splitlines()] == [attached, "!ls"]
    log.unlink()
    invocation = [*invocation, "run", "--attach", "notes.md", "explain"]
    assert subprocess.run(invocation, capture_output=True, env=environment(), cwd=tmp_path).returncode == 0
    assert json.loads(log.read_text()) == "explain\n\nnotes.md:\n```\na\nb\nc\n```"


def test_a_script_runs_commands_only_where_a_flag_allows_it(program, tmp_path: Path) -> None:
    script = f"/shell !echo ran; touch {tmp_path}/ran\nhi\n".encode()
    refused = program(HELLO, stdin=script)
    assert (refused.returncode, (tmp_path / "ran").exists()) == (2, False)
    assert b"/shell in a script needs the flag --shell" in refused.stderr
    allowed = program(HELLO, "--shell", stdin=script)
    assert (allowed.returncode, allowed.stdout) == (0, b"Hello\n")
    assert b"ran\n" in allowed.stderr
    failed = program(HELLO, "--shell", stdin=b"/shell exit 3\nhi\n")
    assert (failed.returncode, failed.stdout) == (2, b"")
    assert b"/shell exit 3: exit code 3" in failed.stderr


def test_a_question_in_place_of_a_command_is_told_how_to_be_asked(program) -> None:
    done = program(HELLO, "why is the sky blue?")
    assert done.returncode == 2
    assert b"No such command" in done.stderr
    assert b'goinfer-chat run "QUESTION" asks a question' in done.stderr
    assert b"QUESTION" not in program(HELLO, "rnu").stderr
