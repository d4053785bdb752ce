"""Patterns: what their classes leave out is not let through."""

import json
import re

import pytest

from quire.base.errors import RequestError
from quire.grammar.errors import GrammarError
from quire.grammar.lark import schema_fields
from quire.grammar.schema_patterns import restrict_pattern
from tests.unit.grammar.byte_vocabulary import accepts, schema_grammar

TEXTS = [
    "",
    "a",
    "q",
    '"',
    "\\",
    "\n",
    "\t",
    "\x01",
    "\x1f",
    "\x7f",
    " ",
    "é",
    "7",
    "]",
    "^",
    "-",
    '"a',
    "a\\",
    "!",
    "_",
    ".",
    ",",
]


def grammar_of(compiler, schema, kind="json_schema"):
    pytest.importorskip("llguidance")
    return schema_grammar(compiler, schema, kind)


def written(text):
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "pattern",
    [
        r'^[^"]*$', r"^[^\\]*$", r'^[^"\\]*$', r'^[^"\\\x00]*$', r'^[^"\n]*$', r'^[^a"]*$', r'^[^\d"]*$', r'^[^\w"]*$',
        r'^[^\s"]*$', r'[^"]', r'^([^"]|\n)*$', r'^(?:\n|[^"\n])+$', r'^[^]"]*$', r'^[]"a]*$', r"^[\x00-!]*$",
        r"^[\x00-\x1f]*$", r"^[\W]*$", r"^\W+$", r"^[\s\S]*$", r"^.*$", r"^[^a]*$", r"^[\x01-!#-\[\]-\x7f]*$", r'^\[[^"]*$',
        r'^[^"\[\]]*$', r'^[a^"]*$', r'^[^\u0022]*$', r"^[^\x5c]*$", r"^(?:[\x00-\x10]|[\x11-\x1f])*$",
    ],
)  # fmt: skip
def test_texts_let_through_are_those_that_python_finds_the_pattern_in(compiler, pattern):
    grammar = grammar_of(compiler, {"type": "string", "pattern": pattern})
    names = {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
    objects = grammar_of(compiler, names)
    for text in TEXTS:
        is_right = re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None
        assert accepts(grammar, written(text)) == is_right, text
        assert accepts(objects, f"{{{written(text)}:null}}") == is_right, text


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^\P{Po}$", "a", '"'),
        (r"^\p{Cc}$", "\n", "\\"),
        (r"^[[:^punct:]]$", "a", '"'),
        (r"^[[:cntrl:]]$", "\n", '"'),
        (r'^[\S\s--"]$', "\\", '"'),
        (r'^[^"&&[^b]]$', "b", '"'),
        (r"^[^\x{22}]$", "\\", '"'),
    ],
)
def test_classes_that_python_does_not_know_are_exact_too(compiler, kind, pattern, right, wrong):
    grammar = grammar_of(compiler, {"$ref": "#/odd", "odd": {"type": "string", "pattern": pattern}}, kind)
    assert accepts(grammar, written(right))
    assert not accepts(grammar, written(wrong))


@pytest.mark.parametrize("pattern", ["abc", "^[a-z]+$", "[^a]", r"^\[\d\]$", r"^[^\x{61}]*$", r"[\w.-]+@\w+", '["]', r"\w"])
def test_pattern_stays_as_it_is_when_no_class_would_be_taken_too_wide(pattern):
    assert restrict_pattern(pattern, "") == pattern


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pattern", [r"^(?x) [^ a ] $", "[a]\x00", r"(?:\x00|[\x01-\x1f])", r"\u0000", r"\x{0}[a]"])
def test_pattern_is_refused_by_its_pointer_when_its_classes_cannot_be_told(compiler, pattern):
    with pytest.raises(GrammarError) as caught:
        schema_fields({"items": {"pattern": pattern}})
    assert caught.value.pointer == "/items/pattern"
    with pytest.raises(RequestError, match=r"\(at /patternProperties/"):
        grammar_of(compiler, {"type": "object", "patternProperties": {pattern: {}}})
