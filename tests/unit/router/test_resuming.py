"""Streams that go on at another backend: whole deltas only, the tokens so far, and what cannot be continued."""

import asyncio
import json

import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.router.resumable import ResumableStream
from quire.router.upstream import UpstreamError
from quire.serving.resume_wire import END_COMMENT, pack_tokens, tokens_comment, unpack_tokens
from tests.unit.router.fake_backend import FakeBackend, backends, begin_stream, end_stream, respond, routing, run, send_chunk

BODY = {"model": "m", "prompt": "x", "stream": True}
MARKED = "text/event-stream\r\nx-quire-resumable: 1"


def delta(number):
    return b'data: {"n": %d}\n\n' % number + tokens_comment([number])


def whole(first, end):
    return b"".join([b'data: {"n": %d}\n\n' % number for number in range(first, end)])


class Counting(FakeBackend):
    """Counts to 10, one token a delta, from where the router says; breaks off after `breaks_after` deltas."""

    def __init__(self, breaks_after=None, tail=b"", error=None, is_marked=True):
        super().__init__(answer=self.count)
        self.breaks_after, self.tail, self.error, self.is_marked = breaks_after, tail, error, is_marked

    async def count(self, request, writer):
        num = int(request["headers"].get("x-quire-resume", 0))
        tokens = unpack_tokens(request["body"][len(request["body"]) - 4 * num :])
        request["tokens"], request["sent_json"] = tokens, json.loads(request["body"][: len(request["body"]) - 4 * num])
        assert tokens == tuple(range(num))
        await begin_stream(writer, MARKED if self.is_marked else "text/event-stream")
        for number in range(num, 10):
            if self.breaks_after is not None and number - num == self.breaks_after:
                if self.error is not None:
                    await send_chunk(writer, b'data: {"error":{"message":"x","code":"%b"}}\n\n' % self.error)
                    await end_stream(writer)
                    return
                if self.tail:
                    await send_chunk(writer, self.tail)
                writer.transport.abort()
                return
            await send_chunk(writer, delta(number))
            await asyncio.sleep(0.001)
        await send_chunk(writer, b"data: [DONE]\n\n" + tokens_comment([]) + END_COMMENT)
        await end_stream(writer)


def test_comments_are_taken_out_wherever_pieces_are_cut():
    data = b": keep-alive\n\n" + delta(1) + delta(2) + b"data: a\n\ndata: b\n\n" + tokens_comment([3, 4]) + END_COMMENT
    shown = b": keep-alive\n\n" + whole(1, 3) + b"data: a\n\ndata: b\n\n"
    for size in range(1, len(data) + 1):
        stream, found = ResumableStream(), b""
        for begin in range(0, len(data), size):
            found += stream.feed(data[begin : begin + size])
        assert (found, stream.token_ids, stream.has_ended, stream.rest()) == (shown, [1, 2, 3, 4], True, b"")


def test_frames_without_their_comment_are_kept_back():
    stream = ResumableStream()
    assert stream.feed(delta(5) + b"data: half") == whole(5, 6)
    assert stream.feed(b" of it\n\n") == b""
    stream.drop_kept()
    assert stream.feed(delta(6)) == whole(6, 7)
    assert stream.token_ids == [5, 6]
    with pytest.raises(UpstreamError):
        stream.feed(b": quire-tokens a\n\n")


