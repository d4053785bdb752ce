"""All kernels that serving a model launches, found without a GPU by steps on a device without memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from quire.contracts.kv_spec import KvDtype, KvSpec
from quire.contracts.model_spec import ModelSpec
from quire.kernels.triton.launching import collected_launches, run_all
from quire.kernels.triton.precompile import variant_of
from quire.kernels.triton.sampling import Choices, RowOptions, sample_launches
from quire.kernels.triton.tiles import CHUNK
from quire.kernels.triton.variant import Variant
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_context import ContextRanks
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_linear import DEQUANTIZE_FROM
from quire.model.device_ranks import DeviceRanks
from quire.model.device_shards import DeviceShard
from quire.model.heads.device_head import DeviceHead
from quire.model.heads.head_spec import LayerHead
from quire.model.parameters import parameter_shapes
from quire.model.token_runs import TreePlaces
from quire.parallel.communicator import EndedTransfer, Transfer
from quire.quant.parameters import Parameter, StoredParameter
from quire.quant.policy import QuantizationPolicy
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.graphs import StepGraphs
from quire.worker.device.host_step import HostStep, full_step
from quire.worker.device.launched_step import StepSizes
from quire.worker.expert_parallel import linear_placements
from quire.worker.step_executor import Moves

_META = torch.device("meta")


class ServedModel(NamedTuple):
    """A model as it is served.

    parameters   all of them: tensors, or still in their checkpoint
    policy       how they are quantised while they are loaded; None: run as they are stored
    is_in_order  see DeviceDecoder
    shares       of tensor-parallel ranks: the part of rank 0 is served
    num_redundant  copies of experts in a layer, with expert parallelism; None: without
    kv_dtypes    of each layer's cache, see KvSpec.layer_dtypes
    has_homes    ranks attend to sequences of their own
    """

    spec: ModelSpec
    parameters: Mapping[str, Parameter | StoredParameter]
    policy: QuantizationPolicy | None = None
    is_in_order: bool = False
    shares: tuple[float, ...] = (1.0,)
    num_redundant: int | None = None
    kv_dtypes: tuple[KvDtype, ...] = ()
    has_homes: bool = False
    context_size: int = 1

    def kinds(self) -> list[tuple[object, ...]]:
        """Return of each layer what its launches depend on, and last of what is in no layer."""
        shapes, num_layers = parameter_shapes(self.spec), len(self.spec.layers)
        dtypes = (*(self.kv_dtypes or (None,) * num_layers), None)
        found: list[list[object]] = [list(kind) for kind in zip((*self.spec.layers, None), dtypes, strict=True)]
        for name, parameter in self.parameters.items():
            index, rest = _split(name)
            layout = parameter.layout if isinstance(parameter, StoredParameter) else ()
            scheme = self.policy and self.policy.scheme_of(name, shapes.get(name, (0,))[-1], num_layers)
            found[num_layers if index is None else index].append((rest, layout, scheme))
        return [tuple(kind) for kind in found]

    def few_layers(self) -> ServedModel:
        """Return the model with few layers, whose kinds follow each other as in all: a layer ends with the next one's norm.

        All of a model whose layers refer to others by their numbers.
        """
        if self.spec.per_layer_inputs is not None or any(one.attention.reads_other_layer for one in self.spec.layers):
            return self
        kinds, layers = self.kinds()[:-1], self.spec.layers
        chosen, pairs = [0][: len(kinds)], list[tuple[object, object]]()
        for index, pair in enumerate(itertools.pairwise(kinds)):
            if pair not in pairs:
                pairs.append(pair)
                chosen += [index + 1] if kinds[chosen[-1]] == pair[0] else [index, index + 1]
        if kinds and kinds[chosen[-1]] != kinds[-1]:
            chosen.append(len(kinds) - 1)
        own = {name: parameter for name, parameter in self.parameters.items() if _split(name)[0] is None}
        for place, source in enumerate(chosen):
            own |= {
                f"layers.{place}.{rest}": parameter
                for name, parameter in self.parameters.items()
                for index, rest in [_split(name)]
                if index == source
            }
        spec = replace(self.spec, layers=tuple(layers[index] for index in chosen))
        dtypes = tuple(self.kv_dtypes[index] for index in chosen) if self.kv_dtypes else ()
        return self._replace(spec=spec, parameters=own, kv_dtypes=dtypes)


def _split(name: str) -> tuple[int | None, str]:
    """Return the layer of a parameter, None where it is in none, and its name there."""
    parts = name.split(".", 2)
    return (int(parts[1]), parts[2]) if parts[0] == "layers" else (None, name)


class ServedHead(NamedTuple):
    """A draft head, and the sizes of its steps.

    head    without its parameters, of which the shapes are here by name
    kv      of the head
    sizes   of its steps
    """

    head: LayerHead
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    kv: KvSpec
    sizes: StepSizes

    @classmethod
    def of(cls, head: LayerHead, kv: KvSpec, sizes: StepSizes) -> ServedHead:
        """Return a head whose parameters are still there."""
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in head.parameters.items())
        vocabulary = None if head.vocabulary is None else torch.zeros_like(head.vocabulary)  # whatever it says
        return cls(replace(head, parameters={}, vocabulary=vocabulary), shapes, kv, sizes)


def serving_variants(model: ServedModel, kv: KvSpec, sizes: StepSizes) -> list[Variant]:
    """Return the variants of the kernels that any steps of these sizes launch, without repetition, those of the start first."""
    few = model.few_layers()
    decoder = meta_decoder(few, sizes.max_model_len)
    cached = decoder.spec if decoder.ranks is None else decoder.ranks.shard.cached_spec
    own = KvSpec.on_device(cached, kv.block_size, kv.dtype, kv.window_tokens is not None)
    return _step_variants(decoder, replace(own, layer_dtypes=few.kv_dtypes), sizes)


def head_variants(model: ServedModel, served: ServedHead) -> list[Variant]:
    """Return those that the steps of a draft head launch, which shares the model's embedding and LM head."""
    head, sizes = meta_head(model, served), served.sizes
    found = _step_variants(head, served.kv, sizes)
    with torch.inference_mode(), collected_launches() as launches:
        for num_tokens in _powers_of_two(sizes.max_num_batched_tokens):
            head.fuse_features(torch.empty(num_tokens, served.head.feature_size, dtype=head.dtype, device=_META))
    return list(dict.fromkeys([*found, *map(variant_of, launches)]))


