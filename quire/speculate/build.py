"""Build the speculator that a configuration describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.base.errors import InvariantError
from quire.base.logging import get_logger
from quire.contracts.kv_spec import KvSpec
from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import ModelSpec
from quire.contracts.speculative import SpeculativeConfig
from quire.kernels.native import load_native
from quire.kv.pool import KvPool
from quire.model.build import Model, build_model, runs_natively
from quire.model.checkpoint import open_parameters
from quire.model.heads.build import build_head
from quire.model.heads.native_vocabulary import NativeVocabulary
from quire.model.heads.parallel_model import ParallelModel
from quire.model.native_decoder import NativeDecoder
from quire.quant.policy import POLICIES, QuantizationPolicy
from quire.speculate.draft_model import DraftModelProposer
from quire.speculate.head_proposer import HeadProposer, Shape
from quire.speculate.layer_skip import LayerSkipProposer
from quire.speculate.lookahead import LookaheadProposer
from quire.speculate.medusa import MedusaProposer, medusa_tree
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
from quire.speculate.sources import LAYER_KINDS, find_draft_model, find_layer_head, find_parallel_head, longest_drafted
from quire.speculate.speculator import Speculator
from quire.speculate.suffix import SuffixProposer
from quire.speculate.target import Target

logger = get_logger(__name__)

_NONE: Mapping[str, Proposer] = {}


def build_speculator(
    config: SpeculativeConfig,
    report: ModelReport,
    target: Target | NativeVocabulary | None,
    limits: StepLimits,
    there: Mapping[str, Proposer] = _NONE,
) -> Speculator:
    """Return a speculator with the proposers of the configuration's methods.

    report, target  of the model that verifies; the target is None if only proposers in `there` read the model, and its
                    vocabulary if its layers are in other processes
    limits          of its steps
    there           method -> proposer that is already built, such as those that draft on a GPU

    Raises ConfigError, ModelFormatError or UnsupportedError.
    """
    if config.is_typical:
        logger.warning("typical acceptance is lossy: sampled outputs differ from plain decoding, and depend on the drafts")
    builder = _Builder(config, report, target, limits)
    proposers = [there[method] if method in there else builder.build(method) for method in config.methods]
    proposer = proposers[0] if len(proposers) == 1 else MergedProposer(proposers, config.max_tokens)
    return Speculator(config, proposer, report.spec.vocab_size, limits.num_drafts)


def count_drafts(config: SpeculativeConfig, report: ModelReport, limits: StepLimits) -> DraftBytes:
    """Return the memory that drafting needs in addition to the model, with a KV pool of the report's size.

    Raises ConfigError, ModelFormatError or UnsupportedError, as build_speculator does.
    """
    total, memory = verification_bytes(config, report.spec.vocab_size, limits), report.memory
    for method in config.methods:
        if method == "draft_model":
            spec = find_draft_model(config, report)[1]
            num_kv_bytes = _kv_spec(report, spec, spec).bytes_per_block * memory.num_kv_blocks
            total += draft_model_bytes(spec, num_kv_bytes, memory, limits)
        elif method == "medusa":
            total += parallel_head_bytes(find_parallel_head(config, report)[1], limits)
        elif method in LAYER_KINDS:
            head = find_layer_head(config, method, report)[1]
            num_kv_bytes = _kv_spec(report, head.body, report.spec).bytes_per_block * memory.num_kv_blocks
            total += layer_head_bytes(head, num_kv_bytes, memory, limits)
    return total


def _kv_spec(report: ModelReport, spec: ModelSpec, runs_as: ModelSpec) -> KvSpec:
    """Return the KV spec of a drafter. It has float32 in place of float16 if native kernels run `runs_as`: they lack
    float16."""
    memory = report.memory
    is_native = runs_natively(runs_as, memory.kv.block_size)
    return KvSpec.of(spec, memory.kv.block_size, "float32" if is_native and spec.dtype == "float16" else spec.dtype)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Builds proposers; checks for each whether it fits into memory together with those before it."""

    config: SpeculativeConfig
    report: ModelReport
    target: Target | NativeVocabulary | None
    limits: StepLimits
    taken: list[DraftBytes] = field(default_factory=list[DraftBytes])
    names: list[str] = field(default_factory=list[str])

    def build(self, method: str) -> Proposer:
        """Return the proposer of a method."""
        config = self.config
        match method:
            case "draft_model":
                return self._draft_model()
            case "eagle" | "eagle3" | "mtp" | "deepseek_mtp":
                return self._layer_head(method)
            case "medusa":
                return self._medusa()
            case "self":
                return LayerSkipProposer(self._target, config.skipped_layers or ())
            case "suffix":
                return SuffixProposer(config)
            case "lookahead":
                return LookaheadProposer(config)
            case _:
                return NgramProposer(config)

    def _layer_head(self, method: str) -> HeadProposer:
        config, model, memory = self.config, self._head_target, self.report.memory
        folder, head = find_layer_head(config, method, self.report)
        kv = _kv_spec(self.report, head.body, self.report.spec)
        num_kv_bytes = kv.bytes_per_block * memory.num_kv_blocks
        self._check_fits(str(folder), layer_head_bytes(head, num_kv_bytes, memory, self.limits))
        if head.aux_hidden_state_layers and not isinstance(model, NativeVocabulary):
            model.keep_inputs(head.aux_hidden_state_layers)
        max_len = longest_drafted(config, head.body, self.report)
        pool = KvPool(kv, memory.num_kv_blocks)
        runs = build_head(head, model, max_len, self._policy)
        return HeadProposer(runs, head, pool, max_len, Shape(config.top_k, config.depth_of(method), config.p_min_of(method)))

    def _medusa(self) -> MedusaProposer:
        config = self.config
        folder, head = find_parallel_head(config, self.report)
        self._check_fits(str(folder), parallel_head_bytes(head, self.limits))
        is_native = isinstance(self._head_target, NativeDecoder | NativeVocabulary)
        model = ParallelModel(head, load_native() if is_native else None, self._policy)
        return MedusaProposer(model, head.vocabulary, config.top_k, config.depth_of("medusa"), medusa_tree(config, head))

    def _draft_model(self) -> DraftModelProposer:
        config, memory = self.config, self.report.memory
        folder, spec = find_draft_model(config, self.report)
        kv = _kv_spec(self.report, spec, spec)
        num_kv_bytes = kv.bytes_per_block * memory.num_kv_blocks
        self._check_fits(str(folder), draft_model_bytes(spec, num_kv_bytes, memory, self.limits))
        max_len = longest_drafted(config, spec, self.report)
        decoder = build_model(spec, open_parameters(folder, spec), max_len, kv.block_size, self._policy)
        return DraftModelProposer(Target(decoder, KvPool(kv, memory.num_kv_blocks)), max_len, config.p_min_of("draft_model"))

    def _check_fits(self, name: str, taken: DraftBytes) -> None:
        self.taken.append(taken)
        self.names.append(name)
        verifying = verification_bytes(self.config, self.report.spec.vocab_size, self.limits)
        check_drafts_fit(" and ".join(self.names), sum(self.taken, verifying), self.report.memory)

    @property
    def _target(self) -> Target:
        if self.target is None or isinstance(self.target, NativeVocabulary):
            raise InvariantError(f"the methods {self.config.methods} need the target model, which was not given")
        return self.target

    @property
    def _head_target(self) -> Model | NativeVocabulary:
        return self.target if isinstance(self.target, NativeVocabulary) else self._target.model

    @property
    def _policy(self) -> QuantizationPolicy | None:
        return None if self.config.quantization is None else POLICIES[self.config.quantization]
