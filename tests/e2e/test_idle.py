"""A server without work: what its processes take of the processor."""

import os
import time
from pathlib import Path

import pytest

from tests.e2e.server_process import serving
from tests.e2e.wire import completion

IDLE_S = 5
MAX_CPU_MS = 250  # in that time, of each process: a loop that spins takes 5,000


def cpu_ms(pid):
    """Return the processor time that a process has had, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_processes_without_work_sleep():
    """The default server and one with two threads, at the same time."""
    with serving() as default, serving("--no-page", "--num-threads", "2") as threads:
        pids = {}
        for name, server in (("default", default), ("threads", threads)):
            pids |= {f"{name} http": server.process.pid, f"{name} engine": server.engine_pid()}
            for stream in (False, True):
                assert server.post("/v1/completions", completion(64, stream=stream)).status_code == 200
            server.wait_for(server.is_idle)
        time.sleep(1)  # threads spin for a while before they sleep
        before = {name: cpu_ms(pid) for name, pid in pids.items()}
        time.sleep(IDLE_S)
        taken = {name: cpu_ms(pid) - before[name] for name, pid in pids.items()}
        print(taken)
        assert all(value > 0 for value in before.values())
        assert all(value <= MAX_CPU_MS for value in taken.values()), taken
