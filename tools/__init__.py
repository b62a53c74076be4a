"""Tools a model may call. Imports neither `engine` nor `goinfer_chat`.

tool.py         what a tool is; @tool makes one of a typed function
schema.py       annotations to a JSON schema, and values back (docstring.py: the words)
registry.py     tools by name; a call ends with a result, whatever the model wrote (validation.py)
loading.py      tools of a file, and of installed packages
mcp_servers.py  tools of MCP servers
root.py         the folder that paths cannot leave
files.py        read_file, list_files, edit_file, write_file (replacing.py: whole or not at all)
search.py       search, with ripgrep or ours (grep.py)
commands.py     run_command, run_tests
process.py      programs without a terminal, ended with all they started (warden.py, environment.py, output.py)
journal.py      what files held before, so that a turn can be taken back
errors.py       ToolError, ToolSetupError
"""

from __future__ import annotations

from tools.errors import ToolError, ToolSetupError
from tools.journal import Journal, TakenBack
from tools.registry import Checked, Registry, run
from tools.root import Root
from tools.tool import Risk, Tool, ToolContext, ToolResult, tool

__all__ = [
    "Checked",
    "Journal",
    "Registry",
    "Risk",
    "Root",
    "TakenBack",
    "Tool",
    "ToolContext",
    "ToolError",
    "ToolResult",
    "ToolSetupError",
    "run",
    "tool",
]
