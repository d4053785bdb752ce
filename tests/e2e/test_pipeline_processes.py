"""Pipeline stages as processes: the tokens of one process, and what happens when one of them is killed."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, WorkerError
from quire.kernels.native import load_native
from quire.worker import pipeline_stage
from tests.ranks import assert_nothing_new, command_lines_of_children, is_alive, left_behind

pytestmark = [
    pytest.mark.skipif(load_native() is None, reason="the native kernels are not built"),
    pytest.mark.usefixtures("temporary_folder"),
]

PROMPTS = ["It was a cold morning when", "The detective looked at", "A", "Once upon a time"]
OPTIONS = {"num_threads": 2, "max_num_seqs": 4, "num_kv_blocks": 256}
LIMIT_S = 15.0
"""Within which an end is noticed on a machine that others use, too; without a monitor it would take minutes."""


def _generate(llm, max_tokens=32, **params):
    params = SamplingParams(**{"temperature": 0.8, "seed": 2, "max_tokens": max_tokens, **params})
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def _pids(llm):
    return llm.llm_engine.runner.worker_pids


@pytest.mark.slow
def test_stages_as_processes_give_the_tokens_of_one_process_and_leave_nothing():
    before = left_behind()
    one = LLM("demo-moe", **OPTIONS)
    expected = _generate(one, logprobs=2, prompt_logprobs=1)
    one.close()
    stages = LLM("demo-moe", pipeline_parallel_size=2, **OPTIONS)
    pids = _pids(stages)
    assert list(pids) == [0, 1]
    assert _generate(stages, logprobs=2, prompt_logprobs=1) == expected
    stages.close()
    assert not any(is_alive(pid) for pid in pids.values())
    assert_nothing_new(before)


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_that_is_killed_or_stopped_in_a_step_ends_the_engine_soon(stage, sent):
    before = left_behind()
    llm = LLM("demo", pipeline_parallel_size=2, **OPTIONS)
    pids = _pids(llm)
    _generate(llm, 4)
    at = []

    def kill():
        at.append(time.monotonic())
        os.kill(pids[stage], sent)

    threading.Timer(0.3, kill).start()
    with pytest.raises(
        WorkerError, match=rf"pipeline stage {stage} \(layers \d to \d\): rank {stage + 1} \(pid {pids[stage]}\)"
    ):
        _generate(llm, 1000, ignore_eos=True)
    assert time.monotonic() - at[0] < LIMIT_S
    llm.close()
    assert not any(is_alive(pid) for pid in pids.values())
    assert_nothing_new(before)


@pytest.mark.slow
def test_stages_of_two_processes_each_give_the_tokens_of_one_and_end_when_one_of_them_is_killed():
    before, killed = left_behind(), 3  # the second process of the second stage, for which the leader never waits
    one = LLM("demo", **OPTIONS)
    expected = _generate(one, 8, logprobs=2, prompt_logprobs=1)
    one.close()
    llm = LLM("demo", pipeline_parallel_size=2, tensor_parallel_size=2, **OPTIONS)
    pids, place = _pids(llm), rf"stage {killed // 2} \(layers \d to \d\), tensor-parallel rank {killed % 2}"
    assert list(pids) == [0, 1, 2, 3]
    assert _generate(llm, 8, logprobs=2, prompt_logprobs=1) == expected
    assert [stats.pid for stats in llm.llm_engine.stats.ranks] == [os.getpid(), *pids.values()]
    assert all(stats.memory_bytes > 0 for stats in llm.llm_engine.stats.ranks)
    at = []

    def kill():
        at.append(time.monotonic())
        os.kill(pids[killed], signal.SIGKILL)

    threading.Timer(0.3, kill).start()
    message = rf"pipeline {place}: rank {killed + 1} \(pid {pids[killed]}\): killed by SIGKILL"
    with pytest.raises(WorkerError, match=message) as raised:
        _generate(llm, 1000, ignore_eos=True)
    assert time.monotonic() - at[0] < LIMIT_S
    assert raised.value.rank == killed + 1
    llm.close()
    assert not any(is_alive(pid) for pid in pids.values())
    assert_nothing_new(before)


@pytest.mark.slow
def test_a_stage_that_cannot_load_says_why(monkeypatch):
    to_json = pipeline_stage.StageConfig.to_json
    monkeypatch.setattr(pipeline_stage.StageConfig, "to_json", lambda config: {**to_json(config), "num_local_blocks": -1})
    with pytest.raises((ConfigError, WorkerError), match=r"failed in loading weights of stage \d \(layers"):
        LLM("demo", pipeline_parallel_size=2, **OPTIONS)


@pytest.mark.slow
def test_a_server_of_stages_and_ranks_tells_of_a_killed_one_and_goes_on_with_new_ones():
    pytest.importorskip("uvicorn", reason="needs quire[server]")
    from tests.e2e.server_process import ServerProcess

    server = ServerProcess("-pp", "2", "-tp", "2", "--pipeline-layers", "5,3").wait_ready()
    try:
        body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
        expected = server.post("/v1/completions", body).json()["choices"][0]["text"]
        workers = [pid for pid, line in command_lines_of_children(server.engine_pid()).items() if "pipeline_worker" in line]
        assert len(workers) == 4
        metrics = server.get("/metrics").text
        assert metrics.count("quire:rank_up{") == len(workers) + 1
        assert metrics.count("quire:pipeline_stage_busy_seconds_total{") == 2
        os.kill(workers[0], signal.SIGKILL)
        server.wait_for(lambda: server.get("/health").status_code == 503, timeout_s=LIMIT_S)
        server.wait_ready()
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == expected
        assert f"(pid {workers[0]}" in server.get("/health").json()["last_error"]
        assert "pipeline stage" in server.get("/health").json()["last_error"]
    finally:
        server.kill()
