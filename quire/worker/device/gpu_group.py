"""GpuGroup: one rank's view of the GPUs that share a model; and what a rank is told when it is started."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import ModelSpec
from quire.model.build import effective_max_model_len
from quire.model.checkpoint import tie_missing_head
from quire.model.config_reader import read_model_spec
from quire.model.device_ranks import DeviceRanks
from quire.model.device_shards import DeviceShard
from quire.model.generation_defaults import read_generation_defaults
from quire.model.parameters import parameter_shapes
from quire.parallel.barrier import ProcessBarrier
from quire.parallel.communicator import Communicator, CountingCommunicator, all_agree, least_of
from quire.parallel.joined_workers import host_key
from quire.parallel.launch import SpawnedWorkers, WorkerContext
from quire.parallel.torch_communicator import TorchCommunicator
from quire.worker.device.launched_step import StepSizes
from quire.worker.device.memory import estimate_memory
from quire.worker.expert_parallel import find_placements, placement_lists, placements_of

if TYPE_CHECKING:
    from torch.distributed import Store

WORKER_MODULE = "quire.worker.device.gpu_worker"


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Return the device of a rank: GPU `rank` of this host; where kernels are interpreted, the CPU as well."""
    return torch.device("cuda", rank) if device.type == "cuda" else device


def hosts_of(store: Store, rank: int, size: int) -> list[int]:
    """Return a number for the host of each rank, the same on all of them; every rank calls this."""
    store.set(f"quire/host/{rank}", host_key())
    keys = [bytes(store.get(f"quire/host/{other}")) for other in range(size)]
    return [keys.index(key) for key in keys]


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What every rank has to know to build its part; the leader's, sent to the workers as JSON.

    config        with the folder of the model, and with what the leader has settled
    is_on_gpu     whether ranks run on GPUs; otherwise their kernels are interpreted
    expert_ranks  with expert parallelism: for each layer that has experts, in order, those of each rank
    """

    config: EngineConfig
    sizes: StepSizes
    is_on_gpu: bool
    expert_ranks: tuple[list[list[int]], ...] | None = None

    @classmethod
    def of(cls, config: EngineConfig, report: ModelReport, sizes: StepSizes) -> RankConfig:
        """Return that of a leader's configuration."""
        settled = replace(
            config,
            model=str(report.folder),
            revision=None,
            max_model_len=report.memory.max_model_len,
            block_size=report.memory.kv.block_size,
            speculative_config=None,  # drafts are made by the leader
        )
        placements = placement_lists(find_placements(config, report.spec))
        return cls(settled, sizes, report.device != "interpreter", placements)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return dataclasses.asdict(self) | {"sizes": list(self.sizes)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RankConfig:
        """Return what to_json was called on."""
        experts = None if fields["expert_ranks"] is None else tuple(fields["expert_ranks"])
        return cls(EngineConfig(**fields["config"]), StepSizes(*fields["sizes"]), fields["is_on_gpu"], experts)

    def device(self, rank: int) -> torch.device:
        """Return the device of a rank."""
        return rank_device(torch.device("cuda" if self.is_on_gpu else "cpu"), rank)

    def spec(self) -> ModelSpec:
        """Return the whole model."""
        folder = Path(self.config.model)
        spec = read_model_spec(folder, self.config.dtype)
        return tie_missing_head(folder, spec) if self.config.allow_missing_head else spec

    def shard(self, rank: int) -> DeviceShard:
        """Return the part of a rank."""
        config, spec = self.config, self.spec()
        placements = placements_of(self.expert_ranks, spec)
        return DeviceShard.of(spec, rank, config.parallel.shares, config.deterministic, placements)

    def report(self, rank: int) -> ModelReport:
        """Return what the model is, as the leader has found, with a plan for this rank's memory."""
        config, folder, device, spec = self.config, Path(self.config.model), self.device(rank), self.spec()
        shapes = parameter_shapes(spec)
        max_model_len = effective_max_model_len(spec, config.max_model_len)
        memory = estimate_memory(config, device, spec, shapes, max_model_len, folder, self.shard(rank))
        name = str(device) if self.is_on_gpu else "interpreter"
        return ModelReport(folder, folder, spec, shapes, memory, read_generation_defaults(folder), device=name)


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """The ranks that share a model, as one of them sees them.

    ranks    what they exchange on their devices, by the communicator `device`
    host     what they exchange on the host, which no device has to wait for
    barrier  says when the group has ended
    shares   what each rank has, in parts
    workers  the other ranks' processes; None: this is a worker
    """

    ranks: DeviceRanks
    device: CountingCommunicator
    host: Communicator
    barrier: ProcessBarrier
    shares: tuple[float, ...]
    workers: SpawnedWorkers | None = None

    @classmethod
    def connect(
        cls,
        member: SpawnedWorkers | WorkerContext,
        store: Store,
        device: torch.device,
        told: RankConfig,
        workers: SpawnedWorkers | None = None,
    ) -> GpuGroup:
        """Connect a rank to the others, over NCCL, or over gloo where kernels are interpreted; every rank calls this.

        member  what the rank is, as the leader or a worker; workers: the leader's
        """
        barrier = member.barrier
        shard = told.shard(barrier.rank)
        barrier.wait()  # all are there, so that none waits for a rank that has failed before
        if device.type == "cuda":
            torch.cuda.set_device(device)
            communicator = TorchCommunicator.nccl(store, barrier.rank, barrier.size, check=barrier.check)
        else:
            communicator = TorchCommunicator.gloo(store, barrier.rank, barrier.size, interface="lo", check=barrier.check)
        counting = CountingCommunicator(communicator)
        ranks = DeviceRanks(counting, shard, hosts_of(store, barrier.rank, barrier.size))
        return cls(ranks, counting, member.communicator, barrier, told.config.parallel.shares, workers)

    @property
    def rank(self) -> int:
        """This one."""
        return self.barrier.rank

    def wait(self) -> None:
        """Return when all ranks have called it."""
        self.host.barrier()

    def least(self, value: int) -> int:
        """Return the least of what all ranks give."""
        return least_of(self.host, value)

    def agree(self, says_yes: bool) -> bool:
        """Return whether all ranks say yes."""
        return all_agree(self.host, says_yes)

    def close(self) -> None:
        """End the threads of the communicator."""
        self.device.close()
