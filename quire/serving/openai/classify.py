"""POST /classify and /pooling, as in vLLM."""

from __future__ import annotations

import time
from functools import partial
from typing import TypeVar

from quire.api.openai.answers import PromptUsage
from quire.api.openai.completions import split_prompts
from quire.api.openai.embeddings import MAX_INPUTS
from quire.api.openai.pooled_answers import Classification, Classifications, Pooled, PooledList
from quire.api.openai.pooling import ClassifyRequest, PoolingRequest
from quire.contracts.pooling_params import PoolingParams
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

Body = TypeVar("Body", bound=ClassifyRequest)


async def post_classify(context: ServerContext, call: Call) -> Answer:
    """Classify texts."""
    return await classify(context, await _read(context, call, ClassifyRequest), caller_of(call, is_streaming=False))


async def post_pooling(context: ServerContext, call: Call) -> Answer:
    """Pool texts by the model's task."""
    return await pool(context, await _read(context, call, PoolingRequest), caller_of(call, is_streaming=False))


async def _read(context: ServerContext, call: Call, kind: type[Body]) -> Body:
    context.check_accepting()
    limit = None if context.served is None else context.served.info.max_model_len
    return await call.body(kind, None if limit is None else partial(check_ids, limit, "input", True))


async def classify(context: ServerContext, body: ClassifyRequest, caller: Caller) -> Answer:
    """Return the answer to a request for classes. Raises ApiError and RequestError."""
    served = context.check_model(body.model)
    params = PoolingParams(
        task="classify", use_activation=body.use_activation, truncate_prompt_tokens=body.truncate_prompt_tokens
    )
    requests = await _prepare(context, body, caller, served, params, "classify-")
    jobs = [caller.job(request, is_streaming=False) for request in requests.made]

    async def work() -> Ready:
        found = await pool_all(context.gateway, jobs)
        labels = served.info.pooler.labels
        data = [
            Classification(index, labels[max(range(len(probs)), key=probs.__getitem__)], probs, len(probs))
            for index, probs in enumerate(found)
        ]
        num_tokens = count_tokens(requests.made)
        usage = PromptUsage(num_tokens, num_tokens)
        return Ready(encode_json(Classifications(requests.id, "list", int(time.time()), served.name, data, usage)))

    return Unary(work)


async def pool(context: ServerContext, body: PoolingRequest, caller: Caller) -> Answer:
    """Return the answer to a pooling request. Raises ApiError and RequestError."""
    served = context.check_model(body.model)
    params = PoolingParams(
        task="classify" if served.info.pooler.task == "classify" else "embed",
        normalize=body.normalize,
        dimensions=body.dimensions,
        use_activation=body.use_activation,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    requests = await _prepare(context, body, caller, served, params, "pool-")
    jobs = [caller.job(request, is_streaming=False) for request in requests.made]

    async def work() -> Ready:
        found = await pool_all(context.gateway, jobs)
        is_base64 = body.encoding_format == "base64"
        data = [Pooled(index, "pooling", to_base64(one) if is_base64 else one) for index, one in enumerate(found)]
        num_tokens = count_tokens(requests.made)
        usage = PromptUsage(num_tokens, num_tokens)
        return Ready(encode_json(PooledList(requests.id, "list", int(time.time()), served.name, data, usage)))

    return Unary(work)


async def _prepare(
    context: ServerContext, body: ClassifyRequest, caller: Caller, served: ServedModel, params: PoolingParams, prefix: str
) -> PooledRequests:
    return await context.prepare(
        caller.owner, caller.call_id, body.input, lambda: _make(served, body, params, caller.owner, prefix)
    )


def _make(served: ServedModel, body: ClassifyRequest, params: PoolingParams, owner: Tenant, prefix: str) -> PooledRequests:
    requests = PooledRequests(served, params, owner, body.cache_salt, prefix)
    for prompt in split_prompts(body.input, MAX_INPUTS, "input"):
        requests.add(prompt, "input", body.add_special_tokens is not False)
    return requests
