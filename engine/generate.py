"""One reply in the making: the ids of prompt and reply, the table of what has K/V, the state of sampling and decoding.

Whatever ids have no K/V yet are what a `Generation` schedules next: chunks of the prompt, then each drawn token.
`step.py` runs the scheduled rows of all running generations in one forward call and hands each its logits.

By the contract of the numerics no result depends on how the rows are cut. So a step may run tokens that are only
guessed (`speculate.py`): from each row is drawn what plain decoding draws at that position, and a guess is kept if it
is what was drawn. The first row behind a wrong guess ends the step. Only what was drawn ever reaches ids, text, stop
strings and table, so there is nothing to take back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    TokenLogprobs,
    TurnStats,
)
from engine.buffers import MAX_WANTED
from engine.errors import EngineError
from engine.kv_cache import BlockTable
from engine.reply_plan import ReplyPlan
from engine.reply_text import ReplyText
from engine.sampler import Sampler, log_probabilities
from engine.speculate import Speculation, StepTime

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
        """The ids that are not guessed."""
        return self.ids[: len(self.ids) - self.num_drafted]

    @property
    def draft(self) -> list[int]:
        """The ids that are guessed."""
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
        plan: ReplyPlan | None = None,
    ) -> None:
        """`table` holds the start of the prompt that needs no evaluation; `submitted` is a time of perf_counter."""
        assert len(table) < len(prompt_ids) < context_size
        self.table = table
        self.ids = list(prompt_ids)
        self.finish_reason: FinishReason | None = None
        self.speculation = speculation
        self._request = request
        self._tokenizer = tokenizer
        self._sampler = Sampler(request.sampling, seed)
        self._plan = plan or ReplyPlan()
        self._text = ReplyText(tokenizer, self._plan, request.stop)
        self.events = self._text.events
        self._matcher = self._plan.grammar.matcher() if self._plan.grammar is not None else None
        self._first = self._matcher.forced() if self._matcher is not None else []  # what the reply must begin with
        self._forced: list[int] = []  # to be drawn next, where the log probabilities of each are wanted
        self._num_forced = 0
        self._guessed = False  # the step that runs has a draft of the drafter's
        self._context_size = context_size
        self._num_prompt = len(prompt_ids)
        self._num_reused = len(table)
        self._end = min(context_size, self._num_prompt + (request.max_tokens or context_size))
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
        self._known = min(table.num_known, self._num_prompt - 1)  # that have K/V, if not a state to go on from
        self._num_recomputed = 0
        table.mark([*message_ends(prompt_ids, tokenizer.end_ids), self._num_prompt - 1])
        self.gave_way = False
        """It gave its K/V back for others to go on."""
        self.error: Exception | None = None
        """Why it cannot go on."""

    @property
    def done(self) -> bool:
        """Finished, with K/V for every id of the reply, so that the next turn can reuse all of it."""
        if self.finish_reason is None:
            return False
        # What was stopped amid its prompt stays so. One that a stop string cut back to before its end reads on.
        amid_prompt = self.finish_reason == "cancelled" and len(self.table) < self._num_prompt
        return self.gave_way or amid_prompt or len(self.table) == len(self.ids)

    @property
    def remaining(self) -> int:
        """Ids that have no K/V yet: the rest of the prompt and what must follow it, or what was drawn last."""
        return len(self.ids) - len(self.table) + len(self._first)

    def give_way(self) -> None:
        """Give back all K/V, for others to go on. The ids are kept, and evaluated again as there is room."""
        self._given_up_to = len(self.ids)
        self.table.truncate(0)
        self._known = 0
        self.gave_way = True

    @property
    def behind(self) -> bool:
        """It gave way, and has not yet got back to where it was."""
        return len(self.table) < self._given_up_to

    def schedule(self, max_rows: int, num_running: int = 1) -> Rows:
        """What to run next: at most `max_rows` ids, and guesses after the last one if the model draws there.

        Logits are wanted of a last row that something is drawn from, and of guesses.
        """
        start = len(self.table)
        if self._first and start + max_rows >= self._num_prompt:
            self._begin()
        ids = self.ids[start : start + max_rows]
        draws = self.finish_reason is None and start + len(ids) == len(self.ids)
        self._guessed = False
        if not draws or start < self._num_prompt or (self.speculation is None and not self._forced):
            return Rows(self.table, ids, num_wanted=int(draws))
        limit = min(MAX_WANTED // num_running, self._end - len(self.ids)) - 1
        if self._forced:
            draft = self._forced[: max(0, limit)]
        else:
            assert self.speculation is not None
            check = None if self._matcher is None else self._lets_through
            draft = self.speculation.draft(self.ids, limit, num_running, check)
            self._guessed = True
        return Rows(self.table, ids + draft, num_wanted=1 + len(draft), num_drafted=len(draft))

    def _begin(self) -> None:
        """What a reply that is held to a grammar must begin with runs with the end of the prompt."""
        first, self._first = self._first, []
        if self._request.top_logprobs is None:
            self._num_forced = len(first)
            self._take(first)
        else:
            self._forced = first

    def _lets_through(self, draft: list[int]) -> list[int]:
        """What the grammar makes of a draft: up to the first token that it bars, with those that it forces."""
        assert self._matcher is not None
        matcher, taken, i = self._matcher, list[int](), 0
        while i < len(draft) and matcher.advance(draft[i : i + 1]):
            taken.append(draft[i])
            i += 1
            forced = [] if matcher.must_end else matcher.forced()
            matcher.advance(forced)
            taken += forced
            if draft[i : i + len(forced)] != forced:
                break
            i += len(forced)
        matcher.rewind(len(taken))
        return taken

    def accept(self, rows: Rows, logits: NDArray[np.float32], started: float, time: StepTime) -> None:
        """Take in a step that began at `started` and ran `rows`; logits [W, V] f32 of those that are wanted."""
        before = len(self.table)
        prefilled = before < self._num_prompt
        self.table.append(rows.known)
        length = len(self.table)
        self._num_recomputed += max(0, min(length, self._known) - before)
        done = min(length, self._num_prompt)
        if prefilled and done > self._reached:
            self._prefill_tokens += done - self._reached
            self._prefill_seconds += perf_counter() - started
            self.events.insert(0, PrefillProgress(done, self._num_prompt, self._num_reused))
        self._reached = max(self._reached, length)
        if self._first_token is None and self._num_prompt <= length and self._num_prompt < len(self.ids):
            self._first_token = perf_counter()  # a forced one: it is known when the prompt has been read
        if not len(logits):
            return
        drawn = self._draw_all(rows.draft, logits)
        if not prefilled:
            self._decode_tokens += len(drawn)
            self._decode_seconds += perf_counter() - started
            if self.speculation is not None and self._guessed:
                self.speculation.learn(drawn, rows.num_drafted, time, len(rows.known))
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
        """Those that have not been handed out."""
        events = self.events.copy()
        self.events.clear()
        return events

    def reply(self) -> Reply:
        """The whole reply, once it has a finish reason."""
        assert self.finish_reason is not None
        return Reply(
            text=self._text.text,
            thinking=self._text.thinking,
            tool_calls=self._text.calls,
            stop_string=self._text.stop_string,
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

        A guess that was drawn, or that a grammar forces, has its K/V already, in the row that was run for it.
        """
        drawn: list[int] = []
        known = len(self.table)
        for i, row in enumerate(logits):
            if self.finish_reason is None and len(self.ids) == len(self.table):
                drawn += self._draw(row)
            position = len(self.table)
            if position != known + i:
                break  # cut back by a stop string
            if i == len(draft) or position >= len(self.ids) or self.ids[position] != draft[i]:
                break
            self.table.append(draft[i : i + 1])
        self._known = max(self._known, len(self.table))
        if draft:
            self.table.truncate(len(self.table))  # no more room than without guesses, or back to before a wrong one
        return drawn

    def _draw(self, logits: NDArray[np.float32]) -> list[int]:
        """The next token, which ends the reply or becomes part of it, and those that a grammar forces after it."""
        logits = logits[: self._tokenizer.vocab_size]  # some models have more rows, as padding
        if self._forced:
            token = self._forced.pop(0)
            self._num_forced += 1
        else:
            allowed = None if self._matcher is None else self._matcher.allowed()
            token = self._sampler.sample(logits, len(self.ids), self.ids, allowed)
            if token in self._tokenizer.end_ids:
                self._first_token = self._first_token or perf_counter()
                self._finish("stop")
                return [token]
        self._first_token = self._first_token or perf_counter()
        if self._request.top_logprobs is not None:
            self._logprobs.append(self._describe(logits, token, self._request.top_logprobs))
        return self._take([token])

    def _take(self, tokens: Sequence[int]) -> list[int]:
        """Tokens become part of the reply, and those that a grammar forces after them, until something ends it.

        Which tokens are forced depends on the tokens before them alone, so it is the same with guesses and without.
        """
        taken: list[int] = []
        todo = list(tokens)
        while todo and self.finish_reason is None:
            token = todo.pop(0)
            taken.append(token)
            self.ids.append(token)
            if self._text.push(token):
                self._stop()
                break
            if self._follow(token) and not todo:
                todo = self._next_forced()
            if self._text.num_thinking == self._request.think_tokens and not todo:
                todo = self._answer_now()
            if self.finish_reason is None and len(self.ids) == self._end:
                self._finish("length")
        return taken

    def _follow(self, token: int) -> bool:
        """Go on in the grammar; False where there is none, or where it ends the reply."""
        if self._matcher is None:
            self._matcher = self._text.call_matcher()
            if self._matcher is None:
                return False
        elif self._matcher.advance([token]) != 1:
            raise EngineError("the grammar refuses a token that it allowed")
        if self._matcher.must_end:
            self._finish("stop")
            return False
        return True

    def _next_forced(self) -> list[int]:
        """What must follow now; where its log probabilities are wanted, it is drawn token by token."""
        assert self._matcher is not None
        if self._forced:
            return []
        forced = self._matcher.forced()
        if self._request.top_logprobs is not None:
            self._forced = forced
            return []
        self._num_forced += len(forced)
        return forced

    def _answer_now(self) -> list[int]:
        """What ends the reasoning; where log probabilities are wanted, it is drawn token by token."""
        closing = self._tokenizer.encode(self._plan.answer_now, control=True, continues=True)
        if self._request.top_logprobs is None:
            return closing
        self._forced = closing
        return []

    def _describe(self, logits: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
        def entry(i: int, logprob: float) -> Logprob:
            return Logprob(id=i, logprob=logprob, piece=self._tokenizer.piece(i))

        chosen, top = log_probabilities(logits, token, count)
        return TokenLogprobs(chosen=entry(token, chosen), top=tuple(entry(i, value) for i, value in top))

    def _finish(self, reason: FinishReason) -> None:
        """Nothing more is drawn."""
        self.finish_reason = reason
        if self._text.finish(whole=reason == "stop"):
            self._stop()
        elif reason == "stop" and self._text.calls:
            self.finish_reason = "tool_calls"

    def _stop(self) -> None:
        """A stop string ended the reply: keep the ids of the text before it."""
        self.finish_reason = "stop"
        kept = self._text.num_kept()
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
            forced_tokens=None if self._matcher is None else self._num_forced,
            recomputed_tokens=None if self.table.state is None else self._num_recomputed,
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


def message_ends(ids: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """Lengths at which the first message of a prompt ends, which others may begin with too, and the last one."""
    ends = [n for n, token in enumerate(ids, start=1) if token in end_ids]
    return [*ends[:1], *ends[-1:]]


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None
