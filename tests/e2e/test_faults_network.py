"""Clients that vanish, thousands that only hold a connection, too many of them, and a clock that jumps."""

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import struct
import time
from pathlib import Path

import pytest

import quire
from tests.e2e.batching import ended_batch, start_batch
from tests.e2e.server_process import serving
from tests.e2e.wire import PROMPT, Wire, assert_recovered, completion, request_bytes
from tests.vanishing import vanish

NUM_VANISHING = 12
NUM_IDLE = 10_000
SPARE_FILES = 512  # for what the test itself has open
MAX_KIB_PER_CONNECTION = 40
DAY_S = 86400


def num_aborted(server):
    return server.metric("quire:stream_aborts_total", reason="disconnect")


def rss_kib(server):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{server.process.pid}/status").read_text())[1])


def num_files(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def connect(server, data):
    """Return a socket with a small buffer that has sent something."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(data)
    return sock


IMPATIENT = """
from quire.serving.http import lifecycle
assert [name for name, _ in lifecycle.PEER_OPTIONS] == ["TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT"]
lifecycle.PEER_OPTIONS = tuple(zip([name for name, _ in lifecycle.PEER_OPTIONS], (2, 1, 3, 2000)))
"""


@pytest.mark.slow
def test_work_of_clients_that_vanish_is_aborted_and_others_are_served():
    """The engine is held, so that nothing ends by itself meanwhile: the system notices after 2 to 5 s, a tenth of the usual."""
    with serving("--no-page", "--max-num-seqs", "32", "--watchdog-timeout", "300", prelude=IMPATIENT) as server:
        expected = server.post("/v1/completions", completion(12)).json()["choices"][0]["text"]
        aborted = num_aborted(server)
        bodies = [completion(900, stream=is_streaming) for is_streaming in (True, False) for _ in range(NUM_VANISHING // 2)]
        clients = [connect(server, request_bytes("/v1/completions", body)) for body in bodies]
        for client in clients[: NUM_VANISHING // 2]:
            assert client.recv(100)
        with server.frozen_engine():
            for client in clients:
                vanish(client)
            assert server.get("/v1/models").status_code == 200
            server.wait_for(lambda: num_aborted(server) == aborted + NUM_VANISHING, 120)
        assert_recovered(server, expected)
        for client in clients:
            client.close()


@contextlib.contextmanager
def many_files():
    """Yield how many idle connections there can be: this process and the server get all the files that the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = NUM_IDLE + 2 * SPARE_FILES if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(allowed, NUM_IDLE + 2 * SPARE_FILES)), hard))
    try:
        yield min(NUM_IDLE, allowed - SPARE_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def hold_idle(server, num):
    """Return connections that were used once and are kept."""
    held = []
    for _ in range(num):
        held.append(connect(server, b""))
        assert ask_again(held[-1], "/health").startswith(b"HTTP/1.1 200")
    return held


def ask_again(sock, path):
    """Return the whole answer to a request on a connection that is kept."""
    sock.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    received = b""
    while b"\r\n\r\n" not in received:
        received += sock.recv(4096)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head)[1])
    while len(body) < length:
        body += sock.recv(4096)
    return head


def reset(sock):
    """Close without a farewell."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.slow
def test_ten_thousand_idle_connections_cost_little_and_leave_nothing():
    with many_files() as num, serving("--no-page") as server:
        expected = server.post("/v1/completions", completion(12)).json()["choices"][0]["text"]
        files, before, resident = num_files(server), rss_kib(server), []
        for leave in (reset, socket.socket.close):
            held = hold_idle(server, num)
            assert num_files(server) > num
            answer = server.post("/v1/completions", completion(12)).json()
            assert answer["choices"][0]["text"] == expected
            resident.append(rss_kib(server))
            for sock in held:
                leave(sock)
            server.wait_for(lambda: num_files(server) <= files + 4)
            assert_recovered(server, expected)
        print(f"{num} idle connections: resident KiB {before}, then {resident}")
        assert resident[0] - before < MAX_KIB_PER_CONNECTION * num
        assert resident[-1] < resident[0] + 16 * 1024  # those that come later take the room of those that went


@pytest.mark.slow
def test_connections_beyond_the_limit_are_turned_away_and_the_server_goes_on():
    def limit_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    with serving("--no-page", "--head-timeout", "3", preexec=limit_files) as server:
        held = hold_idle(server, 120)
        refused = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(300)]
        words = [sock.recv(4096) for sock in refused]
        assert sum(word.startswith(b"HTTP/1.1 503") and b"too_many_connections" in word for word in words) >= 290
        server.wait_for_log("connections are turned away")
        assert len([line for line in list(server.log) if "connections are turned away" in line]) == 1
        assert ask_again(held[0], "/ready").startswith(b"HTTP/1.1 200")  # who is in is served
        for sock in [*held, *refused]:
            sock.close()
        server.wait_for(server.is_ready)
        assert_recovered(server)


CLOCK = """
import os, time
_real = time.time
def _jumping():
    with open(os.environ["QUIRE_TEST_CLOCK"]) as file:
        return _real() + float(file.read() or 0)
