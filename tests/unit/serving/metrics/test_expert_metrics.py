"""Metrics of experts: what a heartbeat says becomes samples, and counts go on after a restart."""

from quire.contracts.expert_stats import ExpertStats
from quire.serving.config import ServerConfig
from quire.serving.metrics.expert_metrics import ExpertMetrics
from quire.serving.metrics.server_metrics import ServerMetrics


def _render(metrics, layers, stats):
    layers[:] = stats
    return [line for line in metrics.render()[0].decode().splitlines() if line.startswith("quire:expert_")]


def _value(lines, name, key):
    (found,) = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"quire:{name}{{") and key in line]
    return found


def _layer(layer, rank_tokens, imbalance):
    return ExpertStats(layer=layer, tokens=[1, 2], rank_tokens=rank_tokens, imbalance=imbalance)


def test_imbalance_has_a_layer_and_tokens_have_a_rank():
    metrics, layers = ServerMetrics(ServerConfig(), "demo-moe"), []
    metrics.on_collect.append(ExpertMetrics(metrics.defined, lambda: layers).write)
    assert _render(metrics, layers, []) == []
    assert _render(metrics, layers, [ExpertStats(layer=0, tokens=[1, 2], rank_tokens=[])]) == []
    lines = _render(metrics, layers, [_layer(1, [10.0, 30.0], 1.5), _layer(4, [20.0, 20.0], 1.0)])
    assert _value(lines, "expert_imbalance", 'layer="1"') == 1.5
    assert _value(lines, "expert_imbalance", 'layer="4"') == 1.0
    assert _value(lines, "expert_tokens_total", 'rank="0"') == 30
    assert _value(lines, "expert_tokens_total", 'rank="1"') == 50


def test_tokens_of_the_next_engine_are_added():
    metrics, layers = ServerMetrics(ServerConfig(), "demo-moe"), []
    metrics.on_collect.append(ExpertMetrics(metrics.defined, lambda: layers).write)
    for rank_tokens, total in (([10.0, 5.0], 10), ([40.0, 5.0], 40), ([7.0, 1.0], 47), ([8.0, 1.0], 48)):
        lines = _render(metrics, layers, [_layer(0, rank_tokens, 1.2)])
        assert _value(lines, "expert_tokens_total", 'rank="0"') == total


def test_moves_and_lossy_routing_are_counted_by_layer():
    metrics, layers = ServerMetrics(ServerConfig(), "demo-moe"), []
    metrics.on_collect.append(ExpertMetrics(metrics.defined, lambda: layers).write)
    figures = {"imbalance_before": 1.4, "imbalance_after": 1.02, "num_moved": 4, "num_failed_moves": 2}
    _render(metrics, layers, [ExpertStats(layer=2, tokens=[1, 2], rank_tokens=[1.0, 2.0], **figures)])
    lossy = {"num_overflowed": 7, "num_dropped": 1, "num_weak": 3, "capacity_use": 0.9}
    lines = _render(metrics, layers, [ExpertStats(layer=2, tokens=[1, 2], rank_tokens=[1.0, 2.0], **figures, **lossy)])
    for name, value in (
        ("imbalance_before", 1.4),
        ("imbalance_after", 1.02),
        ("moved_slots_total", 4),
        ("failed_moves_total", 2),
        ("overflowed_total", 7),
        ("dropped_total", 1),
        ("weak_dropped_total", 3),
        ("capacity_use", 0.9),
    ):
        assert _value(lines, f"expert_{name}", 'layer="2"') == value
