"""POST /v1/chat/completions."""

from __future__ import annotations

from quire.api.openai.chat import ChatCompletionRequest
from quire.serving.answers import Answer
from quire.serving.context import ServerContext
from quire.serving.core.caller import Caller
from quire.serving.core.prepare import prepare_chat
from quire.serving.core.resumption import Resumption
from quire.serving.endpoint import Call
from quire.serving.openai.chat_answers import ChatFold, ChatShape, ChatStreamEncoder
from quire.serving.openai.frames import StreamOptions
from quire.serving.openai.handlers import caller_of, new_head, resumed, resumption_of, stream_answer, whole_answer
from quire.serving.openai.logprobs import LogprobWriter
from quire.serving.openai.requests import chat_input, chat_options, check_n, ignored_by_model, priority_of, tier_of


async def post_chat(context: ServerContext, call: Call) -> Answer:
    """Continue a conversation."""
    context.check_accepting()
    body = await call.body(ChatCompletionRequest, max_bytes=context.max_chat_bytes)
    call.ignore(ignored_by_model(context.model, body))
    return await chat(context, body, caller_of(call, bool(body.stream)), resumption_of(call))


async def chat(
    context: ServerContext, body: ChatCompletionRequest, caller: Caller, resumption: Resumption | None = None
) -> Answer:
    """Return the answer to a chat. Raises ApiError and RequestError."""
    served = context.check_model(body.model)
    check_n(body.n, context.config.max_n)
    priority = priority_of(body.service_tier, caller.owner)
    head = new_head(served, "chatcmpl-", None if body.service_tier is None else tier_of(priority), resumption)
    plan = await context.prepare(
        caller.owner,
        caller.call_id,
        body,
        lambda: prepare_chat(served, head.id, chat_input(body), chat_options(body), caller.owner),
    )
    plan = resumed(plan, resumption, bool(body.stream), served)
    shape = ChatShape(
        logprobs=LogprobWriter(served.tokenizer, body.top_logprobs or 0, bool(body.return_tokens_as_token_ids))
        if body.logprobs
        else None,
        returns_token_ids=bool(body.return_token_ids),
        num_prompt_logprobs=body.prompt_logprobs or 0,
    )
    jobs = [(caller.job(plan.request, bool(body.stream), priority), plan)]
    if not body.stream:
        return whole_answer(context.gateway, jobs, ChatFold(head, shape, plan))
    options = StreamOptions(body.includes_usage, body.has_continuous_usage)
    return stream_answer(context.gateway, jobs, ChatStreamEncoder(head, shape, options, plan), resumption=resumption)
