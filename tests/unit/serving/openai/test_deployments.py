"""Azure's URLs, with the official client for Azure over the real application."""

from __future__ import annotations

import asyncio

import httpx2
import openai
import pytest

from quire.serving.endpoint import bind
from quire.serving.engine_client.messages import RequestDelta
from quire.serving.http.app import make_app
from quire.serving.openai.endpoints import ENDPOINTS
from tests.unit.serving.fakes import FakeGateway, make_served, text_script
from tests.unit.serving.real_app import BASE, running_app

SERVED = make_served()
MESSAGES = [{"role": "user", "content": "hi"}]


def run(use, script=None):
    """Run `use(client, plain)` with the official client and a plain one."""

    async def work():
        async with running_app(FakeGateway(script or text_script(SERVED.tokenizer, "Hello")), SERVED) as app:
            made = make_app(app.parts, bind(ENDPOINTS, app.responses.server))
            plain = httpx2.AsyncClient(transport=httpx2.ASGITransport(made), base_url=BASE)
            client = openai.AsyncAzureOpenAI(
                api_key="k", azure_endpoint=BASE, api_version="2024-10-21", http_client=plain, max_retries=0
            )
            return await use(client, plain)

    return asyncio.run(work())


def test_chat_and_completion_are_answered_whole_and_streamed():
    async def use(client, _):
        chat = await client.chat.completions.create(model="demo", messages=MESSAGES)
        chunks = [chunk async for chunk in await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)]
        text = await client.completions.create(model="demo", prompt="hi")
        return chat, chunks, text

    chat, chunks, text = run(use)
    assert chat.choices[0].message.content == text.choices[0].text == "Hello"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"


@pytest.mark.parametrize("body", [{}, {"model": "another"}], ids=["none", "another"])
def test_deployment_is_the_model_whatever_the_body_says(body):
    async def use(_, plain):
        url = "/openai/deployments/{}/chat/completions?api-version=2024-10-21"
        return [await plain.post(url.format(name), json={"messages": MESSAGES, **body}) for name in ("demo", "org/none")]

    found, missing = run(use)
    assert found.status_code == 200
    assert found.json()["choices"][0]["message"]["content"] == "Hello"
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert "'org/none'" in missing.json()["error"]["message"]


def test_error_of_a_deployment_names_the_field():
    async def use(client, plain):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="demo", messages=[])
        broken = await plain.post(
            "/openai/deployments/demo/completions", content=b'{"a"', headers={"content-type": "application/json"}
        )
        return caught.value.param, broken.status_code, broken.json()["error"]["code"]

    assert run(use) == ("messages", 400, "invalid_json")


def test_embeddings_of_a_deployment():
    def script(job):
        yield RequestDelta(job.request.request_id, [], True, embedding=[0.25, -1.5])

    async def use(client, _):
        found = await client.embeddings.create(model="demo", input="hi")
        with pytest.raises(openai.NotFoundError) as caught:
            await client.embeddings.create(model="none", input="hi")
        return found.data[0].embedding, caught.value.code

    assert run(use, script) == ([0.25, -1.5], "model_not_found")
