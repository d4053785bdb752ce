"""Engines of several tensor-parallel ranks give the tokens and log probabilities of one rank, bit for bit."""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import pytest
import torch

from quire import LLM, BeamSearchParams, PoolingParams
from quire.base.errors import ConfigError
from quire.base.threads import num_usable_cores
from quire.contracts.config import EngineConfig
from quire.kernels.native import load_native
from quire.worker import parallel_build, parallel_launch, parallel_messages
from quire.worker.parallel_build import threads_release
from tests.thread_workers import ThreadWorkers
from tests.unit.engine.one_compiler import one_compiler
from tests.unit.worker import rank_outputs
from tests.unit.worker.rank_outputs import KINDS, OPTIONS, PROMPTS, cases_of, outputs_of

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    with one_compiler():
        yield


@pytest.fixture(autouse=True)
def thread_workers(monkeypatch):
    """Let workers be threads; returns the groups that were made."""
    made = []

    def spawn(*args):
        made.append(ThreadWorkers(*args))
        return made[-1]

    monkeypatch.setattr(parallel_launch, "spawn_workers", spawn)
    return made


def _engine(size=1, **options):
    defaults = {"model": "demo", "num_threads": min(size, num_usable_cores()), "max_num_seqs": 8, "num_kv_blocks": 96}
    return LLM(**{**defaults, **options}, tensor_parallel_size=size)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_outputs_are_those_of_one_rank(size):
    one, ranks = _engine(), _engine(size)
    for name, params in KINDS.items():
        assert outputs_of(ranks, **params) == outputs_of(one, **params), name
        assert outputs_of(ranks, **params) == outputs_of(one, **params), f"{name} over cached prefixes"
    pooled = [llm.embed(PROMPTS, PoolingParams(pooling="mean"), use_tqdm=False) for llm in (one, ranks)]
    assert [o.outputs.embedding for o in pooled[0]] == [o.outputs.embedding for o in pooled[1]]
    beams = [llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=3, max_tokens=8)) for llm in (one, ranks)]
    assert [[s.tokens for s in o.sequences] for o in beams[0]] == [[s.tokens for s in o.sequences] for o in beams[1]]
    one.close()
    ranks.close()


@functools.cache
def _plain_outputs(*kinds):
    """Return the outputs of one rank without drafts by kind."""
    one = _engine()
    found = {name: outputs_of(one, **KINDS[name]) for name in kinds}
    one.close()
    return found


DRAFTS = rank_outputs.DRAFTS | {"self": {"method": "self", "skipped_layers": [1], "num_speculative_tokens": 3}}


@pytest.mark.slow
@pytest.mark.parametrize("drafts", cases_of(DRAFTS, "eagle3"))
def test_outputs_with_drafts_are_those_of_one_rank_without(drafts):
    expected = _plain_outputs("greedy", "sampled", "json")
    ranks = _engine(2, speculative_config={**drafts, "adaptive": False})
    assert {name: outputs_of(ranks, **KINDS[name]) for name in expected} == expected
    assert ranks.llm_engine.stats.num_draft_tokens > 0
    ranks.close()


@pytest.mark.parametrize("options", cases_of(OPTIONS, "int4-and-int8-cache", "mixture-of-experts"))
def test_outputs_are_those_of_one_rank_with_every_option(options):
    one, ranks = _engine(**options), _engine(2, **options, tensor_parallel_shares=(2, 1))
    for name in ("greedy", "log-probabilities"):
        assert outputs_of(ranks, **KINDS[name]) == outputs_of(one, **KINDS[name])
    if "num_kv_blocks" in options:
        assert ranks.llm_engine.scheduler.num_preemptions > 0
    one.close()
    ranks.close()


def test_each_rank_has_its_share_of_the_weights(thread_workers):
    one, ranks = _engine(), _engine(3)
    whole = one.llm_engine.report.packed_weight_bytes
    own = [thread_workers[-1].board.read(rank).ready["packed_weight_bytes"] for rank in range(3)]
    assert sum(own) == ranks.llm_engine.report.packed_weight_bytes
    assert all(abs(num_bytes - whole / 3) < 0.1 * whole for num_bytes in own)
    one.close()
    ranks.close()


def test_a_step_is_one_message_also_when_block_tables_grow(thread_workers):
    ranks = _engine(2, block_size=16)
    sent, writer = [], thread_workers[-1].ring
    send = writer.send
    writer.send = lambda header, arrays=(): (sent.append(int(header[0])), send(header, arrays))
    outputs_of(ranks, ["A"], temperature=0.0, max_tokens=40, ignore_eos=True)
    assert set(sent) == {parallel_messages.Call.STEP}
    assert len(sent) == ranks.llm_engine.stats.num_steps
    ranks.close()


def test_statistics_have_the_barriers_bytes_and_share_of_each_rank(thread_workers):
    ranks = _engine(2, tensor_parallel_shares=(3, 1))
    outputs_of(ranks, ["A"], temperature=0.0, max_tokens=4)
    spec = ranks.llm_engine.report.spec
    first, second = ranks.llm_engine.stats.ranks
    num_layers, num_steps = len(spec.layers), ranks.llm_engine.stats.num_steps
    assert first.num_barriers - second.num_barriers == 0
    assert first.num_barriers >= num_steps * (4 * num_layers + 2)
    assert first.num_bytes > second.num_bytes > 0
    assert first.share + second.share == pytest.approx(1)
    assert first.share > second.share
    assert first.wait_s >= 0
    assert first.num_waits <= first.num_barriers
    ranks.close()
    one = _engine()
    assert one.llm_engine.stats.ranks == []
    one.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"model": "demo-moe"}, {"quantization": "int8"}], ids=["plain", "experts", "int8"])
