"""The memory plan of a host on which some of a model's tensor-parallel ranks run."""

import math
from dataclasses import replace

import pytest

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.worker import inspect, memory, parallel_build
from quire.worker.host_part import host_part, ranks_on_host
from quire.worker.inspect import inspect_model
from quire.worker.memory import check_fits
from quire.worker.parallel_build import check_rank_memory
from quire.worker.tiers import check_tiers, num_host_pages

MODEL = "demo"
TORCHRUN = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}


def config(**options):
    return EngineConfig(model=MODEL, max_model_len=256, **options)


def torchrun(rank, local_rank, num_local_ranks):
    ranks = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": num_local_ranks}
    return TORCHRUN | {name: str(value) for name, value in ranks.items()}


def test_a_leader_that_starts_its_workers_has_all_ranks():
    assert ranks_on_host(config(tensor_parallel_size=4), {}) == range(4)
    assert ranks_on_host(config(tensor_parallel_size=4, pipeline_parallel_size=2), {}) == range(8)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (torchrun(0, 0, 2), range(2)),
        (torchrun(3, 1, 2), range(2, 4)),
        (TORCHRUN | {"RANK": "0"}, range(1)),
        ({"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "4", "LWS_LEADER_ADDRESS": "a"}, range(1)),
    ],
)
def test_launchers_tell_which_ranks_are_on_this_host(environment, expected):
    assert ranks_on_host(config(tensor_parallel_size=4), environment) == expected


def test_one_process_has_no_part():
    report = inspect_model(config())
    assert report.memory.host is None
    assert report.memory.host_weight_bytes == report.memory.weight_bytes


def test_key_value_heads_that_several_ranks_hold_are_counted_for_each():
    one, four = (inspect_model(config(tensor_parallel_size=size, num_kv_blocks=64)).memory for size in (1, 4))
    assert four.kv_bytes == 2 * one.kv_bytes  # the model has two key-value heads
    assert four.num_kv_blocks == one.num_kv_blocks
    assert one.weight_bytes < four.host_weight_bytes < 2 * one.weight_bytes


def test_the_whole_vocabulary_that_draft_heads_read_counts_on_the_host_of_rank_0():
    heads = {"method": "medusa", "model": "demo-medusa", "num_speculative_tokens": 3}
    options = {"tensor_parallel_size": 4, "num_kv_blocks": 64}
    plain, drafting = (inspect_model(config(**options, **more)) for more in ({}, {"speculative_config": heads}))
    vocabulary = sum(
        math.prod(plain.parameters[name]) for name in ("embed.weight", "lm_head.weight") if name in plain.parameters
    )
    more = drafting.memory.host_weight_bytes - plain.memory.host_weight_bytes
    assert more == pytest.approx(plain.memory.weight_bytes * vocabulary / plain.num_parameters, abs=1)


def test_a_host_tier_counts_heads_that_several_ranks_hold_for_each():
    tiers = [config(tensor_parallel_size=size, kv_host_bytes=8 << 20) for size in (1, 4)]
    one, four = (num_host_pages(tier, inspect_model(tier)) for tier in tiers)
    assert one == 2 * four


def test_a_budget_in_bytes_counts_what_all_ranks_on_the_host_hold():
    one, four = (inspect_model(config(tensor_parallel_size=size, kv_cache_memory_bytes=8 << 20)).memory for size in (1, 4))
    assert one.num_kv_blocks == 2 * four.num_kv_blocks
    assert four.kv_bytes <= 8 << 20


def test_a_host_with_half_of_the_ranks_holds_half_of_the_model():
    report = inspect_model(config(tensor_parallel_size=4))
    own = host_part(config(tensor_parallel_size=4), report.spec, report.parameters, 1 << 30, 1024, torchrun(2, 0, 2))
    whole = host_part(config(tensor_parallel_size=4), report.spec, report.parameters, 1 << 30, 1024, {})
    assert own.num_ranks == 2
    assert math.isclose(own.weight_bytes, whole.weight_bytes / 2, rel_tol=0.05)
    assert own.bytes_per_block * 2 == whole.bytes_per_block


def test_a_model_that_fits_only_on_several_hosts_is_taken_and_one_process_refused(monkeypatch):
    """Each of two hosts has less memory than the weights of the model."""
    monkeypatch.setattr(inspect, "weight_bytes", lambda *_: 24 << 30)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 16 << 30)
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 4}
    with pytest.raises(ConfigError, match=r"16.00 GiB are available, weights take 24.00 GiB"):
        check_fits(inspect_model(config(**options)).memory)
    for name, value in (torchrun(0, 0, 1) | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    plan = inspect_model(config(tensor_parallel_size=2, **options)).memory
    check_fits(plan)
    assert plan.weight_bytes == 24 << 30
    assert 12 << 30 <= plan.host_weight_bytes < 14 << 30
    assert "of 1 of 2 ranks, on this host; 24.00 GiB in one process" in plan.describe()
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 8 << 30)
    with pytest.raises(ConfigError, match=r"8.00 GiB are available for 1 of 2 ranks on this host, weights take 1[23]\.\d+ GiB"):
        check_fits(inspect_model(config(tensor_parallel_size=2, **options)).memory)


def test_stages_on_this_host_count_by_their_layers(monkeypatch):
    options = {"pipeline_parallel_size": 2, "pipeline_layers": (6, 2), "num_kv_blocks": 64}
    whole = inspect_model(config(**options)).memory
    assert whole.host is None
    for name, value in (torchrun(0, 0, 1) | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    own = inspect_model(config(**options)).memory
    assert (own.host.num_ranks, own.host.num_all_ranks) == (1, 2)
    assert (own.weight_bytes, own.num_kv_blocks) == (whole.weight_bytes, whole.num_kv_blocks)
    assert own.kv_bytes == whole.kv_bytes * 6 // 8
    assert 0.7 * whole.weight_bytes < own.host_weight_bytes < 0.9 * whole.weight_bytes
    assert own.activation_bytes == whole.activation_bytes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert inspect_model(config(**options)).memory.host is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    ranks = inspect_model(config(**options, tensor_parallel_size=2)).memory
    assert (ranks.host.num_ranks, ranks.host.num_all_ranks, ranks.kv_bytes) == (2, 4, own.kv_bytes)
    assert ranks.host_weight_bytes == pytest.approx(own.host_weight_bytes, rel=0.02)


def test_a_stage_that_does_not_fit_on_its_host_is_refused_with_its_numbers(monkeypatch):
    monkeypatch.setattr(parallel_build, "available_memory_bytes", lambda: 3 << 20)
    check_rank_memory((1 << 20, 2 << 20), 1)
    with pytest.raises(ConfigError, match=r"rank 1 needs about 4.0 MiB .*, but 3.0 MiB are available on .*take more stages"):
        check_rank_memory((1 << 20, 4 << 20), 1, "stages")


def test_tiers_are_refused_on_gpus_of_several_hosts(monkeypatch):
    own = config(device="cpu", tensor_parallel_size=4, kv_disk_dir="/pages", kv_disk_bytes=1 << 30)
    report = replace(inspect_model(own), device="cuda:0")
    check_tiers(own, report)
    for name, value in torchrun(0, 0, 4).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check_tiers(own, report)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="kv_disk_dir is '/pages', but ranks on GPUs of several hosts share no pages"):
        check_tiers(own, report)
