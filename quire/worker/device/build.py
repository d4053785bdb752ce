"""Build the step driver of a device: load the model there, see what a step takes, and give the rest to the KV pool."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from quire.base.errors import ConfigError, WorkerError
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.contracts.expert_options import EplbConfig, counts_experts
from quire.contracts.kv_spec import KvSpec
from quire.contracts.memory import MemoryPlan, ModelReport
from quire.contracts.model_spec import NO_ATTENTION
from quire.contracts.step import StepPlan
from quire.kernels.triton.arithmetic import INTERPRETED
from quire.kernels.triton.device_traits import DeviceTraits, choose_traits
from quire.kernels.triton.libraries import load_library
from quire.kernels.triton.rotated_codes import PACKED
from quire.kernels.triton.tile_table import active_table, choose_table
from quire.kv.device_pool import DeviceKvPool, kv_dtypes
from quire.kv.tiers.host_slab import HostSlab, slots_of
from quire.model.checkpoint import open_parameters
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_offload import OffloadedWeights
from quire.model.lora.device_adapters import DeviceAdapters
from quire.model.lora.device_shards import AdapterShard
from quire.parallel.remote_workers import RemoteWorkers
from quire.parallel.rendezvous import check_fingerprints
from quire.parallel.worker_group import LaunchOptions
from quire.quant.parameters import Parameter, StoredParameter
from quire.quant.policy import DEVICE_POLICIES
from quire.speculate.build import build_speculator
from quire.speculate.memory import StepLimits
from quire.worker.async_driver import AsyncStepDriver
from quire.worker.device.device_select import drafts_trees
from quire.worker.device.drafters import DraftedModel, Drafter, load_drafter
from quire.worker.device.expert_loading import device_mover
from quire.worker.device.faults import is_out_of_memory
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.gpu_group import WORKER_MODULE, GpuGroup, RankConfig
from quire.worker.device.graphs import CountedCapturer, CudaGraphCapturer, GraphCapturer, StepGraphs
from quire.worker.device.launched_step import StepSizes
from quire.worker.device.leader_executor import LeaderGpuExecutor
from quire.worker.device.memory import (
    HOW_TO_SAVE,
    Captures,
    CudaMemory,
    DeviceMemory,
    MemoryBefore,
    check_pinned,
    device_kv_spec,
    device_weight_bytes,
    gathered_bytes,
    measure_usage,
    most_drafts_on_device,
    most_step_tokens,
    moving_bytes,
    num_spare_blocks,
    offload_plan,
    plan_device_memory,
    rank_device,
    tier_staging_bytes,
)
from quire.worker.device.precompile import CompileJob, Precompilation, arch_of
from quire.worker.device.rank_pages import PageMoveCounters
from quire.worker.device.row_processors import fits_tables
from quire.worker.expert_moves import ExpertMover
from quire.worker.expert_parallel import warn_lossy
from quire.worker.lora import DecoderAdapters
from quire.worker.parallel_executor import GroupAdapters
from quire.worker.parallel_launch import fingerprint, launch_options, start_workers
from quire.worker.pipelined_driver import PipelinedStepDriver
from quire.worker.step_driver import StepDriver
from quire.worker.tiers import num_host_pages, page_bytes

logger = get_logger(__name__)


class BuiltRank(NamedTuple):
    """What runs the steps of a model, or of this rank's part of it, the memory that it takes, and its LoRA adapters, if it
    takes any."""

    executor: GpuStepExecutor
    drafter: Drafter | None
    plan: MemoryPlan
    adapters: DeviceAdapters | None = None
    mover: ExpertMover | None = None


def build_device_runner(
    config: EngineConfig, device: torch.device, report: ModelReport, num_batched_tokens: int, slab: HostSlab | None = None
) -> tuple[StepDriver, ModelReport]:
    """Load a model on a device and return its step driver, with the report of what it takes there.

    With several ranks or stages this is rank 0; the other ranks are started and have loaded their parts.
    slab  see build_runner
    Raises ConfigError where it does not fit, or where the device is the CPU and kernels are not interpreted.
    """
    if config.nvtx_ranges and device.type != "cuda":
        raise ConfigError(f"nvtx_ranges needs an NVIDIA GPU, not device {config.device!r}; leave it out")
    if slab is None:
        check_pinned(report.memory)
    sizes = step_sizes(config, report, num_batched_tokens)
    warn_lossy(config)
    if config.parallel.world_size > 1:
        built = build_leader(config, device, report, sizes, slab)
    else:
        built = build_rank(config, device, report, sizes, slab=slab)
    for line in built.plan.describe().splitlines():
        logger.info(line)
    report, speculator = replace(report, memory=built.plan), None
    drafting = () if built.drafter is None else built.drafter.executors
    try:
        if config.speculative_config is not None:
            limits = StepLimits(config.max_num_seqs, num_batched_tokens, most_drafts_on_device(config, report.spec.vocab_size))
            there = {} if built.drafter is None else {built.drafter.method: built.drafter.proposer()}
            speculator = build_speculator(config.speculative_config, report, None, limits, there)
    except BaseException:
        for each in (built.executor, *drafting):
            each.close()
        raise
    mark_step = nvtx_range if config.nvtx_ranges else None
    adapters = None
    leader = built.executor if isinstance(built.executor, LeaderGpuExecutor) else None
    if built.adapters is not None:
        holder = built.adapters if leader is None else GroupAdapters(leader)
        adapters = DecoderAdapters(config, report, holder, has_fixed_memory=True)
    is_async = config.async_scheduling is not False
    processor = built.executor if sizes.has_processors else None
    mover = None if built.executor.host_slab is None else built.executor
    rebalance = None if leader is None or not config.enable_eplb else leader.rebalance_experts
    if leader is not None and config.pipeline_parallel_size > 1:
        return PipelinedStepDriver(leader, speculator, drafting, mover, adapters, mark_step, processor, rebalance), report
    driver = AsyncStepDriver(built.executor, speculator, drafting, is_async, mark_step, adapters, processor, mover, rebalance)
    return driver, report


def nvtx_range(plan: StepPlan) -> AbstractContextManager[object]:
    """Return the NVTX range in which a step is launched, with its number, as profilers such as Nsight Systems show it."""
    return torch.cuda.nvtx.range(f"step {plan.step_id}: {plan.num_tokens} tokens of {len(plan.num_scheduled_tokens)} sequences")


def build_leader(
    config: EngineConfig, device: torch.device, report: ModelReport, sizes: StepSizes, slab: HostSlab | None = None
) -> BuiltRank:
    """Start the other ranks, load the part of rank 0, and return it when all are ready. Raises what any rank fails with.

    slab  see build_runner
    """
    size, num_pages = config.parallel.world_size, num_host_pages(config, report)
    file = slots_of(slab, num_pages, page_bytes(report.memory)) if num_pages > 0 else None
    try:
        told = RankConfig.of(config, report, sizes, -1 if file is None else file)
        pass_fds = () if file is None else (file,)
        options = launch_options(config, with_store=True, areas=PageMoveCounters.areas(size), pass_fds=pass_fds)
        settled = replace(config, pipeline_layers=told.config.pipeline_layers)
        return _start_ranks(settled, device, report, told, options, slab)
    finally:
        if file is not None:
            os.close(file)  # all have mapped it


def _start_ranks(
    config: EngineConfig,
    device: torch.device,
    report: ModelReport,
    told: RankConfig,
    options: LaunchOptions,
    slab: HostSlab | None,
) -> BuiltRank:
    workers = start_workers(config, told.to_json(), options, WORKER_MODULE)
    try:
        assert workers.store is not None
        if told.slots_file >= 0 and isinstance(workers, RemoteWorkers):
            raise ConfigError("the KV tiers and roles need all ranks on one host, but these are on several: leave them out")
        if told.options:
            workers.startup.stage("comparing ranks")
            check_fingerprints(workers.communicator, fingerprint(Path(told.config.model), told.options))
        workers.startup.stage("connecting")
        group = GpuGroup.connect(workers, workers.store, rank_device(device, 0), told, workers)
        workers.startup.stage("loading weights")
        built = build_rank(config, device, report, told.sizes, group, slab)
        workers.startup.ready({"num_kv_blocks": built.plan.num_kv_blocks})
        workers.wait_ready()
        assert isinstance(built.executor, LeaderGpuExecutor)
        built.executor.save_pairs(config.save_expert_load)
        if group.placements is not None:
            built.executor.place_experts(group.placements, config.parallel.shares, config.save_expert_placement)
        if built.mover is not None:
            built.executor.move_experts(built.mover, config.eplb_config or EplbConfig())
        built.executor.lead()
    except WorkerError:
        workers.wait_ready()  # raises what the rank at fault has failed with, in its class
        raise
    except BaseException:
        workers.kill()
        raise
    num_stages, num_blocks = config.pipeline_parallel_size, built.plan.num_local_blocks
    if config.prefill_context_parallel_size > 1:
        logger.info("prompts divided  among %d groups of ranks", config.prefill_context_parallel_size)
    if config.tensor_parallel_size > 1:
        logger.info("tensor parallel  %d ranks, %d KV blocks on each", config.tensor_parallel_size, num_blocks)
    if num_stages > 1:
        layers = ", ".join(map(str, config.pipeline_layers or ()))
        logger.info("pipeline parallel  %d stages of %s layers, %d KV blocks on each", num_stages, layers, num_blocks)
    return built


def _counted(capturer: GraphCapturer | None, group: GpuGroup | None) -> GraphCapturer | None:
    """Return a capturer whose captures count their collectives."""
    for each in () if capturer is None or group is None else group.communicators:
        capturer = CountedCapturer(capturer, each)
    return capturer


def build_rank(
    config: EngineConfig,
    device: torch.device,
    report: ModelReport,
    sizes: StepSizes,
    group: GpuGroup | None = None,
    slab: HostSlab | None = None,
) -> BuiltRank:
    """Load a model, or this rank's part of it; plan its memory and make its KV pool.

    group  of ranks that share the model: every rank calls this, and all find the same number of blocks
    slab   see build_runner
    Raises ConfigError where it does not fit, or where the device is the CPU and kernels are not interpreted.
    """
    choose_tiles(config, device)
    memory = _memory_to_plan(device, group)
    before = MemoryBefore(0, 0) if memory is None else MemoryBefore(memory.free_and_total()[0], memory.allocated())
    capturer = CudaGraphCapturer(device) if device.type == "cuda" and not is_eager(config) else None
    compilations: list[Precompilation] = []
    try:
        parameters = open_parameters(report.folder, report.spec)
        compiles = group is None or group.is_first_on_host
        compilation = compile_ahead(device, config, report, sizes, parameters, group) if compiles else None
        compilations += [] if compilation is None else [compilation]
        decoder = _load_decoder(config, report, device, parameters, group)
        stepper, adapters, drafter = _make_executor(config, report, decoder, sizes, capturer, group, compilations)
        stepper.compilation = compilation
        if group is not None:
            if compilation is not None:
                compilation.wait()
            group.wait()  # for what the first rank of a host has compiled
        kv, num_moving = report.memory.kv, moving_bytes(config, report.spec, report.parameters)
        own = _Measured(stepper, sizes, drafter, group, report.memory.page_shares, num_moving)
        plan = replace(report.memory, kv=kv) if memory is None else _measured_plan(config, memory, own, kv, before)
        plan = _agreed_plan(plan, report, decoder, group)
        _allocate_pools(config, report, plan, own, device, group, slab)
        if capturer is not None:
            for each in own.steppers:
                each.capture_largest()
    except BaseException as error:
        for each in compilations:
            each.stop()
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"the model does not fit on the device: {HOW_TO_SAVE} ({error})") from error
    mover = None if group is None or not config.enable_eplb else device_mover(config, report, decoder, group)
    return BuiltRank(stepper, drafter, plan, adapters, mover)


def _load_decoder(
    config: EngineConfig,
    report: ModelReport,
    device: torch.device,
    parameters: Mapping[str, Parameter | StoredParameter],
    group: GpuGroup | None,
) -> DeviceDecoder:
    """Load the weights of a model, or of this rank's part of it."""
    policy = None if config.quantization is None else DEVICE_POLICIES[config.quantization]
    ranks, stage = (None, None) if group is None else (group.ranks, group.stage)
    max_model_len, is_in_order = report.memory.max_model_len, config.deterministic
    offload = offload_plan(config, report.spec, report.parameters, _whole_weight_bytes(config, report))
    place = device if offload is None else OffloadedWeights(device, offload)
    rows = None if group is None else group.rows
    decoder = DeviceDecoder(report.spec, parameters, max_model_len, place, policy, is_in_order, ranks, stage, rows)
    kv = report.memory.kv
    is_packed = any(PACKED in kv_dtypes(kv.dtype_of(layer)) for layer in range(len(kv.layer_shapes)))
    logger.info("%s%s", decoder.fusion, "; but those with keys or values of four bits are not" if is_packed else "")
    if counts_experts(config):
        decoder.watch_experts(config.lossy_routing, config.save_expert_load is not None and stage is None)
    return decoder


