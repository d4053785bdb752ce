"""Bodies: whatever is sent becomes a Struct or one RequestError with a field, and the published schema says the same."""

from __future__ import annotations

import json
import math
from functools import cache

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.decode import BodyError, decode_body
from quire.api.openai.chat import ChatCompletionRequest
from quire.api.openai.completions import CompletionRequest
from quire.api.openai.embeddings import EmbeddingRequest
from quire.api.openai.tokenize import DetokenizeRequest, TokenizeRequest
from quire.base.errors import RequestError

MINIMAL = {
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"model": "m", "prompt": "x"},
    EmbeddingRequest: {"model": "m", "input": "x"},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
}
TYPES = list(MINIMAL)
CHAT = MINIMAL[ChatCompletionRequest]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def decode(body: object, kind=ChatCompletionRequest):
    return decode_body(json.dumps(body).encode(), kind)


def refused(body: object, kind=ChatCompletionRequest) -> BodyError:
    with pytest.raises(BodyError) as caught:
        decode(body, kind)
    return caught.value


@pytest.mark.parametrize("kind", TYPES)
def test_minimal_body_is_taken(kind):
    body, ignored = decode(MINIMAL[kind], kind)
    assert isinstance(body, kind)
    assert ignored == ()


@pytest.mark.covering
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        '{"model":"m"}'.encode("utf-16"),
        b'{"model":"\xff"}',
        b'{"\xff":1}',
        b'{"model":"\\ud800"}',
        b'{"model":"\\udc00"}',
        b'{"\\ud800":1}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"model":"m","messages":' + b"[" * 200_000,
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"chat_template_kwargs":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"response_format":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda data: repr(data[:40]),
)
@pytest.mark.parametrize("kind", TYPES)
def test_damaged_body_is_one_short_error(data, kind):
    with pytest.raises(RequestError) as caught:
        decode_body(data, kind)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("end", [b'"}', b'", "max_tokens": 1}'])
@pytest.mark.parametrize("text", [rb"\ud800", rb"x\uD83D", rb"\ud83d\ud83d"])
def test_half_of_a_surrogate_pair_is_named(text, end):
    with pytest.raises(BodyError, match="unpaired surrogate") as caught:
        decode_body(b'{"model": "m", "prompt": "' + text + end, CompletionRequest)
    assert caught.value.code == "invalid_json"
    with pytest.raises(BodyError, match="truncated"):
        decode_body(b'{"model": "m", "prompt": "\\ud83d\\ude00', CompletionRequest)


@pytest.mark.parametrize(
    "field",
    ['"temperature":1e999', '"seed":' + "9" * 5000, '"chat_template_kwargs":{"a":' + "9" * 5000 + "}"],
    ids=lambda field: field[:20],
)
def test_number_that_is_out_of_range_is_refused(field):
    body = json.dumps(CHAT)[:-1] + "," + field + "}"
    with pytest.raises(RequestError, match="out of range"):
        decode_body(body.encode(), ChatCompletionRequest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 3}, "temperature: expected float <= 2.0, got 3"),
        ({"stop": "x" * 257}, "stop: expected str of length <= 256, got one of length 257"),
        ({"metadata": {"a": "x" * 513}}, 'metadata[...]: expected str of length <= 512, got {"a":"' + "x" * 94 + "..."),
        ({"logit_bias": {"1": 101}}, 'logit_bias[...]: expected float <= 100.0, got {"1":101}'),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention: may be one of '24h', 'in-memory', 'in_memory', got '1h'"),
        (
            {"messages": [{"role": "wizard", "content": "x"}]},
            "messages[0].role: may be one of 'developer', 'system', 'user', 'assistant', 'tool', 'function', got 'wizard'",
        ),
        ({"kv_compression": {"a": 1}}, "kv_compression: object contains unknown field a; it may have method, budget_tokens, "),
        ({"modalities": ["audio"]}, 'modalities: only text output is supported (got ["audio"])'),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else next(iter(value)),
)
def test_message_has_the_given_value_and_the_allowed_ones(change, message):
    assert str(refused(CHAT | change)).startswith(message)


def test_last_value_counts_when_a_key_stands_twice():
    body, _ = decode_body(b'{"model":"a","prompt":"x","model":"b","prompt":"y"}', CompletionRequest)
    assert (body.model, body.prompt) == ("b", "y")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "wizard", "content": "b"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": []}, "messages"),
        ({"model": 1}, "model"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"enable_thinking": False, "reasoning_effort": "high"}, "enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_value_names_its_field(change, param):
    error = refused({**CHAT, **change})
    assert error.param == param
    assert error.code in ("invalid_value", "missing_required_parameter")


@pytest.mark.parametrize("name", ["messages", "model"])
def test_missing_field_is_named(name):
    error = refused({key: value for key, value in CHAT.items() if key != name})
    assert (error.code, error.param) == ("missing_required_parameter", name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("modalities", ["text", "audio"]),
        ("audio", {}),
        ("moderation", {}),
        ("chat_template", "{{ x }}"),
        ("service_tier", "scale"),
        ("use_beam_search", True),
        ("truncate_prompt_tokens", 5),
        ("logits_processors", ["x"]),
        ("documents", [{}]),
        ("length_penalty", 1.2),
        ("early_stopping", True),
        ("best_of", 2),
        ("suffix", "x"),
        ("prompt_embeds", "AAAA"),
        ("guided_decoding_backend", "outlines"),
        ("structural_tag", {}),
        ("guided_decoding", {"json": {}}),
    ],
)
def test_known_parameter_is_refused_by_name_when_it_is_not_supported(name, value):
    error = refused({**CHAT, name: value})
    assert (error.code, error.param) == ("unsupported_parameter", name)
    assert name in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "text"}),
        ("tool_choice", "auto"),
        ("verbosity", "medium"),
        ("store", False),
        ("modalities", ["text"]),
        ("service_tier", "auto"),
        ("functions", None),
        ("tool_choice", None),
        ("guided_json", None),
        ("guided_json_object", False),
        ("use_beam_search", False),
        ("best_of", 1),
        ("top_logprobs", 0),
        ("user", "someone"),
        ("metadata", {"a": "b"}),
    ],
)
def test_value_that_changes_nothing_is_taken(name, value):
    _, ignored = decode({**CHAT, name: value})
    assert ignored == ()


