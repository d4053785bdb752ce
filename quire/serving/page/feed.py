"""EngineFeed: the live view as server-sent events, for a few viewers at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from quire.serving.errors import ApiError
from quire.serving.page.view import EngineView, Mark, WatchedEngine
from quire.serving.page.wire import Frame

MAX_VIEWERS = 16
FAST_HZ = 10
SLOW_HZ = 1


@dataclass(eq=False, slots=True)
class _Viewer:
    """One viewer. Holds at most one frame; is_behind after a frame had to be dropped.

    told_step  the last step that was sent
    """

    hz: int
    is_admin: bool
    told_step: int
    frame: bytes | None = None
    frame_step: int = -1
    is_behind: bool = False
    is_over: bool = False
    num_dropped: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def offer(self, frame: bytes, step_id: int) -> None:
        """Offer a frame; it is dropped if the previous one is unread."""
        if self.frame is not None or self.is_behind:
            self.is_behind = True
            self.num_dropped += 1
            return
        self.frame, self.frame_step = frame, step_id
        self.news.set()


class EngineFeed:
    """Makes each frame once for all viewers of a rate (twice if some are admins), and none without viewers.

    A viewer that reads too slowly gets a snapshot with the missing steps instead of the missed frames.

    tick_s  seconds between two frames of the fast rate
    """

    def __init__(self, engine: WatchedEngine, view: EngineView, tick_s: float = 1 / FAST_HZ) -> None:
        self._engine = engine
        self._view = view
        self._tick_s = tick_s
        self.viewers: list[_Viewer] = []
        self._marks = {FAST_HZ: Mark(), SLOW_HZ: Mark()}
        self._num_ticks = 0
        self.timer: asyncio.TimerHandle | None = None

    @property
    def num_viewers(self) -> int:
        """The number of viewers."""
        return len(self.viewers)

    async def frames(self, hz: int, is_admin: bool, after_step: int = -1) -> AsyncIterator[bytes]:
        """Yield a snapshot, then changes, at most hz times a second. Raises ApiError 503 if there are too many viewers.

        after_step  the last step that the viewer has; -1 for none
        """
        viewer = self._join(hz, is_admin, after_step)
        try:
            yield self._snapshot(viewer)
            while not viewer.is_over or viewer.frame is not None:
                await viewer.news.wait()
                viewer.news.clear()
                frame, viewer.frame = viewer.frame, None
                if viewer.is_behind:
                    viewer.is_behind = False
                    yield self._snapshot(viewer)
                elif frame is not None:
                    viewer.told_step = viewer.frame_step
                    yield frame
        finally:
            self._leave(viewer)

    def tick(self) -> None:
        """Send changes to the viewers; called by a timer."""
        self._num_ticks += 1
        self._view.update()
        for hz in (FAST_HZ, SLOW_HZ):
            if hz == FAST_HZ or not self._has(FAST_HZ) or self._num_ticks % FAST_HZ == 0:
                self._publish(hz)
        if self._view.is_idle:  # an open stream would delay the server's shutdown
            for viewer in self.viewers:
                viewer.is_over = True
                viewer.news.set()

    def _publish(self, hz: int) -> None:
        viewers = [viewer for viewer in self.viewers if viewer.hz == hz]
        since, mark = self._marks[hz], self._view.mark()
        encoded: dict[bool, bytes] = {}
        for is_admin in {viewer.is_admin for viewer in viewers}:
            frame = self._view.frame(since, is_admin)
            if frame is not None:
                encoded[is_admin] = _event(b"delta", mark.step_id, frame)
        for viewer in viewers:
            if viewer.is_admin in encoded:
                viewer.offer(encoded[viewer.is_admin], mark.step_id)
        self._marks[hz] = mark

    def _snapshot(self, viewer: _Viewer) -> bytes:
        frame = self._view.snapshot(viewer.told_step, viewer.is_admin)
        viewer.told_step = self._view.mark().step_id
        return _event(b"snapshot", viewer.told_step, frame)

    def _join(self, hz: int, is_admin: bool, after_step: int) -> _Viewer:
        if len(self.viewers) >= MAX_VIEWERS:
            raise ApiError(
                503,
                f"{MAX_VIEWERS} viewers watch the engine already; try again later",
                code="too_many_viewers",
                retry_after_s=10.0,
            )
        viewer = _Viewer(hz, is_admin, after_step)
        if not self.viewers:
            self._view.start()
        if not self._has(hz):
            self._marks[hz] = self._view.mark()
        self.viewers.append(viewer)
        self._set_rate()
        return viewer

    def _leave(self, viewer: _Viewer) -> None:
        self.viewers.remove(viewer)
        if not self.viewers:
            self._view.stop()
        self._set_rate()

    def _has(self, hz: int) -> bool:
        return any(viewer.hz == hz for viewer in self.viewers)

    def _set_rate(self) -> None:
        """Set the rate of the engine's reports and of the timer to that of the fastest viewer."""
        hz = max((viewer.hz for viewer in self.viewers), default=0)
        self._engine.watch(hz)
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if hz:
            self._schedule()

    def _schedule(self) -> None:
        delay_s = self._tick_s if self._has(FAST_HZ) else self._tick_s * FAST_HZ
        self.timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._schedule()
        self.tick()


def _event(kind: bytes, step_id: int, frame: Frame) -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % (kind, step_id, msgspec.json.encode(frame))
