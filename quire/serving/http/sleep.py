"""POST /sleep, POST /wake_up and GET /is_sleeping, as vLLM has them: release the engine's memory while nobody needs it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from quire.base.errors import RequestError
from quire.base.logging import get_logger
from quire.contracts.sleep import SLEEP_LEVELS, SLEEP_MODES, SleepLevel, SleepMode, check_sleep_arguments
from quire.serving.answers import Answer, Ready, Unary
from quire.serving.endpoint import Call, Endpoint
from quire.serving.engine_client.client import EngineClient
from quire.serving.engine_client.fleet import EngineFleet
from quire.serving.errors import ApiError, engine_unavailable, invalid
from quire.serving.request_queue import EngineGateway

logger = get_logger(__name__)

_ABORT_S = 5.0
"""How long mode "abort" waits until the ended requests have left the engine and their answers are sent."""

_LEVEL = {"name": "level", "in": "query", "required": False, "schema": {"enum": list(SLEEP_LEVELS), "default": 1}}
_MODE = {"name": "mode", "in": "query", "required": False, "schema": {"enum": list(SLEEP_MODES), "default": "abort"}}


class Sleeping(msgspec.Struct):
    """Whether the engine is asleep. Of several: whether all are."""

    is_sleeping: bool


@dataclass(frozen=True, slots=True)
class SleepParts:
    """The objects that these routes use. lock: one change at a time."""

    client: EngineClient | EngineFleet
    gateway: EngineGateway
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def sleep(self, level: SleepLevel, mode: SleepMode) -> None:
        """End or finish all requests, and put the engine to sleep. Mode "abort" also ends those for which a call with mode
        "wait" still waits. Raises ApiError."""
        refusal = engine_unavailable("the engine is being put to sleep: POST /wake_up wakes it up")
        if mode == "abort" and self.lock.locked():
            await self.client.check_sleep(level)
            self.gateway.fail_all("sleep", refusal)
        async with self.lock:
            await self.client.check_sleep(level)  # before a request ends for nothing
            with self.gateway.refusing(refusal):
                if mode == "wait":
                    await self.gateway.emptied()
                else:
                    self.gateway.fail_all("sleep", refusal)
                    await self.gateway.drained(_ABORT_S)
                await self.client.sleep(level)

    async def wake_up(self) -> None:
        """Wake the engine up. Raises ApiError."""
        async with self.lock:
            await self.client.wake_up()

    @property
    def is_sleeping(self) -> bool:
        """Whether all engines are asleep."""
        return all(replica.state == "sleeping" for replica in self.client.replicas)


async def post_sleep(parts: SleepParts, call: Call) -> Answer:
    """Release the memory of the engine, for callers with an admin key."""
    _check_admin(call)
    _check_query(call, "level", "mode")
    text = call.query.get("level", "1")
    try:
        level, mode = check_sleep_arguments(int(text) if text in ("1", "2") else text, call.query.get("mode", "abort"))
    except RequestError as error:
        raise invalid(str(error), error.param) from None

    async def work() -> Ready:
        await parts.sleep(level, mode)
        logger.info("the engine is put to sleep (level %d) by %s", level, call.owner.name)
        return _state(parts)

    return Unary(work)


async def post_wake_up(parts: SleepParts, call: Call) -> Answer:
    """Take the memory again, and accept requests, for callers with an admin key."""
    _check_admin(call)
    _check_query(call)

    async def work() -> Ready:
        await parts.wake_up()
        logger.info("the engine is woken up by %s", call.owner.name)
        return _state(parts)

    return Unary(work)


async def get_is_sleeping(parts: SleepParts, call: Call) -> Answer:
    """Whether the engine is asleep, for callers with an admin key."""
    _check_admin(call)
    return _state(parts)


def _state(parts: SleepParts) -> Ready:
    return Ready(msgspec.json.encode(Sleeping(parts.is_sleeping)))


def _check_admin(call: Call) -> None:
    if not call.owner.is_admin:
        text = "the engine sleeps and wakes up with an admin key (admin: true in --api-key-file)"
        raise ApiError(403, text, code="admin_only")


def _check_query(call: Call, *allowed: str) -> None:
    unknown = next((name for name in call.query if name not in allowed), None)
    if unknown is not None:
        known = f"allowed: {', '.join(allowed)}" if allowed else "there are none"
        raise invalid(f"the query parameter {unknown[:50]!r} is not supported ({known}): leave it out", unknown[:50])


ENDPOINTS: tuple[Endpoint[SleepParts], ...] = (
    Endpoint(
        method="POST",
        path="/sleep",
        handler=post_sleep,
        summary="Release the memory of the engine",
        tag="system",
        query=(_LEVEL, _MODE),
        answer=Sleeping,
    ),
    Endpoint(
        method="POST",
        path="/wake_up",
        handler=post_wake_up,
        summary="Load what sleeping released",
        tag="system",
        answer=Sleeping,
    ),
    Endpoint(
        method="GET",
        path="/is_sleeping",
        handler=get_is_sleeping,
        summary="Whether the engine is asleep",
        tag="system",
        answer=Sleeping,
    ),
)
