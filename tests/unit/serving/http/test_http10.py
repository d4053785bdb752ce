"""Clients of HTTP/1.0 know neither chunks nor interim answers: a body without a length ends with the connection."""

import asyncio
import socket

import pytest

from quire.serving.answers import DirectSink, Download, Ready, Stream
from quire.serving.errors import ApiError
from tests.unit.serving.http.shell import endpoint, exchange, post, running

FRAMES = [b"data: %d\n\n" % number for number in range(40)]


def old(request):
    return request.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)


async def stream(context, call):
    direct_sink = DirectSink()

    async def frames():
        for frame in FRAMES:
            yield frame
            assert direct_sink.sink is not None
            assert not direct_sink.sink.is_open  # what passes by the task is written as chunks

    return Stream(frames(), ApiError.openai_event, direct_sink=direct_sink)


async def download(context, call):
    async def pieces():
        yield b"abc"
        yield b"def"

    return Download(pieces(), {"content-length": "6"})


async def ready(context, call):
    await call.json_parts()
    return Ready(b"{}")


def ask(path, handler, request=None, method="POST", **options):
    async def go():
        async with running([endpoint(path, handler, method=method)], **options) as (port, _):
            return await asyncio.wait_for(exchange(port, old(request or post(path)), until_close=True), 60)

    head, _, body = asyncio.run(go()).partition(b"\r\n\r\n")
    return head.lower(), body


def test_stream_ends_with_the_connection():
    head, body = ask("/s", stream)
    assert head.startswith(b"http/1.1 200")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"".join(FRAMES)


@pytest.mark.parametrize("extra", ["connection: keep-alive", "connection: upgrade\r\nupgrade: h2c"])
def test_stream_ends_with_the_connection_when_it_is_to_stay_open_or_is_to_be_upgraded(extra):
    head, body = ask("/s", stream, post("/s", b"{}", extra))
    assert b"transfer-encoding" not in head
    assert body == b"".join(FRAMES)


def test_answer_of_known_length_says_its_length():
    for handler, expected in ((ready, b"{}"), (download, b"abcdef")):
        head, body = ask("/a", handler)
        assert b"content-length: %d" % len(expected) in head
        assert body == expected


def test_no_interim_answer_is_sent_when_it_asks_for_one():
    head, body = ask("/a", ready, post("/a", b"{}", "expect: 100-continue"))
    assert (head.split()[1], body) == (b"200", b"{}")


def test_head_of_a_stream_has_no_body():
    request = b"HEAD /s HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head, body = ask("/s", stream, request, method="GET")
    assert (head.split()[1], body) == (b"200", b"")
    assert b"transfer-encoding" not in head


def test_comments_of_a_silent_stream_are_no_chunks():
    async def go():
        have_come = asyncio.Event()

        async def slow(context, call):
            async def frames():
                await have_come.wait()
                yield b"data: 1\n\n"

            return Stream(frames(), ApiError.openai_event)

        async with running([endpoint("/s", slow)], keep_alive_comment_s=0.02) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(old(post("/s")))
            await reader.readuntil(b"\r\n\r\n: keep-alive\n\n: keep-alive\n\n")
            have_come.set()
            rest = await reader.read()
            writer.close()
            return rest

    assert asyncio.run(go()).replace(b": keep-alive\n\n", b"") == b"data: 1\n\n"


def test_all_of_a_long_stream_comes_when_it_is_read_slowly():
    async def large(context, call):
        async def frames():
            for _ in range(100):
                yield b"x" * 50_000

        return Stream(frames(), ApiError.openai_event)

    def read(port):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(old(post("/s")))
            parts = []
            while part := sock.recv(4096):
                parts.append(part)
        return b"".join(parts)

    async def go():
        async with running([endpoint("/s", large)]) as (port, _):
            return await asyncio.to_thread(read, port)

    assert asyncio.run(go()).partition(b"\r\n\r\n")[2] == b"x" * 5_000_000
