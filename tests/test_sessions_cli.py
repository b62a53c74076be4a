"""`goinfer-chat sessions`: what it prints, what it refuses, and that words and caches go together."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from kv_conversations import identity
from store_helpers import kept as keep

from engine.api import Message, TurnStats
from engine.errors import UsageError
from engine.kv_layout import KVLayout, pack_header
from goinfer_chat.session_commands import sessions_app
from goinfer_chat.store import ConversationInUseError, ModelRef, Store, StoreError
from goinfer_chat.terminal import Stream

MODEL = ModelRef(identity="1f" * 32, name="tiny")
STATS = TurnStats(prompt_tokens=1200, prefill_reused_tokens=0, prefill_tokens=1200, context_used=1234)


@pytest.fixture
def sessions(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """`sessions("list")`: standard output and standard error; raises what the command raises."""
    app = typer.Typer(rich_markup_mode=None)
    app.callback()(lambda: None)
    app.add_typer(sessions_app(), name="sessions")

    def run(*arguments: str) -> tuple[str, str]:
        capsys.readouterr()
        command = typer.main.get_command(app)
        assert command.main(["sessions", "--session-dir", str(folder), *arguments], standalone_mode=False) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def kept(store: Store, *turns: tuple[str, str], name: str | None = None, system: str | None = None) -> str:
    with store.create(name=name, system=system) as live:
        for question, answer in turns:
            with live.reply_to([Message(role="user", content=question)], model=MODEL) as draft:
                draft.finish(Message(role="assistant", content=answer, ids=(1, 2)), stats=STATS)
        return live.id


def test_the_list_shows_the_one_used_last_first_with_its_figures(sessions, store) -> None:
    first = kept(store, ("one", "1"), ("two", "2"), name="First")
    kept(store, ("Why is the sky blue?", "1"))
    store.kv_path(first).write_bytes(b"x" * 2_500_000)
    header, *rows = [line.split("  ") for line in sessions()[0].splitlines()]
    assert [cell.strip() for cell in header if cell] == [
        "name", "last used", "messages", "tokens", "cache", "a token", "model", "id",
    ]  # fmt: skip
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[0] for row in cells] == ["Why is the sky blue?", "First"]
    assert cells[1][2:] == ["4", "1,234", "2.5 MB", "tiny", first]
    assert sessions("list", "--limit", "1")[0].count("\n") == 2


def test_on_a_narrow_terminal_the_list_leaves_out_its_last_columns(
    sessions, store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(store, ("one", "1"), name="First")
    monkeypatch.setattr(Stream, "size", property(lambda self: (60, 24)))
    assert sessions()[0].splitlines()[0].endswith("  id")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = sessions()[0].splitlines()
    assert lines[0].split("  ")[0].strip() == "name"
    assert not lines[0].endswith("  id")
    assert max(map(len, lines)) <= 60


def test_the_list_says_what_a_token_takes_in_each_cache_and_in_which_type(sessions, store) -> None:
    """28 layers, K and V, a width of 256, and bytes of a number: as Qwen2.5 1.5B has them."""
    for kv_type, num_bytes in (("f16", 28_672), ("f32", 57_344), ("q8_0", 15_232)):
        id = kept(store, ("one", "1"), name=kv_type)
        heads = SimpleNamespace(num_kv_heads=2, dim=128)
        sizes = SimpleNamespace(attention_layers=range(28), heads=[heads] * 28, state_bytes=0)
        mine = identity(KVLayout.of(sizes, kv_type), kv_type=kv_type)
        store.kv_path(id).write_bytes(pack_header(mine, bytes(16)))
        assert f"  {num_bytes:,} bytes ({kv_type})  " in sessions()[0]
        shown = json.loads(sessions("list", "--json", "--limit", "1")[0])
        assert (shown["kv_bytes_per_token"], shown["kv_type"]) == (num_bytes, kv_type)


def test_the_list_says_what_all_caches_take_on_the_disk_and_what_they_may(
    sessions, store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kept(store, ("one", "1"))
    assert sessions()[1] == ""
    store.kv_path(first).write_bytes(b"x" * 2_500_000)
    assert sessions()[1] == "caches: 2.5 MB of at most 8.00 GB (--kv-cap)\n"
    monkeypatch.setenv("GOINFER_CHAT_KV_CAP", "500MB")
    assert sessions()[1] == "caches: 2.5 MB of at most 500.0 MB (--kv-cap)\n"


def test_the_list_as_json_is_one_object_a_line(sessions, store) -> None:
    id = kept(store, ("é\x1b[31m", "1"))
    (line,) = sessions("list", "--json")[0].splitlines()
    assert line.isascii()
    shown = json.loads(line)
    assert (shown["id"], shown["num_messages"], shown["kv_bytes"], shown["model"]["name"]) == (id, 2, 0, "tiny")


def test_without_conversations_the_list_is_empty_and_says_so(sessions) -> None:
    assert sessions() == ("", "no conversations are kept\n")
    assert sessions("list", "--json") == ("", "")


def test_a_conversation_is_shown_with_the_versions_that_were_left(sessions, store) -> None:
    id = kept(store, ("one", "1"), name="work", system="Be brief.")
    with store.open(id) as live:
        question = live.last_question().id
        with live.reply_to([], after=question, model=MODEL) as draft:
            draft.finish(Message(role="assistant", content="uno\x1b[31m"), finish_reason="length")
    tree = store.tree(id)
    lines = sessions("show", "work")[0].splitlines()
    assert lines[0].startswith(f"work | {id} | ")
    assert lines[1:] == [
        "system",
        "Be brief.",
        f"user | message {question}",
        "one",
        f"assistant | message {tree[2].id} | instead of {tree[1].id} | length",
        "uno[31m",
    ]
    assert sessions("show", id[:8], "--at", str(tree[1].id))[0].splitlines()[-1] == "1"
    shown = [json.loads(line) for line in sessions("show", "work", "--json")[0].splitlines()]
    assert [message["content"] for message in shown] == ["one", "uno\x1b[31m"]
    with pytest.raises(UsageError, match="no message 999"):
        sessions("show", "work", "--at", "999")


def test_a_question_that_a_crash_left_without_an_answer_is_shown_as_such(sessions, store) -> None:
    id = kept(store, ("one", "1"), name="work")
    live = store.open(id)
    live.reply_to([Message(role="user", content="two")], model=MODEL)
    live._lock.release()  # a process that is killed
    *_, heading, question = sessions("show", "work")[0].splitlines()
    (message,) = store.left_open(id)
    assert (heading, question) == (f"user | message {message.id} | got no answer", "two")
    assert sessions()[0].splitlines()[1].split("  ")[2] == "2 (+1 beside)"


def test_search_shows_where_it_found_what(sessions, store) -> None:
    kept(store, ("the needle is here", "yes"), name="hay")
    kept(store, ("no needle here", "no"), name="straw")
    found = [line.split(" | ") for line in sessions("search", "needle")[0].splitlines()]
    assert [line[0].strip() for line in found] == ["straw", "no needle here", "hay", "the needle is here"]
    assert sessions("search", '"needle is"', "--in", "hay")[0].splitlines()[1] == "    the needle is here"
    assert sessions("search", "is", "needle", "--json")[0].count("\n") == 1
    assert sessions("search", "nowhere") == ("", "nothing was found\n")


def test_a_conversation_is_renamed(sessions, store) -> None:
    id = kept(store, ("one", "1"))
    assert sessions("rename", id, "Better name") == ("", "one is called Better name\n")
    assert store.find("Better name").id == id
    with pytest.raises(UsageError, match="path"):
        sessions("rename", "Better name", "../../x")


def test_deleting_takes_the_cache_too_and_needs_a_yes(sessions, store, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [kept(store, ("one", "1"), name=name) for name in ("a", "b", "c")]
    store.kv_path(ids[0]).write_bytes(b"cache")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(UsageError, match="--yes"):
        sessions("delete", "a")
    with pytest.raises(UsageError, match="no conversation 'x'"):
        sessions("delete", "a", "x", "--yes")
    assert store.kv_path(ids[0]).exists()
    assert sessions("delete", "a", "b", "a", "--yes") == ("", "deleted a\ndeleted b\n")
    assert not store.kv_path(ids[0]).exists()
    assert [conversation.name for conversation in store.recent()] == ["c"]


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("yes\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_a_person_is_asked_before_anything_is_deleted(
    sessions, store, monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    kept(store, ("one", "1"), name="a")
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert sessions("delete", "a")[1].startswith("Delete a, with nothing left of it? [y/N] ")
    assert len(store.recent()) == left


def test_one_that_another_program_goes_on_with_is_not_deleted(sessions, store) -> None:
    with store.open(kept(store, ("one", "1"), name="a")), pytest.raises(ConversationInUseError):
        sessions("delete", "a", "--yes")
    assert [conversation.name for conversation in store.recent()] == ["a"]


def test_a_fork_has_the_words_and_the_cache(sessions, store) -> None:
    id = kept(store, ("one", "1"), ("two", "2"), name="work")
    store.kv_path(id).write_bytes(b"cache")
    assert sessions("fork", "work")[0] == "work (2)\n"
    assert sessions("fork", "work", "first", "--at", str(store.path(id)[1].id))[0] == "first\n"
    first = store.find("first").id
    assert [stored.message.content for stored in store.path(first)] == ["one", "1"]
    assert store.kv_path(first).read_bytes() == b"cache"


def test_an_export_with_its_cache_is_taken_in_elsewhere(sessions, store, tmp_path: Path) -> None:
    id = kept(store, ("one", "1"), ("two", "2"), name="work", system="Be brief.")
    store.kv_path(id).write_bytes(b"cache")
    file = tmp_path / "out.json"
    sessions("export", "work", "--format", "json", "-o", str(file), "--kv")
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("out*")} == {
        "out.json": 0o600,
        "out.giw-kv": 0o600,
    }
    store.delete(id)
    assert sessions("import", str(file), "--kv")[0] == "work\n"
    assert sessions("import", str(file))[0] == "work (2)\n"
    assert sessions("import", str(file), "--name", "other")[0] == "other\n"
    with pytest.raises(UsageError, match="already"):
        sessions("import", str(file), "--name", "other")
    back = store.find("work")
    assert [(s.message, s.model, s.stats) for s in store.path(back.id)][1::2] == [
        (Message(role="assistant", content=text, ids=(1, 2)), MODEL.identity, STATS) for text in "12"
    ]
    assert (back.system, store.kv_path(back.id).read_bytes()) == ("Be brief.", b"cache")
    assert store.kv_bytes(store.find("other").id) == 0


def test_a_file_that_is_there_is_replaced_only_by_force(sessions, store, tmp_path: Path) -> None:
    kept(store, ("one", "1"), name="work")
    target, link = tmp_path / "target.md", tmp_path / "link.md"
    target.write_text("mine")
    link.symlink_to(target)
    for file in (target, link):
        with pytest.raises(UsageError, match=rf"{file} already exists; --force replaces it"):
            sessions("export", "work", "-o", str(file))
    sessions("export", "work", "-o", str(link), "--force")
    assert link.read_text().startswith("# work\n")
    assert target.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.md", "sessions", "target.md"]
    with pytest.raises(UsageError, match="cannot be written"):
        sessions("export", "work", "-o", str(tmp_path / "missing" / "x"))


def test_what_is_no_plain_file_is_not_replaced_by_force_either(sessions, store, folder: Path, tmp_path: Path) -> None:
    kept(store, ("one", "1"), name="work")
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for file in (pipe, link, tmp_path, "/", "."):
        with pytest.raises(UsageError, match="cannot be written: it exists and is not a plain file"):
            sessions("export", "work", "-o", str(file), "--force")
    assert pipe.is_fifo()
    assert link.is_symlink()
    before = (folder / "conversations.db").read_bytes()
    with pytest.raises(UsageError, match="is in the folder of the kept conversations"):
        sessions("export", "work", "-o", str(folder / "conversations.db"), "--force")
    assert (folder / "conversations.db").read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [["show", "work", "--at"], ["fork", "work", "--at"], ["list", "--limit"], ["search", "one", "--limit"]],
)
def test_a_number_that_is_too_large_for_the_store_is_wrong_usage(sessions, store, words: list[str]) -> None:
    kept(store, ("one", "1"), name="work")
    with pytest.raises(UsageError, match="a number has too many digits"):
        sessions(*words, str(10**19))


def test_markdown_goes_to_standard_output_without_control_characters(sessions, store) -> None:
    kept(store, ("one", "\x1b[31mred\x07"), name="work")
    assert sessions("export", "work")[0].endswith("## Assistant\n\n[31mred\n")


def test_an_import_reads_standard_input_and_refuses_what_is_no_export(
    sessions, store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(store, ("one", "1"), name="work")
    text = sessions("export", "work", "--format", "json")[0]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert sessions("import", "-")[0] == "work (2)\n"
    (tmp_path / "bad.json").write_text("{}")
    for file, reason in [
        ("bad.json", "not an exported conversation"),
        ("none.json", "cannot be read"),
        ("", "directory"),
    ]:
        with pytest.raises(UsageError, match=reason):
            sessions("import", str(tmp_path / file))
    (tmp_path / "good.json").write_text(text)
    with pytest.raises(UsageError, match="there is no cache"):
        sessions("import", str(tmp_path / "good.json"), "--kv")
    assert len(store.recent()) == 2


def test_a_damaged_store_names_the_command_that_moves_it_away_and_that_does(sessions, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "conversations.db").write_bytes(b"x" * 5000)
    for arguments in (["list"], ["show", "work"], ["search", "x"], ["delete", "x", "--yes"]):
        with pytest.raises(StoreError, match="goinfer-chat sessions set-aside"):
            sessions(*arguments)
    assert "aside-1-conversations.db" in sessions("set-aside", "--yes")[1]
    assert sessions("list")[1] == "no conversations are kept\n"


def test_the_folder_comes_from_flags_before_the_command_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer(rich_markup_mode=None)

    @app.callback()
    def flags(context: typer.Context) -> None:
        context.obj = {"session_dir": str(tmp_path / "given"), "model": None}

    app.add_typer(sessions_app(), name="sessions")
    typer.main.get_command(app).main(["sessions", "list"], standalone_mode=False)
    assert (tmp_path / "given" / "conversations.db").exists()
    typer.main.get_command(app).main(["sessions", "--session-dir", str(tmp_path / "own")], standalone_mode=False)
    assert (tmp_path / "own" / "conversations.db").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["show", "work"],
        ["search", "one"],
        ["rename", "work", "play"],
        ["delete", "work", "--yes"],
        ["fork", "work"],
        ["export", "work"],
        ["set-aside", "--yes"],
    ],
)
def test_the_folder_stands_behind_any_command_too(words: list[str], store, tmp_path: Path) -> None:
    kept(store, ("one", "1"), name="work")
    store.close()
    app = typer.Typer(rich_markup_mode=None)
    app.callback()(lambda: None)
    app.add_typer(sessions_app(), name="sessions")
    command = typer.main.get_command(app)
    before = ["sessions", "--session-dir", str(tmp_path / "elsewhere")]
    assert command.main([*before, *words, "--session-dir", str(store.folder)], standalone_mode=False) == 0
    assert not (tmp_path / "elsewhere").exists()


def test_every_command_explains_itself(sessions) -> None:
    out = sessions("--help")[0]
    for command in ("list", "show", "search", "rename", "delete", "fork", "export", "import", "set-aside"):
        assert f"\n  {command} " in out
        explained = sessions(command, "--help")[0]
        assert "Usage:" in explained
        assert "--session-dir" in explained


def test_wrong_combinations_are_refused(sessions, store) -> None:
    kept(store, ("one", "1"), name="work")
    with pytest.raises(UsageError, match="--kv needs --format json"):
        sessions("export", "work", "--kv")
    with pytest.raises(UsageError, match="--kv needs a file"):
        sessions("import", "-", "--kv")
    with pytest.raises(UsageError, match="nothing to search"):
        sessions("search", " ")


def test_the_folder_of_the_settings_file_counts_behind_flag_and_variable(tmp_path: Path) -> None:
    kept_here, file = tmp_path / "here", tmp_path / "config.toml"
    with Store(kept_here) as store:
        keep(store, ("hi", "hello"), name="of the file")
    file.write_text(f'session-dir = "{kept_here}"\n')
    env = {name: value for name, value in os.environ.items() if not name.startswith("GOINFER_CHAT_")}
    env |= {"GOINFER_CHAT_CONFIG": str(file), "XDG_DATA_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "goinfer_chat", "sessions", "list"]
    assert "of the file" in subprocess.run(command, capture_output=True, text=True, env=env, timeout=30).stdout
    elsewhere = env | {"GOINFER_CHAT_SESSION_DIR": str(tmp_path / "other")}
    assert (
        "of the file" not in subprocess.run(command, capture_output=True, text=True, env=elsewhere, timeout=30).stdout
    )
