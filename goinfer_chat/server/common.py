"""What the routes have in common: sampling, tools and messages in OpenAI's words, figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar, get_args

from engine.api import Message, NamedTool, Reply, Role, SamplingParams, SpeculationMode, ToolChoice
from engine.errors import UsageError
from goinfer_chat.server.errors import ApiError
from goinfer_chat.server.fields import Fields, checked_text, kind_of

MAX_TOKENS = 10_000_000
"""More is no wish but a mistake; what is less and does not fit ends with the context."""
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_MESSAGES = 10_000

_T = TypeVar("_T")


def made(make: Callable[[], _T]) -> _T:
    """What `make` makes; what the engine's own checks refuse is a 400."""
    try:
        return make()
    except UsageError as error:
        raise ApiError(400, str(error)) from None


def read_sampling(body: Fields, defaults: SamplingParams) -> SamplingParams:
    """OpenAI's fields and ours."""
    changes: dict[str, Any] = {
        "temperature": body.number("temperature", 0, 100),
        "top_p": body.number("top_p", 0, 1),
        "min_p": body.number("min_p", 0, 1),
        "top_k": body.integer("top_k", 0, 2**31),
        "presence_penalty": body.number("presence_penalty", -2, 2),
        "frequency_penalty": body.number("frequency_penalty", -2, 2),
        "repeat_penalty": body.number("repeat_penalty", 0, 100),
        "penalty_window": body.integer("penalty_window", 0, 2**31),
        "seed": body.integer("seed", 0, 2**64 - 1),
        "logit_bias": _logit_bias(body),
    }
    given = {name: value for name, value in changes.items() if value is not None}
    return made(lambda: replace(defaults, **given))


def _logit_bias(body: Fields) -> dict[int, float] | None:
    fields = body.fields("logit_bias")
    if fields is None:
        return None
    bias = {}
    for token in list(body.value("logit_bias")):
        value = fields.number(token, -100, 100)
        if not token.isdecimal() or len(token) > 10:
            raise body.invalid("logit_bias", "its names are token ids")
        bias[int(token)] = value or 0.0
    return bias


def read_tools(body: Fields) -> tuple[Mapping[str, Any], ...]:
    """Tools in OpenAI's form, key order kept."""
    tools: list[Mapping[str, Any]] = []
    for tool in body.objects("tools"):
        kind = tool.required_text("type")
        if kind != "function":
            raise tool.invalid("type", f"there are no tools of type {kind!r} here, only function")
        function = tool.fields("function")
        if function is None:
            raise tool.invalid("function", "is missing")
        check_function(function)
        tool.refuse_others()
        tools.append(body.value("tools")[len(tools)])
    return tuple(tools)


def check_function(function: Fields) -> None:
    """Raises ApiError for a description that is none."""
    function.required_text("name")
    function.text("description")
    function.mapping("parameters")
    function.boolean("strict")
    function.refuse_others()


