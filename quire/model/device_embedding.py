"""DeviceEmbedding: what the layers of a model read of the tokens, on a device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import ModelSpec, NormSpec
from quire.kernels.reference.per_layer_inputs import per_layer_inputs
from quire.kernels.triton.norm import Norm, normalize
from quire.model.device_linear import DeviceLinear
from quire.model.device_ranks import DeviceRanks
from quire.model.device_weights import DeviceWeights


class DeviceEmbedding:
    """The embedding of tokens, and of positions if the model has learned ones, scaled and normalised.

    linear  the embedding of tokens
    dtype   of what it returns
    is_in_order  see DeviceDecoder
    ranks   of tensor parallelism, which have rows of the embedding each
    """

    def __init__(
        self, spec: ModelSpec, weights: DeviceWeights, dtype: torch.dtype, is_in_order: bool, ranks: DeviceRanks | None
    ) -> None:
        self.linear = DeviceLinear(weights.linears["embed.weight"])
        self._ranks, self._dtype, self._own, self._per_layer = ranks, dtype, weights.tensors, spec.per_layer_inputs
        self._per_layer_proj: DeviceLinear | None = None
        if spec.per_layer_inputs is not None:
            self._per_layer_proj = DeviceLinear((weights.tensors["per_layer_proj.weight"],), None, is_in_order)
        self._positions = weights.tensors.get("pos.weight")
        self._norm = norm_of(weights.tensors, "embed_norm", spec.embed_norm)
        scale = spec.embed_scale
        self._scale = float(torch.tensor(scale, dtype=dtype)) if spec.is_embed_scale_cast else scale

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return rows [T, hidden_size], given ids and positions [T] i64."""
        if self._ranks is None:
            x = self.linear.lookup(token_ids, self._dtype)
        else:
            x = self._ranks.lookup(self.linear, token_ids, self._dtype)
        if self._scale != 1.0:
            x = x * self._scale
        if self._positions is not None:
            x = x + F.embedding(positions, self._positions)
        return x if self._norm is None else normalize(x, self._norm)

    def per_layer_inputs(self, token_ids: Tensor, x: Tensor) -> Tensor | None:
        """Return the inputs [T, layers, size] that layers get besides the residual stream x; None: the model has none."""
        if self._per_layer is None or self._per_layer_proj is None:
            return None
        embedding, norm = self._own["per_layer_embed.weight"], self._own["per_layer_norm.weight"]
        return per_layer_inputs(token_ids, x, self._per_layer, embedding, self._per_layer_proj, norm)


def norm_of(parameters: Mapping[str, Tensor], name: str, spec: NormSpec | None) -> Norm | None:
    """Return the norm of that name; None if the layer has none."""
    return None if spec is None else Norm(spec, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
