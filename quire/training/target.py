"""Target: the model's hidden states and logits for whole training sequences, as inputs and labels of a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import UnsupportedError
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import ModelSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kv.pool import KvPool
from quire.model.build import load_model
from quire.model.resolve import resolve_model

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The model's results for B sequences of L tokens; no gradients.

    inputs  [B, L, taps * H] the inputs of aux_hidden_state_layers
    hidden  [B, L, H] after the final norm
    logits  [B, L, V] f32
    """

    inputs: Tensor
    hidden: Tensor
    logits: Tensor


class Target:
    """The model, frozen.

    aux_hidden_state_layers  whose inputs are read
    """

    def __init__(self, model: str, sequence_tokens: int, aux_hidden_state_layers: tuple[int, ...]) -> None:
        self._decoder = load_model(resolve_model(model), "auto", sequence_tokens)
        self._decoder.keep_inputs(aux_hidden_state_layers)
        self._kv: KvPool | None = None
        if self.spec.embed_scale != 1.0 or self.spec.num_learned_positions:
            raise UnsupportedError("draft heads are not trained for models with scaled embeddings or learned positions (yet)")

    @property
    def spec(self) -> ModelSpec:
        """The model's spec."""
        return self._decoder.spec

    def parameter(self, name: str) -> Tensor | None:
        """Return a copy in f32 of a parameter by its canonical name, None if the model does not have it."""
        found = self._decoder.parameter(name)
        return None if found is None else found.float().clone()

    def head(self) -> Tensor:
        """Return a copy in f32 of the output head [V, H]."""
        found = self.parameter("lm_head.weight")
        return self.parameter("embed.weight") if found is None else found  # pyright: ignore[reportReturnType]

    def compute(self, token_ids: Tensor) -> TargetRows:
        """Run the model over token_ids [B, L]."""
        num_sequences, length = token_ids.shape
        num_blocks = -(-length // _BLOCK_SIZE)
        if self._kv is None or self._kv.num_blocks < num_sequences * num_blocks:
            self._kv = KvPool(KvSpec.of(self.spec, _BLOCK_SIZE, self.spec.dtype), num_sequences * num_blocks)
        positions = torch.arange(length).repeat(num_sequences)
        slots = (torch.arange(num_sequences)[:, None] * (num_blocks * _BLOCK_SIZE) + torch.arange(length)).flatten()
        step = AttentionMetadata(
            slots,
            [length * index for index in range(num_sequences + 1)],
            [length] * num_sequences,
            torch.arange(num_sequences * num_blocks).view(num_sequences, num_blocks),
        )
        hidden = self._decoder.forward(token_ids.flatten(), positions, step, self._kv)
        logits = self._decoder.logits(hidden)
        shape = (num_sequences, length, -1)
        # Clones are ordinary tensors, which a loss may save for backward.
        inputs = self._decoder.layer_inputs(range(len(hidden))).clone().view(shape)
        return TargetRows(inputs, hidden.clone().view(shape), logits.clone().float().view(shape))
