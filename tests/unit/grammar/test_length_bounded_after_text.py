"""JSON after reasoning and in tool calls that is completed within max_tokens."""

import json
import random

import jsonschema
import pytest

pytest.importorskip("llguidance")

from quire.contracts.constraint import Constraint
from quire.grammar.compiler import GrammarCompiler, GrammarContext
from quire.grammar.length_bounded import LengthBoundedMatcher
from quire.grammar.reasoning_prefix import ReasoningPrefix, TextPlaces, text_before
from quire.grammar.special_tokens import SpecialTexts
from tests.unit.grammar.byte_vocabulary import SPECIAL, allowed_ids, make_vocabulary

PIECES = ('"}', '":', '", "', "}}", "</think>", "</", "think>", ">{", ' "', "null", "é", "\n\n", "<think>", "ink", "k>\n{")
SIZE = 300
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["alpha", "beta"]},
    },
    "required": ["name", "tags", "kind"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": PERSON}
GAP = {"type": "regex", "pattern": r"\n{0,2}"}
CALL = {"type": "tag", "begin": '<call>{"name": "it", "arguments": ', "content": JSON, "end": "}</call>"}
CALLS = {"type": "tags_with_separator", "tags": [CALL], "separator": "\n", "at_least_one": True, "stop_after_first": False}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


def either(*elements):
    return {"type": "or", "elements": list(elements)}


def thought(begin, *ends):
    return {"type": "tag", "begin": begin, "content": {"type": "any_text", "excludes": ["<call>"]}, "end": list(ends)}


FORMATS = {
    "begun": sequence(thought("", "</think>"), GAP, JSON),
    "special": sequence(thought("", SPECIAL), GAP, JSON),
    "maybe": either(sequence(thought("<think>", "</think>"), GAP, JSON), JSON),
    "two-ends": sequence(thought("", f"{SPECIAL}</think>", "</think>"), GAP, JSON),
    "calls": CALLS,
    "answer-or-calls": sequence(thought("", "</think>"), GAP, either(JSON, CALLS)),
}


@pytest.fixture(scope="module")
def vocabulary():
    return make_vocabulary(PIECES, size=SIZE)


@pytest.fixture(scope="module")
def compiler(vocabulary):
    compiler = GrammarCompiler(lambda: vocabulary)
    yield compiler
    compiler.close()


def grammar_of(compiler, wanted, max_tokens, backend="auto"):
    source = json.dumps({"type": "structural_tag", "format": wanted})
    return compiler.start(
        Constraint(kind="structural_tag", source=source, backend=backend), (), GrammarContext((), max_tokens)
    ).result()


def draw(matcher, rng, max_tokens):
    """Return the tokens of an output: any that is allowed, text mostly, as of a model that never comes to an end."""
    tokens = []
    while len(tokens) < max_tokens and not matcher.is_complete:
        allowed = sorted(allowed_ids(matcher, SIZE - 1))
        texts = [token_id for token_id in allowed if 97 <= token_id < 123]
        tokens.append(rng.choice(texts if texts and rng.random() < 0.9 else allowed))
        assert matcher.advance(tokens[-1]) is None
    return tokens


def value_of(vocabulary, name, tokens):
    """Return the value after the reasoning, or in the first call."""
    text = b"".join(vocabulary.tokens[token_id] for token_id in tokens).decode(errors="replace")
    if name != "calls" and not (name == "maybe" and text.startswith("{")):
        text = text.split(SPECIAL if name == "special" else "</think>", maxsplit=1)[1].strip()
    if not text.startswith("<call>"):
        return json.loads(text)
    return json.JSONDecoder().raw_decode(text.removeprefix("<call>"))[0]["arguments"]


@pytest.mark.covering
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("name", FORMATS)
def test_output_ends_and_is_valid_when_the_model_would_go_on(compiler, vocabulary, name, backend):
    pytest.importorskip(backend)
    max_tokens, rng = 160, random.Random(4)
    grammar = grammar_of(compiler, FORMATS[name], max_tokens, backend)
    num_ended = 0
    for _ in range(10):
        matcher = grammar.new_matcher()
        tokens = draw(matcher, rng, max_tokens)
        if matcher.can_end:
            num_ended += 1
            jsonschema.validate(value_of(vocabulary, name, tokens), PERSON)
    assert num_ended >= 9
    free = [grammar_of(compiler, FORMATS[name], None, backend).new_matcher() for _ in range(5)]
    for matcher in free:
        draw(matcher, rng, max_tokens)
    assert not all(matcher.can_end for matcher in free)


def test_reasoning_leaves_room_for_an_answer_of_some_length(compiler, vocabulary):
    matcher = grammar_of(compiler, FORMATS["begun"], 400).new_matcher()
    count = 0
    while ord("w") in allowed_ids(matcher, SIZE - 1):  # a model that would think for ever
        matcher.advance(ord("w"))
        count += 1
    needed = len('</think>{"name":"","tags":[],"kind":"beta"}')
    assert needed + 32 <= 400 - count <= 3 * needed
    matcher_of_few = grammar_of(compiler, FORMATS["begun"], needed + 9).new_matcher()
    assert len(allowed_ids(matcher_of_few, SIZE - 1)) == 1, "there is no room for any reasoning"


def test_nothing_is_changed_while_there_is_room(compiler):
    fitted, free = (grammar_of(compiler, FORMATS["begun"], limit).new_matcher() for limit in (4000, None))
    rng = random.Random(2)
    for _ in range(150):
        allowed = allowed_ids(free, SIZE - 1)
        assert allowed_ids(fitted, SIZE - 1) == allowed
        token_id = rng.choice(sorted(allowed))
        fitted.advance(token_id)
        free.advance(token_id)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["begun", "maybe"])
