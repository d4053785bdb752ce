"""The KV tiers of simulated replicas: the scheduler's own host tier, a disk tier behind it, and the times of copies."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.base.ids import RequestId
from quire.contracts.request import Request
from quire.contracts.step import StepPlan
from quire.engine.scheduling import Scheduler
from quire.engine.scheduling.host_tier import HostTier

_MAX_SHARE = 0.8
"""As in the engine's disk tier: pages are read only if that takes less than this share of the time of computing them."""
_FADING = 0.2


class Pipe:
    """A disk or a network link: one transfer after the other, each with a latency that does not occupy it. Raises ConfigError.

    name  of the option with the rate, for errors
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0, name: str = "bytes_per_s") -> None:
        if not 0 < bytes_per_s < float("inf"):
            raise ConfigError(f"{name} must be a number above 0, got {bytes_per_s / 1e9:g}")
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._free_s = 0.0

    def send(self, now: float, num_bytes: float) -> float:
        """Queue a transfer; return when all of it has arrived."""
        self._free_s = max(now, self._free_s) + num_bytes / self._bytes_per_s
        return self._free_s + self._latency_s

    def duration_s(self, now: float, num_bytes: float) -> float:
        """Return how long a transfer would take from now on, with its turn in the queue."""
        return max(0.0, self._free_s - now) + num_bytes / self._bytes_per_s + self._latency_s


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The KV tiers of each replica. Raises ConfigError.

    page_bytes        of a page: one KV block of all layers
    num_host_pages    that the host tier holds
    host_bytes_per_s  of copies between the pool and the host tier, which a step waits for
    num_disk_pages    that the disk tier holds; 0: there is none
    disk_bytes_per_s  of reads and of writes; disk_latency_s: of each read
    """

    page_bytes: float
    num_host_pages: int
    host_bytes_per_s: float = 20e9
    num_disk_pages: int = 0
    disk_bytes_per_s: float = 2e9
    disk_latency_s: float = 0.0

    def __post_init__(self) -> None:
        for option, rate in (("--kv-host-gb-per-s", self.host_bytes_per_s), ("--kv-disk-gb-per-s", self.disk_bytes_per_s)):
            if not 0 < rate < float("inf"):
                raise ConfigError(f"{option} must be a number above 0, got {rate / 1e9:g}")
        if not 0 <= self.disk_latency_s < float("inf"):
            raise ConfigError(f"--kv-disk-latency-ms must be a number of at least 0, got {self.disk_latency_s * 1e3:g}")
        if self.num_host_pages < 1:
            raise ConfigError(f"the host tier must hold a page of {self.page_bytes / 1e6:.3g} MB at least: raise --kv-host-gb")
        if self.num_disk_pages < 0:
            raise ConfigError(f"the disk tier must hold 0 pages or more, got {self.num_disk_pages}")


class DiskPages:
    """The pages on one replica's disk, least recently used first; they outlive the replica."""

    def __init__(self, options: TierOptions) -> None:
        self._keys: OrderedDict[int, float] = OrderedDict()  # key -> when it is written
        self._num_pages = options.num_disk_pages
        self.reads = Pipe(options.disk_bytes_per_s, options.disk_latency_s)
        self.writes = Pipe(options.disk_bytes_per_s)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, keys: list[int], now: float) -> list[int]:
        """Return the keys, from the first on, whose pages are written."""
        found: list[int] = []
        for key in keys:
            written_s = self._keys.get(key)
            if written_s is None or written_s > now:
                break
            found.append(key)
        for key in reversed(found):
            self._keys.move_to_end(key)
        return found

    def write(self, key: int, written_s: float) -> None:
        """Note that a page will be written at a time."""
        self._keys.setdefault(key, written_s)
        self._keys.move_to_end(key)
        while len(self._keys) > self._num_pages:
            self._keys.popitem(last=False)


