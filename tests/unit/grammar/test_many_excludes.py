"""Free text that may have none of several long texts in it."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("llguidance")

from quire.contracts.constraint import Constraint
from tests.unit.grammar.byte_vocabulary import accepts, make_compiler

TRIGGER = "<tool_calls:opensource>"
EXCLUDED = ("<tool_call:opensource>", "<tool_calls>", "<tool_call>", "some words", "other words", "a long sentence.")


@pytest.fixture(scope="module")
def compiler():
    with make_compiler() as compiler:
        yield compiler


def test_states_of_several_excluded_texts_do_not_multiply(compiler):
    tag = {"type": "tag", "begin": TRIGGER, "content": {"type": "const_string", "value": "\nx"}, "end": "</e>"}
    wanted = {"type": "triggered_tags", "triggers": [TRIGGER], "tags": [tag], "excludes": list(EXCLUDED)}
    source = json.dumps({"type": "structural_tag", "format": wanted})
    grammar = compiler.start(Constraint(kind="structural_tag", source=source, param="tag", schema_names=("tag",))).result()
    assert accepts(grammar, f"text {TRIGGER}\nx</e> more words")
    for text in EXCLUDED:
        assert not accepts(grammar, f"before {text} after")
        assert not accepts(grammar, f"before {text} after {TRIGGER}\nx</e>")
