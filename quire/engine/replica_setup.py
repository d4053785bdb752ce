"""replica_setups: divides a host's threads, memory and GPUs among replicas. Does not import torch."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from quire.base.errors import ConfigError
from quire.base.host_memory import available_memory_bytes
from quire.base.logging import get_logger
from quire.base.threads import num_usable_cores
from quire.contracts.config import EngineConfig

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """One replica.

    config       of this one replica, with its part of the divided resources
    environment  additional variables of its process
    """

    config: EngineConfig
    environment: dict[str, str]


def replica_setups(config: EngineConfig) -> list[ReplicaSetup]:
    """Divide threads, memory and GPUs among the replicas that a configuration asks for. Raises ConfigError.

    A configuration of one replica is returned as it is. Replicas on other hosts are for `quire serve` only.
    """
    if config.data_parallel_backend != "mp":
        raise ConfigError(
            f"data_parallel_backend is {config.data_parallel_backend!r}, which is for `quire serve` with one model: here the "
            "engines are processes of this host, 'mp'"
        )
    size = config.data_parallel_size
    if size == 1:
        threads = config.num_threads if config.data_parallel_threads is None else config.data_parallel_threads[0]
        return [ReplicaSetup(replace(config, num_threads=threads, data_parallel_threads=None), {})]
    threads_of, gpus_of = _divide_threads(config), _divide_gpus(config)
    num_bytes = (config.host_memory_bytes or available_memory_bytes()) // size
    return [
        ReplicaSetup(
            replace(
                config,
                data_parallel_size=1,
                data_parallel_threads=None,
                num_threads=num_threads,
                host_memory_bytes=max(1, num_bytes),
            ),
            environment,
        )
        for num_threads, environment in zip(threads_of, gpus_of, strict=True)
    ]


def _divide_threads(config: EngineConfig) -> tuple[int, ...]:
    """Return the threads of each replica: as configured, otherwise an equal part of num_threads or of the cores; at least
    one."""
    if config.data_parallel_threads is not None:
        return config.data_parallel_threads
    size, num_cores = config.data_parallel_size, num_usable_cores()
    total = config.num_threads or num_cores
    num_ranks = config.parallel.world_size
    num_processes = size * num_ranks
    if num_processes > total:
        logger.warning(
            "%d replicas of %d ranks have one thread each, more than the %d threads that were asked for (%d cores can be used)",
            size,
            num_ranks,
            total,
            num_cores,
        )
    most = _omp_threads() if config.num_threads is None else None
    each = [max(1, (index + 1) * total // size - index * total // size) for index in range(size)]
    return tuple(min(number, most or number) for number in each)


def _omp_threads() -> int | None:
    """Return OMP_NUM_THREADS, which torch would use in each process; None if it is not a number."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _divide_gpus(config: EngineConfig) -> list[dict[str, str]]:
    """Return the environment of each replica, which makes only its own GPUs visible; empty on CPUs."""
    size, num_ranks = config.data_parallel_size, config.parallel.world_size
    can_use = config.device == "cuda" or (config.device == "auto" and importlib.util.find_spec("triton") is not None)
    gpus = visible_gpus() if can_use else ()
    if not gpus and config.device != "cuda":
        return [{} for _ in range(size)]
    if len(gpus) < size * num_ranks:
        shown = f"{len(gpus)} ({', '.join(gpus)})" if gpus else "none"
        raise ConfigError(
            f"data_parallel_size is {size}, and every replica needs {num_ranks} GPU{'s' * (num_ranks > 1)} of its own, but the "
            f"visible GPUs are {shown}: lower data_parallel_size, show more in {VARIABLE}, or choose device='cpu'"
        )
    return [{VARIABLE: ",".join(gpus[index * num_ranks : (index + 1) * num_ranks])} for index in range(size)]


VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILE = re.compile(r"nvidia[0-9]+")


def visible_gpus(device_folder: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the names of the GPUs that CUDA makes visible to a process of this environment, as in CUDA_VISIBLE_DEVICES.

    These are indices, or the entries of the variable. As in CUDA, an index that does not exist hides all that follow it.
    """
    num_devices = sum(_DEVICE_FILE.fullmatch(name) is not None for name in os.listdir(device_folder))
    given = os.environ.get(VARIABLE)
    if num_devices == 0 or given is None:
        return tuple(map(str, range(num_devices)))
    found: list[str] = []
    for name in map(str.strip, given.split(",")):
        is_index = name.lstrip("-").isdecimal()
        if not name or (is_index and not 0 <= int(name) < num_devices):
            break
        found.append(name)
    return tuple(found)
