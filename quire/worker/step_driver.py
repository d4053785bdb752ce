"""StepDriver: turns the scheduler's plans into steps of an executor, and what these compute into results.

It owns the rows, the sampling, the grammar masks, the drafts and their verification. All of that is on the host, and the same
for every device; whatever touches the model or its cache goes through a StepExecutor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from quire.base.errors import ConfigError
from quire.base.ids import SequenceId
from quire.contracts.expert_stats import ExpertStats
from quire.contracts.memory import ModelReport
from quire.contracts.rank_stats import RankStats
from quire.contracts.step import Runner, StageTimes, StepPlan, StepResult
from quire.kv.tiers.host_slab import HostSlab
from quire.sampling.sampler import Sampled, sample
from quire.speculate.proposer import DraftInput
from quire.speculate.speculator import Speculator
from quire.speculate.verifier import Verification, verify, verify_sampled
from quire.worker.block_scores import ObservedRow, find_observed, keep_observed, score_blocks
from quire.worker.drafting import candidates_of, known_tokens, last_tokens, propose_drafts
from quire.worker.grammar_masks import PENDING_WAIT_S, GrammarMasks, StepMasks
from quire.worker.input_batch import NO_DRAFTS, NONE_UNASKED, InputBatch, PooledRun, Row, StepInput
from quire.worker.lora import AdapterStore
from quire.worker.pooling_head import PoolingHead
from quire.worker.prompt_results import pool_hidden_states, prompt_logprobs
from quire.worker.row_processing import can_defer, is_executors, recount, set_processors, with_device_logprobs
from quire.worker.sampled_results import (
    PromptLogprobs,
    apply_verified,
    expect_tokens,
    take_best,
    take_deferred,
    take_expected,
    take_matches,
    take_sampled,
)
from quire.worker.step_executor import BlockScorer, PageMover, RowProcessor, SlotSampling, StepExecutor

_NO_PROMPT_LOGPROBS: PromptLogprobs = {}


class EngineRunner(Runner, Protocol):
    """A runner as the engine uses it: in addition to steps, its speculator, its masks, and measurements of its device."""

    @property
    def speculator(self) -> Speculator:
        """Where drafts come from."""
        ...

    def use_speculator(self, speculator: Speculator) -> None:
        """Draft with another speculator from now on. No sequence may be running."""
        ...

    def use_pooling_head(self, head: PoolingHead | None) -> None:
        """Apply a head to pooled hidden states from now on."""
        ...

    def measure_peaks(self, report: ModelReport) -> tuple[float, float]:
        """Return the bytes per second that the device reads and its operations per second, measured now, in a moment."""
        ...

    def expert_stats(self) -> list[ExpertStats]:
        """Return how many tokens the experts of each layer have got; empty where there are none, or they are not counted."""
        ...

    def rebalance_experts(self) -> bool:
        """Begin to balance the experts over the ranks by the load of the last steps; False: see ExpertRebalancer.start.
        Raises ConfigError where experts do not move."""
        ...

    def rank_stats(self) -> list[RankStats]:
        """Return what each rank of a model on several processes does and holds; empty for one process."""
        ...

    def check_health(self) -> None:
        """Raise DeviceLostError, with the reason, where a process that runs a part of the model has ended."""
        ...

    @property
    def stage_times(self) -> StageTimes | None:
        """How long each pipeline stage has computed; None without stages."""
        ...

    @property
    def adapters(self) -> AdapterStore | None:
        """The LoRA adapters; None without enable_lora."""
        ...

    @property
    def host_slab(self) -> HostSlab | None:
        """The memory of the host tier in this process; None: there is no host tier."""
        ...

    def sleep(self) -> None:
        """Sleep level 1, see StepExecutor.sleep. No step may be in flight."""
        ...

    def wake_up(self) -> None:
        """Undo sleep."""
        ...


class ClosedWith(Protocol):
    """Something that sleeps, and is closed, with the driver."""

    def sleep(self) -> None:
        """See StepExecutor."""
        ...

    def wake_up(self) -> None:
        """See StepExecutor."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


