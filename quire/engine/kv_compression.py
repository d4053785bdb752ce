"""Whether a model and an engine can compress the KV cache of a request."""

from __future__ import annotations

from quire.base.errors import RequestError
from quire.contracts.config import EngineConfig
from quire.contracts.kv_compression import KvCompression
from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import ModelSpec

_HOST_METHODS = ("ngram", "suffix")
"""Speculative methods that read tokens only. All others have a KV cache with the block ids of the model's."""


def compression_refusal(report: ModelReport, config: EngineConfig) -> str | None:
    """Return why no request can have a KV compression that evicts blocks; None: nothing is in the way."""
    if report.device == "cpu" and config.parallel.world_size > 1:
        return "with tensor-parallel or context-parallel ranks or pipeline stages"
    if any(layer.attention.window is not None for layer in report.spec.layers):
        return "with sliding windows, which limit the KV cache already"
    return _common_refusal(report, config)


def bounds_refusal(report: ModelReport, config: EngineConfig) -> str | None:
    """Return why no request can have the method bounds; None: nothing is in the way."""
    parallel, speculative = config.parallel, config.speculative_config
    context_size = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    if report.device == "cpu" and (context_size > 1 or parallel.enable_dp_attention):
        return "with context-parallel ranks or enable_dp_attention"
    if speculative is not None and speculative.suffix_decoding_use_tree_spec:
        return "with drafts that form trees"
    return _common_refusal(report, config)


def _common_refusal(report: ModelReport, config: EngineConfig) -> str | None:
    spec, speculative = report.spec, config.speculative_config
    if report.device != "cpu":
        return "on a GPU"
    if spec.implementation == "transformers":
        return "with a model that the transformers library computes"
    if speculative is not None and not set(speculative.methods) <= set(_HOST_METHODS):
        return f"with drafts of method {speculative.method!r}, which have a KV cache of their own; ngram and suffix have none"
    return _refusal_of_model(spec)


def _refusal_of_model(spec: ModelSpec) -> str | None:
    attentions = [layer.attention for layer in spec.layers]
    if spec.has_recurrent_state or not spec.is_causal:
        return "with a recurrent state, or with attention in both directions"
    if any(one.block_indexer is not None for one in attentions):
        return "with an indexer of blocks of keys, which counts tokens by their place in the cache"
    if any(one.latent is not None or one.shared_kv is not None for one in attentions):
        return "with multi-head latent attention, or keys that are values too"
    if any(one.alibi_slopes for one in attentions):
        return "with ALiBi, whose scores depend on how far keys are away"
    return None


def score_refusal(report: ModelReport) -> str | None:
    """Return why blocks cannot be scored, as all methods but streaming need; None: they can."""
    if report.memory.kv.dtype == "turboquant_4bit":
        return "kv_cache_dtype 'turboquant_4bit', whose keys are rotated"
    if any(layer.attention.has_sinks for layer in report.spec.layers):
        return "the attention sinks of this model"
    return None


def check_compression(
    compression: KvCompression | None, refusal: str | None, score_refusal: str | None, bounds_refusal: str | None
) -> None:
    """Raise RequestError for a compression that this engine cannot do; see the functions above."""
    if compression is None:
        return
    if not compression.evicts and bounds_refusal is not None:
        raise RequestError(f"kv_compression: method 'bounds' is not supported {bounds_refusal}: leave it out", "kv_compression")
    if not compression.evicts:
        return
    if refusal is not None:
        raise RequestError(f"kv_compression is not supported {refusal}: leave it out", "kv_compression")
    if compression.needs_scores and score_refusal is not None:
        raise RequestError(
            f"kv_compression: method {compression.method!r} is not supported with {score_refusal}; 'streaming' is",
            "kv_compression",
        )
