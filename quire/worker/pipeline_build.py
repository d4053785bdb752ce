"""Start the processes of a pipeline's stages, and make the executor that leads them."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.base.errors import ConfigError, WorkerError
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport, format_bytes
from quire.contracts.model_spec import ModelSpec, MoeSpec
from quire.kv.tiers.host_slab import HostSlab, slots_of
from quire.model.stage_decoder import row_floats
from quire.parallel.barrier import native_extension
from quire.parallel.joined_workers import lead_group
from quire.parallel.launch import spawn_workers
from quire.parallel.message_socket import SESSION_BYTES
from quire.parallel.ray_workers import start_ray_workers
from quire.parallel.remote_workers import RemoteWorkers
from quire.parallel.rendezvous import check_fingerprints
from quire.parallel.worker_group import WorkerGroup, attach_subgroups
from quire.worker.expert_parallel import PlacedLoads, find_placements, placement_lists
from quire.worker.memory import max_num_batched_tokens
from quire.worker.parallel_build import check_hosts, close_files, divide_threads, threads_of_host, threads_release
from quire.worker.parallel_launch import config_fields, fingerprint, launch_options, launched_group
from quire.worker.pipeline_executor import PipelineExecutor
from quire.worker.pipeline_join import StageMeans, meet_stages
from quire.worker.pipeline_memory import PipelineMemory, PipelineSizes
from quire.worker.pipeline_own_stage import OwnStage
from quire.worker.pipeline_plan import kept_layers_of, stage_memories, stages_of
from quire.worker.pipeline_stage import StageConfig, build_stage
from quire.worker.pipeline_worker import StageExecutor, check_stage_memory
from quire.worker.tiers import num_host_pages, slot_bytes

logger = get_logger(__name__)

WORKER_MODULE = "quire.worker.pipeline_worker"


def build_pipeline(
    config: EngineConfig, report: ModelReport, slab: HostSlab | None = None
) -> tuple[PipelineExecutor, ModelReport]:
    """Start the processes of all stages; return the executor when all have loaded their layers.

    slab  see build_runner
    Raises what any stage fails with.
    """
    num_files = config.pipeline_parallel_size if config.tensor_parallel_size > 1 else 0
    rows_files = tuple(os.memfd_create("quire-rows", os.MFD_CLOEXEC) for _ in range(num_files))
    num_pages = num_host_pages(config, report)
    page_files = (slots_of(slab, num_pages, slot_bytes(report.memory)),) if num_pages > 0 else ()
    release_threads = threads_release()

    def release() -> None:
        release_threads()
        close_files((*rows_files, *page_files))

    try:
        stage_config = _stage_config(config, report, rows_files, page_files)
        executor, report = _start_stages(config, report, stage_config, slab)
    except BaseException:
        release()
        raise
    executor.release = release
    return executor, report


def _stage_config(
    config: EngineConfig, report: ModelReport, rows_files: tuple[int, ...], page_files: tuple[int, ...]
) -> StageConfig:
    spec, memory = report.spec, report.memory
    stages, kept_layers = stages_of(config, report), kept_layers_of(config, report)
    drafts = config.speculative_config
    has_heads, group = drafts is not None and drafts.has_draft_heads, launched_group(config)
    is_spawned = group is None and config.distributed_executor_backend != "ray"
    return StageConfig(
        folder=str(report.folder),
        dtype=spec.dtype,
        quantization=config.quantization,
        allow_missing_head=config.allow_missing_head,
        max_model_len=memory.max_model_len,
        # A sequence that ends while a step with it is in flight has its slot until that is collected.
        num_batch_slots=2 * config.max_num_seqs,
        block_size=memory.kv.block_size,
        kv_dtype=memory.kv.dtype,
        layer_kv_dtypes=memory.kv.layer_dtypes,
        num_local_blocks=memory.num_local_blocks,
        num_window_blocks=memory.num_window_blocks,
        layers=tuple(stage.num_layers for stage in stages),
        shares=config.parallel.shares,
        rows_files=rows_files,
        num_threads=divide_threads(config.num_threads or torch.get_num_threads(), config.parallel.world_size),
        sizes=PipelineSizes(
            num_stages=len(stages),
            max_tokens=max_num_batched_tokens(config),
            row_floats=row_floats(native_extension(), spec.hidden_size),
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            num_experts=tuple(layer.mlp.num_experts if isinstance(layer.mlp, MoeSpec) else 0 for layer in spec.layers),
            feature_floats=(len(kept_layers) + 2) * spec.hidden_size if has_heads else 0,
        ),
        kept_layers=kept_layers,
        num_host_pages=num_host_pages(config, report),
        slots_file=page_files[0] if page_files else -1,
        context_size=config.decode_context_parallel_size,
        expert_ranks=placement_lists(find_placements(config, spec)),
        first_rank=1 if is_spawned else 0,
        link=None if group is None else (socket.gethostbyname(group.address), secrets.token_hex(SESSION_BYTES)),
        needed_bytes=tuple(each.weight_bytes + each.kv_bytes for each in stage_memories(config, report)),
        options={} if is_spawned else config_fields(config),
        num_states=memory.num_states,
        num_state_checkpoints=memory.num_state_checkpoints,
    )


def _start_stages(
    config: EngineConfig, report: ModelReport, stage_config: StageConfig, slab: HostSlab | None
) -> tuple[PipelineExecutor, ModelReport]:
    """Start the processes, or wait for those that a launcher has started, until they are ready."""
    memory, spec = report.memory, report.spec
    options = launch_options(
        config,
        areas=stage_config.sizes.areas(),
        subgroups=stage_config.subgroups,
        pass_fds=(*stage_config.rows_files, *((stage_config.slots_file,) if stage_config.slots_file >= 0 else ())),
    )
    group = launched_group(config)
    if group is None:
        torch.set_num_threads(stage_config.num_threads[0])  # of what the leader samples
        start = start_ray_workers if stage_config.first_rank == 0 else spawn_workers
        workers = start(WORKER_MODULE, stage_config.first_rank + len(stage_config.places), stage_config.to_json(), options)
    else:
        workers = lead_group(group, stage_config.to_json(), options)
    own_stage = None
    try:
        if isinstance(workers, RemoteWorkers):
            _check_hosts(config, stage_config, spec)
            stage_config = replace(stage_config, slots_file=-1)  # each process has the pages of its own layers
        ready: dict[str, Any] = {}
        if stage_config.first_rank == 0:
            try:
                own_stage, ready = _build_own_stage(config, stage_config, workers)
            except WorkerError:
                workers.raise_failure()
                raise
        workers.startup.ready(ready)
        told = [status.ready for status in workers.wait_ready()[stage_config.first_rank :]]
        own = [int(each["packed_weight_bytes"]) for each in told]
        _log_stages(stage_config, own, workers.num_on_host is not None)
        spared = sum(int(each["spared_weight_bytes"]) for each in told)
        report = replace(report, packed_weight_bytes=sum(own), spared_weight_bytes=spared)
        has_rope_variants = spec.rope_switch_len(memory.max_model_len) is not None
        placements = find_placements(config, spec)
        placed = None if placements is None else PlacedLoads(placements, config.parallel.shares)
        executor = PipelineExecutor(stage_config, memory, workers, own, has_rope_variants, own_stage, placed)
        executor.open_host_tier(stage_config.num_host_pages, config.prefill_listen is not None, slab)
        return executor, report
    except BaseException:
        if own_stage is not None:
            own_stage.close()
        workers.kill()
        raise


def _check_hosts(config: EngineConfig, stage_config: StageConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for what stages on several hosts do not support."""
    if stage_config.link is None:
        raise ConfigError(
            "distributed_executor_backend is 'ray', but its workers share no memory with the leader, as stages must: "
            "start them where processes see each other, or with torchrun"
        )
    check_hosts(config, spec)


