"""The official Anthropic client against a real server: what the client matrix does not ask, such as many requests at once."""

import asyncio

import anthropic
import pytest

from tests.e2e.tooled_model import KEY, MAX_BODY_BYTES, SCHEMA

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
TOOLS = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
GREEDY = {"temperature": 0}  # older clients state it themselves


def text_of(answer):
    return "".join(block.text for block in answer.content if block.type == "text")


def test_body_that_is_too_long_is_refused_by_its_status(tooled_server):
    long = [{"role": "user", "content": "x" * MAX_BODY_BYTES}]
    client = anthropic.Anthropic(base_url=tooled_server.url, api_key=KEY, max_retries=0)
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(model="demo", messages=long, max_tokens=5)
    assert caught.value.status_code == 413
    assert caught.value.body["error"]["type"] == "request_too_large"


def test_wrong_key_is_an_authentication_error(tooled_server):
    client = anthropic.Anthropic(base_url=tooled_server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client.messages.create(model="demo", messages=MESSAGES, max_tokens=5)
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_stream_helpers_give_the_whole_message(tooled_server):
    options = {"base_url": tooled_server.url, "api_key": KEY, "max_retries": 0}
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 12, "extra_body": GREEDY}
    tool = {**body, "tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 200}
    client = anthropic.Anthropic(**options)
    with client.messages.stream(**body) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(**body)
    assert "".join(texts) == text_of(final) == text_of(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens

    async def go():
        async with anthropic.AsyncAnthropic(**options) as other, other.messages.stream(**tool) as stream:
            return await stream.get_final_message()

    assert asyncio.run(go()).content[-1].input == client.messages.create(**tool).content[-1].input


def test_request_ends_when_the_client_leaves_its_stream(tooled_server):
    before = tooled_server.metric("quire:stream_aborts_total", reason="disconnect")

    async def go():
        async with anthropic.AsyncAnthropic(base_url=tooled_server.url, api_key=KEY, max_retries=0) as client:
            body = {"model": "demo", "messages": MESSAGES, "max_tokens": 900, "extra_body": {**GREEDY}}
            async with client.messages.stream(**body) as stream:
                async for _ in stream.text_stream:
                    break

    asyncio.run(go())
    tooled_server.wait_for(tooled_server.is_idle)
    assert tooled_server.metric("quire:stream_aborts_total", reason="disconnect") >= before


def test_many_messages_at_once_have_the_text_of_one_alone(tooled_server):
    async def go():
        async with anthropic.AsyncAnthropic(base_url=tooled_server.url, api_key=KEY, max_retries=0) as client:

            async def one(word):
                body = {"model": "demo", "messages": [{"role": "user", "content": word}], "max_tokens": 8, "extra_body": GREEDY}
                return text_of(await client.messages.create(**body))

            words = ["sea", "wind", "rain", "snow"]
            return await asyncio.gather(*[one(word) for word in words * 4]), [await one(word) for word in words]

    together, alone = asyncio.run(go())
    assert together == alone * 4
