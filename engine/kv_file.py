"""`.giw-kv` files: the K/V of one conversation on disk, so that a restart costs no prefill.

A file is a header, which says what the keys and values belong to, and records (`kv_records.py`). It only grows: `save`
compares the ids it holds with those of a table, cuts off what no longer holds and appends what is new. When more than
half of it would be dead, it is written anew and put in the old one's place. By the numerics contract the same ids have
the same K/V, so only ids have to be compared. K/V are checked when they are read, before anything can use them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from engine.kv_cache import BLOCK_SIZE, BlockTable, CacheFullError, KVPool, StatePool, blocks_for, common_start
from engine.kv_folder import (
    KVFileError,
    KVFileLockedError,
    aside_of,
    create_locked,
    is_at,
    lock,
    open_locked,
    sync_folder,
    temporary_of,
    unlock,
)
from engine.kv_layout import MAX_HEADER_BYTES, SEVERAL, HeaderError, Identity, KVLayout, read_header
from engine.kv_records import HEAD_BYTES, Found, Piece, RecordLog, num_first_good
from engine.memory import MOST_CHECKPOINTS
from engine.running_state import RunningState

__all__ = ["Identity", "KVFile", "KVFileError", "KVFileLockedError", "KVLayout", "Saved"]

RESERVE_BYTES = 16 * 2**20
"""Disk space that caches leave to others, or an eighth of the disk if that is less."""

MAX_PIECES = 8
"""Records that hold a block, on average, before a file is written anew: each costs a third of a millisecond to read."""

MAX_STATES = MOST_CHECKPOINTS
"""Running states of a file: as many as a conversation in memory has at most."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save did."""

    num_bytes: int
    """Written to the disk."""
    num_positions: int
    """In the file now: all of the table's."""


