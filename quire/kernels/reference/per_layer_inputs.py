"""Per-layer inputs: small embeddings that every layer gets of each token (Gemma 3n and 4)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.model_spec import PerLayerInputs
from quire.kernels.reference.norm import normalize


def per_layer_inputs(
    token_ids: Tensor,
    x: Tensor,
    spec: PerLayerInputs,
    embedding: Tensor,
    projection: Callable[[Tensor], Tensor],
    norm_weight: Tensor,
) -> Tensor:
    """Return the inputs of all layers [T, layers, size], in x's dtype.

    token_ids   [T]
    x           [T, H], the model's embeddings, scaled
    embedding   [vocab_size, layers * size]
    projection  a linear layer from [T, H] to [T, layers * size]
    norm_weight [size]
    """
    known = torch.where(token_ids < spec.vocab_size, token_ids, 0)
    embedded = F.embedding(known, embedding) * torch.tensor(spec.size**0.5, dtype=x.dtype)
    projected = projection(x) * _factor(x.shape[-1] ** -0.5, spec, x.dtype)
    shape = (len(token_ids), -1, spec.size)
    projected = normalize(projected.view(shape), spec.norm, norm_weight)
    return (projected + embedded.view(shape)) * _factor(2.0**-0.5, spec, x.dtype)


def _factor(value: float, spec: PerLayerInputs, dtype: torch.dtype) -> float | Tensor:
    return torch.tensor(value, dtype=dtype) if spec.is_scale_cast else value
