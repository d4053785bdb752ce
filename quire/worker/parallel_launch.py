"""Who starts the ranks of a group (this process, a launcher, or Ray), and what all ranks must have alike."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import quire
from quire.base.errors import ConfigError, QuireError, UnsupportedError, WorkerError
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.model.resolve import resolve_model
from quire.parallel.barrier import native_extension
from quire.parallel.joined_workers import join_group, lead_group, refuse_group
from quire.parallel.launch import spawn_workers
from quire.parallel.ray_workers import start_ray_workers
from quire.parallel.remote_workers import RemoteWorkers
from quire.parallel.rendezvous import Rendezvous, read_environment
from quire.parallel.worker_group import LaunchOptions, WorkerGroup
from quire.worker.device.device_select import choose_device
from quire.worker.worker_health import with_health

logger = get_logger(__name__)

WORKER_MODULE = "quire.worker.parallel_worker"

_OF_EACH_HOST = (
    "model",
    "tokenizer",
    "revision",
    "num_threads",
    "tile_table",
    "distributed_executor_backend",
    "distributed_start_timeout_s",
    *("expert_placement", "expert_load", "save_expert_load", "save_expert_placement"),  # only the leader has these files
)
"""Options that may differ between ranks."""

_HEAD_BYTES = 64 << 10
_CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.gguf")


def launched_group(config: EngineConfig, environment: Mapping[str, str] = os.environ) -> Rendezvous | None:
    """Return which rank a launcher has made of this process; None where the leader starts the others itself.

    Raises ConfigError where the launcher has started another number of processes than the configuration has ranks, or ranks
    that only the leader can start: those of several replicas, and of groups that divide prompts.
    """
    size = config.parallel.world_size
    if size == 1 or config.distributed_executor_backend is not None:
        return None
    rendezvous = read_environment(environment)
    if rendezvous is None or rendezvous.world_size == 1:
        return None
    _check_launchable(config, f"{rendezvous.source} has started {rendezvous.world_size} processes, but")
    if rendezvous.world_size != size:
        sizes = ("prefill_context_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")
        names = [name for name in sizes if getattr(config, name) > 1]
        name = " * ".join(names)
        raise ConfigError(
            f"{rendezvous.source} has started {rendezvous.world_size} processes, but {name} asks for {size} "
            "ranks; start as many processes, or give distributed_executor_backend='spawn' to start the ranks from each"
        )
    return rendezvous


def check_backend(config: EngineConfig) -> None:
    """Raise ConfigError where Ray is asked to start ranks that only the leader can start."""
    if config.distributed_executor_backend != "ray":
        return
    if config.parallel.world_size == 1:
        raise ConfigError("distributed_executor_backend is 'ray', but there is one rank only: leave it out, or raise -tp")
    _check_launchable(config, "distributed_executor_backend is 'ray', but")


def _check_launchable(config: EngineConfig, reason: str) -> None:
    """Raise ConfigError where another than the leader is to start ranks that only the leader can start."""
    device = choose_device(config)
    for what, is_there in (
        (f"the ranks of several replicas (data_parallel_size {config.data_parallel_size})", config.data_parallel_size > 1),
        (f"ranks on GPUs (device {device})", device is not None and config.distributed_executor_backend is not None),
        (
            f"groups that divide prompts (prefill_context_parallel_size {config.prefill_context_parallel_size})",
            config.prefill_context_parallel_size > 1 and (config.tensor_parallel_size > 1 or device is not None),
        ),
    ):
        if is_there:
            raise ConfigError(
                f"{reason} {what} are started by the leader only: start one process, without a launcher, or give "
                "distributed_executor_backend='spawn'"
            )


def serve_as_worker(config: EngineConfig, health_address: tuple[str, int] | None = None) -> int | None:
    """Be a worker until rank 0 closes the group, and return the status to exit with, where a launcher has made this process
    another rank than 0. Returns None at once in every other process. Raises ConfigError and WorkerError.

    health_address  (host, port) at which the worker serves /health; None: nowhere
    """
    rendezvous = launched_group(config)
    if rendezvous is None or rendezvous.rank == 0:
        return None
    # They import this module's neighbours.
    if choose_device(config) is not None:
        from quire.worker.device.gpu_worker import main
    elif config.pipeline_parallel_size > 1:
        from quire.worker.pipeline_worker import main
    else:
        from quire.worker.parallel_worker import main

    if health_address is not None:
        main = with_health(main, *health_address)
    return join_group(rendezvous, main, own=config)


@contextmanager
def failures_reported(config: EngineConfig) -> Iterator[None]:
    """If the block ends with a QuireError before the group has begun, tell the ranks that a launcher has started, and that wait
    for this one, rank 0."""
    try:
        yield
    except QuireError as error:
        rendezvous = launched_group(config)
        if rendezvous is not None:
            logger.error("rank 0 cannot begin, which the other ranks are told: %s", error)
            try:
                refuse_group(rendezvous, str(error))
            except WorkerError as unreachable:  # the group has begun, and its store has not ended yet
                logger.debug("the other ranks were not told: %s", unreachable)
        raise


def launch_options(config: EngineConfig, **more: Any) -> LaunchOptions:
    """Return how the workers of a configuration are started; more: other fields of LaunchOptions."""
    return LaunchOptions(
        start_timeout_s=config.distributed_start_timeout_s, watchdog_timeout_s=config.distributed_timeout_s, **more
    )


def start_workers(
    config: EngineConfig, rank_config: dict[str, Any], options: LaunchOptions, module: str = WORKER_MODULE
) -> WorkerGroup | RemoteWorkers:
    """Start the workers of the configuration's group, or wait for those that a launcher has started; this process is rank 0.

    module  run by those that are started, see spawn_workers
    """
    rendezvous = launched_group(config)
    if rendezvous is not None:
        if rendezvous.rank != 0:
            raise WorkerError(f"this process is rank {rendezvous.rank}: the engine runs on rank 0", rendezvous.rank)
        return lead_group(rendezvous, rank_config, options)
    if config.distributed_executor_backend == "ray":
        return start_ray_workers(module, config.parallel.world_size, rank_config, options)
    return spawn_workers(module, config.parallel.world_size, rank_config, options)


# What all ranks must have alike


def config_fields(config: EngineConfig) -> dict[str, str]:
    """Return the options that must be the same on all ranks, as text."""
    return {
        field.name: repr(getattr(config, field.name)) for field in dataclasses.fields(config) if field.name not in _OF_EACH_HOST
    }


def fingerprint(folder: Path, fields: Mapping[str, str]) -> dict[str, str]:
    """Return what check_fingerprints compares: versions, the checkpoint, the options."""
    return {
        "version": quire.__version__,
        "kernels": _kernel_version(),
        "checkpoint": checkpoint_hash(folder),
        **{f"option {name}": value for name, value in sorted(fields.items())},
    }


def own_fingerprint(own: Any, folder: Path, fields: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's fingerprint: of its own configuration where a launcher has started it with one."""
    if isinstance(own, EngineConfig):
        return fingerprint(resolve_model(own.model, own.revision), config_fields(own))
    return fingerprint(folder, fields)


def _kernel_version() -> str:
    """Return the hash of the native kernels and the instruction set that they use here: other ones may round differently."""
    native = native_extension()
    if native.__file__ is None:
        raise UnsupportedError("the native kernels have no file")
    digest = hashlib.sha256(Path(native.__file__).read_bytes()).hexdigest()[:16]
    return f"{digest} {native.isa()}"


def checkpoint_hash(folder: Path) -> str:
    """Return a hash of a checkpoint's configuration and index, and of the names, sizes and heads of its files of weights."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _CHECKPOINT_FILES for path in _files(folder, pattern)}):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
    return digest.hexdigest()[:16]


def _files(folder: Path, pattern: str) -> list[Path]:
    return [folder] if folder.is_file() else list(folder.glob(pattern))
