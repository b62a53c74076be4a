"""/v1/chat/completions: https://platform.openai.com/docs/api-reference/chat"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from threading import Event as Flag
from time import time
from typing import Any

from engine.api import (
    Event,
    Finished,
    Reply,
    Request,
    TextDelta,
    ThinkingDelta,
    TokenLogprobs,
    ToolCall,
    ToolCallReady,
)
from goinfer_chat.server.common import (
    MAX_CHOICES,
    MAX_STOPS,
    MAX_TOKENS,
    logprob,
    made,
    read_messages,
    read_sampling,
    read_schema,
    read_speculation,
    read_template_kwargs,
    read_tool_choice,
    read_tools,
    timings,
    usage,
)
from goinfer_chat.server.fields import Fields
from goinfer_chat.server.served import Models
from goinfer_chat.server.streaming import Job, OpenAIFormat, sse


def read_chat(body: Fields, models: Models) -> Job:
    """Raises ApiError for whatever cannot be obeyed."""
    model = models.find(body.text("model"))
    messages = read_messages(body)
    tools = read_tools(body)
    count = body.integer("n", 1, MAX_CHOICES) or 1
    logprobs = body.boolean("logprobs")
    top = body.integer("top_logprobs", 0, 20)
    if top is not None and not logprobs:
        raise body.invalid("top_logprobs", "needs logprobs")
    newer, older = (body.integer(name, 1, MAX_TOKENS) for name in ("max_completion_tokens", "max_tokens"))
    if None not in (newer, older) and newer != older:
        raise body.invalid("max_tokens", "differs from max_completion_tokens; give only one of them")
    stream = body.boolean("stream")
    include_usage = read_stream_options(body, stream)
    body.labels("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    body.only("store", False)
    body.only("service_tier", "auto", "default")
    body.only("modalities", ["text"])
    request = made(
        lambda: Request(
            messages=messages,
            tools=tools,
            tool_choice=read_tool_choice(body, tools),
            parallel_tool_calls=body.boolean("parallel_tool_calls", default=True),
            json_schema=read_schema(body.fields("response_format")),
            sampling=read_sampling(body, model.sampling),
            max_tokens=newer or older,
            stop=body.texts("stop", MAX_STOPS),
            top_logprobs=(top or 0) if logprobs else None,
            template_kwargs=read_template_kwargs(body),
            speculation=read_speculation(body, model.speculation),
        )
    )
    body.refuse_others()
    form = ChatFormat(model.name, count=count, include_usage=include_usage)
    return Job(model=model, requests=choices_of(request, count), format=form, stream=stream)


def read_stream_options(body: Fields, stream: bool) -> bool:
    """Whether a stream ends with its usage."""
    options = body.fields("stream_options")
    if options is None:
        return False
    if not stream:
        raise body.invalid("stream_options", "needs stream")
    include = options.boolean("include_usage")
    options.only("include_obfuscation", False)
    options.refuse_others()
    return include


def choices_of(request: Request, count: int) -> list[Request]:
    """The request for each choice: with a seed, each the next one, or all would be the same."""
    seed = request.sampling.seed
    return [
        replace(
            request,
            sampling=request.sampling
            if seed is None or not number
            else replace(request.sampling, seed=(seed + number) % 2**64),
            cancel=Flag(),
        )
        for number in range(count)
    ]


class ChatFormat(OpenAIFormat):
    """Chat completions, whole or in chunks."""

    def __init__(self, model: str, *, count: int, include_usage: bool) -> None:
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time()), "model": model}
        self._count = count
        self._include_usage = include_usage
        self._num_calls = [0] * count

    def start(self) -> list[bytes]:
        return [self._chunk(number, {"role": "assistant", "content": ""}) for number in range(self._count)]

    def event(self, number: int, event: Event) -> list[bytes]:
        match event:
            case TextDelta(text=text):
                return [self._chunk(number, {"content": text})]
            case ThinkingDelta(text=text):
                return [self._chunk(number, {"reasoning_content": text})]
            case ToolCallReady(call=call):
                index = self._num_calls[number]
                self._num_calls[number] += 1
                return [self._chunk(number, {"tool_calls": [{"index": index, **_call(call)}]})]
            case Finished(reply=reply):
                chunks = []
                if reply.logprobs is not None:  # known for each token, and not for each piece of text
                    chunks.append(self._chunk(number, {}, logprobs=logprobs_object(reply.logprobs)))
                return [*chunks, self._chunk(number, {}, finish_reason=finish_reason(reply), timings=timings(reply))]
            case _:
                return []

    def end(self, replies: Sequence[Reply]) -> list[bytes]:
        last = []
        if self._include_usage:
            last.append(sse(self._object("chat.completion.chunk", choices=[], usage=usage(replies))))
        return [*last, sse("[DONE]")]

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = []
        for number, reply in enumerate(replies):
            message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
            if reply.thinking is not None:
                message["reasoning_content"] = reply.thinking
            if reply.tool_calls:
                message["tool_calls"] = [_call(call) for call in reply.tool_calls]
                message["content"] = reply.text or None
            choices.append(
                {
                    "index": number,
                    "message": message,
                    "logprobs": None if reply.logprobs is None else logprobs_object(reply.logprobs),
                    "finish_reason": finish_reason(reply),
                }
            )
        return self._object("chat.completion", choices=choices, usage=usage(replies), timings=timings(replies[0]))

    def _object(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"object": kind, **self._head, **fields}

    def _chunk(
        self,
        number: int,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        **fields: Any,
    ) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._include_usage:
            fields["usage"] = None
        return sse(self._object("chat.completion.chunk", choices=[choice], **fields))


def finish_reason(reply: Reply) -> str:
    return "stop" if reply.finish_reason == "cancelled" else reply.finish_reason


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprobs_object(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Log probabilities of each token: as bytes, and as text with U+FFFD where the bytes are not UTF-8."""

    def token(entry: Any) -> dict[str, Any]:
        text = entry.piece.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob(entry.logprob), "bytes": list(entry.piece)}

    return {
        "content": [{**token(e.chosen), "top_logprobs": [token(top) for top in e.top]} for e in entries],
        "refusal": None,
    }
