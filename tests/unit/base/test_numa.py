"""NUMA topologies in folders like those of sysfs, and the nodes of ranks in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.base import numa
from quire.base.errors import ConfigError
from quire.base.numa import (
    NumaNode,
    bind_rank_to_numa_node,
    choose_numa_node,
    choose_thread_places,
    describe_thread_places,
    find_thread_places,
    read_numa_nodes,
)

ALL = frozenset(range(64))


def make_topology(root: Path, cpulists: dict[int, str], has_memory: str | None) -> Path:
    for index, cpulist in cpulists.items():
        (root / f"node{index}").mkdir()
        (root / f"node{index}" / "cpulist").write_text(cpulist + "\n")
    if has_memory is not None:
        (root / "has_memory").write_text(has_memory + "\n")
    (root / "possible").write_text("0-63\n")
    return root


@pytest.mark.parametrize(
    ("cpulists", "has_memory", "expected"),
    [
        ({0: "0-1"}, "0", {0: {0, 1}}),
        ({0: "0-3,8-11", 1: "4-7,12-15"}, "0-1", {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}),
        ({0: "0", 10: "2", 2: "1"}, None, {0: {0}, 2: {1}, 10: {2}}),
        # Memory without cores (CXL, HBM), and cores without memory.
        ({0: "0-1", 1: "", 2: "2-3"}, "0-1", {0: {0, 1}}),
        ({}, None, {}),
    ],
    ids=["one", "two-sockets-smt", "gaps", "cpuless", "none"],
)
def test_nodes_are_those_with_cores_and_memory_when_read(tmp_path: Path, cpulists, has_memory, expected):
    nodes = read_numa_nodes(make_topology(tmp_path, cpulists, has_memory))
    assert [(node.index, node.cores) for node in nodes] == list(expected.items())


def nodes_of(*sizes: int) -> tuple[NumaNode, ...]:
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return tuple(NumaNode(place, frozenset(range(starts[place], starts[place] + size))) for place, size in enumerate(sizes))


@pytest.mark.parametrize(
    ("sizes", "usable", "threads", "expected"),
    [
        ((8, 8), ALL, (8, 8), [0, 1]),
        ((8, 8), ALL, (4, 4, 4, 4), [0, 0, 1, 1]),
        ((4, 4, 4, 4), ALL, (4, 4), [0, 1]),
        ((8, 8), ALL, (5, 5, 5), [None] * 3),  # two ranks of five threads on eight cores
        ((8, 8), ALL, (16,), [None]),  # one rank uses all cores
        ((16,), ALL, (8, 8), [None] * 2),
        ((8, 8), frozenset(range(8)), (4, 4), [None] * 2),  # a container, or numactl, leaves one node
        ((8, 8, 8), frozenset(range(8, 24)), (8, 8), [1, 2]),
        ((), ALL, (1, 1), [None] * 2),
    ],
)
def test_ranks_are_spread_over_nodes_when_each_has_enough_cores(sizes, usable, threads, expected):
    chosen = [choose_numa_node(nodes_of(*sizes), usable, rank, threads) for rank in range(len(threads))]
    assert [node and node.index for node in chosen] == expected
    assert all(node is None or node.cores <= usable for node in chosen)


def test_all_threads_are_bound_when_there_are_two_nodes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numa, "read_numa_nodes", lambda: nodes_of(4, 4))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    bound: dict[int, frozenset[int]] = {}
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    monkeypatch.setenv("QUIRE_NUMA", "0")
    assert bind_rank_to_numa_node(1, (4, 4)) is None
    assert not bound
    monkeypatch.delenv("QUIRE_NUMA")
    node = bind_rank_to_numa_node(1, (4, 4))
    assert node == NumaNode(1, frozenset({4, 5, 6, 7}))
    assert os.getpid() in bound
    assert set(bound.values()) == {node.cores}


@pytest.mark.parametrize(
    ("sizes", "usable", "num_threads", "expected"),
    [
        ((8, 8), ALL, 16, [0] * 8 + [1] * 8),
        ((8, 8), ALL, 4, [0, 0, 1, 1]),
        ((8, 8), ALL, 5, [0, 0, 0, 1, 1]),
        ((4, 12), ALL, 8, [0, 0] + [1] * 6),  # in proportion to the cores
        ((4, 4, 4), frozenset({0, 1, 4, 5, 6, 7}), 6, [0, 0, 1, 1, 1, 1]),  # a container has parts of two nodes
        ((16,), ALL, 16, []),
        ((8, 8), frozenset(range(8)), 8, []),
        ((8, 8), ALL, 17, []),
        ((8, 8), ALL, 1, []),
        ((), ALL, 4, []),
    ],
)
def test_threads_of_a_process_are_spread_over_nodes(sizes, usable, num_threads, expected):
    places = choose_thread_places(nodes_of(*sizes), usable, num_threads)
    assert [place.node for place in places] == expected
    assert all(place.cores <= usable for place in places)
    # No node has more threads than cores.
    assert all(sum(other.node == place.node for other in places) <= len(place.cores) for place in places)


def test_places_of_threads_are_described():
    places = choose_thread_places(nodes_of(4, 8), ALL, 6)
    assert describe_thread_places(places) == "threads 0-1 on node 0 (4 cores), 2-5 on node 1 (8 cores)"


def test_values_of_the_switch_are_checked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numa, "read_numa_nodes", lambda: nodes_of(4, 4))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert len(find_thread_places(8)) == 8
    monkeypatch.setenv("QUIRE_NUMA", "0")
    assert find_thread_places(8) == ()
    monkeypatch.setenv("QUIRE_NUMA", "off")
    with pytest.raises(ConfigError, match="QUIRE_NUMA must be 0 .* or 1 .*, got 'off'"):
        find_thread_places(8)
    with pytest.raises(ConfigError, match="QUIRE_NUMA"):
        bind_rank_to_numa_node(0, (4, 4))
