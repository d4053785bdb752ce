"""The remaining work of running sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quire.base.ids import SequenceId
from quire.engine.scheduling.sequence import Sequence


def find_remaining(
    running: Iterable[Sequence], launched: Mapping[SequenceId, int]
) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
    """Return the sequences with one token to compute, which decode, and those with more, with their number.

    Sequences with a pending mask are in neither.

    launched  tokens that a step in flight computes; the rest is counted after it
    """
    decoding: list[Sequence] = []
    prefilling: list[tuple[Sequence, int]] = []
    for sequence in running:
        if sequence.is_mask_pending:
            continue
        num_left = len(sequence.token_ids) - sequence.num_computed_tokens
        if launched:
            num_left = sequence.num_tokens_behind(launched.get(sequence.sequence_id, 0))
        if num_left == 1:
            decoding.append(sequence)
        elif num_left > 1:
            prefilling.append((sequence, num_left))
    return decoding, prefilling