class _PromptResults(NamedTuple):
    """What a step has to find about prompts.

    hidden_rows  the tokens of pooled_runs
    """

    has_logprobs: bool = False
    pooled_runs: Sequence[PooledRun] = ()
    hidden_rows: Sequence[int] = ()


_NO_PROMPT_RESULTS = _PromptResults()


@dataclass(slots=True)
class RunningStep:
    """A step that was started, and what is needed to finish it; implements contracts.step.LaunchedStep.

    started       the executor's handle
    host_sampled  sequences of step.ready, by index, whose tokens the driver samples
    prompts       what is asked for about prompts; None: nothing
    reads         what the proposer reads of the step
    is_followed   whether the speculator is notified of the end of the step
    places        where the rows have placeholders for the step's tokens; None: they have none
    may_continue  whether the next step may start before this one is finished, as far as is known when it starts: it needs only
                  the tokens, and these are sampled and kept by the executor
    observed      tokens whose attention is observed
    is_deferred   its tokens are to be sampled once the masks of its constraints are there
    pending       sequences whose masks have not come in time; None: it was not waited for them yet
    has_next      the next step was started
    is_sampled    the tokens of a deferred step are sampled, or will be by what was launched
    """

    driver: StepDriver
    plan: StepPlan
    step: StepInput
    started: Any
    masks: StepMasks
    host_sampled: Sequence[int]
    prompts: _PromptResults | None
    reads: Sequence[DraftInput]
    is_followed: bool
    places: Sequence[int] | None
    may_continue: bool
    observed: Sequence[ObservedRow] = ()
    is_deferred: bool = False
    pending: Set[SequenceId] | None = None
    has_next: bool = False
    is_sampled: bool = False

    @property
    def allows_next(self) -> bool:
        """See contracts.step.LaunchedStep. Waits for the masks of a deferred step, but not long."""
        return self.may_continue and self.driver.allows_next(self)

    def collect(self) -> StepResult:
        """See contracts.step.LaunchedStep."""
        return self.driver.collect(self)


@dataclass(slots=True)
class EmptyStep:
    """A step of a plan without tokens."""

    driver: StepDriver
    plan: StepPlan
    is_followed: bool = False
    allows_next: bool = True
    has_next: bool = False

    def collect(self) -> StepResult:
        """See contracts.step.LaunchedStep."""
        return self.driver.collect(self)


class _Sampled(NamedTuple):
    """What is there to choose the tokens of a finished step from.

    token_ids     [R] what the executor has sampled of each of the logit_rows; None: nothing
    failures      by index, why it could not
    host_sampled  sequences of step.ready, by index, whose tokens the driver samples
    pending       sequences with a pending mask
    """

    token_ids: Sequence[int] | None
    failures: Mapping[int, str]
    host_sampled: Sequence[int]
    pending: Set[SequenceId]

    def on_host(self, ready: Sequence[Row]) -> Sequence[int]:
        """Return what the driver samples now: the rows of host_sampled whose masks are not pending."""
        if not self.pending:
            return self.host_sampled
        return [index for index in self.host_sampled if ready[index].start.sequence_id not in self.pending]


