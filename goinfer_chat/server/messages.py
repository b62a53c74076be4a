"""/v1/messages: the form of Anthropic's clients. https://docs.anthropic.com/en/api/messages"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from engine.api import (
    Event,
    Finished,
    Message,
    NamedTool,
    Reply,
    Request,
    TextDelta,
    ThinkingDelta,
    ToolCall,
    ToolCallReady,
    ToolChoice,
)
from goinfer_chat.server.common import (
    MAX_STOPS,
    MAX_TOKENS,
    check_num_items,
    made,
    read_sampling,
    read_schema,
    read_speculation,
    read_template_kwargs,
    timings,
)
from goinfer_chat.server.errors import ApiError
from goinfer_chat.server.fields import Fields, checked_text, kind_of
from goinfer_chat.server.served import Models, Served
from goinfer_chat.server.streaming import Job, sse


def read_anthropic(body: Fields, models: Models) -> Job:
    """Raises ApiError for whatever cannot be obeyed."""
    model = models.find(body.text("model"))
    max_tokens = body.integer("max_tokens", 1, MAX_TOKENS)
    if max_tokens is None:
        raise body.invalid("max_tokens", "is missing")
    stream = body.boolean("stream")
    stops = body.texts("stop_sequences", MAX_STOPS) if body.value("stop_sequences") else ()
    body.labels("metadata", "cache_control")
    body.only("service_tier", "auto", "standard_only")
    request = _request(body, model, max_tokens=max_tokens, stop=stops)
    body.refuse_others()
    return Job(model=model, requests=[request], format=MessageFormat(model.name, stops), stream=stream)


def read_count(body: Fields, models: Models) -> tuple[Served, Request]:
    """/v1/messages/count_tokens: the prompt that would be evaluated."""
    model = models.find(body.text("model"))
    request = _request(body, model)
    body.refuse_others()
    return model, request


def _request(body: Fields, model: Served, *, max_tokens: int | None = None, stop: tuple[str, ...] = ()) -> Request:
    tools = _tools(body)
    choice, parallel = _tool_choice(body, tools)
    kwargs = dict(read_template_kwargs(body))
    output = body.fields("output_config")
    schema = None
    if output is not None:
        schema = read_schema(output.fields("format"))
        output.refuse_others()
    thinking, budget = body.fields("thinking"), None
    if thinking is not None:
        on = thinking.choice("type", "enabled", "disabled", "adaptive")
        budget = thinking.integer("budget_tokens", 1, 10**9)
        thinking.labels("display")
        thinking.refuse_others()
        kwargs.setdefault("enable_thinking", on != "disabled")
    return made(
        lambda: Request(
            messages=(*_system(body), *_messages(body)),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            json_schema=schema,
            sampling=read_sampling(body, model.sampling),
            max_tokens=max_tokens,
            stop=stop,
            template_kwargs=kwargs,
            think_tokens=budget,
            speculation=read_speculation(body, model.speculation),
        )
    )


def _tools(body: Fields) -> tuple[Mapping[str, Any], ...]:
    tools = []
    for tool in body.objects("tools"):
        tool.only("type", "custom")
        function: dict[str, Any] = {"name": tool.required_text("name")}
        description = tool.text("description")
        if description is not None:
            function["description"] = description
        function["parameters"] = tool.mapping("input_schema") or {"type": "object", "properties": {}}
        tool.labels("cache_control", "strict")
        tool.refuse_others()
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def _tool_choice(body: Fields, tools: Sequence[Mapping[str, Any]]) -> tuple[ToolChoice, bool]:
    fields = body.fields("tool_choice")
    if fields is None:
        return "auto", True
    kind = fields.choice("type", "auto", "any", "tool", "none")
    if kind is None:
        raise fields.invalid("type", "is missing")
    parallel = not fields.boolean("disable_parallel_tool_use")
    choice: ToolChoice
    if kind == "tool":
        choice = NamedTool(name=fields.required_text("name"))
    else:
        choice = "required" if kind == "any" else "none" if kind == "none" else "auto"
    fields.refuse_others()
    if not tools and kind in ("any", "tool"):
        raise body.invalid("tool_choice", "there are no tools to choose from")
    return choice, parallel


def _system(body: Fields) -> tuple[Message, ...]:
    if "system" not in body:
        body.value("system")
        return ()
    return (Message(role="system", content=_text(body, "system")),)


def _text(fields: Fields, name: str) -> str:
    """A text, or blocks of text, which are joined."""
    value = fields.value(name)
    if isinstance(value, str):
        return checked_text(value, fields.name(name))
    if value is not None and not isinstance(value, list):
        raise fields.invalid(name, f"must be a text or an array of blocks, not {kind_of(value)}")
    return "".join(_text_block(block) for block in fields.objects(name))


def _text_block(block: Fields) -> str:
    kind = block.required_text("type")
    if kind != "text":
        raise block.invalid("type", f"blocks of type {kind!r} are not supported here: this model reads text")
    block.labels("cache_control", "citations")
    text = block.required_text("text")
    block.refuse_others()
    return text


def _messages(body: Fields) -> tuple[Message, ...]:
    check_num_items(body, "messages")
    messages: list[Message] = []
    for message in body.objects("messages"):
        role = message.choice("role", "user", "assistant", "system")
        content = message.value("content")
        if role is None:
            raise message.invalid("role", "is missing")
        if isinstance(content, str):
            messages.append(Message(role=role, content=checked_text(content, message.name("content"))))  # type: ignore[arg-type]
        elif not isinstance(content, list):
            raise message.invalid("content", f"must be a text or an array of blocks, not {kind_of(content)}")
        elif role == "assistant":
            messages.append(_assistant(message))
        else:
            messages += _user(message, role)
        message.refuse_others()
    return tuple(messages)


def _assistant(message: Fields) -> Message:
    text, thinking, calls = "", None, []
    for block in message.objects("content"):
        match block.required_text("type"):
            case "tool_use":
                block.labels("cache_control", "caller")
                arguments = json.dumps(block.mapping("input") or {}, ensure_ascii=False)
                function = {"name": block.required_text("name"), "arguments": arguments}
                calls.append({"id": block.required_text("id"), "type": "function", "function": function})
                block.refuse_others()
            case "thinking":
                block.labels("signature", "cache_control")
                thinking = (thinking or "") + block.required_text("thinking")
                block.refuse_others()
            case "redacted_thinking":
                pass
            case _:
                text += _text_block(block)
    return Message(role="assistant", content=text, thinking=thinking, tool_calls=tuple(calls))


def _user(message: Fields, role: str) -> list[Message]:
    """Results of tools are messages of their own; text after them is what the person said."""
    found: list[Message] = []
    text: str | None = None
    for block in message.objects("content"):
        if block.required_text("type") == "tool_result":
            block.labels("cache_control", "is_error")
            id, content = block.required_text("tool_use_id"), _text(block, "content")
            block.refuse_others()
            found.append(Message(role="tool", content=content, tool_call_id=id))
        else:
            text = (text or "") + _text_block(block)
    if text is not None or not found:
        found.append(Message(role=role, content=text or ""))  # type: ignore[arg-type]
    return found


class MessageFormat:
    """A message of content blocks, whole or as events."""

    def __init__(self, model: str, stops: tuple[str, ...]) -> None:
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}
        self._stops = stops
        self._kind = ""  # of the block that is open
        self._index = -1

    def start(self) -> list[bytes]:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return [_event("message_start", message=message)]

    def event(self, number: int, event: Event) -> list[bytes]:
        match event:
            case TextDelta(text=text):
                opened = self._open("text", {"type": "text", "text": ""})
                return [*opened, self._delta({"type": "text_delta", "text": text})]
            case ThinkingDelta(text=text):
                opened = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return [*opened, self._delta({"type": "thinking_delta", "thinking": text})]
            case ToolCallReady(call=call):
                block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                opened = [*self._close(), *self._open("tool_use", block)]
                delta = self._delta({"type": "input_json_delta", "partial_json": call.arguments})
                return [*opened, delta, *self._close()]
            case Finished(reply=reply):
                end = {"stop_reason": self._stop_reason(reply), "stop_sequence": self._stop_sequence(reply)}
                return [*self._close(), _event("message_delta", delta=end, usage=_usage(reply))]
            case _:
                return []

    def end(self, replies: Sequence[Reply]) -> list[bytes]:
        return [_event("message_stop")]

    def failed(self, error: ApiError) -> list[bytes]:
        return [sse(error.as_anthropic(), "error")]

    def ping(self) -> bytes:
        return _event("ping")

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        reply = replies[0]
        content: list[dict[str, Any]] = []
        if reply.thinking:
            content.append({"type": "thinking", "thinking": reply.thinking, "signature": ""})
        if reply.text or not reply.tool_calls:
            content.append({"type": "text", "text": reply.text})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)} for call in reply.tool_calls
        ]
        return {
            **self._head,
            "content": content,
            "stop_reason": self._stop_reason(reply),
            "stop_sequence": self._stop_sequence(reply),
            "usage": _usage(reply),
            "timings": timings(reply),
        }

    def _stop_sequence(self, reply: Reply) -> str | None:
        return reply.stop_string if reply.stop_string in self._stops else None

    def _stop_reason(self, reply: Reply) -> str:
        if reply.finish_reason == "length":
            return "max_tokens"
        if self._stop_sequence(reply) is not None:
            return "stop_sequence"
        return "tool_use" if reply.tool_calls else "end_turn"

    def _open(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        if self._kind == kind:
            return []
        closed = self._close()
        self._kind = kind
        self._index += 1
        return [*closed, _event("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[bytes]:
        if not self._kind:
            return []
        self._kind = ""
        return [_event("content_block_stop", index=self._index)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _input(call: ToolCall) -> Any:
    """The arguments as an object; what the model wrote otherwise is given under a name of its own."""
    with suppress(ValueError, RecursionError):
        value = json.loads(call.arguments or "{}")
        if isinstance(value, dict):
            return value
    return {"arguments": call.arguments}


def _usage(reply: Reply) -> dict[str, Any]:
    """Anthropic counts tokens from a cache separately."""
    stats = reply.stats
    return {
        "input_tokens": stats.prefill_tokens,
        "output_tokens": stats.completion_tokens,
        "cache_read_input_tokens": stats.prefill_reused_tokens,
        "cache_creation_input_tokens": 0,
        "prefill_reused_tokens": stats.prefill_reused_tokens,
    }
