"""Drafters: draft models and draft heads on a device. They are loaded with the model and counted in its memory plan.

Weights and buffers are allocated before memory is measured, and so is the largest step. The cache has as many blocks as the
model's: their bytes add to those of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from quire.base.errors import InvariantError
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.contracts.kv_spec import KvSpec
from quire.contracts.memory import ModelReport, format_bytes
from quire.contracts.speculative import SpeculativeConfig
from quire.kernels.triton.tile_table import active_table
from quire.kv.device_pool import DeviceKvPool
from quire.model.checkpoint import open_parameters
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_vocabulary import DeviceVocabulary, load_vocabulary
from quire.model.heads.device_head import DeviceHead
from quire.model.heads.head_spec import LayerHead, ParallelHead
from quire.model.heads.parallel_model import ParallelModel
from quire.quant.parameters import Parameter, StoredParameter
from quire.quant.policy import DEVICE_POLICIES
from quire.speculate.draft_model import MAX_CATCH_UP, DraftModelProposer
from quire.speculate.head_proposer import MAX_PENDING, HeadProposer, Shape
from quire.speculate.head_trees import rank_logits
from quire.speculate.medusa import MedusaProposer, medusa_tree
from quire.speculate.proposer import Proposer
from quire.speculate.sources import LAYER_KINDS, find_draft_model, find_layer_head, find_parallel_head, longest_drafted
from quire.worker.device.draft_chains import DeviceChains, DraftCache, HeadChains, best_shares
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.graphs import GraphCapturer, StepGraphs
from quire.worker.device.launched_step import StepSizes
from quire.worker.device.memory import most_step_tokens
from quire.worker.device.precompile import CompileJob, Precompilation, arch_of
from quire.worker.device.variants import ServedHead

logger = get_logger(__name__)


class DraftedModel(NamedTuple):
    """The model that is drafted for, on its device.

    sizes         of its steps
    capturer      of steps; None: they are launched one by one
    compilations  that have begun; drafters add theirs
    """

    config: EngineConfig
    report: ModelReport
    decoder: DeviceDecoder
    sizes: StepSizes
    capturer: GraphCapturer | None
    compilations: list[Precompilation]

    @property
    def drafting(self) -> SpeculativeConfig:
        """How is drafted."""
        if self.config.speculative_config is None:
            raise InvariantError("nothing is to be drafted")
        return self.config.speculative_config

    @property
    def most_tokens(self) -> int:
        """Tokens of a step at most, padding included."""
        return max(self.sizes.max_num_batched_tokens, self.sizes.max_num_seqs)

    def compile_ahead(self, job: CompileJob, parameters: Mapping[str, Parameter | StoredParameter]) -> Precompilation | None:
        """Begin to compile what drafting launches."""
        found = compile_ahead(self.decoder.device, job, parameters)
        self.compilations.extend([] if found is None else [found])
        return found


class Drafter(ABC):
    """What drafts with weights of its own.

    method       that it is of
    block_bytes  of its cache under one block of the model's
    held_bytes   of what it keeps of sequences, at most
    executors     what launches its steps, if it has any
    """

    method: str
    block_bytes: int = 0
    held_bytes: int = 0
    executors: Sequence[GpuStepExecutor] = ()

    @abstractmethod
    def run_full(self) -> None:
        """Run what takes as much memory as drafting ever will."""

    @abstractmethod
    def give_pool(self, num_blocks: int) -> None:
        """Give it a cache of so many blocks."""

    @abstractmethod
    def proposer(self) -> Proposer:
        """Return what drafts with it, once it has its cache."""


def load_drafter(target: DraftedModel) -> Drafter | None:
    """Load what drafts with weights of its own, and have the model keep what it reads; None where nothing does.

    Raises ConfigError, ModelFormatError or UnsupportedError.
    """
    drafting = target.config.speculative_config
    for method in () if drafting is None else drafting.methods:  # of these one alone has weights
        if method == "draft_model":
            return _DraftModel(target)
        if method in LAYER_KINDS:
            return _Head(method, target)
        if method == "medusa":
            return _Medusa(target)
    return None


class _StepDrafter(Drafter):
    """A drafter that runs steps over a KV cache, which has one block at first."""

    def __init__(
        self,
        decoder: DeviceDecoder | DeviceHead,
        kv: KvSpec,
        sizes: StepSizes,
        target: DraftedModel,
        compilation: Precompilation | None,
    ) -> None:
        self._decoder, self._sizes = decoder, sizes
        self._p_min = target.drafting.p_min_of(self.method)
        self._cache = DraftCache(DeviceKvPool(kv, 1, decoder.device))
        self._executor = GpuStepExecutor(decoder, self._cache.pool, sizes, StepGraphs(target.capturer))
        self._executor.compilation = compilation
        self.block_bytes, self.executors = kv.bytes_per_block, (self._executor,)

    def run_full(self) -> None:
        """See Drafter."""
        sizes, decoder = self._sizes, self._decoder
        self._executor.run_full(sizes.max_num_batched_tokens, sizes.max_num_seqs, sizes.max_model_len)
        if self._p_min > 0:
            shape = sizes.max_num_seqs, decoder.spec.vocab_size
            best_shares(torch.zeros(shape, dtype=decoder.dtype, device=decoder.device))

    def give_pool(self, num_blocks: int) -> None:
        """See Drafter."""
        self._cache.pool = DeviceKvPool(self._cache.spec, num_blocks, self._decoder.device)
        self._executor.give_pool(self._cache.pool)
        num_bytes = num_blocks * self.block_bytes
        logger.info("drafts (%s) have a KV cache of %s under the model's blocks", self.method, format_bytes(num_bytes))


class _DraftModel(_StepDrafter):
    method = "draft_model"

    def __init__(self, target: DraftedModel) -> None:
        drafting, report, device = target.drafting, target.report, target.decoder.device
        folder, spec = find_draft_model(drafting, report)
        self._max_len = longest_drafted(drafting, spec, report)
        kv = KvSpec.on_device(spec, report.memory.kv.block_size, spec.dtype)
        sizes = _draft_sizes(target.sizes, self._max_len, MAX_CATCH_UP)
        parameters = open_parameters(folder, spec)
        job = CompileJob(folder, spec, drafting.quantization, False, kv, sizes, 0, active_table())
        compilation = target.compile_ahead(job, parameters)
        policy = None if drafting.quantization is None else DEVICE_POLICIES[drafting.quantization]
        decoder = DeviceDecoder(spec, parameters, self._max_len, device, policy)
        super().__init__(decoder, kv, sizes, target, compilation)
        self._chains = DeviceChains(decoder, self._executor, self._cache, sizes)

    def proposer(self) -> Proposer:
        """See Drafter."""
        most = self._sizes.max_num_batched_tokens  # its own, which take as many as the model's at least
        return DraftModelProposer(self._chains, self._max_len, self._p_min, most)


class _Head(_StepDrafter):
    def __init__(self, method: str, target: DraftedModel) -> None:
        drafting, report, decoder = target.drafting, target.report, target.decoder
        _, head = find_layer_head(drafting, method, report)
        self.method, self._target = method, target
        self._max_len = longest_drafted(drafting, head.body, report)
        kv = KvSpec.on_device(head.body, report.memory.kv.block_size, head.body.dtype)
        most_waiting = max(2 * MAX_PENDING, kv.block_size)
        sizes = _draft_sizes(target.sizes, self._max_len, most_waiting)
        served = ServedHead.of(head, kv, sizes._replace(has_trees=drafting.top_k > 1))
        compilation = self._compile_head(served)
        decoder.keep_features(head.aux_hidden_state_layers, target.most_tokens)
        # A pass of trees has logits of all tokens that a level has, of all sequences.
        self._most_rows = sizes.max_num_seqs * drafting.top_k
        most_rows = max(sizes.max_num_batched_tokens, self._most_rows)
        self.model = DeviceHead(head, decoder, self._max_len, most_rows, _whole_vocabulary(target, head))
        super().__init__(self.model, kv, sizes, target, compilation)
        self._chains = HeadChains(self.model, self._executor, self._cache, sizes)
        self._head = replace(head, parameters={})  # they are on the device
        # Places of every sequence may wait, and stand in one piece when all are read; so may those of the last two steps.
        num_waiting = sizes.max_num_seqs * min(most_waiting, sizes.max_model_len) + target.most_tokens
        self.held_bytes = 2 * num_waiting * head.body.hidden_size * self.model.dtype.itemsize

    def _compile_head(self, served: ServedHead) -> Precompilation | None:
        config, report, sizes = self._target.config, self._target.report, self._target.sizes
        chosen = report.folder, report.spec, config.quantization, config.deterministic
        job = CompileJob(*chosen, report.memory.kv, sizes, 0, active_table(), head=served)
        return self._target.compile_ahead(job, open_parameters(report.folder, report.spec))

    def run_full(self) -> None:
        """See Drafter."""
        features = self._target.decoder.features_at(range(self._target.sizes.max_num_batched_tokens))
        self.model.fuse_features(features)
        del features
        super().run_full()
        if self._target.drafting.top_k > 1:
            model = self.model
            rows = torch.zeros(self._most_rows, model.spec.hidden_size, dtype=model.dtype, device=model.device)
            wide, _ = rank_logits(model.logits(rows))
            wide.logsumexp(-1)

    def proposer(self) -> Proposer:
        """See Drafter."""
        drafting = self._target.drafting
        shape = Shape(drafting.top_k, drafting.depth_of(self.method), drafting.p_min_of(self.method))
        return HeadProposer(self._chains, self._head, self._cache, self._max_len, shape)


class _Medusa(Drafter):
    method = "medusa"

    def __init__(self, target: DraftedModel) -> None:
        self._drafting, self._decoder, self._num_rows = target.drafting, target.decoder, target.sizes.max_num_seqs
        _, head = find_parallel_head(target.drafting, target.report)
        target.decoder.keep_features((), target.most_tokens)
        self._head = _on_device(head, target.decoder.device)
        self.model = ParallelModel(self._head, None)
        self.held_bytes = 2 * self._num_rows * target.decoder.spec.hidden_size * target.decoder.dtype.itemsize

    def run_full(self) -> None:
        """See Drafter."""
        hidden = self._decoder.features_at([0] * self._num_rows)
        self.model.logits(hidden, self.model.num_heads).softmax(-1)

    def give_pool(self, num_blocks: int) -> None:
        """See Drafter: heads that do not attend have no cache."""

    def proposer(self) -> Proposer:
        """See Drafter."""
        drafting, head = self._drafting, self._head
        return MedusaProposer(
            self.model, head.vocabulary, drafting.top_k, drafting.depth_of(self.method), medusa_tree(drafting, head)
        )


def _whole_vocabulary(target: DraftedModel, head: LayerHead) -> DeviceVocabulary | None:
    """Load the embedding and the LM head that a draft head shares, where the model on this GPU has parts of them; else None."""
    decoder, report, config = target.decoder, target.report, target.config
    if decoder.ranks is None:
        return None
    policy = None if config.quantization is None else DEVICE_POLICIES[config.quantization]
    parameters = open_parameters(report.folder, report.spec)
    return load_vocabulary(parameters, report.spec, decoder.device, head.parameters, policy, decoder.is_in_order)


def _draft_sizes(sizes: StepSizes, max_model_len: int, most_known: int) -> StepSizes:
    """Return the step sizes of a drafter: as many sequences as the model's, with up to most_known tokens of each at once."""
    most = most_step_tokens(max(sizes.max_num_batched_tokens, most_known), sizes.max_num_seqs, max_model_len)
    return StepSizes(sizes.max_num_seqs, most, max_model_len, has_drafts=True)


def compile_ahead(
    device: torch.device, job: CompileJob, parameters: Mapping[str, Parameter | StoredParameter]
) -> Precompilation | None:
    """Begin to compile what drafting launches, while weights are loaded; the job's arch is that of the device."""
    return Precompilation(job._replace(arch=arch_of(device)), parameters) if device.type == "cuda" else None


def _on_device(head: ParallelHead, device: torch.device) -> ParallelHead:
    blocks = tuple(
        tuple((weight.to(device), None if bias is None else bias.to(device)) for weight, bias in block) for block in head.blocks
    )
    vocabulary = None if head.vocabulary is None else head.vocabulary.to(device)
    return replace(head, blocks=blocks, heads=tuple(output.to(device) for output in head.heads), vocabulary=vocabulary)
