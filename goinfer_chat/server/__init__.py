"""The engine behind HTTP, in the words of other APIs. docs/server.md tells what is obeyed and what is refused.

Nothing here is imported before `serve` runs.
"""
