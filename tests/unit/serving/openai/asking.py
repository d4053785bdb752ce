"""Ask the handlers of the OpenAI API as the HTTP shell does, without HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from quire.api.decode import decode_body
from quire.api.openai.chat import ChatCompletionRequest
from quire.api.openai.completions import CompletionRequest
from quire.serving.answers import Answer, Ready, Stream, Unary
from quire.serving.context import ServerContext
from quire.serving.core.caller import Caller
from quire.serving.openai.chat import chat
from quire.serving.openai.completions import complete
from tests.unit.serving.fakes import OWNER

CALLER = Caller(owner=OWNER, route="/v1/test")
USER = [{"role": "user", "content": "hi"}]
HEAD = re.compile(rb'"id":"[a-z]+-[A-Za-z0-9]{29}"|"created":\d+|"system_fingerprint":"fp_[0-9a-f]{12}"|call_[A-Za-z0-9]{24}')
FIXED = {b'"id"': b'"id":"ID"', b'"cre': b'"created":1', b'"sys': b'"system_fingerprint":"FP"', b"call": b"call_1"}


def fix(data: bytes) -> str:
    """Return an answer with what is random in it replaced."""
    return HEAD.sub(lambda found: FIXED[found[0][:4]], data).decode()


async def finish(answer: Answer) -> bytes:
    """Return all bytes of an answer."""
    if isinstance(answer, Stream):
        return b"".join([frame async for frame in answer.frames])
    ready = await answer.work() if isinstance(answer, Unary) else answer
    assert isinstance(ready, Ready)
    assert ready.status == 200
    return ready.body or b""


def ask(handler: Callable[..., Awaitable[Answer]], kind: type, context: ServerContext, **body: Any) -> bytes:
    """Return the bytes of an answer."""
    decoded, ignored = decode_body(json.dumps({"model": "demo", **body}).encode(), kind)
    assert ignored == ()

    async def run() -> bytes:
        return await finish(await handler(context, decoded, CALLER))

    return asyncio.run(run())


def ask_chat(context: ServerContext, **body: Any) -> bytes:
    """Return the answer to a chat."""
    return ask(chat, ChatCompletionRequest, context, **{"messages": USER, **body})


def ask_completion(context: ServerContext, **body: Any) -> bytes:
    """Return the answer to a completion."""
    return ask(complete, CompletionRequest, context, **{"prompt": "Once", **body})


def chunks_of(data: bytes) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which has to be well formed and to end with [DONE]."""
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event[len("data: ") :]) for event in events]
