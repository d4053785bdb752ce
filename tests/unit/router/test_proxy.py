"""The router in front of fake backends on real sockets: bytes, retries, health, models, memory, errors."""

import asyncio
import hashlib
import json

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from tests.unit.router.fake_backend import FakeBackend, backends, begin_stream, end_stream, respond, routing, run, send_chunk

PIECES = [b'data: {"n": 1}\n\n', b": keep-alive\n\n", 'data: {"t": "é\u2028"}\r\n\r\n'.encode(), b"data: [DONE]\n\n"]


async def stream_pieces(request, writer):
    await begin_stream(writer)
    for piece in PIECES:
        await send_chunk(writer, piece)
        await asyncio.sleep(0.01)
    await end_stream(writer)


def test_stream_passes_through_byte_for_byte():
    async def work():
        async with backends(FakeBackend(answer=stream_pieces)) as (fake,), routing(fake) as router:
            answer = await router.post({"model": "m", "prompt": "x", "stream": True})
            assert answer.content == b"".join(PIECES)
            assert answer.headers["content-type"] == "text/event-stream"
            assert fake.requests[0]["body"] == b'{"model":"m","prompt":"x","stream":true}'

    run(work())


def test_answers_of_ollamas_api_are_streams_unless_a_request_says_otherwise():
    """What prompts cost is learned from streams alone."""

    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake) as router:
            found = []

            async def answer(request, writer):
                found.extend(flight.is_streaming for flight in router.backend(fake).flights)
                await respond(writer, {})

            fake.answer = answer
            for path in ("/api/chat", "/api/generate", "/api/embed", "/v1/chat/completions"):
                for more in ({}, {"stream": True}, {"stream": False}, {"stream": None}):
                    await router.post({"model": "m", **more}, path)
            asked = [True, True, False, True], [False, True, False, False]
            assert found == [*asked[0], *asked[0], *asked[1], *asked[1]]

    run(work())


def test_pieces_arrive_before_the_end_of_the_stream():
    async def work():
        may_end = asyncio.Event()

        async def answer(request, writer):
            await begin_stream(writer)
            await send_chunk(writer, b"data: 1\n\n")
            await may_end.wait()
            await end_stream(writer)

        body = {"model": "m", "stream": True}
        async with (
            backends(FakeBackend(answer=answer)) as (fake,),
            routing(fake) as router,
            router.client.stream("POST", "/v1/completions", json=body) as response,
        ):
            pieces = response.aiter_raw()
            assert await anext(pieces) == b"data: 1\n\n"
            may_end.set()
            assert [piece async for piece in pieces] == []

    run(work())


def test_connections_to_a_backend_are_used_again():
    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake, health_interval_s=60) as router:
            for _ in range(5):
                assert (await router.post({"model": "m"})).status_code == 200
            assert fake.num_connections == 1

    run(work())


def test_headers_pass_both_ways_but_those_of_the_connection():
    async def answer(request, writer):
        await respond(writer, {"ok": 1}, 200, "x-request-id: abc", "keep-alive: timeout=5", "x-ratelimit-limit-requests: 7")

    async def work():
        async with backends(FakeBackend(answer=answer)) as (fake,), routing(fake) as router:
            headers = {"authorization": "Bearer k", "x-request-id": "mine", "te": "trailers"}
            got = await router.post({"model": "m"}, headers=headers)
            sent = fake.requests[0]["headers"]
            assert (sent["authorization"], sent["x-request-id"], sent["host"]) == ("bearer k", "mine", fake.name)
            assert "te" not in sent
            assert got.headers["x-request-id"] == "abc"
            assert got.headers["x-ratelimit-limit-requests"] == "7"
            assert "keep-alive" not in got.headers

    run(work())


