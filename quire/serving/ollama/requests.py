"""Bodies of the Ollama API as the neutral core takes them."""

from __future__ import annotations

from typing import Any

from quire.api.ollama.requests import ChatRequest, GenerateRequest, GenerationFields, Options, Think
from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint
from quire.serving.core.constraints import schema_constraint
from quire.serving.core.conversation import Conversation
from quire.serving.core.plan import ChatInput, GenerationOptions
from quire.serving.core.reasoning_effort import has_effort, reasoning_variables
from quire.serving.core.served_model import ServedModel


def chat_input(served: ServedModel, body: ChatRequest) -> ChatInput:
    """Return the conversation. Raises RequestError."""
    messages = body.messages or []
    is_prefilled = messages[-1].role == "assistant" and not messages[-1].tool_calls
    return ChatInput(
        messages=messages_of(body),
        tools=[
            {
                "type": "function",
                "function": {
                    "name": tool.function.name,
                    **({} if tool.function.description is None else {"description": tool.function.description}),
                    "parameters": tool.function.parameters or {},
                },
            }
            for tool in body.tools or ()
        ]
        or None,
        add_generation_prompt=not is_prefilled,
        continues_final_message=is_prefilled,
        reasoning_effort=effort_of(served, body.think),
    )


def prompt_input(served: ServedModel, body: GenerateRequest) -> ChatInput:
    """Return the prompt of /api/generate as a conversation of one message. Raises RequestError."""
    conversation = Conversation()
    if body.system:
        conversation.say("system", [body.system])
    conversation.say("user", [body.prompt or ""])
    return ChatInput(messages=conversation.messages, reasoning_effort=effort_of(served, body.think), param="prompt")


def messages_of(body: ChatRequest) -> list[dict[str, Any]]:
    """Return the messages as a chat template takes them. Calls have no ids here: results belong to them in their order.

    Raises RequestError for a result without a call.
    """
    conversation = Conversation()
    waiting: list[tuple[str, str]] = []  # the ids and names of calls without a result
    num_calls = 0
    for index, message in enumerate(body.messages or ()):
        text = message.content or ""
        if message.role == "tool":
            conversation.result(_take_call(waiting, message.tool_name, f"messages[{index}]"), [text])
        elif message.role == "assistant":
            conversation.answer([text])
            if message.thinking:
                conversation.reason(message.thinking)
            for call in message.tool_calls or ():
                call_id = f"call_{num_calls}"
                num_calls += 1
                waiting.append((call_id, call.function.name))
                conversation.call(call_id, call.function.name, call.function.arguments)
        else:
            conversation.say(message.role, [text])
    return conversation.messages


def _take_call(waiting: list[tuple[str, str]], name: str | None, where: str) -> str:
    """Return the id of the oldest call without a result, of the function that is named where one is."""
    for position, (call_id, called) in enumerate(waiting):
        if name is None or name == called:
            del waiting[position]
            return call_id
    what = "a tool call" if name is None else f"a call of {name[:100]!r}"
    raise RequestError(f"{where}: is the result of a tool, and no message before it has {what} without a result", where)


def effort_of(served: ServedModel, think: Think | None) -> str | None:
    """Return the effort that `think` asks for, None for what the chat template does by itself. Raises RequestError."""
    if think is None or (think is False and not served.reasons):
        return None
    if not served.reasons:
        raise RequestError("think: this model does not think; leave it out, or false", "think")
    if think is True and not has_effort(served.template_source):
        return None
    effort = "none" if think is False else "medium" if think is True else think
    try:
        reasoning_variables(served.template_source, effort, served.reasons)
    except RequestError as error:
        raise RequestError(str(error).replace("reasoning_effort", "think", 1), "think") from None
    return effort


def generation_options(body: GenerationFields) -> GenerationOptions:
    """Return what is asked for in addition to the prompt. What is not stated is the checkpoint's. Raises RequestError."""
    options = body.options or Options()
    sampling = {
        "constraint": _constraint(body.format),
        "max_tokens": None if options.num_predict is None or options.num_predict < 0 else options.num_predict,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "typical_p": options.typical_p,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop or None,
    }
    return GenerationOptions(sampling=sampling)


def _constraint(wanted: dict[str, Any] | str | None) -> Constraint | None:
    if not wanted and not isinstance(wanted, dict):
        return None
    return Constraint(kind="json_object", param="format") if wanted == "json" else schema_constraint(wanted, "format")
