"""Stored responses: restarts, owners, lifetimes, and the routes that read them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sqlite3

import openai
import pytest

from quire.base.errors import ConfigError
from quire.serving.config import ApiKey, ServerConfig
from quire.serving.database import open_database
from quire.serving.errors import ApiError
from quire.serving.responses import conversation_table
from quire.serving.responses import store as store_module
from quire.serving.responses.store import LIFETIME_S, ResponseStore, StoredResponse
from tests.unit.serving.fakes import FakeGateway, make_served, text_script
from tests.unit.serving.real_app import running_app

PLAIN = make_served()
KEYS = {name: hashlib.sha256(name.encode()).digest() for name in ("ann", "bob")}
BODY = {"model": "demo", "input": "hi"}


def gateway():
    return FakeGateway(text_script(PLAIN.tokenizer, "Hello"))


def record(number, previous=None, size=1):
    before = None if previous is None else f"resp_{previous}"
    return StoredResponse(id=f"resp_{number}", previous_id=before, items=b"[]", body=b"x" * size)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


async def with_store(use, folder=None, **options):
    store = ResponseStore(folder, **options)
    try:
        return await use(store)
    finally:
        await store.close()


async def is_there(store, number, owner="ann"):
    try:
        await store.get(owner, f"resp_{number}")
    except ApiError:
        return False
    return True


def test_stored_response_survives_a_restart(tmp_path):
    async def work():
        async with running_app(gateway(), PLAIN, folder=tmp_path) as app:
            first = (await app.post("/v1/responses", BODY)).json()
        async with running_app(gateway(), PLAIN, folder=tmp_path) as app:
            async with app.http() as client:
                found = await client.get(f"/v1/responses/{first['id']}")
            second = await app.post("/v1/responses", {**BODY, "previous_response_id": first["id"]})
            prompt = PLAIN.tokenizer.decode(list(app.gateway.jobs[0].request.prompt_token_ids))
        return first, found.json(), second.json(), prompt

    first, found, second, prompt = asyncio.run(work())
    assert found == first
    assert second["previous_response_id"] == first["id"]
    assert "Hello" in prompt


def test_response_of_another_owner_is_not_there():
    async def work():
        config = ServerConfig(api_keys=tuple(ApiKey(name, digest) for name, digest in KEYS.items()))
        async with running_app(gateway(), PLAIN, config) as app:
            ann, bob = ({"authorization": f"Bearer {name}"} for name in KEYS)
            first = (await app.post("/v1/responses", BODY, **ann)).json()
            url = f"/v1/responses/{first['id']}"
            async with app.http(headers=bob) as client:
                answers = [
                    await client.get(url),
                    await client.delete(url),
                    await client.post(f"{url}/cancel"),
                    await client.get(f"{url}/input_items"),
                    await app.post("/v1/responses", {**BODY, "previous_response_id": first["id"]}, **bob),
                ]
            async with app.http(headers=ann) as client:
                own = await client.get(url)
            return answers, own

    answers, own = asyncio.run(work())
    assert [answer.status_code for answer in answers] == [404] * 5
    assert answers[-1].json()["error"]["param"] == "previous_response_id"
    assert own.status_code == 200


def test_routes_of_a_stored_response():
    async def work():
        async with running_app(gateway(), PLAIN) as app:
            client = openai.AsyncOpenAI(api_key="k", base_url="http://127.0.0.1/v1", http_client=app.http(), max_retries=0)
            items = [
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "4"},
            ]
            first = await client.responses.create(model="demo", input=items)
            listed = [item async for item in client.responses.input_items.list(first.id, limit=3)]
            assert [item.type for item in listed] == ["function_call_output", "function_call", "message", "message"]
            assert listed[2].content[0].type == "output_text"
            assert listed[3].content[0].text == "one"
            page = await client.responses.input_items.list(first.id, order="asc", limit=1)
            assert (page.data[0].content[0].text, page.has_more) == ("one", True)
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.cancel(first.id)
            assert caught.value.code == "response_not_cancellable"
            async with app.http() as plain:
                refused = [
                    await plain.get(f"/v1/responses/{first.id}{rest}")
                    for rest in ("?stream=true", "/input_items?limit=0", "/input_items?order=up")
                ]
                assert [answer.status_code for answer in refused] == [400] * 3
                assert (await plain.get(f"/v1/responses/{first.id}/input_items?after=x")).status_code == 400
                deleted = await plain.delete(f"/v1/responses/{first.id}")
                assert deleted.json() == {"id": first.id, "object": "response", "deleted": True}
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(first.id)

    asyncio.run(work())


def test_response_is_not_stored_when_store_is_false():
    async def work():
        async with running_app(gateway(), PLAIN) as app:
            first = (await app.post("/v1/responses", {**BODY, "store": False})).json()
            async with app.http() as client:
                return first, await client.get(f"/v1/responses/{first['id']}")

    first, found = asyncio.run(work())
    assert first["store"] is False
    assert found.status_code == 404


def test_response_goes_after_thirty_days_and_takes_what_it_went_on_from_along():
    async def use(store):
        await store.put("ann", record(1))
        await store.put("ann", record(9))
        clock.now += LIFETIME_S - 10
        await store.put("ann", record(2, previous=1))
        clock.now += 20
        assert [found.id for found in await store.history("ann", "resp_2")] == ["resp_1", "resp_2"]
        assert not await is_there(store, 9)
        clock.now += LIFETIME_S
        await store.put("ann", record(3))
        assert [await is_there(store, number) for number in (1, 2, 3)] == [False, False, True]

    clock = Clock()
    asyncio.run(with_store(use, clock=clock))


def test_conversation_with_a_gap_is_not_there():
    async def use(store):
        for number in range(1, 4):
            await store.put("ann", record(number, previous=number - 1 or None))
        await store.delete("ann", "resp_2")
        with pytest.raises(ApiError) as caught:
            await store.history("ann", "resp_3")
        assert (caught.value.status, caught.value.param) == (404, "previous_response_id")
        assert "an earlier response of this conversation, 'resp_2', is gone, so 'resp_3' cannot" in caught.value.message
        with pytest.raises(ApiError, match="there is no response 'resp_2'"):
            await store.history("ann", "resp_2")

    asyncio.run(with_store(use))


def test_conversation_that_is_too_long_is_refused(monkeypatch):
    async def use(store):
        for number in range(1, 6):
            await store.put("ann", record(number, previous=number - 1 or None))
        assert len(await store.history("ann", "resp_4")) == 4
        with pytest.raises(ApiError) as caught:
            await store.history("ann", "resp_5")
        assert caught.value.status == 400

    monkeypatch.setattr(store_module, "MAX_CHAIN", 4)
    asyncio.run(with_store(use))


def test_conversation_with_too_many_bytes_is_refused(monkeypatch):
    async def use(store):
        for number in range(1, 4):
            await store.put("ann", record(number, previous=number - 1 or None))
        one = len(record(1).items) + len(record(1).body)
        monkeypatch.setattr(conversation_table, "MAX_HISTORY_BYTES", 2 * one + one // 2)
        assert len(await store.history("ann", "resp_2")) == 2
        with pytest.raises(ApiError) as caught:
            await store.history("ann", "resp_3")
        assert (caught.value.status, caught.value.code) == (400, "conversation_full")

    asyncio.run(with_store(use))


def test_oldest_responses_go_when_memory_is_full():
    async def use(store):
        for number in range(6):
            clock.now += 1
            await store.put("ann", record(number, size=100))
        return [await is_there(store, number) for number in range(6)]

    clock = Clock()
    assert asyncio.run(with_store(use, clock=clock, max_memory_bytes=310)) == [False] * 3 + [True] * 3


def test_oldest_responses_of_the_owner_go_that_has_more_than_its_share(tmp_path):
    async def use(store):
        for number in range(4):
            clock.now += 1
            await store.put("ann", record(number, size=100))
            await store.put("bob", record(10 + number, size=100))
        await store.delete("bob", record(13).id)
        await store.put("bob", record(14, size=100))
        await store.put("bob", record(15, size=10_000))  # the latest stays, whatever its size
        return [
            [await is_there(store, number, owner) for number in numbers]
            for owner, numbers in (("ann", range(4)), ("bob", range(10, 16)))
        ]

    clock = Clock()
    limits = {"ann": 1 << 20, "bob": 210}.__getitem__
    for _ in range(2):  # what was stored before counts
        found = asyncio.run(with_store(use, folder=tmp_path, clock=clock, limit_of=limits))
        assert found == [[True] * 4, [False] * 5 + [True]]
        with sqlite3.connect(tmp_path / "responses.sqlite") as database:
            assert database.execute("SELECT COUNT(*) FROM response").fetchone() == (5,)
            database.execute("DELETE FROM response WHERE owner='ann'")


def test_one_owner_cannot_push_out_what_another_has_when_memory_is_full():
    async def use(store):
        await store.put("ann", record(0, size=100))
        for number in range(1, 10):
            clock.now += 1
            await store.put("bob", record(number, size=100))
        return await is_there(store, 0, "ann"), await is_there(store, 9, "bob"), await is_there(store, 1, "bob")

    clock = Clock()
    assert asyncio.run(with_store(use, clock=clock, max_memory_bytes=410)) == (True, True, False)


def test_folder_of_another_version_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / "responses.sqlite") as database:
        database.execute("PRAGMA user_version=99")
    with pytest.raises(ConfigError, match="another version"):
        ResponseStore(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="data_dir"):
        ResponseStore(tmp_path / "file")


def test_broken_database_is_a_503(tmp_path):
    async def use(store):
        with contextlib.closing(sqlite3.connect(tmp_path / "responses.sqlite")) as database:
            database.execute("DROP TABLE response")
        with pytest.raises(ApiError) as caught:
            await store.put("ann", record(1))
        return caught.value

    error = asyncio.run(with_store(use, folder=tmp_path))
    assert (error.status, error.code) == (503, "storage_full")


def test_closed_store_refuses_and_has_kept_what_was_begun(tmp_path):
    async def work():
        store = ResponseStore(tmp_path)
        putting = asyncio.create_task(store.put("ann", record(1)))
        await asyncio.sleep(0)
        await store.close()
        await putting
        with pytest.raises(ApiError) as caught:
            await store.get("ann", "resp_1")
        return caught.value

    assert asyncio.run(work()).code == "draining"
    assert asyncio.run(with_store(lambda store: is_there(store, 1), folder=tmp_path))


class FailingCommits:
    """A database whose next commits fail, as on a disk that is full."""

    def __init__(self, database):
        self._database = database
        self.num_failures = 1

    def __getattr__(self, name):
        return getattr(self._database, name)

    def execute(self, sql, *args):
        if sql == "COMMIT" and self.num_failures:
            self.num_failures -= 1
            raise sqlite3.OperationalError("disk I/O error")
        return self._database.execute(sql, *args)


def test_store_goes_on_after_a_commit_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.serving.responses.store.open_database", lambda *args: FailingCommits(open_database(*args)))

    async def use(store):
        with pytest.raises(ApiError) as caught:
            await store.put("ann", record(1))
        assert caught.value.code == "storage_full"
        assert not await is_there(store, 1)
        await store.put("ann", record(2))
        return await is_there(store, 2)

    assert asyncio.run(with_store(use, folder=tmp_path))
