"""PrefillService: computes the prompts that decode engines send, and lends their KV pages.

A job is a request of the scheduler that ends with the last whole page; what it samples is dropped. After each step, new full
blocks are saved into slots of the host tier and lent to the connection, which sends them while the next step computes. The
blocks of the pool are free as soon as the prompt is computed: only slots are held for a peer, and only so many.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from quire.base.errors import RequestError
from quire.base.ids import RequestId
from quire.base.logging import get_logger
from quire.contracts.block_keys import state_page_keys
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.shared_slots import SharedSlots
from quire.contracts.tier_stats import TierStats
from quire.engine.scheduling.admission import check_servable
from quire.engine.scheduling.events import SequenceUpdate
from quire.engine.scheduling.host_tier import HostTier
from quire.engine.scheduling.scheduler import Scheduler
from quire.kv.tiers.host_slab import HostSlab
from quire.transfer.address import Address
from quire.transfer.handshake import Identity, RefusedError
from quire.transfer.nixl_reads import NixlAgent
from quire.transfer.page_server import PageServer, PrefillJob

logger = get_logger(__name__)

_LENT_SHARE = 0.4
"""Share of the host tier's slots that may be held for peers; above it this engine answers that it is busy."""
_ID_PREFIX = "\0prefill-"
"""Of the ids of jobs; no client's request id has it."""


@dataclass(eq=False)
class _Lending:
    """What the engine's thread knows of a job.

    keys       of the wanted pages; those of the recurrent state after the last block come last
    last_key   of that block
    slots      pinned, one for each page that was saved or is being saved, in order
    num_lent   of them were given to the connection
    num_freed  of them were unpinned, as the peer has taken them
    """

    job: PrefillJob
    request_id: RequestId
    keys: list[int] = field(default_factory=list[int])
    last_key: int = 0
    slots: list[int] = field(default_factory=list[int])
    num_lent: int = 0
    num_freed: int = 0
    is_computed: bool = False
    is_complete: bool = False
    reason: str = ""