def _make_executor(
    config: EngineConfig,
    report: ModelReport,
    decoder: DeviceDecoder,
    sizes: StepSizes,
    capturer: CudaGraphCapturer | None,
    group: GpuGroup | None,
    compilations: list[Precompilation],
) -> tuple[GpuStepExecutor, DeviceAdapters | None, Drafter | None]:
    """Return what runs the steps, with a pool of one block for measuring, its LoRA adapters, and what drafts on rank 0."""
    ranks, device, kv = None if group is None else group.ranks, decoder.device, report.memory.kv
    # Only collectives are captured, not what stages send.
    agree = None if group is None or ranks is None else group.agree
    pool = DeviceKvPool(kv, 1 + num_spare_blocks(config), device, 1 if kv.state_shapes else 0, 1)
    specs = [layer.attention for layer in decoder.spec.layers if layer.attention != NO_ATTENTION]
    library = load_library(config.attention_backend, specs, decoder.dtype, kv_dtypes(kv.dtype)[0], kv.block_size)
    is_first = group is None or group.rank == 0
    drafter = load_drafter(DraftedModel(config, report, decoder, sizes, capturer, compilations)) if is_first else None
    adapters = None
    if config.enable_lora:
        shard = None if ranks is None else AdapterShard(ranks.shard, decoder.row_parallel)
        limits = config.max_loras, config.max_lora_rank
        adapters = DeviceAdapters(decoder.spec, *limits, device, config.enable_lora_experts, shard)
    parts = decoder, pool, sizes, StepGraphs(_counted(capturer, group), agree), library
    if group is not None and group.workers is not None:
        return LeaderGpuExecutor(*parts, group, adapters), adapters, drafter
    return GpuStepExecutor(*parts, adapters), adapters, drafter


