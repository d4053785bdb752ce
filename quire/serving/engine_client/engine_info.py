"""EngineInfo of a loaded engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import ModelSpec
from quire.serving.engine_client.messages import AttentionKind, EngineInfo

if TYPE_CHECKING:  # it loads torch, which only the engine's process needs
    from quire.engine.llm_engine import LLMEngine


def describe_engine(engine: LLMEngine, load_time_s: float) -> EngineInfo:
    """Return the description of an engine that the server needs."""
    config, report, limits = engine.config, engine.report, engine.scheduler.config
    bytes_per_s, flops_per_s = engine.measure_peaks()
    return EngineInfo(
        model=config.model,
        architecture=report.spec.model_type,
        dtype=report.spec.dtype,
        quantization=config.quantization,
        device=report.device,
        vocab_size=report.spec.vocab_size,
        hidden_size=report.spec.hidden_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        num_kv_blocks=limits.num_kv_blocks,
        eos_token_ids=sorted(report.spec.eos_token_ids),
        generation_defaults=dict(report.generation_defaults),
        model_folder=str(report.folder),
        tokenizer_folder=None if engine.tokenizer is None else str(report.tokenizer_folder),
        chat_template=config.chat_template,
        max_logprobs=config.max_logprobs,
        scheduling_policy=limits.policy,
        enable_prefix_caching=limits.enable_prefix_caching,
        seed=config.seed,
        num_parameters=report.num_parameters,
        num_active_parameters=report.num_active_parameters,
        weight_bytes=report.active_weight_bytes,
        kv_bytes_per_token=report.memory.kv.bytes_per_token,
        kv_cache_dtype=report.memory.kv.format_name,
        attention=_attention_kinds(report.spec, report.memory.kv, engine.windows),
        peak_bytes_per_s=bytes_per_s,
        peak_flops_per_s=flops_per_s,
        load_time_s=load_time_s,
        pid=os.getpid(),
        pooler=report.pooler,
        enable_lora=config.enable_lora,
        max_loras=config.max_loras if config.enable_lora else 0,
        role=engine.transfer.role,
        prefill_listen=None if engine.prefill is None else str(engine.prefill.server.address),
        takes_prefill_urls=engine.remote_prefill is not None and config.prefill_urls is None,
    )


def _attention_kinds(spec: ModelSpec, kv: KvSpec, windows: Sequence[int | None]) -> list[AttentionKind]:
    found: list[AttentionKind] = []
    for window in windows:
        places = [place for place, layer in enumerate(spec.layers) if layer.attention.window == window]
        # The shapes of compressed entries of all layers follow those of all layers.
        caches = [first + place for first in range(0, len(kv.layer_shapes), len(spec.layers)) for place in places]
        num_bytes = sum(map(kv.layer_bytes_per_token, caches))
        heads = [spec.layers[place].attention for place in places]
        found.append(AttentionKind(window, num_bytes, sum(one.num_heads * one.head_dim for one in heads)))
    return found
