"""ConstrainedRows: what the constrained sequences of a step may sample."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from quire.grammar.masks import MaskFiller, Masks
from quire.sampling.row_state import SamplingRow
from quire.worker.input_batch import Row


class ConstrainedRows:
    """Those of the rows that have a constraint; their masks are filled from now on until `wait`."""

    def __init__(self, rows: Sequence[Row], filler: MaskFiller) -> None:
        sampling = [row.sampling for row in rows if row.sampling.matcher is not None]
        self._rows = [row for row in sampling if row.grammar_error is None]
        self._masks: Future[Masks] | None = None
        if self._rows:
            matchers = [row.matcher for row in self._rows if row.matcher is not None]
            self._masks = filler.start(matchers, [row.grammar_ending_ids for row in self._rows])

    def wait(self) -> None:
        """Set the rows' masks, and why a grammar cannot go on where that is so."""
        if self._masks is None:
            return
        _set_masks(self._rows, self._masks.result())


def _set_masks(rows: Sequence[SamplingRow], masks: Masks) -> None:
    words = torch.from_numpy(masks.words)
    for index, row in enumerate(rows):
        if masks.errors[index] is None:
            row.token_mask = words[index]
        else:
            row.token_mask, row.grammar_error = None, masks.errors[index]
