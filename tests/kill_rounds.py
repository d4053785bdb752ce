"""Kills ranks again and again: `python -m tests.kill_rounds SEED NUM_ROUNDS` writes one line of JSON for each round.

A round forks the ranks of a group from this process, which has loaded everything but no model, so that it takes a second. The
ranks find each other as those of torchrun do.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time

from quire import LLM, SamplingParams
from quire.engine import llm_engine  # noqa: F401 - loaded before the fork
from quire.worker import parallel_launch, parallel_worker  # noqa: F401
from tests.ports import free_port

STATES = {"g": "loading", "r": "ready", "s": "step", "i": "idle"}
NOTICE_S = 30.0
"""Within which all other ranks have to end, on a machine that others use, too. The watchdog would end them after minutes."""


def _run_rank(rank: int, size: int, port: int, told: int) -> None:
    """Be a rank until the group ends; rank 0 tells by a letter what it does."""
    address = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in address.items()})
    lead_group = parallel_launch.lead_group

    def lead(*args):
        group = lead_group(*args)
        # A leader that is stopped before its workers have joined is one that has not begun: they wait for it.
        while not all(group.barrier.pid(rank) for rank in range(1, size)):
            time.sleep(0.001)
        os.write(told, b"g")
        return group

    parallel_launch.lead_group = lead
    llm = LLM("demo", tensor_parallel_size=size, num_threads=1, num_kv_blocks=64, max_num_seqs=2)
    os.write(told, b"r")
    while True:
        os.write(told, b"s")
        llm.generate(["Once upon a time"], SamplingParams(max_tokens=24, ignore_eos=True), use_tqdm=False)
        os.write(told, b"i")
        for _ in range(5):
            time.sleep(0.02)
            llm.llm_engine.check_health()


def _fork(*args: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        silent = os.open(os.devnull, os.O_RDWR)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        _run_rank(*args)
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        os._exit(status)


def _wait_for(letter: str, pipe: int, limit_s: float) -> str:
    """Return the last letter that was told, when the one that is wanted has come."""
    last, end_s = "", time.monotonic() + limit_s
    while last != letter and time.monotonic() < end_s:
        if select.select([pipe], [], [], 0.05)[0]:
            letters = os.read(pipe, 64).decode()
            if not letters:
                break
            last = letter if letter in letters else letters[-1]
    return last


def play(seed: int) -> dict[str, object]:
    """Play one round; return what was killed and how long the other ranks took to end."""
    choose = random.Random(seed)
    size, letter = choose.choice((2, 2, 3)), choose.choice("grssi")
    victim = choose.randrange(size)
    sent = choose.choice((signal.SIGKILL,) * 7 + (signal.SIGSTOP,))
    read, write = os.pipe()
    port = free_port()
    pids = [_fork(rank, size, port, write) for rank in range(size)]
    os.close(write)
    last = _wait_for(letter, read, 120)
    time.sleep(choose.random() * (0.3 if letter == "g" else 0.05))
    os.kill(pids[victim], sent)
    began_s, statuses = time.monotonic(), {}
    while len(statuses) < size - 1 and time.monotonic() - began_s < NOTICE_S:
        for rank, pid in enumerate(pids):
            if rank != victim and rank not in statuses and os.waitpid(pid, os.WNOHANG)[0]:
                statuses[rank] = time.monotonic() - began_s
        time.sleep(0.005)
    for rank, pid in enumerate(pids):
        if rank not in statuses:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    os.close(read)
    slowest_s = max(statuses.values()) if len(statuses) == size - 1 else None
    told = STATES.get(last, "starting")
    return {"seed": seed, "size": size, "victim": victim, "signal": sent.name, "state": told, "slowest_s": slowest_s}


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for number in range(first, first + count):
        print(json.dumps(play(number)), flush=True)
