"""The line editor, one file for each of its concerns. Only `repl` imports it: nothing else needs prompt_toolkit."""
