"""Backends come and go while the router runs; requests about stored objects reach the backend that has them."""

import asyncio

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.router.config import RouterConfig
from quire.router.main import allowed_hosts
from tests.unit.router.fake_backend import FakeBackend, backends, begin_stream, end_stream, respond, routing, run, send_chunk

KEY = {"authorization": "Bearer admin"}


def test_backend_is_added_drained_and_removed_while_a_stream_runs():
    may_end = asyncio.Event()

    async def answer(request, writer):
        await begin_stream(writer)
        await send_chunk(writer, b"data: 1\n\n")
        await may_end.wait()
        await end_stream(writer)

    async def work():
        first, second = FakeBackend(answer=answer), FakeBackend("m", "n")
        async with backends(first, second), routing(first) as router:
            client = router.client
            streaming = asyncio.create_task(router.post({"model": "m", "stream": True}))
            await router.until(lambda: first.requests)
            added = await client.post("/router/backends", json={"url": second.url}, headers=KEY)
            assert (added.status_code, added.json()["state"]) == (201, "starting")
            assert (await client.post("/router/backends", json={"url": second.url}, headers=KEY)).status_code == 409
            await router.all_ready()
            drained = await client.post(f"/router/backends/{first.name}/drain", headers=KEY)
            assert (drained.json()["is_draining"], drained.json()["num_in_flight"]) == (True, 1)
            for _ in range(3):
                assert (await router.post({"model": "m"})).json()["backend"] == second.name
            assert (await client.delete(f"/router/backends/{first.name}", headers=KEY)).status_code == 200
            listed = (await client.get("/router/backends", headers=KEY)).json()["backends"]
            assert [(one["name"], one["models"]) for one in listed] == [(second.name, ["m", "n"])]
            may_end.set()
            assert (await streaming).content == b"data: 1\n\n"
            assert (await client.delete(f"/router/backends/{second.name}", headers=KEY)).status_code == 200
            assert (await router.post({"model": "m"})).status_code == 503

    run(work())


def test_drained_backend_is_resumed():
    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake) as router:
            await router.client.post(f"/router/backends/{fake.name}/drain", headers=KEY)
            assert (await router.post({"model": "m"})).status_code == 503
            await router.client.post(f"/router/backends/{fake.name}/resume", headers=KEY)
            assert (await router.post({"model": "m"})).status_code == 200

    run(work())


def test_admin_api_needs_its_key_and_says_what_is_wrong():
    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake) as router:
            client = router.client
            assert (await client.get("/router/backends")).status_code == 401
            assert (await client.get("/router/backends", headers={"authorization": "Bearer x"})).status_code == 401
            for body in ({"url": "nowhere"}, {"url": 3}, {}, {"url": fake.url, "x": 1}, []):
                assert (await client.post("/router/backends", json=body, headers=KEY)).status_code == 400
            unknown = await client.delete("/router/backends/a:1", headers=KEY)
            assert (unknown.status_code, fake.name in unknown.text) == (404, True)
            assert (await client.put("/router/backends", headers=KEY)).status_code == 405
            assert (await client.post(f"/router/backends/{fake.name}/explode", headers=KEY)).status_code == 404
        async with backends(FakeBackend()) as (fake,), routing(fake, admin_key=None) as router:
            assert (await router.client.get("/router/backends", headers=KEY)).status_code == 403

    run(work())


def storing(fake, object_id):
    """Let a backend make an object of an id and know it."""
    made = []

    async def answer(request, writer):
        path, method = request["path"], request["method"]
        if method == "POST" and path.count("/") == 2 and path != "/v1/completions":
            made.append(object_id)
            await respond(writer, {"id": object_id, "backend": fake.name})
        elif method == "GET" and path.count("/") > 2 and path.split("/")[3] not in made:
            await respond(writer, {"error": "unknown"}, 404)
        else:
            await respond(writer, {"backend": fake.name, "path": path})

    fake.answer = answer
    return fake


