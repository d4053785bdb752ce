"""KvSubscriber: follows the KV events of one engine, asks for those that were lost, and keeps its BlockIndex.

Without certainty there is no guessing: after events that cannot be had again, the index starts anew and says that it is not
complete. An engine that is silent, although it computes prompts, is an error in the log and in the router's metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import zmq
import zmq.asyncio

from quire.base.logging import UnexpectedErrors, get_logger
from quire.router.block_index import BlockIndex
from quire.router.config import KvEventSource
from quire.router.kv_events import Batch, KvEventError, decode_batch

logger = get_logger(__name__)

SourceState = Literal["waiting", "live", "silent"]
SOURCE_STATES: tuple[SourceState, ...] = ("waiting", "live", "silent")
_MAX_NUMBER = 1 << 63
_REPLAY_TIMEOUT_S = 5.0
_HIGH_WATER_MARK = 100_000
_RETRY_S = 5.0
"""How long after an error a subscriber waits before it connects again."""
_MIN_REQUESTS = 3
"""Answers of a backend without an event after which its events are missed."""


@dataclass(slots=True)
class SourceCounts:
    """What happened since the start of a subscriber. num_lost: gaps that no replay filled."""

    num_batches: int = 0
    num_gaps: int = 0
    num_lost: int = 0
    num_restarts: int = 0
    num_invalid: int = 0


class KvSubscriber:
    """Follows one source. Used from the event loop only.

    num_answers  returns how many requests the backend has answered, so that silence can be told from idleness
    silence_s    without events after which the engine is asked for a replay, or, where it has none, counts as silent
    """

    def __init__(self, name: str, source: KvEventSource, num_answers: Callable[[], int], silence_s: float = 10.0) -> None:
        self.index = BlockIndex()
        self.state: SourceState = "waiting"
        self.is_complete = False
        self.counts = SourceCounts()
        self._name = name
        self._source = source
        self._num_answers = num_answers
        self._silence_s = silence_s
        self._next: int | None = None
        self._last_time_s = 0.0
        self._answers_seen = 0
        self._resync = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._context: zmq.asyncio.Context | None = None
        self._errors = UnexpectedErrors(logger)

    @property
    def is_live(self) -> bool:
        """Whether the index says what the engine holds now."""
        return self.state == "live"

    def start(self) -> None:
        """Follow the source from now on."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop following it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def restart(self) -> None:
        """Forget everything: the engine may have started again. What it holds now is asked for."""
        self._forget()
        self._next = None
        self.state = "waiting"
        self._resync.set()

    def _forget(self) -> None:
        self.index.clear()
        self.is_complete = False

    async def _run(self) -> None:
        while True:
            await self._connect()
            await asyncio.sleep(_RETRY_S)
            self._forget()
            self._next = None

    async def _connect(self) -> None:
        """Follow the source until an error ends that."""
        self._context = zmq.asyncio.Context()
        try:
            with self._context.socket(zmq.SUB) as socket:
                socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.SUBSCRIBE, b"")
                socket.connect(self._source.endpoint)
                await self._follow(socket)
        except zmq.ZMQError as error:
            self._note_silent(f"no connection can be made: {error}")
        except Exception as error:  # noqa: BLE001 - the prefixes are estimated meanwhile
            self._errors.note("following KV events", error, self._name)
            self._note_silent(f"{type(error).__name__}: {error}")
        finally:
            self._context.destroy(linger=0)

    async def _follow(self, socket: zmq.asyncio.Socket) -> None:
        await self._replay()
        receiving = asyncio.ensure_future(socket.recv_multipart())
        while True:
            asked = asyncio.ensure_future(self._resync.wait())
            try:
                await asyncio.wait({receiving, asked}, timeout=self._silence_s, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():
                    frames = receiving.result()
                    receiving = asyncio.ensure_future(socket.recv_multipart())
                    await self._take(frames)
                elif asked.done():
                    self._resync.clear()
                    await self._replay()
                else:
                    await self._check_silence()
            except BaseException:
                receiving.cancel()
                raise
            finally:
                asked.cancel()

    async def _take(self, frames: list[bytes]) -> None:
        """Take in a message that was published."""
        if len(frames) not in (2, 3):
            self._note_invalid("a message has other frames than topic, number and batch")
            return
        found = self._decode(frames[-2:])
        if found is None:
            return
        number, batch = found
        if self._next is not None and number < self._next:
            if batch.time_s <= self._last_time_s:  # it came in a replay, too
                return
            logger.info("KV events of %s begin anew: its engine has started again", self._name)
            self.counts.num_restarts += 1
            self._forget()
            self._next = 0
        if self._next is not None and number > self._next:
            self.counts.num_gaps += 1
            await self._replay()
            if self._next is not None and self._next > number:
                return
        if self._next is None or number > self._next:
            if self._next is not None:
                self.counts.num_lost += 1
                logger.warning("%d batches of KV events of %s are lost: its index begins anew", number - self._next, self._name)
            self._forget()
            self.is_complete = number == 0
        self._apply(number, batch)

    def _apply(self, number: int, batch: Batch) -> None:
        for event in batch.events:
            self.index.apply(event)
        if number == 0:
            self.is_complete = True
        self._next, self._last_time_s = number + 1, batch.time_s
        self.counts.num_batches += 1
        self._note_alive()

    async def _replay(self) -> bool:
        """Ask for what came after the last batch that was taken in; return whether the engine answered.

        The last batch is asked for, too: where it is another one now, the engine has started again.
        """
        found = await self._ask_replay(max((self._next or 0) - 1, 0))
        if found is None:
            return False
        if self._next and (not found or (found[0][0] == self._next - 1 and found[0][1].time_s != self._last_time_s)):
            logger.info("KV events of %s begin anew: its engine has started again", self._name)
            self.counts.num_restarts += 1
            self._forget()
            self._next = None
            found = await self._ask_replay(0)
            if found is None:
                return False
        for number, batch in found:
            if self._next is not None and number < self._next:
                continue
            if number > (self._next or 0):
                self._forget()
                self.counts.num_lost += self._next is not None
            self._apply(number, batch)
        self._note_alive()
        return True

    async def _ask_replay(self, start: int) -> list[tuple[int, Batch]] | None:
        """Return the batches from a number on that the engine still has; None where it has no replay, or does not answer."""
        if self._source.replay_endpoint is None or self._context is None:
            return None
        found: list[tuple[int, Batch]] = []
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            try:
                async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                    socket.connect(self._source.replay_endpoint)
                    await socket.send_multipart([b"", start.to_bytes(8, "big")])
                    while True:
                        frames = await socket.recv_multipart()
                        if len(frames) < 2 or not frames[-1] or int.from_bytes(frames[-2], "big") >= _MAX_NUMBER:
                            return found
                        one = self._decode(frames[-2:])
                        if one is None:
                            return None
                        found.append(one)
            except TimeoutError:
                logger.warning("no replay of KV events came from %s within %g s", self._name, _REPLAY_TIMEOUT_S)
                return None

    def _decode(self, frames: list[bytes]) -> tuple[int, Batch] | None:
        if len(frames[0]) != 8:
            self._note_invalid("the number of a batch is not 8 bytes")
            return None
        try:
            return int.from_bytes(frames[0], "big"), decode_batch(frames[1])
        except KvEventError as error:
            self._note_invalid(str(error))
            return None

    async def _check_silence(self) -> None:
        """Called when nothing came for a while: an idle engine is well, one that answers requests should say something."""
        num_answers = self._num_answers()
        if num_answers - self._answers_seen < _MIN_REQUESTS and self.state != "silent":
            return
        if self._source.replay_endpoint is not None:
            if not await self._replay():
                self._note_silent("it answers requests, but no replay of events")
        elif self.state != "silent":
            self._note_silent(f"it has answered {num_answers - self._answers_seen} requests without an event")
        self._answers_seen = num_answers

    def _note_alive(self) -> None:
        if self.state == "silent":
            logger.info("KV events of %s come again", self._name)
        self.state = "live"
        self._answers_seen = self._num_answers()

    def _note_silent(self, reason: str) -> None:
        if self.state != "silent":
            logger.error(
                "KV events of %s (%s) do not come: %s; its prefixes are estimated", self._name, self._source.endpoint, reason
            )
        self.state = "silent"

    def _note_invalid(self, reason: str) -> None:
        self.counts.num_invalid += 1
        if self.counts.num_invalid == 1:
            logger.error("KV events of %s are not understood: %s", self._name, reason)
