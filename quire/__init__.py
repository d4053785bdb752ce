"""quire: an LLM inference engine. `from quire import LLM, SamplingParams`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.base.errors import ConfigError, ModelFormatError, QuireError, RequestError, UnsupportedError
    from quire.contracts.config import EngineConfig
    from quire.contracts.constraint import GuidedDecodingParams, StructuredOutputsParams
    from quire.contracts.kv_compression import KvCompression
    from quire.contracts.lora import LoRARequest
    from quire.contracts.outputs import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
    )
    from quire.contracts.pooling_params import PoolingParams
    from quire.contracts.sampling_params import BeamSearchParams, SamplingParams
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.llm import LLM
    from quire.engine.llm_engine import LLMEngine

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "quire.engine.async_llm",
    "BeamSearchParams": "quire.contracts.sampling_params",
    "ClassificationOutput": "quire.contracts.outputs",
    "CompletionOutput": "quire.contracts.outputs",
    "ConfigError": "quire.base.errors",
    "EmbeddingOutput": "quire.contracts.outputs",
    "EmbeddingRequestOutput": "quire.contracts.outputs",
    "EngineConfig": "quire.contracts.config",
    "GuidedDecodingParams": "quire.contracts.constraint",
    "KvCompression": "quire.contracts.kv_compression",
    "LLM": "quire.engine.llm",
    "LLMEngine": "quire.engine.llm_engine",
    "LoRARequest": "quire.contracts.lora",
    "ModelFormatError": "quire.base.errors",
    "PoolingOutput": "quire.contracts.outputs",
    "PoolingParams": "quire.contracts.pooling_params",
    "PoolingRequestOutput": "quire.contracts.outputs",
    "QuireError": "quire.base.errors",
    "RequestError": "quire.base.errors",
    "RequestOutput": "quire.contracts.outputs",
    "SamplingParams": "quire.contracts.sampling_params",
    "ScoringOutput": "quire.contracts.outputs",
    "StructuredOutputsParams": "quire.contracts.constraint",
    "UnsupportedError": "quire.base.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "ClassificationOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "GuidedDecodingParams",
    "KvCompression",
    "LLMEngine",
    "LoRARequest",
    "ModelFormatError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "QuireError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "StructuredOutputsParams",
    "UnsupportedError",
]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used, so that `import quire` loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    if _HOMES[name].startswith("quire.engine"):
        importlib.import_module("quire.base.threads").prefer_short_spins()
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
