"""Step times of layouts: bytes that were counted by hand, those that ranks count, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from quire import EngineConfig
from quire.base.errors import ConfigError
from quire.contracts.model_spec import MlpSpec, MoeSpec
from quire.engine.inspect import inspect_model, weight_bytes_by_precision
from quire.kernels.native import load_native
from quire.model.checkpoint import open_parameters
from quire.model.tensor_shards import ModelShard
from quire.model.token_runs import TokenRuns, address_of
from quire.parallel.expert_placement import linear_placement
from quire.parallel.torch_communicator import ORDERED_BYTES
from quire.planner.expert_exchange import (
    EXCHANGED_BYTES,
    ExpertLinks,
    copies_of_a_row,
    dispatch_and_combine,
    seconds_in_halves,
)
from quire.planner.hardware import find_hardware
from quire.planner.layout import Layout, parse_cluster, usual_layouts
from quire.planner.model_shape import ModelShape
from quire.planner.parallel_time import Load, ParallelSimulation, describe_times
from quire.planner.rank_exchange import StepTokens, context_exchange, gathered_widths, layer_exchange, step_exchange
from tests.rank_threads import RankThreads


def _inspect(model):
    report = inspect_model(EngineConfig(model=model, device="cpu", num_kv_blocks=1))
    return report, ModelShape.of(model, report, weight_bytes_by_precision(report, is_gpu=True))


def _simulation(model, hardware="h100", is_gathered=False):
    report, shape = _inspect(model)
    return ParallelSimulation(report.spec, shape, find_hardware(hardware), "bfloat16", "bfloat16", is_gathered)


# Bytes that a rank receives for a token and layer on 8 ranks, in bf16, as counted by hand: by outputs, and in all-reduces.
COUNTED = {
    "Qwen3-0.6B": ((16, 128, 1024, 3072), 12.5, 7.2),
    "Llama-3.1-8B": ((32, 128, 4096, 14336), 46.6, 28.7),
    "Qwen3-32B": ((64, 128, 5120, 25600), 77.1, 35.8),
    "Llama-3.1-70B": ((64, 128, 8192, 28672), 93.2, 57.3),
}


@pytest.mark.parametrize("model", COUNTED)
def test_bytes_are_those_that_were_counted_by_hand(model):
    (heads, dim, hidden, inner), gathered, reduced = COUNTED[model]
    layer = _inspect("demo")[0].spec.layers[0]
    attention = replace(layer.attention, num_heads=heads, head_dim=dim)
    layer = replace(layer, attention=attention, mlp=replace(layer.mlp, intermediate_size=inner))
    found = layer_exchange(layer, hidden, Layout(num_tensor=8), True, 2)
    assert (found.num_calls, found.num_bytes / 1e3) == (4, pytest.approx(gathered, rel=0.01))
    found = layer_exchange(layer, hidden, Layout(num_tensor=8), False, 2)
    assert (found.num_calls, found.num_bytes / 1e3) == (2, pytest.approx(reduced, rel=0.01))
    assert layer_exchange(layer, hidden, Layout(), True, 2) == (found.__class__(0, 0.0))


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize(
    ("model", "layout"),
    [("demo", "tp2"), ("demo-moe", "tp3"), ("demo-moe", "ep2"), ("demo-moe", "ep3"), ("demo", "tp2xhomes2"), ("demo", "pcp2"),
     ("demo-moe", "ep2xhomes2"), ("demo-moe", "tp2xdcp2"),
     *(pytest.param(*each, marks=pytest.mark.slow) for each in (("demo", "tp4xhomes2"), ("demo-moe", "tp4xdcp2")))],
)  # fmt: skip
def test_collectives_and_bytes_are_those_that_ranks_count(model, layout):
    """Decode steps of two sequences on CPU ranks, which gather f32 rows at barriers."""
    report, _ = _inspect(model)
    spec, layout, num_steps = replace(report.spec, layers=report.spec.layers[:2]), Layout.parse(layout), 2
    shares = (1.0,) * layout.num_tensor
    placement = linear_placement(16, tuple(np.diff(np.linspace(0, 16, layout.num_tensor + 1).astype(int)).tolist()))
    placements = dict.fromkeys(range(2), placement) if layout.has_whole_experts else None
    places = max(layout.num_homes, layout.num_places)
    ranks = RankThreads(
        spec,
        lambda: {
            name: value
            for name, value in open_parameters(report.folder, report.spec).items()
            if not name.startswith("layers.") or int(name.split(".")[1]) < len(spec.layers)
        },
        shares,
        64,
        placements=placements,
        context=(places, 2 if places > 1 else 0),
        num_row_groups=layout.num_parts,
        home_size=layout.head_ranks if layout.num_homes > 1 else 0,
    )
    # The second sequence is at the second home, or its first chunk on the second rank.
    pools, tables = ranks.pools(16, "bfloat16", 2), [np.array([block], np.int64) for block in (0, 2 if places > 1 else 1)]

    def counts():
        counted = [ranks.barriers[0].counts(rank) for rank in range(layout.num_devices)]
        return sum(each.num_bytes for each in counted), counted[0].num_barriers

    def step(at):
        runs = TokenRuns([9, 21 + at], [0, 1, 2], [at + 1, at + 1], tables, [address_of(table) for table in tables])
        ranks.call(lambda decoder, rank: decoder.run(runs, pools[rank], [0, 1], needs_logits=True))

    step(0)
    bytes_before, barriers_before = counts()
    for at in range(1, 1 + num_steps):
        step(at)
    bytes_after, barriers_after = counts()
    ranks.close()
    predicted = step_exchange(spec, layout, True, 4, StepTokens(2))
    assert barriers_after - barriers_before == predicted.num_calls * num_steps
    written = (bytes_after - bytes_before) / (2 * num_steps)  # of a token by all ranks; each receives what the others wrote
    size = layout.num_devices
    if places in (1, size):  # of several groups, the ranks of one receive only what the others of it wrote
        assert predicted.num_bytes == pytest.approx(written * (size - 1) / size, rel=0.002)


def test_whole_experts_gather_less():
    layer = _inspect("demo-moe")[0].spec.layers[0]
    hidden, mlp = 128, layer.mlp
    sharded, whole = (gathered_widths(layer, hidden, is_whole) for is_whole in (False, True))
    assert sharded[2:] == [mlp.top_k * mlp.expert.intermediate_size, mlp.top_k * hidden]
    assert whole[2:] == [mlp.top_k * hidden]


def test_a_step_is_the_sum_of_its_parts_by_hand():
    simulation = _simulation("demo")
    device, reached, shape = simulation.hardware, simulation.hardware.efficiency, simulation.shape
    one = simulation.step(Layout(), Load(8, 64))
    weights = shape.weight_bytes["bfloat16"]
    assert one.read_bytes == pytest.approx(weights, rel=0.1)
    assert (one.num_collectives, one.exchange_s) == (0, 0.0)
    cached = 8 * 64 * shape.kv_bytes_per_token("bfloat16")
    assert one.compute_s == pytest.approx((one.read_bytes + cached) / (device.bytes_per_s * reached.bandwidth), rel=0.01)
    assert one.fixed_s == pytest.approx(reached.step_s + reached.layer_s * shape.num_layers)
    two = simulation.step(Layout(num_tensor=2), Load(8, 64))
    assert two.read_bytes == pytest.approx(one.read_bytes / 2)
    assert two.num_collectives == 2 * shape.num_layers + 2
    assert two.exchange_s == pytest.approx(two.num_collectives * reached.collective_s, rel=0.01)
    assert two.step_s == two.compute_s + two.exchange_s + two.fixed_s
    replicas = simulation.step(Layout(num_replicas=2), Load(8, 64))
    assert replicas.tokens_per_s == pytest.approx(8 / replicas.step_s)
    stages = simulation.step(Layout(num_stages=2), Load(8, 64))
    assert stages.step_s > replicas.step_s
    assert stages.read_bytes < one.read_bytes


@pytest.mark.parametrize("layout", ["tp2", "tp4", "tp4xhomes4", "tp4xhomes2", "tp8xhomes8", "tp4xdcp2", "tp4xdcp4"])
def test_weights_and_keys_of_a_rank_are_those_of_its_shard(layout):
    """`demo-moe` has four heads, and two of keys and values; homes do not divide them."""
    simulation, layout = _simulation("demo-moe", "xeon-8480"), Layout.parse(layout)
    spec, shape = simulation.spec, simulation.shape
    home_size = layout.head_ranks if layout.num_homes > 1 else 0
    shards = [
        ModelShard.of(spec, rank, (1,) * layout.num_tensor, None, layout.num_places, home_size)
        for rank in range(layout.num_tensor)
    ]
    found = simulation.step(layout, Load(8, 64))
    sizes = [sum(map(math.prod, each.parameter_shapes(_inspect("demo-moe")[0].parameters).values())) for each in shards]
    assert found.held_bytes == pytest.approx(2 * max(sizes), rel=0.05)  # copies of k and v are not counted
    held = max(each.kv_spec(spec, 16, "bfloat16").bytes_per_block / 16 for each in shards)
    held /= layout.num_homes * layout.num_places
    assert layout.kv_share(shape.num_kv_heads) * shape.kv_bytes_per_token("bfloat16") == pytest.approx(held)
    room = 0.9 * simulation.hardware.memory_bytes - found.held_bytes
    assert found.capacity_tokens == pytest.approx(room / held, rel=0.01)


def test_prompts_are_divided_and_decoded_tokens_are_not_on_gpus():
    simulation, one, two = _simulation("demo"), Layout(), Layout.parse("pcp2")
    prompts, decode = Load(1, 8192, num_new=8192), Load(64, 1024)
    whole, half = (simulation.step(layout, prompts) for layout in (one, two))
    assert half.compute_s == pytest.approx(whole.compute_s / 2, rel=0.02)
    assert half.num_collectives == 2 * simulation.shape.num_layers + 1
    kv_bytes = simulation.shape.kv_bytes_per_token("bfloat16")
    assert half.exchange_bytes == pytest.approx(kv_bytes / 2 + simulation.spec.hidden_size)
    assert half.held_bytes == whole.held_bytes
    assert replace(simulation.step(two, decode), layout=one) == simulation.step(one, decode)
    cpu = replace(simulation, hardware=find_hardware("xeon-8480"), is_gathered=True, value_bytes=4)
    assert cpu.step(two, decode).compute_s < cpu.step(one, decode).compute_s


def test_ranks_that_share_tokens_send_results_of_decoded_ones_and_keys_of_prompts():
    layer, layout = _inspect("demo-moe")[0].spec.layers[0], Layout.parse("tp4xdcp2")
    rows = (2 + 2 * 1) * 32 * 2 / 2  # of the two heads of a group, from one other rank

    def counted(num_new, is_gathered=False):
        found = context_exchange(layer, layout, StepTokens(1, num_new, 2048, 2.0, True), is_gathered, 2)
        return found.num_calls, found.num_bytes

    assert counted(1) == (2, rows + 2 * 33 * 4)
    assert counted(1, True) == (3, rows + 2 * 33 * 4 * 4)  # four of eight chunks of 256
    assert counted(512) == (3, rows + 2 * 32 * 2 * 2048 / 512 / 2)


def test_an_imbalance_slows_ranks_with_whole_experts_only():
    simulation = _simulation("demo-moe")
    times = [
        simulation.step(Layout.parse(layout), Load(64, 64, imbalance)).compute_s
        for layout, imbalance in (("ep4", 1.0), ("ep4", 2.0), ("tp4", 1.0), ("tp4", 2.0))
    ]
    assert times[0] == times[2] == times[3] < times[1]


MIXTURE = MoeSpec(32, 4, MlpSpec(64, "silu"))


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_copies_of_rows_are_those_that_even_routing_counts(num_hosts):
    rng, num_rows, size = np.random.default_rng(0), 4000, 8
    ranks = np.argsort(rng.random((num_rows, 32)), 1)[:, :4] // 4
    on_host = size // num_hosts
    one, two = np.zeros(2), np.zeros(2)  # copies within hosts, and between them
    for row, at in enumerate(ranks):
        source = row % size
        for rank in set(at.tolist()) - {source}:
            one[int(rank // on_host != source // on_host)] += 1
        for host in set((at // on_host).tolist()):
            relay = source if host == source // on_host else host * on_host + source % on_host
            two[1] += relay != source
            two[0] += len({rank for rank in at.tolist() if rank // on_host == host} - {relay})
    for has_stages, counted in ((False, one), (True, two)):
        found = copies_of_a_row(MIXTURE, size, ExpertLinks(num_hosts=num_hosts, has_stages=has_stages))
        assert found[:2] == pytest.approx(counted / num_rows, rel=0.03)
        assert found[2] == (2 if has_stages and num_hosts > 1 else 1)


def test_rows_of_experts_travel_in_the_form_and_the_way_that_is_asked_for():
    def traffic(is_gathered=False, is_float8=False, **links):
        return dispatch_and_combine(MIXTURE, 1024, 8, ExpertLinks(**links), 2, is_gathered, is_float8)

    dispatch, combine = traffic()
    assert dispatch == combine
    assert (dispatch.num_calls, dispatch.network_bytes) == (1, 0)
    assert dispatch.local_bytes == pytest.approx(7 / 8 * 2048 * (1 - math.comb(28, 4) / math.comb(32, 4)))
    assert traffic(payload="fp8")[0].local_bytes / dispatch.local_bytes == pytest.approx(1040 / 2048)
    assert traffic(payload="fp8")[1] == combine
    assert traffic(is_float8=True) == traffic(payload="fp8")
    assert traffic(is_float8=True, payload="model") == (dispatch, combine)
    one, two = traffic(num_hosts=2, has_stages=False)[0], traffic(num_hosts=2)[0]
    assert one.local_bytes + one.network_bytes == pytest.approx(dispatch.local_bytes)
    assert two.network_bytes < one.network_bytes / 1.5
    none, pairs = traffic(is_gathered=True)
    assert none.num_calls == 0
    assert pairs.local_bytes == pytest.approx(4 * 2048 * 7 / 64)


def test_large_steps_of_gpu_ranks_exchange_rows_and_halves_hide_a_part():
    assert EXCHANGED_BYTES == ORDERED_BYTES
    simulation, layout = _simulation("demo-moe"), Layout.parse("ep4")
    assert not simulation.exchanges_rows(layout, 4096)  # a megabyte of 128 columns
    whole, halves = (
        replace(simulation, links=ExpertLinks(halves=halves)).step(layout, Load(16384, 16)) for halves in (False, True)
    )
    assert whole.num_collectives == 3 * 5 + 2
    assert (halves.num_collectives, halves.exchange_bytes) == (3 * 7 + 2, whole.exchange_bytes)
    assert whole.hidden_s == 0 < halves.hidden_s
    narrow = replace(simulation, precision="fp8")
    in_float8, wide = (
        replace(narrow, links=ExpertLinks(payload)).step(layout, Load(16384, 16)).exchange_bytes
        for payload in ("auto", "model")
    )
    assert 0 < in_float8 < wide == whole.exchange_bytes
    assert halves.exchange_s < whole.exchange_s + 6 * simulation.hardware.efficiency.collective_s
    assert seconds_in_halves(2.0, 5.0, 3.0) == 2 + 5 + 5 + 3
    assert seconds_in_halves(4.0, 1.0, 6.0) == 4 + 4 + 6 + 6
    far = replace(simulation, links=ExpertLinks(num_hosts=2)).step(layout, Load(16384, 16))
    assert 0 < far.network_bytes < far.exchange_bytes
    assert far.exchange_s > whole.exchange_s
    with pytest.raises(ConfigError, match="2 ranks in a group, which cannot be divided among 4 hosts"):
        replace(simulation, links=ExpertLinks(num_hosts=4)).step(Layout.parse("ep2"), Load(8, 16))


@pytest.mark.parametrize("text", ["tp0", "xx", "tp2xtp2", "tp2xep2", "tp", "2"])
def test_layouts_that_cannot_be_read_are_refused(text):
    with pytest.raises(ConfigError, match="--layout must"):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("model", "layout", "reason"),
    [
        ("demo", "tp4xhomes3", "homes3 must divide the 4 tensor ranks"),
        ("demo", "tp4xhomes2", "homes of 2 ranks, but on GPUs each rank is a home"),
        ("demo", "tp4xhomes4xdcp2", "homes cannot be combined with dcp"),
        ("demo-moe", "ep2xpcp2", "pcp cannot be combined with ep"),
        ("demo", "ep2", "places experts, but demo has none"),
        ("demo-moe", "tp5", "5 ranks, but there are 4 attention heads"),
        ("demo-moe", "pp4", "4 stages, but there are 3 layers"),
        ("demo-moe", "dp9", "9 replicas, but there are 8 sequences"),
    ],
)
def test_layouts_that_do_not_fit_the_model_are_refused(model, layout, reason):
    with pytest.raises(ConfigError, match=reason):
        _simulation(model).step(Layout.parse(layout), Load(8, 64))


def test_names_of_clusters_and_layouts():
    device, count = parse_cluster("H100x8")
    assert (device.key, count) == ("h100", 8)
    assert parse_cluster("rtx4090")[1] == 1
    with pytest.raises(ConfigError, match="must be one of h100"):
        parse_cluster("h900x8")
    names = [layout.name for layout in usual_layouts(8, True)]
    assert names == ["tp8", "ep8", "pp8", "dp8", "tp4xdp2", "tp4xpp2"]
    assert [Layout.parse(name).name for name in names] == names
    table = describe_times([_simulation("demo-moe").step(Layout.parse("ep2"), Load(4, 16))], "title")
    assert "ep2" in table
    assert "FIT" not in table
