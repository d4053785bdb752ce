"""Predicted decode steps of one and of two ranks of this machine, next to measured ones.

A step is predicted from counts (bytes of weights, layers, barriers, exchanged bytes) and constants that are measured apart
from it: the bytes of weights per second that products reach at the rows of the step, in the form in which the weights are
packed; the kernels of a layer that are no products (attention, norms, rotation); the sampler; the time of a barrier and the
bandwidth; and a step of a small model, for scheduling. The peak rates bound neither products of few rows nor attention over
few tokens: these spend their time on unpacking weights and loading inputs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from quire.base.errors import ConfigError
from quire.bench.attention_cases import attention_case
from quire.bench.kernel_setup import KernelCase, Setup, noise, shapes_of
from quire.bench.kernels import default_working_set
from quire.bench.linear_cases import pack_weight
from quire.bench.parallel import measure_parallel
from quire.bench.provenance import Provenance, find_provenance
from quire.bench.row_cases import norm_cases, sampler_cases, turn_cases
from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport
from quire.contracts.sampling_params import SamplingParams
from quire.engine.llm_engine import LLMEngine
from quire.kernels.peaks import SHORT, Peaks, measure_peaks
from quire.parallel.barrier import native_extension
from quire.planner.hardware import CPU_EFFICIENCY, Hardware
from quire.planner.layout import Layout
from quire.planner.model_shape import ModelShape
from quire.planner.parallel_time import LayoutTime, Load, ParallelSimulation, ProductRates

_PROMPT_TOKENS = 16
_WARM_UP = 4
_NUM_PASSES = 5
_SMALL_MODEL = "demo-draft"
_PACKED = {"float32": "f32", "float16": "f32", "bfloat16": "bf16", "int8": "int8", "int4": "int4", "fp8": "fp8"}
"""Formats of quire.bench.linear_cases by the precision of the weights."""
_CACHES = {"bfloat16": "bf16", "float32": "f32", "int8": "int8"}
"""Formats of quire.bench.attention_cases by the type of the KV cache."""
_MOST_BITS_OF_BF12 = 14


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """One layout of ranks, each with one thread. error: predicted / measured - 1."""

    layout: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """How far the prediction is off."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """What a prediction is made from. rates are of all ranks together, each with one thread.

    product_bytes_per_s  bytes of weights that products read per second, at the rows of the step
    layer_s              the kernels of a layer that are no products: attention over the step's cached tokens, two norms, and
                         the rotation of heads
    sampler_s            sampling a token of each sequence
    peaks                see measure_peaks; their bandwidth is that of exchanged bytes
    barrier_s            one barrier; 0 with one rank
    small_step_s         a step of a small model with as many sequences: scheduling and calls
    attention_bytes_per_s, head_bytes_per_s  of the products of attention at the rows of a home, and of the output head at
                         all rows, by one rank; None: as all others
    """

    product_bytes_per_s: float
    layer_s: float
    sampler_s: float
    peaks: Peaks
    barrier_s: float
    small_step_s: float
    attention_bytes_per_s: float | None = None
    head_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class ComparisonRecord:
    """Results; rates by layout."""

    model: str
    num_sequences: int
    steps: tuple[ComparedStep, ...]
    rates: tuple[MeasuredRates, ...]
    provenance: Provenance

    def describe(self) -> str:
        """Return a table."""
        lines = [f"{self.model}, decode steps of {self.num_sequences} sequences, one thread a rank"]
        lines += [
            f"{one.layout}: predicted {one.predicted_s * 1e3:.2f} ms, measured {one.measured_s * 1e3:.2f} ms ({one.error:+.1%})"
            for one in self.steps
        ]
        for step, one in zip(self.steps, self.rates, strict=True):
            lines.append(
                f"{step.layout}: products {one.product_bytes_per_s / 1e9:.1f} GB/s of weights, other kernels of a layer "
                f"{one.layer_s * 1e6:.0f} us, sampler {one.sampler_s * 1e3:.2f} ms, "
                f"peak {one.peaks.bytes_per_s / 1e9:.1f} GB/s, barrier {one.barrier_s * 1e6:.2f} us, "
                f"small step {one.small_step_s * 1e3:.2f} ms"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self), indent=1)


def predict_here(
    shape: ModelShape, report: ModelReport, precision: str, rates: MeasuredRates, layout: Layout, load: Load
) -> LayoutTime:
    """Return the prediction for ranks of this machine, which reach these rates together."""
    # A device of the simulation is one rank: it has its part of the rates.
    fixed = {"layer_s": 0.0, "fused_layer_s": 0.0, "sequence_s": 0.0, "step_s": rates.small_step_s + rates.sampler_s}
    efficiency = replace(CPU_EFFICIENCY, bandwidth=1.0, compute=1.0, collective_s=rates.barrier_s, **fixed)
    peaks, num_ranks = rates.peaks, layout.num_devices
    device = Hardware(
        "here",
        "this machine",
        "cpu",
        peaks.bytes_per_s / num_ranks,
        peaks.flops_per_s / num_ranks,
        None,
        1 << 50,
        None,
        peaks.bytes_per_s,
        {},
        efficiency,
        is_measured=True,
    )
    # As the weights are packed: bfloat16 may take 12 bits.
    shape = replace(shape, weight_bytes={precision: report.packed_weight_bytes or shape.weight_bytes[precision]})
    attention = None if rates.attention_bytes_per_s is None else rates.attention_bytes_per_s / num_ranks
    products = ProductRates(rates.product_bytes_per_s / num_ranks, attention, rates.head_bytes_per_s)
    layers_s = rates.layer_s * len(report.spec.layers)
    simulation = ParallelSimulation(report.spec, shape, device, precision, report.memory.kv.dtype, True, 4, products, layers_s)
    return simulation.step(layout, load)


def packed_format(report: ModelReport, precision: str) -> str:
    """Return how most weights of a loaded model are packed, as a format of quire.bench.linear_cases. Raises ConfigError."""
    found = _PACKED.get(precision)
    if found is None:
        raise ConfigError(f"the weights are {precision}: products are timed for {', '.join(_PACKED)}")
    bits = 8 * (report.packed_weight_bytes or 0) / report.num_parameters
    return "bf12" if found == "bf16" and 0 < bits <= _MOST_BITS_OF_BF12 else found


def measure_products(
    report: ModelReport, number_format: str, num_rows: int, num_threads: int, names: Collection[str] = ()
) -> float:
    """Return the bytes of weights per second that the products of the model's linear layers read, each shape weighted by its
    part of a step; names: of quire.bench.kernel_setup.shapes_of, only these."""
    setup = _setup(num_rows, num_threads)
    num_bytes = duration_s = 0.0
    for name, (n, k) in shapes_of(report.spec).linears.items():
        if names and name not in names:
            continue
        weights = [pack_weight(setup, number_format, n, k)]
        weights += [pack_weight(setup, number_format, n, k) for _ in range(setup.copies_for(weights[0].num_bytes) - 1)]
        x, out = noise(num_rows, k), noise(num_rows, n)

        def run(weights: list[Any] = weights, x: Tensor = x, out: Tensor = out) -> None:
            for weight in weights:
                addresses = (x.data_ptr(), weight.k, num_rows, out.data_ptr(), weight.n)
                setup.native.linear(weight, None, *addresses, num_threads=num_threads, isa=setup.isa)

        run()
        times: list[float] = []
        for _ in range(_NUM_PASSES):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) / len(weights))
        count = 1 if name == "head" else len(report.spec.layers) * (1 + name.count(","))
        num_bytes += count * weights[0].num_bytes
        duration_s += count * statistics.median(times)
    return num_bytes / duration_s


def measure_other_kernels(report: ModelReport, load: Load, num_threads: int) -> tuple[float, float]:
    """Return the seconds of the kernels of a layer that are no products, and of the sampler. Raises ConfigError."""
    setup, shapes = _setup(load.num_sequences, num_threads), shapes_of(report.spec)
    cache = _CACHES.get(report.memory.kv.dtype)
    if cache is None:
        raise ConfigError(f"the KV cache is {report.memory.kv.dtype}: attention is timed for {', '.join(_CACHES)}")
    layer_s = _time_of(attention_case(setup, shapes, (cache, "step"), load.num_sequences, 1, load.context_len))
    layer_s += 2 * _time_of(*norm_cases(setup, shapes)) + _time_of(*turn_cases(setup, shapes))
    return layer_s, max(_time_of(case) for case in sampler_cases(setup, shapes))


def _setup(num_rows: int, num_threads: int) -> Setup:
    native = native_extension()
    return Setup(native, native.isa(), num_threads, default_working_set(), (num_rows,), ())


def _time_of(case: KernelCase) -> float:
    """Return the median over passes of the mean seconds of a call."""
    times: list[float] = []
    for _ in range(_NUM_PASSES):
        began = time.perf_counter()
        for copy in range(case.num_copies):
            case.run(copy)
        times.append((time.perf_counter() - began) / case.num_copies)
    return statistics.median(times)


def compare_here(
    config: EngineConfig,
    shape: ModelShape,
    precision: str,
    num_sequences: int,
    layouts: Sequence[Layout] = (Layout(), Layout(num_tensor=2)),
    num_steps: int = 32,
) -> ComparisonRecord:
    """Measure decode steps with each layout, and predict them from rates that are measured right after. Raises ConfigError."""
    if num_sequences < 1 or num_steps < 4:
        raise ConfigError(f"a comparison needs num_sequences >= 1 and num_steps >= 4, got {num_sequences} and {num_steps}")
    for layout in layouts:
        if layout.has_whole_experts or layout.num_stages > 1 or layout.num_replicas > 1:
            raise ConfigError(f"--compare takes layouts of tpN, homesN, dcpN and pcpN, got {layout.name}")
    barrier = measure_parallel((2,), 1000, (), 0.0)
    barrier_s = next(one.median_us for one in barrier.figures if one.operation == "barrier") * 1e-6
    steps: list[ComparedStep] = []
    found: list[MeasuredRates] = []
    load = Load(num_sequences, _PROMPT_TOKENS + num_steps // 2)
    small = EngineConfig(model=_SMALL_MODEL, device="cpu", num_kv_blocks=16 * num_sequences, skip_tokenizer_init=True)
    for layout in layouts:
        count, rows = layout.num_devices, -(-num_sequences // layout.num_parts)
        sizes = {"tensor_parallel_size": layout.num_tensor, "num_threads": count, "max_num_seqs": num_sequences}
        sizes |= {"decode_context_parallel_size": layout.num_places, "prefill_context_parallel_size": layout.num_parts}
        homes = {"enable_dp_attention": True, "dp_attention_size": layout.num_homes} if layout.num_homes > 1 else {}
        measured_s, report = _measure(replace(config, **sizes, **homes), num_sequences, num_steps)
        small_sizes = {"tensor_parallel_size": count, "num_threads": count, "max_num_seqs": num_sequences}
        small_s, _ = _measure(replace(small, **small_sizes), num_sequences, num_steps)
        number_format, attention, head = packed_format(report, precision), None, None
        if layout.num_homes > 1:
            of_home = -(-num_sequences // layout.num_homes)
            attention = measure_products(report, number_format, of_home, count, ("q", "k, v", "o"))
        if layout.num_parts > 1:
            head = measure_products(report, number_format, num_sequences, 1, ("head",))
        rates = MeasuredRates(
            measure_products(report, number_format, rows, count),
            *measure_other_kernels(report, load, count),
            measure_peaks(report, SHORT, num_threads=count),
            barrier_s if count > 1 else 0.0,
            small_s,
            attention,
            head,
        )
        found.append(rates)
        predicted = predict_here(shape, report, precision, rates, layout, load)
        steps.append(ComparedStep(layout.name, predicted.step_s, measured_s))
    return ComparisonRecord(config.model, num_sequences, tuple(steps), tuple(found), find_provenance())


def _measure(config: EngineConfig, num_sequences: int, num_steps: int) -> tuple[float, ModelReport]:
    """Return the median time of a decode step of all sequences."""
    engine = LLMEngine(config)
    engine.is_recording = True  # what is in a step
    try:
        # Sampled, so that the whole LM head is read.
        params = SamplingParams(temperature=1.0, seed=0, max_tokens=num_steps + _WARM_UP, ignore_eos=True, detokenize=False)
        vocab = engine.report.spec.vocab_size
        for index in range(num_sequences):
            prompt = [(7 * index + 13 * place) % (vocab - 10) + 5 for place in range(_PROMPT_TOKENS)]
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        times: list[float] = []
        while engine.has_unfinished_requests():
            began = time.perf_counter()
            engine.step()
            duration_s, step = time.perf_counter() - began, engine.last_step
            if step is not None and len(step.shares) == num_sequences and not any(is_prefill for *_, is_prefill in step.shares):
                times.append(duration_s)
        return statistics.median(times[_WARM_UP:]), engine.report
    finally:
        engine.close()
