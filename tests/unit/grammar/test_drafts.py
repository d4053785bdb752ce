"""The draft that a schema declares: what counts beside a reference, as jsonschema has it."""

import json

import jsonschema
import pytest

pytest.importorskip("llguidance")

from quire.base.errors import RequestError
from quire.contracts.argument_types import types_of
from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError
from quire.grammar.schema_check import check_schema
from tests.unit.grammar.byte_vocabulary import accepts

DRAFT4, DRAFT6 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-06/schema"
DRAFT7, NEWEST = "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"
OLDER = (DRAFT4, DRAFT6, DRAFT7)
NEWER = (None, "https://json-schema.org/draft/2019-09/schema", NEWEST, f"{NEWEST}#")
UNKNOWN = (DRAFT7.replace("http:", "https:"), f"{DRAFT7}#", "http://json-schema.org/schema#", "http://localhost/draft-07/own")

SIBLINGS = (
    {"maxLength": 2},
    {"type": "integer"},
    {"enum": ["ab", "abcd", 3]},
    {"properties": {"a": {"type": "string"}}, "required": ["a"]},
    {"anyOf": [{"type": "integer"}, {"minLength": 3}]},
    {"not": {}},
)
TARGETS = ({"type": ["integer", "string"]}, {"type": "object"}, {"$ref": "#/definitions/text", "maxLength": 3}, {})
VALUES = ("ab", "abcd", "", 3, {}, {"a": "x"}, {"a": 1}, None)


def schemas_of(draft):
    """Yield schemas with something beside a reference, and how a value stands in what they describe."""
    declared = {} if draft is None else {"$schema": draft}
    for sibling in SIBLINGS:
        for target in TARGETS:
            reference = {"$ref": "#/definitions/target", **sibling}
            definitions = {"target": target, "text": {"type": "string"}}
            yield {**declared, **reference, "definitions": definitions}, lambda value: value
            definitions = {**definitions, "own": reference}
            yield (
                {**declared, "type": "array", "items": {"$ref": "#/definitions/own"}, "definitions": definitions},
                lambda value: [value],
            )


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("draft", [*OLDER, *NEWER, *UNKNOWN])
def test_what_stands_beside_a_reference_counts_as_the_draft_has_it(compiler, draft):
    started = [
        (schema, place, compiler.start(Constraint(kind="json_schema", source=json.dumps(schema))))
        for schema, place in schemas_of(draft)
    ]
    num_refused = 0
    for schema, place, compilation in started:
        try:
            grammar = compilation.result()
        except RequestError:
            num_refused += 1
            continue
        validator = jsonschema.validators.validator_for(schema)(schema)
        for value in map(place, VALUES):
            assert accepts(grammar, json.dumps(value)) == validator.is_valid(value), (schema, value)
    assert num_refused == 0 if draft in OLDER else num_refused < len(started) / 3


BOUNDS = (
    {"minimum": 1, "exclusiveMinimum": True},
    {"minimum": 1, "exclusiveMinimum": False},
    {"maximum": 2.5, "exclusiveMaximum": True, "minimum": -1},
    {"minimum": 1, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": True},
    {"exclusiveMinimum": True},
    {"minimum": 0.5, "exclusiveMinimum": True, "type": "integer"},
)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_exclusive_bound_is_a_flag_in_draft_4_and_a_number_since(compiler, bounds):
    schema = {"$schema": DRAFT4, "type": "number", **bounds}
    grammar = compiler.start(Constraint(kind="json_schema", source=json.dumps(schema))).result()
    validator = jsonschema.validators.validator_for(schema)(schema)
    for value in (-1, 0, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4):
        assert accepts(grammar, json.dumps(value)) == validator.is_valid(value), value
    keyword = next(key for key in bounds if key.startswith("exclusive"))
    for draft in (None, DRAFT6, DRAFT7, NEWEST, UNKNOWN[0]):
        with pytest.raises(GrammarError, match="only allowed in draft 4") as caught:
            check_schema({"items": schema | {"$schema": DRAFT4}, **({} if draft is None else {"$schema": draft})})
        assert caught.value.pointer == f"/items/{keyword}"


@pytest.mark.parametrize("draft", [*UNKNOWN, 7])
def test_draft_that_is_not_known_is_left_out_at_any_depth(draft):
    schema = {"$schema": draft, "properties": {"a": {"$schema": draft, "type": "string"}}}
    assert check_schema(schema) == {"properties": {"a": {"type": "string"}}}


def test_newer_draft_within_an_older_one_is_refused_as_more_counts_there():
    inner = {"$schema": NEWEST, "$ref": "#/definitions/x", "maxLength": 2}
    with pytest.raises(GrammarError, match="newer draft") as caught:
        check_schema({"$schema": DRAFT7, "definitions": {"x": {}}, "properties": {"a": inner}})
    assert caught.value.pointer == "/properties/a/$schema"
    assert check_schema({"$schema": DRAFT7, "items": {"$schema": DRAFT4}})["items"] == {"$schema": DRAFT4}


def test_who_reads_arguments_follows_the_draft_too():
    parameters = {
        "properties": {"a": {"$ref": "#/definitions/x", "type": "integer"}},
        "definitions": {"x": {"type": ["string", "null"]}},
    }
    assert types_of(parameters, "a") == {"integer"}
    assert types_of({"$schema": DRAFT7, **parameters}, "a") == {"string", "null"}
