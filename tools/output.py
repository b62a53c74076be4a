"""Long output as a model gets it: its head and its tail, and what was left out between them."""

from __future__ import annotations

from typing import Final

HEAD_SHARE: Final = 0.4
"""Of the room: errors stand at the end more often than at the start."""


def bounded(text: str, limit: int) -> str:
    """At most about `limit` characters of the text."""
    if len(text) <= limit:
        return text
    head, tail = text[: int(limit * HEAD_SHARE)], text[-(limit - int(limit * HEAD_SHARE)) :]
    return _joined(head, tail, len(text) - len(head) - len(tail), "characters")


class HeadAndTail:
    """Collects output of any length in bounded memory. `text` replaces bytes that are no UTF-8."""

    def __init__(self, limit: int) -> None:
        self._head_room = int(limit * HEAD_SHARE)
        self._tail_room = limit - self._head_room
        self._head = bytearray()
        self._tail = bytearray()
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        self._num_bytes += len(data)
        room = self._head_room - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._tail_room:
            del self._tail[: -self._tail_room]

    def text(self) -> str:
        tail = self._tail[-self._tail_room :] if self._tail_room else b""
        left_out = self._num_bytes - len(self._head) - len(tail)
        if left_out == 0:
            return (bytes(self._head) + bytes(tail)).decode("utf-8", "replace")
        # A character that was cut in two is not a fault of the output.
        head = self._head.decode("utf-8", "replace").rstrip("\ufffd")
        return _joined(head, tail.decode("utf-8", "replace").lstrip("\ufffd"), left_out, "bytes")


def _joined(head: str, tail: str, num_left_out: int, unit: str) -> str:
    """Cut at line ends where there are some near."""
    head_end, tail_start = head.rfind("\n") + 1, tail.find("\n") + 1
    if head_end > len(head) // 2:
        num_left_out += len(head) - head_end
        head = head[:head_end]
    if 0 < tail_start < len(tail) // 2:
        num_left_out += tail_start
        tail = tail[tail_start:]
    gap = "" if head.endswith("\n") else "\n"
    return f"{head}{gap}[... {num_left_out:,} {unit} left out ...]\n{tail}"
