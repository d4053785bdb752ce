"""How the layers of a model are divided among pipeline stages, what each stage will hold, and what cannot run on stages."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.contracts.kv_spec import KvSpec
from quire.contracts.memory import HostPart, ModelReport
from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec, MoeSpec
from quire.contracts.parallel import MAX_RANKS
from quire.model.checkpoint import open_parameters
from quire.model.heads.native_vocabulary import vocabulary_bytes
from quire.model.native_model import has_int8_head, int8_head_bytes, native_refusal
from quire.model.parameters import Shape
from quire.model.pipeline_stages import PipelineStage, check_layers, divide_layers
from quire.model.stored_tensors import has_weights
from quire.model.tensor_shards import ModelShard
from quire.parallel.barrier import native_extension
from quire.quant.parameters import StoredParameter
from quire.quant.policy import POLICIES, QuantizationPolicy, quantized_bytes
from quire.speculate.memory import DraftBytes
from quire.speculate.sources import LAYER_KINDS, find_layer_head
from quire.worker.expert_parallel import find_placements
from quire.worker.host_part import ranks_on_host, shard_of
from quire.worker.lora import planned_adapter_bytes
from quire.worker.memory import cpu_block_size, max_num_batched_tokens
from quire.worker.parallel_launch import launched_group

_SEQUENCES_OF_A_STEP = 8
"""For the share of the experts that a step reads."""


def check_pipeline(config: EngineConfig, report: ModelReport) -> None:
    """Raise ConfigError where the model cannot run on pipeline_parallel_size stages here."""
    size, num_ranks = config.pipeline_parallel_size, config.parallel.world_size
    if num_ranks >= MAX_RANKS:
        raise ConfigError(
            f"pipeline_parallel_size * tensor_parallel_size must be at most {MAX_RANKS - 1}, as the leader is a process of its "
            f"own, got {size} * {config.tensor_parallel_size} = {num_ranks}"
        )
    native_extension()  # raises UnsupportedError
    refusal = native_refusal(report.spec, cpu_block_size(config))
    if refusal is not None:
        raise ConfigError(f"pipeline_parallel_size is {size}: it needs the native kernels, which do not run {refusal}")
    spec = report.spec
    if spec.per_layer_inputs is not None or any(layer.attention.kv_source is not None for layer in spec.layers):
        raise ConfigError(
            f"pipeline_parallel_size is {size}, but per-layer inputs and layers that read what another layer has cached "
            f"({spec.model_type}) run on one stage"
        )
    if any(layer.shared_block is not None for layer in spec.layers):
        raise ConfigError(
            f"pipeline_parallel_size is {size}, but layers of a {spec.model_type!r} model read the embeddings and share "
            "weights: they run on one stage"
        )
    methods = () if config.speculative_config is None else config.speculative_config.methods
    if "self" in methods:
        raise ConfigError(
            f"pipeline_parallel_size is {size}, but the speculative method 'self' runs layers of the model, which are on the "
            "stages; choose another method, or pipeline_parallel_size=1"
        )
    stages_of(config, report)


def kept_layers_of(config: EngineConfig, report: ModelReport) -> tuple[int, ...]:
    """Return the layers whose inputs a draft head reads, low to high. Raises ConfigError, ModelFormatError or
    UnsupportedError."""
    drafts = config.speculative_config
    methods = () if drafts is None else drafts.methods
    heads = [find_layer_head(drafts, method, report)[1] for method in methods if drafts is not None and method in LAYER_KINDS]
    return max((head.aux_hidden_state_layers for head in heads), key=len, default=())


def draft_bytes(config: EngineConfig, report: ModelReport) -> DraftBytes:
    """Return the memory that draft heads need in addition to count_drafts, as they run in the leader: the vocabulary that they
    may read, and what the stages write for them of each step in flight."""
    drafts, spec = config.speculative_config, report.spec
    if drafts is None or not drafts.has_draft_heads:
        return DraftBytes()
    # With several ranks in a stage, all on this host, host_part has counted it.
    host = report.memory.host
    is_counted = host is not None and host.num_ranks == host.num_all_ranks
    weights = 0 if is_counted else vocabulary_bytes(spec, report.parameters)
    num_floats = max_num_batched_tokens(config) * (len(kept_layers_of(config, report)) + 1) * spec.hidden_size
    return DraftBytes(weights, 0, 4 * num_floats * (config.pipeline_parallel_size + 1))


def stages_of(config: EngineConfig, report: ModelReport) -> tuple[PipelineStage, ...]:
    """Return the stages of a configuration on CPUs. Raises ConfigError where the layers cannot be divided so."""
    stages = given_stages(config, report.spec)
    if stages is not None:
        return stages
    # Greedy steps read a copy of the head in bytes instead.
    has_copy = has_int8_head(report.spec) and not report.is_quantized
    most_head_bytes = int8_head_bytes(report.spec) if has_copy else None
    return divide_stages(config, report.spec, _own_parameter_bytes(config, report), most_head_bytes)


def _bound_layers(spec: ModelSpec) -> list[int]:
    """Return the layers that read what the one before has chosen, or read: they are on its stage."""
    return [index for index, layer in enumerate(spec.layers) if layer.attention.reads_other_layer]


def given_stages(config: EngineConfig, spec: ModelSpec) -> tuple[PipelineStage, ...] | None:
    """Return the stages that pipeline_layers gives, or the only one; None: the layers are to be divided. Raises ConfigError."""
    if config.pipeline_layers is None:
        return PipelineStage.all_of((len(spec.layers),)) if config.pipeline_parallel_size == 1 else None
    check_layers(config.pipeline_layers, len(spec.layers))
    stages, bound = PipelineStage.all_of(config.pipeline_layers), _bound_layers(spec)
    for stage in stages:
        if stage.start in bound:
            raise ConfigError(
                f"pipeline_layers is {config.pipeline_layers}, but layer {stage.start} reads what the one before has chosen: "
                f"let stages begin with other layers than {bound}"
            )
    return stages


def divide_stages(
    config: EngineConfig, spec: ModelSpec, sizes: Mapping[str, float], most_head_bytes: float | None = None
) -> tuple[PipelineStage, ...]:
    """Return stages that take about the same time. Raises ConfigError for more stages than layers.

    sizes            bytes of all parameters
    most_head_bytes  that a step reads of the LM head; None: all
    """
    costs = [0.0] * len(spec.layers)
    head = 0.0
    for name, num_bytes in sizes.items():
        if name.startswith("layers."):
            index = int(name.split(".")[1])
            costs[index] += num_bytes * _read_share(spec, name, index)
        elif name.startswith("lm_head.") or (name == "embed.weight" and "lm_head.weight" not in sizes):
            head += num_bytes
    head = head if most_head_bytes is None else min(head, most_head_bytes)
    return PipelineStage.all_of(divide_layers(costs, config.pipeline_parallel_size, head, _bound_layers(spec)))


def _read_share(spec: ModelSpec, name: str, index: int) -> float:
    """Return the share of a parameter that a step reads: of experts those that its sequences meet, taken to be even."""
    mlp = spec.layers[index].mlp
    if ".experts." not in name or not isinstance(mlp, MoeSpec):
        return 1.0
    return 1.0 - (1.0 - mlp.top_k / mlp.num_experts) ** _SEQUENCES_OF_A_STEP


def _own_parameter_bytes(config: EngineConfig, report: ModelReport) -> dict[str, float]:
    """Return about what each parameter takes as it is run on a CPU."""
    adapters = planned_adapter_bytes(config, report.spec, report.parameters, config.tensor_parallel_size)
    num_bytes = report.memory.weight_bytes - adapters
    return parameter_bytes(config, report.spec, report.parameters, report.folder, num_bytes, POLICIES)


def parameter_bytes(
    config: EngineConfig,
    spec: ModelSpec,
    shapes: Mapping[str, Shape],
    folder: Path,
    num_weight_bytes: int,
    policies: Mapping[str, QuantizationPolicy],
) -> dict[str, float]:
    """Return about what each parameter takes as it is run; num_weight_bytes: all of them together."""
    width = DTYPE_BYTES[spec.dtype]
    if config.quantization is not None:
        policy = policies[config.quantization]
        return {name: float(quantized_bytes({name: shape}, spec, policy)) for name, shape in shapes.items()}
    dense = {name: float(math.prod(shape) * width) for name, shape in shapes.items()}
    if not has_weights(folder):
        return dense
    stored = open_parameters(folder, spec)
    quantized = {name for name, value in stored.items() if isinstance(value, StoredParameter) and value.is_quantized}
    quantized &= dense.keys()
    # All quantised weights are taken to be of one format: what is left of the whole.
    left = num_weight_bytes - sum(size for name, size in dense.items() if name not in quantized)
    total = sum(dense[name] for name in quantized)
    factor = min(1.0, max(0.05, left / total)) if total else 1.0
    return {name: size * factor if name in quantized else size for name, size in dense.items()}


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What a worker holds, before it is loaded; weight_bytes: an estimate.

    shard  its part of the model, of all layers; None: a stage has one rank
    """

    stage: PipelineStage
    weight_bytes: int
    kv_bytes: int
    shard: ModelShard | None = None


