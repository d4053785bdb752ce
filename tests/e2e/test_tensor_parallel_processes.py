"""Tensor-parallel workers as processes: the tokens of one process, and what happens when one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, DeviceLostError, WorkerError
from quire.kernels.native import load_native
from tests.ranks import assert_nothing_new, left_behind

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

PROMPTS = ["It was a cold morning when", "The detective looked at"]
OPTIONS = {"num_threads": 1, "max_num_seqs": 4, "num_kv_blocks": 256}
LIMIT_S = 15.0
"""Within which an end is noticed on a machine that others use, too; without a monitor it would take minutes."""


def _generate(llm, max_tokens=32, **params):
    params = SamplingParams(**{"temperature": 0.8, "seed": 2, "max_tokens": max_tokens, **params})
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def _executor(llm):
    return llm.llm_engine.runner.executor


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path, monkeypatch):
    """A folder for temporary files that nobody else uses."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def _check_health_for(llm, seconds):
    """Check until it raises, or so long."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        llm.llm_engine.check_health()
        time.sleep(0.02)


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


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
    assert not any(_is_alive(pid) for pid in pids.values())
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
    assert not _is_alive(pid)
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
def test_workers_end_with_their_leader():
    code = (
        "import sys, time\n"
        "from quire import LLM\n"
        f"llm = LLM('demo', tensor_parallel_size=3, **{OPTIONS!r})\n"
        "print(*llm.llm_engine.runner.executor.worker_pids.values(), flush=True)\n"
        "time.sleep(60)\n"
    )
    before = left_behind()
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in leader.stdout.readline().split()]
    assert len(pids) == 2
    leader.kill()
    leader.wait()
    leader.stdout.close()
    end_s = time.monotonic() + LIMIT_S
    while any(map(_is_alive, pids)) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not any(map(_is_alive, pids))
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
