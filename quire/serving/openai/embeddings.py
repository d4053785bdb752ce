"""POST /v1/embeddings."""

from __future__ import annotations

import array
import asyncio
import base64
import sys
from collections.abc import Sequence
from functools import partial

import msgspec

from quire.api.openai.answers import Embedding, EncodedEmbeddings, PromptUsage
from quire.api.openai.embeddings import MAX_INPUT_TOKENS, MAX_INPUTS, EmbeddingRequest, split_prompts
from quire.base.errors import RequestError
from quire.contracts.pooling_params import PoolingParams
from quire.contracts.request import Request
from quire.serving.answers import Answer, Ready, Unary
from quire.serving.context import ServerContext
from quire.serving.core.caller import Caller
from quire.serving.core.long_prompts import pack_prompt
from quire.serving.core.prepare import check_ids, encode_prompt, renamed, salt_of
from quire.serving.core.served_model import ServedModel
from quire.serving.endpoint import Call
from quire.serving.errors import engine_unavailable
from quire.serving.interfaces import NOT_BY_CLIENT, Gateway, Job, Tenant
from quire.serving.openai.frames import encode_json
from quire.serving.openai.handlers import caller_of
from quire.serving.openai.requests import make_id

FLOATS_PER_TURN = 8192  # a millisecond's worth
MAX_AT_ONCE = 64  # inputs of one request that the engine has at a time


async def post_embeddings(context: ServerContext, call: Call) -> Answer:
    """Turn texts into vectors."""
    context.check_accepting()
    limit = None if context.served is None else context.served.info.max_model_len
    body = await call.body(EmbeddingRequest, None if limit is None else partial(check_ids, limit, "input", True))
    return await embed(context, body, caller_of(call, is_streaming=False))


async def embed(context: ServerContext, body: EmbeddingRequest, caller: Caller) -> Answer:
    """Return the answer to a request for embeddings. Raises ApiError and RequestError."""
    served = context.check_model(body.model)
    requests = await context.prepare(
        caller.owner, caller.call_id, body.input, lambda: prepare_embeddings(served, body, caller.owner)
    )
    jobs = [caller.job(request, is_streaming=False) for request in requests]

    async def work() -> Ready:
        vectors = await _embed_all(context.gateway, jobs)
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return Ready(await _encode(served, body, vectors, num_tokens))

    return Unary(work)


def prepare_embeddings(served: ServedModel, body: EmbeddingRequest, owner: Tenant) -> list[Request]:
    """Return a request per input. Raises RequestError with the field at fault."""
    params = PoolingParams(pooling=body.pooling or "last", normalize=body.normalize is not False, dimensions=body.dimensions)
    salt = salt_of(owner, body.cache_salt or "")
    prefix = make_id("embd-")
    requests: list[Request] = []
    num_tokens = 0
    for position, prompt in enumerate(split_prompts(body.input, MAX_INPUTS, "input")):
        with renamed("prompt", "input"):
            _, token_ids = encode_prompt(served, prompt, body.add_special_tokens is not False, is_pooling=True)
        num_tokens += len(token_ids)
        if num_tokens > MAX_INPUT_TOKENS:
            raise RequestError(f"input: may have {MAX_INPUT_TOKENS} tokens in total; send several requests", "input")
        stated = {"prompt_token_ids": token_ids, "cache_salt": salt}
        with renamed("prompt_token_ids", "input"):
            requests.append(pack_prompt(served.factory.make(f"{prefix}-{position}", served.next_index(), stated, params)))
    return requests


async def _embed_all(gateway: Gateway, jobs: Sequence[Job]) -> list[list[float]]:
    """Return the vectors in order; when one fails, the others are aborted."""
    limit = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(job: Job) -> list[float]:
        async with limit:
            return await _embed_one(gateway, job)

    tasks = [asyncio.create_task(one(job)) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel(NOT_BY_CLIENT)
        await asyncio.gather(*tasks, return_exceptions=True)


async def _embed_one(gateway: Gateway, job: Job) -> list[float]:
    async with gateway.open(job) as stream:
        async for delta in stream:
            if delta.embedding is not None:
                return delta.embedding
    raise engine_unavailable("the engine ended the request before it was complete")


async def _encode(served: ServedModel, body: EmbeddingRequest, vectors: Sequence[list[float]], num_tokens: int) -> bytes:
    """Return the answer as JSON. Others have their turn meanwhile: there may be millions of numbers in it."""
    is_base64 = body.encoding_format == "base64"
    data: list[msgspec.Raw] = []
    num_since = 0
    for index, vector in enumerate(vectors):
        data.append(msgspec.Raw(encode_json(Embedding("embedding", index, to_base64(vector) if is_base64 else vector))))
        num_since += len(vector)
        if num_since > FLOATS_PER_TURN:
            num_since = 0
            await asyncio.sleep(0)
    return encode_json(EncodedEmbeddings("list", data, served.name, PromptUsage(num_tokens, num_tokens)))


def to_base64(vector: Sequence[float]) -> str:
    """Return the values as little-endian 32-bit floats in base64."""
    values = array.array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")
