"""Tensor-parallel workers as processes: the tokens of one process, and what happens when one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, DeviceLostError, WorkerError
from quire.kernels.native import load_native
from tests.ranks import assert_nothing_new, is_alive, left_behind

pytestmark = [
    pytest.mark.skipif(load_native() is None, reason="the native kernels are not built"),
    pytest.mark.usefixtures("temporary_folder"),
]

PROMPTS = ["It was a cold morning when", "The detective looked at"]
OPTIONS = {"num_threads": 1, "max_num_seqs": 4, "num_kv_blocks": 256}
LIMIT_S = 15.0
"""Within which an end is noticed on a machine that others use, too; without a monitor it would take minutes."""


def _generate(llm, max_tokens=32, **params):
    params = SamplingParams(**{"temperature": 0.8, "seed": 2, "max_tokens": max_tokens, **params})
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def _executor(llm):
    return llm.llm_engine.runner.executor


def _check_health_for(llm, seconds):
    """Check until it raises, or so long."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        llm.llm_engine.check_health()
        time.sleep(0.02)


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one_and_leave_nothing():
    before = left_behind()
    one = LLM("demo", **OPTIONS)
    expected = _generate(one)
    one.close()
    made = []  # workers outlive the thread that made the engine
    thread = threading.Thread(target=lambda: made.append(LLM("demo", tensor_parallel_size=2, **OPTIONS)))
    thread.start()
    thread.join()
    (ranks,) = made
    pids = _executor(ranks).worker_pids
    assert list(pids) == [1]
    assert _generate(ranks) == expected
    ranks.close()
    assert not any(is_alive(pid) for pid in pids.values())
    assert_nothing_new(before)


@pytest.mark.slow
def test_a_worker_that_is_stopped_in_a_step_ends_the_engine_soon():
    before = left_behind()
    llm = LLM("demo", tensor_parallel_size=2, **OPTIONS)
    (pid,) = _executor(llm).worker_pids.values()
    _generate(llm, 4)
    at = []

    def kill():
        at.append(time.monotonic())
        os.kill(pid, signal.SIGSTOP)

    threading.Timer(0.3, kill).start()
    with pytest.raises(WorkerError, match=rf"rank 1 \(pid {pid}[,)]"):
        _generate(llm, 1000, ignore_eos=True)
    assert time.monotonic() - at[0] < LIMIT_S
    llm.close()
    assert not is_alive(pid)
    assert_nothing_new(before)


@pytest.mark.slow
def test_a_worker_that_is_killed_while_the_engine_is_idle_is_noticed():
    llm = LLM("demo", tensor_parallel_size=2, **OPTIONS)
    (pid,) = _executor(llm).worker_pids.values()
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
        ({"pipeline_parallel_size": 2}, 2),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "kv_host_bytes": 1 << 20}, 4),
        ({"data_parallel_size": 2}, 2),
    ],
    ids=["ranks", "stages", "ranks-of-stages", "replicas"],
)
def test_processes_end_with_their_leader_in_steps(options, num_workers):
    code = (
        "from quire import LLM, SamplingParams\n"
        f"llm = LLM('demo', **{OPTIONS | options!r})\n"
        "engine = llm.llm_engine\n"
        "runner = getattr(engine, 'runner', engine)\n"
        "own = runner if hasattr(runner, 'worker_pids') else getattr(runner, 'executor', None)\n"
        "print(*(engine.pids if own is None else own.worker_pids.values()), flush=True)\n"
        "while True: llm.generate('A', SamplingParams(max_tokens=500, ignore_eos=True), use_tqdm=False)\n"
    )
    before = left_behind()
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in leader.stdout.readline().split()]
    assert len(pids) == num_workers
    time.sleep(0.2)
    leader.kill()
    leader.wait()
    leader.stdout.close()
    end_s = time.monotonic() + LIMIT_S
    while any(map(is_alive, pids)) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not any(map(is_alive, pids))
    assert_nothing_new(before)


@pytest.mark.slow
def test_a_worker_that_cannot_load_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_NATIVE", "1")
    from quire.worker import parallel_build

    def break_json(config):
        return {**config, "num_kv_blocks": -1}

    to_json = parallel_build.RankConfig.to_json
    monkeypatch.setattr(parallel_build.RankConfig, "to_json", lambda config: break_json(to_json(config)))
    with pytest.raises((ConfigError, WorkerError), match="rank 1 failed in loading weights"):
        LLM("demo", tensor_parallel_size=2, **OPTIONS)
