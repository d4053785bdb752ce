"""How the layers of a model are divided among pipeline stages, what each stage will hold, and what cannot run on stages."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.contracts.kv_spec import KvSpec
from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import DTYPE_BYTES, MoeSpec
from quire.model.checkpoint import open_parameters
from quire.model.native_model import is_screened, native_refusal, screen_bytes
from quire.model.pipeline_stages import PipelineStage, check_layers, divide_layers
from quire.model.stored_tensors import has_weights
from quire.parallel.barrier import native_extension
from quire.quant.parameters import StoredParameter
from quire.quant.policy import POLICIES, quantized_bytes
from quire.worker.memory import cpu_block_size

_READING_METHODS = {"eagle", "eagle3", "mtp", "deepseek_mtp", "medusa", "self"}
"""Drafting methods that read hidden states or layers of the model that verifies."""

_SEQUENCES_OF_A_STEP = 8
"""For the share of the experts that a step reads."""


def check_pipeline(config: EngineConfig, report: ModelReport) -> None:
    """Raise ConfigError where the model cannot run on pipeline_parallel_size stages here."""
    size = config.pipeline_parallel_size
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {size} and tensor_parallel_size {config.tensor_parallel_size}: both together are not "
            "supported yet; leave one of them 1"
        )
    if report.device != "cpu":
        raise ConfigError(
            f"pipeline_parallel_size is {size}, but the model runs on {report.device}: pipeline stages run on CPUs only; "
            "choose device='cpu' or pipeline_parallel_size=1"
        )
    native_extension()  # raises UnsupportedError
    refusal = native_refusal(report.spec, cpu_block_size(config))
    if refusal is not None:
        raise ConfigError(f"pipeline_parallel_size is {size}: it needs the native kernels, which do not run {refusal}")
    spec = report.spec
    if spec.per_layer_inputs is not None or any(layer.attention.kv_source is not None for layer in spec.layers):
        raise ConfigError(
            f"pipeline_parallel_size is {size}, but per-layer inputs and layers that read the keys and values of another layer "
            f"({spec.model_type}) run on one stage"
        )
    methods = () if config.speculative_config is None else config.speculative_config.methods
    refused = [method for method in methods if method in _READING_METHODS]
    if refused:
        raise ConfigError(
            f"pipeline_parallel_size is {size}, but the speculative method {refused[0]!r} reads hidden states or layers of the "
            "model, which are on the stages; choose ngram, suffix, lookahead or draft_model, or pipeline_parallel_size=1"
        )
    stages_of(config, report)


def stages_of(config: EngineConfig, report: ModelReport) -> tuple[PipelineStage, ...]:
    """Return the stages of a configuration. Raises ConfigError where the layers cannot be divided so."""
    num_layers = len(report.spec.layers)
    if config.pipeline_layers is not None:
        check_layers(config.pipeline_layers, num_layers)
        return PipelineStage.all_of(config.pipeline_layers)
    if config.pipeline_parallel_size == 1:
        return PipelineStage.all_of((num_layers,))
    sizes = _parameter_bytes(config, report)
    costs = [0.0] * num_layers
    head = 0.0
    for name, num_bytes in sizes.items():
        if name.startswith("layers."):
            index = int(name.split(".")[1])
            costs[index] += num_bytes * _read_share(report, name, index)
        elif name.startswith("lm_head.") or (name == "embed.weight" and "lm_head.weight" not in sizes):
            head += num_bytes
    if is_screened(report.spec) and not report.is_quantized:
        head = min(head, screen_bytes(report.spec))  # greedy steps read a copy in bytes instead
    return PipelineStage.all_of(divide_layers(costs, config.pipeline_parallel_size, head))


def _read_share(report: ModelReport, name: str, index: int) -> float:
    """Return the share of a parameter that a step reads: of experts those that its sequences meet, taken to be even."""
    mlp = report.spec.layers[index].mlp
    if ".experts." not in name or not isinstance(mlp, MoeSpec):
        return 1.0
    return 1.0 - (1.0 - mlp.top_k / mlp.num_experts) ** _SEQUENCES_OF_A_STEP


def _parameter_bytes(config: EngineConfig, report: ModelReport) -> dict[str, float]:
    """Return about what each parameter takes as it is run."""
    spec, width = report.spec, DTYPE_BYTES[report.spec.dtype]
    if config.quantization is not None:
        policy = POLICIES[config.quantization]
        return {name: float(quantized_bytes({name: shape}, spec, policy)) for name, shape in report.parameters.items()}
    dense = {name: float(math.prod(shape) * width) for name, shape in report.parameters.items()}
    if not has_weights(report.folder):
        return dense
    stored = open_parameters(report.folder, spec)
    quantized = {name for name, value in stored.items() if isinstance(value, StoredParameter) and value.is_quantized}
    quantized &= dense.keys()
    # All quantised weights are taken to be of one format: what is left of the whole.
    left = report.memory.weight_bytes - sum(size for name, size in dense.items() if name not in quantized)
    total = sum(dense[name] for name in quantized)
    factor = min(1.0, max(0.05, left / total)) if total else 1.0
    return {name: size * factor if name in quantized else size for name, size in dense.items()}


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What a stage holds, before it is loaded; weight_bytes: an estimate."""

    stage: PipelineStage
    weight_bytes: int
    kv_bytes: int


def stage_memories(config: EngineConfig, report: ModelReport) -> list[StageMemory]:
    """Return what each stage will hold."""
    sizes, memory = _parameter_bytes(config, report), report.memory
    is_tied = "lm_head.weight" not in sizes
    found: list[StageMemory] = []
    copy = report.memory.weight_bytes - sum(sizes.values())  # of the head, for greedy steps
    for stage in stages_of(config, report):
        own = sum(stage.select(sizes, is_tied).values())
        if stage.is_last and is_screened(report.spec):
            own += min(max(0.0, copy), screen_bytes(report.spec))
        shapes = memory.kv.layer_shapes[stage.start : stage.stop]
        kv = KvSpec(memory.kv.block_size, memory.kv.dtype, shapes)
        found.append(StageMemory(stage, int(own), kv.bytes_per_block * memory.num_kv_blocks))
    return found
