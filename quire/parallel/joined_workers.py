"""Groups whose processes a launcher has started (torchrun, LeaderWorkerSet, Ray): rank 0 leads the others.

All ranks meet at a store of torch.distributed. Ranks of one host then share rank 0's memory; if they are on several hosts, they
exchange messages over TCP and rows over gloo, see remote_workers.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.errors import WorkerError
from quire.base.logging import get_logger, setup_logging
from quire.parallel.launch import WorkerContext, WorkerStart, open_descriptor_of, run_attached
from quire.parallel.remote_workers import RemoteStart, RemoteWorkers, run_remote
from quire.parallel.rendezvous import REPORT_S, Rendezvous, connect_store
from quire.parallel.shared_memory import SharedMemoryFile
from quire.parallel.worker_group import JoinedProcess, LaunchOptions, WorkerGroup

if TYPE_CHECKING:
    from torch.distributed import Store

logger = get_logger(__name__)

_POLL_S = 0.02
_INVITATION = "group"


@dataclass(frozen=True, slots=True)
class Member:
    """The process of a rank.

    host_key  equal for processes that can share memory and see each other: the same kernel, pid namespace and network namespace
    host      its name, for messages
    """

    rank: int
    pid: int
    host_key: str
    host: str

    @classmethod
    def own(cls, rank: int) -> Member:
        """Return the member for this process."""
        return cls(rank, os.getpid(), host_key(), socket.gethostname())


def host_key() -> str:
    """Return a key that is equal for processes which can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net"))])


def lead_group(
    rendezvous: Rendezvous,
    config: Mapping[str, Any],
    options: LaunchOptions,
    store: Store | None = None,
    check: Callable[[], None] | None = None,
) -> JoinedWorkers | RemoteWorkers:
    """Act as rank 0: wait for all ranks, and send them their configuration. Raises WorkerError.

    config  the workers' configuration: JSON
    store   where they meet; None: at the address of the rendezvous
    check   called while ranks are missing; raises if one of them will not come
    """
    store = _open_store(rendezvous, options.start_timeout_s, store)
    members = _wait_for_members(store, rendezvous, options.start_timeout_s, check)
    if len({member.host_key for member in members}) == 1:
        return JoinedWorkers(members, config, options, store)
    hosts = ", ".join(f"rank {member.rank} on {member.host}" for member in members)
    logger.info("the ranks are on several hosts: %s", hosts)
    keys = [member.host_key for member in members]
    return RemoteWorkers(
        rendezvous,
        [member.host for member in members],
        [member.pid for member in members],
        [keys.count(key) for key in keys],
        config,
        options,
        store,
    )


def join_group(rendezvous: Rendezvous, main: Callable[[WorkerContext], None], own: Any = None, timeout_s: float = 900.0) -> int:
    """Act as a rank other than 0 until the leader closes the group; return the exit status.

    main  see run_worker; own: passed to its context, such as this process's own configuration

    Raises WorkerError if rank 0 cannot be reached, or says that it cannot begin. Until this process has joined, a
    stopped rank 0 (SIGSTOP) is treated like one that has not started yet.
    """
    store = _open_store(rendezvous, timeout_s, None)
    invitation = json.loads(_wait_for_key(store, _INVITATION, rendezvous, timeout_s))
    if invitation["kind"] == "refused":
        store.set(f"heard/{rendezvous.rank}", "")
        raise WorkerError(f"rank 0 at {rendezvous.address}:{rendezvous.port} cannot begin: {invitation['reason']}", 0)
    setup_logging(invitation["start"]["log_level"])
    if invitation["kind"] == "remote":
        return run_remote(main, RemoteStart(**invitation["start"]), store, rendezvous, own)
    start = WorkerStart(**{**invitation["start"], "rank": rendezvous.rank})
    memory = SharedMemoryFile(open_descriptor_of(start.parent_pid, start.descriptor))
    return run_attached(main, start, memory, start.parent_pid, own, store, rendezvous.local_rank)


