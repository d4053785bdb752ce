"""Message batches of the Anthropic API, with the official client over the real routes and store."""

from __future__ import annotations

import asyncio
import hashlib
import time

import anthropic
import httpx2
import pytest

from quire.serving.batch.endpoints import ENDPOINTS as BATCH_ROUTES
from quire.serving.batch.endpoints import BatchRoutes
from quire.serving.batch.execution import BATCH_ENDPOINTS, check_batch_body, make_execute
from quire.serving.batch.message_batches import ENDPOINTS
from quire.serving.batch.service import BatchService
from quire.serving.config import ApiKey, ServerConfig
from quire.serving.endpoint import bind
from quire.serving.http.app import make_app
from tests.unit.serving.fakes import FakeGateway, make_served, text_script
from tests.unit.serving.http.shell import until
from tests.unit.serving.real_app import BASE, running_app

SERVED = make_served()
KEYS = {name: hashlib.sha256(name.encode()).digest() for name in ("ann", "bob")}
PARAMS = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "hi\nthere"}]}


def request(name, **changes):
    return {"custom_id": name, "params": {**PARAMS, **changes}}


def run(use, tmp_path, window=4, config=None, max_batches=100, done=None):
    """Run `use(client, transport)` with the official client; bodies that were answered are added to `done`."""

    async def work():
        async with running_app(FakeGateway(text_script(SERVED.tokenizer, "Hello")), SERVED, config) as app:
            execute = make_execute(app.responses, app.parts.authenticator, app.parts.bodies.decoding)

            async def held(record, body):
                if b"slow" in body:
                    await asyncio.sleep(600)
                answer = await execute(record, body)
                if done is not None:
                    done.append(body)
                return answer

            service = BatchService(
                tmp_path, held, check_batch_body, BATCH_ENDPOINTS, lambda: window, max_batches_of=lambda owner: max_batches
            )
            await service.start()
            try:
                routes = BatchRoutes(app.responses.server, service)
                made = make_app(app.parts, (*bind(ENDPOINTS, routes), *bind(BATCH_ROUTES, routes)))
                transport = httpx2.ASGITransport(made)
                return await use(client_of(transport), transport)
            finally:
                await service.close()

    return asyncio.run(work())


def client_of(transport, key="ann"):
    plain = httpx2.AsyncClient(transport=transport)
    return anthropic.AsyncAnthropic(api_key=key, base_url=BASE, http_client=plain, max_retries=0)


async def ended(client, batch_id):
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        found = await client.messages.batches.retrieve(batch_id)
        if found.processing_status == "ended":
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("the batch does not end")


async def results(client, batch_id):
    return {one.custom_id: one.result async for one in await client.messages.batches.results(batch_id)}


def test_batch_runs_and_has_a_result_for_each_request(tmp_path):
    async def use(client, _):
        requests = [request("one"), request("two"), request("bad", max_tokens=0), request("other", model="none")]
        made = await client.messages.batches.create(requests=requests)
        with pytest.raises(anthropic.AnthropicError, match="No `results_url`"):
            await client.messages.batches.results(made.id)
        found = await ended(client, made.id)
        return made, found, await results(client, made.id)

    made, found, got = run(use, tmp_path)
    assert made.id.startswith("msgbatch_")
    assert (made.type, made.processing_status, made.ended_at, made.results_url) == ("message_batch", "in_progress", None, None)
    assert (made.request_counts.processing, (made.expires_at - made.created_at).total_seconds()) == (4, 24 * 3600)
    counts = found.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 2, 2, 0, 0)
    assert found.ended_at >= found.created_at
    assert [got[name].type for name in ("one", "two", "bad", "other")] == ["succeeded", "succeeded", "errored", "errored"]
    message = got["one"].message
    assert (message.type, message.role, message.content[0].text, message.stop_reason) == (
        "message",
        "assistant",
        "Hello",
        "end_turn",
    )
    assert got["bad"].error.error.type == "invalid_request_error"
    assert "max_tokens" in got["bad"].error.error.message
    assert got["other"].error.error.type == "not_found_error"


def test_cancelled_batch_keeps_what_had_ended(tmp_path):
    done = []

    async def use(client, _):
        requests = [request("one"), request("slow", system="slow"), request("later", system="slow")]
        made = await client.messages.batches.create(requests=requests)
        await until(lambda: done)
        cancelled = await client.messages.batches.cancel(made.id)
        found = await ended(client, made.id)
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.batches.cancel(made.id)
        return cancelled, found, await results(client, made.id)

    cancelled, found, got = run(use, tmp_path, done=done)
    assert cancelled.processing_status in ("canceling", "ended")
    assert cancelled.cancel_initiated_at is not None
    assert (found.request_counts.succeeded, found.request_counts.canceled, found.request_counts.errored) == (1, 2, 0)
    assert {name: result.type for name, result in got.items()} == {"one": "succeeded", "slow": "canceled", "later": "canceled"}


