"""How long a step takes: StepWork, what it computes; RooflineTime, from a hardware table; FittedTime, from measured steps."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from quire.base.errors import ConfigError
from quire.planner.delivery import Delivery
from quire.planner.hardware import Hardware
from quire.planner.model_shape import ModelShape

FEATURES = ("constant", "sequences", "tokens", "attended_tokens", "bytes", "operations", "roofline")
"""Of a step, in the order of `features`. roofline: the larger of bytes and operations, each over its measured rate."""

_MIN_STEPS = 12
_REGION_EDGES = (2, 8, 32, 128, 512)
_MIN_RESIDUALS = 8
_MIN_CORRECTED = 5


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes.

    num_tokens     new tokens of all sequences
    num_sequences  that are in the step
    num_sampled    that get a token, each of which needs the output head
    attended       (tokens whose K and V are read, pairs of a new token and one that it attends to), by window of the model
    """

    num_tokens: int
    num_sequences: int
    num_sampled: int
    attended: tuple[tuple[int, int], ...]

    @classmethod
    def of_spans(cls, spans: Sequence[tuple[int, int]], windows: Sequence[int | None], num_sampled: int) -> StepWork:
        """Return the work of sequences that compute `count` tokens after `start`, for each (start, count)."""
        attended = tuple(attended_by(spans, window) for window in windows)
        return cls(sum(count for _, count in spans), len(spans), num_sampled, attended)

    @property
    def num_attended(self) -> int:
        """Tokens that are attended to, over all windows."""
        return sum(tokens for tokens, _ in self.attended)


def attended_by(spans: Sequence[tuple[int, int]], window: int | None) -> tuple[int, int]:
    """Return the tokens whose K and V are read, and the pairs, in a layer of one window."""
    num_tokens = num_pairs = 0
    for start, count in spans:
        end = start + count
        if window is None or end <= window:
            num_tokens += end
            num_pairs += count * start + count * (count + 1) // 2
            continue
        num_tokens += min(end, window - 1 + count)
        num_whole = max(0, min(count, window - start))
        num_pairs += num_whole * start + num_whole * (num_whole + 1) // 2 + (count - num_whole) * window
    return num_tokens, num_pairs


def step_flops(shape: ModelShape, work: StepWork) -> tuple[float, float]:
    """Return the operations of the weights' products and of attention: 2 per weight and token, 4 per query element and pair."""
    linear = 2.0 * (shape.num_active_body * work.num_tokens + shape.num_head * work.num_sampled)
    pairs = zip(shape.attention, work.attended, strict=True)
    return linear, sum(4.0 * group.num_query_elements * num_pairs for group, (_, num_pairs) in pairs)


def step_bytes(shape: ModelShape, work: StepWork, precision: str, kv_format: str) -> tuple[float, float]:
    """Return the bytes of weights and of K and V that a step reads."""
    pairs = zip(shape.attention, work.attended, strict=True)
    cached = sum(group.kv_bytes(kv_format) * num_tokens for group, (num_tokens, _) in pairs)
    return shape.read_bytes(precision, work.num_tokens), cached


class StepTime(Protocol):
    """Predicts the seconds of a step."""

    @property
    def request_s(self) -> float:
        """Seconds of a request before its first step."""
        ...

    def mean_s(self, work: StepWork) -> float:
        """Return the expected time."""
        ...

    def draw_ratio(self, work: StepWork, rng: random.Random) -> float:
        """Return a factor on the expected time, with the spread of real steps; 1 where that is not known."""
        ...


