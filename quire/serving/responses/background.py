"""BackgroundResponses: responses that are made without a client on a connection; who wants one asks for it by its id."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

import msgspec

from quire.api.openai.responses_answers import Response
from quire.base.logging import get_logger
from quire.serving.core.sinks import Folding
from quire.serving.core.streams import generation_events
from quire.serving.errors import ApiError, as_api_error, invalid
from quire.serving.interfaces import NOT_BY_CLIENT, Gateway
from quire.serving.openai.frames import encode_json
from quire.serving.openai.handlers import Jobs
from quire.serving.responses.machine import ResponseMachine

logger = get_logger(__name__)

LAST_WORDS_S = 2.0
"""For what runs to be stored as failed when the server ends."""

UNFINISHED = ("queued", "in_progress")
Keep = Callable[[bytes], Awaitable[object]]
"""Replaces what is stored of a response by its body."""


class _Status(msgspec.Struct):
    status: str


@dataclass(slots=True)
class _Running:
    """One response that is being made. has_ended: it can no longer be cancelled."""

    response: Response
    machine: ResponseMachine
    keep: Keep
    has_ended: bool = False
    task: asyncio.Task[None] | None = None

    def current(self) -> bytes:
        """Return the response as it stands."""
        status: Literal["queued", "in_progress"] = "in_progress" if self.machine.has_started else "queued"
        return encode_json(msgspec.structs.replace(self.response, status=status))


class BackgroundResponses:
    """Those of one server. They belong to the event loop."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], _Running] = {}

    def start(
        self, gateway: Gateway, jobs: Jobs, machine: ResponseMachine, response: Response, owner: str, keep: Keep
    ) -> bytes:
        """Begin to make a response, which is stored already; return it as it stands."""
        running = _Running(response, machine, keep)
        self._running[owner, response.id] = running
        running.task = asyncio.create_task(self._make(running, gateway, jobs, owner))
        return running.current()

    def current(self, owner: str, response_id: str) -> bytes | None:
        """Return a response as it stands, None where it is not being made."""
        running = self._running.get((owner, response_id))
        return None if running is None else running.current()

    async def cancel(self, owner: str, response_id: str) -> bytes | None:
        """End a response that is being made, and return it; None where it has ended, or is none of these."""
        running = self._running.get((owner, response_id))
        if running is None or running.task is None:
            return None
        if running.has_ended:
            await asyncio.wait({running.task})
            return None
        running.has_ended = True
        running.task.cancel(NOT_BY_CLIENT)
        await asyncio.wait({running.task})
        body = encode_json(msgspec.structs.replace(running.response, status="cancelled"))
        await running.keep(body)
        self._running.pop((owner, response_id), None)
        return body

    async def close(self) -> None:
        """Wait a little for what runs to be stored, and end the rest."""
        tasks = {running.task for running in self._running.values() if running.task is not None}
        if not tasks:
            return
        _, left = await asyncio.wait(tasks, timeout=LAST_WORDS_S)
        for task in left:
            task.cancel(NOT_BY_CLIENT)
        await asyncio.gather(*left, return_exceptions=True)

    async def _make(self, running: _Running, gateway: Gateway, jobs: Jobs, owner: str) -> None:
        machine = running.machine
        try:
            try:
                async with aclosing(generation_events(gateway, jobs, Folding(machine.feed))) as events_of_deltas:
                    async for events in events_of_deltas:
                        machine.feed(events)
                ended = machine.response()
            except Exception as error:  # noqa: BLE001 - every failure becomes the end of the response
                ended = machine.failed_response(as_api_error(error, running.response.id))
            running.has_ended = True
            await running.keep(await asyncio.to_thread(encode_json, ended) if machine.is_long else encode_json(ended))
        except ApiError as error:
            logger.error("the response %s could not be stored: %s", running.response.id, error)
        finally:
            if running.task is not None and not running.task.cancelling():  # else who cancels it stores it first
                self._running.pop((owner, running.response.id), None)


def ended_with_server(body: bytes) -> bytes | None:
    """Return a stored response as failed where it says that it is being made, which nobody does; None for any other."""
    if msgspec.json.decode(body, type=_Status).status not in UNFINISHED:
        return None
    response = msgspec.json.decode(body)
    error = {"code": "server_error", "message": "the server ended while the response was being made"}
    return encode_json({**response, "status": "failed", "error": error})


def refuse_unfinished(response_id: str) -> ApiError:
    """Return the error for going on from a response that is being made."""
    return invalid(
        f"previous_response_id: the response {response_id!r} is still being made; wait until it has ended",
        "previous_response_id",
        "response_in_progress",
    )
