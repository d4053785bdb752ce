"""Bodies of the Anthropic and the Responses API: what is taken fits the published schema, everything else is one error."""

from __future__ import annotations

import json
import math

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.anthropic.messages import CountTokensRequest, MessagesRequest
from quire.api.decode import decode_body
from quire.api.openai.responses import ResponsesRequest
from quire.base.errors import RequestError
from tests.unit.api.test_decode import schema_of

CACHE = {"type": "ephemeral", "ttl": "5m"}
TEXT = {"type": "text", "text": "x", "cache_control": CACHE}
PROMPT = {
    "model": "m",
    "system": [TEXT],
    "messages": [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "x", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                TEXT,
                {"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}, "cache_control": CACHE},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [TEXT], "is_error": False},
                {"type": "tool_result", "tool_use_id": "a", "content": "x"},
                TEXT,
            ],
        },
        {"role": "system", "content": "x"},
    ],
    "tools": [{"type": "custom", "name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": False}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "low"},
    "cache_control": CACHE,
}
MESSAGES = {
    **PROMPT,
    "max_tokens": 5,
    "stop_sequences": ["x"],
    "stream": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 4,
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
}
RESPONSES = {
    "model": "m",
    "input": [
        {"role": "user", "content": "x"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "x", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "x"},
            ],
        },
        {"type": "function_call", "id": "f", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
    ],
    "instructions": "x",
    "previous_response_id": "resp_1",
    "store": True,
    "max_output_tokens": 5,
    "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": None}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "stop": ["x"],
    "seed": 1,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "metadata": {"a": "b"},
    "truncation": "disabled",
    "service_tier": "auto",
    "user": "u",
}
FULL = {MessagesRequest: MESSAGES, CountTokensRequest: PROMPT, ResponsesRequest: RESPONSES}
FREE = {"input", "input_schema", "parameters"}  # any JSON below


def paths_of(value, path=()):
    yield path
    if path and path[-1] in FREE and isinstance(value, dict):
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths_of(item, (*path, key))


PLACES = [(kind, path) for kind, body in FULL.items() for path in paths_of(body) if path]


def changed(body, path, value):
    found = json.loads(json.dumps(body))
    holder = found
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return found


def refusal_of(body, kind):
    """Return why a body is refused, None if it is taken."""
    try:
        decode_body(json.dumps(body).encode(), kind)
    except RequestError as error:
        return error
    return None


VALIDATORS = {kind: jsonschema.Draft202012Validator(schema_of(kind)) for kind in FULL}


@pytest.mark.parametrize("kind", list(FULL))
def test_full_body_is_taken_and_fits_the_schema(kind):
    body, ignored = decode_body(json.dumps(FULL[kind]).encode(), kind)
    assert ignored == ()
    VALIDATORS[kind].check_schema(VALIDATORS[kind].schema)
    VALIDATORS[kind].validate(FULL[kind])
    assert body.model == "m"


def names_of(path):
    """Return a path as the API writes it."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text.removeprefix(".")


WRONG = (7, 7.5, True, "\u0000wrong", [], [7], {}, {"wrong": 7})


@pytest.mark.parametrize(("kind", "path"), PLACES, ids=lambda value: names_of(value) if isinstance(value, tuple) else None)
def test_every_value_that_does_not_fit_the_schema_is_refused(kind, path):
    for value in WRONG:
        body = changed(FULL[kind], path, value)
        error = refusal_of(body, kind)
        if error is None:
            assert VALIDATORS[kind].is_valid(body), f"{names_of(path)} = {value!r} was taken"
        elif error.param is not None:
            assert error.param.startswith(names_of(path[:1]))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not math.isclose(number, round(number)))
    | st.text(max_size=8)
    | st.sampled_from(["auto", "user", "function", "text", "tool_use", "message", "reasoning"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(["type", "role", "content", "text"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=250, deadline=None)
@given(place=st.sampled_from(PLACES), value=JSON)
def test_any_value_anywhere_is_taken_as_the_schema_has_it_or_refused(place, value):
    kind, path = place
    body = changed(FULL[kind], path, value)
    error = refusal_of(body, kind)
    if error is None:
        VALIDATORS[kind].validate(body)
    else:
        assert len(str(error)) < 2000
        assert len(error.param or "") < 300
