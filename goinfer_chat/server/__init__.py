"""The engine over HTTP, with the APIs of OpenAI and Anthropic. docs/server.md says what is supported.

Nothing here is imported before `serve` runs.
"""
