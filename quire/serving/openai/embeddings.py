"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec

from quire.api.openai.answers import Embedding, EncodedEmbeddings, PromptUsage
from quire.api.openai.embeddings import MAX_INPUTS, EmbeddingRequest, split_prompts
from quire.contracts.pooler_spec import prompt_before
from quire.contracts.pooling_params import PoolingParams
from quire.contracts.request import Request
from quire.serving.answers import Answer, Ready, Unary
from quire.serving.context import ServerContext
from quire.serving.core.caller import Caller
from quire.serving.core.prepare import check_ids
from quire.serving.core.served_model import ServedModel
from quire.serving.endpoint import Call
from quire.serving.interfaces import Tenant
from quire.serving.openai.frames import encode_json
from quire.serving.openai.handlers import caller_of
from quire.serving.openai.pooled import PooledRequests, count_tokens, pool_all, to_base64

FLOATS_PER_TURN = 8192  # about a millisecond


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
        vectors = await pool_all(context.gateway, jobs)
        num_tokens = count_tokens(requests)
        return Ready(await _encode(served, body, vectors, num_tokens))

    return Unary(work)


def prepare_embeddings(served: ServedModel, body: EmbeddingRequest, owner: Tenant) -> list[Request]:
    """Return a request per input. Raises RequestError with the field at fault."""
    params = PoolingParams(
        pooling=body.pooling,
        normalize=body.normalize,
        dimensions=body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    before = prompt_before(served.info.pooler, body.prompt_name)
    requests = PooledRequests(served, params, owner, body.cache_salt, "embd-")
    for prompt in split_prompts(body.input, MAX_INPUTS, "input"):
        requests.add(before + prompt if isinstance(prompt, str) else prompt, "input", body.add_special_tokens is not False)
    return requests.made


async def _encode(served: ServedModel, body: EmbeddingRequest, vectors: Sequence[list[float]], num_tokens: int) -> bytes:
    """Return the answer as JSON. It yields to other tasks in between, since there may be millions of numbers."""
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