def test_client_that_goes_cancels_the_request_at_the_backend():
    async def answer(request, writer):
        await begin_stream(writer)
        await send_chunk(writer, b"data: 1\n\n")
        await asyncio.sleep(60)

    async def work():
        async with backends(FakeBackend(answer=answer)) as (fake,), routing(fake) as router:
            async with router.client.stream("POST", "/v1/completions", json={"model": "m", "stream": True}) as response:
                await anext(response.aiter_raw())
            await router.until(lambda: fake.num_cancelled == 1)
            await router.until(lambda: router.backend(fake).num_in_flight == 0)
            assert await router.metric("requests_total", code="499") == 1

    run(work())


def test_client_that_goes_before_the_first_byte_cancels_too():
    async def answer(request, writer):
        await asyncio.sleep(60)

    async def work():
        async with backends(FakeBackend(answer=answer)) as (fake,), routing(fake) as router:
            posting = asyncio.create_task(router.post({"model": "m"}))
            await router.until(lambda: fake.requests)
            posting.cancel()
            await router.until(lambda: fake.num_cancelled == 1)
            assert router.backend(fake).num_failures == 0

    run(work())


def test_slow_reader_holds_the_backend_back_and_not_the_memory():
    sent = 0
    piece = b"data: " + b"x" * 65_000 + b"\n\n"

    async def answer(request, writer):
        nonlocal sent
        await begin_stream(writer)
        for _ in range(1000):
            await send_chunk(writer, piece)
            sent += 1
        await end_stream(writer)

    async def work():
        nonlocal sent
        async with backends(FakeBackend(answer=answer)) as (fake,), routing(fake) as router:
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1 << 12)
            body = b'{"model":"m","stream":true}'
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            await router.until(lambda: sent > 0)
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.3)
            assert sent < 400  # what sockets hold: some MB, of 65
            assert fake.num_cancelled == 0
            digest, num = hashlib.sha256(), 0
            while num < 65_000_000:
                data = await reader.read(1 << 16)
                assert data
                num += len(data)
                digest.update(data)
            writer.close()

    run(work())


def test_request_goes_to_another_backend_before_the_first_byte():
    async def die(request, writer):
        writer.transport.abort()

    async def die_after_the_head(request, writer):
        await begin_stream(writer)
        writer.transport.abort()

    async def refuse(request, writer):
        await respond(writer, {"error": "full"}, 503, "retry-after: 3")

    async def work(first):
        bad, good = FakeBackend(answer=first), FakeBackend(answer=stream_pieces)
        async with backends(bad, good), routing(bad, good, policy="round-robin") as router:
            got = await router.post({"model": "m", "stream": True})
            assert (got.status_code, got.content) == (200, b"".join(PIECES))
            assert len(bad.requests) == 1
            assert await router.metric("retries_total", backend=bad.name) == 1

    for first in (die, die_after_the_head, refuse):
        run(work(first))


def test_nothing_is_tried_again_after_the_first_byte():
    async def answer(request, writer):
        await begin_stream(writer)
        await send_chunk(writer, b"data: 1\n\n")
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async def work():
        bad, good = FakeBackend(answer=answer), FakeBackend()
        async with backends(bad, good), routing(bad, good, policy="round-robin") as router:
            got = await router.post({"model": "m", "stream": True})
            first, error, end = got.content.split(b"\n\n")[:3]
            assert first == b"data: 1"
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "backend_failed"
            assert end == b"data: [DONE]"
            assert good.requests == []
            assert await router.metric("broken_answers_total", backend=bad.name) == 1

    run(work())


def test_answer_that_breaks_within_an_event_ends_with_the_connection():
    async def answer(request, writer):
        await begin_stream(writer)
        await send_chunk(writer, b'data: {"te')
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async def work():
        async with backends(FakeBackend(answer=answer)) as (fake,), routing(fake) as router:
            with pytest.raises(Exception, match="peer closed connection|incomplete"):
                await router.post({"model": "m", "stream": True})

    run(work())


