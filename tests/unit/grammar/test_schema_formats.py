"""Formats of strings: what the backends take too wide is narrowed, or refused where it cannot be."""

import json
import random

import jsonschema_rs
import pytest

pytest.importorskip("llguidance")

from quire.base.errors import RequestError
from quire.grammar.schema_formats import FORMATS
from tests.unit.grammar.byte_vocabulary import accepts, allowed_next, schema_grammar

DAYS = ["2021-02-28", "2020-02-29", "2000-02-29", "2021-12-31"]
NO_DAYS = ["2021-02-29", "1900-02-29", "2021-02-30", "2021-04-31", "2021-13-01", "2021-00-10", "2021-1-1"]
TIMES = ["00:00:00Z", "23:59:59.125Z", "12:30:00+02:00"]
NO_TIMES = ["12:00:60Z", "24:00:00Z", "12:60:00Z", "12:00:00", "12:00:00+24:00"]


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
@pytest.mark.parametrize(
    ("form", "texts", "others"),
    [
        ("date", DAYS, NO_DAYS),
        ("time", TIMES, NO_TIMES),
        (
            "date-time",
            [f"2020-02-29T{time}" for time in TIMES],
            [*(f"{day}T10:00:00Z" for day in NO_DAYS), "2020-02-29T12:00:60Z"],
        ),
    ],
)
def test_days_and_times_are_those_that_there_are(compiler, kind, form, texts, others):
    grammar = schema_grammar(compiler, {"type": "string", "format": form}, kind)
    assert [text for text in texts if not accepts(grammar, json.dumps(text))] == []
    assert [text for text in others if accepts(grammar, json.dumps(text))] == []


@pytest.mark.parametrize(
    "beside", [{"pattern": "^20"}, {"allOf": [{"pattern": "^20"}]}, {"enum": ["2021-02-28", "2021-02-29"]}, {"minLength": 10}]
)
def test_what_stands_beside_a_format_holds_too(compiler, beside):
    grammar = schema_grammar(compiler, {"type": "object", "properties": {"d": {"type": "string", "format": "date", **beside}}})
    assert accepts(grammar, '{"d": "2021-02-28"}')
    assert not accepts(grammar, '{"d": "2021-02-29"}')
    assert accepts(grammar, '{"d": "1999-12-31"}') == (beside == {"minLength": 10})


def test_a_format_says_nothing_of_what_is_no_string(compiler):
    grammar = schema_grammar(compiler, {"type": ["string", "null", "integer"], "format": "date"})
    assert all(accepts(grammar, text) for text in ("null", "7", '"2020-02-29"'))


@pytest.mark.covering
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("form", FORMATS)
def test_sampled_texts_of_a_format_are_valid(compiler, form, backend):
    pytest.importorskip(backend)
    if (form, backend) == ("regex", "xgrammar"):
        with pytest.raises(RequestError, match="format 'regex' cannot be enforced"):
            schema_grammar(compiler, {"type": "string", "format": form}, backend=backend)
        return
    schema, rng = {"type": "string", "format": form}, random.Random(form)
    grammar, validator = (
        schema_grammar(compiler, schema, backend=backend),
        jsonschema_rs.validator_for(schema, validate_formats=True),
    )
    texts = [text for text in (sample(grammar, rng) for _ in range(16)) if text is not None]
    assert len(texts) >= 4
    assert [text for text in texts if not validator.is_valid(json.loads(text))] == []


def sample(grammar, rng, most=300):
    """Return a random output; None where it does not come to an end."""
    matcher, text = grammar.new_matcher(), bytearray()
    num_characters, share = rng.choice((4, 20, 90, 270)), rng.choice((0.3, 0.7, 0.95))
    while len(text) < most:
        allowed, may_end = allowed_next(matcher)
        if may_end:
            return text.decode()
        plain = [byte for byte in allowed if 0x20 <= byte < 0x7F] or allowed
        if ord('"') in plain and (len(text) > num_characters or not text or plain == [ord('"')]):
            plain = [ord('"')]
        alnum = [byte for byte in plain if chr(byte).isalnum()]
        others = [byte for byte in plain if byte not in alnum and (byte != ord('"') or plain == [byte])]
        text.append(rng.choice(alnum if alnum and (rng.random() < share or not others) else others))
        assert matcher.advance(text[-1]) is None
    return None


@pytest.mark.parametrize("form", ["email", "hostname"])
def test_names_may_be_as_long_as_their_standards_let_them(compiler, form):
    grammar = schema_grammar(compiler, {"type": "string", "format": form})
    local = "a" * 64 + "@" if form == "email" else ""
    label = "b" * 63
    most = 254 if form == "email" else 253
    longest = (local + ".".join([label] * 4))[:most]
    assert accepts(grammar, f'"{longest}"')
    for wrong in (
        longest + "b",
        local + label + "b",
        "a" + local + label + ".c" * 100,
        local + "-a",
        local + "a..b",
        local + "ab--c",
    ):
        if wrong != longest:
            assert not accepts(grammar, f'"{wrong}"'), wrong
