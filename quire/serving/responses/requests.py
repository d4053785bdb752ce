"""Conversion of Responses request bodies, and of stored responses, to the input of the neutral core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.api.openai.responses import (
    CUSTOM_INPUT,
    ChosenCustomTool,
    ChosenTool,
    FunctionTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponsePrompt,
    ResponsesRequest,
    TextFormat,
)
from quire.api.openai.responses_answers import ConversationRef, EchoedReasoning, Response
from quire.api.openai.responses_items import InputItem, InputText, RefusalText
from quire.api.openai.shared import RANDOM_SEED, RETENTION_S
from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint
from quire.contracts.sampling_params import SamplingParams
from quire.serving.core.constraints import schema_constraint
from quire.serving.core.conversation import Conversation
from quire.serving.core.plan import ChatInput, GenerationOptions
from quire.serving.core.reasoning_effort import has_effort, reasoning_variables
from quire.serving.core.served_model import ServedModel
from quire.serving.openai.requests import make_id
from quire.serving.responses.conversation_table import StoredItems
from quire.serving.responses.store import StoredResponse

Earlier = StoredResponse | StoredItems
"""What a request continues: a response, or the items of a conversation."""

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
}


class _Answer(msgspec.Struct):
    output: list[InputItem]


_decode_items = msgspec.json.Decoder(list[InputItem]).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode


def items_of(body: ResponsePrompt) -> list[InputItem]:
    """Return the items of the input."""
    return [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def ignored_by_model(served: ServedModel, body: ResponsePrompt) -> tuple[str, ...]:
    """Return the paths of the fields that have no effect with this model."""
    effort = None if body.reasoning is None else body.reasoning.effort
    return () if effort in (None, "none") or has_effort(served.template_source) else ("reasoning.effort",)


def chat_input(served: ServedModel, body: ResponsePrompt, history: Sequence[Earlier]) -> ChatInput:
    """Return the conversation.

    history  the responses that it continues, oldest first, or the items of the conversation
    Raises RequestError.
    """
    conversation = Conversation()
    if body.instructions is not None:
        conversation.say("system", [body.instructions])
    for earlier in history:
        output = _decode_answer(earlier.body).output if isinstance(earlier, StoredResponse) else []
        for item in (*_decode_items(earlier.items), *output):
            _add(conversation, item)
    for position, item in enumerate(items_of(body)):
        if item.is_call_output and not conversation.knows_call(item.call_id or ""):
            where, call = f"input[{position}].call_id", item.type.removesuffix("_output")
            raise RequestError(f"{where}: no {call} before it has the id {(item.call_id or '')[:100]!r}", where)
        _add(conversation, item)
    if not conversation.messages:
        raise RequestError("input: is empty", "input")
    tools = body.shown_tools
    return ChatInput(
        messages=conversation.messages,
        tools=[_template_tool(tool) for tool in tools] or None,
        reasoning_effort=_effort(served, body),
        parallel_tool_calls=body.parallel_tool_calls is not False
        and not isinstance(body.tool_choice, ChosenTool | ChosenCustomTool),
        forced_tools=body.forced_tools,
        strict_tools=frozenset(tool.name or "" for tool in tools if tool.strict),
        param="input",
    )


def _constraint(body: ResponsesRequest) -> Constraint | None:
    wanted = None if body.text is None else body.text.format
    if isinstance(wanted, JsonSchemaFormat):
        return schema_constraint(wanted.schema, "text.format.schema")
    return Constraint(kind="json_object", param="text.format") if isinstance(wanted, JsonObjectFormat) else None


def response_options(body: ResponsesRequest) -> GenerationOptions:
    """Return the options other than the conversation."""
    sampling: dict[str, Any] = {name: getattr(body, name) for name in _SAMPLING}
    sampling["constraint"] = _constraint(body)
    sampling["stop"] = body.stop or None
    sampling["seed"] = None if body.seed == RANDOM_SEED else body.seed
    sampling["max_tokens"] = body.limit
    if body.has_logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    return GenerationOptions(
        sampling=sampling,
        room_param="max_output_tokens",
        salt=body.cache_salt or "",
        cache_retention_s=RETENTION_S.get(body.prompt_cache_retention or "", 0.0),
        wants_start=True,
    )


def new_response(response_id: str, created_at: int, model: str, body: ResponsesRequest, params: SamplingParams) -> Response:
    """Return the initial response, with the parameters of its generation."""
    reasoning = body.reasoning
    return Response(
        id=response_id,
        created_at=created_at,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.limit,
        max_tool_calls=body.max_tool_calls,
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        conversation=None if body.conversation_id is None else ConversationRef(body.conversation_id),
        prompt_cache_key=body.prompt_cache_key,
        reasoning=EchoedReasoning(reasoning and reasoning.effort, reasoning and reasoning.summary),
        safety_identifier=body.safety_identifier,
        service_tier="default",
        store=body.is_stored,
        temperature=params.temperature,
        text={"format": msgspec.to_builtins((body.text and body.text.format) or TextFormat())},
        tool_choice=msgspec.to_builtins(body.tool_choice or "auto"),
        tools=[_echoed_tool(tool) for tool in body.offered_tools],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation="disabled",
        user=body.user,
        metadata=body.metadata or {},
    )


def stored_items(items: Sequence[InputItem], new_id: Callable[[str], str] = make_id) -> list[dict[str, Any]]:
    """Return items in the form in which they are stored and listed: each with an id, texts as parts."""
    return [_stored_item(item, new_id) for item in items]


def _stored_item(item: InputItem, new_id: Callable[[str], str]) -> dict[str, Any]:
    found: dict[str, Any] = {"id": item.id or new_id(_PREFIXES[item.type]), "type": item.type}
    if item.type == "message":
        found |= {"role": item.role, "status": item.status or "completed", "content": _parts(item)}
    elif item.type == "function_call":
        found |= {"call_id": item.call_id, "name": item.name, "arguments": item.arguments, "status": item.status or "completed"}
    elif item.type == "custom_tool_call":
        found |= {"call_id": item.call_id, "name": item.name, "input": item.input, "status": item.status or "completed"}
    elif item.is_call_output:
        found |= {"call_id": item.call_id, "output": msgspec.to_builtins(item.output), "status": item.status or "completed"}
    else:
        content = [{"type": "reasoning_text", "text": item.content}] if isinstance(item.content, str) else item.content
        found |= {"summary": msgspec.to_builtins(item.summary or []), "content": msgspec.to_builtins(content or [])}
    return found


def _parts(item: InputItem) -> list[dict[str, Any]]:
    """Return the content of a message as parts; those of an answer in the API's output format."""
    content = item.content or ""
    parts = [InputText(content)] if isinstance(content, str) else content
    if item.role != "assistant":
        return msgspec.to_builtins(parts)
    return [
        {"type": "refusal", "refusal": part.refusal}
        if isinstance(part, RefusalText)
        else {"type": "output_text", "text": part.text, "annotations": []}
        for part in parts
    ]


