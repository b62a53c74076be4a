"""What a docstring says about a function and about each of its parameters."""

from __future__ import annotations

import re
from typing import Final

_SECTION: Final = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ENTRY: Final = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_FIELD: Final = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+):\s*(.*)$")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The words before the first section, and a text for each parameter of an `Args:` section or `:param x:` line.

    `text` is as inspect.getdoc gives it: without the indentation of its block.
    """
    about: list[str] = []
    parameters: dict[str, str] = {}
    section, entry = "", ""
    for line in text.splitlines():
        if found := _SECTION.match(line):
            section, entry = found[1], ""
        elif found := _FIELD.match(line):
            section, entry = "Args", found[1]
            parameters[entry] = found[2]
        elif line.startswith(":") and section in ("", "Args"):
            section, entry = "Returns", ""
        elif not section:
            about.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            indent = len(line) - len(line.lstrip())
            if (found := _ENTRY.match(line.strip())) and indent and (not entry or indent <= 4):
                entry = found[1]
                parameters[entry] = found[2]
            elif entry and line.strip():
                parameters[entry] = f"{parameters[entry]} {line.strip()}".strip()
    return " ".join(" ".join(about).split()), parameters
