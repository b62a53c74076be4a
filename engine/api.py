"""What every backend speaks: a request goes in, events come out.

`Engine.generate` is the whole protocol. The engine never prints and never asks; whoever reads the events
decides what a person sees. Requests are validated when they are made, so an engine trusts them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from engine.errors import UsageError

FinishReason = Literal["stop", "length", "cancelled", "tool_calls", "dropped"]
"""`stop`: an end token or a stop string. `length`: max_tokens, or the context is full. `cancelled`: Request.cancel.
`tool_calls`: the reply ended by itself and calls tools. `dropped`: the stream of a server broke off."""

Role = Literal["system", "developer", "user", "assistant", "tool"]

SpeculationMode = Literal["off", "ngram", "model"]
"""How tokens are guessed ahead. `ngram`: from what stands earlier in the conversation; `model`: by a smaller model too.

It changes the speed of a reply, and nothing in it."""

KVType = Literal["f16", "q8_0", "f32"]
"""How keys and values are stored. Another type may give another reply; within one type nothing else changes it."""


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise UsageError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool, as the model wrote it."""

    id: str
    name: str
    arguments: str
    """JSON text. Of a forced call it is one object that is valid under the tool's schema; else whatever was written."""

    def as_json(self) -> dict[str, Any]:
        """In OpenAI's form: what `Message.tool_calls` holds."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTool:
    """The tool that a reply must call."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool
