"""A small MCP server for tests: over standard input and output, or with a port as its argument over HTTP."""

from __future__ import annotations

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test server")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail(text: str) -> str:
    """Fail with a text."""
    raise ToolError(text)


@server.tool()
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


@server.tool(name="what.is-it")
def variable(name: str) -> str:
    """Show a variable of the server's environment."""
    return os.environ.get(name, "not set")


if __name__ == "__main__":
    print("noise on standard error", file=sys.stderr)
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
