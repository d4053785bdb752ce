"""RemotePrefill: has long prompts computed by prefill engines, and pulls their KV pages into the host tier.

A request whose prompt is computed elsewhere is not handed to the scheduler: it holds no blocks and no seat, only slots of the
host tier. When its pages are there, or the peer is lost or late, it is handed over, and its admission finds the pages in the
host tier. The rest of the prompt is computed here, and every token is sampled here.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.base.ids import RequestId
from quire.contracts.block_keys import state_page_keys
from quire.contracts.request import Request
from quire.contracts.step import StepPlan, StepResult
from quire.contracts.tier_stats import TierStats
from quire.engine.scheduling.host_tier import HostTier
from quire.engine.scheduling.scheduler import Scheduler
from quire.kv.tiers.host_slab import HostSlab
from quire.transfer.address import Address, parse_reachable
from quire.transfer.connection import Pull
from quire.transfer.handshake import Identity
from quire.transfer.nixl_reads import NixlAgent
from quire.transfer.page_client import PageClient

_MAX_SLOWDOWN = 1.5
"""A prompt is computed elsewhere if that is expected to take at most so many times as long as computing it here."""
_PATIENCE = 3.0
"""A request waits so many times as long as a transfer was expected to take, but not less than _MIN_WAIT_S."""
_MIN_WAIT_S = 2.0
_UNKNOWN_WAIT_S = 30.0
"""The wait while no transfer was measured yet; a peer that is silent is given up earlier."""
_FADING = 0.2
_LATE_FACTOR = 2.0
"""A peer whose pages were late is expected to take so many times as long as before."""
_RETRY = 1.05
"""Each refused transfer lets the expected rate rise by this much, so that a peer that was slow once is tried again."""


@dataclass(eq=False)
class _Transfer:
    request: Request
    pull: Pull
    slots: list[int]

    @property
    def deadline_s(self) -> float:
        """When the pages that have not come are computed here: it depends on the peer that is asked now."""
        expected_s = self.pull.expected_s
        wait_s = _UNKNOWN_WAIT_S if expected_s is None else max(_MIN_WAIT_S, _PATIENCE * expected_s)
        return self.pull.asked_s + wait_s


class RemotePrefill:
    """Owned by the engine's thread; the pulls have threads of their own."""

    def __init__(
        self,
        addresses: list[Address],
        identity: Identity,
        slab: HostSlab,
        scheduler: Scheduler,
        min_tokens: int,
        nixl: NixlAgent | None = None,
    ) -> None:
        tier = scheduler.kv.host_tier
        assert tier is not None, "the role needs a host tier"
        self._slab, self._scheduler, self._min_tokens = slab, scheduler, min_tokens
        self._has_secret = bool(identity.secret)
        self._tier: HostTier = tier
        self._is_news = threading.Event()
        self.client = PageClient(addresses, identity, self._is_news.set, nixl=nixl)
        self._transfers: dict[RequestId, _Transfer] = {}
        self._abandoned: list[_Transfer] = []
        self.tokens_per_s: float | None = None
        self.is_open = True
        """Whether prompts are computed elsewhere: what is under way goes on in any case."""
        self.local: Counter[str] = Counter()
        self.num_pages = self.num_late = self.num_declined = 0

    def __bool__(self) -> bool:
        return bool(self._transfers)

    @property
    def num_under_way(self) -> int:
        """Transfers that are not over, those of requests that do not wait for them any more included."""
        return self.client.num_active + len(self._abandoned)

    @property
    def pulls(self) -> dict[str, Pull]:
        """The transfers that requests wait for, by request."""
        return {str(name): transfer.pull for name, transfer in self._transfers.items()}

    @property
    def outcomes(self) -> dict[str, int]:
        """How transfers ended, see Pull, and why prompts were computed here without one: short, slower, adapter, no_peer,
        no_room."""
        return dict(self.client.outcomes + self.local)

    def set_urls(self, urls: Sequence[str]) -> None:
        """Ask the prefill engines that listen there from now on, and no others.

        Raises ConfigError, after those that can be asked are taken over, where an address is none or needs a secret.
        """
        usable, refused = list[Address](), list[ConfigError]()
        for url in urls:
            try:
                usable.append(parse_reachable(url, "prefill_urls", has_secret=self._has_secret))
            except ConfigError as error:
                refused.append(error)
        self.client.set_peers(usable)
        if refused:
            raise refused[0]

    def begin(self, request: Request) -> bool:
        """Ask a prefill engine for the rest of a request's prompt; return whether the request is kept aside for it."""
        if not self.is_open:
            return False
        block_size = self._scheduler.config.block_size
        num_pages = self._scheduler.num_cacheable_pages(request)
        keys = self._scheduler.page_keys(request)[:num_pages]
        missing = self._scheduler.missing_pages(request)
        first_page = num_pages - len(missing.keys)
        num_tokens = missing.num_blocks * block_size
        # Prefill engines have no adapters: what they would compute is the base model's.
        reason = "adapter" if request.adapter_key else self._reason_to_compute_here(keys, first_page, num_tokens)
        if reason is not None:
            self.local[reason] += 1
            return False
        state_keys = state_page_keys(keys[-1], missing.num_state_pages)
        slots = self._tier.reserve(len(missing.keys) + len(state_keys))
        prefix_keys, keys = keys[:first_page], [*keys[first_page:], *state_keys][: len(slots)]
        is_cut = len(keys) < len(missing.keys) + len(state_keys)
        if is_cut and (state_keys or len(keys) * block_size < self._min_tokens):
            self._tier.unpin(slots)
            self.local["no_room"] += 1
            return False
        num_tokens = (first_page + len(keys) - len(state_keys)) * block_size
        pull = Pull(
            token_ids=(*request.prompt_token_ids, *request.output_token_ids)[:num_tokens],
            cache_salt=request.cache_salt,
            first_page=first_page,
            keys=keys,
            slots=[self._slab.page(slot).data for slot in slots],
            priority=request.priority,
            is_background=request.is_background,
            prefix_keys=prefix_keys,
        )
        if not self.client.begin(pull):
            self._tier.unpin(slots)
            self.local["no_peer"] += 1
            return False
        self._transfers[request.request_id] = _Transfer(request, pull, slots)
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait until a page has come, or the time is over."""
        if self._is_news.wait(timeout_s):
            self._is_news.clear()

    def take_ready(self, now: float) -> list[Request]:
        """Return the requests that need not wait any more; their pages are held in the host tier until they are admitted."""
        for transfer in [one for one in self._abandoned if one.pull.is_over]:
            self._abandoned.remove(transfer)
            self._tier.unpin(transfer.slots)
        ready = [one for one in self._transfers.values() if one.pull.is_over or now >= one.deadline_s]
        for transfer in ready:
            del self._transfers[transfer.request.request_id]
            self._install(transfer)
        return [transfer.request for transfer in ready]

    def remove(self, request_id: str) -> bool:
        """Forget a request; return whether it waited here."""
        transfer = self._transfers.pop(RequestId(request_id), None)
        if transfer is None:
            return False
        self._let_go(transfer, 0)
        self._tier.let_go(transfer.request.request_id)
        return True

    def note_step(self, plan: StepPlan, result: StepResult, duration_s: float) -> None:
        """Take in how fast a step computed."""
        if plan.num_tokens >= 2 * self._scheduler.config.block_size and duration_s > 0 and not result.is_failed:
            self.tokens_per_s = _blend(self.tokens_per_s, plan.num_tokens / duration_s)

    def tier_stats(self) -> TierStats:
        """Return what was pulled, as the loads of a tier."""
        page_bytes = self._slab.page_bytes
        num_pages = sum(len(transfer.slots) for transfer in self._transfers.values())
        return TierStats(
            tier="peer",
            num_pages=num_pages,
            num_bytes=num_pages * page_bytes,
            max_bytes=self._tier.num_slots * page_bytes,
            num_hits=self._tier.stats.num_peer_hits,
            num_loaded=self.num_pages,
            loaded_bytes=self.num_pages * page_bytes,
            load_s=self.client.pull_s,
            num_damaged=self.client.outcomes["damaged"],
            num_declined=self.num_declined,
            num_late=self.num_late,
            num_errors=self.client.errors.count,
            outcomes=self.outcomes,
            problems=self.client.problems,
            peer_transfers=self.client.num_transfers,
            peer_waits_s=self.client.waits_s,
        )

    def close(self) -> None:
        """Give up all transfers."""
        self.client.close()

    def _reason_to_compute_here(self, keys: list[int], first_page: int, num_tokens: int) -> str | None:
        """Return why the pages from first_page on, which spare num_tokens, are computed here; None: a prefill engine is to be
        asked."""
        if num_tokens < self._min_tokens:
            return "short"
        if not self.client.is_available:
            return "no_peer"
        expected_s = self.client.predict_s(keys, first_page)
        if expected_s is None or self.tokens_per_s is None:
            return None
        if expected_s <= _MAX_SLOWDOWN * num_tokens / self.tokens_per_s:
            return None
        self.client.expect_faster(_RETRY)
        self.num_declined += 1
        return "slower"

    def _install(self, transfer: _Transfer) -> None:
        pull = transfer.pull
        is_late, done = not pull.is_over, pull.num_done
        for slot, key in zip(transfer.slots[:done], pull.keys, strict=False):
            self._tier.install(slot, key, "peer")
        self._tier.hold(transfer.request.request_id, transfer.slots[:done])
        self.num_pages += done
        self.num_late += is_late
        if is_late:
            self.client.note_late(pull, _LATE_FACTOR)
        self._let_go(transfer, done)

    def _let_go(self, transfer: _Transfer, first: int) -> None:
        """Give back the slots of a transfer from `first` on, when nothing is received into them any more."""
        transfer.pull.cancel()
        transfer.slots = transfer.slots[first:]
        if transfer.pull.is_over:
            self._tier.unpin(transfer.slots)
        elif transfer.slots:
            self._abandoned.append(transfer)


def _blend(before: float | None, value: float) -> float:
    return value if before is None else before + _FADING * (value - before)
