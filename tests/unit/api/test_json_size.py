"""Bodies that are refused for their size before they are decoded, and how that size is counted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api import json_size
from quire.api.decode import BodyError, decode_body
from quire.api.json_size import check_size
from quire.api.openai.chat import ChatCompletionRequest
from quire.api.openai.completions import CompletionRequest
from quire.api.openai.tokenize import DetokenizeRequest

BODY = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('"\\,[{]} a\nü'), max_size=12),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=30,
)


def counts_of(value):
    """Return how many strings, containers and separators a value has."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    items = list(value) if isinstance(value, list) else [part for pair in value.items() for part in pair]
    parts = [counts_of(item) for item in items]
    strings, containers, values = (sum(column) for column in zip((0, 0, 0), *parts, strict=True))
    return strings, containers + 1, values + max(len(value) - 1, 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("part_bytes", [7, 1 << 20])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(BODY, st.booleans())
def test_limits_count_what_is_outside_of_strings(part_bytes, value, is_ascii):
    data = json.dumps(value, ensure_ascii=is_ascii).encode()
    names = ("MAX_STRINGS", "MAX_CONTAINERS", "MAX_VALUES")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "_PART_BYTES", part_bytes)
        for name, count in zip(names, counts_of(value), strict=True):
            patch.setattr(json_size, name, count)
        check_size(data)
        for name, count in zip(names, counts_of(value), strict=True):
            if count:
                patch.setattr(json_size, name, count - 1)
                with pytest.raises(ValueError, match=f"more than {count - 1} "):
                    check_size(data)
                patch.setattr(json_size, name, count)


@pytest.mark.parametrize("data", [b"", b'"', b'{"a', b'"\\', b'"a\\"', b"\\", b'"\\\\"', b"[" * 50])
def test_what_is_no_json_is_passed(data):
    check_size(data)


MANY = {
    "ids": (CompletionRequest, b'{"model":"m","prompt":[' + b"1," * 1_100_000 + b"1]}"),
    "texts": (CompletionRequest, b'{"model":"m","prompt":[' + b'"",' * 210_000 + b'""]}'),
    "tokens": (DetokenizeRequest, b'{"tokens":[' + b"1," * 1_100_000 + b"1]}"),
    "variables": (ChatCompletionRequest, b'{"model":"m","chat_template_kwargs":{"a":[' + b"[]," * 110_000 + b"[]]}}"),
    "fields": (ChatCompletionRequest, b"{" + b",".join(b'"a%d":1' % n for n in range(210_000)) + b"}"),
}


@pytest.mark.parametrize(("kind", "data"), MANY.values(), ids=MANY)
def test_body_is_refused_when_there_is_more_in_it_than_any_request_has(kind, data):
    with pytest.raises(BodyError, match="the body has more than [0-9]+ (strings|values|lists)"):
        decode_body(data, kind)


def test_long_text_is_no_matter():
    text = 'say "[{,' * 100_000
    body, _ = decode_body(json.dumps({"model": "m", "prompt": text}).encode(), CompletionRequest)
    assert body.prompt == text
