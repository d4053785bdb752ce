"""The drafts of a step: where they come from, what is verified, and what proposers read of the step."""

from __future__ import annotations

from collections.abc import Mapping, Set

from quire.base.ids import SequenceId
from quire.contracts.step import StepPlan
from quire.speculate.draft import NO_DRAFT, Draft, DraftedSequence
from quire.speculate.speculator import Speculator
from quire.speculate.verifier import Candidate
from quire.worker.grammar_masks import StepMasks
from quire.worker.input_batch import InputBatch, Row, StepInput


def propose_drafts(speculator: Speculator, batch: InputBatch, plan: StepPlan) -> Mapping[SequenceId, Draft]:
    """Return the drafts of the step that begins. The plan is applied to the batch; the speculator follows what it starts."""
    speculator.begin(plan)
    for start in plan.starts:
        if start.request.pooling is None:
            row = batch.row(start.sequence_id)
            known = start.sequence_id, start.request, start.choice, row.token_ids, row.sampling, row.block_table
            speculator.follow(DraftedSequence(*known, uses_short_rope=start.uses_short_rope))
    return speculator.propose(plan)


def candidates_of(rows: list[Row], step: StepInput, masks: StepMasks) -> list[Candidate]:
    """Return what is to be verified. The logits after the rows' known tokens come first, then those after their drafts."""
    found: list[Candidate] = []
    next_row = len(rows)
    for row in rows:
        sequence_id = row.start.sequence_id
        draft, num_unasked = step.drafts.get(sequence_id, NO_DRAFT), step.num_unasked.get(sequence_id, 0)
        masked = masks.masks_of(row), masks.num_forced(row)
        found.append(Candidate(row.sampling, draft, next_row - num_unasked, *masked, num_unasked))
        next_row += len(draft) - num_unasked
    return found


Fed = list[tuple[SequenceId, int, int]]
"""Sequence, position of the first token, and number of tokens; see Speculator.on_step_states."""


def known_tokens(
    step: StepInput, paths: Mapping[SequenceId, tuple[int, ...]], pending: Set[SequenceId]
) -> tuple[Fed, list[int]]:
    """Return the known tokens and the accepted drafts that a step computed, and their indices among its tokens.

    paths    the accepted drafts of each sequence
    pending  sequences with a pending mask: their last known token is computed again, and is left out here
    """
    rows: list[int] = []
    fed: Fed = []
    starts, ends = step.tokens.starts, step.tokens.ends
    for index, row in enumerate(step.rows):
        if row.pooler is not None:
            continue
        sequence_id = row.start.sequence_id
        begin, first_draft = starts[index], starts[index + 1]
        path = paths.get(sequence_id, ())
        if sequence_id in step.drafts:
            first_draft -= len(step.drafts[sequence_id].tokens)
        if sequence_id in pending:
            first_draft -= 1
        if first_draft == begin:
            continue
        fed.append((sequence_id, ends[index] - (starts[index + 1] - begin), first_draft - begin + len(path)))
        rows += range(begin, first_draft)
        rows += map(first_draft.__add__, path)
    return fed, rows


def last_tokens(step: StepInput, paths: Mapping[SequenceId, tuple[int, ...]]) -> tuple[Fed, list[int]]:
    """Return the last computed token of each sequence that got tokens, and their places in the step's logit_rows."""
    places: list[int] = []
    fed: Fed = []
    next_draft = len(step.ready)
    for index, row in enumerate(step.ready):
        sequence_id = row.start.sequence_id
        path = paths.get(sequence_id)
        if path is not None:
            places.append(next_draft + path[-1] if path else index)
            fed.append((sequence_id, row.num_computed_tokens - 1, 1))
        if sequence_id in step.drafts:
            next_draft += len(step.drafts[sequence_id].tokens)
    return fed, places
