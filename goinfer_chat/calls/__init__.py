"""Tool calls: approval, the loop of calls and results, and its events."""
