"""JSON that comes to an end within its tokens: always valid, and left alone while there is room."""

import json
import random

import jsonschema
import numpy as np
import pytest

pytest.importorskip("llguidance")

from quire.contracts.constraint import Constraint
from quire.grammar import llguidance_backend
from quire.grammar.compiler import GrammarCompiler, GrammarContext
from quire.grammar.length_bounded import LengthBoundedGrammar
from quire.grammar.masks import DraftedTokens
from quire.grammar.shortest_completion import ShortestCompletions
from tests.unit.grammar.byte_vocabulary import allowed_ids, filled, make_vocabulary

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
    return compiler.start(constraint, (), GrammarContext((), max_tokens)).result()


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


@pytest.mark.one_in(2)
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
    for _ in range(3):
        matcher, tokens = grammar.new_matcher(), []
        for _ in range(80):
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


def test_draft_is_not_cut_where_the_matcher_has_yet_to_look(compiler):
    grammar = grammar_of(compiler, PERSON, 80)
    tokens = draw(grammar.new_matcher(), random.Random(1), 80)
    assert grammar.new_matcher().num_fitting(tokens[:9]) == 9


def test_fitting_is_left_to_the_constraint_when_what_is_needed_does_not_fit(compiler):
    schema = {"type": "array", "minItems": 50}
    matcher = grammar_of(compiler, schema, 20).new_matcher()
    assert len(draw(matcher, random.Random(1), 20)) == 20
    assert not matcher.is_complete


class CountedEndings:
    """ShortestCompletions that count the looks for an end, and those that find a part of the last one."""

    def __init__(self, endings):
        self._endings = endings
        self.num_finds = 0
        self.num_parts = 0

    def __getattr__(self, name):
        return getattr(self._endings, name)

    def find(self, *args):
        self.num_finds += 1
        return self._endings.find(*args)

    def fitting_part(self, *args):
        part = self._endings.fitting_part(*args)
        self.num_parts += part is not None
        return part


def counted_matcher(compiler, schema, max_tokens):
    constraint = Constraint(kind="json_schema", source=json.dumps(schema))
    endings = CountedEndings(compiler.shortest_completions())
    return LengthBoundedGrammar(compiler.start(constraint).result(), endings, max_tokens).new_matcher(), endings


def test_no_end_is_looked_for_again_when_drafts_are_accepted(compiler):
    matcher, endings = counted_matcher(compiler, PERSON, 110)
    tokens = list(b'{"name": "abcdefghijklmnopqrst", "tags": ["ab", "cd"')
    for first in range(0, len(tokens), 6):
        drafted = tokens[first : first + 6]
        masks = filled(matcher, (), DraftedTokens(drafted, range(-1, len(drafted) - 1)))
        assert all(masks.is_known)
        looks = endings.num_finds, endings.num_parts
        for token_id in drafted:  # on the path of the step, where others wait
            assert matcher.advance(token_id) is None
        assert (endings.num_finds, endings.num_parts) == looks
    assert endings.num_finds + endings.num_parts > 3


def test_an_end_is_looked_for_once_when_the_output_writes_its_parts_in_tokens_of_its_own(compiler):
    matcher, endings = counted_matcher(compiler, PERSON, 70)
    for token_id in b'{"name": "abcdef" , "tags": ["a"], "kind": "beta"}':
        filled(matcher)
        assert matcher.advance(token_id) is None
    assert matcher.can_end
    assert endings.num_finds == 1
    assert endings.num_parts > 3


def test_no_end_is_looked_for_on_the_way_to_one(compiler):
    matcher, endings = counted_matcher(compiler, PERSON, 60)
    filled(matcher)
    for token_id in b'{"name": "abcdefgh':
        assert matcher.advance(token_id) is None
        filled(matcher)
    num_finds = endings.num_finds
    while not matcher.is_complete:
        allowed = allowed_ids(matcher, 299)
        look = matcher._looks[-1]
        token_id = look.ending[matcher._count - look.count]
        assert token_id in allowed
        assert matcher.advance(token_id) is None
    assert endings.num_finds == num_finds > 0


