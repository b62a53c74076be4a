"""Markdown that streams: in whatever pieces it comes, the same rows go out, each once, and none is too wide."""

from __future__ import annotations

import re
import sys
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from goinfer_chat.view.cells import Line, line_width, plain
from goinfer_chat.view.highlight import WINDOW, Highlighter
from goinfer_chat.view.markdown_parser import code_blocks, parse
from goinfer_chat.view.markdown_stream import MarkdownStream, RawStream, ReplyStream

SAMPLE = '''# Title

Some **bold** and *italic* text with `code` and a [link](http://x.example) which is long enough to wrap around twice.
A second line, 2 * 3 = 6, snake_case_word.

- one
- two with 日本語 ❤️ 👩‍🚀 🇯🇵 e\u0301 שלום
  - nested **deep** and so long that it has to be broken into rows
1. first

   more of it
2. second
   ```python
   def f(x):
       """doc"""
       return "a" + 1  # comment
   ```

| name | value | 日本 |
|---|--:|:-:|
| a | 1 | ❤️ |
| bbbbbb long long cell that must wrap | 22 | 👩‍🚀 x |

> quote
> more

---
``` text
as it *is*
```
    indented
The end
'''


def streamed(stream: ReplyStream, pieces: list[str], columns: int) -> tuple[list[Line], list[Line]]:
    """All rows that became final, and the last live ones before the end."""
    rows: list[Line] = []
    live: list[Line] = []
    for piece in pieces:
        stream.push(piece)
        rows += stream.take(columns)
        live = stream.live(columns)
    return rows + stream.finish(columns), live


def shown(text: str, columns: int = 60, *, keep_marks: bool = False) -> list[str]:
    rows, _ = streamed(MarkdownStream(keep_marks=keep_marks), [text], columns)
    return [plain(row).rstrip() for row in rows]


def is_code(row: Line, source: str) -> bool:
    """Whether a row is a line of code as it is, which the terminal breaks."""
    return plain(row) in [line.removeprefix("    ") for line in source.split("\n")]


def cut_at(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 10_000), max_size=80), st.sampled_from([12, 20, 33, 80, 200]))
def test_the_pieces_in_which_a_reply_comes_change_no_row(cuts: list[int], columns: int) -> None:
    whole, _ = streamed(MarkdownStream(), [SAMPLE], columns)
    rows, _ = streamed(MarkdownStream(), cut_at(SAMPLE, cuts), columns)
    assert rows == whole


MARKS = ["**", "`", "a ", "b", "\n", "[", "](x)", "- ", "|", "---", "<b>", "\\", "_", "# ", "~~~\n", "> "]


@settings(deadline=None, max_examples=100)
@example(["**a", " b** `", "c"])
@given(st.lists(st.sampled_from(MARKS), max_size=40))
def test_marks_that_come_one_by_one_break_nothing(pieces: list[str]) -> None:
    rows, live = streamed(MarkdownStream(), pieces, 10)
    assert all(line_width(row) <= 10 or is_code(row, "".join(pieces)) for row in rows)
    assert all(line_width(row) <= 10 for row in live)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8, 20, 79, 300])
def test_no_row_is_wider_than_the_screen(columns: int) -> None:
    for number in range(0, len(SAMPLE), 29):
        stream = MarkdownStream()
        stream.push(SAMPLE[:number])
        assert all(line_width(row) <= columns or is_code(row, SAMPLE) for row in stream.take(columns))
        assert all(line_width(row) <= columns for row in stream.live(columns))


def test_finished_rows_of_a_paragraph_go_out_before_it_ends() -> None:
    stream = MarkdownStream()
    stream.push("one two three four five six")
    assert [plain(row) for row in stream.take(10)] == ["one two", "three four"]
    assert [plain(row) for row in stream.live(10)] == ["five six"]


def test_a_row_waits_for_the_other_end_of_a_mark() -> None:
    stream = MarkdownStream()
    stream.push("one two **three four five six seven")
    assert [plain(row) for row in stream.take(10)] == ["one two"]
    stream.push("** eight")
    assert [plain(row) for row in stream.take(10)] == ["three four", "five six", "seven"]