def test_batches_are_listed_in_pages_apart_from_others_and_deleted(tmp_path):
    async def use(client, transport):
        made = [await client.messages.batches.create(requests=[request("one")]) for _ in range(3)]
        for one in made:
            await ended(client, one.id)
        listed = [one.id async for one in await client.messages.batches.list(limit=2)]
        page = await client.messages.batches.list(limit=1, before_id=made[0].id)
        deleted = await client.messages.batches.delete(made[1].id)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.retrieve(made[1].id)
        async with httpx2.AsyncClient(transport=transport, base_url=BASE) as plain:
            others = (await plain.get("/v1/batches")).json()
            files = (await plain.get("/v1/files")).json()
        return made, listed, page, deleted, others, files

    made, listed, page, deleted, others, files = run(use, tmp_path)
    ids = [one.id for one in made]
    assert listed == ids[::-1]
    assert ([one.id for one in page.data], page.has_more) == ([ids[1]], True)
    assert (deleted.id, deleted.type) == (ids[1], "message_batch_deleted")
    assert others["data"] == []
    assert len(files["data"]) == 4  # the input and the output of two


def test_batch_that_has_not_ended_is_neither_deleted_nor_read(tmp_path):
    async def use(client, transport):
        made = await client.messages.batches.create(requests=[request("slow", system="slow")])
        with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
            await client.messages.batches.delete(made.id)
        async with httpx2.AsyncClient(transport=transport, base_url=BASE) as plain:
            return (await plain.get(f"/v1/messages/batches/{made.id}/results")).json()

    assert "has not ended" in run(use, tmp_path)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"requests": []}, "requests"),
        ({"requests": [{"custom_id": "a b", "params": {}}]}, "requests[0].custom_id"),
        ({"requests": [{"custom_id": "a"}]}, "requests[0].params"),
        ({"requests": [request("a"), request("a")]}, "requests[1].custom_id"),
        ({"requests": [request("a", system="x" * (9 << 20))]}, "requests[0].params"),
    ],
    ids=["empty", "id", "params", "twice", "long"],
)
def test_field_at_fault_is_named(tmp_path, body, field):
    async def use(_, transport):
        async with httpx2.AsyncClient(transport=transport, base_url=BASE) as plain:
            answer = await plain.post("/v1/messages/batches", json=body)
            return answer, (await plain.get("/v1/files")).json()["data"]

    answer, files = run(use, tmp_path)
    assert (answer.status_code, answer.json()["error"]["type"], files) == (400, "invalid_request_error", [])
    assert field in answer.json()["error"]["message"]


def test_batch_over_the_quota_leaves_no_file(tmp_path):
    async def use(client, transport):
        await client.messages.batches.create(requests=[request("slow", system="slow")])
        with pytest.raises(anthropic.BadRequestError, match="batches"):
            await client.messages.batches.create(requests=[request("two")])
        async with httpx2.AsyncClient(transport=transport, base_url=BASE) as plain:
            return len((await plain.get("/v1/files")).json()["data"])

    assert run(use, tmp_path, max_batches=1) == 1


def test_streamed_request_is_an_error_of_its_own(tmp_path):
    async def use(client, _):
        made = await client.messages.batches.create(requests=[request("one", stream=True)])
        await ended(client, made.id)
        return (await results(client, made.id))["one"]

    assert "stream must be false" in run(use, tmp_path).error.error.message


def test_batch_of_another_owner_is_not_there(tmp_path):
    async def use(client, transport):
        made = await client.messages.batches.create(requests=[request("one")])
        bob = client_of(transport, "bob")
        batches, missing = bob.messages.batches, 0
        for ask in (batches.retrieve, batches.cancel, batches.delete, batches.results):
            with pytest.raises(anthropic.NotFoundError):
                await ask(made.id)
            missing += 1
        return missing, [one.id async for one in await batches.list()], (await ended(client, made.id)).request_counts.succeeded

    config = ServerConfig(api_keys=tuple(ApiKey(name, digest) for name, digest in KEYS.items()))
    assert run(use, tmp_path, config=config) == (4, [], 1)


def test_other_batches_do_not_call_messages(tmp_path):
    async def use(_, transport):
        async with httpx2.AsyncClient(transport=transport, base_url=BASE) as plain:
            body = {"input_file_id": "file-x", "endpoint": "/v1/messages", "completion_window": "24h"}
            return (await plain.post("/v1/batches", json=body)).json()["error"]

    error = run(use, tmp_path)
    assert error["param"] == "endpoint"
    assert "/v1/messages/batches" in error["message"]
