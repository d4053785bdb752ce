"""Four times what the server can serve, measured first: what it takes in it serves in time, the rest is told to come back.

QUIRE_OVERLOAD_S sets for how long.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from quire.bench.serving.server_lag import LagCounts
from tests.e2e.server_process import serving
from tests.e2e.wire import Wire, assert_recovered, completion

OVERLOAD_S = float(os.environ.get("QUIRE_OVERLOAD_S", "60"))
FACTOR = 4
MAX_SEQS = 16
MAX_TOKENS = 100
WAIT_SERVICES = 4  # a request is taken in for an estimated wait of so many times what it takes the full engine to answer one
SLACK = 2  # its first token may take so many times the longest wait and an answer: the machine may lose half of its speed
MAX_OPEN = 1000  # requests of the test at once, many times what the server holds: more would wait for the test, not for it
MAX_GROWTH_MIB = 32
MAX_LAG_S = 0.1
NUM_TRIES = 3  # others may have the machine for a while: what is wrong is so each time
NUM_STREAMS = 256


def resident_mib(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


async def measure_service(server, seconds):
    """Return the requests that are answered per second, and the seconds that one takes, when as many are open as may run."""
    end_s = time.monotonic() + seconds
    num_answered = 0

    async def one():
        nonlocal num_answered
        while time.monotonic() < end_s:
            status, _, _ = await Wire.ask(server, MAX_TOKENS)
            assert status == 200
            num_answered += 1

    started_s = time.monotonic()
    await asyncio.gather(*[one() for _ in range(MAX_SEQS)])
    capacity = num_answered / (time.monotonic() - started_s)
    return capacity, MAX_SEQS / capacity


async def arrive(server, rate, seconds, seed):
    """Send at random times, whatever becomes of what was sent before; return [(status, headers, body)]."""
    loop, rng, tasks, room = asyncio.get_running_loop(), random.Random(seed), [], asyncio.Semaphore(MAX_OPEN)
    next_s, end_s = loop.time(), loop.time() + seconds

    async def one():
        try:
            return await Wire.ask(server, MAX_TOKENS)
        finally:
            room.release()

    while next_s < end_s:
        await asyncio.sleep(max(next_s - loop.time(), 0))
        await room.acquire()
        tasks.append(asyncio.create_task(one()))
        next_s += rng.expovariate(rate)
    return await asyncio.gather(*tasks)


async def watch_memory(pids, seconds, samples):
    while True:
        samples.append([resident_mib(pid) for pid in pids])
        await asyncio.sleep(seconds)


@pytest.mark.slow
def test_accepted_requests_are_in_time_when_four_times_as_many_come():
    size = ("--max-num-seqs", str(MAX_SEQS), "--no-page")
    with serving(*size) as server:
        capacity, service_s = asyncio.run(measure_service(server, max(OVERLOAD_S / 10, 3)))
    wait_s = WAIT_SERVICES * service_s
    objective_s = SLACK * (wait_s + service_s)
    with serving(*size, "--max-queue-wait", f"{wait_s:.3f}", "--goodput", f"ttft:{objective_s * 1000:.0f}") as server:
        expected = server.post("/v1/completions", completion(12)).json()["choices"][0]["text"]
        pids = (server.process.pid, server.engine_pid())

        async def go(seed):
            samples = []
            watching = asyncio.create_task(watch_memory(pids, OVERLOAD_S / 30, samples))
            outcomes = await arrive(server, FACTOR * capacity, OVERLOAD_S, seed)
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            return outcomes, samples

        def are_in_time(seed):
            before = server.metrics("quire:slo_requests_total", "quire:slo_requests_met_total")
            outcomes, samples = asyncio.run(go(seed))
            after = server.metrics("quire:slo_requests_total", "quire:slo_requests_met_total")
            counted, met = (new - old for new, old in zip(after, before, strict=True))
            statuses = Counter(status for status, _, _ in outcomes)
            ages = [samples[len(samples) // 3], samples[-1]]
            print(f"capacity {capacity:.1f}/s, an answer {service_s:.2f} s, first token wanted in {objective_s:.2f} s")
            print(f"{statuses}, {met:.0f} of {counted:.0f} in time, MiB {ages}")
            assert set(statuses) == {200, 503}
            assert all(body["usage"]["completion_tokens"] == MAX_TOKENS for status, _, body in outcomes if status == 200)
            refusals = [headers for status, headers, _ in outcomes if status == 503]
            assert all(1 <= int(headers["retry-after"]) <= 120 for headers in refusals)
            # They return one by one, as far as whole milliseconds can tell.
            assert len({headers["retry-after-ms"] for headers in refusals}) > min(len(refusals) / 20, 100)
            assert len(refusals) > len(outcomes) / 4
            assert counted >= statuses[200]
            assert all(new < old + MAX_GROWTH_MIB for old, new in zip(*ages, strict=True)), samples
            return met >= 0.95 * counted

        assert any(are_in_time(seed) for seed in range(NUM_TRIES))
        assert server.metric("quire:engine_restarts_total") == 0
        assert_recovered(server, expected)


@pytest.mark.slow
def test_event_loop_comes_round_when_256_streams_are_open():
    """Speed is measured elsewhere: this sees only what would be wrong by far."""
    with serving("--max-num-seqs", str(NUM_STREAMS), "--num-kv-blocks", "8192", "--no-page") as server:

        async def go():
            wires = [await Wire.stream(server, 250) for _ in range(NUM_STREAMS)]
            await asyncio.gather(*[wire.read_rest() for wire in wires])
            assert all(wire.is_complete for wire in wires)

        assert_seldom_late(server, go)
        assert_recovered(server)


def huge_requests():
    """Return requests that are as large as they may be, or larger, each of another shape."""
    words = "It was a cold morning when the train came in. "

    def chat(**fields):
        return "/v1/chat/completions", {
            "model": "demo",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 2,
        } | fields

    tool = {"type": "function", "function": {"name": "f", "description": words * 400, "parameters": {"type": "object"}}}
    tools = [{**tool, "function": {**tool["function"], "name": f"f{n}"}} for n in range(250)]
    return [
        chat(messages=[{"role": "user", "content": words * 600_000}]),
        chat(messages=[{"role": "user", "content": words * 130_000}]),
        chat(messages=[{"role": "user", "content": "<|im_end|>" + "\u4e2d\n" * 400_000}]),
        chat(tools=tools),
        chat(chat_template_kwargs={"a": [[1] * 10] * 30_000}),
        chat(unheard_of=[{"a": 1}] * 20_000),
        ("/v1/completions", {"model": "demo", "prompt": [7] * 1_000_000}),
        ("/v1/completions", {"model": "demo", "prompt": [[7] * 900] * 256}),
        ("/v1/completions", {"model": "demo", "prompt": [words * 400] * 250}),
        ("/v1/embeddings", {"model": "demo", "input": [[7] * 500] * 500}),
        ("/tokenize", {"model": "demo", "prompt": words * 20_000, "return_token_strs": True}),
        ("/v1/responses", {"model": "demo", "input": words * 130_000}),
        ("/v1/messages", {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": words * 130_000}]}),
    ]


@pytest.mark.slow
def test_event_loop_comes_round_when_huge_requests_come():
    requests = [(path, json.dumps(body).encode()) for path, body in huge_requests()]
    with serving("--no-page") as server:

        async def send(path, data):
            wire = await Wire.send(server, path, data)
            with contextlib.suppress(ConnectionError):
                await wire.writer.drain()
            return (await wire.answer())[0]

        async def go():
            beside = asyncio.create_task((await Wire.stream(server, 900)).read_rest())
            statuses = [await send(path, data) for path, data in requests for _ in range(3)]
            beside.cancel()
            assert set(statuses) <= {200, 400, 413}, statuses

        assert_seldom_late(server, go)
        assert_recovered(server)


def assert_seldom_late(server, make_load):
    """The server's event loop is at most MAX_LAG_S late in 99 of a hundred looks at it, under a load."""
    tries = []
    for _ in range(NUM_TRIES):
        before = LagCounts.parse(server.get("/metrics").content)
        asyncio.run(make_load())
        found = LagCounts.parse(server.get("/metrics").content).since(before)
        print(found.figures())
        assert found.count >= 10
        tries.append(found.bound_of(0.99))
        if tries[-1] <= MAX_LAG_S:
            return
    raise AssertionError(f"the event loop is late by {tries} s at P99")