def test_the_token_of_an_end_is_the_first_of_its_order(compiler):
    endings, rng = compiler.shortest_completions(), np.random.default_rng(3)
    for place in range(3):
        for share in (0.003, 0.02, 0.5, 1.0):
            for _ in range(20):
                bits = np.zeros(endings.num_words * 32, dtype=np.bool_)
                bits[:299] = rng.random(299) < share
                words = np.packbits(bits, bitorder="little").view(np.int32)[None]
                tried = set(rng.integers(0, 6, rng.integers(0, 4)).tolist())
                allowed = np.flatnonzero(bits)
                others = allowed[~np.isin(endings.kinds[allowed], list(tried))]
                allowed = others if len(others) else allowed
                expected = int(allowed[np.argmin(endings.scores[place][allowed])]) if len(allowed) else None
                assert endings.choose(words, place, tried) == expected


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_an_end_fits_when_the_output_could_take_it_and_end(compiler, backend):
    pytest.importorskip(backend)
    endings, rng = compiler.shortest_completions(), random.Random(8)
    grammar = compiler.start(Constraint(kind="json_schema", source=json.dumps(PERSON), backend=backend)).result()
    outcomes = set()
    for _ in range(8):
        matcher, place = grammar.new_matcher(), 0
        ending = ()
        for _ in range(40):
            allowed = sorted(allowed_ids(matcher, 299))
            if not allowed:
                break
            token_id = rng.choice(allowed)
            matcher.advance(token_id)
            place = endings.after(place, token_id)
            found = endings.find(matcher, place, 200)
            for known in (ending, ending[1:], ending[:-1], () if found is None else found.tokens):
                behind = matcher.fork()
                expected = all(behind.advance(one) is None for one in known) and behind.can_end
                assert endings.fits(known, matcher) == expected
                outcomes.add(expected)
            ending = () if found is None else found.tokens
    assert outcomes == {False, True}


def test_the_shortest_part_of_an_end_that_fits_ends_an_output_which_went_on(compiler):
    endings, rng = compiler.shortest_completions(), random.Random(9)
    grammar = compiler.start(Constraint(kind="json_schema", source=json.dumps(PERSON))).result()
    num_parts = num_pieces = 0
    for _ in range(12):
        matcher, place, ending = grammar.new_matcher(), 0, ()
        for count in range(40):
            allowed = sorted(allowed_ids(matcher, 299))
            if not allowed:
                break
            token_id = rng.choice(allowed)
            matcher.advance(token_id)
            place = endings.after(place, token_id)
            part = endings.fitting_part(ending, matcher, 30)
            shorter = [ending[start:] for start in range(len(ending))]
            if part is None:
                assert not any(endings.fits(one, matcher) for one in shorter if 0 < len(one) <= 30)
            else:
                assert endings.fits(part, matcher)
                assert len(part) <= 30
                assert (part == ()) == matcher.can_end
                assert not any(endings.fits(one, matcher) for one in shorter if 0 < len(one) < len(part))
                assert part[1:] == ending[len(ending) + 1 - len(part) :][: len(part[1:])]
                num_parts += 1
                num_pieces += part[:1] != ending[len(ending) - len(part) :][:1]
            if count % 4 == 0:
                found = endings.find(matcher, place, 200)
                ending = () if found is None else found.tokens
    assert num_parts > num_pieces > 0


def test_a_slow_grammar_is_compiled_once_more_for_an_output_however_often_an_end_is_looked_for(compiler, monkeypatch):
    num_compiled, compile_source = [], llguidance_backend.compile_source

    def counted(*args):
        num_compiled.append(1)
        return compile_source(*args)

    grammar = grammar_of(compiler, {**PERSON, "title": "slow"}, 90)
    monkeypatch.setattr(llguidance_backend, "compile_source", counted)
    monkeypatch.setattr(llguidance_backend, "_SLOW_S", -1.0)
    matchers = [grammar.new_matcher() for _ in range(2)]
    for seed, matcher in enumerate(matchers):
        assert len(draw(matcher, random.Random(seed), 90)) > 40
    assert len(num_compiled) == 2