class StepDriver:
    """Runs the plans of one scheduler, one step after the other; implements EngineRunner.

    executor         runs the steps
    speculator       drafts, also with other models; at least what grammars force is always drafted, and verified
    draft_executors  run the steps of draft models and draft heads, and are closed with the driver
    page_mover       the executor, where there is a host tier
    adapters         the LoRA adapters of the executor's decoder; None: sequences have none
    block_scorer     the executor, where sequences may have a KV compression that needs scores
    rebalance        begins to move experts between ranks, see rebalance_experts; None: they do not move
    row_processor    the executor, where it applies logits processors and finds log probabilities; None: the driver does
    """

    def __init__(
        self,
        executor: StepExecutor,
        speculator: Speculator | None = None,
        draft_executors: Sequence[ClosedWith] = (),
        page_mover: PageMover | None = None,
        adapters: AdapterStore | None = None,
        block_scorer: BlockScorer | None = None,
        rebalance: Callable[[], bool] | None = None,
        row_processor: RowProcessor | None = None,
    ) -> None:
        self._row_processor = row_processor
        self._page_mover, self._block_scorer, self._rebalance = page_mover, block_scorer, rebalance
        self._adapters = adapters
        self._executor, self._draft_executors = executor, draft_executors
        self._speculator = Speculator(None, None, executor.vocab_size) if speculator is None else speculator
        self._batch = InputBatch(
            executor.block_tables,
            executor.block_size,
            executor.vocab_size,
            executor.has_sampler,
            executor.has_rope_variants,
            executor.has_states,
            executor.first_window_block,
            adapters is not None,
        )
        self._choose_row_processor()
        self._masks = GrammarMasks()
        self._no_masks = self._masks.start((), {}, 0)
        self._ready_s = 0.0  # when the tokens of the last step had been read

    @property
    def executor(self) -> StepExecutor:
        """What computes the steps."""
        return self._executor

    @property
    def batch(self) -> InputBatch:
        """The sequences that it knows."""
        return self._batch

    @property
    def grammar_masks(self) -> GrammarMasks:
        """The masks of constrained sequences."""
        return self._masks

    @property
    def speculator(self) -> Speculator:
        """Where drafts come from."""
        return self._speculator

    def use_speculator(self, speculator: Speculator) -> None:
        """Draft with another speculator from now on. No sequence may be running.

        The one before forgets its sequences, so that it may be used again later.
        """
        if speculator is self._speculator:
            return
        self._speculator.leave()
        speculator.drafts_forced = self._speculator.drafts_forced
        self._speculator = speculator
        self._choose_row_processor()
        self._executor.keep_inputs(speculator.aux_hidden_state_layers)

    def _choose_row_processor(self) -> None:
        """Have the executor process rows, unless they may have drafts: tokens after these depend on what is accepted."""
        self._batch.row_processor = self._row_processor if self._speculator.proposer is None else None

    def use_pooling_head(self, head: PoolingHead | None) -> None:
        """See EngineRunner."""
        self._batch.pooling_head = head

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see contracts.step.Runner."""
        with self._executor.step_scope():
            return self._finish(self._start(plan))

    def collect(self, running: RunningStep | EmptyStep) -> StepResult:
        """Finish a step that was started; see contracts.step.LaunchedStep."""
        with self._executor.step_scope():
            return self._finish(running)

    def _start(self, plan: StepPlan) -> RunningStep | EmptyStep:
        """Apply a plan, draft, and start its step on the executor."""
        executor, batch, speculator = self._executor, self._batch, self._speculator
        self._masks.forget(plan.ended)
        entries = batch.apply(plan)
        for start in plan.starts:
            row = batch.row(start.sequence_id)
            executor.set_sampling(row.batch_slot, SlotSampling.of(row.sampling, is_executors(row)))
            set_processors(batch.row_processor, row)
        if self._page_mover is not None and (plan.page_saves or plan.page_loads):
            self._page_mover.move_pages(plan.step_id, plan.page_saves, plan.page_loads)
        copies = batch.block_copies(plan)
        if entries or copies:
            executor.begin_step(entries, copies)
        is_skipped = speculator.skips(plan)
        drafts = NO_DRAFTS if is_skipped else propose_drafts(speculator, batch, plan)
        if not plan.num_scheduled_tokens:
            executor.flush()
            return EmptyStep(self, plan)
        # A sampler samples after every draft. Without one, no logits are computed where the next token is forced anyway.
        skips = drafts and not executor.has_sampler
        step = batch.build(plan, drafts, speculator.count_unasked(drafts) if skips else NONE_UNASKED)
        host_sampled = self._host_sampled(step)
        prompts = _prompt_results(step) if step.wants_prompt else None
        has_prompt_logits, _, hidden_rows = prompts or _NO_PROMPT_RESULTS
        reads = () if is_skipped else speculator.inputs
        processor = batch.row_processor
        is_deferred = processor is not None and prompts is None and can_defer(step, host_sampled)
        if processor is not None and is_deferred:
            processor.defer_sampling()
            host_sampled = ()
        keeps_logits = bool(host_sampled) or (bool(drafts) and speculator.wants_logits)
        masks = self._masks_of_start(step)
        observed: Sequence[ObservedRow] = ()
        if self._block_scorer is not None and batch.has_observers:
            observed = find_observed(step)
            if observed:
                self._block_scorer.observe_attention([one.index for one in observed])
        started = executor.start_step(step.tokens, not host_sampled, keeps_logits, hidden_rows, has_prompt_logits, reads)
        # From here on the rows are in the state after this step, except for the tokens that it samples.
        batch.advance(step)
        places = None
        if executor.has_sampler and not host_sampled and not drafts:
            places = expect_tokens(step)
        lets_next_begin = executor.has_sampler and speculator.lets_next_begin
        is_followed = not is_skipped and not lets_next_begin
        if processor is not None and not drafts:
            lets_next_begin = True  # what constraints force is drafted where that is worth more, see `allows_next`
        may_continue = lets_next_begin and not keeps_logits and prompts is None
        running = RunningStep(
            self, plan, step, started, masks, host_sampled, prompts, reads, is_followed, places, may_continue, observed
        )
        running.is_deferred = is_deferred
        return running

    def _masks_of_start(self, step: StepInput) -> StepMasks:
        """Return the masks of a step that starts, as far as they can be filled now."""
        return self._start_masks(step)

    def _start_masks(self, step: StepInput) -> StepMasks:
        """Start filling the masks of a step whose rows have all tokens before it."""
        if not self._batch.has_constraints:
            return self._no_masks
        return self._masks.start(step.ready, step.drafts, len(step.rows))

    def allows_next(self, running: RunningStep) -> bool:
        """Return whether the step after one that may be continued can start now."""
        return True

    def _host_sampled(self, step: StepInput) -> Sequence[int]:
        """Return which of step.ready the driver samples."""
        found = self._batch.host_sampled(step.ready)
        if step.drafts and self._speculator.typical is not None:
            # Typical acceptance needs probabilities, except of rows that always take the best token.
            found = [index for index, row in enumerate(step.ready) if not row.sampling.is_plain]
        # Without a sampler the executor finds the tokens of all rows or of none.
        return range(len(step.ready)) if found and not self._executor.has_sampler else found

    def _finish(self, running: RunningStep | EmptyStep) -> StepResult:
        """Wait for a step and turn what it computed into its result."""
        plan, executor, batch = running.plan, self._executor, self._batch
        if isinstance(running, EmptyStep):
            return StepResult(plan.step_id, {}, {}, {}, {}, mask_ready=self._masks.take_ready(PENDING_WAIT_S))
        step, started = running.step, running.started
        token_ids, failures = executor.take_sampled(started)
        self._ready_s = time.perf_counter()
        if self._block_scorer is not None and running.observed:
            keep_observed(self._block_scorer, running.observed)
        if running.is_deferred:
            running.masks.note_end()
        pending = running.masks.wait() if running.pending is None else running.pending
        prompts, logprobs = running.prompts, _NO_PROMPT_LOGPROBS
        if prompts is not None and prompts.has_logprobs:
            logprobs = prompt_logprobs(step, executor.vocab_size, partial(executor.logits_at, started))
        rows = batch.leave_out(step, pending) if pending else step.ready
        paths: Mapping[SequenceId, tuple[int, ...]] | None = None
        if step.drafts or token_ids is None or running.host_sampled:
            host_sampled = range(len(step.ready)) if token_ids is None else running.host_sampled
            sampled = _Sampled(token_ids, failures, host_sampled, pending)
            if step.drafts:
                result, paths = self._verify(running, sampled, rows, logprobs)
            else:
                result = take_sampled(plan.step_id, rows, self._sample(running, sampled), logprobs)
        elif running.is_deferred and running.places is not None:
            result = take_deferred(step, plan.step_id, running.places, token_ids, failures, pending)
        elif running.places is None:
            result = take_best(plan.step_id, rows, token_ids, logprobs)
        else:
            result = take_expected(plan.step_id, rows, running.places, token_ids, failures, logprobs)
        if running.is_followed and not running.has_next:
            self._update_speculator(running, result, paths, pending)
        if prompts is not None and prompts.pooled_runs:
            hidden_states = executor.hidden_states(started, prompts.hidden_rows)
            pooled, errors = pool_hidden_states(prompts.pooled_runs, hidden_states)
            result = replace(result, pooled=pooled, errors={**result.errors, **errors})
        if self._block_scorer is not None and plan.scored_blocks:
            result = replace(result, block_scores=score_blocks(self._block_scorer, self._batch, plan))
        if self._block_scorer is not None and step.tokens.bounds is not None:
            result = replace(result, run_counts=self._block_scorer.run_counts())
        if batch.row_processor is not None:
            result = with_device_logprobs(result, batch.row_processor, started, step.ready, running.host_sampled)
            recount(batch.row_processor, step.ready, running.host_sampled, pending)
        ready = self._masks.take_ready()
        return replace(result, mask_pending=pending, mask_ready=ready) if pending or ready else result

    def _sample(self, running: RunningStep, sampled: _Sampled) -> list[Sampled]:
        """Return the next token of each row whose mask is not pending: sampled here, or by the executor."""
        ready, executor = running.step.ready, self._executor
        on_host = sampled.on_host(ready)
        found: list[Sampled] = []
        if on_host:
            logits = executor.logits(running.started)
            own = logits if len(on_host) == len(logits) else logits[on_host]
            found = sample(own, [ready[index].sampling for index in on_host], executor.draw)
        token_ids = sampled.token_ids
        if token_ids is None or len(sampled.host_sampled) == len(ready):
            return found
        outcomes = [
            Sampled(None, error=sampled.failures[index]) if index in sampled.failures else Sampled(token_ids[index])
            for index in range(len(ready))
        ]
        for index, outcome in zip(on_host, found, strict=True):
            outcomes[index] = outcome
        if not sampled.pending:
            return outcomes
        return [outcomes[index] for index, row in enumerate(ready) if row.start.sequence_id not in sampled.pending]

    def _verify(
        self, running: RunningStep, sampled: _Sampled, rows: Sequence[Row], logprobs: PromptLogprobs
    ) -> tuple[StepResult, dict[SequenceId, tuple[int, ...]]]:
        """Give each row its accepted drafts and the token after them; also return the accepted drafts of each sequence."""
        step, token_ids, step_id = running.step, sampled.token_ids, running.plan.step_id
        paths: dict[SequenceId, tuple[int, ...]] = {}
        is_plain = token_ids is not None and not sampled.host_sampled and not sampled.failures
        if is_plain and token_ids is not None and step.tokens.trees is None:
            return take_matches(step_id, step, token_ids, logprobs, paths), paths
        verifications = self._verifications(running, sampled)
        result = apply_verified(step_id, self._batch, step, rows, verifications, logprobs, paths)
        moves = self._batch.take_moves()
        if moves is not None:
            self._executor.move_tokens(moves)
        return result, paths

    def _verifications(self, running: RunningStep, sampled: _Sampled) -> list[Verification]:
        """Verify the drafts of each row whose mask is not pending."""
        step, token_ids, failures = running.step, sampled.token_ids, sampled.failures
        candidates = candidates_of(step.ready, step, running.masks)
        count = len(candidates)
        if token_ids is not None and not sampled.host_sampled:
            return verify_sampled(token_ids, candidates, range(count), failures)
        found: dict[int, Verification] = {}
        on_host, typical = sampled.on_host(step.ready), self._speculator.typical
        if on_host:
            logits = self._executor.logits(running.started)
            # Typical acceptance looks at probabilities, which are computed on the host.
            draw = self._executor.draw if typical is None else None
            if len(on_host) == count:
                return verify(logits, candidates, typical, draw=draw)
            chosen = [candidates[index] for index in on_host]
            found.update(zip(on_host, verify(logits, chosen, typical, draw=draw, rows=on_host), strict=True))
        if token_ids is not None and len(sampled.host_sampled) < count:
            host_sampled = set(sampled.host_sampled)
            others = [index for index in range(count) if index not in host_sampled]
            chosen = [candidates[index] for index in others]
            found.update(zip(others, verify_sampled(token_ids, chosen, others, failures), strict=True))
        return [found[index] for index in sorted(found)]

    def _update_speculator(
        self,
        running: RunningStep,
        result: StepResult,
        paths: Mapping[SequenceId, tuple[int, ...]] | None,
        pending: Set[SequenceId],
    ) -> None:
        """Hand the speculator what it reads of the step, and add to the result how many drafts it could make next.

        paths  the accepted drafts of each sequence; None: the step had no drafts
        """
        speculator, executor, step = self._speculator, self._executor, running.step
        if paths is None:
            paths = dict.fromkeys(result.sampled, ())
        for what in running.reads:
            fed, rows = last_tokens(step, paths) if what == "last" else known_tokens(step, paths, pending)
            if fed:
                speculator.on_step_states(what, fed, executor.features(what, rows))
        if step.drafts and speculator.wants_logits:
            sequence_ids = [row.start.sequence_id for row in step.ready]
            speculator.on_logits(paths, sequence_ids, executor.logits(running.started))
        result.draft_requests.update(speculator.end(running.plan, paths))

    def measure_peaks(self, report: ModelReport) -> tuple[float, float]:
        """See EngineRunner."""
        return self._executor.measure_peaks(report)

    def expert_stats(self) -> list[ExpertStats]:
        """See EngineRunner."""
        return self._executor.expert_stats()

    def rebalance_experts(self) -> bool:
        """See EngineRunner."""
        if self._rebalance is None:
            raise ConfigError("the experts of this engine do not move: start it with enable_expert_parallel and enable_eplb")
        return self._rebalance()

    def rank_stats(self) -> list[RankStats]:
        """See EngineRunner."""
        return self._executor.rank_stats()

    def check_health(self) -> None:
        """See EngineRunner."""
        self._executor.check_health()

    @property
    def stage_times(self) -> StageTimes | None:
        """See EngineRunner."""
        return None

    @property
    def adapters(self) -> AdapterStore | None:
        """See EngineRunner."""
        return self._adapters

    @property
    def host_slab(self) -> HostSlab | None:
        """See EngineRunner."""
        return None if self._page_mover is None else self._page_mover.host_slab

    def sleep(self) -> None:
        """See EngineRunner."""
        self._speculator.leave()
        for executor in (self._executor, *self._draft_executors):
            executor.sleep()

    def wake_up(self) -> None:
        """See EngineRunner."""
        for executor in (self._executor, *self._draft_executors):
            executor.wake_up()

    def close(self) -> None:
        """Release the weights and the KV pools: of all executors, also where one of them fails, whose error is raised."""
        self._page_mover, self._adapters, self._block_scorer = None, None, None
        self._row_processor = self._batch.row_processor = None
        self._speculator = Speculator(None, None, self._executor.vocab_size)  # proposers have weights and pools of their own
        with ExitStack() as closing:
            for executor in (*reversed(self._draft_executors), self._executor):
                closing.callback(executor.close)
            closing.callback(self._masks.close)
            del self._executor, self._draft_executors


def _prompt_results(step: StepInput) -> _PromptResults | None:
    """Return what a step has to find about prompts, before its tokens count as computed; None: nothing."""
    pooled_runs = step.pooled_rows()
    has_logprobs = any(
        row.num_prompt_logprobs is not None and row.num_computed_tokens < row.num_prompt_tokens - 1 for row in step.rows
    )
    if not has_logprobs and not pooled_runs:
        return None
    hidden_rows = [index for run in pooled_runs for index in range(run.first, run.last)]
    return _PromptResults(has_logprobs, pooled_runs, hidden_rows)
