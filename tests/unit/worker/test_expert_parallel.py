"""Options of experts: what is refused, what the ranks hold, and the statistics."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.kernels.native import load_native
from quire.parallel.expert_files import write_loads, write_placements
from quire.parallel.expert_placement import ExpertPlacement
from quire.worker.expert_parallel import (
    PlacedLoads,
    check_experts,
    count_experts,
    expert_stats,
    find_placements,
    placements_in,
    save_expert_load,
)
from quire.worker.inspect import inspect_model
from quire.worker.parallel_build import rank_memories

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")


def _config(**options):
    options = {"model": "demo-moe", "device": "cpu", "num_kv_blocks": 64, "tensor_parallel_size": 2, **options}
    return EngineConfig(**{"enable_expert_parallel": True, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"enable_expert_parallel": "yes"}, "enable_expert_parallel must be True or False, got 'yes'"),
        ({"expert_placement": ""}, "expert_placement must be 'linear', 'balanced' or a file, got ''"),
        ({"num_redundant_experts": -1}, "num_redundant_experts must be an integer >= 0, got -1"),
        ({"expert_load": 3, "expert_placement": "balanced"}, "expert_load must be None or a string, got 3"),
        (
            {"enable_expert_parallel": False, "num_redundant_experts": 1},
            "num_redundant_experts is 1, but enable_expert",
        ),
        (
            {"enable_expert_parallel": False, "expert_placement": "x.json"},
            "expert_placement is 'x.json', but enable_exp",
        ),
        ({"expert_placement": "balanced"}, "expert_placement is 'balanced' and expert_load None"),
        ({"expert_load": "load.json"}, "expert_placement is 'linear' and expert_load 'load.json'"),
        ({"expert_placement": "x.json", "num_redundant_experts": 2}, "num_redundant_experts is 2, but the file of expert_plac"),
        ({"tensor_parallel_size": 1}, "enable_expert_parallel is True, but tensor_parallel_size is 1, and one rank holds all"),
        (
            {"tensor_parallel_size": 1, "prefill_context_parallel_size": 2},
            "enable_expert_parallel and prefill_context_parallel_size 2",
        ),
        ({"save_expert_load": "load.json", "data_parallel_size": 2}, "save_expert_load is 'load.json', but data_parallel_size"),
        ({"enable_eplb": True, "enable_expert_parallel": False}, "enable_eplb is True, but enable_expert_parallel is False"),
        ({"enable_eplb": 1}, "enable_eplb must be True or False, got 1"),
        ({"eplb_config": {}}, "eplb_config is given, but enable_eplb is False"),
        ({"enable_eplb": True, "eplb_config": "{"}, "eplb_config is not JSON"),
        ({"enable_eplb": True, "eplb_config": "[]"}, "eplb_config must be an object with the options window_size, step_inter"),
        ({"enable_eplb": True, "eplb_config": {"windowsize": 3}}, "eplb_config has no option windowsize.*window_size"),
        (
            {"enable_eplb": True, "eplb_config": {"step_interval": 0}},
            "eplb_config: step_interval must be an integer from 1 to .*, got 0",
        ),
        (
            {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 2}, "num_redundant_experts": 3},
            "num_redundant_experts is 3, but eplb_config has 2",
        ),
        ({"expert_capacity_factor": 0.9}, "expert_capacity_factor must be None or a number from 1 to 8, got 0.9"),
        ({"expert_bias_rate": 10**400}, "expert_bias_rate must be None or a number from 1e-06 to 0.05, got 1000"),
        ({"expert_min_share": float("nan")}, "expert_min_share must be None or a number from 0.001 to 1, got nan"),
        ({"expert_min_share": 0.1, "deterministic": True}, "expert_min_share is 0.1, but deterministic is True"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        _config(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": "demo"}, r"enable_expert_parallel is for mixture models, but the model \(qwen3\) has no experts"),
        (
            {"model": "demo", "enable_expert_parallel": False, "save_expert_load": "load.json"},
            "save_expert_load is for mixture models",
        ),
        ({"tensor_parallel_size": 17}, "tensor_parallel_size must be at most 16 with enable_expert_parallel.*got 17"),
        ({"num_redundant_experts": 17}, "num_redundant_experts must be at most 16 for 16 experts on 2 ranks.*got 17"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size must be at most 4 for a model of 4 attention heads, got 5"),
        ({"save_expert_load": "/nowhere/load.json"}, "save_expert_load is '/nowhere/load.json', but its folder does not exist"),
        (
            {"enable_eplb": True, "pipeline_parallel_size": 2},
            "enable_eplb and pipeline_parallel_size 2: both together are not supported on CPUs",
        ),
        ({"expert_placement": "/nowhere/x.json"}, "expert placement /nowhere/x.json cannot be read"),
        ({"block_size": 8}, "needs the native kernels, which do not run a block_size of 8"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        inspect_model(_config(**options))


def test_a_redundant_number_comes_from_eplb_config_too():
    config = _config(enable_eplb=True, eplb_config='{"num_redundant_experts": 2, "window_size": 10}')
    assert (config.num_redundant_experts, config.eplb_config.window_size, config.eplb_config.step_interval) == (2, 10, 3000)


def test_gpus_take_the_options_of_experts():
    report = replace(inspect_model(_config()), device="cuda:0")
    for option in ({"num_redundant_experts": 2}, {"expert_capacity_factor": 1.25}, {"enable_eplb": True}):
        check_experts(_config(**option), report)


def test_ranks_divide_the_memory_and_copies_add_to_it():
    sharded, linear = (
        [each.weight_bytes for each in rank_memories(config, inspect_model(config))]
        for config in (_config(enable_expert_parallel=False), _config())
    )
    assert linear == pytest.approx(sharded, rel=0.01)
    config = _config(num_redundant_experts=4)
    report = inspect_model(config)
    copied = rank_memories(config, report)
    assert [each.num_experts for each in copied] == [30, 30]
    of_expert = 3 * 128 * 64 * 2
    assert sum(each.weight_bytes for each in copied) - sum(linear) == pytest.approx(3 * 4 * of_expert, rel=0.01)
    assert report.memory.weight_bytes - inspect_model(_config()).memory.weight_bytes == pytest.approx(
        3 * 4 * of_expert, rel=0.01
    )


def test_rank_0_counts_the_whole_vocabulary_that_draft_heads_read():
    options = {"model": "demo", "enable_expert_parallel": False}
    plain, drafting = _config(**options), _config(**options, speculative_config={"model": "demo-eagle3", "method": "eagle3"})
    before, after = (rank_memories(config, inspect_model(config)) for config in (plain, drafting))
    report = inspect_model(plain)
    vocabulary = sum(
        math.prod(report.parameters[name]) for name in ("embed.weight", "lm_head.weight") if name in report.parameters
    )
    expected = report.memory.weight_bytes * vocabulary / report.num_parameters
    assert after[0].weight_bytes - before[0].weight_bytes == pytest.approx(expected, rel=0.01)
    assert after[1].weight_bytes == before[1].weight_bytes


def test_moving_experts_takes_a_spare_slot_on_each_rank():
    before, after = (rank_memories(config, inspect_model(config)) for config in (_config(), _config(enable_eplb=True)))
    of_expert = 3 * 128 * 64 * 2
    assert [b.weight_bytes - a.weight_bytes for a, b in zip(before, after, strict=True)] == pytest.approx([of_expert] * 2, 0.01)


def test_shares_divide_the_experts():
    config = _config(tensor_parallel_shares=(3, 1))
    assert [each.num_experts for each in rank_memories(config, inspect_model(config))] == [36, 12]


def test_placements_come_from_loads_and_from_files(tmp_path):
    spec, path = inspect_model(_config()).spec, str(tmp_path / "file.json")
    assert count_experts(spec) == {0: 16, 1: 16, 2: 16}
    assert find_placements(_config(enable_expert_parallel=False), spec) is None
    write_loads(path, {layer: [100 if expert == layer else 1 for expert in range(16)] for layer in range(3)})
    config = _config(expert_placement="balanced", expert_load=path, num_redundant_experts=1)
    found = find_placements(config, spec)
    assert [found[layer].num_copies[layer] for layer in range(3)] == [2, 2, 2]
    placement = ExpertPlacement(16, (tuple(range(16)), (2,)))
    write_placements(path, dict.fromkeys(range(3), placement))
    read = find_placements(_config(expert_placement=path), spec)
    assert read == dict.fromkeys(range(3), placement)
    assert placements_in(read | {0: found[0]}, 0, 2) == {0: found[0], 1: placement}
    assert placements_in(read, 2, 3) == {0: placement}
    assert placements_in(None, 0, 1) is None


def test_the_imbalance_is_that_of_a_count_by_hand():
    placement = ExpertPlacement(4, ((0, 1), (0, 2, 3)))
    dense, placed, _ = [], [30, 4, 6, 10], None
    (stats,) = expert_stats([dense, placed], PlacedLoads({1: placement}, (1, 1)))
    assert (stats.layer, stats.tokens, stats.rank_tokens) == (1, placed, [15 + 4, 15 + 6 + 10])
    assert stats.imbalance == pytest.approx(31 / 25)
    (stats,) = expert_stats([dense, placed])
    assert (stats.rank_tokens, stats.imbalance) == ([], 1.0)


def test_a_load_that_cannot_be_written_is_logged(tmp_path, caplog):
    save_expert_load(str(tmp_path / "none" / "load.json"), expert_stats([[1, 2]]))
    assert "the load of the experts is lost" in caplog.text
