"""Clients that disconnect, stall, never read, or send invalid requests: others are not affected, and no resource leaks."""

import asyncio
import json
import socket
import time

import pytest

from tests.e2e.server_process import serving
from tests.e2e.wire import Wire, assert_recovered, completion, exchange, read_answer, request_bytes

SLOW_READER_S = 1.5
TIMEOUT_S = 2.0
LONG_PROMPT = [5 + n % 3000 for n in range(1000)]
MIB = 1 << 20
MAX_ERROR_BYTES = 4 << 10


@pytest.fixture(scope="module")
def server():
    options = ("--head-timeout", str(TIMEOUT_S), "--body-timeout", str(TIMEOUT_S), "--slow-reader-bytes", "20000")
    with serving(*options, "--slow-reader-timeout", str(SLOW_READER_S), "--max-num-seqs", "32", "--no-page") as running:
        yield running


@pytest.fixture(scope="module")
def expected(server):
    return server.post("/v1/completions", completion(12)).json()["choices"][0]["text"]


def num_aborted(server, reason="disconnect"):
    return server.metric("quire:stream_aborts_total", reason=reason)


def num_unread(server):
    """Return how many streams were ended as unread: by what piled up, or, where the engine is slow, by the blocked socket."""
    return num_aborted(server, "slow_reader") + num_aborted(server)


def num_open(server):
    return server.metric("quire:num_requests_running") + server.metric("quire:num_requests_waiting")


def leave_all(server, wires, how):
    for wire in wires:
        if how == "half-close":
            wire.writer.write_eof()
        else:
            getattr(wire, how)()


@pytest.mark.parametrize(
    "is_streaming, how",
    [
        (True, "close"),
        (False, "reset"),
        (True, "half-close"),
        pytest.param(False, "close", marks=pytest.mark.slow),
        pytest.param(True, "reset", marks=pytest.mark.slow),
        pytest.param(False, "half-close", marks=pytest.mark.slow),
    ],
)
def test_work_stops_when_clients_go(server, expected, is_streaming, how):
    """Of 60 requests 32 run, the others wait in the queue."""
    aborted = num_aborted(server)

    async def go():
        wires = []
        for _ in range(60):
            wires.append(await Wire.send(server, "/v1/completions", completion(900, stream=is_streaming)))
        await asyncio.to_thread(server.wait_for, lambda: num_open(server) == 60)
        if is_streaming:
            await wires[0].read_event()
        generated = await asyncio.to_thread(server.metric, "quire:generation_tokens_total")
        leave_all(server, wires, how)
        await asyncio.to_thread(server.wait_for, lambda: num_aborted(server) == aborted + 60)
        return generated

    generated = asyncio.run(go())
    assert_recovered(server, expected)
    assert server.metric("quire:generation_tokens_total") - generated < 60 * 900 / 2


@pytest.mark.slow
def test_work_stops_when_clients_go_during_prefill(server, expected):
    aborted = num_aborted(server)

    async def go():
        bodies = [completion(800, prompt=[9 + n, *LONG_PROMPT[:100]]) for n in range(40)]
        wires = await asyncio.gather(*[Wire.send(server, "/v1/completions", body) for body in bodies])
        await asyncio.to_thread(server.wait_for, lambda: num_open(server) == 40)
        leave_all(server, wires, "reset")
        await asyncio.to_thread(server.wait_for, lambda: num_aborted(server) == aborted + 40)

    asyncio.run(go())
    assert_recovered(server, expected)


def never_read(server, max_tokens, num):
    """Return sockets that have asked for wordy streams and read nothing."""
    body = completion(max_tokens, stream=True, logprobs=5)
    found = []
    for _ in range(num):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(request_bytes("/v1/completions", body))
        found.append(sock)
    return found


@pytest.mark.slow
def test_one_stream_goes_on_when_others_never_read(server, expected):
    unread, others = num_unread(server), 6
    sockets = never_read(server, 900, others)

    async def go():
        wire = await Wire.stream(server, 200)
        return await wire.read_rest()

    try:
        wire = asyncio.run(go())
        assert wire.is_complete
        assert len(wire.events) >= 200 / 32
        server.wait_for(lambda: num_unread(server) == unread + others)
    finally:
        for sock in sockets:
            sock.close()
    assert_recovered(server, expected)


@pytest.mark.slow
def test_one_stream_goes_on_when_many_more_than_run_at_once_never_read(server, expected):
    sockets = never_read(server, 900, 120)

    async def go():
        wire = await Wire.stream(server, 200)
        return await wire.read_rest()

    try:
        assert asyncio.run(go()).is_complete
    finally:
        for sock in sockets:
            sock.close()
    assert_recovered(server, expected)


