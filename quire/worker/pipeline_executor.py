"""PipelineExecutor: runs the steps of a model whose layers are divided among stages, each in a process of its own.

The leader has no layers. It sends each step to all stages, reads what the last one has written, and may have as many steps on
their way as there are stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import DeviceLostError, InvariantError, QuireError, WorkerError
from quire.base.logging import get_logger
from quire.contracts.expert_stats import ExpertStats
from quire.contracts.memory import MemoryPlan, ModelReport
from quire.contracts.rank_stats import RankStats
from quire.contracts.step import StageTimes
from quire.kernels.peaks import SHORT, measure_peaks
from quire.kv.page_supply import PageSupply
from quire.kv.pool import KvPool
from quire.kv.tiers.host_slab import HostSlab
from quire.model.lora.adapter import Adapter
from quire.parallel.barrier import AbortReason
from quire.parallel.remote_workers import RemoteWorkers
from quire.parallel.worker_group import WorkerGroup
from quire.sampling.sampler import Draw
from quire.speculate.proposer import DraftInput
from quire.worker.expert_parallel import PlacedLoads, expert_stats
from quire.worker.parallel_executor import check_adapter_size
from quire.worker.parallel_messages import (
    Call,
    Changes,
    Encoded,
    StepCall,
    encode_adapter,
    encode_adapter_key,
    encode_changes,
    encode_page_moves,
    encode_rows,
)
from quire.worker.pipeline_memory import PipelineMemory, StageClock
from quire.worker.pipeline_messages import encode_numbered_step, encode_request
from quire.worker.pipeline_own_stage import OwnStage
from quire.worker.pipeline_stage import StageConfig
from quire.worker.step_executor import NO_FAILURES, Moves, SlotSampling, StepTokens, TableEntry
from quire.worker.tiers import state_bytes

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step that the stages were told to compute.

    number  of the steps before it
    """

    number: int
    slot: int
    wants_best: bool
    keeps_all: bool
    num_logit_rows: int
    num_tokens: int


