"""Schemas that a reference leads to are checked like all others, wherever they stand."""

import pytest

from quire.base.errors import RequestError
from quire.grammar.errors import GrammarError
from quire.grammar.lark import schema_fields
from quire.grammar.schema_check import XGRAMMAR, check_schema, close_ends
from quire.grammar.schema_walk import iter_reached
from tests.unit.grammar.byte_vocabulary import accepts, schema_grammar

DRAFTS = {number: f"http://json-schema.org/draft-{number:02}/schema#" for number in (4, 6, 7)}
NARROW = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
COUNT = {"type": "integer"}


def grammar_of(compiler, schema):
    pytest.importorskip("llguidance")
    return schema_grammar(compiler, schema)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        (
            {"$ref": "#/components/schemas/P", "components": {"schemas": {"P": NARROW}}},
            "/components/schemas/P/exclusiveMinimum",
        ),
        ({"$ref": "#/$defs/g/sub", "$defs": {"g": {"sub": {"not": {}}}}}, "/$defs/g/sub/not"),
        ({"items": {"$ref": "#/a%20b/c~1d"}, "a b": {"c/d": {"items": {"uniqueItems": True}}}}, "/a b/c~1d/items/uniqueItems"),
        ({"$ref": "#/x/1", "x": [{}, {"$ref": "#/y"}], "y": {"if": {}, "then": {}}}, "/y/if"),
        ({"$ref": "#/x", "x": {"type": "text"}}, "/x/type"),
        ({"$ref": "in.json#/q/w", "$defs": {"a": {"$id": "in.json", "q": {"w": {"not": {}}}}}}, "/$defs/a/q/w/not"),
        ({"$ref": "#there", "odd": {"$anchor": "there", "not": {}}}, "/odd/not"),
        ({"$schema": DRAFTS[7], "$ref": "#/c/P", "c": {"P": {"contains": {}}}}, "/c/P/contains"),
        ({"$schema": DRAFTS[7], "allOf": [{"$ref": "#/c"}], "c": {"uniqueItems": True}}, "/c/uniqueItems"),
        ({"$ref": "#/nowhere"}, "/$ref"),
        ({"$ref": "#/x/+0", "x": [{}]}, "/$ref"),
        ({"$ref": "#/enum", "enum": [1]}, "/$ref"),
    ],
)
@pytest.mark.parametrize("options", [(), (XGRAMMAR,)], ids=["llguidance", "xgrammar"])
def test_schema_is_refused_by_the_path_of_its_reference_when_it_cannot_be_enforced(schema, pointer, options):
    with pytest.raises(GrammarError) as caught:
        check_schema(schema, *options)
    assert caught.value.pointer == pointer


def test_schema_is_yielded_once_when_references_lead_around():
    schema = {"$ref": "#/a", "a": {"properties": {"b": {"$ref": "#/a"}, "c": {"$ref": "#/$defs/d"}}}, "$defs": {"d": {}}}
    assert [pointer for pointer, _ in iter_reached(schema)] == ["", "/$defs/d", "/a", "/a/properties/b", "/a/properties/c"]


def test_schema_behind_a_reference_is_cleaned_and_narrowed_like_others():
    inner = {"type": "array", "minItems": 2.0, "uniqueItems": False, "items": {"type": "string", "format": "date"}}
    found = schema_fields(close_ends(check_schema({"$ref": "#/odd", "odd": inner}), 5))["odd"]
    assert found["minItems"] == 2
    assert "uniqueItems" not in found
    assert found["maxItems"] == 5
    assert "pattern" in found["items"]


@pytest.mark.covering
@pytest.mark.parametrize("draft", [*DRAFTS.values(), "https://json-schema.org/draft/2020-12/schema", None])
@pytest.mark.parametrize("reference", ["#/components/schemas/P", "#/definitions/g/sub", "#/an%20odd%25"])
@pytest.mark.parametrize("is_root", [True, False], ids=["root", "within"])
def test_reference_is_followed_in_every_draft_when_its_place_is_no_keyword(compiler, draft, reference, is_root):
    found = {"components": {"schemas": {"P": COUNT}}, "definitions": {"g": {"sub": COUNT}}, "an odd%": COUNT}
    place = {"$ref": reference} if is_root else {"type": "array", "items": {"$ref": reference}}
    grammar = grammar_of(compiler, {**({"$schema": draft} if draft else {}), **place, **found})
    for text, is_right in (("12", True), ("1.5", False), ('"a"', False)):
        assert accepts(grammar, text if is_root else f"[{text}]") == is_right


def test_number_out_of_bounds_is_not_let_through_when_a_reference_leads_to_them(compiler):
    bounds = {"type": "number", "minimum": 0, "exclusiveMaximum": 0.5}
    grammar = grammar_of(compiler, {"$ref": "#/x/P", "x": {"P": bounds}})
    assert accepts(grammar, "0.4")
    assert not accepts(grammar, "0.5")
    with pytest.raises(RequestError, match=r"\(at /x/P/exclusiveMinimum\)"):
        grammar_of(compiler, {"$ref": "#/x/P", "x": {"P": NARROW}})