def _agreed_plan(plan: MemoryPlan, report: ModelReport, decoder: DeviceDecoder, group: GpuGroup | None) -> MemoryPlan:
    """Return the plan with what the report says of host memory, and with as many blocks as every rank has room for."""
    pinned_bytes, page_shares = report.memory.pinned_bytes, report.memory.page_shares
    plan = replace(plan, offloaded_bytes=decoder.offloaded_bytes, pinned_bytes=pinned_bytes, page_shares=page_shares)
    if group is None:
        return plan
    return replace(plan, num_kv_blocks=group.least(plan.num_kv_blocks), num_window_blocks=group.least(plan.num_window_blocks))


def _allocate_pools(
    config: EngineConfig,
    report: ModelReport,
    plan: MemoryPlan,
    own: _Measured,
    device: torch.device,
    group: GpuGroup | None,
    slab: HostSlab | None,
) -> None:
    """Allocate the KV pools of the executor and the drafter, and the host tier, if there is one."""
    num_blocks = plan.num_local_blocks + num_spare_blocks(config)
    pool = DeviceKvPool(report.memory.kv, num_blocks, device, plan.num_states, plan.num_window_blocks)
    own.stepper.give_pool(pool, plan.num_states, plan.num_state_checkpoints)
    if own.drafter is not None:
        own.drafter.give_pool(plan.num_kv_blocks)
    if config.host_tier_bytes:
        share = None if group is None else group.page_share(report.memory)
        is_shared = (group is None or group.rank == 0) and config.prefill_listen is not None
        own.stepper.open_host_tier(num_host_pages(config, report), is_shared, share, slab)


