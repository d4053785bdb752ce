"""What the runners have in common about drafts: who drafts, what is drafted in a step, and what of it is to be verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from quire.base.ids import SequenceId
from quire.contracts.speculative import SpeculativeConfig
from quire.contracts.step import StepPlan
from quire.speculate.draft import NO_DRAFT, Draft, DraftedSequence
from quire.speculate.proposer import Proposer
from quire.speculate.speculator import Speculator
from quire.speculate.verifier import Candidate
from quire.worker.grammar_masks import StepMasks
from quire.worker.input_batch import InputBatch, Row, StepInput


class DraftingRunner:
    """Owns the speculator of a runner. At first it drafts what constraints force, and nothing else; see draft_with.

    keep_inputs  has the model keep the inputs of these layers, as Speculator.tap_layers names them
    """

    def __init__(self, vocab_size: int, keep_inputs: Callable[[tuple[int, ...]], None]) -> None:
        self._vocab_size, self._keep_inputs = vocab_size, keep_inputs
        self._speculator = Speculator(None, None, vocab_size)
        self._paused: Speculator | None = None  # that will draft again

    def draft_with(self, speculator: Speculator) -> None:
        """Draft with a speculator from now on; the one that was there before must follow no sequence."""
        speculator.drafts_forced = self._speculator.drafts_forced
        self._speculator, self._paused = speculator, None

    def replace_proposer(self, config: SpeculativeConfig, make: Callable[[Proposer | None], Proposer]) -> None:
        """Let another proposer draft, made of the one that did; no sequence may be followed."""
        self.draft_with(Speculator(config, make(self._speculator.proposer), self._vocab_size))

    def pause_drafts(self, is_wanted: bool) -> None:
        """Draft nothing at all, as if there never had been a speculator, or go on; no sequence may be followed."""
        if is_wanted == (self._paused is not None):
            return
        if self._paused is None:
            self._speculator.leave()
            self._paused, self._speculator = self._speculator, Speculator(None, None, self._vocab_size)
            self._speculator.drafts_forced = self._paused.drafts_forced
        else:
            self._paused.drafts_forced = self._speculator.drafts_forced
            self._speculator, self._paused = self._paused, None
        self._keep_inputs(self._speculator.tap_layers)

    def draft_forced(self, is_wanted: bool) -> None:
        """Say whether the tokens that constraints force are drafted; no sequence may be followed."""
        self._speculator.drafts_forced = is_wanted


def propose_drafts(speculator: Speculator, batch: InputBatch, plan: StepPlan) -> Mapping[SequenceId, Draft]:
    """Return the drafts of the step that begins, whose plan the batch has taken over; what it starts is followed now."""
    speculator.begin(plan)
    for start in plan.starts:
        if start.request.pooling is None:
            row = batch.row(start.sequence_id)
            known = start.sequence_id, start.request, start.choice, row.token_ids, row.sampling, row.block_table
            speculator.follow(DraftedSequence(*known))
    return speculator.propose(plan)


def candidates_of(rows: list[Row], step: StepInput, masks: StepMasks) -> list[Candidate]:
    """Return what is to be verified, where the logits behind the drafts come after those of the rows, in their order."""
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
"""Sequence, position of the first token, and number of tokens; see Speculator.feed."""


def known_tokens(step: StepInput, paths: Mapping[SequenceId, tuple[int, ...]], late: Set[SequenceId]) -> tuple[Fed, list[int]]:
    """Return what a step computed of known tokens and accepted drafts, and where these stand among its tokens.

    paths  of sequences, the drafts that were accepted
    late   whose last known token is computed once more, and is none of these
    """
    rows: list[int] = []
    fed: Fed = []
    starts, ends = step.runs.starts, step.runs.ends
    for index, row in enumerate(step.rows):
        if row.pooler is not None:
            continue
        sequence_id = row.start.sequence_id
        begin, first_draft = starts[index], starts[index + 1]
        path = paths.get(sequence_id, ())
        if sequence_id in step.drafts:
            first_draft -= len(step.drafts[sequence_id].tokens)
        if sequence_id in late:
            first_draft -= 1
        if first_draft == begin:
            continue
        fed.append((sequence_id, ends[index] - (starts[index + 1] - begin), first_draft - begin + len(path)))
        rows += range(begin, first_draft)
        rows += map(first_draft.__add__, path)
    return fed, rows


def last_tokens(step: StepInput, paths: Mapping[SequenceId, tuple[int, ...]]) -> tuple[Fed, list[int]]:
    """Return the last computed token of every sequence that got tokens, and where these stand in the step's logit_rows."""
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
