"""Schemas that are nested deeply are enforced, by both backends and with all that is around them."""

import importlib.util
import json

import pytest

pytest.importorskip("llguidance")

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint, StructuredOutputsParams, json_depth
from quire.grammar.compiler import GrammarContext
from quire.grammar.schema_check import check_schema
from quire.grammar.schema_depth import MAX_FLAT_DEPTH, flatten_schema
from tests.unit.grammar.byte_vocabulary import accepts, allowed_next, schema_grammar

DEPTH = 128


def nested(depth, inner, **more):
    schema = inner
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False, **more}
    return schema


def value(depth, inner):
    return '{"a":' * depth + inner + "}" * depth


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_schema_of_many_objects_in_each_other_is_enforced(compiler, backend, kind):
    pytest.importorskip(backend)
    schema = nested(DEPTH, {"type": "integer"})
    grammar = schema_grammar(compiler, schema, kind, backend)
    assert accepts(grammar, value(DEPTH, "7"))
    assert not accepts(grammar, value(DEPTH, '""'))
    assert not accepts(grammar, value(DEPTH - 1, "7"))


def test_deep_schema_is_enforced_with_banned_words_and_closed_objects(compiler):
    schema = nested(DEPTH, {"type": "string"})
    constraint = StructuredOutputsParams(json=schema, disable_additional_properties=True, max_open_length=9).constraint()
    grammar = compiler.start(constraint, ("secret",), GrammarContext((), 2000)).result()
    assert accepts(grammar, value(DEPTH, '"x"'))
    matcher = grammar.new_matcher()
    for byte in b'{"a":' * DEPTH + b'"my secre':
        assert matcher.advance(byte) is None
    assert ord("t") not in allowed_next(matcher)[0]


@pytest.mark.parametrize("key", ["items", "anyOf", "additionalProperties"])
def test_deep_schema_is_enforced_when_other_keywords_nest_it(compiler, key):
    schema = {"type": "integer"}
    for _ in range(100):
        schema = (
            {key: [schema, {"type": "null"}]}
            if key == "anyOf"
            else {key: schema, "type": "array" if key == "items" else "object"}
        )
    grammar = schema_grammar(compiler, schema)
    assert accepts(grammar, {"items": "[" * 100 + "7" + "]" * 100, "anyOf": "null"}.get(key, value(100, "7")))
    assert not accepts(grammar, {"items": "[" * 100 + '""' + "]" * 100, "anyOf": '""'}.get(key, value(100, '""')))


def test_references_into_parts_that_were_moved_are_followed(compiler):
    schema = nested(60, {"type": "object", "properties": {"x y": {"type": "integer"}, "z": {"type": "string"}}})
    place = "#" + "/properties/a" * 60 + "/properties/x%20y"
    whole = {"type": "object", "properties": {"tree": schema, "n": {"$ref": place.replace("#", "#/properties/tree")}}}
    grammar = schema_grammar(compiler, whole)
    assert accepts(grammar, '{"n": 7}')
    assert not accepts(grammar, '{"n": ""}')


def test_flat_schema_has_no_deep_piece_and_means_the_same():
    schema = nested(DEPTH, {"const": 1})
    flat = flatten_schema(json.loads(json.dumps(schema)))
    assert json_depth(flat) <= 2 * MAX_FLAT_DEPTH
    assert flatten_schema({"const": 1}) == {"const": 1}
    assert check_schema(schema) == schema


def test_error_names_the_place_when_it_is_deep(compiler):
    with pytest.raises(RequestError) as caught:
        schema_grammar(compiler, nested(DEPTH, {"type": "string", "pattern": "a(?=b)"}))
    assert f"(at {'/properties/a' * DEPTH}/pattern)" in str(caught.value)


def test_schema_is_refused_when_it_is_deeper_than_that():
    with pytest.raises(RequestError, match="may be nested"):
        Constraint(kind="json_schema", source=json.dumps(nested(170, {})))


def _nested_list():
    deep = 1
    for _ in range(150):
        deep = [deep]
    return deep


def test_deep_value_within_a_schema_is_refused(compiler):
    with pytest.raises(RequestError, match="nested"):
        schema_grammar(compiler, {"type": "object", "properties": {"a": {"const": _nested_list()}}})


def test_deep_default_is_refused_where_no_backend_ignores_it(compiler):
    """It changes no output: xgrammar, where it is installed, compiles the schema without it."""
    schema = {"type": "object", "properties": {"a": {"default": _nested_list()}}}
    if importlib.util.find_spec("xgrammar") is not None:
        schema_grammar(compiler, schema)
        return
    with pytest.raises(RequestError, match="nested"):
        schema_grammar(compiler, schema)