def read_tool_choice(body: Fields, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """`tool_choice` in the forms of both of OpenAI's APIs: the name of a function stands in `function` or beside it."""
    value = body.value("tool_choice")
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise body.invalid("tool_choice", "must be none, auto, required, or name a function")
        choice: ToolChoice = value  # type: ignore[assignment]
    else:
        fields = Fields(value, body.name("tool_choice") + ".")
        fields.only("type", "function")
        function = fields.fields("function")
        choice = NamedTool(name=fields.required_text("name") if function is None else function.required_text("name"))
        fields.refuse_others()
    if not tools and choice not in ("none", "auto"):
        raise body.invalid("tool_choice", "there are no tools to choose from")
    return choice


def read_schema(form: Fields | None) -> Mapping[str, Any] | None:
    """`response_format` in the forms of both of OpenAI's APIs: the schema that a reply must be valid under."""
    if form is None:
        return None
    kind = form.choice("type", "text", "json_object", "json_schema")
    schema: Mapping[str, Any] | None = None
    if kind == "json_object":
        schema = {}
    elif kind == "json_schema":
        inner = form.fields("json_schema") or form
        inner.labels("name", "description", "strict", "type")
        schema = inner.mapping("schema")
        if schema is None:
            raise inner.invalid("schema", "is missing")
        inner.refuse_others()
    elif kind is None:
        raise form.invalid("type", "is missing")
    form.refuse_others()
    return {"type": "object"} if kind == "json_object" else schema


def read_content(fields: Fields, name: str, *kinds: str) -> str:
    """A text, or parts of text, which are joined."""
    value = fields.value(name)
    if isinstance(value, str):
        return checked_text(value, fields.name(name))
    if not isinstance(value, list):
        raise fields.invalid(name, f"must be a text or an array of parts, not {kind_of(value)}")
    return "".join(_part(part, *kinds) for part in fields.objects(name))


def _part(part: Fields, *kinds: str) -> str:
    kind = part.required_text("type")
    if kind == "refusal" and "refusal" in kinds:
        return part.required_text("refusal")
    if kind not in kinds:
        raise part.invalid("type", f"parts of type {kind!r} are not supported: this model reads text")
    part.labels("annotations", "logprobs", "cache_control", "prompt_cache_breakpoint")
    text = part.required_text("text")
    part.refuse_others()
    return text


def check_num_items(body: Fields, name: str) -> None:
    """Raises ApiError unless the array of messages `name` is there and has 1 to MAX_MESSAGES items."""
    items = body.items(name)
    if not items:
        raise body.invalid(name, "is missing" if items is None else "is empty")
    if len(items) > MAX_MESSAGES:
        raise body.invalid(name, f"has more than {MAX_MESSAGES:,} items")


def read_messages(body: Fields) -> tuple[Message, ...]:
    """Messages in OpenAI's form."""
    check_num_items(body, "messages")
    return tuple(_message(message) for message in body.objects("messages"))


def _message(message: Fields) -> Message:
    roles = ("system", "developer", "user", "assistant", "tool")
    role = message.choice("role", *roles)
    if role is None:
        raise message.invalid("role", "is missing")
    calls: tuple[Mapping[str, Any], ...] = ()
    thinking = None
    if role == "assistant":
        calls = tuple(_call(call) for call in message.objects("tool_calls"))
        thinking = message.text("reasoning_content")
        message.labels("refusal", "annotations", "audio", "function_call", "reasoning")
        for name in ("audio", "function_call"):
            message.only(name)
    if role == "assistant" and "content" not in message:
        if not calls:
            raise message.invalid("content", "is missing")
        message.value("content")
        content = ""
    else:
        content = read_content(message, "content", "text", *(("refusal",) if role == "assistant" else ()))
    tool_call_id = message.text("tool_call_id") if role == "tool" else None
    speaker = message.text("name")
    message.refuse_others()
    known: Role = role  # type: ignore[assignment]
    return Message(
        role=known, content=content, thinking=thinking, tool_calls=calls, tool_call_id=tool_call_id, name=speaker
    )


def _call(call: Fields) -> Mapping[str, Any]:
    call.only("type", "function")
    function = call.fields("function")
    if function is None:
        raise call.invalid("function", "is missing")
    inner = {"name": function.required_text("name"), "arguments": function.text("arguments", "") or "{}"}
    function.refuse_others()
    id = call.required_text("id")
    call.labels("index")
    call.refuse_others()
    return {"id": id, "type": "function", "function": inner}


def read_template_kwargs(body: Fields) -> Mapping[str, Any]:
    kwargs = dict(body.mapping("chat_template_kwargs") or {})
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in kwargs:
            raise body.invalid("chat_template_kwargs", f"{name} is already given by the request itself")
    return kwargs


def read_speculation(body: Fields, default: SpeculationMode | None) -> SpeculationMode | None:
    """A field of ours that any route takes."""
    chosen = body.choice("speculation", *get_args(SpeculationMode))
    return next((mode for mode in get_args(SpeculationMode) if mode == chosen), default)


def usage(replies: Sequence[Reply], *, num_prompts: int = 1) -> dict[str, Any]:
    """Tokens of an answer, in OpenAI's words and ours. A prompt that several choices share, one after the other,
    counts once."""
    prompts = [reply.stats for reply in replies[:: len(replies) // num_prompts]]
    prompt = sum(stats.prompt_tokens or 0 for stats in prompts)
    reused = sum(stats.prefill_reused_tokens or 0 for stats in prompts)
    completion = sum(reply.stats.completion_tokens or 0 for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reused},
        "prefill_reused_tokens": reused,
        "prefill_tokens": sum(stats.prefill_tokens or 0 for stats in prompts),
    }


def logprob(value: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what cannot be drawn."""
    return max(value, -9999.0)


def timings(reply: Reply) -> dict[str, Any]:
    """The figures of a reply under our own names; those that are not known are left out."""
    return {name: value for name, value in asdict(reply.stats).items() if value is not None}
