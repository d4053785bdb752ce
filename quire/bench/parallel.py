"""Communication between ranks of one host: barriers, sums, messages after idle time, and the cost of idle workers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire.base.errors import ConfigError
from quire.bench.provenance import Provenance, find_provenance
from quire.contracts.parallel import MAX_RANKS
from quire.kernels.native import load_native
from quire.parallel.launch import LaunchOptions, SpawnedWorkers, spawn_workers

WORKER_MODULE = "quire.bench.parallel_worker"
RESULTS = "bench.results"
MAX_SAMPLES = 20_000
STOP, BARRIERS, SUMS, MESSAGES, IDLE = range(5)
"""Commands to a worker, in the header of a message: (command, count, bytes)."""

_MESSAGE_ELEMENTS = 60  # with its header a message of the size of a step with 16 sequences
_WARM_UP = 200


@dataclass(frozen=True, slots=True)
class ParallelFigure:
    """One operation; times in microseconds, of the leader, or of the measured reader for messages.

    least_us, tenth_us  show the cost of the code even if others use the machine, median_us and p99_us the actual waiting times
    """

    operation: str
    num_ranks: int
    num_bytes: int
    idle_s: float
    least_us: float
    tenth_us: float
    median_us: float
    p90_us: float
    p99_us: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class ParallelRecord:
    """All results and their provenance. idle_share: of a core, used by one worker that waits for messages."""

    figures: tuple[ParallelFigure, ...]
    idle_share: float
    provenance: Provenance

    def describe(self) -> str:
        """Return a table."""
        lines = [
            f"{'operation':<12}{'ranks':>6}{'bytes':>8}{'idle s':>8}{'least':>9}{'p10':>9}{'median':>9}{'p90':>9}{'p99':>9}  us"
        ]
        for each in self.figures:
            times = (each.least_us, each.tenth_us, each.median_us, each.p90_us, each.p99_us)
            columns = "".join(f"{value:9.2f}" for value in times)
            lines.append(f"{each.operation:<12}{each.num_ranks:6d}{each.num_bytes:8d}{each.idle_s:8g}{columns}")
        lines.append(f"idle worker: {self.idle_share:.3%} of a core")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self), indent=1)


def figure_of(
    operation: str, num_ranks: int, num_bytes: int, times_ns: NDArray[np.float64], idle_s: float = 0
) -> ParallelFigure:
    """Return the figure of samples in nanoseconds."""
    least, tenth, median, p90, p99 = (np.percentile(times_ns, [0, 10, 50, 90, 99]) / 1e3).round(3).tolist()
    return ParallelFigure(operation, num_ranks, num_bytes, idle_s, least, tenth, median, p90, p99, times_ns.size)


def measure_parallel(
    ranks: Sequence[int] = (2, 4), num_samples: int = 5000, idle_s: Sequence[float] = (0.001,), idle_worker_s: float = 5.0
) -> ParallelRecord:
    """Measure groups of these numbers of processes in turn. Raises ConfigError.

    num_samples    barriers and sums; a hundredth of it messages after each idle time
    idle_s         seconds without a message before a measured one
    idle_worker_s  duration of the measurement of an idle worker's CPU time
    """
    for size in ranks:
        if not 2 <= size <= MAX_RANKS:
            raise ConfigError(f"ranks must be from 2 to {MAX_RANKS}, got {size}")
    if not 100 <= num_samples <= MAX_SAMPLES:
        raise ConfigError(f"num_samples must be from 100 to {MAX_SAMPLES}, got {num_samples}")
    figures: list[ParallelFigure] = []
    idle_share = 0.0
    for size in ranks:
        options = LaunchOptions(areas={RESULTS: 8 * MAX_SAMPLES})
        with spawn_workers(WORKER_MODULE, size, {}, options) as workers:
            workers.wait_ready()
            figures.extend(_measure_group(workers, num_samples))
            if size == min(ranks):
                figures.extend(_measure_messages(workers, seconds, max(10, num_samples // 100)) for seconds in idle_s)
                idle_share = _measure_idle(workers, idle_worker_s)
            workers.ring.send([STOP])
    return ParallelRecord(tuple(figures), idle_share, find_provenance())


def _measure_group(workers: SpawnedWorkers, count: int) -> list[ParallelFigure]:
    native = load_native()
    assert native is not None  # the barrier would have refused
    workers.ring.send([BARRIERS, _WARM_UP + count])
    times_ns = native.time_barriers(workers.barrier.address, 0, workers.size, _WARM_UP + count)
    workers.barrier.check()
    figures = [figure_of("barrier", workers.size, 0, np.array(times_ns[_WARM_UP:], np.float64))]
    for num_bytes in (8 << 10, 64 << 10):
        workers.ring.send([SUMS, _WARM_UP + count, num_bytes])
        x = torch.zeros(num_bytes // 4)
        samples: list[int] = []
        for _ in range(_WARM_UP + count):
            began_ns = time.perf_counter_ns()
            workers.communicator.all_reduce(x)
            samples.append(time.perf_counter_ns() - began_ns)
        figures.append(figure_of("all_reduce", workers.size, num_bytes, np.array(samples[_WARM_UP:], np.float64)))
    return figures


def _measure_messages(workers: SpawnedWorkers, idle_s: float, count: int) -> ParallelFigure:
    """Measure the time from before a message is written until its reader has decoded it; both processes share the clock."""
    workers.ring.send([MESSAGES, count])
    workers.barrier.wait()
    payload = np.zeros(_MESSAGE_ELEMENTS, np.int32)
    for _ in range(count):
        time.sleep(idle_s)
        workers.ring.send([MESSAGES], [np.array([time.monotonic_ns()]), payload])
    workers.barrier.wait()
    times_ns = workers.memory.area(RESULTS).view(np.float64)[:count].copy()
    return figure_of("message", workers.size, payload.nbytes, times_ns, idle_s)


def _measure_idle(workers: SpawnedWorkers, seconds: float) -> float:
    workers.ring.send([IDLE])
    workers.barrier.wait()
    time.sleep(seconds)
    workers.ring.send([IDLE])
    workers.barrier.wait()
    return float(workers.memory.area(RESULTS).view(np.float64)[0])
