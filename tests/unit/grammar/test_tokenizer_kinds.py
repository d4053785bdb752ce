"""Constraints with every kind of tokenizer: what comes out is what was asked for, whatever the tokenizer puts before a text."""

import importlib.util
import json
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

pytest.importorskip("llguidance")

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint
from quire.grammar.masks import fill_mask
from quire.grammar.sandbox import SandboxedCompiler
from quire.text.detokenizer import IncrementalDetokenizer
from tests.unit.grammar.tokenizer_kinds import COMPLETE_KINDS, INCOMPLETE, KINDS, compiler_for, make_tokenizer

BACKENDS = [
    "llguidance",
    pytest.param("xgrammar", marks=pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="no xgrammar")),
]
TEXTS = (
    "hello",
    " hello",
    "  hello  world",
    "yes",
    "a\n\tb",
    "é",
    "e\u0301",
    "日本",
    "<s>",
    "</s>x",
    MARKED := "a\u2581b",
    '{"a": 12}',
)
SCHEMA = {
    "type": "object",
    "properties": {"s": {"type": "string", "maxLength": 5}, "n": {"enum": ["é", "日本", " hello"]}},
    "required": ["s", "n"],
    "additionalProperties": False,
}
TAG = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": "<think>", "content": {"type": "regex", "pattern": "[a-z ]{0,9}"}, "end": "</think>"},
        {"type": "json_schema", "json_schema": SCHEMA},
    ],
}
SOURCES = {
    "choice": list(TEXTS),
    "regex": " ?hello( the|\n\t日){2}é{3}",
    "json_schema": SCHEMA,
    "structural_tag": {"type": "structural_tag", "format": TAG},
    "lark": 'start: "é" "日" " hello"',
    "gbnf": 'root ::= "é" "日" " hello"',
}
DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "schemas"
_KEPT = {}


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory):
    """Return a function from a kind to its tokenizer, vocabulary and compiler."""
    closed_later = []

    def get(kind):
        if kind not in _KEPT:
            tokenizer = make_tokenizer(kind, tmp_path_factory.mktemp(kind))
            vocabulary, closing = compiler_for(tokenizer)
            closed_later.append(closing)
            _KEPT[kind] = tokenizer, vocabulary, closing.__enter__()
        return _KEPT[kind]

    yield get
    _KEPT.clear()
    for closing in closed_later:
        closing.__exit__(None, None, None)


def compiled(compiler, name, backend, source=None, **options):
    kind = {"lark": "grammar", "gbnf": "grammar"}.get(name, name)
    source = SOURCES[name] if source is None else source
    written = source if isinstance(source, str) else json.dumps(source)
    return compiler.start(Constraint(kind=kind, source=written, param="here", backend=backend, **options)).result()


def bytes_of(vocabulary, token_ids):
    return b"".join(vocabulary.tokens[token_id] for token_id in token_ids)


def draw(grammar, vocabulary, rng):
    """Return the tokens of an output: what is forced, or any token that is allowed, until it is complete."""
    matcher = grammar.new_matcher()
    token_ids = []
    words = np.zeros(vocabulary.num_mask_words, dtype=np.int32)
    for _ in range(300):
        forced = list(matcher.forced_tokens())
        assert matcher.num_fitting(forced) == len(forced)
        assert fill_mask(matcher, words) is None
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        assert allowed
        if forced:
            assert allowed == forced[:1]
        if vocabulary.end_token_id in allowed:
            return token_ids
        token_id = rng.choice(allowed)
        assert matcher.advance(token_id) is None
        token_ids.append(token_id)
        if matcher.is_complete:
            return token_ids
    raise AssertionError("the output does not end")


def check(name, text):
    if name == "choice":
        assert text in TEXTS
    elif name == "regex":
        assert re.fullmatch(SOURCES["regex"], text)
    elif name in ("lark", "gbnf"):
        assert text == "é日 hello"
    else:
        found = re.fullmatch(r"<think>[a-z ]{0,9}</think>(.*)" if name == "structural_tag" else "(.*)", text, re.DOTALL)
        jsonschema.validate(json.loads(found[1]), SCHEMA)


@pytest.mark.parametrize("kind", COMPLETE_KINDS)
def test_text_is_spelled_byte_for_byte_by_every_kind(of_kind, kind):
    tokenizer, vocabulary, _ = of_kind(kind)
    for text in TEXTS:
        token_ids = vocabulary.encode(text)
        assert bytes_of(vocabulary, token_ids) == text.encode(), text
        assert not set(token_ids) & vocabulary.special_token_ids
        detokenizer = IncrementalDetokenizer(tokenizer, is_exact=True)
        assert detokenizer.append(token_ids) + detokenizer.finish() == text


