"""StepExecutor: runs the steps of one model on one device. It is the border between what decides and what computes.

The step driver decides: it has the scheduler's plans, the sampling state, grammars and drafts. An executor computes: it has the
decoder, the KV pool and the copy of the block tables that the kernels read. What crosses this border is arrays and plain
numbers, so that it can be sent to worker processes, each of which runs an executor of its own for its part of the model. An
executor reads no clock to decide anything. Executors that get the same calls compute the same.

Only the driver's own process reads results (logits, hidden states, features).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.expert_stats import ExpertStats
from quire.contracts.memory import ModelReport
from quire.contracts.rank_stats import RankStats
from quire.contracts.step import TokenLogprobs
from quire.kv.tiers.host_slab import HostSlab
from quire.model.token_runs import BoundsRequest, TreePlaces
from quire.sampling.row_state import SamplingRow
from quire.sampling.sampler import Draw
from quire.speculate.proposer import DraftInput

UNKNOWN = -1
"""A token id that the executor knows and the driver does not yet: the one that it sampled last in this batch slot."""

TableEntry = tuple[int, int, Sequence[int]]
"""A change of a block table: the batch slot, the index of the first entry, and the block ids from there on."""

NO_FAILURES: Mapping[int, str] = {}


class StateChange(NamedTuple):
    """What becomes of the recurrent states of S sequences in a step, besides that each is taken through its tokens.

    starts      (batch slot, computed tokens, checkpoint that holds the state after these, None: there are none) of new ones
    saves       index of a sequence -> (number of its tokens, checkpoint that gets the state after these)
    num_drafts  S numbers: how many of the last tokens of each sequence are drafts, which may be rejected
    """

    starts: Sequence[tuple[int, int, int | None]]
    saves: Mapping[int, Sequence[tuple[int, int]]]
    num_drafts: Sequence[int]


class StepTokens(NamedTuple):
    """The tokens of S sequences in one step, one sequence after the other, without padding.

    token_ids    [T]; UNKNOWN only for the last known token of a sequence
    starts       S + 1 offsets: sequence s has token_ids [starts[s], starts[s + 1]), at least one
    ends         S positions, each after the last token of its sequence
    batch_slots  S rows of the block tables
    logit_rows   R indices of tokens whose logits are computed: first the last known token of each of num_ready sequences, which
                 get a next token, then the drafts of these sequences
    trees        None: no draft is a tree
    short_ropes  S flags: the sequence takes the short variant of the rope, see ModelSpec.rope_switch_len; None: none does
    states       of a model with a recurrent state
    adapters     S keys of LoRA adapters, "": the base model; None: there are no adapters
    num_dropped  S numbers of tokens that the cache has no longer: the place of a token in it is its position minus this. None:
                 all are 0
    bounds       None: no sequence skips runs
    """

    token_ids: list[int]
    starts: list[int]
    ends: list[int]
    batch_slots: list[int]
    logit_rows: list[int]
    num_ready: int
    trees: TreePlaces | None = None
    short_ropes: list[bool] | None = None
    states: StateChange | None = None
    adapters: list[str] | None = None
    num_dropped: list[int] | None = None
    bounds: BoundsRequest | None = None


class Moves(NamedTuple):
    """KV of accepted drafts to be moved, as cache slots (block id * block size + offset).

    starts  offsets of each sequence's first move, and one more that is the number of moves

    In order, no source is written before it is read: a target is never after its source, nor after the target before.
    """

    sources: list[int]
    targets: list[int]
    starts: list[int]


class ObservedToken(NamedTuple):
    """A token whose attention is observed: its batch slot, and its place in the cache."""

    batch_slot: int
    place: int


class SlotSampling(NamedTuple):
    """How an executor samples the tokens of one batch slot; fixed while a sequence has the slot.

    top_k      0: no limit
    log_min_p  logarithm of min_p; -inf: no limit
    seed       64 bits, unsigned
    """

    is_greedy: bool
    inverse_temperature: float
    top_k: int
    top_p: float
    log_min_p: float
    seed: int

    @classmethod
    def of(cls, row: SamplingRow, is_used: bool = True) -> SlotSampling:
        """Return how a row is sampled. If the result is not used, the best token is taken, which is cheapest."""
        params = row.params
        is_greedy = row.is_greedy or not is_used
        seed = row.seed & (1 << 64) - 1
        return cls(is_greedy, row.inverse_temperature, max(params.top_k, 0), params.top_p, row.log_min_p, seed)


def needs_host_sampling(row: SamplingRow, has_sampler: bool, row_processor: RowProcessor | None = None) -> bool:
    """Return whether the driver has to sample the tokens of a row.

    has_sampler    of the executor, see StepExecutor
    row_processor  the executor, where it can apply processors and find log probabilities; None: it cannot
    """
    if row.is_plain or not has_sampler:
        return not row.is_plain
    if row_processor is not None:
        return not row_processor.takes_row(row)
    is_drawn = row.is_greedy or row.params.typical_p >= 1
    return not is_drawn or row.edits_logits or row.matcher is not None or row.needs_logprob


class RowProcessor(Protocol):
    """An executor whose sampler applies logits processors, and finds log probabilities, so that no logits go to the host. It
    counts the tokens that it samples; set_processors reports those that the driver samples."""

    def takes_row(self, row: SamplingRow) -> bool:
        """Return whether it can sample the tokens of a row."""
        ...

    def takes_masked(self, row: SamplingRow) -> bool:
        """Return whether it can sample the tokens of a row with a constraint by sample_deferred."""
        ...

    def defer_sampling(self) -> None:
        """Have the next step that is started compute logits, and sample no row before sample_deferred."""
        ...

    def sample_deferred(self, started: Any, masks: Mapping[int, Tensor]) -> Any:
        """Sample the rows of a deferred step, before another one is started; return its new handle.

        masks  index in logit_rows -> [ceil(V / 32) or more] i32, a bit per token, the lowest first: 0 forbids it
        """
        ...

    def set_processors(self, batch_slot: int, row: SamplingRow) -> None:
        """Set the processors and log probabilities of a batch slot from the next step on, after set_sampling, or again. The row
        has all known tokens."""
        ...

    def take_logprobs(self, started: Any, wanted: Sequence[tuple[int, int]]) -> list[TokenLogprobs]:
        """Return the log probabilities of sampled tokens of a step, after take_sampled; wanted: index in logit_rows, and number
        of most likely tokens."""
        ...


class PageMover(Protocol):
    """An executor with a host tier. host_slab: that of this process; None: there is no host tier."""

    host_slab: HostSlab | None

    def move_pages(self, step_id: int, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to slots of the host tier, (block, slot), and then slots to blocks, (slot, block); before begin_step of
        this step. The copies may go on when it returns, see AsyncPageMover."""
        ...


