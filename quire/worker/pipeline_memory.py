"""Where the pipeline stages of a host meet: rows of the residual stream, results, and counters, in shared memory.

Each step in flight has a slot. Stages work in place on its rows, one after the other: a stage begins when the counter of the
stage before says so. Pages are taken from the system when they are first written, so areas may be as large as any step needs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.step import StageTimes
from quire.parallel.shared_memory import SharedMemoryFile
from quire.worker.prompt_results import MAX_LOGIT_ELEMENTS

_LINE = 128
_ROWS, _LOGITS, _BEST, _FEATURES, _ANSWER, _EXPERTS, _COUNTERS, _BUSY = (
    "pipeline.rows",
    "pipeline.logits",
    "pipeline.best",
    "pipeline.features",
    "pipeline.answer",
    "pipeline.experts",
    "pipeline.counters",
    "pipeline.busy",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSizes:
    """How large the areas are.

    max_tokens      of a step
    row_floats      from one row of the residual stream to the next
    feature_floats  that draft heads may read of a token: of all layers, and after the final norm
    num_experts     of each layer
    """

    num_stages: int
    max_tokens: int
    row_floats: int
    hidden_size: int
    vocab_size: int
    feature_floats: int = 0
    num_experts: tuple[int, ...] = ()

    def areas(self) -> dict[str, int]:
        """Return the areas of the shared memory, in bytes."""
        answer = max(MAX_LOGIT_ELEMENTS + self.vocab_size, self.max_tokens * self.hidden_size)
        return {
            _ROWS: self.num_stages * self.max_tokens * self.row_floats * 4,
            _LOGITS: self.num_stages * self.max_tokens * self.vocab_size * 4,
            _BEST: self.num_stages * self.max_tokens * 4,
            _FEATURES: self.num_stages * self.max_tokens * self.feature_floats * 4,
            _ANSWER: answer * 4,
            _EXPERTS: sum(self.num_experts) * 8,
            _COUNTERS: (self.num_stages + 1) * _LINE,
            _BUSY: self.num_stages * _LINE,
        }


class PipelineMemory:
    """The areas of PipelineSizes, as a process sees them."""

    def __init__(self, memory: SharedMemoryFile, sizes: PipelineSizes) -> None:
        self._memory, self._sizes = memory, sizes
        size = sizes.num_stages
        self._rows = memory.address(_ROWS)
        self._row_bytes = sizes.max_tokens * sizes.row_floats * 4
        self._logits = torch.from_numpy(memory.area(_LOGITS).view(np.float32)).view(size, sizes.max_tokens, sizes.vocab_size)
        self._best = memory.area(_BEST).view(np.int32).reshape(size, sizes.max_tokens)
        features = torch.from_numpy(memory.area(_FEATURES).view(np.float32))
        self._features = features.view(size, sizes.max_tokens * sizes.feature_floats)
        self._answer = torch.from_numpy(memory.area(_ANSWER).view(np.float32))
        self._expert_tokens = memory.area(_EXPERTS).view(np.int64)
        self._counters = memory.address(_COUNTERS)
        self._busy = memory.area(_BUSY).view(np.float64).reshape(size, _LINE // 8)

    @property
    def span(self) -> tuple[int, int]:
        """The address of all areas, which lie one after the other at the same offsets in every process, and their bytes."""
        names = list(self._sizes.areas())
        last = self._memory.area(names[-1])
        return self._rows, self._memory.address(names[-1]) + last.nbytes - self._rows

    def slot(self, number: int) -> int:
        """Return the slot of a step, by the number of steps before it."""
        return number % self._sizes.num_stages

    def rows(self, slot: int) -> int:
        """Return the address of a slot's rows of the residual stream."""
        return self._rows + slot * self._row_bytes

    @property
    def row_bytes(self) -> int:
        """From one row of the residual stream to the next."""
        return self._sizes.row_floats * 4

    def logits(self, slot: int, count: int) -> Tensor:
        """Return the first rows of a slot's logits [count, vocab_size] f32, not a copy."""
        return self._logits[slot, :count]

    def best(self, slot: int, count: int) -> NDArray[np.int32]:
        """Return a slot's best tokens [count], not a copy."""
        return self._best[slot, :count]

    def features(self, slot: int, first: int, width: int, count: int) -> Tensor:
        """Return [count, width] f32, what draft heads read of a slot's tokens: the columns from `first` on; not a copy."""
        begin = first * self._sizes.max_tokens
        return self._features[slot, begin : begin + count * width].view(count, width)

    def answer(self, num_rows: int, width: int) -> Tensor:
        """Return [num_rows, width] f32, what the last stage was asked for, not a copy."""
        return self._answer[: num_rows * width].view(num_rows, width)

    def expert_tokens(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the tokens that the experts of the layers [first, last) have got so far, one layer after the other; not a
        copy."""
        starts = [sum(self._sizes.num_experts[:layer]) for layer in (first, last)]
        return self._expert_tokens[starts[0] : starts[1]]

    def counter(self, stage: int) -> int:
        """Return the address of the counter of the steps that a stage has computed."""
        return self._counters + stage * _LINE

    @property
    def answer_counter(self) -> int:
        """The address of the counter of what the last stage has answered."""
        return self.counter(self._sizes.num_stages)

    def busy_address(self, stage: int) -> int:
        """Return where the time is that a stage has computed, a f64."""
        return self._memory.address(_BUSY) + stage * _LINE

    def note_busy(self, stage: int, seconds: float) -> None:
        """Add to the time that a stage has computed; by that stage only."""
        self._busy[stage, 0] += seconds

    def busy_s(self) -> tuple[float, ...]:
        """Return how long each stage has computed."""
        return tuple(self._busy[:, 0].tolist())


class StageClock:
    """Knows for how long steps were in flight, and how long each stage has computed meanwhile; kept by the leader."""

    def __init__(self, memory: PipelineMemory) -> None:
        self._memory = memory
        self._active_s = 0.0
        self._began_s: float | None = None

    def note_in_flight(self, num_in_flight: int) -> None:
        """Take in how many steps are in flight now."""
        now_s = time.perf_counter()
        if num_in_flight > 0 and self._began_s is None:
            self._began_s = now_s
        elif num_in_flight == 0 and self._began_s is not None:
            self._active_s += now_s - self._began_s
            self._began_s = None

    @property
    def times(self) -> StageTimes:
        """The times so far."""
        since_s = 0.0 if self._began_s is None else time.perf_counter() - self._began_s
        return StageTimes(self._memory.busy_s(), self._active_s + since_s)
