"""JSON that comes to an end within its tokens: always valid, and left alone while there is room."""

import json
import random

import jsonschema
import pytest

pytest.importorskip("llguidance")

from quire.contracts.constraint import Constraint
from quire.grammar.compiler import GrammarCompiler, Use
from tests.unit.grammar.byte_vocabulary import allowed_ids, make_vocabulary

PIECES = ('"}', '":', '", "', "}}", "]}", "null", "true", "{}", "the", " a", "12", '"name"')
OPEN = {"type": "object"}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "port": {"type": "string", "pattern": "^[a-z]{2,3}-[0-9]{1,}/[0-9]{1,}$"},
        "kind": {"enum": ["alpha", "beta"]},
        "size": {"type": "number"},
    },
    "required": ["name", "tags", "kind"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["value"],
        }
    },
}
SCHEMAS = {"open": OPEN, "person": PERSON, "tree": TREE, "list": {"type": "array", "minItems": 3}, "text": {"type": "string"}}


@pytest.fixture(scope="module")
def compiler():
    vocabulary = make_vocabulary(PIECES, size=300)
    compiler = GrammarCompiler(lambda: vocabulary)
    yield compiler
    compiler.close()


def grammar_of(compiler, schema, max_tokens):
    constraint = Constraint(kind="json_schema", source=json.dumps(schema))
    return compiler.start(constraint, (), Use((), max_tokens)).result()


def draw(matcher, rng, max_tokens):
    """Return the tokens of an output: any that is allowed, text mostly, as of a model that never comes to an end."""
    tokens = []
    while len(tokens) < max_tokens and not matcher.is_complete:
        allowed = sorted(allowed_ids(matcher, 299))
        texts = [token_id for token_id in allowed if 97 <= token_id < 123 or 48 <= token_id < 58]
        tokens.append(rng.choice(texts if texts and rng.random() < 0.9 else allowed))
        assert matcher.advance(tokens[-1]) is None
    return tokens


def text_of(tokens):
    vocabulary = make_vocabulary(PIECES, size=300)
    return b"".join(vocabulary.tokens[token_id] for token_id in tokens).decode(errors="replace")


@pytest.mark.parametrize("name", SCHEMAS)
def test_output_ends_and_is_valid_when_the_model_would_go_on(compiler, name):
    schema, max_tokens = SCHEMAS[name], 120
    grammar, rng = grammar_of(compiler, schema, max_tokens), random.Random(5)
    num_ended = 0
    for _ in range(12):
        matcher = grammar.new_matcher()
        tokens = draw(matcher, rng, max_tokens)
        if matcher.is_complete:
            num_ended += 1
            jsonschema.validate(json.loads(text_of(tokens)), schema)
    assert num_ended >= 9, "few run into a part that needs more than what is left"
    free = grammar_of(compiler, schema, None)
    matchers = [free.new_matcher() for _ in range(6)]
    for matcher in matchers:
        draw(matcher, rng, max_tokens)
    assert not all(matcher.is_complete for matcher in matchers)


def test_nothing_is_changed_while_there_is_room(compiler):
    fitted, free = grammar_of(compiler, PERSON, 4000).new_matcher(), grammar_of(compiler, PERSON, None).new_matcher()
    rng = random.Random(2)
    for _ in range(200):
        allowed = allowed_ids(free, 299)
        assert allowed_ids(fitted, 299) == allowed
        token_id = rng.choice(sorted(allowed))
        fitted.advance(token_id)
        free.advance(token_id)
        if free.is_complete:
            break


def test_matcher_depends_on_its_tokens_alone(compiler):
    grammar, rng = grammar_of(compiler, PERSON, 80), random.Random(11)
    for _ in range(5):
        matcher, tokens = grammar.new_matcher(), []
        for _ in range(150):
            if matcher.is_complete or (tokens and rng.random() < 0.3):
                num_back = rng.randint(1, min(5, len(tokens)))
                assert matcher.retreat(num_back) is None
                del tokens[-num_back:]
            other = grammar.new_matcher()  # as a row that is made anew after a preemption
            for token_id in tokens:
                other.advance(token_id)
            allowed = allowed_ids(matcher, 299)
            assert allowed_ids(other, 299) == allowed == allowed_ids(matcher.fork(), 299)
            assert other.is_complete == matcher.is_complete
            forced = matcher.forced_tokens()
            assert not forced or allowed == {forced[0]}
            tokens.append(rng.choice(sorted(allowed)))
            num_fitting = matcher.num_fitting([tokens[-1], 0])
            assert num_fitting in (0, 1), "a control character fits nowhere"
            assert matcher.advance(tokens[-1]) is None


def test_fitting_is_left_to_the_constraint_when_what_is_needed_does_not_fit(compiler):
    schema = {"type": "array", "minItems": 50}
    matcher = grammar_of(compiler, schema, 20).new_matcher()
    assert len(draw(matcher, random.Random(1), 20)) == 20
    assert not matcher.is_complete