"""Whether a reply calls tools. `none`: it does not, but their descriptions stay in the prompt. `auto`: if the model
wants to. `required`: one of the tools or several. A named one: that tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation; `Reply.as_message` makes that of a reply.

    `ids` are the token ids of an assistant's reply as they were generated, without the end-of-turn token, with its
    reasoning and its calls. With them the reply is never tokenized again, and the cache is reused right through it.
    `tool_calls` are in OpenAI's form, with the arguments as an object or as JSON text. `tool_call_id` and `name` of a
    tool's message say which call it answers.
    """

    role: Role
    content: str
    thinking: str | None = None
    ids: tuple[int, ...] | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn from the logits.

    The order is: logit bias, penalties, temperature, top-k, top-p, min-p, one draw. `temperature` 0 is greedy: the
    largest logit, the lowest id among equals. Penalties look at the last `penalty_window` tokens of prompt and reply.
    """

    temperature: float = 0.7
    top_k: int = 40
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 0.95
    """Keep the smallest set of tokens whose probabilities sum to p; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one; 0 drops none."""
    repeat_penalty: float = 1.0
    """Divide positive and multiply negative logits of seen tokens (Keskar et al. 2019); 1 is off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None: the engine draws one and reports it in the stats."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"):
            _check(math.isfinite(getattr(self, name)), f"{name} must be a finite number, not {getattr(self, name)}")
        _check(0 <= self.temperature <= 100, f"temperature must be between 0 and 100, not {self.temperature}")
        _check(self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}")
        _check(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p}")
        _check(0 <= self.min_p <= 1, f"min_p must be between 0 and 1, not {self.min_p}")
        _check(self.repeat_penalty > 0, f"repeat_penalty must be above 0, not {self.repeat_penalty}")
        _check(self.penalty_window >= 0, f"penalty_window must be 0 or more, not {self.penalty_window}")
        _check(self.seed is None or 0 <= self.seed < 2**64, f"seed must be between 0 and 2**64 - 1, not {self.seed}")
        for token, bias in self.logit_bias.items():
            _check(not math.isnan(bias), f"the logit bias of token {token} is not a number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to generate. Exactly one of `messages` and `prompt_ids` is given."""

    messages: tuple[Message, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool descriptions in OpenAI's form (`{"type": "function", "function": {"name": ..., "description": ...,
    "parameters": JSON schema}}`, or the inner object alone), key order kept, handed to the chat template."""
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    """False: one call at most."""
    json_schema: Mapping[str, Any] | bool | None = None
    """The reply is JSON text that is valid under this schema; {} or True: any JSON. None: any text."""
    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    """Tokens of the reply at most, the end token not counted; None: to the end of the context."""
    think_tokens: int | None = None
    """Tokens of reasoning at most: after them a thinking model is made to answer. None: as many as it likes."""
    stop: tuple[str, ...] = ()
    """The reply ends before the first of these, also when it spans tokens."""
    top_logprobs: int | None = None
    """None: no log probabilities. n: those of the chosen token and of the n most likely ones."""
    conversation: str = "default"
    """Whose cache this is: the conversation that owns the positions this request adds."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    speculation: SpeculationMode | None = None
    """None: what the engine was loaded with."""
    told: str | None = None
    """A `Prospect.problem` of this conversation that the person has read: no notice says it again."""
    cancel: threading.Event = field(default_factory=threading.Event, compare=False)
    """Set from any thread to stop within half a second; what was generated is kept."""

    @property
    def goes_on(self) -> bool:
        """Whether it continues a conversation with this model, so that a part of its prompt may be cached."""
        return any(message.role == "assistant" and message.ids for message in self.messages)

    def __post_init__(self) -> None:
        _check((self.prompt_ids is None) == bool(self.messages), "a request needs either messages or prompt_ids")
        _check(self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be 1 or more, not {self.max_tokens}")
        _check(
            self.think_tokens is None or self.think_tokens >= 1,
            f"think_tokens must be 1 or more, not {self.think_tokens}; enable_thinking False asks for none",
        )
        _check(all(self.stop), "a stop string must not be empty")
        _check(self.top_logprobs is None or 0 <= self.top_logprobs <= 20, "top_logprobs must be between 0 and 20")
        _check(
            self.speculation is None or self.speculation in get_args(SpeculationMode),
            f"unknown speculation {self.speculation!r}; choose from: {', '.join(get_args(SpeculationMode))}",
        )
        _check(self.prompt_ids is None or not self.tools, "tools need messages: prompt_ids are run as they are")
        self._check_tools()
        _check(
            self.json_schema is None or not (self.tools and self.tool_choice != "none"),
            "a reply cannot both follow a schema and call tools; give the schema with tool_choice none",
        )

    def _check_tools(self) -> None:
        names = [tool_name(tool) for tool in self.tools]
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        _check(twice is None, f"two tools have the name {twice!r}")
        choice, known = self.tool_choice, ", ".join(names) or "none"
        if isinstance(choice, NamedTool):
            _check(choice.name in names, f"the tool {choice.name!r} that must be called is not given; given: {known}")
        else:
            _check(
                choice in ("none", "auto", "required"),
                f"unknown tool_choice {choice!r}; choose from: none, auto, required",
            )
            _check(choice != "required" or bool(names), "tool_choice required needs tools")


def tool_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a tool's description, or of a call, that has its name: `function`, or the whole of it."""
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def tool_name(tool: Mapping[str, Any]) -> str:
    """Raises UsageError for a description without a name."""
    name = tool_function(tool).get("name")
    if not isinstance(name, str) or not name:
        raise UsageError("a tool needs a name that is a text and not empty")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token and its natural-log probability under the model (before sampling settings)."""

    id: int
    logprob: float
    piece: bytes
    """The token's own bytes; together the pieces of a reply are its UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """A token of a reply, and what might have stood in its place."""

    chosen: Logprob
    top: tuple[Logprob, ...]
    """The most likely tokens, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStats:
    """The figures of one request, under the names used everywhere (docs/cli.md). None is "not known", never 0."""

    prompt_tokens: int | None
    prefill_reused_tokens: int | None
    prefill_tokens: int | None
    completion_tokens: int | None = 0
    ttft_ms: float | None = None
    """From submit to the first token known."""
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    context_used: int | None = 0
    context_size: int = 0
    """0 where it is not known."""
    kv_bytes: int | None = 0
    seed: int | None = None
    forced_tokens: int | None = None
    """Tokens of the reply that a grammar left no choice about; None where it was held to none."""
    recomputed_tokens: int | None = None
    """Tokens that were evaluated again though they had been before, since a running state cannot be cut back; None
    where the model has none."""
    draft_tokens: int | None = None
    """Tokens guessed ahead; this and the next six are None where speculation is off."""
    draft_accepted: int | None = None
    """Of these, how many the model drew too."""
    acceptance: float | None = None
    """draft_accepted / draft_tokens."""
    tokens_per_step: float | None = None
    """Tokens drawn for each step after the prompt's; 1 is plain decoding."""
    undrafted_steps: int | None = None
    """Steps after the prompt's in which nothing was guessed."""
    draft_saved_ms: float | None = None
    """Estimated: what plain steps for the same tokens would have taken, less what the steps with guesses took."""
    draft_pauses: int | None = None
    """How often guessing was stopped for a while because it made the reply slower."""
    restore_ms: float | None = None
    """To bring back positions from the conversation's file; None where none were."""
    restored_tokens: int | None = None
    """Positions that came from there; they are among those reused."""
    kv_saved_bytes: int | None = None
    """Written to the conversation's file in this turn; None where there is none, or saving failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A finished reply. `ids` is all of it without the end-of-turn token; `text` has no stop string, no control token,
    no reasoning and no call."""

    text: str
    ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: TurnStats
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry for each id of `ids`, when asked for."""
    thinking: str | None = None
    """What a reasoning model thought before it answered; None where it did not."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Whole calls in the order written. A call that `length` or `cancelled` cut is not among them."""
    stop_string: str | None = None
    """The one of `Request.stop`, or of the template's, that ended it; None where none did."""

    def as_message(self) -> Message:
        """What goes into the conversation for it."""
        calls = tuple(call.as_json() for call in self.tool_calls)
        ids = self.ids or None  # a server tells none
        return Message(role="assistant", content=self.text, thinking=self.thinking, ids=ids, tool_calls=calls)


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """After each chunk: prompt tokens whose K/V exist, of which `reused` cost nothing."""

    done: int
    total: int
    reused: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The figures so far while a reply is decoded, at most ten times a second; a short reply has none."""

    stats: TurnStats


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New whole characters of the reply; the deltas joined are `Reply.text`."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """New whole characters of a model's reasoning; the deltas joined are `Reply.thinking`."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallReady:
    """A whole call. Nothing of its markup is ever in a TextDelta."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the user should see once: a fallback template, a smaller context, an end token that was guessed."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every reply."""

    reply: Reply


Event = PrefillProgress | Progress | TextDelta | ThinkingDelta | ToolCallReady | Notice | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a program shows about the model that is loaded. Texts are as in the file: sanitize before showing."""

    name: str
    architecture: str
    quantization: str
    num_parameters: int
    """0 where it is not known, as for all sizes below: a server tells few of them, and no model has one that is 0."""
    num_layers: int
    vocab_size: int
    context_size: int
    train_context_size: int
    kv_bytes_per_token: int
    """Layers x 2 x width of K or V x bytes of a number, scales included."""
    weight_bytes: int
    backend: str
    kernels: str
    """Such as "AVX-512 VNNI"; where PyTorch computes, on which device and with which weights."""
    threads: int
    """Of the CPU; 0 where something else computes."""
    kv_type: str = ""
    """Of `KVType`. "" if not known."""
    state_bytes: int = 0
    """Bytes of the running state that layers of some models keep instead of K and V; it does not grow. 0: none."""
    state_slots: int = 0
    """How many running states have room in memory: those of conversations, and the checkpoints of their pasts."""
    identity: str = ""
    """A hash of the model's content: token ids and caches belong to it, whatever its name. "" if not known."""
    thinks: bool = True
    """Whether it may reason before it answers; True if not known."""
    session_reuse: str = ""
    """One line about how many conversations stay in memory."""
    fewer_sessions: bool = False
    """Memory has no room for as many as were asked for: that line has both numbers."""
    kept_conversations: int | None = None
    """Brought back from files when the model was loaded; this and the next two are None where none are kept."""
    kept_tokens: int | None = None
    kept_ms: float | None = None
    """What that took."""
    notices: tuple[str, ...] = ()

    @property
    def computed_by(self) -> str:
        """Such as "AVX-512 VNNI, 2 threads"."""
        threads = f", {self.threads} thread{'s' if self.threads != 1 else ''}" if self.threads else ""
        return f"{self.kernels}{threads}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What reading the prompt of a request would cost if it came next."""

    prompt_tokens: int
    reused_tokens: int
    """Those that are in memory, or in the conversation's file, which has been checked."""
    tok_s: float | None
    """About how fast the others are evaluated, in tokens per second; None: not known here."""
    problem: str | None
    """What is wrong with the conversation's file, where it should save more than it does; None: nothing."""

    @property
    def prefill_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens

    @property
    def seconds(self) -> float | None:
        """About how long the prompt takes."""
        return None if self.tok_s is None else self.prefill_tokens / self.tok_s


class Engine(Protocol):
    """A loaded model that answers requests, several at once from any threads; close() frees the memory."""

    @property
    def info(self) -> ModelInfo: ...

    def generate(self, request: Request) -> Iterator[Event]:
        """Events of one reply, ending with Finished.

        Raises UsageError, SchemaError, TemplateError, ContextExceededError or EngineError before the first event, and
        EngineError after it where the reply cannot go on. Closing the iterator early stops the work and leaves the
        cache consistent.
        """
        ...

    def count_tokens(self, request: Request) -> int:
        """Prompt tokens this request would have. Raises TemplateError, UsageError, or EngineError if it cannot tell."""
        ...

    def foresee(self, request: Request, forgotten: str | None = None) -> Prospect:
        """What the prompt of this request would cost if it came next, and `forgotten` had been forgotten before.

        Raises TemplateError, UsageError, or EngineError where that cannot be known.
        """
        ...

    def forget(self, conversation: str) -> None:
        """Drop the cache of one conversation."""
        ...

    def close(self) -> None: ...