@dataclass(frozen=True, slots=True)
class RooflineTime:
    """Times from a device's rates: t = overheads + max(bytes, operations) of the weights + the same of attention.

    num_tensor_parallel   devices that share every weight: bytes and operations are divided, two all-reduces a layer are added
    num_pipeline_stages   devices that have a range of the layers each: a token passes through all of them
    """

    shape: ModelShape
    hardware: Hardware
    precision: str
    kv_format: str
    num_tensor_parallel: int = 1
    num_pipeline_stages: int = 1

    @property
    def request_s(self) -> float:
        return self.hardware.efficiency.request_s

    def mean_s(self, work: StepWork) -> float:
        linear_flops, attention_flops = step_flops(self.shape, work)
        weight_bytes, kv_bytes = step_bytes(self.shape, work, self.precision, self.kv_format)
        device, reached = self.hardware, self.hardware.efficiency
        bandwidth = device.bytes_per_s * reached.bandwidth * self.num_tensor_parallel
        compute = reached.compute * self.num_tensor_parallel
        linear_s = max(weight_bytes / bandwidth, linear_flops / (device.flops_of(self.precision) * compute))
        attention_s = max(kv_bytes / bandwidth, attention_flops / (device.flops_per_s * compute))
        layer_s = reached.fused_layer_s if work.num_tokens <= reached.few_tokens else reached.layer_s
        fixed_s = reached.step_s + layer_s * self.shape.num_layers + reached.sequence_s * work.num_sequences
        return fixed_s + linear_s + attention_s + self._transfer_s(work)

    def draw_ratio(self, work: StepWork, rng: random.Random) -> float:
        return 1.0

    def _transfer_s(self, work: StepWork) -> float:
        """Return the time of moving activations between devices."""
        num_devices, stages = self.num_tensor_parallel, self.num_pipeline_stages
        activation = work.num_tokens * self.shape.hidden_size * 2.0
        rate = self.hardware.link_bytes_per_s or self.hardware.bytes_per_s / 2
        latency = self.hardware.efficiency.collective_s
        total = 0.0
        if num_devices > 1:  # a ring moves 2 (n - 1) / n of the data over each link
            total += 2 * self.shape.num_layers * (latency + 2 * (num_devices - 1) / num_devices * activation / rate)
        if stages > 1:
            total += (stages - 1) * (latency + activation / rate)
        return total


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Measured peaks of the machine whose steps are fitted."""

    bytes_per_s: float
    flops_per_s: float


def features(work: StepWork, shape: ModelShape, precision: str, kv_format: str, rates: MachineRates) -> list[float]:
    """Return the features of a step in the order of FEATURES."""
    num_bytes, num_flops = sum(step_bytes(shape, work, precision, kv_format)), sum(step_flops(shape, work))
    roofline = max(num_bytes / rates.bytes_per_s, num_flops / rates.flops_per_s)
    counts = (1.0, float(work.num_sequences), float(work.num_tokens), float(work.num_attended))
    return [*counts, num_bytes, num_flops, roofline]


def nnls(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return x >= 0 that minimises |matrix x - target| (Lawson and Hanson, 1974, chapter 23).

    matrix  [N, F] f64, columns of about equal size; target [N]
    """
    num_columns = matrix.shape[1]
    solution, is_free = np.zeros(num_columns), np.zeros(num_columns, dtype=bool)
    tolerance = 1e-10 * float(np.abs(matrix.T @ target).max(initial=1.0))
    for _ in range(10 * num_columns):
        gradient = matrix.T @ (target - matrix @ solution)
        candidates = np.where(is_free, -np.inf, gradient)
        if candidates.max() <= tolerance:
            break
        is_free[int(candidates.argmax())] = True
        while True:
            trial = np.zeros(num_columns)
            trial[is_free] = np.linalg.lstsq(matrix[:, is_free], target, rcond=None)[0]
            negative = is_free & (trial <= 0)
            if not negative.any():
                solution = trial
                break
            steps = solution[negative] / (solution[negative] - trial[negative])
            solution = solution + float(steps.min()) * (trial - solution)
            is_free &= solution > 1e-15
            solution[~is_free] = 0.0
            if not is_free.any():
                break
    return solution


def kind_of(work: StepWork) -> str:
    """Return "decode" for a step of one token for each sequence, else "prefill"."""
    return "decode" if work.num_tokens == work.num_sequences else "prefill"


def region_of(work: StepWork) -> str:
    """Return the name of the region whose residuals belong together: by tokens, decode steps apart from those with prompts."""
    kind = kind_of(work)
    place = bisect.bisect_left(_REGION_EDGES, work.num_tokens)
    return f"{kind}<={_REGION_EDGES[place]}" if place < len(_REGION_EDGES) else f"{kind}>{_REGION_EDGES[-1]}"


