"""RouterTimelines: what happened to requests (`quire explain`), as the backends that served them tell it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from quire.base.logging import get_logger
from quire.router.backend import Backend, BackendTable
from quire.router.incoming import Incoming
from quire.router.upstream import UpstreamError
from quire.serving.errors import ApiError

logger = get_logger(__name__)

_PATH = re.compile(r"/v1/requests/(?:timelines|.+/timeline)")
_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 64 << 20


class _Timelines(msgspec.Struct):
    """What is read of RequestTimelines and KeptTimelines of quire.serving."""

    timelines: list[dict[str, Any]]
    max_timelines: int | None = None
    steps: list[dict[str, Any]] = []


class RouterTimelines:
    """Asks all backends with the client's own key: which ones served a request is known after a restart, too, and a stream
    that another backend continued has a timeline at both.
    """

    def __init__(self, table: BackendTable) -> None:
        self._table = table

    @staticmethod
    def is_asked(path: str) -> bool:
        """Return whether a path is one of the routes of timelines."""
        return _PATH.fullmatch(path) is not None

    async def answer(self, incoming: Incoming) -> str:
        """Answer a request; return the names of the backends that knew something. Raises ApiError."""
        backends = list(self._table)
        ready = [one for one in backends if one.state == "ready"]
        answers = await asyncio.gather(*(self._ask(one, incoming) for one in ready))
        found = [(one.name, body) for one, (status, body) in zip(ready, answers, strict=True) if status == 200]
        if not found:
            await self._answer_nothing(incoming, answers, len(backends) - len(ready))
            return "none"
        merged = _merge([body for _, body in found])
        await incoming.answer(200, msgspec.json.encode(merged))
        return "+".join(name for name, _ in found)

    async def _ask(self, backend: Backend, incoming: Incoming) -> tuple[int, bytes]:
        """Return the status and the body of a backend's answer; status 0 where it gave none."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await backend.upstream.send(
                    "GET", incoming.target, incoming.headers_to_send(), idle_timeout_s=_TIMEOUT_S
                )
                async with answer:
                    return answer.status, await answer.read(_MAX_ANSWER_BYTES)
        except (TimeoutError, UpstreamError) as error:
            logger.warning("backend %s could not be asked for timelines: %s", backend.name, error)
            return 0, b""

    @staticmethod
    async def _answer_nothing(incoming: Incoming, answers: list[tuple[int, bytes]], num_unready: int) -> None:
        """Pass on a refusal, or what a backend says of a request that it does not know, where all could be asked."""
        num_silent = num_unready + sum(status == 0 for status, _ in answers)
        refused = next((one for one in answers if one[0] not in (0, 404)), None)
        if refused is None and (num_silent or not answers):
            message = f"no backend that answers knows this request, and {num_silent} backends do not answer"
            raise ApiError(503, message, code="backend_unavailable", retry_after_s=2.0)
        status, body = refused or answers[0]
        await incoming.answer(status, body)


def _merge(bodies: list[bytes]) -> dict[str, Any]:
    """Return one answer; the engines of all backends are numbered through. Raises ApiError for what are no timelines."""
    merged: dict[str, Any] = {"timelines": []}
    first = 0
    for body in bodies:
        try:
            found = msgspec.json.decode(body, type=_Timelines)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(502, f"a backend answers with what are no timelines: {error}", code="backend_failed") from None
        entries = [*found.timelines, *found.steps]
        for entry in entries:
            entry["replica"] = first + int(entry.get("replica", 0))
        first = max([first, *(entry["replica"] + 1 for entry in entries)])
        merged["timelines"] += found.timelines
        if found.max_timelines is not None:
            merged["max_timelines"] = merged.get("max_timelines", 0) + found.max_timelines
            merged.setdefault("steps", []).extend(found.steps)
    merged["timelines"].sort(key=lambda one: one.get("received_at", 0.0))
    return merged
