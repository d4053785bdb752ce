"""Routes about the server itself: health, readiness, version and metrics."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

import quire
from quire.api.decode import Body
from quire.base.logging import get_logger
from quire.contracts.config import Role
from quire.contracts.expert_stats import ExpertStats
from quire.contracts.tier_stats import TierStats
from quire.serving.answers import Answer, Ready, Unary
from quire.serving.auth import Authenticator
from quire.serving.context import ServerContext
from quire.serving.endpoint import Call, Endpoint
from quire.serving.engine_client.client import EngineClient
from quire.serving.engine_client.fleet import EngineFleet
from quire.serving.errors import ApiError, invalid
from quire.serving.hosts import is_loopback
from quire.serving.http.openapi import document
from quire.serving.metrics.server_metrics import ServerMetrics
from quire.serving.public_error import show_error

logger = get_logger(__name__)

_COMPAT = {"name": "compat", "in": "query", "required": False, "schema": {"enum": ["vllm"]}}


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Ready:
    return Ready(msgspec.json.encode(body), status, headers or {})


class ReplicaHealth(msgspec.Struct):
    """The state of one of several engines. error: why it last ended, omitted for callers without access."""

    replica: int
    engine: str
    heartbeat_age_s: float | None
    num_restarts: int
    error: str | msgspec.UnsetType | None = msgspec.UNSET


class Health(msgspec.Struct):
    """Whether the engine is alive (of several: at least one), be it asleep. Errors are omitted for callers without access.

    error       why it is not alive; None if unknown, omitted while it is alive
    last_error  why it last ended, while it is alive again; None if it never ended, omitted while it is not alive
    replicas    each engine, if there are several
    transfers   of servers with a role: how many KV transfers ended so; of decode servers also how many prompts were computed
                here without one, by the reason
    transfer_problems  of decode servers: why the last transfer from a prefill server failed, by its address; omitted for
                callers without access
    tier_problems  what is wrong with the other KV tiers, whose pages are computed meanwhile; omitted for callers without access
    """

    status: Literal["ok", "unhealthy"]
    phase: str
    engine: str
    heartbeat_age_s: float | None
    error: str | msgspec.UnsetType | None = msgspec.UNSET
    last_error: str | msgspec.UnsetType | None = msgspec.UNSET
    replicas: list[ReplicaHealth] | msgspec.UnsetType = msgspec.UNSET
    transfers: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    transfer_problems: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    tier_problems: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class Readiness(msgspec.Struct, omit_defaults=True):
    """Whether requests are accepted; if not, why."""

    status: Literal["ready", "not ready"]
    reason: str | None = None


class Version(msgspec.Struct):
    """Of quire."""

    version: str


class ReplicaLoad(msgspec.Struct):
    """How full one engine is. kv_blocks_free: those that hold a reusable prefix among them."""

    replica: int
    engine: str
    running: int
    waiting: int
    kv_blocks_free: int
    kv_blocks_total: int


class Load(msgspec.Struct):
    """How full the server is, for routers. A sum over its engines, but for block_size.

    server_load   running and waiting requests together: the name that vLLM has for it
    running       sequences that the engines compute
    waiting       requests in the server's queue and in the engines'
    block_size    tokens of a KV block
    max_num_seqs  that run at once
    replica_id    which ids of stored objects begin with; empty: none
    model_content  of weights, tokenizer and options that decide tokens: servers with another one serve another model
    role          of the engines: both, prefill or decode
    prefill_listen  of prefill servers: where decode servers connect
    prefill_urls  of decode servers that take them by `PUT /prefill_urls`: those in use; null while the replicas differ
    prompt_tokens_total  of requests that reached their first output token; cached_tokens_total: of these, taken from the cache
    """

    server_load: int
    running: int
    waiting: int
    kv_blocks_free: int
    kv_blocks_total: int
    block_size: int
    max_num_seqs: int
    replicas: list[ReplicaLoad]
    prompt_tokens_total: int
    cached_tokens_total: int
    replica_id: str = ""
    model_content: str = ""
    role: Role = "both"
    prefill_listen: str | msgspec.UnsetType = msgspec.UNSET
    prefill_urls: list[str] | msgspec.UnsetType | None = msgspec.UNSET


class PrefillUrls(Body):
    """Where the prefill servers listen that a decode server is to use, as tcp://HOST:PORT or unix:PATH; none: []."""

    urls: Annotated[list[Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=256)]


