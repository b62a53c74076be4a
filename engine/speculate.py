"""How many tokens to guess ahead, and what it brought.

A step that checks n guesses reads the weights once, so it costs far less than n steps. `Speculation` decides for one
reply, before each step, how many tokens its drafter guesses:

- A drafter (`drafters.py`) makes guesses, each of some kind, and `Acceptance` knows how often guesses of a kind come
  true. It learns from every token, also from those that were not guessed: what would have been the guess is compared
  with what was drawn.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from engine.draft_model import DraftModel, Pick
from engine.drafters import Acceptance, Drafter, Guess, ModelDrafter, NgramDrafter
from engine.kv_cache import BlockTable
from engine.ngram import NgramIndex

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Row counts that are timed apart; kernels work on 8 rows at once, so what lies between costs about the next one."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """What one step of all running generations took."""

    seconds: float
    num_rows: int
    num_running: int


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

    def __init__(
        self, history: History, costs: StepCosts, end_ids: frozenset[int], drafter: Drafter | None = None
    ) -> None:
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
        self._drafter = drafter if drafter is not None else NgramDrafter(history.index)
        self._guesses: list[Guess] = []  # of the last step, checked or not

    def draft(
        self,
        ids: Sequence[int],
        limit: int,
        num_running: int = 1,
        check: Callable[[list[int]], list[int]] | None = None,
    ) -> list[int]:
        """At most `limit` tokens that may follow `ids`, worth checking in a step of `num_running` generations.

        `ids` is the whole conversation so far, and only grows from call to call. `check` makes of a draft what a
        grammar lets through.
        """
        idle = limit < 1 or self._history.guard.pausing or self.costs.due(len(ids))
        worth_seconds = 0.0 if idle else self.costs.plain(1)
        self._guesses = self._drafter.guess(ids, 1 if idle else limit, worth_seconds=worth_seconds)
        count = 0 if idle else self._count(self._guesses, num_running)
        draft = [guess.token for guess in self._guesses[:count]]
        # What follows the end of a reply is never said.
        draft = draft[: next((i for i, token in enumerate(draft) if token in self._end_ids), count)]
        if check is not None and draft:
            draft = check(draft)[:limit]
        return draft

    def learn(self, drawn: Sequence[int], num_drafted: int, time: StepTime, num_known: int = 1) -> None:
        """Take in what the model drew in a step for which `draft` gave `num_drafted` tokens.

        `num_known` rows were not guessed: more than one where a running state had to go back to before a wrong guess.
        """
        acceptance, guard = self._history.acceptance, self._history.guard
        accepted = 0
        for token, guess in zip(drawn, self._guesses):
            acceptance.observe(guess.kind, token == guess.token)
            accepted += token == guess.token
        self.num_steps += 1
        self.num_drawn += len(drawn)
        if not (num_drafted or self._drafter.seconds):
            guard.undrafted()
            return
        self.num_drafted_steps += num_drafted > 0
        self.num_guessed += num_drafted
        self.num_accepted += min(accepted, num_drafted)
        spent = time.seconds * (num_drafted + num_known) / time.num_rows + self._drafter.seconds
        saved = len(drawn) * self.costs.plain(time.num_running) / time.num_running - spent
        self.saved_seconds += saved
        if self._guesses:  # else a smaller model reads what was said, which it does once
            self.num_pauses += guard.drafted(saved, spent)

    def _count(self, guesses: Sequence[Guess], num_running: int) -> int:
        """How many of the guesses to check: as many as promise the most tokens a second.

        Each of several running generations reckons as if all guessed as much: rows of a step are dear together.
        """
        if not guesses:
            return 0
        costs, acceptance, limit = self.costs, self._history.acceptance, len(guesses)
        best, chosen = self.MARGIN * num_running / costs.plain(num_running), 0
        expected, chance, counted = 1.0, 1.0, 0
        for size in range(_size(2 * num_running), len(SIZES)):
            count = min(SIZES[size] // num_running - 1, limit)
            for guess in guesses[counted:count]:
                chance *= acceptance.chance(guess.kind)
                expected += chance
            counted = count
            rate = num_running * expected / costs.drafted(size)
            if rate > best:
                best, chosen = rate, count
            if count == limit or chance < 0.02:
                break
        return chosen


class Speculator:
    """What speculation keeps from reply to reply: costs on this machine, and the history of each kept conversation."""

    def __init__(self, model: DraftModel | None = None) -> None:
        self.model = model
        self.costs = StepCosts()
        # A conversation is known by its table, so a history lives exactly as long as the cache it belongs to.
        self._histories: WeakKeyDictionary[BlockTable, History] = WeakKeyDictionary()

    def begin(
        self, table: BlockTable, end_ids: frozenset[int], model_for: tuple[str, Pick] | None = None
    ) -> Speculation:
        """For a reply of the conversation that `table` belongs to. The first guess brings its history up to date.

        `model_for`: the conversation's name and how tokens are drawn, where the smaller model guesses too.
        """
        history = self._histories.setdefault(table, History())
        if model_for is None:
            return Speculation(history, self.costs, end_ids)
        assert self.model is not None
        drafter = ModelDrafter(NgramDrafter(history.index), history.acceptance, self.model, *model_for)
        return Speculation(history, self.costs, end_ids, drafter)


def _size(num_rows: int) -> int:
    """Index of the smallest of SIZES that holds so many rows; the largest for more."""
    return min(bisect_left(SIZES, num_rows), len(SIZES) - 1)


def _median(values: Sequence[float] | deque[float]) -> float:
    return sorted(values)[len(values) // 2]
