"""The parts of this package put together as an Engine, whatever computes the model (`backend.py`)."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self, get_args

from engine.api import (
    Event,
    Finished,
    KVType,
    Message,
    ModelInfo,
    Notice,
    Prospect,
    Reply,
    Request,
    SamplingParams,
    SpeculationMode,
    TextDelta,
    ToolChoice,
)
from engine.backend import Backend, CpuBackend, StepModel, open_backend
from engine.buffers import MAX_WANTED
from engine.chat_template import ChatTemplate
from engine.config import ModelConfig
from engine.cpu import MAX_THREADS
from engine.draft_model import DraftModel, check_vocabulary
from engine.errors import ContextExceededError, EngineError, ModelError, ModelFileError, UsageError
from engine.generate import Generation, Rows
from engine.gguf_file import GGUFFile, open_gguf
from engine.grammar import GrammarCompiler
from engine.kept_files import CAP_BYTES, KeptFiles
from engine.kv_cache import BLOCK_SIZE, BlockTable, blocks_for
from engine.kv_folder import prepare
from engine.kv_layout import Identity
from engine.memory import MemoryPlan, plan_memory
from engine.reply_plan import plan_reply
from engine.sampler import Sampler, log_probabilities
from engine.scheduler import CLOSED, MAX_CONCURRENT, Scheduler
from engine.sessions import Sessions
from engine.speculate import Speculation, Speculator
from engine.step import MAX_ROWS, to_batch
from engine.tokenizer import Tokenizer

Progress = Callable[[str, float], None]

DEFAULT_SPECULATION: SpeculationMode = "ngram"
"""Measured: copies several times as fast, ordinary questions no slower (docs/benchmarks.md)."""

# `general.file_type` of a GGUF by number: LlamaFileType in gguf-py's constants.py.
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 21: "Q2_K_S",
    25: "IQ4_NL", 30: "IQ4_XS", 32: "BF16", 38: "MXFP4",
}  # fmt: skip


_NO_TOOLS = (
    "the chat template of this model knows no tools: the system prompt tells of them and of a form for calls, and "
    "calls may be poor"
)


class LocalEngine:
    """A loaded model that answers requests, several at once. Usable as a context manager."""

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        context_size: int | None,
        threads: int | None,
        kv_sessions: int,
        chat_template: str | None,
        progress: Progress | None,
        speculation: SpeculationMode | None = None,
        kv_folder: Path | None = None,
        kv_cap_bytes: int = CAP_BYTES,
        kv_type: KVType = "f16",
        max_concurrent: int = 4,
        prefill_chunk: int | None = None,
        draft: Path | None = None,
        from_disk: bool = False,
        backend: str = "cpu",
        device: str = "auto",
    ) -> Self:
        """See `engine.load`."""
        if kv_sessions < 0:
            raise UsageError(f"kv_sessions must be 0 (keep none) or more, not {kv_sessions}")
        if speculation is not None and speculation not in get_args(SpeculationMode):
            known = ", ".join(get_args(SpeculationMode))
            raise UsageError(f"unknown speculation {speculation!r}; there is: {known}")
        _check_draft_model(speculation, draft is not None)
        if kv_type not in get_args(KVType):
            raise UsageError(f"unknown type of K and V {kv_type!r}; there is: {', '.join(get_args(KVType))}")
        if threads is not None and not 1 <= threads <= MAX_THREADS:
            raise UsageError(f"threads must be between 1 and {MAX_THREADS}, not {threads}")
        if kv_cap_bytes < 0:
            raise UsageError(f"the bytes of kept caches must be 0 or more, not {kv_cap_bytes}")
        if not 1 <= max_concurrent <= MAX_CONCURRENT:
            raise UsageError(f"max_concurrent must be between 1 and {MAX_CONCURRENT}, not {max_concurrent}")
        if prefill_chunk is not None and not 1 <= prefill_chunk <= MAX_ROWS:
            raise UsageError(f"prefill_chunk must be between 1 and {MAX_ROWS}, not {prefill_chunk}")
        if kv_folder is not None and kv_sessions > 0:
            prepare(kv_folder)
        with ExitStack() as undo:
            gguf = undo.enter_context(open_gguf(path))
            tokenizer = _read_tokenizer(gguf)
            template = ChatTemplate.from_gguf(gguf.metadata, tokenizer, chat_template)
            config = ModelConfig.from_gguf(gguf)
            if tokenizer.vocab_size > config.vocab_size:
                raise ModelFileError(
                    f"{path.name}: the tokenizer has {tokenizer.vocab_size:,} tokens and the model only "
                    f"{config.vocab_size:,}: the file's parts do not belong together"
                )
            place = open_backend(backend, device, gguf, kv_type, from_disk=from_disk)
            needs = [place.estimate(gguf, kv_type)]
            draft_gguf = None if draft is None else undo.enter_context(open_gguf(draft))
            if draft_gguf is not None:
                check_vocabulary(draft_gguf, gguf)
                if ModelConfig.from_gguf(draft_gguf).state_bytes:
                    raise UsageError(
                        f"{draft_gguf.path.name} cannot guess for another model: it has layers with a running state, "
                        "which would have to be taken back after every guess"
                    )
                needs.append(place.estimate(draft_gguf, "f16"))
            plan = plan_memory(
                name=path.name,
                weight_bytes=sum(weight_bytes for weight_bytes, _ in needs),
                block_bytes=sum(block_bytes for _, block_bytes in needs),
                context_size=context_size,
                train_context_size=config.train_context_size,
                kv_sessions=kv_sessions,
                available=place.available_memory(),
                from_disk=from_disk,
                # A draft model is in memory whole.
                token_bytes=place.token_bytes(gguf) + sum(weight_bytes for weight_bytes, _ in needs[1:]),
                state_bytes=config.state_bytes,
            )
            model = place.load(
                gguf,
                threads=threads,
                max_rows=MAX_ROWS,
                max_positions=plan.context_size,
                kv_type=kv_type,
                progress=progress,
                from_disk=plan.from_disk,
            )
            undo.callback(model.close)
            draft_model = None
            if draft_gguf is not None:
                draft_model = DraftModel.load(
                    place,
                    draft_gguf,
                    vocab_size=tokenizer.vocab_size,
                    threads=threads,
                    num_blocks=plan.num_blocks,
                    kv_sessions=max(1, kv_sessions),
                    context_size=plan.context_size,
                    progress=progress,
                )
                undo.callback(draft_model.close)
                speculation = speculation or "model"
            engine = cls(
                gguf,
                tokenizer,
                template,
                model,
                plan,
                kv_sessions,
                speculation or DEFAULT_SPECULATION,
                max_concurrent=max_concurrent,
                prefill_chunk=prefill_chunk,
                draft_model=draft_model,
                backend=place,
            )
            if kv_folder is not None and kv_sessions > 0:
                engine.keep_in(kv_folder, engine.identity(), kv_cap_bytes)
            undo.pop_all()
            return engine

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
        self.info = replace(
            _model_info(gguf, tokenizer, template, model, plan, backend or CpuBackend()),
            session_reuse=_session_reuse(kv_sessions, plan),
            fewer_sessions=_num_fitting(kv_sessions, plan) < kv_sessions,
        )
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

        `load` calls it.
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

    def generate(self, request: Request) -> Iterator[Event]:
        """Events of one reply, ending with Finished.

        Raises at once, with nothing evaluated or changed: TemplateError, ContextExceededError, UsageError for ids
        that the model does not have, SchemaError for a schema that cannot be followed, EngineError when the engine is
        closed. A request that finds no place, or another one of its conversation running, waits; one that is cancelled
        meanwhile ends without having run.
        """
        submitted = perf_counter()
        self._check_open()
        _check_draft_model(request.speculation, self._speculator.model is not None)
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


def _check_draft_model(speculation: SpeculationMode | None, has_model: bool) -> None:
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


def _read_tokenizer(gguf: GGUFFile) -> Tokenizer:
    """Its errors name the file, of which the tokenizer sees only the metadata."""
    try:
        return Tokenizer.from_gguf(gguf.metadata)
    except ModelError as error:
        raise type(error)(f"{gguf.path.name}: {error}") from error


def _model_info(
    gguf: GGUFFile,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    model: StepModel,
    plan: MemoryPlan,
    backend: Backend,
) -> ModelInfo:
    config = model.config
    return ModelInfo(
        name=config.name,
        architecture=config.architecture,
        quantization=_quantization(gguf),
        num_parameters=sum(math.prod(tensor.shape) for tensor in gguf.tensors.values()),
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        context_size=plan.context_size,
        train_context_size=config.train_context_size,
        kv_bytes_per_token=model.kv_block_bytes // BLOCK_SIZE,
        state_bytes=config.state_bytes,
        state_slots=plan.num_states,
        weight_bytes=model.weight_bytes,
        backend=backend.name,
        kernels=model.kernels,
        threads=model.threads,
        kv_type=model.kv_type,
        identity=gguf.content_hash(),
        notices=(*tokenizer.notices, *template.notices, *backend.notices, *plan.notices),
    )


def _session_reuse(kv_sessions: int, plan: MemoryPlan) -> str:
    """How many conversations stay in memory; both numbers where not so many full ones fit."""
    if kv_sessions == 0:
        return "session reuse: off"
    fit = _num_fitting(kv_sessions, plan)
    if fit < kv_sessions:
        return (
            f"session reuse: on ({fit} of {kv_sessions} conversations kept prefilled; "
            f"memory has no room for more of {plan.context_size:,} tokens)"
        )
    return f"session reuse: on ({_count(fit)} kept prefilled)"


def _num_fitting(kv_sessions: int, plan: MemoryPlan) -> int:
    """Conversations of a full context that memory has room for, at most as many as are wanted."""
    fit = min(kv_sessions, plan.num_blocks // blocks_for(plan.context_size))
    return min(fit, plan.num_states - 2) if plan.num_states else fit  # the one that runs has two


def _count(conversations: int) -> str:
    return "1 conversation" if conversations == 1 else f"{conversations} conversations"


def _quantization(gguf: GGUFFile) -> str:
    """What the file says it is, else the type that most of its bytes have."""
    named = gguf.metadata.get("general.file_type")
    if isinstance(named, int) and named in _FILE_TYPES:
        return _FILE_TYPES[named]
    sizes: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        sizes[tensor.type.name] += tensor.nbytes
    return sizes.most_common(1)[0][0]