def test_stored_response_is_found_where_it_was_made():
    async def work():
        first, second = storing(FakeBackend(), "resp_first"), storing(FakeBackend(), "resp_second")
        async with backends(first, second), routing(first, second, policy="round-robin") as router:
            made = [(await router.post({"model": "m", "input": "x"}, "/v1/responses")).json() for _ in range(2)]
            for one in made * 2:
                got = (await router.client.get(f"/v1/responses/{one['id']}/input_items")).json()
                assert got["backend"] == one["backend"]
                body = {"model": "m", "input": "y", "previous_response_id": one["id"]}
                assert (await router.post(body, "/v1/responses")).json()["backend"] == one["backend"]
            assert (await router.client.get("/v1/responses/resp_nowhere")).status_code == 404
        # A router that knows nothing asks the backends.
        async with backends(first, second), routing(first, second) as router:
            for one in made:
                assert (await router.client.delete(f"/v1/responses/{one['id']}")).json()["backend"] == one["backend"]
            second.is_ready = False
            await router.until(lambda: router.backend(second).state == "unhealthy")
            got = await router.client.get("/v1/responses/resp_second")
            assert (got.status_code, got.json()["error"]["code"]) == (503, "backend_unavailable")
            assert (await router.client.get("/v1/responses/resp_unknown")).status_code == 503

    run(work())


def test_object_whose_id_begins_with_a_servers_own_is_asked_of_it_alone():
    async def work():
        fakes = [storing(FakeBackend(load={"replica_id": name}), f"resp_{name}1") for name in ("aaaa", "bbbb", "cccc")]
        async with backends(*fakes):
            async with routing(*fakes, policy="round-robin") as router:
                for _ in fakes:
                    await router.post({"model": "m", "input": "x"}, "/v1/responses")
            async with routing(*fakes) as router:  # knows of nothing
                await router.until(lambda: all(router.backend(fake).replica_id for fake in fakes))
                assert (await router.client.delete("/v1/responses/resp_cccc1")).json()["backend"] == fakes[2].name
        assert [len(fake.requests) for fake in fakes] == [1, 1, 3]  # the last is asked whether it has it

    run(work())


def test_response_of_a_conversation_goes_where_the_conversation_is():
    async def work():
        fakes = [storing(FakeBackend(), "conv_first"), storing(FakeBackend(), "conv_second")]
        async with backends(*fakes), routing(*fakes, policy="round-robin") as router:
            made = [(await router.post({}, "/v1/conversations")).json() for _ in range(2)]
            assert {one["id"] for one in made} == {"conv_first", "conv_second"}
            for one in made * 2:
                got = (await router.client.get(f"/v1/conversations/{one['id']}/items")).json()
                assert got["backend"] == one["backend"]
                for conversation in (one["id"], {"id": one["id"]}):
                    body = {"model": "m", "input": "y", "conversation": conversation}
                    assert (await router.post(body, "/v1/responses")).json()["backend"] == one["backend"]

    run(work())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/responses", "previous_response_id"),
        ("/v1/responses", "conversation"),
        ("/v1/batches", "input_file_id"),
    ],
)
@pytest.mark.parametrize(
    "object_id",
    [
        "x HTTP/1.1\r\nhost: a\r\n\r\nPOST /v1/load_lora_adapter HTTP/1.1\r\nhost: a\r\n\r\n",
        *("../requests/timelines", "x?limit=1", "x y", "é", "x" * 300),
    ],
)
def test_id_in_a_body_never_becomes_another_request(path, field, object_id):
    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake) as router:
            assert (await router.post({"model": "m", "input": "x", field: object_id}, path)).status_code == 404
            assert fake.requests == []

    run(work())