class PipelineExecutor:
    """Implements StepExecutor in the leader of a pipeline.

    config   what the stages were started with
    memory   the plan of the whole model
    shares   what each worker has of the weights, in parts
    has_rope_variants  of the model
    own_stage          the first stage, where it is in this process
    placed             the experts of all layers, where each tensor-parallel rank has whole ones
    release  called once when the executor is closed

    Where the group has ended, for example because the process of a stage was killed, a call raises DeviceLostError, which names
    the stage.
    """

    has_sampler = False
    draw: Draw | None = None

    def __init__(
        self,
        config: StageConfig,
        memory: MemoryPlan,
        workers: WorkerGroup | RemoteWorkers,
        shares: Sequence[float],
        has_rope_variants: bool,
        own_stage: OwnStage | None = None,
        placed: PlacedLoads | None = None,
    ) -> None:
        self._workers, self._stages, self._places, self._own_stage = workers, config.stages, config.places, own_stage
        self._shares = [0.0] * config.first_rank + [share / sum(shares) for share in shares]
        self._first_rank = config.first_rank
        self._memory = PipelineMemory(workers.memory, config.sizes) if own_stage is None else own_stage.memory
        self.clock = StageClock(self._memory)
        self.max_in_flight = len(config.stages)
        self.block_size, self.vocab_size = memory.kv.block_size, config.sizes.vocab_size
        self.has_rope_variants = has_rope_variants
        self.has_states = memory.num_states > 0
        self._hidden_size, self._num_threads = config.sizes.hidden_size, sum(config.num_threads)
        self.block_tables = np.zeros((config.num_batch_slots, memory.table_width), dtype=np.int64)
        self.first_window_block = None if memory.kv.window_tokens is None else memory.num_kv_blocks
        self._pages: PageSupply | None = None
        self._draft_pools: Sequence[KvPool] = ()
        self._num_sent = self._num_taken = self._num_asked = 0
        self._taken: SentStep | None = None
        self._kept_layers = config.kept_layers
        self._kept_parts = [config.kept_part(stage) for stage in config.stages]
        self._num_experts, self._placed = config.sizes.num_experts, placed
        self._is_closed = self._is_moving = False  # moving: pages, in a step that has not begun
        self._page_part = config.page_part(memory.kv, memory.kv.part(0, 0), state_bytes=state_bytes(memory))
        self.host_slab: HostSlab | None = None
        self.release: Callable[[], None] | None = None

    def expert_stats(self) -> list[ExpertStats]:
        """See StepExecutor: as the stages have written in their last steps."""
        layers = range(len(self._num_experts) if not self._is_closed else 0)
        return expert_stats([self._memory.expert_tokens(layer, layer + 1).tolist() for layer in layers], self._placed)

    def rank_stats(self) -> list[RankStats]:
        """See StepExecutor. Rank 0 has no layers; the times of stages are counted apart, see StageTimes."""
        parts = {rank: place.describe() for rank, place in self._places.items()}
        found = zip(self._workers.stats(), self._shares, strict=True)
        return [replace(stats, share=share, part=parts.get(stats.rank, "no layers")) for stats, share in found]

    @property
    def stage_times(self) -> StageTimes:
        """See StageExecutor of pipelined_driver.py."""
        return self.clock.times

    @property
    def worker_pids(self) -> dict[int, int]:
        """The processes of the stages but this one: by stage, those of several ranks one after the other."""
        return {rank - self._first_rank: pid for rank, pid in self._workers.pids.items()}

    def take_pages(self, draft_pools: Sequence[KvPool]) -> None:
        """Take the first memory pages of the pools of draft models, which are in this process, from the system."""
        self._draft_pools = draft_pools
        if draft_pools:
            self._pages = PageSupply(*draft_pools)
            self._pages.start()

    def step_scope(self) -> AbstractContextManager[object]:
        """See StepExecutor."""
        return self._pages or nullcontext()

    def set_sampling(self, batch_slot: int, sampling: SlotSampling) -> None:
        """See StepExecutor: best tokens need no options."""

    def begin_step(self, entries: Sequence[TableEntry], block_copies: Sequence[tuple[int, int]]) -> None:
        """See StepExecutor."""
        if self._pages is not None:
            for _, _, block_ids in entries:
                self._pages.use(block_ids)
        if entries or block_copies:
            self._send(encode_changes(Changes(list(entries), list(block_copies))))

    def open_host_tier(self, num_pages: int, is_shared: bool, slab: HostSlab | None = None) -> None:
        """Map the slots that the stages share, if there are any, unless `slab` has them mapped; see HostSlab."""
        if self._page_part is not None:
            self.host_slab = slab or HostSlab(None, num_pages, is_shared, self._page_part)

    def move_pages(self, step_id: int, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """See PageMover: every stage copies its part, in the order of the steps."""
        self._send(encode_page_moves(saves, loads))
        self._is_moving = True

    def flush(self) -> None:
        """See StepExecutor: changes are sent at once, and every stage has moved its pages before this returns."""
        if self._is_moving:
            self._is_moving = False
            self._send_and_wait(Call.WAIT)

    def start_step(
        self,
        tokens: StepTokens,
        samples: bool,
        keeps_logits: bool,
        hidden_rows: Sequence[int],
        keeps_prompt_logits: bool,
        reads: Sequence[DraftInput],
    ) -> SentStep:
        """See StepExecutor."""
        number = self._num_sent
        # A step that was started and never collected may still be under way in its slot.
        self._wait(self._memory.counter(len(self._stages) - 1), number + 1 - self.max_in_flight)
        call = StepCall(tokens, list(hidden_rows), samples, keeps_logits, keeps_prompt_logits)
        self._send(encode_numbered_step(call, number & 0x7FFFFFFF, reads))
        self._num_sent, self._is_moving = number + 1, False
        self.clock.note_in_flight(self._num_sent - self._num_taken)
        num_logit_rows, num_tokens = len(tokens.logit_rows), len(tokens.token_ids)
        keeps_all = keeps_prompt_logits or "final" in reads
        return SentStep(number, self._memory.slot(number), samples, keeps_all, num_logit_rows, num_tokens)

    def take_sampled(self, started: SentStep) -> tuple[Sequence[int] | None, Mapping[int, str]]:
        """See StepExecutor. Where a row has no best token, the sampler says what is wrong with its logits."""
        self._wait(self._memory.counter(len(self._stages) - 1), started.number + 1)
        self._num_taken, self._taken = started.number + 1, started
        self.clock.note_in_flight(self._num_sent - self._num_taken)
        if not started.wants_best:
            return None, NO_FAILURES
        best: list[int] = self._memory.best(started.slot, started.num_logit_rows).tolist()
        return (None if min(best, default=0) < 0 else best), NO_FAILURES

    def logits(self, started: SentStep) -> Tensor:
        """See StepExecutor. Valid until as many steps as there are stages have been started after it."""
        return self._memory.logits(started.slot, started.num_logit_rows)

    def logits_at(self, started: SentStep, first: int, last: int) -> Tensor:
        """See StepExecutor; asked of the last stage, which answers after the steps that it was sent before."""
        if not started.keeps_all:
            raise InvariantError("logits_at was called for a step that has not kept all rows")
        return self._ask(Call.LOGITS, started.slot, range(first, last), self.vocab_size)

    def hidden_states(self, started: SentStep, hidden_rows: Sequence[int]) -> Callable[[int, int], Tensor]:
        """See StepExecutor; asked of the last stage, as logits_at."""
        first_kept = started.num_logit_rows
        places = list(hidden_rows) if started.keeps_all else range(first_kept, first_kept + len(hidden_rows))

        def read(first: int, last: int) -> Tensor:
            return self._ask(Call.HIDDEN_STATES, started.slot, places[first:last], self._hidden_size).clone()

        return read

    def features(self, what: DraftInput, rows: Sequence[int]) -> Tensor:
        """See StepExecutor; of the step that was taken last, of which the stages have written what its heads read."""
        step, size, num_kept = self._taken, self._hidden_size, len(self._kept_layers)
        if step is None:
            raise InvariantError("no step was taken whose features are there")
        places = torch.tensor(rows)
        if what != "layers":
            first, count = (num_kept, step.num_tokens) if what == "final" else (num_kept + 1, step.num_logit_rows)
            return self._memory.features(step.slot, first * size, size, count)[places]
        parts = [(part.start * size, len(part) * size) for part in self._kept_parts if part]
        return torch.cat([self._memory.features(step.slot, *part, step.num_tokens)[places] for part in parts], dim=1)

    def keep_inputs(self, layers: tuple[int, ...]) -> None:
        """See StepExecutor: the stages keep those of StageConfig in steps that are read."""
        if layers and layers != self._kept_layers:
            raise InvariantError(f"the stages keep the inputs of the layers {self._kept_layers}, not of {layers}")

    def move_tokens(self, moves: Moves) -> None:
        """See StepExecutor."""
        self._send(encode_rows(Call.MOVE_TOKENS, moves.sources, moves.targets))

    def load_adapter(self, adapter: Adapter) -> None:
        """Add a LoRA adapter on all stages, before their next step. Raises UnsupportedError."""
        check_adapter_size(adapter)
        self._send(encode_adapter(adapter))

    def unload_adapter(self, key: str) -> None:
        """Remove a LoRA adapter on all stages."""
        self._send(encode_adapter_key(key))

    def measure_peaks(self, report: ModelReport) -> tuple[float, float]:
        """See StepExecutor."""
        peaks = measure_peaks(report, SHORT, self._num_threads)
        return peaks.bytes_per_s, peaks.flops_per_s

    def check_health(self) -> None:
        """See StepExecutor."""
        with self._group():
            self._workers.barrier.check()

    def sleep(self) -> None:
        """See StepExecutor: every stage does, before this returns."""
        if self._pages is not None:
            self._pages.close()
        for pool in self._draft_pools:
            pool.drop()
        self._send_and_wait(Call.SLEEP)

    def wake_up(self) -> None:
        """See StepExecutor: every stage does, before this returns."""
        self.take_pages(self._draft_pools)
        self._send_and_wait(Call.WAKE_UP)

    def _send_and_wait(self, call: Call) -> None:
        with self._group():
            self._workers.ring.send([call], [])
            if self._own_stage is not None:
                self._own_stage.send(([call], []))
                self._own_stage.wait()
            self._workers.communicator.barrier()

    def close(self) -> None:
        """See StepExecutor: the stages end, and the log says how much of the time each was idle."""
        if not self._is_closed:
            self._is_closed = True
            if self._num_taken > 0:
                logger.info("%s", self.clock.times.describe())
        if self._own_stage is not None:
            self._own_stage.close()
            self._own_stage = None
        self._workers.close()
        if self._pages is not None:
            self._pages.close()
        self.host_slab = None
        if self.release is not None:
            self.release()
            self.release = None

    def _ask(self, call: Call, slot: int, places: Sequence[int], width: int) -> Tensor:
        """Return what the last stage has computed for places in a slot: valid until it is asked again."""
        self._send(encode_request(call, slot, places))
        self._num_asked += 1
        self._wait(self._memory.answer_counter, self._num_asked)
        return self._memory.answer(len(places), width)

    def _send(self, message: Encoded) -> None:
        with self._group():
            self._workers.ring.send(*message)
            if self._own_stage is not None:
                self._own_stage.send(message)

    def _wait(self, counter: int, least: int) -> None:
        timeout_s = None if self._own_stage is None else self._own_stage.timeout_s
        with self._group():
            if not self._workers.barrier.wait_for_counter(counter, least, timeout_s):
                last = next(rank for rank, place in self._places.items() if place.stage.is_last)
                reason = "it, or a stage before it, is stopped, or a host cannot be reached"
                raise WorkerError(f"no answer for {timeout_s:g} s (distributed_timeout_s): {reason}", last)

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Turn an error of a call into the reason why the group has ended, with the name of the stage."""
        try:
            yield
        except Exception as error:
            barrier = self._workers.barrier
            if barrier.abort_cause is None:
                text = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
                if isinstance(error, WorkerError):
                    barrier.abort(error.rank, AbortReason.FAILED, text)
                else:
                    barrier.abort(0, AbortReason.FAILED, f"the leader of the pipeline failed: {text}")
            try:
                barrier.check()
            except WorkerError as reason:
                raise DeviceLostError(self._describe_end(reason), reason.rank) from error
            raise

    def _describe_end(self, reason: WorkerError) -> str:
        place = self._places.get(reason.rank)
        return str(reason) if place is None else f"pipeline {place.describe()}: {reason}"
