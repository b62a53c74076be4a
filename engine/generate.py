"""One reply in the making: the ids of prompt and reply, the table of what has K/V, the state of sampling and decoding.

Whatever ids have no K/V yet are what a `Generation` schedules next: chunks of the prompt, then each drawn token.
`step.py` runs the scheduled rows of all running generations in one forward call and hands each its logits.

By the contract of the numerics no result depends on how the rows are cut. So a step may run tokens that are only
guessed (`speculate.py`): from each row is drawn what plain decoding draws at that position, and a guess is kept if it
is what was drawn. The first row behind a wrong guess ends the step. Only what was drawn ever reaches ids, text, stop
strings and table, so there is nothing to take back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.api import (
    Event,
    FinishReason,
    Logprob,
    PrefillProgress,
    Progress,
    Reply,
    Request,
    TextDelta,
    TokenLogprobs,
    TurnStats,
)
from engine.kv_cache import BlockTable
from engine.model import MAX_WANTED
from engine.sampler import Sampler, log_probabilities
from engine.speculate import Speculation, StepTime
from engine.stop_strings import StopStrings

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

PROGRESS_SECONDS = 0.1
"""Between two Progress events: as often as an eye follows a number, and seldom enough to cost nothing."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Ids to run on top of a table, and of how many of the last ones logits are wanted."""

    table: BlockTable
    ids: list[int]
    num_wanted: int
    num_drafted: int = 0
    """How many of the last ids are guesses."""

    @property
    def known(self) -> list[int]:
        return self.ids[: len(self.ids) - self.num_drafted]

    @property
    def draft(self) -> list[int]:
        return self.ids[len(self.ids) - self.num_drafted :]


