"""How answers are sent, and what happens when they fail, are not read, or their clients go."""

import asyncio
import json

import pytest

from quire.serving.answers import DirectSink, Stream, Unary
from quire.serving.auth import hash_key
from quire.serving.config import ApiKey
from quire.serving.errors import ApiError, overloaded
from tests.unit.serving.http.shell import ask, echo, endpoint, exchange, post, running, until


async def error_frames(error, frames):
    for frame in frames:
        yield frame
    raise error


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (post("/echo", b"{}", "authorization: Bearer wrong"), (401, "invalid_api_key")),
        (post("/echo", b"{", "authorization: Bearer right"), (400, "invalid_json")),
        (post("/echo", b" " * 200, "authorization: Bearer right"), (413, "request_too_large")),
        (post("/nowhere", b"{}", "authorization: Bearer right"), (404, "not_found")),
        (b"no http\r\n\r\n", (400, "bad_request")),
        (post("/echo", b"{}", f"x: {'a' * 40_000}"), (431, "headers_too_large")),
        (post("/unary", b"{}", "authorization: Bearer right"), (503, "overloaded")),
        (post("/stream", b"{}", "authorization: Bearer right"), (503, "engine_error")),
        (post("/echo", b"{}", "authorization: Bearer right"), None),
    ],
)
def test_error_is_counted_once_when_it_is_the_answer(sent, expected):
    async def unary(context, call):
        async def work():
            raise overloaded("full", 1)

        return Unary(work)

    async def stream(context, call):
        return Stream(error_frames(ApiError(503, "died", code="engine_error"), [b"data: 1\n\n"]), ApiError.openai_event)

    async def go():
        endpoints = [endpoint("/echo", echo), endpoint("/unary", unary), endpoint("/stream", stream)]
        key = ApiKey("a", hash_key("right"))
        async with running(endpoints, api_keys=(key,), max_body_bytes=100) as (port, context):
            closing = sent.replace(b"host: localhost", b"host: localhost\r\nconnection: close")
            await exchange(port, closing, until_close=True)
            return context.metrics.errors

    assert asyncio.run(go()) == ([] if expected is None else [expected])


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


def test_frames_are_in_order_when_some_pass_by_the_iteration():
    async def stream(context, call):
        direct_sink = DirectSink()

        async def frames():
            assert direct_sink.sink is not None
            assert not direct_sink.sink.is_open  # nothing has been sent yet
            for number in range(0, 20, 2):
                yield b"data: %d\n\n" % number
                assert direct_sink.sink.is_open
                direct_sink.sink.write(b"data: %d\n\n" % (number + 1))

        return Stream(frames(), ApiError.openai_event, direct_sink=direct_sink)

    answer = read_stream(stream)
    sent = [b"%x\r\n%b\r\n" % (len(frame), frame) for frame in (b"data: %d\n\n" % number for number in range(20))]
    assert answer.partition(b"\r\n\r\n")[2] == b"".join(sent) + b"0\r\n\r\n"


def test_frames_stop_passing_by_when_the_client_does_not_read():
    async def go():
        is_full = asyncio.Event()

        async def stream(context, call):
            direct_sink = DirectSink()

            async def frames():
                yield b"data: 1\n\n"
                while direct_sink.sink is not None and direct_sink.sink.is_open:
                    direct_sink.sink.write(b"x" * 65536)
                    await asyncio.sleep(0)
                is_full.set()

            return Stream(frames(), ApiError.openai_event, direct_sink=direct_sink)

        async with running([endpoint("/s", stream)]) as (port, _):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.transport.pause_reading()
            writer.write(post("/s", b"{}"))
            await asyncio.wait_for(is_full.wait(), 60)
            writer.close()

    asyncio.run(go())


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


WHOLE_REQUEST = post("/s")


def stopped_by_leaving(make_answer, wait_for_answer, request=WHOLE_REQUEST):
    """Return what was counted after the client had gone, and the handler's own clean-up had run."""

    async def go():
        started, stopped = asyncio.Event(), asyncio.Event()

        async def handler(context, call):
            return make_answer(started, stopped)

        async with running([endpoint("/s", handler)]) as (port, context):
            await leave(port, request, wait_for_answer, started)
            await asyncio.wait_for(stopped.wait(), 60)
            await until(lambda: context.metrics.requests)
            return context.metrics.requests

    return asyncio.run(go())


def waiting(started, stopped):
    """Return an answer that never comes."""

    async def work():
        try:
            started.set()
            await asyncio.sleep(600)
        finally:
            stopped.set()

    return Unary(work)


@pytest.mark.parametrize("request_bytes", [WHOLE_REQUEST, post("/s", b"x" * 100)[:-50]], ids=["whole", "still_coming"])
def test_work_is_cancelled_when_the_client_goes_before_a_unary_answer(request_bytes):
    assert stopped_by_leaving(waiting, False, request_bytes) == [("/s", 499)]


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


def test_request_counts_as_given_up_when_its_work_ends_otherwise_than_by_being_cancelled():
    def make(started, stopped):
        async def work():
            try:
                started.set()
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                stopped.set()
                raise ValueError from None

        return Unary(work)

    assert stopped_by_leaving(make, wait_for_answer=False) == [("/s", 499)]


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
