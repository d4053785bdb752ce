"""DeviceHead: a LayerHead on GPU kernels, with the interface of a decoder."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.reference.rope import inverse_frequencies
from quire.kernels.triton.norm import Norm, normalize
from quire.kernels.triton.qk_rope_store import rope_table
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_decoder_layer import DeviceLayer
from quire.model.device_embedding import norm_of
from quire.model.device_linear import DeviceLinear
from quire.model.device_ranks import DeviceRanks
from quire.model.device_vocabulary import DeviceVocabulary
from quire.model.device_weights import load_on_device
from quire.model.heads.head_spec import LayerHead
from quire.model.heads.stored import body_shapes
from quire.quant.parameters import Parameter, StoredParameter


class DeviceHead:
    """Runs a draft head next to its model, whose embedding and LM head it shares if it has none.

    It is used in place of a DeviceDecoder: its steps compute tokens after the features in `inputs`, row by row. Afterwards
    `inputs` has the features of the rows whose logits were computed, in order, for the next step.

    inputs         [most_tokens, hidden_size] in the model's dtype, at a fixed place
    spec           its layer, with the vocabulary of the model
    max_model_len  the longest sequence; some rope scalings depend on it
    most_tokens    of a step, padding included
    vocabulary     embedding and LM head that it shares; None: those of the model, which must be unsharded
    """

    is_in_order = False
    ranks: DeviceRanks | None = None
    captures_prompts = True

    def __init__(
        self,
        head: LayerHead,
        target: DeviceDecoder,
        max_model_len: int,
        most_tokens: int,
        vocabulary: DeviceVocabulary | None = None,
    ) -> None:
        shared = vocabulary
        if shared is None:
            if target.ranks is not None or target.embedding is None or target.head is None:
                raise InvariantError("a draft head next to a rank with a part of the model needs the embedding and the LM head")
            shared = DeviceVocabulary(target.embedding, target.head)
        body, device = head.body, target.device
        self._head, self._target, self._body = replace(head, parameters={}), target, body
        self.spec, self.dtype, self.device = replace(body, vocab_size=target.spec.vocab_size), target.dtype, device
        self.num_long_rope_rows = max_model_len
        attended = body.hidden_size * (2 if head.entry == "beside" else 1)
        shapes = body_shapes(body, attended)
        shapes |= {name: tuple(tensor.shape) for name, tensor in head.parameters.items()}
        # Weights that are joined are loaded in the order of their rows.
        parameters: dict[str, Parameter | StoredParameter] = {
            name: head.parameters[name] for name in shapes if name in head.parameters
        }
        weights = load_on_device(parameters, body, device, shapes=shapes)
        self._weights, own, ends = weights, weights.tensors, weights.linears
        layer = body.layers[0]
        rope = layer.attention.rope
        tables = {}
        if rope is not None:
            frequencies = inverse_frequencies(rope, max_model_len).to(device)
            tables[rope] = rope_table(rope, frequencies, max_model_len, self.dtype)
        self._layer = DeviceLayer(layer, "layers.0.", weights, tables, False)
        self._fuse = DeviceLinear((own["fuse.weight"],), own.get("fuse.bias"))
        self._embedding = DeviceLinear(ends["embed.weight"]) if "embed.weight" in ends else _given(shared.embedding)
        self._has_output = "lm_head.weight" in ends
        self._output = DeviceLinear(ends["lm_head.weight"]) if self._has_output else _given(shared.head)
        self._embed_norm = norm_of(own, "embed_norm", head.embed_norm)
        self._feature_norm = norm_of(own, "feature_norm", head.feature_norm)
        self._final_norm = Norm(body.final_norm, own["final_norm.weight"]) if head.has_final_norm else None
        self.vocabulary = None if head.vocabulary is None else head.vocabulary.long().to(device)
        self.inputs = torch.zeros(most_tokens, body.hidden_size, dtype=self.dtype, device=device)

    def on_device(self) -> AbstractContextManager[object]:
        """See DeviceDecoder."""
        return self._target.on_device()

    def weight_tensors(self) -> list[Tensor]:
        """Return the weights on the device, without those that it shares with the model."""
        return list(self._weights.all_tensors())

    @torch.inference_mode()
    def fuse_features(self, features: Tensor) -> Tensor:
        """Return features [R, F] of the model in the form of `inputs` [R, hidden_size]: entry "beside" fuses them."""
        return self._fuse(features) if self._head.entry == "beside" else features

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, step: DeviceAttentionMetadata, pool: DeviceKvPool) -> Tensor:
        """Compute tokens after the features in `inputs`, and store their KV.

        token_ids, positions  [T] i64: the token i + 1 of each place i, and i
        Returns               [T, hidden_size], before the final norm
        """
        head = self._head
        features = self.inputs[: len(token_ids)]
        e = self._embedding.lookup(token_ids, self.dtype)
        if self._body.embed_scale != 1.0:
            e = e * self._body.embed_scale
        if self._embed_norm is not None:
            e = normalize(e, self._embed_norm)
        layer_norm = self._layer.attn_in
        if head.entry == "joined":
            if self._feature_norm is not None:
                features = normalize(features, self._feature_norm)
            x = self._fuse(torch.cat((e, features), 1))
            y = x if layer_norm is None else normalize(x, layer_norm)
        else:
            normed = features if layer_norm is None else normalize(features, layer_norm)
            y = torch.cat((e, normed), 1)
            x = (normed if head.is_residual_normed else features).clone()  # the layer changes it in place
        return self._layer.forward(x, y, positions, step, pool.caches[0], None)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits [R, vocab_size] of rows of `forward`'s result, -inf for tokens outside the head's vocabulary.

        Afterwards `inputs` has these rows as features of the next positions.
        """
        normed = hidden if self._final_norm is None else normalize(hidden, self._final_norm)
        self.inputs[: len(hidden)].copy_(normed if self._head.recycles_normed else hidden)
        if not self._has_output or self.vocabulary is None:
            return self._target.finish_logits(self._output(normed, out))
        logits = self._output(normed)
        if out is None:
            out = torch.empty(len(hidden), self.spec.vocab_size, dtype=logits.dtype, device=logits.device)
        return out.fill_(-torch.inf).index_copy_(1, self.vocabulary, logits)


def _given(linear: DeviceLinear | None) -> DeviceLinear:
    if linear is None:
        raise InvariantError("a draft head has neither an embedding or LM head of its own nor one that it shares")
    return linear
