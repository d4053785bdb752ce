"""How the processes of pipeline stages that a launcher has started find each other: the ranks of a stage share memory, and the
first rank of each stage is connected to the next stage if stages are on several hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.base.errors import ConfigError, InvariantError
from quire.parallel.barrier import ProcessBarrier
from quire.parallel.communicator import Communicator
from quire.parallel.joined_workers import host_key
from quire.parallel.launch import open_descriptor_of
from quire.parallel.message_socket import MessageListener
from quire.parallel.shared_memory import SharedMemoryFile
from quire.parallel.worker_group import attach_subgroups, initialise_subgroups, subgroup_areas
from quire.worker.pipeline_link import StageLinks, own_address
from quire.worker.pipeline_memory import PipelineMemory
from quire.worker.pipeline_stage import StageConfig

_RECORD_BYTES = 512


@dataclass(frozen=True, slots=True)
class StageMeans:
    """What a process of a stage has in common with others.

    links      to the other stages; None: it shares memory with all of them, or is not the first rank of its stage
    barriers   see StageConfig.subgroups
    rows_file  descriptor of the file for the rows that the ranks of the stage share; None: it has one rank
    """

    memory: PipelineMemory
    links: StageLinks | None = None
    barriers: Mapping[str, ProcessBarrier] = field(default_factory=dict[str, ProcessBarrier])
    rows_file: int | None = None

    def close_links(self) -> None:
        """Close the connections to other stages; may be called again."""
        if self.links is not None:
            self.links.close()


def meet_stages(config: StageConfig, rank: int, barrier: ProcessBarrier, communicator: Communicator) -> StageMeans:
    """Return what the process of a rank shares where stages are on several hosts; called by all ranks of the group.

    barrier  of this process

    Raises ConfigError for a stage whose ranks are on several hosts, and WorkerError.
    """
    if config.link is None:
        raise InvariantError("the leader has given no address for the links of stages")
    place, leader_address, session = config.places[rank], config.link[0], bytes.fromhex(config.link[1])
    subgroups = {name: ranks for name, ranks in config.subgroups.items() if rank in ranks}
    first = rank - place.tensor_rank
    own: dict[str, Any] = {"host": host_key()}
    file, rows_file, listener = None, None, None
    if place.is_first_rank:
        file = SharedMemoryFile.create({**subgroup_areas(subgroups), **config.sizes.areas()})
        initialise_subgroups(file, subgroups)
        rows_file = os.memfd_create("quire-rows", os.MFD_CLOEXEC) if subgroups else None
        listener = MessageListener(own_address(leader_address), session)
        own |= {"pid": os.getpid(), "files": [file.descriptor, rows_file], "at": [listener.address, listener.port]}
    records = _gather(communicator, own)
    _check_hosts(config, [record["host"] for record in records])
    if file is None:
        pid, (descriptor, rows) = records[first]["pid"], records[first]["files"]
        file, rows_file = SharedMemoryFile(open_descriptor_of(pid, descriptor)), open_descriptor_of(pid, rows)
    memory, links = PipelineMemory(file, config.sizes), None
    if listener is not None:
        address, port = records[(rank + place.num_tensor_ranks) % len(records)]["at"]
        links = StageLinks(memory, barrier, listener, (address, port), session)
    return StageMeans(memory, links, attach_subgroups(file, rank, subgroups), rows_file)


def _check_hosts(config: StageConfig, hosts: Sequence[str]) -> None:
    """Raise ConfigError for a stage whose ranks are on several hosts; hosts: of each rank."""
    for rank, place in config.places.items():
        first = rank - place.tensor_rank
        if hosts[rank] != hosts[first]:
            raise ConfigError(
                f"rank {rank} is on another host than rank {first}, but both are of pipeline stage {place.stage.index}, whose "
                f"ranks share memory: start {place.num_tensor_ranks} (tensor_parallel_size) consecutive ranks on each host, or "
                "a multiple of that"
            )


def _gather(communicator: Communicator, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the records of all ranks, which are sent as JSON."""
    size, text = communicator.size, json.dumps(own).encode().ljust(_RECORD_BYTES)
    told = torch.empty((size, _RECORD_BYTES), dtype=torch.uint8)
    communicator.all_gather(told, torch.frombuffer(bytearray(text), dtype=torch.uint8)[None])
    return [json.loads(row.numpy().tobytes()) for row in told]
