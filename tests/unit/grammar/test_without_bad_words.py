"""Constraints with banned phrases: what would be a dead end is not begun."""

import json
import random
import re
from itertools import count

import pytest

pytest.importorskip("llguidance")

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint
from quire.grammar.bad_words import can_continue, excluding, without_bad_words
from tests.unit.grammar.byte_vocabulary import accepts, allowed_ids


def closed(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def schema(value):
    return Constraint(kind="json_schema", source=json.dumps(value), disable_any_whitespace=True)


def choice(*texts):
    return Constraint(kind="choice", source=json.dumps(texts))


def regex(source):
    return Constraint(kind="regex", source=source)


def lark(body):
    return Constraint(kind="grammar", source=f"start: {body}\n")


BANNED = {"enum": ["yes", "no"]}
IMPOSSIBLE = (
    closed(a=BANNED),
    closed(a={"enum": [12, 120]}),
    closed(a={"const": {"k": [1, "yes"]}}),
    closed(a={"type": "boolean"}, notes={"type": "integer"}),
    closed(a={"type": "string"}, b=closed(c=BANNED)),
    closed(a={"anyOf": [BANNED, closed(b=BANNED)]}),
    closed(a={"allOf": [{"type": "string"}, BANNED]}),
    closed(a={"type": "array", "items": BANNED, "minItems": 1}),
    {"$ref": "#/$defs/a", "$defs": {"a": closed(b={"$ref": "#/$defs/b"}), "b": closed(c=BANNED)}},
    {"type": "object", "required": ["yes"]},
)


@pytest.mark.parametrize(
    ("constraint", "words", "first"),
    [
        (choice("yes", "no"), ("yes",), "n"),
        (choice("yes1", "yes2", "no"), ("es1", "es2"), "n"),
        (regex("yes|no"), (" es",), "n"),
        (regex("(aab|cad)z"), ("bz",), "c"),
        (regex("a[0-9]{3,40}(bad|ba)|c"), ("ba",), "c"),
        (regex("a.*/bad|c"), ("/bad",), "c"),
        (regex("(yes|no)[ab]"), ("esa", "esb"), "n"),
        (lark('("yes" | "no") /[ab]/'), ("ea", "esa", "esb"), "n"),
        (lark('"b" /[ab]/ /[cd]/ | "c"'), ("bac", "bad", "bbc", "bbd"), "c"),
        (lark("A | B\nA: /x[0-9]{9}bad/\nB: /y[0-9]+/"), ("bad",), "y"),
        (lark('A "."\nA: (B | C) "ad" // comment\n  | "y"\nB: /x[0-9]{9}b/\n | /z[0-9]{9}ba/\nC: "cb"'), ("b",), "y"),
        (schema({"anyOf": [closed(ab={}), {"const": 4}]}), ("ab",), "4"),
        (schema({"enum": [{"a": ["yes"]}, 17, 5]}), ("yes", "17"), "5"),
        (schema({"enum": ["yes", 3]}), ("yes",), "3"),
        (schema({"anyOf": [{"const": "a"}, {"const": 4}]}), ("a",), "4"),
        (schema({"enum": ['a"b', 5]}), ('\\"b',), "5"),
        (schema({"anyOf": [{"type": "string", "pattern": "^[0-9]{9}bad$"}, {"const": 4}]}), ("bad",), "4"),
    ],
    ids=str,
)
def test_token_that_leads_to_a_phrase_alone_is_not_allowed(compiler, constraint, words, first):
    matcher = compiler.start(constraint, words).result().new_matcher()
    assert allowed_ids(matcher, 257) == {ord(first)}


def test_expression_is_left_whole_when_it_could_not_go_on_without_phrases(compiler, monkeypatch):
    monkeypatch.setattr("quire.grammar.compiler.can_continue", lambda grammar: False)
    matcher = compiler.start(regex("a[0-9]{9}(bad|ba)|d"), ("ba",)).result().new_matcher()
    assert allowed_ids(matcher, 257) == {ord("a"), ord("d")}


def test_grammar_cannot_go_on_when_a_mask_cannot_be_filled(compiler, monkeypatch):
    grammar = compiler.start(regex("[ab]{3}|c*")).result()
    assert can_continue(grammar)
    masks = type(grammar.new_matcher().source)
    fill, num_filled = masks.fill, count()

    def fill_some(self, matcher, words):
        return "it is too complex" if next(num_filled) == 2 else fill(self, matcher, words)

    monkeypatch.setattr(masks, "fill", fill_some)
    assert not can_continue(grammar)
    assert can_continue(grammar)


def test_expression_is_itself_when_phrases_are_many_or_forced_by_nothing():
    for source, phrases in (
        ("[a-z]{3,9}[^0-9]", ["bad"]),
        ("a{3}", ["3"]),
        ("bad", [f"{number}d" for number in range(9)]),
        ("bad", ["d" * 200]),
    ):
        assert without_bad_words(regex(source), phrases) == regex(source)


def test_property_is_not_begun_when_its_name_is_banned(compiler):
    wanted = schema(
        {"type": "object", "properties": {"ab": {}, "cd": {"const": 1}}, "additionalProperties": False, "required": []}
    )
    matcher = compiler.start(wanted, ("ab",)).result().new_matcher()
    for letter in '{"':
        assert matcher.advance(ord(letter)) is None
    assert allowed_ids(matcher, 257) == {ord("c")}


def test_alternative_of_a_structural_tag_is_not_begun_when_it_is_banned(compiler):
    texts = [{"type": "const_string", "value": text} for text in ("yes1", "yes2", "no")]
    tag = {"type": "structural_tag", "format": {"type": "or", "elements": texts}}
    wanted = Constraint(kind="structural_tag", source=json.dumps(tag))
    matcher = compiler.start(wanted, ("yes",)).result().new_matcher()
    assert allowed_ids(matcher, 257) == {ord("n")}


@pytest.mark.parametrize("phrase", ["bad", "a", "aa", "abab", "aabaaab", "abcabcabd", "mississippi", "no \n. d", "*]\\^"])
def test_texts_without_a_phrase_are_those_of_an_expression(phrase):
    written = excluding(phrase)
    assert len(written) < 1000
    expression = re.compile(re.sub(r"\\x\{([0-9A-F]+)\}", lambda found: re.escape(chr(int(found[1], 16))), written))
    rng = random.Random(phrase)
    for _ in range(2000):
        text = "".join(rng.choices(f"{phrase}z", k=rng.randrange(12)))
        at = rng.randrange(len(text) + 1)
        text = text[:at] + phrase[: rng.randrange(len(phrase) + 1)] + text[at:]
        assert (expression.fullmatch(text) is not None) == (phrase not in text)


def test_there_is_no_expression_of_texts_without_a_phrase_that_would_be_long():
    assert excluding("phrase " * 20) is None


def test_string_of_a_pattern_is_not_begun_where_it_would_run_into_a_phrase(compiler):
    wanted = schema(closed(a={"type": "string", "pattern": "x[0-9]{3}bad$|^y[0-9]{3}ok$", "maxLength": 9}))
    matcher = compiler.start(wanted, ("bad",)).result().new_matcher()
    for letter in '{"a":"':
        assert matcher.advance(ord(letter)) is None
    assert allowed_ids(matcher, 257) == {ord("y")}


@pytest.mark.parametrize("backend", ["auto", "xgrammar"])
def test_expression_of_a_structural_tag_is_not_begun_where_it_would_run_into_a_phrase(compiler, backend):
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    tag = {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "x[0-9]{3}bad|y[0-9]{3}ok"}, "end": ">"}
    source = json.dumps({"type": "structural_tag", "format": tag})
    wanted = Constraint(kind="structural_tag", source=source, backend=backend)
    matcher = compiler.start(wanted, ("bad",)).result().new_matcher()
    assert matcher.advance(ord("<")) is None
    assert allowed_ids(matcher, 257) == ({ord("y")} if backend == "auto" else {ord("x"), ord("y")})