@pytest.mark.parametrize(
    "kind", ["llama", "metaspace-always", "metaspace-first", "byte-level-prefix", "gguf-llama", "unigram-bytes"]
)
def test_text_is_spelled_in_the_tokens_that_the_model_was_trained_on(of_kind, kind):
    _, vocabulary, _ = of_kind(kind)
    assert [bytes_of(vocabulary, [token_id]) for token_id in vocabulary.encode("hello hello")] == [b"hello", b" hello"]


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", COMPLETE_KINDS)
def test_outputs_match_their_constraint_with_every_kind(of_kind, kind, backend):
    tokenizer, vocabulary, compiler = of_kind(kind)
    rng = random.Random(kind)
    for name in SOURCES.keys() - {"gbnf" if backend == "llguidance" else "lark"}:
        grammar = compiled(compiler, name, backend)
        for _ in range(2):
            token_ids = draw(grammar, vocabulary, rng)
            detokenizer = IncrementalDetokenizer(tokenizer, is_exact=True, after=[1])
            check(name, detokenizer.append(token_ids) + detokenizer.finish())


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_sample_of_schemas_is_enforced_with_every_kind(of_kind, kind, backend):
    if not DATA.is_dir():
        pytest.skip("../shared/data/schemas is not beside the checkout")
    lines = (DATA / "jsonschemabench_100.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:: 3 if backend == "llguidance" else 25]]  # xgrammar compiles for seconds
    with compiler_for(of_kind(kind)[0], SandboxedCompiler())[
        1
    ] as compiler:  # in processes: some take more memory than there is
        counts = [count(of_kind(kind)[1], compiled_or_none(compiler, row["schema"], backend), row["tests"]) for row in rows]
    if kind in COMPLETE_KINDS:
        assert sum(1 for num_valid, _ in counts if num_valid) >= (0.85 if backend == "llguidance" else 0.2) * len(rows)
    assert sum(num_taken for _, num_taken in counts) >= 0.95 * sum(num_valid for num_valid, _ in counts)


def compiled_or_none(compiler, schema, backend):
    try:
        return compiled(compiler, "json_schema", backend, schema)
    except RequestError:
        return None


def count(vocabulary, grammar, tests):
    """Return how many valid instances there are that tokens spell, and how many are accepted; no invalid one is."""
    num_valid = num_taken = 0
    for test in tests if grammar is not None else ():
        text = json.dumps(test["data"], ensure_ascii=False)
        token_ids = vocabulary.encode(text)
        if bytes_of(vocabulary, token_ids) != text.encode():
            assert not vocabulary.spelling.is_complete
            continue
        matcher = grammar.new_matcher()
        is_taken = all(matcher.advance(token_id) is None for token_id in token_ids) and matcher.can_end
        assert test["valid"] or not is_taken
        num_valid += test["valid"]
        num_taken += test["valid"] and is_taken
    return num_valid, num_taken


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("kind", ["llama-no-bytes", "unigram", "byte-level-ascii", "wordpiece"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "source", "text"),
    [
        ("choice", ["yes", "a日本"], "'日' (U+65E5) of the text 'a日本'"),
        ("regex", "日{3}", "'日' (U+65E5) of the text '日日日'"),
        ("regex", "(ye|no日)s", "'日' (U+65E5) of the text"),
        ("regex", "(ye|no[日本])s", "the text that has to come next after 'no'"),
        ("json_schema", {"enum": ["日"]}, "'日' (U+65E5) of the text '\"日\"'"),
        ("json_schema", {"properties": {"日": {"type": "null"}}, "additionalProperties": False}, "'日' (U+65E5)"),
        (
            "structural_tag",
            {"type": "structural_tag", "format": {**TAG["elements"][0], "end": "</日>"}},
            "'日' (U+65E5) of the text '</日>'",
        ),
    ],
    ids=["choice", "forced", "branch", "class", "enum", "name", "tag"],
)
def test_constraint_is_refused_with_the_text_that_no_tokens_spell(of_kind, kind, backend, name, source, text):
    _, _, compiler = of_kind(kind)
    with pytest.raises(RequestError, match="^here: no tokens of this model spell ") as caught:
        compiled(compiler, name, backend, source)
    assert text in str(caught.value)
    assert caught.value.param == "here"


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("kind", INCOMPLETE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_constraint_is_enforced_when_the_vocabulary_lacks_only_what_it_need_not_have(of_kind, kind, backend):
    _, vocabulary, compiler = of_kind(kind)
    rng = random.Random(kind)
    for pattern in ("[a-z日]{3}", "hello( hello)?", "(no|yes)!"):
        text = bytes_of(vocabulary, draw(compiled(compiler, "regex", backend, pattern), vocabulary, rng)).decode()
        assert re.fullmatch(pattern, text)
    text = bytes_of(vocabulary, draw(compiled(compiler, "json_schema", backend, {"type": "boolean"}), vocabulary, rng)).decode()
    assert text in ("true", "false")