def test_a_look_goes_on_with_the_tokens_when_there_is_room(compiler):
    """With many properties to come a search fills many masks, a few for each token."""
    names = [f"p{index}" for index in range(40)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "array", "items": {"type": "integer"}} for name in names},
        "required": names[:30],
        "additionalProperties": False,
    }
    constraint = Constraint(kind="json_schema", source=json.dumps(schema))
    fills = []

    class Counted(ShortestCompletions):
        def choose(self, *args):
            fills[-1] += 1
            return super().choose(*args)

    vocabulary = make_vocabulary((*PIECES, *(f'"{name}":[],' for name in names)), size=400)
    compiler = GrammarCompiler(lambda: vocabulary)
    try:
        matcher = LengthBoundedGrammar(compiler.start(constraint).result(), Counted(vocabulary), 400).new_matcher()
        for token_id in b'{"p0":[' + b"1," * 130:
            fills.append(0)
            assert token_id in allowed_ids(matcher, 399)
            assert matcher.advance(token_id) is None
    finally:
        compiler.close()
    assert sum(fills) > 40
    assert max(fills) <= 8


TEXTS = {
    "five-digits": {"type": "string", "pattern": r"\d{5}"},
    "domain-at-end": {"type": "string", "pattern": r"\.com$"},
    "letters": {"type": "string", "pattern": "b+c"},
    "two-patterns": {"allOf": [{"type": "string", "pattern": "[a-z]{4}"}, {"pattern": "[0-9]{4}"}, {"minLength": 12}]},
    "after-anything": {"type": "string", "pattern": r"^.*\.(?:tar|zip)$", "maxLength": 40},
    "date": {"type": "string", "format": "date-time"},
    "email": {"type": "string", "format": "email"},
    "quotes": {"type": "string", "pattern": r'"x\\y"'},
}
MAPS = {
    "names": {"patternProperties": {"^x-[a-z]+$": {"type": "integer"}}, "additionalProperties": False},
    "hard-names": {"patternProperties": {r"\d{4}": {"type": "string"}}, "additionalProperties": False},
    "entries": {
        "additionalProperties": {
            "properties": {"id": {"type": "string", "format": "uuid"}, "v": {"type": "string", "pattern": r"\d-\d"}},
            "required": ["id", "v"],
        }
    },
    "maps": {
        "additionalProperties": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}}
    },
}


@pytest.mark.covering
@pytest.mark.parametrize("max_tokens", [60, 150])
@pytest.mark.parametrize("name", [*TEXTS, *MAPS])
def test_every_output_ends_whatever_pattern_its_strings_have(compiler, name, max_tokens):
    if name in TEXTS:
        schema = {"type": "object", "properties": {"v": TEXTS[name]}, "required": ["v"], "additionalProperties": False}
    else:
        schema = {"type": "object", **MAPS[name]}
    grammar, rng = grammar_of(compiler, schema, max_tokens), random.Random(3)
    for _ in range(4):
        matcher = grammar.new_matcher()
        tokens = draw(matcher, rng, max_tokens)
        assert matcher.can_end, text_of(tokens)
        jsonschema.validate(json.loads(text_of(tokens)), schema)


def test_end_is_found_when_brackets_of_the_same_mask_follow_each_other(compiler):
    inner = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    schema = {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": inner}}
    matcher = grammar_of(compiler, schema, 400).new_matcher()
    vocabulary = make_vocabulary(PIECES, size=300)
    for byte in b'{"k": {"l": {':
        assert matcher.advance(byte) is None
    found = ShortestCompletions(vocabulary).find(matcher.inner, 0, 200)
    assert found is not None
    assert len(found.tokens) <= 12
