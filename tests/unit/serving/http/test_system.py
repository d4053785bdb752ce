"""What the server says of itself, and to whom."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from quire.contracts.expert_stats import ExpertStats
from quire.contracts.tier_stats import TierStats
from quire.serving.auth import hash_key
from quire.serving.config import ApiKey
from quire.serving.errors import ApiError, engine_unavailable, invalid
from quire.serving.http.system import _prefill_urls, experts, health, load, put_prefill_urls, put_role, rebalance
from quire.serving.metrics.engine_metrics import EngineOccupancy
from tests.unit.serving.http.shell import endpoint, exchange, parse, running

ERROR = "RuntimeError: no block for 'a secret prompt' in /secret/path\nand more"
SHOWN = "RuntimeError: no block for '...' in <path>"
KEYS = (ApiKey("a", hash_key("k")),)


def ask(headers, state="restarting", error=ERROR, tiers=(), **options):
    async def go():
        async with running([endpoint("/health", health, method="GET", is_open=True)], **options) as (port, context):
            replicas = (SimpleNamespace(tiers=tiers),)
            context.client = SimpleNamespace(state=state, heartbeat_age_s=1.0, last_error=error, replicas=replicas)
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
    dead = SimpleNamespace(state="restarting", heartbeat_age_s=float("inf"), last_error=ERROR, num_restarts=2, tiers=[])
    live = SimpleNamespace(state="ready", heartbeat_age_s=0.5, last_error=None, num_restarts=0, tiers=[])

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


@pytest.mark.parametrize(("headers", "is_told"), [("", False), ("authorization: Bearer k\r\n", True)])
def test_health_of_decode_servers_counts_transfers_and_tells_problems_to_those_who_may_ask(headers, is_told):
    problem = "mismatch: the engines differ in dtype: bfloat16 on the decode engine, float32 on the prefill engine"
    sizes = {"num_pages": 0, "num_bytes": 0, "max_bytes": 1}
    tiers = [
        TierStats(tier="disk", **sizes, problems={"read": "it cannot be read"}),
        TierStats(tier="peer", **sizes, outcomes={"complete": 2, "mismatch": 1}, problems={"tcp://10.0.0.1:7000": problem}),
    ]
    _, body = ask(headers, state="ready", tiers=tiers, api_keys=KEYS)
    assert body["transfers"] == {"complete": 2, "mismatch": 1}
    assert body.get("transfer_problems") == ({"tcp://10.0.0.1:7000": problem} if is_told else None)
    assert body.get("tier_problems") == ({"disk read": "it cannot be read"} if is_told else None)


def test_load_sums_the_replicas_and_lists_them():
    found = [EngineOccupancy(2, 1, 40, 100, 16, 8), EngineOccupancy(3, 0, 60, 100, 16, 8)]

    async def go():
        async with running([endpoint("/load", load, method="GET")], replica_id="k3fa") as (port, context):
            replicas = (SimpleNamespace(state="ready"), SimpleNamespace(state="restarting"))
            info = SimpleNamespace(role="prefill", prefill_listen="unix:/x", takes_prefill_urls=False)
            context.client = SimpleNamespace(replicas=replicas, info=info)
            context.metrics = SimpleNamespace(occupancy=lambda: (found, 4), prompt_totals=lambda: (70, 30))
            return parse(await exchange(port, b"GET /load HTTP/1.1\r\nhost: localhost\r\n\r\n"))

    status, _, body = asyncio.run(go())
    assert status == 200
    body = json.loads(body)
    assert [(one["replica"], one["engine"], one["running"], one["waiting"]) for one in body.pop("replicas")] == [
        (0, "ready", 2, 1),
        (1, "restarting", 3, 0),
    ]
    assert body == {
        "role": "prefill",
        "prefill_listen": "unix:/x",
        "server_load": 9,
        "running": 5,
        "waiting": 4,
        "kv_blocks_free": 100,
        "kv_blocks_total": 200,
        "block_size": 16,
        "max_num_seqs": 16,
        "replica_id": "k3fa",
        "model_content": "",
        "prompt_tokens_total": 70,
        "cached_tokens_total": 30,
    }


def test_experts_are_listed_by_replica_and_layer():
    stats = ExpertStats(layer=3, tokens=[4, 0, 2], rank_tokens=[4.0, 2.0], imbalance=4 / 3)

    async def go():
        async with running([endpoint("/debug/experts", experts, method="GET")]) as (port, context):
            context.client = SimpleNamespace(replicas=(SimpleNamespace(experts=[stats]), SimpleNamespace(experts=[])))
            return parse(await exchange(port, b"GET /debug/experts HTTP/1.1\r\nhost: localhost\r\n\r\n"))

    status, _, body = asyncio.run(go())
    assert status == 200
    (layer,) = json.loads(body)["replicas"][0]["layers"]
    assert (layer["layer"], layer["tokens"], layer["rank_tokens"]) == (3, [4, 0, 2], [4.0, 2.0])
    assert layer["imbalance"] == pytest.approx(4 / 3)
    assert json.loads(body)["replicas"][1] == {"replica": 1, "layers": []}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, 200),
        (invalid("the experts are being moved already"), 400),
        (engine_unavailable("the model is being loaded"), 503),
    ],
    ids=["begun", "refused", "loading"],
)
def test_experts_are_rebalanced_on_every_engine(error, status):
    asked = []

    async def rebalance_experts():
        asked.append(1)
        if error is not None:
            raise error

    async def go():
        async with running([endpoint("/experts/rebalance", rebalance)]) as (port, context):
            context.client = SimpleNamespace(replicas=(SimpleNamespace(rebalance_experts=rebalance_experts),) * 2)
            head = b"POST /experts/rebalance HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
            return parse(await exchange(port, head))

    found, _, body = asyncio.run(go())
    assert found == status
    assert len(asked) == 2
    if error is None:
        assert json.loads(body) == {"num_engines": 2, "refused": {}}


def test_an_engine_that_refuses_to_rebalance_does_not_stop_the_others():
    asked = []

    async def accept():
        asked.append(1)

    async def refuse():
        raise ApiError(400, "experts are being moved already")

    async def go():
        async with running([endpoint("/experts/rebalance", rebalance)]) as (port, context):
            context.client = SimpleNamespace(replicas=[SimpleNamespace(rebalance_experts=one) for one in (refuse, accept)])
            head = b"POST /experts/rebalance HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
            return parse(await exchange(port, head))

    found, _, body = asyncio.run(go())
    assert (found, len(asked)) == (200, 1)
    assert json.loads(body) == {"num_engines": 1, "refused": {"0": "experts are being moved already"}}


@pytest.mark.parametrize(("is_admin", "status"), [(False, 403), (True, 200)])
def test_experts_are_rebalanced_for_admin_keys_only(is_admin, status):
    asked = []

    async def rebalance_experts():
        asked.append(1)

    async def go():
        keys = (ApiKey("a", hash_key("k"), is_admin=is_admin),)
        async with running([endpoint("/experts/rebalance", rebalance)], api_keys=keys) as (port, context):
            context.client = SimpleNamespace(replicas=(SimpleNamespace(rebalance_experts=rebalance_experts),))
            head = b"POST /experts/rebalance HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n"
            return parse(await exchange(port, head + b"content-length: 0\r\n\r\n"))

    found, _, body = asyncio.run(go())
    assert (found, len(asked)) == (status, int(is_admin))
    if not is_admin:
        assert json.loads(body)["error"]["code"] == "admin_only"


@pytest.mark.parametrize(("is_admin", "status"), [(False, 403), (True, 200)])
def test_prefill_urls_are_set_for_admin_keys_only_and_reported(is_admin, status):
    tiers = [SimpleNamespace(peer_transfers={})]

    async def set_prefill_urls(urls):
        tiers[0].peer_transfers = dict.fromkeys(urls, 0)

    async def go():
        keys = (ApiKey("a", hash_key("k"), is_admin=is_admin),)
        async with running([endpoint("/prefill_urls", put_prefill_urls)], api_keys=keys) as (port, context):
            context.client = SimpleNamespace(replicas=(SimpleNamespace(set_prefill_urls=set_prefill_urls, tiers=tiers),))
            body = b'{"urls": ["unix:/b", "unix:/a"]}'
            head = b"POST /prefill_urls HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n"
            lines = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            return parse(await exchange(port, head + lines + body)), _prefill_urls(context.client.replicas)

    (found, _, body), reported = asyncio.run(go())
    assert found == status
    assert reported == (["unix:/a", "unix:/b"] if is_admin else [])
    if not is_admin:
        assert json.loads(body)["error"]["code"] == "admin_only"


@pytest.mark.parametrize(("is_admin", "role", "status"), [(True, "prefill", 200), (True, "some", 400), (False, "prefill", 403)])
def test_role_is_changed_in_all_engines_for_admin_keys_only(is_admin, role, status):
    told = []

    async def set_role(role):
        told.append(role)

    async def go():
        keys = (ApiKey("a", hash_key("k"), is_admin=is_admin),)
        async with running([endpoint("/role", put_role)], api_keys=keys) as (port, context):
            context.client = SimpleNamespace(replicas=(SimpleNamespace(set_role=set_role),) * 2)
            body = json.dumps({"role": role}).encode()
            head = b"POST /role HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n"
            lines = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            return parse(await exchange(port, head + lines + body))

    assert asyncio.run(go())[0] == status
    assert told == (["prefill", "prefill"] if status == 200 else [])


def test_replicas_with_different_prefill_servers_have_no_common_list():
    replicas = [SimpleNamespace(tiers=[SimpleNamespace(peer_transfers=peers)]) for peers in ({"unix:/a": 1}, {})]
    assert _prefill_urls(replicas) is None