class NewRole(Body):
    """The role that the engines have from now on: both, prefill or decode."""

    role: Role


class ReplicaExperts(msgspec.Struct):
    """The experts of one engine, by layer; empty where they are not counted."""

    replica: int
    layers: list[ExpertStats]


class Experts(msgspec.Struct):
    """How many tokens each expert of each layer has got, and the imbalance of the ranks that they are placed on."""

    replicas: list[ReplicaExperts]


class Rebalancing(msgspec.Struct):
    """The number of engines that have begun to move experts. The log has each move, `/debug/experts` the counts.

    refused  why others have not, by the number of the replica
    """

    num_engines: int
    refused: dict[str, str] = msgspec.field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class SystemParts:
    """The objects that these routes use."""

    server: ServerContext
    client: EngineClient | EngineFleet
    authenticator: Authenticator
    metrics: ServerMetrics


async def health(parts: SystemParts, call: Call) -> Answer:
    """Whether the engine is alive and makes progress; if not, with the reason for callers with a key."""
    client, state = parts.client, parts.server.state
    is_alive = client.state == "ready" and client.heartbeat_age_s < parts.server.config.watchdog_timeout_s
    is_alive = is_alive or client.state == "sleeping"  # the supervisor watches it, and it is silent while it wakes up
    body = Health(
        status="ok" if is_alive else "unhealthy",
        phase=state.phase,
        engine=client.state,
        heartbeat_age_s=_rounded(client.heartbeat_age_s),
    )
    may_know = parts.authenticator.knows(call.request.headers)
    if len(client.replicas) > 1:
        body.replicas = [_replica_health(number, one, may_know) for number, one in enumerate(client.replicas)]
    _describe_tiers(body, [tier for replica in client.replicas for tier in replica.tiers], may_know)
    if may_know:
        error = state.failure or client.last_error
        shown = None if error is None else show_error(error)
        if is_alive:
            body.last_error = shown
        else:
            body.error = shown
    return _json(body, 200 if is_alive else 503)


def _describe_tiers(body: Health, tiers: list[TierStats], may_know: bool) -> None:
    transfers, of_peers, of_tiers = Counter[str](), dict[str, str](), dict[str, str]()
    for tier in tiers:
        transfers.update(tier.outcomes)
        for name, problem in tier.problems.items():
            if tier.tier == "peer":
                of_peers[name] = show_error(problem)
            else:
                of_tiers[f"{tier.tier} {name}"] = show_error(problem)
    if transfers:
        body.transfers = dict(transfers)
    if of_peers and may_know:
        body.transfer_problems = of_peers
    if of_tiers and may_know:
        body.tier_problems = of_tiers


def _replica_health(number: int, replica: EngineClient, may_know: bool) -> ReplicaHealth:
    body = ReplicaHealth(number, replica.state, _rounded(replica.heartbeat_age_s), replica.num_restarts)
    if may_know:
        body.error = None if replica.last_error is None else show_error(replica.last_error)
    return body


def _rounded(seconds: float) -> float | None:
    return round(seconds, 3) if math.isfinite(seconds) else None


async def ready(parts: SystemParts, call: Call) -> Answer:
    """Whether new requests are accepted; for load balancers."""
    phase, engine = parts.server.state.phase, parts.client.state
    is_ready = phase == "serving" and engine == "ready" and parts.server.served is not None
    if is_ready:
        return _json(Readiness("ready"))
    reason = phase if phase != "serving" else f"engine {engine}"
    return _json(Readiness("not ready", reason), 503, {"retry-after": "1"})