def meta_head(model: ServedModel, served: ServedHead) -> DeviceHead:
    """Return a head without memory."""
    dtype, sizes = getattr(torch, served.head.body.dtype), served.sizes
    parameters = {name: torch.empty(shape, dtype=dtype, device=_META) for name, shape in served.shapes}
    target = meta_decoder(model.few_layers(), sizes.max_model_len)
    most_tokens = max(sizes.max_num_batched_tokens, sizes.max_num_seqs)
    return DeviceHead(replace(served.head, parameters=parameters), target, sizes.max_model_len, most_tokens)


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _step_variants(decoder: DeviceDecoder | DeviceHead, kv: KvSpec, sizes: StepSizes) -> list[Variant]:
    pool = DeviceKvPool(kv, 2, _META, num_window_blocks=1)
    executor = GpuStepExecutor(decoder, pool, sizes, StepGraphs(NotCapturing()))
    one_by_one = GpuStepExecutor(decoder, pool, sizes, StepGraphs())
    with torch.inference_mode(), collected_launches() as launches:
        # The engine begins with these; then come the first prompts and decode steps.
        one_by_one.run_full(sizes.max_num_batched_tokens, sizes.max_num_seqs, sizes.max_model_len)
        executor.capture_samples()
        # Those of steps with prompts differ from the others below in their attention alone, and that not by their tokens.
        prompts = [key for key in executor.prompts.keys if key.num_tokens == executor.prompts.max_tokens]
        for key in [*prompts, *executor.capture_sizes.keys]:
            executor.capture(key)
        for step in _mixed_steps(one_by_one, sizes):
            one_by_one.launch(step, one_by_one.samplings[0], BlockTableUpdates([]))
            if sizes.has_trees:
                one_by_one.launch(_with_trees(step), one_by_one.samplings[0], BlockTableUpdates([]))
        if sizes.has_trees:
            moves = Moves([1], [0], [0, 1])
            one_by_one.launch(None, one_by_one.samplings[0], BlockTableUpdates([], (), moves, window_moves=moves))
        for dtype, has_masks, has_cuts in itertools.product({decoder.dtype, torch.float32}, (False, True), (False, True)):
            _sample(dtype, decoder.spec.vocab_size, has_masks, has_cuts)
    return list(dict.fromkeys(map(variant_of, launches)))


class NotCapturing:
    """Stands for a capturer where nothing runs: steps have the sizes of captured ones, and are launched one by one."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return the step."""
        return step


