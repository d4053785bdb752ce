"""Speculator: the runner's interface to speculative decoding. It owns the proposer, the draft controller and the drafts."""

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
"""Maximum number of logits for draft positions that are held at once."""


def most_drafts(max_tokens: int, vocab_size: int, max_logits: int = MAX_DRAFT_LOGITS) -> int:
    """Return the maximum number of drafts in a step, given the limits of drafts per sequence and of logits per step."""
    return max(max_tokens, max_logits // vocab_size)


def share_drafts(wanted: Mapping[SequenceId, int], limit: int, turn: int = 0) -> dict[SequenceId, int]:
    """Distribute at most `limit` drafts over the sequences as evenly as possible, and return the number for each.

    turn  index of the step; rotates which sequences get one more where the limit does not divide evenly
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
    """Drafts of a sequence in a step: the number requested from the proposer, and whether the first one is verified."""

    num_asked: int
    is_verified: bool


class StepDrafts(NamedTuple):
    """State that a Speculator keeps from the start of a step to its end."""

    drafted: dict[SequenceId, _Made]
    drafts: dict[SequenceId, Draft]
    num_drafts: int
    num_caught_up: int


class Speculator:
    """Tracks the worker's sequences. Call `begin` and `end` around every step for which `skips` is False.

    config, proposer  None: only tokens that constraints force are drafted
    typical           accepts drafts that were not sampled; None: tokens are those of plain decoding
    max_drafts        per step; None: the number whose logits a CPU holds at once
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
        self.controller = DraftController(config.max_tokens, self._record) if config is not None and config.adaptive else None
        self._max_drafts = most_drafts(self._max_tokens, vocab_size) if max_drafts is None else max_drafts
        self.followed: dict[SequenceId, _Followed] = {}
        self.forced = ForcedTokens()
        self._constrained: set[SequenceId] = set()
        self.drafts_forced = True  # whether tokens that constraints force are drafted
        self._num_wanted: dict[SequenceId, int] = {}  # drafts requested from the proposer for the next step
        self._turn = 0  # rotates the remainder in share_drafts
        self.drafted: dict[SequenceId, _Made] = {}
        self._drafts: dict[SequenceId, Draft] = {}  # of the current step
        self._begun_s = 0.0  # start of the current step
        self.num_drafts, self._num_caught_up = 0, 0
        self._decoded: Sequence[SequenceId] = ()
        self._has_ended = False  # whether an ended step was not reported to the controller yet
        self._skips_left = self.num_skipped = 0  # steps that need not be reported: those left, and those that have passed
        self._num_skipping = 0  # sequences in these steps
        self._idle_s = 0.0  # in the current step, see note_idle

    def skips(self, plan: StepPlan) -> bool:
        """Whether the step that begins drafts nothing and reads no model states; no other method is called for it then."""
        if self._proposer is None:
            return not self.followed and not plan.starts
        if self._skips_left == 0:
            return False
        num_sequences = len(plan.num_scheduled_tokens)
        if plan.starts or plan.ended or plan.num_draft_slots or num_sequences != self._num_skipping:
            self._skips_left = 0
            return False
        self._skips_left -= 1
        self.num_skipped += 1
        if plan.new_block_ids or plan.replaced_blocks or plan.block_copies:
            self._proposer.apply(plan)
        return True

    def end_skipping(self) -> None:
        """Report the steps that were skipped to the controller, and skip no more."""
        if self.controller is not None and self.num_skipped > 0:
            self.controller.skip_steps(self.num_skipped)
        self._skips_left = self.num_skipped = 0

    @property
    def proposer(self) -> Proposer | None:
        """The proposer, if there is one."""
        return self._proposer

    def with_proposer(self, proposer: Proposer | None) -> Speculator:
        """Return a speculator with the same options and limits and another proposer; None: only tokens that constraints force
        are drafted."""
        return Speculator(None if proposer is None else self._config, proposer, self._vocab_size, self._max_drafts)

    @property
    def lets_next_begin(self) -> bool:
        """Whether the next step may begin before the current one has ended, because it will have no drafts. No other method
        is called for the current step then. Query it after the current step has begun."""
        if self._proposer is None:
            return not (self.followed and self.drafts_forced)
        return self._skips_left > 0

    def note_idle(self, idle_s: float) -> None:
        """Record how long the device was idle before the current step, because that step waited for the previous one.

        Without drafts the step would have begun earlier, so this time is not part of the cost of a plain step.
        """
        self._idle_s = idle_s

    def restart_clock(self) -> None:
        """Restart the clock of the current step, which had to wait for the previous one. Call when the previous one ends."""
        self._begun_s = time.perf_counter()

    def begin(self, plan: StepPlan) -> None:
        """Begin a step and release the sequences that ended. Call before `follow` for the step's sequences."""
        if self._skips_left or self.num_skipped:
            self.end_skipping()
        now_s = time.perf_counter()
        # The time between two steps counts too, except when there was no work.
        goes_on = bool(self._decoded) and self._decoded[0] in plan.num_scheduled_tokens
        self._update_controller(now_s - self._begun_s if goes_on else None)
        self._begun_s, self._idle_s = now_s, 0.0
        for sequence_id in plan.ended:
            self.forced.forget(sequence_id)
            self._constrained.discard(sequence_id)
            self._num_wanted.pop(sequence_id, None)
            followed = self.followed.pop(sequence_id, None)
            if followed is not None and self._proposer is not None:
                self._proposer.release(followed.sequence)
        if self._proposer is not None and (plan.starts or plan.new_block_ids or plan.replaced_blocks or plan.block_copies):
            self._proposer.apply(plan)

    def _update_controller(self, duration_s: float | None) -> None:
        """Report the last step to the controller once; None: its duration is not meaningful."""
        controller = self.controller
        if controller is not None and self._has_ended:
            if duration_s is None:
                controller.pass_step(self.num_drafts, self._num_caught_up)
            else:
                if self._idle_s > 0 and self.num_drafts == 0 and controller.is_disabled:
                    duration_s = max(duration_s - self._idle_s, self._idle_s)
                controller.note_step(len(self._decoded), self.num_drafts, duration_s, self._num_caught_up)
        self._has_ended, self._decoded = False, ()

    def leave(self) -> None:
        """Forget all sequences and the contents of their blocks; the following steps are not reported to the speculator."""
        self.end_skipping()
        self._update_controller(None)
        for followed in self.followed.values():
            if self._proposer is not None:
                self._proposer.release(followed.sequence)
        if self._proposer is not None:
            self._proposer.forget_blocks()
        self.followed.clear()
        self._constrained.clear()
        self.forced.clear()
        self.drafted.clear()
        self._num_wanted, self._drafts = {}, {}

    @property
    def pools(self) -> Sequence[KvPool]:
        """KV pools of the proposer; their blocks have the target's ids."""
        return () if self._proposer is None else self._proposer.pools

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Model layers whose inputs the proposer reads."""
        return () if self._proposer is None else self._proposer.aux_hidden_state_layers or ()

    def follow(self, sequence: DraftedSequence) -> None:
        """Track a sequence that the plan starts."""
        if self.controller is not None:
            self.controller.note_start()
        if sequence.sampling.matcher is not None:
            self._constrained.add(sequence.sequence_id)
        if self._proposer is not None or sequence.sampling.matcher is not None:
            self.followed[sequence.sequence_id] = _Followed(sequence, self._record(self._max_tokens, RECENT_FADING))

    def propose(self, plan: StepPlan) -> dict[SequenceId, Draft]:
        """Return the drafts of the step; none of them is empty."""
        self.num_drafts = self._num_caught_up = 0
        slots = plan.num_draft_slots
        if not slots:
            if self._drafts or self.drafted:
                self.drafted.clear()
                self._drafts = {}
            return {}
        self.drafted.clear()
        found: dict[SequenceId, Draft] = {}
        wanted: dict[SequenceId, int] = {}
        asked: list[tuple[DraftedSequence, int]] = []
        for sequence_id, count in slots.items():
            if sequence_id in self._num_wanted:
                wanted[sequence_id] = count = min(count, self._num_wanted[sequence_id])
                asked.append((self.followed[sequence_id].sequence, count))
        if self.controller is not None and self.controller.is_trial and not self._will_tell(plan, wanted):
            self.controller.cancel_trial()
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
                sampling = self.followed[sequence_id].sequence.sampling
                fitting = fit_draft(sampling, draft, self.forced.of(sequence_id), count)
                is_verified = is_verified and fitting.tokens[:1] == draft.tokens[:1]
            num_asked = wanted.get(sequence_id, 0) if self._stops_early else num_tokens
            if num_asked > 0:
                # Drafts that a constraint rejects have been computed too, so they count.
                self.drafted[sequence_id] = _Made(num_asked, is_verified)
                self.num_drafts += num_asked
            if fitting.tokens:
                kept[sequence_id] = fitting
        self._drafts = kept
        return kept

    def count_unasked(self, drafts: Mapping[SequenceId, Draft]) -> dict[SequenceId, int]:
        """Return for each sequence how many of its first drafts need no logits, because the token after them is forced.

        Sequences for which this is 0 are left out.
        """
        found: dict[SequenceId, int] = {}
        proposer = self._proposer
        if not self._constrained or (proposer is not None and (proposer.wants_logits or "last" in proposer.inputs)):
            return found
        for sequence_id in self._constrained & drafts.keys():
            count = count_shared(drafts[sequence_id], self.forced.of(sequence_id))
            if count > 1 and self.followed[sequence_id].sequence.sampling.takes_forced:
                found[sequence_id] = count - 1
        return found

    def _will_tell(self, plan: StepPlan, wanted: Mapping[SequenceId, int]) -> bool:
        """Return whether the step will yield a measurement of the drafts' cost: it has some, and is otherwise a decode step."""
        scheduled = plan.num_scheduled_tokens
        are_forced = any(key not in wanted and self.forced.of(key) for key in plan.num_draft_slots or ())
        return bool(wanted) and not are_forced and len(scheduled) == sum(scheduled.values())

    def on_logits(
        self, paths: Mapping[SequenceId, tuple[int, ...]], sequence_ids: Sequence[SequenceId], logits: Tensor
    ) -> None:
        """Pass the logits of a step to the proposer. Call before `end`.

        paths         of the sequences that got tokens, the accepted drafts; only sequences with drafts are reported
        sequence_ids  the sampled sequences: logits [R, vocab_size] has one row for the last known token of each, then the rows
                      for their drafts
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
                sequence = self.followed[sequence_id].sequence
                outcomes.append(Outcome(sequence, draft, paths[sequence_id], logits, rows))
            next_row += len(draft)
        self._proposer.on_logits(outcomes)

    @property
    def wants_logits(self) -> bool:
        """Whether `on_logits` is to be called after this step."""
        return bool(self._drafts) and self._proposer is not None and self._proposer.wants_logits

    @property
    def inputs(self) -> tuple[DraftInput, ...]:
        """Model states that the proposer reads in this step; empty while drafts are disabled for many more steps."""
        if self._proposer is None or (self.controller is not None and not self.controller.is_reading):
            return ()
        return self._proposer.inputs

    def on_step_states(self, what: DraftInput, fed: Sequence[tuple[SequenceId, int, int]], features: Tensor) -> None:
        """Pass one of `inputs` to the proposer. Call before `end`.

        fed       sequence, position of the first token, and number of tokens, in the order of `features` [R, F] f32
        """
        if self._proposer is not None:
            told: list[tuple[DraftedSequence, int, int]] = []
            for sequence_id, first, count in fed:  # every one of them is tracked
                told.append((self.followed[sequence_id].sequence, first, count))
            self._proposer.on_step_states(what, told, features)

    def suspend(self) -> StepDrafts:
        """Save and clear the state of the current step, so that a step of other sequences can begin before it ends."""
        kept = StepDrafts(self.drafted, self._drafts, self.num_drafts, self._num_caught_up)
        self.drafted, self._drafts = {}, {}
        return kept

    def resume(self, step: StepDrafts) -> None:
        """Restore a step that was suspended; it must be the next one to end."""
        self.drafted, self._drafts, self.num_drafts, self._num_caught_up = step

    def end(self, plan: StepPlan, paths: Mapping[SequenceId, tuple[int, ...]]) -> dict[SequenceId, int]:
        """End a step, and return how many drafts each sequence that got tokens could use in the next one.

        paths  of these sequences, the accepted drafts
        """
        if not self.followed:
            return {}
        controller = self.controller
        is_plain = len(paths) == len(plan.num_scheduled_tokens) == sum(plan.num_scheduled_tokens.values())
        if controller is not None and is_plain and not self.drafted and not self._constrained:
            num_skippable = controller.num_skippable
            if num_skippable > 0:
                controller.skip_steps(1)
                self._note_wanted(plan, {})
                self._skips_left, self._num_skipping = num_skippable - 1, len(paths)
                return {}
        self._has_ended = True
        if controller is not None:
            for sequence_id, made in self.drafted.items():
                if sequence_id not in paths:  # its mask is pending, or it has failed: nothing was verified
                    continue
                path = paths[sequence_id] if made.is_verified else ()
                controller.note_verified(self.followed[sequence_id].record, made.num_asked, path)
            # Steps with forced tokens are not measured: their number varies whatever drafts cost.
            if is_plain and self._drafts.keys() <= self.drafted.keys():
                self._decoded = list(paths)
        is_drafting = self._proposer is not None and not (controller is not None and controller.is_disabled)
        wanted = self._choose(self._proposer, list(paths)) if is_drafting and self._proposer is not None else {}
        self._note_wanted(plan, wanted)
        requested = self._with_forced(paths) if self._constrained and self.drafts_forced else wanted
        if not requested:
            return {}
        self._turn += 1
        return share_drafts(requested, self._max_drafts, self._turn)

    def _note_wanted(self, plan: StepPlan, wanted: Mapping[SequenceId, int]) -> None:
        """Replace the requested drafts of a step's sequences; those of sequences in other steps in flight are kept."""
        for sequence_id in plan.num_scheduled_tokens:
            self._num_wanted.pop(sequence_id, None)
        self._num_wanted.update(wanted)

    def _with_forced(self, advanced: Iterable[SequenceId]) -> dict[SequenceId, int]:
        """Return the number of drafts that each sequence could use: from the proposer, or forced by a constraint."""
        requested: dict[SequenceId, int] = {}
        for sequence_id in advanced:
            num_forced = 0
            if sequence_id in self._constrained:
                num_forced = self.forced.num_available(sequence_id, self.followed[sequence_id].sequence.sampling)
            requested[sequence_id] = max(self._num_wanted.get(sequence_id, 0), num_forced)
        return requested

    def _choose(self, proposer: Proposer, advanced: list[SequenceId]) -> dict[SequenceId, int]:
        """Return how many drafts to request from the proposer for the next step."""
        followed = [self.followed[sequence_id] for sequence_id in advanced]
        counts = [proposer.num_available(one.sequence, self._max_tokens) for one in followed]
        if self.controller is not None:
            counts = self.controller.choose([(one.record, count) for one, count in zip(followed, counts, strict=True)])
        return {sequence_id: count for sequence_id, count in zip(advanced, counts, strict=True) if count > 0}
