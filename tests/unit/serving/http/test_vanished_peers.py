"""Clients that vanish without closing, by dropped packets on real sockets."""

import asyncio
import socket

import pytest

from quire.serving.answers import Stream, Unary
from quire.serving.errors import ApiError
from quire.serving.http import lifecycle
from tests.unit.serving.http.shell import endpoint, post, running
from tests.vanishing import vanish


@pytest.fixture(autouse=True)
def quick_peer_timeouts(monkeypatch):
    quick = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", 1000))
    assert [name for name, _ in quick] == [name for name, _ in lifecycle.PEER_OPTIONS]
    monkeypatch.setattr(lifecycle, "PEER_OPTIONS", quick)


@pytest.mark.slow
def test_work_is_cancelled_when_clients_vanish_in_silence_and_in_a_stream():
    async def go():
        loop = asyncio.get_running_loop()
        started, stopped = asyncio.Queue(), asyncio.Queue()

        async def work():
            started.put_nowait("unary")
            try:
                await asyncio.sleep(600)
            finally:
                stopped.put_nowait("unary")

        async def frames():
            started.put_nowait("stream")
            try:
                while True:
                    yield b"data: 1\n\n"
                    await asyncio.sleep(0.01)
            finally:
                stopped.put_nowait("stream")

        async def unary(context, call):
            return Unary(work)

        async def stream(context, call):
            return Stream(frames(), ApiError.openai_event)

        async with running([endpoint("/unary", unary), endpoint("/stream", stream)]) as (port, context):
            clients = []
            for path in ("/unary", "/stream"):
                client = socket.create_connection(("127.0.0.1", port))
                client.sendall(post(path))
                client.setblocking(False)
                await asyncio.wait_for(started.get(), 60)
                clients.append(client)
            await loop.sock_recv(clients[1], 100)
            for client in clients:
                vanish(client)
            ended = {await asyncio.wait_for(stopped.get(), 60) for _ in clients}
            while len(context.metrics.requests) < 2:
                await asyncio.sleep(0.005)
            for client in clients:
                client.close()
            return ended, sorted(context.metrics.requests)

    assert asyncio.run(go()) == ({"unary", "stream"}, [("/stream", 499), ("/unary", 499)])
