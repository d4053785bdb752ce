"""What compiled grammars let through, against brute force; what is refused."""

import itertools
import json
import re

import pytest

pytest.importorskip("llguidance")
from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint
from quire.grammar.compiler import GrammarCompiler
from tests.no_threads import no_threads
from tests.unit.grammar.byte_vocabulary import SPECIAL, accepts, allowed_ids, can_end, filled, make_vocabulary

TEXTS = ("ab", "ba", "abb", "bba", "a0", '"a', " a", "yes", "no")


@pytest.fixture(scope="module")
def vocabulary():
    return make_vocabulary(TEXTS, size=300)


@pytest.fixture(scope="module")
def compiler(vocabulary):
    compiler = GrammarCompiler(lambda: vocabulary)
    yield compiler
    compiler.close()


def compile_one(compiler, kind, source, **options):
    text = source if isinstance(source, str) else json.dumps(source)
    return compiler.start(Constraint(kind=kind, source=text, **options)).result()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "pattern",
    ["a*b", "(ab|ba)+", "^ab?0$", "a|^b$", "[^a]{1,3}", "a.b", "(a|ab)(0|b0)", "a{2}", "ab/0?", r"\$a", "b$"],
)
def test_regex_lets_through_what_python_matches(compiler, pattern):
    grammar = compile_one(compiler, "regex", pattern)
    alphabet = "ab0" + "".join(letter for letter in "/$\n" if letter in pattern or (letter, pattern) == ("\n", "a.b"))
    for length in range(5):
        for letters in itertools.product(alphabet, repeat=length):
            text = "".join(letters)
            assert accepts(grammar, text) == bool(re.fullmatch(pattern, text)), (pattern, text)


@pytest.mark.parametrize(
    "words",
    [["yes", "no"], ["a", "ab", "abba", "abb0"], ['"a', "a\\b\n", " a", "/a/"], ["é", "èa", "aé"], ["b"] * 3],
)
def test_masks_are_those_of_brute_force_when_one_of_some_words_is_wanted(compiler, vocabulary, words):
    grammar = compile_one(compiler, "choice", words)
    encoded = {word.encode() for word in words}
    ending = 299
    seen, queue = set(), [(b"", ())]
    while queue:
        prefix, token_ids = queue.pop()
        matcher = grammar.new_matcher()
        assert all(matcher.advance(token_id) is None for token_id in token_ids)
        expected = {
            token_id
            for token_id, token in enumerate(vocabulary.tokens)
            if token and token_id != 256 and any(word.startswith(prefix + token) for word in encoded)
        }
        expected |= {ending} if prefix in encoded else set()
        if expected != {ending}:
            assert allowed_ids(matcher, vocabulary.size, [ending]) == expected, (words, prefix)
        assert matcher.is_complete == (expected == {ending}), (words, prefix)
        seen.add(prefix)
        queue += [(prefix + vocabulary.tokens[t], (*token_ids, t)) for t in expected - {ending}]
    assert encoded <= seen


@pytest.mark.parametrize("source", ['start: "a" B "0"\nB: /b{1,2}/', 'root ::= "a" mid "0"\nmid ::= "b" | "bb"'])
def test_grammar_lets_through_its_language_in_both_notations(compiler, source):
    grammar = compile_one(compiler, "grammar", source)
    for length in range(6):
        for letters in itertools.product("ab0", repeat=length):
            text = "".join(letters)
            assert accepts(grammar, text) == (text in ("ab0", "abb0"))


def test_any_object_is_let_through_when_json_object_is_wanted(compiler):
    grammar = compile_one(compiler, "json_object", "")
    assert all(accepts(grammar, text) for text in ("{}", '{"a": [1, 2.5e3, null], "b": {"c": "é\\n"}}', '{\n  "a": 1\n}'))
    assert not any(accepts(grammar, text) for text in ("", "[]", "1", "{} ", " {}", "{'a': 1}", '{"a": 01}', '{"a":   1}'))


def test_special_tokens_are_no_text_when_the_grammar_does_not_name_them(compiler, vocabulary):
    grammar = compile_one(compiler, "regex", "(?s:.*)")
    assert 256 not in allowed_ids(grammar.new_matcher(), vocabulary.size)
    assert 280 not in allowed_ids(grammar.new_matcher(), vocabulary.size), "a token without a text"
    tag = {"format": {"type": "tag", "begin": f"a{SPECIAL}", "content": {"type": "regex", "pattern": "b"}, "end": SPECIAL}}
    grammar = compile_one(compiler, "structural_tag", tag)
    assert accepts(grammar, [97, 256, 98, 256])
    assert not accepts(grammar, f"a{SPECIAL}b{SPECIAL}")


