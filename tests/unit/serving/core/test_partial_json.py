"""What is complete of cut JSON; the reader that the official clients have is the oracle."""

from __future__ import annotations

import json
import random

import jiter
import pytest

from quire.serving.core.partial_json import is_json, read_partial

VALUE = {
    "a": 'x"\\\n é🙂',
    "b": [1, -2.5e3, True, None, {"c": [], "d": {}}, "{[,]}"],
    "empty": "",
    "deep": {"e": {"f": [[1, [2]], "y"]}},
    "last": False,
}


@pytest.mark.parametrize("text", [json.dumps(VALUE), json.dumps(VALUE, indent=1, ensure_ascii=False), ' {"a" : 1 } '])
def test_every_cut_reads_as_clients_read_it(text):
    for end in range(1, len(text) + 1):
        if text[:end].strip():
            assert read_partial(text[:end]) == jiter.from_json(text[:end].encode(), partial_mode=True)


def test_random_values_cut_anywhere_read_as_clients_read_them():
    rng = random.Random(5)

    def value(depth):
        kind = rng.randrange(6 if depth else 4)
        if kind == 4:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 5:
            return {f"k{index}": value(depth - 1) for index in range(rng.randrange(4))}
        return [rng.randrange(-50, 50), rng.choice([True, False, None]), 'a,"}]{[:\\', rng.random()][kind]

    for _ in range(200):
        text = json.dumps({"k": value(3)})
        cut = text[: rng.randrange(1, len(text) + 1)]
        assert read_partial(cut) == jiter.from_json(cut.encode(), partial_mode=True)


@pytest.mark.parametrize("text", ["", " ", "}", '{"a": 1]', "{1", "nonsense", '"abc'])
def test_what_is_no_json_is_an_empty_object(text):
    assert read_partial(text) in ({}, {"a": 1})
    assert not is_json(text)
