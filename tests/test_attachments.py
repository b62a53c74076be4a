"""Files that go into a message: which lines, what is refused, what is a mention and what is a word."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UsageError
from goinfer_chat.attachments import MAX_BYTES, Attachment, matching_files, mentioned, read_attachment, with_attachments
from goinfer_chat.shell import MAX_OUTPUT_BYTES, how_it_ended, run_shell_captured
from goinfer_chat.store import name_from


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_text("one\ntwo\nthree\n")
    (tmp_path / "with blanks.md").write_text("blank")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / ".hidden").write_text("h")
    return tmp_path


@pytest.mark.parametrize(
    ("reference", "name", "content"),
    [
        ("a.py", "a.py", "one\ntwo\nthree"),
        ("a.py#2", "a.py, line 2", "two"),
        ("a.py#2-", "a.py, lines 2 to 3", "two\nthree"),
        ("a.py#2-99", "a.py, lines 2 to 3", "two\nthree"),
        ("a.py#1-2", "a.py, lines 1 to 2", "one\ntwo"),
    ],
)
def test_a_file_or_some_lines_of_it_are_read(folder: Path, reference: str, name: str, content: str) -> None:
    assert read_attachment(reference, folder) == Attachment(name, content)


def test_an_empty_line_at_the_end_counts_as_the_lines_of_the_file_do(folder: Path) -> None:
    (folder / "gap.py").write_text("one\n\nthree\x0c\n")
    assert read_attachment("gap.py#1-2", folder).num_lines == 2
    assert read_attachment("gap.py", folder).num_lines == 3
    assert Attachment("empty", "").num_lines == 0


def test_a_file_whose_name_ends_like_lines_is_that_file(folder: Path) -> None:
    (folder / "a.py#2").write_text("other")
    assert read_attachment("a.py#2", folder).content == "other"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("none.py", "none.py cannot be read: No such file"),
        ("sub", "sub is a folder"),
        ("a.py#9", "a.py has no line 9"),
        ("a.py#0", "lines are counted from 1"),
        ("a.py#3-2", "lines are counted from 1, the first one first"),
        ("binary", "binary is not text"),
        ("latin", "latin is not UTF-8 text"),
        ("large", "large has more than 1,000,000 bytes; take some lines of it: large#1-200"),
        ("pipe", "pipe is not a plain file"),
        ("a\0b", "cannot be read"),
    ],
)
def test_what_cannot_go_into_a_message_says_why(folder: Path, reference: str, message: str) -> None:
    (folder / "binary").write_bytes(b"a\0b")
    (folder / "latin").write_bytes(b"\xe9")
    (folder / "large").write_bytes(b"x\n" * (MAX_BYTES // 2 + 1))
    os.mkfifo(folder / "pipe")
    with pytest.raises(UsageError, match=message):
        read_attachment(reference, folder)


def test_lines_of_a_large_file_can_be_taken(folder: Path) -> None:
    (folder / "large").write_bytes(b"x\n" * MAX_BYTES)
    assert read_attachment("large#500000-500001", folder).content == "x\nx"


@given(st.text())
def test_nothing_in_a_file_closes_its_fence(content: str) -> None:
    first, *_, last = Attachment("f", content).text.partition(":\n")[2].split("\n")
    assert first == last
    assert re.fullmatch("`{3,}", first)
    assert first not in content


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("look at @a.py.", ["a.py"]),
        ("(@a.py)", []),
        ("@a.py#2 and @a.py#3, then @a.py#2", ["a.py, line 2", "a.py, line 3"]),
        ('@"with blanks.md"', ["with blanks.md"]),
        ("ada@a.py", []),
        ("hello @ada", []),
        ("@", []),
    ],
)
def test_files_are_mentioned_after_an_at(folder: Path, text: str, names: list[str]) -> None:
    said, attachments = mentioned(text, folder=folder)
    assert (said, [attachment.name for attachment in attachments]) == (text, names)


def test_a_path_that_is_not_there_is_an_error_and_a_backslash_keeps_it_a_word(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file src/b\.py; \\@ begins a word that is not a file"):
        mentioned("see @src/b.py", folder=folder)
    assert mentioned(r"see \@src/b.py, \@a.py, \@ada", folder=folder) == (r"see @src/b.py, @a.py, \@ada", [])


def test_nothing_in_a_pasted_text_of_several_lines_is_a_mention(folder: Path) -> None:
    pasted = "@a.py\n@none.py"
    assert mentioned(f"why {pasted} @a.py#1", [pasted], folder)[1] == [Attachment("a.py, line 1", "one")]


def test_completion_offers_files_folders_with_a_slash_and_hidden_ones_after_a_dot(folder: Path) -> None:
    (folder / "a\x1bb").touch()
    assert matching_files(f"{folder}/a") == [f"{folder}/a.py"]
    assert matching_files("s", folder) == ["sub/"]
    assert (matching_files("sub/", folder), matching_files("sub/.", folder)) == ([], ["sub/.hidden"])
    assert matching_files("none/", folder) == []


def test_of_a_long_output_the_first_and_the_last_part_are_handed_over() -> None:
    shown: list[str] = []
    output, code = run_shell_captured("seq 100000", shown.append)
    assert (code, len("".join(shown))) == (0, 588895)
    assert output.content.startswith("1\n2\n")
    assert output.content.endswith("\n99999\n100000")
    assert re.search(r"\[\.\.\. [\d,]+ bytes left out \.\.\.\]", output.content)
    assert len(output.content) < MAX_OUTPUT_BYTES + 100


def test_a_command_that_a_signal_ended_is_told_by_its_name_or_else_by_its_number() -> None:
    assert [how_it_ended(code) for code in (0, 3, -9, -40)] == [
        "",
        "exit code 3",
        "ended by SIGKILL",
        "ended by signal 40",
    ]


def test_a_conversation_is_named_after_what_was_typed_and_not_after_a_file() -> None:
    assert name_from(with_attachments("explain this", [Attachment("a.py", "one")])) == "explain this"