def stage_memories(config: EngineConfig, report: ModelReport) -> list[StageMemory]:
    """Return what each stage on CPUs, or each tensor-parallel rank of each stage, will hold."""
    sizes = _own_parameter_bytes(config, report)
    adapters = planned_adapter_bytes(config, report.spec, report.parameters, config.tensor_parallel_size)
    copy = max(0.0, report.memory.weight_bytes - adapters - sum(sizes.values()))  # of the head, for greedy steps
    copy = min(copy, int8_head_bytes(report.spec)) if has_int8_head(report.spec) else 0.0
    num_ranks = config.tensor_parallel_size
    placements = find_placements(config, report.spec)
    shards = [None if num_ranks == 1 else shard_of(config, report.spec, rank, placements) for rank in range(num_ranks)]
    return [
        _worker_memory(config, report, stage, shard, sizes, copy) for stage in stages_of(config, report) for shard in shards
    ]


def stages_part(config: EngineConfig, report: ModelReport, environment: Mapping[str, str] = os.environ) -> HostPart | None:
    """Return what the stages on this host hold, where a launcher has started others elsewhere; otherwise None."""
    num_stages = config.pipeline_parallel_size
    if num_stages == 1 or launched_group(config, environment) is None:
        return None
    here, memories = ranks_on_host(config, environment), stage_memories(config, report)
    if len(here) == len(memories):
        return None
    own = [memories[rank] for rank in here]
    kv = [_worker_kv(report, each.stage, each.shard) for each in own]
    return HostPart(
        len(own),
        len(memories),
        sum(each.weight_bytes for each in own),
        sum(each.bytes_per_block for each in kv),
        sum(each.window_bytes_per_block for each in kv),
        sum(each.bytes_per_state for each in kv),
    )


