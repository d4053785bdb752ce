"""Formats that are not enforced are told by their paths, wherever a body has the schema of the output."""

import json

import pytest

from quire.api.anthropic.messages import MessagesRequest
from quire.api.decode import annotations_of, decode_body
from quire.api.openai.chat import ChatCompletionRequest
from quire.api.openai.responses import ResponsesRequest
from quire.contracts.string_formats import ENFORCED_FORMATS, find_annotations
from quire.grammar.schema_formats import FORMATS

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "format": "int32"},
        "format": {"type": "string", "format": "date"},
        "paths": {"type": "array", "items": {"type": "string", "format": "path"}},
        "default": {
            "default": {"format": "odd"},
            "const": {"format": "odd"},
            "anyOf": [{"type": "null"}, {"format": "float", "type": "number"}],
        },
    },
}
FOUND = ["properties.n.format", "properties.paths.items.format", "properties.default.anyOf[1].format"]
MESSAGES = [{"role": "user", "content": "x"}]


def test_formats_are_found_by_their_paths_when_they_are_not_enforced():
    assert list(find_annotations(SCHEMA)) == FOUND
    assert list(find_annotations({"type": ["string", "null"], "format": "email"})) == []
    assert list(find_annotations({"type": "integer", "format": "email"})) == ["format"]


def test_formats_that_are_called_enforced_are_those_with_an_expression():
    assert frozenset(FORMATS) == ENFORCED_FORMATS


@pytest.mark.parametrize(
    ("kind", "fields", "path"),
    [
        (
            ChatCompletionRequest,
            {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            "response_format.json_schema.schema",
        ),
        (ChatCompletionRequest, {"messages": MESSAGES, "structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        (
            ChatCompletionRequest,
            {
                "messages": MESSAGES,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}],
            },
            "tools[0].function.parameters",
        ),
        (
            ChatCompletionRequest,
            {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
            "",
        ),
        (
            ResponsesRequest,
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            "text.format.schema",
        ),
        (
            ResponsesRequest,
            {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "tool_choice": "required"},
            "tools[0].parameters",
        ),
        (
            MessagesRequest,
            {
                "messages": MESSAGES,
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": SCHEMA}],
                "tool_choice": {"type": "any"},
            },
            "tools[0].input_schema",
        ),
        (
            MessagesRequest,
            {"messages": MESSAGES, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "output_config.format.schema",
        ),
    ],
)
def test_annotations_of_a_body_are_those_of_the_schemas_that_its_output_has_to_match(kind, fields, path):
    body, ignored = decode_body(json.dumps({"model": "m", **fields}).encode(), kind)
    assert ignored == ()
    assert list(annotations_of(body)) == [f"{path}.{inner}" for inner in FOUND if path]
