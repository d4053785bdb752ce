"""How the layers of a model are divided among GPUs, and which models cannot be. Nothing here needs Triton."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.contracts.model_spec import ModelSpec
from quire.model.parameters import Shape
from quire.model.pipeline_stages import PipelineStage
from quire.quant.policy import DEVICE_POLICIES
from quire.worker.device.device_select import DEVICE_METHODS
from quire.worker.pipeline_plan import divide_stages, given_stages, parameter_bytes
from quire.worker.pipeline_stage import StagePlace

_METHODS = ("ngram", "suffix", "lookahead", "draft_model")
"""Methods of speculative_config that read nothing of the model but its tokens."""


def device_stages(
    config: EngineConfig, spec: ModelSpec, shapes: Mapping[str, Shape], folder: Path, num_weight_bytes: int
) -> tuple[PipelineStage, ...]:
    """Return the pipeline stages of a model on GPUs, also where there is one.

    shapes            of all parameters
    num_weight_bytes  of all weights, as they are run
    Raises ConfigError where the layers cannot be divided so.
    """
    stages = given_stages(config, spec)
    if stages is not None:
        return stages
    sizes = parameter_bytes(config, spec, shapes, folder, num_weight_bytes, DEVICE_POLICIES)
    return divide_stages(config, spec, sizes)


def place_of(config: EngineConfig, stages: tuple[PipelineStage, ...], rank: int) -> StagePlace:
    """Return the place of a rank: those of the last stage come first, then those of the first stage, and so on. Groups that
    divide prompts each have the only stage."""
    size = config.tensor_parallel_size
    return StagePlace(stages[rank // size % len(stages) - 1], rank % size, size)


def check_device_stages(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for what GPUs with a stage each do not support."""
    what: list[str] = []
    if config.enable_lora:
        what.append("LoRA adapters (enable_lora)")
    if spec.has_recurrent_state:
        what.append(f"layers with a recurrent state ({spec.model_type})")
    if spec.per_layer_inputs is not None or spec.altup is not None:
        what.append(f"per-layer inputs or several residual streams ({spec.model_type})")
    if any(layer.attention.kv_source is not None or layer.shared_block is not None for layer in spec.layers):
        what.append(f"layers that read another layer's keys and values, or the embeddings ({spec.model_type})")
    drafts = () if config.speculative_config is None else config.speculative_config.methods
    methods = [method for method in drafts if method in DEVICE_METHODS and method not in _METHODS]
    if methods:
        there = ", ".join(_METHODS)
        what.append(f"the speculative method {' and '.join(methods)}, which reads hidden states (choose {there})")
    if what:
        raise ConfigError(
            f"pipeline_parallel_size is {config.pipeline_parallel_size}, but stages on GPUs do not support {'; '.join(what)}: "
            "change that, or set pipeline_parallel_size to 1"
        )
