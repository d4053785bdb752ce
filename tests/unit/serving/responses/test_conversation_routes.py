"""Conversations: their routes with the official client, responses that continue them, owners, limits and lifetimes."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from contextlib import closing

import openai
import pytest

from quire.serving.config import ApiKey, ServerConfig
from quire.serving.errors import ApiError
from quire.serving.responses import conversation_table
from quire.serving.responses.conversation_table import StoredConversation
from quire.serving.responses.store import LIFETIME_S, StoredResponse
from tests.unit.serving.fakes import FakeGateway, text_script
from tests.unit.serving.real_app import running_app
from tests.unit.serving.responses.asking_responses import CALL, TOOL, TOOLED, prompt_of
from tests.unit.serving.responses.test_response_store import with_store

KEYS = {name: hashlib.sha256(name.encode()).digest() for name in ("ann", "bob")}


def gateway(*texts):
    return FakeGateway(text_script(TOOLED.tokenizer, *(texts or ("Hello",))))


def run(use, where=None, **options):
    """Run `use(client, app)` with the official client over the real application."""

    async def work():
        async with running_app(where or gateway(), TOOLED, **options) as app:
            client = openai.AsyncOpenAI(api_key="k", base_url="http://127.0.0.1/v1", http_client=app.http(), max_retries=0)
            return await use(client, app)

    return asyncio.run(work())


def message(text, role="user", **fields):
    return {"type": "message", "role": role, "content": text, **fields}


async def texts_of(client, conversation_id):
    items = [item async for item in client.conversations.items.list(conversation_id, order="asc")]
    return [item.content[0].text if item.type == "message" else item.type for item in items]


def test_conversation_is_created_changed_and_deleted():
    async def use(client, app):
        made = await client.conversations.create(metadata={"topic": "a"}, items=[message("one")])
        found = await client.conversations.retrieve(made.id)
        changed = await client.conversations.update(made.id, metadata={"topic": "b"})
        again = await client.conversations.retrieve(made.id)
        deleted = await client.conversations.delete(made.id)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.conversations.items.list(made.id)
        return made, found, changed, again, deleted, caught.value

    made, found, changed, again, deleted, error = run(use)
    assert (made.object, made.metadata, made == found) == ("conversation", {"topic": "a"}, True)
    assert (changed.metadata, again) == ({"topic": "b"}, changed)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "conversation.deleted", True)
    assert (error.param, made.id in error.message) == ("conversation_id", True)


def test_items_are_added_listed_in_pages_read_and_deleted():
    async def use(client, app):
        made = await client.conversations.create(items=[message("m0")])
        added = await client.conversations.items.create(made.id, items=[message(f"m{n}") for n in range(1, 5)])
        newest = await client.conversations.items.list(made.id, limit=2)
        listed = [item.content[0].text async for item in client.conversations.items.list(made.id, limit=2)]
        after = await client.conversations.items.list(made.id, order="asc", after=added.data[1].id)
        one = await client.conversations.items.retrieve(added.data[0].id, conversation_id=made.id)
        kept = await client.conversations.items.delete(added.data[0].id, conversation_id=made.id)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.conversations.items.retrieve(added.data[0].id, conversation_id=made.id)
        return made, added, newest, listed, after, one, kept, caught.value, await texts_of(client, made.id)

    made, added, newest, listed, after, one, kept, error, left = run(use)
    assert [item.content[0].text for item in added.data] == ["m1", "m2", "m3", "m4"]
    assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[3].id, False)
    assert ([item.id for item in newest.data], newest.has_more) == ([added.data[3].id, added.data[2].id], True)
    assert listed == ["m4", "m3", "m2", "m1", "m0"]
    assert [item.content[0].text for item in after.data] == ["m3", "m4"]
    assert one == added.data[0]
    assert kept.id == made.id
    assert error.param == "item_id"
    assert left == ["m0", "m2", "m3", "m4"]


@pytest.mark.parametrize("how", ["plain", "stream", "background", "not stored"])
def test_response_continues_a_conversation_and_is_appended(how):
    async def use(client, app):
        made = await client.conversations.create(items=[message("first question"), message("first answer", "assistant")])
        options = {"background": how == "background", "store": how != "not stored"}
        asked = {"model": "demo", "input": "second", "conversation": made.id}
        if how == "stream":
            events = [event async for event in await client.responses.create(stream=True, **asked)]
            response = events[-1].response
        else:
            response = await client.responses.create(**asked, **options)
        for _ in range(3000):
            if len(await texts_of(client, made.id)) == 4:
                break
            await asyncio.sleep(0.01)
        second = await client.responses.create(model="demo", input="third", conversation={"id": made.id})
        return made, response, second, await texts_of(client, made.id), app.gateway

    made, response, second, texts, where = run(use)
    assert response.conversation.id == second.conversation.id == made.id
    assert texts == ["first question", "first answer", "second", "Hello", "third", "Hello"]
    prompt = prompt_of(where, 1)
    places = [prompt.index(text) for text in ("first question", "first answer", "second", "Hello", "third")]
    assert places == sorted(places)


def test_call_of_a_function_and_its_output_are_of_the_conversation():
    async def use(client, app):
        made = await client.conversations.create()
        asked = {"model": "demo", "conversation": made.id, "tools": [TOOL]}
        first = await client.responses.create(input="hi", **asked)
        output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "42"}
        await client.responses.create(input=[output], **asked)
        counted = await client.responses.input_tokens.count(model="demo", input="more", conversation=made.id)
        return await texts_of(client, made.id), prompt_of(app.gateway, 1), counted.input_tokens

    texts, prompt, num_tokens = run(use, gateway(CALL))
    assert texts == ["hi", "function_call", "function_call_output", "function_call"]
    assert "42" in prompt
    assert num_tokens > 10


def test_response_that_fails_or_is_cancelled_is_not_appended():
    def play(job):
        yield ApiError(503, "the engine has died", code="engine_unavailable")

    async def use(client, app):
        made = await client.conversations.create()
        asked = {"model": "demo", "input": "hi", "conversation": made.id}
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(**asked)
        response = await client.responses.create(background=True, **asked)
        while response.status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            response = await client.responses.retrieve(response.id)
        return response.status, await texts_of(client, made.id)

    assert run(use, FakeGateway(play)) == ("failed", [])


def test_conversation_that_is_deleted_meanwhile_does_not_fail_the_response():
    async def use(client, app):
        made = await client.conversations.create()
        events = await client.responses.create(model="demo", input="hi", conversation=made.id, stream=True)
        found = []
        async for event in events:
            if not found:
                await client.conversations.delete(made.id)
            found.append(event)
        return found[-1]

    assert run(use).type == "response.completed"


def test_item_whose_id_is_there_already_gets_a_new_one_in_a_response_and_is_refused_where_it_is_added():
    async def use(client, app):
        made = await client.conversations.create(items=[message("one", id="msg_mine")])
        with pytest.raises(openai.BadRequestError) as caught:
            await client.conversations.items.create(made.id, items=[message("x"), message("two", id="msg_mine")])
        await client.responses.create(model="demo", input=[message("two", id="msg_mine")], conversation=made.id)
        items = [item.id async for item in client.conversations.items.list(made.id, order="asc")]
        return caught.value.param, items, await texts_of(client, made.id)

    param, ids, texts = run(use)
    assert param == "items[1].id"
    assert texts == ["one", "two", "Hello"]
    assert ids[0] == "msg_mine"
    assert len(set(ids)) == 3
    assert all(name.startswith("msg_") for name in ids)


def test_conversation_of_another_owner_is_not_there():
    config = ServerConfig(api_keys=tuple(ApiKey(name, digest) for name, digest in KEYS.items()))

    async def use(_, app):
        ann, bob = ({"authorization": f"Bearer {name}"} for name in KEYS)
        made = (await app.post("/v1/conversations", {"items": [message("x", id="msg_1")]}, **ann)).json()
        url = f"/v1/conversations/{made['id']}"
        async with app.http(headers=bob) as client:
            answers = [
                await client.get(url),
                await client.delete(url),
                await client.post(url, json={"metadata": {}}),
                await client.get(f"{url}/items"),
                await client.post(f"{url}/items", json={"items": [message("y")]}),
                await client.get(f"{url}/items/msg_1"),
                await client.delete(f"{url}/items/msg_1"),
                await client.post("/v1/responses", json={"model": "demo", "input": "hi", "conversation": made["id"]}),
            ]
        async with app.http(headers=ann) as client:
            return [answer.status_code for answer in answers], (await client.get(f"{url}/items")).json()

    statuses, items = run(use, config=config)
    assert statuses == [404] * 8
    assert [item["id"] for item in items["data"]] == ["msg_1"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [message("x")] * 21}, "items"),
        ("", {"items": [{"type": "message", "role": "user"}]}, "items[0].content"),
        ("", {"metadata": {"a": 1}}, "metadata[...]"),
        ("/{id}", {}, "metadata"),
        ("/{id}/items", {"items": []}, "items"),
        ("/{id}/items", {"items": [{"type": "image"}]}, "items[0].type"),
    ],
)
def test_field_at_fault_is_named(path, body, param):
    async def use(client, app):
        made = await client.conversations.create()
        return await app.post("/v1/conversations" + path.replace("{id}", made.id), body)

    answer = run(use)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "order=up", "after=msg_none"])
def test_wrong_query_is_refused(query):
    async def use(client, app):
        made = await client.conversations.create()
        async with app.http() as plain:
            return await plain.get(f"/v1/conversations/{made.id}/items?{query}")

    answer = run(use)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.split("=")[0])


def test_conversation_that_is_full_is_refused(monkeypatch):
    monkeypatch.setattr(conversation_table, "MAX_ITEMS", 3)

    async def use(client, app):
        made = await client.conversations.create(items=[message("x")] * 2)
        codes = []
        for ask in (
            lambda: client.conversations.items.create(made.id, items=[message("x")] * 2),
            lambda: client.responses.create(model="demo", input="hi", conversation=made.id),
            lambda: client.responses.create(model="demo", input="hi", conversation=made.id),
        ):
            try:
                codes.append((await ask()).object)
            except openai.BadRequestError as error:
                codes.append(error.code)
        return codes

    assert run(use) == ["conversation_full", "response", "conversation_full"]


def test_conversation_survives_a_restart(tmp_path):
    async def work():
        async with running_app(gateway(), TOOLED, folder=tmp_path) as app:
            made = (await app.post("/v1/conversations", {"items": [message("before")]})).json()
        async with running_app(gateway(), TOOLED, folder=tmp_path) as app:
            await app.post("/v1/responses", {"model": "demo", "input": "hi", "conversation": made["id"]})
            return prompt_of(app.gateway)

    assert "before" in asyncio.run(work())


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def stored(number):
    return StoredConversation(id=f"conv_{number}", created_at=0, metadata=b"{}")


async def put(store, number, owner="ann", size=1):
    items = [{"id": "msg_1", "text": "x" * size}]
    await store.conversation(lambda table, _, expires_at: table.add(owner, stored(number), items, expires_at))


async def there(store, number, owner="ann"):
    try:
        await store.conversation(lambda table, now, _: table.get(owner, f"conv_{number}", now))
    except ApiError:
        return False
    return True


def test_conversation_goes_thirty_days_after_its_last_change(tmp_path):
    clock = Clock()

    async def use(store):
        for number in (1, 2):
            await put(store, number)
        clock.now += LIFETIME_S - 10
        answer = b'{"status":"completed","output":[{"id":"msg_2"}]}'
        await store.append("ann", "conv_1", b"[]", answer)
        clock.now += 20
        found = [await there(store, number) for number in (1, 2)]
        with closing(sqlite3.connect(tmp_path / "responses.sqlite")) as database:
            rows = database.execute("SELECT conversation_id, id FROM conversation_item").fetchall()
        clock.now += LIFETIME_S
        return found, rows, await there(store, 1)

    found, rows, last = asyncio.run(with_store(use, folder=tmp_path, clock=clock))
    assert found == [True, False]
    assert rows == [("conv_1", "msg_1"), ("conv_1", "msg_2")]  # those of the other went with it
    assert last is False


def test_oldest_responses_and_conversations_of_an_owner_go_when_it_has_too_much():
    clock = Clock()

    async def use(store):
        await put(store, 1, size=1000)
        clock.now += 1
        await store.put("ann", StoredResponse(id="resp_1", previous_id=None, items=b"[]", body=b"x" * 1000))
        await put(store, 9, owner="bob", size=1000)
        clock.now += 1
        await put(store, 2, size=1000)
        first = [await there(store, 1), await there(store, 2), await there(store, 9, "bob")]
        clock.now += 1
        await put(store, 3, size=1200)
        with pytest.raises(ApiError):
            await store.get("ann", "resp_1")
        return first, [await there(store, number) for number in (2, 3)]

    limits = {"ann": 3500, "bob": 1 << 20}.__getitem__
    assert asyncio.run(with_store(use, clock=clock, limit_of=limits)) == ([False, True, True], [True, True])


def test_bytes_of_conversations_are_counted_as_they_are_stored():
    async def use(store):
        await put(store, 1, size=1000)
        await put(store, 2, size=10)
        await store.conversation(lambda table, now, expires_at: table.update("ann", "conv_1", b'{"a":"b"}', now, expires_at))
        await store.conversation(
            lambda table, now, expires_at: table.add_items("ann", "conv_1", [{"id": "msg_2"}], now, expires_at)
        )
        await store.append("ann", "conv_2", b'[{"id":"msg_2"}]', b'{"status":"incomplete","output":[{"id":"msg_3"}]}')
        await store.conversation(lambda table, now, _: table.delete_item("ann", "conv_1", "msg_1", now))
        before = await store.thread.call(lambda table: (dict(table.num_bytes), table.count_bytes()))
        await store.conversation(lambda table, now, _: table.delete("ann", "conv_1", now))
        after = await store.thread.call(lambda table: (dict(table.num_bytes), table.count_bytes()))
        return before, after

    before, after = asyncio.run(with_store(use))
    assert before[0] == before[1]
    assert after[0] == after[1]
    assert 0 < after[0]["ann"] < before[0]["ann"]


def test_conversation_is_refused_where_none_are_stored():
    from quire.api.openai.responses import ResponsesRequest
    from quire.serving.core.caller import Caller
    from quire.serving.responses.create import ResponseRoutes, respond
    from tests.unit.serving.fakes import OWNER, make_context

    async def work():
        routes = ResponseRoutes(make_context(gateway(), TOOLED), keeps_responses=False)
        body = ResponsesRequest(model="demo", input="hi", conversation="conv_1")
        await respond(routes, body, Caller(owner=OWNER, route="/v1/responses"))

    with pytest.raises(ApiError, match="conversation: no conversations are stored here"):
        asyncio.run(work())


def test_conversation_with_too_many_bytes_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(conversation_table, "MAX_HISTORY_BYTES", 1000)

    async def use(client, app):
        made = await client.conversations.create(items=[message("x" * 1100)])
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="demo", input="hi", conversation=made.id)
        return caught.value.code, caught.value.param

    assert run(use) == ("conversation_full", "conversation")
