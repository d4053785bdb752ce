"""GpuGroup: one rank's view of the GPUs that share a model; and the message that starts a rank.

With pipeline stages the leader, rank 0, is the first tensor-parallel rank of the last stage, which samples. The ranks after
those of the last stage are those of the first one, and so on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quire.base.errors import ConfigError, WorkerError
from quire.contracts.config import EngineConfig
from quire.contracts.expert_options import counts_experts
from quire.contracts.memory import MemoryPlan, ModelReport
from quire.contracts.model_spec import ModelSpec
from quire.contracts.rank_stats import CollectiveStats
from quire.kv.device_pages import PageShare
from quire.model.build import effective_max_model_len
from quire.model.checkpoint import tie_missing_head
from quire.model.config_reader import read_model_spec
from quire.model.device_context import ContextRanks
from quire.model.device_ranks import DeviceRanks
from quire.model.device_routing import RoutingCounts
from quire.model.device_rows import RowRanks
from quire.model.device_shards import DeviceShard
from quire.model.device_stage import DeviceStage
from quire.model.generation_defaults import read_generation_defaults
from quire.model.parameters import parameter_shapes
from quire.model.pipeline_stages import PipelineStage
from quire.parallel.barrier import ProcessBarrier
from quire.parallel.communicator import Communicator, CountingCommunicator, all_agree, least_of
from quire.parallel.joined_workers import host_key
from quire.parallel.launch import WorkerContext
from quire.parallel.remote_workers import RemoteWorkers
from quire.parallel.torch_communicator import TorchCommunicator
from quire.parallel.worker_group import WorkerGroup
from quire.worker.device.launched_step import StepSizes
from quire.worker.device.memory import device_weight_bytes, estimate_memory, rank_device
from quire.worker.device.rank_pages import PageMoveCounters
from quire.worker.device.stages import device_stages, place_of
from quire.worker.expert_parallel import (
    Placements,
    count_experts,
    find_placements,
    placement_lists,
    placements_in,
    placements_of,
)
from quire.worker.parallel_launch import config_fields, launched_group
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

    config        with the folder of the model, and what the leader has decided, such as the layers of each stage. Instead of
                  the files of expert_placement and expert_load see expert_ranks
    is_on_gpu     whether ranks run on GPUs; otherwise their kernels are interpreted
    slots_file    the leader's descriptor of the memory of the host tier, which all map; -1: there is none
    options       that all ranks must have alike, where a launcher has started them, see config_fields; otherwise empty
    expert_ranks  with expert parallelism: for each layer that has experts, in order, those of each rank
    """

    config: EngineConfig
    sizes: StepSizes
    is_on_gpu: bool
    slots_file: int = -1
    options: dict[str, str] = field(default_factory=dict[str, str])
    expert_ranks: tuple[list[list[int]], ...] | None = None

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
            expert_placement="linear",
            expert_load=None,
        )
        options = {} if launched_group(config) is None else config_fields(config)
        placements = placement_lists(find_placements(config, report.spec))
        return cls(settled, sizes, report.device != "interpreter", slots_file, options, placements)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return dataclasses.asdict(self) | {"sizes": list(self.sizes)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RankConfig:
        """Return what to_json was called on."""
        experts = None if fields["expert_ranks"] is None else tuple(fields["expert_ranks"])
        config, sizes = EngineConfig(**fields["config"]), StepSizes(*fields["sizes"])
        return cls(config, sizes, fields["is_on_gpu"], fields["slots_file"], fields["options"], experts)

    def device(self, local_rank: int) -> torch.device:
        """Return the device of a rank, by its number on its host. Raises ConfigError if it is not there."""
        if self.is_on_gpu and local_rank >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise ConfigError(f"rank {local_rank} of this host runs on cuda:{local_rank}, but there are {count} GPUs here")
        return rank_device(torch.device("cuda" if self.is_on_gpu else "cpu"), local_rank)

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
        spec = self.spec()
        placements = placements_in(placements_of(self.expert_ranks, spec), place.stage.start, place.stage.stop)
        return self._shard(place.stage.spec(spec), place.tensor_rank, placements)

    def rank_specs(self, place: StagePlace) -> list[ModelSpec]:
        """Return the whole model as each tensor-parallel rank of a stage runs it."""
        spec, size = self.spec(), place.num_tensor_ranks
        placements = placements_of(self.expert_ranks, spec)
        return [spec] if size == 1 else [self._shard(spec, rank, placements).local_spec for rank in range(size)]

    def _shard(self, spec: ModelSpec, tensor_rank: int, placements: Placements | None) -> DeviceShard:
        config = self.config
        options = config.parallel.shares, config.deterministic, placements, config.decode_context_parallel_size
        return DeviceShard.of(spec, tensor_rank, *options, has_homes=config.enable_dp_attention)

    def report(self, rank: int, device: torch.device) -> ModelReport:
        """Return what the model is, as the leader has found, with a plan for this rank's memory."""
        config, folder, spec = self.config, Path(self.config.model), self.spec()
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
    rows     the ranks that divide prompts, each with the whole model or one shard of it; None: there are none
    others   the communicators of `rows`, and of ranks that share the tokens of sequences, if not of all of a stage
    stage    what the stages exchange, by the communicator `stages`; None: there is one
    host     what all exchange on the host, which no device has to wait for
    barrier  says when the group has ended
    moves    how many page moves each rank has ended; None: there is no host tier
    slots_file  see RankConfig
    shares   what each rank has of the model, from 0 to 1
    places   of all ranks
    workers  the other ranks' processes; None: this is a worker
    is_first_on_host  of the ranks there: compiles kernels for all of them
    timeout_s  until the device has run a step; None: all ranks are on this host, where they are watched
    placements  of the experts of all layers, at first; None: they are not on ranks
    has_counts  whether the tokens of experts are counted
    """

    ranks: DeviceRanks | None
    tensor: CountingCommunicator | None
    stage: DeviceStage | None
    stages: CountingCommunicator | None
    host: Communicator
    barrier: ProcessBarrier
    moves: PageMoveCounters | None
    slots_file: int
    shares: tuple[float, ...]
    places: dict[int, StagePlace]
    workers: WorkerGroup | RemoteWorkers | None = None
    rows: RowRanks | None = None
    others: tuple[CountingCommunicator, ...] = ()
    is_first_on_host: bool = True
    timeout_s: float | None = None
    placements: Placements | None = None
    has_counts: bool = False

    @classmethod
    def connect(
        cls,
        member: WorkerGroup | RemoteWorkers | WorkerContext,
        store: Store,
        device: torch.device,
        told: RankConfig,
        workers: WorkerGroup | RemoteWorkers | None = None,
    ) -> GpuGroup:
        """Connect a rank to the others, over NCCL, or over gloo where kernels are interpreted; every rank calls this.

        member  what the rank is, as the leader or a worker; workers: the leader's
        """
        from torch.distributed import PrefixStore

        barrier, places = member.barrier, told.places
        place = places[barrier.rank]
        stage, num_ranks = place.stage, place.num_tensor_ranks
        member.communicator.barrier()  # all are there, so that none waits for a rank that has failed before
        if device.type == "cuda":
            torch.cuda.set_device(device)

        def connect(name: str, rank: int, size: int) -> CountingCommunicator:
            own_store = PrefixStore(name, store)
            if device.type == "cuda":
                return CountingCommunicator(TorchCommunicator.nccl(own_store, rank, size, check=barrier.check))
            where = {"interface": "lo"} if member.address is None else {"hostname": member.address}
            return CountingCommunicator(TorchCommunicator.gloo(own_store, rank, size, check=barrier.check, **where))

        others, ranks, rows = list[CountingCommunicator](), None, None
        num_copies, context_size = told.config.prefill_context_parallel_size, told.config.decode_context_parallel_size
        copy = barrier.rank // num_ranks if num_copies > 1 else 0
        own_name = f"{stage.index}copy{copy}"
        tensor = connect(f"stage{own_name}", place.tensor_rank, num_ranks) if num_ranks > 1 else None
        if tensor is not None:
            hosts = hosts_of(PrefixStore(f"hosts{own_name}", store), place.tensor_rank, num_ranks)
            (number, own_place), shared = divmod(place.tensor_rank, context_size), tensor
            if 1 < context_size < num_ranks:
                others.append(shared := connect(f"context{stage.index}part{number}", own_place, context_size))
            context = None if context_size == 1 else ContextRanks(shared, own_place)
            ranks = DeviceRanks(tensor, told.shard(place), hosts, context)
        if num_copies > 1:
            others.append(connect(f"rows{place.tensor_rank}", copy, num_copies))
            rows = RowRanks(others[-1], copy)
        stages = connect(f"rank{place.tensor_rank}", stage.index, stage.num_stages) if stage.num_stages > 1 else None
        own = None if stages is None else DeviceStage(stage, told.spec(), told.rank_specs(place), stages)
        shares = told.config.parallel.shares
        layers = [each.stage.num_layers * shares[each.tensor_rank] for each in places.values()]
        parts = tuple(each * num_copies / sum(layers) for each in layers)
        moves = None if told.slots_file < 0 else PageMoveCounters(member.memory, barrier.size)
        is_first = workers is not None or (isinstance(member, WorkerContext) and member.local_rank == 0)
        host, timeout_s = member.communicator, None
        if member.address is not None:
            # Unlike that of a member, it waits for ranks that load and compile longer than others.
            timeout_s, place_of_all = told.config.distributed_timeout_s, (barrier.rank, barrier.size)
            host_store = PrefixStore("host", store)
            host = TorchCommunicator.gloo(host_store, *place_of_all, check=barrier.check, hostname=member.address)
        of_host = host, barrier, moves, told.slots_file
        placements = placements_of(told.expert_ranks, told.spec())
        further = rows, tuple(others), is_first, timeout_s, placements, counts_experts(told.config)
        return cls(ranks, tensor, own, stages, *of_host, parts, places, workers, *further)

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

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for an event of this rank's device. Raises WorkerError if the group ends first: then it may never come."""
        self.communicators[0].wait_for(event)

    def least(self, value: int) -> int:
        """Return the least of what all ranks give."""
        return least_of(self.host, value)

    def agree(self, says_yes: bool) -> bool:
        """Return whether all ranks say yes."""
        return all_agree(self.host, says_yes)

    @property
    def communicators(self) -> list[CountingCommunicator]:
        """What this rank exchanges tensors of its device by."""
        return [each for each in (self.tensor, self.stages, *self.others) if each is not None]

    def gather_counts(self, own: Sequence[RoutingCounts | None]) -> list[RoutingCounts | None]:
        """Return the tokens of the experts of all layers, given those of this rank's stage; every rank calls this."""
        assert self.stage is not None
        place, numbers = self.places[self.rank], count_experts(self.stage.spec)
        tokens = torch.zeros(len(self.stage.spec.layers), max(numbers.values()), dtype=torch.int64)
        for layer, counts in enumerate(own if place.tensor_rank == 0 else (), place.stage.start):
            if counts is not None:
                tokens[layer, : len(counts.tokens)] = torch.tensor(counts.tokens)
        self.host.all_reduce(tokens)
        rows: list[list[int]] = tokens.tolist()
        found = [RoutingCounts(row[: numbers.get(layer, 0)], (0, 0, 0, 0.0)) for layer, row in enumerate(rows)]
        return [counts if counts.tokens else None for counts in found]

    def collectives(self) -> dict[str, CollectiveStats]:
        """Return what this rank has exchanged on its device."""
        found: dict[str, CollectiveStats] = {}
        for each in self.communicators:
            for name, count in each.stats().items():
                found[name] = count if name not in found else found[name].plus(count)
        return found

    def describe_end(self, reason: WorkerError) -> str:
        """Return why the group has ended, with the stage of the rank at fault."""
        place = self.places.get(reason.rank)
        return str(reason) if self.stage is None or place is None else f"pipeline {place.describe()}: {reason}"

    def close(self) -> None:
        """End the threads of the communicators."""
        for each in self.communicators:
            each.close()
        if isinstance(self.host, TorchCommunicator):
            self.host.close()
