"""/v1/completions: text that goes on, without messages. https://platform.openai.com/docs/api-reference/completions"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from threading import Event as Flag
from time import time
from typing import Any

from engine.api import Event, Finished, Reply, Request, TextDelta, TokenLogprobs
from goinfer_chat.server.chat import choices_of, finish_reason, read_stream_options
from goinfer_chat.server.common import (
    MAX_CHOICES,
    MAX_STOPS,
    MAX_TOKENS,
    logprob,
    read_sampling,
    read_speculation,
    timings,
    usage,
)
from goinfer_chat.server.errors import ApiError
from goinfer_chat.server.fields import Fields, checked_text, kind_of
from goinfer_chat.server.served import Models, Tokens
from goinfer_chat.server.streaming import Job, OpenAIFormat, TextJob, sse

DEFAULT_TOKENS = 16
"""What OpenAI generates where a request does not say how much."""


def read_completion(body: Fields, models: Models) -> TextJob:
    """Raises ApiError for what cannot be obeyed."""
    model = models.find(body.text("model"))
    prompts = _prompts(body)
    special = body.boolean("parse_special")
    count = body.integer("n", 1, MAX_CHOICES) or 1
    if len(prompts) * count > MAX_CHOICES:
        raise body.invalid("prompt", f"prompts and n make more than {MAX_CHOICES} choices")
    logprobs = body.integer("logprobs", 0, 20)
    max_tokens = body.integer("max_tokens", 1, MAX_TOKENS) or DEFAULT_TOKENS
    stream = body.boolean("stream")
    include_usage = read_stream_options(body, stream)
    stop = body.texts("stop", MAX_STOPS)
    sampling = read_sampling(body, model.sampling)
    body.labels("user")
    body.only("echo", False)
    body.only("suffix", "")
    body.only("best_of", 1, count)
    speculation = read_speculation(body, model.speculation)
    body.refuse_others()

    def make() -> Job:
        requests: list[Request] = []
        for prompt in prompts:
            request = Request(
                prompt_ids=_ids(prompt, model.tokenizer, special=special),
                sampling=sampling,
                max_tokens=max_tokens,
                stop=stop,
                top_logprobs=logprobs,
                speculation=speculation,
                cancel=Flag(),
            )
            requests += choices_of(replace(request), count)
        form = CompletionFormat(model.name, include_usage=include_usage, num_prompts=len(prompts))
        return Job(model=model, requests=requests, format=form, stream=stream, one_prompt=len(prompts) == 1)

    return TextJob(model, make)


def _prompts(body: Fields) -> list[str | list[int]]:
    """A text, token ids, or several of either."""
    value = body.value("prompt")
    if value is None:
        raise body.invalid("prompt", "is missing")
    if isinstance(value, str) or (isinstance(value, list) and value and all(map(_is_id, value))):
        value = [value]
    if not isinstance(value, list) or not value:
        raise body.invalid("prompt", f"must be a text, an array of texts or of token ids, not {kind_of(value)}")
    prompts: list[str | list[int]] = []
    for prompt in value:
        if isinstance(prompt, str):
            prompts.append(checked_text(prompt, body.name("prompt")))
        elif isinstance(prompt, list) and prompt and all(map(_is_id, prompt)):
            prompts.append(prompt)
        else:
            raise body.invalid("prompt", "must be a text, an array of texts or of token ids")
    return prompts


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(prompt: str | list[int], tokenizer: Tokens, *, special: bool) -> tuple[int, ...]:
    """A text gets the beginning-of-text token where the model wants one; ids are run as they are."""
    if not isinstance(prompt, str):
        return tuple(prompt)
    ids = tokenizer.encode(prompt, control=special)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids = [tokenizer.bos_id, *ids]
    if not ids:
        raise ApiError(400, "prompt: is empty, and this model has no token to begin a text with", param="prompt")
    return tuple(ids)


class CompletionFormat(OpenAIFormat):
    """Completions, whole or in chunks."""

    def __init__(self, model: str, *, include_usage: bool, num_prompts: int) -> None:
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time()),
            "model": model,
        }
        self._include_usage = include_usage
        self._num_prompts = num_prompts

    def start(self) -> list[bytes]:
        return []

    def event(self, number: int, event: Event) -> list[bytes]:
        match event:
            case TextDelta(text=text):
                return [self._chunk(_choice(number, text))]
            case Finished(reply=reply):
                logprobs = _logprobs(reply.logprobs)
                return [self._chunk(_choice(number, "", logprobs, finish_reason(reply)), timings=timings(reply))]
            case _:
                return []

    def end(self, replies: Sequence[Reply]) -> list[bytes]:
        last = []
        if self._include_usage:
            last.append(sse({**self._head, "choices": [], "usage": usage(replies, num_prompts=self._num_prompts)}))
        return [*last, sse("[DONE]")]

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = [
            _choice(number, reply.text, _logprobs(reply.logprobs), finish_reason(reply))
            for number, reply in enumerate(replies)
        ]
        figures = {"usage": usage(replies, num_prompts=self._num_prompts), "timings": timings(replies[0])}
        return {**self._head, "choices": choices, **figures}

    def _chunk(self, choice: dict[str, Any], **fields: Any) -> bytes:
        if self._include_usage:
            fields["usage"] = None
        return sse({**self._head, "choices": [choice], **fields})


def _choice(
    number: int, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
    if entries is None:
        return None
    pieces = [entry.chosen.piece.decode("utf-8", "replace") for entry in entries]
    return {
        "tokens": pieces,
        "token_logprobs": [logprob(entry.chosen.logprob) for entry in entries],
        "top_logprobs": [
            {top.piece.decode("utf-8", "replace"): logprob(top.logprob) for top in entry.top} for entry in entries
        ],
        "text_offset": [sum(map(len, pieces[:number])) for number in range(len(pieces))],
    }
