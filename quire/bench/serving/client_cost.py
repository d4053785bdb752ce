"""Cost of the load generator itself: CPU time, the lag of its event loop, and the server's CPU time for comparison."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import ConfigError

_TICK_S = 0.05


class LagMeter:
    """Sleeps repeatedly and records how late the event loop woke up, which bounds the error of time stamps. Seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lags_s: list[float] = []
        self._clock = clock

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = self._clock() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.lags_s.append(max(0.0, self._clock() - due))


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds of this process, and of the server's processes if they are known.

    server_s      of these and all their descendants
    front_end_s   of these processes only: for quire everything except the engine
    """

    client_s: float
    server_s: float | None = None
    front_end_s: float | None = None

    def since(self, before: CpuTimes) -> CpuTimes:
        """Return what was used after `before`."""
        return CpuTimes(
            self.client_s - before.client_s,
            _difference(self.server_s, before.server_s),
            _difference(self.front_end_s, before.front_end_s),
        )


def read_cpu_times(server_pids: tuple[int, ...] = (), proc: Path = Path("/proc")) -> CpuTimes:
    """Return the CPU time used so far; the server's is that of its processes and all their descendants.

    Raises ConfigError for a process that does not exist, and without /proc.
    """
    if not server_pids:
        return CpuTimes(time.process_time())
    ticks_s = 1.0 / os.sysconf("SC_CLK_TCK")
    stats = _read_stats(proc)
    missing = [pid for pid in server_pids if pid not in stats]
    if missing:
        raise ConfigError(f"--server-pid {missing[0]}: there is no such process in {proc}")
    family = _with_descendants(server_pids, {pid: parent for pid, (parent, _) in stats.items()})
    whole_s, front_end_s = (ticks_s * sum(stats[pid][1] for pid in pids) for pids in (family, dict.fromkeys(server_pids)))
    return CpuTimes(time.process_time(), whole_s, front_end_s)


def _difference(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before


def _read_stats(proc: Path) -> dict[int, tuple[int, int]]:
    """Return parent and clock ticks (user and system, of the process and of children that have ended) of every process."""
    stats = {}
    for folder in proc.glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text()
        except OSError:
            continue  # it has ended meanwhile
        fields = text.rpartition(")")[2].split()  # the name before may contain spaces and parentheses
        stats[int(folder.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    return stats


def _with_descendants(roots: tuple[int, ...], parents: dict[int, int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = dict.fromkeys(roots)
    queue = list(found)
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in found:
                found[child] = None
                queue.append(child)
    return list(found)