def test_white_space_is_as_asked_for(compiler):
    schema = {"type": "array", "items": {"type": "integer"}}
    texts = ["[1,2]", "[1, 2]", "[1,\n  2]", "[1,\t2]", "[1,  2]"]

    def found(**options):
        grammar = compile_one(compiler, "json_schema", schema, **options)
        return [accepts(grammar, text) for text in texts]

    assert found() == [True, True, True, False, False]
    assert found(disable_any_whitespace=True) == [True, False, False, False, False]
    assert found(whitespace_pattern=r"\t") == [True, False, False, True, False]


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "(a", "regex"),
        ("regex", "a(?=b)", "look-around"),
        ("grammar", "start: missing", "missing"),
        ("grammar", "root ::= (", "GBNF"),
        ("json_schema", '{"type": "wrong"}', "wrong"),
        ("json_schema", "false", "allows nothing"),
    ],
)
def test_constraint_is_refused_with_its_field_when_it_is_wrong(compiler, kind, source, words):
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        compile_one(compiler, kind, source, param="response_format")
    assert caught.value.param == "response_format"


TEXT = {"type": "const_string", "value": "a"}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({**TEXT, "max_tokens": 3}, "const_string has no 'max_tokens', but value (at /format/max_tokens)"),
        ({"type": "sequence", "elements": [TEXT], "separator": ","}, "(at /format/separator)"),
        ({"type": "or", "elements": [{**TEXT, "a/b": 1}]}, "(at /format/elements/0/a~1b)"),
        ({"type": "tag", "begin": "<", "content": TEXT, "end": ">", "max": 2}, "tag has no 'max', but begin, content, end"),
        (
            {"type": "tags_with_separator", "tags": [TEXT], "separator": ",", "at_least_one": "no"},
            "at_least_one must be true or false, got 'no' (at /format/at_least_one)",
        ),
    ],
)
def test_structural_tag_is_refused_when_it_has_what_would_be_ignored(compiler, wanted, words):
    with pytest.raises(RequestError, match=re.escape(words)):
        compile_one(compiler, "structural_tag", {"format": wanted})


def test_constraint_is_compiled_by_the_next_request_when_there_was_no_thread(vocabulary):
    compiler = GrammarCompiler(lambda: vocabulary)
    with no_threads("quire-grammar"), pytest.raises(RequestError, match="can't start new thread: try again"):
        compile_one(compiler, "regex", "a")
    assert accepts(compile_one(compiler, "regex", "a"), b"a")
    compiler.close()


def test_constraint_is_compiled_once_when_it_comes_again(vocabulary):
    compiler = GrammarCompiler(lambda: vocabulary, max_cached=2)
    try:
        first = compile_one(compiler, "regex", "a")
        assert compile_one(compiler, "regex", "a", param="other") is first
        with pytest.raises(RequestError) as caught:
            compile_one(compiler, "regex", "(", param="one")
        assert caught.value.param == "one"
        with pytest.raises(RequestError) as caught:
            compile_one(compiler, "regex", "(", param="two")
        assert caught.value.param == "two"
        assert compiler.num_compiled == 1
        compile_one(compiler, "regex", "b")
        compile_one(compiler, "regex", "c")
        compile_one(compiler, "regex", "a")
        assert compiler.num_compiled == 4, "what was not wanted for longest has gone"
    finally:
        compiler.close()


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(12)]} for i in range(12)]}),
        ("json_schema", {"enum": [f"{index:07}" for index in range(5000)]}),
        ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}),
        ("json_schema", {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}}),
        ("json_schema", {"type": "string", "minLength": 10**7, "pattern": "^(a|aa)+$"}),
        ("json_schema", {"type": "string", "pattern": "^(.*a){40}.{500}$"}),
        ("regex", "(((a{1,200}){1,200}){1,200}){1,200}"),
        ("regex", "(a?){3000}a{3000}"),
        ("regex", "(" * 1000 + "a" + ")*" * 1000),
        ("grammar", 'start: a\na: a a | a a a | "b"'),
        ("grammar", "start: " + "(" * 2000 + '"a"' + ")" * 2000),
        ("choice", ["a" * length for length in range(1, 340)]),
    ],
    ids=range(12),
)
def test_hostile_constraint_ends_in_a_refusal_or_a_grammar_whose_masks_come(compiler, vocabulary, kind, source):
    try:
        grammar = compile_one(compiler, kind, source)
    except RequestError:
        return
    masks = filled(grammar.new_matcher(), [0])
    assert masks.error is None or "cannot go on" in masks.error


@pytest.mark.parametrize("pattern", ["(a|aa)+(b?){30}c{1000}{1000}", "x(a|aa)+(b?){30}c{1000}{1000}"])
def test_constraint_is_refused_when_one_of_its_ways_becomes_too_complex_soon(compiler, pattern):
    with pytest.raises(RequestError, match="too complex"):
        compile_one(compiler, "regex", pattern)


def test_constraint_is_refused_when_its_first_mask_fails(compiler):
    """Else the request would fail in a step, as if that were the engine's fault."""
    endless = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}
    with pytest.raises(RequestError, match="no output can begin: "):
        compile_one(compiler, "json_schema", endless)


def test_matchers_of_one_grammar_go_separate_ways(compiler):
    grammar = compile_one(compiler, "choice", ["ab", "ba"])
    one, other = grammar.new_matcher(), grammar.new_matcher()
    assert one.advance(ord("a")) is None
    assert other.advance(ord("b")) is None
    assert one.advance(ord("b")) is None
    assert (one.is_complete, other.is_complete) == (True, False)
    assert other.advance(ord("b")) is not None
    assert can_end(one)
