"""Self-speculation: the model drafts for itself without some of its layers (Zhang et al., arXiv 2309.08168).

It reads the keys and values of the whole model, and writes those of its drafts to the slots that the step will overwrite: every
slot that it writes is written again in the same step, in all layers, before it is read. The proposer keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.base.errors import ConfigError
from quire.contracts.model_spec import ModelSpec
from quire.speculate.chains import Chain, extend_chains
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.proposer import Proposer
from quire.speculate.target import Target


def kept_layers(spec: ModelSpec, skipped: Sequence[int]) -> tuple[int, ...]:
    """Return the layers that are not skipped. Raises ConfigError if `skipped` names unknown layers, all, or one whose choice of
    keys others share."""
    num_layers, last = len(spec.layers), 0
    beyond = [layer for layer in skipped if layer >= num_layers]
    if beyond:
        raise ConfigError(f"skipped_layers names layer {beyond[0]}, but the model has layers 0 to {num_layers - 1}")
    kept = tuple(layer for layer in range(num_layers) if layer not in skipped)
    if not kept:
        raise ConfigError(f"skipped_layers names all {num_layers} layers of the model; leave it at least one")
    for index, layer in enumerate(spec.layers):
        indexer = None if layer.attention.latent is None else layer.attention.latent.indexer
        if indexer is not None and not indexer.is_shared:
            last = index
        elif indexer is not None and index in kept and last not in kept:
            raise ConfigError(f"skipped_layers names layer {last}, but layer {index} attends to the keys that it chooses")
    return kept


class LayerSkipProposer(Proposer):
    """Drafts with some layers of the model, one token per pass, all sequences together.

    skipped  the layers that are left out. Raises ConfigError
    """

    def __init__(self, target: Target, skipped: Sequence[int]) -> None:
        self._target = target
        self._layers = kept_layers(target.model.spec, skipped)

    def num_available(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer; there is no other limit."""
        return limit

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        chains: list[Chain] = [(sequence, [], count) for sequence, count in wanted]
        extend_chains(self._target, chains, self._layers)
        return [Draft.chain(tuple(tokens)) for _, tokens, _ in chains]