def _worker_kv(report: ModelReport, stage: PipelineStage, shard: ModelShard | None) -> KvSpec:
    """Return the layout of the KV cache of a rank of a stage."""
    kv = report.memory.kv
    if shard is not None:
        own = shard.kv_spec(report.spec, kv.block_size, kv.dtype, kv.window_tokens is not None)
        kv = own.with_dtypes(kv.layer_dtypes)
    return kv.part(stage.start, stage.stop)


def _worker_memory(
    config: EngineConfig,
    report: ModelReport,
    stage: PipelineStage,
    shard: ModelShard | None,
    sizes: dict[str, float],
    head_copy: float,
) -> StageMemory:
    """Return what a rank of a stage holds; sizes: bytes of all parameters; head_copy: of the head's copy."""
    memory, shapes = report.memory, report.parameters
    if shard is not None:
        shapes = shard.parameter_shapes(report.parameters)
        sizes = {
            name: num_bytes * math.prod(shapes[name]) / max(1, math.prod(report.parameters[name]))
            for name, num_bytes in sizes.items()
        }
        head_copy *= shard.vocabulary.size / report.spec.vocab_size
    own = sum(stage.select(sizes, "lm_head.weight" not in sizes).values()) + head_copy * stage.is_last
    own += planned_adapter_bytes(config, stage.spec(report.spec), stage.select(shapes, False))
    kv = _worker_kv(report, stage, shard)
    num_kv_bytes = kv.pool_bytes(memory.num_local_blocks, memory.num_window_blocks) + memory.num_states * kv.bytes_per_state
    return StageMemory(stage, int(own), num_kv_bytes, shard)
