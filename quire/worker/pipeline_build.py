"""Start the processes of a pipeline's stages, and make the executor that leads them."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport, format_bytes
from quire.model.stage_decoder import row_floats
from quire.parallel.barrier import native_extension
from quire.parallel.launch import spawn_workers
from quire.worker.expert_parallel import find_placements, placement_lists
from quire.worker.memory import max_num_batched_tokens
from quire.worker.parallel_build import divide_threads, threads_release
from quire.worker.parallel_launch import launch_options
from quire.worker.pipeline_executor import PipelineExecutor
from quire.worker.pipeline_memory import PipelineSizes
from quire.worker.pipeline_plan import kept_layers_of, stages_of
from quire.worker.pipeline_stage import StageConfig

logger = get_logger(__name__)

WORKER_MODULE = "quire.worker.pipeline_worker"


def build_pipeline(config: EngineConfig, report: ModelReport) -> tuple[PipelineExecutor, ModelReport]:
    """Start the processes of all stages; return the executor when all have loaded their layers.

    Raises what any stage fails with.
    """
    num_files = config.pipeline_parallel_size if config.tensor_parallel_size > 1 else 0
    rows_files = [os.memfd_create("quire-rows", os.MFD_CLOEXEC) for _ in range(num_files)]
    release_threads = threads_release()

    def release() -> None:
        release_threads()
        for rows_file in rows_files:
            os.close(rows_file)

    try:
        stage_config = _stage_config(config, report, tuple(rows_files))
        torch.set_num_threads(stage_config.num_threads[0])  # of what the leader samples
        executor, report = _start_stages(config, report, stage_config)
    except BaseException:
        release()
        raise
    executor.release = release
    return executor, report


def _stage_config(config: EngineConfig, report: ModelReport, rows_files: tuple[int, ...]) -> StageConfig:
    spec, memory = report.spec, report.memory
    stages, kept_layers = stages_of(config, report), kept_layers_of(config, report)
    drafts = config.speculative_config
    has_heads = drafts is not None and drafts.has_draft_heads
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
        num_kv_blocks=memory.num_kv_blocks,
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
            feature_floats=(len(kept_layers) + 2) * spec.hidden_size if has_heads else 0,
        ),
        kept_layers=kept_layers,
        expert_ranks=placement_lists(find_placements(config, spec)),
    )


def _start_stages(config: EngineConfig, report: ModelReport, stage_config: StageConfig) -> tuple[PipelineExecutor, ModelReport]:
    """Start the processes and wait until they are ready."""
    places, memory, spec = stage_config.places, report.memory, report.spec
    options = launch_options(
        config,
        areas=stage_config.sizes.areas(),
        subgroups=stage_config.subgroups,
        pass_fds=stage_config.rows_files,
    )
    workers = spawn_workers(WORKER_MODULE, len(places) + 1, stage_config.to_json(), options)
    try:
        workers.startup.ready({})
        told = [status.ready for status in workers.wait_ready()[1:]]
        own = [int(ready["packed_weight_bytes"]) for ready in told]
        ranks = "" if len(stage_config.shares) == 1 else f" and {len(stage_config.shares)} ranks each"
        logger.info(
            "pipeline parallel  %d stages of %s layers%s, threads %s, weights %s",
            len(stage_config.layers),
            ", ".join(map(str, stage_config.layers)),
            ranks,
            ", ".join(map(str, stage_config.num_threads)),
            ", ".join(map(format_bytes, own)),
        )
        spared = sum(int(ready["spared_weight_bytes"]) for ready in told)
        report = replace(report, packed_weight_bytes=sum(own), spared_weight_bytes=spared)
        has_rope_variants = spec.rope_switch_len(memory.max_model_len) is not None
        return PipelineExecutor(stage_config, memory, workers, own, spec.vocab_size, has_rope_variants), report
    except BaseException:
        workers.kill()
        raise
