"""ApiError: what a client is told when a request cannot be served, in the shape of each API."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from quire.base.errors import QuireError, RequestError, UnsupportedError
from quire.base.logging import get_logger

logger = get_logger(__name__)

ErrorStyle = Literal["openai", "anthropic", "ollama"]
OVERLOADED_STATUS = 529  # of the Anthropic API: what 503 is elsewhere

# status -> (OpenAI type, Anthropic type)
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("invalid_request_error", "authentication_error"),
    403: ("invalid_request_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout", "timeout_error"),
    409: ("conflict", "conflict_error"),
    413: ("request_too_large", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    431: ("invalid_request_error", "invalid_request_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
    504: ("timeout", "timeout_error"),
    OVERLOADED_STATUS: ("server_error", "overloaded_error"),
}
_LENGTH_FIELDS = ("prompt", "messages", "input", "max_tokens", "max_completion_tokens", "max_output_tokens")
MAX_MESSAGE_LENGTH = 2000
MAX_RETRY_AFTER_S = 120  # clients treat a longer wait as "do not retry"
INTERNAL_ERROR = "the server failed on this request; its log has the reason under the request id"
BODY_ROOM_CODE = "too_many_body_bytes"


class ApiError(Exception):
    """An answer with an error status.

    code           a stable identifier for programs, such as "context_length_exceeded"
    param          the invalid field, as a path: "messages[2].content[0].type"
    retry_after_s  the Retry-After of 429 and 503, between 1 and 120 seconds
    should_retry   tells clients whether to retry, independently of the status; None leaves it to them
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[:MAX_MESSAGE_LENGTH]}..."
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry

    def headers(self) -> dict[str, str]:
        """Return the headers of the error."""
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            seconds = min(max(self.retry_after_s, 1.0), MAX_RETRY_AFTER_S)
            headers["retry-after"] = str(math.ceil(seconds))
            headers["retry-after-ms"] = str(math.ceil(seconds * 1000))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def openai_body(self) -> dict[str, Any]:
        """Return {"error": {...}} in the format of the OpenAI API."""
        kind = _TYPES.get(self.status, ("server_error", "api_error"))[0]
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str | None = None) -> dict[str, Any]:
        """Return {"type": "error", ...} in the format of the Anthropic API; the invalid field is part of the message."""
        kind = _TYPES.get(self.status, ("server_error", "api_error"))[1]
        message = self.message if self.param is None or self.param in self.message else f"{self.param}: {self.message}"
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}

    def ollama_body(self) -> dict[str, str]:
        """Return {"error": "..."} as the Ollama API has it; the field at fault goes into the message."""
        is_named = self.param is None or self.param in self.message
        return {"error": self.message if is_named else f"{self.param}: {self.message}"}

    def body(self, style: ErrorStyle, request_id: str | None = None) -> dict[str, Any]:
        """Return the error in the shape of an API."""
        if style == "openai":
            return self.openai_body()
        return self.anthropic_body(request_id) if style == "anthropic" else self.ollama_body()

    def ollama_line(self) -> bytes:
        """Return the error as a line of a stream."""
        return msgspec.json.encode(self.ollama_body()) + b"\n"

    def openai_event(self) -> bytes:
        """Return the error as an event of a stream, followed by [DONE]."""
        return b"data: " + msgspec.json.encode(self.openai_body()) + b"\n\ndata: [DONE]\n\n"

    def anthropic_event(self, request_id: str | None = None) -> bytes:
        """Return the error as an event of a stream."""
        return b"event: error\ndata: " + msgspec.json.encode(self.anthropic_body(request_id)) + b"\n\n"


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return a 400: the client must change the request."""
    return ApiError(400, message, code=code, param=param)


def unknown_parameters(paths: Sequence[str]) -> ApiError:
    """Return a 400 for unknown fields on a strict server."""
    return ApiError(400, f"unknown parameters: {', '.join(paths)}", code="unknown_parameter", param=paths[0])


def unsupported(param: str, message: str) -> ApiError:
    """Return a 400 for a parameter of the API that is not supported here."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def not_found(message: str, code: str = "not_found", param: str | None = None) -> ApiError:
    """Return a 404."""
    return ApiError(404, message, code=code, param=param)


def overloaded(message: str, retry_after_s: float) -> ApiError:
    """Return a 503: the queue is full."""
    return ApiError(503, message, code="overloaded", retry_after_s=retry_after_s)


def rate_limited(message: str, retry_after_s: float) -> ApiError:
    """Return a 429: this key is over its share or rate."""
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def spread_s(seconds: float, draw: Callable[[], float] = random.random) -> float:
    """Return `seconds` plus a random jitter of up to a quarter, so that clients do not all return at once."""
    return min(max(math.ceil(seconds), 1) * (1 + 0.25 * draw()), float(MAX_RETRY_AFTER_S))


def engine_unavailable(message: str, retry_after_s: float = 5.0) -> ApiError:
    """Return a 503: the engine is not available (starting, restarting, draining or dead). Retry-After has jitter."""
    return ApiError(503, message, code="engine_unavailable", retry_after_s=spread_s(retry_after_s))


def wrong_role(message: str) -> ApiError:
    """Return a 503: this server does not take requests of clients; another one has to be asked."""
    return ApiError(503, message, code="wrong_role", retry_after_s=spread_s(float(MAX_RETRY_AFTER_S)))


def shutting_down(code: str = "draining", after_s: float = 1.0) -> ApiError:
    """Return a 503: this server ends, after about `after_s`. Retry-After has jitter."""
    return ApiError(503, "the server is shutting down", code=code, retry_after_s=spread_s(after_s))


def deadline_exceeded(while_queued: bool) -> ApiError:
    """Return a 408 for a deadline that passed in the queue, otherwise a 504, since a retry would take as long."""
    if while_queued:
        return ApiError(408, "the deadline passed while the request waited in the queue", code="request_timeout")
    return ApiError(504, "the deadline passed while the request ran", code="deadline_exceeded", should_retry=False)


def from_quire_error(error: QuireError) -> ApiError:
    """Return a 400 for errors that the client can fix, otherwise a 500."""
    if isinstance(error, RequestError):
        is_too_long = error.param in _LENGTH_FIELDS and "max_model_len" in str(error)
        code = "context_length_exceeded" if is_too_long else "invalid_value"
        return ApiError(400, str(error), code=code, param=error.param)
    if isinstance(error, UnsupportedError):
        return ApiError(400, str(error), code="unsupported_value")
    return ApiError(500, str(error), code="internal_error")


def as_api_error(error: BaseException, request_id: str) -> ApiError:
    """Return the client's view of an exception: client errors in full, server errors by type only, with the rest in the log."""
    if isinstance(error, ApiError):
        # Clear the traceback: it references frames that reference the error and the body of the request, a cycle that would
        # live until the next garbage collection.
        return error.with_traceback(None)
    if isinstance(error, QuireError):
        return from_quire_error(error)
    logger.error("request %s failed", request_id, exc_info=error, extra={"request_id": request_id})
    return ApiError(500, INTERNAL_ERROR, code="internal_error")


def too_large(max_bytes: int, num_bytes: int) -> ApiError:
    """Return a 413 for a body with at least num_bytes; the rest of it is not read."""
    return ApiError(413, f"the body may have {max_bytes} bytes, got {num_bytes} or more", code="request_too_large")
