"""RankMetrics: metrics of the ranks, from the engine's last heartbeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.contracts.rank_stats import CollectiveStats, RankStats
from quire.serving.metrics.definitions import Definitions
from quire.serving.metrics.instruments import Cell


class RankMetrics:
    """Writes the metrics of an engine's ranks. Counts of a restarted engine begin at zero and are added to the previous ones.

    labels  label values that identify the engine among several; empty if it is the only one
    """

    def __init__(self, defined: Definitions, read: Callable[[], Sequence[RankStats]], labels: tuple[str, ...] = ()) -> None:
        self._defined = defined
        self._labels = labels
        self._read = read
        self._last: dict[tuple[str, str, str], float] = {}
        self._known: set[str] = set()

    def write(self) -> None:
        """Update the metrics; called before they are rendered."""
        defined, labels, ranks = self._defined, self._labels, self._read()
        for rank in self._known - {str(stats.rank) for stats in ranks}:
            defined.rank_up.labels(*labels, rank).set(0)
        for stats in ranks:
            rank = str(stats.rank)
            self._known.add(rank)
            defined.rank_up.labels(*labels, rank).set(float(stats.state == "ready"))
            defined.rank_memory.labels(*labels, rank).set(stats.memory_bytes)
            defined.rank_share.labels(*labels, rank).set(stats.share)
            self._count("waits", rank, "", stats.num_waits, defined.rank_waits.labels(*labels, rank))
            barriers = CollectiveStats(
                num_calls=stats.num_barriers,
                num_bytes=stats.num_bytes,
                seconds=stats.wait_s,
                exposed_seconds=stats.wait_s,
            )
            for name, each in {"barrier": barriers, **stats.collectives}.items():
                self._count_operation(rank, name, each)

    def _count_operation(self, rank: str, operation: str, counts: CollectiveStats) -> None:
        defined, labels = self._defined, (*self._labels, rank, operation)
        self._count("calls", rank, operation, counts.num_calls, defined.rank_calls.labels(*labels))
        self._count("bytes", rank, operation, counts.num_bytes, defined.rank_bytes.labels(*labels))
        self._count("seconds", rank, operation, counts.seconds, defined.rank_seconds.labels(*labels))
        self._count("exposed", rank, operation, counts.exposed_seconds, defined.rank_exposed.labels(*labels))

    def _count(self, kind: str, rank: str, operation: str, total: float, cell: Cell) -> None:
        key = (kind, rank, operation)
        before = self._last.get(key, 0.0)
        cell.add(total - before if total >= before else total)
        self._last[key] = total
