"""Models, tokenize, detokenize, embeddings, and the table of routes."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from quire.api.decode import BodyError, decode_body
from quire.api.openai.embeddings import EmbeddingRequest
from quire.api.openai.tokenize import MAX_TOKENS, DetokenizeRequest, TokenizeRequest
from quire.base.errors import RequestError
from quire.serving.config import ServerConfig
from quire.serving.engine_client.messages import RequestDelta
from quire.serving.errors import ApiError, engine_unavailable, rate_limited
from quire.serving.http.openapi import document
from quire.serving.openai import tokenize as tokenize_route
from quire.serving.openai.embeddings import embed
from quire.serving.openai.endpoints import ENDPOINTS
from quire.serving.openai.models import get_model, list_models
from quire.serving.openai.tokenize import detokenize, get_tokenizer_info, tokenize
from tests.unit.serving.fakes import TOOL_TEMPLATE, FakeGateway, make_context, make_served
from tests.unit.serving.openai.asking import CALLER, finish

SERVED = make_served(TOOL_TEMPLATE)
TOKENIZER = SERVED.tokenizer


def body_of(kind, **fields):
    return decode_body(json.dumps(fields).encode(), kind)[0]


def test_tokenizer_tells_its_special_tokens_and_template():
    found = json.loads(asyncio.run(get_tokenizer_info(make_context(FakeGateway(lambda job: []), SERVED), None)).body)
    assert (found["chat_template"], found["model_max_length"]) == (TOOL_TEMPLATE, 1024)
    assert found["eos_token"] == TOKENIZER.named_tokens["eos_token"]
    assert (found["vocab_size"], "bos_token" in found) == (TOKENIZER.vocab_size, True)


def test_models_are_listed_by_every_name():
    served = make_served(config=ServerConfig(served_model_names=("a/b", "c", "*")))
    context = make_context(FakeGateway(lambda job: []), served)
    found = json.loads(asyncio.run(list_models(context, None)).body)
    assert [card["id"] for card in found["data"]] == ["a/b", "c"]
    assert found["data"][0] == {
        "id": "a/b",
        "object": "model",
        "created": served.created_s,
        "owned_by": "quire",
        "root": "demo",
        "parent": None,
        "max_model_len": 1024,
        "type": "model",
        "display_name": "a/b",
        "created_at": datetime.fromtimestamp(served.created_s, UTC).isoformat(),
    }
    assert (found["first_id"], found["last_id"], found["has_more"]) == ("a/b", "c", False)
    card = asyncio.run(get_model(context, SimpleNamespace(path_params={"model": "a/b"})))
    assert json.loads(card.body) == found["data"][0]
    with pytest.raises(ApiError) as caught:
        asyncio.run(get_model(make_context(FakeGateway(lambda job: [])), SimpleNamespace(path_params={"model": "x"})))
    assert caught.value.status == 404


def test_prompt_is_tokenised_and_comes_back():
    answer = tokenize(SERVED, body_of(TokenizeRequest, prompt="Été 🙂", return_token_strs=True))
    assert answer.tokens == TOKENIZER.encode("Été 🙂")
    assert (answer.count, answer.max_model_len, len(answer.token_strs)) == (len(answer.tokens), 1024, len(answer.tokens))
    assert detokenize(SERVED, body_of(DetokenizeRequest, tokens=answer.tokens)).prompt == "Été 🙂"
    assert tokenize(SERVED, body_of(TokenizeRequest, prompt="x")).token_strs is None


def test_messages_are_tokenised_as_the_template_writes_them():
    tool = {"type": "function", "function": {"name": "looked_up"}}
    body = body_of(
        TokenizeRequest,
        messages=[{"role": "user", "content": "hi"}],
        tools=[tool],
        chat_template_kwargs={"enable_thinking": False},
    )
    text = TOKENIZER.decode(tokenize(SERVED, body).tokens, skip_special_tokens=False)
    assert "looked_up" in text
    assert text.endswith("</think>\n\n")


def test_token_id_that_does_not_exist_is_refused():
    with pytest.raises(RequestError) as caught:
        detokenize(SERVED, body_of(DetokenizeRequest, tokens=[1, 4096]))
    assert caught.value.param == "tokens[1]"


def test_many_tokens_come_back_as_they_were():
    rng = random.Random(5)
    tokens = [rng.randrange(TOKENIZER.vocab_size) for _ in range(20_000)]
    expected = TOKENIZER.decode(tokens, skip_special_tokens=False)
    assert detokenize(SERVED, body_of(DetokenizeRequest, tokens=tokens)).prompt == expected


def test_answer_is_made_in_a_thread_when_tokens_are_asked_for(monkeypatch):
    threads = []

    def note(encode, value):
        threads.append(threading.current_thread())
        return encode(value)

    real = tokenize_route.encode_json
    monkeypatch.setattr(tokenize_route, "encode_json", lambda value: note(real, value))
    context = make_context(FakeGateway(lambda job: []), SERVED)

    async def run(kind, post, **fields):
        body = body_of(kind, **fields)

        async def read(_kind, **_limits):
            return body

        await post(context, SimpleNamespace(body=read, ignore=lambda names: None, owner=CALLER.owner, request_id="req"))

    asyncio.run(run(TokenizeRequest, tokenize_route.post_tokenize, prompt="x"))
    asyncio.run(run(DetokenizeRequest, tokenize_route.post_detokenize, tokens=[5]))
    assert len(threads) == 2
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("kind", "post", "fields"),
    [
        (TokenizeRequest, tokenize_route.post_tokenize, {"prompt": "x"}),
        (DetokenizeRequest, tokenize_route.post_detokenize, {"tokens": [5]}),
    ],
)
def test_call_counts_against_its_key_when_it_only_tokenises(kind, post, fields):
    held = []

    class Full(FakeGateway):
        def holding(self, owner, call_id):
            held.append((owner, call_id))
            raise rate_limited("one is in flight", 1)

    async def read(_kind, **_limits):
        return body_of(kind, **fields)

    call = SimpleNamespace(body=read, ignore=lambda names: None, owner=CALLER.owner, request_id="req")
    with pytest.raises(ApiError, match="in flight"):
        asyncio.run(post(make_context(Full(lambda job: []), SERVED), call))
    assert held == [(CALLER.owner.name, "req")]


@pytest.mark.parametrize(("count", "param"), [(MAX_TOKENS + 1, "tokens"), (3 * MAX_TOKENS, None)])
def test_too_many_tokens_are_refused(count, param):
    with pytest.raises(BodyError) as caught:
        body_of(DetokenizeRequest, tokens=[1] * count)
    assert caught.value.param == param


def test_variable_is_unused_when_the_template_does_not_read_it():
    found = SERVED.unused_variables({"enable_thinking": True, "enable_thinkin": True, "assistant": 1, "x" * 500: 1})
    assert found[:2] == ("chat_template_kwargs.enable_thinkin", "chat_template_kwargs.assistant")
    assert len(found) == 3
    assert len(found[2]) < 100


def test_model_is_served_when_its_chat_template_is_damaged():
    assert make_served("{% if %}").unused_variables({"x": 1}) == ("chat_template_kwargs.x",)


def test_embedding_parameters_reach_the_engine():
    def script(job):
        yield RequestDelta(job.request.request_id, [], True, embedding=[1.0, 0.0])

    context = make_context(FakeGateway(script))
    body = body_of(
        EmbeddingRequest, model="demo", input=[[5, 6], [7]], pooling="mean", normalize=False, dimensions=2, cache_salt="s"
    )

    async def run():
        return await finish(await embed(context, body, CALLER))

    answer = json.loads(asyncio.run(run()))
    assert [item["embedding"] for item in answer["data"]] == [[1.0, 0.0]] * 2
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    requests = [job.request for job in context.gateway.jobs]
    assert [request.prompt_token_ids for request in requests] == [(5, 6), (7,)]
    pooling = requests[0].pooling
    assert (pooling.pooling, pooling.normalize, pooling.dimensions) == ("mean", False, 2)
    assert requests[0].cache_salt == requests[1].cache_salt != ""


def test_all_inputs_are_aborted_when_one_fails():
    def script(job):
        if job.request.prompt_token_ids == (6,):
            yield engine_unavailable("gone")
        for _ in range(100):
            yield RequestDelta(job.request.request_id, [], False)
        yield RequestDelta(job.request.request_id, [], True, embedding=[1.0])

    context = make_context(FakeGateway(script))

    async def run():
        return await finish(await embed(context, body_of(EmbeddingRequest, model="demo", input=[[5], [6], [7]]), CALLER))

    with pytest.raises(ApiError, match="gone"):
        asyncio.run(run())
    assert all(stream.is_left for stream in context.gateway.streams)


def test_dimensions_that_the_model_lacks_are_refused():
    context = make_context(FakeGateway(lambda job: []))
    with pytest.raises(RequestError) as caught:
        asyncio.run(embed(context, body_of(EmbeddingRequest, model="demo", input="x", dimensions=65), CALLER))
    assert caught.value.param == "dimensions"


def test_routes_are_described():
    described = document("quire", "1", ENDPOINTS)
    assert {"/v1/chat/completions", "/v1/models/{model}", "/tokenize"} <= set(described["paths"])
    text = json.dumps(described)
    names = set(described["components"]["schemas"])
    referred = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert referred <= names
