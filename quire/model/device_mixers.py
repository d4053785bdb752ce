"""What recurrent mixers compute with on a GPU; see quire.model.mixers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import NormSpec
from quire.kernels.reference.recurrent import Recurrence
from quire.kernels.triton.norm import normalize_unweighted
from quire.kernels.triton.recurrent import causal_conv, recur
from quire.kernels.triton.step import DeviceAttentionMetadata, DeviceStateRows
from quire.model.device_linear import DeviceLinear

_MODULES = ("delta.", "conv.", "mamba.")


def mixer_linears(own: Mapping[str, Tensor], is_in_order: bool) -> dict[str, DeviceLinear]:
    """Return the linear layers among a layer's dense parameters that belong to its mixer, by the names of their modules."""
    names = [name.removesuffix(".weight") for name in own if name.endswith(".weight") and name.startswith(_MODULES)]
    return {
        name: DeviceLinear((own[f"{name}.weight"],), own.get(f"{name}.bias"), is_in_order)
        for name in names
        if own[f"{name}.weight"].ndim == 2
    }


@dataclass(frozen=True, slots=True)
class DeviceMixerInputs:
    """Implements MixerInputs on a GPU.

    states  the layer's tensors of a DeviceKvPool's states
    prefix  of the layer's canonical names
    """

    parameters: Mapping[str, Tensor]
    linears: Mapping[str, DeviceLinear]
    states: Sequence[Tensor]
    step: DeviceAttentionMetadata
    prefix: str

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See MixerInputs."""
        return self.adapted(self.linears[name](x), x, name)

    def adapted(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """See MixerInputs."""
        return y if self.step.lora is None else self.step.lora.add_to(y, x, self.prefix + name)

    def convolve(self, x: Tensor) -> Tensor:
        """See MixerInputs."""
        weight, bias = self.parameters["conv.weight"][:, 0], self.parameters.get("conv.bias")
        return causal_conv(x, weight, bias, self.states[0], self.step.query_starts, self._rows)

    def recur(self, inputs: Recurrence) -> Tensor:
        """See MixerInputs."""
        pool = self.states[1]
        return recur(inputs, pool.view(len(pool), *inputs.state_shape), self.step.query_starts, self._rows)

    def unit(self, x: Tensor, eps: float) -> Tensor:
        """See MixerInputs."""
        return normalize_unweighted(x, NormSpec("rms", eps))

    @property
    def _rows(self) -> DeviceStateRows:
        if self.step.states is None:
            raise InvariantError("a step of a model with a recurrent state does not say what becomes of the states")
        return self.step.states
