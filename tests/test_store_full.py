"""The store where there is no room, and on file systems that need room for every change."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from store_helpers import ROOT, kept, run_code, words
from tiny_models import write_tiny_model

from goinfer_chat.store import Store, StoreError
from goinfer_chat.store.file_system import why_not_written
from goinfer_chat.store.folder import Lock, explained

QUOTA = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def journal_mode(store: Store) -> str:
    with store._database.reading() as connection:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on btrfs."""
    monkeypatch.setattr("goinfer_chat.store.database.copies_on_write", lambda path: True)


def test_where_a_change_takes_new_room_nothing_is_written_as_memory(copying: None, folder: Path) -> None:
    with Store(folder) as store:
        kept(store, ("one", "1"), name="work")
        assert journal_mode(store) == "delete"
        assert {path.name for path in folder.iterdir()} == {"conversations.db"}
        assert store.delete(store.find("work").id)
        assert b"one" not in (folder / "conversations.db").read_bytes()


def test_a_store_with_a_log_gives_it_up_where_it_could_end_the_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(folder) as other:
        kept(other, ("one", "1"), name="work")
        monkeypatch.setattr("goinfer_chat.store.database.copies_on_write", lambda path: True)
        with Store(folder) as store:  # while another program has it, it stays
            assert journal_mode(store) == "wal"
            kept(store, ("two", "2"), name="more")
    with Store(folder) as store:
        assert journal_mode(store) == "delete"
        assert words(store.path(store.find("work").id)) == ["one", "1"]
        assert words(store.path(store.find("more").id)) == ["two", "2"]


def test_who_only_looks_needs_no_room_for_what_a_crash_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
    store = Store(folder, draft_seconds=0.01)
    live = store.open(store.find("work").id)
    live.reply_to([user("unanswered")], model=MODEL).add("half")
    time.sleep(0.3)
    os.kill(os.getpid(), 9)
    """
    with Store(folder) as store:
        id = kept(store, ("one", "1"), name="work")
        crashed = run_code("import os, time\n" + textwrap.dedent(code), folder)
        assert crashed.communicate() == ("", "")
        assert crashed.returncode == -signal.SIGKILL

        def no_room(lock: Lock) -> bool:
            with explained(folder):
                raise QUOTA

        with monkeypatch.context() as full:
            full.setattr(Lock, "acquire", no_room)
            with Store(folder) as looking:
                assert words(looking.path(looking.find("work").id)) == ["one", "1"]
                with pytest.raises(StoreError, match="quota exceeded; what was saved before stands; make room"):
                    looking.open(id)
        assert words(store.path(store.find("work").id))[2:] == ["unanswered", "half"]


def test_the_systems_own_reason_is_said_where_sqlite_has_none(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "unable to open database file" is all that SQLite says of a log that finds no room."""
    monkeypatch.setattr("goinfer_chat.store.database.why_not_written", lambda path: QUOTA)
    error = sqlite3.OperationalError("unable to open database file")
    error.sqlite_errorname = "SQLITE_CANTOPEN"
    told = r"conversations\.db: .* quota exceeded; what was saved .* make room"
    with pytest.raises(StoreError, match=told), store._database.reading():
        raise error


def test_a_folder_that_can_be_written_has_no_reason_not_to_be(tmp_path: Path) -> None:
    assert why_not_written(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    missing = why_not_written(tmp_path / "missing")
    assert missing is not None
    assert missing.errno == errno.ENOENT


LOOK = """
import json, pathlib, sys
from goinfer_chat.store import Store
with Store(pathlib.Path(sys.argv[1])) as store:
    path = [stored.message for stored in store.path(store.find('work').id)]
    print(json.dumps([message.content for message in path if message.role == 'assistant']))
"""


@pytest.fixture
def quota(tmp_path: Path) -> str:
    """Shell commands that give `$disk`, a folder which 8 MB fit into, in a name space of its own."""
    tools = [shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin") for name in ("mkfs.btrfs", "btrfs")]
    if os.name == "nt" or os.getuid() or not shutil.which("unshare"):
        pytest.skip("only root can mount a disk with a quota")
    if None in tools or "btrfs" not in Path("/proc/filesystems").read_text():
        pytest.skip("this system has no file system whose quotas a test can set (btrfs)")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    return f"""
        truncate -s 256M {image}
        {tools[0]} -q -f {image} > {tmp_path}/made 2>&1 && mount -o loop {image} {mount} || exit 77
        {tools[1]} quota enable {mount} && {tools[1]} subvolume create {mount}/v > {tmp_path}/made && \
        {tools[1]} qgroup limit 8M {mount}/v || exit 77
        disk={mount}/v
    """


def test_a_real_quota_costs_nothing_that_was_saved(quota: str, tmp_path: Path) -> None:
    """With room for some of a chat: nothing ends by a signal, every reply that the chat went on from is kept."""
    model = write_tiny_model(tmp_path / "tiny.gguf", "llama", context_size=2048)
    chat = f'"{sys.executable}" -m goinfer_chat --model {model} --temperature 0 --max-tokens 12 --ctx 1024 --quiet'
    exported = f'"{sys.executable}" -m goinfer_chat sessions export work'
    look = f'"{sys.executable}" -c "{LOOK}" $disk/s'
    script = f"""
        {quota}
        export HOME=$disk/home GOINFER_CHAT_SESSION_DIR=$disk/s
        mkdir $HOME
        printf 'one\\ntwo\\n' | {chat} --save work > {tmp_path}/first || exit 9
        head -c 300000 /dev/urandom > $disk/room
        sync
        head -c 20M /dev/urandom > $disk/filling 2> {tmp_path}/filled; sync
        cat /dev/zero >> $disk/filling 2>> {tmp_path}/filled
        rm $disk/room
        sync
        seq 60 | sed 's/$/ questions, one longer than the other/' | {chat} --resume work > {tmp_path}/more
        echo "code $?"
        {look} > {tmp_path}/seen
        {exported} --output $disk/out.json; echo "code $?"
        printf '/set temperature 0.5\\n/save-settings\\n' | {chat} --ephemeral; [ $? -lt 3 ] || exit 7
        rm $disk/filling
        sync
        printf 'last\\n' | {chat} --resume work > {tmp_path}/last || exit 8
        {look} > {tmp_path}/at-last
    """
    kept_caches = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | kept_caches,
        timeout=120,
    )
    if done.returncode == 77:
        pytest.skip("this system does not mount a disk with a quota")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines() == ["code 1", "code 2"]
    assert done.stderr.count("uota exceeded") >= 2
    seen, at_last = (json.loads((tmp_path / name).read_text()) for name in ("seen", "at-last"))
    assert at_last[: len(seen)] == seen
    assert len(seen) < 60
    # Each reply that the chat went on from is kept, and the last was shown before it was said that it could not be.
    shown = (tmp_path / "more").read_text()
    for reply in seen[2:]:
        assert shown.startswith(f"{reply}\n")
        shown = shown.removeprefix(f"{reply}\n")