@runtime_checkable
class AsyncPageMover(PageMover, Protocol):
    """A PageMover whose copies run next to the steps. Steps that use loaded blocks, and copies, wait for what they need."""

    def take_moved(self, waits: bool) -> tuple[int, ...]:
        """Return the steps whose pages have been saved and loaded, in order, each once. waits: all, when they have."""
        ...


class BlockScorer(Protocol):
    """An executor that can score the blocks of sequences with KV compression; see contracts.kv_compression."""

    def observe_attention(self, rows: Sequence[int]) -> None:
        """Keep the queries of these rows of the next step, for take_observed."""
        ...

    def take_observed(self, places: Sequence[ObservedToken]) -> list[Tensor]:
        """Return the attention that each of the kept rows of the last step pays to each block up to its own, f64, summed over
        heads and layers."""
        ...

    def score_key_norms(self, block_ids: Sequence[int]) -> tuple[float, ...]:
        """Return for each block minus the mean norm of its keys, over tokens, heads and layers."""
        ...

    def run_counts(self) -> tuple[int, int]:
        """Return how many runs might have been skipped so far by bounds, and how many were; with several ranks, of the heads
        of this one."""
        ...


class StepExecutor(Protocol):
    """Runs steps in the order of the calls. All methods but close and measure_peaks are called inside of step_scope().

    has_sampler    whether it samples a token for each row, with noise and cuts, and keeps it for the next step, which may then
                   start before the token is read (UNKNOWN). Otherwise it only finds the best tokens, and only if all rows of
                   a step want these
    max_in_flight  steps that may be started and not yet read
    draw           samples from logits where they are, see sampling.sampler; None: on the host
    block_tables   [max_num_seqs, max_blocks] i64, a row for each batch slot. The driver writes them before it starts a step
    first_window_block  None: the cache has one group. Otherwise the second half of a row is the table of the window group, and
                   window block w is first_window_block + w in block copies and moves, see KvPool
    has_rope_variants  sequences take one of two variants of the rope, see ModelSpec.rope_switch_len
    has_states     sequences have a recurrent state: StepTokens.states says what becomes of it
    """

    has_sampler: bool
    max_in_flight: int
    draw: Draw | None
    block_tables: NDArray[np.int64]
    first_window_block: int | None
    block_size: int
    vocab_size: int
    has_rope_variants: bool
    has_states: bool

    def step_scope(self) -> AbstractContextManager[object]:
        """Return the context of a step's calls: it sets the current device, and turns the device's errors into ours."""
        ...

    def set_sampling(self, batch_slot: int, sampling: SlotSampling) -> None:
        """Set how a batch slot is sampled from the next step on."""
        ...

    def begin_step(self, entries: Sequence[TableEntry], block_copies: Sequence[tuple[int, int]]) -> None:
        """Take in the changes before a step: what changed in block_tables, and KV blocks to copy, as (source, target).

        The copies are made before anything of the step is written, and after all moves.
        """
        ...

    def flush(self) -> None:
        """Make the changes of begin_step and move_tokens although no step follows now."""
        ...

    def start_step(
        self,
        tokens: StepTokens,
        samples: bool,
        keeps_logits: bool,
        hidden_rows: Sequence[int],
        keeps_prompt_logits: bool,
        reads: Sequence[DraftInput],
    ) -> Any:
        """Start a step; return a handle for the methods that read its results.

        samples              whether its own tokens are wanted of all rows; otherwise of some or of none
        keeps_logits         whether `logits` will be called, besides when take_sampled returns no tokens
        hidden_rows          tokens whose hidden states may be read
        keeps_prompt_logits  whether logits_at may be called
        reads                what `features` may be asked for
        """
        ...

    def take_sampled(self, started: Any) -> tuple[Sequence[int] | None, Mapping[int, str]]:
        """Wait for a step; return the token of each of its logit_rows, and by index why a row has none.

        None: it has not sampled, and the host has to.
        """
        ...

    def logits(self, started: Any) -> Tensor:
        """Return the logits [R, vocab_size] of a step, on the executor's device. Valid until the next step is started."""
        ...

    def logits_at(self, started: Any, first: int, last: int) -> Tensor:
        """Return the logits of the tokens [first, last) of a step with keeps_prompt_logits, before the next one is started."""
        ...

    def hidden_states(self, started: Any, hidden_rows: Sequence[int]) -> Callable[[int, int], Tensor]:
        """Return what reads [first, last) of a step's hidden_rows, f32 on the host, before the next step is started."""
        ...

    def features(self, what: DraftInput, rows: Sequence[int]) -> Tensor:
        """Return what a proposer reads of the step that was started last [R or more, F].

        rows  indices of tokens; if what is "last": places in logit_rows
        """
        ...

    def keep_inputs(self, layers: tuple[int, ...]) -> None:
        """Keep the inputs of these layers, low to high, in every step from now on; for features("layers")."""
        ...

    def move_tokens(self, moves: Moves) -> None:
        """Move the KV of accepted drafts in every layer, before anything else reads or writes it."""
        ...

    def measure_peaks(self, report: ModelReport) -> tuple[float, float]:
        """Return the bytes per second that the device reads and its operations per second, measured now, in a moment."""
        ...

    def expert_stats(self) -> list[ExpertStats]:
        """Return how many tokens the experts of each layer have got; empty where there are none, or they are not counted."""
        ...

    def rank_stats(self) -> list[RankStats]:
        """Return what each rank of a model on several processes does and holds; empty for one process."""
        ...

    def check_health(self) -> None:
        """Raise DeviceLostError, with the reason, where a process that runs a part of the model has ended. At any time."""
        ...

    def sleep(self) -> None:
        """Release the memory of the KV pools, and move weights on a GPU to the host, while no step runs; outside of step_scope.

        Until wake_up only rank_stats, expert_stats, check_health, wake_up and close may be called.
        """
        ...

    def wake_up(self) -> None:
        """Undo sleep: the KV pools are there again, without values."""
        ...

    def close(self) -> None:
        """Release what it holds; it cannot be used afterwards."""
        ...
