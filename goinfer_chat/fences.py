"""Fences of Markdown: a text as a block that nothing in it can end."""

from __future__ import annotations

import re


def fenced(text: str, language: str = "") -> str:
    """The text in a code block, whose fence is longer than every run of backticks in the text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
