"""The other backend: the same languages where it enforces them, a refusal where it would not."""

import itertools
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("xgrammar")

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.xgrammar_tags import count_optional_groups
from tests.unit.grammar.byte_vocabulary import SPECIAL, accepts, allowed_ids, make_vocabulary

SAMPLE = Path(__file__).resolve().parents[4] / "shared" / "data" / "schemas" / "jsonschemabench_100.jsonl"
MAX_CHARACTERS = 7000
"""Of a schema of the sample: most larger ones take longer to compile than is allowed."""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary():
    return make_vocabulary(("ab", "yes", "no"), size=300)


@pytest.fixture(scope="module")
def compiler(vocabulary):
    compiler = GrammarCompiler(lambda: vocabulary)
    yield compiler
    compiler.close()


def start(compiler, kind, source, **options):
    text = source if isinstance(source, str) else json.dumps(source)
    return compiler.start(Constraint(kind=kind, source=text, backend="xgrammar", **options))


def compile_one(compiler, kind, source, **options):
    return start(compiler, kind, source, **options).result()


def test_language_is_the_one_asked_for(compiler, vocabulary):
    cases = [
        ("choice", ["a", "ab", 'c"'], ["a", "ab", 'c"'], ["", "b", "abc"]),
        ("regex", "[ab]{2,3}c", ["abc", "bbbc"], ["ac", "ab"]),
        ("grammar", 'root ::= "x" y\ny ::= [0-9]+', ["x1", "x12"], ["x", "12"]),
        (
            "json_schema",
            PERSON,
            ['{"name":"ab","age":7}', '{"name": "ab", "age": 7}'],
            ['{"name":"abcdef","age":7}', '{"age":1}'],
        ),
        ("json_object", "", ["{}", '{"a": [1]}'], ["[]", "1"]),
    ]
    for kind, source, right, wrong in cases:
        grammar = compile_one(compiler, kind, source)
        assert all(accepts(grammar, text) for text in right), kind
        assert not any(accepts(grammar, text) for text in wrong), kind
    assert 256 not in allowed_ids(compile_one(compiler, "regex", "(.|\\n)*").new_matcher(), vocabulary.size)


@pytest.mark.parametrize("size", range(287, 291))
def test_vocabulary_may_have_any_size(size):
    vocabulary = make_vocabulary(size=size)
    compiler = GrammarCompiler(lambda: vocabulary)
    try:
        assert allowed_ids(compile_one(compiler, "choice", ["a", "b"]).new_matcher(), size) == {ord("a"), ord("b")}
    finally:
        compiler.close()


@pytest.mark.parametrize(("kind", "source"), [("json_schema", {"type": "string"}), ("regex", '".{1,3}"')])
def test_surrogates_are_no_characters(compiler, vocabulary, kind, source):
    matcher = compile_one(compiler, kind, source).new_matcher()
    for byte in b'"\xed':
        assert matcher.advance(byte) is None
    for one in (matcher, matcher.fork()):
        assert allowed_ids(one, vocabulary.size) == set(range(0x80, 0xA0))
    assert matcher.retreat(1) is None
    assert {0xEC, 0xED, 0xEE} < allowed_ids(matcher, vocabulary.size)
    for byte in b"\xee":
        assert matcher.advance(byte) is None
    assert allowed_ids(matcher, vocabulary.size) == set(range(0x80, 0xC0))


def test_forced_text_may_end_within_a_character(compiler):
    grammar = compiler.start(Constraint(kind="regex", source="a[日本]", backend="xgrammar"), ("日",)).result()
    matcher = grammar.new_matcher()
    assert matcher.forced_bytes() in (b"a", b"a\xe6")  # from 0.2.9 on, xgrammar leaves out the begun character
    assert accepts(grammar, "a本")
    for byte in b"a\xe6":
        assert matcher.advance(byte) is None
    assert allowed_ids(matcher, 300) == {"本".encode()[1]}


def test_matcher_is_complete_when_nothing_can_follow(compiler):
    matcher = compile_one(compiler, "choice", ["a", "ab"]).new_matcher()
    states = [matcher.is_complete]
    for letter in "ab":
        assert matcher.advance(ord(letter)) is None
        states.append(matcher.is_complete)
    assert states == [False, False, True]
    assert compile_one(compiler, "choice", ["ab"]).new_matcher().advance(ord("b")) is not None


