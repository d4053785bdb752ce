"""The scheduler's configuration for a loaded model."""

from __future__ import annotations

from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import ModelSpec
from quire.contracts.scheduler_config import SchedulerConfig
from quire.worker.memory import max_num_batched_tokens, max_state_drafts
from quire.worker.tiers import max_page_saves, num_host_pages, num_state_pages

logger = get_logger(__name__)


def make_scheduler_config(config: EngineConfig, report: ModelReport) -> SchedulerConfig:
    """Return the scheduler's configuration for a loaded model."""
    made = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens(config, report.device),
        max_model_len=report.memory.max_model_len,
        block_size=report.memory.kv.block_size,
        num_kv_blocks=report.memory.num_kv_blocks,
        enable_prefix_caching=config.enable_prefix_caching and report.spec.is_causal,
        computes_whole_prompts=not report.spec.is_causal,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        policy=config.scheduling_policy,
        rope_switch_len=report.spec.rope_switch_len(report.memory.max_model_len),
        num_pipeline_stages=config.pipeline_parallel_size,
        num_state_checkpoints=report.memory.num_state_checkpoints if report.spec.has_recurrent_state else None,
        max_num_drafts=max_state_drafts(config) if report.spec.has_recurrent_state else None,
        num_host_pages=num_host_pages(config, report),
        max_page_saves=max_page_saves(report),
        num_state_pages=num_state_pages(report.memory),
        has_block_pages=report.memory.kv.bytes_per_block > 0,
        kv_save=config.kv_save,
        loads_aside=report.device != "cpu",
        window_tokens=report.memory.kv.window_tokens,
        num_window_blocks=report.memory.num_window_blocks,
        num_block_places=report.memory.num_block_places,
        block_chunk=report.memory.block_chunk,
        num_homes=report.memory.num_homes,
    )
    _log_rope_variants(report.spec, made.rope_switch_len)
    return made


def _log_rope_variants(spec: ModelSpec, switch_len: int | None) -> None:
    if switch_len is None:
        return
    logger.info("sequences that outgrow %d tokens are computed again, with the rope of long sequences", switch_len)
    if any(layer.attention.rope is not None and layer.attention.rope.kind == "dynamic" for layer in spec.layers):
        logger.warning(
            "the dynamic rope of sequences longer than %d tokens is that of max_model_len: their tokens can differ from "
            "those of transformers, which changes the rope with every token",
            switch_len,
        )
