"""StateCheckpoints: recurrent states that are saved at block borders, so that a cached prefix can be continued.

The blocks of a prefix hold the KV of all its tokens. A recurrent state exists only where it was saved: a prefix is
a hit up to its last block with a checkpoint. Checkpoints are slots of a small pool in the worker. They
belong to published blocks and are dropped with them, or by LRU eviction when the pool is full.

A state is saved
- at the last block border of the known tokens of a sequence, when a chunk passes it: for the same prompt again, or after a
  preemption;
- at every INTERVAL_TOKENS of a prompt;
- where the cached blocks of the sequence end after its last checkpoint: other prompts begin in the same way;
- at each block border while the sequence decodes, replacing the previous one: for the next turn of a chat;
- before the last token of a prompt that has further choices, for their forks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from quire.base.errors import InvariantError
from quire.base.ids import BlockId
from quire.engine.scheduling.prefix_index import PrefixEntry
from quire.engine.scheduling.sequence import Sequence, StateSave

INTERVAL_TOKENS = 1024


class StateCheckpoints:
    """The slots of a pool of num_slots states: free, pinned by sequences that will start from them, or of published blocks.

    on_evict(block id)  called before the checkpoint of a block is dropped because another one needs its slot
    """

    def __init__(
        self, num_slots: int, block_size: int, *, is_caching: bool, on_evict: Callable[[BlockId], None] | None = None
    ) -> None:
        self._on_evict = on_evict
        self._block_size = block_size
        self._is_caching = is_caching
        self._free = deque(range(num_slots))
        self._slot_by_block: OrderedDict[BlockId, int] = OrderedDict()  # least recently used first
        self._num_pins: dict[int, int] = {}
        self.num_slots = num_slots

    @property
    def num_cached(self) -> int:
        """Slots that belong to published blocks."""
        return len(self._slot_by_block)

    @property
    def has_room(self) -> bool:
        """Whether a checkpoint can be taken in, perhaps in place of another one."""
        return bool(self._free) or any(slot not in self._num_pins for slot in self._slot_by_block.values())

    def slot_of(self, block_id: BlockId) -> int | None:
        """Return the slot of the checkpoint of a block; None: it has none."""
        return self._slot_by_block.get(block_id)

    def block_ids(self) -> Iterator[BlockId]:
        """Yield the blocks with a checkpoint, the least recently used first."""
        return iter(tuple(self._slot_by_block))

    def adopt(self, block_id: BlockId) -> int:
        """Give a slot to a block without a checkpoint, whose state is being loaded; there must be room."""
        slot = self._allocate()
        if slot is None:
            raise InvariantError("a state is loaded, but every slot is pinned")
        self._slot_by_block[block_id] = slot
        return slot

    def drop_slot(self, slot: int) -> None:
        """Drop the checkpoint in a slot, if there is one: its content is unknown."""
        for block_id in [block_id for block_id, other in self._slot_by_block.items() if other == slot]:
            self.drop(block_id)

    def cut(self, sequence: Sequence, hits: list[PrefixEntry]) -> list[PrefixEntry]:
        """Return the hits of a sequence up to the last one with a checkpoint."""
        num_hits = len(hits)
        while num_hits > 0 and hits[num_hits - 1].block_id not in self._slot_by_block:
            num_hits -= 1
        sequence.num_shared_tokens = len(hits) * self._block_size if num_hits < len(hits) else 0
        return hits[:num_hits]

    def start_from(self, sequence: Sequence, hits: list[PrefixEntry]) -> None:
        """Make a sequence start from the checkpoint of its last hit."""
        if hits:
            block_id = hits[-1].block_id
            self._slot_by_block.move_to_end(block_id)
            sequence.state_slot = self._pin(self._slot_by_block[block_id])

    def can_fork(self, source: Sequence) -> bool:
        """Return whether sequences can be forked from one that has computed its prompt."""
        return source.fork_slot is not None or source.num_prompt_tokens == 1

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Let `target` start from the state before the last token of the prompt, which `source` has computed."""
        if source.fork_slot is not None:
            target.state_slot = self._pin(source.fork_slot)

    def end_forks(self, source: Sequence) -> None:
        """Release the state for forks of a sequence, after all forks are made."""
        if source.fork_slot is not None:
            self._unpin(source.fork_slot)
            source.fork_slot = None

    def take_start(self, sequence: Sequence) -> int | None:
        """Return the slot from which a sequence starts in the planned step; None: from zero. Unpins it, since a step
        reads all states before it writes any."""
        slot, sequence.state_slot = sequence.state_slot, None
        if slot is not None:
            self._unpin(slot)
        return slot

    def plan_saves(
        self, sequence: Sequence, num_tokens: int, step_id: int, num_launched: int = 0
    ) -> tuple[tuple[int, int], ...]:
        """Return the states to save in a step of num_tokens tokens of a sequence: (tokens before it, slot).

        num_launched  tokens that the step in flight before this one computes
        """
        start = sequence.num_computed_tokens + num_launched
        end = start + num_tokens
        fork_at = sequence.num_prompt_tokens - 1
        has_forks = sequence.choice == 0 and sequence.request.params.num_sequences > 1
        if has_forks and sequence.fork_slot is None and start < fork_at <= end:
            slot = self._allocate()
            if slot is not None:
                sequence.fork_slot = self._pin(slot)
                sequence.state_saves.append(StateSave(fork_at, slot, step_id, is_for_forks=True))
        for position in self._borders(sequence, start, end, num_launched > 0) if self._is_caching else ():
            slot = self._allocate()
            if slot is None:
                break
            self._pin(slot)
            sequence.state_saves.append(StateSave(position, slot, step_id))
        return tuple((save.position, save.slot) for save in sequence.state_saves if save.step_id == step_id)

    def _borders(self, sequence: Sequence, start: int, end: int, is_ahead: bool) -> list[int]:
        """Return the block borders in (start, end] at which the state is saved; the last known border first.

        is_ahead  the token before `end` may still be computed; it is no draft
        """
        size = self._block_size
        last = (sequence.num_tokens - 1) // size * size
        wanted = [last, sequence.num_shared_tokens]
        if (end == sequence.num_tokens or is_ahead) and end % size == 0 and start >= sequence.num_prompt_tokens:
            wanted.append(end)
        first = (start // INTERVAL_TOKENS + 1) * INTERVAL_TOKENS
        wanted += [place for place in range(first, end + 1, INTERVAL_TOKENS) if place % size == 0]
        return list(dict.fromkeys(place for place in wanted if start < place <= end))

    def commit(self, sequence: Sequence, step_id: int) -> list[tuple[int, PrefixEntry]]:
        """Record that the states of a step were saved, and return the new checkpoints, by position; the blocks of the sequence
        have been published. The step after it may be in flight."""
        made: list[tuple[int, PrefixEntry]] = []
        saves = [save for save in sequence.state_saves if save.step_id <= step_id]
        sequence.state_saves = sequence.state_saves[len(saves) :]
        for save in saves:
            if save.is_for_forks:
                continue
            entry = self._entry_at(sequence, save.position)
            if entry is not None and entry.block_id not in self._slot_by_block:
                self._slot_by_block[entry.block_id] = save.slot
                self._replace_last(sequence, save.position, entry)
                made.append((save.position, entry))
            self._unpin(save.slot)
        return made

    def _entry_at(self, sequence: Sequence, position: int) -> PrefixEntry | None:
        """Return the live entry of the published block that ends at a position."""
        entry = sequence.last_entry
        if position > sequence.num_computed_tokens or position > sequence.num_published_blocks * self._block_size:
            return None
        for _ in range(sequence.num_published_blocks - position // self._block_size):
            entry = None if entry is None else entry.parent
        return entry if entry is not None and entry.is_live else None

    def _replace_last(self, sequence: Sequence, position: int, entry: PrefixEntry) -> None:
        """Drop the previous checkpoint of a decoding sequence."""
        if position <= sequence.num_prompt_tokens:
            return
        last = sequence.last_checkpoint
        sequence.last_checkpoint = None if position % INTERVAL_TOKENS == 0 else entry
        if last is not None and last.is_live:
            self.drop(last.block_id)

    def forget(self, sequence: Sequence) -> None:
        """Release the pins of a sequence that loses its blocks."""
        for save in sequence.state_saves:
            if not save.is_for_forks:
                self._unpin(save.slot)
        sequence.state_saves = []
        self.end_forks(sequence)
        self.take_start(sequence)
        sequence.last_checkpoint, sequence.num_shared_tokens = None, 0

    def drop(self, block_id: BlockId) -> None:
        """Drop the checkpoint of a block, if it has one."""
        slot = self._slot_by_block.pop(block_id, None)
        if slot is not None and slot not in self._num_pins:
            self._free.append(slot)

    def check(self, sequences: list[Sequence]) -> None:
        """Raise InvariantError if slots are lost or held twice, or pins do not match those of the sequences."""
        pins: dict[int, int] = {}
        for sequence in sequences:
            slots = [save.slot for save in sequence.state_saves if not save.is_for_forks]
            for slot in (*slots, sequence.state_slot, sequence.fork_slot):
                if slot is not None:
                    pins[slot] = pins.get(slot, 0) + 1
        if pins != self._num_pins:
            raise InvariantError(f"the pins of states are {self._num_pins}, sequences hold {pins}")
        cached = list(self._slot_by_block.values())
        if len(set(cached)) != len(cached) or sorted({*self._free, *cached, *pins}) != list(range(self.num_slots)):
            raise InvariantError("a slot of a state is lost or held twice")
        if len(set(self._free)) != len(self._free) or {*self._free} & {*cached, *pins}:
            raise InvariantError("a slot of a state is free and held at once")

    def _allocate(self) -> int | None:
        """Return an empty slot, evicting the least recently used checkpoint if none is free; None: all are pinned."""
        if self._free:
            return self._free.popleft()
        block_id = next((key for key, slot in self._slot_by_block.items() if slot not in self._num_pins), None)
        if block_id is None:
            return None
        if self._on_evict is not None:
            self._on_evict(block_id)
        return self._slot_by_block.pop(block_id)

    def _pin(self, slot: int) -> int:
        self._num_pins[slot] = self._num_pins.get(slot, 0) + 1
        return slot

    def _unpin(self, slot: int) -> None:
        self._num_pins[slot] -= 1
        if self._num_pins[slot] == 0:
            del self._num_pins[slot]
            if slot not in self._slot_by_block.values():
                self._free.append(slot)
