"""The session that `bench replay` plays: a coding agent looks for a fault, covers it with a test and mends it.

Ours, written for this purpose; no model wrote the replies. With the template of Qwen2.5 the prompt of turn 1 has about
730 tokens and that of turn 9 about 1,920, of which the last result is about 200.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One turn: the tool that is called, and what it answers."""

    tool: str
    arguments: Mapping[str, Any]
    result: str

    @property
    def reply(self) -> str:
        """The call as a model writes it."""
        call = json.dumps({"name": self.tool, "arguments": self.arguments})
        return f"<tool_call>\n{call}\n</tool_call>"


def described(
    name: str, description: str, required: tuple[str, ...], /, **properties: tuple[str, str]
) -> dict[str, Any]:
    """A tool as a request has it; each property with its type and what it means."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()},
                "required": list(required),
            },
        },
    }


TOOLS: Final = (
    described(
        "search",
        "Find lines that match a regular expression. Gives path, line number and line.",
        ("pattern",),
        pattern=("string", "Regular expression, as Python's re takes it"),
        path=("string", "Folder or file to look in; the whole project if left out"),
    ),
    described(
        "read_file",
        "Read a text file of the project. Lines are numbered from 1.",
        ("path",),
        path=("string", "Path of the file"),
        first=("integer", "First line wanted"),
        last=("integer", "Last line wanted"),
    ),
    described(
        "edit_file",
        "Replace one piece of text in a file by another. The old text must occur exactly once.",
        ("path", "old", "new"),
        path=("string", "Path of the file"),
        old=("string", "Text to be replaced, with its line ends and indentation"),
        new=("string", "Text to stand in its place"),
    ),
    described(
        "run_tests",
        "Run the project's tests and give the end of what they print.",
        (),
        path=("string", "A test file or folder; all tests if left out"),
    ),
)

SYSTEM: Final = """\
You are a careful programmer who works in the repository of a small Python project by calling tools. Look before you \
change anything: read the code that a change touches and the tests that cover it. Make the smallest change that solves \
the task, in the style of the code around it. Whatever you change, run the tests afterwards and read what they say. A \
test that failed before must not be edited to make it pass. Call one tool at a time and wait for its result. \
When the task is done, say in two sentences what was wrong and what you changed."""

TASK: Final = """\
The nightly import of our suppliers' stock lists loses articles. Yesterday the list of one supplier had 412 lines and \
only 411 articles arrived; the last one was missing. Their files do not end with a newline, those of the other \
suppliers do. Please find out why that happens, write a test that shows it, and mend it. The code is in stock, the \
tests are in tests. The numbers of rejected lines must stay as they are: the buyers compare them with the file."""

STEPS: Final = (
    Step(
        tool="search",
        arguments={"pattern": "split|readline|newline", "path": "stock"},
        result="""\
stock/importer.py:9:    def __init__(self, chunks, newline="\\n"):
stock/importer.py:11:        self._newline = newline
stock/importer.py:21:        while self._newline in self._rest:
stock/importer.py:22:            line, _, self._rest = self._rest.partition(self._newline)
stock/importer.py:41:    fields = line.split(";")""",
    ),
    Step(
        tool="read_file",
        arguments={"path": "stock/importer.py", "first": 15, "last": 24},
        result="""\
15      def __iter__(self):
16          for chunk in self._chunks:
17              self._rest += chunk
18              yield from self._complete()
19
20      def _complete(self):
21          while self._newline in self._rest:
22              line, _, self._rest = self._rest.partition(self._newline)
23              self.number += 1
24              yield line""",
    ),
    Step(
        tool="search",
        arguments={"pattern": "def test_|Lines\\(", "path": "tests/test_importer.py"},
        result="""\
tests/test_importer.py:11:def test_lines_are_put_together_from_chunks():
tests/test_importer.py:12:    lines = Lines(["a;1\\nb", ";2\\n"])
tests/test_importer.py:16:def test_lines_are_numbered_from_one():
tests/test_importer.py:17:    lines = Lines(["a;1\\n", "b;2\\n"])""",
    ),
    Step(
        tool="edit_file",
        arguments={
            "path": "tests/test_importer.py",
            "old": "def test_lines_are_numbered_from_one():",
            "new": 'def test_a_last_line_needs_no_newline():\n    lines = Lines(["a;1\\nb;2"])\n'
            '    assert list(lines) == ["a;1", "b;2"]\n\n\ndef test_lines_are_numbered_from_one():',
        },
        result="tests/test_importer.py: 1 replacement, 5 lines added",
    ),
    Step(
        tool="run_tests",
        arguments={"path": "tests/test_importer.py"},
        result="""\
tests/test_importer.py ..F                                    [100%]
______________ test_a_last_line_needs_no_newline ______________
    def test_a_last_line_needs_no_newline():
        lines = Lines(["a;1\\nb;2"])
>       assert list(lines) == ["a;1", "b;2"]
E       AssertionError: assert ['a;1'] == ['a;1', 'b;2']
E         Right contains one more item: 'b;2'
1 failed, 2 passed in 0.08s""",
    ),
    Step(
        tool="edit_file",
        arguments={
            "path": "stock/importer.py",
            "old": "            yield from self._complete()\n",
            "new": "            yield from self._complete()\n        self.number += 1\n        yield self._rest\n",
        },
        result="stock/importer.py: 1 replacement, 2 lines added",
    ),
    Step(
        tool="run_tests",
        arguments={},
        result="""\
tests/test_importer.py F.F                                    [ 60%]
tests/test_report.py FF                                       [100%]
E       AssertionError: assert ['a;1', 'b;2', ''] == ['a;1', 'b;2']
E       AssertionError: assert [2, 3, 4] == [2, 3]
4 failed, 1 passed in 0.11s""",
    ),
    Step(
        tool="read_file",
        arguments={"path": "tests/test_report.py"},
        result="""\
 1  import pytest
 2
 3  from stock.importer import Lines, read_articles
 4  from stock.report import rejected_lines, summary
 5
 6
 7  LIST = "4711;Bolt;250\\n4712;Nut\\n4713;Washer;many\\n"
 8
 9
10  def test_rejected_lines_keep_the_numbers_of_the_file():
11      articles, rejected = read_articles(Lines([LIST]))
12      assert [article.code for article in articles] == ["4711"]
13      assert [entry.number for entry in rejected] == [2, 3]
14      assert rejected_lines(rejected)[0] == "line 2: 2 fields"
15
16
17  def test_the_summary_counts_what_was_read():
18      assert summary(*read_articles(Lines([LIST]))) == "1 of 3 lines imported"
""",
    ),
    Step(
        tool="edit_file",
        arguments={
            "path": "stock/importer.py",
            "old": "        self.number += 1\n        yield self._rest\n",
            "new": "        if self._rest:\n            self.number += 1\n            yield self._rest\n",
        },
        result="stock/importer.py: 1 replacement, 1 line added",
    ),
    Step(
        tool="run_tests",
        arguments={},
        result="""\
tests/test_importer.py ...                                    [ 60%]
tests/test_report.py ..                                       [100%]
5 passed in 0.09s""",
    ),
)
