"""POST /api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import Callable

from quire.api.ollama.answers import AnswerMessage, ChatAnswer, GenerateAnswer
from quire.api.ollama.requests import ChatRequest, GenerateRequest, GenerationFields
from quire.serving.answers import Answer, Ready
from quire.serving.context import ServerContext
from quire.serving.core.plan import GenerationPlan
from quire.serving.core.prepare import prepare_chat, prepare_prompts
from quire.serving.core.served_model import ServedModel
from quire.serving.endpoint import Call
from quire.serving.errors import ApiError
from quire.serving.ollama.answers import AnswerFold, AnswerReader, LineEncoder
from quire.serving.ollama.names import check_model, line, moment
from quire.serving.ollama.requests import chat_input, generation_options, prompt_input
from quire.serving.openai.handlers import caller_of, lines_answer, whole_answer
from quire.serving.openai.requests import make_id


async def post_chat(context: ServerContext, call: Call) -> Answer:
    """Continue a conversation."""
    context.check_accepting()
    body = await call.body(ChatRequest, max_bytes=context.max_chat_bytes, any_media_type=True)
    served = check_model(context, body.model)
    if not body.messages:
        message = AnswerMessage(role="assistant", content="")
        reason = _load_reason(body)
        return Ready(line(ChatAnswer(model=body.model, created_at=moment(), message=message, done=True, done_reason=reason)))
    request_id = make_id("ollama-")

    def prepare() -> GenerationPlan:
        return prepare_chat(served, request_id, chat_input(served, body), generation_options(body), call.owner)

    return await _answer(context, call, body, prepare, is_chat=True)


async def post_generate(context: ServerContext, call: Call) -> Answer:
    """Continue a prompt, in the chat template unless it is raw or there is none."""
    context.check_accepting()
    body = await call.body(GenerateRequest, max_bytes=context.max_chat_bytes, any_media_type=True)
    served = check_model(context, body.model)
    if not body.prompt:
        reason = _load_reason(body)
        return Ready(line(GenerateAnswer(model=body.model, created_at=moment(), response="", done=True, done_reason=reason)))
    request_id = make_id("ollama-")

    def prepare() -> GenerationPlan:
        options = generation_options(body)
        if body.raw or not _has_template(served):
            text = body.prompt or ""
            return prepare_prompts(served, [request_id], [text], options, call.owner, add_special_tokens=not body.raw)[0]
        return prepare_chat(served, request_id, prompt_input(served, body), options, call.owner)

    return await _answer(context, call, body, prepare, is_chat=False)


def _load_reason(body: GenerationFields) -> str:
    return "unload" if body.keep_alive in (0, "0") else "load"


def _has_template(served: ServedModel) -> bool:
    return served.tokenizer is not None and served.tokenizer.chat_template is not None


async def _answer(
    context: ServerContext, call: Call, body: GenerationFields, prepare: Callable[[], GenerationPlan], *, is_chat: bool
) -> Answer:
    """Return the answer of a plan. The model is called as the client calls it."""
    caller = caller_of(call, body.is_streaming)
    plan = await context.prepare(call.owner, call.request_id, body, prepare)
    jobs = [(caller.job(plan.request, body.is_streaming), plan)]
    reader = AnswerReader(body.model, call.received_s)
    if not body.is_streaming:
        return whole_answer(context.gateway, jobs, AnswerFold(reader, is_chat))
    return lines_answer(context.gateway, jobs, LineEncoder(reader, is_chat), ApiError.ollama_line)
