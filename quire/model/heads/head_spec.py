"""LayerHead and ParallelHead: descriptions of a draft head's computation, independent of its stored layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from quire.contracts.medusa_choices import Choices
from quire.contracts.model_spec import ModelSpec, NormSpec


@dataclass(frozen=True, slots=True)
class LayerHead:
    """A decoder layer that reads, at position i, the model's features there and token i + 1, and predicts token i + 2.

    entry         "joined": the layer's input is fuse(concat(embedding, feature)), both normed (multi-token prediction; EAGLE-1,
                  arXiv 2401.15077, without the norms); "beside": it is the feature, projected by fuse, and attention reads
                  the concatenated normed embedding and normed feature (EAGLE-3, arXiv 2503.01840)
    body          the one layer, with the head's dtype; with "beside" attention reads twice the hidden size, and attn_in is the
                  norm of the feature. Its vocabulary is the head's, its embedding the model's
    aux_hidden_state_layers
                  layers of the model whose inputs are the features, low to high; none: the hidden state after the final
                  norm
    embed_norm, feature_norm
                  norms of the inputs; feature_norm only with "joined"
    has_final_norm      whether there is a norm before the output
    is_residual_normed  "beside": the layer adds to the normed feature
    recycles_normed     the next position's feature is taken after the final norm, not before it
    parameters    fuse.weight [H, n * H], fuse.bias, embed_norm.weight, feature_norm.weight, layers.0.*, final_norm.weight;
                  embed.weight and lm_head.weight if they are not the model's
    vocabulary    [body.vocab_size] i32 the model's token for each of the head's tokens; None: the same
    """

    entry: Literal["joined", "beside"]
    body: ModelSpec
    aux_hidden_state_layers: tuple[int, ...]
    embed_norm: NormSpec | None
    feature_norm: NormSpec | None
    has_final_norm: bool
    is_residual_normed: bool
    recycles_normed: bool
    parameters: dict[str, Tensor]
    vocabulary: Tensor | None = None

    @property
    def feature_size(self) -> int:
        """Values of a feature as the model gives it."""
        return self.body.hidden_size * max(1, len(self.aux_hidden_state_layers))


@dataclass(frozen=True, slots=True)
class ParallelHead:
    """Medusa (arXiv 2401.10774): block i predicts, from the hidden state of the last token, the token 2 + i positions after it.

    blocks      per output, residual layers h + silu(A h + b) one after the other: (A [H, H], b [H] or None)
    heads       [V', H] of each output
    vocabulary  [V'] i32 the model's token for each of the heads' tokens; None: the same
    choices     their best draft tree, None if none is stored
    """

    blocks: tuple[tuple[tuple[Tensor, Tensor | None], ...], ...]
    heads: tuple[Tensor, ...]
    vocabulary: Tensor | None = None
    choices: Choices | None = None
