"""POST /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from quire.api.ollama.answers import EmbedAnswer, EmbeddingsAnswer
from quire.api.ollama.requests import EmbeddingsRequest, EmbedRequest
from quire.api.openai.embeddings import EmbeddingRequest
from quire.serving.answers import Answer, Ready, Unary
from quire.serving.context import ServerContext
from quire.serving.endpoint import Call
from quire.serving.ollama.names import check_model, line
from quire.serving.openai.embeddings import prepare_embeddings
from quire.serving.openai.handlers import caller_of
from quire.serving.openai.pooled import count_tokens, pool_all

_WHOLE_CONTEXT = -1


async def post_embed(context: ServerContext, call: Call) -> Answer:
    """Turn texts into vectors of length 1; what is too long is cut unless truncate is false."""
    context.check_accepting()
    body = await call.body(EmbedRequest, any_media_type=True)
    truncation = None if body.truncate is False else _WHOLE_CONTEXT
    wanted = EmbeddingRequest(
        model=body.model, input=body.input, dimensions=body.dimensions, normalize=True, truncate_prompt_tokens=truncation
    )
    if body.input == []:
        check_model(context, body.model)
        return Ready(line(EmbedAnswer(model=body.model, embeddings=[], total_duration=0, load_duration=0, prompt_eval_count=0)))

    def answer(vectors: list[list[float]], num_tokens: int) -> EmbedAnswer:
        nanoseconds = int((time.monotonic() - call.received_s) * 1e9)
        return EmbedAnswer(
            model=body.model,
            embeddings=vectors,
            total_duration=nanoseconds,
            load_duration=0,
            prompt_eval_count=num_tokens,
        )

    vectors_of = await _pooled(context, call, wanted)

    async def work() -> Ready:
        return Ready(line(answer(*await vectors_of())))

    return Unary(work)


async def post_embeddings(context: ServerContext, call: Call) -> Answer:
    """Turn one text into a vector."""
    context.check_accepting()
    body = await call.body(EmbeddingsRequest, any_media_type=True)
    wanted = EmbeddingRequest(model=body.model, input=body.prompt, truncate_prompt_tokens=_WHOLE_CONTEXT)
    vectors_of = await _pooled(context, call, wanted)

    async def work() -> Ready:
        vectors, _ = await vectors_of()
        return Ready(line(EmbeddingsAnswer(vectors[0])))

    return Unary(work)


async def _pooled(
    context: ServerContext, call: Call, wanted: EmbeddingRequest
) -> Callable[[], Awaitable[tuple[list[list[float]], int]]]:
    """Return what gives the vectors of the inputs, and the number of their tokens. Raises ApiError and RequestError."""
    served = check_model(context, wanted.model)
    wanted.check()
    caller = caller_of(call, is_streaming=False)
    requests = await context.prepare(
        call.owner, call.request_id, wanted.input, lambda: prepare_embeddings(served, wanted, call.owner)
    )
    jobs = [caller.job(request, is_streaming=False) for request in requests]

    async def pool() -> tuple[list[list[float]], int]:
        return await pool_all(context.gateway, jobs), count_tokens(requests)

    return pool
