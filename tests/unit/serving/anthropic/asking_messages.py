"""Ask for messages over the real application, plainly and with the official client."""

from __future__ import annotations

import asyncio
import json

import anthropic

from tests.unit.serving.fakes import TOOL_TEMPLATE, FakeGateway, make_served, text_script
from tests.unit.serving.real_app import BASE, fix, running_app

PLAIN = make_served()
TOOLED = make_served(TOOL_TEMPLATE)
TOKENIZER = TOOLED.tokenizer
USER = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é\\n", "b": [1, {"c": null}]}}\n</tool_call>'
INPUT = {"a": "é\n", "b": [1, {"c": None}]}
USAGE = '"cache_creation_input_tokens":0,"cache_read_input_tokens":'


def run(work):
    return asyncio.run(work)


def script(*texts, **options):
    return text_script(TOKENIZER, *texts, **options)


def ask(play, path="/v1/messages", served=TOOLED, gateway=None, headers=None, **body):
    """Return the answer over HTTP, and the gateway."""

    async def work():
        where = FakeGateway(play, **(gateway or {}))
        async with running_app(where, served) as app:
            base = {"model": "demo", "messages": USER}
            if path == "/v1/messages":
                base["max_tokens"] = 100
            return await app.post(path, {**base, **body}, **(headers or {})), where

    return run(work())


def prompt_of(gateway):
    return TOKENIZER.decode(list(gateway.jobs[0].request.prompt_token_ids), skip_special_tokens=False)


async def with_client(play, use, served=TOOLED, config=None, key="k", gateway=None):
    where = gateway or FakeGateway(play)
    async with running_app(where, served, config) as app:
        client = anthropic.AsyncAnthropic(api_key=key, base_url=BASE, http_client=app.http(), max_retries=0)
        return await use(client)


def create(play, served=TOOLED, **body):
    async def use(client):
        return await client.messages.create(**{"model": "demo", "messages": USER, "max_tokens": 100, **body})

    return run(with_client(play, use, served))


def stream(play, served=TOOLED, **body):
    async def use(client):
        async with client.messages.stream(**{"model": "demo", "messages": USER, "max_tokens": 100, **body}) as events:
            return await events.get_final_message()

    return run(with_client(play, use, served))


def comparable(message):
    found = message.to_dict()
    found.pop("stop_details", None)
    for block in found["content"]:
        block.pop("parsed_output", None)
        block.update({"signature": "SIG"} if "signature" in block else {})
    return json.loads(fix(json.dumps(found, sort_keys=True, separators=(",", ":"))))