def test_matcher_stands_where_it_stood_after_it_has_looked_ahead(compiler):
    grammar = compiler.start(lark('("a" /b{0,3}c/ | "ad") "e"'), ("ce", "bc", "dd")).result()
    matcher, other = grammar.new_matcher(), grammar.new_matcher()
    for letter in "ade":
        assert ord(letter) in allowed_ids(matcher, 257)
        matcher.advance(ord(letter))
    assert matcher.is_complete
    matcher.retreat(2)
    other.advance(ord("a"))
    assert allowed_ids(matcher, 257) == allowed_ids(other, 257)


@pytest.mark.parametrize(
    ("wanted", "kept", "lost"),
    [
        ({**closed(a={"const": 1}, yes={}), "required": ["a"]}, ['{"a":1}'], ['{"a":1,"yes":2}']),
        ({"type": ["object", "null"], "properties": {"a": BANNED}, "required": ["a"]}, ["null"], ['{"a":1}']),
        ({"properties": {"a": BANNED}, "required": ["a"]}, ["1", "[{}]", '"a"', "null", "true", "0.5"], ['{"a":1}']),
        ({"type": "object", "properties": {"a": BANNED}}, ['{"b":1}', "{}"], ['{"a":1}', '{"a":"yes"}']),
        ({"type": "array", "items": BANNED}, ["[]"], ['["yes"]', "[1]"]),
        ({"type": "array", "prefixItems": [{"const": 1}, BANNED]}, ["[]", "[1]"], ["[1,1]", "[1,"]),
        ({"oneOf": [{"const": "yes"}, {"const": 7}]}, ["7"], ['"yes"']),
    ],
    ids=str,
)
def test_schema_keeps_what_can_be_written(compiler, wanted, kept, lost):
    grammar = compiler.start(schema(wanted), ("yes", "no")).result()
    assert all(accepts(grammar, text) for text in kept)
    assert not any(accepts(grammar, text) for text in lost)


