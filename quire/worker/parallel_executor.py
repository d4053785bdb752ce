"""LeaderExecutor: runs the steps of a model that tensor-parallel ranks share, and tells the other ranks what to do."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import DeviceLostError, InvariantError, QuireError, UnsupportedError, WorkerError
from quire.contracts.expert_options import EplbConfig
from quire.contracts.memory import MemoryPlan, format_bytes
from quire.contracts.rank_stats import RankStats
from quire.model.lora.adapter import Adapter
from quire.model.native_decoder import NativeDecoder
from quire.model.native_steps import OneTokenCall
from quire.parallel.barrier import AbortReason
from quire.parallel.expert_placement import ExpertPlacement
from quire.parallel.remote_workers import RemoteWorkers
from quire.parallel.worker_group import WorkerGroup
from quire.speculate.proposer import DraftInput
from quire.worker.cpu_executor import CpuStepExecutor
from quire.worker.expert_moves import ExpertMover
from quire.worker.expert_parallel import PlacedLoads, save_placements
from quire.worker.expert_rebalance import ExpertRebalancer
from quire.worker.parallel_messages import (
    Call,
    Changes,
    Encoded,
    StepCall,
    encode_adapter,
    encode_adapter_key,
    encode_changes,
    encode_expert_change,
    encode_one_token,
    encode_page_moves,
    encode_rows,
    encode_step,
)
from quire.worker.step_executor import Moves, StepTokens, TableEntry

_MAX_ADAPTER_BYTES = 2_000_000_000
"""Sizes in a message have 31 bits."""


class LeaderExecutor(CpuStepExecutor):
    """Implements StepExecutor on rank 0; every call that computes is sent to the workers first.

    decoder  rank 0's shard of the model
    memory   the plan of rank 0: its share of the KV cache
    rows_file  descriptor of the file of shared rows; closed with the executor
    shares     what each rank has of the weights, in parts
    release    called once when the executor is closed

    Where the group has ended, for example because a worker was killed, a call raises DeviceLostError with the reason.
    """

    def __init__(
        self,
        decoder: NativeDecoder,
        memory: MemoryPlan,
        max_num_seqs: int,
        workers: WorkerGroup | RemoteWorkers,
        rows_file: int,
        shares: Sequence[float],
    ) -> None:
        super().__init__(decoder, memory, max_num_seqs)
        self._shard, self._workers, self._rows_file = decoder, workers, rows_file
        self._shares = [share / sum(shares) for share in shares]
        self._changes: Changes | None = None
        self._is_moving = False  # pages, in a step that has not begun
        self._rebalancer: ExpertRebalancer | None = None
        self._mover: ExpertMover | None = None
        self._save_placement: Callable[[], None] | None = None
        self.release: Callable[[], None] | None = None
        # Ranks that divide the rows of a step bring them to rank 0, which has the whole model.
        decoder.mirror = self if decoder.is_sharded else None

    def begin_step(self, entries: Sequence[TableEntry], block_copies: Sequence[tuple[int, int]]) -> None:
        """See StepExecutor."""
        if entries or block_copies:
            with self._group():
                self._send_changes()
            self._changes = Changes(list(entries), list(block_copies))  # they go with the next message
        super().begin_step(entries, block_copies)

    def start_step(
        self,
        tokens: StepTokens,
        samples: bool,
        keeps_logits: bool,
        hidden_rows: Sequence[int],
        keeps_prompt_logits: bool,
        reads: Sequence[DraftInput],
    ) -> tuple[Tensor, list[int] | None]:
        """See StepExecutor."""
        keeps_all = keeps_prompt_logits or "final" in reads
        with self._group():
            if self._rebalancer is not None:
                self._rebalancer.advance()
            changes, self._changes = self._changes, None
            self._is_moving = False  # in a step the leader waits for the others, which then have moved their pages
            self._workers.ring.send(
                *encode_step(StepCall(tokens, list(hidden_rows), samples, keeps_logits, keeps_all, changes))
            )
            with nullcontext() if self._mover is None else self._mover.during_step():
                started = super().start_step(tokens, samples, keeps_logits, hidden_rows, keeps_prompt_logits, reads)
            if self._rebalancer is not None:
                self._rebalancer.note_step()
            return started

    def move_pages(self, step_id: int, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """See PageMover: every rank copies its part."""
        with self._group():
            self._send(encode_page_moves(saves, loads))
        self._is_moving = True
        super().move_pages(step_id, saves, loads)

    def flush(self) -> None:
        """See StepExecutor: every rank has moved its pages before this returns."""
        if self._is_moving:
            self._is_moving = False
            self._send_and_wait(Call.WAIT)

    def move_tokens(self, moves: Moves) -> None:
        """See StepExecutor."""
        with self._group():
            self._send(encode_rows(Call.MOVE_TOKENS, moves.sources, moves.targets))
        super().move_tokens(moves)

    def call_logits(self, rows: Sequence[int], run: Callable[[], None]) -> None:
        """Compute logits of rows that the last step kept, on all ranks; called by the decoder, see PlanMirror."""
        with self._group():
            self._send(encode_rows(Call.LOGITS, rows))
            run()

    def call_one_token(self, call: OneTokenCall, run: Callable[[], None]) -> None:
        """Run a pass of drafts by layer skipping on all ranks; called by OneTokenSteps, see PlanMirror."""
        with self._group():
            self._send(encode_one_token(call))
            run()

    def load_adapter(self, adapter: Adapter) -> None:
        """Add a LoRA adapter on all ranks, before their next step. Raises UnsupportedError if it is too large."""
        check_adapter_size(adapter)
        with self._group():
            self._send(encode_adapter(adapter))
            self._shard.adapters.load(adapter)

    def unload_adapter(self, key: str) -> None:
        """Remove a LoRA adapter on all ranks."""
        with self._group():
            self._send(encode_adapter_key(key))
            self._shard.adapters.unload(key)

    def sleep(self) -> None:
        """See StepExecutor: every rank does, before this returns."""
        self._send_and_wait(Call.SLEEP, super().sleep)

    def wake_up(self) -> None:
        """See StepExecutor: every rank does, before this returns."""
        self._send_and_wait(Call.WAKE_UP, super().wake_up)

    def close(self) -> None:
        """See StepExecutor: the workers end."""
        if self._save_placement is not None:
            self._save_placement()
            self._save_placement = None
        self._workers.close()
        super().close()
        del self._shard
        if self.release is not None:
            self.release()
            self.release = None
        if self._rows_file >= 0:
            os.close(self._rows_file)
            self._rows_file = -1

    def check_health(self) -> None:
        """See StepExecutor."""
        with self._group():
            self._workers.barrier.check()
            if self._rebalancer is not None:
                self._rebalancer.advance()

    def place_experts(
        self, placements: Mapping[int, ExpertPlacement], shares: Sequence[float], save: str | None = None
    ) -> None:
        """Say where the experts of each layer are, for their statistics; save: a file for it, written at the end."""
        self._placed = PlacedLoads(placements, shares)
        if save is not None:
            self._save_placement = functools.partial(save_placements, save, self._placed)

    def move_experts(self, mover: ExpertMover, options: EplbConfig) -> None:
        """Move experts between ranks from now on; after place_experts."""
        if self._placed is None:
            raise InvariantError("the experts are not placed on ranks")
        self._mover = mover
        self._rebalancer = ExpertRebalancer(
            mover,
            lambda change: self._send(encode_expert_change(change)),
            self._placed_tokens,
            self._placed,
            options,
            self._save_placement,
        )

    def rebalance_experts(self) -> bool:
        """Begin to balance the experts over the ranks by the load of the last steps; False: see ExpertRebalancer.start.
        After move_experts."""
        if self._rebalancer is None:
            raise InvariantError("experts do not move: move_experts was not called")
        return self._rebalancer.start()

    def _placed_tokens(self) -> dict[int, NDArray[np.int64]]:
        """Return the tokens so far of the experts of each layer that has any."""
        return {layer: np.array(counts) for layer, counts in enumerate(self._expert_tokens()) if counts}

    def rank_stats(self) -> list[RankStats]:
        """See StepExecutor."""
        return [replace(stats, share=share) for stats, share in zip(self._workers.stats(), self._shares, strict=True)]

    @property
    def worker_pids(self) -> dict[int, int]:
        """The processes of the workers by rank."""
        return self._workers.pids

    def _send_changes(self) -> None:
        """Send changes that no step has followed."""
        changes, self._changes = self._changes, None
        if changes is not None:
            self._workers.ring.send(*encode_changes(changes))

    def _send_and_wait(self, call: Call, run: Callable[[], None] = lambda: None) -> None:
        with self._group():
            self._send(([call], []))
            run()
            self._workers.communicator.barrier()

    def _send(self, message: Encoded) -> None:
        self._send_changes()
        self._workers.ring.send(*message)

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Turn an error of a call into the reason why the group has ended. A call that fails on one rank ends the group, as
        the other ranks wait for it."""
        try:
            yield
        except Exception as error:
            barrier = self._workers.barrier
            if barrier.abort_cause is None:
                text = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
                barrier.abort(0, AbortReason.FAILED, f"{barrier.describe_rank(0)} failed: {text}")
            try:
                barrier.check()
            except WorkerError as reason:
                raise DeviceLostError(str(reason), reason.rank) from error
            raise


def check_adapter_size(adapter: Adapter) -> None:
    """Raise UnsupportedError for a LoRA adapter that does not fit into a message."""
    if adapter.num_bytes > _MAX_ADAPTER_BYTES:
        raise UnsupportedError(
            f"the adapter has {format_bytes(adapter.num_bytes)}, but at most {format_bytes(_MAX_ADAPTER_BYTES)} can go to "
            "tensor-parallel ranks and pipeline stages: take a lower rank, or merge it into the weights"
        )


class LoadsAdapters(Protocol):
    """An executor that adds LoRA adapters on all ranks."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Add a LoRA adapter, before the next step. Raises UnsupportedError."""
        ...

    def unload_adapter(self, key: str) -> None:
        """Remove a LoRA adapter."""
        ...


class GroupAdapters:
    """Implements AdapterHolder on all ranks of a group."""

    def __init__(self, leader: LoadsAdapters) -> None:
        self._leader = leader

    def load(self, adapter: Adapter) -> None:
        """See AdapterHolder."""
        self._leader.load_adapter(adapter)

    def unload(self, key: str) -> None:
        """See AdapterHolder."""
        self._leader.unload_adapter(key)
