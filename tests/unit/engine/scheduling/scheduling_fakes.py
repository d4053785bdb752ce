"""A worker that knows only what StepPlans say, and a driver that checks every promise of the scheduler while it runs.

The fake KV of a token is a hash of the salt, of the variant of the rope and of all tokens up to it, so that any block that is
stale, copied wrongly or shared wrongly is seen at the first step that reads it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from reference_model import (
    STOP_STRING,
    extend_chain,
    is_stop_string,
    kv_root,
    make_request,
    pool,
    reference_run,
    sample,
    score,
)

from quire.base.ids import BlockId, RequestId, SequenceId
from quire.contracts.request import Request
from quire.contracts.scheduler_config import SchedulerConfig
from quire.contracts.step import StepPlan, StepResult, TokenLogprobs
from quire.engine.scheduling import Scheduler, SequenceUpdate, check_invariants
from quire.engine.scheduling.admission import check_servable
from quire.engine.scheduling.eviction import EvictionRule


@dataclass
class Row:
    request: Request
    choice: int
    tokens: list[int]
    table: list[BlockId]
    num_computed: int
    chain: list[int] = field(default_factory=list)
    pooled: list[int] = field(default_factory=list)
    window_table: dict[int, BlockId] = field(default_factory=dict)
    uses_short_rope: bool = False
    values: list[int] = field(default_factory=list)  # what is in the cache, by place
    evicted: tuple = ()
    num_dropped: int = 0

    @property
    def root(self) -> str:
        return kv_root(self.request, self.uses_short_rope)


class FakeWorker:
    """Executes plans against a KV of hashes; up to max_sampled tokens at a time, and drafts, up to max_drafts of them, which
    are right or wrong by chance."""

    def __init__(self, config: SchedulerConfig, max_sampled: int = 1, seed: int = 0, max_drafts: int = 0) -> None:
        self.block_size = config.block_size
        self.rope_switch_len = config.rope_switch_len
        self.num_blocks = config.num_kv_blocks
        self.kv = [[-1] * config.block_size for _ in range(config.num_kv_blocks)]
        self.window_tokens = config.window_tokens
        self.window_kv = [[-1] * config.block_size for _ in range(config.num_window_blocks)]
        self.pages: dict[int, list[int]] = {}  # the slots of the host tier
        self.rows: dict[SequenceId, Row] = {}
        self.next_step_id = 0
        self.max_sampled = max_sampled
        self.max_drafts = max_drafts
        self.wishes: dict[SequenceId, int] = {}
        self.rng = random.Random(seed)
        self.plans: list[StepPlan] = []
        self.may_be_late: Callable[[Request], bool] = lambda request: False
        self._late: list[SequenceId] = []
        self._rng_of_late = random.Random(seed)
        self.num_late = 0
        self.num_state_slots = config.num_state_checkpoints
        self.num_state_pages = max(1, config.num_state_pages)
        self.has_block_pages = config.has_block_pages
        self.states: dict[int, list[int]] = {}  # by slot: the fake KV of the last token before it, once for each page

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step_id == self.next_step_id
        self.next_step_id += 1
        self.plans.append(plan)
        self._apply(plan)
        self.move_pages(plan)
        for start in plan.starts:
            self._read_state(start, self.rows[start.sequence_id])
        self._copy(plan)
        holders = Counter(block for row in self.rows.values() for block in row.table)
        prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            row = self.rows[sequence_id]
            assert num_tokens >= 1
            assert row.num_computed + num_tokens <= len(row.tokens)
            assert not row.uses_short_rope or len(row.tokens) <= self.rope_switch_len
            assert len(row.table) * self.block_size >= row.num_computed - row.num_dropped + num_tokens
            extend_chain(row.chain, row.tokens, row.root)
            self._check_evictions(row, num_tokens)
            self.check_row(row)
            for position in range(row.num_computed, row.num_computed + num_tokens):
                value = self._value(row, position)
                block, offset = self._place(row, position)
                assert holders[block] == 1, f"block {block} is written, but {holders[block]} sequences hold it"
                self.kv[block][offset] = value
                row.values[position - row.num_dropped :] = [value]
                self.write_window(row, position, row.chain[position])
                row.pooled.append(row.chain[position])
            if row.request.params.prompt_logprobs is not None:
                last = min(row.num_computed + num_tokens, len(row.request.prompt_token_ids) - 1)
                positions = range(row.num_computed + 1, last + 1)
                prompt_logprobs[sequence_id] = tuple(TokenLogprobs(row.tokens[p], -float(p), 1) for p in positions)
        self._save_states(plan)
        sampled: dict[SequenceId, tuple[int, ...]] = {}
        pooled: dict[SequenceId, tuple[float, ...]] = {}
        verified: dict[SequenceId, tuple[int, int]] = {}
        for sequence_id, num_slots in (plan.num_draft_slots or {}).items():
            assert 1 <= num_slots <= self.wishes[sequence_id]
            assert plan.num_scheduled_tokens[sequence_id] == 1
            verified[sequence_id] = self._draft(self.rows[sequence_id], num_slots, holders)
        for sequence_id in plan.num_scheduled_tokens:
            self.wishes.pop(sequence_id, None)
        late: list[SequenceId] = []
        for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
            row = self.rows[sequence_id]
            row.num_computed += num_tokens
            self.check_row(row)
            if row.num_computed == len(row.tokens) and row.request.pooling is not None:
                pooled[sequence_id] = pool(row.request, row.pooled)
            elif row.num_computed == len(row.tokens) and self.may_be_late(row.request):
                row.num_computed -= 1
                verified.pop(sequence_id, None)
                late.append(sequence_id)
            elif row.num_computed == len(row.tokens):
                num_accepted = verified.get(sequence_id, (0, 0))[1]
                row.num_computed += num_accepted
                sampled[sequence_id] = self._sample(row, 1 + num_accepted if sequence_id in verified else None)
                if self.max_drafts and row.num_computed == len(row.tokens) - 1:
                    self.wishes[sequence_id] = self.rng.randint(0, self.max_drafts)
        logprobs = {
            sequence_id: tuple(TokenLogprobs(token, -1.0, 1) for token in tokens)
            for sequence_id, tokens in sampled.items()
            if self.rows[sequence_id].request.params.needs_logprob
        }
        wishes = {sequence_id: count for sequence_id, count in self.wishes.items() if count and sequence_id in sampled}
        mask_ready = [sequence_id for sequence_id in self._late if self._rng_of_late.random() < 0.3]
        self._late = [sequence_id for sequence_id in self._late if sequence_id not in mask_ready] + late
        self.num_late += len(late)
        return StepResult(
            plan.step_id,
            sampled,
            logprobs,
            prompt_logprobs,
            {},
            pooled,
            verified,
            wishes,
            mask_pending=frozenset(late),
            mask_ready=tuple(mask_ready),
            block_scores={key: self._score(self.rows[key], count) for key, count in (plan.scored_blocks or {}).items()},
        )

    def _place(self, row: Row, position: int) -> tuple[BlockId, int]:
        block, offset = divmod(position - row.num_dropped, self.block_size)
        return row.table[block], offset

    def _value(self, row: Row, position: int) -> int:
        return hash((row.chain[position], row.evicted)) if row.evicted else row.chain[position]

    def _score(self, row: Row, count: int) -> tuple[float, ...]:
        size = self.block_size
        return tuple(score(row.values[index * size : (index + 1) * size]) for index in range(count))

    def _check_evictions(self, row: Row, num_tokens: int) -> None:
        """Check that a step does not go beyond the length of an eviction."""
        rule = EvictionRule.of(row.request.params.kv_compression, len(row.request.prompt_token_ids), self.block_size)
        next_len = None if rule is None else rule.next_len(row.num_computed, row.num_dropped)
        assert next_len is None or row.num_computed + num_tokens <= next_len

    def _evict(self, plan: StepPlan) -> None:
        for sequence_id, indices in (plan.evicted_blocks or {}).items():
            row = self.rows[sequence_id]
            row.evicted += ((row.num_computed, indices),)
            row.table = [block for index, block in enumerate(row.table) if index not in indices]
            row.values = [value for place, value in enumerate(row.values) if place // self.block_size not in indices]
            row.num_dropped += len(indices) * self.block_size

    def _read_state(self, start, row: Row) -> None:
        if self.num_state_slots is None or start.num_computed_tokens == 0:
            assert start.state_slot is None
            return
        extend_chain(row.chain, row.tokens, row.root)
        expected = [row.chain[start.num_computed_tokens - 1]] * self.num_state_pages
        assert self.states[start.state_slot] == expected, "it starts from another state"

    def _save_states(self, plan: StepPlan) -> None:
        slots: list[int] = []
        for sequence_id, saves in (plan.state_saves or {}).items():
            row = self.rows[sequence_id]
            for position, slot in saves:
                assert row.num_computed < position <= row.num_computed + plan.num_scheduled_tokens[sequence_id]
                assert 0 <= slot < self.num_state_slots
                self.states[slot] = [row.chain[position - 1]] * self.num_state_pages
                slots.append(slot)
        assert len(set(slots)) == len(slots), "two states are kept in one slot"

    def move_pages(self, plan: StepPlan) -> None:
        targets = {block_id for _, block_id in plan.page_loads}
        assert len(targets) == len(plan.page_loads)
        assert len({slot for _, slot in plan.page_saves}) == len(plan.page_saves)
        for block_id, slot in plan.page_saves:
            self.pages[slot] = self.page_of(block_id)
        for slot, block_id in plan.page_loads:
            self.fill(block_id, self.pages[slot])

    def page_of(self, block_id: int) -> list[int]:
        """Return what a page of a block, or a page of a state, has."""
        if block_id >= self.num_blocks:
            slot, page = divmod(block_id - self.num_blocks, self.num_state_pages)
            return [self.states[slot][page]]
        assert self.has_block_pages
        assert -1 not in self.kv[block_id], "a block is saved that was never filled"
        return list(self.kv[block_id])

    def fill(self, block_id: int, values: list[int]) -> None:
        """Load a page."""
        if block_id >= self.num_blocks:
            slot, page = divmod(block_id - self.num_blocks, self.num_state_pages)
            self.states.setdefault(slot, [-1] * self.num_state_pages)[page] = values[0]
        else:
            self.kv[block_id] = list(values)

    def _draft(self, row: Row, num_slots: int, holders: Counter) -> tuple[int, int]:
        """Write the KV of drafts after the last known token: correct ones, and then garbage."""
        num_drafts = self.rng.randint(0, num_slots)
        num_accepted = self.rng.randint(0, num_drafts)
        tokens, chain = list(row.tokens), list(row.chain)
        for offset in range(1, num_slots + 1):  # all slots are there, used or not
            position = row.num_computed + offset
            block, place = self._place(row, position)
            assert holders[block] == 1, f"a draft is written into block {block}, which {holders[block]} sequences hold"
            if offset <= num_accepted:
                tokens.append(sample(row.request, row.choice, chain, row.evicted))
                extend_chain(chain, tokens, row.root)
            value = -self.rng.random()
            if offset <= num_accepted:
                value = hash((chain[position], row.evicted)) if row.evicted else chain[position]
                row.values[position - row.num_dropped :] = [value]
            self.kv[block][place] = value
            self.write_window(row, position, value)
        return num_drafts, num_accepted

    def check_row(self, row: Row) -> None:
        if not self.has_block_pages:
            return  # it has no KV
        size = self.block_size
        for place in range(row.num_computed - row.num_dropped):
            found = self.kv[row.table[place // size]][place % size]
            assert found == row.values[place], f"{row.request.request_id}/{row.choice} reads wrong KV at {place}"
        if self.window_tokens is None:
            return
        # What the next token attends to, itself aside.
        for position in range(max(0, row.num_computed - self.window_tokens + 1), row.num_computed):
            found = self.window_kv[row.window_table[position // size]][position % size]
            assert found == row.chain[position], f"{row.request.request_id}/{row.choice} reads wrong window KV at {position}"

    def write_window(self, row: Row, position: int, value: float) -> None:
        if self.window_tokens is not None:
            self.window_kv[row.window_table[position // self.block_size]][position % self.block_size] = value

    def _apply_windows(self, plan: StepPlan) -> None:
        assert self.window_tokens is not None or not (plan.window_blocks or plan.window_copies)
        assert not set(plan.window_blocks or {}) & {start.sequence_id for start in plan.starts}
        runs = [(start.sequence_id, run) for start in plan.starts for run in start.window_blocks]
        runs += [(key, run) for key, found in (plan.window_blocks or {}).items() for run in found]
        for sequence_id, (first, window_ids) in runs:
            for index, window_id in enumerate(window_ids, first):
                self.rows[sequence_id].window_table[index] = window_id

    def _copy_windows(self, plan: StepPlan) -> None:
        targets = [target for _, target in plan.window_copies]
        assert len(set(targets)) == len(targets)
        at_once = [list(self.window_kv[source]) for source, _ in plan.window_copies]
        for (_, target), values in zip(plan.window_copies, at_once, strict=True):
            self.window_kv[target] = values

    def _sample(self, row: Row, count: int | None) -> tuple[int, ...]:
        first = len(row.tokens)
        most = self.rope_switch_len + 1 - first if row.uses_short_rope else first + self.max_sampled
        assert count is None or not row.uses_short_rope or count <= most, "a draft stands where the other rope is needed"
        count = count or min(most, self.rng.randint(1, self.max_sampled))
        for _ in range(count):
            extend_chain(row.chain, row.tokens, row.root)
            row.tokens.append(sample(row.request, row.choice, row.chain, row.evicted))
        return tuple(row.tokens[first:])

    def _apply(self, plan: StepPlan) -> None:
        for sequence_id in plan.ended:
            del self.rows[sequence_id]
        self._late = [sequence_id for sequence_id in self._late if sequence_id not in plan.ended]
        assert not set(self._late) & set(plan.num_scheduled_tokens), "a late sequence is planned"
        self._evict(plan)
        known = set(self.rows)
        for start in plan.starts:
            assert start.sequence_id not in self.rows
            assert start.sequence_id in plan.num_scheduled_tokens
            assert 0 <= start.num_computed_tokens < len(start.token_ids)
            assert start.token_ids[: len(start.request.prompt_token_ids)] == start.request.prompt_token_ids
            is_short = self.rope_switch_len is not None and len(start.token_ids) <= self.rope_switch_len
            assert start.uses_short_rope == is_short
            self.rows[start.sequence_id] = Row(
                start.request,
                start.choice,
                list(start.token_ids),
                list(start.block_ids),
                start.num_computed_tokens,
                uses_short_rope=is_short,
            )
            row = self.rows[start.sequence_id]
            extend_chain(row.chain, row.tokens, row.root)
            row.values = row.chain[: row.num_computed]
        for sequence_id, block_ids in (plan.new_block_ids or {}).items():
            assert sequence_id in known
            assert sequence_id in plan.num_scheduled_tokens
            self.rows[sequence_id].table.extend(block_ids)
        for sequence_id, replacements in (plan.replaced_blocks or {}).items():
            assert sequence_id in known
            assert sequence_id in plan.num_scheduled_tokens
            for index, block_id in replacements:
                self.rows[sequence_id].table[index] = block_id
        self._apply_windows(plan)
        for row in self.rows.values():
            assert len(set(row.table)) == len(row.table)
            assert all(0 <= block_id < self.num_blocks for block_id in row.table)

    def _copy(self, plan: StepPlan) -> None:
        self._copy_windows(plan)
        targets = [target for _, target in plan.block_copies]
        assert len(set(targets)) == len(targets)
        at_once = [list(self.kv[source]) for source, _ in plan.block_copies]
        for source, target in plan.block_copies:
            self.kv[target] = list(self.kv[source])
        assert [self.kv[target] for target in targets] == at_once, "the order of the copies matters"


@dataclass
class LateMove:
    """The pages of a step that are still being copied: slots that get what blocks held, and blocks that get what slots hold."""

    step_id: int
    saves: dict[int, list[int]]
    loads: dict[BlockId, int]

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads)


class LatePages(FakeWorker):
    """Copies pages some time after the step that asks for it, as a GPU does next to its steps; a step that needs a page waits.

    num_waits   steps that have waited for a page that they read
    is_late     otherwise pages are copied with the step that asks for it
    keeps_late  nothing is copied before a step needs it, or there is nothing else to do
    """

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.late: list[LateMove] = []
        self.num_waits = 0
        self.keeps_late = False
        self._rng_of_moves = random.Random(7)
        self._lost: list[int] = []

    is_late = True

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if not self.is_late:
            return result
        num_done = 0 if self.keeps_late else self._rng_of_moves.randint(0, len(self.late))
        if not plan.num_scheduled_tokens:
            num_done = len(self.late)
        done, self.late = self.late[:num_done], self.late[num_done:]
        for move in done:
            self._finish(move, move.saves, move.loads)
        moved = [*self._lost, *(move.step_id for move in done)]
        self._lost = []
        return replace(result, moved_steps=tuple(moved))

    def fail(self, step_id: int, moved_steps: tuple[int, ...] = ()) -> None:
        """Forget the copies of a step that has failed; its moved_steps are told with the next result."""
        self.late = [move for move in self.late if move.step_id != step_id]
        self._lost += moved_steps

    def move_pages(self, plan: StepPlan) -> None:
        if not self.is_late:
            super().move_pages(plan)
            return
        move = LateMove(plan.step_id, {}, {block_id: slot for slot, block_id in plan.page_loads})
        self._use(block_id for block_id, _ in plan.page_saves)
        for block_id, slot in plan.page_saves:
            move.saves[slot] = self.page_of(block_id)
        for other in self.late:  # a slot is written after it was read, and read after it was written
            self._finish(other, (), [block_id for block_id, slot in other.loads.items() if slot in move.saves])
            self._finish(other, other.saves.keys() & set(move.loads.values()), other.loads.keys() & move.loads.keys())
        if move:
            self.late.append(move)
        self.num_waits += self._use(block_id for key in plan.num_scheduled_tokens for block_id in self.rows[key].table)
        slots = [start.state_slot for start in plan.starts if start.state_slot is not None]
        slots += [slot for saves in (plan.state_saves or {}).values() for _, slot in saves]
        for slot in slots:
            self._use(self.num_blocks + slot * self.num_state_pages + page for page in range(self.num_state_pages))
        self._use(block_id for copy in plan.block_copies for block_id in copy)

    def _use(self, block_ids) -> bool:
        """Finish the loads into these blocks; return whether there were any."""
        wanted, found = set(block_ids), False
        for move in self.late:
            needed = move.loads.keys() & wanted
            self._finish(move, (), needed)
            found |= bool(needed)
        return found

    def _finish(self, move, slots, block_ids) -> None:
        for slot in list(slots):
            self.pages[slot] = move.saves.pop(slot)
        for block_id in list(block_ids):
            slot = move.loads.pop(block_id)
            if slot in move.saves:
                self.pages[slot] = move.saves.pop(slot)
            self.fill(block_id, self.pages[slot])


@dataclass
class Output:
    """What the driver has seen of one choice."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: dict[int, int] = field(default_factory=dict)
    last: SequenceUpdate | None = None