def test_retry_budget_limits_the_load_of_failures():
    async def refuse(request, writer):
        await respond(writer, {"error": "full"}, 503, "retry-after: 3")

    async def work():
        fakes = [FakeBackend(answer=refuse), FakeBackend(answer=refuse)]
        async with backends(*fakes), routing(*fakes, policy="round-robin", retry_ratio=0.0) as router:
            got = await router.post({"model": "m"})
            assert (got.status_code, got.json(), got.headers["retry-after"]) == (503, {"error": "full"}, "3")
            assert sum(len(fake.requests) for fake in fakes) == 1
            assert await router.metric("retries_denied_total") == 1

    run(work())


def test_client_errors_are_passed_on_and_not_tried_again():
    async def refuse(request, writer):
        await respond(writer, {"error": {"message": "no"}}, 400)

    async def work():
        fakes = [FakeBackend(answer=refuse), FakeBackend(answer=refuse)]
        async with backends(*fakes), routing(*fakes) as router:
            got = await router.post({"model": "m"})
            assert (got.status_code, got.json()) == (400, {"error": {"message": "no"}})
            assert sum(len(fake.requests) for fake in fakes) == 1

    run(work())


def test_backend_that_ends_is_left_out_and_comes_back():
    async def work():
        first, second = FakeBackend(), FakeBackend()
        async with backends(first, second), routing(first, second, policy="round-robin") as router:
            await first.stop()
            for _ in range(4):
                assert (await router.post({"model": "m"})).json()["backend"] == second.name
            await router.until(lambda: router.backend(first).state == "unhealthy")
            await first.start()
            await router.until(lambda: router.backend(first).state == "ready")
            names = {(await router.post({"model": "m"})).json()["backend"] for _ in range(4)}
            assert names == {first.name, second.name}

    run(work())


def test_backend_that_is_not_ready_is_left_out_and_keeps_what_runs():
    async def work():
        first, second = FakeBackend(answer=stream_pieces), FakeBackend()
        async with backends(first, second), routing(first, second, policy="round-robin") as router:
            streaming = asyncio.create_task(router.post({"model": "m", "stream": True}))
            await router.until(lambda: first.requests)
            first.is_ready = False
            await router.until(lambda: router.backend(first).state == "unhealthy")
            assert (await streaming).content == b"".join(PIECES)
            assert (await router.post({"model": "m"})).json()["backend"] == second.name

    run(work())


def test_all_backends_down_is_a_503_with_retry_after():
    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake) as router:
            fake.is_ready = False
            await router.until(lambda: router.backend(fake).state == "unhealthy")
            got = await router.post({"model": "m"})
            assert (got.status_code, got.json()["error"]["code"]) == (503, "no_backend_available")
            assert int(got.headers["retry-after"]) >= 1
            assert (await router.client.get("/ready")).status_code == 503
            assert (await router.client.get("/health")).status_code == 200

    run(work())


def test_backend_that_was_never_there_does_not_stop_the_others():
    async def work():
        absent = await FakeBackend("other").start()
        await absent.stop()
        async with backends(FakeBackend()) as (fake,), routing(absent, fake, waits=False) as router:
            await router.until(lambda: router.backend(fake).state == "ready" and router.backend(absent).state == "unhealthy")
            assert (await router.post({"model": "m"})).status_code == 200
            assert (await router.post({"model": "typo"})).status_code == 404

    run(work())


def test_model_chooses_the_backend_and_aliases_are_replaced():
    async def work():
        first, second = FakeBackend("a"), FakeBackend("b", "c")
        async with backends(first, second), routing(first, second, aliases={"best": "c"}) as router:
            for model, fake in (("a", first), ("b", second), ("c", second)):
                assert (await router.post({"model": model})).json() == {"backend": fake.name, "model": model}
            assert (await router.post({"model": "best", "x": 1.0})).json()["model"] == "c"
            assert second.requests[-1]["body"] == b'{"model":"c","x":1.0}'
            listed = (await router.client.get("/v1/models")).json()["data"]
            assert [entry["id"] for entry in listed] == ["a", "b", "c", "best"]
            assert (await router.client.get("/v1/models/best")).json()["root"] == "c"

    run(work())


