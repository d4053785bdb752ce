"""Who is refused while still sending gets the answer, and not a reset; for a while, and not too many at a time."""

import asyncio
import socket

import pytest

from quire.serving.answers import Ready
from quire.serving.http import protocol
from quire.serving.http.protocol import LINGER_S, LingeringCloses
from tests.unit.serving.http.shell import endpoint, post, running
from tests.unit.serving.http.test_protocol_timeouts import MIB, chunk, send_slowly

LIMIT = 32 * MIB  # of the default configuration
CHUNKED = post("/echo").partition(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n"


async def echo(context, call):
    await call.json_parts()
    return Ready(b"{}")


def send_all_then_read(port, data):
    """Return what a client of blocking sockets sees that writes everything before it reads."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(data)
        received = b""
        while part := sock.recv(1 << 16):
            received += part
        return received


def head(num_bytes):
    return post("/echo").replace(b"content-length: 2", b"content-length: %d" % num_bytes).removesuffix(b"{}")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(head(9 * MIB) + b" " * (9 * MIB), b"413", id="length"),
        pytest.param(CHUNKED + chunk(9 * MIB), b"413", id="chunks"),
        pytest.param(b"POST /echo HTTP/1.1\r\n" + b"x-a: %b\r\n" % (b"a" * 9 * MIB), b"431", id="head"),
        pytest.param(b"POST /echo HTTP/1.1\r\nbad\r\n" + b"a" * 9 * MIB, b"400", id="no-http"),
    ],
)
def test_client_sees_its_refusal_when_it_sends_everything_first(data, status):
    async def go():
        async with running([endpoint("/echo", echo)], max_body_bytes=MIB) as (port, _):
            return await asyncio.to_thread(send_all_then_read, port, data)

    answer = asyncio.run(go())
    assert answer.split()[1] == status
    assert answer.rstrip().endswith(b"}")


def test_connection_is_closed_after_a_while_when_its_client_goes_on():
    transport = send_slowly((0, head(LIMIT + 1)), *[(0.25, b" " * 1000)] * 100)
    assert (transport.status, transport.closed_s) == (413, LINGER_S)
    assert transport.written.count(b"HTTP/1.1") == 1


def test_connection_is_closed_when_too_much_came_after_the_answer(monkeypatch):
    monkeypatch.setattr("quire.serving.http.protocol.LINGER_BYTES", 10_000)
    transport = send_slowly((0, head(LIMIT + 1)), *[(0.25, b" " * 1000)] * 100)
    assert (transport.status, transport.closed_s) == (413, 0.25 * 11)


def test_connection_is_closed_at_once_when_enough_others_linger(monkeypatch):
    monkeypatch.setattr(protocol.LingeringCloses.__init__, "__defaults__", (0,))
    transport = send_slowly((0, head(LIMIT + 1)), (1, b" "))
    assert (transport.status, transport.closed_s) == (413, 0)


def test_connection_is_closed_at_once_when_all_of_the_request_has_come():
    transport = send_slowly((0, post("/echo").replace(b"host:", b"connection: close\r\nhost:")), (1, b""))
    assert (transport.status, transport.closed_s) == (200, 0)


def test_places_are_given_back_when_connections_end():
    closes = LingeringCloses(most=1)
    assert closes.begin()
    assert not closes.begin()
    closes.end()
    assert closes.begin()