@pytest.mark.slow
def test_slow_heads_and_bodies_are_cut_off_while_others_are_served(server, expected):
    whole = request_bytes("/v1/completions", completion(1))
    cuts = [1, 20, len(whole) // 2, len(whole) - 1]
    sockets = []
    for number in range(60):
        sockets.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        sockets[-1].sendall(whole[: cuts[number % len(cuts)]])
    assert server.post("/v1/completions", completion(1)).status_code == 200
    answers = []
    for sock in sockets:
        answers.append(read_answer(sock))
        sock.close()
    assert {status for status, _, _ in answers} == {408}
    assert all(json.loads(body)["error"]["code"] == "request_timeout" for _, _, body in answers)
    assert_recovered(server, expected)


@pytest.mark.slow
def test_slow_drip_is_cut_off_when_the_head_does_not_end(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        assert drip(sock, 60) < 30


def drip(sock, most_s):
    """Send a header now and then until the connection is cut; return after how long that was."""
    started_s = time.monotonic()
    try:
        while time.monotonic() < started_s + most_s:
            sock.sendall(b"x-a: b\r\n")
            time.sleep(0.2)
    except OSError:
        return time.monotonic() - started_s
    raise AssertionError("it was never cut")


def json_request(data, *headers):
    return request_bytes("/v1/chat/completions", data, *headers)


def chat_body(text):
    return b'{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":' + text + b"}]}"


def with_field(field):
    return b'{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":"a"}],' + field + b"}"


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BAD_REQUESTS = {
    "utf8": (json_request(chat_body(b'"\xff\xfe"')), {400}),
    "overlong_utf8": (json_request(chat_body(b'"\xc0\x80"')), {400}),
    "lone_surrogate": (json_request(chat_body(rb'"\ud800"')), {400}),
    "raw_surrogate": (json_request(chat_body(b'"\xed\xa0\x80"')), {400}),
    "nan": (json_request(with_field(b'"temperature":NaN')), {400}),
    "infinity": (json_request(with_field(b'"temperature":1e999')), {400}),
    "big_int": (json_request(with_field(b'"seed":' + b"9" * 5000)), {400}),
    "big_max_tokens": (json_request(with_field(b'"max_completion_tokens":' + b"9" * 5000)), {400}),
    "huge_n": (json_request(with_field(b'"n":1000000000')), {400}),
    "depth_bomb": (json_request(b'{"a":' * 100_000), {400}),
    "depth_bomb_closed": (json_request(with_field(b'"metadata":' + b"[" * 50_000 + b"]" * 50_000)), {400}),
    "depth_bomb_in_schema": (json_request(with_field(b'"tools":' + b'[{"a":' * 20_000 + b"1" + b"}]" * 20_000)), {400}),
    "60k_errors": (json_request(b'{"model":"demo","messages":[' + b",".join([b'{"role":1}'] * 60_000) + b"]}"), {400}),
    "60k_unknown": (json_request(b'{"messages":1,' + b",".join(b'"k%d":1' % n for n in range(60_000)) + b"}"), {400}),
    "long_name": (json_request(with_field(b'"' + b"k" * 100_000 + b'":1,"n":-1')), {400}),
    "long_value": (json_request(with_field(b'"tool_choice":"' + b"v" * 100_000 + b'"')), {400}),
    "duplicate_keys": (json_request(with_field(b'"n":1,"n":-1')), {400}),
    "empty": (json_request(b""), {400}),
    "array": (json_request(b"[]"), {400}),
    "header_1mb": (json_request(b"{}", "x-a: " + "a" * MIB), {431}),
    "headers_5000": (json_request(b"{}", *[f"x-{n}: 1" for n in range(5000)]), {431}),
    "target_100k": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", {400, 404, 414, 431}),
    "length_and_chunks": (HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
    "two_lengths": (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}{}{}", {400}),
    "negative_length": (HEAD + b"content-length: -5\r\n\r\n{}", {400}),
    "chunk_of_bad_size": (HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", {400}),
    "not_http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64, {400}),
    "nul_in_header": (HEAD + b"x-a: \x00\r\ncontent-length: 2\r\n\r\n{}", {400}),
    "100mb_by_length": (HEAD + b"connection: close\r\ncontent-length: 100000000\r\n\r\n" + b" " * 1000, {413}),
    "gzip": (json_request(b"{}", "content-encoding: gzip"), {415}),
    "form": (json_request(b"{}").replace(b"application/json", b"text/plain"), {415}),
    "unknown_path": (request_bytes("/v1/" + "x" * 3000, {}), {404}),
    "unknown_method": (request_bytes("/v1/models", {}, method="DELETE"), {405}),
    "path_with_bad_utf8": (b"GET /v1/models/%ff%fe HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", {404}),
    "id_that_climbs": (b"GET /v1/files/..%2f..%2fetc HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", {404}),
    "foreign_host": (b"GET /v1/models HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n", {403}),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_request_is_refused_in_few_words(server, name):
    data, statuses = BAD_REQUESTS[name]
    status, headers, body = exchange(server, data)
    assert status in statuses
    assert headers["content-type"] == "application/json"
    assert len(body) < MAX_ERROR_BYTES
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


def test_body_of_100_mb_is_refused_before_it_has_come_when_it_is_chunked(server):
    head = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%s\r\n" % (MIB, b" " * MIB)
    num_sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(head)
        try:
            for _ in range(100):
                sock.sendall(chunk)
                num_sent += 1
        except OSError:
            pass
        status, _, body = read_answer(sock)
    assert num_sent < 50
    if status:  # a reset may overtake the answer
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")


def test_server_is_whole_after_all_of_it(server, expected):
    assert_recovered(server, expected)


@pytest.mark.parametrize("is_split", [False, True], ids=["one-segment", "split"])
@pytest.mark.parametrize("body", [json.dumps(completion(2)).encode(), b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_body_of_a_request_for_h2c_is_its_own_and_no_second_request(server, body, is_split):
    upgrade = (
        "Connection: close, Upgrade, HTTP2-Settings",
        "Upgrade: h2c",
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    )
    data = request_bytes("/v1/completions", body, *upgrade).replace(b"connection: close\r\n", b"", 1)
    head, _, sent = data.partition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(head + b"\r\n\r\n" + (b"" if is_split else sent))
        if is_split:
            time.sleep(0.2)  # so that the server reads the head by itself
            sock.sendall(sent)
        status, _, answer = read_answer(sock)
    assert answer.count(b"HTTP/1.1") == 0
    if body.startswith(b"{"):
        assert (status, json.loads(answer)["usage"]["completion_tokens"]) == (200, 2)
    else:
        assert (status, json.loads(answer)["error"]["code"]) == (400, "invalid_json")
