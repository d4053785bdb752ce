"""Constraints: what their options do to a schema, and which are refused."""

from __future__ import annotations

import json

import pytest

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint, StructuredOutputsParams

DATA = {"properties": {"a": 1}}
INNER = {"type": "object", "properties": {"x": {}}}
CLOSED = {**INNER, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"const": DATA}, {"const": DATA}),
        ({"enum": [DATA], "default": DATA, "examples": [DATA]}, {"enum": [DATA], "default": DATA, "examples": [DATA]}),
        (INNER, CLOSED),
        (
            {"anyOf": [INNER], "items": INNER, "$defs": {"a": INNER}},
            {"anyOf": [CLOSED], "items": CLOSED, "$defs": {"a": CLOSED}},
        ),
        (
            {"properties": {"properties": {"type": "object"}, "const": INNER}},
            {"properties": {"properties": {"type": "object"}, "const": CLOSED}, "additionalProperties": False},
        ),
        ({"$ref": "#/shared/a", "shared": {"a": INNER}}, {"$ref": "#/shared/a", "shared": {"a": CLOSED}}),
        ({**INNER, "additionalProperties": True}, {**INNER, "additionalProperties": True}),
    ],
    ids=str,
)
def test_schemas_are_closed_and_data_is_left_alone_when_more_properties_are_disabled(schema, closed):
    found = StructuredOutputsParams(json=schema, disable_additional_properties=True).constraint()
    assert json.loads(found.source) == closed


@pytest.mark.parametrize("pattern", [" ", "[ \\t\\n\\r]*", "( |\\n){0,3}", "(?:\\x20|\\u000a)?", " ?\n?", "[\n ]{1,}"])
def test_white_space_of_json_is_taken(pattern):
    assert Constraint(kind="json_object", whitespace_pattern=pattern).whitespace_pattern == pattern


@pytest.mark.parametrize(
    "pattern", ["_", "[a-z]", ".", "\\s*", "[^a]", " |x", "\\x41", "[ -~]", "(?i) ", "\\d", " {a}", "\u00a0"]
)
def test_pattern_of_white_space_is_refused_by_its_name_when_it_matches_anything_else(pattern):
    with pytest.raises(RequestError, match="json_object: whitespace_pattern may match white space of JSON") as caught:
        StructuredOutputsParams(json_object=True, whitespace_pattern=pattern)
    assert caught.value.param == "structured_outputs.json_object"


@pytest.mark.parametrize(
    "wanted", [{"regex": "a+"}, {"choice": ["a"]}, {"grammar": 'start: "a"'}], ids=lambda wanted: next(iter(wanted))
)
@pytest.mark.parametrize(
    "option",
    [{"max_open_length": 4}, {"whitespace_pattern": " ?"}, {"disable_any_whitespace": True}],
    ids=lambda one: next(iter(one)),
)
def test_option_of_json_is_refused_by_its_name_when_the_output_is_none(wanted, option):
    (kind,), (name,) = wanted, option
    with pytest.raises(RequestError, match=f"{kind}: {name} is for JSON") as caught:
        StructuredOutputsParams(**wanted, **option)
    assert caught.value.param == f"structured_outputs.{kind}"
    StructuredOutputsParams(**wanted, disable_any_whitespace=False)
    StructuredOutputsParams(json_object=True, **option)