def test_tokens_cross_as_four_bytes():
    assert pack_tokens([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert unpack_tokens(pack_tokens([5, 0, 151_935])) == (5, 0, 151_935)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tail", [b"", b"data: {", b'data: {"n": 99}\n\n', b'data: {"n": 99}\n\n: quire-tok'])
@pytest.mark.parametrize(
    "after, path",
    [
        (0, "/v1/completions"),
        (1, "/v1/completions"),
        (7, "/v1/completions"),
        (1, "/openai/deployments/m/completions?api-version=1"),
    ],
)
def test_stream_goes_on_at_another_backend(after, path, tail):
    async def work():
        first, second = Counting(after, tail), Counting(after, tail)
        third = Counting()
        async with backends(first, second, third), routing(first, second, third, policy="round-robin") as router:
            got = await router.post(BODY, path)
            assert got.content == whole(0, 10) + b"data: [DONE]\n\n"
            assert "x-quire-resumable" not in got.headers
            sent = [request for fake in (first, second, third) for request in fake.requests]
            assert len(sent) in (2, 3)
            assert all(request["sent_json"] == BODY for request in sent)
            heads = {request["headers"]["x-quire-resumable"] for request in sent}
            assert len(heads) == 1
            assert await router.metric("resumes_total") + await router.metric("retries_total") == len(sent) - 1
            assert after == 0 or await router.metric("resumes_total") == len(sent) - 1
            assert await router.metric("broken_answers_total") == 0

    run(work())


@pytest.mark.parametrize("code", [b"engine_unavailable", b"engine_error", b"draining", b"server_shutdown"])
def test_engine_that_is_lost_while_its_server_lives_counts_as_broken(code):
    async def work():
        fakes = [Counting(3, error=code), Counting()]
        async with backends(*fakes), routing(*fakes, policy="round-robin") as router:
            assert (await router.post(BODY)).content == whole(0, 10) + b"data: [DONE]\n\n"

    run(work())


def test_error_of_the_request_is_passed_on():
    async def work():
        fakes = [Counting(3, error=b"contradiction"), Counting()]
        async with backends(*fakes), routing(*fakes, policy="round-robin") as router:
            got = await router.post(BODY)
            assert got.content.startswith(whole(0, 3))
            assert b'"code":"contradiction"' in got.content
            assert not fakes[1].requests

    run(work())


def test_stream_that_no_backend_can_continue_ends_with_an_error_event():
    async def work():
        broken, other = Counting(2), Counting(is_marked=False)
        async with backends(broken, other), routing(broken, other, policy="round-robin") as router:
            got = await router.post(BODY)
            assert got.content.startswith(whole(0, 2))
            assert b"backend_failed" in got.content[len(whole(0, 2)) :]
            assert b'"n": 2' not in got.content
            assert await router.metric("broken_answers_total") == 1

    run(work())


def test_stream_is_not_continued_by_another_model_of_the_same_name(caplog):
    async def work():
        broken, other = Counting(2), Counting()
        broken.load, other.load = {"model_content": "a"}, {"model_content": "b"}
        async with backends(broken, other), routing(broken, other, policy="round-robin") as router:
            await router.until(lambda: all(one.model_content for one in router.router.table))
            assert (await router.client.get("/health")).json()["models_differ"] == {"m": [broken.name, other.name]}
            assert "backends serve different models as 'm'" in caplog.text
            got = await router.post(BODY)
            assert got.content.startswith(whole(0, 2))
            assert b"backend_failed" in got.content[len(whole(0, 2)) :]
            assert not other.requests
            assert (await router.post(BODY)).content == whole(0, 10) + b"data: [DONE]\n\n"  # nothing else suffers

    run(work())


def test_streams_are_continued_no_more_often_than_allowed():
    async def work():
        fakes = [Counting(1) for _ in range(3)]
        async with backends(*fakes), routing(*fakes, policy="round-robin", max_resumes=2) as router:
            got = await router.post(BODY)
            assert got.content.startswith(whole(0, 3))
            assert b"backend_failed" in got.content
            assert sum(len(fake.requests) for fake in fakes) == 3

    run(work())


def test_resuming_has_the_budget_of_retries():
    async def work():
        fakes = [Counting(1), Counting()]
        async with backends(*fakes), routing(*fakes, policy="round-robin", retry_ratio=0.0) as router:
            assert b"backend_failed" in (await router.post(BODY)).content
            assert await router.metric("retries_denied_total") == 1

    run(work())


@pytest.mark.parametrize("change", [{"max_resumes": 0}, {"path": "/v1/responses"}, {"stream": False}])
def test_other_requests_are_sent_as_they_are(change):
    async def answer(request, writer):
        await respond(writer, {"ok": 1})

    async def work():
        options = {"max_resumes": 0} if "max_resumes" in change else {}
        async with backends(FakeBackend(answer=answer)) as (fake,), routing(fake, **options) as router:
            body = {**BODY, "stream": change.get("stream", True)}
            headers = {"x-quire-resume": "1", "x-quire-resumable": "1 aaaaaaaaaa 1"}  # not the client's to send
            await router.post(body, change.get("path", "/v1/completions"), headers=headers)
            assert not [name for name in fake.requests[0]["headers"] if name.startswith("x-quire-resum")]

    run(work())
