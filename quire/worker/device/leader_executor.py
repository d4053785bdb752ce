"""LeaderGpuExecutor: runs the steps of a model that several GPUs share, and tells the other ranks what to launch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import DeviceLostError, InvariantError, QuireError, WorkerError
from quire.contracts.expert_options import EplbConfig
from quire.contracts.expert_stats import ExpertStats
from quire.contracts.rank_stats import RankStats
from quire.kernels.triton.step import AttentionLibrary
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_routing import RoutingCounts
from quire.model.lora.adapter import Adapter
from quire.model.lora.device_adapters import DeviceAdapters
from quire.parallel.barrier import AbortReason
from quire.parallel.remote_workers import RemoteWorkers
from quire.parallel.worker_group import WorkerGroup
from quire.sampling.row_state import SamplingRow
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.device_sampler import SampledRows
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.gpu_group import GpuGroup
from quire.worker.device.graphs import StepGraphs
from quire.worker.device.host_step import HostStep, Sampling
from quire.worker.device.launched_step import Kept, Launched, StepSizes
from quire.worker.device.staged_call import StagedCall, encode_staged
from quire.worker.expert_moves import ExpertChange, ExpertMover
from quire.worker.expert_parallel import add_pairs
from quire.worker.expert_rebalance import ExpertRebalancer
from quire.worker.parallel_executor import check_adapter_size
from quire.worker.parallel_messages import Call, encode_adapter, encode_adapter_key, encode_expert_change, encode_page_moves

_SPINS = 200
_PAUSE_S = 2e-5
_NOTHING = Kept()


class LeaderGpuExecutor(GpuStepExecutor):
    """Implements StepExecutor on rank 0. Every call that computes is sent to the workers, then made here.

    All ranks sample the same tokens, as they have the same logits and noise; only this one reads them. With pipeline stages
    these are the ranks of the last one.
    Where the group has ended, for example because a worker was killed, a call raises DeviceLostError with the reason. So it
    does where a call fails here: the other ranks would wait for this one for ever.
    """

    def __init__(
        self,
        decoder: DeviceDecoder,
        pool: DeviceKvPool,
        sizes: StepSizes,
        graphs: StepGraphs,
        library: AttentionLibrary | None,
        group: GpuGroup,
        adapters: DeviceAdapters | None = None,
    ) -> None:
        if group.workers is None:
            raise InvariantError("the leader of a group has workers")
        self._group, self._workers, self._is_leading = group, group.workers, False
        self._num_kept = 0  # steps whose hidden states are kept
        self._page_moves: deque[tuple[int, bool]] = deque()  # not ended on all ranks: the step, and whether it loads pages
        self._num_moved = self._num_moved_here = 0
        self._rebalancer: ExpertRebalancer | None = None
        self._pairs_path: str | None = None
        super().__init__(decoder, pool, sizes, graphs, library, adapters)

    def lead(self) -> None:
        """Tell the workers of every call from now on. Before, all ranks make the same calls by themselves."""
        self._is_leading = True

    @property
    def workers(self) -> WorkerGroup | RemoteWorkers:
        """The other ranks."""
        return self._workers

    @property
    def _num_hosts(self) -> int:
        """Hosts of as many consecutive ranks each; 1 where they are not so."""
        hosts = () if self._group.ranks is None else self._group.ranks.hosts
        number = len(set(hosts)) or 1
        size = len(hosts) // number
        return number if hosts == tuple(rank // size * size for rank in range(len(hosts))) else 1

    @property
    def stage_times(self) -> None:
        """See StageExecutor of pipelined_driver.py: no stage waits for its device to be measured."""

    @property
    def worker_pids(self) -> dict[int, int]:
        """The processes of the workers by rank."""
        return self._workers.pids

    def launch(self, step: HostStep | None, sampling: Sampling, changes: BlockTableUpdates, kept: Kept = _NOTHING) -> Launched:
        """See GpuStepExecutor."""
        with self._scope():
            if self._rebalancer is not None:
                self._rebalancer.advance()
            launched = super().launch(step, sampling, changes, kept)
            if self._rebalancer is not None and step is not None:
                self._rebalancer.note_step()
            if launched.logits is None and launched.hidden is None:
                return launched
            logits, hidden = (None if each is None else self.kept(each) for each in (launched.logits, launched.hidden))
            place = self._num_kept % self.max_in_flight
            self._num_kept += hidden is not None
            return launched._replace(logits=logits, hidden=hidden, place=place)

    def save_pairs(self, path: str | None) -> None:
        """Add the tokens that chose two experts to this file of loads at the end, where they are counted."""
        self._pairs_path = path

    def move_experts(self, mover: ExpertMover, options: EplbConfig) -> None:
        """Move experts between ranks from now on; after place_experts."""
        if self._placed is None:
            raise InvariantError("the experts are not placed on ranks")
        self._rebalancer = ExpertRebalancer(
            mover, self._send_change, self._placed_tokens, self._placed, options, self._save_placement, self._num_hosts
        )

    def rebalance_experts(self) -> bool:
        """Begin to balance the experts over the ranks by the load of the last steps; False: see ExpertRebalancer.start.
        After move_experts."""
        if self._rebalancer is None:
            raise InvariantError("experts do not move: move_experts was not called")
        return self._rebalancer.start()

    def _send_change(self, change: ExpertChange | None) -> None:
        self._workers.ring.send(*encode_expert_change(change))

    def flush(self) -> None:
        """See StepExecutor."""
        with self._scope():
            super().flush()

    def read_rows(self, launched: Launched) -> SampledRows:
        """See GpuStepExecutor."""
        with self._scope():
            return super().read_rows(launched)

    def logits_at(self, started: Launched, first: int, last: int) -> Tensor:
        """See StepExecutor. Each rank has the hidden states of the last steps that kept them."""
        with self._scope():
            if self._is_leading:
                numbers = [] if started.adapters is None else [started.adapters[first:last]]
                self._workers.ring.send([Call.LOGITS, first, last, started.place], numbers)
            return super().logits_at(started, first, last)

    def takes_masked(self, row: SamplingRow) -> bool:
        """See RowProcessor: the other ranks get no masks."""
        return False

    def load_adapter(self, adapter: Adapter) -> None:
        """Add a LoRA adapter on all ranks, before their next step. Raises UnsupportedError if it is too large."""
        check_adapter_size(adapter)
        holder = self._adapters_here()
        holder.load(adapter)  # checks it: an error of a worker would end the group
        with self._scope():
            self._workers.ring.send(*encode_adapter(adapter))

    def unload_adapter(self, key: str) -> None:
        """Remove a LoRA adapter on all ranks."""
        self._adapters_here().unload(key)
        with self._scope():
            self._workers.ring.send(*encode_adapter_key(key))

    def _adapters_here(self) -> DeviceAdapters:
        if self._adapters is None:
            raise InvariantError("the decoder takes no adapters")
        return self._adapters

    def move_pages(self, step_id: int, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """See PageMover: every rank copies its share of each page."""
        with self._scope():
            _, arrays = encode_page_moves(saves, loads)
            self._workers.ring.send([Call.MOVE_PAGES], arrays)
            super().move_pages(step_id, saves, loads)
        self._page_moves.append((step_id, bool(loads)))

    def use_blocks(self, block_ids: Sequence[int]) -> None:
        """See GpuStepExecutor. Another rank may still load pages that this one has loaded."""
        with self._scope():
            if block_ids and any(has_loads for _, has_loads in self._page_moves):
                self._workers.ring.send([Call.USE_BLOCKS], [np.array(block_ids, np.int64)])
            super().use_blocks(block_ids)

    def take_moved(self, waits: bool) -> tuple[int, ...]:
        """See AsyncPageMover: a move is done when it is on all ranks, which say so when they get a message."""
        with self._scope():
            has_others = waits and bool(self._page_moves)
            if has_others:
                self._workers.ring.send([Call.SETTLE_PAGES])
            self._num_moved_here += len(super().take_moved(waits))
            if has_others:
                self._workers.communicator.barrier()
        moves = self._group.moves
        if moves is None:
            return ()
        moves.set(0, self._num_moved_here)
        count = moves.least() - self._num_moved
        self._num_moved += count
        return tuple(self._page_moves.popleft()[0] for _ in range(count))

    def expert_stats(self) -> list[ExpertStats]:
        """See GpuStepExecutor."""
        with self._scope():
            return super().expert_stats()

    def _expert_counts(self) -> list[RoutingCounts | None]:
        """See GpuStepExecutor. With stages every rank counts its layers, when it has run what was launched."""
        if self._stage is None or not self._group.has_counts:
            return super()._expert_counts()
        self._workers.ring.send([Call.COUNT_EXPERTS])
        return self._group.gather_counts(self.own_expert_counts())

    def rank_stats(self) -> list[RankStats]:
        """See StepExecutor. The collectives on the devices are those of this rank: all ranks of a stage make the same."""
        found = self._workers.stats()
        found[0] = replace(found[0], collectives=self._group.collectives())
        shares, places = self._group.shares, self._group.places if self._stage is not None else {}
        parts = [place.describe() for place in places.values()] or [""] * len(found)
        parted = zip(found, shares, parts, strict=True)
        return [replace(stats, share=share, part=part) for stats, share, part in parted]

    def check_health(self) -> None:
        """See StepExecutor."""
        with self._scope():
            self._workers.barrier.check()
            if self._rebalancer is not None and self.sleeping is None:
                self._rebalancer.advance()

    def sleep(self) -> None:
        """See StepExecutor: every rank does, before this returns."""
        with self._scope():
            self._workers.ring.send([Call.SLEEP])
            super().sleep()
            self._workers.communicator.barrier()

    def wake_up(self) -> None:
        """See StepExecutor: every rank does, before this returns. All ranks capture the same CUDA graphs by themselves."""
        with self._scope():
            self._workers.ring.send([Call.WAKE_UP])
            self._is_leading = False
            try:
                super().wake_up()
            finally:
                self._is_leading = True
            self._workers.communicator.barrier()

    def close(self) -> None:
        """See StepExecutor: the workers end."""
        cause = self._workers.barrier.abort_cause
        if self._save_placement is not None:
            self._save_placement()
            self._save_placement = None
        if self._pairs_path is not None and cause is None and isinstance(self._decoder, DeviceDecoder):
            self._wait_for_steps()
            pairs = self._decoder.expert_pairs()
            if pairs:
                add_pairs(self._pairs_path, {layer: each.tolist() for layer, each in pairs.items()})
        self._pairs_path = None
        self._workers.close()
        self._drop_graphs()  # NCCL waits for those that have its collectives when its communicators go
        if cause is None:  # else the device may wait for a rank that is gone, and so would who frees its memory
            super().close()
        self._group.close()

    def give_pool(self, pool: DeviceKvPool, num_states: int = 0, num_checkpoints: int = 0) -> None:
        """See GpuStepExecutor. There are no recurrent states: models that have them run on one GPU."""
        self._drop_graphs()
        self._use(pool)

    def _publish(self, call: StagedCall, staged: NDArray[np.uint8]) -> None:
        if self._is_leading:
            self._workers.ring.send(*encode_staged(call, staged))

    def _wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for an event, and see when the group has ended: then it may never come."""
        for _ in range(_SPINS):
            if event.query():
                return
        timeout_s, began_s = self._group.timeout_s, time.monotonic()
        while not event.query():
            self._workers.barrier.check()
            if timeout_s is not None and time.monotonic() - began_s > timeout_s:
                reason = "a rank is stopped, or a host cannot be reached"
                raise WorkerError(f"no step has ended for {timeout_s:g} s (distributed_timeout_s): {reason}", 0)
            time.sleep(_PAUSE_S)

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """Turn an error of a call into the reason why the group has ended, and end it where this rank is at fault."""
        try:
            yield
        except Exception as error:
            if not self._is_leading:
                raise
            barrier = self._workers.barrier
            if barrier.abort_cause is None:
                text = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
                barrier.abort(0, AbortReason.FAILED, f"{barrier.describe_rank(0)} failed: {text}")
            try:
                barrier.check()
            except WorkerError as reason:
                raise DeviceLostError(self._group.describe_end(reason), reason.rank) from error
            raise
