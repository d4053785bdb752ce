"""StepDecoder: the rows of a step, for decoders that compute it with torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.reference.attention import AttentionMetadata, move_kv
from quire.kv.pool import KvPool
from quire.model.token_runs import TokenRuns


class StepDecoder(ABC):
    """Runs steps by `forward` and `logits` of a subclass, and keeps the hidden states of the last one.

    Hidden states stay on the device of the model; logits and what `hidden_states` and `final_states` return are on the CPU.
    """

    def __init__(self) -> None:
        self._hidden: Tensor | None = None
        self._hidden_rows: list[int] = []
        self._kept_rows: list[int] | None = None
        self.run_counts: tuple[int, int] = (0, 0)
        """Runs that might have been skipped, and that were; see RunSkips."""

    @abstractmethod
    def forward(
        self, token_ids: Tensor, positions: Tensor, step: AttentionMetadata, kv: KvPool, layers: Sequence[int] | None = None
    ) -> Tensor:
        """Compute the tokens of one step and store their KV.

        token_ids, positions  [T] i64, the sequences of the step one after the other
        layers                the layers to run, in order; None: all
        Returns               [T, hidden_size], after the final norm
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of rows of `forward`'s result, in the model's dtype."""

    def step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        step: AttentionMetadata,
        kv: KvPool,
        logit_rows: list[int],
        keeps_all: bool = False,
        hidden_rows: list[int] | None = None,
        layers: Sequence[int] | None = None,
    ) -> Tensor:
        """Compute the tokens of one step and return the logits [R, vocab_size] of the rows in `logit_rows`.

        keeps_all    logits_at may ask for other rows before the next step
        hidden_rows  other rows, of which hidden_states may ask for some
        layers       the layers to run, in order; None: all. The KV of the others is left as it is
        """
        hidden = self.forward(token_ids, positions, step, kv, layers)
        self._hidden = hidden if keeps_all or hidden_rows else None
        self._hidden_rows = hidden_rows or []
        return self.logits_of(hidden, torch.tensor(logit_rows, dtype=torch.int64))

    def logits_of(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of the tokens `rows` [R] i64 of the last step, given the result of `forward`."""
        return self.logits(hidden[rows])

    def run(
        self,
        runs: TokenRuns,
        kv: KvPool,
        logit_rows: list[int],
        hidden_rows: list[int] | None = None,
        *,
        keeps_all: bool = False,
        wants_best: bool = False,
        needs_logits: bool = True,
    ) -> tuple[Tensor, list[int] | None]:
        """As `step`, of runs of tokens; None in place of the best tokens: only the native decoder finds them on the way."""
        self._kept_rows = None if keeps_all else logit_rows
        tokens = runs.tensors(kv.spec.block_size, has_windows=kv.spec.window_tokens is not None)
        logits = self.step(*tokens, kv, logit_rows, True, hidden_rows)
        if tokens[2].skips is not None:
            looked, skipped = tokens[2].skips.counts
            self.run_counts = self.run_counts[0] + looked, self.run_counts[1] + skipped
        return logits, None

    def move_tokens(self, kv: KvPool, sources: Tensor, targets: Tensor) -> None:
        """Copy the KV of the slots `sources` [N] i64 to `targets` in every layer; all are read before any is written."""
        flags = kv.spec.is_windowed or (False,) * len(kv.k)
        for is_windowed, own_sources, own_targets in kv.split_slots(sources, targets):
            for k_cache, v_cache, flag in zip(kv.k, kv.v, flags, strict=True):
                if flag is is_windowed:
                    move_kv(k_cache, v_cache, own_sources, own_targets)

    def cached_keys(self, kv: KvPool, layer: int, block_ids: Tensor) -> Tensor:
        """Return the keys [K, N * block_size, D] f32, as queries meet them, of N blocks of a layer with a cache of its own."""
        return kv.k[layer][block_ids].transpose(0, 1).flatten(1, 2).float()

    def logits_at(self, first: int, last: int) -> Tensor:
        """Return the logits of rows [first, last) of the last step, which kept all."""
        return self.logits(self._kept()[first:last])

    def hidden_states(self, first: int, last: int) -> Tensor:
        """Return the hidden states [last - first, hidden_size] f32, after the final norm, of a run of the last hidden_rows."""
        return self._kept()[torch.tensor(self._hidden_rows[first:last], dtype=torch.int64)].float().cpu()

    def final_states(self, places: Sequence[int]) -> Tensor:
        """Return the hidden states [R, hidden_size] f32, after the final norm, of rows of the last `run`: the indices of
        tokens where it kept all, else places in its logit_rows."""
        rows = places if self._kept_rows is None else [self._kept_rows[place] for place in places]
        return self._kept()[torch.tensor(rows, dtype=torch.int64)].float().cpu()

    def _kept(self) -> Tensor:
        if self._hidden is None:
            raise InvariantError("the last step did not keep its rows")
        return self._hidden