class ReplicaTiers:
    """The tiers of one replica. num_handed: pages that came from prefill replicas."""

    def __init__(self, options: TierOptions, scheduler: Scheduler, disk: DiskPages | None) -> None:
        tier = scheduler.kv.host_tier
        assert tier is not None, "the scheduler has no host tier"
        self.tier: HostTier = tier
        self._options, self._scheduler, self._disk = options, scheduler, disk
        self._aside: dict[RequestId, tuple[list[int], list[int]]] = {}  # keys and their reserved slots
        self._writing: deque[tuple[float, list[int]]] = deque()
        self._num_writing = 0
        self.tokens_per_s: float | None = None
        self.num_declined = 0

    @property
    def num_aside(self) -> int:
        """Requests whose pages are on their way."""
        return len(self._aside)

    @property
    def num_aside_tokens(self) -> int:
        """Tokens of the pages that are on their way."""
        return sum(len(keys) for keys, _ in self._aside.values()) * self._scheduler.config.block_size

    def copy_s(self, plan: StepPlan) -> float:
        """Return how long a step copies pages between the pool and the host tier."""
        num_pages = len(plan.page_saves) + len(plan.page_loads)
        return num_pages * self._options.page_bytes / self._options.host_bytes_per_s

    def reserve(self, request_id: RequestId, keys: list[int]) -> int:
        """Reserve slots for the pages of a request that is kept aside; return for how many there is room."""
        slots = self.tier.reserve(len(keys))
        if slots:
            self._aside[request_id] = (keys[: len(slots)], slots)
        return len(slots)

    def read(self, request: Request, now: float) -> float | None:
        """Read what the disk tier has of a request's prompt; return when that is done, or None where nothing is read."""
        if self._disk is None:
            return None
        found = self._disk.find(self._scheduler.missing_keys(request), now)
        if not found or not self._pays(len(found), now):
            return None
        num_pages = self.reserve(request.request_id, found)
        return self._disk.reads.send(now, num_pages * self._options.page_bytes) if num_pages else None

    def install(self, request_id: RequestId, source: str) -> None:
        """Take in the pages of a request, which is about to enter the scheduler."""
        keys, slots = self._aside.pop(request_id)
        for slot, key in zip(slots, keys, strict=True):
            self.tier.install(slot, key, "peer" if source == "peer" else "disk")
        self.tier.hold(request_id, slots)

    def drop(self, request_id: RequestId) -> None:
        """Give back the slots of a request whose pages do not come."""
        _, slots = self._aside.pop(request_id)
        self.tier.unpin(slots)

    def note_step(self, plan: StepPlan, duration_s: float, now: float) -> None:
        """Write what a step has saved, and take in how fast it computed."""
        if plan.num_tokens >= 2 * self._scheduler.config.block_size and duration_s > 0:
            rate = plan.num_tokens / duration_s
            self.tokens_per_s = rate if self.tokens_per_s is None else self.tokens_per_s + _FADING * (rate - self.tokens_per_s)
        while self._writing and self._writing[0][0] <= now:
            _, slots = self._writing.popleft()
            self._num_writing -= len(slots)
            self.tier.unpin(slots)
        if self._disk is None or not plan.page_saves:
            return
        room = max(0, max(1, self.tier.num_slots // 2) - self._num_writing)
        pages = [(key, slot) for _, slot in plan.page_saves if (key := self.tier.key_of(slot)) is not None][:room]
        if pages:
            slots = [slot for _, slot in pages]
            self.tier.pin(slots)
            self._num_writing += len(slots)
            written_s = self._disk.writes.send(now, len(pages) * self._options.page_bytes)
            self._writing.append((written_s, slots))
            for key, _ in pages:
                self._disk.write(key, written_s)

    def _pays(self, num_pages: int, now: float) -> bool:
        """Return whether reading is expected to be faster than computing; before anything was computed it is."""
        assert self._disk is not None
        if self.tokens_per_s is None:
            return True
        computing_s = num_pages * self._scheduler.config.block_size / self.tokens_per_s
        if self._disk.reads.duration_s(now, num_pages * self._options.page_bytes) < _MAX_SHARE * computing_s:
            return True
        self.num_declined += 1
        return False