class Generation:
    """One reply in the making. `events` are those not yet handed out."""

    def __init__(
        self,
        request: Request,
        prompt_ids: Sequence[int],
        table: BlockTable,
        tokenizer: Tokenizer,
        *,
        seed: int,
        context_size: int,
        submitted: float,
        speculation: Speculation | None = None,
    ) -> None:
        """`table` holds the start of the prompt that needs no evaluation; `submitted` is a time of perf_counter."""
        assert len(table) < len(prompt_ids) < context_size
        self.table = table
        self.ids = list(prompt_ids)
        self.finish_reason: FinishReason | None = None
        self.events: list[Event] = []
        self.speculation = speculation
        self._request = request
        self._tokenizer = tokenizer
        self._sampler = Sampler(request.sampling, seed)
        self._decoder = tokenizer.stream()
        self._stops = StopStrings(request.stop)
        self._context_size = context_size
        self._num_prompt = len(prompt_ids)
        self._num_reused = len(table)
        self._end = min(context_size, self._num_prompt + (request.max_tokens or context_size))
        self._text: list[str] = []
        self._text_ends: list[int] = []  # characters decoded up to and with each reply id
        self._logprobs: list[TokenLogprobs] = []
        self._submitted = submitted
        self._first_token: float | None = None
        self._told = submitted
        self._prefill_tokens = 0
        self._prefill_seconds = 0.0
        self._decode_tokens = 0
        self._decode_seconds = 0.0
        self._given_up_to = 0
        self._reached = len(table)  # positions that have had K/V, also where they had to be given back
        self.put_back = False
        """It gave its K/V back for others to go on."""
        self.error: Exception | None = None
        """Why it cannot go on."""

    @property
    def done(self) -> bool:
        """Finished, and every id of the reply has K/V: the next turn reuses all of it."""
        if self.finish_reason is None:
            return False
        return self.put_back or len(self.table) < self._num_prompt or len(self.table) == len(self.ids)

    @property
    def remaining(self) -> int:
        """Ids that have no K/V yet: the rest of the prompt, or what was drawn last."""
        return len(self.ids) - len(self.table)

    def give_way(self) -> None:
        """Give back all K/V, for others to go on. The ids are kept, and evaluated again when there is room for all."""
        self._given_up_to = len(self.ids)
        self.table.truncate(0)
        self.put_back = True

    @property
    def behind(self) -> bool:
        """It gave way, and has not yet got back to where it was."""
        return len(self.table) < self._given_up_to

    def schedule(self, max_rows: int, num_running: int = 1) -> Rows:
        """What to run next: at most `max_rows` ids, and guesses after the last one if the model draws there.

        Logits are wanted of a last row that something is drawn from, and of guesses.
        """
        start = len(self.table)
        ids = self.ids[start : start + max_rows]
        draws = self.finish_reason is None and start + len(ids) == len(self.ids)
        if self.speculation is None or not draws or start < self._num_prompt:
            return Rows(self.table, ids, num_wanted=int(draws))
        limit = min(MAX_WANTED // num_running, self._end - len(self.ids)) - 1
        draft = self.speculation.draft(self.ids, limit, num_running)
        return Rows(self.table, ids + draft, num_wanted=1 + len(draft), num_drafted=len(draft))

    def accept(self, rows: Rows, logits: NDArray[np.float32], started: float, time: StepTime) -> None:
        """Take in a step that began at `started` and ran `rows`; logits [W, V] f32 of those that are wanted."""
        self.table.append(rows.known)
        length = len(self.table)
        prefilled = length <= self._num_prompt
        if prefilled and length > self._reached:
            self._prefill_tokens += length - self._reached
            self._prefill_seconds += perf_counter() - started
            self.events.append(PrefillProgress(length, self._num_prompt, self._num_reused))
        self._reached = max(self._reached, length)
        if not len(logits):
            return
        drawn = self._draw_all(rows.draft, logits)
        if not prefilled:
            self._decode_tokens += len(drawn)
            self._decode_seconds += perf_counter() - started
            if self.speculation is not None:
                self.speculation.learn(drawn, rows.num_drafted, time)
            self._tell()

    def _tell(self) -> None:
        """The figures so far, unless it is too soon for them or the reply ends and Finished has them."""
        now = perf_counter()
        if self.finish_reason is None and now - self._told >= PROGRESS_SECONDS:
            self._told = now
            self.events.append(Progress(self._stats()))

    def cancel(self) -> None:
        """End the reply with what there is."""
        if self.finish_reason is None:
            self._finish("cancelled")

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def reply(self) -> Reply:
        assert self.finish_reason is not None
        return Reply(
            text="".join(self._text),
            ids=tuple(self._reply_ids),
            prompt_ids=tuple(self.ids[: self._num_prompt]),
            finish_reason=self.finish_reason,
            stats=self._stats(),
            logprobs=None if self._request.top_logprobs is None else tuple(self._logprobs),
        )

    @property
    def _reply_ids(self) -> list[int]:
        return self.ids[self._num_prompt :]

    def _draw_all(self, draft: list[int], logits: NDArray[np.float32]) -> list[int]:
        """The tokens drawn from rows of logits [1 + D, V] f32, up to the first that a draft of D did not guess.

        A guess that was drawn has its K/V already, in the row that was run for it.
        """
        drawn: list[int] = []
        for i, row in enumerate(logits):
            position = len(self.ids)
            token = self._draw(row)
            drawn.append(token)
            right = i < len(draft) and draft[i] == token
            if right and len(self.ids) > position:  # else it is an end token, or a stop string cut it off
                self.table.append([token])
            if not right or self.finish_reason is not None:
                break
        if draft:
            self.table.truncate(len(self.table))  # no more room than without guesses
        return drawn

    def _draw(self, logits: NDArray[np.float32]) -> int:
        """The next token: it ends the reply, or becomes part of it."""
        logits = logits[: self._tokenizer.vocab_size]  # some models have more rows, as padding
        token = self._sampler.sample(logits, len(self.ids), self.ids)
        if self._first_token is None:
            self._first_token = perf_counter()
        if token in self._tokenizer.end_ids:
            self._finish("stop")
            return token
        if self._request.top_logprobs is not None:
            self._logprobs.append(self._describe(logits, token, self._request.top_logprobs))
        self.ids.append(token)
        text = self._decoder.push(token)
        self._text_ends.append((self._text_ends[-1] if self._text_ends else 0) + len(text))
        if self._show(text):
            self._stop()
        elif len(self.ids) == self._end:
            self._finish("length")
        return token

    def _describe(self, logits: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
        def entry(i: int, logprob: float) -> Logprob:
            return Logprob(id=i, logprob=logprob, piece=self._tokenizer.piece(i))

        chosen, top = log_probabilities(logits, token, count)
        return TokenLogprobs(chosen=entry(token, chosen), top=tuple(entry(i, value) for i, value in top))

    def _show(self, text: str, *, last: bool = False) -> bool:
        """Let decoded text out as far as the stop strings allow; True when one of them ended the reply."""
        text, stopped = self._stops.push(text)
        if last and not stopped:
            text += self._stops.finish()
        if text:
            self._text.append(text)
            self.events.append(TextDelta(text))
        return stopped

    def _finish(self, reason: FinishReason) -> None:
        """Nothing more is drawn: what was held back is text after all, a cut character becomes U+FFFD."""
        self.finish_reason = reason
        if self._show(self._decoder.finish(), last=True):
            self._stop()

    def _stop(self) -> None:
        """A stop string ended the reply: keep the ids up to the one that completes the text before it.

        That id's own text may reach into the stop string; a token cannot be cut.
        """
        self.finish_reason = "stop"
        length = sum(map(len, self._text))
        kept = min(bisect_left(self._text_ends, length) + 1, len(self._text_ends)) if length else 0
        del self.ids[self._num_prompt + kept :]
        del self._logprobs[kept:]
        self.table.truncate(min(len(self.table), len(self.ids)))

    def _stats(self) -> TurnStats:
        known, sampling, speculation = self._first_token, self._sampler, self.speculation
        stats = TurnStats(
            prompt_tokens=self._num_prompt,
            prefill_reused_tokens=self._num_reused,
            prefill_tokens=self._prefill_tokens,
            completion_tokens=len(self._reply_ids),
            ttft_ms=None if known is None else (known - self._submitted) * 1e3,
            prefill_tok_s=_rate(self._prefill_tokens, self._prefill_seconds),
            decode_tok_s=_rate(self._decode_tokens, self._decode_seconds),
            context_used=len(self.table),
            context_size=self._context_size,
            kv_bytes=self.table.num_bytes,
            seed=sampling.seed,
        )
        if speculation is None:
            return stats
        return replace(
            stats,
            draft_tokens=speculation.num_guessed,
            draft_accepted=speculation.num_accepted,
            acceptance=_rate(speculation.num_accepted, speculation.num_guessed),
            tokens_per_step=_rate(speculation.num_drawn, speculation.num_steps),
            undrafted_steps=speculation.num_steps - speculation.num_drafted_steps,
            draft_saved_ms=speculation.saved_seconds * 1e3,
            draft_pauses=speculation.num_pauses,
        )


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None
