"""What arrives too slowly is cut off: one connection over a transport of the test's own, on a clock that jumps."""

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from quire.serving.answers import Ready
from quire.serving.config import ServerConfig
from quire.serving.http.protocol import guarded_protocol
from tests.unit.serving.http.shell import EveryPart, endpoint, post
from tests.unit.serving.request_queue.virtual_engine import run_virtual

MIB = 1 << 20
HEAD_TIMEOUT_S, BODY_TIMEOUT_S = 10.0, 30.0
CHUNKED = post("/echo").partition(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n"


async def echo(context, call):
    await call.json_parts()  # large ones are decoded in a thread, for which this clock would not wait
    return Ready(b"{}")


class Transport(asyncio.Transport):
    """Keeps what is written. `closed_s` is when it was closed, by the loop's clock."""

    def __init__(self, loop):
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.loop, self.written, self.closed_s = loop, b"", None

    def write(self, data):
        self.written += data

    def close(self):
        if self.closed_s is None:
            self.closed_s = self.loop.time()

    abort = close

    def write_eof(self):
        pass

    def is_closing(self):
        return self.closed_s is not None

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    @property
    def status(self):
        return int(self.written.split(b" ")[1]) if self.written else None


def send_slowly(*pieces, until_s=200.0):
    """Send (seconds after the last, bytes) on a connection and return its transport."""

    async def go(loop):
        config = ServerConfig(port=0, head_timeout_s=HEAD_TIMEOUT_S, body_timeout_s=BODY_TIMEOUT_S)
        app = EveryPart(config).app([endpoint("/echo", echo)])
        settings = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, timeout_keep_alive=75)
        settings.load()
        protocol = guarded_protocol(config)(config=settings, server_state=ServerState(), app_state={}, _loop=loop)
        transport = Transport(loop)
        protocol.connection_made(transport)
        for delay_s, data in pieces:
            await asyncio.sleep(delay_s)
            if transport.is_closing():
                break
            protocol.data_received(data)
        await asyncio.sleep(until_s)
        protocol.connection_lost(None)
        await asyncio.sleep(0)
        return transport

    return run_virtual(go)


def chunk(num_bytes):
    return b"%x\r\n" % num_bytes + b" " * num_bytes + b"\r\n"


def test_connection_is_closed_without_a_word_when_nothing_ever_comes():
    transport = send_slowly()
    assert (transport.written, transport.closed_s) == (b"", HEAD_TIMEOUT_S)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([(0, b"POST /echo HT")], id="half"),
        pytest.param([(0, b"GET /echo HTTP/1.1\r\n"), *[(0.5, b"x-a: b\r\n")] * 60], id="a-header-now-and-then"),
        pytest.param([(0.5, post("/echo")[n : n + 1]) for n in range(60)], id="byte-by-byte"),
    ],
)
def test_head_is_cut_off_when_it_does_not_end_in_time(pieces):
    transport = send_slowly(*pieces)
    assert (transport.status, transport.closed_s) == (408, HEAD_TIMEOUT_S)
    assert b"request_timeout" in transport.written


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([(5, post("/echo")[:-1])], id="half"),
        pytest.param([(5, post("/echo", b" " * 200)[:-200]), *[(0.5, b" ")] * 190], id="byte-by-byte"),
        pytest.param([(5, CHUNKED), *[(0.5, chunk(1))] * 190], id="chunk-by-chunk"),
    ],
)
def test_body_is_cut_off_when_it_does_not_end_in_time(pieces):
    transport = send_slowly(*pieces)
    assert (transport.status, transport.closed_s) == (408, pytest.approx(5 + BODY_TIMEOUT_S, abs=0.01))


def test_body_of_known_length_has_a_second_more_for_each_mib():
    head = post("/echo", b" " * (8 * MIB))[: -8 * MIB]
    assert send_slowly((0, head)).closed_s == BODY_TIMEOUT_S + 8


def test_body_of_unknown_length_gets_more_time_the_more_of_it_has_come():
    last = chunk(2).replace(b"  ", b"{}") + b"0\r\n\r\n"
    slow = [(0, CHUNKED), *[(BODY_TIMEOUT_S / 4, chunk(MIB))] * 4]
    assert send_slowly(*slow, (3.9, last)).status == 200
    transport = send_slowly(*slow, (4.1, last))
    assert (transport.status, transport.closed_s) == (408, pytest.approx(BODY_TIMEOUT_S + 4))


def test_next_head_on_a_connection_has_its_time_again():
    answered = (0, post("/echo"))
    transport = send_slowly(answered, (60, b"POST"), (HEAD_TIMEOUT_S - 0.1, post("/echo")[4:]))
    assert transport.written.count(b"HTTP/1.1 200") == 2
    transport = send_slowly(answered, (60, b"POST"))
    assert transport.closed_s == 60 + HEAD_TIMEOUT_S
    assert b"HTTP/1.1 408" in transport.written


def test_connection_is_closed_when_it_is_idle_for_long():
    transport = send_slowly((0, post("/echo")))
    assert (transport.status, transport.closed_s) == (200, 75)