def test_body_that_is_nested_too_deeply_is_refused():
    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake) as router:
            body = b'{"model": "m", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
            answer = await router.client.post("/v1/completions", content=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")

    run(work())


def test_message_batch_goes_where_it_was_made():
    async def work():
        fakes = [FakeBackend(), FakeBackend()]
        async with backends(*fakes), routing(*fakes) as router:
            home = (await router.client.get("/v1/messages/batches")).json()["backend"]
            assert (await router.post({"requests": []}, "/v1/messages/batches")).json()["backend"] == home

    run(work())


def test_deployment_in_the_path_is_the_model():
    async def work():
        config = {"aliases": {"gpt": "m"}}
        async with backends(FakeBackend()) as (fake,), routing(fake, **config) as router:
            await router.until(lambda: router.backend(fake).models)
            for name in ("m", "gpt"):
                answer = await router.post(
                    {"model": "x", "messages": []}, f"/openai/deployments/{name}/chat/completions?api-version=1"
                )
                assert answer.json() == {"backend": fake.name, "model": "m"}
                assert fake.requests[-1]["path"] == "/v1/chat/completions"
            assert (await router.post({}, "/openai/deployments/none/completions")).status_code == 404
            assert (await router.post({}, "/openai/deployments/m/other")).status_code == 404

    run(work())


def test_upload_goes_through_as_it_comes_and_its_batch_follows():
    async def work():
        fakes = [storing(FakeBackend(), "file-1"), storing(FakeBackend(), "file-2")]
        async with backends(*fakes), routing(*fakes, max_body_bytes=1000) as router:
            data = b"x" * 300_000
            made = (await router.client.post("/v1/files", files={"file": ("a.jsonl", data)})).json()
            (fake,) = [fake for fake in fakes if fake.name == made["backend"]]
            assert data in fake.requests[0]["body"]
            batch = await router.post({"input_file_id": made["id"]}, "/v1/batches")
            assert batch.json()["backend"] == fake.name
            assert (await router.client.get("/v1/files")).json()["backend"] == fake.name

    run(work())


def test_foreign_host_name_is_refused():
    async def work():
        config = RouterConfig(admin_key="x")
        assert allowed_hosts(RouterConfig(admin_key="x", host="0.0.0.0")) is None
        async with backends(FakeBackend()) as (fake,), routing(fake, allowed_hosts=allowed_hosts(config)) as router:
            assert (await router.post({"model": "m"})).status_code == 200
            assert (await router.post({"model": "m"}, headers={"host": "evil.example"})).status_code == 403

    run(work())


def test_client_that_goes_in_an_upload_is_not_the_backends_fault():
    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake) as router:
            _, writer = await asyncio.open_connection("127.0.0.1", router.port)
            head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=x\r\n"
            writer.write(head + b"content-length: 1000\r\n\r\n" + b"x" * 500)
            await router.until(lambda: router.backend(fake).num_in_flight == 1)
            writer.close()
            await router.until(lambda: router.backend(fake).num_in_flight == 0)
            assert router.backend(fake).num_failures == 0
            assert await router.metric("requests_total", code="499") == 1
            assert await router.metric("backend_failures_total") == 0

    run(work())


def test_response_of_another_models_server_is_named():
    async def answer(request, writer):
        known = request["path"].endswith("resp_1") or request["method"] == "POST"
        await respond(writer, {"id": "resp_1"}, 200 if known else 404)

    async def work():
        first, second = FakeBackend("m", answer=answer), FakeBackend("n")
        async with backends(first, second), routing(first, second) as router:
            body = {"model": "n", "input": "x", "previous_response_id": "resp_1"}
            got = await router.post(body, "/v1/responses")
            error = got.json()["error"]
            assert (got.status_code, error["param"], error["code"]) == (400, "previous_response_id", "model_mismatch")
            assert "kept by a server of m, which does not serve the model 'n'" in error["message"]
            assert (await router.post({**body, "model": "m"}, "/v1/responses")).status_code == 200

    run(work())


def test_clients_of_ollama_reach_models_by_name_and_see_them_listed():
    async def work():
        async with backends(FakeBackend("m"), FakeBackend("n")) as fakes, routing(*fakes, aliases={"gpt": "n"}) as router:
            for name, model, fake in (("m", "m", fakes[0]), ("n:latest", "n", fakes[1]), ("gpt:latest", "n", fakes[1])):
                got = await router.post({"model": name, "messages": []}, "/api/chat")
                assert got.json() == {"backend": fake.name, "model": model}
            assert (await router.post({"name": "n"}, "/api/show")).json()["backend"] == fakes[1].name
            for path, names in {"/api/tags": ["m", "n", "gpt"], "/api/ps": ["m", "n"]}.items():
                assert [one["name"] for one in (await router.client.get(path)).json()["models"]] == names
            assert (await router.client.get("/api/version")).json().keys() == {"version"}
            unknown = await router.post({"model": "x"}, "/api/generate")
            assert unknown.status_code == 404
            assert "no backend serves the model 'x'" in unknown.json()["error"]
            assert (await router.post({"model": "m"}, "/api/pull")).status_code == 404

    run(work())
