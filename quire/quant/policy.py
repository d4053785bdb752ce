"""Which parameters of a model are quantised, and how."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from quire.base.errors import ConfigError, InvariantError
from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec
from quire.quant.float8 import quantize_float8
from quire.quant.parameters import DenseOrQuantized, Parameter, QuantizedStack, StoredParameter, load_parameter
from quire.quant.quantize import FINE_INT4, FLOAT8, INT4, INT8, Scheme, fit_scheme, quantize_weight
from quire.quant.weight import QuantizedWeight

_EMBED = "embed.weight"
_MLP = ("gate", "up", "down")
_LINEARS = (
    *("q", "k", "v", "o", "gate", "up", "down", "experts.gate_up", "experts.down"),
    *("shared.gate", "shared.up", "shared.down", "q_a", "kv_a"),
)
"""kv_b of multi-head latent attention is excluded: decoders transpose a half of it, and keep it in the model's dtype."""
_PROGRESS_DELAY_S = 3.0


def is_in_end_layer(name: str, num_layers: int) -> bool:
    """Return whether a parameter is in the first or last layer, whose weights may have another scheme."""
    return name.startswith(("layers.0.", f"layers.{num_layers - 1}."))


@dataclass(frozen=True, slots=True)
class QuantizationPolicy:
    """The scheme of every weight. Norms, biases, routers, position embeddings and kv_b of latent attention are not quantised.

    linears          of the projections of attention, MLPs and experts
    embedding, head  of the embedding and the output head; a tied model uses only the first. None: not quantised
    int8_linears     names of projections (q, k, v, o, gate, up, down) that get int8 in every layer
    has_int8_ends    the MLPs of the first and of the last layer get int8, but not mixtures of experts
    min_columns      weights with fewer columns count as small: each of their values matters more
    small_linears   of small projections; None: as the others. Quantised small embeddings and heads get int8
    small_int8      names of projections that get int8 if they are small
    """

    linears: Scheme
    embedding: Scheme | None = INT8
    head: Scheme | None = INT8
    int8_linears: frozenset[str] = frozenset()
    has_int8_ends: bool = False
    min_columns: int = 0
    small_linears: Scheme | None = None
    small_int8: frozenset[str] = frozenset()

    def scheme_of(self, name: str, num_columns: int, num_layers: int) -> Scheme | None:
        """Return the scheme of a parameter by its canonical name, or None if it is not quantised."""
        module, _, kind = name.rpartition(".")
        if kind != "weight":
            return None
        if module in ("embed", "lm_head"):
            wanted = self.embedding if module == "embed" else self.head
            if wanted is not None and num_columns < self.min_columns:
                wanted = INT8
            return wanted and fit_scheme(wanted, num_columns)
        if not module.startswith("layers."):
            return None
        _, _, module = module.split(".", 2)
        if module not in _LINEARS:
            return None
        is_end = self.has_int8_ends and module in _MLP and is_in_end_layer(name, num_layers)
        is_small = num_columns < self.min_columns
        if is_end or module in self.int8_linears or (is_small and module in self.small_int8):
            return fit_scheme(INT8, num_columns)
        return fit_scheme((is_small and self.small_linears) or self.linears, num_columns)


POLICIES = {
    "int8": QuantizationPolicy(INT8),
    "int4": QuantizationPolicy(
        INT4, INT4, INT4, has_int8_ends=True, min_columns=256, small_linears=FINE_INT4, small_int8=frozenset({"k", "v"})
    ),
    "fp8": QuantizationPolicy(FLOAT8, None, None),
}
"""Policies of the option `quantization`. On a small model, half of the loss of 4 bits is due to k, v and the MLPs of the first
and last layers. A model with few columns would lose as much again in its head, in k and v, and with groups twice as large; a
wider one loses little (docs/performance.md), and every token reads them all. With fp8, embedding and head are not quantised, as
is usual."""


@dataclass(frozen=True, slots=True)
class ParameterQuantizer:
    """Quantises the parameters of one model by their canonical names.

    dtype        of the model, to which weights are rounded first
    first_layer  what is layer 0 in the names: that of a pipeline stage
    """

    policy: QuantizationPolicy
    num_layers: int
    dtype: torch.dtype
    first_layer: int = 0

    def scheme_of(self, name: str, num_columns: int) -> Scheme | None:
        """Return the scheme of a parameter, or None if it is not quantised."""
        if self.first_layer and name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            name = f"layers.{int(index) + self.first_layer}.{rest}"
        return self.policy.scheme_of(name, num_columns, self.num_layers)

    def __call__(self, name: str, weight: Tensor) -> Parameter:
        """Return a parameter according to the policy: quantised, a stack of experts as a QuantizedStack, or unchanged.

        The mapped file pages of a quantised weight are released.
        """
        scheme = self.scheme_of(name, weight.shape[-1])
        if scheme is None:
            return weight
        if scheme.kind == "float8":
            return self._round_to_float8(weight)
        if weight.ndim == 3:
            return QuantizedStack(tuple(self._quantize(expert, scheme) for expert in weight))
        return self._quantize(weight, scheme)

    def quantized(self, name: str, weight: Tensor) -> DenseOrQuantized:
        """Return one weight, or that of one expert, according to the policy, including float8; it may be on a GPU."""
        scheme = self.scheme_of(name, weight.shape[1])
        if scheme is None:
            return weight
        if scheme.kind == "float8":
            return quantize_float8(weight, self.dtype)
        return quantize_weight(weight, scheme, is_forgotten=weight.device.type == "cpu", rounded_to=self.dtype)

    def _round_to_float8(self, weight: Tensor) -> Tensor:
        """Return a weight, or a stack of them, rounded to float8 and dequantised, for kernels that run it dense."""
        rounded = torch.empty(weight.shape, dtype=self.dtype)
        for rows, to in zip(weight, rounded, strict=True) if weight.ndim == 3 else ((weight, rounded),):
            to.copy_(quantize_float8(rows, self.dtype).dequantize(self.dtype))
        return rounded

    def _quantize(self, weight: Tensor, scheme: Scheme) -> QuantizedWeight:
        return quantize_weight(weight, scheme, is_forgotten=True, rounded_to=self.dtype)


