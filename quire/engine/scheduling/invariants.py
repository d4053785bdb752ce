"""check_invariants: checks the data structures of a scheduler, for tests and debugging; O(pool + all tokens)."""

from __future__ import annotations

from collections import Counter

from quire.base.errors import InvariantError
from quire.base.ids import BlockId
from quire.contracts.block_keys import block_key, root_key
from quire.engine.scheduling.kv_allocator import content_root
from quire.engine.scheduling.prefix_index import PrefixEntry
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.sequence import Sequence, SequenceStatus
from quire.engine.scheduling.sequence_queue import SequenceQueue


def check_invariants(scheduler: Scheduler) -> None:
    """Raise InvariantError if the queues, the block pool, the block tables or the prefix index contradict each other."""
    _check_queues(scheduler)
    _check_pool(scheduler)
    _check_index(scheduler)
    _check_windows(scheduler)
    problem = None if scheduler.kv.host_tier is None else scheduler.kv.host_tier.find_problem()
    _require(problem is None, f"the host tier {problem}")
    for sequence in scheduler.iter_sequences():
        _check_sequence(sequence, scheduler)
    if scheduler.kv.states is not None:
        scheduler.kv.states.check(list(scheduler.iter_sequences()))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)


def _check_queues(scheduler: Scheduler) -> None:
    by_status: dict[SequenceStatus, list[Sequence]] = {status: [] for status in SequenceStatus}
    for sequence in scheduler.iter_sequences():
        by_status[sequence.status].append(sequence)
    _require(not by_status[SequenceStatus.FINISHED], "a finished sequence is kept")
    _check_queue("waiting", scheduler.waiting, by_status[SequenceStatus.WAITING])
    _check_queue("running", scheduler.running, by_status[SequenceStatus.RUNNING])
    _require(len(scheduler.running) <= scheduler.config.max_num_seqs, "more sequences run than max_num_seqs allows")
    leaders = {s.request.request_id for s in scheduler.iter_sequences() if s.choice == 0}
    for sequence in by_status[SequenceStatus.HELD]:
        _require(sequence.request.request_id in leaders, f"sequence {sequence.sequence_id} is held, but choice 0 is gone")


def _check_queue(name: str, queue: SequenceQueue, expected: list[Sequence]) -> None:
    members = list(queue)
    keys = [sequence.order_key for sequence in members]
    _require(keys == sorted(set(keys)), f"the {name} queue is out of order or holds a sequence twice")
    _require(
        {id(sequence) for sequence in members} == {id(sequence) for sequence in expected},
        f"the {name} queue holds other sequences than those with that status",
    )


def _check_pool(scheduler: Scheduler) -> None:
    pool = scheduler.kv.pool
    num_refs: Counter[BlockId] = Counter(scheduler.in_flight.retired_block_ids)
    for sequence in scheduler.running:
        num_refs.update(sequence.block_ids)
        _require(len(set(sequence.block_ids)) == len(sequence.block_ids), "a block table holds a block twice")
    free_ids = list(pool.iter_free())
    is_free = set(free_ids)
    _require(len(free_ids) == len(is_free), "a block is in the free list twice")
    _require(len(free_ids) == pool.num_free, f"{len(free_ids)} blocks are in the free list, {pool.num_free} are counted")
    for block_id in map(BlockId, range(pool.num_blocks)):
        counted, real = pool.num_refs(block_id), num_refs[block_id]
        if counted != real:
            raise InvariantError(f"block {block_id} counts {counted} references, but {real} tables hold it")
        if (real == 0) != (block_id in is_free):
            raise InvariantError(f"block {block_id} is free and held at once, or neither")
    _require(set(num_refs) <= set(range(pool.num_blocks)), "a block table holds a block that does not exist")


