"""What is not supported is refused, and what fails is told, before and in mid-stream."""

from __future__ import annotations

import asyncio

import openai
import pytest

from quire.serving.config import ServerConfig
from quire.serving.engine_client.messages import ChoiceDelta
from quire.serving.errors import ApiError, overloaded
from tests.unit.serving.fakes import FakeGateway
from tests.unit.serving.real_app import events_of, names_of, running_app
from tests.unit.serving.responses.asking_responses import (
    PLAIN,
    TOOL,
    ask,
    run,
    script,
    with_client,
)

IMAGE = {"type": "input_image", "image_url": "http://x"}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"input": None}, None, "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content"),
        ({"input": [{"role": "boss", "content": "x"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "invalid_value", "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]},
            "invalid_value",
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "computer_call"}]}, "invalid_value", "input[0].type"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "missing_required_parameter",
            "input[0].call_id",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}, "invalid_value", "input[0].call_id"),
        ({"tools": [{"type": "code_interpreter"}]}, "unsupported_value", "tools[0].type"),
        ({"tools": [{"type": "functoin", "name": "f"}]}, "unsupported_value", "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "invalid_value", "tools[0].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tools": [{"type": "custom", "name": "f"}, {**TOOL, "name": "f"}]}, "invalid_value", "tools[1].name"),
        (
            {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]},
            "missing_required_parameter",
            "input[0].input",
        ),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "x", "output": "1"}]}, "invalid_value", "input[0].call_id"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "unsupported_value", "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "invalid_value", "tools[1].name"),
        ({"tools": [{**TOOL, "strict": 1}]}, "invalid_value", "tools[0].strict"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": "some"}, "invalid_value", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "invalid_value", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search_preview"}}, "unsupported_parameter", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, None, "tool_choice.tools"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "missing_required_parameter", "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "unsupported_parameter", "text"),
        ({"text": {"verbosity": "low"}}, "unsupported_parameter", "text"),
        ({"background": True, "store": False}, "invalid_value", "background"),
        ({"background": True, "stream": True}, "invalid_value", "stream"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "invalid_value", "conversation"),
        ({"conversation": {"name": "c"}}, "missing_required_parameter", "conversation.id"),
        ({"prompt": {"id": "x"}}, "unsupported_parameter", "prompt"),
        ({"include": ["thoughts"]}, "unsupported_value", "include[0]"),
        ({"stream_options": {}}, "invalid_value", "stream_options"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"service_tier": "scale"}, "unsupported_parameter", "service_tier"),
    ],
)
def test_what_is_not_supported_is_refused(body, code, param):
    answer, gateway = ask(script("Hi"), **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert gateway.jobs == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (overloaded("busy", 3.0), openai.InternalServerError),
        (ApiError(429, "slow down", code="rate_limit_exceeded", retry_after_s=2), openai.RateLimitError),
        (ApiError(400, "no", param="x"), openai.BadRequestError),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_client_raises_its_class_for_an_error_before_the_first_token(error, kind, is_stream):
    async def use(client):
        with pytest.raises(kind) as caught:
            await client.responses.create(model="demo", input="hi", stream=is_stream)
        assert caught.value.code == error.code

    run(with_client(lambda job: [error], use))


def test_client_raises_for_what_is_not_there():
    async def use(client):
        for work in (
            client.responses.create(model="other", input="hi"),
            client.responses.create(model="demo", input="hi", previous_response_id="resp_none"),
            client.responses.retrieve("resp_none"),
            client.responses.delete("resp_none"),
            client.responses.cancel("resp_none"),
            client.responses.input_items.list("resp_none"),
        ):
            with pytest.raises(openai.NotFoundError):
                await work

    run(with_client(script("Hi"), use))


def failing(job):
    return [[ChoiceDelta(0, "Hi", [5])], overloaded("the engine is gone", 1.0)]


def test_error_in_mid_stream_fails_the_response_and_is_stored():
    async def use(client):
        stream = await client.responses.create(model="demo", input="hi", stream=True)
        events = [event async for event in stream]
        return events, await client.responses.retrieve(events[-1].response.id)

    events, stored = run(with_client(failing, use, served=PLAIN))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.failed"
    response = events[-1].response
    assert (response.status, response.error.code, response.error.message) == ("failed", "server_error", "the engine is gone")
    assert stored.to_dict() == response.to_dict()


def test_failed_store_fails_the_response():
    async def work():
        gateway = FakeGateway(script("Hi"))
        async with running_app(gateway, PLAIN) as app:

            async def fail(owner, record, conversation_id):
                raise ApiError(503, "the disk is full", code="storage_full")

            store = app.responses.opened
            app.responses.opened = type("Broken", (), {"put": staticmethod(fail), "history": store.history})()
            body = {"model": "demo", "input": "hi"}
            whole = await app.post("/v1/responses", body)
            streamed = await app.post("/v1/responses", {**body, "stream": True})
            app.responses.opened = store
        return whole, streamed

    whole, streamed = run(work())
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "storage_full")
    assert names_of(streamed.text)[-2:] == ["response.output_item.done", "response.failed"]
    numbers = [data["sequence_number"] for _, data in events_of(streamed.text)]
    assert numbers == list(range(len(numbers)))


def test_error_after_a_comment_and_before_the_first_token_is_an_error_event():
    class SlowGateway(FakeGateway):
        def open(self, job):
            stream = super().open(job)
            play = stream.play

            async def late():
                await asyncio.sleep(0.05)
                async for delta in play():
                    yield delta

            stream.play = late
            return stream

    async def work():
        config = ServerConfig(keep_alive_comment_s=0.005)
        async with running_app(SlowGateway(lambda job: [overloaded("gone", 1.0)]), PLAIN, config) as app:
            return await app.post("/v1/responses", {"model": "demo", "input": "hi", "stream": True})

    answer = run(work())
    last = answer.text.split("\n\n")[-2]
    assert answer.text.startswith(": keep-alive\n\n")
    assert last == (
        'event: error\ndata: {"type":"error","sequence_number":0,"code":"overloaded","message":"gone","param":null}'
    )
