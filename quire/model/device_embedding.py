"""DeviceEmbedding: what the first layer of a model reads, on a device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import ModelSpec, NormSpec
from quire.kernels.triton.norm import Norm, normalize
from quire.model.device_linear import DeviceLinear
from quire.model.device_ranks import DeviceRanks
from quire.model.device_weights import DeviceWeights


class DeviceEmbedding:
    """The embedding of tokens, and of positions if the model has learned ones, scaled and normalised.

    linear  the embedding of tokens
    dtype   of what it returns
    ranks   of tensor parallelism, which have rows of the embedding each
    """

    def __init__(self, spec: ModelSpec, weights: DeviceWeights, dtype: torch.dtype, ranks: DeviceRanks | None) -> None:
        self.linear = DeviceLinear(weights.linears["embed.weight"])
        self._ranks, self._dtype = ranks, dtype
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


def norm_of(parameters: Mapping[str, Tensor], name: str, spec: NormSpec | None) -> Norm | None:
    """Return the norm of that name; None if the layer has none."""
    return None if spec is None else Norm(spec, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