async def load(parts: SystemParts, call: Call) -> Answer:
    """How full the server is."""
    found, num_waiting = parts.metrics.occupancy()
    num_running = sum(one.num_running for one in found)
    replicas = [
        ReplicaLoad(number, client.state, one.num_running, one.num_waiting, one.num_free_blocks, one.num_blocks)
        for number, (client, one) in enumerate(zip(parts.client.replicas, found, strict=True))
    ]
    num_prompt_tokens, num_cached_tokens = parts.metrics.prompt_totals()
    body = Load(
        server_load=num_running + num_waiting,
        running=num_running,
        waiting=num_waiting,
        kv_blocks_free=sum(one.num_free_blocks for one in found),
        kv_blocks_total=sum(one.num_blocks for one in found),
        block_size=max(one.block_size for one in found),
        max_num_seqs=sum(one.max_num_seqs for one in found),
        replicas=replicas,
        prompt_tokens_total=num_prompt_tokens,
        cached_tokens_total=num_cached_tokens,
        replica_id=parts.server.config.replica_id,
        model_content="" if parts.server.served is None else parts.server.served.content,
    )
    info = parts.client.info
    if info is not None:
        body.role = info.role
        if info.prefill_listen is not None and info.role == "prefill":
            body.prefill_listen = info.prefill_listen
        if info.takes_prefill_urls and info.role == "decode":
            body.prefill_urls = _prefill_urls(parts.client.replicas)
    return _json(body)


def _prefill_urls(replicas: Sequence[EngineClient]) -> list[str] | None:
    """Return the prefill servers that the engines use, as of the last heartbeat; None if they use different ones."""
    found = {tuple(sorted(url for tier in replica.tiers for url in tier.peer_transfers)) for replica in replicas}
    return list(found.pop()) if len(found) == 1 else None


async def put_prefill_urls(parts: SystemParts, call: Call) -> Answer:
    """Set the prefill servers of a decode server, for callers with an admin key."""
    _check_may_set(parts, call, "prefill servers are")
    body = await call.body(PrefillUrls)

    async def work() -> Ready:
        for client in parts.client.replicas:
            await client.set_prefill_urls(body.urls)
        logger.info("the prefill servers are now %s", ", ".join(body.urls) or "none")
        return _json(body)

    return Unary(work)


async def put_role(parts: SystemParts, call: Call) -> Answer:
    """Change the role of the engines, for callers with an admin key. What was begun in the role before goes on to its end."""
    _check_may_set(parts, call, "the role is")
    body = await call.body(NewRole)

    async def work() -> Ready:
        # A caller that leaves does not divide engines and server.
        changes = asyncio.gather(*(client.set_role(body.role) for client in parts.client.replicas), return_exceptions=True)
        for failure in await asyncio.shield(changes):
            if failure is not None:
                raise failure
        logger.info("the role is now %s, as set by %s", body.role, call.owner.name)
        return _json(body)

    return Unary(work)


def _check_may_set(parts: SystemParts, call: Call, what: str) -> None:
    """Raise ApiError for callers without an admin key, and for all where no key keeps other machines out."""
    if not call.owner.is_admin:
        raise ApiError(403, f"{what} set with an admin key (admin: true in --api-key-file)", code="admin_only")
    config = parts.server.config
    if not config.api_keys and not is_loopback(config.host):
        raise ApiError(
            403,
            f"{what} set with an admin key where others can connect (host is {config.host}): give --api-key-file",
            code="admin_only",
        )


async def experts(parts: SystemParts, call: Call) -> Answer:
    """How many tokens the experts of a mixture model have got, as of the last heartbeat."""
    return _json(Experts([ReplicaExperts(number, client.experts) for number, client in enumerate(parts.client.replicas)]))


