"""The records of a `.giw-kv` file: read from its start, appended to its good end (docs/giw-kv.md has every byte).

A record adds at most 64 positions of one block (ids and K/V), or says how many positions are left, or adds the running
state after so many positions (of models that have such layers).

Every byte is covered by a checksum. A record's checksum starts from that of the record before, and the first record's
from the header's, which holds a random number: so a record is good at one place of one file only. Damage costs the
record it hits and all that follow.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from engine.cpu import usable_threads
from engine.kv_cache import BLOCK_SIZE
from engine.kv_layout import Identity, KVLayout, pack_header

_RECORD = struct.Struct("<IIII")
_CHECK = struct.Struct("<I")
HEAD_BYTES = _RECORD.size + _CHECK.size
"""Of a record before its ids."""

_ADD, _CUT, _STATE = 0x2B2B2B2B, 0x2D2D2D2D, 0x23232323


class Found(Enum):
    """What stands at a place where a record may begin."""

    WHOLE = auto()
    UNFINISHED = auto()
    """What there is of it is right, and the file ends inside it: whoever appended it was killed meanwhile."""
    DAMAGED = auto()


@dataclass(slots=True)
class Piece:
    """Where positions start .. start + count - 1 lie: the first of the `total` of a record."""

    start: int
    count: int
    total: int
    offset: int
    """Of the K/V in the file."""
    checksum: int
    """CRC-32 of the K/V of all `total`."""
    right: bool
    """This process has written or checked them."""


@dataclass(slots=True)
class StateRecord:
    """Where the running state after `length` positions lies in the file, and its CRC-32."""

    length: int
    offset: int
    checksum: int


class RecordLog:
    """The records of an open file: read from its start, appended to its good end."""

    def __init__(self, descriptor: int, layout: KVLayout, header: bytes) -> None:
        self.descriptor = descriptor
        self.end = len(header)
        """Bytes up to the end of the last good record."""
        self.length = 0
        """Positions according to the records."""
        self.ids: list[int] = []
        """Of the positions that can be used, as far as is known: fewer than `length` where K/V are damaged."""
        self.pieces: list[Piece] = []
        self.states: list[StateRecord] = []
        """Ascending by length."""
        self._layout = layout
        self._header_bytes = len(header)
        # The header's own checksum: that of a header with its checksum is the same number for all headers.
        (self._check,) = _CHECK.unpack(header[-_CHECK.size :])

    @classmethod
    def create(cls, descriptor: int, identity: Identity) -> RecordLog:
        """In an empty file. Raises OSError."""
        header = pack_header(identity, secrets.token_bytes(16))
        _write(descriptor, [header], 0)
        return cls(descriptor, identity.layout, header)

    def bytes_of(self, num_positions: int, num_pieces: int, num_states: int = 0) -> int:
        """Size of a file in which nothing is dead."""
        positions = num_positions * (4 + self._layout.position_bytes) + num_pieces * HEAD_BYTES
        return self._header_bytes + positions + num_states * (HEAD_BYTES + self._layout.state_bytes)

    def add(self, ids: Sequence[int], packed: NDArray[np.uint8]) -> None:
        """Append positions of one block with their K/V. Raises OSError, with the file as before."""
        start, count, checksum = self.length, len(ids), zlib.crc32(packed.data)
        assert start == len(self.ids)
        assert 0 < count <= BLOCK_SIZE - start % BLOCK_SIZE
        assert len(packed) == count * self._layout.position_bytes
        self._append(_RECORD.pack(_ADD, start, count, checksum), np.array(ids, "<u4").tobytes(), packed)
        self._added(ids, Piece(start, count, count, self.end - len(packed), checksum, right=True))

    def add_state(self, length: int, state: NDArray[np.uint8]) -> None:
        """Append the running state after `length` positions. Raises OSError, with the file as before."""
        assert 0 < length <= self.length
        assert len(state) == self._layout.state_bytes
        checksum = zlib.crc32(state.data)
        self._append(_RECORD.pack(_STATE, length, 0, checksum), b"", state)
        self._has_state(StateRecord(length, self.end - len(state), checksum))

    def _has_state(self, state: StateRecord) -> None:
        self.states = sorted([*(s for s in self.states if s.length != state.length), state], key=lambda s: s.length)

    def load_state(self, state: StateRecord, target: NDArray[np.uint8]) -> bool:
        """Read a running state [state_bytes] u8; if it is damaged it is forgotten."""
        right = _read(self.descriptor, target, state.offset) and zlib.crc32(target.data) == state.checksum
        if not right:
            self.states.remove(state)
        return right

    def cut(self, length: int) -> None:
        """Append that `length` positions are left. Raises OSError, with the file as before."""
        self._append(_RECORD.pack(_CUT, length, 0, 0), b"", np.empty(0, np.uint8))
        self.length = length
        self.drop(length)

    def drop(self, length: int) -> None:
        """Forget what lies behind the first `length` positions, here and not in the file."""
        del self.ids[length:]
        self.states = [state for state in self.states if state.length <= length]
        while self.pieces and self.pieces[-1].start >= length:
            self.pieces.pop()
        if self.pieces:
            self.pieces[-1].count = min(self.pieces[-1].count, length - self.pieces[-1].start)

    def _added(self, ids: Sequence[int], piece: Piece) -> None:
        self.ids += ids
        self.length += len(ids)
        self.pieces.append(piece)

    def _append(self, record: bytes, ids: bytes, packed: NDArray[np.uint8]) -> None:
        check = zlib.crc32(ids, zlib.crc32(record, self._check))
        head = record + _CHECK.pack(check) + ids
        try:
            _write(self.descriptor, [head, packed.data], self.end)
        except OSError:
            with contextlib.suppress(OSError):  # without it a reader finds the good end all the same
                os.ftruncate(self.descriptor, self.end)
            raise
        self.end += len(head) + len(packed)
        self._check = check

    def read_heads(self) -> Found:
        """Take in the records up to the end of the file, or to the first that is not whole and right; what that is.

        K/V are left for `load` to check. Raises OSError.
        """
        size, found = os.fstat(self.descriptor).st_size, Found.WHOLE
        while self.end < size and found is Found.WHOLE:
            found = self._read_head(size)
        return found

    def _read_head(self, size: int) -> Found:
        head = os.pread(self.descriptor, HEAD_BYTES + 4 * BLOCK_SIZE, self.end)
        if len(head) < HEAD_BYTES:
            begun = any(struct.pack("<I", kind).startswith(head[:4]) for kind in (_ADD, _CUT, _STATE))
            return Found.UNFINISHED if begun else Found.DAMAGED
        kind, start, count, checksum = _RECORD.unpack_from(head)
        adds = kind == _ADD and start == self.length and 0 < count <= BLOCK_SIZE - start % BLOCK_SIZE
        ids = head[HEAD_BYTES : HEAD_BYTES + 4 * min(count, BLOCK_SIZE)]
        if adds and len(ids) < 4 * count:
            return Found.UNFINISHED
        check = zlib.crc32(ids, zlib.crc32(head[: _RECORD.size], self._check))
        if len(ids) != 4 * count or _CHECK.unpack_from(head, _RECORD.size) != (check,):
            return Found.DAMAGED
        offset = self.end + HEAD_BYTES + len(ids)
        end = offset + count * self._layout.position_bytes
        if adds:
            if end > size:
                return Found.UNFINISHED
            piece = Piece(start, count, count, offset, checksum, right=False)
            self._added(np.frombuffer(ids, "<u4").tolist(), piece)
        elif kind == _CUT and start <= self.length and count == 0:
            self.length = start
            self.drop(start)
        elif kind == _STATE and 0 < start <= self.length and count == 0 and self._layout.state_bytes:
            end = offset + self._layout.state_bytes
            if end > size:
                return Found.UNFINISHED
            self._has_state(StateRecord(start, offset, checksum))
        else:
            return Found.DAMAGED
        self.end, self._check = end, check
        return Found.WHOLE

    def load(self, piece: Piece, block: NDArray[np.uint8], first: int, last: int) -> bool:
        """Put the K/V of positions first .. last - 1 of a piece into their block; False if they are damaged."""
        if first == piece.start and piece.count == BLOCK_SIZE:
            # The block is this piece and nothing else: read it in place. It stays unreachable until it is right.
            if not self._read(piece, block):
                block.fill(0)  # attention relies on finite numbers, also where it does not look
        else:
            packed = np.empty(piece.total * self._layout.position_bytes, np.uint8)
            if self._read(piece, packed):
                slot = first % BLOCK_SIZE
                self._layout.scatter(packed, first - piece.start, block, slot, slot + last - first)
        return piece.right

    def check(self, length: int, first: int = 0) -> bool:
        """Look at what nobody has looked at of positions first .. length - 1; False if some had to be dropped."""
        pieces = [p for p in self.pieces if p.start < length and p.start + p.count > first and not p.right]
        if not pieces:
            return True

        def read(piece: Piece) -> bool:
            return self._read(piece, np.empty(piece.total * self._layout.position_bytes, np.uint8))

        num_good = num_first_good(read, pieces)
        if num_good < len(pieces):
            self.drop(pieces[num_good].start)
        return num_good == len(pieces)

    def _read(self, piece: Piece, target: NDArray[np.uint8]) -> bool:
        """All bytes of a piece; False if they are not what was written."""
        piece.right = _read(self.descriptor, target, piece.offset) and zlib.crc32(target.data) == piece.checksum
        return piece.right


def num_first_good(read: Callable[[Piece], bool], pieces: Sequence[Piece]) -> int:
    """How many pieces there are before the first for which `read` says False; several are read at a time."""
    with ThreadPoolExecutor(usable_threads()) as threads:  # reading and checksums let go of the GIL
        return len(list(takewhile(bool, threads.map(read, pieces))))


def _write(descriptor: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
    """All of the parts, one after another. Raises OSError."""
    views = [memoryview(part) for part in parts if len(part)]
    while views:
        written = os.pwritev(descriptor, views, offset)
        offset += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]


def _read(descriptor: int, target: NDArray[np.uint8], offset: int) -> bool:
    """Fill the target; False if the file does not have so much or cannot be read."""
    view = target.data
    with contextlib.suppress(OSError):
        while view:
            num_bytes = os.preadv(descriptor, [view], offset)
            if num_bytes == 0:
                return False
            view, offset = view[num_bytes:], offset + num_bytes
        return True
    return False
