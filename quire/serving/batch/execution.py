"""Execution of batch lines: through the online routes, with the priority class "batch"."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec

from quire.api.anthropic.messages import MessagesRequest
from quire.api.decode import LARGE_BYTES, annotations_of, decode_body
from quire.api.openai.chat import ChatCompletionRequest
from quire.api.openai.completions import CompletionRequest
from quire.api.openai.embeddings import EmbeddingRequest
from quire.api.openai.responses import ResponsesRequest
from quire.base.errors import QuireError, RequestError
from quire.serving.answers import Answer, Ready, Unary
from quire.serving.anthropic.endpoints import message
from quire.serving.anthropic.requests import ignored_by_model as ignored_in_message
from quire.serving.auth import Authenticator
from quire.serving.batch.records import MESSAGES_ENDPOINT, BatchRecord
from quire.serving.batch.runner import Execute
from quire.serving.context import ServerContext
from quire.serving.core.caller import Caller
from quire.serving.errors import from_quire_error, invalid, unknown_parameters
from quire.serving.ignored import IGNORED_HEADER, header_of
from quire.serving.openai.chat import chat
from quire.serving.openai.completions import complete
from quire.serving.openai.embeddings import embed
from quire.serving.openai.requests import ignored_by_model as ignored_in_chat
from quire.serving.responses.create import ResponseRoutes, respond
from quire.serving.responses.requests import ignored_by_model as ignored_in_response

_ROUTES: dict[str, tuple[type[msgspec.Struct], Callable[[ServerContext, Any, Caller], Awaitable[Answer]]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, chat),
    "/v1/completions": (CompletionRequest, complete),
    "/v1/embeddings": (EmbeddingRequest, embed),
}
_KINDS: dict[str, type[msgspec.Struct]] = {
    **{path: kind for path, (kind, _) in _ROUTES.items()},
    "/v1/responses": ResponsesRequest,
}
BATCH_ENDPOINTS = tuple(_KINDS)
_KINDS[MESSAGES_ENDPOINT] = MessagesRequest


def check_batch_body(endpoint: str, body: bytes) -> None:
    """Check a body as its route does; that of a message batch when it runs. Raises ApiError 400."""
    if endpoint == MESSAGES_ENDPOINT:
        return
    try:
        decoded, _ = decode_body(body, _KINDS[endpoint])
    except RequestError as error:
        raise invalid(str(error), error.param, getattr(error, "code", "invalid_value")) from None
    if getattr(decoded, "stream", None):
        raise invalid("stream must be false or absent in a batch", "stream")


async def _decode(decoding: asyncio.Lock, body: bytes, kind: type[msgspec.Struct]) -> tuple[msgspec.Struct, tuple[str, ...]]:
    """Return the decoded body, and the paths of ignored fields. Raises RequestError."""
    if len(body) <= LARGE_BYTES:
        return decode_body(body, kind)
    async with decoding:  # one huge body at a time, for all owners
        return await asyncio.to_thread(decode_body, body, kind)


def make_execute(responses: ResponseRoutes, authenticator: Authenticator, decoding: asyncio.Lock) -> Execute:
    """Return the function that runs one line.

    decoding  held while a huge body is decoded
    """
    context = responses.server

    async def execute(record: BatchRecord, body: bytes) -> Ready:
        deadline_s = time.monotonic() + record.expires_at - time.time()
        caller = Caller(
            owner=authenticator.owner_named(record.owner),
            route=record.endpoint,
            deadline_s=deadline_s,
            priority="batch",
        )
        try:
            decoded, ignored = await _decode(decoding, body, _KINDS[record.endpoint])
            if isinstance(decoded, ChatCompletionRequest):
                ignored += ignored_in_chat(context.model, decoded)
            elif isinstance(decoded, ResponsesRequest):
                ignored += ignored_in_response(context.model, decoded)
            elif isinstance(decoded, MessagesRequest):
                if decoded.stream:
                    raise invalid("stream must be false or absent in a batch", "stream")
                ignored += ignored_in_message(context.model, decoded)
            if ignored and context.config.strict:
                raise unknown_parameters(ignored)
            ignored += annotations_of(decoded)
            if isinstance(decoded, ResponsesRequest):
                answer = await respond(responses, decoded, caller)
            elif isinstance(decoded, MessagesRequest):
                answer = await message(context, decoded, caller)
            else:
                answer = await _ROUTES[record.endpoint][1](context, decoded, caller)
            if isinstance(answer, Unary):
                answer = await answer.work()
        except QuireError as error:
            raise from_quire_error(error) from None
        if not isinstance(answer, Ready):
            raise invalid("a line of a batch cannot be streamed", "stream")
        return replace(answer, headers={**answer.headers, IGNORED_HEADER: header_of(ignored)}) if ignored else answer

    return execute
