"""What docs/reliability.md and docs/security.md claim is held by tests that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


@cache
def names_in(name: str) -> frozenset[str]:
    """The names of all tests in a file; none where there is no such file."""
    path = TESTS / name
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return frozenset(re.findall(r"^(?: {4})?(?:async )?def (test_\w+)\(", text, re.MULTILINE))


def rows(name: str, heading: str) -> list[str]:
    """The rows of all tables of a page that have a column `heading`, without their heads."""
    found: list[str] = []
    inside = False
    for line in (DOCS / name).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif heading in cells:
            inside = True
        elif inside and set(line) - set("|-: "):
            found.append(line)
    return found


@pytest.mark.parametrize("name", ["reliability.md", "security.md"])
def test_every_test_that_is_named_exists(name: str) -> None:
    named = NAMED.findall((DOCS / name).read_text(encoding="utf-8"))
    assert len(named) > 20
    assert [f"{file}::{test}" for file, test in named if test not in names_in(file)] == []


@pytest.mark.parametrize("name", ["reliability.md", "security.md"])
def test_every_row_names_a_test(name: str) -> None:
    table = rows(name, "held by")
    assert len(table) > 10
    assert [row for row in table if not NAMED.search(row)] == []


def test_ids_are_there_once() -> None:
    ids = [row.split("|")[1].strip() for name in ("reliability.md", "security.md") for row in rows(name, "held by")]
    assert len(ids) == len(set(ids)) > 90
