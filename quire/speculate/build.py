"""Build the speculator that a configuration describes."""

from __future__ import annotations

import math

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.contracts.kv_spec import KvSpec
from quire.contracts.memory import MemoryPlan, format_bytes
from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec
from quire.contracts.speculative import SpeculativeConfig
from quire.kv.pool import KvPool
from quire.model.build import build_model, runs_natively
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.parameters import parameter_shapes
from quire.model.resolve import resolve_model
from quire.speculate.draft_model import DraftModelProposer
from quire.speculate.ngram import NgramProposer
from quire.speculate.proposer import Proposer
from quire.speculate.speculator import Speculator
from quire.speculate.suffix import SuffixProposer

logger = get_logger(__name__)


def build_speculator(config: SpeculativeConfig | None, spec: ModelSpec, memory: MemoryPlan) -> Speculator:
    """Return a speculator with the proposer of the configuration's method, without a configuration with none.

    spec, memory  of the model that verifies. Raises ConfigError, ModelFormatError or UnsupportedError.
    """
    if config is None:
        return Speculator(None, None, spec.vocab_size)
    proposer: Proposer
    if config.model is not None:
        proposer = _build_draft_model(config.model, spec, memory)
    elif config.method == "suffix":
        proposer = SuffixProposer(config)
    else:
        proposer = NgramProposer(config)
    return Speculator(config, proposer, spec.vocab_size)


def _build_draft_model(model: str, target: ModelSpec, memory: MemoryPlan) -> DraftModelProposer:
    folder = resolve_model(model, None)
    spec = read_model_spec(folder, "auto")
    if spec.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model {model} has a vocabulary of {spec.vocab_size}, the model one of {target.vocab_size}; "
            "take a draft model with the same tokenizer"
        )
    block_size = memory.kv.block_size
    is_half = runs_natively(spec, block_size) and spec.dtype == "float16"
    kv = KvSpec.of(spec, block_size, "float32" if is_half else spec.dtype)
    num_weight_bytes = sum(map(math.prod, parameter_shapes(spec).values())) * DTYPE_BYTES[spec.dtype]
    num_kv_bytes = kv.bytes_per_block * memory.num_kv_blocks
    left = memory.available_bytes - memory.weight_bytes - memory.activation_bytes - memory.kv_bytes
    if num_weight_bytes + num_kv_bytes > left:
        raise ConfigError(
            f"the draft model does not fit: its weights take {format_bytes(num_weight_bytes)} and its KV cache "
            f"{format_bytes(num_kv_bytes)}, but beside the model {format_bytes(max(0, left))} are left; lower num_kv_blocks"
        )
    logger.info("draft model %s: weights %s, KV cache %s", model, format_bytes(num_weight_bytes), format_bytes(num_kv_bytes))
    max_len = min(spec.max_positions, memory.max_model_len)
    decoder = build_model(spec, open_parameters(folder, spec), max_len, block_size)
    return DraftModelProposer(decoder, KvPool(kv, memory.num_kv_blocks), max_len)
