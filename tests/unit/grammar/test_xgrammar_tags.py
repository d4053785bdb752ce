"""Structural tags by xgrammar: the same outputs as by llguidance, whose schemas it takes where that does not."""

import itertools
import json
import random

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("xgrammar")

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint
from quire.grammar.compiler import GrammarCompiler
from tests.unit.grammar.byte_vocabulary import SPECIAL, accepts, allowed_ids, make_vocabulary

SPECIAL_ID = 256
NAMES = {"type": "object", "propertyNames": {"enum": ["a", "b"]}}
GAP = {"type": "regex", "pattern": r"\n{0,2}"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}


@pytest.fixture(scope="module")
def compiler():
    vocabulary = make_vocabulary(("</", "</e>", ">{", "\n\n1", "e>2", "</e>1"))
    compiler = GrammarCompiler(lambda: vocabulary)
    yield compiler
    compiler.close()


def start(compiler, wanted, backend="auto"):
    source = json.dumps({"type": "structural_tag", "format": wanted})
    return compiler.start(Constraint(kind="structural_tag", source=source, backend=backend, param="here"))


def text(*excludes):
    return {"type": "any_text", "excludes": list(excludes)}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(value):
    return {"type": "const_string", "value": value}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


def either(*elements):
    return {"type": "or", "elements": list(elements)}


def tags(*items, **options):
    return {"type": "tags_with_separator", "tags": list(items), "separator": ",", **options}


PIECES = (*map(ord, "<e>/x1,\nf"), SPECIAL_ID, 258, 259, 260, 261, 262)
FORMATS = {
    "reasoning": sequence(tag("", text("<f>"), ["</e>"]), GAP, NUMBER),
    "two-ends": sequence(tag("", text(), ["</e>", "<f>"]), GAP, NUMBER),
    "special-end": sequence(tag("", text("x"), SPECIAL), GAP, NUMBER),
    "special-end-and-text": sequence(tag("", text(), f"{SPECIAL}x"), NUMBER),
    "maybe-reasoning": either(sequence(tag("<e>", text(), "</e>"), GAP, NUMBER), NUMBER),
    "text-before": sequence(text("x"), const("<e>"), NUMBER),
    "text-before-a-tag": sequence(text(), tag("<e>", NUMBER, ""), const("x")),
    "calls": sequence(const("<e>"), tags(tag("x", NUMBER, ""), tag("f", NUMBER, ">"), at_least_one=True), const(">")),
    "one-call-or-none": sequence(tags(tag("x", NUMBER, ""), stop_after_first=True), const("/")),
    "begun-calls": tags(tag("x", NUMBER, ""), tag("f", NUMBER, ""), begin=SPECIAL),
    "nothing": either(const(""), const(SPECIAL), const("x1")),
}


def texts_of(name):
    """Return outputs, short ones and random ones, as token ids; many of them nearly fit."""
    noise = random.Random(name)
    short = [list(ids) for length in range(4) for ids in itertools.product(PIECES, repeat=length)]
    parts = [b"<e>", b"</e>", b"<f>", b"\n", b"1", b"x", b"<e>x1", b"f1", b">", b",", b"/", b"\xff", [SPECIAL_ID], [261], [260]]
    return short + [[token for part in noise.choices(parts, k=noise.randint(1, 7)) for token in part] for _ in range(1500)]


@pytest.mark.parametrize("name", FORMATS)
def test_outputs_are_those_of_the_other_backend(compiler, name):
    one, other = (start(compiler, FORMATS[name], backend).result() for backend in ("llguidance", "xgrammar"))
    num_taken = 0
    for ids in texts_of(name):
        is_taken = accepts(other, ids)
        assert accepts(one, ids) == is_taken, bytes(token if token < 256 else 63 for token in ids)
        num_taken += is_taken
    assert num_taken > 0


@pytest.mark.parametrize("end", ["</e>", SPECIAL])
def test_schema_behind_reasoning_is_sent_on_when_only_the_other_backend_enforces_it(compiler, end):
    before = compiler.num_sent_on
    answer = {"type": "json_schema", "json_schema": NAMES}
    grammar = start(compiler, sequence(tag("", text(), end), GAP, answer)).result()
    assert compiler.num_sent_on == before + 1
    ids = [SPECIAL_ID] if end == SPECIAL else list(end.encode())
    for answer, is_right in (('{"a": 1}', True), ('{"c": 1}', False), ("", False)):
        assert accepts(grammar, [*b'{"c": 1}', *ids, *answer.encode()]) is is_right


def test_special_token_comes_only_where_the_grammar_names_it(compiler):
    grammar = start(compiler, sequence(tag("", text(), SPECIAL), NUMBER), "xgrammar").result()
    matcher = grammar.new_matcher()
    assert SPECIAL_ID in allowed_ids(matcher, 263)
    assert 0xFF not in allowed_ids(matcher, 263)
    matcher.advance(SPECIAL_ID)
    assert SPECIAL_ID not in allowed_ids(matcher, 263)


def test_tag_is_refused_as_before_when_no_backend_enforces_all_of_it(compiler):
    before = compiler.num_sent_on
    answer = {"type": "json_schema", "json_schema": NAMES}
    triggered = {"type": "triggered_tags", "triggers": ["<e>"], "tags": [tag("<e>", answer, "")]}
    for wanted in (triggered, sequence(answer, {"type": "json_schema", "json_schema": {"uniqueItems": True}})):
        with pytest.raises(RequestError, match="here: propertyNames cannot be enforced.*/json_schema/propertyNames"):
            start(compiler, wanted).result()
    assert compiler.num_sent_on == before