def test_inspection_knows_what_each_rank_will_hold(thread_workers, options):
    ranks = _engine(2, **options, tensor_parallel_shares=(3, 1))
    config, report = ranks.llm_engine.config, ranks.llm_engine.report
    memories = parallel_build.rank_memories(config, report)
    own = [thread_workers[-1].board.read(rank).ready["packed_weight_bytes"] for rank in range(2)]
    for memory, num_bytes in zip(memories, own, strict=True):
        assert abs(memory.weight_bytes - num_bytes) < 0.1 * sum(own)
    assert sum(memory.kv_bytes for memory in memories) == report.memory.kv_bytes
    assert [memory.heads.size for memory in memories] == [2, 2]  # two heads of keys and values cannot be divided as 3 to 1
    ranks.close()


def test_a_rank_without_memory_for_its_part_is_named_with_the_numbers(monkeypatch):
    monkeypatch.setattr(parallel_build, "available_memory_bytes", lambda: 3 << 20)
    with pytest.raises(ConfigError, match=r"rank [01] needs about [0-9.]+ MiB .*, but 3.0 MiB are available on"):
        _engine(2)


def test_ranks_are_compared_and_a_difference_is_told(monkeypatch):
    from quire.worker import parallel_worker

    def other(own, folder, options):
        return {**parallel_launch.own_fingerprint(own, folder, options), "version": "9.9"}

    monkeypatch.setattr(parallel_worker, "own_fingerprint", other)
    with pytest.raises(ConfigError, match=r"rank 1 has version 9.9, rank 0 \d"):
        _engine(2)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 1),
        ({"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "a"}, 0),
    ],
)
def test_a_launcher_is_found_in_the_environment(environment, expected):
    config = EngineConfig(model="demo", tensor_parallel_size=2)
    found = parallel_launch.launched_group(config, environment)
    assert (None if found is None else found.rank) == expected
    assert parallel_launch.launched_group(EngineConfig(model="demo"), environment) is None
    spawned = replace(config, distributed_executor_backend="spawn")
    assert parallel_launch.launched_group(spawned, environment) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "the ranks of several replicas .data_parallel_size 2."),
        ({"tensor_parallel_size": 2, "device": "cuda"}, "ranks on GPUs .device cuda."),
    ],
)
def test_ranks_that_only_the_leader_can_start_are_refused_to_launchers_and_those_on_gpus_to_ray(monkeypatch, options, message):
    monkeypatch.setattr(parallel_launch, "choose_device", lambda config: "cuda" if config.device == "cuda" else None)
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    config = EngineConfig(model="demo", **options)
    if config.device == "cuda":
        assert parallel_launch.launched_group(config, torchrun).rank == 1
    else:
        with pytest.raises(ConfigError, match=f"has started 2 processes, but {message}.*'spawn'"):
            parallel_launch.launched_group(config, torchrun)
    by_ray = EngineConfig(model="demo", distributed_executor_backend="ray", **options)
    with pytest.raises(ConfigError, match=f"'ray', but {message}"):
        parallel_launch.check_backend(by_ray)


def test_a_launcher_may_start_stages():
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    stages = EngineConfig(model="demo", pipeline_parallel_size=2)
    assert parallel_launch.launched_group(stages, torchrun).rank == 1
    with pytest.raises(ConfigError, match="has started 2 processes, but pipeline_parallel_size asks for 3 ranks"):
        parallel_launch.launched_group(replace(stages, pipeline_parallel_size=3), torchrun)
    message = r"but pipeline_parallel_size \* tensor_parallel_size asks for 4 ranks"
    with pytest.raises(ConfigError, match=message):
        parallel_launch.launched_group(replace(stages, tensor_parallel_size=2), torchrun)
    parallel_launch.check_backend(replace(stages, distributed_executor_backend="ray"))


def test_ray_is_refused_where_there_is_one_rank():
    with pytest.raises(ConfigError, match="'ray', but there is one rank only"):
        parallel_launch.check_backend(EngineConfig(model="demo", distributed_executor_backend="ray"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer >= 1, got 0"),
        ({"tensor_parallel_size": 9}, "tensor_parallel_size must be at most 4 for a model of 4 attention heads, got 9"),
        ({"tensor_parallel_size": 2, "tensor_parallel_shares": (1,)}, "one number for each of the 2"),
        ({"tensor_parallel_size": 2, "tensor_parallel_shares": (1, -1)}, "finite numbers > 0, got -1"),
        (
            {"distributed_executor_backend": "mp"},
            "distributed_executor_backend must be None or one of .*, got 'mp'",
        ),
        ({"distributed_timeout_s": 0}, "distributed_timeout_s must be a number of seconds from 1 to 86400, got 0"),
        ({"distributed_start_timeout_s": float("nan")}, "distributed_start_timeout_s must be a number of seconds"),
        ({"tensor_parallel_size": 2, "block_size": 4}, "it needs the native kernels, which do not run a block_size of 4"),
    ],
)
def test_ranks_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **options)


def test_workers_get_the_time_limits_of_the_configuration():
    config = EngineConfig(model="demo", distributed_timeout_s=7.5, distributed_start_timeout_s=40)
    options = parallel_launch.launch_options(config, with_store=True)
    assert (options.watchdog_timeout_s, options.start_timeout_s, options.with_store) == (7.5, 40, True)


def test_threads_and_cores_are_given_back_when_a_leader_ends():
    num_threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(3)
    release = threads_release()
    try:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {min(cores)})
        release()
        assert torch.get_num_threads() == 3
        assert os.sched_getaffinity(0) == cores
    finally:
        torch.set_num_threads(num_threads)
        os.sched_setaffinity(0, cores)