def is_eager(config: EngineConfig) -> bool:
    """Return whether no CUDA graphs are captured: copying offloaded weights takes so long that they would gain nothing."""
    return config.enforce_eager or config.cpu_offload_gb > 0


def _whole_weight_bytes(config: EngineConfig, report: ModelReport) -> int:
    return device_weight_bytes(config, report.spec, report.parameters, report.folder)


def choose_tiles(config: EngineConfig, device: torch.device) -> None:
    """Make a device the current one, and choose its tiles. Raises ConfigError for a device that cannot be used so."""
    if device.type != "cuda" and not INTERPRETED:
        raise ConfigError("triton was imported before TRITON_INTERPRET=1 was set: set it in the environment of the process")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        traits = DeviceTraits.of(device)
        choose_traits(traits)
        choose_table(torch.cuda.get_device_name(device), traits.name, config.tile_table)
        if not traits.is_hopper:
            logger.warning(
                "quire has not been run on a GPU of compute capability %s yet: its kernels are compiled for it and were tested "
                "on other GPUs and in Triton's interpreter; run `quire tune` once, as its tiles were not measured either",
                traits.name,
            )
    elif config.tile_table is not None:
        raise ConfigError("tile_table is for a GPU; leave it out")


def _memory_to_plan(device: torch.device, group: GpuGroup | None) -> DeviceMemory | None:
    """Return the memory that is measured, and divided; None: the host's, of which the report says enough."""
    if device.type != "cuda":
        return None
    return CudaMemory(device) if group is None else CudaMemory(device, group.wait_for)


