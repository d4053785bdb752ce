"""What every stage of a pipeline has to know to build its part, and how it does."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.contracts.kv_spec import KvDtype, KvSpec
from quire.contracts.memory import MemoryPlan
from quire.kv.tiers.host_slab import PagePart
from quire.model.checkpoint import open_parameters, tie_missing_head
from quire.model.config_reader import read_model_spec
from quire.model.pipeline_stages import PipelineStage
from quire.model.stage_decoder import StageDecoder
from quire.model.tensor_shards import ContextPlace, ModelShard, RankGroup
from quire.parallel.barrier import ProcessBarrier, native_extension
from quire.parallel.mesh import DeviceMesh
from quire.quant.policy import POLICIES, parameter_quantizer
from quire.worker.expert_parallel import placements_of
from quire.worker.pipeline_memory import PipelineSizes


@dataclass(frozen=True, slots=True)
class StagePlace:
    """The place of a worker: its stage, and its tensor-parallel rank there. The first rank of a stage works on the rows of a
    slot in place."""

    stage: PipelineStage
    tensor_rank: int
    num_tensor_ranks: int

    @property
    def is_first_rank(self) -> bool:
        """Whether it is the first rank of its stage."""
        return self.tensor_rank == 0

    @property
    def barrier_name(self) -> str:
        """The name of the barrier of the ranks of its stage."""
        return f"stage{self.stage.index}"

    def describe(self) -> str:
        """Return "stage 1 (layers 14 to 27), tensor-parallel rank 0"; without the rank where a stage has one."""
        rank = "" if self.num_tensor_ranks == 1 else f", tensor-parallel rank {self.tensor_rank}"
        return self.stage.describe() + rank


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """Decided by the leader, and sent to the stages as JSON.

    layers           the number of layers of each stage
    shares           what each tensor-parallel rank of a stage gets, in parts
    rows_files       with several ranks in a stage: for each stage the descriptor of the file for the rows that its ranks share,
                     the same in every process
    num_threads      of each worker, those of the first stage first
    num_batch_slots  rows of the block tables
    kept_layers      whose inputs a draft head in the leader reads, low to high
    num_host_pages   pages of the host tier
    slots_file       descriptor of the memory of these pages, which all processes share; -1: there are none
    context_size     tensor-parallel ranks that share the tokens of a sequence; each holds num_local_blocks blocks
    expert_ranks     with expert parallelism: for each layer that has experts, in order, those of each tensor-parallel rank
    first_rank       of the first stage; 0: it is in the leader's process, as a launcher or Ray starts a process for each stage
    link             address of the leader, and the session of StageLinks, where the stages are on several hosts
    needed_bytes     of memory, of each worker, estimated
    options          that all processes must have alike, see config_fields; empty where the leader has started them itself
    allow_missing_head as in EngineConfig
    num_states, num_state_checkpoints  as in MemoryPlan
    """

    folder: str
    dtype: str
    quantization: str | None
    allow_missing_head: bool
    max_model_len: int
    num_batch_slots: int
    block_size: int
    kv_dtype: KvDtype
    num_local_blocks: int
    num_window_blocks: int
    layers: tuple[int, ...]
    shares: tuple[float, ...]
    rows_files: tuple[int, ...]
    num_threads: tuple[int, ...]
    sizes: PipelineSizes
    kept_layers: tuple[int, ...] = ()
    num_host_pages: int = 0
    slots_file: int = -1
    context_size: int = 1
    expert_ranks: tuple[list[list[int]], ...] | None = None
    first_rank: int = 1
    link: tuple[str, str] | None = None
    needed_bytes: tuple[int, ...] = ()
    options: dict[str, str] = field(default_factory=dict[str, str])
    num_states: int = 0
    num_state_checkpoints: int = 0

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """All stages, in order."""
        return PipelineStage.all_of(self.layers)

    @property
    def places(self) -> dict[int, StagePlace]:
        """The places of the workers, by their ranks in the group: rank 0 is the leader, which has no layers, or the first
        stage."""
        stages, mesh = self.stages, DeviceMesh(tensor=len(self.shares), pipeline=len(self.layers))
        coordinates = map(mesh.coordinates, range(mesh.size))
        return {
            rank: StagePlace(stages[at.pipeline], at.tensor, mesh.tensor)
            for rank, at in enumerate(coordinates, self.first_rank)
        }

    def kept_part(self, stage: PipelineStage) -> range:
        """Return the places in kept_layers of those that a stage has."""
        first, last = (bisect_left(self.kept_layers, layer) for layer in (stage.start, stage.stop))
        return range(first, last)

    def page_part(
        self,
        whole: KvSpec,
        own: KvSpec,
        first_layer: int = 0,
        shards: Sequence[tuple[ModelShard, KvSpec]] = (),
        tensor_rank: int = 0,
        state_bytes: int | None = None,
    ) -> PagePart | None:
        """Return what a process holds of the pages of the host tier; None: there are none.

        whole, own   the KV caches of the model and of the process
        first_layer  of its stage
        shards       of the whole model, of the ranks of a stage, with their KV caches of all layers; empty where it has one
        state_bytes  of a recurrent state over all ranks; None: they follow from the rest
        """
        if self.slots_file < 0:
            return None
        layers = range(first_layer, first_layer + len(own.layer_shapes))
        first_heads = tuple(0 if not shards else shards[tensor_rank][0].layers[layer].cached_kv_heads.start for layer in layers)
        ranks = [kv for _, kv in shards] or [whole]
        first_byte = (
            sum(kv.bytes_per_state for kv in ranks[:tensor_rank]) + ranks[tensor_rank].part(0, first_layer).bytes_per_state
        )
        num_bytes = sum(kv.bytes_per_state for kv in ranks) if state_bytes is None else state_bytes
        return PagePart(self.slots_file, whole, own, first_layer, first_heads, num_bytes, first_byte)

    @property
    def subgroups(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each stage, by the name of their barrier; none where a stage has one rank."""
        found: dict[str, tuple[int, ...]] = {}
        for rank, place in self.places.items() if len(self.shares) > 1 else ():
            found[place.barrier_name] = (*found.get(place.barrier_name, ()), rank)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> StageConfig:
        """Return what to_json was called on."""
        lists = {name: tuple(fields[name]) for name in ("layers", "shares", "rows_files", "num_threads", "kept_layers")}
        return cls(**{**fields, **lists, "sizes": PipelineSizes(**fields["sizes"])})


