"""Threads of a single process on simulated NUMA nodes: what is bound, and what `quire inspect` and the log say of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

from quire.base import numa
from quire.base.numa import NumaNode
from quire.cli.main import main
from quire.kernels.native import load_native
from quire.worker import build

native = load_native()
pytestmark = pytest.mark.skipif(native is None, reason="the native kernels are not built")


@pytest.fixture
def two_nodes(monkeypatch):
    """Two nodes with the cores of this machine, which may be one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    nodes = NumaNode(0, frozenset(cores[:1])), NumaNode(1, frozenset(cores[1:]))
    monkeypatch.setattr(numa, "read_numa_nodes", lambda: nodes)
    yield nodes
    native.bind_threads([])


@pytest.fixture
def two_threads():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


def cores_of_threads():
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread of another test ended meanwhile
            found.append(os.sched_getaffinity(int(task.name)))
    return found


def packed_result():
    """Return the product of a weight that several threads pack, in pieces of its rows."""
    weight, x = torch.arange(400.0 * 24).reshape(400, 24), torch.ones(1, 24)
    packed, out = native.Weight("f32", 400, 24), torch.full((1, 400), float("nan"))
    for first, count in ((0, 208), (208, 192)):
        packed.pack(weight[first:].data_ptr(), 24, first, count, num_threads=2)
    native.linear(packed, None, x.data_ptr(), 24, 1, out.data_ptr(), 400, num_threads=2)
    return out


def test_threads_are_bound_and_pack_all_rows_when_there_are_two_nodes(two_nodes, two_threads, caplog):
    own, expected = os.sched_getaffinity(0), packed_result()
    with caplog.at_level("INFO", logger="quire"):
        build.bind_threads(True)
    assert "threads 0-0 on node 0 (1 cores), 1-1 on node 1" in caplog.text
    assert torch.equal(packed_result(), expected)
    assert set(two_nodes[1].cores) in cores_of_threads()
    assert os.sched_getaffinity(0) == own  # the calling thread is bound only while a team runs
    num_bound = cores_of_threads().count(set(two_nodes[1].cores))
    build.bind_threads(False)
    assert torch.equal(packed_result(), expected)
    assert cores_of_threads().count(set(two_nodes[1].cores)) == num_bound - 1


@pytest.mark.parametrize("cores", [[[0], []], [[0], [100000]], [[0], [-1]]])
def test_bindings_that_are_not_possible_are_refused(cores):
    assert native.bind_threads(cores) is False


def test_inspect_says_what_is_bound(two_nodes, two_threads, tiny_model, capsys, monkeypatch):
    argv = ["inspect", str(tiny_model), "--num-kv-blocks", "8", "--device", "cpu"]
    assert main(argv) == 0
    assert "numa        threads 0-0 on node 0 (1 cores), 1-1 on node 1" in capsys.readouterr().out
    monkeypatch.setenv("QUIRE_NUMA", "0")
    assert main(argv) == 0
    assert "numa" not in capsys.readouterr().out
