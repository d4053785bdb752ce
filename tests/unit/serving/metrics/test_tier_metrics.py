"""Metrics of KV tiers: what a heartbeat says becomes samples, and counts go on after a restart."""

from quire.contracts.tier_stats import TierStats
from quire.serving.config import ServerConfig
from quire.serving.metrics.server_metrics import ServerMetrics
from quire.serving.metrics.tier_metrics import TierMetrics

HOST = TierStats(tier="host", num_pages=3, num_bytes=300, max_bytes=1200, num_hits=5, num_saved=7, saved_bytes=700, save_s=0.5)
DISK = TierStats(tier="disk", num_pages=9, num_bytes=1000, max_bytes=4000, num_dropped=2, num_damaged=1, num_late=4)


def samples(metrics):
    lines = metrics.render()[0].decode().splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith("quire:kv_tier_")]
    return {(name.split("{")[0][14:], "host" if 'tier="host"' in name else "disk"): float(value) for name, value in found}


def test_stats_of_tiers_are_samples_and_counts_are_added_after_a_restart():
    metrics, tiers = ServerMetrics(ServerConfig(), "demo"), []
    metrics.on_collect.append(TierMetrics(metrics.defined, lambda: tiers).write)
    assert samples(metrics) == {}
    tiers += [HOST, DISK]
    found = samples(metrics)
    assert found["pages", "host"] == 3
    assert found["used_bytes", "disk"] == 1000
    assert found["usage_perc", "host"] == 0.25
    assert found["hit_pages_total", "host"] == 5
    assert found["saved_bytes_total", "host"] == 700
    assert found["save_seconds_total", "host"] == 0.5
    assert found["dropped_pages_total", "disk"] == 2
    assert found["damaged_pages_total", "disk"] == 1
    assert found["late_requests_total", "disk"] == 4
    tiers[:] = [TierStats(tier="host", num_pages=1, num_bytes=100, max_bytes=1200, num_hits=2)]
    found = samples(metrics)
    assert found["hit_pages_total", "host"] == 7
    assert found["saved_pages_total", "host"] == 7
    assert found["pages", "host"] == 1


def test_transfers_are_counted_by_outcome_and_go_on_after_a_restart():
    metrics = ServerMetrics(ServerConfig(), "demo")
    sizes = {"num_pages": 0, "num_bytes": 0, "max_bytes": 1}
    tiers = [TierStats(tier="peer", **sizes, loaded_bytes=900, load_s=0.25, outcomes={"complete": 2, "lost": 1})]
    metrics.on_collect.append(TierMetrics(metrics.defined, lambda: tiers).write)
    lines = metrics.render()[0].decode().splitlines()
    assert count_of(lines, "kv_tier_loaded_bytes_total", 'tier="peer"') == 900
    assert count_of(lines, "kv_tier_load_seconds_total", 'tier="peer"') == 0.25
    assert count_of(lines, "kv_transfers_total", 'outcome="complete"') == 2
    tiers[:] = [TierStats(tier="peer", **sizes, outcomes={"complete": 1, "short": 5})]
    lines = metrics.render()[0].decode().splitlines()
    assert [count_of(lines, "kv_transfers_total", f'outcome="{name}"') for name in ("complete", "lost", "short")] == [3, 1, 5]


def count_of(lines, name, label):
    found = [line for line in lines if line.startswith(f"quire:{name}{{") and label in line]
    assert len(found) == 1
    return float(found[0].rsplit(" ", 1)[1])
