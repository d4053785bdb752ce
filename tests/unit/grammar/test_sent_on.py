"""Schemas that llguidance refuses: sent to xgrammar where that enforces them, else refused with the pointer."""

import json

import jsonschema
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("xgrammar")

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint
from tests.unit.grammar.byte_vocabulary import accepts


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}}, [{}, {"a": 1}, {"ab": 1, "c": 2}, {"d": 1}, {"aB": 0}]),
        ({"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "null"}},
         [{"x": None}, {"z": None}, {"y": 1}]),
        ({"type": "object", "propertyNames": {"maxLength": 2}, "odd": 1}, [{"p": 1}, {"": 1}, {"ppp": 1}]),
    ],
    ids=["names", "names-enum", "names-short"],
)  # fmt: skip
def test_schema_is_enforced_when_the_other_backend_can(compiler, schema, values):
    before = compiler.num_sent_on
    grammar = compiler.start(Constraint(kind="json_schema", source=json.dumps(schema), param="here")).result()
    assert compiler.num_sent_on == before + 1
    for value in values:
        assert accepts(grammar, json.dumps(value)) == jsonschema.validators.Draft202012Validator(schema).is_valid(value), value


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "object", "propertyNames": {"maxLength": 2}, "properties": {"long": {}}}, "/propertyNames"),
        ({"properties": {"a": {"not": {"minimum": 1}}}}, "/properties/a/not"),
        ({"type": "object", "propertyNames": {"pattern": '^["]$'}}, "/propertyNames"),
        ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
        ({"type": "object", "additionalProperties": {}, "minProperties": 2}, "/minProperties"),
        (
            {"properties": {"a": {"type": "object", "propertyNames": {"minLength": 1}}, "b": {"minLength": 3}}},
            "/properties/a/propertyNames",
        ),
        (
            {"properties": {"a": {"type": "object", "propertyNames": {"minLength": 1}}, "b": {"enum": ["ab"], "minLength": 3}}},
            "/properties/a/propertyNames",
        ),
    ],
)
def test_schema_is_refused_with_its_pointer_when_no_backend_enforces_it(compiler, schema, pointer):
    before = compiler.num_sent_on
    with pytest.raises(RequestError, match="here: ") as caught:
        compiler.start(Constraint(kind="json_schema", source=json.dumps(schema), param="here")).result()
    assert f"(at {pointer})" in str(caught.value)
    assert compiler.num_sent_on == before


def test_only_llguidance_is_asked_when_the_request_says_so(compiler):
    schema = json.dumps({"type": "object", "propertyNames": {"maxLength": 2}})
    assert compiler.start(Constraint(kind="json_schema", source=schema)).result()
    with pytest.raises(RequestError, match="propertyNames"):
        compiler.start(Constraint(kind="json_schema", source=schema, backend="llguidance")).result()
