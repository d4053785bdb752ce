"""Fields that no body has: told with their paths; those that would change an answer, refused by name."""

from __future__ import annotations

import json
import typing

import pytest

from quire.api.anthropic.messages import CountTokensRequest, MessagesRequest
from quire.api.decode import BodyError, decode_body
from quire.api.openai.chat import ChatCompletionRequest
from quire.api.openai.completions import CompletionRequest
from quire.api.openai.embeddings import EmbeddingRequest
from quire.api.openai.responses import ResponsesRequest
from quire.api.openai.tokenize import DetokenizeRequest, TokenizeRequest
from quire.api.unsupported_params import WITHOUT_EFFECT
from tests.unit.api.test_messages_and_responses import FREE, FULL

USER = [{"role": "user", "content": "x"}]
CHAT_BODY = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "t"}, {"type": "refusal", "refusal": "r"}],
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "f"}}]}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
BODIES = {
    **FULL,
    ChatCompletionRequest: CHAT_BODY,
    CompletionRequest: {"model": "m", "prompt": "x"},
    EmbeddingRequest: {"model": "m", "input": "x"},
    TokenizeRequest: {"messages": CHAT_BODY["messages"], "tools": CHAT_BODY["tools"]},
    DetokenizeRequest: {"tokens": [1]},
}
GENERATING = (ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest)


def decode(kind, body):
    return decode_body(json.dumps(body).encode(), kind)[1]


def refused(kind, body):
    with pytest.raises(BodyError) as caught:
        decode(kind, body)
    return caught.value


def objects_of(value, path=""):
    """Yield the path of every object in a body that has names of its own."""
    if isinstance(value, dict):
        yield path
        for name, item in value.items():
            if name not in FREE | {"schema", "arguments", "metadata"} or (name == "input" and isinstance(item, list)):
                yield from objects_of(item, f"{path}.{name}".removeprefix("."))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from objects_of(item, f"{path}[{position}]")


def at(body, path):
    for part in path.replace("[", ".[").split("."):
        if part:
            body = body[int(part[1:-1])] if part.startswith("[") else body[part]
    return body


PLACES = [(kind, path) for kind, body in BODIES.items() for path in objects_of(body)]


@pytest.mark.parametrize(("kind", "path"), PLACES, ids=lambda value: getattr(value, "__name__", value))
def test_field_is_told_with_its_path_when_it_is_unknown_anywhere(kind, path):
    body = json.loads(json.dumps(BODIES[kind]))
    at(body, path)["frobnicate"] = {"deep": [1]}
    assert decode(kind, body) == (f"{path}.frobnicate".removeprefix("."),)
    at(body, path)["frobnicate"] = None
    assert decode(kind, body) == ()


def test_places_are_many():
    assert len(PLACES) > 60


def test_field_is_told_once_when_it_is_unknown_in_many_items():
    messages = [{"role": "user", "content": "x", "odd": 1, "odder": 2}] * 100
    assert decode(ChatCompletionRequest, {"model": "m", "messages": messages}) == ("messages[0].odd", "messages[0].odder")


def test_free_json_has_no_unknown_fields():
    body = {"model": "m", "messages": USER, "chat_template_kwargs": {"a": {"b": 1}}, "logit_bias": {"1": 1}}
    assert decode(ChatCompletionRequest, body) == ()


