"""Scheduler: decides what every step computes, and keeps the books about it.

A step is {sequence: number of tokens} under one token budget; there is no prefill step and no decode step. In order:

1. Running sequences with one uncomputed token (they decode) get it, in policy order. The budget is never below
   max_num_seqs, so none of them ever waits behind a prompt.
2. Running sequences with more uncomputed tokens get chunks, in policy order, of what the budget has left and at most
   long_prefill_token_threshold each.
3. Waiting sequences are admitted in policy order while there is a seat (max_num_seqs), budget, and free blocks for ALL
   their known tokens, which they get at once. The first that does not fit blocks those behind it, even if they would fit:
   blocks that become free are for it, so that a long prompt cannot be starved by short ones.
4. What is in the background (Request.is_background) has its chunks and its admissions only now. Where somebody who is not
   finds no seat or no blocks in 3, the last running one in the background is preempted for it.
5. Decoding sequences for which the worker has drafts get slots for them, in policy order, of what budget and blocks are left.
   A block is left for each running sequence: drafts cause no preemption.

Where a running sequence needs a block and none is free, the last running one in policy order is preempted: it loses its
blocks and waits, in front, until all its tokens fit again. It may be the one that asked. After a preemption nobody is
admitted in that step, but those for whom the background made room. The first running sequence is preempted for nobody but
them, as one that is alone in the pool always fits (see admission; a fork needs a block to spare, so this holds for it too):
there is always progress. A sequence is left out of plans while the mask of its constraint is pending in the worker. A step is
empty only if no other sequence has anything to compute: the worker then waits for a mask.

The choices of a request (n > 1) are sequences of their own. All but choice 0 are held back until it has computed the
prompt, then forked from it where there is a seat and a free block for each; a fork may overtake waiting requests, as it
costs next to nothing then. Otherwise, or when choice 0 ends before, they wait like others, and the prefix cache serves them.

A sequence that outgrows the short variant of its rope (longrope, dynamic) loses its blocks, too, and is computed again with the
long variant, as transformers does it; see ModelSpec.rope_switch_len.

A request with pooling params is a sequence like any other, which ends when its prompt is computed. Where tokens attend in both
directions (computes_whole_prompts), a prompt is computed in one step, and not found in the prefix cache.

While a step runs, the next may be planned (schedule_ahead): from what the sequences will have then, one token more each. That
preempts nobody. Who turns out to have ended meanwhile has computed a token for nothing, in blocks that are its own until then.

With pipeline stages several steps are in flight (schedule_pipelined), each of other sequences: see preemption.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from quire.base.errors import InvariantError, RequestError
from quire.base.ids import RequestId, SequenceId
from quire.contracts.config import SchedulerConfig
from quire.contracts.request import FinishReason, Request
from quire.contracts.step import StepPlan, StepResult, TokenLogprobs
from quire.engine.scheduling.admission import new_sequence
from quire.engine.scheduling.events import SequenceStats, SequenceUpdate
from quire.engine.scheduling.host_tier import HostTier
from quire.engine.scheduling.in_flight import StepsInFlight
from quire.engine.scheduling.kv_allocator import NO_GROWTH, KvAllocator
from quire.engine.scheduling.preemption import StepLimits, find_preemptible, find_victim, must_make_room, share_of_step
from quire.engine.scheduling.sequence import Sequence, SequenceStatus
from quire.engine.scheduling.sequence_queue import SequenceQueue
from quire.engine.scheduling.step_outcome import find_mistake, take_computed, take_prompt_logprobs
from quire.engine.scheduling.step_plan_builder import StepPlanBuilder, find_remaining, give_draft_slots

_NOTHING: Mapping[SequenceId, int] = {}


class Scheduler:
    """Holds every unfinished sequence. add, finish and abort may come at any time.

    schedule() and commit() alternate; or schedule_ahead() comes between them, and then commits in the order of the plans.
    With pipeline stages schedule_pipelined() is called instead, up to num_pipeline_stages times before a commit.

    Not thread-safe. When a step fails as a whole, commit a StepResult that has an error for each of its sequences.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        num_pages = config.num_host_pages
        self.kv = KvAllocator(
            config.num_kv_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            num_state_checkpoints=config.num_state_checkpoints,
            host_tier=HostTier(num_pages, config.max_page_saves, config.kv_save) if num_pages > 0 else None,
        )
        self.waiting = SequenceQueue()
        self.running = SequenceQueue()
        self._sequences: dict[SequenceId, Sequence] = {}
        self._choices: dict[RequestId, list[Sequence]] = {}  # unfinished ones only, in order
        self._ended: list[SequenceId] = []  # rows that the worker still has
        self.in_flight = StepsInFlight(max(2, config.num_pipeline_stages))
        self._sequence_ids = count()
        self._arrivals = count()
        self._step_ids = count()
        self._num_preemptions = 0
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence has not ended; schedule() then always finds something to compute."""
        return bool(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks, those held back for a fork included."""
        return len(self._sequences) - len(self.running)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.running)

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that sequences hold, 0 to 1; blocks that are only cached count as free."""
        return 1.0 - self.kv.pool.num_free / self.kv.pool.num_blocks

    @property
    def prefix_cache_queries(self) -> int:
        """Tokens that were looked up in the prefix cache at first admissions."""
        return self._num_queried_tokens

    @property
    def prefix_cache_hits(self) -> int:
        """Those of them that were found."""
        return self._num_hit_tokens

    @property
    def num_preemptions(self) -> int:
        """Times that a sequence gave up its blocks."""
        return self._num_preemptions

    def sequence(self, sequence_id: SequenceId) -> Sequence:
        """Return an unfinished sequence. Raises KeyError when there is none of that id."""
        return self._sequences[sequence_id]

    def iter_sequences(self) -> Iterator[Sequence]:
        """Yield every unfinished sequence in order of creation."""
        return iter(self._sequences.values())

    def add(self, request: Request, now: float = 0.0) -> tuple[SequenceId, ...]:
        """Take a request in and return the ids of its sequences by choice.

        request  has passed `check_servable`
        Raises RequestError, and changes nothing, when its id is in use.
        """
        if request.request_id in self._choices:
            raise RequestError(f"request_id {request.request_id!r} is in use by an unfinished request", "request_id")
        arrival = next(self._arrivals)
        num_choices = request.params.num_sequences
        ids = [SequenceId(next(self._sequence_ids)) for _ in range(num_choices)]
        choices = [new_sequence(request, self.config, ids[i], arrival, i, now) for i in range(num_choices)]
        self._choices[request.request_id] = choices
        for sequence in choices:
            self._sequences[sequence.sequence_id] = sequence
        self.waiting.add(choices[0])
        return tuple(sequence.sequence_id for sequence in choices)

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Return the next step; None exactly when nothing is unfinished. The plan must be executed and committed."""
        step = self.in_flight.first
        if step is not None:
            raise InvariantError(f"step {step.step_id} must be committed before the next is scheduled")
        return self._plan(_NOTHING, now)

    def schedule_saves(self, now: float = 0.0) -> StepPlan | None:
        """Return a step that computes nothing, and saves cached blocks that no tier has; None where there are none."""
        tier = self.kv.host_tier
        if tier is None or len(self.in_flight) > 0:
            return None
        self.kv.save_cached(min(self.config.max_page_saves, tier.num_slots))
        if not tier.has_moves:
            return None
        plan = self.kv.with_page_moves(StepPlanBuilder(0).build(next(self._step_ids), tuple(self._ended)))
        self._ended = []
        self.in_flight.begin(plan)
        return plan

    def missing_keys(self, request: Request) -> list[int]:
        """Return the keys of the blocks of a request that may be cached, after those that the pool and the host tier have."""
        sequence = new_sequence(request, self.config, SequenceId(-1), 0, 0, 0.0)
        return self.kv.missing_keys(sequence)

    def schedule_ahead(self, now: float = 0.0) -> StepPlan | None:
        """Return the step behind the one in flight; None where that must be committed first.

        Who gets a token there is taken to go on with it, unless it must be its last.
        """
        step = self.in_flight.first
        if step is None or len(self.in_flight) > 1:
            raise InvariantError(f"{len(self.in_flight)} steps are in flight: exactly one can be followed by a step ahead")
        launched = step.num_scheduled_tokens
        if (
            not launched
            or not self.kv.has_room_behind(self.running, launched)
            or must_make_room(self.waiting, self.running, self.kv, self.config.max_num_seqs)
        ):
            return None
        return self._plan(launched, now)

    def schedule_pipelined(self, now: float = 0.0) -> StepPlan | None:
        """Return a step of sequences that no step in flight computes; None where a step must be committed first, or nothing is
        unfinished.

        It takes a share of the running sequences and of the token budget, so that every stage has a step to compute.
        """
        if len(self.in_flight) >= self.config.num_pipeline_stages:
            raise InvariantError(f"{len(self.in_flight)} steps are in flight, one for each pipeline stage")
        return self._plan(_NOTHING, now, share_of_step(self.config, self.running, self.waiting, self.kv))

    def _plan(self, launched: Mapping[SequenceId, int], now: float, limits: StepLimits | None = None) -> StepPlan | None:
        """Return the step behind one that computes `launched` tokens of sequences; or with limits one of other sequences than
        those of the steps in flight."""
        draft = StepPlanBuilder(*(limits or (self.config.max_num_batched_tokens,)))
        num_preempted_before = self._num_preemptions
        running = self.running if limits is None else self.in_flight.leave_out(self.running)
        decoding, prefilling = find_remaining(running, launched)
        for sequence in decoding:
            self._schedule_running(draft, sequence, 1, launched)
        for is_background in (False, True) if prefilling or len(self.waiting) > 0 else ():
            for sequence, num_left in prefilling:
                if sequence.request.is_background is is_background:
                    self._schedule_running(draft, sequence, self._chunk(draft, num_left), launched)
            if self._num_preemptions == num_preempted_before and not draft.is_starved:
                self._schedule_waiting(draft, is_background, may_preempt=not launched)
        if not launched:  # what drafts follow is not known before
            give_draft_slots(draft, self.kv, len(self.running), self.config.max_num_drafts)
        if draft.is_empty and (len(self.in_flight) > 0 or not any(sequence.is_mask_pending for sequence in self.running)):
            return None
        ended = self._ended
        if limits is not None:  # the worker keeps the rows of a step until it is collected
            ended = [sequence_id for sequence_id in ended if self.in_flight.last_with(sequence_id) is None]
        plan = self.kv.with_page_moves(draft.build(next(self._step_ids), tuple(ended), self.kv.states))
        self.in_flight.begin(plan)
        self._ended = [] if len(ended) == len(self._ended) else [key for key in self._ended if key not in ended]
        for start in plan.starts:
            sequence = self._sequences[start.sequence_id]
            sequence.is_known = True
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[SequenceUpdate]:
        """Record what the worker did in the oldest plan in flight; return the news, in batch order.

        Sequences that ended while the plan was in flight are passed over. A mid-prompt chunk makes no news.
        """
        for block_ids in self.in_flight.end(plan, result):
            self.kv.free(block_ids)
        self.kv.end_page_moves(plan, result.is_failed)
        behind = self.in_flight.first
        launched = _NOTHING if behind is None else behind.num_scheduled_tokens
        updates: list[SequenceUpdate] = []
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            sequence = self._sequences.get(sequence_id)
            if sequence is None:
                continue
            error = result.errors.get(sequence_id)
            if error is None:
                num_slots = plan.num_draft_slots.get(sequence_id, 0) if plan.num_draft_slots else 0
                error = find_mistake(sequence, num_tokens, num_slots, result, goes_on=sequence_id in launched)
            if error is not None:
                updates.append(self._end(sequence, "error", error=error, error_param=result.error_params.get(sequence_id)))
                continue
            update = self._commit_sequence(sequence, num_tokens, result, now)
            if update is not None:
                updates.append(update)
        for sequence_id in result.mask_ready:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                sequence.is_mask_pending = False
        return updates

    def finish(
        self, sequence_id: SequenceId, reason: FinishReason, stop_reason: int | str | None = None
    ) -> SequenceUpdate | None:
        """End a sequence for a reason found outside, such as a stop string; None if it has ended already."""
        sequence = self._sequences.get(sequence_id)
        return None if sequence is None else self._end(sequence, reason, stop_reason=stop_reason)

    def abort(self, request_id: RequestId) -> list[SequenceUpdate]:
        """End every unfinished choice of a request with "abort"; empty if there is none."""
        # The last choice goes first, so that choice 0 leaves none behind that would have to be queued for a moment.
        return [self._end(sequence, "abort") for sequence in reversed(tuple(self._choices.get(request_id, ())))][::-1]

    def _chunk(self, draft: StepPlanBuilder, num_left: int) -> int:
        """Return how many of its uncomputed tokens a sequence may compute in this step, 0 when the budget is spent."""
        if self.config.computes_whole_prompts:
            return num_left if num_left <= draft.num_tokens_left else 0
        return min(num_left, self.config.long_prefill_token_threshold or num_left, draft.num_tokens_left)

    def _schedule_running(
        self, draft: StepPlanBuilder, sequence: Sequence, num_tokens: int, launched: Mapping[SequenceId, int]
    ) -> None:
        if num_tokens == 0 or draft.is_full or sequence.status is not SequenceStatus.RUNNING:  # preempted a moment ago
            return
        num_launched = launched.get(sequence.sequence_id, 0) if launched else 0
        while (growth := self.kv.grow(sequence, num_tokens, num_launched)) is None:
            victim = self.running.last if len(self.in_flight) == 0 else find_preemptible(sequence, self.running, self.in_flight)
            if victim is None:
                draft.is_starved = True
                return
            draft.remove(victim)
            self._preempt(victim)
            if victim is sequence:
                return
        draft.add(sequence, num_tokens, growth)

    def _schedule_waiting(self, draft: StepPlanBuilder, is_background: bool, may_preempt: bool) -> None:
        while len(self.waiting) > 0 and draft.num_tokens_left > 0 and not draft.is_full:
            sequence = self.waiting.first
            if sequence.request.is_background is not is_background:
                return
            if self.config.computes_whole_prompts and sequence.num_uncomputed_tokens > draft.num_tokens_left:
                return  # it is not cut: it waits for a step with room for all of it
            num_cached = self.kv.admit(sequence) if len(self.running) < self.config.max_num_seqs else None
            if num_cached is None:
                victim = find_victim(sequence, self.running)
                if victim is None or not may_preempt or self.in_flight.last_with(victim.sequence_id) is not None:
                    return
                draft.remove(victim)
                self._preempt(victim)
                continue
            self._start_running(sequence)
            if sequence.first_scheduled_s is None:
                sequence.num_cached_tokens = num_cached
                if self.config.enable_prefix_caching and sequence.max_cached_tokens == sequence.num_tokens - 1:
                    self._num_queried_tokens += sequence.num_tokens
                    self._num_hit_tokens += num_cached
            draft.add(sequence, self._chunk(draft, sequence.num_uncomputed_tokens), NO_GROWTH)

    def _start_running(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.running.add(sequence)

    def _start_waiting(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        step = self.in_flight.last_with(sequence.sequence_id)
        if step is not None:
            raise InvariantError(
                f"sequence {sequence.sequence_id} is preempted while step {step.step_id}, which has it, is in flight"
            )
        self._drop_kv(sequence)
        sequence.num_preemptions += 1
        self._num_preemptions += 1

    def _recompute_with_long_rope(self, sequence: Sequence) -> None:
        """Let a sequence that has outgrown the short variant of the rope wait until all its tokens are computed again.

        No step in flight computes it: `num_tokens_behind` says that it has nothing to compute after the token that came now.
        """
        self._drop_kv(sequence)
        sequence.short_rope_len = None
        sequence.block_contents.clear()

    def _drop_kv(self, sequence: Sequence) -> None:
        self.kv.release(sequence)
        self._forget_row(sequence)
        self._start_waiting(sequence)
        sequence.num_requested_drafts = 0
        sequence.is_mask_pending = False

    def _forget_row(self, sequence: Sequence) -> None:
        if sequence.is_known:
            self._ended.append(sequence.sequence_id)
            sequence.is_known = False

    def _commit_sequence(self, sequence: Sequence, num_tokens: int, result: StepResult, now: float) -> SequenceUpdate | None:
        num_prompt, num_computed_before = sequence.num_prompt_tokens, sequence.num_computed_tokens
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        prompt_logprobs_start = 0
        if sequence.next_prompt_logprob < num_prompt:
            prompt_logprobs, prompt_logprobs_start = take_prompt_logprobs(sequence, result)
        token_ids, ending = take_computed(sequence, num_tokens, result)
        self.kv.publish(sequence)
        if sequence.choice == 0 and num_computed_before < num_prompt <= sequence.num_computed_tokens:
            self._release_held(sequence.request.request_id, source=sequence)
        pooled = result.pooled.get(sequence.sequence_id)
        if pooled is not None:
            return self._end(sequence, "stop", pooled=pooled)
        if ending is None and sequence.short_rope_len is not None and sequence.num_tokens > sequence.short_rope_len:
            self._recompute_with_long_rope(sequence)
        is_start = bool(token_ids) and sequence.first_token_s is None
        if is_start:
            sequence.first_token_s = now
        if not token_ids and not prompt_logprobs:
            return None
        logprobs = result.logprobs.get(sequence.sequence_id, ())[: len(token_ids)]
        update = SequenceUpdate(sequence.sequence_id, sequence.request.request_id, sequence.choice, token_ids, logprobs)
        if ending is None and not is_start and not prompt_logprobs:
            return update
        return update._replace(
            prompt_logprobs=prompt_logprobs,
            prompt_logprobs_start=prompt_logprobs_start,
            finish_reason=None if ending is None else ending.finish_reason,
            stop_reason=None if ending is None else ending.stop_reason,
            is_ended_by_token=ending is not None and ending.is_by_token,
            start=SequenceStats.of(sequence) if is_start else None,
            stats=None if ending is None else self._drop(sequence),
        )

    def _release_held(self, request_id: RequestId, source: Sequence | None) -> None:
        """Set the held choices of a request going: forked from `source` where that is possible, else waiting."""
        num_forked = 0
        for sequence in self._choices[request_id]:
            if sequence.status is not SequenceStatus.HELD:
                continue
            has_room = len(self.running) < self.config.max_num_seqs and self.kv.pool.num_free > num_forked
            if source is None or not has_room or not self.kv.can_fork(source):
                self._start_waiting(sequence)
                continue
            self.kv.fork(source, sequence)
            self._start_running(sequence)
            num_forked += 1
        if source is not None and self.kv.states is not None:
            self.kv.states.end_forks(source)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        error_param: str | None = None,
        pooled: tuple[float, ...] | None = None,
    ) -> SequenceUpdate:
        return SequenceUpdate(
            sequence_id=sequence.sequence_id,
            request_id=sequence.request.request_id,
            choice=sequence.choice,
            pooled=pooled,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            error_param=error_param,
            stats=self._drop(sequence),
        )

    def _drop(self, sequence: Sequence) -> SequenceStats:
        """Take an ended sequence out of every structure; return what is left to say about it."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            last = self.in_flight.last_with(sequence.sequence_id)
            if last is None:
                self.kv.release(sequence)
            else:
                self.in_flight.retire(last, self.kv.detach(sequence))
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        if self.kv.host_tier is not None:
            self.kv.host_tier.let_go(sequence.request.request_id)
        sequence.status = SequenceStatus.FINISHED
        self._forget_row(sequence)
        del self._sequences[sequence.sequence_id]
        request_id = sequence.request.request_id
        self._choices[request_id].remove(sequence)
        if not self._choices[request_id]:
            del self._choices[request_id]
        elif sequence.choice == 0:
            self._release_held(request_id, source=None)
        return SequenceStats.of(sequence)
