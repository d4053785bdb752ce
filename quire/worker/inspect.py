"""Inspect a model before it is built: what it is, which device runs it, and the memory that it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from quire.base.errors import ConfigError, ModelFormatError, UnsupportedError
from quire.base.numa import ThreadPlace, find_thread_places
from quire.base.shared_reads import shared_reads
from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec
from quire.contracts.pooler_spec import PoolerSpec
from quire.model.build import effective_max_model_len
from quire.model.checkpoint import open_parameters, tie_missing_head
from quire.model.config_reader import read_model_spec
from quire.model.device_refusal import check_on_device
from quire.model.generation_defaults import read_generation_defaults
from quire.model.heads.build import find_head_kind
from quire.model.native_model import SHORT_FROM
from quire.model.parameters import Shape, parameter_shapes
from quire.model.pooler import read_pooler_spec
from quire.model.resolve import resolve_model
from quire.model.stored_tensors import has_weights, open_tensors
from quire.model.transformers_backend.probe import read_transformers_model
from quire.quant.policy import DEVICE_POLICIES, POLICIES, quantized_bytes
from quire.speculate.build import count_drafts
from quire.speculate.memory import StepLimits
from quire.speculate.sources import check_device_sources, check_state_drafts, settle_method
from quire.worker.context_parallel import check_context_parallel, check_dp_attention
from quire.worker.device.device_select import choose_device, library_device
from quire.worker.device.memory import device_stage_memories, estimate_memory
from quire.worker.device.stages import check_device_stages
from quire.worker.expert_parallel import check_experts, copied_weight_bytes
from quire.worker.host_part import host_part
from quire.worker.lora import check_lora
from quire.worker.memory import leave_room, max_num_batched_tokens, plan_memory, uses_native_kernels, weight_bytes
from quire.worker.parallel_build import check_tensor_parallel
from quire.worker.parallel_launch import check_backend
from quire.worker.pipeline_plan import StageMemory, check_pipeline, draft_bytes, stages_part
from quire.worker.pipeline_plan import stage_memories as cpu_stage_memories
from quire.worker.tiers import check_tiers


def settle_drafts(config: EngineConfig) -> EngineConfig:
    """Return a configuration whose speculative_config names the method. Raises ConfigError."""
    drafts = config.speculative_config
    return config if drafts is None else replace(config, speculative_config=settle_method(drafts))


@shared_reads()
def inspect_model(config: EngineConfig) -> ModelReport:
    """Return what a model is and how much memory it needs, without loading its weights, and even if it does not fit.

    Raises ModelFormatError, UnsupportedError or ConfigError.
    """
    config = settle_drafts(config)
    folder = resolve_model(config.model, config.revision)
    # The revision is the model's; a tokenizer from elsewhere has its own history.
    tokenizer = config.model if config.tokenizer is None or config.skip_tokenizer_init else config.tokenizer
    tokenizer_folder = folder if tokenizer == config.model else resolve_model(tokenizer, None)
    spec, shapes, measured = _read_model(config, folder)
    pooler = PoolerSpec()
    if spec.implementation == "quire":
        pooler = read_pooler_spec(folder, spec, generates_without_head=config.allow_missing_head)
    max_model_len = effective_max_model_len(spec, config.max_model_len)
    if config.max_model_len is None and pooler.max_tokens is not None:
        max_model_len = min(max_model_len, pooler.max_tokens)
    device = choose_device(config)
    gpu = library_device(config)
    name = str(gpu or "cpu") if device is None else "interpreter" if device.type == "cpu" else str(device)
    _check_options(config, spec, device, name)
    if device is None:
        _check_deterministic(config, spec)
        num_bytes = weight_bytes(config, spec, shapes, folder) if measured is None else measured
        host = host_part(config, spec, shapes, num_bytes, max_model_len)
        num_bytes += copied_weight_bytes(config, spec, shapes, num_bytes)
        memory = plan_memory(config, spec, num_bytes, max_model_len, max_num_batched_tokens(config, str(gpu)), gpu, host)
    else:
        check_on_device(spec, config.deterministic)
        memory = estimate_memory(config, device, spec, shapes, max_model_len, folder)
    report = ModelReport(
        folder, tokenizer_folder, spec, shapes, memory, read_generation_defaults(folder), device=name, pooler=pooler
    )
    check_tiers(config, report)
    if config.pipeline_parallel_size > 1 and device is None:
        check_pipeline(config, report)
        report = _on_this_host(config, report)
        memory = report.memory
    check_experts(config, report)
    if config.speculative_config is None:
        return report
    check_state_drafts(config.speculative_config, spec)
    if device is not None:
        check_device_sources(config.speculative_config, report)
        return report  # what a device has left for the cache is measured, with drafts
    drafts = count_drafts(config.speculative_config, report, step_limits(config))
    if config.pipeline_parallel_size > 1:
        drafts += draft_bytes(config, report)
    return replace(report, memory=leave_room(config, memory, drafts))


def _read_model(config: EngineConfig, folder: Path) -> tuple[ModelSpec, dict[str, Shape], int | None]:
    """Return what the files say of a model: its structure, its parameters, and the bytes of its weights if they were counted.
    Raises ModelFormatError or UnsupportedError, also for a draft head that is given as a model."""
    try:
        if config.model_impl == "transformers":
            info = read_transformers_model(folder, config.dtype)
            return info.spec, info.parameters, info.weight_bytes
        spec = read_model_spec(folder, config.dtype)
        spec = tie_missing_head(folder, spec) if config.allow_missing_head else spec
        return spec, parameter_shapes(spec), None
    except (ModelFormatError, UnsupportedError):
        refuse_head(config, folder)
        raise


def _check_options(config: EngineConfig, spec: ModelSpec, device: torch.device | None, name: str) -> None:
    """Raise ConfigError or UnsupportedError for options that the model or the device does not support; name: the device's."""
    if config.enable_lora:
        check_lora(config, spec, name)
    check_backend(config)
    check_context_parallel(config, spec, name)
    has_device_stages = config.pipeline_parallel_size > 1 and device is not None
    if has_device_stages:
        check_device_stages(config, spec)
    if config.enable_dp_attention:
        check_dp_attention(config, spec, name)
    if config.tensor_parallel_size > 1 or (device is not None and config.parallel.world_size > 1):
        check_tensor_parallel(config, spec, name)
    if device is None and config.cpu_offload_gb > 0:
        raise ConfigError(
            f"cpu_offload_gb is {config.cpu_offload_gb:g}, but the model runs on the CPU, where all weights are in host memory "
            "already: leave it out"
        )


