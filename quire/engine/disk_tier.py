"""DiskTier: reads pages from the disk tier for requests that are kept aside, and writes the pages that were saved.

A request whose prompt goes on in the disk tier is not handed to the scheduler: it holds no blocks and no seat. A thread looks
its pages up, and reads them into slots of the host tier that are reserved for them. When they are there, or the deadline has
passed, the request is handed over, and its admission finds the pages in the host tier. A page that cannot be read is a miss.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from quire.base.errors import ConfigError
from quire.base.ids import RequestId
from quire.base.logging import UnexpectedErrors, get_logger
from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport
from quire.contracts.request import Request
from quire.contracts.step import StepPlan, StepResult
from quire.contracts.tier_stats import TierStats
from quire.engine.scheduling.host_tier import HostTier
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.state_pages import MissingPages
from quire.kv.tiers.disk_store import DiskStore
from quire.kv.tiers.host_slab import HostSlab
from quire.worker.tiers import tier_fingerprint

logger = get_logger(__name__)
_LOOK_UP, _READING, _NOTING, _WRITING = (
    f"a {job} of the disk tier" for job in ("look-up", "reading", "noting of uses", "writing")
)

_MAX_SHARE = 0.8
"""Pages are read only if that takes less than this share of the time that computing their tokens takes."""
_PATIENCE = 1.5
"""A request waits so many times as long as reading was expected to take, but not less than _MIN_WAIT_S."""
_MIN_WAIT_S = 0.1
_FADING = 0.2
_PAUSE_S = 60.0
"""After a failed write nothing is written for so long."""
_RETRY = 1.05
"""Each refused load lets the expected rate rise by this much, so that a disk that was slow once is tried again."""
_CLOSE_S = 5.0
"""How long `close` waits for the thread, which may be in the middle of a read or a write."""
_TOUCH_S = 2.0
"""Interval at which uses of pages are written to the index, together: it may sync then, and look-ups wait."""
_WRITE_BYTES = 4 << 20
"""Pages are written in pieces of this size, so that a look-up waits for no more than that."""


@dataclass(slots=True, eq=False)
class _Load:
    """What is read for a request. found, done and is_read are written by the thread.

    found  the keys of the pages to read, of those that the store has; None: it was not asked yet
    num_blocks  that are not computed with them
    slots  reserved for them, in order
    done   pages that were read, from the first on
    """

    request: Request
    missing: MissingPages
    found: list[int] | None = None
    num_blocks: int = 0
    slots: list[int] = field(default_factory=list[int])
    done: int = 0
    is_read: bool = False
    is_cancelled: bool = False
    deadline_s: float = float("inf")


@dataclass(slots=True)
class DiskTierStats:
    """Counts since the engine was made.

    num_read         pages read from the disk tier
    num_written      pages written to it
    num_not_written  pages that were saved to the host tier, but not written, because writing fell behind or has failed
    num_declined     requests whose pages were there, but slower to read than to compute
    num_late         requests that were handed over before all their pages were read
    read_s, write_s  seconds of reading and writing
    num_pages        pages of this fingerprint, and num_bytes the bytes of all slots, when pages were last written
    """

    num_read: int = 0
    num_written: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    num_pages: int = 0
    num_bytes: int = 0
    num_not_written: int = 0
    num_declined: int = 0
    num_late: int = 0


class DiskTier:
    """Owned by the engine's thread; the store belongs to a thread of its own."""

    def __init__(self, store: DiskStore, slab: HostSlab, scheduler: Scheduler, tier: HostTier) -> None:
        self._store, self._slab, self._scheduler, self._tier = store, slab, scheduler, tier
        self._loads: dict[RequestId, _Load] = {}
        self._asked: list[_Load] = []  # to be looked up together: each wake-up of the thread costs the steps some time
        self._abandoned: list[_Load] = []
        self._written: deque[Sequence[int]] = deque()  # slots to unpin
        self._num_writing = 0
        self._jobs: deque[Callable[[], None]] = deque()  # look-ups and reads, which come before writes
        self._writes: deque[list[tuple[int, int, float]]] = deque()  # key, slot, and how much longer the page is to be kept
        self._touched: dict[int, float] = {}  # keys of pages that were used, and how much longer each is to be kept
        self._touch_at_s = 0.0
        self._wake, self._is_news = threading.Condition(), threading.Event()
        self._is_closing = self._is_broken = False
        self._problems: dict[str, str] = {}  # why nothing is read or written now
        self._errors = UnexpectedErrors(logger)
        self._paused_until_s = 0.0
        self.bytes_per_s: float | None = None
        self._tokens_per_s: float | None = None
        self.stats = DiskTierStats()
        self.stats.num_pages, self.stats.num_bytes = store.usage()
        tier.tracks_uses = True
        self._thread = threading.Thread(target=self._run, name="kv-disk-tier", daemon=True)
        self._thread.start()

    def __bool__(self) -> bool:
        return bool(self._loads)

    @property
    def is_behind(self) -> bool:
        """Whether as many pages wait to be written as may."""
        return self._num_writing >= self._max_writing

    @property
    def _max_writing(self) -> int:
        return max(1, self._tier.num_slots // 2)

    def begin(self, request: Request) -> bool:
        """Look for a request's pages; return whether it is kept aside until `take_ready` returns it."""
        if self._is_broken:
            return False
        missing = self._scheduler.missing_pages(request)
        if not missing:
            return False
        wait_s = max(_MIN_WAIT_S, self._computing_s(missing.num_blocks))
        load = _Load(request, missing, deadline_s=time.monotonic() + wait_s)
        self._loads[request.request_id] = load
        self._asked.append(load)
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait until something is found or read, or the time is over."""
        self._look_up()
        if self._is_news.wait(timeout_s):
            self._is_news.clear()

    def take_ready(self, now: float) -> list[Request]:
        """Return the requests that need not wait any more; their pages are held in the host tier until they are admitted."""
        self._look_up()
        self._take_written()
        for load in [load for load in self._abandoned if load.is_read]:
            self._abandoned.remove(load)
            self._tier.unpin(load.slots)
        ready = [load for load in self._loads.values() if self._is_ready(load, now)]
        for load in ready:
            del self._loads[load.request.request_id]
        return [load.request for load in ready]

    def remove(self, request_id: str) -> bool:
        """Forget a request; return whether it waited here."""
        load = self._loads.pop(RequestId(request_id), None)
        if load is None:
            return False
        self._release_slots(load, 0)
        return True

    def tier_stats(self) -> TierStats:
        """Return what the tier holds and has done."""
        stats, page_bytes = self.stats, self._slab.page_bytes
        problems = dict(self._problems)
        if self._errors.last:
            problems["error"] = self._errors.last
        return TierStats(
            tier="disk",
            num_pages=stats.num_pages,
            num_bytes=stats.num_bytes,
            max_bytes=self._store.max_bytes,
            num_hits=self._tier.stats.num_disk_hits,
            num_saved=stats.num_written,
            num_loaded=stats.num_read,
            saved_bytes=stats.num_written * page_bytes,
            loaded_bytes=stats.num_read * page_bytes,
            save_s=stats.write_s,
            load_s=stats.read_s,
            num_dropped=stats.num_not_written,
            num_damaged=self._store.num_damaged,
            num_declined=stats.num_declined,
            num_late=stats.num_late,
            num_errors=self._errors.count,
            problems=problems,
        )

    def note_step(self, plan: StepPlan, result: StepResult, duration_s: float) -> None:
        """Write the pages that are saved now, and take in how fast the step computed; before its result is committed."""
        block_size = self._scheduler.config.block_size
        if plan.num_tokens >= 2 * block_size and duration_s > 0 and not result.is_failed:
            self._tokens_per_s = _blend(self._tokens_per_s, plan.num_tokens / duration_s)
        uses = self._tier.take_uses()
        if uses and not self._is_broken:
            self._touch_later(uses)
        slots = self._tier.saved_slots(result.done_moves)
        pages = [(key, slot) for slot in slots if (key := self._tier.key_of(slot)) is not None]
        if not pages:
            return
        room = 0 if time.monotonic() < self._paused_until_s or self._is_broken else self._max_writing - self._num_writing
        self.stats.num_not_written += max(0, len(pages) - room)
        pages = pages[: max(0, room)]
        if pages:
            self._tier.pin([slot for _, slot in pages])
            self._num_writing += len(pages)
            num_at_once = max(1, _WRITE_BYTES // self._slab.page_bytes)
            with self._wake:
                for first in range(0, len(pages), num_at_once):
                    self._writes.append(
                        [(key, slot, self._tier.keep_s(slot)) for key, slot in pages[first : first + num_at_once]]
                    )
                self._wake.notify()

    def wait_written(self) -> bool:
        """Wait a moment until something more was written; return whether something was left to write."""
        if self._num_writing == 0 or self._is_broken or time.monotonic() < self._paused_until_s:
            return False
        self.wait(0.05)
        self._take_written()
        return True

    def _take_written(self) -> None:
        while self._written:
            slots = self._written.popleft()
            self._num_writing -= len(slots)
            self._tier.unpin(slots)

    def close(self) -> None:
        """End the thread; what is not written yet is dropped."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(_CLOSE_S)

    def _look_up(self) -> None:
        loads, self._asked = self._asked, []
        if loads:
            self._submit(lambda: self._find(loads))

    def _is_ready(self, load: _Load, now: float) -> bool:
        """Move a load on; return whether its request need not wait for it any more."""
        if load.found is None:
            if now < load.deadline_s:
                return False
            self.stats.num_late += 1
            self._release_slots(load, 0)
            return True
        if not load.slots:
            if not load.found or not self._is_reading_faster(len(load.found), load.num_blocks):
                return True
            load.slots = self._tier.reserve(len(load.found))
            if load.missing.num_state_pages and len(load.slots) < len(load.found):  # the state is last
                self._tier.unpin(load.slots)
                load.slots = []
            if not load.slots:
                return True
            expected_s = len(load.slots) * self._slab.page_bytes / self.bytes_per_s if self.bytes_per_s else 1.0
            load.deadline_s = now + max(_MIN_WAIT_S, _PATIENCE * expected_s)
            self._submit(lambda: self._read(load))
            return False
        if not load.is_read and now < load.deadline_s:
            return False
        done = load.done
        for slot, key in zip(load.slots[:done], load.found, strict=False):
            self._tier.install(slot, key)
        self.stats.num_read += done
        self.stats.num_late += not load.is_read
        self._tier.hold(load.request.request_id, load.slots[:done])
        self._release_slots(load, done)
        return True

    def _computing_s(self, num_blocks: int) -> float:
        """Return how long the tokens of blocks are expected to take to compute; a second while nothing was measured."""
        num_tokens = num_blocks * self._scheduler.config.block_size
        return 1.0 if self._tokens_per_s is None else num_tokens / self._tokens_per_s

    def _release_slots(self, load: _Load, first: int) -> None:
        """Give back the slots of a load from `first` on, when nothing is read into them any more."""
        load.is_cancelled = True
        load.slots = load.slots[first:]
        if load.is_read:
            self._tier.unpin(load.slots)
        elif load.slots:
            self._abandoned.append(load)

    def _is_reading_faster(self, num_pages: int, num_blocks: int) -> bool:
        """Return whether reading pages is expected to be faster than computing the tokens of the blocks that they spare."""
        if self.bytes_per_s is None or self._tokens_per_s is None:
            return True
        num_waiting = sum(len(load.slots) - load.done for load in self._loads.values())
        read_s = (num_waiting + num_pages) * self._slab.page_bytes / self.bytes_per_s
        if read_s < _MAX_SHARE * self._computing_s(num_blocks):
            return True
        self.bytes_per_s *= _RETRY
        self.stats.num_declined += 1
        return False

    def _submit(self, job: Callable[[], None]) -> None:
        with self._wake:
            self._jobs.append(job)
            self._wake.notify()

    def _run(self) -> None:
        while not self._is_closing:
            job: Callable[[], None] | None = None
            with self._wake:
                wait_s = self._touch_at_s - time.monotonic() if self._touched else None
                if self._jobs:
                    job = self._jobs.popleft()
                elif wait_s is not None and wait_s <= 0:
                    job = self._touch
                elif self._writes:
                    job = partial(self._write, self._writes.popleft())
                elif not self._is_closing:
                    self._wake.wait(wait_s)
            if job is not None:
                job()
                self._is_news.set()
        if self._touched:
            self._touch()
        self._store.close()

    def _find(self, loads: Iterable[_Load]) -> None:
        for load in loads:
            found: list[int] = []
            try:
                if not load.is_cancelled and not self._is_broken:
                    found, load.num_blocks = load.missing.choose(self._store.find)
            except (OSError, sqlite3.Error) as error:
                self._break(error)
            except Exception as error:  # noqa: BLE001 - the request is computed
                self._errors.note(_LOOK_UP, error, f"request {load.request.request_id}")
            else:
                self._errors.end(_LOOK_UP)
            finally:
                load.found = found

    def _read(self, load: _Load) -> None:
        started_s = time.monotonic()
        slots, keys = load.slots, load.found or []
        try:
            for slot, key in zip(slots, keys, strict=False):
                if load.is_cancelled or self._is_closing or not self._store.read(key, self._slab.page(slot)):
                    break
                load.done += 1
                self._errors.end(_READING)
            self._touch_later(dict.fromkeys(keys[: load.done], 0.0))
        except (OSError, sqlite3.Error) as error:
            self._break(error)
        except Exception as error:  # noqa: BLE001 - what was not read is computed
            self._errors.note(_READING, error, f"page {keys[min(load.done, len(keys) - 1)]:032x}")
        finally:
            duration_s = time.monotonic() - started_s
            self.stats.read_s += duration_s
            if load.done and duration_s > 0:
                self.bytes_per_s = _blend(self.bytes_per_s, load.done * self._slab.page_bytes / duration_s)
            load.is_read = True

    def _touch_later(self, uses: Mapping[int, float]) -> None:
        with self._wake:
            if not self._touched:
                self._touch_at_s = time.monotonic() + _TOUCH_S
                self._wake.notify()
            for key, keep_s in uses.items():
                self._touched[key] = max(keep_s, self._touched.get(key, 0.0))

    def _touch(self) -> None:
        with self._wake:
            uses, self._touched = self._touched, {}
        if time.monotonic() < self._paused_until_s or self._is_broken:
            return
        try:
            self._store.touch(uses)
            self._errors.end(_NOTING)
        except (OSError, sqlite3.Error) as error:
            self._pause(error)
        except Exception as error:  # noqa: BLE001 - the pages are only replaced earlier
            self._errors.note(_NOTING, error)

    def _write(self, pages: list[tuple[int, int, float]]) -> None:
        started_s = time.monotonic()
        try:
            if time.monotonic() < self._paused_until_s or self._is_broken:
                self.stats.num_not_written += len(pages)
            else:
                self.stats.num_written += self._store.write(
                    [(key, self._slab.page(slot)) for key, slot, _ in pages], {key: keep_s for key, _, keep_s in pages}
                )
                self.stats.num_pages, self.stats.num_bytes = self._store.usage()
                self._problems.pop("write", None)
                self._errors.end(_WRITING)
        except (OSError, sqlite3.Error) as error:
            self.stats.num_not_written += len(pages)
            self._pause(error)
        except Exception as error:  # noqa: BLE001 - the pages are not written
            self.stats.num_not_written += len(pages)
            self._errors.note(_WRITING, error, f"page {pages[0][0]:032x} and those after it")
        finally:
            self.stats.write_s += time.monotonic() - started_s
            self._written.append([slot for _, slot, _ in pages])

    def _pause(self, error: Exception) -> None:
        """Write nothing for a while. A warning is logged once, until something could be written again."""
        self._paused_until_s = time.monotonic() + _PAUSE_S
        if "write" not in self._problems:
            logger.warning(
                "the disk tier %s cannot be written, which is tried again every %d s: %s", self._store.folder, _PAUSE_S, error
            )
        self._problems["write"] = f"it cannot be written: {error}"

    def _break(self, error: Exception) -> None:
        if not self._is_broken:
            logger.warning("the disk tier %s cannot be read, and is not used any more: %s", self._store.folder, error)
            self._problems["read"] = f"it cannot be read, and is not used any more: {error}"
        self._is_broken = True


def open_disk_tier(config: EngineConfig, report: ModelReport, slab: HostSlab | None, scheduler: Scheduler) -> DiskTier | None:
    """Return the disk tier that a configuration asks for; None, with a message in the log, where it cannot be used."""
    tier = scheduler.kv.host_tier
    if config.kv_disk_dir is None or config.kv_disk_bytes is None or slab is None or tier is None:
        return None
    try:
        folder = Path(config.kv_disk_dir).expanduser()
        store = DiskStore(folder, config.kv_disk_bytes, tier_fingerprint(config, report), slab.page_bytes)
    except (ConfigError, OSError, sqlite3.Error) as error:
        logger.warning("the engine runs without the disk tier: %s", error)
        return None
    return DiskTier(store, slab, scheduler, tier)


def host_tier_stats(tier: HostTier, slab: HostSlab | None, page_bytes: int) -> TierStats:
    """Return what the host tier holds and has done; the seconds are those of this process.

    page_bytes  of all ranks together
    """
    stats = tier.stats
    return TierStats(
        tier="host",
        num_pages=len(tier),
        num_bytes=len(tier) * page_bytes,
        max_bytes=tier.num_slots * page_bytes,
        num_hits=stats.num_host_hits,
        num_saved=stats.num_saved,
        num_loaded=stats.num_loaded,
        saved_bytes=stats.num_saved * page_bytes,
        loaded_bytes=stats.num_loaded * page_bytes,
        save_s=0.0 if slab is None else slab.save_s,
        load_s=0.0 if slab is None else slab.load_s,
        num_dropped=stats.num_not_saved,
    )


def _blend(before: float | None, value: float) -> float:
    return value if before is None else before + _FADING * (value - before)
