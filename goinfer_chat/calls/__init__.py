"""Calls of tools: approval, the loop of calls and results, what is told of it."""
