"""The application: routes to what answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from goinfer_chat import __version__
from goinfer_chat.server.chat import read_chat
from goinfer_chat.server.common import made
from goinfer_chat.server.completions import read_completion
from goinfer_chat.server.errors import ApiError, from_exception, invalid
from goinfer_chat.server.fields import Fields, parse_body
from goinfer_chat.server.messages import read_anthropic, read_count
from goinfer_chat.server.metrics import Metrics
from goinfer_chat.server.responses import Stored, read_response
from goinfer_chat.server.security import Gate, Limits
from goinfer_chat.server.served import Models, Served
from goinfer_chat.server.streaming import Answer, Context, Job, TextJob

MAX_PIECES = 100_000
"""Tokens that are told with their pieces: each takes some seventy bytes, and all of them are in memory at once."""

_T = TypeVar("_T")


@dataclass(slots=True)
class Application:
    """The ASGI application and what its owner needs of it."""

    gate: Gate
    metrics: Metrics
    context: Context

    async def stop(self) -> None:
        """End all replies that are being generated: clients get an error, conversations are saved."""
        self.context.closing = True
        tasks = [*self.context.running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_application(
    models: Models,
    *,
    limits: Limits,
    api_key: str | None = None,
    origins: Collection[str] = (),
    check_host: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Application:
    metrics = Metrics()
    context = Context(metrics, set(), say)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, title="goinfer-chat", version=__version__)
    _add_errors(app, metrics)
    _add_generation(app, models, context)
    _add_tokens(app, models, metrics)
    gate = Gate(app, metrics=metrics, limits=limits, api_key=api_key, origins=origins, check_host=check_host)
    _add_state(app, models, metrics, gate)
    return Application(gate, metrics, context)


def _add_errors(app: FastAPI, metrics: Metrics) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        told = from_exception(error)
        if told.code == "queue_full":
            metrics.count("goinfer_rejected_total", full="queue")
        return JSONResponse(told.body(request.url.path), told.status, told.headers)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = ApiError(error.status_code, "there is no such route" if error.status_code == 404 else str(error.detail))
        return JSONResponse(told.body(request.url.path), told.status, error.headers)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, api_error)


def _add_generation(app: FastAPI, models: Models, context: Context) -> None:
    stored = Stored()

    def route(path: str, read: Callable[[Fields], Job | TextJob]) -> None:
        async def endpoint(request: Request) -> Response:
            found = read(parse_body(await request.body()))
            if isinstance(found, TextJob):
                found = await _of_text(request, found.model, found.make, context.metrics)
            return Answer(found, context)

        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)

    route("/v1/chat/completions", lambda body: read_chat(body, models))
    route("/v1/completions", lambda body: read_completion(body, models))
    route("/v1/responses", lambda body: read_response(body, models, stored))
    route("/v1/messages", lambda body: read_anthropic(body, models))

    @app.get("/v1/responses/{id}", response_model=None)
    async def show_response(id: str) -> Response:
        raise ApiError(404, "responses are not kept for reading; go on with one by previous_response_id")


def _add_tokens(app: FastAPI, models: Models, metrics: Metrics) -> None:
    @app.post("/v1/messages/count_tokens", response_model=None)
    async def count(request: Request) -> Response:
        model, wanted = read_count(parse_body(await request.body()), models)
        number = await _of_text(request, model, lambda: model.engine.count_tokens(wanted), metrics)
        return JSONResponse({"input_tokens": number})

    @app.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Response:
        body = parse_body(await request.body())
        model = models.find(body.text("model"))
        name = "prompt" if "prompt" in body and "content" not in body else "content"
        text = body.required_text(name)
        special, pieces = body.boolean("parse_special"), body.boolean("with_pieces")
        body.labels("content", "prompt")
        body.refuse_others()
        answer = await _of_text(request, model, lambda: _tokenized(model, text, special, pieces), metrics)
        return JSONResponse(answer)


def _tokenized(model: Served, text: str, special: bool, with_pieces: bool) -> dict[str, Any]:
    ids = model.tokenizer.encode(text, control=special)
    answer = {"tokens": ids, "count": len(ids), "max_model_len": model.engine.info.context_size}
    if with_pieces and len(ids) > MAX_PIECES:
        raise invalid("with_pieces", f"the text has {len(ids):,} tokens; pieces are told of {MAX_PIECES:,} at most")
    if with_pieces:
        answer["pieces"] = [
            {"id": id, "piece": piece.decode("utf-8", "replace"), "bytes": list(piece)}
            for id, piece in zip(ids, map(model.tokenizer.piece, ids))
        ]
    return answer


async def _of_text(request: Request, model: Served, work: Callable[[], _T], metrics: Metrics) -> _T:
    """What `work` makes of a text in a thread, when it has a place. Raises ApiError."""
    async with model.texts.place():
        if await request.is_disconnected():
            metrics.count("goinfer_disconnects_total")
            raise ApiError(408, "the client has left")
        try:
            return await asyncio.to_thread(made, work)
        except Exception as error:
            raise from_exception(error) from error


def _add_state(app: FastAPI, models: Models, metrics: Metrics, gate: Gate) -> None:
    @app.get("/v1/models", response_model=None)
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_object(model) for model in models]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def show_model(name: str) -> Response:
        return JSONResponse(_model_object(models.find(name)))

    @app.get("/health", response_model=None)
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_model=None)
    async def show_metrics() -> Response:
        for model in models:
            metrics.gauge("goinfer_running_requests", model.admission.num_running, model=model.name)
            metrics.gauge("goinfer_waiting_requests", model.admission.num_waiting, model=model.name)
        metrics.gauge("goinfer_inflight_requests", gate.num_inflight)
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model_object(model: Served) -> dict[str, Any]:
    info = model.engine.info
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "local",
        "type": "model",
        "display_name": model.name,
        "context_length": info.context_size,
        "max_model_len": info.context_size,
    }
