"""The requests of a simulation: arrival times and lengths, and prompts that are made when they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.base.errors import ConfigError
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.traces import read_trace
from quire.bench.serving.workload import Dataset

_LENGTHS = 0x10  # the stream of the seed that `quire bench serve` draws lengths from
_OWN_TOKEN = 1 << 40  # private prompts begin with a token above all that are shared
_SHARED_PREFIX = 1 << 41


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request: when it is sent, its lengths, and the ids of the shared blocks that its prompt begins with.

    block_tokens  tokens of each shared block
    """

    index: int
    due_s: float
    num_input_tokens: int
    num_output_tokens: int
    shared_ids: tuple[int, ...] = ()
    block_tokens: int = 0

    def prompt(self) -> Sequence[int]:
        """Return token ids that are equal to those of other requests exactly as far as their shared ids are equal."""
        parts: list[int] = []
        for shared_id in self.shared_ids:
            parts += [shared_id] * self.block_tokens
        missing = self.num_input_tokens - len(parts)
        if missing > 0:
            parts += [_OWN_TOKEN + self.index] * missing
        return parts[: self.num_input_tokens]


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """Requests in order of time. has_times: their times are a trace's own."""

    requests: tuple[SimulatedRequest, ...]
    has_times: bool

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that all prompts begin with."""
        first = self.requests[0]
        num_blocks = 0
        for place, shared_id in enumerate(first.shared_ids):
            if any(len(one.shared_ids) <= place or one.shared_ids[place] != shared_id for one in self.requests):
                break
            num_blocks += 1
        return num_blocks * first.block_tokens


def make_load(dataset: Dataset, arrivals: Arrivals) -> SimulatedLoad:
    """Return the load of a dataset, with the lengths and times that `quire bench serve` gives it. Raises ConfigError."""
    if dataset.name == "custom":
        raise ConfigError("--dataset-name must be random or trace, got 'custom': nothing tokenises prompts in a simulation")
    rows = _random_rows(dataset) if dataset.path is None else _trace_rows(dataset)
    if not rows:
        raise ConfigError("the workload has no request: --trace-duration ends before the first one")
    recorded = [row.due_s for row in rows] if dataset.path is not None else None
    times = arrivals.times(len(rows), recorded, dataset.seed)
    requests = tuple(
        SimulatedRequest(row.index, due_s, row.num_input_tokens, row.num_output_tokens, row.shared_ids, row.block_tokens)
        for row, due_s in zip(rows, times, strict=True)
    )
    return SimulatedLoad(requests, recorded is not None)


def _random_rows(dataset: Dataset) -> list[SimulatedRequest]:
    number = 1000 if dataset.num_prompts is None else dataset.num_prompts
    generator = np.random.default_rng([dataset.seed, _LENGTHS, 0])
    inputs = _draw_lengths(generator, dataset.input_len, dataset.range_ratio, number)
    outputs = _draw_lengths(generator, dataset.output_len, dataset.range_ratio, number)
    prefix = dataset.prefix_len
    shared = (_SHARED_PREFIX,) if prefix else ()
    rows = []
    for index, (num_input, num_output) in enumerate(zip(inputs, outputs, strict=True)):
        length = dataset.scaled_input(num_input) + prefix
        length = length if dataset.max_input_len is None else min(length, dataset.max_input_len)
        rows.append(SimulatedRequest(index, 0.0, length, dataset.scaled_output(num_output), shared, prefix))
    return rows


def _draw_lengths(generator: np.random.Generator, length: int, ratio: float, number: int) -> list[int]:
    low, high = max(1, int(np.floor(length * (1 - ratio)))), int(np.ceil(length * (1 + ratio)))
    return generator.integers(low, high, number, endpoint=True).tolist()


def _trace_rows(dataset: Dataset) -> list[SimulatedRequest]:
    if dataset.path is None:
        raise ConfigError(f"--dataset-name {dataset.name} needs --dataset-path")
    trace = read_trace(dataset.path, dataset.trace_duration_s, dataset.num_prompts)
    block = 0 if trace.block_tokens is None else max(1, round(trace.block_tokens * dataset.input_scale))
    rows = []
    for index, row in enumerate(trace.rows):
        length = dataset.scaled_input(row.num_input_tokens)
        shared = row.hash_ids[: -(-length // block)] if block else ()
        rows.append(SimulatedRequest(index, row.time_s, length, dataset.scaled_output(row.num_output_tokens), shared, block))
    return rows
