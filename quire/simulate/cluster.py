"""The replicas of a simulation with their roles and states, and what happened to them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from quire.router.autoscale import Replica, Role
from quire.simulate.replica import SimulatedReplica
from quire.simulate.tiers import DiskPages, Pipe

if TYPE_CHECKING:
    from quire.simulate.run import SimulateOptions

_COLD_STEPS = 32
"""Steps after a pause that are late as in the requests after such a pause."""

MemberState = Literal["off", "starting", "ready", "draining", "failed"]


@dataclass(slots=True)
class ClusterStats:
    """What happened besides the requests' own times.

    replica_s            seconds for which replicas were held, from the start of each to its end
    num_retries          requests that another replica began again before their first token; num_resumes: that one continued
    num_handed_over      prompts that came from prefill replicas, num_handed_pages: their KV pages
    num_host_pages, num_disk_pages  that were loaded in place of being computed
    actions              what the autoscaler did: (seconds, text)
    """

    replica_s: float = 0.0
    num_retries: int = 0
    num_resumes: int = 0
    num_handed_over: int = 0
    num_handed_pages: int = 0
    num_host_pages: int = 0
    num_disk_pages: int = 0
    num_peer_pages: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    actions: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])


class Member:
    """One replica's place in the cluster: a process that may end and start again. Its disk outlives the process."""

    def __init__(self, index: int, role: Role, options: SimulateOptions) -> None:
        self.index, self.role, self.next_role = index, role, role
        self.state: MemberState = "off"
        self.epoch = 0
        self.busy_s = 0.0
        self.started_s = 0.0
        tiers, hand_over = options.tiers, options.hand_over
        self.disk = DiskPages(tiers) if tiers is not None and tiers.num_disk_pages else None
        self.link = None if hand_over is None else Pipe(hand_over.bytes_per_s, hand_over.latency_s, "--link-gb-per-s")
        self.pages_per_s: float | None = None  # of hand-overs to this replica
        self._options = options
        self._rng = random.Random(options.dataset.seed + index)
        self._seen_s = self._ended_s = self._pause_s = 0.0
        self._num_since_pause = 0
        self.replica = self._new()

    @property
    def is_held(self) -> bool:
        """Whether it costs replica hours."""
        return self.state != "off"

    @property
    def is_usable(self) -> bool:
        """Whether the router may choose it."""
        return self.state == "ready" and self.next_role == self.role

    def describe(self) -> Replica | None:
        """Return the replica as the autoscaler sees it; None: there is none."""
        if self.state == "off":
            return None
        state = "starting" if self.state == "failed" else self.state
        if self.state == "ready" and self.next_role != self.role:
            state = "draining"
        return Replica(str(self.index), self.role, state, self.replica.num_unfinished)

    def note_begin(self, now: float) -> None:
        """A step begins."""
        if now > self._ended_s:
            self._pause_s, self._num_since_pause = now - self._ended_s, 0

    def deliver(self, ends_s: list[float]) -> list[float]:
        """Return when clients see the tokens of steps that ended at ends_s, in their order."""
        delivery = self._options.delivery
        if delivery is None:
            return ends_s
        self._ended_s = ends_s[-1]
        seen_s: list[float] = []
        for end_s in ends_s:
            pause_s = self._pause_s if self._num_since_pause < _COLD_STEPS else 0.0
            self._num_since_pause += 1
            self._seen_s = max(self._seen_s, end_s + delivery.draw_stall(pause_s, self._rng))
            seen_s.append(self._seen_s)
        return seen_s

    def _new(self) -> SimulatedReplica:
        options = self._options
        rng = random.Random(options.dataset.seed + self.index)
        return SimulatedReplica(
            options.scheduler, options.times, options.windows, options.batching, rng, options.tiers, self.disk
        )

    def restart(self, stats: ClusterStats) -> None:
        """Forget the process, and take a new one with empty caches."""
        self.collect(stats)
        self.epoch += 1
        self.replica = self._new()

    def collect(self, stats: ClusterStats) -> None:
        """Add the counts of the process, once, when it ends or the simulation does."""
        scheduler = self.replica.scheduler
        self.busy_s += self.replica.busy_s
        stats.num_steps += self.replica.num_steps
        stats.num_preemptions += scheduler.num_preemptions
        stats.num_queried_tokens += scheduler.prefix_cache_queries
        stats.num_hit_tokens += scheduler.prefix_cache_hits
        tier = scheduler.kv.host_tier
        if tier is not None:
            stats.num_host_pages += tier.stats.num_host_hits
            stats.num_disk_pages += tier.stats.num_disk_hits
            stats.num_peer_pages += tier.stats.num_peer_hits


def make_members(options: SimulateOptions) -> list[Member]:
    """Return a place for each replica that there may be; those that the simulation starts with are ready."""
    hand_over, autoscale = options.hand_over, options.autoscale
    starting = {"serve" if hand_over is None else "decode": options.num_replicas}
    if hand_over is not None:
        starting["prefill"] = hand_over.num_prefill
    roles: list[Role] = ["serve"] if hand_over is None else ["decode", "prefill"]
    members: list[Member] = []
    for role in roles:
        for _ in range(starting[role]):
            members.append(Member(len(members), role, options))
            members[-1].state = "ready"
    if autoscale is not None:
        for role in roles:
            members += [
                Member(len(members) + place, role, options)
                for place in range(max(0, autoscale.limits.max_replicas - starting[role]))
            ]
    return members


def usable_of(members: Sequence[Member], roles: tuple[Role, ...]) -> list[int]:
    """Return the replicas that the router may choose for what these roles do."""
    return [member.index for member in members if member.role in roles and member.is_usable]


def summed(stats: ClusterStats, members: Sequence[Member], last_s: float) -> ClusterStats:
    """Return the counts at the end of a simulation, those of the last processes included."""
    found = replace(stats, actions=list(stats.actions))
    for member in members:
        member.collect(found)
        if member.is_held:
            found.replica_s += max(0.0, last_s - member.started_s)
    return found
