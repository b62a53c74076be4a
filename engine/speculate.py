"""How many tokens to guess ahead, and what it brought.

A step that checks n guesses reads the weights once, so it costs far less than n steps. `Speculation` decides for one
reply, before each step, how many tokens its drafter guesses:

- `Acceptance` knows how often guesses come true, by the length of the match they go on from. It learns from every
  token, also from those that were not guessed: what would have been the guess is compared with what was drawn.
- `StepCosts` knows how long a step with so many rows takes, from timing them.
- The count with the most expected tokens a second is taken; none, where plain decoding has most.
- `Guard` adds up what steps with guesses took. Where they lost time after all, nothing is guessed for a while.

Times and odds decide how many tokens are guessed and nothing else. The guesses are rows of a step like any others;
`generate.py` draws from each row what plain decoding would have drawn there and drops the rows behind the first wrong
guess. So nothing in this file can change a reply.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from engine.kv_cache import BlockTable
from engine.ngram import LONGEST, NgramIndex

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Rows of a step that are told apart; kernels work on 8 rows at once, so what lies between costs about the next one."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """What one step of all running generations took."""

    seconds: float
    num_rows: int
    num_running: int


class Acceptance:
    """How likely the next token of a match of some length is right, by powers of two of the length.

    It forgets: the last 40 or so outcomes of a length count, since a conversation changes from answers to copies.
    """

    def __init__(self) -> None:
        # For lengths 1, 2-3, 4-7, ... and LONGEST: about what code and prose gave; each is worth 8 outcomes.
        self._chances = [0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.97]
        self._counts = [8] * len(self._chances)
        assert LONGEST.bit_length() == len(self._chances)

    def chance(self, length: int) -> float:
        return self._chances[min(length, LONGEST).bit_length() - 1]

    def observe(self, length: int, right: bool) -> None:
        kind = min(length, LONGEST).bit_length() - 1
        self._counts[kind] = min(self._counts[kind] + 1, 40)
        self._chances[kind] += (right - self._chances[kind]) / self._counts[kind]


class StepCosts:
    """Seconds of a step by its rows, on this machine and at the depth of late: kept from reply to reply.

    Steps without guesses give the unit, a step of one row; steps with guesses are measured against it. Both are
    medians of a few, since one step may take ten times as long when something else runs on the machine.
    """

    REMEASURE = 32
    """Steps with guesses after which a plain one is due: it costs them less than 1 % and keeps the unit true."""

    _PRIOR = (1.0, 1.05, 1.1, 1.25, 1.9, 2.4, 3.0, 4.0, 5.0)  # rather too cheap: what is never tried is never learned

    def __init__(self) -> None:
        self._units: deque[float] = deque(maxlen=9)
        self._unit = 0.0
        self._unit_depth = 0
        self._since_unit = 0
        self._measured: list[deque[float]] = [deque(maxlen=6) for _ in SIZES]
        self._ratios = list(self._PRIOR)
        self._num_steps = 0

    def due(self, depth: int) -> bool:
        """Whether a step without guesses should be timed: it is long ago, or was at a quite different depth."""
        return (
            not self._units
            or self._since_unit >= self.REMEASURE
            or abs(depth - self._unit_depth) > 256 + self._unit_depth // 4
        )

    def measured(self, num_rows: int, num_drafted: int, depth: int, seconds: float) -> None:
        """Learn from a step that gave the logits of all its rows."""
        size, seconds = _size(num_rows), max(seconds, 1e-9)
        if not num_drafted:
            self._units.append(seconds / self._PRIOR[size])
            self._unit, self._unit_depth, self._since_unit = _median(self._units), depth, 0
        elif self._unit:
            self._since_unit += 1
            self._measured[size].append(seconds / self._unit)
            self._update(size)
        self._num_steps += 1
        if self._num_steps % 512 == 0:  # what has not been measured for long goes back to the prior, and is tried again
            for size, measured in enumerate(self._measured):
                if measured:
                    measured.popleft()
                    self._update(size)

    def plain(self, num_rows: int) -> float:
        """Seconds of a step without guesses: one row for each of the running generations."""
        return self._unit * self._PRIOR[_size(num_rows)]

    def drafted(self, size: int) -> float:
        """Seconds of a step with guesses of SIZES[size] rows."""
        return self._unit * self._ratios[size]

    def _update(self, size: int) -> None:
        self._ratios[size] = max(1.0, _median([self._PRIOR[size], *self._measured[size]]))


class Guard:
    """Stops guessing for a while when it costs time: 16 steps with guesses that took 3 % longer than plain ones would.

    The first pause is 32 tokens, each one that follows at once twice as long as the last.
    """

    WINDOW = 16
    FIRST_PAUSE, LONGEST_PAUSE = 32, 1024

    def __init__(self) -> None:
        self._saved: list[float] = []
        self._spent = 0.0
        self._pause = self.FIRST_PAUSE
        self._left = 0

    @property
    def pausing(self) -> bool:
        return self._left > 0

    def drafted(self, saved: float, spent: float) -> bool:
        """A step with guesses took `spent` seconds and saved some, or lost them; True when a pause begins."""
        self._saved.append(saved)
        self._spent += spent
        if len(self._saved) < self.WINDOW:
            return False
        lost = -sum(self._saved) > 0.03 * self._spent
        self._saved.clear()
        self._spent = 0.0
        if not lost:
            self._pause = self.FIRST_PAUSE
            return False
        self._left = self._pause
        self._pause = min(2 * self._pause, self.LONGEST_PAUSE)
        return True

    def undrafted(self) -> None:
        self._left = max(0, self._left - 1)


class History:
    """What is kept of a conversation: all it has said, how often guesses from it came true, whether they paid."""

    def __init__(self) -> None:
        self.index = NgramIndex()
        self.acceptance = Acceptance()
        self.guard = Guard()


class Speculation:
    """Guesses for one reply, and their figures."""

    MARGIN = 1.03
    """Guessing must promise this much more than plain decoding: odds and costs are estimates."""

    def __init__(self, history: History, costs: StepCosts, end_ids: frozenset[int]) -> None:
        self.costs = costs
        self.num_steps = 0
        self.num_drafted_steps = 0
        self.num_drawn = 0
        self.num_guessed = 0
        self.num_accepted = 0
        self.num_pauses = 0
        self.saved_seconds = 0.0
        self._history = history
        self._end_ids = end_ids
        self._begun = False
        self._length = 0  # of the match at the last step, and the guesses that it gave, checked or not
        self._guess: list[int] = []

    def draft(self, ids: Sequence[int], limit: int, num_running: int = 1) -> list[int]:
        """At most `limit` tokens that may follow `ids`, worth checking in a step of `num_running` generations.

        `ids` is the whole conversation so far, and only grows from call to call.
        """
        index = self._history.index
        if self._begun:
            index.extend(ids[len(index) :])
        else:
            index.follow(ids)
            self._begun = True
        self._length = index.match()
        count = self._count(limit, num_running, len(ids))
        self._guess = index.guess(max(1, count))
        draft = self._guess[:count]
        # What follows the end of a reply is never said.
        return draft[: next((i for i, token in enumerate(draft) if token in self._end_ids), count)]

    def learn(self, drawn: Sequence[int], num_drafted: int, time: StepTime) -> None:
        """Take in what the model drew in a step for which `draft` gave `num_drafted` tokens."""
        acceptance, guard = self._history.acceptance, self._history.guard
        accepted = 0
        for i, (token, guess) in enumerate(zip(drawn, self._guess)):
            acceptance.observe(self._length + i, token == guess)
            accepted += token == guess
        self.num_steps += 1
        self.num_drawn += len(drawn)
        if not num_drafted:
            guard.undrafted()
            return
        self.num_drafted_steps += 1
        self.num_guessed += num_drafted
        self.num_accepted += min(accepted, num_drafted)
        spent = time.seconds * (num_drafted + 1) / time.num_rows
        saved = len(drawn) * self.costs.plain(time.num_running) / time.num_running - spent
        self.saved_seconds += saved
        self.num_pauses += guard.drafted(saved, spent)

    def _count(self, limit: int, num_running: int, depth: int) -> int:
        """How many tokens to guess: as many as promise the most tokens a second."""
        costs, acceptance, length = self.costs, self._history.acceptance, self._length
        if not length or limit < 1 or self._history.guard.pausing or costs.due(depth):
            return 0
        best, chosen = self.MARGIN * num_running / costs.plain(num_running), 0
        expected, chance, counted = float(num_running), 1.0, 0
        for size in range(_size(num_running + 1), len(SIZES)):
            count = min(SIZES[size] - num_running, limit)
            for i in range(counted, count):
                chance *= acceptance.chance(length + i)
                expected += chance
            counted = count
            rate = expected / costs.drafted(size)
            if rate > best:
                best, chosen = rate, count
            if count == limit or chance < 0.02:
                break
        return chosen


class Speculator:
    """What speculation keeps from reply to reply: costs on this machine, and the history of each kept conversation."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        # A conversation is known by its table, so a history lives exactly as long as the cache it belongs to.
        self._histories: WeakKeyDictionary[BlockTable, History] = WeakKeyDictionary()

    def begin(self, table: BlockTable, end_ids: frozenset[int]) -> Speculation:
        """For a reply of the conversation that `table` belongs to. The first guess brings its history up to date."""
        return Speculation(self._histories.setdefault(table, History()), self.costs, end_ids)


def _size(num_rows: int) -> int:
    """Index of the smallest of SIZES that holds so many rows; the largest for more."""
    return min(bisect_left(SIZES, num_rows), len(SIZES) - 1)


def _median(values: Sequence[float] | deque[float]) -> float:
    return sorted(values)[len(values) // 2]
