"""Minutes of mixed traffic with disconnects, invalid requests and engine crashes: no resource grows or leaks.

QUIRE_SOAK_S sets how long.
"""

import asyncio
import os
import random
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.batching import custom_ids, ended_batch, start_batch
from tests.e2e.server_process import serving
from tests.e2e.wire import PROMPT, Wire, assert_recovered, completion

SOAK_S = float(os.environ.get("QUIRE_SOAK_S", "600"))
NUM_ROUNDS = 4
NUM_CLIENTS = 24
MAX_GROWTH_MIB = 48
NUM_BATCH_LINES = 100
MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
WORDS = ("sea", "wind", "stone", "bread", "lamp", "road", "child", "winter")


def footprint(server):
    """Return (MiB resident, open files, threads) of the server's process."""
    pid = server.process.pid
    status = Path(f"/proc/{pid}/status").read_text()
    resident, threads = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "Threads"))
    return resident / 1024, len(os.listdir(f"/proc/{pid}/fd")), threads


def engine_resident_mib(server):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{server.engine_pid()}/status").read_text())[1]) / 1024


class Traffic:
    """Clients that each send one request after the other, drawn from a seed. `seen` counts how they ended."""

    def __init__(self, server, seed):
        self.server = server
        self.random = random.Random(seed)
        self.seen = Counter()

    async def run(self, seconds):
        """Send for so long."""
        end_s = asyncio.get_running_loop().time() + seconds

        async def client():
            while asyncio.get_running_loop().time() < end_s:
                kind = self.random.choice((self.whole, self.whole, self.stream, self.leave, self.bad, self.other))
                try:
                    self.seen[await asyncio.wait_for(kind(), 120)] += 1
                except (ConnectionError, asyncio.IncompleteReadError) as error:
                    self.seen[type(error).__name__] += 1

        await asyncio.gather(*[client() for _ in range(NUM_CLIENTS)])

    def body(self, **options):
        prompt = " ".join([PROMPT, *self.random.choices(WORDS, k=self.random.randrange(1, 60))])
        return completion(self.random.randrange(1, 80), prompt=prompt, n=self.random.choice((1, 1, 1, 3)), **options)

    async def ask(self, path, body):
        status, _, _ = await (await Wire.send(self.server, path, body)).answer()
        if status == 503:
            await asyncio.sleep(0.2)
        return status

    async def whole(self):
        return await self.ask("/v1/completions", self.body())

    async def stream(self):
        wire = await (await Wire.send(self.server, "/v1/completions", self.body(stream=True))).read_head()
        if wire.status != 200:
            wire.close()
            await asyncio.sleep(0.2)
            return wire.status
        await wire.read_rest()
        assert wire.is_complete or wire.error["code"] == "engine_error"
        return "stream" if wire.is_complete else "broken stream"

    async def leave(self):
        wire = await Wire.send(
            self.server, "/v1/completions", {**self.body(stream=self.random.random() < 0.5), "max_tokens": 500}
        )
        await asyncio.sleep(self.random.choice((0, 0.01, 0.1, 0.5)))
        self.random.choice((wire.close, wire.reset, wire.writer.write_eof))()
        await asyncio.sleep(0.05)
        wire.close()
        return "left"

    async def bad(self):
        body = self.random.choice(({"prompt": 1}, {"messages": []}, b"{", b"\xff", {"model": "none", "prompt": "a"}, {"n": -1}))
        path = self.random.choice(("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/v1/nothing"))
        status = await self.ask(path, body)
        assert 400 <= status < 500 or status == 503
        return "refused"

    async def other(self):
        path, body = self.random.choice(
            (
                ("/v1/chat/completions", {"model": "demo", "messages": MESSAGES, "max_tokens": 20}),
                ("/v1/embeddings", {"model": "demo", "input": ["a", PROMPT]}),
                ("/tokenize", {"model": "demo", "prompt": PROMPT}),
                ("/v1/responses", {"model": "demo", "input": PROMPT, "max_output_tokens": 20}),
                ("/v1/messages", {"model": "demo", "messages": MESSAGES, "max_tokens": 20}),
            )
        )
        return await self.ask(path, body)


def run_batch(server):
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": completion(16, prompt=f"{PROMPT} {n}")}
        for n in range(NUM_BATCH_LINES)
    ]
    return start_batch(server, lines)


async def run_round(server, traffic, seconds, is_deadly):
    """Send traffic with a batch beneath it, and kill the engine in the middle."""
    batch_id = await asyncio.to_thread(run_batch, server)
    sending = asyncio.create_task(traffic.run(seconds))
    await asyncio.sleep(seconds / 2)
    if is_deadly:
        os.kill(server.engine_pid(), signal.SIGKILL)
    await sending
    return batch_id


@pytest.mark.slow
def test_nothing_grows_in_mixed_traffic(tmp_path):
    options = ("--data-dir", str(tmp_path), "--max-restarts", "1000", "--no-page", "--max-num-seqs", "32")
    with serving(*options) as server:
        expected = server.post("/v1/completions", completion(12)).json()["choices"][0]["text"]
        traffic, footprints, engines = Traffic(server, seed=5), [], []
        for number in range(NUM_ROUNDS):
            batch_id = asyncio.run(run_round(server, traffic, SOAK_S / NUM_ROUNDS, is_deadly=number % 2 == 1))
            server.wait_ready()
            batch = server.wait_for(lambda batch_id=batch_id: ended_batch(server, batch_id))
            assert sorted(custom_ids(server, batch)) == sorted(f"r{n}" for n in range(NUM_BATCH_LINES))
            assert_recovered(server, expected)
            footprints.append(footprint(server))
            engines.append(engine_resident_mib(server))
        print(traffic.seen, footprints, engines)
        (first, *_), (last, *_) = footprints[1], footprints[-1]
        assert last < first + MAX_GROWTH_MIB, footprints
        assert footprints[-1][1] <= footprints[1][1] + 4, footprints
        assert footprints[-1][2] <= footprints[1][2] + 2, footprints
        assert max(engines) < min(engines) + 2 * MAX_GROWTH_MIB, engines
        assert {"stream", 200, "left", "refused"} <= set(traffic.seen), traffic.seen
        assert not {500, 502, 504} & set(traffic.seen), traffic.seen
        assert server.stop() == 0
        assert "Traceback" not in server.whole_log()
        assert "Task was destroyed" not in server.whole_log()
        assert "never retrieved" not in server.whole_log()