def step_sizes(config: EngineConfig, report: ModelReport, num_batched_tokens: int) -> StepSizes:
    """Return how large steps become; what constraints force is drafted in any case."""
    drafting, max_model_len = config.speculative_config, report.memory.max_model_len
    num_tokens = most_step_tokens(num_batched_tokens, config.max_num_seqs, max_model_len)
    return StepSizes(
        config.max_num_seqs,
        num_tokens,
        max_model_len,
        min(most_drafts_on_device(config, report.spec.vocab_size), num_tokens - 1),
        drafting is not None,
        drafting is not None and drafts_trees(drafting),
        drafting is None and fits_tables(max_model_len),  # after drafts the host applies processors
        config.pipeline_parallel_size,
    )


def compile_ahead(
    device: torch.device,
    config: EngineConfig,
    report: ModelReport,
    sizes: StepSizes,
    parameters: Mapping[str, Parameter | StoredParameter],
    group: GpuGroup | None,
) -> Precompilation | None:
    """Begin to compile what serving will launch, while weights are loaded; with stages what the whole model would launch."""
    if device.type != "cuda":
        return None
    chosen = report.folder, report.spec, config.quantization, config.deterministic
    shares, copies = config.parallel.shares, config.num_redundant_experts if config.enable_expert_parallel else None
    kernels = arch_of(device), active_table()
    kv = report.memory.kv
    if group is not None and group.stage is not None:
        kv = device_kv_spec(config, group.stage.rank_specs[0], kv.window_tokens is not None)
    of_ranks = shares, copies, config.enable_dp_attention, config.decode_context_parallel_size
    job = CompileJob(*chosen, kv, sizes, *kernels, None, *of_ranks)
    return Precompilation(job, parameters)


class _Measured(NamedTuple):
    """What takes memory in addition to the KV pool: the model's steps, and the drafter."""

    stepper: GpuStepExecutor
    sizes: StepSizes
    drafter: Drafter | None
    group: GpuGroup | None
    page_shares: tuple[int, ...]
    moving_bytes: int = 0

    @property
    def steppers(self) -> list[GpuStepExecutor]:
        """All that launch steps, the model's first."""
        return [self.stepper, *(() if self.drafter is None else self.drafter.executors)]

    def run_full(self) -> None:
        """Run the largest step, and what takes most memory to draft."""
        ranks = None if self.group is None else self.group.ranks
        with nullcontext() if ranks is None else ranks.measuring():
            self.stepper.run_full(self.sizes.max_num_batched_tokens, self.sizes.max_num_seqs, self.sizes.max_model_len)
        if self.drafter is not None:
            self.drafter.run_full()

    def capture_samples(self) -> None:
        """Capture steps of every sort, of all."""
        for each in self.steppers:
            each.capture_samples()


def _measured_plan(config: EngineConfig, memory: DeviceMemory, own: _Measured, kv: KvSpec, before: MemoryBefore) -> MemoryPlan:
    num_graphs = sum(len(each.keys) for each in own.steppers)
    captures = Captures(own.capture_samples, own.stepper.capture_copies, num_graphs)
    usage = measure_usage(memory, before, own.run_full, None if is_eager(config) else captures)
    if own.group is not None and config.enable_dp_attention:  # all that was run was at the first home; it may be at any one
        usage = replace(usage, activation_bytes=-own.group.least(-usage.activation_bytes))
    held, block_bytes = (0, 0) if own.drafter is None else (own.drafter.held_bytes, own.drafter.block_bytes)
    held += own.moving_bytes
    held += tier_staging_bytes(config, kv, own.page_shares) + gathered_bytes(config, kv, own.sizes.max_model_len)
    usage = replace(usage, activation_bytes=usage.activation_bytes + held)
    limits = own.sizes.max_model_len, own.sizes.max_num_batched_tokens
    return plan_device_memory(config, kv, usage, *limits, draft_block_bytes=block_bytes)
