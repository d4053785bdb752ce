"""Formats of strings: what the backends take too wide is narrowed, or refused where it cannot be."""

import json

import pytest

pytest.importorskip("llguidance")

from quire.base.errors import RequestError
from tests.unit.grammar.byte_vocabulary import accepts, schema_grammar

DAYS = ["2021-02-28", "2020-02-29", "2000-02-29", "2021-12-31"]
NO_DAYS = ["2021-02-29", "1900-02-29", "2021-02-30", "2021-04-31", "2021-13-01", "2021-00-10", "2021-1-1"]
TIMES = ["00:00:00Z", "23:59:59.125Z", "12:30:00+02:00"]
NO_TIMES = ["12:00:60Z", "24:00:00Z", "12:60:00Z", "12:00:00", "12:00:00+24:00"]


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


@pytest.mark.parametrize("form", ["date", "time", "date-time", "ipv4", "hostname"])
def test_formats_that_xgrammar_takes_too_wide_are_refused_there(compiler, form):
    pytest.importorskip("xgrammar")
    with pytest.raises(RequestError, match=f"here: .*{form}.* cannot be enforced"):
        schema_grammar(compiler, {"type": "string", "format": form}, backend="xgrammar")
