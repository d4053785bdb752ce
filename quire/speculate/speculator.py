"""Speculator: what the runner asks before and after a step; it owns the proposer, the draft controller and what is drafted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from quire.base.ids import SequenceId
from quire.contracts.speculative import SpeculativeConfig
from quire.contracts.step import StepPlan
from quire.kv.pool import KvPool
from quire.speculate.acceptance import RECENT_FADING, AcceptanceRecord
from quire.speculate.draft import NO_DRAFT, Draft, DraftedSequence
from quire.speculate.draft_controller import DraftController
from quire.speculate.forced import ForcedTokens, count_shared, fit_draft
from quire.speculate.proposer import DraftInput, Outcome, Proposer
from quire.speculate.typical import TypicalAcceptance

MAX_DRAFT_LOGITS = 1 << 24
"""Logits behind drafts that are held at once."""


def most_drafts(max_tokens: int, vocab_size: int, max_logits: int = MAX_DRAFT_LOGITS) -> int:
    """Return how many drafts there are in a step at most; max_tokens of a sequence, max_logits behind all of them."""
    return max(max_tokens, max_logits // vocab_size)


def share_drafts(wanted: Mapping[SequenceId, int], limit: int, turn: int = 0) -> dict[SequenceId, int]:
    """Return how many drafts each sequence gets of what it wants, together at most `limit`: as even shares as can be.

    turn  of the step: where the limit does not divide, others get one more in every turn
    """
    if sum(wanted.values()) <= limit:
        return {key: count for key, count in wanted.items() if count > 0}
    level, left = 0, limit  # all get as many as `level`, or what they want
    for index, count in enumerate(sorted(wanted.values())):
        num_more = len(wanted) - index
        if (count - level) * num_more > left:
            level, left = level + left // num_more, left % num_more
            break
        level, left = count, left - (count - level) * num_more
    granted = {key: min(count, level) for key, count in wanted.items()}
    others = [key for key, count in wanted.items() if count > level]
    for place in range(turn * left, (turn + 1) * left):
        granted[others[place % len(others)]] += 1
    return {key: count for key, count in granted.items() if count > 0}


@dataclass(frozen=True, slots=True)
class _Followed:
    sequence: DraftedSequence
    record: AcceptanceRecord


class _Made(NamedTuple):
    """Drafts of a sequence in a step: how many the proposer was asked for, and whether the first one is verified."""

    num_asked: int
    is_verified: bool


class StepDrafts(NamedTuple):
    """What a Speculator keeps from the start of a step to its end."""

    drafted: dict[SequenceId, _Made]
    drafts: dict[SequenceId, Draft]
    num_drafts: int
    num_caught_up: int


class Speculator:
    """Follows the worker's sequences. begin and end enclose every step but those that it naps through.

    config, proposer  None: nothing is drafted but what constraints force
    typical           what takes drafts that were not sampled; None: tokens are those of plain decoding
    max_drafts        of a step; None: as many as the logits allow that a CPU holds at once
    """

    def __init__(
        self, config: SpeculativeConfig | None, proposer: Proposer | None, vocab_size: int, max_drafts: int | None = None
    ) -> None:
        self._config, self._vocab_size = config, vocab_size
        self._max_tokens = 0 if config is None else config.max_tokens
        self._proposer = proposer
        is_typical = config is not None and config.is_typical
        self.typical = TypicalAcceptance(config.posterior_threshold, config.posterior_alpha) if is_typical else None
        self._stops_early = proposer is not None and proposer.stops_early
        self._record = AcceptanceRecord if proposer is None else proposer.record
        self._controller = DraftController(config.max_tokens, self._record) if config is not None and config.adaptive else None
        self._max_drafts = most_drafts(self._max_tokens, vocab_size) if max_drafts is None else max_drafts
        self._followed: dict[SequenceId, _Followed] = {}
        self._forced = ForcedTokens()
        self._constrained: set[SequenceId] = set()
        self.drafts_forced = True  # whether what constraints force is drafted
        self._num_wanted: dict[SequenceId, int] = {}  # of the proposer in the next step
        self._turn = 0  # of sharing drafts
        self._drafted: dict[SequenceId, _Made] = {}
        self._drafts: dict[SequenceId, Draft] = {}  # all of this step
        self._begun_s = 0.0  # start of the step that runs
        self._num_drafts, self._num_caught_up = 0, 0
        self._decoded: Sequence[SequenceId] = ()
        self._has_ended = False  # a step of which the controller was not told yet
        self._nap_left = self._num_napped = 0  # steps of which it need not be told, and those of them that are over
        self._num_napping = 0  # sequences then
        self._idle_s = 0.0  # of the step that runs, see note_idle

    def naps(self, plan: StepPlan) -> bool:
        """Whether nothing is drafted, read or learnt in the step that begins: then nothing else is called in it."""
        if self._proposer is None:
            return not self._followed and not plan.starts
        if self._nap_left == 0:
            return False
        num_sequences = len(plan.num_scheduled_tokens)
        if plan.starts or plan.ended or plan.num_draft_slots or num_sequences != self._num_napping:
            self._nap_left = 0
            return False
        self._nap_left -= 1
        self._num_napped += 1
        if plan.new_block_ids or plan.replaced_blocks or plan.block_copies:
            self._proposer.apply(plan)
        return True

    def _end_nap(self) -> None:
        if self._controller is not None and self._num_napped > 0:
            self._controller.skip_steps(self._num_napped)
        self._nap_left = self._num_napped = 0

    @property
    def proposer(self) -> Proposer | None:
        """What drafts, beside constraints."""
        return self._proposer

    def with_proposer(self, proposer: Proposer | None) -> Speculator:
        """Return a speculator with the same options and limits that drafts with another proposer, or, if that is None, only
        what constraints force."""
        return Speculator(None if proposer is None else self._config, proposer, self._vocab_size, self._max_drafts)

    @property
    def lets_next_begin(self) -> bool:
        """Whether the next step may begin before the one that runs has ended, of which nothing else is called then: nothing
        is drafted in the next one. To be asked once the one that runs has begun."""
        if self._proposer is None:
            return not (self._followed and self.drafts_forced)
        return self._nap_left > 0

    def note_idle(self, idle_s: float) -> None:
        """Take in how long the device had nothing to do before the step that has begun, as that waited for the one before.

        Were nothing drafted, the step would have begun meanwhile: it is no part of what a step without drafts takes.
        """
        self._idle_s = idle_s

    def restart_clock(self) -> None:
        """Take in that the step that has begun had to wait for the one before, which ends now."""
        self._begun_s = time.perf_counter()

    def begin(self, plan: StepPlan) -> None:
        """Forget sequences that ended; to be called before the step's sequences are followed."""
        if self._nap_left or self._num_napped:
            self._end_nap()
        now_s = time.perf_counter()
        # What is done between two steps counts too; but not that there was nothing to do.
        goes_on = bool(self._decoded) and self._decoded[0] in plan.num_scheduled_tokens
        self._tell_controller(now_s - self._begun_s if goes_on else None)
        self._begun_s, self._idle_s = now_s, 0.0
        for sequence_id in plan.ended:
            self._forced.forget(sequence_id)
            self._constrained.discard(sequence_id)
            self._num_wanted.pop(sequence_id, None)
            followed = self._followed.pop(sequence_id, None)
            if followed is not None and self._proposer is not None:
                self._proposer.release(followed.sequence)
        if self._proposer is not None and (plan.starts or plan.new_block_ids or plan.replaced_blocks or plan.block_copies):
            self._proposer.apply(plan)

    def _tell_controller(self, duration_s: float | None) -> None:
        """Tell the controller once of the step that ended last, if there is one; None: its time says nothing."""
        controller = self._controller
        if controller is not None and self._has_ended:
            if duration_s is None:
                controller.pass_step(self._num_drafts, self._num_caught_up)
            else:
                if self._idle_s > 0 and self._num_drafts == 0 and controller.is_disabled:
                    duration_s = max(duration_s - self._idle_s, self._idle_s)
                controller.note_step(len(self._decoded), self._num_drafts, duration_s, self._num_caught_up)
        self._has_ended, self._decoded = False, ()

    def leave(self) -> None:
        """Forget all sequences, and what is kept of their blocks: steps follow that it is not told of."""
        self._end_nap()
        self._tell_controller(None)
        for followed in self._followed.values():
            if self._proposer is not None:
                self._proposer.release(followed.sequence)
        if self._proposer is not None:
            self._proposer.forget_blocks()
        self._followed.clear()
        self._constrained.clear()
        self._forced.clear()
        self._drafted.clear()
        self._num_wanted, self._drafts = {}, {}

    @property
    def pools(self) -> Sequence[KvPool]:
        """Pools of what drafts, whose blocks have the target's ids."""
        return () if self._proposer is None else self._proposer.pools

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Layers of the model whose inputs the proposer reads."""
        return () if self._proposer is None else self._proposer.aux_hidden_state_layers or ()

    def follow(self, sequence: DraftedSequence) -> None:
        """Take in a sequence that the plan starts."""
        if self._controller is not None:
            self._controller.note_start()
        if sequence.sampling.matcher is not None:
            self._constrained.add(sequence.sequence_id)
        if self._proposer is not None or sequence.sampling.matcher is not None:
            self._followed[sequence.sequence_id] = _Followed(sequence, self._record(self._max_tokens, RECENT_FADING))

    def propose(self, plan: StepPlan) -> dict[SequenceId, Draft]:
        """Return the drafts of the step, none of them empty."""
        self._num_drafts = self._num_caught_up = 0
        slots = plan.num_draft_slots
        if not slots:
            if self._drafts or self._drafted:
                self._drafted.clear()
                self._drafts = {}
            return {}
        self._drafted.clear()
        found: dict[SequenceId, Draft] = {}
        wanted: dict[SequenceId, int] = {}
        asked: list[tuple[DraftedSequence, int]] = []
        for sequence_id, count in slots.items():
            if sequence_id in self._num_wanted:
                wanted[sequence_id] = count = min(count, self._num_wanted[sequence_id])
                asked.append((self._followed[sequence_id].sequence, count))
        if self._controller is not None and self._controller.is_trial and not self._will_tell(plan, wanted):
            self._controller.cancel_trial()
            wanted = {}
        if wanted and self._proposer is not None:
            found = dict(zip(wanted, self._proposer.propose(asked), strict=True))
            self._num_caught_up = self._proposer.num_caught_up
        kept: dict[SequenceId, Draft] = {}
        for sequence_id, count in slots.items():
            draft = fitting = found.get(sequence_id, NO_DRAFT)
            num_tokens = len(draft.tokens)
            is_verified = num_tokens > 0
            if sequence_id in self._constrained:
                sampling = self._followed[sequence_id].sequence.sampling
                fitting = fit_draft(sampling, draft, self._forced.of(sequence_id), count)
                is_verified = is_verified and fitting.tokens[:1] == draft.tokens[:1]
            num_asked = wanted.get(sequence_id, 0) if self._stops_early else num_tokens
            if num_asked > 0:
                # Drafts that a constraint refuses were made nevertheless.
                self._drafted[sequence_id] = _Made(num_asked, is_verified)
                self._num_drafts += num_asked
            if fitting.tokens:
                kept[sequence_id] = fitting
        self._drafts = kept
        return kept

    def count_unasked(self, drafts: Mapping[SequenceId, Draft]) -> dict[SequenceId, int]:
        """Return behind how many first drafts of the step, of which there are some, nothing is to be sampled, as what follows
        there is forced; nothing else needs logits there."""
        found: dict[SequenceId, int] = {}
        proposer = self._proposer
        if not self._constrained or (proposer is not None and (proposer.wants_logits or "last" in proposer.inputs)):
            return found
        for sequence_id in self._constrained & drafts.keys():
            count = count_shared(drafts[sequence_id], self._forced.of(sequence_id))
            if count > 1 and self._followed[sequence_id].sequence.sampling.takes_forced:
                found[sequence_id] = count - 1
        return found

    def _will_tell(self, plan: StepPlan, wanted: Mapping[SequenceId, int]) -> bool:
        """Return whether a step will tell what drafts cost, as far as is known: it has some, and nothing else happens in it."""
        scheduled = plan.num_scheduled_tokens
        are_forced = any(key not in wanted and self._forced.of(key) for key in plan.num_draft_slots or ())
        return bool(wanted) and not are_forced and len(scheduled) == sum(scheduled.values())

    def on_logits(
        self, paths: Mapping[SequenceId, tuple[int, ...]], sequence_ids: Sequence[SequenceId], logits: Tensor
    ) -> None:
        """Tell the proposer, if it wants to know, what a step computed; to be called before `end`.

        paths         of the sequences that got tokens, the drafts that were accepted; it is told of those with drafts
        sequence_ids  whose next tokens were sought: logits [R, vocab_size] are those behind the last known token of each, and
                      then those behind their drafts
        """
        if self._proposer is None:
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
        self._proposer.on_logits(outcomes)

    @property
    def wants_logits(self) -> bool:
        """Whether `observe` is to be called after this step."""
        return bool(self._drafts) and self._proposer is not None and self._proposer.wants_logits

    @property
    def inputs(self) -> tuple[DraftInput, ...]:
        """What the proposer reads of the model in this step. Nothing, while drafts are long not to be tried."""
        if self._proposer is None or (self._controller is not None and not self._controller.is_reading):
            return ()
        return self._proposer.inputs

    def on_step_states(self, what: DraftInput, fed: Sequence[tuple[SequenceId, int, int]], features: Tensor) -> None:
        """Hand the proposer one thing that it reads; to be called before `end`.

        fed       sequence, position of the first token, and number of tokens, in the order of `features` [R, F] f32
        """
        if self._proposer is not None:
            told: list[tuple[DraftedSequence, int, int]] = []
            for sequence_id, first, count in fed:  # none is missing: what has no tokens to draft is not in the step
                told.append((self._followed[sequence_id].sequence, first, count))
            self._proposer.on_step_states(what, told, features)

    def suspend(self) -> StepDrafts:
        """Put aside what belongs to the step that has begun, so that a step of other sequences may begin before it ends."""
        kept = StepDrafts(self._drafted, self._drafts, self._num_drafts, self._num_caught_up)
        self._drafted, self._drafts = {}, {}
        return kept

    def resume(self, step: StepDrafts) -> None:
        """Go on with a step that was put aside; it ends next."""
        self._drafted, self._drafts, self._num_drafts, self._num_caught_up = step

    def end(self, plan: StepPlan, paths: Mapping[SequenceId, tuple[int, ...]]) -> dict[SequenceId, int]:
        """Take in a step; return how many drafts the sequences that got tokens in it could use in the next one.

        paths  of those sequences, the drafts that were accepted
        """
        if not self._followed:
            return {}
        controller = self._controller
        is_plain = len(paths) == len(plan.num_scheduled_tokens) == sum(plan.num_scheduled_tokens.values())
        if controller is not None and is_plain and not self._drafted and not self._constrained:
            num_skippable = controller.num_skippable
            if num_skippable > 0:
                controller.skip_steps(1)
                self._note_wanted(plan, {})
                self._nap_left, self._num_napping = num_skippable - 1, len(paths)
                return {}
        self._has_ended = True
        if controller is not None:
            for sequence_id, made in self._drafted.items():
                if sequence_id not in paths:  # its mask is pending, or it has failed: nothing was verified
                    continue
                path = paths[sequence_id] if made.is_verified else ()
                controller.note_verified(self._followed[sequence_id].record, made.num_asked, path)
            # Forced tokens come and go, whatever they cost.
            if is_plain and self._drafts.keys() <= self._drafted.keys():
                self._decoded = list(paths)
        is_drafting = self._proposer is not None and not (controller is not None and controller.is_disabled)
        wanted = self._choose(self._proposer, list(paths)) if is_drafting and self._proposer is not None else {}
        self._note_wanted(plan, wanted)
        wishes = self._with_forced(paths) if self._constrained and self.drafts_forced else wanted
        if not wishes:
            return {}
        self._turn += 1
        return share_drafts(wishes, self._max_drafts, self._turn)

    def _note_wanted(self, plan: StepPlan, wanted: Mapping[SequenceId, int]) -> None:
        """Replace the drafts that the sequences of a step want next; sequences of other steps in flight keep theirs."""
        for sequence_id in plan.num_scheduled_tokens:
            self._num_wanted.pop(sequence_id, None)
        self._num_wanted.update(wanted)

    def _with_forced(self, advanced: Iterable[SequenceId]) -> dict[SequenceId, int]:
        """Return the drafts that the sequences could use, those of the proposer and those that are forced."""
        wishes: dict[SequenceId, int] = {}
        for sequence_id in advanced:
            num_forced = 0
            if sequence_id in self._constrained:
                num_forced = self._forced.num_available(sequence_id, self._followed[sequence_id].sequence.sampling)
            wishes[sequence_id] = max(self._num_wanted.get(sequence_id, 0), num_forced)
        return wishes

    def _choose(self, proposer: Proposer, advanced: list[SequenceId]) -> dict[SequenceId, int]:
        """Return how many drafts of the proposer to take in the next step."""
        followed = [self._followed[sequence_id] for sequence_id in advanced]
        counts = [proposer.num_available(one.sequence, self._max_tokens) for one in followed]
        if self._controller is not None:
            counts = self._controller.choose([(one.record, count) for one, count in zip(followed, counts, strict=True)])
        return {sequence_id: count for sequence_id, count in zip(advanced, counts, strict=True) if count > 0}
