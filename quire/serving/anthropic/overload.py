"""answer_overloaded: report a full queue with status 529, as the Anthropic API does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import cast

from quire.serving.answers import Answer, Ready, Stream, Unary
from quire.serving.errors import OVERLOADED_STATUS, ApiError


@contextmanager
def overload_as_529() -> Generator[None]:
    """Turn the 503 of a full queue into a 529; other errors pass unchanged."""
    try:
        yield
    except ApiError as error:
        if error.status != 503 or error.code != "overloaded":
            raise
        raise ApiError(
            OVERLOADED_STATUS,
            error.message,
            code=error.code,
            param=error.param,
            retry_after_s=error.retry_after_s,
            should_retry=error.should_retry,
        ) from None


def answer_overloaded(answer: Answer) -> Answer:
    """Return an answer that becomes a 529 if the queue is full."""
    if isinstance(answer, Unary):
        work = answer.work

        async def run() -> Ready:
            with overload_as_529():
                return await work()

        return Unary(run)
    return replace(answer, frames=_frames(answer.frames)) if isinstance(answer, Stream) else answer


async def _frames(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    # This is an asynchronous generator, although its type is wider: it must be closed together with this one.
    async with aclosing(cast("AsyncGenerator[bytes]", frames)) as pieces:
        with overload_as_529():
            async for piece in pieces:
                yield piece
