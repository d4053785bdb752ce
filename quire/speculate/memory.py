"""Memory that drafting needs in addition to the model; a configuration that does not fit is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.contracts.memory import MemoryPlan, format_bytes
from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec
from quire.contracts.speculative import SpeculativeConfig
from quire.model.heads.head_spec import LayerHead, ParallelHead
from quire.model.native_model import int8_head_bytes
from quire.model.native_scratch import scratch_bytes
from quire.model.parameters import parameter_shapes
from quire.speculate.draft_model import MAX_CATCH_UP
from quire.speculate.head_proposer import MAX_PENDING
from quire.speculate.speculator import MAX_DRAFT_LOGITS

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Maximum numbers of sequences, tokens and drafts of a step; num_drafts None: as many as a CPU verifies."""

    num_sequences: int
    num_tokens: int
    num_drafts: int | None = None


@dataclass(frozen=True, slots=True)
class DraftBytes:
    """Memory of a proposer: weights, KV cache, and the maximum of its state and scratch memory."""

    weights: int = 0
    kv: int = 0
    work: int = 0

    def __add__(self, other: DraftBytes) -> DraftBytes:
        return DraftBytes(self.weights + other.weights, self.kv + other.kv, self.work + other.work)


def layer_head_bytes(head: LayerHead, kv_bytes: int, memory: MemoryPlan, limits: StepLimits) -> DraftBytes:
    """Return the memory of a head with a decoder layer.

    A step keeps the inputs of the layers that the head reads, and passes on a copy. Up to 2 * MAX_PENDING positions of every
    sequence, or one block if that is longer, may be pending, and one pass may compute them all.
    """
    feature = 4 * head.feature_size
    num_waiting = min(max(2 * MAX_PENDING, memory.kv.block_size) * limits.num_sequences, memory.num_kv_tokens)
    scratch = _scratch(head.body, num_waiting, memory)
    logits = 4 * limits.num_sequences * head.body.vocab_size
    weights = sum(tensor.numel() * tensor.element_size() for tensor in head.parameters.values())
    return DraftBytes(weights, kv_bytes, 2 * limits.num_tokens * feature + 2 * num_waiting * feature + scratch + logits)


def parallel_head_bytes(head: ParallelHead, limits: StepLimits) -> DraftBytes:
    """Return the memory of Medusa heads: hidden states of a step, the last of each sequence, and the logits of all heads."""
    blocks = [tensor for block in head.blocks for pair in block for tensor in pair if tensor is not None]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in (*blocks, *head.heads))
    vocab_size, hidden_size = head.heads[0].shape
    logits_bytes = 4 * limits.num_sequences * len(head.heads) * vocab_size
    return DraftBytes(weights, 0, 4 * hidden_size * (limits.num_tokens + 4 * limits.num_sequences) + 2 * logits_bytes)


def draft_model_bytes(spec: ModelSpec, kv_bytes: int, memory: MemoryPlan, limits: StepLimits) -> DraftBytes:
    """Return the memory of a draft model: a pass computes up to MAX_CATCH_UP tokens of every sequence."""
    weights = sum(map(math.prod, parameter_shapes(spec).values())) * DTYPE_BYTES[spec.dtype] + int8_head_bytes(spec)
    num_tokens = min(MAX_CATCH_UP * limits.num_sequences, memory.num_kv_tokens)
    return DraftBytes(weights, kv_bytes, _scratch(spec, num_tokens, memory) + 4 * limits.num_sequences * spec.vocab_size)


def verification_bytes(config: SpeculativeConfig, vocab_size: int, limits: StepLimits) -> DraftBytes:
    """Return the memory of verification: the logits of all drafts of a step."""
    wanted = limits.num_sequences * config.max_tokens * vocab_size
    return DraftBytes(work=4 * min(wanted, max(MAX_DRAFT_LOGITS, config.max_tokens * vocab_size)))


def check_drafts_fit(name: str, taken: DraftBytes, memory: MemoryPlan) -> None:
    """Check that drafting fits into memory together with the model, and log its size. Raises ConfigError."""
    left = memory.available_bytes - memory.needed_bytes
    if taken.weights + taken.kv + taken.work > left:
        raise ConfigError(
            f"not enough memory for speculative decoding ({name}): weights need {format_bytes(taken.weights)}, the KV cache "
            f"{format_bytes(taken.kv)}, and working memory up to {format_bytes(taken.work)}, but the model leaves only "
            f"{format_bytes(max(0, left))}; lower num_kv_blocks or max_num_seqs"
        )
    logger.info(
        "drafts (%s): weights %s, KV cache %s, working memory up to %s",
        *(name, format_bytes(taken.weights), format_bytes(taken.kv), format_bytes(taken.work)),
    )


def _scratch(spec: ModelSpec, num_tokens: int, memory: MemoryPlan) -> int:
    return scratch_bytes(spec, num_tokens, min(memory.max_model_len, memory.num_kv_tokens), torch.get_num_threads())
