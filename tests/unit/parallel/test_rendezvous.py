"""Rendezvous: what launchers set, what is refused, and whether all ranks run the same."""

import logging
import socket
import subprocess
import sys
import threading

import pytest

from quire.base.environment import environment_with_quire
from quire.base.errors import ConfigError, WorkerError
from quire.kernels.native import load_native
from quire.parallel import rendezvous as module
from quire.parallel.joined_workers import join_group, refuse_group
from quire.parallel.rendezvous import DEFAULT_PORT, Rendezvous, check_fingerprints, connect_store, read_environment
from tests.ports import free_port
from tests.ranks import SharedGroup, run_threads, wait_until

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
LWS = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "leader.example"}


def test_torchrun():
    expected = Rendezvous(rank=3, world_size=4, local_rank=1, address="10.0.0.1", port=1234)
    assert read_environment(TORCHRUN) == expected
    agent = read_environment({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent.is_store_made
    assert read_environment({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}).num_local_ranks == 2


def test_leader_worker_set():
    expected = Rendezvous(
        rank=1,
        world_size=2,
        local_rank=0,
        address="leader.example",
        port=DEFAULT_PORT,
        source="LeaderWorkerSet",
        num_local_ranks=1,
    )
    assert read_environment(LWS) == expected
    assert read_environment({**LWS, "MASTER_PORT": "7"}).port == 7


def test_neither():
    assert read_environment({"MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "0"}) is None


@pytest.mark.parametrize(
    "environment, told",
    [
        ({"RANK": "0"}, "torchrun: environment variables WORLD_SIZE, MASTER_ADDR, MASTER_PORT are missing"),
        ({**TORCHRUN, "RANK": "4"}, "rank must be from 0 to world size - 1, got rank 4 of 4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK must be a number >= 0, got '-1'"),
        ({**TORCHRUN, "WORLD_SIZE": "x"}, "WORLD_SIZE must be a number"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "port must be from 1 to 65535, got 70000"),
        ({**TORCHRUN, "LOCAL_RANK": "9"}, "local rank"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, "number of ranks on this host must be above local rank 1"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, "leave room for rank 3 in 4 ranks, got 3"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "address of rank 0 is empty"),
        ({"LWS_GROUP_SIZE": "2"}, "LeaderWorkerSet: .*LWS_WORKER_INDEX, LWS_LEADER_ADDRESS are missing"),
    ],
)
def test_bad_environments_are_named(environment, told):
    with pytest.raises(ConfigError, match=told):
        read_environment(environment)


def of(rank, port):
    return Rendezvous(rank=rank, world_size=2, local_rank=rank, address="127.0.0.1", port=port)


def test_store_connects_ranks_also_where_the_leader_is_late(monkeypatch, caplog):
    monkeypatch.setattr(module, "REPORT_S", (0.2,))
    port, found = free_port(), []
    worker = threading.Thread(target=lambda: found.append(connect_store(of(1, port), 60)))
    with caplog.at_level(logging.WARNING, "quire"):
        worker.start()
        told = f"rank 1 still tries to reach rank 0 at 127.0.0.1:{port}"
        assert wait_until(lambda: told in caplog.text)
        assert not found
        leader = connect_store(of(0, port), 60)
        worker.join()
    leader.set("x", "1")
    assert found[0].get("x") == b"1"


def test_leader_that_never_comes_is_told_with_its_address():
    port = free_port()
    with pytest.raises(WorkerError, match=f"rank 1 has not reached rank 0 at 127.0.0.1:{port} .torchrun. in") as caught:
        connect_store(of(1, port), 0.3)
    assert caught.value.rank == 1


def test_ranks_that_wait_for_a_leader_that_cannot_begin_end_with_its_reason():
    port = free_port()
    ranks = [Rendezvous(rank, 3, rank, "127.0.0.1", port) for rank in range(3)]

    def join(rank):
        with pytest.raises(WorkerError, match=f"rank 0 at 127.0.0.1:{port} cannot begin: no such option"):
            join_group(ranks[rank], main=None, timeout_s=60)

    run_threads(3, lambda rank: join(rank) if rank else refuse_group(ranks[0], "no such option"))


def test_port_that_is_taken_is_told():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(WorkerError, match=f"rank 0 cannot listen at 127.0.0.1:{port}"):
            connect_store(of(0, port), 2)


ALIKE = {"version": "0.1.0", "config": "bf16", "checkpoint": "abc"}


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_ranks_that_differ_are_named_on_every_rank():
    group = SharedGroup(4)
    told = {1: {"checkpoint": "abd"}, 3: {"version": "0.2.0", "config": "f32"}}
    errors = []

    def body(rank):
        with pytest.raises(ConfigError) as caught:
            check_fingerprints(group.communicator(rank), {**ALIKE, **told.get(rank, {})})
        errors.append(str(caught.value))

    run_threads(4, body)
    assert len(errors) == 4
    assert set(errors) == {
        "all ranks must run the same: rank 1 has checkpoint abd, rank 0 abc; rank 3 has version 0.2.0, rank 0 0.1.0; "
        "rank 3 has config f32, rank 0 bf16"
    }


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_ranks_that_are_alike_go_on():
    for size in (1, 3):
        group = SharedGroup(size)
        run_threads(size, lambda rank, group=group: check_fingerprints(group.communicator(rank), ALIKE))


@pytest.mark.slow
def test_torchrun_starts_two_ranks(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, torch\n"
        "from quire.parallel.rendezvous import check_fingerprints, connect_store, read_environment\n"
        "from quire.parallel.torch_communicator import TorchCommunicator\n"
        "own = read_environment()\n"
        "group = TorchCommunicator.gloo(connect_store(own, 60), own.rank, own.world_size, interface='lo')\n"
        "check_fingerprints(group, {'version': '1'})\n"
        "x = torch.tensor([own.rank + 1.0])\n"
        "group.all_reduce(x)\n"
        "sys.stdout.write(f'sum {x.item()} of {own.world_size}\\n')\n"  # in one piece; print writes each part alone
        "group.barrier()\n"
        # A thread of gloo may release tensors while the interpreter ends, which aborts the process: known, not what is tested.
        "sys.stdout.flush()\n"
        "__import__('os')._exit(0)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    result = subprocess.run(command, env=environment_with_quire(), capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sum 3.0 of 2") == 2