def test_matcher_depends_on_its_tokens_alone(compiler, name):
    grammar, rng = grammar_of(compiler, FORMATS[name], 90), random.Random(11)
    for _ in range(3):
        matcher, tokens = grammar.new_matcher(), []
        for _ in range(70):
            if matcher.is_complete or (tokens and rng.random() < 0.3):
                num_back = rng.randint(1, min(5, len(tokens)))
                assert matcher.retreat(num_back) is None
                del tokens[-num_back:]
            other = grammar.new_matcher()
            for token_id in tokens:
                other.advance(token_id)
            allowed = allowed_ids(matcher, SIZE - 1)
            assert allowed_ids(other, SIZE - 1) == allowed == allowed_ids(matcher.fork(), SIZE - 1)
            if allowed:
                tokens.append(rng.choice(sorted(allowed)))
                assert matcher.advance(tokens[-1]) is None


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (FORMATS["begun"], ReasoningPrefix((), ("</think>",))),
        (FORMATS["maybe"], ReasoningPrefix(("<think>",), ("</think>",))),
        (FORMATS["two-ends"], ReasoningPrefix((), (f"{SPECIAL}</think>", "</think>"))),
        (CALLS, ReasoningPrefix()),
        (either(sequence(thought("<a>", "</a>"), JSON), sequence(thought("<b>", "</b>"), JSON)),
         ReasoningPrefix(("<a>", "<b>"), ("</a>", "</b>"))),
        (sequence(either(thought("<a>", "</a>"), thought("<b>", "</a>")), CALLS), ReasoningPrefix(("<a>", "<b>"), ("</a>",))),
        (either(sequence(thought("", "</a>"), JSON), JSON), None),
        (either(sequence(thought("", "</a>"), JSON), {"type": "any_text"}), None),
        (sequence(thought("", "</a>"), {"type": "regex", "pattern": "a"}), None),
        (sequence(thought("", "x" * 600), JSON), None),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, None),
        ({"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL]}, None),
    ],
)  # fmt: skip
def test_text_before_json_is_found_in_a_structural_tag(wanted, expected):
    assert text_before(json.dumps({"format": wanted})) == expected


def test_user_who_wants_outputs_cut_gets_them(compiler):
    assert isinstance(grammar_of(compiler, FORMATS["begun"], 50).new_matcher(), LengthBoundedMatcher)
    assert not isinstance(grammar_of(compiler, FORMATS["begun"], None).new_matcher(), LengthBoundedMatcher)


def test_place_follows_what_opens_and_closes_the_text_however_it_is_cut_into_tokens(vocabulary):
    ids = {text: token_id for token_id, text in enumerate(vocabulary.tokens)}
    places = TextPlaces(
        ReasoningPrefix(("<think>", "<x"), ("</think>", f"{SPECIAL}!")), vocabulary, SpecialTexts.of(vocabulary)
    )

    def follow(*texts):
        place = places.start
        for at, text in enumerate(texts):
            token = text.encode()
            place, rest = places.after(place, ids[token])
            if place is None:
                return at, rest
        return place, bool(places.closings(place))

    assert follow(*'{"a"') == (0, b"{")
    assert follow(*"<thin", '"') == (5, b'<thin"')
    assert follow("<think>")[1] is True
    assert follow("<", "t", "h", "ink", ">")[1] is True
    assert follow(*"<x", "</think>") == (2, b"")
    assert follow(*"<x", *"</<", "</", "think>") == (6, b"")
    assert follow(*"<x", "</", *"thin", "k>\n{") == (7, b"\n{")
    assert follow(*"<x", SPECIAL, "a", SPECIAL, "!") == (5, b"")
