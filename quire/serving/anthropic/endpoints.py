"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import cast

from quire.api.anthropic.answers import Message, TokenCount
from quire.api.anthropic.messages import CountTokensRequest, MessagesRequest
from quire.serving.answers import Answer, Ready, Stream, Unary
from quire.serving.anthropic.answers import MessageFold, MessageHead, MessageStreamEncoder
from quire.serving.anthropic.requests import chat_input, ignored_by_model, message_options
from quire.serving.anthropic.thinking import ThinkingSigner
from quire.serving.context import ServerContext
from quire.serving.core.caller import Caller
from quire.serving.core.plan import GenerationPlan
from quire.serving.core.prepare import count_chat_tokens, prepare_chat
from quire.serving.core.resumption import Resumption
from quire.serving.endpoint import JOB_HEADERS, Call, Endpoint
from quire.serving.errors import OVERLOADED_STATUS, ApiError
from quire.serving.openai.frames import encode_json
from quire.serving.openai.handlers import caller_of, resumed, resumption_of, stream_answer, whole_answer
from quire.serving.openai.requests import make_id


async def post_message(context: ServerContext, call: Call) -> Answer:
    """Continue a conversation. A queue that is full is a 529."""
    with overload_as_529():
        return answer_overloaded(await _message(context, call))


async def _message(context: ServerContext, call: Call) -> Answer:
    context.check_accepting()
    body = await call.body(MessagesRequest, max_bytes=context.max_chat_bytes)
    call.ignore(ignored_by_model(context.model, body))
    return await message(context, body, caller_of(call, bool(body.stream)), resumption_of(call))


async def message(
    context: ServerContext, body: MessagesRequest, caller: Caller, resumption: Resumption | None = None
) -> Answer:
    """Return the answer to a conversation. Raises ApiError and RequestError."""
    served = context.check_model(body.model)
    signer = ThinkingSigner(context.signing_key, caller.owner.name)
    message_id = make_id("msg_") if resumption is None else "msg_" + resumption.id_suffix
    head = MessageHead(id=message_id, model=served.name, max_tokens=body.max_tokens, sign=signer.sign)

    def prepare() -> GenerationPlan:
        return prepare_chat(served, head.id, chat_input(served, body, signer), message_options(body), caller.owner)

    plan = await context.prepare(caller.owner, caller.call_id, body, prepare)
    plan = resumed(plan, resumption, bool(body.stream), served)
    jobs = [(caller.job(plan.request, bool(body.stream)), plan)]
    if not body.stream:
        return whole_answer(context.gateway, jobs, MessageFold(head))
    encoder = MessageStreamEncoder(head)
    return stream_answer(context.gateway, jobs, encoder, lambda error: error.anthropic_event(caller.call_id), resumption)


async def post_count_tokens(context: ServerContext, call: Call) -> Answer:
    """Count the tokens of a conversation, tools and all that the chat template adds included."""
    body = await call.body(CountTokensRequest, max_bytes=context.max_chat_bytes)
    call.ignore(ignored_by_model(context.model, body))
    served = context.check_model(body.model)
    signer = ThinkingSigner(context.signing_key, call.owner.name)

    def count() -> int:
        return count_chat_tokens(served, chat_input(served, body, signer))

    with overload_as_529():
        return Ready(encode_json(TokenCount(await context.prepare(call.owner, call.request_id, body, count))))


ENDPOINTS: tuple[Endpoint[ServerContext], ...] = (
    Endpoint(
        method="POST",
        path="/v1/messages",
        handler=post_message,
        summary="Continue a conversation",
        tag="anthropic",
        body=MessagesRequest,
        answer=Message,
        is_streaming=True,
        headers=JOB_HEADERS,
        error_style="anthropic",
    ),
    Endpoint(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=post_count_tokens,
        summary="Count the tokens of a conversation",
        tag="anthropic",
        body=CountTokensRequest,
        answer=TokenCount,
        error_style="anthropic",
    ),
)


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
