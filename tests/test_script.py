'''Scripts: which lines are turns, which are commands, and where a block of """ ends.'''

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UsageError
from goinfer_chat.script import CommandLine, Item, Turn, read_item, read_script


def items(text: str | bytes) -> list[Item]:
    return list(read_script(io.BytesIO(text if isinstance(text, bytes) else text.encode())))


def test_a_line_is_a_turn_and_empty_lines_are_skipped() -> None:
    assert items("one\n\n  \n two \nlast without newline") == [Turn("one"), Turn(" two "), Turn("last without newline")]


def test_nothing_is_no_turn() -> None:
    assert items("") == items("\n\n") == items('"""\n \n"""\n') == []
    assert list(read_script(None)) == []


def test_a_block_keeps_its_lines_as_they_are() -> None:
    assert items('"""\n/not a command\n\n  indented """\n"""\nnext') == [
        Turn('/not a command\n\n  indented """'),
        Turn("next"),
    ]


def test_a_longer_fence_holds_a_shorter_one() -> None:
    assert items('""""\na\n"""\nb\n""""\n') == [Turn('a\n"""\nb')]


def test_a_block_that_is_not_closed_is_an_error_with_its_line() -> None:
    script = read_script(io.BytesIO(b'first\n"""\nsecond\n'))
    assert next(script) == Turn("first")
    with pytest.raises(UsageError, match=r'line 3: .* a line of """ closes it'):
        next(script)


def test_commands_have_a_name_and_the_rest_of_the_line() -> None:
    assert items("/reset\n/system  You are  brief. \n/\n") == [
        CommandLine("reset", ""),
        CommandLine("system", "You are  brief."),
        CommandLine("", ""),
    ]


def test_two_slashes_say_a_slash() -> None:
    assert items("//etc/hosts is what?\n") == [Turn("/etc/hosts is what?")]


def test_a_pasted_text_of_several_lines_is_never_a_command() -> None:
    assert read_item(lambda _inside: "/reset\nand more") == Turn("/reset\nand more")


def test_line_ends_byte_order_mark_and_bytes_that_are_no_utf8_do_no_harm() -> None:
    assert items(b"\xef\xbb\xbfone\r\nt\xffwo\xc3\xa9\r\n") == [Turn("one"), Turn("t\ufffdwo\u00e9")]


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20), min_size=1))
def test_any_text_can_stand_in_a_block(lines: list[str]) -> None:
    text = "\n".join(lines)
    longest = max((len(line.rstrip()) for line in lines if line.rstrip() and not line.rstrip().strip('"')), default=0)
    fence = '"' * (max(longest, 2) + 1)
    assert items(f"{fence}\n{text}\n{fence}\n") == ([Turn(text)] if text.strip() else [])


def test_a_turn_is_there_before_the_next_line_is_written() -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "wb", buffering=0) as writer:
        script: Iterator[Item] = read_script(reader)
        found: list[Item] = []
        thread = threading.Thread(target=lambda: found.append(next(script)))
        writer.write(b"first\n")
        thread.start()
        thread.join(5)
        assert found == [Turn("first")]
