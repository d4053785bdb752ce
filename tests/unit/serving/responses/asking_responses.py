"""Ask for responses over the real application, plainly and with the official client."""

from __future__ import annotations

import asyncio
import json

import openai

from tests.unit.serving.fakes import TOOL_TEMPLATE, FakeGateway, make_served, text_script
from tests.unit.serving.real_app import BASE, fix, running_app

PLAIN = make_served()
TOOLED = make_served(TOOL_TEMPLATE)
TOKENIZER = TOOLED.tokenizer
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é\\n"}}\n</tool_call>'
ARGUMENTS = '{"a": "é\\n"}'


def run(work):
    return asyncio.run(work)


def script(*texts, **options):
    return text_script(TOKENIZER, *texts, **options)


def ask(play, served=TOOLED, gateway=None, **body):
    """Return the answer over HTTP, and the gateway."""

    async def work():
        where = FakeGateway(play, **(gateway or {}))
        async with running_app(where, served) as app:
            return await app.post("/v1/responses", {"model": "demo", "input": "hi", **body}), where

    return run(work())


def prompt_of(gateway, number=0):
    return TOKENIZER.decode(list(gateway.jobs[number].request.prompt_token_ids), skip_special_tokens=False)


async def with_client(play, use, served=TOOLED, gateway=None, folder=None):
    where = gateway or FakeGateway(play)
    async with running_app(where, served, folder=folder) as app:
        client = openai.AsyncOpenAI(api_key="k", base_url=f"{BASE}/v1", http_client=app.http(), max_retries=0)
        return await use(client)


def create(play, served=TOOLED, **body):
    async def use(client):
        return await client.responses.create(**{"model": "demo", "input": "hi", **body})

    return run(with_client(play, use, served))


def stream(play, served=TOOLED, **body):
    """Return the last response of a stream, and the snapshot of the client's helper where it is complete."""

    async def use(client):
        events = await client.responses.create(**{"model": "demo", "input": "hi", "stream": True, **body})
        return [event async for event in events]

    return run(with_client(play, use, served))


def comparable(response):
    return json.loads(fix(json.dumps(response.to_dict(), separators=(",", ":"))))


HEAD = (
    '"id":"resp_1","object":"response","created_at":1,"status":"STATUS","background":false,"completed_at":DONE,"error":null,'
    '"incomplete_details":null,"instructions":null,"max_output_tokens":null,"max_tool_calls":null,"model":"demo",'
    '"output":OUTPUT,"parallel_tool_calls":true,"previous_response_id":null,"conversation":null,"prompt_cache_key":null,'
    '"reasoning":{"effort":null,"summary":null},"safety_identifier":null,"service_tier":"default","store":true,'
    '"temperature":1.0,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":1.0,'
    '"truncation":"disabled","usage":USAGE,"user":null,"metadata":{}'
)


def head(status="in_progress", done="null", output="[]", usage="null"):
    text = HEAD.replace("STATUS", status).replace("DONE", done).replace("OUTPUT", output).replace("USAGE", usage)
    return "{" + text + "}"
