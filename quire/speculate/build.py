"""Build the speculator that a configuration describes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.base.errors import ConfigError, UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.kv_spec import KvSpec
from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import ModelSpec
from quire.contracts.speculative import SpeculativeConfig
from quire.kernels.native import load_native
from quire.kv.pool import KvPool
from quire.model.build import build_model, runs_natively
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.heads.build import build_head, find_head_kind, read_layer_head, read_parallel_head
from quire.model.heads.parallel_model import ParallelModel
from quire.model.native_decoder import NativeDecoder
from quire.model.resolve import resolve_model
from quire.quant.policy import POLICIES, QuantizationPolicy
from quire.speculate.draft_model import DraftModelProposer
from quire.speculate.head_proposer import HeadProposer, Shape
from quire.speculate.layer_skip import LayerSkipProposer
from quire.speculate.lookahead import LookaheadProposer
from quire.speculate.medusa import MedusaProposer
from quire.speculate.memory import (
    DraftBytes,
    StepLimits,
    check_drafts_fit,
    draft_model_bytes,
    layer_head_bytes,
    parallel_head_bytes,
    verification_bytes,
)
from quire.speculate.merged import MergedProposer
from quire.speculate.ngram import NgramProposer
from quire.speculate.proposer import Proposer
from quire.speculate.speculator import Speculator
from quire.speculate.suffix import SuffixProposer
from quire.speculate.target import Target

logger = get_logger(__name__)

_LayerKind = Literal["eagle", "eagle3", "mtp"]
_LAYER_KINDS: dict[str, _LayerKind] = {"eagle": "eagle", "eagle3": "eagle3", "mtp": "mtp", "deepseek_mtp": "mtp"}


def build_speculator(config: SpeculativeConfig, report: ModelReport, target: Target, limits: StepLimits) -> Speculator:
    """Return a speculator with the proposers of the configuration's methods.

    report, target  of the model that verifies
    limits          of its steps

    Raises ConfigError, ModelFormatError or UnsupportedError.
    """
    if config.acceptance_method == "typical_acceptance_sampler":
        logger.warning("typical acceptance is lossy: sampled outputs are not those of plain decoding, and depend on the drafts")
    builder = _Builder(config, report, target, limits)
    proposers = [builder.build(method) for method in config.methods]
    proposer = proposers[0] if len(proposers) == 1 else MergedProposer(proposers, config.max_tokens)
    return Speculator(config, proposer, report.spec.vocab_size)


def count_drafts(config: SpeculativeConfig, report: ModelReport, limits: StepLimits) -> DraftBytes:
    """Return what drafts take beside the model, with a pool as the report has it.

    Raises ConfigError, ModelFormatError or UnsupportedError, as build_speculator does.
    """
    total, memory = verification_bytes(config, report.spec.vocab_size, limits), report.memory
    for method in config.methods:
        if method == "draft_model":
            spec = _read_draft_spec(str(config.model), _find(str(config.model), config.revision))
            num_kv_bytes = _kv_spec(report, spec, spec).bytes_per_block * memory.num_kv_blocks
            total += draft_model_bytes(spec, num_kv_bytes, memory, limits)
        elif method == "medusa":
            total += parallel_head_bytes(read_parallel_head(_find_head(config, "medusa", report), report.spec), limits)
        elif method in _LAYER_KINDS:
            kind = _LAYER_KINDS[method]
            head = read_layer_head(_find_head(config, kind, report), kind, report.spec)
            num_kv_bytes = _kv_spec(report, head.body, report.spec).bytes_per_block * memory.num_kv_blocks
            total += layer_head_bytes(head, num_kv_bytes, memory, limits)
    return total


def _kv_spec(report: ModelReport, spec: ModelSpec, runs_as: ModelSpec) -> KvSpec:
    """Return the cache of what drafts; the native kernels, if they run `runs_as`, have no float16."""
    block_size = report.memory.kv.block_size
    is_half = runs_natively(runs_as, block_size) and spec.dtype == "float16"
    return KvSpec.of(spec, block_size, "float32" if is_half else spec.dtype)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Builds proposers, each after a look at whether it fits."""

    config: SpeculativeConfig
    report: ModelReport
    target: Target
    limits: StepLimits

    def build(self, method: str) -> Proposer:
        """Return the proposer of a method."""
        config = self.config
        match method:
            case "draft_model":
                return self._draft_model(str(config.model))
            case "eagle" | "eagle3" | "mtp" | "deepseek_mtp":
                return self._layer_head(_LAYER_KINDS[method])
            case "medusa":
                return self._medusa(_find_head(config, "medusa", self.report))
            case "self":
                return LayerSkipProposer(self.target, config.skipped_layers or ())
            case "suffix":
                return SuffixProposer(config)
            case "lookahead":
                return LookaheadProposer(config)
            case _:
                return NgramProposer(config)

    def _layer_head(self, kind: _LayerKind) -> HeadProposer:
        config, model, memory = self.config, self.target.model, self.report.memory
        folder = _find_head(config, kind, self.report)
        head = read_layer_head(folder, kind, self.report.spec)
        kv = _kv_spec(self.report, head.body, self.report.spec)
        num_kv_bytes = kv.bytes_per_block * memory.num_kv_blocks
        self._check_fits(str(folder), layer_head_bytes(head, num_kv_bytes, memory, self.limits))
        if head.tap_layers:
            model.keep_inputs(head.tap_layers)
        max_len = self._max_len(head.body)
        pool = KvPool(kv, memory.num_kv_blocks)
        runs = build_head(head, model, max_len, self._policy)
        return HeadProposer(runs, head, pool, max_len, Shape(config.top_k, config.depth, config.min_share))

    def _medusa(self, folder: Path) -> MedusaProposer:
        config = self.config
        head = read_parallel_head(folder, self.report.spec)
        self._check_fits(str(folder), parallel_head_bytes(head, self.limits))
        model = ParallelModel(head, load_native() if isinstance(self.target.model, NativeDecoder) else None, self._policy)
        choices = config.medusa_choices or (head.choices if config.draft_top_k is None else None)
        return MedusaProposer(model, head.vocabulary, config.top_k, config.depth, choices)

    def _draft_model(self, model: str) -> DraftModelProposer:
        folder, target, memory = _find(model, self.config.revision), self.report.spec, self.report.memory
        spec = _read_draft_spec(model, folder)
        if spec.vocab_size != target.vocab_size:
            raise ConfigError(
                f"the draft model {model} has a vocabulary of {spec.vocab_size}, the model one of {target.vocab_size}; "
                "take a draft model with the same tokenizer"
            )
        kv = _kv_spec(self.report, spec, spec)
        num_kv_bytes = kv.bytes_per_block * memory.num_kv_blocks
        self._check_fits(model, draft_model_bytes(spec, num_kv_bytes, memory, self.limits))
        max_len = self._max_len(spec)
        decoder = build_model(spec, open_parameters(folder, spec), max_len, kv.block_size, self._policy)
        return DraftModelProposer(decoder, KvPool(kv, memory.num_kv_blocks), max_len, self.config.min_share)

    def _max_len(self, spec: ModelSpec) -> int:
        longest = min(spec.max_positions, self.report.memory.max_model_len)
        return longest if self.config.max_model_len is None else min(longest, self.config.max_model_len)

    def _check_fits(self, name: str, taken: DraftBytes) -> None:
        verifying = verification_bytes(self.config, self.report.spec.vocab_size, self.limits)
        check_drafts_fit(name, taken + verifying, self.report.memory)

    @property
    def _policy(self) -> QuantizationPolicy | None:
        return None if self.config.quantization is None else POLICIES[self.config.quantization]


def _find(model: str, revision: str | None) -> Path:
    try:
        return resolve_model(model, revision)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: model: {error}") from None


def _find_head(config: SpeculativeConfig, kind: Literal["eagle", "eagle3", "medusa", "mtp"], report: ModelReport) -> Path:
    """Return the folder of a head, the model's own where none is given. Raises ConfigError for a head of another kind."""
    if config.model is None:
        return report.folder
    folder = _find(config.model, config.revision)
    found = find_head_kind(folder)
    if found is not None and found != kind:
        raise ConfigError(f'speculative_config: {config.model} is a head of another kind: give it with "method": "{found}"')
    return folder


def _read_draft_spec(model: str, folder: Path) -> ModelSpec:
    kind = find_head_kind(folder)
    if kind is not None:
        raise ConfigError(
            f"speculative_config: {model} is no model, but a head that was trained to draft for one: give it with "
            f'"method": "{kind}"'
        )
    try:
        return read_model_spec(folder, "auto")
    except UnsupportedError as error:
        heads = 'for a head that was trained to draft give its method: "eagle", "eagle3", "medusa" or "mtp"'
        raise UnsupportedError(f"speculative_config: the draft model {model} cannot be used: {error}; {heads}") from None
