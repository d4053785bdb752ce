"""answer_overloaded: a full queue in the words of the Anthropic API, whose status for it is 529."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import cast

from quire.serving.answers import Answer, Ready, Stream, Unary
from quire.serving.errors import OVERLOADED_STATUS, ApiError


@contextmanager
def overload_as_529() -> Generator[None]:
    """Raise a 529 for the 503 of a full queue; everything else goes through."""
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
    """Return an answer that says 529 where the queue turns out to be full while it is made."""
    if isinstance(answer, Unary):
        work = answer.work

        async def run() -> Ready:
            with overload_as_529():
                return await work()

        return Unary(run)
    return replace(answer, frames=_frames(answer.frames)) if isinstance(answer, Stream) else answer


async def _frames(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    # An asynchronous generator, though its type does not say so: it is closed when this one is.
    async with aclosing(cast("AsyncGenerator[bytes]", frames)) as pieces:
        with overload_as_529():
            async for piece in pieces:
                yield piece
