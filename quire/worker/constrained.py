"""ConstrainedRows: what the constrained sequences of a step may sample, and what behind their drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from quire.base.ids import SequenceId
from quire.grammar.masks import DraftedTokens, MaskFiller, Masks
from quire.speculate.draft import Draft
from quire.worker.input_batch import Row

_NONE = DraftedTokens()


class ConstrainedRows:
    """Those of the rows that have a constraint; their masks are filled from now on until `wait`."""

    def __init__(self, rows: Sequence[Row], drafts: Mapping[SequenceId, Draft], filler: MaskFiller) -> None:
        self._rows = [row for row in rows if row.sampling.matcher is not None and row.sampling.grammar_error is None]
        self._masks: Future[Masks] | None = None
        self._drafted: dict[SequenceId, list[Tensor | None]] = {}
        if self._rows:
            found = [drafts.get(row.start.sequence_id) for row in self._rows] if drafts else []
            self._drafts = [_NONE if draft is None else DraftedTokens(draft.tokens, draft.parents) for draft in found]
            matchers = [row.sampling.matcher for row in self._rows if row.sampling.matcher is not None]
            ending_ids = [row.sampling.grammar_ending_ids for row in self._rows]
            self._masks = filler.start(matchers, ending_ids, self._drafts or None)

    def wait(self) -> None:
        """Set the rows' masks, and why a grammar cannot go on where that is so."""
        if self._masks is None:
            return
        masks = self._masks.result()
        words = torch.from_numpy(masks.words)
        for index, row in enumerate(self._rows):
            if masks.errors[index] is None:
                row.sampling.token_mask = words[index]
            else:
                row.sampling.grammar_error = masks.errors[index]
            if masks.is_broken[index]:
                row.sampling.restart_grammar()
        first = len(self._rows)
        for row, draft in zip(self._rows, self._drafts, strict=False):
            last = first + len(draft.tokens)
            self._drafted[row.start.sequence_id] = [words[i] if masks.is_known[i] else None for i in range(first, last)]
            first = last

    def masks_of(self, row: Row) -> Sequence[Tensor | None]:
        """Return what may follow the draft tokens of a row; None where nothing can, or it is not known."""
        return self._drafted.get(row.start.sequence_id, ())
