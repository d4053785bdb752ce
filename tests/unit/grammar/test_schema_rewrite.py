"""Keywords that are written in another way for a backend keep their meaning, with both backends."""

import json
from decimal import Decimal

import jsonschema
import pytest

pytest.importorskip("llguidance")

from quire.base.errors import RequestError
from quire.grammar.schema_check import check_schema
from tests.unit.grammar.byte_vocabulary import accepts, allowed_next, schema_grammar

INT = {"type": "integer"}
COLOURS = {"enum": ["red", "green", "blue"]}


def closed(properties, **more):
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


CASES = {
    "pattern-of-declared-name": (
        closed({"score": INT}, required=["score"], patternProperties={"^score$": INT}),
        [{"score": 1}, {"score": "1"}, {}, {"score": 1, "other": 1}],
    ),
    "pattern-of-two-names": (
        closed({"a": {}, "b": {"type": "string"}}, patternProperties={"^(a|b)$": {}}),
        [{}, {"a": 1}, {"a": None, "b": ""}, {"b": 2}, {"c": 1}],
    ),
    "pattern-in-any-case": (
        closed({"ab": INT, "AB": INT, "aB": INT, "Ab": INT}, patternProperties={"(?i)^ab$": {}}),
        [{"ab": 1}],
    ),
    "not-anything": (
        {"type": "object", "properties": {"a": INT, "b": {"not": {}}}, "additionalProperties": False},
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": None}],
    ),
    "no-other-items": (
        {"type": "object", "properties": {"a": {"type": "array", "items": {"not": True}}}, "additionalProperties": False},
        [{"a": []}, {"a": [1]}],
    ),
    "not-null": (closed({"a": {"not": {"type": "null"}, "type": ["string", "null"]}}), [{"a": "x"}, {"a": None}]),
    "any-names": ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INT}, [{"x": 1}, {"x": ""}]),
    "unique-values": (
        {"type": "array", "items": COLOURS, "uniqueItems": True, "minItems": 1},
        [[], ["red"], ["blue", "red"], ["red", "red"], ["green", "red", "blue"], ["red", "blue", "red"], ["pink"]],
    ),
    "unique-referred": (
        {"type": "array", "items": {"$ref": "#/$defs/c"}, "uniqueItems": True, "maxItems": 2, "$defs": {"c": COLOURS}},
        [[], ["red"], ["blue", "red"], ["red", "red"], ["green", "red", "blue"]],
    ),
    "one-item": ({"type": "array", "items": INT, "uniqueItems": True, "maxItems": 1}, [[], [1], [1, 2]]),
    "one-of-integers": (
        {
            "oneOf": [
                closed({"v": {"const": 1}, "a": INT}, required=["v", "a"]),
                closed({"v": {"const": 2}, "b": INT}, required=["v", "b"]),
                closed({"v": {"enum": [3, 4]}}, required=["v"]),
            ]
        },
        [{"v": 1, "a": 1}, {"v": 2, "b": 1}, {"v": 1, "b": 1}, {"v": 4}, {"v": 5}],
    ),
    "one-of-numbers": ({"oneOf": [{"const": 1}, {"enum": [2, 3]}, {"const": True}]}, [1, 2, True, 4, False]),
    "number-formats": (
        closed({"a": {"type": "integer", "format": "int32"}, "b": {"type": "number", "format": "double"}}),
        [{"a": 1, "b": 0.5}, {"a": 0.5}],
    ),
    "unknown-format": (closed({"a": {"type": "string", "format": "path"}}), [{"a": "x/y"}, {"a": 1}]),
}


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("name", CASES)
def test_rewritten_schema_takes_the_same_values(compiler, name, backend):
    pytest.importorskip(backend)
    schema, values = CASES[name]
    validator = jsonschema.validators.Draft202012Validator(schema)
    grammar = schema_grammar(compiler, schema, backend=backend)
    for value in values:
        assert accepts(grammar, json.dumps(value, separators=(",", ":"))) == validator.is_valid(value), value


def test_output_never_comes_to_a_dead_end_when_patterns_match_declared_names_only(compiler):
    schema = closed({"score": INT}, required=["score"], patternProperties={"^score$": {"maximum": 5}})
    grammar = schema_grammar(compiler, schema)
    assert accepts(grammar, '{"score": 5}')
    assert not accepts(grammar, '{"score": 6}'), "what the pattern demands of the property holds"
    matcher = grammar.new_matcher()
    for byte in b'{"score": 5':
        assert matcher.advance(byte) is None
    assert ord(",") not in allowed_next(matcher)[0]


def test_pattern_stays_when_it_matches_other_names_too(compiler):
    schema = closed({"a": INT}, patternProperties={"^[ab]$": INT})
    assert check_schema(schema) == schema
    assert accepts(schema_grammar(compiler, schema), '{"a": 1, "b": 2}')


def test_schema_is_refused_when_all_of_it_allows_nothing(compiler):
    for schema in ({"not": {}}, {"type": "object", "properties": {"a": {"not": True}}, "required": ["a"]}):
        with pytest.raises(RequestError):
            schema_grammar(compiler, schema)


@pytest.mark.parametrize("step", ["0.01", "0.1", "0.05", "0.7", "0.125", "2.5", "3", "0.003"])
def test_multiples_of_decimals_are_exact(compiler, step):
    grammar = schema_grammar(compiler, {"type": "number", "multipleOf": json.loads(step)})
    whole = schema_grammar(compiler, {"type": "integer", "multipleOf": json.loads(step)})
    for count in (0, 1, 3, 7, 19, 29, 100, 1003, 9999):
        value = Decimal(step) * count
        text = f"{value.normalize():f}"
        assert accepts(grammar, text) or accepts(grammar, str(value)), f"{text} may be written with the decimals of the step"
        assert accepts(whole, text) == (value % 1 == 0), text
        assert not accepts(grammar, f"{value}1" if "." in str(value) else f"{value}.0001"), text


def test_reference_by_anchor_at_the_root_is_followed(compiler):
    schema = {"$anchor": "tree", **closed({"v": INT, "next": {"$ref": "#tree"}}, required=["v"])}
    grammar = schema_grammar(compiler, schema)
    assert accepts(grammar, '{"v": 1, "next": {"v": 2}}')
    assert not accepts(grammar, '{"v": 1, "next": {"v": ""}}')
