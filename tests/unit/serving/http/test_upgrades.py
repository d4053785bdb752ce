"""An upgrade that the server does not support is ignored: the body belongs to its request, whatever the client sends it in."""

import asyncio
import json

import pytest

from quire.serving.answers import Ready
from tests.unit.serving.http.shell import endpoint, running

TIMEOUT_S = 20
UPGRADES = {
    "h2c": ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"],
    "websocket": ["Connection: keep-alive, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: a"],
    "several": ["Upgrade: h2c, websocket", "connection: upgrade", "upgrade: TLS/1.2"],
}
SMUGGLED = b"GET /inner HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def echo(context, call):
    body = b"".join(await call.json_parts())
    return Ready(json.dumps({"body": body.decode(), "upgrade": call.headers.get("upgrade")}).encode())


async def path_of(context, call):
    return Ready(json.dumps({"path": call.route}).encode())


ENDPOINTS = [endpoint("/echo", echo), *[endpoint(path, path_of, method="GET") for path in ("/inner", "/last")]]


def head(*headers, method="POST", path="/echo", version="1.1"):
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def with_length(kind, body=b"{}", *headers):
    return head(*UPGRADES[kind], f"Content-Length: {len(body)}", *headers), body


def with_chunks(kind, body=b"{}", *headers):
    middle = len(body) // 2
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:middle], body[middle:]) if piece)
    return head(*UPGRADES[kind], "Transfer-Encoding: chunked", *headers), pieces + b"0\r\n\r\n"


async def read_answers(reader):
    """Return (status, JSON) of every answer until the server closes."""
    answers = []
    while line := await reader.readline():
        status = int(line.split()[1])
        headers = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().rstrip().partition(": ")
            headers[name.lower()] = value
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        answers.append((status, json.loads(body) if body else None))
    return answers


def talk(*segments, closes=True):
    """Send segments one after the other, so that the server reads each by itself, and return all answers.

    closes  whether a last request asks the server to close, which shows that the connection is still in step
    """

    async def go():
        async with running(ENDPOINTS) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for segment in (*segments, *([LAST] if closes else [])):
                writer.write(segment)
                await writer.drain()
                await asyncio.sleep(0.02)
            try:
                return await asyncio.wait_for(read_answers(reader), TIMEOUT_S)
            finally:
                writer.close()

    return asyncio.run(go())


def echoed(body):
    return (200, {"body": body.decode(), "upgrade": None})


AT_LAST = (200, {"path": "/last"})


@pytest.mark.covering
@pytest.mark.parametrize("kind", UPGRADES)
@pytest.mark.parametrize("make", [with_length, with_chunks])
@pytest.mark.parametrize("body", [b"{}", SMUGGLED, b" " * 200_000], ids=["small", "smuggled", "large"])
@pytest.mark.parametrize("is_split", [False, True], ids=["one-segment", "split"])
def test_body_belongs_to_its_request_when_that_asks_for_an_upgrade(kind, make, body, is_split):
    parts = make(kind, body)
    assert talk(*(parts if is_split else [b"".join(parts)])) == [echoed(body), AT_LAST]


@pytest.mark.parametrize("make", [with_length, with_chunks])
def test_body_belongs_to_its_request_when_all_comes_byte_by_byte(make):
    data = b"".join(make("h2c", SMUGGLED))

    async def go():
        async with running(ENDPOINTS) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.transport.get_extra_info("socket").setsockopt(6, 1, 1)  # TCP_NODELAY
            for position in range(len(data)):
                writer.write(data[position : position + 1])
                await asyncio.sleep(0)
            writer.write(LAST)
            answers = await asyncio.wait_for(read_answers(reader), TIMEOUT_S)
            writer.close()
            return answers

    assert asyncio.run(go()) == [echoed(SMUGGLED), AT_LAST]


def test_get_is_answered_when_it_asks_for_an_upgrade():
    request = head(*UPGRADES["websocket"], method="GET", path="/inner")
    assert talk(request) == [(200, {"path": "/inner"}), AT_LAST]


@pytest.mark.parametrize("is_split", [False, True], ids=["one-segment", "split"])
def test_pipelined_requests_are_answered_in_order_when_each_asks_for_an_upgrade(is_split):
    bodies = [b"%d" % number for number in range(300)]
    requests = [b"".join((with_length if number % 2 else with_chunks)("h2c", body)) for number, body in enumerate(bodies)]
    assert talk(*(requests[:20] if is_split else [b"".join(requests)])) == [
        *[echoed(body) for body in bodies[: 20 if is_split else None]],
        AT_LAST,
    ]


def test_upgrade_is_ignored_when_it_comes_after_a_request_without_one():
    plain = head("Content-Length: 2") + b"[]"
    assert talk(plain + b"".join(with_length("h2c")) + plain) == [echoed(b"[]"), echoed(b"{}"), echoed(b"[]"), AT_LAST]


@pytest.mark.parametrize("make", [with_length, with_chunks])
def test_client_is_told_to_continue_when_it_also_asks_for_an_upgrade(make):
    first, body = make("h2c", b"{}", "Expect: 100-continue")

    async def go():
        async with running(ENDPOINTS) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first)
            interim = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
            writer.write(body + LAST)
            answers = await asyncio.wait_for(read_answers(reader), TIMEOUT_S)
            writer.close()
            return interim, answers

    interim, answers = asyncio.run(go())
    assert interim.startswith(b"HTTP/1.1 100 ")
    assert answers == [echoed(b"{}"), AT_LAST]


@pytest.mark.covering(keep=False)
@pytest.mark.parametrize("target", ["example.com:443", "/echo", "http://localhost/echo"])
@pytest.mark.parametrize("is_split", [False, True], ids=["one-segment", "split"])
@pytest.mark.parametrize("length", [[], [f"Content-Length: {len(SMUGGLED)}"]], ids=["tunnel", "body"])
def test_connect_is_refused_and_nothing_after_it_is_read_as_a_request(target, is_split, length):
    connect = head(*length, method="CONNECT", path=target)
    segments = [connect, SMUGGLED] if is_split else [connect + SMUGGLED]
    answers = talk(*segments, closes=False)
    assert [status for status, _ in answers] == [405]
    assert answers[0][1]["error"]["code"] == "method_not_allowed"


def test_head_is_refused_once_when_it_asks_for_an_upgrade_and_is_too_large():
    request = head(*UPGRADES["h2c"], *[f"x-{number}: 1" for number in range(101)])
    assert [status for status, _ in talk(request, closes=False)] == [431]
