"""Conversations' files at work: restored when a turn begins, saved while it goes on, reloaded when the engine starts.

Whatever goes wrong with a file, the reply is the same: the problem becomes a notice, and the model evaluates what the
file would have saved it. Wrong K/V never get this far: `kv_file.py` compares ids and checks every byte.

A conversation's file stays open as long as its table is in memory, and locked while a turn runs: between turns another
process may go on with the conversation. Whoever finds a file changed reads it anew.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from engine.api import Notice, Reply, TurnStats
from engine.errors import UsageError
from engine.kv_cache import BlockTable, CacheFullError, KVPool, blocks_for, common_start
from engine.kv_file import Identity, KVFile, bring_back
from engine.kv_folder import (
    SUFFIX,
    KeptFile,
    KVFileError,
    KVFileLockedError,
    aside_of,
    list_kept,
    make_room,
    path_of,
)
from engine.kv_layout import speed_key
from engine.prefill_speed import PrefillSpeed
from engine.sessions import Sessions

CAP_BYTES = 8 * 10**9
"""Bytes of all files of a folder, unless the caller says otherwise."""

SAVE_SECONDS = 1.0
"""How much of a long turn the death of the process may cost."""

RELOAD_SECONDS = 0.25
"""A start that has spent this long on files reads no more of them: the others are read when they are needed."""

_MISSING = "file missing"
_OF_NO_USE = "it holds nothing of what was said"


@dataclass(frozen=True, slots=True)
class Restored:
    """What came out of a conversation's file."""

    num_tokens: int
    num_kept: int
    """Tokens that the file had, according to the heads of its records."""
    milliseconds: float


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a start brought back into memory."""

    num_conversations: int
    num_tokens: int
    milliseconds: float


class KeptFiles:
    """The files of the conversations that are in memory. `folder` has been prepared (`kv_folder.prepare`)."""

    def __init__(
        self, folder: Path, identity: Identity, pool: KVPool, sessions: Sessions, cap_bytes: int = CAP_BYTES
    ) -> None:
        assert pool.block_bytes == identity.layout.block_bytes
        self._folder = folder
        self._identity = identity
        self._pool = pool
        self._sessions = sessions
        self._cap_bytes = cap_bytes
        self._files: dict[str, KVFile] = {}
        self._reloaded: dict[str, Restored] = {}  # not asked for since the start
        self._refused: dict[str, str] = {}  # why there is no file, where that has been said
        self._unsaved: set[str] = set()
        self._speed = PrefillSpeed(folder, speed_key(identity))
        sessions.evicted = self._evicted

    def reload(self, max_conversations: int, max_positions: int) -> Reloaded:
        """Bring back what was used last, as far as there is room.

        A file that is damaged, in use or of another model is passed over: it is looked at again, and something is said
        about it, when its conversation goes on.
        """
        started = perf_counter()
        counts: list[int] = []
        for kept in list_kept(self._folder):
            if len(counts) == max_conversations or perf_counter() - started > RELOAD_SECONDS:
                break
            with contextlib.suppress(KVFileError, UsageError):
                count = self._reload_one(kept, max_positions)
                if count:
                    counts.append(count)
        return Reloaded(len(counts), sum(counts), (perf_counter() - started) * 1e3)

    def _reload_one(self, kept: KeptFile, max_positions: int) -> int:
        name, started = kept.path.name.removesuffix(SUFFIX), perf_counter()
        with contextlib.ExitStack() as undo:
            file = undo.enter_context(KVFile.open(path_of(self._folder, name), self._identity))
            num_kept = len(file.ids)
            length = min(num_kept, max_positions)
            states = self._pool.states
            if length == 0 or blocks_for(length) > self._pool.num_free or (states is not None and not states.num_free):
                return 0
            table = self._sessions.preload(name, file.ids[:length])
            undo.callback(self._sessions.forget, name)
            file.restore(table, self._pool, length)
            # Reading a file at a start does not count as using it: the order by use stays as it was.
            with contextlib.suppress(OSError):
                os.utime(kept.path, (kept.used_at, kept.used_at), follow_symlinks=False)
            if not len(table):
                return 0
            file.pause()
            undo.pop_all()
        self._files[name] = file
        self._reloaded[name] = Restored(len(table), num_kept, (perf_counter() - started) * 1e3)
        return len(table)

    def begin(
        self,
        conversation: str,
        table: BlockTable,
        prompt_ids: Sequence[int],
        *,
        warm: bool,
        goes_on: bool,
        told: str | None = None,
    ) -> KeptTurn:
        """Extend the table of a conversation that begins to run by what its file has of the rest of the prompt.

        `warm`: the conversation was in memory. `goes_on`: it has replies already, so a missing file is worth a notice.
        `told`: a problem of the file that has been said.
        """
        num_known = len(table)
        known = self._files.get(conversation)
        reloaded = self._reloaded.pop(conversation, None)
        turn = KeptTurn(self, conversation, table)
        file = self._file(conversation)
        if isinstance(file, KVFile):
            before = file.problem if file is known and reloaded is None else None
            turn.restored = self._restore(file, table, prompt_ids, reloaded)
            problem = file.problem if file.problem != before else None
            if problem == _MISSING and not (goes_on and 2 * num_known < len(prompt_ids)):
                problem = None  # it is new, or a fork of what is in memory
            if file.problem is None and goes_on and common_start(file.ids, prompt_ids, 1) == 0:
                problem = _OF_NO_USE
            if problem == told:
                problem = None
            if turn.restored is not None:
                num_ready = common_start(file.ids, prompt_ids, len(table)) if file.ids else len(table)
                turn.say(self._resume_line(turn.restored, num_ready, _together(problem, _of_another(file, table))))
            elif problem and not warm:
                turn.say(f"not resumed: {problem}")
        elif file != self._refused.get(conversation):
            self._refused[conversation] = file
            turn.say(("not saved: " if warm else "not resumed and not saved: ") + file)
        return turn

    def foresee(
        self, conversation: str, prompt_ids: Sequence[int], in_memory: int, *, goes_on: bool
    ) -> tuple[int, str | None]:
        """The same as `kept_start`, also for a file that is open here."""
        limit = len(prompt_ids) - 1
        file = self._files.get(conversation)
        if file and file.is_untouched and file.reach(common_start(file.ids, prompt_ids, limit)) <= in_memory:
            return in_memory, file.problem if conversation in self._reloaded else None
        goes_on = goes_on and 2 * in_memory < len(prompt_ids)
        return kept_start(self._folder, conversation, self._identity, prompt_ids, in_memory, goes_on=goes_on)

    @property
    def tok_s(self) -> float | None:
        """About how fast prompts are read; None: not known."""
        return self._speed.tok_s

    def _file(self, conversation: str) -> KVFile | str:
        """The conversation's file, open and locked; or why there is none."""
        file = self._files.pop(conversation, None)
        if file is not None and not _goes_on(file):
            file.close()
            file = None
        if file is None:
            try:
                path = path_of(self._folder, conversation)
                bring_back(path, self._identity)
                file = _open_patiently(path, self._identity)
            except KVFileError as error:
                return error.reason
            except UsageError as error:
                return str(error)
        self._files[conversation] = file
        return file

    def _restore(
        self, file: KVFile, table: BlockTable, prompt_ids: Sequence[int], reloaded: Restored | None
    ) -> Restored | None:
        started, num_kept = perf_counter(), len(file.ids)
        num_tokens, milliseconds = 0, 0.0
        if reloaded is not None:
            num_tokens, num_kept = min(reloaded.num_tokens, len(table)), max(reloaded.num_kept, num_kept)
            milliseconds = reloaded.milliseconds
        found = common_start(file.ids, prompt_ids, len(prompt_ids) - 1)
        if file.ids:
            num_tokens = min(num_tokens, found)  # the table may be another conversation's, and the file a stranger's
        known = max(table.num_known, found)
        if file.reach(found) > len(table):
            with contextlib.suppress(CacheFullError):
                self._sessions.make_room(table, found - len(table))
                num_tokens += file.restore(table, self._pool, found)
                milliseconds += (perf_counter() - started) * 1e3
        table.num_known = known
        table.mark([known])
        return Restored(num_tokens, num_kept, milliseconds) if num_tokens else None

    def _resume_line(self, restored: Restored, length: int, problem: str | None) -> str:
        """The line about a resume: `length` positions are ready, of those that its file has or had."""
        # Positions that another conversation had in memory count too, though they did not have to come from the file.
        length = min(length, restored.num_kept)
        line = f"resumed {length:,} of {restored.num_kept:,} tokens, {restored.milliseconds:,.0f} ms"
        if self._speed.tok_s is not None:
            seconds = restored.num_tokens / self._speed.tok_s - restored.milliseconds / 1e3
            if seconds >= 0.1:
                line += f", saved about {seconds:,.{1 if seconds < 2 else 0}f} s"
        return line + (f"; {problem}" if problem else "")

    def save(self, conversation: str, table: BlockTable, *, sync: bool) -> int | None:
        """Bytes written; None where there is no file. Raises KVFileError."""
        file = self._files.get(conversation)
        if file is None:
            return None
        self._unsaved.add(conversation)
        num_bytes = file.save(table, self._pool, sync=sync).num_bytes
        self._unsaved.discard(conversation)
        return num_bytes

    def pause(self, conversation: str) -> None:
        """The turn is over: others may have the file."""
        file = self._files.get(conversation)
        if file is not None:
            file.pause()

    def make_room(self) -> str | None:
        """Remove files beyond the cap; returns a line for people if there were any."""
        removed = make_room(self._folder, self._cap_bytes, [file.path for file in self._files.values()])
        if not removed:
            return None
        what = "the cache of 1 conversation" if len(removed) == 1 else f"the caches of {len(removed):,} conversations"
        size = sum(file.num_bytes for file in removed)
        return (
            f"removed {what} not used for longest ({_megabytes(size)}), to stay within {_megabytes(self._cap_bytes)} "
            "on disk; their words are kept, and read again when they go on"
        )

    def learn(self, stats: TurnStats) -> None:
        """Learn how fast prompts are read, to tell how much time a resume saved."""
        self._speed.learn(stats.prefill_tokens or 0, stats.prefill_tok_s)

    def forget(self, conversation: str) -> None:
        """Let go of a conversation's file, and leave it as it is."""
        self._reloaded.pop(conversation, None)
        self._refused.pop(conversation, None)
        self._unsaved.discard(conversation)
        file = self._files.pop(conversation, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Let go of all files."""
        for conversation in list(self._files):
            self.forget(conversation)

    def _evicted(self, conversation: str, table: BlockTable) -> None:
        """A conversation leaves memory. It was saved when its turn ended; where that failed, there may be room now."""
        file = self._files.get(conversation)
        # A file that somebody has deleted is not made again.
        if file is not None and conversation in self._unsaved and file.path.exists() and _goes_on(file):
            with contextlib.suppress(KVFileError):
                file.save(table, self._pool, sync=True)
        self.forget(conversation)


def kept_start(
    folder: Path,
    conversation: str,
    identity: Identity,
    prompt_ids: Sequence[int],
    in_memory: int = 0,
    *,
    goes_on: bool,
) -> tuple[int, str | None]:
    """How many ids of a prompt would not have to be evaluated, and what is wrong with the conversation's file.

    So many as are in memory, or as the file holds; what it holds behind those in memory is checked. Nothing is changed.
    `goes_on`: it has replies already, so that there should be a file.
    """
    try:
        path = path_of(folder, conversation)
        names = (path, aside_of(path, identity.key))  # as `bring_back` would leave them
        problem = None
        for name in names if os.path.lexists(names[1]) else names[:1]:
            with _open_patiently(name, identity) as file:
                found = file.reach(common_start(file.ids, prompt_ids, len(prompt_ids) - 1))
                count = file.check(in_memory, found) if found > in_memory else 0
                problem = file.problem
                if file.num_bytes:
                    return max(in_memory, count), problem
    except KVFileError as error:
        return in_memory, error.reason
    except UsageError as error:
        return in_memory, str(error)
    return in_memory, None if problem == _MISSING and not goes_on else problem


class KeptTurn:
    """One turn of a conversation with its file, between `KeptFiles.begin` and `finish`."""

    def __init__(self, files: KeptFiles, conversation: str, table: BlockTable) -> None:
        self.restored: Restored | None = None
        self._files = files
        self._conversation = conversation
        self._table = table
        self._notices: list[Notice] = []
        self._num_bytes: int | None = None
        self._saved_at = perf_counter()
        self._failed = False
        self._finished = False

    def say(self, line: str | None) -> None:
        if line is not None:
            self._notices.append(Notice(line))

    def take_notices(self) -> list[Notice]:
        """The notices that have not been taken yet."""
        notices, self._notices = self._notices, []
        return notices

    def keep_up(self) -> None:
        """Save what there is, if the last save is long enough ago."""
        if not self._failed and perf_counter() - self._saved_at >= SAVE_SECONDS:
            self._failed = self._save(sync=False) is not None  # said at the end, if it still fails then
            self._saved_at = perf_counter()

    def finish(self, *, save: bool = True) -> None:
        """Save all of it, and keep to the cap. May be called again; raises nothing."""
        if self._finished:
            return
        self._finished = True
        if save:
            self.say(self._save(sync=True))
        if self._num_bytes:
            self.say(self._files.make_room())
        self._files.pause(self._conversation)

    def described(self, reply: Reply) -> Reply:
        """A reply with the figures of its conversation's file."""
        self._files.learn(reply.stats)
        return replace(reply, stats=self._figures(reply.stats))

    def _save(self, *, sync: bool) -> str | None:
        """Why it failed, or None."""
        try:
            num_bytes = self._files.save(self._conversation, self._table, sync=sync)
        except KVFileError as error:
            return error.reason if error.reason.startswith("not saved") else f"not saved: {error.reason}"
        if num_bytes is not None:
            self._num_bytes = (self._num_bytes or 0) + num_bytes
        return None

    def _figures(self, stats: TurnStats) -> TurnStats:
        restored = self.restored
        return replace(
            stats,
            restore_ms=None if restored is None else restored.milliseconds,
            restored_tokens=None if restored is None else restored.num_tokens,
            kv_saved_bytes=self._num_bytes,
        )


def _of_another(file: KVFile, table: BlockTable) -> str | None:
    """The notice about K/V that another backend computed."""
    if file.maker is None or not table.adopted:
        return None
    return f"computed by {file.maker}, so words may differ from those of a prompt that is read here"


def _together(*texts: str | None) -> str | None:
    return "; ".join(text for text in texts if text) or None


def _goes_on(file: KVFile) -> bool:
    """Whether a file that was let go of is this process's again, and as it was."""
    with contextlib.suppress(KVFileError, OSError):
        return file.go_on()
    return False


def _open_patiently(path: Path, identity: Identity, sleep: Callable[[float], None] = time.sleep) -> KVFile:
    """Open a file. A program that starts holds it for some milliseconds, which is no reason to go without."""
    for seconds in (0.02, 0.06):
        try:
            return KVFile.open(path, identity)
        except KVFileLockedError:
            sleep(seconds)
    return KVFile.open(path, identity)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:,.1f} MB"
