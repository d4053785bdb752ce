"""TierMetrics: what the engine's last heartbeat said of its KV tiers, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.contracts.tier_stats import TierStats
from quire.serving.metrics.definitions import Definitions


class TierMetrics:
    """Writes the metrics of an engine's KV tiers; counts of one that has been started again begin at zero and are added.

    labels  values of the labels that tell the engine from the server's other ones; empty where it is the only one
    """

    def __init__(self, defined: Definitions, read: Callable[[], Sequence[TierStats]], labels: tuple[str, ...] = ()) -> None:
        self._defined = defined
        self._labels = labels
        self._read = read
        self._last: dict[tuple[str, str], float] = {}

    def write(self) -> None:
        """Bring the metrics up to date; called before they are rendered."""
        defined, labels = self._defined, self._labels
        for stats in self._read():
            cells = (*labels, stats.tier)
            defined.tier_pages.labels(*cells).set(stats.num_pages)
            defined.tier_used_bytes.labels(*cells).set(stats.num_bytes)
            defined.tier_usage.labels(*cells).set(stats.num_bytes / stats.max_bytes)
            for name, family in defined.tier_counters.items():
                self._count(stats, name, family.labels(*cells).add)

            for outcome, total in stats.outcomes.items():
                self._count_total((f"outcome {outcome}", ""), total, defined.kv_transfers.labels(*labels, outcome).add)
            for peer, total in stats.peer_transfers.items():
                self._count_total((f"peer {peer}", ""), total, defined.peer_transfers.labels(*labels, peer).add)
            for peer in stats.peer_transfers:  # one that has just failed has no wait
                defined.peer_wait.labels(*labels, peer).set(stats.peer_waits_s.get(peer, 0.0))

    def _count(self, stats: TierStats, name: str, add: Callable[[float], None]) -> None:
        self._count_total((stats.tier, name), float(getattr(stats, name)), add)

    def _count_total(self, key: tuple[str, str], total: float, add: Callable[[float], None]) -> None:
        before = self._last.get(key, 0.0)
        add(total - before if total >= before else total)
        self._last[key] = total