def build_stage(
    config: StageConfig, place: StagePlace, subgroups: Mapping[str, ProcessBarrier], rows_file: int | None
) -> tuple[StageDecoder, MemoryPlan, PagePart | None]:
    """Load a worker's part of the layers of its stage; return what runs it, the plan of its KV cache, and its part of the pages
    of the host tier. Nothing of other stages, and no rows of other ranks, are opened.

    subgroups  the barriers of this worker, see StageConfig.subgroups
    rows_file  descriptor of the file for the rows that the ranks of the stage share, where it has several

    Raises ModelFormatError, UnsupportedError or ConfigError.
    """
    folder, stage = Path(config.folder), place.stage
    spec = read_model_spec(folder, config.dtype)
    if config.allow_missing_head:
        spec = tie_missing_head(folder, spec)
    parameters = open_parameters(folder, spec)
    policy = None if config.quantization is None else POLICIES[config.quantization]
    quantize = None if policy is None else parameter_quantizer(parameters, spec, policy).quantized
    is_windowed = config.num_window_blocks > 0
    group, kv = None, KvSpec.of(spec, config.block_size, config.kv_dtype, is_windowed)
    whole, shards = kv, list[tuple[ModelShard, KvSpec]]()
    if place.num_tensor_ranks > 1:
        rank, size, placements = place.tensor_rank, config.context_size, placements_of(config.expert_ranks, spec)
        for each in range(place.num_tensor_ranks):
            one = ModelShard.of(spec, each, config.shares, placements, size)
            shards.append((one, one.kv_spec(spec, config.block_size, config.kv_dtype, is_windowed)))
        shard, kv = shards[rank]
        context = None if size == 1 else ContextPlace(rank % size, size, config.num_local_blocks)
        assert rows_file is not None
        own_shard = shard.part(stage.start, stage.stop)
        group = RankGroup(own_shard, subgroups[place.barrier_name].address, rows_file, context=context)
    decoder = StageDecoder(native_extension(), stage, spec, parameters, config.max_model_len, quantize, group)
    kept = config.kept_part(stage)
    if kept and place.is_first_rank:
        decoder.keep_inputs(tuple(config.kept_layers[index] - stage.start for index in kept))
    own = kv.part(stage.start, stage.stop)
    plan = MemoryPlan(
        0,
        decoder.weight_bytes,
        0,
        own,
        config.num_local_blocks,
        config.max_model_len,
        config.num_states,
        config.num_state_checkpoints,
        num_window_blocks=config.num_window_blocks,
    )
    return decoder, plan, config.page_part(whole, own, stage.start, shards, place.tensor_rank)