def refuse_group(rendezvous: Rendezvous, reason: str, timeout_s: float = 30.0) -> None:
    """Tell the other ranks, as rank 0, that no group will begin, and why; does nothing if it has begun.

    Returns when all have heard it, or after timeout_s: a rank that comes later finds nobody.
    """
    store = _open_store(rendezvous, timeout_s, None)
    if store.check([_INVITATION]):
        return
    store.set(_INVITATION, json.dumps({"kind": "refused", "reason": reason}))
    heard = [f"heard/{rank}" for rank in range(1, rendezvous.world_size)]
    began_s = time.monotonic()
    while not store.check(heard) and time.monotonic() - began_s < timeout_s:
        time.sleep(_POLL_S)


def _open_store(rendezvous: Rendezvous, timeout_s: float, store: Store | None) -> Store:
    """Return the store, after publishing where this rank runs."""
    from torch.distributed import PrefixStore

    # torchrun's own store outlives the processes that it restarts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"quire/{attempt}", connect_store(rendezvous, timeout_s) if store is None else store)
    store.set(f"member/{rendezvous.rank}", json.dumps(dataclasses.asdict(Member.own(rendezvous.rank))))
    return store


def _wait_for_members(store: Store, rendezvous: Rendezvous, timeout_s: float, check: Callable[[], None] | None) -> list[Member]:
    began_s, num_reports = time.monotonic(), 0
    while True:
        missing = [rank for rank in range(rendezvous.world_size) if not store.check([f"member/{rank}"])]
        if not missing:
            return [Member(**json.loads(store.get(f"member/{rank}"))) for rank in range(rendezvous.world_size)]
        if check is not None:
            check()
        waited_s = time.monotonic() - began_s
        named = f"rank {', '.join(map(str, missing))} of {rendezvous.world_size}"
        where = f"{rendezvous.address}:{rendezvous.port} ({rendezvous.source})"
        if waited_s >= timeout_s:
            raise WorkerError(f"{named} has not come to {where} in {waited_s:.0f} s", missing[0])
        if num_reports < len(REPORT_S) and waited_s >= REPORT_S[num_reports]:
            num_reports += 1
            logger.warning("rank 0 has waited %.0f s at %s for %s", waited_s, where, named)
        time.sleep(_POLL_S)


def _wait_for_key(store: Store, key: str, rendezvous: Rendezvous, timeout_s: float) -> bytes:
    began_s = time.monotonic()
    try:
        while not store.check([key]):
            if time.monotonic() - began_s >= timeout_s:
                raise WorkerError(
                    f"rank {rendezvous.rank} has waited {timeout_s:.0f} s for rank 0 at "
                    f"{rendezvous.address}:{rendezvous.port} to begin",
                    rendezvous.rank,
                )
            time.sleep(_POLL_S)
        return store.get(key)
    except RuntimeError as error:  # the store has ended with rank 0, which says why
        raise WorkerError(f"rank 0 at {rendezvous.address}:{rendezvous.port} has ended before the group began", 0) from error


class JoinedWorkers(WorkerGroup):
    """Workers of this host that a launcher has started. They map the leader's memory through /proc."""

    def __init__(self, members: list[Member], config: Mapping[str, Any], options: LaunchOptions, store: Store) -> None:
        super().__init__(len(members), options)
        self.store = store
        try:
            for member in members[1:]:
                self._processes[member.rank] = JoinedProcess(member.pid)
                self._monitor.watch(member.rank, member.pid)
            self._monitor.start()
            start = WorkerStart(
                rank=0,
                size=self.size,
                descriptor=self.memory.descriptor,
                parent_pid=os.getpid(),
                session=self.session,
                log_level=options.log_level,
                watchdog_timeout_s=options.watchdog_timeout_s,
                store_port=None,
                config=dict(config),
                subgroups=dict(options.subgroups),
            )
            store.set(_INVITATION, json.dumps({"kind": "shared", "start": dataclasses.asdict(start)}))
        except BaseException:
            self.kill()
            raise
