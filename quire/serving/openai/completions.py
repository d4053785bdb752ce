"""POST /v1/completions."""

from __future__ import annotations

from functools import partial

from quire.api.openai.completions import MAX_PROMPTS, CompletionRequest, split_prompts
from quire.base.errors import RequestError
from quire.serving.answers import Answer
from quire.serving.context import ServerContext
from quire.serving.core.caller import Caller
from quire.serving.core.prepare import check_ids, prepare_prompts
from quire.serving.core.resumption import Resumption
from quire.serving.endpoint import Call
from quire.serving.openai.completion_answers import CompletionFold, CompletionShape, CompletionStreamEncoder
from quire.serving.openai.frames import StreamOptions
from quire.serving.openai.handlers import caller_of, new_head, resumed, resumption_of, stream_answer, whole_answer
from quire.serving.openai.logprobs import LogprobWriter
from quire.serving.openai.requests import check_n, check_sequences, completion_options


async def post_completion(context: ServerContext, call: Call) -> Answer:
    """Continue one or several texts."""
    context.check_accepting()
    limit = None if context.served is None else context.served.info.max_model_len
    body = await call.body(CompletionRequest, None if limit is None else partial(check_ids, limit, "prompt", False))
    return await complete(context, body, caller_of(call, bool(body.stream)), resumption_of(call))


async def complete(
    context: ServerContext, body: CompletionRequest, caller: Caller, resumption: Resumption | None = None
) -> Answer:
    """Return the answer to a completion. Raises ApiError and RequestError."""
    served = context.check_model(body.model)
    check_n(body.n, context.config.max_n)
    check_n(body.best_of, context.config.max_n, "best_of")
    head = new_head(served, "cmpl-", resumption=resumption)
    prompts = split_prompts(body.prompt, MAX_PROMPTS, "prompt")
    check_sequences(len(prompts), max(body.n or 1, body.best_of or 1), context.config.max_queued_requests)
    ids = [f"{head.id}-{position}" for position in range(len(prompts))]
    plans = await context.prepare(
        caller.owner,
        caller.call_id,
        body,
        lambda: prepare_prompts(
            served,
            ids,
            prompts,
            completion_options(body),
            caller.owner,
            add_special_tokens=body.add_special_tokens is not False,
        ),
        may_run_here=True,
    )
    if len(plans) == 1:
        plans = [resumed(plans[0], resumption, bool(body.stream), served)]
    elif resumption is not None and resumption.token_ids:
        raise RequestError(f"prompt: {len(plans)} prompts cannot be continued together", "prompt")
    shape = CompletionShape(
        tokenizer=served.tokenizer,
        logprobs=None
        if body.logprobs is None
        else LogprobWriter(served.tokenizer, body.logprobs, bool(body.return_tokens_as_token_ids)),
        returns_token_ids=bool(body.return_token_ids),
        num_prompt_logprobs=body.prompt_logprobs or 0,
    )
    jobs = [(caller.job(plan.request, bool(body.stream)), plan) for plan in plans]
    if not body.stream:
        return whole_answer(context.gateway, jobs, CompletionFold(head, shape, plans))
    options = StreamOptions(body.includes_usage, body.has_continuous_usage)
    return stream_answer(context.gateway, jobs, CompletionStreamEncoder(head, shape, options, plans), resumption=resumption)