class KVFile:
    """One conversation's file, which nobody else may write until `close`. Usable as a context manager.

    For one thread at a time. Nothing on the disk is created or changed before the first `save`.
    """

    @classmethod
    def open(cls, path: Path, identity: Identity) -> Self:
        """Open a file, or the place for one. `ids` says what can be restored, `problem` why that is not all.

        Raises KVFileLockedError if the file is in use, KVFileError for what must not or cannot be opened: a symbolic
        link, what is no regular file, another user's file, no permission.
        """
        return cls(path, identity, open_locked(path))

    def __init__(self, path: Path, identity: Identity, descriptor: int | None) -> None:
        """For `open`."""
        self.path = path
        self.identity = identity
        self.problem: str | None = None
        """Why the file, or a part of it, cannot be used: one line for people. `restore` may find more damage."""
        self._descriptor = descriptor
        self.maker: str | None = None
        """Which other backend computed the K/V that the file had when it was opened; None: this one."""
        self._other: Identity | None = None  # of the K/V in a file that is of no use here, and may be elsewhere
        self._numerics = identity.numerics_version  # of the log
        self._log: RecordLog | None = None  # None: the next save writes a new file
        self._closed = False
        self._paused: tuple[int, int] | None = None
        if descriptor is None:
            self.problem = "file missing"
            return
        try:
            self._read(descriptor)
        except HeaderError as error:
            self.problem = str(error)
        except OSError as error:
            self.problem = f"it cannot be read: {error.strerror or error}"

    @property
    def ids(self) -> list[int]:
        """Token ids of the positions that can be restored, as far as is known. Not to be changed."""
        return self._log.ids if self._log else []

    @property
    def num_bytes(self) -> int:
        """Size of the file; 0 if there is none that can be used."""
        return self._log.end if self._log else 0

    def reach(self, length: int) -> int:
        """How many of the first `length` positions a table could get: up to where a running state is kept."""
        if not self.identity.layout.state_bytes:
            return length
        return max((s.length for s in self._log.states if s.length <= length), default=0) if self._log else 0

    def restore(self, table: BlockTable, pool: KVPool, length: int) -> int:
        """Give a table that holds a start of `ids`, or nothing, the positions up to `length`, at most all of them.

        Each byte is checked before the table has its position. Returns the positions added: fewer where the file is
        damaged, and then `ids` ends there and `problem` says so; or where no running state is kept so far. Raises
        CacheFullError, with nothing changed.
        """
        first = len(table)
        length = max(first, self.reach(length))
        assert first <= length <= len(self.ids)
        assert table.ids == self.ids[:first], "the table is of another conversation"
        log = self._log
        if log is None or first == length:
            return 0
        assert pool.block_bytes == self.identity.layout.block_bytes
        table.make_room(length - first)

        def load(piece: Piece) -> bool:
            start, end = max(first, piece.start), min(length, piece.start + piece.count)
            with pool.editing(table.blocks[start // BLOCK_SIZE]) as block:
                return log.load(piece, block, start, end)

        pieces = [p for p in log.pieces if p.start < length and p.start + p.count > first]
        num_good = num_first_good(load, pieces)
        good = length if num_good == len(pieces) else max(first, pieces[num_good].start)
        table.append(self.ids[first:good])
        if table.state is not None and pool.states is not None:
            self._load_state(log, pool.states, table.state, first, good)
        table.truncate(good)
        table.adopted = table.adopted or (self._numerics != self.identity.numerics_version and good > first)
        if good < length:
            log.drop(pieces[num_good].start)  # all of it, though the table may have its start from elsewhere
            self._damaged()
        with contextlib.suppress(OSError):
            os.utime(log.descriptor)  # used now
        return len(table) - first

    def _load_state(self, log: RecordLog, states: StatePool, running: RunningState, first: int, length: int) -> None:
        """Give a table the last running state up to `length`, or an earlier one where that is damaged."""
        for state in [s for s in reversed(log.states) if first < s.length <= length]:
            try:
                slot = running.restore(state.length)
            except CacheFullError:
                return
            with states.editing(slot) as memory:
                if log.load_state(state, memory):
                    return
            running.drop(state.length)
            self.problem = f"the running state at position {state.length:,} is damaged"

    def check(self, first: int, length: int) -> int:
        """How far from `first` on, at most to `length`, positions are right: their bytes are read, and kept nowhere."""
        if self._log is not None and not self._log.check(length, first):
            self._damaged()
        return min(length, len(self.ids))

    def save(self, table: BlockTable, pool: KVPool, *, sync: bool = False) -> Saved:
        """Make the file hold what the table holds: write what it lacks, or all of it if too much would be dead.

        What a save has returned survives the death of this process and, with `sync`, of the machine. Raises
        KVFileLockedError or KVFileError (disk full, no permission): the file is good up to where it got.
        """
        assert not self._closed
        assert pool.block_bytes == self.identity.layout.block_bytes
        try:
            log = self._usable_log()
            if log is None:
                return self._rewrite(table, pool) if len(table) else Saved(0, 0)
            if not log.check(common_start(log.ids, table.ids)):
                self._damaged()
            keep = common_start(log.ids, table.ids)
            states = self._states_after(log, table, keep)
            other = self._numerics != self._numerics_of(table)
            if other or self._worth_rewriting(log, len(table), keep, states):
                return self._rewrite(table, pool)
            return self._append(log, table, pool, keep, sync)
        except OSError as error:
            kept = common_start(self.ids, table.ids)
            raise KVFileError(
                self.path, f"not saved: {error.strerror or error}; {kept:,} of {len(table):,} tokens are kept"
            ) from error

    def pause(self) -> None:
        """Let others have the file; nothing else may be called until `go_on`, but `close`."""
        if self._descriptor is not None:
            self._paused = _state(self._descriptor)
            unlock(self._descriptor)

    def go_on(self) -> bool:
        """Have the file again. False if somebody has touched it: close it, and open it anew.

        Raises KVFileLockedError.
        """
        if self._descriptor is not None:
            lock(self._descriptor, self.path)
        return self.is_untouched

    @property
    def is_untouched(self) -> bool:
        """Whether nobody else has had the file since `pause`."""
        if self._descriptor is None:
            return not os.path.lexists(self.path)
        return is_at(self._descriptor, self.path) and _state(self._descriptor) == self._paused

    def close(self) -> None:
        """Let go of the file. May be called again."""
        self._let_go()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, descriptor: int) -> None:
        """Take in header and heads. Raises HeaderError or OSError."""
        header, identity = read_header(os.pread(descriptor, MAX_HEADER_BYTES, 0))
        mismatch = identity.mismatch(self.identity)
        if mismatch:
            self._other = identity
            raise HeaderError(mismatch)
        if identity.numerics_version != self.identity.numerics_version:
            self.maker = identity.maker
        self._numerics = identity.numerics_version
        log = RecordLog(descriptor, identity.layout, header)
        found = log.read_heads()
        self._log = log
        if found is Found.UNFINISHED:
            self._ends("unfinished", ", as after a kill")
        elif found is Found.DAMAGED:
            self._damaged()

    def _damaged(self) -> None:
        self._ends("damaged")

    def _ends(self, how: str, why: str = "") -> None:
        count = len(self.ids)
        used = f"the {count:,} before it are used" if count else "nothing of it is used"
        self.problem = f"{how} from position {count:,} on{why}; {used}"

    def _let_go(self) -> None:
        descriptor, self._descriptor, self._log, self._other = self._descriptor, None, None, None
        if descriptor is not None:
            os.close(descriptor)

    def _usable_log(self) -> RecordLog | None:
        """The log, if its file is where it was and has all of it; what a crash left behind its end is taken away."""
        if self._descriptor is not None and not is_at(self._descriptor, self.path):
            self._let_go()
        log = self._log
        if log is not None:
            size = os.fstat(log.descriptor).st_size
            if size > log.end:
                os.ftruncate(log.descriptor, log.end)
            elif size < log.end:
                self._log = None
        return self._log

    def _worth_rewriting(self, log: RecordLog, length: int, keep: int, states: set[int]) -> bool:
        """Whether more than half would be dead, or blocks in too many pieces, if the rest were appended."""
        kept = sum(piece.start < keep for piece in log.pieces)
        new = blocks_for(length) - keep // BLOCK_SIZE if length > keep else 0
        live = log.bytes_of(length, kept + new, len(states))
        total = log.end + (HEAD_BYTES if keep < log.length else 0) + log.bytes_of(length, new) - log.bytes_of(keep, 0)
        total += log.bytes_of(0, 0, len(states - {s.length for s in log.states})) - log.bytes_of(0, 0)
        return 2 * live < total or kept + new > MAX_PIECES * (blocks_for(length) + 1)

    def _append(self, log: RecordLog, table: BlockTable, pool: KVPool, keep: int, sync: bool) -> Saved:
        before = log.end
        states = self._states_after(log, table, keep)
        self._leave_room(len(table) - keep, len(states - {s.length for s in log.states}))
        if keep < log.length:
            log.cut(keep)
        self._add(log, table, pool)
        self._add_states(log, table, pool)
        if sync and log.end > before:
            try:
                getattr(os, "fdatasync", os.fsync)(log.descriptor)
            except OSError:
                self._log = None  # nobody knows what of it is on the disk
                raise
        return Saved(log.end - before, len(table))

    def _leave_room(self, num_positions: int, num_states: int = 0) -> None:
        """A cache can be made again and words cannot: it does not take the last of the disk from them.

        Raises OSError. What others write meanwhile is not known; then the write itself fails.
        """
        try:
            usage = shutil.disk_usage(self.path.parent)
        except OSError:  # such as a folder that is gone: the write says it better
            return
        reserve = min(RESERVE_BYTES, usage.total // 8)
        layout = self.identity.layout
        needed = num_positions * layout.block_bytes // BLOCK_SIZE + num_states * layout.state_bytes
        if needed and usage.free < needed + reserve:
            raise OSError(errno.ENOSPC, "the disk is nearly full, and the rest is for words")

    def _rewrite(self, table: BlockTable, pool: KVPool) -> Saved:
        """Write another file and put it in place: at any moment, also on the disk, one of them is whole."""
        temporary = temporary_of(self.path)
        old = self._log
        states = self._states_after(old, table, common_start(self.ids, table.ids))
        self._leave_room(len(table), len(states))
        descriptor = create_locked(temporary)
        try:
            if self._descriptor is None:
                # No file when it was looked for; if there is one by now, its owner must not lose it.
                self._descriptor = open_locked(self.path)
            numerics = self._numerics_of(table)
            log = RecordLog.create(descriptor, replace(self.identity, numerics_version=numerics))
            self._add(log, table, pool)
            for state in [*old.states] if old is not None else []:
                held = np.empty(self.identity.layout.state_bytes, np.uint8)
                if state.length in states and old is not None and old.load_state(state, held):
                    log.add_state(state.length, held)
            self._add_states(log, table, pool)
            os.fsync(descriptor)
            if self._other is not None and self._other.numerics_version == self.identity.numerics_version:
                os.replace(self.path, aside_of(self.path, self._other.key))
            os.replace(temporary, self.path)
            sync_folder(self.path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            os.close(descriptor)
            raise
        self._let_go()
        self._descriptor, self._log, self._numerics = descriptor, log, numerics
        return Saved(log.end, len(table))

    def _numerics_of(self, table: BlockTable) -> int:
        return SEVERAL if table.adopted else self.identity.numerics_version

    def _add(self, log: RecordLog, table: BlockTable, pool: KVPool) -> None:
        """Append what a log, which holds a start of the table, does not hold of it."""
        while log.length < len(table):
            start = log.length
            end = min(len(table), (start // BLOCK_SIZE + 1) * BLOCK_SIZE)
            slot = start % BLOCK_SIZE
            block = pool.read(table.blocks[start // BLOCK_SIZE])
            log.add(table.ids[start:end], self.identity.layout.gather(block, slot, slot + end - start))

    def _add_states(self, log: RecordLog, table: BlockTable, pool: KVPool) -> None:
        """Append the running states that a log, which holds all positions of the table, does not have."""
        known = {state.length for state in log.states}
        for checkpoint in table.state.checkpoints if table.state is not None else ():
            if checkpoint.length not in known and pool.states is not None:
                log.add_state(checkpoint.length, pool.states.read(checkpoint.slot))

    @staticmethod
    def _states_after(log: RecordLog | None, table: BlockTable, keep: int) -> set[int]:
        """Lengths whose running states a file holds once `table` is saved, of which it has the first `keep` positions.

        Those that the table has, and of what the file had from earlier the last ones.
        """
        mine = {c.length for c in table.state.checkpoints} if table.state is not None else set[int]()
        others = [s.length for s in log.states if s.length <= keep and s.length not in mine] if log is not None else []
        return mine | set(others[len(others) - max(0, MAX_STATES - len(mine)) :] if others else ())


def bring_back(path: Path, identity: Identity) -> None:
    """Give a conversation's name to the file of this identity, if it was set aside when another model went on with it.

    What has the name is set aside in its turn. Where a file is in use, all stays as it is.
    """
    mine = aside_of(path, identity.key)
    if not os.path.lexists(mine):
        return
    with contextlib.ExitStack() as held, contextlib.suppress(KVFileError, OSError):
        present = None
        for name in (mine, path):
            descriptor = open_locked(name)
            if descriptor is not None:
                held.callback(os.close, descriptor)
                present = _identity_in(descriptor) if name == path else None
        if present == identity:
            return
        if present is not None:
            os.replace(path, aside_of(path, present.key))
        # Killed here, neither has the name: then the next turn finds its file set aside all the same.
        os.replace(mine, path)


def _identity_in(descriptor: int) -> Identity | None:
    """None where the header cannot be used by anybody."""
    with contextlib.suppress(HeaderError):
        return read_header(os.pread(descriptor, MAX_HEADER_BYTES, 0))[1]
    return None


def _state(descriptor: int) -> tuple[int, int]:
    """Another one after every change, and after every opening by this program (it sets the permissions)."""
    info = os.fstat(descriptor)
    return info.st_size, info.st_ctime_ns
