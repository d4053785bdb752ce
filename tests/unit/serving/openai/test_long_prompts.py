"""What is beyond the context is refused before it is decoded, or rendered, which would hold up everybody's streams."""

import asyncio
import json

import pytest

from quire.serving.anthropic.endpoints import post_count_tokens, post_message
from quire.serving.config import ServerConfig
from quire.serving.openai.chat import post_chat
from quire.serving.openai.completions import post_completion
from quire.serving.openai.embeddings import post_embeddings
from quire.serving.openai.tokenize import post_tokenize
from quire.serving.responses.create import post_response
from tests.unit.serving.fakes import FakeGateway, make_served
from tests.unit.serving.http.shell import endpoint, exchange, post, running

SERVED = make_served()  # with a context of 1,024 tokens


def error_of(handler, **body):
    async def go():
        async with running([endpoint("/x", handler)]) as (port, context):
            context.served, context.gateway = SERVED, FakeGateway(lambda job: [])
            return await exchange(port, post("/x", json.dumps(body).encode()))

    answer = asyncio.run(go())
    assert answer.split()[1] == b"400"
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize(("handler", "field", "num_ids"), [(post_completion, "prompt", 1024), (post_embeddings, "input", 1025)])
def test_ids_are_counted_before_anything_is_decoded_when_they_are_too_many(handler, field, num_ids):
    too_many = error_of(handler, model="demo", user=5, **{field: [7] * num_ids})
    assert (too_many["code"], too_many["param"]) == ("context_length_exceeded", field)
    assert f"the prompt has {num_ids} tokens" in too_many["message"]
    for fitting in ([7] * (num_ids - 1), [[7] * num_ids], "7, " * num_ids):
        error = error_of(handler, model="demo", user=5, **{field: fitting})
        assert error["param"] == "user"


@pytest.mark.parametrize(("handler", "field"), [(post_completion, "prompt"), (post_embeddings, "input")])
def test_ids_of_all_prompts_are_counted_before_anything_is_decoded_when_they_are_too_many(handler, field):
    many = [[7] * 1000] * 300
    error = error_of(handler, model="demo", user=5, **{field: [*many, [7]]})
    assert (error["code"], error["param"]) == ("invalid_value", field)
    assert "may have 300000 together, got 300001" in error["message"]
    assert error_of(handler, model="demo", user=5, **{field: many})["param"] == "user"


@pytest.mark.parametrize("handler", [post_chat, post_message, post_count_tokens, post_response, post_tokenize])
def test_body_is_refused_before_it_is_read_when_no_prompt_is_so_long(handler):
    async def go():
        async with running([endpoint("/x", handler)]) as (port, context):
            context.served = SERVED
            limit = SERVED.max_chat_bytes if handler is not post_tokenize else 8 << 20
            head = post("/x").replace(b"content-length: 2", b"content-length: %d" % (limit + 1)).removesuffix(b"{}")
            return await exchange(port, head, until_close=True)

    answer = asyncio.run(go())
    assert answer.split()[1] == b"413"


@pytest.mark.parametrize("role", ["user", "system"])
def test_chat_is_refused_before_it_is_rendered_when_it_is_too_long(monkeypatch, role):
    monkeypatch.setattr("quire.serving.core.prepare.render", lambda *_: pytest.fail("was rendered"))
    parts = [{"type": "text", "text": "x" * 10_000}] * 2
    error = error_of(post_chat, model="demo", messages=[{"role": role, "content": parts}])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "the prompt has 20000 characters" in error["message"]


def test_prompt_is_refused_when_the_option_allows_less_than_the_context(monkeypatch):
    served = make_served(config=ServerConfig(max_prompt_characters=100))
    monkeypatch.setitem(globals(), "SERVED", served)
    error = error_of(post_completion, model="demo", prompt="x" * 101)
    assert (error["code"], error["param"]) == ("invalid_value", "prompt")
    assert "--max-prompt-characters" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20}, "logprobs"),
        ({"echo": True, "logprobs": 5, "stream": True}, "logprobs"),
    ],
)
def test_log_probabilities_of_a_prompt_are_refused_when_they_are_too_many_to_tell(monkeypatch, fields, param):
    monkeypatch.setattr("quire.serving.core.prepare.MAX_PROMPT_ENTRIES", 10_499)
    monkeypatch.setattr("quire.serving.core.prepare.MAX_STREAMED_ENTRIES", 2999)
    error = error_of(post_completion, model="demo", prompt=[7] * 500, max_tokens=2, **fields)
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert "log probabilities of a prompt are asked for" in error["message"]
