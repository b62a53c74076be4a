"""What a client is told when something cannot be done: a status, one sentence, and the field it is about.

No traceback and no path of this machine leaves it: only errors that are written for people are passed on.
"""

from __future__ import annotations

from typing import Any

from engine.errors import ContextExceededError, EngineError, TemplateError, UsageError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_TOO_LONG = "context_length_exceeded"
_PROMPT_FIELDS = {"/v1/completions": "prompt", "/v1/responses": "input"}
"""Where a route has what a prompt is made of; the others call it `messages`."""


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "api_error")

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    def as_openai(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def as_anthropic(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": self.type, "message": self.message}}

    def body(self, path: str) -> dict[str, Any]:
        """In the form that clients of this route expect."""
        if path.startswith("/v1/messages"):
            return self.as_anthropic()
        body = self.as_openai()
        if self.code == _TOO_LONG:
            body["error"]["param"] = _PROMPT_FIELDS.get(path, "messages")
        return body


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """A field that cannot be obeyed; the message names it."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def from_exception(error: BaseException) -> ApiError:
    """What a client may know of an error."""
    match error:
        case ApiError():
            return error
        case ContextExceededError():
            message = (
                f"the prompt has {error.prompt_tokens} tokens and the context {error.context_size}, "
                "of which one is kept for the reply"
            )
            return ApiError(400, message, code=_TOO_LONG)
        case UsageError() | TemplateError():
            return ApiError(400, str(error))
        case EngineError():
            return ApiError(503, str(error), retry_after=1)
        case RecursionError():
            return ApiError(400, "the body is nested too deeply", param="body")
        case _:
            return ApiError(500, "internal error")
