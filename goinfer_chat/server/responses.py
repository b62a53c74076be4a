"""/v1/responses: https://platform.openai.com/docs/api-reference/responses"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import time
from typing import Any

from engine.api import (
    Event,
    Finished,
    Message,
    NamedTool,
    Reply,
    Request,
    Role,
    TextDelta,
    ThinkingDelta,
    ToolCall,
    ToolCallReady,
)
from goinfer_chat.server.common import (
    MAX_TOKENS,
    check_num_items,
    made,
    read_content,
    read_sampling,
    read_schema,
    read_speculation,
    read_template_kwargs,
    read_tool_choice,
    timings,
)
from goinfer_chat.server.errors import ApiError
from goinfer_chat.server.fields import Fields, checked_text
from goinfer_chat.server.served import Models
from goinfer_chat.server.streaming import Job, OpenAIFormat, sse

MAX_STORED = 256
MAX_STORED_CHARACTERS = 64_000_000
"""Of all stored responses together: a body may have 4 MB, so their number alone does not bound the memory."""


class Stored:
    """Messages by the id of the response that they end with, for `previous_response_id`; the oldest go first."""

    def __init__(self, max_characters: int = MAX_STORED_CHARACTERS) -> None:
        self._messages: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        self._max_characters = max_characters
        self._num_characters = 0

    def add(self, id: str, messages: tuple[Message, ...]) -> None:
        self._messages[id] = messages
        self._num_characters += _num_characters(messages)
        while len(self._messages) > MAX_STORED or self._num_characters > self._max_characters:
            _, dropped = self._messages.popitem(last=False)
            self._num_characters -= _num_characters(dropped)

    def find(self, id: str) -> tuple[Message, ...] | None:
        return self._messages.get(id)


def _num_characters(messages: Sequence[Message]) -> int:
    """About what the messages take in memory. A message that several responses share counts once for each."""
    return sum(
        len(message.content) + len(message.thinking or "") + 8 * len(message.ids or ()) + len(str(message.tool_calls))
        for message in messages
    )


def read_response(body: Fields, models: Models, stored: Stored) -> Job:
    """Raises ApiError for whatever cannot be obeyed."""
    model = models.find(body.text("model"))
    before = _previous(body, stored)
    messages = (*before, *_input(body))
    instructions = body.text("instructions")
    system = () if instructions is None else (Message(role="system", content=instructions),)
    tools = _tools(body)
    stream = body.boolean("stream")
    options = body.fields("stream_options")
    if options is not None:
        options.only("include_obfuscation", False)
        options.refuse_others()
    text = body.fields("text")
    schema = None
    if text is not None:
        schema = read_schema(text.fields("format"))
        text.only("verbosity", "medium")
        text.refuse_others()
    keep = body.boolean("store", default=True)
    body.labels("metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    body.only("background", False)
    body.only("truncation", "disabled")
    body.only("service_tier", "auto", "default")
    if body.items("include"):
        raise body.invalid("include", "nothing can be included")
    request = made(
        lambda: Request(
            messages=(*system, *messages),
            tools=tools,
            tool_choice=read_tool_choice(body, tools),
            parallel_tool_calls=body.boolean("parallel_tool_calls", default=True),
            json_schema=schema,
            sampling=read_sampling(body, model.sampling),
            max_tokens=body.integer("max_output_tokens", 1, MAX_TOKENS),
            template_kwargs=read_template_kwargs(body),
            speculation=read_speculation(body, model.speculation),
        )
    )
    body.refuse_others()
    form = ResponseFormat(model.name, request, instructions, stored=keep)

    def finished(reply: Message) -> None:
        if keep:
            stored.add(form.id, (*messages, reply))

    return Job(model=model, requests=[request], format=form, stream=stream, finished=finished)


def _previous(body: Fields, stored: Stored) -> tuple[Message, ...]:
    id = body.text("previous_response_id")
    if id is None:
        return ()
    found = stored.find(id)
    if found is None:
        raise ApiError(
            404,
            "previous_response_id: there is no such response, or it is no longer kept",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


def _input(body: Fields) -> tuple[Message, ...]:
    value = body.value("input")
    if isinstance(value, str):
        return (Message(role="user", content=checked_text(value, "input")),)
    check_num_items(body, "input")
    messages: list[Message] = []
    thinking: str | None = None
    for item in body.objects("input"):
        match item.text("type", "message"):
            case "message":
                messages.append(_message(item, thinking))
                thinking = None
            case "function_call":
                _add_call(messages, item, thinking)
                thinking = None
            case "function_call_output":
                item.labels("id", "status")
                output = read_content(item, "output", "input_text", "output_text", "text")
                messages.append(Message(role="tool", content=output, tool_call_id=item.required_text("call_id")))
                item.refuse_others()
            case "reasoning":
                item.labels("id", "status", "summary", "encrypted_content")
                thinking = read_content(item, "content", "reasoning_text") if "content" in item else None
                item.refuse_others()
            case kind:
                raise item.invalid("type", f"items of type {kind!r} are not supported")
    return tuple(messages)


def _message(item: Fields, thinking: str | None) -> Message:
    role = item.choice("role", "system", "developer", "user", "assistant")
    if role is None:
        raise item.invalid("role", "is missing")
    item.labels("id", "status", "phase")
    kinds = ("output_text", "input_text", "text", "refusal") if role == "assistant" else ("input_text", "text")
    content = read_content(item, "content", *kinds)
    item.refuse_others()
    known: Role = role  # type: ignore[assignment]
    return Message(role=known, content=content, thinking=thinking if role == "assistant" else None)


def _add_call(messages: list[Message], item: Fields, thinking: str | None) -> None:
    """A call is an item of its own; here it belongs to the message that it ends."""
    item.labels("id", "status", "namespace")
    function = {"name": item.required_text("name"), "arguments": item.text("arguments", "") or "{}"}
    call = {"id": item.required_text("call_id"), "type": "function", "function": function}
    item.refuse_others()
    if messages and messages[-1].role == "assistant":
        messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))
    else:
        messages.append(Message(role="assistant", content="", thinking=thinking, tool_calls=(call,)))


def _tools(body: Fields) -> tuple[Mapping[str, Any], ...]:
    tools = []
    for tool in body.objects("tools"):
        kind = tool.required_text("type")
        if kind != "function":
            raise tool.invalid("type", f"there are no tools of type {kind!r} here, only function")
        function: dict[str, Any] = {"name": tool.required_text("name")}
        description, parameters = tool.text("description"), tool.mapping("parameters")
        if description is not None:
            function["description"] = description
        if parameters is not None:
            function["parameters"] = parameters
        tool.labels("strict")
        tool.refuse_others()
        tools.append({"type": "function", "function": function})
    return tuple(tools)


class ResponseFormat(OpenAIFormat):
    """A response object, whole or as the events that build it."""

    def __init__(self, model: str, request: Request, instructions: str | None, *, stored: bool) -> None:
        self.id = f"resp_{secrets.token_hex(12)}"
        sampling = request.sampling
        self._head: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time()),
            "model": model,
            "instructions": instructions,
            "metadata": {},
            "parallel_tool_calls": request.parallel_tool_calls,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "tool_choice": "auto" if isinstance(request.tool_choice, NamedTool) else request.tool_choice,
            "tools": [{"type": "function", "strict": True, **tool["function"]} for tool in request.tools],
            "max_output_tokens": request.max_tokens,
            "previous_response_id": None,
            "store": stored,
            "truncation": "disabled",
        }
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""

    def start(self) -> list[bytes]:
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def event(self, number: int, event: Event) -> list[bytes]:
        match event:
            case TextDelta(text=text):
                return [*self._begin("message"), self._text_delta(text)]
            case ThinkingDelta(text=text):
                return [*self._begin("reasoning"), self._text_delta(text)]
            case ToolCallReady(call=call):
                return [*self._end_item(), *self._call(call)]
            case Finished(reply=reply):
                last = self._end_item()
                if not self._items:  # a reply without a word is a message without one
                    last = [*last, *self._begin("message"), *self._end_item()]
                status = _status(reply)
                response = self._response(status, self._items, reply)
                return [*last, self._event(f"response.{status}", response=response)]
            case _:
                return []

    def end(self, replies: Sequence[Reply]) -> list[bytes]:
        return []

    def failed(self, error: ApiError) -> list[bytes]:
        response = self._response("failed", self._items)
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        return [self._event("response.failed", response=response)]

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        reply = replies[0]
        items = []
        if reply.thinking:
            items.append(_item("reasoning", reply.thinking))
        if reply.text or not reply.tool_calls:
            items.append(_item("message", reply.text))
        items += [_call_item(call) for call in reply.tool_calls]
        return self._response(_status(reply), items, reply)

    def _response(self, status: str, items: Sequence[dict[str, Any]], reply: Reply | None = None) -> dict[str, Any]:
        response = {**self._head, "status": status, "output": list(items), "error": None, "incomplete_details": None}
        if reply is not None:
            if status == "incomplete":
                response["incomplete_details"] = {"reason": "max_output_tokens"}
            response |= {"usage": _usage(reply), "timings": timings(reply)}
        return response

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse({"type": kind, "sequence_number": number, **fields}, kind)

    def _begin(self, kind: str) -> list[bytes]:
        if self._open is not None and self._open["type"] == kind:
            return []
        ended = self._end_item()
        self._open, self._text = _item(kind, "", status="in_progress"), ""
        added = self._event(
            "response.output_item.added", output_index=len(self._items), item={**self._open, "content": []}
        )
        part = self._event("response.content_part.added", **self._place(), part=_part(kind, ""))
        return [*ended, added, part]

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._items), "content_index": 0}

    def _text_kind(self) -> str:
        assert self._open is not None
        return "response.output_text" if self._open["type"] == "message" else "response.reasoning_text"

    def _text_delta(self, text: str) -> bytes:
        self._text += text
        more: dict[str, Any] = {"logprobs": []} if self._text_kind() == "response.output_text" else {}
        return self._event(f"{self._text_kind()}.delta", **self._place(), delta=text, **more)

    def _end_item(self) -> list[bytes]:
        if self._open is None:
            return []
        kind = self._open["type"]
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        events = [
            self._event(f"{self._text_kind()}.done", **self._place(), text=self._text, **more),
            self._event("response.content_part.done", **self._place(), part=_part(kind, self._text)),
        ]
        item = {**_item(kind, self._text), "id": self._open["id"]}
        events.append(self._event("response.output_item.done", output_index=len(self._items), item=item))
        self._items.append(item)
        self._open = None
        return events

    def _call(self, call: ToolCall) -> list[bytes]:
        item = _call_item(call)
        place = {"item_id": item["id"], "output_index": len(self._items)}
        begun = {**item, "arguments": "", "status": "in_progress"}
        events = [
            self._event("response.output_item.added", output_index=len(self._items), item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, arguments=call.arguments, name=call.name),
            self._event("response.output_item.done", output_index=len(self._items), item=item),
        ]
        self._items.append(item)
        return events


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(kind: str, text: str, status: str = "completed") -> dict[str, Any]:
    item: dict[str, Any] = {"type": kind, "id": f"{'rs' if kind == 'reasoning' else 'msg'}_{secrets.token_hex(12)}"}
    if kind == "reasoning":
        item |= {"summary": []}
    else:
        item |= {"role": "assistant"}
    return {**item, "status": status, "content": [_part(kind, text)]}


def _call_item(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{secrets.token_hex(12)}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _status(reply: Reply) -> str:
    return "incomplete" if reply.finish_reason == "length" else "completed"


def _usage(reply: Reply) -> dict[str, Any]:
    stats = reply.stats
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.prefill_reused_tokens},
        "output_tokens": stats.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": (stats.prompt_tokens or 0) + (stats.completion_tokens or 0),
        "prefill_reused_tokens": stats.prefill_reused_tokens,
    }
