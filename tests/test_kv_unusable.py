"""Files of conversations that cannot be used: damaged, in use, of another model; what is said, and what it costs."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kv_chats import GREEDY, Chat, added_by, assert_matches, cold_ids, identity, make, prefilled, started
from tiny_models import write_tiny_model

from engine import kept_files, load
from engine.api import Message, Request, TextDelta
from engine.errors import UsageError
from engine.kv_file import KVFile
from engine.kv_folder import KVFileLockedError, aside_of, path_of, remove


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_to_its_header(path: Path) -> None:
    os.truncate(path, int.from_bytes(path.read_bytes()[16:20], "little"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def be_empty(path: Path) -> None:
    path.write_bytes(b"")


def be_something_else(path: Path) -> None:
    path.write_bytes(b"what is this" * 100)


def be_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGES = [
    (cut_in_half,
     r"resumed 192 of 192 tokens, .* ms; unfinished from position 192 on, as after a kill; the 192 before it are used"),
    (lambda path: flip(path, path.stat().st_size // 2),
     r"resumed 192 of \d+ tokens, .* ms; damaged from position 192 on; the 192 before it are used"),
    (lambda path: flip(path, 300), r"not resumed: damaged from position 0 on; nothing of it is used"),
    (lambda path: flip(path, 500), r"not resumed: damaged from position 0 on; nothing of it is used"),
    (lambda path: path.write_bytes(path.read_bytes() + bytes(2**20)),
     r"resumed 428 of 428 tokens, .* ms; damaged from position 428 on; the 428 before it are used"),
    (lambda path: flip(path, 30), r"not resumed: its header is damaged"),
    (be_empty, r"not resumed: it is empty"),
    (cut_to_its_header, r"not resumed: it holds nothing of what was said"),
    (be_something_else, r"not resumed: it is not a .giw-kv file"),
    (be_a_link, r"not resumed and not saved: refused: it is a symbolic link; remove /.*/kept/work.giw-kv"),
]  # fmt: skip
"""What is done to a file, and what is said of it."""


@pytest.mark.parametrize(("harm", "said"), DAMAGES)
def test_a_file_that_is_damaged_costs_one_notice_and_a_prefill_and_no_word(
    harm: Callable[[Path], None], said: str, folder: Path
) -> None:
    chat, kept = started(folder)
    harm(path_of(folder, "work"))
    with make(folder) as engine:
        reply = chat.ask(engine, "go on")
        assert [chat.before_prefill, len(chat.said)] == [1, 1]
        assert_matches(said, chat.said[0])
        restored = reply.stats.restored_tokens or 0
        assert reply.stats.prefill_tokens == kept - restored + added_by("go on")
        chat.ask(engine, "and on")
        assert chat.said == []
    assert reply.ids == cold_ids(chat, 4)
    with make(folder) as engine:
        reply = chat.ask(engine, "once more")
    if harm is not be_a_link:
        assert prefilled(reply) == added_by("once more")


@pytest.mark.parametrize(("harm", "said"), DAMAGES)
def test_what_a_turn_will_cost_is_known_before_it_whatever_became_of_the_file(
    harm: Callable[[Path], None], said: str, folder: Path
) -> None:
    chat, _ = started(folder)
    path = path_of(folder, "work")
    harm(path)
    before = path.read_bytes()
    chat.foresees = True
    with make(folder) as engine:
        request = Request(messages=tuple(chat.messages), conversation="work")
        problem = engine.foresee(request).problem
        if "nothing of what was said" in said:
            assert problem is None
        else:
            assert problem is not None
            assert_matches(re.split("not saved: |not resumed: |ms; ", said)[-1], problem)
        assert path.read_bytes() == before
        assert chat.ask(engine, "go on").ids == cold_ids(chat, 4)
        chat.ask(engine, "and on")
        harm(path)
        chat.ask(engine, "from memory")


@pytest.mark.parametrize(
    ("harm", "left"),
    [(cut_in_half, r"resumed 192 of 192 tokens, [\d.]+ ms"), (be_empty, None), (lambda path: flip(path, 300), None)],
)
def test_what_was_told_of_a_file_before_a_turn_is_not_told_in_it(
    harm: Callable[[Path], None], left: str | None, folder: Path
) -> None:
    chat, _ = started(folder)
    harm(path_of(folder, "work"))
    with make(folder) as engine:
        told = engine.foresee(Request(messages=tuple(chat.messages), conversation="work")).problem
        assert told
        chat.ask(engine, "go on", told=told)
        assert len(chat.said) == (left is not None)
        for line in chat.said:
            assert_matches(left or "", line)
    other, _ = started(folder / "other")
    harm(path_of(folder / "other", "work"))
    with make(folder / "other") as engine:
        other.ask(engine, "go on", told="damaged from position 7 on; the 7 before it are used")
        assert told in other.said[0]


@pytest.mark.parametrize("shared", [0, 20, 100])
def test_a_damaged_first_record_is_told_alike_before_the_turn_and_in_it_whoever_holds_its_start(
    folder: Path, shared: int
) -> None:
    chat, _ = started(folder)
    path = path_of(folder, "work")
    with KVFile.open(path, identity()) as file:
        assert file._log is not None
        offset = file._log.pieces[0].offset
    flip(path, offset)
    chat.foresees = True
    said = "damaged from position 0 on; nothing of it is used"
    with make(folder) as engine:
        Chat("other").ask(engine, "x" * shared + "y" * 30)
        request = Request(messages=(*chat.messages, Message(role="user", content="go on")), conversation="work")
        foreseen = engine.foresee(request)
        assert foreseen.reused_tokens >= shared
        reply = chat.ask(engine, "go on")
        assert reply.ids == cold_ids(chat, 4)
        if shared > 64:  # the record is not needed, and nobody has looked at it
            assert foreseen.problem is None
        else:
            assert (foreseen.problem, chat.said) == (said, [f"not resumed: {said}"])
    with make(folder) as engine:  # the file is right again
        assert prefilled(chat.ask(engine, "once more")) == added_by("once more")


def test_what_a_turn_will_cost_is_known_before_it_of_other_models_and_files_in_use(folder: Path) -> None:
    chat, kept = started(folder)
    chat.foresees = True
    path, other = path_of(folder, "work"), b"n" * 32
    with make(folder, model=other) as engine:
        request = Request(messages=tuple(chat.messages), conversation="work")
        assert engine.foresee(request).problem == "made with another model"
        chat.ask(engine, "go on")
    with make(folder) as engine:  # its file has been set aside
        assert engine.foresee(request).reused_tokens >= kept
        with KVFile.open(path, identity(other)):
            assert engine.foresee(request).problem == "locked: another goinfer-chat has this conversation open"
            chat.ask(engine, "in use")
    with make(folder) as engine:
        chat.ask(engine, "free again")
        assert engine.foresee(request, "work").reused_tokens >= kept  # from its file
        path.unlink()
        assert engine.foresee(request).problem is None  # in memory, and it will be written
    with make(folder) as engine:
        remove(path)
        assert engine.foresee(request).problem == "file missing"
        chat.ask(engine, "gone")
    flip(path, 500)
    fork = chat.fork("fork", None)
    with make(folder, kv_sessions=1) as engine:  # what is damaged is in memory, and what comes behind it is not
        short = Chat("short", chat.messages[:2], foresees=True)
        assert short.ask(engine, "here").stats.prefill_reused_tokens == 0
        assert chat.ask(engine, "there").stats.restored_tokens
    with make(folder) as first, make(folder) as second:
        for engine in (first, second, first, second, second):
            chat.ask(engine, "in turn")
            fork.ask(engine, "beside")


def test_another_model_s_file_is_named_as_such_and_set_aside_until_that_model_goes_on(folder: Path) -> None:
    chat, kept = started(folder)
    with make(folder, model=b"n" * 32) as engine:
        assert engine.info.kept_conversations == 0
        reply = chat.ask(engine, "go on")
        assert chat.said == ["not resumed: made with another model"]
        assert reply.stats.prefill_reused_tokens == 0
    with make(folder, model=b"n" * 32) as engine:
        assert prefilled(chat.ask(engine, "and on")) == added_by("and on")
    assert sorted(path.name for path in folder.glob("work*")) == ["work.giw-kv", f"work.giw-kv.{identity().key}"]
    with make(folder) as engine:
        reply = chat.ask(engine, "back")
        assert reply.stats.prefill_reused_tokens == reply.stats.restored_tokens == kept
        assert chat.said[0].startswith(f"resumed {kept} of {kept} tokens, ")
    assert reply.ids == cold_ids(chat, len(chat.messages))
    with make(folder, model=b"n" * 32) as engine:  # and there again
        reply = chat.ask(engine, "once more")
        assert prefilled(reply) < reply.stats.prompt_tokens / 2
    remove(path_of(folder, "work"))
    assert list(folder.glob("work*")) == []


def test_a_file_of_another_kv_type_is_named_as_such_and_used_again_with_its_own(folder: Path, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", "llama")
    chat, other = Chat(), Chat("other")
    with load(path, context_size=512, threads=1, kv_folder=folder) as engine:
        kept = chat.ask(engine, "a question").stats.context_used
    with load(path, context_size=512, threads=1, kv_folder=folder, kv_type="q8_0") as engine:
        assert (engine.info.kept_conversations, engine.info.kv_type) == (0, "q8_0")
        assert engine.info.kv_bytes_per_token == 2 * 2 * 2 * (64 + 2 * 2)  # layers, K and V, heads, numbers and scales
        chat.ask(engine, "go on")
        assert chat.said == ["not resumed: made with another KV type, f16, and q8_0 is in use"]
        other.ask(engine, "a question")
    with load(path, context_size=512, threads=1, kv_folder=folder, kv_type="q8_0") as engine:
        assert engine.info.kept_conversations == 2
    with load(path, context_size=512, threads=1, kv_folder=folder) as engine:
        assert chat.ask(engine, "back").stats.restored_tokens == kept


def test_files_that_are_set_aside_count_for_the_cap(folder: Path) -> None:
    chat, _ = started(folder)
    with make(folder, model=b"n" * 32) as engine:
        chat.ask(engine, "go on")
    aside = aside_of(path_of(folder, "work"), identity().key)
    os.utime(aside, (1000, 1000))
    with make(folder, model=b"n" * 32, cap_bytes=aside.stat().st_size) as engine:
        chat.ask(engine, "and on")
        assert chat.said[-1].startswith("removed the cache of 1 conversation not used for longest")
    assert [path.name for path in folder.glob("work*")] == ["work.giw-kv"]


def test_what_a_model_left_in_the_middle_of_a_swap_is_found(folder: Path) -> None:
    chat, kept = started(folder)
    path = path_of(folder, "work")
    path.rename(aside_of(path, identity().key))
    with make(folder) as engine:
        assert chat.ask(engine, "go on").stats.restored_tokens == kept


def test_a_file_that_is_in_use_elsewhere_is_not_swapped(folder: Path) -> None:
    chat, _ = started(folder)
    with make(folder, model=b"n" * 32) as engine:
        chat.ask(engine, "go on")
    before = {path.name: path.read_bytes() for path in folder.glob("work*")}
    with make(folder) as engine, KVFile.open(path_of(folder, "work"), identity(b"n" * 32)):
        chat.ask(engine, "back")
        assert chat.said == ["not resumed and not saved: locked: another goinfer-chat has this conversation open"]
    assert {path.name: path.read_bytes() for path in folder.glob("work*")} == before


def test_a_file_that_is_in_use_is_left_alone_and_said_once(folder: Path) -> None:
    chat, kept = started(folder)
    path = path_of(folder, "work")
    before = path.read_bytes()
    with make(folder) as engine, KVFile.open(path, identity()):
        chat.ask(engine, "go on")  # reloaded before somebody else took the file
        assert chat.said == ["not saved: locked: another goinfer-chat has this conversation open"]
        chat.ask(engine, "and on")
        assert chat.said == []
        with make(folder) as other:
            assert other.info.kept_conversations == 0
            cold = Chat(messages=chat.messages[:2])
            reply = cold.ask(other, "go on")
            assert reply.stats.prefill_tokens == kept + added_by("go on")
            assert cold.said == ["not resumed and not saved: locked: another goinfer-chat has this conversation open"]
            assert reply.ids == chat.messages[3].ids
        assert path.read_bytes() == before
    with make(folder) as engine:
        reply = chat.ask(engine, "free again")
        assert reply.stats.restored_tokens == kept


def test_a_file_that_is_free_again_is_saved_to(folder: Path) -> None:
    chat, _ = started(folder)
    with make(folder) as engine:
        with KVFile.open(path_of(folder, "work"), identity()):
            chat.ask(engine, "go on")
        reply = chat.ask(engine, "and on")
        assert chat.said == []
    with KVFile.open(path_of(folder, "work"), identity()) as file:
        assert len(file.ids) == reply.stats.context_used


def test_a_warm_conversation_is_not_called_unresumed_because_of_its_file(folder: Path) -> None:
    chat, _ = started(folder)
    path = path_of(folder, "work")
    with make(folder) as engine:
        with KVFile.open(path, identity()):
            chat.ask(engine, "go on")
        be_something_else(path)
        reply = chat.ask(engine, "and on")
        assert chat.said == []
    assert prefilled(reply) == added_by("and on")
    with make(folder) as engine:
        assert chat.ask(engine, "again").stats.restored_tokens == reply.stats.context_used


def test_a_file_that_is_locked_again_is_said_again(folder: Path) -> None:
    chat, _ = started(folder)
    with make(folder) as engine:
        for text in ("one", "two"):
            with KVFile.open(path_of(folder, "work"), identity()):
                chat.ask(engine, text)
            assert len(chat.said) == 1
            chat.ask(engine, "free")
            engine.forget("work")


def test_a_fork_in_memory_needs_no_file(folder: Path) -> None:
    chat, _ = started(folder)
    with make(folder) as engine:
        chat.ask(engine, "go on")
        twin = Chat("twin", list(chat.messages))
        reply = twin.ask(engine, "and on")
    assert twin.said == []
    assert prefilled(reply) == added_by("and on")


def test_what_a_stranger_s_file_holds_is_not_called_resumed(folder: Path) -> None:
    chat, other = started(folder)[0], Chat("other")
    chat.fork("twin", folder)
    with make(folder) as engine:
        num_kept = other.ask(engine, "y" * 300).stats.context_used
    shutil.copy(path_of(folder, "other"), path_of(folder, "work"))
    with make(folder) as engine:
        reply = chat.ask(engine, "go on")
    assert prefilled(reply) == added_by("go on")  # the twin has all of it
    in_common = len("user:")
    assert reply.stats.restored_tokens == in_common
    assert_matches(rf"resumed {in_common} of {num_kept} tokens, \d+ ms", chat.said[0])


def test_two_engines_on_one_folder_keep_their_own_conversations_and_read_each_other_s(folder: Path) -> None:
    a, b = Chat("a"), Chat("b")
    with make(folder) as one, make(folder) as two:
        for turn in range(3):
            for engine, chat in ((one, a), (two, b)):
                reply = chat.ask(engine, f"{chat.name}, turn {turn}")
                assert chat.said == []
                assert turn == 0 or prefilled(reply) == added_by(f"{chat.name}, turn {turn}")
    with make(folder) as engine:
        assert engine.info.kept_conversations == 2
        for chat in (a, b):
            assert prefilled(chat.ask(engine, "go on")) == added_by("go on")


def test_two_engines_take_turns_with_one_conversation_and_each_reads_what_the_other_added(folder: Path) -> None:
    chat, expected = Chat(), Chat()
    with make(folder) as one, make(folder) as two, make(None) as alone:
        for turn in range(6):
            reply = chat.ask((one, two)[turn % 2], f"turn {turn}")
            other = expected.ask(alone, f"turn {turn}")
            assert reply.ids == other.ids
            assert prefilled(reply) == prefilled(other)
            assert len(chat.said) == (turn > 0)
            assert all(line.startswith("resumed ") for line in chat.said)


def test_a_conversation_is_in_use_while_a_turn_of_it_runs(folder: Path) -> None:
    chat, kept = started(folder)
    before = path_of(folder, "work").stat().st_size
    with make(folder) as one, make(folder) as two:
        request = Request(
            prompt_ids=tuple(b"something else " * 20), max_tokens=50, sampling=GREEDY, conversation="work"
        )
        running = one.generate(request)
        while not isinstance(next(running), TextDelta):
            pass
        reply = chat.ask(two, "go on")
        assert chat.said == ["not saved: locked: another goinfer-chat has this conversation open"]
        assert (reply.stats.prefill_reused_tokens, reply.stats.kv_saved_bytes) == (kept, None)
        assert path_of(folder, "work").stat().st_size == before
        for _ in running:
            pass
        assert chat.ask(two, "and on").stats.kv_saved_bytes
        assert chat.said == []


@pytest.mark.parametrize("deleted", [False, True])
def test_a_file_that_was_let_go_of_is_taken_again_only_as_it_was(folder: Path, deleted: bool) -> None:
    _, kept = started(folder)
    path = path_of(folder, "work")
    with KVFile.open(path, identity()) as file:
        for _ in range(2):
            file.pause()
            assert file.go_on()
        assert len(file.ids) == kept
        file.pause()
        time.sleep(0.02)  # the clock of files is coarse
        with KVFile.open(path, identity()):  # it might have been changed
            with pytest.raises(KVFileLockedError):
                file.go_on()
            if deleted:
                path.unlink()
        assert not file.go_on()


def test_the_place_of_a_file_is_taken_again_only_if_there_is_none_yet(folder: Path) -> None:
    folder.mkdir()
    with KVFile.open(path_of(folder, "work"), identity()) as file:
        file.pause()
        assert file.go_on()
        file.pause()
        started(folder)
        assert not file.go_on()


def test_a_start_that_looks_at_a_file_for_a_moment_is_waited_for(folder: Path) -> None:
    _, kept = started(folder)
    naps: list[float] = []
    held = KVFile.open(path_of(folder, "work"), identity())

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        held.close()

    with kept_files._open_patiently(path_of(folder, "work"), identity(), sleep) as file:
        assert len(file.ids) == kept
    assert len(naps) == 1


def test_a_name_that_fits_no_file_is_answered_and_said_once(folder: Path) -> None:
    chat = Chat("../outside")
    with make(folder) as engine:
        reply = chat.ask(engine, "hello")
        assert len(chat.said) == 1
        assert "'../outside' cannot name a conversation's file" in chat.said[0]
        assert reply.stats.kv_saved_bytes is None
        assert prefilled(chat.ask(engine, "go on")) == added_by("go on")
        assert chat.said == []
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="conversations cannot be kept there"):
        load(tmp_path / "no model", kv_folder=tmp_path / "file" / "kept")
