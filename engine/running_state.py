"""The running state of one conversation in layers that fold each token into it, and the states of its past.

Such a state has a fixed size and cannot be cut back: what a token did to it cannot be undone. So states are kept as
checkpoints, at lengths where a conversation is likely to go another way: where messages end, and every INTERVAL
positions. A checkpoint never changes, and forks share it by reference. Going back means going to the last checkpoint
before, and evaluating the rest again; by the contract of the numerics that gives the same bits.

A step takes the running state through its rows, in `Segment`s: where one ends, what it ran on stays behind as it is
there, and the next one runs on a copy. That is how checkpoints are made amid a prompt, and how a state from before
tokens that are only guessed is still there when a guess was wrong.

There are few slots. A conversation that has as many checkpoints as it may have drops the one that would save the least
work in proportion to its age, so they become rarer towards the start of the conversation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.kv_pool import StatePool, StatesFullError

INTERVAL = 512
"""Positions after which a state is kept, if no message ended: what at most has to be evaluated again near the end."""

MAX_SEGMENTS = 4
"""Of a step: it can leave three states behind."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state that is kept."""

    length: int
    """Positions that it has taken in."""
    slot: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a step that run on one slot, up to row `end` of the conversation's."""

    slot: int
    end: int


@dataclass(slots=True)
class _Step:
    """A step under way: the state after it is worth something once all its positions are there."""

    segments: list[Segment]
    """`end` as lengths of the conversation."""
    guessed_from: int
    """Length at which what is only guessed begins."""


