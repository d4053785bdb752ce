"""More than the server can do: what is accepted ends well, the rest is told when to come back, and keys keep their share."""

import asyncio
import json
import re

import pytest

from tests.e2e.server_process import serving
from tests.e2e.wire import Wire, assert_recovered

KEYS = [
    {"name": "flood", "key": "key-of-flood"},
    {"name": "calm", "key": "key-of-calm"},
    {"name": "rated", "key": "key-of-rated", "requests_per_minute": 5, "tokens_per_minute": 100000},
    {"name": "tokens", "key": "key-of-tokens", "tokens_per_minute": 600},
    {"name": "pair", "key": "key-of-pair", "max_concurrent": 2},
]
MAX_QUEUED = 48
MAX_SEQS = 8


def bearer(name):
    return f"authorization: Bearer key-of-{name}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    path.write_text(json.dumps(KEYS))
    limits = ("--max-queued-requests", str(MAX_QUEUED), "--max-num-seqs", str(MAX_SEQS))
    with serving("--api-key-file", str(path), *limits, "--no-page", key="key-of-calm") as running:
        yield running


def assert_says_when_to_return(headers, body, status):
    assert 1 <= int(headers["retry-after"]) <= 120
    assert 1000 <= int(headers["retry-after-ms"]) <= 120_000
    assert body["error"]["code"] == {429: "rate_limit_exceeded", 503: "overloaded"}[status]


def test_key_is_told_its_rates_and_refused_over_them(server):
    answers = [asyncio.run(Wire.ask(server, 1, bearer("rated"))) for _ in range(7)]
    assert [status for status, _, _ in answers] == [200] * 5 + [429] * 2
    for number, (_, headers, _) in enumerate(answers):
        assert headers["x-ratelimit-limit-requests"] == "5"
        assert int(headers["x-ratelimit-remaining-requests"]) == max(4 - number, 0)
        assert 0 < int(headers["x-ratelimit-remaining-tokens"]) <= 100_000
        assert re.fullmatch(r"(\d+m)?(\d+s)?(\d+ms)?", headers["x-ratelimit-reset-requests"])
    for status, headers, body in answers[5:]:
        assert_says_when_to_return(headers, body, status)
        assert int(headers["retry-after"]) > 1
    assert "x-ratelimit-limit-requests" not in asyncio.run(Wire.ask(server, 1, bearer("calm")))[1]
    assert_recovered(server)


def test_key_is_refused_over_its_tokens_and_not_charged_for_what_it_did_not_use(server):
    first = asyncio.run(Wire.ask(server, 400, bearer("tokens")))
    assert (first[0], first[2]["usage"]["completion_tokens"]) == (200, 400)
    status, headers, body = asyncio.run(Wire.ask(server, 400, bearer("tokens")))
    assert status == 429
    assert_says_when_to_return(headers, body, status)
    assert headers["x-ratelimit-limit-tokens"] == "600"


def test_key_is_refused_over_its_requests_in_flight(server):
    async def go():
        wires = [await Wire.stream(server, 900, bearer("pair"), n=8) for _ in range(2)]
        for wire in wires:
            await wire.read_event()
        with server.frozen_engine():
            refused = await Wire.ask(server, 1, bearer("pair"))
        others = await Wire.ask(server, 1, bearer("calm"))
        for wire in wires:
            wire.close()
        return refused, others

    (status, headers, body), others = asyncio.run(go())
    assert status == 429
    assert_says_when_to_return(headers, body, status)
    assert others[0] == 200
    server.wait_for(server.is_idle)
    assert asyncio.run(Wire.ask(server, 1, bearer("pair")))[0] == 200


async def flood(server, num, is_over, outcomes, name="flood", max_tokens=60):
    """Keep `num` requests of one key coming, those that are refused too, until it is over."""

    async def one():
        while not is_over.is_set():
            status, headers, body = await Wire.ask(server, max_tokens, bearer(name))
            outcomes.append((status, headers, body))
            if status != 200:
                await asyncio.sleep(0.05)

    await asyncio.gather(*[one() for _ in range(num)])


@pytest.mark.slow
def test_requests_of_one_key_flow_while_another_floods(server):
    async def go():
        is_over, outcomes = asyncio.Event(), []
        flooding = asyncio.create_task(flood(server, 60, is_over, outcomes, max_tokens=24))
        await asyncio.to_thread(server.wait_for, lambda: server.metric("quire:num_requests_waiting") > 10)
        calm = [await Wire.ask(server, 8, bearer("calm")) for _ in range(5)]
        is_over.set()
        await flooding
        return calm, outcomes

    calm, outcomes = asyncio.run(go())
    assert [status for status, _, _ in calm] == [200] * 5
    assert {status for status, _, _ in outcomes} <= {200, 429, 503}
    for status, headers, body in outcomes:
        if status == 200:
            assert body["usage"]["completion_tokens"] == 24
        else:
            assert_says_when_to_return(headers, body, status)
    assert any(status != 200 for status, _, _ in outcomes)
    assert_recovered(server)


@pytest.mark.slow
def test_deadline_ends_requests_in_the_queue_and_in_the_engine(server):
    async def go():
        with server.frozen_engine():
            running = await Wire.ask(server, 900, bearer("calm"), "x-request-timeout: 0.2")
            wires = [await Wire.stream(server, 900, bearer("calm")) for _ in range(2 * MAX_SEQS)]
            await asyncio.to_thread(server.wait_for, lambda: server.metric("quire:num_requests_waiting") > 0)
            queued = await Wire.ask(server, 900, bearer("calm"), "x-request-timeout: 0.2")
            for wire in wires:
                wire.close()
        await asyncio.to_thread(server.wait_for, server.is_idle)
        stream = await Wire.stream(server, 900, bearer("calm"), "x-request-timeout: 1.5", n=8)
        await stream.read_event()
        with server.frozen_engine():
            await stream.read_rest()
        return queued, running, stream

    queued, running, stream = asyncio.run(go())
    assert queued[0] in (408, 503)  # 503 where the wait could be foreseen
    assert (running[0], running[2]["error"]["code"], running[1]["x-should-retry"]) == (504, "deadline_exceeded", "false")
    assert stream.error["code"] == "deadline_exceeded"
    assert_recovered(server)