def test_model_that_nobody_serves_is_a_404_with_the_list():
    async def work():
        first, second = FakeBackend("alpha"), FakeBackend("beta")
        async with backends(first, second), routing(first, second) as router:
            got = await router.post({"model": "alpho"})
            assert got.status_code == 404
            error = got.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert error["message"] == "no backend serves the model 'alpho' (did you mean 'alpha'?); there are: alpha, beta"
            assert (await router.post({})).json()["error"]["param"] == "model"
            assert (await router.client.get("/v1/models/alpho")).status_code == 404

    run(work())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"model": 3}', b'{"model": ""}', b'{"model": ["m"]}']
)
def test_body_that_is_no_json_object_is_a_400_and_reaches_no_backend(body):
    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake) as router:
            got = await router.client.post("/v1/chat/completions", content=body)
            assert got.status_code == 400
            assert got.json()["error"]["code"] in ("invalid_json", "invalid_value")
            got = await router.client.post("/v1/messages", content=body)
            assert (got.status_code, got.json()["type"]) == (400, "error")
            assert fake.requests == []

    run(work())


def test_body_over_the_limit_is_a_413():
    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake, max_body_bytes=1000) as router:
            got = await router.post({"model": "m", "prompt": "x" * 2000})
            assert (got.status_code, got.json()["error"]["code"]) == (413, "request_too_large")
            assert (await router.post({"model": "m"})).status_code == 200

    run(work())


@pytest.mark.parametrize("path", ["/", "/router", "/metrics/x", "/v1/load_lora_adapter", "/shutdown"])
def test_paths_that_are_not_passed_on(path):
    async def work():
        async with backends(FakeBackend()) as (fake,), routing(fake) as router:
            assert (await router.client.post(path, json={"model": "m"})).status_code == 404
            assert fake.requests == []

    run(work())


def test_backend_that_hangs_is_a_504_and_is_not_tried_again():
    async def hang(request, writer):
        await asyncio.sleep(60)

    async def work():
        fakes = [FakeBackend(answer=hang), FakeBackend(answer=hang)]
        async with backends(*fakes), routing(*fakes, idle_timeout_s=0.2) as router:
            got = await router.post({"model": "m"})
            assert (got.status_code, got.json()["error"]["code"]) == (504, "backend_timeout")
            assert sum(len(fake.requests) for fake in fakes) == 1

    run(work())


def test_timelines_come_from_all_backends_that_know_the_request():
    def backend(*ids):
        async def answer(request, writer):
            wanted = request["path"].split("/")[3]
            timelines = [{"id": one, "replica": 0, "received_at": int(one[1:])} for one in ids]
            if wanted == "timelines":
                await respond(writer, {"max_timelines": 5, "timelines": timelines, "steps": [{"replica": 1}]})
                return
            found = [one for one in timelines if one["id"] == wanted]
            await respond(writer, {"timelines": found} if found else {"error": {"message": "no"}}, 200 if found else 404)

        return FakeBackend(answer=answer)

    async def work():
        async with backends(backend("r1", "r3"), backend("r2", "r3")) as fakes, routing(*fakes) as router:
            for wanted, replicas in {"r1": [0], "r2": [0], "r3": [0, 1]}.items():
                got = (await router.client.get(f"/v1/requests/{wanted}/timeline")).json()["timelines"]
                assert [(one["id"], one["replica"]) for one in got] == [(wanted, number) for number in replicas]
            unknown = await router.client.get("/v1/requests/r9/timeline")
            assert (unknown.status_code, unknown.json()) == (404, {"error": {"message": "no"}})
            kept = (await router.client.get("/v1/requests/timelines")).json()
            assert [one["id"] for one in kept["timelines"]] == ["r1", "r2", "r3", "r3"]
            assert (kept["max_timelines"], kept["steps"]) == (10, [{"replica": 1}, {"replica": 3}])
            await fakes[1].stop()
            await router.until(lambda: router.backend(fakes[1]).state != "ready")
            assert (await router.client.get("/v1/requests/r2/timeline")).status_code == 503

    run(work())
