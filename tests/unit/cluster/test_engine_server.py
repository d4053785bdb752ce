"""EngineServer: a replica's own `quire serve`; its start, requests, reports and end. No Ray."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("uvicorn", reason="needs quire[server]")

from quire.cluster.config import read_config
from quire.cluster.engine_server import EngineServer, ReplicaError, _server_options
from quire.cluster.messages import AnswerFailure, AnswerHead, ForwardedRequest
from quire.cluster.replica_choice import ReplicaStats
from quire.fleet.manager import ModelStartError

CONFIG = {"model": "demo", "options": {"max-model-len": 256, "num-kv-blocks": 64, "api-key": "client"}}
SLEEP = "import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "program, config, error, message",
    [
        ("import sys; sys.exit(3)", {}, ModelStartError, "exit status 3"),
        (SLEEP, {"start_timeout_s": 0.3}, ReplicaError, "not ready in 0.3 s"),
    ],
)
def test_server_that_does_not_start_leaves_nothing(own_folder, program, config, error, message):
    command = (sys.executable, "-c", program)
    with pytest.raises(error, match=message):
        asyncio.run(EngineServer.start(read_config({**CONFIG, **config}), "r1", command))
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "environment", "keys", "has_key"),
    [
        ({}, "", [], False),
        ({"api-key": "client"}, "other", ["client"], True),
        ({"api_key": ["a", "b"]}, "", ["a", "b"], True),
        ({"api_key_file": "keys.json"}, "", [], True),
        ({}, "from-environment", ["from-environment"], True),
    ],
    ids=["none", "one", "underscores", "file", "environment"],
)
def test_replica_has_a_key_of_its_own_when_clients_need_one(monkeypatch, options, environment, keys, has_key):
    monkeypatch.setenv("QUIRE_API_KEY", environment)
    config = read_config({"model": "demo", "options": options})
    found, headers = _server_options(config, Path("server.sock"), "own")
    assert found.get("api-key", []) == [*keys, *(["own"] if has_key else [])]
    assert headers == ([(b"authorization", b"Bearer own")] if has_key else [])
    assert not any("_" in name for name in found)


def test_folder_is_removed_when_the_server_cannot_be_started(own_folder):
    with pytest.raises(ReplicaError, match="no-such-program"):
        asyncio.run(EngineServer.start(read_config(CONFIG), "r1", ("no-such-program",)))
    assert list(own_folder.iterdir()) == []


async def ask(server, path, body, key=b"client"):
    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer " + key)]
    request = ForwardedRequest("POST", path, headers, msgspec.json.encode(body))
    head, *pieces = [item async for item in server.forward(request)]
    return head, pieces


@pytest.mark.slow
def test_server_answers_reports_and_ends(own_folder):
    async def work():
        server = await EngineServer.start(read_config(CONFIG), "r1")
        body = {"model": "demo", "prompt": "One day", "max_tokens": 5, "temperature": 0}
        head, pieces = await ask(server, b"/v1/completions", body)
        assert isinstance(head, AnswerHead)
        assert (head.status, head.replica) == (200, "r1")
        assert json.loads(b"".join(pieces))["usage"]["completion_tokens"] == 5
        head, pieces = await ask(server, b"/v1/completions", {**body, "stream": True})
        assert pieces[-1].endswith(b"data: [DONE]\n\n")
        assert (await ask(server, b"/v1/completions", body, b"wrong"))[0].status == 401
        await server.check_health()
        stats = msgspec.convert(await server.record_routing_stats(), type=ReplicaStats)
        assert (stats.load.kv_blocks_total, stats.load.running) == (64, 0)
        headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer client")]
        long = msgspec.json.encode({**body, "stream": True, "max_tokens": 200, "ignore_eos": True})
        stream = server.forward(ForwardedRequest("POST", b"/v1/completions", headers, long))
        for _ in range(3):
            await anext(stream)
        await stream.aclose()  # its client has gone: nothing of it is counted any more
        while (await server.record_routing_stats())["load"]["running"] > 0:
            await asyncio.sleep(0.02)
        await server.record_autoscaling_stats()
        await ask(server, b"/v1/completions", body)
        assert (await server.record_autoscaling_stats())["output_tokens_per_s"] > 0
        await server.close()
        failed = [item async for item in server.forward(ForwardedRequest("GET", b"/load", []))]
        assert isinstance(failed[0], AnswerFailure)
        with pytest.raises(ReplicaError, match="has ended"):
            await server.check_health()
        assert list(Path(own_folder).iterdir()) == []

    asyncio.run(asyncio.wait_for(work(), 300))
