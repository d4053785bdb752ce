"""RayLauncher: starts engines as actors of Ray, on any node of its cluster. No token passes through Ray."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.base.environment import environment_with_quire
from quire.base.errors import ConfigError
from quire.base.host_memory import available_memory_bytes
from quire.base.logging import get_logger
from quire.base.ray_modules import import_ray
from quire.contracts.config import EngineConfig
from quire.engine.replica_setup import ReplicaSetup
from quire.serving.engine_client.messages import Start
from quire.serving.engine_client.process import EXIT_FAILED, write_start

logger = get_logger(__name__)

_PATIENCE_S = 30.0
"""After it, a warning says that Ray has not placed an engine yet."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What an engine takes of its node."""

    num_cpus: int
    num_gpus: int

    def __str__(self) -> str:
        return f"{self.num_cpus} CPUs and {self.num_gpus} GPUs"

    def most_on(self, node: Mapping[str, float]) -> int:
        """Return how many such engines a node with these resources has room for; at least one."""
        rooms = [node.get("CPU", 0.0) // self.num_cpus]
        if self.num_gpus:
            rooms.append(node.get("GPU", 0.0) // self.num_gpus)
        return max(1, int(min(rooms)))


class EngineActor:
    """Holds the process of one engine, which ends with it; made an actor by RayLauncher."""

    def place(self) -> tuple[str, int]:
        """Return the address of the node, and the actor's process id."""
        ray = importlib.import_module("ray")
        return str(ray.util.get_node_ip_address()), os.getpid()

    def run(self, start: bytes, arguments: tuple[str, ...], environment: dict[str, str], resources: Resources) -> int:
        """Run an engine to its end and return its status, negative for a signal.

        start      a Start message. Without host_memory_bytes in its configuration the engine gets a part of what is free
        arguments  of this node's interpreter
        """
        message = msgspec.msgpack.decode(start, type=Start)
        ray = importlib.import_module("ray")
        node_id = ray.get_runtime_context().get_node_id()
        node = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
        host_memory_bytes = message.config.get("host_memory_bytes") or available_memory_bytes()
        config = {
            **message.config,
            "data_parallel_backend": "mp",
            "host_memory_bytes": max(1, host_memory_bytes // resources.most_on(node)),
        }
        variables = {**environment_with_quire(), **environment}
        # This method blocks, so that the thread that starts the process lives as long; the kernel ends it with that thread.
        process = subprocess.Popen((sys.executable, *arguments), stdin=subprocess.PIPE, env=variables, bufsize=0)
        if process.stdin is None:
            raise OSError("the engine's process has no standard input")
        process.stdin.write(write_start(msgspec.structs.replace(message, config=config, parent_pid=os.getpid())))
        return process.wait()


class RayProcess:
    """An actor as a process: what EngineProcess uses of subprocess.Popen."""

    stdin = None
    stdout = None

    def __init__(self, ray: Any, actor: Any, resources: Resources, *run: Any) -> None:
        """run: the arguments of EngineActor.run before the resources."""
        self.pid = 0  # until it is placed
        self._ray = ray
        self._actor = actor
        self._resources = resources
        self._placed: Any = actor.place.remote()
        self._result = actor.run.remote(*run, resources)
        self._warn_at_s = time.monotonic() + _PATIENCE_S
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the status of the engine, negative for a signal; None while it runs."""
        if self._status is None:
            self._note_placing()
            if self._ray.wait([self._result], timeout=0)[0]:
                self._status = self._read_status()
                self._ray.kill(self._actor)  # it would hold its resources
        return self._status

    def kill(self) -> None:
        """End the actor, and the engine with it."""
        if self._status is None:
            self._status = -signal.SIGKILL
            self._ray.kill(self._actor)

    def _read_status(self) -> int:
        errors = self._ray.exceptions
        try:
            return int(self._ray.get(self._result))
        except errors.RayActorError as error:
            logger.error("an engine's actor has ended: %s", error)
            return -signal.SIGKILL
        except errors.RayError as error:
            logger.error("an engine's actor has failed: %s", error)
            return EXIT_FAILED

    def _note_placing(self) -> None:
        if self._placed is None:
            return
        if self._ray.wait([self._placed], timeout=0)[0]:
            placed, self._placed = self._placed, None
            try:
                address, self.pid = self._ray.get(placed)
            except self._ray.exceptions.RayError as error:
                logger.debug("an engine was not placed: %s", error)  # its result has the error too
                return
            logger.info("Ray has placed an engine of %s at %s, process %d", self._resources, address, self.pid)
        elif time.monotonic() > self._warn_at_s:
            self._warn_at_s = float("inf")
            free = self._ray.available_resources()
            logger.warning(
                "Ray has not placed an engine of %s yet; free on all nodes together: %g CPUs and %g GPUs",
                *(self._resources, free.get("CPU", 0.0), free.get("GPU", 0.0)),
            )


class RayLauncher:
    """Connected to a cluster of Ray until this process ends."""

    def __init__(self, ray: Any, address: str) -> None:
        """Use `connect`. address: of this node."""
        self._ray = ray
        self.address = address

    @classmethod
    def connect(cls, *, shows_log: bool) -> RayLauncher:
        """Connect to the cluster of RAY_ADDRESS or of this host; where there is none, start one of this host.

        shows_log  print what engines log, here. Raises UnsupportedError without Ray, ConfigError if it cannot be reached.
        """
        (ray,) = import_ray("data_parallel_backend='ray'", "ray")
        if not ray.is_initialized():
            try:
                ray.init(log_to_driver=shows_log)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"Ray cannot be reached: {error}") from None
        return cls(ray, ray.util.get_node_ip_address())

    def setups(self, config: EngineConfig) -> list[ReplicaSetup]:
        """Return the configuration of each replica, with its threads. Raises ConfigError where there are fewer CPUs than
        replicas."""
        size = config.data_parallel_size
        threads: Sequence[int | None] = config.data_parallel_threads or [config.num_threads] * size
        if threads[0] is None and not self._num_gpus(config):
            cpus = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
            each = threads_of_each(cpus, size)
            if each == 0:
                raise ConfigError(
                    f"data_parallel_size is {size}, but Ray's nodes have {sum(cpus)} CPUs: lower it, add nodes, or set "
                    "num_threads to the CPUs of a replica to wait for nodes that come"
                )
            threads = [each] * size
        return [
            ReplicaSetup(replace(config, data_parallel_size=1, data_parallel_threads=None, num_threads=number), {})
            for number in threads
        ]

    def launch(self, start: Start, command: tuple[str, ...], environment: Mapping[str, str]) -> RayProcess:
        """Return an engine that Ray starts as soon as a node has room; see Launcher."""
        config = EngineConfig(**start.config)
        resources = Resources(config.num_threads or 1, self._num_gpus(config))
        options = {"num_cpus": resources.num_cpus, "num_gpus": resources.num_gpus, "scheduling_strategy": "SPREAD"}
        actor = self._ray.remote(EngineActor).options(**options).remote()
        return RayProcess(self._ray, actor, resources, msgspec.msgpack.encode(start), command[1:], dict(environment))

    def _num_gpus(self, config: EngineConfig) -> int:
        """Return how many GPUs a replica takes."""
        has_gpus = config.device == "auto" and self._ray.cluster_resources().get("GPU", 0) >= 1
        return config.parallel.world_size if config.device == "cuda" or has_gpus else 0


def threads_of_each(cpus: Sequence[int], size: int) -> int:
    """Return the most CPUs that each of `size` replicas can have, on nodes with so many; 0 if some would have none."""
    return next((each for each in range(max(cpus, default=0), 0, -1) if sum(one // each for one in cpus) >= size), 0)
