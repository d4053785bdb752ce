"""Responses that are made in the background, read and cancelled with the official client."""

from __future__ import annotations

import asyncio

import openai
import pytest

from quire.serving.errors import ApiError
from quire.serving.responses.store import ResponseStore
from tests.unit.serving.fakes import FakeGateway, make_served, text_script
from tests.unit.serving.real_app import running_app

PLAIN = make_served()
FIELDS = {"model": "demo", "input": "hi", "background": True}


def script(text="Hello"):
    return text_script(PLAIN.tokenizer, text)


def run(use, gateway=None, **options):
    """Run `use(client, app)` with the official client over the real application."""

    async def work():
        async with running_app(gateway or FakeGateway(script()), PLAIN, **options) as app:
            client = openai.AsyncOpenAI(api_key="k", base_url="http://127.0.0.1/v1", http_client=app.http(), max_retries=0)
            return await use(client, app)

    return asyncio.run(work())


async def ended(client, response_id):
    for _ in range(3000):
        found = await client.responses.retrieve(response_id)
        if found.status not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("the response does not end")


class HeldGateway(FakeGateway):
    """Holds every answer back until `released` is set."""

    def __init__(self, play):
        super().__init__(play)
        self.released, self.opened = asyncio.Event(), asyncio.Event()
        self.num_closed = 0

    def open(self, job):
        gateway, stream = self, super().open(job)

        class Held:
            request_id = "held"

            async def __aenter__(self):
                await stream.__aenter__()
                gateway.opened.set()
                return self

            async def __aexit__(self, *error):
                gateway.num_closed += 1
                return await stream.__aexit__(*error)

            def abort(self, reason):
                stream.abort(reason)

            def attach_sink(self, take):
                """Take none: the deltas are iterated over."""

            async def __aiter__(self):
                await gateway.released.wait()
                async for delta in stream:
                    yield delta

        return Held()


def test_response_is_queued_at_once_and_read_by_its_id():
    async def use(client, app):
        first = await client.responses.create(**FIELDS)
        found = await ended(client, first.id)
        items = [item async for item in client.responses.input_items.list(first.id)]
        second = await client.responses.create(model="demo", input="more", previous_response_id=first.id)
        return first, found, items, second

    first, found, items, second = run(use)
    assert (first.status, first.background, first.output) == ("queued", True, [])
    assert (found.status, found.background, found.output_text) == ("completed", True, "Hello")
    assert found.usage.output_tokens > 0
    assert items[0].content[0].text == "hi"
    assert second.status == "completed"


def test_response_is_cancelled_once_and_stays_so():
    async def use(client, gateway):
        first = await client.responses.create(**FIELDS)
        await gateway.opened.wait()
        before = await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="demo", input="x", previous_response_id=first.id)
        cancelled = await client.responses.cancel(first.id)
        return before, caught.value.code, cancelled, await client.responses.cancel(first.id), await ended(client, first.id)

    async def work():
        gateway = HeldGateway(script())
        async with running_app(gateway, PLAIN) as app:
            client = openai.AsyncOpenAI(api_key="k", base_url="http://127.0.0.1/v1", http_client=app.http(), max_retries=0)
            return await use(client, gateway), gateway

    (before, code, *after), gateway = asyncio.run(work())
    assert (before.status in ("queued", "in_progress"), code) == (True, "response_in_progress")
    assert [response.status for response in after] == ["cancelled"] * 3
    assert gateway.num_closed == 1


def test_response_that_has_ended_cannot_be_cancelled():
    async def use(client, app):
        first = await client.responses.create(**FIELDS)
        await ended(client, first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.cancel(first.id)
        return caught.value.code

    assert run(use) == "response_not_cancellable"


def test_error_ends_the_response_as_failed():
    async def use(client, app):
        return await ended(client, (await client.responses.create(**FIELDS)).id)

    def play(job):
        yield ApiError(503, "the engine has died", code="engine_unavailable")

    found = run(use, FakeGateway(play))
    assert (found.status, found.error.message) == ("failed", "the engine has died")


def test_deleted_response_is_not_made_further():
    async def work():
        gateway = HeldGateway(script())
        async with running_app(gateway, PLAIN) as app, app.http() as client:
            made = (await app.post("/v1/responses", FIELDS)).json()
            await gateway.opened.wait()
            deleted = await client.delete(f"/v1/responses/{made['id']}")
            return deleted.status_code, (await client.get(f"/v1/responses/{made['id']}")).status_code, gateway.num_closed

    assert asyncio.run(work()) == (200, 404, 1)


def test_response_of_a_server_that_ended_is_failed(tmp_path):
    async def work():
        async with running_app(HeldGateway(script()), PLAIN, folder=tmp_path) as app:
            made = (await app.post("/v1/responses", FIELDS)).json()
        async with running_app(FakeGateway(script()), PLAIN, folder=tmp_path) as app, app.http() as client:
            return made, [(await client.get(f"/v1/responses/{made['id']}")).json() for _ in range(2)]

    made, found = asyncio.run(work())
    assert made["status"] == "queued"
    assert [response["status"] for response in found] == ["failed", "failed"]
    assert "the server ended" in found[0]["error"]["message"]


def test_store_counts_the_bytes_of_what_replaces_a_body():
    async def work():
        store = ResponseStore(None, limit_of=lambda owner: 60)
        try:
            from quire.serving.responses.store import StoredResponse

            for name in ("a", "b"):
                await store.put("o", StoredResponse(id=name, previous_id=None, items=b"[]", body=b"x" * 20))
            assert await store.replace("o", "b", b"y" * 50)
            assert not await store.replace("o", "c", b"")
            assert not await store.replace("other", "b", b"")
            with pytest.raises(ApiError):
                await store.get("o", "a")
            return (await store.get("o", "b")).body
        finally:
            await store.close()

    assert asyncio.run(work()) == b"y" * 50


def test_line_of_a_batch_may_not_be_in_the_background():
    from quire.api.openai.responses import ResponsesRequest
    from quire.base.errors import QuireError
    from quire.serving.core.caller import Caller
    from quire.serving.responses.create import ResponseRoutes, respond
    from tests.unit.serving.fakes import OWNER, make_context

    async def work():
        routes = ResponseRoutes(make_context(FakeGateway(script()), PLAIN), ResponseStore(None))
        try:
            body = ResponsesRequest(model="demo", input="hi", background=True)
            await respond(routes, body, Caller(owner=OWNER, route="/v1/responses"))
        finally:
            await routes.store.close()

    with pytest.raises((ApiError, QuireError), match="a batch is in the background already"):
        asyncio.run(work())
