"""GpuStepExecutor: runs the steps of a model, or of a draft head, on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import clear_frames
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import DeviceLostError, InvariantError, WorkerError
from quire.contracts.expert_stats import ExpertStats
from quire.contracts.memory import ModelReport
from quire.contracts.rank_stats import RankStats
from quire.contracts.step import TokenLogprobs
from quire.kernels.triton.step import AttentionLibrary
from quire.kv.device_pages import DevicePages, PageShare
from quire.kv.device_pool import DeviceKvPool
from quire.kv.tiers.host_slab import HostSlab
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_routing import RoutingCounts
from quire.model.heads.device_head import DeviceHead
from quire.model.lora.device_adapters import DeviceAdapters
from quire.sampling.row_state import SamplingRow
from quire.sampling.sampler import Draw
from quire.speculate.proposer import DraftInput
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.faults import is_lost, is_out_of_memory, release_unused
from quire.worker.device.graphs import StepGraphs
from quire.worker.device.host_step import (
    host_step,
)
from quire.worker.device.launched_step import (
    Kept,
    Launched,
    StepSizes,
    hidden_of,
)
from quire.worker.device.memory import HOW_TO_SAVE
from quire.worker.device.peaks import measure_device_peaks
from quire.worker.device.row_processors import is_masked_on_device, is_sampled_on_device
from quire.worker.device.sampling_table import draw_on_device
from quire.worker.device.sleeping import SleepingMemory, sleep_on_device
from quire.worker.device.staged_call import ChangeCounts, StagedCall
from quire.worker.device.staging import NUM_READBACKS
from quire.worker.device.step_launcher import StepLauncher
from quire.worker.expert_parallel import PlacedLoads, Placements, expert_stats, save_placements, with_routing_counts
from quire.worker.state_table import StateTable
from quire.worker.step_executor import Moves, SlotSampling, StepTokens, TableEntry

if TYPE_CHECKING:
    from quire.worker.device.precompile import Precompilation


class GpuStepExecutor(StepLauncher):
    """Implements StepExecutor, and launches the steps of a draft model or a draft head, which have no driver of their own."""

    has_sampler = True

    def __init__(
        self,
        decoder: DeviceDecoder | DeviceHead,
        pool: DeviceKvPool,
        sizes: StepSizes,
        graphs: StepGraphs,
        library: AttentionLibrary | None = None,
        adapters: DeviceAdapters | None = None,
    ) -> None:
        super().__init__(decoder, pool, sizes, graphs, library, adapters)
        spec = decoder.spec
        self.max_in_flight = NUM_READBACKS if sizes.num_stages == 1 else sizes.num_stages
        whole = spec if self._stage is None else self._stage.spec
        self.has_rope_variants = whole.rope_switch_len(sizes.max_model_len) is not None
        self._states: StateTable | None = None
        self._num_checkpoints = 0
        self.vocab_size, self.block_size = spec.vocab_size, pool.spec.block_size
        self.draw: Draw | None = draw_on_device
        width = self.tables.shape[1]
        self.block_tables = np.zeros((sizes.num_slots, width), dtype=np.int64)  # on the host, written by the driver
        self._entries: Sequence[TableEntry] = ()  # of block_tables, to be sent before the next step
        self._block_copies: Sequence[tuple[int, int]] = ()
        self.moves: Moves | None = None
        self.sleeping: SleepingMemory | None = None
        self._placed: PlacedLoads | None = None
        self._save_placement: Callable[[], None] | None = None
        self.host_slab: HostSlab | None = None
        self._pages: DevicePages | None = None
        self.compilation: Precompilation | None = None  # of its kernels, if they are compiled ahead
        self._logit_rows: list[int] = []  # of the step that was started last
        self._defers = False  # whether the next step is not sampled

    @contextmanager
    def step_scope(self) -> Iterator[None]:
        """See StepExecutor. Raises WorkerError, which says what to lower, when memory ends, and DeviceLostError when nothing
        runs on the device any more."""
        device = self._decoder.device
        try:
            with torch.inference_mode(), self._decoder.on_device():
                yield
        except Exception as error:
            # Of a step that was not started: its sequences have failed.
            self._entries, self._block_copies, self._defers = (), (), False
            if isinstance(error, WorkerError):
                raise  # of ranks: the device may wait for one that has ended, and so would who waits for the device
            has_lost = is_lost(device)  # it waits for all that was launched, copies of pages too, whose slots may be taken next
            if is_out_of_memory(error):
                clear_frames(error.__traceback__)  # which hold the step's tensors
                release_unused(device)
                raise WorkerError(f"the device has not enough memory for this step: {HOW_TO_SAVE} ({error})") from error
            if has_lost:
                raise DeviceLostError(f"nothing runs on {device} any more in this process: {error}") from error
            raise

    def open_host_tier(
        self, num_pages: int, is_shared: bool = False, share: PageShare | None = None, slab: HostSlab | None = None
    ) -> None:
        """Make the slab of the host tier, if it has any pages, or map it; see HostSlab and DevicePages.

        share  of each page, where several ranks have one
        slab   with its pages, that another executor of the same model had
        """
        if num_pages > 0:
            page_bytes, file = (self._pool.spec.page_bytes, None) if share is None else (share.page_bytes, share.file)
            self.host_slab = slab or HostSlab(None, num_pages, is_shared, page_bytes=page_bytes, file=file)
            with torch.inference_mode(), self._decoder.on_device():
                first_byte = 0 if share is None else share.first_byte
                self._pages = DevicePages(self._pool, self.host_slab, None, first_byte, self._num_checkpoints)
                self._pages.warm_up()

    def move_pages(self, step_id: int, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """See PageMover."""
        if self._pages is None:
            raise InvariantError("a step saves or loads pages, but there is no host tier")
        self._pages.move(step_id, saves, loads)

    def take_moved(self, waits: bool) -> tuple[int, ...]:
        """See AsyncPageMover."""
        if self._pages is None:
            return ()
        if waits:
            self._pages.settle()
        return self._pages.take_done()

    def set_sampling(self, batch_slot: int, sampling: SlotSampling) -> None:
        """See StepExecutor."""
        self._sampler.set(batch_slot, sampling)

    def takes_row(self, row: SamplingRow) -> bool:
        """See RowProcessor."""
        return is_sampled_on_device(row)

    def set_processors(self, batch_slot: int, row: SamplingRow) -> None:
        """See RowProcessor."""
        self._sampler.set_processors(batch_slot, row)

    def begin_step(self, entries: Sequence[TableEntry], block_copies: Sequence[tuple[int, int]]) -> None:
        """See StepExecutor. The changes are sent with the step."""
        self._entries, self._block_copies = entries, block_copies
        if self._pages is not None:
            used = [block_id for _, _, block_ids in entries for block_id in block_ids]
            self.use_blocks([*used, *(block_id for copy in block_copies for block_id in copy)])

    def use_blocks(self, block_ids: Sequence[int]) -> None:
        """Have the next steps wait for pages that are being loaded into these blocks; only with a host tier."""
        if self._pages is not None:
            self._pages.use(block_ids)

    def move_tokens(self, moves: Moves) -> None:
        """See StepExecutor. The moves are made with the next step that is started, also if one fails before that."""
        self.moves = moves

    def flush(self) -> None:
        """See StepExecutor."""
        updates = self._take_updates()
        if not updates.is_empty:
            self.staging.wait()
            self.staging.holds = None
            self._call(StagedCall(ChangeCounts.of(updates)), 0, updates)

    def _take_updates(self) -> BlockTableUpdates:
        copies = () if self._states is None else self._states.take_copies()
        changes = self._entries, self._block_copies, self.moves, copies
        updates = BlockTableUpdates.split(*changes, self.first_window_block, self.block_size)
        self._entries, self._block_copies, self.moves = (), (), None
        return updates

    def start_step(
        self,
        tokens: StepTokens,
        samples: bool,
        keeps_logits: bool,
        hidden_rows: Sequence[int],
        keeps_prompt_logits: bool,
        reads: Sequence[DraftInput],
    ) -> Launched:
        """See StepExecutor. It samples in any case, and keeps features as keep_features of the decoder says."""
        states = None if self._states is None else self._states.place(tokens)
        if self._pages is not None and tokens.states is not None:
            starts = [checkpoint for _, _, checkpoint in tokens.states.starts if checkpoint is not None]
            self._pages.use_states([*starts, *(slot for saves in tokens.states.saves.values() for _, slot in saves)])
        adapters = None if self._adapters is None else self._adapters.numbers.of_runs(tokens.adapters, tokens.starts)
        rope_rows = self._decoder.num_long_rope_rows
        step = host_step(tokens, self.block_tables, self.block_size, rope_rows, states, adapters, self._has_windows)
        if self._homes.size > 1:
            step = self._homes.placed(step, self.block_tables[step.rows, 0], (self._pool.num_blocks, self.block_size))
        kept = Kept(keeps_logits, keeps_prompt_logits or bool(hidden_rows))
        self._logit_rows = tokens.logit_rows
        sampling = "deferred" if self._defers else self.sampling_table.sampling_of(step.sampled_rows)
        self._defers = False
        return self.launch(step, sampling, self._take_updates(), kept)

    def take_sampled(self, started: Launched) -> tuple[list[int], Mapping[int, str]]:
        """See StepExecutor."""
        found = self.read_rows(started)
        return found.tokens, found.failures(started.is_processed, started.is_masked)

    def takes_masked(self, row: SamplingRow) -> bool:
        """See RowProcessor."""
        return is_masked_on_device(row)

    def defer_sampling(self) -> None:
        """See RowProcessor."""
        self._defers = True

    def sample_deferred(self, started: Launched, masks: Mapping[int, Tensor]) -> Launched:
        """See RowProcessor. Its launches are not part of a CUDA graph; the masks are sent in one transfer."""
        if started.deferred is None or started.logits is None:
            raise InvariantError("a step is sampled that was not deferred")
        self.staging.wait()
        self.staging.holds = None
        self._sampler.sample_masked(self.staging, started.logits, started.deferred, masks)
        count = started.num_sampled
        found = started._replace(num_rows=count, logits=None, deferred=None, is_masked=masks.keys())
        return self._read_back(found, "full", started.deferred[0])

    def take_logprobs(self, started: Launched, wanted: Sequence[tuple[int, int]]) -> list[TokenLogprobs]:
        """See RowProcessor."""
        found = self.read_rows(started)
        return [found.logprobs_of(index, num_top) for index, num_top in wanted]

    def logits(self, started: Launched) -> Tensor:
        """See StepExecutor."""
        if started.logits is None:
            raise InvariantError("the step did not keep its logits")
        return started.logits

    def logits_at(self, started: Launched, first: int, last: int) -> Tensor:
        """See StepExecutor."""
        adapters = None if started.adapters is None else started.adapters[first:last]
        return self.logits_of(hidden_of(started)[first:last], adapters)

    def hidden_states(self, started: Launched, hidden_rows: Sequence[int]) -> Callable[[int, int], Tensor]:
        """See StepExecutor. All rows are copied to the host at once."""
        hidden = hidden_of(started)
        wanted = hidden[torch.tensor(list(hidden_rows), device=hidden.device)].float().cpu()
        return lambda first, last: wanted[first:last]

    def features(self, what: DraftInput, rows: Sequence[int]) -> Tensor:
        """See StepExecutor."""
        if isinstance(self._decoder, DeviceHead):
            raise InvariantError("a draft head keeps no features")
        return self._decoder.features_at([self._logit_rows[place] for place in rows] if what == "last" else rows)

    def keep_inputs(self, layers: tuple[int, ...]) -> None:
        """See StepExecutor: what is kept is part of the CUDA graphs, and never changes; see DeviceDecoder.keep_features."""

    def measure_peaks(self, report: ModelReport) -> tuple[float, float]:
        """See StepExecutor."""
        with self._decoder.on_device():  # events belong to the current device
            return measure_device_peaks(report, self._decoder.device)

    def give_pool(self, pool: DeviceKvPool, num_states: int = 0, num_checkpoints: int = 0) -> None:
        """Use another pool, which differs only in its number of blocks and states; all CUDA graphs are dropped."""
        self._drop_graphs()
        self._use(pool)
        if self.has_states:
            self._states = StateTable(self._sizes.max_num_seqs, num_states, num_checkpoints, copies_starts=True)
            self._num_checkpoints = num_checkpoints

    def expert_stats(self) -> list[ExpertStats]:
        """See StepExecutor: where the decoder watches them. Waits for launched steps."""
        if not isinstance(self._decoder, DeviceDecoder):
            return []
        counts = self._expert_counts()
        stats = expert_stats([[] if each is None else each.tokens for each in counts], self._placed)
        return with_routing_counts(stats, [(0, 0, 0, 0.0) if each is None else each.changes for each in counts])

    def place_experts(self, placements: Placements, shares: Sequence[float], save: str | None = None) -> None:
        """Say where the experts of each layer are, for their statistics; save: a file for it, written at the end."""
        self._placed = PlacedLoads(placements, shares)
        if save is not None:
            self._save_placement = functools.partial(save_placements, save, self._placed)

    def _wait_for_steps(self) -> None:
        """Wait for all launched steps."""
        if self._decoder.device.type == "cuda":
            with self._decoder.on_device():
                event = torch.cuda.Event()
                event.record()
                self._wait_for(event)

    def _placed_tokens(self) -> dict[int, NDArray[np.int64]]:
        """Return the tokens so far of the experts of each layer that has any."""
        counts = enumerate(self._expert_counts())
        return {layer: np.array(each.tokens) for layer, each in counts if each is not None}

    def own_expert_counts(self) -> list[RoutingCounts | None]:
        """Return the counts of each layer of the decoder, see there. Waits for launched steps."""
        assert isinstance(self._decoder, DeviceDecoder)
        self._wait_for_steps()
        return self._decoder.expert_counts()

    def _expert_counts(self) -> list[RoutingCounts | None]:
        """Return the counts of each layer of the model."""
        return self.own_expert_counts()

    def rank_stats(self) -> list[RankStats]:
        """See StepExecutor."""
        return []

    def check_health(self) -> None:
        """See StepExecutor: it is the only process."""

    def sleep(self) -> None:
        """See StepExecutor. CUDA graphs are dropped, since the weights will have other addresses."""
        with self._decoder.on_device():
            self._drop_graphs()
            if self._pages is not None:
                self._pages.settle()
            self.sleeping = sleep_on_device(self._decoder, self._pool, self._adapters)

    def wake_up(self) -> None:
        """See StepExecutor. The largest CUDA graphs are captured again, others with the first step of their kind."""
        if self.sleeping is None:
            raise InvariantError("an executor wakes up that is not asleep")
        with self.step_scope():
            self.sleeping.restore()
            self.sleeping = None
            if self.graphs.is_enabled:
                self.capture_largest()

    def close(self) -> None:
        """Drop all CUDA graphs, so that their memory can be freed, and give up what is not compiled yet."""
        if self.compilation is not None:
            self.compilation.stop()
        self._drop_graphs()
        pages, self._pages, self.host_slab = self._pages, None, None
        if pages is not None:
            pages.settle()
