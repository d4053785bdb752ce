"""Packs the experts of mixture models for the native kernels, all of a layer at load and single ones later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.base.logging import get_logger
from quire.contracts.model_spec import ModelSpec, MoeSpec
from quire.model.native_weights import InputForm, NativeWeight, WeightPacker, input_form, is_made_exact
from quire.model.tensor_shards import ExpertShard
from quire.parallel.shards import ShardRange
from quire.parallel.step_pacer import StepPacer
from quire.quant.parameters import DenseOrQuantized, Parameter, QuantizedStack, StoredParameter, load_parameter
from quire.quant.weight import QuantizedWeight

logger = get_logger(__name__)

_CHECKED_ROWS = 1024
"""Elements of a weight that are copied at once."""

PackedExpert = tuple[NativeWeight | None, NativeWeight, NativeWeight]
"""Gate, if experts have one, up and down."""


class WeightForms:
    """In which form weights are packed: as stored, quantised on load, or dense.

    quantize  applied to every weight by its name, to each expert separately; None: weights stay as they are stored
    """

    def __init__(self, dtype: str, quantize: Callable[[str, Tensor], DenseOrQuantized] | None) -> None:
        self._dtype, self.quantize = dtype, quantize
        self._has_said_inputs = False

    def open(self, parameter: StoredParameter, index: int | None = None) -> DenseOrQuantized:
        """Return a stored weight, or that of one expert: in its stored form, or dense if it will be quantised."""
        if self.quantize is None:
            return parameter.open_quantized(index)
        return parameter.open() if index is None else parameter.open_expert(index)

    def of(self, name: str, weight: DenseOrQuantized) -> DenseOrQuantized:
        """Return a weight in the form in which it is packed: quantised if requested, or made exact, see `is_made_exact`."""
        if isinstance(weight, Tensor):
            return weight if self.quantize is None else self.quantize(name, weight)
        if not isinstance(weight, QuantizedWeight) or weight.is_token_quantized:
            return weight
        is_exact = is_made_exact(self._dtype)
        self._say_inputs(is_exact)
        return weight.dequantize() if is_exact else weight

    def _say_inputs(self, is_exact: bool) -> None:
        """Log once whether the inputs of integer weights are quantised."""
        if self._has_said_inputs:
            return
        self._has_said_inputs = True
        if is_exact:
            logger.info(
                "the checkpoint's quantised weights are run as float32, which is exact: it does not declare quantised inputs; "
                "dtype bfloat16 keeps the weights small and is faster"
            )
            return
        logger.info(
            "inputs of the checkpoint's quantised weights are rounded to int8, with a scale for each group of them, although "
            "it does not declare that: the kernels multiply integers; dtype float32 does without, in more memory"
        )


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The weights of one kind of all experts of a layer; module: their name without `.weight`."""

    module: str
    weights: Parameter | StoredParameter
    biases: Tensor | None

    def bias(self, index: int) -> Tensor | None:
        """Return the bias of an expert."""
        return None if self.biases is None else self.biases[index]

    def give_back(self, index: int) -> None:
        """Release the file's pages of an expert."""
        if isinstance(self.weights, StoredParameter):
            self.weights.give_back(index)


