"""The part of a request that the prompt is made of: messages, tools, and the values for the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from typing import TYPE_CHECKING, Any

from engine.api import Message, Request
from goinfer_chat.conversations import DATE
from goinfer_chat.settings import Settings

if TYPE_CHECKING:
    from tools import Tool


def prompt_request(
    conversation: str,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    settings: Settings,
    about: Mapping[str, Any],
) -> Request:
    """A request that has all the prompt depends on, and nothing else.

    conversation   its id
    messages       those after the system prompt, which is one of the settings
    about          the settings that the conversation itself keeps, such as the day it began
    """
    system = () if settings.system is None else (Message(role="system", content=settings.system),)
    return Request(
        messages=(*system, *messages),
        tools=tuple(tool.describe() for tool in tools),
        conversation=conversation,
        template_kwargs=_day(about) | _thinking(settings),
    )


def _day(about: Mapping[str, Any]) -> dict[str, Any]:
    """Templates that tell the day call it `date_string`; the others ignore it."""
    day = about.get(DATE)
    with suppress(ValueError, TypeError):
        return {"date_string": date.fromisoformat(day).strftime("%d %b %Y")} if day is not None else {}
    return {}


def _thinking(settings: Settings) -> dict[str, Any]:
    """Templates of thinking models ask for `enable_thinking`; the others ignore it."""
    return {} if settings.think == "auto" else {"enable_thinking": settings.think == "on"}
