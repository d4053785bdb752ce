"""The official client reads what the encoders write: its own accumulators are the oracle."""

from __future__ import annotations

import asyncio
import json
import warnings

import httpx
import openai
import pytest

from quire.api.decode import decode_body
from quire.api.openai.chat import ChatCompletionRequest
from quire.api.openai.completions import CompletionRequest
from quire.base.errors import QuireError
from quire.serving.answers import Stream
from quire.serving.engine_client.messages import ChoiceDelta
from quire.serving.errors import ApiError, deadline_exceeded, from_quire_error
from quire.serving.openai.chat import chat
from quire.serving.openai.completions import complete
from tests.unit.serving.fakes import TOOL_TEMPLATE, FakeGateway, make_context, make_served, text_script
from tests.unit.serving.openai.asking import CALLER, USER, finish

TOOLED = make_served(TOOL_TEMPLATE)
TOKENIZER = TOOLED.tokenizer
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'
ROUTES = {
    "/v1/chat/completions": (chat, ChatCompletionRequest),
    "/v1/completions": (complete, CompletionRequest),
}


def client_of(script, served=TOOLED):
    context = make_context(FakeGateway(script), served)

    async def respond(request: httpx.Request) -> httpx.Response:
        handler, kind = ROUTES[request.url.path]
        try:
            body, ignored = decode_body(request.content, kind)
            assert ignored == ()
            answer = await handler(context, body, CALLER)
            if not isinstance(answer, Stream):
                return httpx.Response(200, content=await finish(answer))
        except (ApiError, QuireError) as error:
            api_error = error if isinstance(error, ApiError) else from_quire_error(error)
            return httpx.Response(api_error.status, json=api_error.openai_body())
        frames = []
        try:
            async for frame in answer.frames:
                frames.append(frame)
        except ApiError as error:
            frames.append(answer.encode_error(error))
        return httpx.Response(200, content=b"".join(frames), headers={"content-type": "text/event-stream"})

    transport = httpx.MockTransport(respond)
    return openai.AsyncOpenAI(
        api_key="k", base_url="http://quire/v1", http_client=httpx.AsyncClient(transport=transport), max_retries=0
    )


def say(*texts, **options):
    return client_of(text_script(TOKENIZER, *texts, **options))


def run(work):
    return asyncio.run(work)


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 1000])
def test_accumulator_of_the_client_gives_what_the_whole_answer_has(tokens_per_delta):
    text = f"<think>so 🙂</think>Été{CALL}{CALL}"

    async def work():
        client = say(text, tokens_per_delta=tokens_per_delta)
        kwargs = {"model": "demo", "messages": USER, "tools": [TOOL], "logprobs": True, "top_logprobs": 2}
        async with client.chat.completions.stream(**kwargs, stream_options={"include_usage": True}) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_completion()
        return streamed, await client.chat.completions.create(**kwargs)

    streamed, whole = run(work())
    with warnings.catch_warnings():  # the client warns of its own generic types
        warnings.simplefilter("ignore")
        left, right = streamed.model_dump(), whole.model_dump()
    for answer in (left, right):
        answer.pop("id"), answer.pop("created"), answer.pop("object"), answer.pop("service_tier", None)
        for choice in answer["choices"]:
            choice["message"].pop("parsed", None), choice["message"].pop("refusal", None)
            for call in choice["message"]["tool_calls"]:
                call.pop("id"), call.pop("index", None)
                call["function"].pop("parsed_arguments", None)
            choice["message"] = {key: value for key, value in choice["message"].items() if value is not None}
            choice["logprobs"].pop("refusal", None)
    assert left == right
    message = right["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Été", "so 🙂")
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"a": "b"}] * 2


def test_client_reads_completions():
    async def work():
        client = say("Hi there")
        whole = await client.completions.create(model="demo", prompt=["a", "b"], logprobs=2, echo=True)
        stream = await client.completions.create(model="demo", prompt="a", stream=True)
        return whole, "".join([chunk.choices[0].text async for chunk in stream])

    whole, streamed = run(work())
    assert [choice.text for choice in whole.choices] == ["aHi there", "bHi there"]
    assert whole.choices[0].logprobs.text_offset[0] == 0
    assert streamed == "Hi there"


def test_client_raises_an_error_in_a_stream_with_its_code():
    def script(job):
        yield [ChoiceDelta(0, "Hi", [5])]
        yield deadline_exceeded(while_queued=False)

    async def work():
        async for _ in await client_of(script).chat.completions.create(model="demo", messages=USER, stream=True):
            pass

    with pytest.raises(openai.APIError) as caught:
        run(work())
    assert caught.value.code == "deadline_exceeded"
