"""Conversion of OpenAI request bodies to the input of the neutral core."""

from __future__ import annotations

import secrets
import string
from dataclasses import replace
from typing import Any, cast

import msgspec

from quire.api.openai.chat import AssistantMessage, ChatCompletionRequest, ChosenTool, Message, Tool
from quire.api.openai.completions import CompletionRequest
from quire.api.openai.shared import (
    GUIDED_KINDS,
    RANDOM_SEED,
    RETENTION_S,
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingFields,
    StructuralTagFormat,
)
from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint, StructuredOutputsParams, dump_json, grammar_backend
from quire.contracts.kv_compression import as_kv_compression
from quire.serving.core.constraints import schema_constraint
from quire.serving.core.plan import ChatInput, GenerationOptions
from quire.serving.core.reasoning_effort import has_effort
from quire.serving.core.served_model import ServedModel
from quire.serving.interfaces import PriorityClass, Tenant

_ALPHABET = (string.ascii_letters + string.digits).encode()
_LETTER_OF_BYTE = bytes(_ALPHABET[byte % len(_ALPHABET)] for byte in range(256))
_PLAIN_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "bad_words",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "n",
    "min_tokens",
    "skip_special_tokens",
    "priority",
    "prompt_logprobs",
)


def make_id(prefix: str) -> str:
    """Return a new id: the prefix and 29 letters or digits (over 160 bits; the first eight letters are slightly more
    frequent)."""
    return prefix + secrets.token_bytes(29).translate(_LETTER_OF_BYTE).decode()


def check_n(n: int | None, limit: int, param: str = "n") -> None:
    """Raise RequestError, naming the field, if more choices are requested than the server allows."""
    if n is not None and n > limit:
        raise RequestError(f"{param}: this server gives at most {limit} choices, got {n}", param)


def check_sequences(num_prompts: int, n: int, limit: int) -> None:
    """Raise RequestError if prompts and choices exceed the queue's limit, since a retry would not help."""
    if num_prompts * n > limit:
        raise RequestError(
            f"prompt: {num_prompts} prompts of {n} choices are more than the {limit} that this server takes", "prompt"
        )


def priority_of(service_tier: str | None, owner: Tenant) -> PriorityClass:
    """Return the class of a service tier; an owner without the right to "priority" gets the default class."""
    if service_tier in ("priority", "fast"):
        return "interactive" if owner.may_use_interactive else "default"
    return "batch" if service_tier == "flex" else "default"


def tier_of(priority: PriorityClass) -> str:
    """Return the service tier of a class for the answer."""
    return {"interactive": "priority", "default": "default", "batch": "flex"}[priority]


def _sampling(body: SamplingFields) -> dict[str, Any]:
    stated = {name: getattr(body, name) for name in _PLAIN_FIELDS}
    stated["stop"] = body.stop or None
    stated["seed"] = None if body.seed == RANDOM_SEED else body.seed
    stated["constraint"] = constraint_of(body)
    if body.kv_compression is not None:
        fields = msgspec.to_builtins(body.kv_compression)
        stated["kv_compression"] = as_kv_compression({name: value for name, value in fields.items() if value is not None})
    if body.logit_bias is not None:
        stated["logit_bias"] = {int(token_id): bias for token_id, bias in body.logit_bias.items()}
    return stated


def constraint_of(body: SamplingFields) -> Constraint | None:
    """Return the constraint of the output. Raises RequestError, naming the field."""
    found = _stated_constraint(body)
    options: dict[str, Any] = {"whitespace_pattern": body.guided_whitespace_pattern}
    if body.guided_decoding_backend is not None:
        options["backend"] = grammar_backend(body.guided_decoding_backend)
    stated = {name: value for name, value in options.items() if value is not None}
    return replace(found, **stated) if found is not None and stated else found