async def rebalance(parts: SystemParts, call: Call) -> Answer:
    """Begin to move experts between the ranks of each engine, for callers with an admin key."""
    if not call.owner.is_admin:
        raise ApiError(403, "experts are moved with an admin key (admin: true in --api-key-file)", code="admin_only")
    clients = parts.client.replicas
    ends = await asyncio.gather(*(client.rebalance_experts() for client in clients), return_exceptions=True)
    errors = {number: end for number, end in enumerate(ends) if isinstance(end, BaseException)}
    unexpected = next((error for error in errors.values() if not isinstance(error, ApiError)), None)
    if unexpected is not None:
        raise unexpected
    if len(errors) == len(clients):
        raise errors[0]
    return _json(Rebalancing(len(clients) - len(errors), {str(number): str(error) for number, error in errors.items()}))


async def version(parts: SystemParts, call: Call) -> Answer:
    """The version of quire."""
    return _json(Version(quire.__version__))


async def metrics(parts: SystemParts, call: Call) -> Answer:
    """All metrics in Prometheus' text format."""
    compat = call.query.get("compat")
    if compat not in (None, "vllm"):
        raise invalid(f"compat must be 'vllm' or absent, got {compat[:50]!r}", "compat")
    body, media_type = parts.metrics.render(compat=compat)
    return Ready(body, media_type=media_type)


_ENDPOINTS: tuple[Endpoint[SystemParts], ...] = (
    Endpoint(
        method="GET",
        path="/health",
        handler=health,
        summary="Whether the engine lives",
        tag="system",
        answer=Health,
        other_answers={503: Health},
        is_open=True,
    ),
    Endpoint(
        method="GET",
        path="/ready",
        handler=ready,
        summary="Whether requests are taken",
        tag="system",
        answer=Readiness,
        other_answers={503: Readiness},
        is_open=True,
    ),
    Endpoint(method="GET", path="/load", handler=load, summary="How full the server is", tag="system", answer=Load),
    Endpoint(
        method="GET",
        path="/debug/experts",
        handler=experts,
        summary="Tokens of the experts of a mixture model",
        tag="system",
        answer=Experts,
    ),
    Endpoint(
        method="POST",
        path="/experts/rebalance",
        handler=rebalance,
        summary="Balance the experts over the ranks by the load of the last steps (enable_eplb)",
        tag="system",
        answer=Rebalancing,
    ),
    Endpoint(
        method="PUT",
        path="/prefill_urls",
        handler=put_prefill_urls,
        summary="Set the prefill servers of a decode server",
        tag="system",
        body=PrefillUrls,
        answer=PrefillUrls,
    ),
    Endpoint(
        method="PUT",
        path="/role",
        handler=put_role,
        summary="Change the role of the engines: both, prefill or decode",
        tag="system",
        body=NewRole,
        answer=NewRole,
    ),
    Endpoint(method="GET", path="/version", handler=version, summary="The version", tag="system", answer=Version),
)
_METRICS: Endpoint[SystemParts] = Endpoint(
    method="GET",
    path="/metrics",
    handler=metrics,
    summary="Prometheus metrics",
    tag="system",
    query=(_COMPAT,),
    success_media_type="text/plain",
)


def make_endpoints(others: tuple[Endpoint[Any], ...], is_metrics_enabled: bool) -> tuple[Endpoint[SystemParts], ...]:
    """Return the endpoints of this module; the OpenAPI description covers `others` too."""
    description: list[bytes] = []

    async def openapi(parts: SystemParts, call: Call) -> Answer:
        if not description:
            root_path = parts.server.config.root_path
            maxima = {"n": parts.server.config.max_n, "best_of": parts.server.config.max_n}
            listed = (*others, *found)
            description.append(
                await asyncio.to_thread(
                    lambda: msgspec.json.encode(document("quire", quire.__version__, listed, maxima, root_path))
                )
            )
        return Ready(description[0])

    described: Endpoint[SystemParts] = Endpoint(
        method="GET",
        path="/openapi.json",
        handler=openapi,
        summary="The description of this API",
        tag="system",
        answer=dict[str, Any],
    )
    found = (*_ENDPOINTS, *((_METRICS,) if is_metrics_enabled else ()), described)
    return found
