"""Further tools for the prompt of `bench replay --tool-schemas N`: none of them is called, all of them are read.

Agents offer dozens of tools, and each costs its schema in every prompt that is not reused.
"""

from __future__ import annotations

from typing import Any, Final

from goinfer_chat.bench.transcript import described

_TEXT: Final = "string"
_NUMBER: Final = "integer"
_SWITCH: Final = "boolean"

MORE_TOOLS: Final[tuple[dict[str, Any], ...]] = (
    described(
        "list_files",
        "List the files below a folder.",
        (),
        path=(_TEXT, "Folder to list; the whole project if left out"),
        pattern=(_TEXT, "Only names that match, such as *.py"),
    ),
    described(
        "write_file",
        "Make a file, or replace all that it holds.",
        ("path", "content"),
        path=(_TEXT, "Path of the file"),
        content=(_TEXT, "All that the file is to hold"),
    ),
    described("delete_file", "Delete a file of the project.", ("path",), path=(_TEXT, "Path of the file")),
    described(
        "move_file",
        "Move or rename a file.",
        ("source", "target"),
        source=(_TEXT, "Path of the file as it is"),
        target=(_TEXT, "Path it is to have; missing folders are made"),
    ),
    described(
        "run_command",
        "Run a program in the project's folder and give what it prints.",
        ("command",),
        command=(_TEXT, "Program and arguments"),
        seconds=(_NUMBER, "How long it may run"),
    ),
    described("git_status", "Show which files were changed since the last commit.", ()),
    described(
        "git_diff",
        "Show the changes since a commit.",
        (),
        commit=(_TEXT, "Commit to compare with; the last one if left out"),
        path=(_TEXT, "Only changes of this file or folder"),
    ),
    described(
        "git_log",
        "List commits, the newest first.",
        (),
        path=(_TEXT, "Only commits that change this file or folder"),
        limit=(_NUMBER, "How many commits"),
    ),
    described(
        "git_blame",
        "Say which commit wrote each line of a file.",
        ("path",),
        path=(_TEXT, "Path of the file"),
        first=(_NUMBER, "First line wanted"),
        last=(_NUMBER, "Last line wanted"),
    ),
    described(
        "git_commit",
        "Commit all changes.",
        ("message",),
        message=(_TEXT, "What was changed and why"),
        amend=(_SWITCH, "Whether to replace the last commit"),
    ),
    described(
        "find_symbol",
        "Find where a function, class or variable is defined.",
        ("name",),
        name=(_TEXT, "Name of the symbol"),
        kind=(_TEXT, "function, class or variable; any if left out"),
    ),
    described(
        "find_uses",
        "Find all places that use a symbol.",
        ("name",),
        name=(_TEXT, "Name of the symbol"),
        path=(_TEXT, "Folder to look in; the whole project if left out"),
    ),
    described(
        "rename_symbol",
        "Rename a symbol wherever it is used.",
        ("old", "new"),
        old=(_TEXT, "Name as it is"),
        new=(_TEXT, "Name it is to have"),
    ),
    described(
        "check_types",
        "Run the type checker and give its complaints.",
        (),
        path=(_TEXT, "File or folder to check; the whole project if left out"),
    ),
    described(
        "lint",
        "Run the linter and give its complaints.",
        (),
        path=(_TEXT, "File or folder to look at; the whole project if left out"),
        mend=(_SWITCH, "Whether to mend what can be mended"),
    ),
    described(
        "coverage",
        "Say which lines of a file no test runs.",
        ("path",),
        path=(_TEXT, "Path of the file"),
    ),
    described(
        "fetch_page",
        "Fetch a page of documentation and give its text.",
        ("address",),
        address=(_TEXT, "Address of the page"),
        find=(_TEXT, "Only paragraphs that hold this text"),
    ),
    described(
        "package_version",
        "Say which version of a package is installed, and which is the newest.",
        ("name",),
        name=(_TEXT, "Name of the package"),
    ),
    described(
        "query_database",
        "Run a query that only reads on the test database.",
        ("query",),
        query=(_TEXT, "The query, in SQL"),
        limit=(_NUMBER, "How many rows at most"),
    ),
    described(
        "note",
        "Keep a note for later turns.",
        ("text",),
        text=(_TEXT, "The note"),
        topic=(_TEXT, "What it is about"),
    ),
    described(
        "ask_user",
        "Ask the user a question and wait for the answer.",
        ("question",),
        question=(_TEXT, "The question"),
        choices=(_TEXT, "Answers to choose from, with commas between them"),
    ),
)
