"""Layers over several residual streams on a GPU: alternating updates and a low-rank residual (Gemma 3n)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import LayerSpec, PerLayerGate
from quire.kernels.reference.activation import ACTIVATIONS
from quire.kernels.reference.altup import correct, modalities, predict
from quire.kernels.triton.norm import Norm, add_and_normalize, normalize


class LayerNorms(NamedTuple):
    """The norms before and after attention, and before and after the feed-forward block."""

    attn_in: Norm | None
    attn_out: Norm | None
    mlp_in: Norm | None
    mlp_out: Norm | None


class LayerInputs(NamedTuple):
    """What the layers of a step read besides the residual.

    per_layer   [T, layers, size] of a model with per-layer inputs
    embeddings  [T, hidden_size] what the first layer reads, for shared blocks
    """

    per_layer: Tensor | None
    embeddings: Tensor | None


class StreamLayer:
    """One layer of a model with alternating updates; see LayerSpec.altup and LayerSpec.laurel.

    own  the layer's dense parameters
    """

    def __init__(self, spec: LayerSpec, own: Mapping[str, Tensor], norms: LayerNorms) -> None:
        if spec.altup is None or norms.attn_in is None or norms.mlp_in is None:
            raise InvariantError("a layer of several streams has alternating updates, and a norm before each block")
        self._altup, self._laurel, self._gate, self._own, self._norms = spec.altup, spec.laurel, spec.per_layer_gate, own, norms

    def forward(
        self,
        streams: Tensor,
        mix: Callable[[Tensor], Tensor],
        feed_forward: Callable[[Tensor, Tensor], Tensor],
        per_layer: Tensor | None,
    ) -> Tensor:
        """Return the streams [N, T, hidden_size] after the layer.

        mix           attention of its normed input
        feed_forward  of its normed input, and the residual
        per_layer     the layer's per-layer inputs [T, size]
        """
        own, norms, active = self._own, self._norms, self._altup.active
        assert norms.attn_in is not None
        streams = predict(streams, self._modalities(streams[active]), own["altup.predict.weight"])
        x = streams[active].clone(memory_format=torch.contiguous_format)
        normed = normalize(x, norms.attn_in)
        add_and_normalize(x, mix(normed), None, norms.attn_out)
        if self._laurel is not None:
            low = F.linear(F.linear(normed, own["laurel.left.weight"]), own["laurel.right.weight"])
            x = (x + (normed + normalize(low, Norm(self._laurel.norm, own["laurel.norm.weight"])))) / math.sqrt(2)
        assert norms.mlp_in is not None
        add_and_normalize(x, feed_forward(normalize(x, norms.mlp_in), x), None, norms.mlp_out)
        streams = correct(streams, active, x, self._modalities(x), own["altup.correct.weight"])
        return streams if self._gate is None or per_layer is None else self._add_per_layer(streams, self._gate, per_layer)

    def _modalities(self, x: Tensor) -> Tensor:
        normed = normalize(x.contiguous(), Norm(self._altup.norm, self._own["altup.norm.weight"]))
        return modalities(normed, self._own["altup.router.weight"])

    def _add_per_layer(self, streams: Tensor, spec: PerLayerGate, inputs: Tensor) -> Tensor:
        """Return the streams with what the per-layer inputs give added to all but the first."""
        own, read = self._own, streams[self._altup.active]
        if self._altup.has_scale:
            read = read * own["altup.scale.weight"]
        gated = ACTIVATIONS[spec.activation](F.linear(read, own["per_layer.gate.weight"])) * inputs
        y = normalize(F.linear(gated, own["per_layer.up.weight"]), Norm(spec.norm, own["per_layer.norm.weight"]))
        return torch.cat((streams[:1], streams[1:] + y))
