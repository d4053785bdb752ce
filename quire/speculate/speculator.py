"""Speculator: what the runner asks before and after a step; it owns the proposer, the pace and what is drafted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire.base.ids import SequenceId
from quire.contracts.speculative import SpeculativeConfig
from quire.contracts.step import StepPlan
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.pace import AcceptanceRecord, Pace
from quire.speculate.proposer import Proposer

_MAX_LOGIT_ELEMENTS = 1 << 24
"""Logits behind drafts that are held at once."""
_RECENT = 0.95


@dataclass(frozen=True, slots=True)
class _Followed:
    sequence: DraftedSequence
    record: AcceptanceRecord


class Speculator:
    """Follows the worker's sequences. begin and end enclose every step."""

    def __init__(self, config: SpeculativeConfig, proposer: Proposer, vocab_size: int) -> None:
        self._max_tokens = config.max_tokens
        self._proposer = proposer
        self._pace = Pace(config.max_tokens) if config.adaptive else None
        self._max_drafts = max(config.max_tokens, _MAX_LOGIT_ELEMENTS // vocab_size)
        self._followed: dict[SequenceId, _Followed] = {}
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
            followed = self._followed.pop(sequence_id, None)
            if followed is not None:
                self._proposer.release(followed.sequence)
        self._proposer.apply(plan)

    def follow(self, sequence: DraftedSequence) -> None:
        """Take in a sequence that the plan starts."""
        self._followed[sequence.sequence_id] = _Followed(sequence, AcceptanceRecord(self._max_tokens, _RECENT))

    def propose(self, plan: StepPlan) -> dict[SequenceId, Draft]:
        """Return the drafts of the step, none of them empty."""
        slots = plan.num_draft_slots or {}
        wanted = [(self._followed[sequence_id].sequence, count) for sequence_id, count in slots.items()]
        drafts = self._proposer.propose(wanted) if wanted else []
        found = {sequence_id: draft for sequence_id, draft in zip(slots, drafts, strict=True) if len(draft) > 0}
        self._num_drafts = sum(map(len, found.values()))
        return found

    def end(
        self, plan: StepPlan, advanced: Sequence[SequenceId], verified: dict[SequenceId, tuple[int, int]]
    ) -> dict[SequenceId, int]:
        """Take in a step; return how many drafts the sequences that got tokens in it could use in the next one."""
        pace = self._pace
        if pace is not None:
            for sequence_id, (num_drafts, num_accepted) in verified.items():
                pace.note_verified(self._followed[sequence_id].record, num_drafts, num_accepted)
            if len(advanced) == len(plan.num_scheduled_tokens) == sum(plan.num_scheduled_tokens.values()):
                self._decoded = advanced
            if pace.is_asleep:
                return {}
        followed = [self._followed[sequence_id] for sequence_id in advanced]
        counts = [self._look(one.sequence) for one in followed]
        if pace is not None:
            counts = pace.choose([(one.record, count) for one, count in zip(followed, counts, strict=True)])
        wishes: dict[SequenceId, int] = {}
        num_left = self._max_drafts
        for sequence_id, count in zip(advanced, counts, strict=True):
            granted = min(count, num_left)
            if granted > 0:
                wishes[sequence_id] = granted
                num_left -= granted
        return wishes

    def _look(self, sequence: DraftedSequence) -> int:
        return 0 if sequence.sampling.matcher is not None else self._proposer.look(sequence, self._max_tokens)
