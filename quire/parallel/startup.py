"""StartupBoard: the startup progress of each rank, in shared memory, for the leader."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from quire.base.errors import InvariantError
from quire.parallel.barrier import native_extension
from quire.parallel.shared_memory import SharedMemoryFile

if TYPE_CHECKING:
    from torch.distributed import Store

AREA = "startup"

_COUNTER_BYTES = 64
_PAGE_BYTES = 8192
_ROW_BYTES = _COUNTER_BYTES + 2 * _PAGE_BYTES
_MAX_TEXT = 2000


@dataclass(frozen=True, slots=True)
class StartupStatus:
    """The last status of a rank.

    stage    the current or last stage; since_s: its start, by time.monotonic
    stages   (name, seconds) of the finished stages
    ready    its message when it became ready: JSON
    error    (class, text) of its failure
    """

    state: Literal["starting", "ready", "failed"] = "starting"
    stage: str = "starting Python"
    since_s: float = 0.0
    stages: tuple[tuple[str, float], ...] = ()
    ready: dict[str, Any] = field(default_factory=dict)
    error: tuple[str, str] | None = None

    def describe(self, now_s: float) -> str:
        """Return "loading weights for 40.0 s"."""
        if self.state == "ready":
            return f"ready after {sum(seconds for _, seconds in self.stages):.1f} s"
        if self.state == "failed" and self.error is not None:
            return f"failed in {self.stage}: {self.error[1]}"
        return f"{self.stage} for {now_s - self.since_s:.1f} s"

    def to_json(self) -> bytes:
        """Return all fields as JSON."""
        return json.dumps([self.state, self.stage, self.since_s, self.stages, self.ready, self.error]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> StartupStatus:
        """Return the status from the result of to_json."""
        state, stage, since_s, stages, ready, error = json.loads(text)
        error = None if error is None else (error[0], error[1])
        return cls(state, stage, since_s, tuple((name, s) for name, s in stages), ready, error)


class Board(Protocol):
    """Where ranks report their progress."""

    def write(self, rank: int, status: StartupStatus) -> None: ...

    def read(self, rank: int) -> StartupStatus: ...


class StoreBoard:
    """A board in a store of torch.distributed, for ranks of several hosts. Times are those of each host's clock."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, rank: int, status: StartupStatus) -> None:
        """Set the status of a rank."""
        self._store.set(f"startup/{rank}", status.to_json())

    def read(self, rank: int) -> StartupStatus:
        """Return the last status of a rank."""
        key = f"startup/{rank}"
        return StartupStatus.from_json(self._store.get(key)) if self._store.check([key]) else StartupStatus()


class StartupBoard:
    """A row for each rank: a counter, and two pages of JSON that are written alternately."""

    def __init__(self, memory: SharedMemoryFile) -> None:
        self._native = native_extension()
        self._memory = memory

    @staticmethod
    def areas(size: int) -> dict[str, int]:
        """Return the area that a board for this number of ranks needs."""
        return {AREA: size * _ROW_BYTES}

    def write(self, rank: int, status: StartupStatus) -> None:
        """Replace the row of a rank; by one thread at a time."""
        text = status.to_json()
        if len(text) > _PAGE_BYTES - 4:
            raise InvariantError(f"the startup report of rank {rank} has {len(text)} bytes, expected at most {_PAGE_BYTES - 4}")
        number = (self._native.read_counter(self._counter(rank)) + 1) & 0xFFFFFFFF
        page = self._page(rank, number)
        page[:4] = memoryview(len(text).to_bytes(4, "little"))
        page[4 : 4 + len(text)] = memoryview(text)
        self._native.advance_counter(self._counter(rank), number)

    def read(self, rank: int) -> StartupStatus:
        """Return the last status of a rank."""
        while (number := self._native.read_counter(self._counter(rank))) != 0:
            page = bytes(self._page(rank, number))
            if self._native.read_counter(self._counter(rank)) == number:
                return StartupStatus.from_json(page[4 : 4 + int.from_bytes(page[:4], "little")])
        return StartupStatus()

    def _counter(self, rank: int) -> int:
        return self._memory.address(AREA) + rank * _ROW_BYTES

    def _page(self, rank: int, number: int) -> memoryview:
        start = rank * _ROW_BYTES + _COUNTER_BYTES + number % 2 * _PAGE_BYTES
        return memoryview(self._memory.area(AREA))[start : start + _PAGE_BYTES]


class StartupReporter:
    """Reports the progress of one rank."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._stages: list[tuple[str, float]] = []
        self._stage = "starting Python"
        self._since_s = time.monotonic()

    def stage(self, name: str) -> None:
        """Report that a new stage begins."""
        self._end_stage()
        self._stage = name
        self._board.write(self._rank, StartupStatus("starting", name, self._since_s, tuple(self._stages)))

    def ready(self, told: dict[str, Any] | None = None) -> None:
        """Report that this rank is ready, with a message for the leader: JSON."""
        self._end_stage()
        status = StartupStatus("ready", self._stage, self._since_s, tuple(self._stages), told or {})
        self._board.write(self._rank, status)

    def failed(self, error: Exception) -> None:
        """Report the failure of this rank."""
        kind_and_text = (type(error).__name__, str(error)[:_MAX_TEXT])
        status = StartupStatus("failed", self._stage, self._since_s, tuple(self._stages), {}, kind_and_text)
        self._board.write(self._rank, status)

    def _end_stage(self) -> None:
        now_s = time.monotonic()
        self._stages.append((self._stage, round(now_s - self._since_s, 3)))
        self._since_s = now_s