def test_a_mark_that_waits_for_its_other_end_is_shown_as_if_it_had_come() -> None:
    stream = MarkdownStream()
    for text, shown in (("a **", "a"), ("bold", "a bold"), ("** and `", "a bold and"), ("co", "a bold and co")):
        stream.push(text)
        assert [plain(row).rstrip() for row in stream.live(40)] == [shown]
    assert stream.live(40)[0][1].style.bold
    assert stream.live(40)[0][-1].style.role == "code"


def test_a_line_of_code_is_final_once_the_next_one_begins() -> None:
    stream = MarkdownStream()
    stream.push("```python\na = 1\nb = 2\nc")
    assert [plain(row) for row in stream.take(30)][1:] == ["a = 1", "b = 2"]
    assert [plain(row) for row in stream.live(30)] == ["c"]


def test_a_table_is_final_when_it_ends() -> None:
    stream = MarkdownStream()
    stream.push("| a | b |\n|---|---|\n| 1 | 2 |\n")
    assert stream.take(30) == []
    assert len(stream.live(30)) == 5
    stream.push("\nAfter it")
    assert len(stream.take(30)) == 5


def test_a_screen_that_changes_its_width_gets_every_word_once() -> None:
    stream, rows = MarkdownStream(), list[Line]()
    words = [f"word{number}" for number in range(60)]
    for number, word in enumerate(words):
        stream.push(word + " ")
        rows += stream.take((80, 20, 33)[number // 7 % 3])
    rows += stream.finish(40)
    assert " ".join(plain(row) for row in rows).split() == words


def test_code_that_changes_its_width_keeps_every_line() -> None:
    stream, rows = MarkdownStream(), list[Line]()
    stream.push("```\n")
    for number in range(40):
        stream.push(f"line {number} of the code\n")
        rows += stream.take((80, 10)[number // 5 % 2])
        stream.live(20)
    rows += stream.finish(80)
    text = "".join(plain(row) for row in rows[1:-1]).replace(" ", "")
    assert text == "".join(f"line{number}ofthecode" for number in range(40))


def test_a_second_round_begins_below_the_first() -> None:
    stream = MarkdownStream()
    stream.push("Before the tool.\n```\nx\n```")
    before = stream.finish(40)
    stream.push("After it.\n\n```\ny\n```\n")
    rows = [plain(row) for row in [*before, *stream.take(40), *stream.finish(40)]]
    assert rows[0] == "Before the tool."
    assert rows[4:6] == ["", "After it."]
    assert "[2]" in rows[7]


def test_blocks_look_as_they_should() -> None:
    rows = shown(SAMPLE, 60)
    assert rows[0] == "Title"
    assert "• one" in rows
    assert "  ◦ nested deep and so long that it has to be broken into" in rows
    assert "    rows" in rows
    assert "2. second" in rows
    assert "   def f(x):" in rows
    assert "▌ quote" in rows
    assert "as it *is*" in rows
    assert any(row.startswith("   ── python [1] ─") for row in rows)
    assert any(row.startswith("── text [2] ─") for row in rows)
    grid = [row for row in rows if row.startswith(("│", "┌", "├", "└"))]
    assert len(grid) == 6
    assert grid[1].startswith("│ name ")


def test_lines_that_a_model_ends_stay_lines() -> None:
    assert shown("Roses are red,\nviolets are blue") == ["Roses are red,", "violets are blue"]


def test_a_table_on_a_narrow_screen_becomes_a_list() -> None:
    rows = shown("| name | a | b | c |\n|---|---|---|---|\n| x | 1 | 2 | 3 |\n", 14)
    assert rows[:4] == ["name: x", "a: 1", "b: 2", "c: 3"]


def test_without_styles_the_marks_stay() -> None:
    rows = shown("# Head\n\n**bold** `code` *it* ~~no~~", keep_marks=True)
    assert rows == ["# Head", "", "**bold** `code` *it* ~~no~~"]


def test_addresses_of_links_are_shown_and_never_hidden_behind_words() -> None:
    assert shown("[safe](http://evil.example) <http://x.example>") == ["safe (http://evil.example) http://x.example"]


@pytest.mark.parametrize(
    "text",
    [
        "a\x1b[2Jb",
        "```\n\x1b[2J\n```",
        "| \x1b[2J |\n|---|\n| x |",
        "&#27;[2J &#x1b;[2J &#155;",
        "[a\x1b](\x9b2J)",
        "`\x1b[2J`",
    ],
)
def test_no_control_character_gets_through(text: str) -> None:
    for row in shown(text):
        assert not re.search(r"[\x00-\x1f\x7f-\x9f]", row)


@pytest.mark.parametrize("text", ["a\u202eb", "`a\u202eb`", "a&#x202e;b", "[a\u202eb](http://x)", "```\na\u202eb\n```"])
def test_text_that_turns_the_direction_shows_its_code(text: str) -> None:
    [row] = [row for row in shown(text) if "a" in row]
    assert "a<U+202E>b" in row


def test_the_exact_code_can_be_had() -> None:
    assert code_blocks(SAMPLE)[1] == "as it *is*\n"
    assert code_blocks("```py\nx = 1\n\n  y") == ["x = 1\n\n  y"]
    assert code_blocks("no code") == []


def test_raw_text_is_final_line_by_line_and_never_broken() -> None:
    stream = RawStream()
    stream.push("**one** " * 10 + "\ntwo\x1b")
    assert [plain(row) for row in stream.take(20)] == ["**one** " * 10]
    assert [plain(row) for row in stream.live(20)] == ["two\u241b"]
    assert [plain(row) for row in stream.finish(20)] == ["two\u241b"]


def test_code_that_grows_has_the_colours_of_the_whole() -> None:
    lines = [
        line
        for number in range(200)
        for line in (f"def f{number}(x):", f'    """doc {number}', '    more"""', "    return x", "")
    ]
    whole = Highlighter()(lines, "python", 0)
    growing, last = Highlighter(), list[Line]()
    for end in range(1, len(lines) + 1, 3):
        last = growing(lines[:end], "python", max(end - 5, 0))
        assert last[:-1] == whole[max(end - 5, 0) : end - 1]
    assert growing._anchor > len(lines) - 4 * WINDOW


def test_a_language_nobody_knows_is_plain_text() -> None:
    assert [plain(line) for line in Highlighter()(["a", "b"], "no such language", 0)] == ["a", "b"]


def test_a_document_is_one_list_of_blocks() -> None:
    assert [type(block).__name__ for block in parse("a\n\n- b\n  > c\n\n```\nd\n```\n---\n")] == [
        "Flow",
        "Flow",
        "Flow",
        "Code",
        "Rule",
    ]


def test_a_complete_line_of_code_is_one_row_that_can_be_copied_whole() -> None:
    stream = MarkdownStream()
    long = "x = " + "y" * 60
    stream.push(f"```\n{long}\n{long}")
    assert [plain(row) for row in stream.take(20)][1:] == [long]
    assert max(line_width(row) for row in stream.live(20)) <= 20
    stream.push("\n```\n")
    assert next(plain(row) for row in stream.finish(20)) == long


@pytest.mark.parametrize(
    "fault", [ImportError("no such module"), RecursionError(), re.error("in a lexer"), KeyError(1)]
)
def test_code_whose_lexer_fails_is_shown_without_colours(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr("pygments.lexers.c_cpp.CLexer.get_tokens", fail)
    shown = Highlighter()(["int a;", "int b;"], "c", 0)
    assert [plain(line) for line in shown] == ["int a;", "int b;"]


def test_a_lexer_that_cannot_be_read_leaves_code_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygments.lexers.fortran", None)
    assert [plain(line) for line in Highlighter()(["end"], "fortran", 0)] == ["end"]