class PrefillService:
    """Owned by the engine's thread, which calls `advance` between steps; the page server calls the methods of PageSource."""

    def __init__(
        self,
        address: Address,
        identity: Identity,
        slab: HostSlab,
        scheduler: Scheduler,
        check: Callable[[Request], None],
        nixl: NixlAgent | None = None,
    ) -> None:
        """Start to listen. Raises OSError.

        check  raises RequestError for a request that the model cannot compute
        """
        tier = scheduler.kv.host_tier
        assert tier is not None, "the role needs a host tier"
        self._slab, self._scheduler, self._check = slab, scheduler, check
        self._tier: HostTier = tier
        self._new: deque[PrefillJob] = deque()
        self._lendings: dict[RequestId, _Lending] = {}
        self._lock = threading.Lock()
        self._num_promised = 0  # pages of jobs that are not freed yet
        self._num_waiting = 0  # of them, those that are not lent yet
        self._num_jobs = 0
        self._is_changed = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self.is_open = True
        """Whether new jobs are taken: others are told that this engine is busy."""
        self.max_lent_pages = max(1, int(tier.num_slots * _LENT_SHARE))
        self.num_lent_pages = 0
        self._num_state_pages = scheduler.config.num_state_pages
        self._lent_s = 0.0
        self._outcomes: Counter[str] = Counter()
        self.server = PageServer(address, identity, self, nixl=nixl)

    @property
    def wake_fd(self) -> int:
        """Readable when `advance` has something to do; for the poll of an idle engine."""
        return self._wake_fd

    @property
    def has_work(self) -> bool:
        """Whether `advance` has something to do, or a step has pages to save, or to wait for."""
        return self._is_changed or self._tier.has_moves or self._tier.is_moving

    @property
    def num_lendings(self) -> int:
        """Prompts that are computed, or whose pages a peer may still read."""
        return len(self._lendings)

    # Called by the threads of the page server.

    def begin(self, job: PrefillJob) -> None:
        """See PageSource."""
        try:
            self._check_job(job)
            with self._lock:
                if not self.is_open:
                    raise RefusedError("busy", "this engine's role is not prefill any more")
                if self._num_promised + job.num_pages > self.max_lent_pages or self._is_closed:
                    raise RefusedError("busy", f"{self._num_promised} of {self.max_lent_pages} pages are lent")
                self._num_promised += job.num_pages
                self._num_waiting += job.num_pages
        except RefusedError as error:
            with self._lock:
                self._outcomes[error.reason] += 1
            raise
        self._new.append(job)
        self.note_change()

    @property
    def shared(self) -> SharedSlots | None:
        """See PageSource."""
        return self._slab.shared

    @property
    def num_waiting_pages(self) -> int:
        """See PageSource."""
        return self._num_waiting

    def page(self, slot: int) -> memoryview:
        """See PageSource."""
        return self._slab.page(slot).data

    def note_change(self) -> None:
        """See PageSource."""
        with self._lock:
            self._is_changed = True
            if not self._is_closed:
                with suppress(BlockingIOError):
                    os.eventfd_write(self._wake_fd, 1)

    # Called by the engine's thread.

    def owns(self, request_id: str) -> bool:
        """Return whether a request of the scheduler is a job."""
        return request_id in self._lendings

    def note_update(self, update: SequenceUpdate) -> None:
        """Apply the scheduler's update of a job."""
        lending = self._lendings[RequestId(update.request_id)]
        if update.finish_reason is not None:
            lending.is_computed = True
            lending.reason = update.error or ""

    def advance(self) -> None:
        """Take new jobs, lend pages that were saved, choose those that the next step saves, and free what peers have taken.

        Steps may be in flight: pages that they save are lent when they have ended.
        """
        with self._lock:
            self._is_changed = False
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        while self._new:
            self._start(self._new.popleft())
        for lending in list(self._lendings.values()):
            if lending.job.is_over:
                self._end(lending)
            else:
                self._lend(lending)

    def tier_stats(self) -> TierStats:
        """Return what was lent, as the saves of a tier."""
        page_bytes = self._slab.page_bytes
        with self._lock:
            outcomes = self._outcomes.copy()
        outcomes += self.server.refusals
        return TierStats(
            tier="peer",
            num_pages=self._num_promised,
            num_bytes=self._num_promised * page_bytes,
            max_bytes=self.max_lent_pages * page_bytes,
            num_saved=self.num_lent_pages,
            saved_bytes=self.num_lent_pages * page_bytes,
            save_s=self._lent_s,
            num_declined=outcomes["busy"],
            num_errors=self.server.errors.count,
            outcomes=dict(outcomes),
        )

    def close(self) -> None:
        """End the transfers and stop listening."""
        self.server.close()
        self.advance()
        with self._lock:
            self._is_closed = True
            os.close(self._wake_fd)

    def _request_of(self, job: PrefillJob, request_id: RequestId) -> Request:
        # A state is kept at the last block border before the last token of a prompt, so one token more makes that the end.
        extra = (0,) if self._num_state_pages else ()
        return Request(
            request_id=request_id,
            prompt_token_ids=(*job.token_ids, *extra),
            params=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, priority=job.priority, detokenize=False),
            seed=0,
            cache_salt=job.cache_salt,
            arrival_time_s=time.monotonic(),
            is_background=job.is_background,
        )

    def _check_job(self, job: PrefillJob) -> None:
        """Raise RefusedError for a job that this engine can never do."""
        num_tokens, block_size = len(job.token_ids), self._scheduler.config.block_size
        if num_tokens % block_size or job.first_page + job.num_pages != num_tokens // block_size + self._num_state_pages:
            last_page = job.first_page + job.num_pages - 1
            raise RefusedError("refused", f"{num_tokens} tokens are not pages {job.first_page} to {last_page}")
        if job.num_pages > self.max_lent_pages:
            raise RefusedError(
                "refused",
                f"{job.num_pages} pages are wanted, this engine lends {self.max_lent_pages} at most: raise its kv_host_bytes",
            )
        request = self._request_of(job, RequestId(_ID_PREFIX))
        try:
            self._check(request)
            check_servable(request, self._scheduler.config)
        except RequestError as error:
            raise RefusedError("refused", str(error)) from None

    def _start(self, job: PrefillJob) -> None:
        request_id = RequestId(f"{_ID_PREFIX}{self._num_jobs}")
        self._num_jobs += 1
        lending = self._lendings[request_id] = _Lending(job, request_id)
        request = self._request_of(job, request_id)
        keys = self._scheduler.page_keys(request)
        lending.last_key = keys[-1]
        lending.keys = [*keys[job.first_page :], *state_page_keys(keys[-1], self._num_state_pages)]
        self._save_more(lending)
        if len(lending.slots) == len(lending.keys):
            lending.is_computed = True  # pool and host tier have all of them
        else:
            self._scheduler.add(request, time.monotonic())

    def _lend(self, lending: _Lending) -> None:
        job, tier = lending.job, self._tier
        if lending.num_freed < job.num_taken:
            self._free(lending, job.num_taken)
        pages: list[tuple[int, int]] = []
        for index in range(lending.num_lent, len(lending.slots)):
            slot, key = lending.slots[index], lending.keys[index]
            if tier.is_saving(slot):
                break
            if tier.key_of(slot) != key:  # the step that saved it failed
                tier.unpin(lending.slots[index:])
                del lending.slots[index:]
                break
            pages.append((key, slot))
        if pages:
            lending.num_lent += len(pages)
            with self._lock:
                self._num_waiting -= len(pages)
            self.num_lent_pages += len(pages)
            job.add_ready(pages)
        if lending.is_complete:
            return
        self._save_more(lending)
        is_all = lending.num_lent == len(lending.keys)
        # If nothing is being saved, no page of a computed prompt can come any more.
        if is_all or (lending.is_computed and lending.num_lent == len(lending.slots) and not tier.has_moves):
            lending.is_complete = True
            job.complete("" if is_all else lending.reason or "the pages were replaced before they could be saved")

    def _save_more(self, lending: _Lending) -> None:
        kv, num_blocks = self._scheduler.kv, len(lending.keys) - self._num_state_pages
        for index in range(len(lending.slots), len(lending.keys)):
            if kv.state_pages is None or index < num_blocks:
                slot = kv.save_page(lending.keys[index])
            else:
                slot = kv.state_pages.save_page(lending.last_key, index - num_blocks)
            if slot is None:
                return
            self._tier.pin([slot])
            lending.slots.append(slot)

    def _free(self, lending: _Lending, until: int) -> None:
        self._tier.unpin(lending.slots[lending.num_freed : until])
        with self._lock:
            self._num_promised -= until - lending.num_freed
        lending.num_freed = until

    def _end(self, lending: _Lending) -> None:
        if not lending.is_computed:
            self._scheduler.abort(lending.request_id)
        if self._scheduler.timelines is not None:
            self._scheduler.timelines.take(lending.request_id)  # nobody asks for it
        del self._lendings[lending.request_id]
        num_pages = lending.job.num_pages
        self._tier.unpin(lending.slots[lending.num_freed :])
        with self._lock:
            self._num_promised -= num_pages - lending.num_freed
            self._num_waiting -= num_pages - lending.num_lent
            self._outcomes[lending.job.outcome] += 1
            self._lent_s += time.monotonic() - lending.job.started_s
