"""Metrics of ranks: what a heartbeat says becomes samples, and counts go on after a restart."""

from quire.contracts.rank_stats import CollectiveStats, RankStats
from quire.serving.config import ServerConfig
from quire.serving.metrics.rank_metrics import RankMetrics
from quire.serving.metrics.server_metrics import ServerMetrics


def _stats(rank, barriers, wait_s, **more):
    counts = {"num_barriers": barriers, "num_waits": barriers // 2, "wait_s": wait_s, "num_bytes": 64 * barriers}
    return RankStats(rank=rank, pid=10 + rank, memory_bytes=1 << 20, share=0.5, **counts, **more)


def _render(metrics, ranks):
    ranks[:] = ranks
    return [line for line in metrics.render()[0].decode().splitlines() if line.startswith("quire:rank_")]


def _value(lines, name, **labels):
    (found,) = [
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(f"quire:{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items())
    ]
    return found


def test_counts_of_ranks_are_samples_with_their_rank_and_operation():
    metrics, ranks = ServerMetrics(ServerConfig(), "demo"), []
    metrics.on_collect.append(RankMetrics(metrics.defined, lambda: ranks).write)
    assert _render(metrics, ranks) == []
    gathers = {"all_gather": CollectiveStats(num_calls=3, num_bytes=300, seconds=0.25, exposed_seconds=0.125)}
    ranks[:] = [_stats(0, 10, 0.5, collectives=gathers), _stats(1, 10, 0.125)]
    lines = _render(metrics, ranks)
    assert _value(lines, "rank_up", rank="1") == 1
    assert _value(lines, "rank_resident_bytes", rank="0") == 1 << 20
    assert _value(lines, "rank_weight_share", rank="1") == 0.5
    assert _value(lines, "rank_collective_calls_total", rank="0", operation="barrier") == 10
    assert _value(lines, "rank_collective_seconds_total", rank="1", operation="barrier") == 0.125
    assert _value(lines, "rank_collective_bytes_total", rank="0", operation="all_gather") == 300
    exposed = [_value(lines, "rank_collective_exposed_seconds_total", rank="0", operation=o) for o in ("barrier", "all_gather")]
    assert exposed == [0.5, 0.125]
    assert _value(lines, "rank_barrier_waits_total", rank="1") == 5


def test_counts_of_the_next_engine_are_added_and_a_rank_that_is_gone_is_not_up():
    metrics, ranks = ServerMetrics(ServerConfig(), "demo"), [_stats(0, 10, 0.5), _stats(1, 10, 0.5)]
    metrics.on_collect.append(RankMetrics(metrics.defined, lambda: ranks).write)
    _render(metrics, ranks)
    ranks.clear()
    lines = _render(metrics, ranks)
    assert _value(lines, "rank_up", rank="1") == 0
    ranks[:] = [_stats(0, 4, 0.25), _stats(1, 4, 0.25)]
    lines = _render(metrics, ranks)
    assert _value(lines, "rank_collective_calls_total", rank="1", operation="barrier") == 14
    assert _value(lines, "rank_collective_seconds_total", rank="0", operation="barrier") == 0.75
