"""EngineInfo of a loaded engine."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from quire.contracts.model_spec import MoeSpec
from quire.serving.link.messages import EngineInfo

if TYPE_CHECKING:  # it loads torch, which only the engine's process needs
    from quire.contracts.memory import ModelReport
    from quire.engine.llm_engine import LLMEngine


def describe_engine(engine: LLMEngine, load_time_s: float) -> EngineInfo:
    """Return what the server has to know of an engine."""
    config, report, limits = engine.config, engine.report, engine.scheduler.config
    num_parameters = sum(math.prod(shape) for shape in report.parameters.values())
    num_active = num_active_parameters(report)
    return EngineInfo(
        model=config.model,
        architecture=report.spec.model_type,
        dtype=report.spec.dtype,
        quantization=config.quantization,
        device="cpu",
        vocab_size=report.spec.vocab_size,
        hidden_size=report.spec.hidden_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        num_kv_blocks=limits.num_kv_blocks,
        eos_token_ids=sorted(report.spec.eos_token_ids),
        generation_defaults=dict(report.generation_defaults),
        tokenizer_folder=None if engine.tokenizer is None else str(report.tokenizer_folder),
        max_logprobs=config.max_logprobs,
        scheduling_policy=limits.policy,
        enable_prefix_caching=limits.enable_prefix_caching,
        seed=config.seed,
        num_parameters=num_parameters,
        num_active_parameters=num_active,
        weight_bytes=round(report.memory.weight_bytes * num_active / num_parameters),
        kv_bytes_per_token=report.memory.kv.bytes_per_token,
        load_time_s=load_time_s,
        pid=os.getpid(),
    )


def num_active_parameters(report: ModelReport) -> int:
    """Return how many parameters one token is multiplied with: of a mixture only its experts, and no embedding rows."""
    spec, total = report.spec, 0
    for name, shape in report.parameters.items():
        if name == "pos.weight" or (name == "embed.weight" and not spec.is_tied):
            continue
        size = math.prod(shape)
        if ".experts." in name:
            mlp = spec.layers[int(name.split(".")[1])].mlp
            if isinstance(mlp, MoeSpec):
                size = size * mlp.top_k // mlp.num_experts
        total += size
    return total