time.time = _jumping
"""
RATE_PER_MINUTE = 30
KEYS = [
    {"name": "plain", "key": "key-of-plain"},
    {"name": "rated", "key": "key-of-rated", "requests_per_minute": RATE_PER_MINUTE},
]


@pytest.fixture
def clock(tmp_path):
    """Yield a function that has the wall clock of a server jump by so many seconds, and the environment for that server."""
    offset = tmp_path / "offset"
    offset.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(CLOCK)

    def jump(seconds):
        new = tmp_path / "new"
        new.write_text(str(seconds))
        new.rename(offset)

    paths = (str(tmp_path), str(Path(quire.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    return jump, {"QUIRE_TEST_CLOCK": str(offset), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.slow
def test_nothing_but_dates_changes_when_the_clock_jumps(clock, tmp_path):
    jump, env = clock
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))
    options = ("--api-key-file", str(tmp_path / "keys.json"), "--data-dir", str(tmp_path / "data"), "--no-page")
    with serving(*options, env=env, key="key-of-plain") as server:
        answer = server.post("/v1/completions", completion(12)).json()
        expected = answer["choices"][0]["text"]
        assert abs(answer["created"] - time.time()) < 60
        started_s, num_served = time.monotonic(), ask_by_rate(server)
        for days in (400, -1):
            asyncio.run(jump_in_mid_stream(server, jump, days * DAY_S, expected))
            assert abs(server.post("/v1/completions", completion(1)).json()["created"] - time.time() - days * DAY_S) < 60
            num_served += ask_by_rate(server)
            assert num_served <= RATE_PER_MINUTE * (1 + (time.monotonic() - started_s) / 60) + 1
            assert_recovered(server, expected)
        assert_times_are_real(server)


def ask_by_rate(server):
    """Ask more often than the key with a rate may; return how many requests were served."""
    headers = {"authorization": "Bearer key-of-rated"}
    answers = [server.post("/v1/completions", completion(1), headers=headers) for _ in range(RATE_PER_MINUTE + 1)]
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in answers if answer.status_code == 429)
    assert {answer.status_code for answer in answers} <= {200, 429}
    return sum(answer.status_code == 200 for answer in answers)


async def jump_in_mid_stream(server, jump, offset_s, expected):
    """Let the clock jump while streams with deadlines, whole answers and a batch are under way: all end as they should."""
    header = "authorization: Bearer key-of-plain"
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": completion(16, prompt=f"{PROMPT} {n}")}
        for n in range(40)
    ]
    streams = [await Wire.stream(server, 600, header, "x-request-timeout: 120") for _ in range(4)]
    whole = asyncio.create_task(Wire.ask(server, 600, header, "x-request-timeout: 120"))
    await asyncio.gather(*[wire.read_event() for wire in streams])
    with server.frozen_engine():
        jump(offset_s)
        await asyncio.sleep(0.3)  # timers of the old clock would go off here
    await asyncio.gather(*[wire.read_rest() for wire in streams])
    assert all(wire.is_complete and wire.text.startswith(expected) for wire in streams)
    assert (await whole)[0] == 200
    batch_id = await asyncio.to_thread(start_batch, server, lines)
    batch = await asyncio.to_thread(server.wait_for, lambda: ended_batch(server, batch_id))
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}


def assert_times_are_real(server):
    """No latency is as long as a jump or negative, and the engine was not taken for dead."""
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "inter_token_latency"):
        assert 0 <= server.metric(f"quire:{name}_seconds_sum") < DAY_S / 2
    assert -1 < server.metric("quire:engine_heartbeat_age_seconds") < 60
    assert server.metric("quire:engine_restarts_total") == 0
