"""Responses and events out of bytes that are cut anywhere."""

import random
from itertools import pairwise

import pytest

from quire.bench.serving.http_wire import HttpError, ResponseReader
from quire.bench.serving.openai_stream import EventSplitter
from tests.unit.bench.serving.fakes import chunked, head

BODY = b"data: 1\r\n\r\n" + bytes(range(256)) + b"\r\n0\r\n\r\n"


def read_all(parts):
    reader = ResponseReader()
    body = b"".join(reader.feed(part) for part in parts)
    return reader, body


def pieces(data, cuts):
    edges = [0, *sorted(cuts), len(data)]
    return [data[low:high] for low, high in pairwise(edges) if high > low]


RESPONSES = {
    "chunked": head() + chunked(BODY[:7], BODY[7:100], BODY[100:]),
    "extension-and-trailer": head() + b"%X;name=value\r\n%s\r\n0\r\nTrailer: x\r\nOther: y\r\n\r\n" % (len(BODY), BODY),
    "length": head(framing=f"Content-Length: {len(BODY)}") + BODY,
    "interim-first": b"HTTP/1.1 100 Continue\r\n\r\n" + head() + chunked(BODY),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_body_is_the_same_when_bytes_are_cut_anywhere(name):
    data = RESPONSES[name]
    for cut in range(1, len(data)):
        reader, body = read_all(pieces(data, [cut]))
        assert (reader.is_complete, reader.status, body) == (True, 200, BODY)
    reader, body = read_all([data[i : i + 1] for i in range(len(data))])
    assert (reader.is_complete, body, reader.keeps_alive) == (True, BODY, True)
    draw = random.Random(7)
    for _ in range(200):
        reader, body = read_all(pieces(data, draw.sample(range(1, len(data)), draw.randint(2, 12))))
        assert (reader.is_complete, body) == (True, BODY)


@pytest.mark.parametrize("name", RESPONSES)
def test_early_end_is_an_error_when_it_comes_at_any_byte(name):
    data = RESPONSES[name]
    for cut in range(len(data)):
        reader, _ = read_all(pieces(data[:cut], []))
        assert not reader.is_complete
        with pytest.raises(HttpError) as caught:
            reader.feed_eof()
        assert caught.value.kind in ("closed", "truncated")


def test_body_without_framing_ends_when_the_server_closes():
    reader, body = read_all([b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nda", b"ta"])
    assert not reader.is_complete
    reader.feed_eof()
    assert (reader.is_complete, reader.keeps_alive, body) == (True, False, b"data")


@pytest.mark.parametrize(
    "data,keeps",
    [
        (head(extra="Connection: close\r\n") + chunked(b"x"), False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\nConnection: keep-alive\r\n\r\nx", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (head() + chunked(b"x") + b"HTTP/1.1 200 unasked", False),
    ],
    ids=["close", "1.0", "1.0-kept", "no-content", "bytes-after-the-end"],
)
def test_connection_is_kept_only_when_the_response_allows_it(data, keeps):
    reader, _ = read_all([data])
    assert reader.is_complete
    assert reader.keeps_alive is keeps


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        head() + b"zz\r\nx\r\n",
        head() + b"\r\n",
        head() + b"fffffffff\r\n",
        head() + b"1\r\nxyz\r\n",
        head() + b"1" * 5000,
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70000,
    ],
)
def test_nonsense_is_refused_when_it_is_no_http(data):
    with pytest.raises(HttpError) as caught:
        read_all([data])
    assert caught.value.kind == "protocol"


STREAM = b": hi\n\nevent: x\ndata: one\nid: 3\n\ndata:two\ndata: three\n\n\n\ndata: f\xc3\xbcnf\n\n: end\n\ndata: [DONE]\n\n"
EVENTS = [b"one", b"two\nthree", b"f\xc3\xbcnf", b"[DONE]"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "mark"])
def test_events_are_the_same_when_the_stream_is_cut_anywhere(line_end, start):
    data = start + STREAM.replace(b"\n", line_end)
    draw = random.Random(3)
    many_cuts = [[cut] for cut in range(1, len(data))] + [list(range(1, len(data)))]
    many_cuts += [draw.sample(range(1, len(data)), 5) for _ in range(300)]
    for cuts in many_cuts:
        splitter = EventSplitter()
        events = [found for part in pieces(data, cuts) for found in splitter.feed(part)]
        assert events + splitter.finish() == EVENTS


def test_last_event_is_found_when_its_empty_line_is_missing():
    splitter = EventSplitter()
    assert splitter.feed(b"data: one\n\ndata: [DONE]\n") == [b"one"]
    assert splitter.finish() == [b"[DONE]"]
