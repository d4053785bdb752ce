"""LayerProbe: measures how well a model without some of its layers predicts the whole model's tokens, and its step time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from quire.base.errors import ConfigError
from quire.contracts.kv_spec import KvSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kv.pool import KvPool
from quire.model.build import Model
from quire.model.native_decoder import NativeDecoder

_BLOCK_SIZE = 16
_WARM_UP, _NUM_TIMED = 2, 15


class LayerProbe:
    """Windows of a text, computed by the whole model, and positions in them at which the next token is predicted.

    These are the first tokens of blocks. Each gets its own block after the cached blocks before it, so that all are computed in
    one step and read the KV of the whole model, as drafts do.

    windows  token ids of each, at least one block and one token
    """

    def __init__(self, model: Model, windows: Sequence[Sequence[int]]) -> None:
        lengths = [(len(window) - 1) // _BLOCK_SIZE for window in windows]
        if not windows or min(lengths) < 1:
            raise ConfigError(f"a window of text to probe needs at least {_BLOCK_SIZE + 1} tokens; give a longer text")
        self._model = model
        num_places = sum(lengths)
        dtype = model.spec.dtype
        is_half = isinstance(model, NativeDecoder) and dtype == "float16"
        # The last block of the longest window, and the block after it, for the timing.
        self._pool = KvPool(KvSpec.of(model.spec, _BLOCK_SIZE, "float32" if is_half else dtype), 2 * num_places + 2)
        self._tables = torch.zeros(num_places, max(lengths) + 1, dtype=torch.int64)
        self._tokens: list[int] = []
        self._positions: list[int] = []
        answers: list[int] = []
        first_block = 0
        for window, num_blocks in zip(windows, lengths, strict=True):
            blocks = torch.arange(first_block, first_block + num_blocks)
            logits = self._prefill(window[: num_blocks * _BLOCK_SIZE + 1], blocks, 2 * num_places)
            answers += logits.argmax(dim=-1).tolist()
            for block in range(1, num_blocks + 1):
                place = len(self._tokens)
                self._tables[place, :block] = blocks[:block]
                self._tables[place, block] = num_places + place
                self._tokens.append(window[block * _BLOCK_SIZE])
                self._positions.append(block * _BLOCK_SIZE)
            first_block += num_blocks
        self._answers = torch.tensor(answers)

    def _prefill(self, window: Sequence[int], blocks: torch.Tensor, spare_block: int) -> torch.Tensor:
        """Compute a window, its last token in a spare block; return the logits of the first tokens of its blocks."""
        positions = torch.arange(len(window))
        table = torch.cat([blocks, torch.tensor([spare_block])])
        slots = table[positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
        step = AttentionMetadata(slots, [0, len(window)], [len(window)], table[None])
        rows = list(range(_BLOCK_SIZE, len(window), _BLOCK_SIZE))
        return self._model.step(torch.tensor(list(window)), positions, step, self._pool, rows)

    @property
    def num_places(self) -> int:
        """Number of positions at which the next token is predicted."""
        return len(self._tokens)

    @torch.inference_mode()
    def agreement(self, layers: Sequence[int]) -> float:
        """Return the share of positions at which the model with only these layers predicts the same token as the whole one."""
        positions = torch.tensor(self._positions)
        slots = self._tables[torch.arange(self.num_places), positions // _BLOCK_SIZE] * _BLOCK_SIZE
        lengths = [position + 1 for position in self._positions]
        step = AttentionMetadata(slots, list(range(self.num_places + 1)), lengths, self._tables)
        rows = list(range(self.num_places))
        logits = self._model.step(torch.tensor(self._tokens), positions, step, self._pool, rows, layers=layers)
        return float((logits.argmax(dim=-1) == self._answers).double().mean())

    @torch.inference_mode()
    def cost(self, num_rows: int, layers: Sequence[int] | None = None) -> float:
        """Return the time of num_rows <= 16 tokens after the longest window, relative to one token of the whole model.

        The two alternate, because the speed of a shared machine varies. layers  None: all
        """
        ratios: list[float] = []
        for _ in range(_WARM_UP + _NUM_TIMED):
            plain_s = self._step_s(1, None)
            ratios.append(self._step_s(num_rows, layers) / plain_s)
        return statistics.median(ratios[_WARM_UP:])

    def _step_s(self, num_rows: int, layers: Sequence[int] | None) -> float:
        longest = max(range(self.num_places), key=lambda place: self._positions[place])
        position = self._positions[longest]
        table = self._tables[longest : longest + 1]
        slots = int(table[0, position // _BLOCK_SIZE]) * _BLOCK_SIZE + torch.arange(num_rows)
        step = AttentionMetadata(slots, [0, num_rows], [position + num_rows], table)
        tokens = torch.tensor([self._tokens[longest]] * num_rows)
        positions = torch.arange(position, position + num_rows)
        begin = time.perf_counter()
        self._model.step(tokens, positions, step, self._pool, list(range(num_rows)), layers=layers)
        return time.perf_counter() - begin
