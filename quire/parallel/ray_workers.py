"""Workers as Ray actors: Ray only starts and ends them; messages and tokens do not pass through it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quire.base.errors import WorkerError
from quire.base.logging import get_logger
from quire.base.ray_modules import import_ray
from quire.parallel.joined_workers import join_group, lead_group
from quire.parallel.launch import WorkerContext
from quire.parallel.remote_workers import RemoteWorkers
from quire.parallel.rendezvous import Rendezvous
from quire.parallel.worker_group import LaunchOptions, WorkerGroup

if TYPE_CHECKING:
    from torch.distributed import TCPStore

logger = get_logger(__name__)

_PLACEMENT_TIMEOUT_S = 60.0
_THIS_NODE = 0.001
"""Amount of this node's own resource that a bundle requests; the resource exists only on this node."""


class RayWorkerActor:
    """A worker's process; made an actor by start_ray_workers."""

    def run(self, module: str, rendezvous: Rendezvous) -> int:
        """Run the rank of a rendezvous until the leader closes the group; return the status."""
        main: Callable[[WorkerContext], None] = importlib.import_module(module).main
        return join_group(rendezvous, main)


def start_ray_workers(module: str, size: int, config: Mapping[str, Any], options: LaunchOptions) -> WorkerGroup | RemoteWorkers:
    """Start ranks 1 to size - 1 as Ray actors on this node, and lead them; see spawn_workers.

    One placement group has a bundle for each rank; that of rank 0 reserves resources for this process. Raises UnsupportedError
    without Ray, WorkerError if this node has no room for all ranks.
    """
    names = "ray", "ray.util", "ray.util.scheduling_strategies"
    ray, _, strategies = import_ray("distributed_executor_backend='ray'", *names)
    placement = strategies.PlacementGroupSchedulingStrategy
    if not ray.is_initialized():
        ray.init(log_to_driver=True)
    node_id = ray.get_runtime_context().get_node_id()
    address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
    cores = max(1, math.floor(ray.cluster_resources().get("CPU", size) / max(1, len(ray.nodes())) / size))
    bundles = [{"CPU": cores, f"node:{address}": _THIS_NODE} for _ in range(size)]
    group = ray.util.placement_group(bundles, strategy="STRICT_PACK")
    if not group.wait(timeout_seconds=_PLACEMENT_TIMEOUT_S):
        ray.util.remove_placement_group(group)
        raise WorkerError(
            f"Ray has no room for {size} ranks of {cores} cores on this node ({address}) in {_PLACEMENT_TIMEOUT_S:.0f} s", 0
        )
    store = _make_store(address)
    actors: list[Any] = []
    results: list[Any] = []

    def check() -> None:
        """Raise the error of an actor that failed before its rank arrived."""
        for ended in ray.wait(results, num_returns=len(results), timeout=0)[0]:
            raise WorkerError(f"an actor of Ray has ended with status {ray.get(ended)} before its rank was there", 1)

    try:
        for rank in range(1, size):
            strategy = placement(placement_group=group, placement_group_bundle_index=rank)
            actor = ray.remote(RayWorkerActor).options(num_cpus=cores, scheduling_strategy=strategy).remote()
            actors.append(actor)
            results.append(actor.run.remote(module, _rendezvous(rank, size, address, store.port)))
        workers = lead_group(_rendezvous(0, size, address, store.port), config, options, store, check)
    except BaseException:
        _end(ray, actors, group)
        raise
    workers.on_end = lambda: _end(ray, actors, group)
    return workers


def _rendezvous(rank: int, size: int, address: str, port: int) -> Rendezvous:
    return Rendezvous(rank=rank, world_size=size, local_rank=rank, address=address, port=port, is_store_made=True, source="Ray")


def _end(ray: Any, actors: list[Any], group: Any) -> None:
    for actor in actors:
        ray.kill(actor, no_restart=True)
    ray.util.remove_placement_group(group)


def _make_store(address: str) -> TCPStore:
    from torch.distributed import TCPStore

    return TCPStore(address, 0, is_master=True, wait_for_workers=False)