class Driver:
    """A small engine: adds, steps and aborts, plays the text layer, and checks invariants after every event."""

    def __init__(self, config: SchedulerConfig, *, max_sampled: int = 1, seed: int = 0, max_drafts: int = 0) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.worker = FakeWorker(config, max_sampled, seed, max_drafts)
        self.requests: dict[RequestId, Request] = {}
        self.outputs: dict[tuple[RequestId, int], Output] = {}
        self.now = 0.0

    def add(self, request: Request) -> None:
        check_servable(request, self.config)
        ids = self.scheduler.add(request, now=self.now)
        assert len(ids) == request.params.num_sequences
        self.requests[request.request_id] = request
        for choice in range(len(ids)):
            self.outputs[request.request_id, choice] = Output()
        check_invariants(self.scheduler)

    def schedule(self) -> StepPlan | None:
        scheduler = self.scheduler
        decoding = [s for s in scheduler.running if s.num_uncomputed_tokens == 1 and not (s.is_mask_pending or s.is_loading)]
        plan = scheduler.schedule(now=self.now)
        assert (plan is not None) == scheduler.has_unfinished
        if plan is not None:
            still_running = set(scheduler.running)
            assert all(plan.num_scheduled_tokens[s.sequence_id] == 1 for s in decoding if s in still_running)
            assert plan.num_tokens <= self.config.max_num_batched_tokens
            assert set(plan.num_scheduled_tokens) <= {s.sequence_id for s in still_running}
            threshold = self.config.long_prefill_token_threshold
            assert not threshold or max(plan.num_scheduled_tokens.values(), default=0) <= threshold
        check_invariants(scheduler)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        self.now += 1.0
        updates = self.scheduler.commit(plan, result, now=self.now)
        check_invariants(self.scheduler)
        for update in updates:
            self.take(update)

    def step(self) -> StepPlan | None:
        plan = self.schedule()
        if plan is not None:
            self.commit(plan, self.worker.execute(plan))
        return plan

    def abort(self, name) -> list[SequenceUpdate]:
        updates = self.scheduler.abort(RequestId(str(name)))
        check_invariants(self.scheduler)
        for update in updates:
            self.take(update)
        return updates

    def take(self, update: SequenceUpdate) -> None:
        output = self.outputs[update.request_id, update.choice]
        request = self.requests[update.request_id]
        assert output.reason is None, "an update after the last one"
        assert (update.pooled is not None) == (request.pooling is not None and update.finish_reason == "stop")
        if update.pooled is not None:
            chain: list[int] = []
            prompt, switch_len = request.prompt_token_ids, self.config.rope_switch_len
            extend_chain(chain, prompt, kv_root(request, switch_len is not None and len(prompt) <= switch_len))
            assert update.pooled == pool(request, chain), "pooled are other tokens than those of the prompt, each once"
        assert (update.stats is None) == (update.finish_reason is None)
        assert (update.error is not None) == (update.finish_reason == "error")
        assert len(update.logprobs) == (len(update.new_token_ids) if request.params.needs_logprob else 0)
        for offset, logprob in enumerate(update.prompt_logprobs):
            position = update.prompt_logprobs_start + offset
            assert position == len(output.prompt_logprobs) + 1
            assert logprob.token_id == request.prompt_token_ids[position]
            output.prompt_logprobs[position] = logprob.token_id
        output.reason, output.stop_reason, output.last = update.finish_reason, update.stop_reason, update
        for token in update.new_token_ids:
            output.tokens.append(token)
            if is_stop_string(request, token):
                if output.reason is None:
                    output.last = self.scheduler.finish(update.sequence_id, "stop", STOP_STRING)
                    check_invariants(self.scheduler)
                output.reason, output.stop_reason = "stop", STOP_STRING
                break

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if self.step() is None:
                return
        raise AssertionError(f"not finished after {max_steps} steps")

    def check_outputs(self) -> None:
        """Every sequence has ended once, with the tokens of an isolated run, and nothing is left of it."""
        for (request_id, choice), output in self.outputs.items():
            request = self.requests[request_id]
            tokens, reason, stop_reason = reference_run(request, choice, self.config)
            assert output.reason is not None
            if output.reason in ("abort", "error"):
                assert output.tokens == tokens[: len(output.tokens)]
                continue
            assert (output.tokens, output.reason, output.stop_reason) == (tokens, reason, stop_reason)
            if choice == 0 and request.params.prompt_logprobs is not None:
                assert len(output.prompt_logprobs) == len(request.prompt_token_ids) - 1
            else:
                assert not output.prompt_logprobs
        scheduler = self.scheduler
        assert not scheduler.has_unfinished
        assert scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.kv.pool.num_free == self.config.num_kv_blocks
        assert scheduler.kv_usage == 0.0
        windows = scheduler.kv.windows
        assert windows is None or windows.pool.num_free == self.config.num_window_blocks

    def flush(self) -> None:
        """Run one more request, so that the worker hears of every end; it must then have no other row."""
        self.add(make_request("flush", 1, max_tokens=1))
        plan = self.step()
        assert plan is not None
        assert set(self.worker.rows) == set(plan.num_scheduled_tokens)
        assert self.outputs[RequestId("flush"), 0].reason is not None
