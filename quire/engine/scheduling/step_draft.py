"""StepDraft: a StepPlan while it is being made."""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.ids import BlockId, SequenceId
from quire.contracts.step import SequenceStart, StepPlan
from quire.engine.scheduling.kv_allocator import BlockGrowth
from quire.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Share:
    """What one sequence does in the step."""

    sequence: Sequence
    num_tokens: int
    growth: BlockGrowth
    num_draft_slots: int = 0


def _start(sequence: Sequence) -> SequenceStart:
    return SequenceStart(
        sequence_id=sequence.sequence_id,
        request=sequence.request,
        choice=sequence.choice,
        token_ids=tuple(sequence.token_ids),
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=tuple(sequence.block_ids),
    )


class StepDraft:
    """Collects who computes how many tokens under one token budget; who is taken out again leaves no trace."""

    def __init__(self, max_num_tokens: int) -> None:
        self._shares: dict[SequenceId, _Share] = {}
        self._num_tokens_left = max_num_tokens

    @property
    def num_tokens_left(self) -> int:
        """Tokens of the budget that are not given out yet."""
        return self._num_tokens_left

    @property
    def is_empty(self) -> bool:
        """Whether nobody computes anything."""
        return not self._shares

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences in the step, in batch order."""
        return tuple(share.sequence for share in self._shares.values())

    def add(self, sequence: Sequence, num_tokens: int, growth: BlockGrowth) -> None:
        """Let a sequence compute num_tokens >= 1 more tokens, in a block table that has just grown so."""
        self._shares[sequence.sequence_id] = _Share(sequence, num_tokens, growth)
        self._num_tokens_left -= num_tokens

    def add_draft_slots(self, sequence: Sequence, num_slots: int, growth: BlockGrowth) -> None:
        """Let a sequence that is in compute num_slots >= 1 drafts too, for which its table has grown again."""
        share = self._shares[sequence.sequence_id]
        both = BlockGrowth(
            share.growth.appended + growth.appended,
            share.growth.replaced + growth.replaced,
            share.growth.copies + growth.copies,
        )
        self._shares[sequence.sequence_id] = _Share(sequence, share.num_tokens, both, num_slots)
        self._num_tokens_left -= num_slots

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, if it is in, and give its tokens back to the budget."""
        share = self._shares.pop(sequence.sequence_id, None)
        if share is not None:
            self._num_tokens_left += share.num_tokens + share.num_draft_slots

    def build(self, step_id: int, ended: tuple[SequenceId, ...]) -> StepPlan:
        """Return the plan; sequences that the worker does not know are described in full, the others by their growth."""
        starts: list[SequenceStart] = []
        new_block_ids: dict[SequenceId, tuple[BlockId, ...]] = {}
        replaced_blocks: dict[SequenceId, tuple[tuple[int, BlockId], ...]] = {}
        block_copies: list[tuple[BlockId, BlockId]] = []
        draft_slots = {key: share.num_draft_slots for key, share in self._shares.items() if share.num_draft_slots}
        for sequence_id, share in self._shares.items():
            block_copies.extend(share.growth.copies)
            if not share.sequence.is_known:
                starts.append(_start(share.sequence))
                continue
            if share.growth.appended:
                new_block_ids[sequence_id] = share.growth.appended
            if share.growth.replaced:
                replaced_blocks[sequence_id] = share.growth.replaced
        return StepPlan(
            step_id=step_id,
            num_scheduled_tokens={sequence_id: share.num_tokens for sequence_id, share in self._shares.items()},
            starts=tuple(starts),
            new_block_ids=new_block_ids or None,
            replaced_blocks=replaced_blocks or None,
            block_copies=tuple(block_copies),
            ended=ended,
            num_draft_slots=draft_slots or None,
        )
