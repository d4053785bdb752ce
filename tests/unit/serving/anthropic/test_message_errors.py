"""What is not supported is refused, and what fails is told, in the shape of the API and the classes of its client."""

from __future__ import annotations

import asyncio
import hashlib
import json

import anthropic
import httpx2
import pytest

from quire.serving.config import ApiKey, ServerConfig
from quire.serving.engine_client.messages import ChoiceDelta
from quire.serving.errors import ApiError, engine_unavailable, overloaded
from tests.unit.serving.anthropic.asking_messages import (
    PLAIN,
    TOOL,
    USER,
    ask,
    run,
    script,
    with_client,
)
from tests.unit.serving.fakes import FakeGateway
from tests.unit.serving.real_app import BASE, events_of, names_of, running_app

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "nobody"}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, ["max_tokens"]),
        ({"max_tokens": 0}, ["max_tokens"]),
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["messages[0].role"]),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, ["messages[0].content[0].type", "image", "text"]),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, ["document", "text"]),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, ["messages[0].content[0].tool_use_id", "nobody"]),
        ({"messages": [{"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}]}, ["content[0].content[0].type"]),
        ({"messages": [*USER, {"role": "assistant", "content": [USE]}]}, ["messages[1]", "tool_result"]),
        ({"tools": [TOOL, TOOL]}, ["tools", "'f'"]),
        ({"tools": [{"type": "code_execution_20250522", "name": "x"}]}, ["tools", "code_execution_20250522"]),
        ({"tools": [{"name": "f"}]}, ["tools[0].input_schema", "required"]),
        (
            {"tools": [{"type": "web_search_20250305", "name": "s"}], "tool_choice": {"type": "tool", "name": "s"}},
            ["tool_choice", "needs tools"],
        ),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, ["context_management"]),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, ["context_management", "keep"]),
        ({"tool_choice": {"type": "any"}}, ["tool_choice", "needs tools"]),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, ["tool_choice.name", "required"]),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, ["tool_choice", "'g'"]),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, ["tool_choice.type"]),
        ({"output_config": {"format": {"type": "json_schema"}}}, ["output_config.format.schema", "required"]),
        (
            {
                "messages": [*USER, {"role": "assistant", "content": "{"}],
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            ["output_config.format", "assistant"],
        ),
        ({"output_format": {"type": "json_schema", "schema": {}}}, ["output_format", "output_config.format"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, ["budget_tokens"]),
        ({"temperature": 1.5}, ["temperature"]),
        ({"container": "c"}, ["container"]),
        ({"mcp_servers": [{"authorization_token": "secret"}]}, ["mcp_servers"]),
        ({"inference_geo": "us"}, ["inference_geo"]),
        ({"speed": "slow"}, ["speed"]),
        ({"stop_sequences": [""]}, ["stop_sequences[0]"]),
    ],
)
def test_what_is_not_supported_is_refused_in_the_shape_of_the_api(body, words):
    answer, gateway = ask(script("Hi"), **body)
    found = answer.json()
    assert answer.status_code == 400
    assert found["type"] == "error"
    assert found["request_id"] == answer.headers["request-id"]
    assert found["error"]["type"] == "invalid_request_error"
    assert all(word in found["error"]["message"] for word in words)
    assert "secret" not in answer.text
    assert gateway.jobs == []


def test_prompt_that_is_too_long_is_refused():
    def refuse(job):
        return [ApiError(400, "the prompt is too long for max_model_len", code="context_length_exceeded", param="prompt")]

    answer, _ = ask(refuse, messages=[{"role": "user", "content": "a b c"}])
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (overloaded("busy", 3.0), anthropic.InternalServerError),
        (engine_unavailable("loading"), anthropic.InternalServerError),
        (ApiError(429, "slow down", code="rate_limit_exceeded", retry_after_s=2), anthropic.RateLimitError),
        (ApiError(400, "no", param="x"), anthropic.BadRequestError),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_client_raises_its_class_for_an_error_before_the_first_token(error, kind, is_stream):
    async def use(client):
        with pytest.raises(kind) as caught:
            await client.messages.create(model="demo", max_tokens=10, messages=USER, stream=is_stream)
        assert caught.value.request_id.startswith("req_")
        assert caught.value.status_code == (529 if error.code == "overloaded" else error.status)
        assert caught.value.response.headers.get("retry-after") == error.headers().get("retry-after")
        assert caught.value.body["error"]["message"].endswith(error.message)

    run(with_client(lambda job: [error], use))


def test_client_raises_for_a_model_that_is_not_served_and_a_key_that_is_not_known():
    async def missing(client):
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", max_tokens=10, messages=USER)

    async def unknown(client):
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(model="demo", max_tokens=10, messages=USER)
        assert caught.value.body["error"]["type"] == "authentication_error"

    run(with_client(script("Hi"), missing))
    config = ServerConfig(api_keys=(ApiKey("ann", hashlib.sha256(b"ann").digest()),))
    run(with_client(script("Hi"), unknown, config=config))


def test_error_in_mid_stream_is_an_event():
    def play(job):
        return [[ChoiceDelta(0, "Hi", [5])], overloaded("the engine is gone", 1.0)]

    answer, _ = ask(play, served=PLAIN, stream=True)
    assert names_of(answer.text)[-2:] == ["content_block_delta", "error"]
    assert events_of(answer.text)[-1][1]["error"] == {"type": "overloaded_error", "message": "the engine is gone"}

    async def use(client):
        with pytest.raises(anthropic.APIStatusError, match="the engine is gone"):
            async with client.messages.stream(model="demo", max_tokens=10, messages=USER) as events:
                await events.get_final_message()

    run(with_client(play, use, served=PLAIN))


def test_client_that_goes_aborts_the_request():
    async def work():
        gateway = FakeGateway(script("Hello there you all"), blocks_after=2)
        async with running_app(gateway, PLAIN) as app:
            messages, gone = [], asyncio.Event()
            body = json.dumps({"model": "demo", "max_tokens": 9, "messages": USER, "stream": True}).encode()
            parts = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive():
                if parts:
                    return parts.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message):
                messages.append(message)
                if len(messages) == 3:
                    gone.set()

            request = httpx2.Request("POST", f"{BASE}/v1/messages", content=body, headers={"content-type": "application/json"})
            scope = {
                "type": "http",
                "asgi": {"version": "3.0"},
                "http_version": "1.1",
                "method": "POST",
                "path": "/v1/messages",
                "raw_path": b"/v1/messages",
                "root_path": "",
                "scheme": "http",
                "query_string": b"",
                "headers": [(key.lower(), value) for key, value in request.headers.raw],
                "client": ("127.0.0.1", 1),
                "server": ("127.0.0.1", 80),
            }
            await app.transport.app(scope, receive, send)
        assert gateway.streams[0].aborts == ["cancelled"]
        assert gateway.streams[0].is_left

    run(work())


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_wrong_method_is_told_in_the_shape_of_the_api(path):
    async def work():
        async with running_app(FakeGateway(script("Hi")), PLAIN) as app, app.http() as client:
            return await client.get(path)

    answer = run(work())
    assert answer.status_code == 405
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == answer.headers["request-id"]
    assert answer.headers["allow"] == "POST"
