"""Scheduler: decides what every step computes, and tracks all unfinished sequences.

A step is {sequence: number of tokens} under one token budget; there is no prefill step and no decode step. In order:

1. Running sequences with one uncomputed token (they decode) get it, in policy order. The budget is never below
   max_num_seqs, so none of them ever waits for a prompt.
2. Running sequences with more uncomputed tokens get chunks, in policy order, from the rest of the budget and at most
   long_prefill_token_threshold each.
3. Waiting sequences are admitted in policy order while max_num_seqs, the budget, and the free blocks allow it, for ALL
   their known tokens, which they get at once. The first that does not fit blocks the ones after it, even if they would fit:
   blocks that become free are reserved for it, so that short prompts cannot starve a long one.
4. Background requests (Request.is_background) get chunks and are admitted only now. If another request
   cannot be admitted in 3, the last running background sequence is preempted for it.
5. Decoding sequences for which the worker has drafts get slots for them, in policy order, from the remaining budget and blocks.
   One block is left for each running sequence, so drafts cause no preemption.

If a running sequence needs a block and none is free, the last running one in policy order is preempted: it loses its
blocks and waits at the front until all its tokens fit again. It may be the sequence that needs the block. After a preemption
no sequence is admitted in that step, except those for which a background sequence was preempted. The first running sequence is
never preempted (except for such requests): alone in the pool it always fits (see admission; a fork needs a spare block, so this
holds for it too), so there is always progress. A sequence is left out of plans while the mask of its constraint is pending in
the worker. A step is empty only if no other sequence has anything to compute: the worker then waits for a mask.

The choices of a request (n > 1) are sequences of their own. All but choice 0 are held back until it has computed the
prompt, then forked from it if max_num_seqs and free blocks allow it. A fork may overtake waiting requests, since it
costs almost nothing. Otherwise, or if choice 0 ends before, they wait like others, and the prefix cache serves them.

A sequence that becomes longer than the short variant of its rope allows (longrope, dynamic) also loses its blocks, and is
computed again with the long variant, as in transformers; see ModelSpec.rope_switch_len.

A request with pooling params is a sequence like any other, which ends when its prompt is computed. With bidirectional
attention (computes_whole_prompts), a prompt is computed in one step, without the prefix cache.

While a step runs, the next may be planned (schedule_ahead), assuming one more token for each sequence. This
preempts no sequence. A sequence that turns out to have ended has computed one token in vain, in blocks that it keeps until
then.

With attention data parallelism each sequence has a home (num_homes), which is chosen when it is admitted, see homes.py. Each
home has a part of the blocks and of the token budget, and a running sequence is preempted only for another one of its home.

With pipeline stages several steps are in flight (schedule_pipelined), each of other sequences: see preemption.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import count

from quire.base.errors import InvariantError, RequestError
from quire.base.ids import BlockId, RequestId, SequenceId
from quire.contracts.request import FinishReason, Request
from quire.contracts.scheduler_config import SchedulerConfig
from quire.contracts.step import StepPlan, StepResult, TokenLogprobs
from quire.contracts.timeline import PreemptReason
from quire.engine.scheduling.admission import new_sequence, window_limits
from quire.engine.scheduling.events import SequenceStats, SequenceUpdate
from quire.engine.scheduling.homes import admit_at_home, block_layout, home_budget, last_of_home
from quire.engine.scheduling.host_tier import HostTier
from quire.engine.scheduling.in_flight import StepsInFlight
from quire.engine.scheduling.kv_allocator import NO_GROWTH, KvAllocator
from quire.engine.scheduling.preemption import StepLimits, find_preemptible, find_victim, must_make_room, share_of_step
from quire.engine.scheduling.sequence import Sequence, SequenceStatus
from quire.engine.scheduling.sequence_queue import SequenceQueue
from quire.engine.scheduling.state_pages import MissingPages
from quire.engine.scheduling.step_outcome import find_mistake, take_computed, take_prompt_logprobs
from quire.engine.scheduling.step_plan_builder import StepPlanBuilder, find_remaining, give_draft_slots
from quire.engine.scheduling.timeline import TimelineRecorder

_NOTHING: Mapping[SequenceId, int] = {}


class Scheduler:
    """Holds every unfinished sequence. add, finish and abort may be called at any time.

    schedule() and commit() alternate; or schedule_ahead() is called between them, and commits follow in the order of the plans.
    With pipeline stages schedule_pipelined() is called instead, up to num_pipeline_stages times before a commit.

    Not thread-safe. If a whole step fails, commit a StepResult with an error for each of its sequences.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        num_pages = config.num_host_pages
        self.kv = KvAllocator(
            config.num_kv_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            num_state_checkpoints=config.num_state_checkpoints,
            num_state_pages=config.num_state_pages,
            has_block_pages=config.has_block_pages,
            host_tier=HostTier(num_pages, config.max_page_saves, config.kv_save) if num_pages > 0 else None,
            window=window_limits(config),
            layout=block_layout(config),
        )
        self.waiting = SequenceQueue()
        self.running = SequenceQueue()
        self._sequences: dict[SequenceId, Sequence] = {}
        self._choices: dict[RequestId, list[Sequence]] = {}  # unfinished ones only, in order
        self._ended: list[SequenceId] = []  # the worker still has rows for them
        self.in_flight = StepsInFlight(max(2, config.num_pipeline_stages))
        self._sequence_ids = count()
        self._arrivals = count()
        self._step_ids = count()
        self._num_preemptions = 0
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0
        self._evicted: dict[SequenceId, tuple[int, ...]] = {}  # blocks that the worker's tables still have
        self._num_evicted_blocks = 0
        self.run_counts: tuple[int, int] = (0, 0)
        """See StepResult."""
        self.timelines: TimelineRecorder | None = None
        """Records what happens to each sequence, if set; it is told here and by the step loop."""

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence has not ended; schedule() then always finds something to compute."""
        return bool(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks, including those held for a fork."""
        return len(self._sequences) - len(self.running)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.running)

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that sequences hold, 0 to 1, of the fuller group; blocks that are only cached count as free. With
        decode context parallelism: on the fullest rank."""
        pools = [self.kv.pool] if self.kv.windows is None else [self.kv.pool, self.kv.windows.pool]
        return max(pool.usage for pool in pools)

    @property
    def prefix_cache_queries(self) -> int:
        """Tokens that were looked up in the prefix cache at first admissions."""
        return self._num_queried_tokens

    @property
    def prefix_cache_hits(self) -> int:
        """Tokens of these lookups that were found."""
        return self._num_hit_tokens

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions."""
        return self._num_preemptions

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks that KV compression has evicted."""
        return self._num_evicted_blocks

    def sequence(self, sequence_id: SequenceId) -> Sequence:
        """Return an unfinished sequence. Raises KeyError when there is none of that id."""
        return self._sequences[sequence_id]

    def iter_sequences(self) -> Iterator[Sequence]:
        """Yield every unfinished sequence in order of creation."""
        return iter(self._sequences.values())

    def add(self, request: Request, now: float = 0.0) -> tuple[SequenceId, ...]:
        """Add a request and return the ids of its sequences by choice.

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
            if self.timelines is not None:
                self.timelines.add(sequence)
        self.waiting.add(choices[0])
        return tuple(sequence.sequence_id for sequence in choices)

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Return the next step; None exactly when nothing is unfinished. The plan must be executed and committed."""
        step = self.in_flight.first
        if step is not None:
            raise InvariantError(f"step {step.step_id} must be committed before the next is scheduled")
        return self._plan(_NOTHING, now)

    def schedule_saves(self, now: float = 0.0) -> StepPlan | None:
        """Return a step that only saves cached blocks that no tier has; None if there are none."""
        tier = self.kv.host_tier
        if tier is None or len(self.in_flight) > 0:
            return None
        self.kv.save_cached(min(self.config.max_page_saves, tier.num_slots))
        return self.schedule_moves(now)

    def schedule_moves(self, now: float = 0.0) -> StepPlan | None:
        """Return a step that only saves the pages that are to be saved, and waits for those on their way; None if there are
        none."""
        tier = self.kv.host_tier
        if tier is None or len(self.in_flight) > 0 or not (tier.has_moves or tier.is_moving):
            return None
        plan = self.kv.with_page_moves(StepPlanBuilder(0).build(next(self._step_ids), tuple(self._ended)))
        self._ended = []
        self.in_flight.begin(plan)
        return plan

    def reset_cache(self) -> None:
        """Forget the contents of all KV blocks: the worker has lost them. Nothing may be unfinished or in flight."""
        if self.has_unfinished or len(self.in_flight) > 0:
            raise InvariantError("the KV cache is reset while sequences use it")
        self.kv.clear_cache()

    def forget_ended(self) -> None:
        """Forget the ended sequences that the worker was not told of: it is a new one, and has no rows for them."""
        self._ended = []

    def page_keys(self, request: Request) -> list[int]:
        """Return the keys of the full blocks of a request's prompt."""
        sequence = new_sequence(request, self.config, SequenceId(-1), 0, 0, 0.0)
        return self.kv.page_keys(sequence)

    def num_cacheable_pages(self, request: Request) -> int:
        """Return how many blocks at the start of a request's prompt may come from a cache."""
        sequence = new_sequence(request, self.config, SequenceId(-1), 0, 0, 0.0)
        return sequence.max_cached_tokens // self.config.block_size

    def missing_keys(self, request: Request) -> list[int]:
        """Return the keys of a request's cacheable blocks after those that the pool and the host tier have."""
        return list(self.missing_pages(request).keys)

    def missing_pages(self, request: Request) -> MissingPages:
        """Return which pages a request could use that neither the pool nor the host tier has."""
        sequence = new_sequence(request, self.config, SequenceId(-1), 0, 0, 0.0)
        return self.kv.missing_pages(sequence)

    def schedule_ahead(self, now: float = 0.0) -> StepPlan | None:
        """Return the step after the one in flight; None if that must be committed first.

        Sequences that get a token in flight are assumed to continue, unless it must be their last.
        """
        step = self.in_flight.first
        if step is None or len(self.in_flight) > 1:
            raise InvariantError(f"{len(self.in_flight)} steps are in flight: exactly one can be followed by a step ahead")
        launched = step.num_scheduled_tokens
        if (
            not launched
            or not self.kv.has_room_after(self.running, launched)
            or must_make_room(self.waiting, self.running, self.kv, self.config.max_num_seqs)
        ):
            return None
        return self._plan(launched, now)

    def schedule_pipelined(self, now: float = 0.0) -> StepPlan | None:
        """Return a step of sequences that are not in flight; None if a step must be committed first, or nothing is
        unfinished.

        It takes a share of the running sequences and of the token budget, so that every stage has a step to compute.
        """
        if len(self.in_flight) >= self.config.num_pipeline_stages:
            raise InvariantError(f"{len(self.in_flight)} steps are in flight, one for each pipeline stage")
        return self._plan(_NOTHING, now, share_of_step(self.config, self.running, self.waiting, self.kv))

    def _plan(self, launched: Mapping[SequenceId, int], now: float, limits: StepLimits | None = None) -> StepPlan | None:
        """Return the step after one that computes `launched` tokens of sequences; or, with limits, a step of sequences that
        are not in flight."""
        most = limits or StepLimits(self.config.max_num_batched_tokens, None)
        draft = StepPlanBuilder(*most, self.config.num_homes, home_budget(self.config))
        num_preempted_before = self._num_preemptions
        running = self.running if limits is None else self.in_flight.leave_out(self.running)
        decoding, prefilling = find_remaining(running, launched)
        for sequence in decoding:
            self._schedule_running(draft, sequence, 1, launched)
        for is_background in (False, True) if prefilling or len(self.waiting) > 0 else ():
            for sequence, num_left in prefilling:
                if sequence.request.is_background is is_background:
                    self._schedule_running(draft, sequence, self._chunk(draft, sequence, num_left), launched)
            if self._num_preemptions == num_preempted_before and not draft.is_starved:
                self._schedule_waiting(draft, is_background, may_preempt=not launched)
        if not launched:  # the next drafts are not known earlier
            give_draft_slots(draft, self.kv, len(self.running), self.config.max_num_drafts)
        if draft.is_empty:
            is_waiting = any(sequence.is_mask_pending or sequence.is_loading for sequence in self.running)
            if len(self.in_flight) > 0 or not is_waiting:
                return None
        ended = self._ended
        if limits is not None:  # the worker's rows cannot change until the step is collected
            ended = [sequence_id for sequence_id in ended if self.in_flight.last_with(sequence_id) is None]
        plan = self.kv.with_page_moves(draft.build(next(self._step_ids), tuple(ended), self.kv, self._evicted, launched))
        self.in_flight.begin(plan)
        self._evicted = {}
        self._ended = [] if len(ended) == len(self._ended) else [key for key in self._ended if key not in ended]
        for start in plan.starts:
            sequence = self._sequences[start.sequence_id]
            sequence.is_known = True
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[SequenceUpdate]:
        """Record the worker's result of the oldest plan in flight; return the updates, in batch order.

        Sequences that ended while the plan was in flight are skipped. A chunk before the end of a prompt makes no update.
        """
        for held in self.in_flight.end(plan, result):
            self.kv.free(held)
        lost_ids = self.kv.end_page_moves(result)
        if lost_ids or result.moved_steps:
            self._end_loading(lost_ids)
        self.run_counts = result.run_counts or self.run_counts
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
        """End a sequence for an external reason, such as a stop string; None if it has already ended."""
        sequence = self._sequences.get(sequence_id)
        return None if sequence is None else self._end(sequence, reason, stop_reason=stop_reason)

    def abort(self, request_id: RequestId) -> list[SequenceUpdate]:
        """End every unfinished choice of a request with "abort"; empty if there is none."""
        # The last choice is ended first, so that ending choice 0 does not queue the held ones.
        return [self._end(sequence, "abort") for sequence in reversed(tuple(self._choices.get(request_id, ())))][::-1]

    def _chunk(self, draft: StepPlanBuilder, sequence: Sequence, num_left: int) -> int:
        """Return how many of its uncomputed tokens a sequence may compute in this step, 0 when the budget is spent."""
        if sequence.eviction is not None:
            num_left = sequence.eviction.limit_chunk(num_left, sequence.num_computed_tokens, sequence.num_dropped_tokens)
        if self.config.computes_whole_prompts:
            return num_left if num_left <= draft.num_tokens_left else 0
        return min(num_left, self.config.long_prefill_token_threshold or num_left, draft.tokens_left(sequence.home))

    def _schedule_running(
        self, draft: StepPlanBuilder, sequence: Sequence, num_tokens: int, launched: Mapping[SequenceId, int]
    ) -> None:
        if num_tokens == 0 or draft.is_full or sequence.status is not SequenceStatus.RUNNING:  # just preempted
            return
        num_launched = launched.get(sequence.sequence_id, 0) if launched else 0
        while (growth := self.kv.grow(sequence, num_tokens, num_launched)) is None:
            if len(self.in_flight) == 0:
                victim = last_of_home(sequence, self.running)
            else:
                victim = find_preemptible(sequence, self.running, self.in_flight)
            if victim is None:
                draft.is_starved = True
                return
            draft.remove(victim)
            self.preempt(victim, "kv_blocks")
            if victim is sequence:
                return
        draft.add(sequence, num_tokens, growth)

    def _schedule_waiting(self, draft: StepPlanBuilder, is_background: bool, may_preempt: bool) -> None:
        while len(self.waiting) > 0 and draft.has_tokens_left and not draft.is_full:
            sequence = self.waiting.first
            if sequence.request.is_background is not is_background:
                return
            if self.config.computes_whole_prompts and sequence.num_uncomputed_tokens > draft.num_tokens_left:
                return  # the prompt is not split: it waits for a step with room for all of it
            num_cached = admit_at_home(sequence, self.kv, draft) if len(self.running) < self.config.max_num_seqs else None
            if num_cached is None:
                victim = find_victim(sequence, self.running)
                if victim is None or not may_preempt or self.in_flight.last_with(victim.sequence_id) is not None:
                    return
                draft.remove(victim)
                self.preempt(victim, "priority")
                continue
            self._start_running(sequence)
            if sequence.first_scheduled_s is None:
                sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
                if self.config.enable_prefix_caching and sequence.max_cached_tokens == sequence.num_tokens - 1:
                    self._num_queried_tokens += sequence.num_tokens
                    self._num_hit_tokens += num_cached
            if self._waits_for_pages(sequence, draft):
                continue
            num_tokens = self._chunk(draft, sequence, sequence.num_uncomputed_tokens)
            self.kv.cover_start(sequence, num_tokens)
            draft.add(sequence, num_tokens, NO_GROWTH)

    def _waits_for_pages(self, sequence: Sequence, draft: StepPlanBuilder) -> bool:
        """Return whether an admitted sequence is left out of plans until its pages are loaded.

        It is where it would have others in the step wait for them.
        """
        tier = self.kv.host_tier
        if tier is not None and self.config.loads_aside and not draft.is_empty:
            sequence.is_loading = tier.is_loading(self.kv.moved_ids(sequence))
        return sequence.is_loading

    def _end_loading(self, lost_ids: AbstractSet[BlockId]) -> None:
        """Let sequences go on whose pages were loaded. lost_ids: blocks whose pages may not be; who waits for one starts
        again."""
        tier = self.kv.host_tier
        for sequence in [sequence for sequence in self.running if sequence.is_loading]:
            moved_ids = self.kv.moved_ids(sequence)
            if not lost_ids.isdisjoint(moved_ids):
                self.preempt(sequence, "kv_blocks")
            elif tier is None or not tier.is_loading(moved_ids):
                sequence.is_loading = False

    def _start_running(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.running.add(sequence)
        if self.timelines is not None:
            self.timelines.admit(sequence)

    def _start_waiting(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)

    def preempt(self, sequence: Sequence, reason: PreemptReason) -> None:
        """Take a running sequence's blocks and let it wait. Raises InvariantError while a step in flight computes it."""
        step = self.in_flight.last_with(sequence.sequence_id)
        if step is not None:
            raise InvariantError(
                f"sequence {sequence.sequence_id} is preempted while step {step.step_id}, which has it, is in flight"
            )
        self._drop_kv(sequence, reason)
        sequence.num_preemptions += 1
        self._num_preemptions += 1

    def _recompute_with_long_rope(self, sequence: Sequence) -> None:
        """Preempt a sequence that has become longer than the short variant of the rope allows, so that all its tokens are
        recomputed.

        No step in flight computes it: `num_tokens_after` has returned that nothing is left to compute after the present token.
        """
        self._drop_kv(sequence, "rope")
        sequence.short_rope_len = None
        sequence.block_contents.clear()

    def _drop_kv(self, sequence: Sequence, reason: PreemptReason) -> None:
        if self.timelines is not None:
            self.timelines.preempt(sequence, reason)
        self.kv.release(sequence)
        self._forget_row(sequence)
        self._start_waiting(sequence)
        sequence.num_requested_drafts = 0
        sequence.is_mask_pending = sequence.is_loading = False

    def _forget_row(self, sequence: Sequence) -> None:
        self._evicted.pop(sequence.sequence_id, None)
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
        self.kv.publish(sequence, result.step_id)
        if sequence.choice == 0 and num_computed_before < num_prompt <= sequence.num_computed_tokens:
            self._release_held(sequence.request.request_id, source=sequence)
        if sequence.eviction is not None and ending is None:
            self._evict(sequence, num_computed_before, result)
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
            stats=None if ending is None else self._drop(sequence, ending.finish_reason),
        )

    def _evict(self, sequence: Sequence, num_computed_before: int, result: StepResult) -> None:
        """Evict blocks of a sequence if a step has reached the length at which its compression does so."""
        rule, num_computed = sequence.eviction, sequence.num_computed_tokens
        if rule is None or num_computed != rule.next_len(num_computed_before, sequence.num_dropped_tokens):
            return
        scores = result.block_scores.get(sequence.sequence_id)
        if rule.compression.needs_scores and scores is None:
            raise InvariantError(f"the worker returned no scores of the blocks of sequence {sequence.sequence_id}")
        indices = rule.choose(num_computed, sequence.num_dropped_tokens, scores)
        if indices:
            self.kv.evict(sequence, indices)
            self._evicted[sequence.sequence_id] = indices
            self._num_evicted_blocks += len(indices)
            sequence.num_evicted_tokens = sequence.num_dropped_tokens

    def _release_held(self, request_id: RequestId, source: Sequence | None) -> None:
        """Release the held choices of a request: forked from `source` if possible, otherwise waiting."""
        num_forked = 0
        for sequence in self._choices[request_id]:
            if sequence.status is not SequenceStatus.HELD:
                continue
            has_seat = len(self.running) < self.config.max_num_seqs
            if source is None or not has_seat or not self.kv.can_fork(source, num_forked):
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
            stats=self._drop(sequence, reason),
        )

    def _drop(self, sequence: Sequence, reason: FinishReason) -> SequenceStats:
        """Remove an ended sequence from all structures; return its last update."""
        if self.timelines is not None:
            self.timelines.finish(sequence, reason)
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
