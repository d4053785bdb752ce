"""ExpertMetrics: how evenly the ranks share the tokens of the experts, and what changes that, from the last heartbeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.contracts.expert_stats import ExpertStats
from quire.serving.metrics.definitions import Definitions
from quire.serving.metrics.instruments import Counter


class ExpertMetrics:
    """Writes the metrics of an engine's experts. Counts of a restarted engine begin at zero and are added to the previous ones.

    labels  label values that identify the engine among several; empty if it is the only one
    """

    def __init__(self, defined: Definitions, read: Callable[[], Sequence[ExpertStats]], labels: tuple[str, ...] = ()) -> None:
        self._defined = defined
        self._labels = labels
        self._read = read
        self._last: dict[tuple[int, str], float] = {}

    def write(self) -> None:
        """Update the metrics; called before they are rendered."""
        everything = self._read()
        for stats in everything:
            self._write_layer(stats)
        layers = [stats for stats in everything if stats.rank_tokens]
        for stats in layers:
            labels = *self._labels, str(stats.layer)
            self._defined.expert_imbalance.labels(*labels).set(stats.imbalance)
            if stats.imbalance_before:
                self._defined.expert_imbalance_before.labels(*labels).set(stats.imbalance_before)
                self._defined.expert_imbalance_after.labels(*labels).set(stats.imbalance_after)
        for rank, tokens in enumerate(zip(*(stats.rank_tokens for stats in layers), strict=True)):
            self._count(self._defined.expert_tokens, str(rank), float(sum(tokens)))

    def _write_layer(self, stats: ExpertStats) -> None:
        """Update what has been moved, and what lossy routing has done, in one layer."""
        defined, layer = self._defined, str(stats.layer)
        for metric, count in (
            (defined.expert_moved_slots, stats.num_moved),
            (defined.expert_failed_moves, stats.num_failed_moves),
            (defined.expert_overflowed, stats.num_overflowed),
            (defined.expert_dropped, stats.num_dropped),
            (defined.expert_weak, stats.num_weak),
        ):
            if count:
                self._count(metric, layer, float(count))
        if stats.capacity_use:
            defined.expert_capacity_use.labels(*self._labels, layer).set(stats.capacity_use)

    def _count(self, metric: Counter, label: str, total: float) -> None:
        """Add what a count has grown by."""
        key = id(metric), label
        before = self._last.get(key, 0.0)
        metric.labels(*self._labels, label).add(total - before if total >= before else total)
        self._last[key] = total