class ExpertPacker:
    """Packs experts. dense_stacks: names of modules that are kept dense, as the stored forms of their experts differ."""

    def __init__(self, forms: WeightForms, packer: WeightPacker, dtype: torch.dtype) -> None:
        self._forms, self._packer, self._dtype = forms, packer, dtype
        self.dense_stacks: set[str] = set()

    def pack(
        self, stack: ExpertStack, num_experts: int, ranges: tuple[ShardRange, ...], own: ExpertShard | None
    ) -> list[list[NativeWeight] | None]:
        """Return the weights of every expert of a stack, one for each range of its rows, and None for those of other ranks. All
        read their inputs in the same form: if the stored forms differ, the weights become dense."""
        bytes_before = self._packer.num_bytes
        packed: list[list[NativeWeight] | None] = []
        form: InputForm | None = None
        for index in range(num_experts):
            if own is not None and own.own_copies[index] < 0:
                other = self._form_of(stack, index)
                if index > 0 and other != form:
                    break
                form = other
                packed.append(None)
                continue
            # Check whole weights: all ranks must choose the same form.
            weight = self._packer.fitting(self._forms.of(f"{stack.module}.weight", self._open(stack, index)))
            if index > 0 and input_form(weight) != form:
                break
            form = input_form(weight)
            packed.append(self._pack_parts(stack, index, weight, ranges))
        if len(packed) == num_experts:
            return packed
        logger.warning("the experts of a layer are quantised in different forms: they are kept in %s", self._dtype)
        self.dense_stacks.add(stack.module)
        self._packer.num_bytes = bytes_before
        packed.clear()
        return [
            None if own is not None and own.own_copies[index] < 0 else self.pack_one(stack, index, ranges)
            for index in range(num_experts)
        ]

    def pack_one(self, stack: ExpertStack, index: int, ranges: tuple[ShardRange, ...]) -> list[NativeWeight]:
        """Return the weights of one expert, in the form that its layer has."""
        weight = self._open(stack, index)
        if self._forms.quantize is not None and isinstance(weight, Tensor):
            self._packer.take(weight.nbytes)
        if stack.module in self.dense_stacks:
            weight = weight if isinstance(weight, Tensor) else weight.dequantize(self._dtype)
        else:
            weight = self._packer.fitting(self._forms.of(f"{stack.module}.weight", weight))
        return self._pack_parts(stack, index, weight, ranges)

    def _form_of(self, stack: ExpertStack, index: int) -> InputForm | None:
        """Return the form in which an expert of another rank reads its inputs, which decides how all ranks keep theirs. An
        expert of a dense checkpoint is not opened, unless it is quantised on load: then its values must be finite."""
        quantize, weights = self._forms.quantize, stack.weights
        if quantize is None and isinstance(weights, StoredParameter) and not weights.is_quantized:
            return None
        weight = self._open(stack, index)
        if isinstance(weight, Tensor) and quantize is not None and is_finite(weight, self._dtype):
            weight = weight[:1]  # rows are quantised one by one, in the same form
            form = input_form(self._packer.fitting(self._forms.of(f"{stack.module}.weight", weight)))
        elif isinstance(weight, Tensor) and quantize is not None:
            form = input_form(self._packer.fitting(weight))
        else:
            form = input_form(self._packer.fitting(self._forms.of(f"{stack.module}.weight", weight)))
        stack.give_back(index)
        return form

    def _open(self, stack: ExpertStack, index: int) -> DenseOrQuantized:
        weights = stack.weights
        if isinstance(weights, StoredParameter):
            return self._forms.open(weights, index)
        if isinstance(weights, QuantizedStack):
            return weights.weights[index]
        return weights[index] if isinstance(weights, Tensor) else weights

    def _pack_parts(
        self, stack: ExpertStack, index: int, weight: DenseOrQuantized, ranges: tuple[ShardRange, ...]
    ) -> list[NativeWeight]:
        bias = stack.bias(index)
        # Gate and up of an expert are one job, which requires the same form.
        packed = [
            self._packer.pack(
                weight_rows(weight, rows.start, rows.stop),
                None if bias is None else bias[rows.start : rows.stop],
                may_be_short=False,
            )
            for rows in ranges
        ]
        stack.give_back(index)
        return packed


class ExpertLoader:
    """Reads single whole experts from the checkpoint while the model runs. Used by one thread at a time.

    open_parameters  returns all parameters of the model, as quire.model.checkpoint.open_parameters does
    quantize, dense_stacks  as when the model was built
    pacer            bounds what is read and written next to a step; a weight that is quantised on load counts as one piece
    """

    def __init__(
        self,
        native: ModuleType,
        spec: ModelSpec,
        open_parameters: Callable[[], Mapping[str, Parameter | StoredParameter]],
        quantize: Callable[[str, Tensor], DenseOrQuantized] | None,
        dense_stacks: frozenset[str],
        pacer: StepPacer | None = None,
    ) -> None:
        self._spec, self._open_parameters = spec, open_parameters
        self._parameters: Mapping[str, Parameter | StoredParameter] = {}
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self._packer = ExpertPacker(
            WeightForms(spec.dtype, quantize), WeightPacker(native, dtype, num_threads=1, pacer=pacer), dtype
        )
        self._packer.dense_stacks |= dense_stacks

    def load(self, layer: int, expert: int) -> PackedExpert:
        """Return the packed weights of an expert; whatever opening the checkpoint raises."""
        self._parameters = self._parameters or self._open_parameters()
        mlp = self._spec.layers[layer].mlp
        if not isinstance(mlp, MoeSpec):
            raise InvariantError(f"layer {layer} has no experts")
        size = mlp.expert.intermediate_size
        halves = (ShardRange(0, size), ShardRange(size, 2 * size))[: 2 if mlp.expert.is_gated else 1]
        *gates, up = self._packer.pack_one(self._stack(f"layers.{layer}.experts.gate_up"), expert, halves)
        outputs = (ShardRange(0, self._spec.hidden_size),)
        (down,) = self._packer.pack_one(self._stack(f"layers.{layer}.experts.down"), expert, outputs)
        return (gates[0] if gates else None), up, down

    def _stack(self, module: str) -> ExpertStack:
        biases = self._parameters.get(f"{module}.bias")
        loaded = None if biases is None else load_parameter(biases)
        if not isinstance(loaded, Tensor | None):
            raise TypeError(f"{module}.bias is quantised")
        return ExpertStack(module, self._parameters[f"{module}.weight"], loaded)


def is_finite(weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all values of a weight are finite, once they are rounded to a dtype."""
    return all(bool(torch.isfinite(rows.to(dtype)).all()) for rows in weight.split(_CHECKED_ROWS))


def weight_rows(weight: DenseOrQuantized, start: int, stop: int) -> DenseOrQuantized:
    """Return rows of a weight; the weight itself where these are all."""
    if start == 0 and stop == weight.shape[0]:
        return weight
    return weight[start:stop] if isinstance(weight, Tensor) else weight.rows(start, stop)
