"""The parts of this package put together as an Engine, whatever computes the model (`backend.py`).

`loading.py` makes one from a file.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from engine.api import (
    Event,
    Finished,
    Message,
    Notice,
    Prospect,
    Reply,
    Request,
    SamplingParams,
    SpeculationMode,
    TextDelta,
    ToolChoice,
)
from engine.backend import Backend, CpuBackend, StepModel
from engine.buffers import MAX_WANTED
from engine.chat_template import ChatTemplate
from engine.draft_model import DraftModel
from engine.errors import ContextExceededError, EngineError, UsageError
from engine.generate import Generation, Rows
from engine.gguf_file import GGUFFile
from engine.grammar import GrammarCompiler
from engine.kept_files import CAP_BYTES, KeptFiles
from engine.kv_cache import BlockTable
from engine.kv_layout import Identity
from engine.memory import MemoryPlan
from engine.model_info import describe
from engine.reply_plan import plan_reply
from engine.sampler import Sampler, log_probabilities
from engine.scheduler import CLOSED, Scheduler
from engine.sessions import Sessions
from engine.speculate import Speculation, Speculator
from engine.step import to_batch
from engine.tokenizer import Tokenizer

_NO_TOOLS = (
    "the chat template of this model knows no tools: the system prompt tells of them and of a form for calls, and "
    "calls may be poor"
)

REST = 0.2
"""Seconds. A script asks at once when the model is loaded, a person has to type first."""


class LocalEngine:
    """A loaded model that answers requests, several at once. Usable as a context manager."""

    def __init__(
        self,
        gguf: GGUFFile,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        model: StepModel,
        plan: MemoryPlan,
        kv_sessions: int,
        speculation: SpeculationMode = "off",
        *,
        max_concurrent: int = 4,
        prefill_chunk: int | None = None,
        draft_model: DraftModel | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.info = describe(gguf, tokenizer, template, model, plan, backend or CpuBackend(), kv_sessions)
        self._gguf = gguf
        self._model = model
        self._pool = model.new_pool(plan.num_blocks, plan.num_states, plan.num_checkpoints)
        self._sessions = Sessions(self._pool, kv_sessions)
        self._kv_sessions = kv_sessions
        self._speculation = speculation
        self._speculator = Speculator(draft_model)
        self._grammars = GrammarCompiler(tokenizer)
        self._told_form = False
        self._scheduler = Scheduler(model, self._sessions, max_concurrent=max_concurrent, prefill_chunk=prefill_chunk)

    def identity(self) -> Identity:
        """What its keys and values belong to."""
        return Identity.of(self._model.config, self.info.identity, self._model.kv_type, self._model.numerics)

    def keep_in(self, folder: Path, identity: Identity, cap_bytes: int = CAP_BYTES) -> None:
        """Keep conversations' caches in a prepared folder too, and bring back the last ones. Before the first request.

        Loading calls it.
        """
        assert self._kv_sessions > 0
        assert self._scheduler.kept is None
        self._scheduler.kept = KeptFiles(folder, identity, self._pool, self._sessions, cap_bytes)
        reloaded = self._scheduler.kept.reload(self._kv_sessions, self.info.context_size)
        self.info = replace(
            self.info,
            kept_conversations=reloaded.num_conversations,
            kept_tokens=reloaded.num_tokens,
            kept_ms=reloaded.milliseconds,
        )

    def prepare_grammars(self) -> Thread:
        """Get ready for forced calls and schemas in a thread of its own, once nobody has asked for `REST` seconds.

        Before that it would keep the first reply waiting, and no later one has to. Loading calls it.
        """

        def prepare() -> None:
            if self._scheduler.wait_for_rest(REST):
                self._grammars.prepare()
                _ = self.template.call_form

        thread = Thread(target=prepare, name="grammars", daemon=True)
        thread.start()
        return thread

    def generate(self, request: Request) -> Iterator[Event]:
        """Events of one reply, ending with Finished.

        Raises at once, with nothing evaluated or changed: TemplateError, ContextExceededError, UsageError for ids
        that the model does not have, SchemaError for a schema that cannot be followed, EngineError when the engine is
        closed. A request that finds no place, or another one of its conversation running, waits; one that is cancelled
        meanwhile ends without having run.
        """
        submitted = perf_counter()
        self._check_open()
        check_draft_model(request.speculation, self._speculator.model is not None)
        prompt_ids = self._prompt_ids(request)
        self._check_ids(request.sampling.logit_bias, "the logit bias")
        if len(prompt_ids) >= self.info.context_size:
            raise ContextExceededError(len(prompt_ids), self.info.context_size)
        if request.messages and self.template.stop:
            request = replace(request, stop=(*request.stop, *self.template.stop))
        plan = plan_reply(request, prompt_ids, self.template, self.tokenizer, self._grammars)
        if request.tools and request.tool_choice == "none":
            request = self._without_opener(request)

        def start(table: BlockTable) -> Generation:
            seed = secrets.randbits(32) if request.sampling.seed is None else request.sampling.seed
            return Generation(
                request,
                prompt_ids,
                table,
                self.tokenizer,
                seed=seed,
                context_size=self.info.context_size,
                submitted=submitted,
                speculation=self._begin_speculation(request, table, seed),
                plan=plan,
            )

        notices = []
        if plan.form is not None and plan.form.stated and not self._told_form:
            self._told_form = True
            notices.append(Notice(_NO_TOOLS))
        return self._scheduler.submit(request, prompt_ids, start, notices)

    def _begin_speculation(self, request: Request, table: BlockTable, seed: int) -> Speculation | None:
        mode = request.speculation or self._speculation
        if mode == "off":
            return None
        model_for = (request.conversation, Sampler(request.sampling, seed).sample) if mode == "model" else None
        return self._speculator.begin(table, self.tokenizer.end_ids, model_for)

    def count_tokens(self, request: Request) -> int:
        """Prompt tokens this request would have. Raises TemplateError or UsageError."""
        return len(self._prompt_ids(request))

    def foresee(self, request: Request, forgotten: str | None = None) -> Prospect:
        """What the prompt of this request would cost if it came next. Raises TemplateError or UsageError.

        `forgotten`: a conversation that would be forgotten before. What the conversation's file holds is checked, so
        this takes as long as restoring it does, and waits for the step of a reply that runs.
        """
        if request.prompt_ids is None:
            prompt_ids = self.template.encode_foreseen(request.messages, request.tools, **request.template_kwargs)
        else:
            prompt_ids = self._prompt_ids(request)
        with self._scheduler.writing():
            self._check_open()
            found = self._sessions.known_start(prompt_ids, len(prompt_ids) - 1, without=forgotten)
            kept, problem = self._scheduler.kept, None
            if kept is not None:
                found, problem = kept.foresee(request.conversation, prompt_ids, found, goes_on=request.goes_on)
        return Prospect(
            prompt_tokens=len(prompt_ids),
            reused_tokens=found,
            tok_s=None if kept is None else kept.tok_s,
            problem=problem,
        )

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
        conversation: str = "default",
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        json_schema: Mapping[str, Any] | bool | None = None,
    ) -> Reply:
        """The reply to messages, or to one user message given as text. Raises what `generate` raises."""
        request = replace(
            _request(messages, sampling, max_tokens, stop, top_logprobs, conversation),
            tools=tuple(tools),
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            json_schema=json_schema,
        )
        return next(event.reply for event in self.generate(request) if isinstance(event, Finished))

    def stream(
        self,
        messages: str | Sequence[Message],
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        conversation: str = "default",
    ) -> Iterator[str]:
        """The text of a reply as it is generated, in whole characters. Raises what `generate` raises."""
        request = _request(messages, sampling, max_tokens, stop, None, conversation)
        return (event.text for event in self.generate(request) if isinstance(event, TextDelta))

    def score(self, ids: Sequence[int], first: int) -> list[float]:
        """Natural-log probabilities of ids[first:], each given all ids before it. Kept conversations stay as they are.

        Raises ContextExceededError for more ids than the context holds, and UsageError for ids the model does not have.
        """
        assert 1 <= first <= len(ids)
        self._check_ids(ids, "the text")
        if len(ids) > self.info.context_size:
            raise ContextExceededError(len(ids), self.info.context_size)
        self._check_open()
        scores: list[float] = []
        table = BlockTable(self._pool)
        try:
            while len(table) < len(ids) - 1:  # the last id predicts nothing that is asked for
                part = list(ids[len(table) : min(len(table) + MAX_WANTED, len(ids) - 1)])
                end = len(table) + len(part)
                rows = Rows(table, part, num_wanted=min(len(part), max(0, end - first + 1)))
                with self._scheduler.writing():  # between the steps of replies
                    self._check_open()
                    self._sessions.reserve(table, len(part))
                    logits = self._model.forward(to_batch([rows]))
                    table.append(part)
                    scores += [
                        log_probabilities(row, ids[position + 1], 0)[0]
                        for position, row in enumerate(logits, start=end - rows.num_wanted)
                    ]
        finally:
            with self._scheduler.writing():
                table.release()
        return scores

    def forget(self, conversation: str) -> None:
        """Drop the cache of one conversation: at once, or at the end of its request that is running."""
        self._scheduler.forget(conversation)
        if self._speculator.model is not None:
            with self._scheduler.writing():
                self._speculator.model.forget(conversation)

    def close(self) -> None:
        """Free the memory. Replies that run are cancelled and saved first; may be called again."""
        self._scheduler.close(self._free)

    def _free(self) -> None:
        self._model.close()
        self._gguf.close()
        if self._speculator.model is not None:
            self._speculator.model.close()
        del self._model, self._sessions, self._pool  # an engine that is still referenced holds no memory

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _without_opener(self, request: Request) -> Request:
        """Without the token that begins a call, where that is one token."""
        opener = next(self.tokenizer.parts(self.template.call_form.opener), "")
        if isinstance(opener, str):
            return request
        sampling = request.sampling
        return replace(request, sampling=replace(sampling, logit_bias={**sampling.logit_bias, opener: -math.inf}))

    def _prompt_ids(self, request: Request) -> list[int]:
        if request.prompt_ids is None:
            return self.template.encode(request.messages, request.tools, **request.template_kwargs)
        if not request.prompt_ids:
            raise UsageError("prompt_ids is empty: a model needs at least one token to go on from")
        self._check_ids(request.prompt_ids, "the prompt")
        return list(request.prompt_ids)

    def _check_ids(self, ids: Iterable[int], what: str) -> None:
        vocab_size = self.tokenizer.vocab_size
        wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise UsageError(f"{what} has token id {wrong}; the model's ids are 0 to {vocab_size - 1:,}")

    def _check_open(self) -> None:
        if self._scheduler.closing:
            raise EngineError(CLOSED)


def check_draft_model(speculation: SpeculationMode | None, has_model: bool) -> None:
    """Raises UsageError where guesses are asked for from a smaller model and there is none."""
    if speculation == "model" and not has_model:
        raise UsageError(
            "speculation 'model' needs a smaller model that guesses (--draft MODEL, draft= in the library)"
        )


def _request(
    messages: str | Sequence[Message],
    sampling: SamplingParams | None,
    max_tokens: int | None,
    stop: Sequence[str],
    top_logprobs: int | None,
    conversation: str,
) -> Request:
    return Request(
        messages=(Message(role="user", content=messages),) if isinstance(messages, str) else tuple(messages),
        sampling=sampling or SamplingParams(),
        max_tokens=max_tokens,
        stop=tuple(stop),
        top_logprobs=top_logprobs,
        conversation=conversation,
    )
