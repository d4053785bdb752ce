"""The shell around the routes: ids, keys, errors, limits, and how answers are sent and stopped."""

import asyncio
import json

import msgspec
import pytest

from quire.base.errors import RequestError
from quire.serving.answers import Ready, Stream, Unary
from quire.serving.config import ApiKey
from quire.serving.errors import ApiError, overloaded
from quire.serving.http.auth import hash_key
from tests.unit.serving.http.shell import endpoint, exchange, post, running


class Body(msgspec.Struct):
    text: str = ""


async def echo(context, call):
    body = await call.body(Body)
    return Ready(msgspec.json.encode({"text": body.text, "owner": call.owner.name}))


def parse(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


def ask(request, endpoints=None, **options):
    async def go():
        async with running(endpoints or [endpoint("/echo", echo)], **options) as (port, context):
            return parse(await exchange(port, request)), context

    (status, headers, body), context = asyncio.run(go())
    return status, headers, json.loads(body) if body else None, context


def test_answer_carries_ids_and_the_clients_own_when_it_is_printable():
    status, headers, body, context = ask(post("/echo", b'{"text":"hi"}', "x-request-id: mine"))
    assert (status, body) == (200, {"text": "hi", "owner": "anonymous"})
    assert headers["x-request-id"] == headers["request-id"] != "mine"
    assert headers["x-client-request-id"] == "mine"
    assert context.metrics.requests == [("/echo", 200)]


def test_clients_id_is_not_echoed_when_it_is_too_long():
    _, headers, _, _ = ask(post("/echo", b"{}", f"x-request-id: {'a' * 129}"))
    assert "x-client-request-id" not in headers


@pytest.mark.parametrize(
    "request_bytes, status, code",
    [
        (post("/nowhere"), 404, "not_found"),
        (b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n", 405, "method_not_allowed"),
        (post("/echo", b"{"), 400, "invalid_json"),
        (post("/echo", b'{"text":1}'), 400, "invalid_value"),
        (post("/echo").replace(b"application/json", b"text/plain"), 415, "unsupported_media_type"),
        (post("/echo", b"{}", "content-encoding: gzip"), 415, "unsupported_media_type"),
        (post("/echo", b'{"a":' * 10_000), 400, "invalid_json"),
        (post("/echo", b'{"a":' * 100_000), 400, "invalid_value"),
        (b"nonsense\r\n\r\n", 400, "bad_request"),
        (post("/echo", b"{}", *[f"x-{n}: 1" for n in range(101)]), 431, "headers_too_large"),
        (post("/echo", b"{}", f"x-a: {'a' * 40_000}"), 431, "headers_too_large"),
        (post("/echo", b"{}", "x-request-timeout: -1"), 200, None),
    ],
)
def test_answer_has_the_shape_of_the_api_when_the_request_is_bad(request_bytes, status, code):
    got, _, body, _ = ask(request_bytes)
    assert got == status
    if code is not None:
        assert body["error"]["code"] == code
        assert set(body["error"]) == {"message", "type", "param", "code"}


def test_body_is_refused_before_it_is_read_when_its_length_is_over_the_limit():
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100000000\r\n\r\n"
    status, headers, body, _ = ask(head, max_body_bytes=1000)
    assert (status, body["error"]["code"]) == (413, "request_too_large")
    assert headers["connection"] == "close"


def test_body_is_refused_when_its_chunks_go_over_the_limit():
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    status, _, body, _ = ask(head + b"400\r\n" + b" " * 1024 + b"\r\n", max_body_bytes=1000)
    assert (status, body["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "header, status, owner",
    [
        ("authorization: Bearer right", 200, "ann"),
        ("x-api-key: right", 200, "ann"),
        ("authorization: Bearer wrong", 401, None),
        ("authorization: Basic right", 401, None),
        ("x-none: 1", 401, None),
    ],
)
def test_key_decides_who_asks(header, status, owner):
    keys = (ApiKey("bob", hash_key("other")), ApiKey("ann", hash_key("right")))
    got, headers, body, _ = ask(post("/echo", b"{}", header), api_keys=keys)
    assert got == status
    if owner is None:
        assert (body["error"]["code"], headers["www-authenticate"]) == ("invalid_api_key", "bearer")
    else:
        assert body["owner"] == owner


def test_answer_tells_what_is_left_when_the_key_has_rates():
    keys = (ApiKey("ann", hash_key("right"), requests_per_minute=9), ApiKey("bob", hash_key("other")))

    async def go(key):
        async with running([endpoint("/echo", echo)], api_keys=keys) as (port, context):
            context.gateway.ratelimit_headers = lambda owner: {"x-ratelimit-remaining-requests": f"8 of {owner}"}
            return parse(await exchange(port, post("/echo", b"{}", f"authorization: Bearer {key}")))[1]

    assert asyncio.run(go("right"))["x-ratelimit-remaining-requests"] == "8 of ann"
    assert "x-ratelimit-remaining-requests" not in asyncio.run(go("other"))


def test_every_path_needs_a_key_unless_it_is_open():
    keys = (ApiKey("ann", hash_key("right")),)
    assert ask(post("/nowhere"), api_keys=keys)[0] == 401
    assert ask(post("/echo"), [endpoint("/echo", echo, is_open=True)], api_keys=keys)[0] == 200


def test_tenants_have_salts_of_their_own():
    salts = []

    async def note(context, call):
        salts.append(call.owner.cache_salt)
        return Ready(b"{}")

    async def go():
        keys = (ApiKey("bob", hash_key("b")), ApiKey("ann", hash_key("a")))
        async with running([endpoint("/note", note)], api_keys=keys) as (port, _):
            for key in "aba":
                await exchange(port, post("/note", b"{}", f"x-api-key: {key}"))

    asyncio.run(go())
    assert salts[0] == salts[2] != salts[1]
    assert all(len(salt) == 64 for salt in salts)


@pytest.mark.parametrize(
    "host, header, status",
    [
        ("localhost", "x-a: 1", 200),
        ("127.0.0.1:80", "x-a: 1", 200),
        ("evil.example", "x-a: 1", 403),
        ("[::1]:80", "x-a: 1", 200),
        ("[", "x-a: 1", 403),
        ("localhost", "origin: http://localhost", 200),
        ("localhost", "origin: http://evil.example", 403),
        ("localhost", "origin: null", 403),
    ],
)
def test_foreign_names_and_pages_are_refused_when_there_is_no_key(host, header, status):
    assert ask(post("/echo", b"{}", header).replace(b"localhost", host.encode(), 1))[0] == status


def test_error_names_its_headers_when_a_handler_refuses():
    async def refuse(context, call):
        raise overloaded("full", 3.2)

    status, headers, body, _ = ask(post("/full"), [endpoint("/full", refuse)])
    assert (status, body["error"]["code"]) == (503, "overloaded")
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("4", "3200")


def test_error_has_the_other_shape_when_the_endpoint_is_of_the_other_api():
    async def refuse(context, call):
        raise RequestError("temperature must be ...", "temperature")

    status, headers, body, _ = ask(post("/m"), [endpoint("/m", refuse, is_anthropic=True)])
    assert status == 400
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == headers["x-request-id"]


def test_exception_is_not_shown_to_the_client():
    async def fail(context, call):
        raise ValueError("secret path /etc")

    status, _, body, _ = ask(post("/fail"), [endpoint("/fail", fail)])
    assert status == 500
    assert "secret" not in json.dumps(body)


async def error_frames(error, frames):
    for frame in frames:
        yield frame
    raise error


def test_stream_answers_with_a_status_when_it_fails_before_its_first_frame():
    async def stream(context, call):
        return Stream(error_frames(ApiError(404, "gone", code="x"), []), ApiError.openai_event)

    status, _, body, _ = ask(post("/s"), [endpoint("/s", stream)])
    assert (status, body["error"]["code"]) == (404, "x")


def read_stream(stream, **options):
    async def go():
        async with running([endpoint("/s", stream)], **options) as (port, _):
            return await exchange(port, post("/s", b"{}", "connection: close"), until_close=True)

    return asyncio.run(go())


def test_stream_ends_with_an_error_event_when_it_fails_later():
    async def stream(context, call):
        return Stream(error_frames(ValueError("secret"), [b"data: 1\n\n"]), ApiError.openai_event)

    answer = read_stream(stream)
    assert b"text/event-stream" in answer
    assert answer.index(b"data: 1") < answer.index(b'data: {"error"') < answer.index(b"data: [DONE]")
    assert b"secret" not in answer
    assert answer.endswith(b"0\r\n\r\n")


def test_stream_gets_comments_when_it_is_silent():
    async def go():
        has_come = asyncio.Event()

        async def slow():
            await has_come.wait()
            yield b"data: 1\n\n"

        async def stream(context, call):
            return Stream(slow(), ApiError.openai_event)

        async with running([endpoint("/s", stream)], keep_alive_comment_s=0.02) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post("/s", b"{}", "connection: close"))
            before = await reader.readuntil(b": keep-alive\n\n")
            has_come.set()
            after = await reader.read()
            writer.close()
            return before, after

    before, after = asyncio.run(go())
    assert b"data: 1" not in before
    assert b"data: 1" in after


async def leave(port, request, wait_for_answer, started):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    if wait_for_answer:
        await reader.readuntil(b"data: 1")
    else:
        await started.wait()
    writer.close()


def stopped_by_leaving(make_answer, wait_for_answer):
    """Return whether the handler's own clean-up ran, and what was counted, after the client had gone."""

    async def go():
        started, stopped = asyncio.Event(), asyncio.Event()

        async def handler(context, call):
            return make_answer(started, stopped)

        async with running([endpoint("/s", handler)]) as (port, context):
            await leave(port, post("/s"), wait_for_answer, started)
            await asyncio.wait_for(stopped.wait(), 60)
            while not context.metrics.requests:
                await asyncio.sleep(0.005)
            return context.metrics.requests

    return asyncio.run(go())


def test_work_is_cancelled_when_the_client_goes_before_a_unary_answer():
    def make(started, stopped):
        async def work():
            try:
                started.set()
                await asyncio.sleep(600)
            finally:
                stopped.set()

        return Unary(work)

    assert stopped_by_leaving(make, wait_for_answer=False) == [("/s", 499)]


@pytest.mark.parametrize("is_blocked_in_send", [False, True])
def test_stream_is_closed_when_the_client_goes(is_blocked_in_send):
    def make(started, stopped):
        async def frames():
            try:
                yield b"data: 1\n\n"
                while is_blocked_in_send:
                    yield b"data: " + b"x" * 100_000 + b"\n\n"
                await asyncio.sleep(600)
            finally:
                stopped.set()

        return Stream(frames(), ApiError.openai_event)

    assert stopped_by_leaving(make, wait_for_answer=True) == [("/s", 499)]


def test_connection_is_cut_when_its_answer_is_not_read():
    async def go():
        stopped = asyncio.Event()

        async def frames():
            try:
                while True:
                    yield b"data: " + b"x" * 100_000 + b"\n\n"
            finally:
                stopped.set()

        async def stream(context, call):
            return Stream(frames(), ApiError.openai_event)

        async with running([endpoint("/s", stream)], slow_reader_s=0.2) as (port, _):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(post("/s"))
            await asyncio.wait_for(stopped.wait(), 10)  # the kernel itself gives up after 20 s
            writer.close()

    asyncio.run(go())


def test_second_request_on_a_connection_is_served():
    async def go():
        async with running([endpoint("/echo", echo)]) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            answers = []
            for text in ("a", "b"):
                writer.write(post("/echo", json.dumps({"text": text}).encode()))
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                answers.append(json.loads(await reader.readexactly(length))["text"])
            writer.close()
            return answers

    assert asyncio.run(go()) == ["a", "b"]


def test_unknown_fields_are_listed_or_refused():
    _, headers, _, context = ask(post("/echo", b'{"text":"a","nonsense":1}'))
    assert headers["x-quire-ignored-params"] == "nonsense"
    assert context.metrics.ignored == ["nonsense"]
    status, _, body, _ = ask(post("/echo", b'{"nonsense":1}'), strict=True)
    assert (status, body["error"]["param"]) == (400, "nonsense")
