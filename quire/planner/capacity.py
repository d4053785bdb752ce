"""What one replica serves in the steady state, within objectives: batch, speed, and the share of prompts in its time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.planner.memory import Lengths, Limits, WindowPool, users_that_fit
from quire.planner.model_shape import ModelShape
from quire.planner.step_time import StepTime, StepWork

_HEADROOM = 0.8
"""Share of its capacity at which a replica is planned to run: queues grow without bound near 1."""

_SLO_NAMES = ("ttft", "tpot")


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits in seconds; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def parse(cls, items: Sequence[str]) -> Objectives:
        """Return the objectives of items like "ttft:500", in milliseconds. Raises ConfigError."""
        found: dict[str, float] = {}
        for item in items:
            name, _, text = item.partition(":")
            try:
                limit = float(text)
            except ValueError:
                limit = math.nan
            if name not in _SLO_NAMES or not (limit > 0 and math.isfinite(limit)):
                raise ConfigError(f"--slo takes ttft:MS and tpot:MS with milliseconds above 0, got {item!r}")
            if name in found:
                raise ConfigError(f"--slo names {name} twice")
            found[name] = limit / 1000.0
        return cls(found.get("ttft"), found.get("tpot"))


@dataclass(frozen=True, slots=True)
class Operation:
    """The steady state of a replica with num_sequences that decode while the prompts of the next ones are computed.

    step_s            mean time of a step, which is the time per output token
    decode_step_s     of a step without prompt tokens
    ttft_s            of a prompt of p95 length, without waiting for a seat
    requests_per_s, output_tokens_per_s, input_tokens_per_s  at this batch
    """

    num_sequences: int
    step_s: float
    decode_step_s: float
    ttft_s: float
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float

    def meets(self, objectives: Objectives) -> bool:
        """Return whether both limits are kept."""
        keeps_tpot = objectives.tpot_s is None or self.step_s <= objectives.tpot_s
        return keeps_tpot and (objectives.ttft_s is None or self.ttft_s <= objectives.ttft_s)


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica: its model, step times, limits and blocks.

    num_in_flight  steps in flight at once: the pipeline stages, each of which computes other sequences
    window         pool of the layers that keep only a window; None: all layers keep all tokens
    """

    shape: ModelShape
    times: StepTime
    limits: Limits
    num_kv_blocks: int
    num_in_flight: int = 1
    window: WindowPool | None = None

    def operate(self, num_sequences: int, lengths: Lengths, hit_share: float = 0.0) -> Operation:
        """Return the steady state with so many sequences; hit_share: of prompt tokens that the prefix cache has."""
        windows = self.shape.windows
        per_step = max(1, num_sequences // self.num_in_flight)
        context = max(1, round(lengths.mean_input + lengths.mean_output / 2))
        decoding = [(context, 1)] * per_step
        computed = lengths.mean_input * (1.0 - hit_share)
        prompt_tokens = per_step * computed / lengths.mean_output
        decode_s = self.times.mean_s(StepWork.of_spans(decoding, windows, per_step))
        step_s = self._mixed_s(decoding, prompt_tokens, lengths, hit_share)
        output_per_s = per_step * self.num_in_flight / step_s
        requests_per_s = output_per_s / lengths.mean_output
        return Operation(
            num_sequences,
            step_s,
            decode_s,
            self._first_token_s(decoding, lengths, hit_share, step_s),
            requests_per_s,
            output_per_s,
            requests_per_s * lengths.mean_input,
        )

    def _mixed_s(self, decoding: list[tuple[int, int]], prompt_tokens: float, lengths: Lengths, hit_share: float) -> float:
        """Return the mean step time where prompt_tokens of prompts are computed per step on average.

        Prompts come whole: of many steps, few have a chunk. Their times are averaged.
        """
        windows, num_decoding = self.shape.windows, len(decoding)
        plain_s = self.times.mean_s(StepWork.of_spans(decoding, windows, num_decoding))
        start = round(lengths.mean_input * hit_share)
        whole = max(1, round(lengths.mean_input) - start)
        room = max(1, self.limits.max_num_batched_tokens - num_decoding)
        chunk = min(whole, room)
        with_chunk = StepWork.of_spans([*decoding, (start, chunk)], windows, num_decoding + 1)
        if prompt_tokens <= chunk:
            share = prompt_tokens / chunk
            return plain_s * (1.0 - share) + self.times.mean_s(with_chunk) * share
        num_chunks = prompt_tokens / chunk  # several prompts in each step, and more steps where the budget is less
        per_step = min(num_chunks, max(1.0, room / chunk))
        spans = [(start, chunk)] * max(1, round(per_step))
        full_s = self.times.mean_s(StepWork.of_spans([*decoding, *spans], windows, num_decoding + len(spans)))
        extra_s = (full_s - plain_s) / len(spans)
        return plain_s + extra_s * num_chunks

    def _first_token_s(self, decoding: list[tuple[int, int]], lengths: Lengths, hit_share: float, step_s: float) -> float:
        """Return the time to the first token of a prompt of p95 length: half a step, then its chunks next to the batch."""
        others = decoding[1:]
        room = max(1, self.limits.max_num_batched_tokens - len(others))
        at, end = round(lengths.p95_input * hit_share), lengths.p95_input
        total = self.times.request_s + (step_s / 2 if others else 0.0)
        while at < end:
            chunk = min(room, end - at)
            work = StepWork.of_spans([*others, (at, chunk)], self.shape.windows, len(others) + (at + chunk == end))
            total += self.times.mean_s(work)
            at += chunk
        return total

    def users(self, num_tokens: int, num_shared: int = 0) -> int:
        """Return how many sequences of num_tokens the memory of the KV pools holds, whatever max_num_seqs is."""
        if self.window is not None:
            return self.window.users(num_tokens, self.limits.block_size, num_shared)
        return users_that_fit(self.num_kv_blocks, self.limits.block_size, num_tokens, num_shared)

    def largest_batch(self, lengths: Lengths, objectives: Objectives, hit_share: float = 0.0) -> tuple[int, int]:
        """Return the largest batches: by memory (at mean lengths), and by the objectives within that; 0: none."""
        mean_tokens = max(1, math.ceil(lengths.mean_input + lengths.mean_output))
        block_size = self.limits.block_size
        by_memory = users_that_fit(self.num_kv_blocks, block_size, mean_tokens, lengths.num_shared)
        if self.window is not None:
            by_memory = min(by_memory, self.window.num_blocks // self.window.blocks_of(mean_tokens, block_size))
        by_memory = min(by_memory, self.limits.max_num_seqs)
        low, high = 0, by_memory
        while low < high:  # step times grow with the batch
            middle = (low + high + 1) // 2
            if self.operate(middle, lengths, hit_share).meets(objectives):
                low = middle
            else:
                high = middle - 1
        return by_memory, low

    @property
    def headroom(self) -> float:
        """Share of the capacity that is planned with."""
        return _HEADROOM


def replicas_needed(rate: float, requests_per_s: float, headroom: float = _HEADROOM) -> int | None:
    """Return how many replicas serve `rate` requests per second with room to spare; None where none does."""
    return None if requests_per_s <= 0 else max(1, math.ceil(rate / (requests_per_s * headroom) - 1e-9))


@dataclass(frozen=True, slots=True)
class Cost:
    """What tokens and requests cost at full use of a replica, in the currency of the price, and their energy.

    per_million_input, per_million_output  the time of a step is divided: what a step takes without prompts is for outputs, the
                                           rest is for prompts
    per_user_hour  for each sequence that runs at the same time
    joules_per_output_token, kwh_per_million_output  at the devices' full power; None where the table has none
    """

    per_hour: float
    per_million_input: float
    per_million_output: float
    per_million_total: float
    per_request: float
    per_user_hour: float
    joules_per_output_token: float | None
    kwh_per_million_output: float | None


def cost_of(operation: Operation, price_per_hour: float, watts: float | None) -> Cost:
    """Return the cost of a replica in a steady state; price and watts are of all of its devices."""
    per_s = price_per_hour / 3600.0
    decode_share = min(1.0, operation.decode_step_s / operation.step_s)
    per_output = per_s * decode_share / operation.output_tokens_per_s
    per_input = per_s * (1.0 - decode_share) / operation.input_tokens_per_s
    joules = None if watts is None else watts / operation.output_tokens_per_s
    total_per_s = operation.output_tokens_per_s + operation.input_tokens_per_s
    return Cost(
        price_per_hour,
        per_input * 1e6,
        per_output * 1e6,
        per_s / total_per_s * 1e6,
        per_s / operation.requests_per_s,
        price_per_hour / operation.num_sequences,
        joules,
        None if joules is None else joules * 1e6 / 3.6e6,
    )
