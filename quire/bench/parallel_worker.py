"""The workers of `quire bench parallel`: `python -m quire.bench.parallel_worker`."""

from __future__ import annotations

import time

import numpy as np
import torch

from quire.bench.parallel import BARRIERS, IDLE, MESSAGES, RESULTS, STOP, SUMS
from quire.parallel.barrier import native_extension
from quire.parallel.launch import WorkerContext, run_worker


def main(context: WorkerContext) -> None:
    """Execute the leader's commands, until STOP."""
    torch.set_num_threads(1)
    native = native_extension()
    context.startup.ready()
    while True:
        message = context.ring.receive()
        assert message is not None  # no limit was given
        what, count, num_bytes = message.header[:3].tolist()
        if what == STOP:
            return
        if what == BARRIERS:
            native.time_barriers(context.barrier.address, context.rank, context.size, count)
        elif what == SUMS:
            x = torch.zeros(num_bytes // 4)
            for _ in range(count):
                context.communicator.all_reduce(x)
        elif what == MESSAGES:
            _receive_timed(context, count)
        elif what == IDLE:
            _wait_idle(context)


def _receive_timed(context: WorkerContext, count: int) -> None:
    """Record for each message the nanoseconds since before it was written; those of rank 1 are the results."""
    context.barrier.wait()
    times_ns = np.empty(count)
    for index in range(count):
        message = context.ring.receive()
        assert message is not None
        times_ns[index] = time.monotonic_ns() - int(message.arrays[0][0])
    if context.rank == 1:
        context.memory.area(RESULTS).view(np.float64)[:count] = times_ns
    context.barrier.wait()


def _wait_idle(context: WorkerContext) -> None:
    """Wait for one message, and record the share of a core that this process used meanwhile."""
    context.barrier.wait()
    began_s, used_s = time.monotonic(), time.process_time()
    context.ring.receive()
    share = (time.process_time() - used_s) / (time.monotonic() - began_s)
    if context.rank == 1:
        context.memory.area(RESULTS).view(np.float64)[0] = share
    context.barrier.wait()


if __name__ == "__main__":
    run_worker(main)
