"""Sequence: one choice of a request while it is unfinished."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from quire.base.ids import BlockId, SequenceId
from quire.contracts.request import Request
from quire.engine.scheduling.eviction import EvictionRule
from quire.engine.scheduling.prefix_index import BlockContent, PrefixEntry

OrderKey = tuple[int, float, int, int]


class SequenceStatus(Enum):
    """The state of a sequence. HELD: a further choice that waits until choice 0 has computed the shared prompt."""

    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class StateSave(NamedTuple):
    """A recurrent state that a step in flight saves: after `position` tokens of its sequence, in a slot of StateCheckpoints."""

    position: int
    slot: int
    step_id: int
    is_for_forks: bool = False


class HeldBlocks(NamedTuple):
    """The blocks of a sequence, in order, and its window blocks."""

    block_ids: list[BlockId]
    window_ids: list[BlockId]


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable state of one choice; only the scheduler and its KvAllocator write it.

    token_ids            prompt, then output
    order_key            order among all sequences under the policy; unique, never changes
    max_total_tokens     prompt and output together, at which it ends with "length"
    ending_token_ids     the request's; stored here because they are read for every token
    num_computed_tokens  tokens whose KV is in block_ids, or was evicted: [0, num_computed_tokens)
    block_ids            the block table; covers at least the computed tokens; empty unless RUNNING
    home                 the rank that attends to it, with attention data parallelism; set when it is admitted
    eviction             which blocks its KV compression evicts, and when; None: none
    exact_len            only so many first tokens have the keys and values of plain decoding; None: all
    num_dropped_tokens   tokens of the blocks that were evicted from block_ids, a multiple of the block size
    window_first, window_end  it holds the window blocks of block_ids[window_first:window_end], see WindowBlocks
    is_known             the worker has a row for it
    block_contents       of its first full blocks; computed once, kept after a preemption
    num_published_blocks blocks from the start of the table that are in the prefix index, themselves or as an equal block
    last_entry           the index entry of the last of them
    next_prompt_logprob  next prompt position whose log probabilities are to be returned
    num_requested_drafts drafts that the worker could use after its last known token; 0 unless it decodes
    is_loading           pages of its cached tokens are still being loaded; it is left out of plans. Only if RUNNING
    is_mask_pending      the mask of its constraint is not filled yet; its last known token is computed again; only if RUNNING
    short_rope_len       the longest length with the short variant of the rope; beyond it the sequence is computed again with
                         the long variant, and this is None. Also None if there are no variants
    state_slot, fork_slot, state_saves, last_checkpoint
                         for models with a recurrent state, written by StateCheckpoints: the checkpoint from which it starts,
                         the one for its forks, those that the step in flight saves, and the last one of its output
    num_shared_tokens    tokens of blocks that were found without a checkpoint when it was admitted; with a window group, of all
                         blocks that were found, with window blocks or not
    num_cached_tokens    prompt tokens found in the prefix cache when it was first admitted
    num_evicted_tokens   num_dropped_tokens as it was last, also after the end
    times                in seconds on the clock of the caller's `now`
    """

    sequence_id: SequenceId
    request: Request
    choice: int
    order_key: OrderKey
    max_total_tokens: int
    ending_token_ids: frozenset[int]
    next_prompt_logprob: int
    token_ids: list[int]
    added_s: float
    status: SequenceStatus
    num_computed_tokens: int = 0
    block_ids: list[BlockId] = field(default_factory=list[BlockId])
    home: int = 0
    eviction: EvictionRule | None = None
    exact_len: int | None = None
    num_dropped_tokens: int = 0
    window_first: int = 0
    window_end: int = 0
    is_known: bool = False
    block_contents: list[BlockContent] = field(default_factory=list[BlockContent])
    num_published_blocks: int = 0
    last_entry: PrefixEntry | None = None
    num_requested_drafts: int = 0
    is_mask_pending: bool = False
    is_loading: bool = False
    short_rope_len: int | None = None
    state_slot: int | None = None
    fork_slot: int | None = None
    state_saves: list[StateSave] = field(default_factory=list[StateSave])
    last_checkpoint: PrefixEntry | None = None
    num_shared_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_evicted_tokens: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is not computed, at least one; exactly one while it decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    def num_tokens_after(self, num_launched: int) -> int:
        """Return how many tokens are left to compute after a step that computes num_launched of them.

        If that step samples the next token this is one, unless that token must be the last. It is 0, too, if the step computes
        the prompt and further choices wait for it: they share its last block before anything is written after it.
        """
        num_computed = self.num_computed_tokens + num_launched
        num_left = len(self.token_ids) - num_computed
        if num_left > 0:
            return num_left
        # With one more token it ends, or must be computed again with the long rope.
        is_last = len(self.token_ids) + 1 >= self.max_total_tokens or self.short_rope_len == len(self.token_ids)
        is_forked = self.choice == 0 and self.num_computed_tokens < self.num_prompt_tokens <= num_computed
        return 0 if is_last or (is_forked and self.request.params.num_sequences > 1) else 1

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that may come from the prefix cache: at least one token is left to compute, and all tokens with prompt log
        probabilities that are not returned yet.

        0 for a prompt whose hidden states are all pooled.
        """
        if self.request.pooling is not None and self.request.pooling.needs_every_token:
            return 0
        most = self.num_tokens - 1
        if self.next_prompt_logprob < self.num_prompt_tokens:
            most = self.next_prompt_logprob - 1
        if self.exact_len is not None:
            most = min(most, self.exact_len)
        return most if self.eviction is None else min(most, self.eviction.max_cached_tokens)

    @property
    def num_slots_computed(self) -> int:
        """Places of the computed tokens in the cache: those that were not evicted."""
        return self.num_computed_tokens - self.num_dropped_tokens

    @property
    def num_admitted_tokens(self) -> int:
        """Tokens for which blocks are allocated at admission: all known ones, but for those that are evicted on the way."""
        return len(self.token_ids) if self.eviction is None else self.eviction.peak_tokens(len(self.token_ids))
