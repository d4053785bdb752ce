"""The official OpenAI client against a real server: what the client matrix does not ask, such as many requests at once."""

import asyncio
import json

import openai
import pytest

from quire import LLM, SamplingParams
from tests.e2e.tooled_model import KEY, MAX_BODY_BYTES, SCHEMA

PROMPT = "It was a cold morning when"
MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module")
def client(tooled_server):
    with openai.OpenAI(base_url=f"{tooled_server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm():
    model = LLM("demo", num_kv_blocks=512, num_threads=1)
    yield model
    model.llm_engine.close()


def refusal(call):
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    return caught.value


def test_completion_has_the_tokens_of_the_engine(client, llm):
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_many_requests_at_once_have_the_tokens_of_one_alone(tooled_server, llm):
    params = SamplingParams(temperature=0, max_tokens=10)
    prompts = [f"{PROMPT} {word}" for word in ("he", "she", "they", "it", "we", "you", "I", "one")] * 6
    expected = [output.outputs[0].text for output in llm.generate(prompts, params)]

    async def go():
        client = openai.AsyncOpenAI(base_url=f"{tooled_server.url}/v1", api_key=KEY)

        async def one(prompt):
            text = ""
            async for chunk in await client.completions.create(
                model="demo", prompt=prompt, max_tokens=10, temperature=0, stream=True
            ):
                text += chunk.choices[0].text
            return text

        found = await asyncio.gather(*[one(prompt) for prompt in prompts])
        await client.close()
        return found

    names = ("quire:generation_tokens_total", "quire:request_success_total")
    before = [tooled_server.metric(name) for name in names]
    assert asyncio.run(go()) == expected
    assert [tooled_server.metric(name) - then for name, then in zip(names, before, strict=True)] == [480, 48]


def test_helpers_of_streams_give_the_whole_answer(client):
    wanted = {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}}  # an answer that ends
    body = {"model": "demo", "input": PROMPT, "max_output_tokens": 200, "temperature": 0, "text": wanted}
    with client.responses.stream(**body) as stream:
        assert stream.get_final_response().output_text == client.responses.create(**body).output_text


def batch_lines(**body):
    line = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "It was", **body}}
    return json.dumps(line).encode()


def test_files_are_listed_page_by_page_and_deleted(client):
    made = [client.files.create(file=(f"{n}.jsonl", batch_lines(max_tokens=3)), purpose="batch") for n in range(3)]
    first = client.files.list(purpose="batch", limit=2, order="desc")
    second = client.files.list(purpose="batch", limit=2, order="desc", after=first.data[-1].id)
    assert sorted(file.id for file in [*first.data, *second.data][:3]) == sorted(file.id for file in made)
    assert client.files.content(made[0].id).read() == batch_lines(max_tokens=3)
    assert all(client.files.delete(file.id).deleted for file in made)
    for call in (lambda: client.files.list(after="zz"), lambda: client.batches.list(after=made[0].id)):
        assert (refusal(call).status_code, refusal(call).param) == (400, "after")
    assert refusal(lambda: client.files.retrieve(made[0].id)).status_code == 404


def test_cancelled_batch_is_no_client_that_went(client, tooled_server):
    def counts():
        aborted = tooled_server.metric("quire:stream_aborts_total", reason="cancelled")
        return aborted, tooled_server.metric("quire:client_disconnects_total")

    def num_dispatched():
        return tooled_server.metric("quire:queue_wait_seconds_count", **{"class": "batch"})

    tooled_server.wait_for(tooled_server.is_idle)
    (num_cancelled, num_gone), num_before = counts(), num_dispatched()
    file = client.files.create(file=("in.jsonl", batch_lines(max_tokens=900, ignore_eos=True)), purpose="batch")
    with tooled_server.frozen_engine():
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        # A batch is in progress before its line is: one that the engine does not have yet is cancelled without an abort.
        tooled_server.wait_for(lambda: num_dispatched() == num_before + 1)
        client.batches.cancel(batch.id)
    tooled_server.wait_for(lambda: client.batches.retrieve(batch.id).status == "cancelled")
    tooled_server.wait_for(lambda: counts()[0] == num_cancelled + 1)
    assert counts()[1] == num_gone


def test_body_that_is_too_long_is_refused_by_its_status(client):
    assert refusal(lambda: client.completions.create(model="demo", prompt="x" * MAX_BODY_BYTES)).status_code == 413


def test_unknown_fields_are_told_with_their_paths(client):
    messages = [{"role": "user", "content": "x", "mood": "calm"}]
    extra = {"colour": "blue", "chat_template_kwargs": {"depth": 3}}
    raw = client.chat.completions.with_raw_response.create(model="demo", messages=messages, max_tokens=2, extra_body=extra)
    told = raw.headers["x-quire-ignored-params"].split(",")
    assert set(told) == {"messages[0].mood", "colour", "chat_template_kwargs.depth"}


def test_wrong_key_is_an_authentication_error(tooled_server):
    client = openai.OpenAI(base_url=f"{tooled_server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"
    client.close()
