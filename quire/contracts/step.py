"""StepPlan and StepResult: what crosses between the scheduler and the worker in one step.

The worker keeps a row per sequence (its tokens, its block table, its sampling state). A plan describes a sequence in full
once, when it is new or comes back from preemption, and later only what changed. The worker appends the tokens that it
samples to its rows by itself; the scheduler does the same when it commits the result, so that both agree.

Where a worker can, a step is planned and launched while the one before still runs: each of its sequences has one token more by
then, which only the worker knows. What a sequence computes that has ended meanwhile is passed over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from quire.base.ids import BlockId, SequenceId
from quire.contracts.request import Request

TableRun = tuple[int, tuple[BlockId, ...]]
"""Entries of a block table: the index of the first one, and the blocks from there on."""


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A sequence that the worker does not know: new, forked, or resumed after preemption (then with its output so far).

    choice               index of the sequence within its request, 0 <= choice < params.num_sequences
    token_ids            all known tokens, the prompt first
    num_computed_tokens  tokens whose KV is already in the blocks; fewer than len(token_ids)
    block_ids            its block table, in order
    uses_short_rope      its tokens take the short variant of the rope, see ModelSpec.rope_switch_len
    window_blocks        its entries of the window group's table, see KvSpec.window_tokens; those before them are never read
    state_slot           the checkpoint that holds its recurrent state after the computed tokens; None: there are none of these,
                         or the model has no such state
    """

    sequence_id: SequenceId
    request: Request
    choice: int
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    block_ids: tuple[BlockId, ...]
    uses_short_rope: bool = False
    state_slot: int | None = None
    window_blocks: tuple[TableRun, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: which sequences compute how many tokens, and where.

    num_scheduled_tokens  sequence -> number of tokens, >= 1, in batch order. Where they reach the last known token of the
                          sequence, the worker samples the next one, or pools the hidden states of a request that asks for that.
                          Empty where the masks of all that could go on are pending: the worker waits a moment for one of them
    starts                sequences that the worker sees for the first time (again), all of them in num_scheduled_tokens
    new_block_ids         blocks appended to the tables of sequences the worker knows
    replaced_blocks       sequence -> (index in its table, new block), after copy on write
    block_copies          (source, target) blocks to copy before anything is written
    ended                 sequences to forget, finished or preempted; applied first
    num_draft_slots       sequence -> drafts that it may compute after its last known token, which this step computes; its
                          blocks have room for them
    state_saves           sequence -> (number of its tokens, checkpoint) of recurrent states to keep: the state after so many
                          tokens, of which this step computes the last. Starts read their checkpoints before any is written
    window_blocks         sequence -> new entries of the window group's table, of sequences the worker knows
    window_copies         as block_copies, in the window group
    evicted_blocks        sequence -> indices in its table, ascending, of blocks that its KV compression has evicted: they leave
                          the table before anything else changes in it, and later entries move up
    scored_blocks         sequence -> number of first blocks of its table of which its KV compression needs scores after this
                          step, see StepResult.block_scores
    page_saves            (block, slot of the host tier): blocks to copy there as they stand before the step, before all else
    page_loads            (slot of the host tier, block): pages to copy into blocks after page_saves and before block_copies
    """

    step_id: int
    num_scheduled_tokens: dict[SequenceId, int]
    starts: tuple[SequenceStart, ...] = ()
    new_block_ids: dict[SequenceId, tuple[BlockId, ...]] | None = None
    replaced_blocks: dict[SequenceId, tuple[tuple[int, BlockId], ...]] | None = None
    block_copies: tuple[tuple[BlockId, BlockId], ...] = ()
    ended: tuple[SequenceId, ...] = ()
    num_draft_slots: dict[SequenceId, int] | None = None
    state_saves: dict[SequenceId, tuple[tuple[int, int], ...]] | None = None
    page_saves: tuple[tuple[BlockId, int], ...] = ()
    page_loads: tuple[tuple[int, BlockId], ...] = ()
    window_blocks: dict[SequenceId, tuple[TableRun, ...]] | None = None
    window_copies: tuple[tuple[BlockId, BlockId], ...] = ()
    evicted_blocks: dict[SequenceId, tuple[int, ...]] | None = None
    scored_blocks: dict[SequenceId, int] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step over all sequences, drafts included."""
        num_drafts = sum(self.num_draft_slots.values()) if self.num_draft_slots else 0
        return sum(self.num_scheduled_tokens.values()) + num_drafts


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position.

    token_id, logprob, rank  of the token that is there; rank 1 is the most likely
    top                      (token id, log probability) of the most likely tokens, best first; equal ones by id
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the worker did in one step.

    sampled          sequence -> tokens appended to it, in order; no entry where its known tokens are not all computed yet
    logprobs         sequence -> one TokenLogprobs per sampled token, where its params ask for log probabilities
    prompt_logprobs  sequence -> log probabilities of the prompt tokens that follow the tokens computed in this step
    errors           sequence -> why no token could be sampled (its logits were not finite, say); it must be ended
    completed        sequences whose output matches its constraint as a whole, so that nothing can follow: they end with "stop"
    pooled           sequence -> the vector of a request with pooling params, f32 values; no entry before its prompt is computed
    verified         sequence -> how many drafts this step computed of it, and how many of them were accepted: the KV of these
                     stands, they are the sampled tokens but the last one
    draft_requests   sequence -> drafts that the worker could use in the next step, > 0
    mask_pending     sequences that got no token although one was due, because the mask of their constraint is not filled yet.
                     Their last known token counts as not computed. They are left out of plans until mask_ready names them
    mask_ready       sequences that were in mask_pending of an earlier step, and are to be in plans again
    error_params     sequence -> the field of its request that is at fault, of errors of constraints that cannot go on
    block_scores     sequence -> score of each of its scored_blocks of the plan; the lowest are evicted first
    run_counts       runs of keys that all steps so far might have skipped by bounds, and those that they have; None: as before
    is_failed        the step failed as a whole: whether its pages were saved and loaded is not known
    moved_steps      steps, perhaps earlier ones, whose page_saves and page_loads have been made since the last result; None:
                     those of this step, and it waited for them
    """

    step_id: int
    sampled: dict[SequenceId, tuple[int, ...]]
    logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]]
    prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]]
    errors: dict[SequenceId, str]
    pooled: dict[SequenceId, tuple[float, ...]] = field(default_factory=lambda: {})
    verified: dict[SequenceId, tuple[int, int]] = field(default_factory=lambda: {})
    draft_requests: dict[SequenceId, int] = field(default_factory=lambda: {})
    completed: frozenset[SequenceId] = frozenset()
    mask_pending: frozenset[SequenceId] = frozenset()
    mask_ready: tuple[SequenceId, ...] = ()
    error_params: dict[SequenceId, str] = field(default_factory=lambda: {})
    is_failed: bool = False
    block_scores: dict[SequenceId, tuple[float, ...]] = field(default_factory=lambda: {})
    moved_steps: tuple[int, ...] | None = None
    run_counts: tuple[int, int] | None = None

    @property
    def done_moves(self) -> tuple[int, ...]:
        """Steps whose pages have been saved and loaded, as this result says; none if it failed."""
        if self.is_failed:
            return ()
        return (self.step_id,) if self.moved_steps is None else self.moved_steps


class Runner(Protocol):
    """Executes step plans, in one process or several."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Plans must come in order and none may be left out. Raises WorkerError."""
        ...

    def close(self) -> None:
        """Release what the runner holds; it cannot be used afterwards."""
        ...


class LaunchedStep(Protocol):
    """A step on its way."""

    @property
    def allows_next(self) -> bool:
        """Whether the next step may be launched before this one is collected: it then finds the tokens that this one samples,
        one for each sequence, by itself."""
        ...

    def collect(self) -> StepResult:
        """Wait for the step, and return what it did; once, and steps in their order. Raises WorkerError."""
        ...


@runtime_checkable
class AheadRunner(Runner, Protocol):
    """A runner whose steps run while its caller goes on: execute(plan) is launch(plan).collect()."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step, after at most one that is not collected; plans come in order, see execute. Raises WorkerError."""
        ...


@dataclass(frozen=True, slots=True)
class StageTimes:
    """How long each pipeline stage has computed, and how long steps were in flight, in seconds."""

    busy_s: tuple[float, ...]
    active_s: float

    def since(self, before: StageTimes) -> StageTimes:
        """Return what has come to the times of `before`."""
        busy_s = tuple(now - then for now, then in zip(self.busy_s, before.busy_s, strict=True))
        return StageTimes(busy_s, self.active_s - before.active_s)

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """The share of the active time in which each stage did not compute, 0 to 1; 0 where there was none."""
        if self.active_s <= 0.0:
            return (0.0,) * len(self.busy_s)
        return tuple(min(1.0, max(0.0, 1.0 - busy_s / self.active_s)) for busy_s in self.busy_s)

    def describe(self) -> str:
        """Return a line for people."""
        shares = (f"stage {index} {share:.1%}" for index, share in enumerate(self.idle_shares))
        return f"pipeline stages were idle {', '.join(shares)} of {self.active_s:.2f} s with steps in flight"


@runtime_checkable
class PipelinedRunner(Runner, Protocol):
    """A runner that computes several steps at once, each of other sequences; see Scheduler.schedule_pipelined.

    num_stages  steps that may be launched and not collected
    """

    num_stages: int

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step after num_stages - 1 that are not collected at most; plans come in order. Raises WorkerError."""
        ...
