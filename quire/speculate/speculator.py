"""Speculator: what the runner asks before and after a step; it owns the proposer, the pace and what is drafted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.base.ids import SequenceId
from quire.contracts.speculative import SpeculativeConfig
from quire.contracts.step import StepPlan
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.forced import ForcedTokens, fit_draft
from quire.speculate.pace import Pace
from quire.speculate.proposer import Outcome, Proposer
from quire.speculate.records import AcceptanceRecord

_MAX_LOGIT_ELEMENTS = 1 << 24
"""Logits behind drafts that are held at once."""
_RECENT = 0.95
_FED_BEFORE_WAKING = 48
"""Steps before drafts are tried again in which a proposer is fed, so that it knows some of what it is to go on with."""
_NONE = Draft()


@dataclass(frozen=True, slots=True)
class _Followed:
    sequence: DraftedSequence
    record: AcceptanceRecord


class Speculator:
    """Follows the worker's sequences. begin and end enclose every step.

    config, proposer  None: nothing is drafted but what constraints force
    """

    def __init__(self, config: SpeculativeConfig | None, proposer: Proposer | None, vocab_size: int) -> None:
        self._max_tokens = 0 if config is None else config.max_tokens
        self._proposer = proposer
        self._record = AcceptanceRecord if proposer is None else proposer.record
        self._pace = Pace(config.max_tokens, self._record) if config is not None and config.adaptive else None
        self._max_drafts = max(self._max_tokens, _MAX_LOGIT_ELEMENTS // vocab_size)
        self._followed: dict[SequenceId, _Followed] = {}
        self._forced = ForcedTokens()
        self.drafts_forced = True  # whether what constraints force is drafted
        self._num_wanted: dict[SequenceId, int] = {}  # of the proposer in the next step
        # In this step: how many the proposer made, and whether the first of them is in.
        self._drafted: dict[SequenceId, tuple[int, bool]] = {}
        self._drafts: dict[SequenceId, Draft] = {}  # all of this step
        self._begun_s = 0.0
        self._num_drafts = 0
        self._decoded: Sequence[SequenceId] = ()

    def begin(self, plan: StepPlan) -> None:
        """Forget sequences that ended; to be called before the step's sequences are followed."""
        now_s = time.perf_counter()
        if self._pace is not None and any(sequence_id in plan.num_scheduled_tokens for sequence_id in self._decoded[:1]):
            # What is done between two steps counts too; but not that there was nothing to do.
            self._pace.note_step(len(self._decoded), self._num_drafts, now_s - self._begun_s)
        self._decoded = ()
        self._begun_s = now_s
        for sequence_id in plan.ended:
            self._forced.forget(sequence_id)
            followed = self._followed.pop(sequence_id, None)
            if followed is not None and self._proposer is not None:
                self._proposer.release(followed.sequence)
        if self._proposer is not None:
            self._proposer.apply(plan)

    def follow(self, sequence: DraftedSequence) -> None:
        """Take in a sequence that the plan starts."""
        if self._proposer is not None or sequence.sampling.matcher is not None:
            self._followed[sequence.sequence_id] = _Followed(sequence, self._record(self._max_tokens, _RECENT))

    def propose(self, plan: StepPlan) -> dict[SequenceId, Draft]:
        """Return the drafts of the step, none of them empty."""
        found: dict[SequenceId, Draft] = {}
        self._drafted.clear()
        slots = plan.num_draft_slots or {}
        wanted = {key: min(count, self._num_wanted[key]) for key, count in slots.items() if key in self._num_wanted}
        if wanted and self._proposer is not None:
            drafts = self._proposer.propose([(self._followed[key].sequence, count) for key, count in wanted.items()])
            found = dict(zip(wanted, drafts, strict=True))
        for sequence_id, count in slots.items():
            draft, forced = found.get(sequence_id, _NONE), self._forced.of(sequence_id)
            fitting = fit_draft(self._followed[sequence_id].sequence.sampling, draft, forced, count)
            if len(draft) > 0:
                # Those that a constraint does not take were made in vain, but made.
                self._drafted[sequence_id] = len(draft), fitting.tokens[:1] == draft.tokens[:1]
            found[sequence_id] = fitting
        self._num_drafts = sum(count for count, _ in self._drafted.values())
        self._drafts = {sequence_id: draft for sequence_id, draft in found.items() if len(draft) > 0}
        return self._drafts

    def observe(self, paths: Mapping[SequenceId, tuple[int, ...]], sequence_ids: Sequence[SequenceId], logits: Tensor) -> None:
        """Tell the proposer, if it wants to know, what a step computed; to be called before `end`.

        paths         of the sequences that got tokens, the drafts that were accepted; it is told of those with drafts
        sequence_ids  whose next tokens were sought: logits [R, vocab_size] are those behind the last known token of each, and
                      then those behind their drafts
        """
        if self._proposer is None or not self._proposer.observes or not self._drafts:
            return
        outcomes: list[Outcome] = []
        next_row = len(sequence_ids)
        for index, sequence_id in enumerate(sequence_ids):
            draft = self._drafts.get(sequence_id)
            if draft is None:
                continue
            if sequence_id in paths:
                rows = (index, *range(next_row, next_row + len(draft)))
                sequence = self._followed[sequence_id].sequence
                outcomes.append(Outcome(sequence, draft, paths[sequence_id], logits, rows))
            next_row += len(draft)
        self._proposer.observe(outcomes)

    @property
    def tap_layers(self) -> tuple[int, ...] | None:
        """What the proposer reads of the model in this step; see Proposer. Nothing, while drafts are long not to be tried."""
        if self._proposer is None or (self._pace is not None and self._pace.sleep_left > _FED_BEFORE_WAKING):
            return None
        return self._proposer.tap_layers

    def feed(self, fed: Sequence[tuple[SequenceId, int, int]], features: Tensor) -> None:
        """Hand the proposer what it reads; to be called before `end`.

        fed       sequence, position of the first token, and number of tokens, in the order of `features` [R, F] f32
        """
        row = 0
        for sequence_id, first, count in fed:
            followed = self._followed.get(sequence_id)
            if followed is not None and self._proposer is not None:
                self._proposer.feed(followed.sequence, first, features[row : row + count])
            row += count

    def end(self, plan: StepPlan, paths: Mapping[SequenceId, tuple[int, ...]]) -> dict[SequenceId, int]:
        """Take in a step; return how many drafts the sequences that got tokens in it could use in the next one.

        paths  of those sequences, the drafts that were accepted
        """
        if not self._followed:
            return {}
        pace = self._pace
        advanced = list(paths)
        if pace is not None:
            for sequence_id, (count, is_in) in self._drafted.items():
                path = paths.get(sequence_id, ()) if is_in else ()
                pace.note_verified(self._followed[sequence_id].record, count, path)
            is_usual = self._drafts.keys() <= self._drafted.keys()  # forced tokens come and go, whatever they cost
            if is_usual and len(advanced) == len(plan.num_scheduled_tokens) == sum(plan.num_scheduled_tokens.values()):
                self._decoded = advanced
        self._num_wanted = {} if self._proposer is None else self._choose(self._proposer, advanced)
        wishes: dict[SequenceId, int] = {}
        num_left = self._max_drafts
        for sequence_id in advanced:
            followed = self._followed.get(sequence_id)
            num_forced = 0
            if self.drafts_forced and followed is not None and followed.sequence.sampling.matcher is not None:
                num_forced = self._forced.look(sequence_id, followed.sequence.sampling)
            granted = min(max(self._num_wanted.get(sequence_id, 0), num_forced), num_left)
            if granted > 0:
                wishes[sequence_id] = granted
                num_left -= granted
        return wishes

    def _choose(self, proposer: Proposer, advanced: Sequence[SequenceId]) -> dict[SequenceId, int]:
        """Return how many drafts of the proposer to take in the next step."""
        if self._pace is not None and self._pace.is_asleep:
            return {}
        followed = [self._followed[sequence_id] for sequence_id in advanced]
        counts = [proposer.look(one.sequence, self._max_tokens) for one in followed]
        if self._pace is not None:
            counts = self._pace.choose([(one.record, count) for one, count in zip(followed, counts, strict=True)])
        return {sequence_id: count for sequence_id, count in zip(advanced, counts, strict=True) if count > 0}
