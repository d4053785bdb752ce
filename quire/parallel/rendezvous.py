"""Rendezvous: the rank of this process according to its environment, how it meets the others, and whether all run the same."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.base.errors import ConfigError, WorkerError
from quire.base.logging import get_logger
from quire.parallel.communicator import Communicator

if TYPE_CHECKING:
    from torch.distributed import Store

logger = get_logger(__name__)

DEFAULT_PORT = 29500
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LWS = ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS")
REPORT_S = (10.0, 60.0)
"""Waiting times after which a rank that waits for another logs it."""
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rank of this process, the number of ranks, and the address of rank 0.

    local_rank     among the num_local_ranks ranks of this host; None: how many there are was not told
    is_store_made  the launcher has a store at the address already (torchrun's agent), so rank 0 makes none
    source         the origin of these values, for messages
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    is_store_made: bool = False
    source: str = "torchrun"
    num_local_ranks: int | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"{self.source}: rank must be from 0 to world size - 1, got rank {self.rank} of {self.world_size}"
            )
        if not 0 <= self.local_rank < self.world_size:
            raise ConfigError(f"{self.source}: local rank must be from 0 to {self.world_size - 1}, got {self.local_rank}")
        most = self.world_size - self.rank + self.local_rank
        if self.num_local_ranks is not None and not self.local_rank < self.num_local_ranks <= most:
            raise ConfigError(
                f"{self.source}: the number of ranks on this host must be above local rank {self.local_rank} and leave "
                f"room for rank {self.rank} in {self.world_size} ranks, got {self.num_local_ranks}"
            )
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"{self.source}: port must be from 1 to 65535, got {self.port}")
        if not self.address:
            raise ConfigError(f"{self.source}: the address of rank 0 is empty")


def read_environment(environment: Mapping[str, str] = os.environ) -> Rendezvous | None:
    """Return the settings of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) or of a
    LeaderWorkerSet (LWS_WORKER_INDEX, LWS_GROUP_SIZE, LWS_LEADER_ADDRESS); None if there are neither.

    Raises ConfigError if some variables are missing or not numbers. MASTER_PORT may be set in addition to LWS_*.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        _require("torchrun", _TORCHRUN, environment)
        rank = _number("RANK", environment)
        return Rendezvous(
            rank=rank,
            world_size=_number("WORLD_SIZE", environment),
            local_rank=_number("LOCAL_RANK", environment) if "LOCAL_RANK" in environment else 0,
            num_local_ranks=_number("LOCAL_WORLD_SIZE", environment) if "LOCAL_WORLD_SIZE" in environment else None,
            address=environment["MASTER_ADDR"],
            port=_number("MASTER_PORT", environment),
            is_store_made=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    if any(name in environment for name in _LWS):
        _require("LeaderWorkerSet", _LWS, environment)
        return Rendezvous(
            rank=_number("LWS_WORKER_INDEX", environment),
            world_size=_number("LWS_GROUP_SIZE", environment),
            local_rank=0,
            num_local_ranks=1,
            address=environment["LWS_LEADER_ADDRESS"],
            port=_number("MASTER_PORT", environment) if "MASTER_PORT" in environment else DEFAULT_PORT,
            source="LeaderWorkerSet",
        )
    return None


def _require(source: str, names: tuple[str, ...], environment: Mapping[str, str]) -> None:
    missing = [name for name in names if name not in environment]
    if missing:
        raise ConfigError(f"{source}: environment variables {', '.join(missing)} are missing; required: {', '.join(names)}")


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment[name]
    if not text.isdecimal() or not text.isascii():
        raise ConfigError(f"environment variable {name} must be a number >= 0, got {text!r}")
    return int(text)


def connect_store(rendezvous: Rendezvous, timeout_s: float = 600.0) -> Store:
    """Return the store of all ranks, which rank 0 creates unless the launcher has; the others wait for it.

    Unreachable addresses are logged after 10 s and after 60 s. Raises WorkerError after timeout_s.
    """
    from torch.distributed import TCPStore

    is_server = rendezvous.rank == 0 and not rendezvous.is_store_made
    if not is_server:
        _wait_for_server(rendezvous, timeout_s)
    try:
        return TCPStore(
            rendezvous.address,
            rendezvous.port,
            is_master=is_server,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        doing = "listen at" if is_server else "connect to"
        told = f"rank {rendezvous.rank} cannot {doing} {rendezvous.address}:{rendezvous.port}: {error}"
        raise WorkerError(told, rendezvous.rank) from error


def _wait_for_server(rendezvous: Rendezvous, timeout_s: float) -> None:
    began_s, num_reports = time.monotonic(), 0
    where = f"rank 0 at {rendezvous.address}:{rendezvous.port}"
    while True:
        try:
            socket.create_connection((rendezvous.address, rendezvous.port), timeout=5.0).close()
            return
        except OSError as error:
            waited_s = time.monotonic() - began_s
            if waited_s >= timeout_s:
                told = f"rank {rendezvous.rank} has not reached {where} ({rendezvous.source}) in {waited_s:.0f} s: {error}"
                raise WorkerError(told, rendezvous.rank) from error
            if num_reports < len(REPORT_S) and waited_s >= REPORT_S[num_reports]:
                num_reports += 1
                logger.warning("rank %d still tries to reach %s after %.0f s: %s", rendezvous.rank, where, waited_s, error)
            time.sleep(min(0.2, timeout_s / 10))


def check_fingerprints(communicator: Communicator, fields: Mapping[str, str]) -> None:
    """Compare what must be the same on all ranks: version, configuration, hash of the checkpoint, kind of device.

    Raises ConfigError on every rank, naming each rank that differs from rank 0, with both values.
    """
    own = np.frombuffer(json.dumps(dict(fields)).encode(), np.uint8).copy()
    sizes = torch.empty(communicator.size, dtype=torch.int64)
    communicator.all_gather(sizes, torch.tensor([own.size]))
    lengths = sizes.tolist()
    gathered = torch.empty(sum(lengths), dtype=torch.uint8)
    communicator.all_gather(gathered, torch.from_numpy(own), lengths)
    texts = [json.loads(part.numpy().tobytes()) for part in gathered.split(lengths)]
    differences = [
        f"rank {rank} has {name} {_shown(texts[rank].get(name))}, rank 0 {_shown(texts[0].get(name))}"
        for rank in range(1, communicator.size)
        for name in dict.fromkeys((*texts[0], *texts[rank]))
        if texts[rank].get(name) != texts[0].get(name)
    ]
    if differences:
        raise ConfigError(f"all ranks must run the same: {'; '.join(differences)}")


def _shown(value: str | None) -> str:
    return "none" if value is None else value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
