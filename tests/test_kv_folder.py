"""The folder of conversations' files: nothing leaves it, nobody else reads it, and it does not grow without end."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_conversations import Conversation, identity, restored

from engine.errors import UsageError
from engine.kv_file import KVFile, KVFileError, KVFileLockedError
from engine.kv_folder import list_kept, make_room, path_of, prepare, remove


@pytest.fixture(params=[0o022, 0o000])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def keep(folder: Path, name: str, count: int = 100, used_at: float | None = None) -> Path:
    """A file of that many positions."""
    conversation = Conversation(path_of(folder, name))
    conversation.add_some(count)
    conversation.save().close()
    if used_at is not None:
        os.utime(conversation.path, (used_at, used_at))
    return conversation.path


@pytest.mark.parametrize("name", ["work", "a", "2026-10-01.chat_2", "-", "x" * 100, "a..b"])
def test_plain_names_lie_in_the_folder(tmp_path: Path, name: str) -> None:
    path = path_of(tmp_path, name)
    assert path.parent == tmp_path
    assert path.name == f"{name}.giw-kv"
    path.touch()  # the system takes it as one name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../../x", "a/b", "/tmp/x", "a\\b", "x" * 300, "x" * 101, "a\0b", ".hidden", "a\n", "é", "a b"],
)  # fmt: skip
def test_names_that_could_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a conversation's file") as caught:
        path_of(tmp_path, name)
    assert str(caught.value).isprintable()


@pytest.mark.usefixtures("umask")
def test_folder_and_files_are_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "kv"
    prepare(folder)
    path = keep(folder, "work")
    assert (mode(folder), mode(path)) == (0o700, 0o600)
    folder.chmod(0o755)
    path.chmod(0o664)
    prepare(folder)
    KVFile.open(path, identity()).close()
    assert (mode(folder), mode(path)) == (0o700, 0o600)


def test_a_file_that_is_written_anew_is_the_owners_alone_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keep(tmp_path, "work", 200)
    seen = []
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        seen.append((Path(source).parent, mode(source)))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    keep(tmp_path, "work", 20)
    assert seen == [(tmp_path, 0o600)]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "kv"):
        with pytest.raises(UsageError, match=r"kept there: .*/file is not a folder; choose another place"):
            prepare(folder)


@pytest.mark.parametrize("suffix", ["", ".tmp"])
def test_a_link_is_refused_and_what_it_points_to_stays_as_it_is(tmp_path: Path, suffix: str) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    outside.chmod(0o644)
    folder = tmp_path / "kv"
    prepare(folder)
    path = path_of(folder, "evil")
    link = path.with_name(path.name + suffix)
    link.symlink_to("../outside.txt")
    conversation = Conversation(path)
    conversation.add_some(100)
    with pytest.raises(KVFileError, match="refused: it is a symbolic link"):
        conversation.save()
    assert (outside.read_text(), mode(outside)) == ("mine", 0o644)
    remove(path)
    assert not list(folder.iterdir())
    assert (outside.read_text(), mode(outside)) == ("mine", 0o644)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kv", "outside.txt"]


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.giw-kv")
    (tmp_path / "folder.giw-kv").mkdir()
    for name in ("fifo", "folder"):
        with pytest.raises(KVFileError, match="refused: it is not a regular file"):
            KVFile.open(path_of(tmp_path, name), identity())


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep(tmp_path, "work")
    before = path.read_bytes()
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(KVFileError, match=r"work\.giw-kv: refused: it belongs to another user"):
        KVFile.open(path, identity())
    assert path.read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not stop root")
def test_a_file_that_may_not_be_opened_is_one_clear_error(tmp_path: Path) -> None:
    path = keep(tmp_path, "work")
    path.chmod(0)
    with pytest.raises(KVFileError, match="cannot be opened: Permission denied"):
        KVFile.open(path, identity())


def test_a_link_to_the_folder_is_the_owners_choice(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "kv").symlink_to("disk")
    prepare(tmp_path / "kv")
    path = keep(tmp_path / "kv", "work")
    assert restored(path) == (list(range(100)), None)
    assert mode(tmp_path / "disk") == 0o700


def test_a_removed_conversation_leaves_nothing_behind(tmp_path: Path) -> None:
    path = keep(tmp_path, "work")
    path.with_name(path.name + ".tmp").write_bytes(b"of a process that was killed")
    with KVFile.open(path, identity()), pytest.raises(KVFileLockedError):
        remove(path)
    remove(path)
    remove(path)
    assert not list(tmp_path.iterdir())


def test_what_killed_processes_left_is_swept_and_what_others_are_writing_is_not(tmp_path: Path) -> None:
    path = keep(tmp_path, "work")
    (tmp_path / "dead.giw-kv.tmp").write_bytes(b"half a file")
    living = Conversation(tmp_path / "living.giw-kv.tmp")
    living.add_some(3)
    with living.save():
        prepare(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "living.giw-kv.tmp"}


def test_restoring_and_saving_count_as_use(tmp_path: Path) -> None:
    first, second = keep(tmp_path, "a", used_at=1000), keep(tmp_path, "b", used_at=2000)
    assert [file.path for file in list_kept(tmp_path)] == [second, first]
    restored(first)
    assert [file.path for file in list_kept(tmp_path)] == [first, second]
    assert list_kept(tmp_path)[1].num_bytes == second.stat().st_size
    assert list_kept(tmp_path / "nowhere") == []


def test_over_the_cap_the_least_recently_used_go_first_and_those_in_use_stay(tmp_path: Path) -> None:
    paths = [keep(tmp_path, f"c{i}", used_at=1000 + i) for i in range(6)]
    size = paths[0].stat().st_size
    assert make_room(tmp_path, 6 * size) == []
    with KVFile.open(paths[1], identity()):
        removed = make_room(tmp_path, 3 * size, spare=[paths[2]])
    assert [file.path for file in removed] == [paths[0], paths[3], paths[4]]
    assert [file.path for file in list_kept(tmp_path)] == [paths[5], paths[2], paths[1]]
    make_room(tmp_path, 0)
    assert not list(tmp_path.iterdir())
