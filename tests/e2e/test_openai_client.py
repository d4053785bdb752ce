"""The official OpenAI client against a real server: every route, synchronous and asynchronous."""

import asyncio
import base64
import json
import struct

import openai
import pytest

from quire import LLM, SamplingParams

PROMPT = "It was a cold morning when"
MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm():
    model = LLM("demo", num_kv_blocks=512, num_threads=1)
    yield model
    model.llm_engine.close()


def chat(client, **options):
    return client.chat.completions.create(model="demo", messages=MESSAGES, **{"max_tokens": 12, "temperature": 0, **options})


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


@pytest.mark.parametrize("options", [{"seed": 7, "temperature": 1}, {"seed": 3, "top_p": 0.8, "extra_body": {"top_k": 20}}])
def test_stream_joins_to_the_unary_answer_when_the_seed_is_the_same(client, options):
    options = {"model": "demo", "prompt": [PROMPT, "The sea"], "max_tokens": 16, "n": 2, **options}
    whole = {choice.index: choice.text for choice in client.completions.create(**options).choices}
    streamed = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == whole
    assert len(whole) == 4


def test_chat_streams_a_role_once_and_usage_at_the_end(client):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    whole = chat(client)
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices][:2] == ["assistant", None]
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    )
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].choices == []


def test_chat_stream_helper_gives_the_unary_message(client):
    stop = chat(client).choices[0].message.content.split()[2]  # the helper refuses answers that end by length
    with client.chat.completions.stream(model="demo", messages=MESSAGES, max_tokens=12, temperature=0, stop=[stop]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == chat(client, stop=[stop]).choices[0].message.content


def test_logprobs_are_those_of_the_tokens(client):
    content = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(content) == 12
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    text = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert text == chat(client).choices[0].message.content


def test_loglikelihood_of_a_prompt_is_served_when_no_token_is_wanted(client):
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    found = answer.choices[0].logprobs
    assert "".join(found.tokens) == answer.choices[0].text == PROMPT
    assert found.token_logprobs[0] is None
    assert all(value < 0 for value in found.token_logprobs[1:])
    assert found.text_offset == [len("".join(found.tokens[:index])) for index in range(len(found.tokens))]


def test_stop_string_ends_an_answer(client):
    whole = client.completions.create(model="demo", prompt=PROMPT, max_tokens=40, temperature=0).choices[0].text
    stop = whole.split()[5]
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == whole[: whole.index(stop)]


def test_parameters_reach_the_sampler(client):
    biased = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=3, temperature=0, logit_bias={"300": 100}, logprobs=0
    )
    assert len(set(biased.choices[0].logprobs.tokens)) == 1
    best = client.completions.create(model="demo", prompt=PROMPT, max_tokens=6, best_of=4, n=2, seed=1, temperature=1)
    assert len(best.choices) == 2
    longest = chat(client, max_tokens=None, max_completion_tokens=3)
    assert longest.usage.completion_tokens == 3
    extra = chat(client, extra_body={"min_tokens": 5, "ignore_eos": True, "repetition_penalty": 1.2, "min_p": 0.1})
    assert extra.usage.completion_tokens == 12


def test_embeddings_are_vectors_of_length_one_in_both_encodings(client):
    texts = ["The sea was calm.", "A cold morning."]
    plain = client.embeddings.create(model="demo", input=texts, encoding_format="float")
    packed = client.embeddings.create(model="demo", input=texts)
    for one, other in zip(plain.data, packed.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert sum(value * value for value in one.embedding) == pytest.approx(1, abs=1e-5)
    raw = client.embeddings.with_raw_response.create(model="demo", input="a", encoding_format="base64").http_response.json()
    data = base64.b64decode(raw["data"][0]["embedding"])
    assert struct.unpack(f"<{len(data) // 4}f", data)
    shorter = client.embeddings.create(model="demo", input="a", dimensions=8)
    assert len(shorter.data[0].embedding) == 8


def test_models_are_listed_and_described(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").max_model_len == 1024
    assert refusal(lambda: client.models.retrieve("no/such")).status_code == 404


def test_tokens_go_to_and_fro(server):
    found = server.post("/tokenize", {"model": "demo", "prompt": PROMPT}).json()
    assert found["count"] == len(found["tokens"])
    assert server.post("/detokenize", {"model": "demo", "tokens": found["tokens"]}).json()["prompt"] == PROMPT
    assert server.post("/tokenize", {"model": "demo", "messages": MESSAGES}).json()["count"] > 0


@pytest.mark.parametrize(
    "options, param",
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 100}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop[0]"),
        ({"max_tokens": -5}, "max_tokens"),
    ],
)
def test_refusal_names_the_parameter(client, options, param):
    error = refusal(lambda: chat(client, **options))
    assert (error.status_code, error.param) == (400, param)


def test_answer_fits_the_schema_when_one_is_given(client):
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "is_old": {"type": "boolean"}},
        "required": ["age", "is_old"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}
    answer = chat(client, max_tokens=200, temperature=1, seed=3, response_format=wanted)
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"age", "is_old"}
    assert 0 <= found["age"] <= 99
    chosen = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=9, extra_body={"structured_outputs": {"choice": ["red", "green"]}}
    )
    assert chosen.choices[0].text in ("red", "green")


def test_unknown_model_and_long_prompt_are_refused_by_name(client):
    assert refusal(lambda: client.completions.create(model="x", prompt="a")).code == "model_not_found"
    long = refusal(lambda: client.completions.create(model="demo", prompt=[5] * 2000, max_tokens=1))
    assert (long.status_code, long.code) == (400, "context_length_exceeded")


def test_many_requests_at_once_have_the_tokens_of_one_alone(server, llm):
    params = SamplingParams(temperature=0, max_tokens=10)
    prompts = [f"{PROMPT} {word}" for word in ("he", "she", "they", "it", "we", "you", "I", "one")] * 6
    expected = [output.outputs[0].text for output in llm.generate(prompts, params)]

    async def go():
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")

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
    before = [server.metric(name) for name in names]
    assert asyncio.run(go()) == expected
    assert [server.metric(name) - then for name, then in zip(names, before, strict=True)] == [480, 48]


def test_batch_runs_from_upload_to_output(client, server):
    lines = [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": PROMPT, "max_tokens": n, "model": "demo"},
        }
        for n in range(1, 6)
    ]
    lines.append({**lines[0], "custom_id": "bad", "body": {"model": "other", "prompt": "a"}})
    data = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    server.wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (5, 1)
    output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [entry["response"]["body"]["usage"]["completion_tokens"] for entry in output] == [1, 2, 3, 4, 5]
    errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert errors[0]["response"]["status_code"] == 404
    assert client.files.retrieve(file.id).bytes == len(data)
    assert batch.id in [item.id for item in client.batches.list()]
    assert client.files.content(file.id).read() == data
    assert client.files.delete(batch.output_file_id).deleted
    assert refusal(lambda: client.files.content(batch.output_file_id)).status_code == 404
    assert refusal(lambda: client.batches.cancel(batch.id)).code == "batch_not_cancellable"