def _stated_constraint(body: SamplingFields) -> Constraint | None:
    wanted = body.response_format
    if isinstance(wanted, JsonSchemaFormat):
        return schema_constraint(wanted.json_schema.schema, "response_format.json_schema.schema")
    if isinstance(wanted, JsonObjectFormat):
        return Constraint(kind="json_object", param="response_format")
    if isinstance(wanted, StructuralTagFormat):
        fields = {name: value for name, value in msgspec.to_builtins(wanted).items() if value is not None}
        return Constraint(kind="structural_tag", source=dump_json(fields, "response_format"), param="response_format")
    if body.structured_outputs is not None:
        fields = msgspec.to_builtins(body.structured_outputs)
        return StructuredOutputsParams(**{name: value for name, value in fields.items() if value is not None}).constraint()
    for name in GUIDED_KINDS:
        value = getattr(body, f"guided_{name}")
        if value is not None and (name, value) != ("json_object", False):
            return _guided_constraint(name, value)
    return None


def _guided_constraint(name: str, value: Any) -> Constraint:
    sent = f"guided_{name}"
    try:
        return replace(StructuredOutputsParams(**{name: value}).constraint(), param=sent)
    except RequestError as error:
        raise RequestError(str(error).replace(f"structured_outputs.{name}", sent, 1), sent) from None


def chat_options(body: ChatCompletionRequest) -> GenerationOptions:
    """Return the options of a chat other than its messages."""
    sampling = _sampling(body)
    sampling["max_tokens"] = body.max_output_tokens
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    return GenerationOptions(
        sampling=sampling,
        room_param="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        salt=body.cache_salt or "",
        cache_retention_s=RETENTION_S.get(body.prompt_cache_retention or "", 0.0),
        echo=bool(body.echo),
        shows_reasoning=body.include_reasoning is not False,
        wants_tokens=bool(body.return_token_ids) or body.has_continuous_usage,
        returns_prompt_ids=bool(body.return_token_ids),
    )


def completion_options(body: CompletionRequest) -> GenerationOptions:
    """Return the options of a completion other than its prompts."""
    sampling = _sampling(body)
    sampling["max_tokens"] = body.max_output_tokens
    sampling["logprobs"] = body.logprobs
    sampling["best_of"] = body.best_of
    return GenerationOptions(
        sampling=sampling,
        room_param=None if body.stated_limit is None else body.limit_param,
        salt=body.cache_salt or "",
        echo=bool(body.echo),
        wants_tokens=bool(body.return_token_ids) or body.has_continuous_usage,
        returns_prompt_ids=bool(body.return_token_ids),
        is_streaming=bool(body.stream),
    )


def ignored_by_model(served: ServedModel, body: ChatCompletionRequest) -> tuple[str, ...]:
    """Return the paths of the fields that have no effect with this model."""
    has_none = body.reasoning_effort in (None, "none") or has_effort(served.template_source)
    return (*(() if has_none else ("reasoning_effort",)), *served.unused_variables(body.chat_template_kwargs))


def chat_input(body: ChatCompletionRequest) -> ChatInput:
    """Return the conversation."""
    tools = body.shown_tools
    return ChatInput(
        messages=messages_of(body.messages),
        tools=tools_of(tools),
        add_generation_prompt=body.add_generation_prompt is not False,
        continues_final_message=bool(body.continue_final_message),
        template_variables=body.chat_template_kwargs or {},
        reasoning_effort=body.wanted_effort,
        parallel_tool_calls=body.parallel_tool_calls is not False and not isinstance(body.tool_choice, ChosenTool),
        forced_tools=body.forced_tools,
        strict_tools=frozenset(tool.function.name for tool in tools if tool.function.strict),
    )


def tools_of(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Return the tools for a chat template."""
    return [_without_null(msgspec.to_builtins(tool)) for tool in tools] if tools else None


def messages_of(messages: list[Message]) -> list[dict[str, Any]]:
    """Return the messages for a chat template: null fields are absent, except content."""
    return [_message(message) for message in messages]


def _message(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(message)
    content = found.get("content")
    if isinstance(content, list):
        parts = cast("list[dict[str, Any]]", content)
        found["content"] = [{"type": "text", "text": part.get("text", part.get("refusal"))} for part in parts]
    if isinstance(message, AssistantMessage):
        reasoning = found.pop("reasoning")
        if found["reasoning_content"] is None:
            found["reasoning_content"] = reasoning
        if content is None and message.refusal is not None:
            found["content"] = message.refusal
        found.pop("refusal")
    return {name: value for name, value in found.items() if value is not None or name == "content"}


def _without_null(tool: dict[str, Any]) -> dict[str, Any]:
    # In the order of the API, since templates print it unchanged.
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return {"type": tool["type"], "function": function}
