"""Names of properties that are written with escapes: they are the names that the schema speaks of."""

import json

import pytest

pytest.importorskip("llguidance")

from quire.base.errors import RequestError
from tests.unit.grammar.byte_vocabulary import accepts, schema_grammar

OPEN = {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"]}
CLOSED = {**OPEN, "properties": {**OPEN["properties"], "z": {"type": "string"}}, "additionalProperties": False}


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (OPEN, r'{"y":1,"z\n\"\\":"a"}', r'{"y":1,"\u0079":"a"}'),
        (OPEN, r'{"y":1,"Y":"a"}', '{"y":1,"y":"a"}'),
        ({**OPEN, "required": [], "additionalProperties": {"type": "string"}}, '{"z":"a"}', r'{"\u0079":"a"}'),
        ({"type": "object", "patternProperties": {"^a": {"type": "string"}}}, '{"ac":"a","b":1}', r'{"\u0061c":1}'),
        ({"type": "object", "properties": {"a": False}}, '{"b":1}', r'{"\u0061":1}'),
        ({"type": "object", "properties": {"a\n": {"type": "null"}}}, r'{"a\n":null}', r'{"a\u000a":1}'),
        ({"type": "object", "properties": {"a/": {"type": "null"}}}, r'{"a/":null}', r'{"a\/":1}'),
        (
            {
                "type": "object",
                "properties": {"a\n": False},
                "patternProperties": {"^[^b]*$": {}},
                "additionalProperties": False,
            },
            r'{"a\t":1}',
            r'{"a\u000a":1}',
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": OPEN}}, r'{"y":1,"é":"a"}', r'{"y":1,"\u0079":"a"}'),
        ({"$ref": "#/odd/a", "odd": {"a": OPEN}}, r'{"y":1}', r'{"y":1,"\u0079":"a"}'),
    ],
)
def test_escape_is_no_way_around_a_name_when_others_are_open(compiler, kind, backend, schema, right, wrong):
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    try:
        grammar = schema_grammar(compiler, schema, kind, backend)
    except RequestError:
        assert backend == "xgrammar"
        assert schema is not OPEN, "only odd ones may be refused"
        return
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "object"}, {"const": "\x1b"}, {"items": CLOSED}])
def test_control_characters_can_be_written_when_names_are_closed_or_all_open(compiler, schema):
    text = {"string": r'"\u001b"', "object": r'{"\u001b":"\u001b"}'}.get(schema.get("type"), r'"\u001b"')
    assert accepts(schema_grammar(compiler, schema), r'[{"y":1,"z":"\u001b"}]' if "items" in schema else text)


@pytest.mark.parametrize("name", ["a\n", 'a"', "a\\"])
def test_declared_name_is_refused_by_xgrammar_when_json_escapes_it_and_others_are_open(compiler, name):
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {name: {"type": "null"}}}
    with pytest.raises(RequestError, match="additionalProperties"):
        schema_grammar(compiler, schema, backend="xgrammar")
    grammar = schema_grammar(compiler, {**schema, "additionalProperties": False}, backend="xgrammar")
    assert accepts(grammar, json.dumps({name: None}))
