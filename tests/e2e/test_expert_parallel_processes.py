"""Whole experts on ranks that are processes: the tokens of one process, from load statistics to a placement with copies."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, DeviceLostError
from quire.kernels.native import load_native
from quire.parallel.expert_files import read_loads, read_placements, write_placements
from quire.parallel.expert_placement import ExpertPlacement

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

PROMPTS = ["It was a cold morning when", "The detective looked at"]
OPTIONS = {"num_threads": 1, "max_num_seqs": 4, "num_kv_blocks": 256, "device": "cpu"}
NUM_EXPERTS = dict.fromkeys(range(3), 16)
LIMIT_S = 60.0


def _generate(llm):
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=24, logprobs=3)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [
        (output.token_ids, [{token: entry.logprob for token, entry in at.items()} for at in output.logprobs])
        for output in outputs
    ]


def _generate_until_it_fails(llm):
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        _generate(llm)


def _run(**options):
    """Return the outputs of an engine and the statistics of its experts."""
    llm = LLM("demo-moe", **OPTIONS, **options)
    try:
        return _generate(llm), llm.llm_engine.stats.experts
    finally:
        llm.close()


@pytest.mark.slow
def test_experts_that_are_placed_by_their_load_give_the_tokens_of_one_process(tmp_path):
    load = str(tmp_path / "load.json")
    expected, counted = _run(save_expert_load=load)
    assert [stats.rank_tokens for stats in counted] == [[], [], []]
    saved = read_loads(load, NUM_EXPERTS)
    assert saved == {stats.layer: stats.tokens for stats in counted}
    # Two experts for each token of the prompts and each of the 23 output tokens that are computed.
    assert min(map(sum, saved.values())) >= 2 * 2 * 23

    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    found, linear = _run(**ranks)
    assert found == expected
    found, balanced = _run(**ranks, expert_placement="balanced", expert_load=load, num_redundant_experts=2)
    assert found == expected
    assert [stats.tokens for stats in linear] == [stats.tokens for stats in balanced] == list(saved.values())
    for before, after in zip(linear, balanced, strict=True):
        assert sum(after.rank_tokens) == sum(after.tokens)
        assert after.imbalance <= before.imbalance
        assert after.imbalance < 1.05


@pytest.mark.slow
def test_experts_that_are_placed_by_a_file_give_the_tokens_of_one_process(tmp_path):
    path = str(tmp_path / "placement.json")
    placement = ExpertPlacement(16, (tuple(range(16)), (3,), (15, 0, 7)))
    write_placements(path, dict.fromkeys(range(3), placement))
    expected, _ = _run()
    found, stats = _run(tensor_parallel_size=3, enable_expert_parallel=True, expert_placement=path)
    assert found == expected
    assert stats[0].rank_tokens[1] == stats[0].tokens[3] / 2
    with pytest.raises(ConfigError, match="is for 3 ranks, but tensor_parallel_size is 2"):
        LLM("demo-moe", tensor_parallel_size=2, enable_expert_parallel=True, expert_placement=path, **OPTIONS)


@pytest.mark.slow
def test_experts_that_move_while_requests_run_give_the_tokens_of_one_process(tmp_path, caplog):
    caplog.set_level("INFO")
    num_ranks = 3
    expected, _ = _run()
    path = str(tmp_path / "placement.json")
    first = {layer: ExpertPlacement(16, tuple(tuple(range(r, 16, num_ranks)) for r in range(num_ranks))) for layer in range(3)}
    write_placements(path, first)
    eplb = {"window_size": 8, "step_interval": 8, "log_balancedness": True}
    llm = LLM(
        "demo-moe",
        **OPTIONS,
        tensor_parallel_size=num_ranks,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config=eplb,
        expert_placement=path,
        save_expert_placement=path,
    )
    try:
        end_s = time.monotonic() + LIMIT_S  # experts are placed and prepared by threads, while steps go on
        while sum(layer.num_moved for layer in llm.llm_engine.stats.experts) < 6 and time.monotonic() < end_s:
            assert _generate(llm) == expected
        stats = llm.llm_engine.stats.experts
        assert sum(layer.num_moved for layer in stats) >= 6
        assert all(layer.num_failed_moves == 0 and layer.imbalance_after <= layer.imbalance_before for layer in stats)
    finally:
        llm.close()
    assert caplog.text.count("in place of") >= 3
    assert read_placements(path, NUM_EXPERTS, num_ranks) != first


@pytest.mark.slow
def test_a_rank_that_is_killed_while_experts_move_ends_the_group():
    llm = LLM(
        "demo-moe",
        **OPTIONS,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config={"window_size": 4, "step_interval": 4},
    )
    try:
        rebalancer = llm.llm_engine.runner.executor._rebalancer
        prepare = rebalancer._mover.prepare

        def kill_then_prepare(change):
            os.kill(llm.llm_engine.runner.executor.worker_pids[1], signal.SIGKILL)
            prepare(change)

        rebalancer._mover.prepare = kill_then_prepare
        with pytest.raises(DeviceLostError, match=r"rank 1 \(pid \d+\).*SIGKILL"):
            _generate_until_it_fails(llm)
    finally:
        llm.close()


def test_moves_are_refused_where_experts_do_not_move():
    llm = LLM("demo-moe", **OPTIONS)
    with pytest.raises(ConfigError, match="start it with enable_expert_parallel and enable_eplb"):
        llm.llm_engine.rebalance_experts()
    llm.close()


@pytest.mark.slow
def test_drafts_are_verified_on_whole_experts():
    speculative = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
    expected, _ = _run()
    found, _ = _run(tensor_parallel_size=2, enable_expert_parallel=True, speculative_config=speculative)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
