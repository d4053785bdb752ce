"""The launcher: workers are ready, work, fail and end; nothing is left of them."""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.base.environment import environment_with_quire
from quire.base.errors import ConfigError, ModelFormatError, WorkerError
from quire.kernels.native import load_native
from quire.parallel import barrier, worker_group
from quire.parallel.launch import LaunchOptions, SpawnedWorkers, spawn_workers
from quire.parallel.startup import StartupBoard, StartupReporter, StartupStatus
from quire.parallel.torch_communicator import TorchCommunicator
from tests.no_threads import no_threads
from tests.ranks import SharedGroup, files_in_dev_shm, is_alive, open_descriptors, start_processes, statuses_of, wait_until

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

WORKER = "tests.parallel_worker"
LIMIT_S = 25.0
"""Within which an end is noticed on a machine that others use, too; without a monitor it would take minutes."""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A temporary folder of their own for the processes of a test, which may take their time on a busy machine."""
    monkeypatch.setattr(worker_group, "_CLOSE_S", 60.0)
    monkeypatch.setattr(barrier, "_LEADER_ACCOUNT_S", 20.0)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def step(workers, value):
    """Send numbers to all workers, and add up what each makes of them."""
    workers.ring.send([1], [np.full(5, value)])
    x = torch.full((5,), float(value))
    workers.communicator.all_reduce(x)
    return x.tolist()


def step_until_it_fails(workers):
    while True:
        step(workers, 1)


def check_steps_failure_and_end(size):
    """Start, steps, the death of the last worker, the end of all."""
    with spawn_workers(WORKER, size, {"do": "work"}) as workers:
        statuses = workers.wait_ready()
        ready = [{"rank": rank, "num_kv_blocks": 100 + rank} for rank in range(1, size)]
        assert [status.ready for status in statuses[1:]] == ready
        names = [name for name, _ in statuses[1].stages]
        assert names == ["starting Python", "initialising", "loading weights", "agreeing"]
        assert all(seconds >= 0 for _, seconds in statuses[1].stages)
        for value in range(10):
            assert step(workers, value) == [value * size * (size + 1) / 2] * 5
        pids, last = workers.pids, size - 1
        assert not any(files_in_dev_shm(pid) for pid in pids.values())
        began_s = time.monotonic()
        os.kill(pids[last], signal.SIGKILL)
        with pytest.raises(WorkerError, match=rf"rank {last} \(pid {pids[last]}\): killed by SIGKILL") as caught:
            step_until_it_fails(workers)
        assert caught.value.rank == last
        assert time.monotonic() - began_s < LIMIT_S
    assert not any(is_alive(pid) for pid in pids.values())


@pytest.mark.slow
def test_workers_start_work_and_end_with_one_of_them(temporary):
    before = open_descriptors()
    check_steps_failure_and_end(4)
    # The mapping, which holds one, goes with the last object that refers to it.
    assert wait_until(lambda: open_descriptors() <= before), open_descriptors() - before
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_close_lets_workers_leave_by_themselves():
    workers = spawn_workers(WORKER, 2, {"do": "work"})
    workers.wait_ready()
    processes = dict(workers._processes)
    workers.close()
    workers.close()
    assert [process.returncode for process in processes.values()] == [0]


@pytest.mark.slow
def test_error_of_a_step_reaches_the_leader():
    with spawn_workers(WORKER, 2, {"do": "work"}) as workers:
        workers.wait_ready()
        workers.ring.send([2, 17])
        with pytest.raises(WorkerError, match=r"rank 1 \(pid \d+\) failed: ValueError: step 17 failed") as caught:
            workers.barrier.wait()
        assert caught.value.rank == 1


@pytest.mark.parametrize(
    "do, kind, told",
    [
        pytest.param(
            "refuse",
            ModelFormatError,
            "rank 1 failed in loading weights: model.safetensors is damaged",
            marks=pytest.mark.slow,
        ),
        pytest.param("raise", WorkerError, "rank 1 failed in loading weights: KeyError: 'a bug'", marks=pytest.mark.slow),
        pytest.param("die", WorkerError, r"rank 1 \(pid \d+\): killed by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_failure_in_the_start_is_told_in_its_class(do, kind, told):
    workers = spawn_workers(WORKER, 2, {"do": do})
    with pytest.raises(kind, match=told):
        workers.wait_ready()
    assert not any(is_alive(pid) for pid in workers.pids.values())
    workers.close()


@pytest.mark.slow
def test_start_timeout_says_where_each_rank_is(monkeypatch):
    workers = spawn_workers(WORKER, 3, {"do": "hang", "victim": 2}, LaunchOptions(start_timeout_s=20.0))

    def are_there():
        told = [workers.board.read(rank).describe(time.monotonic()) for rank in (1, 2)]
        return told[0].startswith("ready") and told[1].startswith("loading weights")

    assert wait_until(are_there, 60.0)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 20.0, sleep=time.sleep)
    monkeypatch.setattr(worker_group, "time", later)
    told = r"start_timeout_s \(20 s\) is over.*rank 1: ready after .* s; rank 2: loading weights for .* s"
    with pytest.raises(WorkerError, match=told) as caught:
        workers.wait_ready()
    assert caught.value.rank == 2
    assert not any(is_alive(pid) for pid in workers.pids.values())


@pytest.mark.slow
@pytest.mark.parametrize(("size", "refused"), [(3, "another"), (2, "Thread-")], ids=["later", "at-once"])
def test_stopped_worker_is_named_and_killed(size, refused):
    with spawn_workers(WORKER, size, {"do": "work"}) as workers, no_threads(refused):
        workers.wait_ready()
        os.kill(workers.pids[1], signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(WorkerError, match=r"rank 1 \(pid \d+\) is stopped"):
            step(workers, 1)
        assert time.monotonic() - began_s < LIMIT_S
        assert wait_until(lambda: not is_alive(workers.pids[1]))


@pytest.mark.slow
def test_workers_end_with_a_leader_that_is_terminated_and_leave_nothing(temporary):
    code = (
        "from quire.parallel.launch import spawn_workers; import time;"
        "w = spawn_workers('tests.parallel_worker', 3, {'do': 'work'});"
        "w.wait_ready(); print(*w.pids.values(), flush=True); time.sleep(60)"
    )
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment_with_quire())
    pids = [int(word) for word in leader.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(files_in_dev_shm(pid) for pid in (leader.pid, *pids))
    leader.terminate()
    leader.wait()
    leader.stdout.close()
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert not list(temporary.iterdir())


def can_mount():
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace")
def test_full_dev_shm_does_not_matter():
    code = (
        "import torch;"
        "from quire.parallel.launch import spawn_workers;"
        "w = spawn_workers('tests.parallel_worker', 2, {'do': 'work'});"
        "w.wait_ready(); w.memory.area('collectives.slots')[:] = 1; w.close(); print('done')"
    )
    script = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && dd if=/dev/zero of=/dev/shm/x bs=64k count=1 && exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, code]
    result = subprocess.run(command, env=environment_with_quire(), capture_output=True, text=True)
    assert result.stdout == "done\n", result.stderr


@pytest.mark.slow
def test_groups_start_at_the_same_moment():
    groups, errors = [], []

    def start():
        try:
            workers = spawn_workers(WORKER, 2, {"do": "gloo"}, LaunchOptions(with_store=True))
            groups.append(workers)
            TorchCommunicator.gloo(workers.store, 0, 2, interface="lo").all_reduce(torch.zeros(3))
            workers.wait_ready()
        except WorkerError as error:
            errors.append(error)
        done.wait()  # workers die with the thread that started them

    done = threading.Event()
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: len(errors) + sum(group.board.read(1).state == "ready" for group in groups) == len(threads), 120)
    try:
        assert not errors
        for group in groups:
            assert step(group, 2) == [6.0] * 5
    finally:
        for group in groups:
            group.close()
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("size", [0, 1, 65])
def test_sizes_that_cannot_be_are_refused(size):
    with pytest.raises(ConfigError, match="2 to 64"):
        SpawnedWorkers(WORKER, size, {}, LaunchOptions())


@pytest.mark.slow
def test_worker_that_nobody_started_says_so():
    result = subprocess.run(
        [sys.executable, "-m", WORKER], stdin=subprocess.DEVNULL, env=environment_with_quire(), capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "started by the leader of a group only" in result.stderr


def test_board_shows_what_ranks_said_last():
    group = SharedGroup(2, **StartupBoard.areas(2))
    board = StartupBoard(group.memory)
    assert board.read(1) == StartupStatus()
    reporter = StartupReporter(StartupBoard(group.memory), 1)
    reporter.stage("loading weights")
    status = board.read(1)
    assert (status.state, status.stage) == ("starting", "loading weights")
    assert status.describe(status.since_s + 40) == "loading weights for 40.0 s"
    reporter.failed(ModelFormatError("x" * 10000))
    assert board.read(1).error == ("ModelFormatError", "x" * 2000)
    assert board.read(0) == StartupStatus()


def test_board_is_never_read_half_written():
    group = SharedGroup(2, **StartupBoard.areas(2))
    board = StartupBoard(group.memory)

    def write(_):
        for number in itertools.cycle(range(1, 3001)):
            board.write(1, StartupStatus(stage=str(number) + "x" * number, since_s=float(number)))

    (pid,) = start_processes(1, write)
    seen = {}

    def has_seen_many():
        for _ in range(1000):
            status = board.read(1)
            seen[status.since_s] = status.stage
        return len(seen) > 100

    try:
        assert wait_until(has_seen_many)
    finally:
        os.kill(pid, signal.SIGKILL)
        statuses_of([pid])
    assert seen.pop(0.0, "starting Python") == "starting Python"
    assert all(stage == f"{number:.0f}" + "x" * int(number) for number, stage in seen.items())
