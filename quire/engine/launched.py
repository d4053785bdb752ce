"""What a process does that a launcher has made a worker of another process's engine."""

from __future__ import annotations

from quire.contracts.config import EngineConfig
from quire.worker.parallel_launch import serve_as_worker


def exit_if_worker(config: EngineConfig, health_address: tuple[str, int] | None = None) -> None:
    """Be a worker until rank 0 closes the group, and then raise SystemExit; return at once where no launcher (torchrun,
    LeaderWorkerSet) has made this process another rank than 0.

    health_address  (host, port) at which the worker serves /health; None: nowhere
    """
    status = serve_as_worker(config, health_address)
    if status is not None:
        raise SystemExit(status)
