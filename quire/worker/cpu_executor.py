"""CpuStepExecutor: runs the steps of a model in this process, on the CPU; those of the transformers library on a GPU too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.expert_stats import ExpertStats
from quire.contracts.memory import MemoryPlan, ModelReport
from quire.contracts.rank_stats import RankStats
from quire.kernels.peaks import SHORT, measure_peaks
from quire.kernels.reference.block_scores import attention_by_block, key_norms
from quire.kernels.reference.recurrent import StateRows
from quire.kv.page_supply import PageSupply
from quire.kv.pool import KvPool
from quire.kv.tiers.host_slab import HostSlab, PagePart
from quire.model.build import Model
from quire.model.decoder import Decoder
from quire.model.native_decoder import NativeDecoder
from quire.model.token_runs import TokenRuns, address_of
from quire.model.transformers_backend.decoder import TransformersDecoder
from quire.sampling.sampler import Draw
from quire.speculate.proposer import DraftInput
from quire.speculate.target import Target
from quire.worker.expert_parallel import PlacedLoads, expert_stats, with_routing_counts
from quire.worker.state_table import StateTable
from quire.worker.step_executor import NO_FAILURES, Moves, ObservedToken, SlotSampling, StepTokens, TableEntry

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
        self._context = decoder.context if isinstance(decoder, NativeDecoder) else None
        self._kv = KvPool(memory.kv, memory.num_local_blocks, memory.num_states, device, memory.num_window_blocks)
        self.first_window_block = None if memory.kv.window_tokens is None else memory.num_kv_blocks
        self.has_states = decoder.spec.has_recurrent_state
        is_native = isinstance(decoder, NativeDecoder)
        self._num_checkpoints = memory.num_state_checkpoints
        self._states = StateTable(max_num_seqs, memory.num_states, memory.num_state_checkpoints, copies_starts=is_native)
        self._draft_pools: Sequence[KvPool] = ()
        self._pages = PageSupply(self._kv)  # see take_pages
        self.block_size, self.vocab_size = memory.kv.block_size, decoder.spec.vocab_size
        self.has_rope_variants = decoder.spec.rope_switch_len(memory.max_model_len) is not None
        self.block_tables = np.zeros((max_num_seqs, memory.table_width), dtype=np.int64)
        # Asked for once: the address of an array takes longer to find than a native call.
        self._tables = list(self.block_tables)
        self._addresses = [address_of(table) for table in self._tables]
        # The native decoder uses no torch operations, so it needs no inference mode.
        self._inference = None if isinstance(decoder, NativeDecoder) else torch.inference_mode()
        self._keeps_all, self._logit_rows = False, list[int]()  # of the last step
        self.host_slab: HostSlab | None = None
        self._observed: list[Tensor] = []  # of each layer, the queries of the last step that are observed
        self._placed: PlacedLoads | None = None  # where experts are placed on ranks

    @property
    def target(self) -> Target:
        """The model and its cache, for proposers that draft with them."""
        return Target(self._decoder, self._kv)

    def take_pages(self, draft_pools: Sequence[KvPool]) -> None:
        """Take the first memory pages of the pool, and of draft_pools, which have the same block ids, from the system."""
        self._draft_pools = draft_pools
        # Where ranks share the tokens of sequences, the blocks of a rank have other numbers than those of draft_pools.
        self._pages = PageSupply(self._kv, *(draft_pools if self._context is None else ()))
        self._pages.start()

    def open_host_tier(
        self, num_pages: int, is_shared: bool = False, part: PagePart | None = None, slab: HostSlab | None = None
    ) -> None:
        """Make the slab of the host tier, if it has any pages; see HostSlab.

        slab  with its pages, that another executor of the same model had
        """
        if slab is not None:
            slab.attach(self._kv)
            self.host_slab = slab
        elif num_pages > 0:
            self.host_slab = HostSlab(self._kv, num_pages, is_shared, part, num_checkpoints=self._num_checkpoints)

    def move_pages(self, step_id: int, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
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
            self._pages.use(block_ids if self._context is None else self._context.local(block_ids))
        copies = block_copies
        if self._context is not None:
            # Both blocks of a copy have the same index in their tables, and so are on the same rank.
            copies = list(zip(*(self._context.local(ids) for ids in zip(*block_copies, strict=True)), strict=True))
        if copies:
            self._kv.copy_blocks(tuple(copies))

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
        token_ids, starts, ends, batch_slots, logit_rows, _, trees, short_ropes, _, adapters, num_dropped, bounds = tokens
        if num_dropped is not None:
            ends = [end - dropped for end, dropped in zip(ends, num_dropped, strict=True)]
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
                self._place_states(tokens) if self.has_states else None,
                adapters,
                num_dropped,
                bounds,
            ),
            self._kv,
            logit_rows,
            list(hidden_rows) if hidden_rows else None,
            keeps_all=keeps_all,
            wants_best=samples,
            needs_logits=keeps_logits,
        )

    def _place_states(self, tokens: StepTokens) -> StateRows:
        rows = self._states.place(tokens)
        self._kv.copy_states(self._states.take_copies())
        return rows

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

    def observe_attention(self, rows: Sequence[int]) -> None:
        """See BlockScorer."""
        self._observed = self._scoring_decoder.copy_queries(rows)

    def take_observed(self, places: Sequence[ObservedToken]) -> list[Tensor]:
        """See BlockScorer."""
        decoder, size = self._scoring_decoder, self.block_size
        found = [torch.zeros(one.place // size + 1, dtype=torch.float64) for one in places]
        for index, (layer, queries) in enumerate(zip(decoder.spec.layers, self._observed, strict=True)):
            source = index if layer.attention.kv_source is None else layer.attention.kv_source
            keys: dict[int, Tensor] = {}  # by batch slot, those of the last place, which the others see in part
            for one in places:
                longest = max(other.place for other in places if other.batch_slot == one.batch_slot)
                if one.batch_slot not in keys:
                    blocks = torch.from_numpy(self.block_tables[one.batch_slot, : longest // size + 1])
                    keys[one.batch_slot] = decoder.cached_keys(self._kv, source, blocks)
            for row, one in enumerate(places):
                seen = keys[one.batch_slot][:, : one.place + 1]
                found[row] += attention_by_block(queries[row], seen, layer.attention, size)
        self._observed = []
        return found

    def score_key_norms(self, block_ids: Sequence[int]) -> tuple[float, ...]:
        """See BlockScorer."""
        decoder, blocks = self._scoring_decoder, torch.tensor(block_ids, dtype=torch.int64)
        total, num_heads = torch.zeros(len(block_ids), dtype=torch.float64), 0
        for layer, (heads, _) in enumerate(self._kv.spec.layer_shapes):
            if heads > 0:
                total += key_norms(decoder.cached_keys(self._kv, layer, blocks), self.block_size)
                num_heads += heads
        return tuple((-total / (num_heads * self.block_size)).tolist())

    def run_counts(self) -> tuple[int, int]:
        """See BlockScorer."""
        return self._scoring_decoder.run_counts

    @property
    def _scoring_decoder(self) -> Decoder | NativeDecoder:
        if not isinstance(self._decoder, Decoder | NativeDecoder):
            raise InvariantError(f"{type(self._decoder).__name__} does not score blocks")
        return self._decoder

    def measure_peaks(self, report: ModelReport) -> tuple[float, float]:
        """See StepExecutor."""
        peaks = measure_peaks(report, SHORT)
        return peaks.bytes_per_s, peaks.flops_per_s

    def expert_stats(self) -> list[ExpertStats]:
        """See StepExecutor."""
        stats = expert_stats(self._expert_tokens(), self._placed)
        if not stats or not isinstance(self._decoder, NativeDecoder):
            return stats
        return with_routing_counts(stats, self._decoder.plan.routing_counts())

    def _expert_tokens(self) -> list[list[int]]:
        """Return the tokens of each expert of each layer; of layers without experts, and where torch runs the model, empty."""
        return self._decoder.plan.expert_tokens() if isinstance(self._decoder, NativeDecoder) else []

    def rank_stats(self) -> list[RankStats]:
        """See StepExecutor."""
        return []

    def check_health(self) -> None:
        """See StepExecutor: it is the only process."""

    def sleep(self) -> None:
        """See StepExecutor. The weights stay: the host is where they are."""
        self._pages.close()
        for pool in (self._kv, *self._draft_pools):
            pool.drop()

    def wake_up(self) -> None:
        """See StepExecutor."""
        self.take_pages(self._draft_pools)

    def close(self) -> None:
        """See StepExecutor."""
        self._pages.close()
        self._draft_pools = ()
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
