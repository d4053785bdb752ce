"""NUMA nodes of this machine, and the binding of a tensor-parallel rank, or of the threads of a single process, to them.

What is bound before it loads its weights has them on its node: Linux places a page where it is first written.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from quire.base.errors import ConfigError

logger = logging.getLogger(__name__)

_NODES = Path("/sys/devices/system/node")
_TASKS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A node with memory, and the cores next to it."""

    index: int
    cores: frozenset[int]


def read_numa_nodes(root: Path = _NODES) -> tuple[NumaNode, ...]:
    """Return the nodes that have cores and memory, by index; none where the system does not list them.

    root  the folder of the nodes in sysfs: node0/cpulist and so on, and has_memory with a list of indices
    """
    with_memory = _read_list(root / "has_memory")
    nodes: list[NumaNode] = []
    for folder in root.glob("node[0-9]*"):
        index, cores = int(folder.name.removeprefix("node")), _read_list(folder / "cpulist")
        if cores and (with_memory is None or index in with_memory):
            nodes.append(NumaNode(index, cores))
    return tuple(sorted(nodes, key=lambda node: node.index))


def choose_numa_node(
    nodes: tuple[NumaNode, ...], usable_cores: frozenset[int], rank: int, threads: tuple[int, ...]
) -> NumaNode | None:
    """Return the node of a rank, with those of its cores that may be used, or None if ranks should not be bound.

    Neighbouring ranks share a node if there are more ranks than nodes. Ranks are bound only if the cores of every node are
    enough for the threads of its ranks.

    threads  of each rank
    """
    usable = [NumaNode(node.index, node.cores & usable_cores) for node in nodes if node.cores & usable_cores]
    num_ranks, num_nodes = len(threads), min(len(usable), len(threads))
    if num_nodes < 2:
        return None
    places = [other * num_nodes // num_ranks for other in range(num_ranks)]
    for place, node in enumerate(usable[:num_nodes]):
        if sum(number for number, of_rank in zip(threads, places, strict=True) if of_rank == place) > len(node.cores):
            return None
    return usable[places[rank]]


class ThreadPlace(NamedTuple):
    """The node of a thread, and those of its cores that may be used."""

    node: int
    cores: frozenset[int]


def choose_thread_places(
    nodes: tuple[NumaNode, ...], usable_cores: frozenset[int], num_threads: int
) -> tuple[ThreadPlace, ...]:
    """Return the place of each thread of a process, or none if threads should not be bound: they would all have the same one,
    or there are more threads than cores.

    Neighbouring threads share a node, and the nodes have threads in proportion to their cores.
    """
    usable = [NumaNode(node.index, node.cores & usable_cores) for node in nodes if node.cores & usable_cores]
    by_core = [ThreadPlace(node.index, node.cores) for node in usable for _ in node.cores]
    if num_threads > len(by_core):
        return ()
    places = tuple(by_core[thread * len(by_core) // num_threads] for thread in range(num_threads))
    return places if len({place.node for place in places}) > 1 else ()


def find_thread_places(num_threads: int) -> tuple[ThreadPlace, ...]:
    """Return choose_thread_places for this machine and process; none with QUIRE_NUMA=0."""
    if not is_numa_used() or not hasattr(os, "sched_getaffinity"):
        return ()
    return choose_thread_places(read_numa_nodes(), frozenset(os.sched_getaffinity(0)), num_threads)


def describe_thread_places(places: tuple[ThreadPlace, ...]) -> str:
    """Return which threads are on which node, in words."""
    parts: list[str] = []
    for place, group in groupby(enumerate(places), key=lambda item: item[1]):
        threads = [thread for thread, _ in group]
        parts.append(f"{threads[0]}-{threads[-1]} on node {place.node} ({len(place.cores)} cores)")
    return "threads " + ", ".join(parts)


def is_numa_used() -> bool:
    """Return whether something may be bound to nodes: QUIRE_NUMA is not 0. Raises ConfigError if it is neither 0 nor 1."""
    value = os.environ.get("QUIRE_NUMA", "1")
    if value not in ("0", "1"):
        raise ConfigError(f"QUIRE_NUMA must be 0 (bind nothing to NUMA nodes) or 1 (the default), got {value!r}")
    return value == "1"


def bind_rank_to_numa_node(rank: int, threads: tuple[int, ...]) -> NumaNode | None:
    """Bind all threads of this process to the node of its rank, and return the node; None if nothing was bound.

    To be called before weights are loaded. QUIRE_NUMA=0 prevents it.

    threads  of each rank; all ranks are on this host
    """
    if not is_numa_used() or not hasattr(os, "sched_setaffinity"):
        return None
    node = choose_numa_node(read_numa_nodes(), frozenset(os.sched_getaffinity(0)), rank, threads)
    if node is None:
        return None
    bind_process(node.cores)
    logger.info("rank %d is bound to NUMA node %d with %d cores", rank, node.index, len(node.cores))
    return node


def bind_process(cores: frozenset[int]) -> None:
    """Bind all threads of this process to some cores. Without an effect where the system has no such call."""
    if not hasattr(os, "sched_setaffinity"):
        return
    for task in _TASKS.iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:  # the thread has ended
            logger.debug("thread %s ended before it could be bound", task.name)


def _read_list(path: Path) -> frozenset[int] | None:
    """Return the numbers of a list as the kernel writes them, such as 0-3,8; None where there is no such file."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