@pytest.mark.parametrize(
    ("kind", "change", "param", "hint"),
    [
        (ChatCompletionRequest, {"enable_thinking": True}, "enable_thinking", "chat_template_kwargs"),
        (ChatCompletionRequest, {"thinking": {"type": "enabled"}}, "thinking", "reasoning_effort"),
        (ChatCompletionRequest, {"reasoning": {"effort": "low"}}, "reasoning", "reasoning_effort"),
        (ChatCompletionRequest, {"spaces_between_special_tokens": False}, "spaces_between_special_tokens", ""),
        (ChatCompletionRequest, {"detokenize": False}, "detokenize", ""),
        (ChatCompletionRequest, {"stop_sequences": ["a"]}, "stop_sequences", "use stop"),
        (ChatCompletionRequest, {"system": "s"}, "system", "use messages"),
        (ChatCompletionRequest, {"json_schema": {}}, "json_schema", "use response_format"),
        (ChatCompletionRequest, {"mirostat": 2}, "mirostat", ""),
        (CompletionRequest, {"max_output_tokens": 5}, "max_output_tokens", "use max_completion_tokens"),
        (CompletionRequest, {"tools": [{}]}, "tools", ""),
        (CompletionRequest, {"messages": USER}, "messages", "use prompt"),
        (ResponsesRequest, {"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        (ResponsesRequest, {"response_format": {"type": "json_object"}}, "response_format", "use text"),
        (ResponsesRequest, {"n": 2}, "n", ""),
        (ResponsesRequest, {"structured_outputs": {"json": {}}}, "structured_outputs", "use text.format"),
        (ResponsesRequest, {"guided_json_object": True}, "guided_json_object", "use text.format"),
        (ChatCompletionRequest, {"structural_tag": {}}, "structural_tag", "use structured_outputs"),
        (CompletionRequest, {"guided_decoding": {"regex": "a"}}, "guided_decoding", "use structured_outputs"),
        (MessagesRequest, {"stop": ["a"]}, "stop", "use stop_sequences"),
        (MessagesRequest, {"reasoning_effort": "low"}, "reasoning_effort", "use thinking"),
        (MessagesRequest, {"logprobs": True}, "logprobs", ""),
        (EmbeddingRequest, {"input_type": "query"}, "input_type", "input"),
        (TokenizeRequest, {"chat_template": "x"}, "chat_template", ""),
        (ChatCompletionRequest, {"messages": [*USER, {"role": "assistant", "content": "a", "prefix": True}]},
         "messages[1].prefix", "continue_final_message"),
        (ChatCompletionRequest, {"messages": [{"role": "assistant", "content": "a", "function_call": {}}]},
         "messages[0].function_call", "tool_calls"),
        (ChatCompletionRequest, {"response_format": {"type": "json_object", "schema": {}}},
         "response_format.schema", "json_schema"),
        (ResponsesRequest, {"reasoning": {"mode": "pro"}}, "reasoning.mode", "standard"),
        (ResponsesRequest, {"tools": [{"type": "function", "name": "f", "defer_loading": True}]},
         "tools[0].defer_loading", ""),
        (MessagesRequest, {"tools": [{"name": "f", "input_schema": {}, "input_examples": [{}]}]},
         "tools[0].input_examples", "description"),
        (MessagesRequest, {"output_config": {"task_budget": {}}}, "output_config.task_budget", "max_tokens"),
    ],
    ids=lambda value: str(getattr(value, "__name__", value))[:30],
)  # fmt: skip
def test_parameter_is_refused_by_name_when_it_would_change_the_answer(kind, change, param, hint):
    body = {"model": "m", "messages": USER, "max_tokens": 5} if kind is MessagesRequest else BODIES[kind]
    error = refused(kind, {**{key: value for key, value in body.items() if key != "tool_choice"}, **change})
    assert (error.code, error.param) == ("unsupported_parameter", param)
    assert param in str(error)
    assert hint in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [("detokenize", True), ("n", 1), ("stop", []), ("presence_penalty", 0), ("presence_penalty", 0.0), ("mirostat", 0),
     ("repetition_penalty", 1.0), ("response_format", {"type": "text"}), ("logprobs", None), ("top_k", -1), ("tools", [])],
)  # fmt: skip
def test_parameter_is_taken_when_its_value_changes_nothing(name, value):
    if (name, value) != ("top_k", -1):
        assert decode(MessagesRequest, {"model": "m", "messages": USER, "max_tokens": 5, name: value}) == ()
    assert decode(ResponsesRequest, {"model": "m", "input": "x", name: value}) == ()


# Fields without a say in what is answered: whose request it is, where it is kept, how it is sent or put in line.
NO_EFFECT = {
    *("model", "user", "metadata", "store", "service_tier", "priority", "cache_salt", "stream", "stream_options"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_control"),
    *("user_profile_id", "workspace_id", "modalities", "add_generation_prompt", "max_tool_calls", "include", "truncation"),
    *("access_programs", "background_options", "image", "context_management"),
}


@pytest.mark.parametrize("kind", GENERATING)
def test_parameter_of_one_route_is_known_or_refused_on_every_other(kind):
    known = {*kind.__struct_encode_fields__, *kind.refusals()}
    for other in GENERATING:
        assert set(other.__struct_encode_fields__) - known - NO_EFFECT - WITHOUT_EFFECT == set(), other


def params_of(*names):
    """Return the parameters of methods of the official clients."""
    import importlib

    found = set()
    for name in names:
        module, _, kind = name.rpartition(".")
        found |= set(typing.get_type_hints(getattr(importlib.import_module(module), kind)))
    return found


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (ChatCompletionRequest, ["openai.types.chat.completion_create_params.CompletionCreateParamsStreaming"]),
        (CompletionRequest, ["openai.types.completion_create_params.CompletionCreateParamsStreaming"]),
        (ResponsesRequest, ["openai.types.responses.response_create_params.ResponseCreateParamsStreaming"]),
        (EmbeddingRequest, ["openai.types.embedding_create_params.EmbeddingCreateParams"]),
        (MessagesRequest, ["anthropic.types.message_create_params.MessageCreateParamsStreaming"]),
        (CountTokensRequest, ["anthropic.types.message_count_tokens_params.MessageCountTokensParams"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_parameter_of_the_official_client_is_known_or_refused(kind, names):
    pytest.importorskip(names[0].partition(".")[0])
    assert params_of(*names) - {*kind.__struct_encode_fields__, *kind.refusals()} - NO_EFFECT - WITHOUT_EFFECT == set()
