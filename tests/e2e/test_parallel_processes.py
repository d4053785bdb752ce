"""Ranks and stages as processes: the tokens of one process, and what happens when one of them, or their leader, is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, DeviceLostError, WorkerError
from quire.kernels.native import load_native
from quire.worker import parallel_build, pipeline_stage
from tests.ranks import assert_nothing_new, command_lines_of_children, is_alive, left_behind, wait_until

pytestmark = [
    pytest.mark.skipif(load_native() is None, reason="the native kernels are not built"),
    pytest.mark.usefixtures("temporary_folder"),
]

PROMPTS = ["It was a cold morning when", "The detective looked at", "A", "Once upon a time"]
OPTIONS = {"num_threads": 2, "max_num_seqs": 4, "num_kv_blocks": 256}
RANKS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
LIMIT_S = 30.0
"""Within which an end is noticed on a machine that others use, too; without a monitor it would take minutes."""
SHOWS_PIDS = """
engine = llm.llm_engine
runner = getattr(engine, "runner", engine)
own = runner if hasattr(runner, "worker_pids") else getattr(runner, "executor", None)
print(*(engine.pids if own is None else own.worker_pids.values()), flush=True)
while True:
    llm.generate("A", SamplingParams(max_tokens=500, ignore_eos=True), use_tqdm=False)
"""


def _generate(llm, max_tokens=32, **params):
    params = SamplingParams(**{"temperature": 0.8, "seed": 2, "max_tokens": max_tokens, **params})
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def _pids(llm):
    runner = llm.llm_engine.runner
    return (runner if hasattr(runner, "worker_pids") else runner.executor).worker_pids


def _end_in_a_step(llm, pid, sent, message):
    """Kill or stop a process in a step; return the error, which has to come soon."""
    at = []

    def kill():
        at.append(time.monotonic())
        os.kill(pid, sent)

    threading.Timer(0.3, kill).start()
    with pytest.raises(WorkerError, match=message) as raised:
        _generate(llm, 1000, ignore_eos=True)
    assert time.monotonic() - at[0] < LIMIT_S
    return raised.value


def _check_health_for(llm, seconds):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        llm.llm_engine.check_health()
        time.sleep(0.02)


def _close(llm, pids, before):
    llm.close()
    assert not any(is_alive(pid) for pid in pids)
    assert_nothing_new(before)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "ranks"), [("demo", RANKS), ("demo-moe", STAGES)])
def test_processes_give_the_tokens_of_one_and_leave_nothing(model, ranks):
    before = left_behind()
    one = LLM(model, **OPTIONS)
    expected = _generate(one, logprobs=2, prompt_logprobs=1)
    one.close()
    made = []  # workers outlive the thread that made the engine
    thread = threading.Thread(target=lambda: made.append(LLM(model, **ranks, **OPTIONS)))
    thread.start()
    thread.join()
    (llm,) = made
    pids = _pids(llm)
    assert list(pids) == ([1] if ranks is RANKS else [0, 1])
    assert _generate(llm, logprobs=2, prompt_logprobs=1) == expected
    _close(llm, pids.values(), before)


@pytest.mark.slow
@pytest.mark.parametrize(("worker", "sent"), [(0, signal.SIGKILL), (1, signal.SIGSTOP), ("rank", signal.SIGSTOP)])
def test_a_process_that_is_killed_or_stopped_in_a_step_ends_the_engine_soon(worker, sent):
    before = left_behind()
    llm = LLM("demo", **(RANKS if worker == "rank" else STAGES), **OPTIONS)
    pids = _pids(llm)
    _generate(llm, 4)
    message, pid = r"rank 1 \(pid {}[,)]", pids[1 if worker == "rank" else worker]
    if worker != "rank":
        message = rf"pipeline stage {worker} \(layers \d to \d\): rank {worker + 1} \(pid {{}}\)"
    _end_in_a_step(llm, pid, sent, message.format(pid))
    _close(llm, pids.values(), before)


@pytest.mark.slow
def test_stages_of_two_processes_each_give_the_tokens_of_one_and_end_when_one_of_them_is_killed():
    before, killed = left_behind(), 3  # the second process of the second stage, for which the leader never waits
    one = LLM("demo", **OPTIONS)
    expected = _generate(one, 8, logprobs=2, prompt_logprobs=1)
    one.close()
    llm = LLM("demo", **STAGES, **RANKS, **OPTIONS)
    pids, place = _pids(llm), rf"stage {killed // 2} \(layers \d to \d\), tensor-parallel rank {killed % 2}"
    assert list(pids) == [0, 1, 2, 3]
    assert _generate(llm, 8, logprobs=2, prompt_logprobs=1) == expected
    assert [stats.pid for stats in llm.llm_engine.stats.ranks] == [os.getpid(), *pids.values()]
    assert all(stats.memory_bytes > 0 for stats in llm.llm_engine.stats.ranks)
    message = rf"pipeline {place}: rank {killed + 1} \(pid {pids[killed]}\): killed by SIGKILL"
    assert _end_in_a_step(llm, pids[killed], signal.SIGKILL, message).rank == killed + 1
    _close(llm, pids.values(), before)


@pytest.mark.slow
def test_a_worker_that_is_killed_while_the_engine_is_idle_is_noticed():
    llm = LLM("demo", **RANKS, **OPTIONS)
    (pid,) = _pids(llm).values()
    llm.llm_engine.check_health()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DeviceLostError, match=rf"rank 1 \(pid {pid}.*SIGKILL"):
        _check_health_for(llm, LIMIT_S)
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "num_workers"),
    [
        ({"tensor_parallel_size": 3, "kv_host_bytes": 1 << 20}, 2),
        (STAGES, 2),
        ({**RANKS, **STAGES, "kv_host_bytes": 1 << 20}, 4),
        ({"data_parallel_size": 2}, 2),
    ],
    ids=["ranks", "stages", "ranks-of-stages", "replicas"],
)
def test_processes_end_with_their_leader_in_steps(options, num_workers):
    before = left_behind()
    code = f"from quire import LLM, SamplingParams\nllm = LLM('demo', **{OPTIONS | options!r}){SHOWS_PIDS}"
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in leader.stdout.readline().split()]
    assert len(pids) == num_workers
    time.sleep(0.2)
    leader.kill()
    leader.wait()
    leader.stdout.close()
    assert wait_until(lambda: not any(map(is_alive, pids)), LIMIT_S)
    assert_nothing_new(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "config", "field"),
    [(RANKS, parallel_build.RankConfig, "num_kv_blocks"), (STAGES, pipeline_stage.StageConfig, "num_local_blocks")],
    ids=["rank", "stage"],
)
def test_a_process_that_cannot_load_says_why(monkeypatch, ranks, config, field):
    to_json = config.to_json
    monkeypatch.setattr(config, "to_json", lambda made: {**to_json(made), field: -1})
    told = r"rank 1 failed in loading weights|failed in loading weights of stage \d \(layers"
    with pytest.raises((ConfigError, WorkerError), match=told):
        LLM("demo", **ranks, **OPTIONS)


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
        said = rf"pipeline stage.*\(pid {workers[0]}"
        server.wait_for(lambda: re.search(said, server.get("/health").text), timeout_s=LIMIT_S)
        server.wait_ready()
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == expected
        assert re.search(said, server.get("/health").json()["last_error"])
    finally:
        server.kill()
