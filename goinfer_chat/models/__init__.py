"""Models by name: find, fetch, verify, list."""