def meta_decoder(model: ServedModel, max_model_len: int) -> DeviceDecoder:
    """Return a decoder without memory."""
    ranks = None
    if len(model.shares) > 1:
        placements = None
        if model.num_redundant is not None:
            placements = linear_placements(model.spec, model.num_redundant, model.shares)
        parts = placements, model.context_size, model.has_homes
        shard = DeviceShard.of(model.spec, 0, model.shares, model.is_in_order, *parts)
        context = None if model.context_size == 1 else ContextRanks(_NoExchange(model.context_size), 0)
        ranks = DeviceRanks(_NoExchange(len(model.shares)), shard, context=context)
    options = model.policy, model.is_in_order, ranks
    return DeviceDecoder(model.spec, dict(model.parameters), max_model_len, _META, *options)


class _NoExchange:
    """Stands for a communicator on a device without memory."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, out: torch.Tensor, part: torch.Tensor, sizes: Sequence[int] | None = None) -> None:
        """Do nothing."""

    def all_reduce(self, x: torch.Tensor, in_order: bool = True) -> None:
        """Do nothing."""

    def begin_all_to_all(self, out: torch.Tensor, x: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> Transfer:
        """Do nothing."""
        return EndedTransfer(0.0)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, sizes: Sequence[int] | None = None) -> None:
        """Do nothing."""


def _mixed_steps(executor: GpuStepExecutor, sizes: StepSizes) -> Iterator[HostStep]:
    """Yield steps with prompts of every kind that kernels distinguish: powers of two, one chunk of keys or more, and whether
    quantised weights are dequantised."""
    longest = sizes.max_model_len
    most = min(sizes.max_num_batched_tokens, sizes.max_num_seqs * longest)
    powers = _powers_of_two(most)
    kinds = {most, DEQUANTIZE_FROM - 1, *(count for power in powers for count in (power, power + 1))}
    for count in sorted(count for count in kinds if count <= most):
        # As many sequences as so many tokens take: short sequences must not leave out the tiles of large steps.
        yield full_step(count, -(-count // longest), longest, executor.padding_slot, longest, sizes.max_num_drafts)
        if count <= min(CHUNK, longest):
            yield full_step(count, 1, count, executor.padding_slot)
    # As many tokens are sampled as there are sequences and drafts.
    num_drafts, most_sampled = sizes.max_num_drafts, min(most, sizes.max_num_seqs + sizes.max_num_drafts)
    for count in sorted({*(power for power in powers if num_drafts < power < most_sampled), most_sampled}):
        if num_drafts and count > num_drafts:
            # More sequences, with fewer drafts of each, where so many tokens do not fit fewer.
            num_sequences = max(count - num_drafts, -(-count // longest))
            yield full_step(count, num_sequences, longest, executor.padding_slot, 1, num_drafts)
    num_long = max(num_queries for num_queries, _ in executor.tile_kinds)
    for num_short, context_len in itertools.product((1, 2, 4, 8, 16), {min(CHUNK, longest), longest}):
        num_tokens = min(num_long + num_short, context_len + num_short, sizes.max_num_batched_tokens)
        if sizes.max_num_seqs > 1 and num_tokens > num_short:
            yield full_step(num_tokens, 2, context_len, executor.padding_slot, num_short)


def _with_trees(step: HostStep) -> HostStep:
    """Return a step some of whose drafts may be trees."""
    num_tokens, num_sequences = len(step.given_ids), len(step.counts)
    nothing = np.zeros(num_tokens, np.int64), np.zeros(num_sequences, np.int32), np.zeros(num_tokens, np.uint64)
    return replace(step, trees=TreePlaces(*nothing))


def _sample(dtype: torch.dtype, vocab_size: int, has_masks: bool, has_cuts: bool) -> None:
    """Launch what the host's sampler asks the device for."""
    dtypes = (torch.float32, torch.int32, torch.int32, torch.float64, torch.float32, torch.int64, torch.int64)
    columns = [torch.empty(2, dtype=column, device=_META) for column in dtypes]
    masks = torch.empty(2, -(-vocab_size // 32), dtype=torch.int32, device=_META) if has_masks else None
    choices = Choices(*(torch.empty(2, dtype=column, device=_META) for column in (torch.int64, torch.int32)))
    logits = torch.empty(2, vocab_size, dtype=dtype, device=_META)
    run_all(sample_launches(choices, logits, RowOptions(*columns, masks), has_cuts))
