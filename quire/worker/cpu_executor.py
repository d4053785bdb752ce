"""CpuStepExecutor: runs the steps of a model in this process, on the CPU; those of the transformers library on a GPU too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.memory import MemoryPlan, ModelReport
from quire.contracts.rank_stats import RankStats
from quire.kernels.peaks import SHORT, measure_peaks
from quire.kv.page_supply import PageSupply
from quire.kv.pool import KvPool
from quire.kv.tiers.host_slab import HostSlab
from quire.model.build import Model
from quire.model.native_decoder import NativeDecoder
from quire.model.token_runs import TokenRuns, address_of
from quire.model.transformers_backend.decoder import TransformersDecoder
from quire.sampling.sampler import Draw
from quire.speculate.proposer import DraftInput
from quire.speculate.target import Target
from quire.worker.state_table import StateTable
from quire.worker.step_executor import NO_FAILURES, Moves, SlotSampling, StepTokens, TableEntry

_Started = tuple[Tensor, list[int] | None]
"""The logits of a step, and the best token of each row; None: not known."""


class CpuStepExecutor:
    """Implements StepExecutor over a decoder for the CPU. A step has run when start_step returns.

    It only finds best tokens: the native decoder does so without writing logits. Everything else is sampled by the driver.
    """

    has_sampler = False
    max_in_flight = 1
    draw: Draw | None = None

    def __init__(self, decoder: Model, memory: MemoryPlan, max_num_seqs: int) -> None:
        self._decoder = decoder
        device = decoder.device if isinstance(decoder, TransformersDecoder) else None
        self._kv = KvPool(memory.kv, memory.num_kv_blocks, memory.num_states, device)
        self.has_states = decoder.spec.has_recurrent_state
        self._states = StateTable(max_num_seqs, memory.num_states, memory.num_state_checkpoints)
        self._pages = PageSupply(self._kv)  # see take_pages
        self.block_size, self.vocab_size = memory.kv.block_size, decoder.spec.vocab_size
        self.has_rope_variants = decoder.spec.rope_switch_len(memory.max_model_len) is not None
        # No sequence has more blocks than the pool, however long the model would let it become.
        max_blocks = min(-(-memory.max_model_len // memory.kv.block_size), memory.num_kv_blocks)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        # Asked for once: the address of an array takes longer to find than a native call.
        self._tables = list(self.block_tables)
        self._addresses = [address_of(table) for table in self._tables]
        # The native decoder uses no torch operations, so it needs no inference mode.
        self._inference = None if isinstance(decoder, NativeDecoder) else torch.inference_mode()
        self._keeps_all, self._logit_rows = False, list[int]()  # of the last step
        self.host_slab: HostSlab | None = None

    @property
    def target(self) -> Target:
        """The model and its cache, for proposers that draft with them."""
        return Target(self._decoder, self._kv)

    def take_pages(self, draft_pools: Sequence[KvPool]) -> None:
        """Take the first memory pages of the pool, and of draft_pools, which have the same block ids, from the system."""
        self._pages = PageSupply(self._kv, *draft_pools)
        self._pages.start()

    def open_host_tier(self, num_pages: int) -> None:
        """Make the slab of the host tier, if it has any pages."""
        if num_pages > 0:
            self.host_slab = HostSlab(self._kv, num_pages)

    def move_pages(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """See PageMover."""
        if self.host_slab is None:
            raise InvariantError("a step saves or loads pages, but there is no host tier")
        self.host_slab.move(saves, loads)

    def step_scope(self) -> AbstractContextManager[object]:
        """See StepExecutor. Memory pages are taken from the system only outside of it."""
        return self._pages if self._inference is None else _TorchScope(self._pages, self._inference)

    def set_sampling(self, batch_slot: int, sampling: SlotSampling) -> None:
        """See StepExecutor: best tokens need no options."""

    def begin_step(self, entries: Sequence[TableEntry], block_copies: Sequence[tuple[int, int]]) -> None:
        """See StepExecutor."""
        for _, _, block_ids in entries:
            self._pages.use(block_ids)
        if block_copies:
            self._kv.copy_blocks(tuple(block_copies))

    def flush(self) -> None:
        """See StepExecutor: changes are made at once."""

    def start_step(
        self,
        tokens: StepTokens,
        samples: bool,
        keeps_logits: bool,
        hidden_rows: Sequence[int],
        keeps_prompt_logits: bool,
        reads: Sequence[DraftInput],
    ) -> _Started:
        """See StepExecutor."""
        token_ids, starts, ends, batch_slots, logit_rows, _, trees, short_ropes, _ = tokens
        tables, addresses = self._tables, self._addresses
        self._keeps_all = keeps_all = keeps_prompt_logits or "final" in reads
        self._logit_rows = logit_rows
        return self._decoder.run(
            TokenRuns(
                token_ids,
                starts,
                ends,
                [tables[batch_slot] for batch_slot in batch_slots],
                [addresses[batch_slot] for batch_slot in batch_slots],
                trees,
                short_ropes,
                self._states.place(tokens) if self.has_states else None,
            ),
            self._kv,
            logit_rows,
            list(hidden_rows) if hidden_rows else None,
            keeps_all=keeps_all,
            wants_best=samples,
            needs_logits=keeps_logits,
        )

    def take_sampled(self, started: _Started) -> tuple[Sequence[int] | None, Mapping[int, str]]:
        """See StepExecutor. Where a row has no best token, the sampler says what is wrong with its logits."""
        best = started[1]
        return (None if best is None or min(best, default=0) < 0 else best), NO_FAILURES

    def logits(self, started: _Started) -> Tensor:
        """See StepExecutor."""
        return started[0]

    def logits_at(self, started: _Started, first: int, last: int) -> Tensor:
        """See StepExecutor."""
        return self._decoder.logits_at(first, last)

    def hidden_states(self, started: _Started, hidden_rows: Sequence[int]) -> Callable[[int, int], Tensor]:
        """See StepExecutor."""
        return self._decoder.hidden_states

    def features(self, what: DraftInput, rows: Sequence[int]) -> Tensor:
        """See StepExecutor."""
        if what == "layers":
            return self._decoder.layer_inputs(rows)
        if what == "last" and self._keeps_all:
            rows = [self._logit_rows[place] for place in rows]
        return self._decoder.final_states(rows)

    def keep_inputs(self, layers: tuple[int, ...]) -> None:
        """See StepExecutor."""
        self._decoder.keep_inputs(layers)

    def move_tokens(self, moves: Moves) -> None:
        """See StepExecutor."""
        self._decoder.move_tokens(self._kv, torch.tensor(moves.sources), torch.tensor(moves.targets))

    def measure_peaks(self, report: ModelReport) -> tuple[float, float]:
        """See StepExecutor."""
        peaks = measure_peaks(report, SHORT)
        return peaks.bytes_per_s, peaks.flops_per_s

    def rank_stats(self) -> list[RankStats]:
        """See StepExecutor."""
        return []

    def check_health(self) -> None:
        """See StepExecutor: it is the only process."""

    def close(self) -> None:
        """See StepExecutor."""
        self._pages.close()
        self.host_slab = None
        del self._decoder, self._kv


class _TorchScope:
    """The context of a step that torch runs."""

    def __init__(self, pages: PageSupply, inference: torch.inference_mode) -> None:
        self._pages, self._inference = pages, inference

    def __enter__(self) -> None:
        self._pages.__enter__()
        self._inference.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._inference.__exit__(kind, error, traceback)
        self._pages.__exit__()
