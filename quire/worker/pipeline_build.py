"""Start the processes of a pipeline's stages, and make the executor that leads them."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport, format_bytes
from quire.model.stage_decoder import row_floats
from quire.parallel.barrier import native_extension
from quire.parallel.launch import LaunchOptions, spawn_workers
from quire.worker.memory import max_num_batched_tokens
from quire.worker.parallel_build import divide_threads
from quire.worker.pipeline_executor import PipelineExecutor
from quire.worker.pipeline_memory import PipelineSizes
from quire.worker.pipeline_plan import stages_of
from quire.worker.pipeline_stage import StageConfig

logger = get_logger(__name__)

WORKER_MODULE = "quire.worker.pipeline_worker"


def build_pipeline(config: EngineConfig, report: ModelReport) -> tuple[PipelineExecutor, ModelReport]:
    """Start a process for each stage; return the executor when all have loaded their layers.

    Raises what any stage fails with.
    """
    spec, memory = report.spec, report.memory
    stages = stages_of(config, report)
    threads = divide_threads(config.num_threads or torch.get_num_threads(), len(stages))
    stage_config = StageConfig(
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
        layers=tuple(stage.num_layers for stage in stages),
        num_threads=threads,
        sizes=PipelineSizes(
            num_stages=len(stages),
            max_tokens=max_num_batched_tokens(config),
            row_floats=row_floats(native_extension(), spec.hidden_size),
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
        ),
    )
    torch.set_num_threads(threads[0])  # of what the leader samples
    options = LaunchOptions(areas=stage_config.sizes.areas())
    workers = spawn_workers(WORKER_MODULE, len(stages) + 1, stage_config.to_json(), options)
    try:
        workers.startup.ready({})
        told = [status.ready for status in workers.wait_ready()[1:]]
        own = [int(ready["packed_weight_bytes"]) for ready in told]
        logger.info(
            "pipeline parallel  %d stages of %s layers, threads %s, weights %s",
            len(stages),
            ", ".join(map(str, stage_config.layers)),
            ", ".join(map(str, threads)),
            ", ".join(map(format_bytes, own)),
        )
        spared = int(told[-1]["spared_weight_bytes"])
        report = replace(report, packed_weight_bytes=sum(own), spared_weight_bytes=spared)
        has_rope_variants = spec.rope_switch_len(memory.max_model_len) is not None
        return PipelineExecutor(stage_config, memory, workers, spec.vocab_size, has_rope_variants), report
    except BaseException:
        workers.kill()
        raise