class RunningState:
    """The states of one conversation. It knows lengths only; which ids they belong to is the table's business."""

    def __init__(self, pool: StatePool) -> None:
        self.checkpoints: list[Checkpoint] = []  # ascending
        self._pool = pool
        self._slot: int | None = None  # nobody else holds it
        self._length = 0  # positions that it has taken in
        self._step: _Step | None = None
        self._marks: list[int] = []

    def nearest(self, length: int) -> int:
        """The last length up to this one that a state was kept at; at 0 there is always one."""
        return max((c.length for c in self.checkpoints if c.length <= length), default=0)

    def mark(self, lengths: Iterable[int]) -> None:
        """Keep a state at these lengths when they are reached, beside those marked before."""
        self._marks = sorted({*self._marks, *lengths})

    # ------------------------------------------------------------------ a step
    def reserve(self, length: int, num_rows: int, num_guessed: int) -> None:
        """Slots for a step of `num_rows` rows behind `length` positions. Raises StatesFullError, with nothing changed.

        States to be kept on the way take the slots that are left, or those of checkpoints that are missed less.
        """
        self._forget_step()
        assert self._slot is None or self._length == length, "the running state is elsewhere"
        end = length + num_rows
        guessed_from = end - num_guessed
        needed = (self._slot is None) + (num_guessed > 0)
        if needed > self._pool.num_free + len(self._own(but=length)):
            raise StatesFullError(needed, self._pool.num_free)
        while needed > self._pool.num_free:
            self._give_up(self._own(but=length))
        if self._slot is None:
            self._slot = self._begin(length)
        self._length = length
        ends = [*self._due(length, guessed_from), end] if not num_guessed else [guessed_from, end]
        segments = [Segment(self._slot, ends[0])]
        for one in ends[1:]:
            if not self._pool.num_free and not self.thin():  # without what was only to be kept
                segments[-1] = Segment(segments[-1].slot, end)
                break
            segments.append(Segment(self._pool.allocate(), one))
        self._step = _Step(segments, guessed_from)

    def _begin(self, length: int) -> int:
        """A slot of its own with the state at a checkpoint, or at the start."""
        found = next((c.slot for c in self.checkpoints if c.length == length), None)
        if found is not None:
            return self._pool.copy(found)
        assert length == 0, f"no state is kept at {length}"
        slot = self._pool.allocate()
        with self._pool.editing(slot) as memory:
            memory[:] = 0
        return slot

    def _due(self, length: int, end: int) -> list[int]:
        """Lengths before `end` to keep a state at, the last MAX_SEGMENTS - 1 of them."""
        last, due = self.nearest(length), list[int]()
        for mark in [mark for mark in self._marks if length <= mark < end and mark != last] + [end]:
            while last + INTERVAL < mark:
                last = max(last + INTERVAL, length)
                due.append(last)
            last = mark
            due.append(mark)
        return due[:-1][1 - MAX_SEGMENTS :]

    def segments(self, length: int) -> list[Segment]:
        """Of the step that slots were reserved for, with `end` as rows of the step."""
        assert self._step is not None
        assert self._length == length
        return [Segment(segment.slot, segment.end - length) for segment in self._step.segments]

    def advance(self, length: int) -> None:
        """The table has the positions of the step up to `length`: the step is over if those are all."""
        step = self._step
        if step is not None and length == step.segments[-1].end:
            *behind, last = step.segments
            self._step = None
            self._slot, self._length = last.slot, length
            for segment in behind:
                self._keep(segment, guess=segment.end == step.guessed_from)

    def _keep(self, segment: Segment, *, guess: bool) -> None:
        """What a segment left behind becomes a checkpoint, if it is not from before a guess or that is due anyway."""
        if guess and segment.end < self.nearest(segment.end) + INTERVAL:
            self._pool.release(segment.slot)
        else:
            self._add(Checkpoint(segment.end, segment.slot))

    # ------------------------------------------------------------------ the past
    def cut(self, length: int) -> int:
        """Forget what is behind the last state up to `length`; its length.

        A step under way whose guesses were wrong goes back to before them.
        """
        step = self._step
        if step is not None and step.guessed_from <= length < step.segments[-1].end:
            for segment in step.segments[1:]:
                self._pool.release(segment.slot)
            self._step = None
            self._length = length = step.guessed_from
        else:
            self._forget_step()
        if self._slot is not None and self._length == length > 0:
            return length
        self._drop_running()
        length = self.nearest(length)
        for checkpoint in self.checkpoints:
            if checkpoint.length > length:
                self._pool.release(checkpoint.slot)
        self.checkpoints = [c for c in self.checkpoints if c.length <= length]
        return length

    def rest(self, length: int) -> None:
        """The running state becomes a checkpoint."""
        self._marks = []
        if self._slot is not None:
            assert self._length == length
            slot, self._slot = self._slot, None
            if length:
                self._add(Checkpoint(length, slot))
            else:
                self._pool.release(slot)

    def share(self, other: RunningState, length: int) -> int:
        """Take over another's checkpoints up to `length`; the length of the last."""
        assert not self.checkpoints
        self.checkpoints = [c for c in other.checkpoints if c.length <= length]
        for checkpoint in self.checkpoints:
            self._pool.share(checkpoint.slot)
        return self.nearest(length)

    def restore(self, length: int) -> int:
        """A slot for a state that was kept elsewhere, as a checkpoint at `length`. Raises StatesFullError."""
        if not self._pool.num_free and not self.thin():
            raise StatesFullError(1, 0)
        slot = self._pool.allocate()
        self.checkpoints = sorted([*self.checkpoints, Checkpoint(length, slot)], key=lambda c: c.length)
        return slot

    def drop(self, length: int) -> None:
        """Forget the checkpoint at this length."""
        for checkpoint in [c for c in self.checkpoints if c.length == length]:
            self.checkpoints.remove(checkpoint)
            self._pool.release(checkpoint.slot)

    def thin(self) -> bool:
        """Give up a checkpoint that nobody shares, but not the last; False where there is none."""
        found = self._own(but=self.checkpoints[-1].length) if self.checkpoints else []
        if found:
            self._give_up(found)
        return bool(found)

    def _add(self, checkpoint: Checkpoint) -> None:
        if any(c.length == checkpoint.length for c in self.checkpoints):
            self._pool.release(checkpoint.slot)
            return
        self.checkpoints = sorted([*self.checkpoints, checkpoint], key=lambda c: c.length)
        if len(self.checkpoints) > self._pool.most_checkpoints:
            self._give_up(self.checkpoints[:-1])

    def _own(self, but: int) -> list[Checkpoint]:
        """Those that nobody shares, but the one at this length."""
        return [c for c in self.checkpoints if c.length != but and self._pool.num_holders(c.slot) == 1]

    def _give_up(self, some: list[Checkpoint]) -> None:
        """Drop the one whose absence costs least for how long ago it is."""
        lengths = [0, *(c.length for c in self.checkpoints)]
        end = lengths[-1] + 1

        def missed(checkpoint: Checkpoint) -> float:
            n = lengths.index(checkpoint.length)
            return (lengths[min(n + 1, len(lengths) - 1)] - lengths[n - 1]) / (end - lengths[n - 1])

        gone = min(some, key=missed)
        self.checkpoints.remove(gone)
        self._pool.release(gone.slot)

    def _forget_step(self) -> None:
        """A step that did not come to its end: nobody knows what its slots hold."""
        step, self._step = self._step, None
        if step is not None:
            for segment in step.segments[1:]:
                self._pool.release(segment.slot)
            self._drop_running()

    def _drop_running(self) -> None:
        if self._slot is not None:
            self._pool.release(self._slot)
            self._slot = None
