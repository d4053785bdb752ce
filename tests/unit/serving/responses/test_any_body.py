"""Whatever is sent, the real application answers 200 or 400, in the shape of its API."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.anthropic.messages import CountTokensRequest, MessagesRequest
from quire.api.openai.responses import ResponsesRequest
from tests.unit.serving.fakes import TOOL_TEMPLATE, FakeGateway, make_served, text_script
from tests.unit.serving.real_app import running_app

SERVED = make_served(TOOL_TEMPLATE)
USER = [{"role": "user", "content": "hi"}]
ROUTES = {
    "/v1/messages": (MessagesRequest, {"model": "demo", "max_tokens": 5, "messages": USER}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"model": "demo", "messages": USER}),
    "/v1/responses": (ResponsesRequest, {"model": "demo", "input": "hi"}),
}
FIELDS = [
    (path, name)
    for path, (kind, _) in ROUTES.items()
    for name in sorted({*kind.__struct_fields__, *kind.refusals()} - {"model", "previous_response_id"})
]
WORDS = st.sampled_from(["auto", "user", "assistant", "system", "text", "tool_use", "function", "message", "reasoning", "low"])
NAMES = st.sampled_from(["type", "role", "content", "text", "name", "input_schema", "id", "call_id", "output", "effort"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2000) | st.floats(0, 1) | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=10,
)


async def ask_all(bodies):
    async with running_app(FakeGateway(text_script(SERVED.tokenizer, "Hello")), SERVED) as app:
        return [await app.post(path, body) for path, body in bodies]


@settings(max_examples=10, deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from(FIELDS), JSON), min_size=4, max_size=12))
def test_any_value_in_any_field_is_a_200_or_a_400(changes):
    bodies = [(path, {**ROUTES[path][1], name: value}) for (path, name), value in changes]
    for (path, body), answer in zip(bodies, asyncio.run(ask_all(bodies)), strict=True):
        assert answer.status_code in (200, 400), (path, body, answer.text)
        if answer.status_code == 400:
            check_error(path, answer.json())


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("path", list(ROUTES))
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"model": "\\ud800"}'])
def test_damaged_body_is_a_400(path, data):
    (answer,) = asyncio.run(ask_all([(path, data)]))
    assert answer.status_code == 400
    check_error(path, answer.json())


def check_error(path, body):
    if "messages" in path:
        assert body["type"] == "error"
        assert body["request_id"].startswith("req_")
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"]
