"""What the server says of itself, and to whom."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from quire.serving.auth import hash_key
from quire.serving.config import ApiKey
from quire.serving.http.system import health, load
from quire.serving.metrics.engine_metrics import EngineOccupancy
from tests.unit.serving.http.shell import endpoint, exchange, running
from tests.unit.serving.http.test_shell import parse

ERROR = "RuntimeError: no block for 'a secret prompt' in /secret/path\nand more"
SHOWN = "RuntimeError: no block for '...' in <path>"
KEYS = (ApiKey("a", hash_key("k")),)


def ask(headers, state="restarting", error=ERROR, **options):
    async def go():
        async with running([endpoint("/health", health, method="GET", is_open=True)], **options) as (port, context):
            context.client = SimpleNamespace(state=state, heartbeat_age_s=1.0, last_error=error, replicas=(None,))
            return parse(await exchange(port, f"GET /health HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n".encode()))

    status, _, body = asyncio.run(go())
    return status, json.loads(body)


@pytest.mark.parametrize(
    ("keys", "headers", "is_told"),
    [
        ((), "", True),
        (KEYS, "", False),
        (KEYS, "authorization: Bearer wrong\r\n", False),
        (KEYS, "authorization: Bearer k\r\n", True),
        (KEYS, "x-api-key: k\r\n", True),
    ],
)
def test_health_tells_the_error_to_those_who_may_ask_and_the_state_to_all(keys, headers, is_told):
    status, body = ask(headers, api_keys=keys)
    assert (status, body["status"], body["engine"], body["phase"]) == (503, "unhealthy", "restarting", "starting")
    assert body.get("error") == (SHOWN if is_told else None)
    assert ("error" in body) == is_told


@pytest.mark.parametrize(("error", "shown"), [(ERROR, SHOWN), (None, None)])
def test_error_is_the_last_one_by_its_name_when_the_engine_has_recovered(error, shown):
    status, body = ask("", state="ready", error=error)
    assert (status, body["status"], body["last_error"]) == (200, "ok", shown)
    assert "error" not in body
    _, body = ask("", state="ready", error=error, api_keys=KEYS)
    assert not {"error", "last_error"} & body.keys()


def test_health_lists_the_replicas_and_is_well_while_one_is_ready():
    dead = SimpleNamespace(state="restarting", heartbeat_age_s=float("inf"), last_error=ERROR, num_restarts=2)
    live = SimpleNamespace(state="ready", heartbeat_age_s=0.5, last_error=None, num_restarts=0)

    async def go(keys):
        async with running([endpoint("/health", health, method="GET", is_open=True)], api_keys=keys) as (port, context):
            context.client = SimpleNamespace(state="ready", heartbeat_age_s=0.5, last_error=ERROR, replicas=(live, dead))
            return parse(await exchange(port, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"))

    status, _, body = asyncio.run(go(()))
    assert status == 200
    assert json.loads(body)["replicas"] == [
        {"replica": 0, "engine": "ready", "heartbeat_age_s": 0.5, "num_restarts": 0, "error": None},
        {"replica": 1, "engine": "restarting", "heartbeat_age_s": None, "num_restarts": 2, "error": SHOWN},
    ]
    _, _, body = asyncio.run(go(KEYS))
    assert all("error" not in row for row in json.loads(body)["replicas"])


def test_load_sums_the_replicas_and_lists_them():
    found = [EngineOccupancy(2, 1, 40, 100, 16, 8), EngineOccupancy(3, 0, 60, 100, 16, 8)]

    async def go():
        async with running([endpoint("/load", load, method="GET")]) as (port, context):
            context.client = SimpleNamespace(replicas=(SimpleNamespace(state="ready"), SimpleNamespace(state="restarting")))
            context.metrics = SimpleNamespace(occupancy=lambda: (found, 4))
            return parse(await exchange(port, b"GET /load HTTP/1.1\r\nhost: localhost\r\n\r\n"))

    status, _, body = asyncio.run(go())
    assert status == 200
    body = json.loads(body)
    assert [(one["replica"], one["engine"], one["running"], one["waiting"]) for one in body.pop("replicas")] == [
        (0, "ready", 2, 1),
        (1, "restarting", 3, 0),
    ]
    assert body == {
        "server_load": 9,
        "running": 5,
        "waiting": 4,
        "kv_blocks_free": 100,
        "kv_blocks_total": 200,
        "block_size": 16,
        "max_num_seqs": 16,
    }
