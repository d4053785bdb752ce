"""The whole embedding and LM head of a model, for a draft head next to a tensor-parallel model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from quire.contracts.model_spec import ModelSpec
from quire.model.device_linear import DeviceLinear
from quire.model.device_weights import load_on_device
from quire.quant.parameters import Parameter, StoredParameter
from quire.quant.policy import QuantizationPolicy, parameter_quantizer


class DeviceVocabulary(NamedTuple):
    """The parts that a draft head shares with the model; None: it has its own."""

    embedding: DeviceLinear | None
    head: DeviceLinear | None


def load_vocabulary(
    parameters: Mapping[str, Parameter | StoredParameter],
    spec: ModelSpec,
    device: torch.device,
    owned: Collection[str],
    policy: QuantizationPolicy | None = None,
    is_in_order: bool = False,
) -> DeviceVocabulary:
    """Load the whole embedding and LM head of a model, with the same values as on a single rank.

    parameters           of the whole model
    owned                names of parameters that the draft head has itself; these are not loaded
    policy, is_in_order  as in DeviceDecoder
    """
    quantize = None if policy is None else parameter_quantizer(parameters, spec, policy, keeps_float8=True)
    output = "lm_head.weight" if "lm_head.weight" in parameters else "embed.weight"
    wanted = {} if "embed.weight" in owned else {"embed.weight": parameters["embed.weight"]}
    if "lm_head.weight" not in owned:
        wanted |= {name: parameters[name] for name in (output, "lm_head.bias") if name in parameters}
    weights = load_on_device(wanted, spec, device, quantize)
    linears = weights.linears
    head = None
    if "lm_head.weight" not in owned:
        head = DeviceLinear(linears[output], weights.tensors.get("lm_head.bias"), is_in_order, weights.whole_rows[output])
    return DeviceVocabulary(None if "embed.weight" in owned else DeviceLinear(linears["embed.weight"]), head)
