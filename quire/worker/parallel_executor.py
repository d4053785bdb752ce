"""LeaderExecutor: runs the steps of a model that tensor-parallel ranks share, and tells the other ranks what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from quire.base.errors import DeviceLostError, QuireError, WorkerError
from quire.contracts.memory import MemoryPlan
from quire.contracts.rank_stats import RankStats
from quire.model.native_decoder import NativeDecoder
from quire.model.native_steps import OneTokenCall
from quire.parallel.barrier import AbortReason
from quire.parallel.remote_workers import RemoteWorkers
from quire.parallel.worker_group import WorkerGroup
from quire.speculate.proposer import DraftInput
from quire.worker.cpu_executor import CpuStepExecutor
from quire.worker.parallel_messages import (
    Call,
    Changes,
    Encoded,
    StepCall,
    encode_changes,
    encode_one_token,
    encode_page_moves,
    encode_rows,
    encode_step,
)
from quire.worker.step_executor import Moves, StepTokens, TableEntry


class LeaderExecutor(CpuStepExecutor):
    """Implements StepExecutor on rank 0; every call that computes is sent to the workers first.

    decoder  rank 0's shard of the model
    memory   the plan of rank 0: its share of the KV cache
    rows_file  descriptor of the file of shared rows; closed with the executor
    shares     what each rank has of the weights, in parts

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
        self._workers, self._rows_file = workers, rows_file
        self._shares = [share / sum(shares) for share in shares]
        self._changes: Changes | None = None
        decoder.mirror = self

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
            changes, self._changes = self._changes, None
            self._workers.ring.send(
                *encode_step(StepCall(tokens, list(hidden_rows), samples, keeps_logits, keeps_all, changes))
            )
            return super().start_step(tokens, samples, keeps_logits, hidden_rows, keeps_prompt_logits, reads)

    def move_pages(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """See PageMover: every rank copies its part."""
        with self._group():
            self._send(encode_page_moves(saves, loads))
        super().move_pages(saves, loads)

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

    def close(self) -> None:
        """See StepExecutor: the workers end."""
        self._workers.close()
        super().close()
        if self._rows_file >= 0:
            os.close(self._rows_file)
            self._rows_file = -1

    def check_health(self) -> None:
        """See StepExecutor."""
        with self._group():
            self._workers.barrier.check()

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