DEVICE_POLICIES = {
    "int8": POLICIES["int8"],
    "int4": QuantizationPolicy(
        Scheme("linear", 64),
        INT8,
        INT8,
        has_int8_ends=True,
        min_columns=256,
        small_linears=Scheme("linear", 32),
        small_int8=frozenset({"k", "v"}),
    ),
    "fp8": POLICIES["fp8"],
}
"""Policies on a GPU, whose kernels need 16 consecutive levels for 4 bits. With int4, embedding and head get int8: they are one
weight in a tied model, and lower precision would affect it most."""


def parameter_quantizer(
    parameters: Mapping[str, Parameter | StoredParameter],
    spec: ModelSpec,
    policy: QuantizationPolicy,
    keeps_float8: bool = False,
) -> ParameterQuantizer:
    """Return a quantizer for these parameters. Raises ConfigError if one of them is quantised already.

    keeps_float8  float8 parameters count as quantised; otherwise they are dequantised
    """
    if not all(_is_float(parameter, keeps_float8) for parameter in parameters.values()):
        raise ConfigError(
            "quantization is for weights that are not quantised, but this checkpoint is already: leave the option out, or "
            "take the checkpoint in its original precision"
        )
    return ParameterQuantizer(policy, len(spec.layers), getattr(torch, spec.dtype))


def _is_float(parameter: Parameter | StoredParameter, keeps_float8: bool) -> bool:
    if isinstance(parameter, StoredParameter):
        return not (parameter.is_quantized if keeps_float8 else parameter.is_integer)
    return isinstance(parameter, Tensor)


def iterate_quantized(
    parameters: dict[str, Parameter | StoredParameter], spec: ModelSpec, policy: QuantizationPolicy
) -> Iterator[tuple[str, Parameter]]:
    """Yield every parameter with its name, quantised. `parameters` is emptied meanwhile, to free the float weights.

    A head that is tied to the embedding stays one object with it. Raises ConfigError if a parameter is quantised already.
    """
    quantize = parameter_quantizer(parameters, spec, policy)
    shared = [name for name in parameters if parameters[name] is parameters.get(_EMBED)]
    embedded: Parameter | None = None
    for name in tqdm(list(parameters), "quantising weights", delay=_PROGRESS_DELAY_S, disable=None, leave=False):
        if len(shared) < 2 or name not in shared:
            # The result is not assigned to a variable, so that nothing is kept alive while it is used.
            yield name, quantize(name, _pop_tensor(parameters, name))
            continue
        weight = _pop_tensor(parameters, name)
        if embedded is None:
            embedded = quantize(_EMBED, weight)
        del weight
        yield name, embedded


def _pop_tensor(parameters: dict[str, Parameter | StoredParameter], name: str) -> Tensor:
    weight = load_parameter(parameters.pop(name))
    if not isinstance(weight, Tensor):
        raise InvariantError(f"{name} was put among the parameters while they were quantised")
    return weight


def quantize_parameters(
    parameters: dict[str, Parameter | StoredParameter], spec: ModelSpec, policy: QuantizationPolicy
) -> dict[str, Parameter]:
    """Return a model's parameters quantised, all at once; see `iterate_quantized`."""
    return dict(iterate_quantized(parameters, spec, policy))


def quantized_bytes(shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec, policy: QuantizationPolicy) -> int:
    """Return the size of a model's parameters after quantisation, given their shapes."""
    total = 0.0
    for name, shape in shapes.items():
        scheme = policy.scheme_of(name, shape[-1], len(spec.layers)) if len(shape) > 1 else None
        width = DTYPE_BYTES[spec.dtype] if scheme is None else scheme.bytes_per_weight
        total += math.prod(shape) * width
    return int(total)


def describe_short_rows(shapes: Mapping[str, tuple[int, ...]], num_layers: int, policy: QuantizationPolicy) -> str | None:
    """Return which weights get int8 from a policy of fewer bits because their rows are short; None: none."""
    policy = replace(policy, has_int8_ends=False)
    short = {name: shape[-1] for name, shape in shapes.items() if len(shape) > 1 and shape[-1] < policy.min_columns}
    schemes = {name: policy.scheme_of(name, size, num_layers) for name, size in short.items()}
    found = {name.rpartition(".")[0].split(".", 2)[-1]: None for name, scheme in schemes.items() if scheme == INT8}
    if policy.linears == INT8 or not found:
        return None
    return f"{', '.join(sorted(found))} get int8, as their rows have fewer than {policy.min_columns} values"
