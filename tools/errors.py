"""What can go wrong around tools.

ToolError        raised inside a tool: its text becomes the result that the model reads
ToolSetupError   a tool that cannot be offered at all: its function, its file or its server; for the person who wrote it
"""

from __future__ import annotations


class ToolError(Exception):
    """A call that cannot be done. The message says what is wrong, so that the model can do better."""


class ToolSetupError(Exception):
    """A tool that cannot be made, loaded or reached. The message says where and what to do."""
