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
        ({"properties": {"a/b": {"items": {"not": {}}}}}, "/properties/a~1b/items/not"),
        ({"anyOf": [{}, {"uniqueItems": True}]}, "/anyOf/1/uniqueItems"),
        ({"$defs": {"x": {"if": {}, "then": {}}}}, "/$defs/x/if"),
        ({"type": "string", "format": "path"}, "/format"),
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
    ],
)
def test_schema_stays_as_it_is_when_all_of_it_can_be_enforced(schema):
    assert check_schema(schema) == schema


def test_keywords_that_demand_nothing_are_left_out():
    schema = {"properties": {"a": {"uniqueItems": False, "then": {"not": {}}, "minContains": 2, "type": "array"}}}
    assert check_schema(schema) == {"properties": {"a": {"type": "array"}}}
    assert schema["properties"]["a"]["uniqueItems"] is False, "the caller's own is not changed"


def test_nothing_counts_beside_a_reference_when_the_draft_says_so():
    inner = {"$ref": "#/definitions/x", "additionalProperties": False, "not": {}}
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

    assert sum(passes(row["schema"]) for row in rows) >= 94


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