@pytest.mark.parametrize(
    ("schema", "right"),
    [
        ({"type": "string", "maxLength": 9}, ["", "aé /"]),
        ({"type": "string", "minLength": 1}, ["a", "a b"]),
        ({"type": "string", "format": "json-pointer"}, ["", "/a b/~0é", "/[x]"]),
        ({"type": "string", "format": "relative-json-pointer"}, ["0#", "1/a/~1"]),
        ({"type": "string", "format": "email"}, ["a.b@c.de", "x+{y}@c-d.e"]),
        ({"type": "string", "pattern": "^[^a]+$"}, ["b"]),
    ],
)
def test_texts_of_strings_are_json_whatever_bounds_them(compiler, schema, right):
    values = compile_one(compiler, "json_schema", schema)
    names = compile_one(compiler, "json_schema", {"type": "object", "propertyNames": schema})
    assert all(accepts(values, json.dumps(text, ensure_ascii=False)) for text in right)
    parts = [chr(code) for code in range(128)] + ["\\q", "\\u12", '\\"\\q\\"@a', '\\"\\u\\"@a', '\\"\\\\"\\"@a']
    for text in [f"{begin}{part}" for begin in ("", "a", "/", "0/") for part in parts]:
        for grammar, written in ((values, f'"{text}"'), (names, f'{{"{text}":1}}')):
            if accepts(grammar, written):
                assert json.loads(written) is not None


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("json_schema", {"type": "integer", "multipleOf": 3}, "/multipleOf"),
        ("json_schema", {"type": "object", "required": ["a"]}, "/required"),
        ("json_schema", {"properties": {"a": {"patternProperties": {"^b": {}}}}}, "/properties/a/patternProperties"),
        ("json_schema", {"allOf": [{}, {}]}, "/allOf"),
        ("structural_tag", {"format": {"type": "regex", "pattern": '[^"]'}}, "/format/pattern"),
        ("structural_tag", {"format": {"type": "triggered_tags"}}, "/format/type"),
        ("structural_tag", {"triggers": ["<a>"], "structures": []}, "llguidance"),
        ("structural_tag", {"format": {"type": "json_schema", "json_schema": {}, "style": "python"}}, "/format/style"),
        (
            "structural_tag",
            {"format": {"type": "json_schema", "json_schema": {"not": {"minimum": 1}}}},
            "/format/json_schema/not",
        ),
        ("structural_tag", {"format": {"type": "any_text", "begins_without": "a"}}, "/format/begins_without"),
        (
            "structural_tag",
            {"format": {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": f"a{SPECIAL}"}},
            "special token",
        ),
        ("grammar", 'start: "a"', "GBNF"),
        ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "leads back to itself"),
        ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "no output can begin"),
    ],
)
def test_constraint_is_refused_when_it_would_be_weakened(compiler, kind, source, words):
    with pytest.raises(RequestError, match=words):
        compile_one(compiler, kind, source)


def compile_without(compiler, kind, source, *words):
    text = source if isinstance(source, str) else json.dumps(source)
    constraint = Constraint(kind=kind, source=text, backend="xgrammar", disable_any_whitespace=kind == "json_schema")
    return compiler.start(constraint, words).result()


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("choice", ["yes", "no"]),
        ("json_schema", {"enum": ["yes", "no"]}),
        ("json_schema", {**PERSON, "properties": {**PERSON["properties"], "name": {"enum": ["yes", "no"]}}}),
        ("regex", "a[0-9]{3}(yes|no)"),
    ],
)
def test_constraint_is_refused_when_banned_words_leave_nothing_of_it(compiler, kind, source):
    compile_one(compiler, kind, source)
    with pytest.raises(RequestError, match="bad_words"):
        compile_without(compiler, kind, source, "yes", "no")


def test_values_and_names_that_are_banned_are_not_begun(compiler):
    alternatives = {"anyOf": [{"enum": ["yes", "no"]}, {**PERSON, "required": ["age"]}]}
    grammar = compile_without(compiler, "json_schema", alternatives, "yes", "no", "name")
    assert accepts(grammar, '{"age":7}')
    assert not accepts(grammar, '"yes"')
    matcher = grammar.new_matcher()
    assert allowed_ids(matcher, 257) == {ord("{")}
    assert matcher.advance(ord("{")) is None
    assert matcher.advance(ord('"')) is None
    assert allowed_ids(matcher, 257) == {ord("a")}
    still_open = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}, "b": {"const": 1}}, "required": ["b"]}
    grammar = compile_without(compiler, "json_schema", still_open, "yes", "no")
    assert accepts(grammar, '{"b":1}')
    assert not accepts(grammar, '{"a":1,"b":1}')


def test_backends_stand_side_by_side_in_one_batch(tiny_model):
    llm = LLM(str(tiny_model), max_num_seqs=8, num_kv_blocks=100)
    try:
        params = [
            SamplingParams(
                structured_outputs=StructuredOutputsParams(choice=["yes", "no"], backend=backend), seed=3, max_tokens=9
            )
            for backend in ("llguidance", "xgrammar", "auto")
        ]
        outputs = llm.generate([[1, 2]] * 3, params, use_tqdm=False)
    finally:
        llm.close()
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert outputs[1].outputs[0].text in ("yes", "no")
    assert outputs[1].outputs[0].finish_reason == "stop"


@pytest.mark.slow
@pytest.mark.skipif(not SAMPLE.is_file(), reason="../shared/data/schemas is not beside the checkout")
def test_nothing_invalid_gets_through_in_the_sample(compiler):
    rows = [row for row in map(json.loads, SAMPLE.read_text().splitlines()) if not all(test["valid"] for test in row["tests"])]
    rows = [row for row in rows if len(json.dumps(row["schema"])) < MAX_CHARACTERS]
    started = [start(compiler, "json_schema", row["schema"]) for row in rows]
    mistakes, num_compiled = [], 0
    for row, compilation in zip(rows, started, strict=True):
        try:
            grammar = compilation.result()
        except RequestError:
            continue
        num_compiled += 1
        invalid = [json.dumps(test["data"], ensure_ascii=False) for test in row["tests"] if not test["valid"]]
        mistakes += [(row["id"], text) for text in invalid if accepts(grammar, text)]
    assert mistakes == []
    assert num_compiled >= 40


@pytest.mark.parametrize("pattern", [r"^a(\.0*)?Z$", "^a(b0*|c)?Z$", "^(a(b0*)?)?Z$"])
def test_optional_group_is_taken_as_a_whole(compiler, pattern):
    grammar = compile_one(compiler, "json_schema", {"type": "string", "pattern": pattern})
    for size in range(6):
        for text in map("".join, itertools.product("ab0.cZ"[: 6 if size < 5 else 3], repeat=size)):
            assert accepts(grammar, f'"{text}"') == bool(re.search(pattern, text)), text


def test_question_marks_stay_when_they_are_not_of_a_group():
    assert count_optional_groups(r"^(a[)?]\)?(b0*)?)??c?[^]])?") == r"^(a[)?]\)?(b0*){0,1}){0,1}c?[^]]){0,1}"
