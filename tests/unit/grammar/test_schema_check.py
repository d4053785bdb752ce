"""What is refused before a backend would weaken it, by the JSON pointer of the keyword."""

import json
from pathlib import Path

import pytest

from quire.grammar.errors import GrammarError
from quire.grammar.schema_check import check_schema, close_ends

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "schemas"
DRAFT7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a/b": {"items": {"not": {"minimum": 1}}}}}, "/properties/a~1b/items/not"),
        ({"anyOf": [{}, {"uniqueItems": True}]}, "/anyOf/1/uniqueItems"),
        ({"$defs": {"x": {"if": {}, "then": {}}}}, "/$defs/x/if"),
        ({"pattern": "a(?!b)"}, "/pattern"),
        ({"patternProperties": {"(?<=a)b": {}}}, "/patternProperties/(?<=a)b"),
        ({"items": [{"type": "integer"}]}, "/items"),
        ({"minProperties": 2}, "/minProperties"),
        ({"properties": {"a": {"$ref": "https://example.org/a.json"}}}, "/properties/a/$ref"),
        ({"x-guidance": {"lenient": True}}, "/x-guidance"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "/$schema"),
        ({"additionalProperties": {"dependentRequired": {"a": ["b"]}}}, "/additionalProperties/dependentRequired"),
        ({"unevaluatedProperties": False}, "/unevaluatedProperties"),
        ({"contains": {"const": 1}}, "/contains"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "/exclusiveMinimum"),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "/exclusiveMaximum"),
        ({"multipleOf": float("inf")}, "/multipleOf"),
        ({"minimum": 0, "exclusiveMinimum": True}, "/exclusiveMinimum"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "/uniqueItems"),
        ({"type": "array", "items": {"enum": [*range(6)]}, "uniqueItems": True}, "/uniqueItems"),
        ({"properties": {"b": {"$ref": "#/properties/a/enum/0"}, "a": {"enum": [{"type": "null"}]}}}, "/properties/b/$ref"),
        ({"properties": {"a": {"const": {"if": {}}}, "b": {"$ref": "#/properties/a/const"}}}, "/properties/b/$ref"),
        ({"$ref": "#foo", "$anchor": "foo"}, "/$ref"),
    ],
)
def test_keyword_is_refused_by_its_pointer_when_it_cannot_be_enforced(schema, pointer):
    with pytest.raises(GrammarError) as caught:
        check_schema(schema)
    assert caught.value.pointer == pointer


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"properties": {"not": {"type": "string"}, "if": {}, "uniqueItems": False}},
        {"const": {"not": 1}, "enum": [{"uniqueItems": True}], "default": {"if": 1}},
        {"minProperties": 2, "required": ["a", "b"]},
        {"$schema": DRAFT7, "items": [{"type": "integer"}]},
        {"somebodys-own": {"not": 1}, "nullable": True},
        {"exclusiveMinimum": 0, "maximum": 1},
        {"exclusiveMinimum": 0.5, "exclusiveMaximum": 0.75},
        {"type": "number", "multipleOf": 2.5},
        {"type": "number", "multipleOf": 0.01},
        {"type": "integer", "multipleOf": 0.7},
        {"type": "string", "multipleOf": 0.1},
    ],
)
def test_schema_stays_as_it_is_when_all_of_it_can_be_enforced(schema):
    assert check_schema(schema) == schema


def test_keywords_that_demand_nothing_are_left_out():
    schema = {"properties": {"a": {"uniqueItems": False, "then": {"not": {}}, "minContains": 2, "type": "array"}}}
    assert check_schema(schema) == {"properties": {"a": {"type": "array"}}}
    assert schema["properties"]["a"]["uniqueItems"] is False, "the caller's own is not changed"


def test_nothing_counts_beside_a_reference_when_the_draft_says_so():
    inner = {"$ref": "#/definitions/x", "additionalProperties": False, "not": {"minimum": 1}}
    definitions = {"x": {"type": "object"}}
    cleaned = check_schema({"$schema": DRAFT7, "definitions": definitions, "properties": {"a": dict(inner)}})
    assert cleaned["properties"]["a"] == {"$ref": "#/definitions/x"}
    with pytest.raises(GrammarError):
        check_schema({"definitions": definitions, "properties": {"a": dict(inner)}})


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data/schemas is not beside the checkout")
def test_nearly_all_schemas_of_the_sample_pass():
    rows = [json.loads(line) for line in (DATA / "jsonschemabench_100.jsonl").read_text().splitlines()]

    def passes(schema):
        try:
            check_schema(schema)
        except GrammarError:
            return False
        return True

    assert sum(passes(row["schema"]) for row in rows) >= 93


def test_open_ends_get_a_limit_and_nothing_else_changes():
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": ["string", "null"], "minLength": 20},
            "c": {"type": "string", "maxLength": 99},
            "d": {"type": "array", "items": {"type": "string", "pattern": "x+"}},
            "e": {"enum": ["long enough"], "type": "string"},
        },
    }
    assert close_ends(schema, None) == schema
    closed = close_ends(schema, 8)["properties"]
    assert closed["a"]["maxLength"] == 8
    assert closed["b"]["maxLength"] == 20
    assert closed["d"] == {"type": "array", "maxItems": 8, "items": {"type": "string", "pattern": "x+"}}
    assert closed["c"] == schema["properties"]["c"]
    assert closed["e"] == schema["properties"]["e"]


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": []}, "/properties"),
        ({"properties": {"a": "string"}}, "/properties"),
        ({"properties": {"a": {"additionalProperties": "no"}}}, "/properties/a/additionalProperties"),
        ({"enum": "abc"}, "/enum"),
        ({"items": {"minItems": "1"}}, "/items/minItems"),
        ({"anyOf": {"type": "string"}}, "/anyOf"),
        ({"anyOf": []}, "/anyOf"),
        ({"required": 5}, "/required"),
        ({"required": [5]}, "/required"),
        ({"maxLength": -1}, "/maxLength"),
        ({"maxLength": 1.5}, "/maxLength"),
        ({"minLength": True}, "/minLength"),
        ({"minItems": 3, "maxItems": 2}, "/minItems"),
        ({"type": "text"}, "/type"),
        ({"type": []}, "/type"),
        ({"minimum": "0"}, "/minimum"),
        ({"multipleOf": 0}, "/multipleOf"),
        ({"$ref": 1}, "/$ref"),
        ({"pattern": 1}, "/pattern"),
    ],
)
def test_schema_is_refused_by_its_pointer_when_a_keyword_has_a_value_that_it_cannot_have(schema, pointer):
    with pytest.raises(GrammarError) as caught:
        check_schema(schema)
    assert caught.value.pointer == pointer
