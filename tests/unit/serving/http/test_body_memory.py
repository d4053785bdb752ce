"""The server's memory after bodies are processed, and the limit of bodies that it holds at once."""

import asyncio
import gc
import threading
import tracemalloc

import msgspec
import pytest

from quire.base.errors import ConfigError
from quire.serving.answers import Ready
from quire.serving.config import ServerConfig
from quire.serving.errors import ApiError
from tests.unit.serving.http.shell import endpoint, exchange, post, running, until

MIB = 1 << 20


class Body(msgspec.Struct):
    text: str = ""


async def echo(context, call):
    await call.body(Body)
    return Ready(b"{}")


def head(num_bytes):
    return post("/echo").replace(b"content-length: 2", b"content-length: %d" % num_bytes).removesuffix(b"{}")


async def break_off(port, context):
    """Send half of a body and close; return when the server has noticed."""
    num_before = len(context.metrics.requests)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head(8 * MIB) + b" " * (4 * MIB))
    await writer.drain()
    writer.close()
    await until(lambda: len(context.metrics.requests) > num_before)


async def send_invalid(port, context):
    assert b"invalid_json" in await exchange(port, post("/echo", b" " * (4 * MIB)))


@pytest.mark.parametrize("send", [break_off, send_invalid])
def test_nothing_of_a_body_is_left_when_its_request_has_failed_and_no_collector_runs(send):
    async def go():
        async with running([endpoint("/echo", echo)]) as (port, context):
            await send(port, context)  # what is made once is there
            gc.collect()
            others = [found for found in gc.get_objects() if isinstance(found, ApiError)]  # of tests before this one
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(3):
                await send(port, context)
            for _ in range(100):  # turns of the loop in which the last task ends
                await asyncio.sleep(0.001)
            left = [found for found in gc.get_objects() if isinstance(found, ApiError) and found not in others]
            return tracemalloc.get_traced_memory()[0] - before, left

    tracemalloc.start()
    gc.disable()
    try:
        num_bytes, left = asyncio.run(go())
    finally:
        gc.enable()
        tracemalloc.stop()
    assert left == []
    assert num_bytes < MIB


async def hold(port, context, num_bytes):
    """Open a request, send so much of its body and return its writer when that has been taken in."""
    before = context.bodies.num_bytes
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head(MIB + MIB // 2) + b" " * num_bytes)
    await until(lambda: context.bodies.num_bytes >= before + num_bytes)
    return writer


def test_bodies_beyond_the_bound_are_refused_but_small_ones_when_others_are_stalled():
    async def go():
        limits = {"max_body_bytes": 2 * MIB, "max_held_body_bytes": 3 * MIB}
        async with running([endpoint("/echo", echo)], **limits) as (port, context):
            refused = []
            context.metrics.rejected = refused.append
            writers = [await hold(port, context, MIB + MIB // 4) for _ in range(2)]
            by_length = await exchange(port, head(MIB), until_close=True)
            piece = b"%x\r\n%b" % (MIB, b" " * (MIB // 2 + 1))  # all of it is read, so that no reset overtakes the answer
            chunked = post("/echo", b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
            by_bytes = await exchange(port, chunked + piece, until_close=True)
            small = await exchange(port, post("/echo", b'{"text":"%b"}' % (b"x" * 60_000)))
            for writer in writers:
                writer.close()
            await until(lambda: not context.bodies.num_bytes)
            later = await exchange(port, post("/echo", b'{"text":"%b"}' % (b"x" * MIB)))
            return by_length, by_bytes, small, later, refused

    *answers, refused = asyncio.run(go())
    assert [answer.split()[1] for answer in answers] == [b"503", b"503", b"200", b"200"]
    for answer in answers[:2]:
        assert b"too_many_body_bytes" in answer
        assert b"\r\nretry-after: " in answer
        assert b"\r\nconnection: close" in answer
    told = [error.code for error in refused if error.code != "request_timeout"]  # of those that the test left
    assert told == ["too_many_body_bytes"] * 2


def test_bound_on_bodies_is_refused_when_it_is_below_one_body():
    with pytest.raises(ConfigError, match="max_held_body_bytes must be at least max_body_bytes"):
        ServerConfig(max_body_bytes=2, max_held_body_bytes=1)


def test_huge_bodies_are_decoded_one_at_a_time_and_large_ones_meanwhile(monkeypatch):
    began, may_end = [], threading.Event()

    def decode(data, kind, **options):
        began.append(len(data))
        assert len(data) <= MIB or may_end.wait(60)
        return Body(), ()

    async def go():
        async with running([endpoint("/echo", echo)]) as (port, context):
            huge = [asyncio.create_task(exchange(port, post("/echo", b" " * (MIB + 1)))) for _ in range(3)]
            await until(lambda: began)
            await until(lambda: context.bodies.num_bytes >= 3 * MIB)
            await exchange(port, post("/echo", b" " * (100 << 10)))
            num_first = list(began)
            may_end.set()
            await asyncio.gather(*huge)
            return num_first

    monkeypatch.setattr("quire.serving.endpoint.decode_body", decode)
    assert asyncio.run(go()) == [MIB + 1, 100 << 10]
    assert len(began) == 4
