"""What is refused says why in plain words, and where; what can be compiled can also be followed."""

import json
import re

import pytest

pytest.importorskip("llguidance")

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint

OPEN = {"type": "object", "properties": {"x": {"type": "string"}}}


def message_of(compiler, schema, **more):
    with pytest.raises(RequestError) as caught:
        compiler.start(
            Constraint(kind="json_schema", source=json.dumps(schema, separators=(",", ":")), backend="llguidance", **more)
        ).result()
    return str(caught.value).removeprefix("structured_outputs: ")


@pytest.mark.parametrize(
    ("schema", "pointer", "words"),
    [
        ({"enum": []}, "/enum", "nothing can match it: enum has no value"),
        ({"type": "number", "minimum": 1e3, "maximum": 1e20}, "/maximum", "bounds of numbers .* 9e18"),
        ({"items": {"type": "integer", "minimum": 10**30}}, "/items/minimum", "integers may have 64 bits"),
        ({"properties": {"a": {"const": {"b~/": [2**64]}}}}, "/properties/a/const/b~0~1/0", "integers may have 64 bits"),
        ({"$ref": "#"}, "/$ref", "leads back to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "/$ref", "leads back"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "/properties/a/$ref", "'#/\\$defs/x' leads nowhere"),
        (
            {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}},
            "/properties/a/minimum",
            "greater than maximum",
        ),
        ({"required": ["z"], "type": "object", "additionalProperties": False}, "/required", "'z' is required"),
        (
            {"type": "object", "properties": {"b": {"type": "object", "patternProperties": {"^x": {}, "y$": {}}}}},
            "/properties/b/patternProperties",
            "no name matches two of them",
        ),
        ({"anyOf": [OPEN, {"type": "string", "pattern": r"\bfoo"}]}, "/anyOf/1/pattern", re.escape(r"\b, \B, and anchors")),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "pattern": "(a"}}}, "/$defs/a/pattern", "regex parse error"),
        ({"items": {"allOf": [{"type": "string"}, {"type": "integer"}]}, "minItems": 1, "type": "array"}, "/items", "no value"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "the root", "nothing can match it"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_schema_is_refused_with_a_plain_reason_and_its_pointer(compiler, schema, pointer, words):
    message = message_of(compiler, schema)
    assert message.endswith(f"(at {pointer})"), message
    assert re.search(words, message), message


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "object", "properties": {f"p{j}": {"type": "string"} for j in range(10)}} for _ in range(60)]},
        {"type": "object", "properties": {f"p{j}": {"type": "string"} for j in range(600)}, "additionalProperties": False},
    ],
    ids=["anyOf", "optional"],
)
def test_object_of_many_optional_properties_can_be_begun(compiler, schema):
    matcher = compiler.start(Constraint(kind="json_schema", source=json.dumps(schema))).result().new_matcher()
    for letter in '{"p1':
        assert matcher.advance(ord(letter)) is None


def test_schema_is_refused_before_its_request_begins_when_no_object_of_it_can_be_begun(compiler):
    objects = [{"properties": dict.fromkeys(map(str, range(10, 90)), True), "type": "object"}] * 70
    message = message_of(compiler, {"items": {"anyOf": objects}, "type": "array"})
    assert re.search(r"it goes on in \d+ ways at one place, and may in 20000", message), message
