"""Build the speculator that a configuration describes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from quire.base.errors import ConfigError, UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.kv_spec import KvSpec
from quire.contracts.memory import MemoryPlan, ModelReport, format_bytes
from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec
from quire.contracts.speculative import SpeculativeConfig
from quire.kernels.native import load_native
from quire.kv.pool import KvPool
from quire.model.build import Model, build_model, runs_natively
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.heads.build import build_head, read_layer_head, read_parallel_head
from quire.model.heads.parallel_model import ParallelModel
from quire.model.native_decoder import NativeDecoder
from quire.model.parameters import parameter_shapes
from quire.model.resolve import resolve_model
from quire.quant.policy import POLICIES, QuantizationPolicy
from quire.speculate.draft_model import DraftModelProposer
from quire.speculate.head_proposer import HeadProposer
from quire.speculate.layer_skip import LayerSkipProposer
from quire.speculate.lookahead import LookaheadProposer
from quire.speculate.medusa import MedusaProposer
from quire.speculate.merged import MergedProposer
from quire.speculate.ngram import NgramProposer
from quire.speculate.proposer import Proposer
from quire.speculate.speculator import Speculator
from quire.speculate.suffix import SuffixProposer
from quire.speculate.target import Target

logger = get_logger(__name__)


def build_speculator(config: SpeculativeConfig, report: ModelReport, target: Target) -> Speculator:
    """Return a speculator with the proposers of the configuration's methods.

    report, target  of the model that verifies. Raises ConfigError, ModelFormatError or UnsupportedError.
    """
    proposers = [_build_proposer(method, config, report, target) for method in config.methods]
    proposer = proposers[0] if len(proposers) == 1 else MergedProposer(proposers, config.max_tokens)
    return Speculator(config, proposer, report.spec.vocab_size)


def _build_proposer(method: str, config: SpeculativeConfig, report: ModelReport, target: Target) -> Proposer:
    match method:
        case "draft_model":
            policy = None if config.quantization is None else POLICIES[config.quantization]
            return _build_draft_model(str(config.model), policy, report.spec, report.memory)
        case "eagle" | "eagle3":
            return _build_layer_head(method, _find(str(config.model)), config, report, target.model)
        case "mtp" | "deepseek_mtp":
            folder = report.folder if config.model is None else _find(config.model)
            return _build_layer_head("mtp", folder, config, report, target.model)
        case "medusa":
            head = read_parallel_head(_find(str(config.model)), report.spec)
            model = ParallelModel(head, load_native() if isinstance(target.model, NativeDecoder) else None)
            return MedusaProposer(model, head.vocabulary, config.draft_top_k)
        case "self":
            return LayerSkipProposer(target, config.skipped_layers or ())
        case "suffix":
            return SuffixProposer(config)
        case "lookahead":
            return LookaheadProposer(config)
        case _:
            return NgramProposer(config)


def _find(model: str) -> Path:
    try:
        return resolve_model(model)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: model: {error}") from None


def _build_layer_head(
    kind: Literal["eagle", "eagle3", "mtp"], folder: Path, config: SpeculativeConfig, report: ModelReport, model: Model
) -> HeadProposer:
    head = read_layer_head(folder, kind, report.spec)
    if head.tap_layers:
        model.keep_inputs(head.tap_layers)
    memory = report.memory
    block_size = memory.kv.block_size
    is_half = runs_natively(report.spec, block_size) and head.body.dtype == "float16"
    kv = KvSpec.of(head.body, block_size, "float32" if is_half else head.body.dtype)
    num_weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in head.parameters.values())
    _check_fits(str(folder), num_weight_bytes, kv.bytes_per_block * memory.num_kv_blocks, memory)
    max_len = min(head.body.max_positions, memory.max_model_len)
    policy = None if config.quantization is None else POLICIES[config.quantization]
    return HeadProposer(build_head(head, model, max_len, policy), head, KvPool(kv, memory.num_kv_blocks), max_len)


def _build_draft_model(
    model: str, policy: QuantizationPolicy | None, target: ModelSpec, memory: MemoryPlan
) -> DraftModelProposer:
    folder = _find(model)
    try:
        spec = read_model_spec(folder, "auto")
    except UnsupportedError as error:
        heads = 'for a head that was trained to draft give its method: "eagle", "eagle3", "medusa" or "mtp"'
        raise UnsupportedError(f"speculative_config: the draft model {model} cannot be used: {error}; {heads}") from None
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
    _check_fits(model, num_weight_bytes, num_kv_bytes, memory)
    max_len = min(spec.max_positions, memory.max_model_len)
    decoder = build_model(spec, open_parameters(folder, spec), max_len, block_size, policy)
    return DraftModelProposer(decoder, KvPool(kv, memory.num_kv_blocks), max_len)


def _check_fits(name: str, num_weight_bytes: int, num_kv_bytes: int, memory: MemoryPlan) -> None:
    """Refuse what drafts where it does not fit beside the model. Raises ConfigError."""
    left = memory.available_bytes - memory.weight_bytes - memory.activation_bytes - memory.kv_bytes
    if num_weight_bytes + num_kv_bytes > left:
        raise ConfigError(
            f"the draft model does not fit: its weights take {format_bytes(num_weight_bytes)} and its KV cache "
            f"{format_bytes(num_kv_bytes)}, but beside the model {format_bytes(max(0, left))} are left; lower num_kv_blocks"
        )
    logger.info("draft model %s: weights %s, KV cache %s", name, format_bytes(num_weight_bytes), format_bytes(num_kv_bytes))
