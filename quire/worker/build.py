"""Build what runs a model's steps: plan the memory, load the weights, allocate the KV pool."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from quire.base.errors import ModelFormatError
from quire.base.logging import get_logger
from quire.base.numa import describe_thread_places, find_thread_places
from quire.base.shared_reads import shared_reads
from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport
from quire.kernels.native import load_native
from quire.kv.tiers.host_slab import HostSlab
from quire.model.build import build_model
from quire.model.checkpoint import open_parameters
from quire.model.heads.native_vocabulary import NativeVocabulary
from quire.model.native_decoder import NativeDecoder
from quire.model.transformers_backend.decoder import load_transformers_model
from quire.model.transformers_backend.probe import read_transformers_model
from quire.parallel.barrier import native_extension
from quire.quant.policy import DEVICE_POLICIES, POLICIES, describe_short_rows, parameter_quantizer
from quire.speculate.build import build_speculator
from quire.worker.cpu_executor import CpuStepExecutor
from quire.worker.device.device_select import choose_device, library_device
from quire.worker.expert_parallel import warn_lossy
from quire.worker.inspect import inspect_model, refuse_head, settle_drafts, step_limits
from quire.worker.lora import adapters_of
from quire.worker.memory import check_fits, cpu_block_size, max_num_batched_tokens, uses_native_kernels
from quire.worker.parallel_build import build_leader
from quire.worker.parallel_executor import GroupAdapters, LeaderExecutor
from quire.worker.pipeline_build import build_pipeline
from quire.worker.pipelined_driver import PipelinedStepDriver
from quire.worker.pooling_head import load_pooling_head
from quire.worker.step_driver import EngineRunner, StepDriver
from quire.worker.tiers import num_host_pages

logger = get_logger(__name__)


@shared_reads()
def build_runner(config: EngineConfig, slab: HostSlab | None = None) -> tuple[EngineRunner, ModelReport]:
    """Load a model on the device that the configuration names; return its step driver, and the report of what it takes.

    slab  of the host tier, with its pages, that another runner of the same model had; not with a launcher's ranks
    Raises ModelFormatError, UnsupportedError or ConfigError.
    """
    config = settle_drafts(config)
    report = inspect_model(config)
    warn_replaced(config, report)
    try:
        head = load_pooling_head(report)
        device = choose_device(config)
        if config.quantization is not None:
            policy = (POLICIES if device is None else DEVICE_POLICIES)[config.quantization]
            short = describe_short_rows(report.parameters, len(report.spec.layers), policy)
            if short is not None:
                logger.info("quantization %s: %s", config.quantization, short)
        if device is None:
            runner, built = _build_on_cpu(config, report, slab)
        else:
            from quire.worker.device.build import build_device_runner  # needs Triton

            runner, built = build_device_runner(config, device, report, max_num_batched_tokens(config, report.device), slab)
        runner.use_pooling_head(head)
        return runner, replace(built, pooler=report.pooler)
    except ModelFormatError:
        refuse_head(config, report.folder)
        raise


def warn_replaced(config: EngineConfig, report: ModelReport) -> None:
    """Log which options this model does not have as they were given, and what is used."""
    kv = report.memory.kv
    if config.kv_cache_dtype not in ("auto", kv.dtype):
        logger.warning("kv_cache_dtype is %s: a latent row, key and value in one, is %s", config.kv_cache_dtype, kv.dtype)
    if config.dtype == "float16" and report.device == "cpu" and uses_native_kernels(config, report.spec):
        logger.warning("dtype is float16: weights are, but the CPU's kernels compute in float32; the KV cache is %s", kv.dtype)
    for option in fields(config) if report.device == "cpu" else ():
        value = getattr(config, option.name)
        if option.name in ("gpu_memory_utilization", "enforce_eager") and value != option.default:
            logger.warning("%s is %s: it is for GPUs, and has no effect on a CPU", option.name, value)


def _build_on_cpu(config: EngineConfig, report: ModelReport, slab: HostSlab | None) -> tuple[StepDriver, ModelReport]:
    check_fits(report.memory)
    for line in report.memory.describe().splitlines():
        logger.info(line)
    warn_lossy(config)
    if config.parallel.world_size > 1:
        bind_threads(False)
    if config.pipeline_parallel_size > 1:
        return _build_pipeline(config, report, slab)
    rebalance = None
    if config.parallel.world_size > 1:
        executor, report = build_leader(config, report, slab)
        rebalance = executor.rebalance_experts if config.enable_eplb else None
    else:
        executor, report = _build_executor(config, report)
    speculator = None
    try:
        if config.speculative_config is not None:
            speculator = build_speculator(config.speculative_config, report, executor.target, step_limits(config))
        executor.take_pages(() if speculator is None else speculator.pools)
        if config.parallel.world_size == 1:  # otherwise the ranks have opened it together
            executor.open_host_tier(num_host_pages(config, report), config.prefill_listen is not None, slab=slab)
        adapters = None
        if config.enable_lora:
            holder = GroupAdapters(executor) if isinstance(executor, LeaderExecutor) else None
            adapters = adapters_of(config, report, executor.target.model, holder)
        scorer = executor if isinstance(executor, CpuStepExecutor) else None
        driver = StepDriver(
            executor, speculator, page_mover=executor, adapters=adapters, block_scorer=scorer, rebalance=rebalance
        )
    except BaseException:
        executor.close()
        raise
    return driver, report


def _build_pipeline(
    config: EngineConfig, report: ModelReport, slab: HostSlab | None
) -> tuple[PipelinedStepDriver, ModelReport]:
    executor, report = build_pipeline(config, report, slab)
    speculator = None
    try:
        if config.speculative_config is not None:
            target = _vocabulary(config, report) if config.speculative_config.has_draft_heads else None
            speculator = build_speculator(config.speculative_config, report, target, step_limits(config))
        executor.take_pages(() if speculator is None else speculator.pools)
        adapters = adapters_of(config, report, None, GroupAdapters(executor)) if config.enable_lora else None
        return PipelinedStepDriver(executor, speculator, page_mover=executor, adapters=adapters), report
    except BaseException:
        executor.close()
        raise


def _vocabulary(config: EngineConfig, report: ModelReport) -> NativeVocabulary:
    """Return the embedding and the LM head for draft heads in the leader of a pipeline, which has no layers."""
    spec = report.spec
    parameters = open_parameters(report.folder, spec)
    policy = None if config.quantization is None else POLICIES[config.quantization]
    quantize = None if policy is None else parameter_quantizer(parameters, spec, policy).quantized
    return NativeVocabulary(native_extension(), spec, parameters, quantize)


def bind_threads(is_alone: bool) -> None:
    """Bind the threads of native steps to NUMA nodes, if there are several, before they pack the weights.

    is_alone  one process runs the model by native steps; otherwise threads that an earlier engine has bound are let go
    """
    native = load_native()
    if native is None:
        return
    places = find_thread_places(torch.get_num_threads()) if is_alone else ()
    if not native.bind_threads([sorted(place.cores) for place in places]):
        logger.warning("numa        the system refuses to bind %s", describe_thread_places(places))
    elif places:
        logger.info("numa        %s", describe_thread_places(places))


def _build_executor(config: EngineConfig, report: ModelReport) -> tuple[CpuStepExecutor, ModelReport]:
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    bind_threads(uses_native_kernels(config, report.spec))
    if report.spec.implementation == "transformers":
        info = read_transformers_model(report.folder, report.spec.dtype)
        model = load_transformers_model(report.folder, info, library_device(config))
        return CpuStepExecutor(model, report.memory, config.max_num_seqs), report
    parameters = open_parameters(report.folder, report.spec)
    policy = None if config.quantization is None else POLICIES[config.quantization]
    decoder = build_model(
        report.spec, parameters, report.memory.max_model_len, cpu_block_size(config), policy, config.enable_lora
    )
    if isinstance(decoder, NativeDecoder):
        if config.lossy_routing:
            decoder.use_lossy_routing(config.lossy_routing)
        report = replace(report, packed_weight_bytes=decoder.weight_bytes, spared_weight_bytes=decoder.spared_bytes)
    return CpuStepExecutor(decoder, report.memory, config.max_num_seqs), report
