"""KV events of a real server: what is computed is published, with the hashes of its tokens; a restart begins anew."""

import os
import signal

import msgspec
import pytest
import zmq

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.contracts.block_keys import block_keys
from quire.serving.engine_client.kv_events import AllBlocksCleared, BlockStored, KvEventBatch
from tests.e2e.server_process import serving

pytestmark = pytest.mark.slow

SIZE = 16


def replayed(context, endpoint):
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    found = []
    while True:
        assert socket.poll(20_000), "no replay came"
        _, number, payload = socket.recv_multipart()
        if not payload:
            return found
        assert int.from_bytes(number, "big") == len(found)
        found.append(msgspec.msgpack.decode(payload, type=KvEventBatch))


def test_server_publishes_what_its_prefix_cache_holds(tmp_path):
    events, replay = f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
    context = zmq.Context()
    try:
        with serving("--kv-events-endpoint", events, "--kv-events-replay-endpoint", replay) as server:
            assert replayed(context, replay)[0].events == [AllBlocksCleared()]
            tokens = list(range(100, 100 + 5 * SIZE))
            body = {"model": "demo", "prompt": tokens, "max_tokens": 2, "temperature": 0}
            assert server.post("/v1/completions", body).status_code == 200
            stored = [one for batch in replayed(context, replay) for one in batch.events if isinstance(one, BlockStored)]
            assert [one.parent_block_hash for one in stored] == [None]
            assert stored[0].block_hashes == [key.to_bytes(16) for key in block_keys("", tokens, SIZE)]
            assert (stored[0].token_ids, stored[0].block_size) == (tokens, SIZE)
            server.post("/v1/completions", body)  # from the cache: nothing new
            assert sum(len(batch.events) for batch in replayed(context, replay)) == 2
            os.kill(server.engine_pid(), signal.SIGKILL)
            server.wait_for(lambda: server.metric("quire:engine_restarts_total") == 1 and server.is_ready())
            assert [batch.events for batch in replayed(context, replay)] == [[AllBlocksCleared()]]
    finally:
        context.destroy(linger=0)
