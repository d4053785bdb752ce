"""GpuGroup: one rank's view of the GPUs that share a model; and what a rank is told when it is started.

With pipeline stages the leader, rank 0, is the first tensor-parallel rank of the last stage, which samples. The ranks behind
those of the last stage are those of the first one, and so on.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quire.base.errors import WorkerError
from quire.contracts.config import EngineConfig
from quire.contracts.memory import MemoryPlan, ModelReport
from quire.contracts.model_spec import ModelSpec
from quire.contracts.rank_stats import CollectiveStats
from quire.kv.device_pages import PageShare
from quire.model.build import effective_max_model_len
from quire.model.checkpoint import tie_missing_head
from quire.model.config_reader import read_model_spec
from quire.model.device_ranks import DeviceRanks
from quire.model.device_shards import DeviceShard
from quire.model.device_stage import DeviceStage
from quire.model.generation_defaults import read_generation_defaults
from quire.model.parameters import parameter_shapes
from quire.model.pipeline_stages import PipelineStage
from quire.parallel.barrier import ProcessBarrier
from quire.parallel.communicator import Communicator, CountingCommunicator, all_agree, least_of
from quire.parallel.joined_workers import host_key
from quire.parallel.launch import SpawnedWorkers, WorkerContext
from quire.parallel.torch_communicator import TorchCommunicator
from quire.worker.device.launched_step import StepSizes
from quire.worker.device.memory import device_weight_bytes, estimate_memory, rank_device
from quire.worker.device.rank_pages import PageMoveCounters
from quire.worker.device.stages import device_stages, place_of
from quire.worker.pipeline_stage import StagePlace

if TYPE_CHECKING:
    from torch.distributed import Store

WORKER_MODULE = "quire.worker.device.gpu_worker"


def hosts_of(store: Store, rank: int, size: int) -> list[int]:
    """Return a number for the host of each rank, the same on all of them; every rank calls this."""
    store.set(f"quire/host/{rank}", host_key())
    keys = [bytes(store.get(f"quire/host/{other}")) for other in range(size)]
    return [keys.index(key) for key in keys]


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What every rank has to know to build its part; the leader's, sent to the workers as JSON.

    config       with the folder of the model, and with what the leader has settled, such as the layers of each stage
    is_on_gpu    whether ranks run on GPUs; otherwise their kernels are interpreted
    slots_file   descriptor of the memory of the host tier, which all inherit; -1: there is none
    """

    config: EngineConfig
    sizes: StepSizes
    is_on_gpu: bool
    slots_file: int = -1

    @classmethod
    def of(cls, config: EngineConfig, report: ModelReport, sizes: StepSizes, slots_file: int = -1) -> RankConfig:
        """Return that of a leader's configuration."""
        settled = replace(
            config,
            model=str(report.folder),
            revision=None,
            max_model_len=report.memory.max_model_len,
            block_size=report.memory.kv.block_size,
            speculative_config=None,  # drafts are made by the leader
            pipeline_layers=tuple(stage.num_layers for stage in _stages(config, report)),
        )
        return cls(settled, sizes, report.device != "interpreter", slots_file)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {"config": dataclasses.asdict(self.config), "sizes": list(self.sizes)} | {
            "is_on_gpu": self.is_on_gpu,
            "slots_file": self.slots_file,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RankConfig:
        """Return what to_json was called on."""
        sizes = StepSizes(*fields["sizes"])
        return cls(EngineConfig(**fields["config"]), sizes, fields["is_on_gpu"], fields["slots_file"])

    def device(self, rank: int) -> torch.device:
        """Return the device of a rank."""
        return rank_device(torch.device("cuda" if self.is_on_gpu else "cpu"), rank)

    def spec(self) -> ModelSpec:
        """Return the whole model."""
        folder = Path(self.config.model)
        spec = read_model_spec(folder, self.config.dtype)
        return tie_missing_head(folder, spec) if self.config.allow_missing_head else spec

    @property
    def places(self) -> dict[int, StagePlace]:
        """The places of all ranks."""
        stages = PipelineStage.all_of(self.config.pipeline_layers or ())
        return {rank: place_of(self.config, stages, rank) for rank in range(self.config.parallel.world_size)}

    def shard(self, place: StagePlace) -> DeviceShard:
        """Return the part of a rank of the layers of its stage."""
        return self._shard(place.stage.spec(self.spec()), place.tensor_rank)

    def rank_specs(self, place: StagePlace) -> list[ModelSpec]:
        """Return the whole model as each tensor-parallel rank of a stage runs it."""
        spec, size = self.spec(), place.num_tensor_ranks
        return [spec] if size == 1 else [self._shard(spec, rank).local_spec for rank in range(size)]

    def _shard(self, spec: ModelSpec, tensor_rank: int) -> DeviceShard:
        config = self.config
        return DeviceShard.of(spec, tensor_rank, config.parallel.shares, config.deterministic, config.enable_expert_parallel)

    def report(self, rank: int) -> ModelReport:
        """Return what the model is, as the leader has found, with a plan for this rank's memory."""
        config, folder, device, spec = self.config, Path(self.config.model), self.device(rank), self.spec()
        shapes = parameter_shapes(spec)
        max_model_len = effective_max_model_len(spec, config.max_model_len)
        memory = estimate_memory(config, device, spec, shapes, max_model_len, folder, rank)
        name = str(device) if self.is_on_gpu else "interpreter"
        return ModelReport(folder, folder, spec, shapes, memory, read_generation_defaults(folder), device=name)


def _stages(config: EngineConfig, report: ModelReport) -> tuple[PipelineStage, ...]:
    model = report.spec, report.parameters, report.folder
    return device_stages(config, *model, device_weight_bytes(config, *model))


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """The ranks that share a model, as one of them sees them.

    ranks    what the ranks of a stage exchange on their devices, by the communicator `tensor`; None: there is one
    stage    what the stages exchange, by the communicator `stages`; None: there is one
    host     what all exchange on the host, which no device has to wait for
    barrier  says when the group has ended
    moves    how many page moves each rank has ended
    slots_file  see RankConfig
    shares   what each rank has, in parts
    places   of all ranks
    workers  the other ranks' processes; None: this is a worker
    """

    ranks: DeviceRanks | None
    tensor: CountingCommunicator | None
    stage: DeviceStage | None
    stages: CountingCommunicator | None
    host: Communicator
    barrier: ProcessBarrier
    moves: PageMoveCounters
    slots_file: int
    shares: tuple[float, ...]
    places: dict[int, StagePlace]
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
        from torch.distributed import PrefixStore

        barrier, places = member.barrier, told.places
        place = places[barrier.rank]
        stage, num_ranks = place.stage, place.num_tensor_ranks
        barrier.wait()  # all are there, so that none waits for a rank that has failed before
        if device.type == "cuda":
            torch.cuda.set_device(device)

        def connect(name: str, rank: int, size: int) -> CountingCommunicator:
            own_store = PrefixStore(name, store)
            if device.type == "cuda":
                return CountingCommunicator(TorchCommunicator.nccl(own_store, rank, size, check=barrier.check))
            return CountingCommunicator(TorchCommunicator.gloo(own_store, rank, size, interface="lo", check=barrier.check))

        tensor = connect(f"stage{stage.index}", place.tensor_rank, num_ranks) if num_ranks > 1 else None
        ranks = None
        if tensor is not None:
            hosts = hosts_of(PrefixStore(f"hosts{stage.index}", store), place.tensor_rank, num_ranks)
            ranks = DeviceRanks(tensor, told.shard(place), hosts)
        stages = connect(f"rank{place.tensor_rank}", stage.index, stage.num_stages) if stage.num_stages > 1 else None
        own = None if stages is None else DeviceStage(stage, told.spec(), told.rank_specs(place), stages)
        shares = told.config.parallel.shares
        parts = tuple(each.stage.num_layers * shares[each.tensor_rank] for each in places.values())
        moves = PageMoveCounters(member.memory, barrier.size)
        return cls(ranks, tensor, own, stages, member.communicator, barrier, moves, told.slots_file, parts, places, workers)

    def page_share(self, memory: MemoryPlan) -> PageShare | None:
        """Return what this rank has of the pages of the host tier; None: there is none."""
        if self.slots_file < 0:
            return None
        shares = memory.page_shares
        return PageShare(self.slots_file, sum(shares), sum(shares[: self.rank]))

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

    def collectives(self) -> dict[str, CollectiveStats]:
        """Return what this rank has exchanged on its device."""
        return {name: count for each in (self.tensor, self.stages) if each is not None for name, count in each.stats().items()}

    def describe_end(self, reason: WorkerError) -> str:
        """Return why the group has ended, with the stage of the rank at fault."""
        place = self.places.get(reason.rank)
        return str(reason) if self.stage is None or place is None else f"pipeline {place.describe()}: {reason}"

    def close(self) -> None:
        """End the threads of the communicators."""
        for each in (self.tensor, self.stages):
            if each is not None:
                each.close()