@dataclass(frozen=True, slots=True)
class FittedTime:
    """Times from a fit. coefficients: seconds per unit of FEATURES; residuals: measured over predicted, by region.

    corrections  by kind of step: (log2 of its tokens, factor), ascending. Kernels work on tiles, so that times grow in steps of
                 the batch, which no coefficient has; between two batches the factor is interpolated
    added_step_s, added_sequence_s  what a server adds to each step, and for each of its sequences
    median_error, p90_error  of |predicted / measured - 1| over the steps of the fit
    """

    shape: ModelShape
    precision: str
    kv_format: str
    rates: MachineRates
    coefficients: tuple[float, ...]
    residuals: dict[str, list[float]]
    median_error: float
    p90_error: float
    request_s: float = 0.0
    corrections: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    added_step_s: float = 0.0
    added_sequence_s: float = 0.0

    def mean_s(self, work: StepWork) -> float:
        values = features(work, self.shape, self.precision, self.kv_format, self.rates)
        factor = correction_of(self.corrections.get(kind_of(work), ()), work.num_tokens)
        added_s = self.added_step_s + self.added_sequence_s * work.num_sequences
        return added_s + factor * sum(each * value for each, value in zip(self.coefficients, values, strict=True))

    def draw_ratio(self, work: StepWork, rng: random.Random) -> float:
        found = self.residuals.get(region_of(work), ())
        return rng.choice(found) if len(found) >= _MIN_RESIDUALS else 1.0

    def served(self, delivery: Delivery) -> FittedTime:
        """Return the times at a server, with the median delay of its requests."""
        added = {"added_step_s": delivery.step_s, "added_sequence_s": delivery.sequence_s}
        return replace(self, **added, request_s=delivery.median_delay_s)

    def describe(self) -> str:
        """Return the fit for people."""
        parts = [f"{value:.3g} s per {name}" for name, value in zip(FEATURES, self.coefficients, strict=True) if value > 0]
        return (
            f"step time = {' + '.join(parts)}, corrected by kind and number of tokens\n"
            f"error of the fit: median {self.median_error:.1%}, 90% of steps within {self.p90_error:.1%}"
        )


def correction_of(points: Sequence[tuple[float, float]], num_tokens: int) -> float:
    """Return the factor for a step of so many tokens: interpolated between points, the nearest beyond them, 1 without any."""
    if not points:
        return 1.0
    return float(np.interp(math.log2(max(1, num_tokens)), [at for at, _ in points], [factor for _, factor in points]))


def _find_corrections(steps: Sequence[MeasuredStep], ratios: np.ndarray) -> dict[str, list[tuple[float, float]]]:
    """Return the median ratios of measured to fitted times, by kind, of half octaves of tokens with enough steps."""
    bins: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for step, ratio in zip(steps, ratios.tolist(), strict=True):
        at = math.log2(step.work.num_tokens)
        bins.setdefault((kind_of(step.work), round(2 * at)), []).append((at, ratio))
    found: dict[str, list[tuple[float, float]]] = {}
    for (kind, _), points in sorted(bins.items()):
        if len(points) >= _MIN_CORRECTED:
            at, factor = float(np.mean([one for one, _ in points])), float(np.median([two for _, two in points]))
            found.setdefault(kind, []).append((round(at, 4), round(factor, 4)))
    return found


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step that was measured."""

    work: StepWork
    duration_s: float


def fit_steps(
    steps: Sequence[MeasuredStep],
    shape: ModelShape,
    precision: str,
    kv_format: str,
    rates: MachineRates,
    request_s: float = 0.0,
) -> FittedTime:
    """Return the fit of measured steps, which minimises relative errors. Raises ConfigError for too few steps."""
    usable = [step for step in steps if step.duration_s > 0 and step.work.num_tokens > 0]
    if len(usable) < _MIN_STEPS:
        raise ConfigError(f"a fit of step times needs at least {_MIN_STEPS} steps with tokens, got {len(usable)}")
    measured = np.array([step.duration_s for step in usable])
    rows = np.array([features(step.work, shape, precision, kv_format, rates) for step in usable]) / measured[:, None]
    sizes = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    weights, factors = np.ones(len(usable)), np.zeros(len(FEATURES))
    for _ in range(5):  # re-weighted, so that steps that the machine interrupted do not pull the fit
        factors = nnls(rows / sizes * weights[:, None], weights) / sizes
        errors = np.abs(rows @ factors - 1.0)
        scale = max(float(np.median(errors)), 1e-6)
        weights = np.sqrt(np.minimum(1.0, 2.0 * scale / np.maximum(errors, 1e-12)))
    ratios = 1.0 / np.maximum(rows @ factors, 1e-12)
    corrections = _find_corrections(usable, ratios)
    ratios /= [correction_of(corrections.get(kind_of(step.work), ()), step.work.num_tokens) for step in usable]
    residuals: dict[str, list[float]] = {}
    for step, ratio in zip(usable, ratios.tolist(), strict=True):
        residuals.setdefault(region_of(step.work), []).append(round(ratio, 4))
    errors = np.abs(1.0 / ratios - 1.0)
    return FittedTime(
        shape,
        precision,
        kv_format,
        rates,
        tuple(factors.tolist()),
        residuals,
        float(np.median(errors)),
        float(np.percentile(errors, 90)),
        request_s,
        corrections,
    )