def test_chat_that_is_to_be_stored_is_answered_and_told_that_it_is_not():
    assert decode({**CHAT, "store": True})[1] == ("store",)


@pytest.mark.parametrize(
    ("fields", "limit", "param"),
    [
        ({}, 16, "max_tokens"),
        ({"max_tokens": -1}, None, "max_tokens"),
        ({"max_tokens": 3}, 3, "max_tokens"),
        ({"max_completion_tokens": 3}, 3, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, 3, "max_completion_tokens"),
    ],
)
def test_limit_of_a_completion_has_two_names(fields, limit, param):
    body, _ = decode({"model": "m", "prompt": "x", **fields}, CompletionRequest)
    assert (body.max_output_tokens, body.limit_param) == (limit, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ],
)
def test_limit_of_a_completion_is_refused_by_the_name_that_was_sent(fields, param):
    assert refused({"model": "m", "prompt": "x", **fields}, CompletionRequest).param == param


def test_suffix_is_refused_for_completions():
    assert refused({"model": "m", "prompt": "x", "suffix": "y"}, CompletionRequest).param == "suffix"


def test_unknown_fields_are_told():
    _, ignored = decode({**CHAT, "temprature": 1, "x" * 500: 1})
    assert ignored[0] == "temprature"
    assert len(ignored[1]) < 200


def test_deep_schema_of_a_tool_is_refused():
    schema: dict = {}
    for _ in range(400):
        schema = {"properties": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert "nested" in str(refused({**CHAT, "tools": [tool]}))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ("", "prompt"),
        ([1, "a"], "prompt"),
        ([[1], []], "prompt[1]"),
        (["a", ""], "prompt[1]"),
        (["a"] * 257, "prompt"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_prompt_of_wrong_shape_is_refused(prompt, param):
    assert refused({"model": "m", "prompt": prompt}, CompletionRequest).param == param


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "user", "function"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(["type", "role", "content"]), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = [(kind, name) for kind in TYPES for name in {*kind.__struct_fields__, *kind.refusals()}]


@settings(max_examples=400, deadline=None)
@given(field=st.sampled_from(FIELDS), value=JSON)
def test_any_value_in_any_field_is_taken_or_refused_as_a_request_error(field, value):
    kind, name = field
    try:
        body, _ = decode({**MINIMAL[kind], name: value}, kind)
    except RequestError as error:
        texts = (str(error), error.param or "")
    else:
        texts = ("", "")
        msgspec.json.encode(body)
    assert len(texts[0]) < 2000
    assert len(texts[1]) < 300


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60), kind=st.sampled_from(TYPES))
def test_any_bytes_are_taken_or_refused_as_a_request_error(data, kind):
    try:
        decode_body(data, kind)
    except RequestError:
        pass
    else:
        json.loads(data)


@cache
def schema_of(kind) -> dict:
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    return {**schema, "components": {"schemas": components}}


@cache
def validator_of(kind) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema_of(kind))


@pytest.mark.parametrize("kind", TYPES)
def test_schema_is_valid_and_takes_the_minimal_body(kind):
    schema = schema_of(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(MINIMAL[kind], schema)
    assert json.dumps(schema).count("description") > 0


def is_strictly_json(value: object) -> bool:
    """Whether JSON Schema and a typed decoder mean the same: for schemas 1.0 is an integer and NaN a number."""
    if isinstance(value, float):
        return math.isfinite(value) and not value.is_integer()
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**63
    if isinstance(value, dict):
        return all(map(is_strictly_json, value.values()))
    return all(map(is_strictly_json, value)) if isinstance(value, list) else True


@settings(max_examples=300, deadline=None)
@given(field=st.sampled_from(FIELDS), value=JSON.filter(is_strictly_json))
def test_schema_takes_what_the_decoder_takes(field, value):
    kind, name = field
    body = {**MINIMAL[kind], name: value}
    try:
        decode(body, kind)
    except RequestError:
        return
    validator_of(kind).validate(body)


@pytest.mark.parametrize("field", ["response_format", "chat_template_kwargs", "unheard_of"])
def test_field_is_refused_before_it_is_decoded_when_it_is_too_long(field):
    body = {"model": 5, "messages": "x" * (2 << 20), field: "y" * (1 << 20)}
    with pytest.raises(BodyError, match=f"{field}: may have 1048576 bytes of JSON, got 1048578") as caught:
        decode_body(json.dumps(body).encode(), ChatCompletionRequest)
    assert caught.value.param == field
    body[field] = "y" * ((1 << 20) - 2)
    with pytest.raises(BodyError, match="model"):
        decode_body(json.dumps(body).encode(), ChatCompletionRequest)


def test_body_is_refused_when_its_strings_have_too_many_escapes():
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "\n" * (1 << 20)}]}).encode()
    with pytest.raises(BodyError, match="more than 1048576 escapes") as caught:
        decode_body(body.replace(b"\\n", b"\\n\\n", 1), ChatCompletionRequest)
    assert caught.value.param is None
    assert decode_body(body, ChatCompletionRequest)[0].messages[0].content == "\n" * (1 << 20)