def stage_memories(config: EngineConfig, report: ModelReport) -> list[StageMemory]:
    """Return what each pipeline stage, or each tensor-parallel rank of each stage, will hold."""
    device = choose_device(config)
    if device is None:
        return cpu_stage_memories(config, report)
    return device_stage_memories(config, device, report)


def _on_this_host(config: EngineConfig, report: ModelReport) -> ModelReport:
    """Return the report of pipeline stages, with the plan of those on this host."""
    part, memory = stages_part(config, report), report.memory
    if part is None:
        return report
    num_tokens = max_num_batched_tokens(config)
    own = plan_memory(config, report.spec, memory.weight_bytes, memory.max_model_len, num_tokens, host=part)
    return replace(report, memory=own)


def check_weights(report: ModelReport) -> bool:
    """Check the names, shapes and dtypes of the stored weights and the sizes of their files, without reading values.

    Returns whether any weights are stored. Raises ModelFormatError.
    """
    if not has_weights(report.folder):
        return False
    if report.spec.implementation == "transformers":
        open_tensors(report.folder)  # how the library names what it reads is not known before it loads the model
    else:
        open_parameters(report.folder, report.spec)
    return True


_SHORT_SHARE = 0.752
"""Of plain bfloat16: 12 bits a weight, and its exceptions; measured with normally distributed weights."""


def weight_bytes_by_precision(report: ModelReport, is_gpu: bool = False) -> dict[str, int]:
    """Return the bytes of all weights of a model in its own dtype and in each precision of the option `quantization`.

    On a CPU the bfloat16 weights of large models are expected to be packed in 12 bits, with few exceptions, see WeightPacker.

    is_gpu  with the formats of a GPU's kernels, whose 4 bits keep embedding and head in int8
    """
    spec = report.spec
    found = {spec.dtype: report.num_parameters * DTYPE_BYTES[spec.dtype]}
    is_short = spec.dtype == "bfloat16" and report.num_parameters >= SHORT_FROM and not is_gpu
    if is_short and uses_native_kernels(EngineConfig(model=str(report.folder)), spec):
        found[spec.dtype] = round(found[spec.dtype] * _SHORT_SHARE)
    for name, policy in (DEVICE_POLICIES if is_gpu else POLICIES).items():
        found[name] = quantized_bytes(report.parameters, spec, policy)
    return found


def _check_deterministic(config: EngineConfig, spec: ModelSpec) -> None:
    if config.deterministic and not uses_native_kernels(config, spec):
        raise ConfigError(
            "deterministic needs the native kernels of the CPU, which do not run this model here: leave it out, or see the log "
            "for why they do not"
        )


def step_limits(config: EngineConfig) -> StepLimits:
    """Return how large the steps of a configuration become on the CPU."""
    return StepLimits(config.max_num_seqs, max_num_batched_tokens(config))


def refuse_head(config: EngineConfig, folder: Path) -> None:
    """Raise ConfigError if a folder cannot be read as a model because it holds a draft head."""
    kind = find_head_kind(folder)
    if kind is not None:
        given = f'{{"method": "{kind}", "model": "{config.model}"}}'
        raise ConfigError(
            f"{config.model} is no model, but a head that drafts for one: give the model that it was trained for, and the head "
            f"as speculative_config {given}"
        ) from None


def thread_places(config: EngineConfig, report: ModelReport) -> tuple[ThreadPlace, ...]:
    """Return the NUMA nodes to which the threads of a single process on the CPU will be bound; none: they will not be."""
    is_single = report.device == "cpu" and config.parallel.world_size == 1
    if not is_single or not uses_native_kernels(config, report.spec):
        return ()
    return find_thread_places(config.num_threads or torch.get_num_threads())