def _build_own_stage(
    config: EngineConfig, stage_config: StageConfig, workers: WorkerGroup | RemoteWorkers
) -> tuple[OwnStage, dict[str, int]]:
    """Compare the processes that a launcher has started, and load the first stage in this one."""
    workers.startup.stage("comparing ranks")
    check_fingerprints(workers.communicator, fingerprint(Path(stage_config.folder), stage_config.options))
    num_on_host = workers.num_on_host
    num_threads = stage_config.num_threads[0] if num_on_host is None else threads_of_host(config.num_threads, num_on_host)
    torch.set_num_threads(num_threads)
    check_stage_memory(stage_config, 0)
    if isinstance(workers, RemoteWorkers):
        means = meet_stages(stage_config, 0, workers.barrier, workers.communicator)
        workers.watch_barriers(means.barriers.values())
    else:
        barriers = attach_subgroups(workers.memory, 0, stage_config.subgroups)
        rows_file = stage_config.rows_files[0] if stage_config.rows_files else None
        means = StageMeans(PipelineMemory(workers.memory, stage_config.sizes), None, barriers, rows_file)
    place = stage_config.places[0]
    workers.startup.stage(f"loading weights of {place.describe()}")
    try:
        decoder, plan, part = build_stage(stage_config, place, means.barriers, means.rows_file)
        executor = StageExecutor(decoder, plan, stage_config, place, means, workers.barrier)
        executor.open_host_tier(stage_config.num_host_pages, part)
    except BaseException:
        means.close_links()
        raise
    ready = {"packed_weight_bytes": decoder.weight_bytes, "spared_weight_bytes": executor.spared_bytes}
    timeout_s = config.distributed_timeout_s if isinstance(workers, RemoteWorkers) else None
    return OwnStage(executor, means.memory, workers.barrier, timeout_s), ready


def _log_stages(config: StageConfig, weight_bytes: Sequence[int], has_hosts: bool) -> None:
    ranks = "" if len(config.shares) == 1 else f" and {len(config.shares)} ranks each"
    logger.info(
        "pipeline parallel  %d stages of %s layers%s, threads %s, weights %s",
        len(config.layers),
        ", ".join(map(str, config.layers)),
        ranks,
        "of each host" if has_hosts else ", ".join(map(str, config.num_threads)),
        ", ".join(map(format_bytes, weight_bytes)),
    )
