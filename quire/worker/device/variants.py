"""All kernels that serving a model launches, found without a GPU by steps on a device without memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.kernels.triton.ahead import Variant, variant_of
from quire.kernels.triton.launching import noted_launches, run_all
from quire.kernels.triton.sampling import Choices, RowOptions, sample_launches
from quire.kernels.triton.tiles import CHUNK
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.parameters import parameter_shapes
from quire.worker.device.graphs import StepGraphs
from quire.worker.device.host_step import SAMPLINGS, HostStep, full_step
from quire.worker.device.stepper import DeviceStepper, StepSizes, TableChanges

_META = torch.device("meta")


def serving_variants(spec: ModelSpec, kv: KvSpec, sizes: StepSizes, is_in_order: bool = False) -> list[Variant]:
    """Return the variants of the kernels that any steps of these sizes launch, without repetition."""
    decoder = meta_decoder(spec, sizes.max_model_len, is_in_order)
    pool = DeviceKvPool(KvSpec.of(decoder.spec, kv.block_size, kv.dtype), 1, _META)
    stepper = DeviceStepper(decoder, pool, sizes, StepGraphs(NotRecording()))
    one_by_one = DeviceStepper(decoder, pool, sizes, StepGraphs())
    with torch.inference_mode(), noted_launches() as launches:
        # Recorded steps with prompts differ from the others below in their attention alone, and that not by their tokens.
        prompts = [key for key in stepper.prompts.keys if key.num_tokens == stepper.prompts.max_tokens]
        for key in [*prompts, *stepper.grid.keys]:
            stepper.record(key)
        for step in _mixed_steps(one_by_one, sizes):
            one_by_one.launch(step, SAMPLINGS[0], TableChanges([]))
        for dtype, has_masks, has_cuts in itertools.product({decoder.dtype, torch.float32}, (False, True), (False, True)):
            _sample(dtype, spec.vocab_size, has_masks, has_cuts)
    return list(dict.fromkeys(map(variant_of, launches)))


class NotRecording:
    """Stands for a recorder where nothing runs: steps have the sizes of recorded ones, and are launched one by one."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return the step."""
        return step


def meta_decoder(spec: ModelSpec, max_model_len: int, is_in_order: bool = False) -> DeviceDecoder:
    """Return a decoder without memory that launches every kernel of a model's, but in fewer layers."""
    few = replace(spec, layers=tuple(_few_layers(spec.layers)))
    dtype: torch.dtype = getattr(torch, spec.dtype)
    parameters = {name: torch.empty(shape, dtype=dtype, device=_META) for name, shape in parameter_shapes(few).items()}
    return DeviceDecoder(few, parameters, max_model_len, _META, None, is_in_order)


def _few_layers(layers: tuple[LayerSpec, ...]) -> list[LayerSpec]:
    """Return layers in which everything that follows something in these does so: a layer's end is the next one's norm."""
    pairs: list[tuple[LayerSpec, LayerSpec]] = []
    for pair in itertools.pairwise(layers):
        if pair not in pairs:
            pairs.append(pair)
    return [*layers[:1], *itertools.chain.from_iterable(pairs), *layers[-1:]]


def _mixed_steps(stepper: DeviceStepper, sizes: StepSizes) -> Iterator[HostStep]:
    """Yield steps with prompts of every kind that kernels tell apart: by powers of two, and by what fits one chunk of keys."""
    most, longest = min(sizes.max_num_batched_tokens, sizes.max_model_len), sizes.max_model_len
    powers = [1 << power for power in range(most.bit_length())]
    for count in sorted({count for power in powers for count in (power, power + 1) if count <= most} | {most}):
        yield full_step(count, 1, longest, stepper.padding_line)
        if count <= CHUNK:
            yield full_step(count, 1, count, stepper.padding_line)
    num_long = max(num_queries for num_queries, _ in stepper.tile_kinds)
    for num_short, context_len in itertools.product((1, 2, 4, 8, 16), {min(CHUNK, longest), longest}):
        num_tokens = min(num_long + num_short, context_len + num_short, sizes.max_num_batched_tokens)
        if sizes.max_num_seqs > 1 and num_tokens > num_short:
            yield full_step(num_tokens, 2, context_len, stepper.padding_line, num_short)


def _sample(dtype: torch.dtype, vocab_size: int, has_masks: bool, has_cuts: bool) -> None:
    """Launch what the host's sampler asks the device for."""
    dtypes = (torch.float32, torch.int32, torch.int32, torch.float64, torch.float32, torch.int64, torch.int64)
    columns = [torch.empty(2, dtype=column, device=_META) for column in dtypes]
    masks = torch.empty(2, -(-vocab_size // 32), dtype=torch.int32, device=_META) if has_masks else None
    choices = Choices(*(torch.empty(2, dtype=column, device=_META) for column in (torch.int64, torch.int32)))
    logits = torch.empty(2, vocab_size, dtype=dtype, device=_META)
    run_all(sample_launches(choices, logits, RowOptions(*columns, masks), has_cuts))
