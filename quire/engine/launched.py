"""The main function of a process that a launcher started as a worker of another process's engine."""

from __future__ import annotations

from quire.contracts.config import EngineConfig
from quire.worker.parallel_launch import failures_reported, serve_as_worker

__all__ = ["exit_if_worker", "failures_reported"]


def exit_if_worker(config: EngineConfig, health_address: tuple[str, int] | None = None) -> None:
    """Run a worker until rank 0 closes the group, then raise SystemExit. Return at once unless a launcher (torchrun,
    LeaderWorkerSet) started this process as a rank other than 0.

    health_address  (host, port) at which the worker serves /health; None: nowhere
    """
    status = serve_as_worker(config, health_address)
    if status is not None:
        raise SystemExit(status)
