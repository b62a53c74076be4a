"""A request as the body of a chat completion.

Everything OpenAI documents goes where it says. What other servers take beyond that (`top_k`, `min_p`, the repeat
penalty) is sent only when the request asks for something else than the default: a server that does not know it refuses,
and that is better than a setting that is not obeyed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.api import Message, NamedTool, Request, SamplingParams

_DEFAULTS = SamplingParams()
_OURS = ("date_string",)
"""A server tells its templates the day itself."""


def body_of(request: Request, model: str) -> dict[str, Any]:
    """Arguments of `chat.completions.create`. The messages come first and in order, so that the prompts of two turns
    start alike and a server with a prefix cache finds the first in it."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": [message_of(message) for message in request.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    optional: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "stop": list(request.stop) or None,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "tools": [tool_of(tool) for tool in request.tools] or None,
        "response_format": schema_of(request.json_schema),
    }
    if request.tools:
        optional["tool_choice"] = choice_of(request)
        optional["parallel_tool_calls"] = None if request.parallel_tool_calls else False
    extra = {
        "top_k": sampling.top_k if sampling.top_k != _DEFAULTS.top_k else None,
        "min_p": sampling.min_p or None,
        "repeat_penalty": sampling.repeat_penalty if sampling.repeat_penalty != 1 else None,
        "chat_template_kwargs": {k: v for k, v in request.template_kwargs.items() if k not in _OURS} or None,
    }
    body |= {name: value for name, value in optional.items() if value is not None}
    extra = {name: value for name, value in extra.items() if value is not None}
    return body | ({"extra_body": extra} if extra else {})


def message_of(message: Message) -> dict[str, Any]:
    """In OpenAI's form. Reasoning stays here: servers drop it or refuse it."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [call_of(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.name is not None and message.role != "tool":
        shown["name"] = message.name
    return shown


def call_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are JSON text, as the form wants them."""
    function = dict(call.get("function", {}))
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {"id": call.get("id", ""), "type": "function", "function": function}


def tool_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's description in OpenAI's form, whichever of the two forms of `Request.tools` it has."""
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def choice_of(request: Request) -> str | dict[str, Any]:
    """`tool_choice` in OpenAI's form."""
    choice = request.tool_choice
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice


def schema_of(schema: Mapping[str, Any] | bool | None) -> dict[str, Any] | None:
    """`response_format`: any JSON, JSON under a schema, or None for any text."""
    if schema is None:
        return None
    if isinstance(schema, bool) or not schema:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": dict(schema), "strict": True}}