def _add(conversation: Conversation, item: InputItem) -> None:
    if item.type == "function_call":
        conversation.call(item.call_id or "", item.name or "", item.arguments or "")
    elif item.type == "custom_tool_call":
        conversation.call(item.call_id or "", item.name or "", msgspec.json.encode({CUSTOM_INPUT: item.input}).decode())
    elif item.is_call_output:
        conversation.result(item.call_id or "", item.texts)
    elif item.type == "reasoning":
        if item.texts:
            conversation.reason("".join(item.texts))
    elif item.role == "assistant":
        conversation.answer(item.texts)
    else:
        conversation.say(item.role or "user", item.texts)


def _effort(served: ServedModel, body: ResponsePrompt) -> str | None:
    effort = None if body.reasoning is None else body.reasoning.effort
    try:
        reasoning_variables(served.template_source, effort, served.reasons)
    except RequestError as error:
        raise RequestError(str(error).replace("reasoning_effort", "reasoning.effort", 1), "reasoning.effort") from None
    return effort


def _template_tool(tool: FunctionTool) -> dict[str, Any]:
    # In the order of the API, since templates print it unchanged.
    stated = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
    return {"type": "function", "function": {name: value for name, value in stated.items() if value is not None}}


def _echoed_tool(tool: FunctionTool) -> dict[str, Any]:
    if tool.is_custom:
        return {"type": "custom", "name": tool.name, "description": tool.description, "format": {"type": "text"}}
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
