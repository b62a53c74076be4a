"""What Up and Ctrl-R find: what was sent, also in earlier sessions, and drafts that were cleared in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from prompt_toolkit.history import History

from goinfer_chat.store.typed import append_typed, read_typed


class Drafts(Protocol):
    def add_draft(self, text: str) -> None:
        """Let Up find a draft that was cleared."""
        ...


class TypedHistory(History):
    """Backed by the file of `store.typed`.

    limit     entries read at the start; 0 reads and keeps none
    is_kept   whether what is sent at this moment is kept; else it is there until the program ends

    A text that begins with a space and a cleared draft never reach the file.
    """

    def __init__(self, folder: Path, limit: int, is_kept: Callable[[], bool]) -> None:
        super().__init__()
        self._folder = folder
        self._limit = limit
        self._is_kept = is_kept
        self._draft_on_top = False

    def load_history_strings(self) -> Iterable[str]:
        return reversed(read_typed(self._folder, self._limit))

    def get_strings(self) -> list[str]:
        # A buffer that sends what is last here anyway adds nothing; a draft that is sent after all has to be added.
        strings = super().get_strings()
        return strings[:-1] if self._draft_on_top else strings

    def append_string(self, string: str) -> None:
        if self._draft_on_top and self._loaded_strings[0] == string:
            self._loaded_strings.pop(0)
        super().append_string(string)

    def store_string(self, string: str) -> None:
        self._draft_on_top = False
        if self._limit and self._is_kept() and not string.startswith(" "):
            append_typed(self._folder, string)

    def add_draft(self, text: str) -> None:
        if self._loaded_strings[:1] != [text]:
            self._loaded_strings.insert(0, text)
            self._draft_on_top = True
