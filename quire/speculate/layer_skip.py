"""Self-speculation: the model drafts for itself without some of its layers (Zhang et al., arXiv 2309.08168).

It reads the keys and values that the whole model has left, and writes those of its drafts where the step will write the right
ones: every slot that it touches is written again in the same step, in all layers, before anybody reads it. It keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.base.errors import ConfigError
from quire.speculate.chains import Chain, extend_chains
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.proposer import Proposer
from quire.speculate.target import Target


def kept_layers(num_layers: int, skipped: Sequence[int]) -> tuple[int, ...]:
    """Return the layers that are left. Raises ConfigError where there are not so many, or none is left."""
    beyond = [layer for layer in skipped if layer >= num_layers]
    if beyond:
        raise ConfigError(f"skipped_layers names layer {beyond[0]}, but the model has layers 0 to {num_layers - 1}")
    kept = tuple(layer for layer in range(num_layers) if layer not in skipped)
    if not kept:
        raise ConfigError(f"skipped_layers names all {num_layers} layers of the model; leave it at least one")
    return kept


class LayerSkipProposer(Proposer):
    """Drafts by some layers of the model, a token a pass, all sequences together.

    skipped  the layers that it leaves out. Raises ConfigError
    """

    def __init__(self, target: Target, skipped: Sequence[int]) -> None:
        self._target = target
        self._layers = kept_layers(len(target.model.spec.layers), skipped)

    def num_available(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer; something can always be drafted."""
        return limit

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        chains: list[Chain] = [(sequence, [], count) for sequence, count in wanted]
        extend_chains(self._target, chains, self._layers)
        return [Draft.chain(tuple(tokens)) for _, tokens, _ in chains]