def _check_windows(scheduler: Scheduler) -> None:
    windows = scheduler.kv.windows
    if windows is None:
        return
    problem = windows.find_problem()
    _require(problem is None, f"the window group {problem}")
    num_refs: Counter[BlockId] = Counter(scheduler.in_flight.retired_window_ids)
    for sequence in scheduler.running:
        held = windows.held(sequence)
        num_refs.update(held)
        _require(len(set(held)) == len(held), "a window block is held twice by a sequence")
        num_launched = sum(plan.num_scheduled_tokens.get(sequence.sequence_id, 0) for plan in scheduler.in_flight)
        needed = range(
            windows.first_needed(sequence.num_computed_tokens + 1),  # without the token more that is kept for forks
            -(-(sequence.num_computed_tokens + num_launched) // scheduler.kv.block_size),
        )
        is_held = not needed or (sequence.window_first <= needed.start and needed.stop <= sequence.window_end)
        held_range = f"[{sequence.window_first}, {sequence.window_end})"
        _require(is_held, f"sequence {sequence.sequence_id} needs window blocks {needed}, but holds {held_range}")
    for window_id in map(BlockId, range(windows.pool.num_blocks)):
        counted, real = windows.pool.num_refs(window_id), num_refs[window_id]
        if counted != real:
            raise InvariantError(f"window block {window_id} counts {counted} references, but {real} sequences hold it")


def _check_index(scheduler: Scheduler) -> None:
    index, size = scheduler.kv.index, scheduler.kv.block_size
    _require(scheduler.config.enable_prefix_caching or len(index) == 0, "a block is published, but caching is off")
    num_cached, num_counted = len(scheduler.kv.cached_block_ids()), scheduler.kv.num_cached_blocks
    _require(num_cached == num_counted, f"{num_cached} free blocks are published, {num_counted} are counted")
    for key, block_id, entry in index.iter_entries():
        problem = _find_entry_problem(entry, size)
        if problem is None and (entry.block_id != block_id or index.find(key, entry.place) is not entry):
            problem = "cannot be found"
        if problem is not None:
            raise InvariantError(f"the index entry of block {block_id} {problem}")


def _find_entry_problem(entry: PrefixEntry, block_size: int) -> str | None:
    content, parent = entry.content, entry.parent
    if not entry.is_live or len(content.token_ids) != block_size:
        return "is dead or not full"
    if parent is not None and parent.content.root != content.root:
        return "has a parent of another root"
    parent_key = root_key(content.root) if parent is None else parent.content.key
    return None if content.key == block_key(parent_key, content.token_ids) else "has a key that is not that of its tokens"


def _prefix_of(entry: PrefixEntry) -> list[int]:
    """Return the tokens from the start of the sequence to the end of the entry's block."""
    blocks: list[tuple[int, ...]] = []
    step: PrefixEntry | None = entry
    while step is not None:
        blocks.append(step.content.token_ids)
        step = step.parent
    return [token_id for block in reversed(blocks) for token_id in block]


def _check_sequence(sequence: Sequence, scheduler: Scheduler) -> None:
    problem = _find_problem(sequence, scheduler)
    if problem is not None:
        raise InvariantError(f"sequence {sequence.sequence_id} {problem}")


def _find_problem(sequence: Sequence, scheduler: Scheduler) -> str | None:
    size = scheduler.kv.block_size
    prompt = sequence.request.prompt_token_ids
    if tuple(sequence.token_ids[: len(prompt)]) != prompt:
        return "does not begin with its prompt"
    if sequence.num_tokens >= sequence.max_total_tokens:
        return "should have ended"
    if sequence.short_rope_len is not None and sequence.num_tokens > sequence.short_rope_len:
        return "should take the long variant of the rope"
    if sequence.status is not SequenceStatus.RUNNING:
        if sequence.block_ids or sequence.num_computed_tokens:
            return "does not run, but has blocks"
        if sequence.is_known:
            return "does not run, but the worker is thought to know it"
    if not 0 <= sequence.num_computed_tokens < sequence.num_tokens:
        return "has nothing left to compute"
    if sequence.is_mask_pending and (sequence.status is not SequenceStatus.RUNNING or sequence.num_uncomputed_tokens != 1):
        return "has a pending mask, but no next token due"
    num_launched = sum(plan.num_scheduled_tokens.get(sequence.sequence_id, 0) for plan in scheduler.in_flight)
    if len(sequence.block_ids) * size < sequence.num_slots_computed + num_launched:
        return "has tokens computed outside its blocks"
    if sequence.num_published_blocks * size > sequence.num_computed_tokens:
        return "has published what is not computed yet"
    if sequence.num_dropped_tokens % size != 0 or sequence.num_dropped_tokens > sequence.num_computed_tokens:
        return f"has dropped {sequence.num_dropped_tokens} tokens, which are not whole computed blocks"
    if sequence.num_dropped_tokens > 0 and sequence.eviction is None:
        return "has dropped tokens, but has no KV compression"
    if (sequence.last_entry is None) != (sequence.num_published_blocks == 0):
        return "has lost its last index entry"
    for index, content in enumerate(sequence.block_contents):
        if content.token_ids != tuple(sequence.token_ids[index * size : (index + 1) * size]):
            return f"has other tokens than were hashed in block {index}"
    layout, pool = scheduler.kv.layout, scheduler.kv.pool
    if layout.has_homes and sequence.block_ids and pool.place_of(sequence.block_ids[0]) != sequence.home:
        return f"is at home {sequence.home}, but its blocks are at {pool.place_of(sequence.block_ids[0])}"
    for index, block_id in enumerate(sequence.block_ids):
        if pool.place_of(block_id) != layout.place(pool.place_of(sequence.block_ids[0]), index):
            return f"holds block {block_id} at place {pool.place_of(block_id)}, where its block {index} is not"
        entry = scheduler.kv.index.entry_of(block_id)
        if entry is None:
            continue
        if entry.content.root != content_root(sequence):
            return f"holds block {block_id} of another salt or rope"
        if sequence.num_dropped_tokens > 0:
            continue  # the block was at another place of the table
        if _prefix_of(entry) != sequence.token_ids[: (index + 1) * size]:
            return f"holds block {block_id}, published with other tokens"
    return None