def test_schema_that_is_no_schema_is_refused_as_without_phrases(compiler):
    for wrong in ({"minItems": "3", "items": BANNED}, {"properties": [], "required": 1}, {"anyOf": {}}, {"type": 3}):
        with pytest.raises(RequestError) as plain:
            compiler.start(schema(wrong)).result()
        with pytest.raises(RequestError) as caught:
            compiler.start(schema(wrong), ("yes", "no")).result()
        assert str(caught.value) == str(plain.value)


def test_nothing_but_what_is_banned_is_lost(compiler):
    wanted = schema(closed(a={"enum": ["yes", "no", "yesterday"]}, b={"const": {"yes": 1}}))
    grammar = compiler.start(wanted, ("day",)).result()
    assert accepts(grammar, '{"a":"yes","b":{"yes":1}}')
    assert accepts(grammar, '{"a":"no","b":{"yes":1}}')
    assert not accepts(grammar, '{"a":"yesterday","b":{"yes":1}}')


@pytest.mark.parametrize(
    ("constraint", "words", "message"),
    [
        (choice("yes", "yesno"), ("yes",), "each of the texts has one of bad_words in it"),
        *[(schema(impossible), ("yes", "no", "12"), "bad_words leave nothing of it") for impossible in IMPOSSIBLE],
        (regex("a[0-9]{3}(bad|ba)"), ("ba",), "bad_words leave nothing of it"),
        (regex("[a-z]{20}end"), ("end",), "bad_words leave nothing of it"),
    ],
    ids=lambda value: getattr(value, "source", ""),
)
def test_constraint_is_refused_when_nothing_is_left_of_it(compiler, constraint, words, message):
    with pytest.raises(RequestError, match=message):
        compiler.start(constraint, words).result()


def test_constraint_is_itself_when_nothing_is_banned_in_it():
    part = closed(
        a={"$ref": "#/$defs/a"}, d={"type": "array", "items": {"type": "integer"}, "minItems": 1}, c={"enum": [1, True]}
    )
    whole = schema({**part, "$defs": {"a": {"anyOf": [{"const": "a"}, {"$ref": "#/$defs/a"}]}}})
    for constraint in (choice("a"), schema({"enum": ["a"]}), whole, regex("a"), Constraint(kind="json_object")):
        assert without_bad_words(constraint, ["b"]) is constraint
