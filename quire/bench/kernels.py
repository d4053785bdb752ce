"""Benchmarks of single kernels, relative to the machine's peaks measured at the same time."""

from __future__ import annotations

import json
import mmap
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.base.cpu_caches import CACHES, largest_cache_bytes
from quire.base.errors import ConfigError
from quire.base.threads import check_num_threads
from quire.bench.attention_cases import attention_cases, store_cases
from quire.bench.expert_cases import expert_cases
from quire.bench.kernel_setup import QWEN3_0_6B, KernelCase, ModelShapes, Setup, noise, shapes_of
from quire.bench.linear_cases import INPUT_GROUP, best_cases, linear_cases, pack_weight
from quire.bench.provenance import Provenance, find_provenance
from quire.bench.recurrence_cases import recurrence_cases
from quire.bench.row_cases import norm_cases, sampler_cases, turn_cases
from quire.kernels.native import load_native
from quire.model.config_reader import read_model_spec
from quire.model.resolve import resolve_model
from quire.quant.quantize import INT4, INT8, Scheme, fit_scheme, native_quantizer

_INPUT_BYTES = {"bf16": 2, "int8": 1}
_GROUP_BYTES = 12
"""Additional bytes per group of int8 inputs: its scale, and its sum in two forms."""


def pack_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    """Yield the packing of inputs, to int8 with a scale for each group or to bfloat16, which `linear` cases include."""
    for number_format, width in _INPUT_BYTES.items():
        for k in dict.fromkeys(k for _, k in shapes.linears.values()):
            weight = pack_weight(setup, number_format, 1, k)
            row_bytes = (4 + width) * k + (_GROUP_BYTES * -(-k // INPUT_GROUP) if number_format == "int8" else 0)
            for m in setup.rows:
                copies = setup.copies_for(m * row_bytes)
                x = noise(copies, m, k).contiguous()

                def run(copy: int, m: int = m, k: int = k, weight: Any = weight, x: Tensor = x) -> None:
                    setup.native.pack_inputs(weight, x[copy].data_ptr(), k, m, setup.num_threads, setup.isa)

                yield KernelCase("pack", number_format, f"M={m} [{k}]", m * row_bytes, 0, "f32", copies, run)


def quantize_cases(setup: Setup, shapes: ModelShapes) -> Iterator[KernelCase]:
    """Yield the quantisation of bfloat16 weights: the search for scales, and the codes."""
    if not hasattr(setup.native, "quantize_search"):
        return
    for number_format, scheme in (("int8", INT8), ("int4", INT4)):
        for name, (n, k) in shapes.linears.items():
            fitting = fit_scheme(scheme, k)
            if name != "head" and fitting is not None and fitting.kind == scheme.kind:
                yield _quantize_case(setup, number_format, fitting, f"{name} [{n}, {k}]", (n, k))


def _quantize_case(setup: Setup, number_format: str, scheme: Scheme, name: str, size: tuple[int, int]) -> KernelCase:
    (n, k), quantizer = size, native_quantizer(setup.native, scheme, setup.isa)
    num_bytes = 3 * n * k + 4 * n * (1 if scheme.kind == "int8" else k // scheme.group_size)
    copies = setup.copies_for(num_bytes)
    weights, codes = noise(copies, n, k, dtype=torch.bfloat16).contiguous(), torch.ones(copies, n, k, dtype=torch.int8)

    def run(copy: int) -> None:
        (scale,) = quantizer.search(weights[copy])
        quantizer.encode(weights[copy], scale, None, codes[copy])

    return KernelCase("quantize", number_format, name, num_bytes, 0, "f32", copies, run)


_MAKERS: dict[str, Callable[[Setup, ModelShapes], Iterator[KernelCase]]] = {
    "linear": linear_cases,
    "best": best_cases,
    "experts": expert_cases,
    "pack": pack_cases,
    "quantize": quantize_cases,
    "attention": attention_cases,
    "store": store_cases,
    "norm": norm_cases,
    "turn": turn_cases,
    "sampler": sampler_cases,
    "recurrence": recurrence_cases,
}
KERNELS = tuple(_MAKERS)


def make_cases(setup: Setup, shapes: ModelShapes, only: tuple[str, ...] = KERNELS) -> Iterator[KernelCase]:
    """Yield the cases; each one's data is freed when the next one is requested."""
    for kernel, make in _MAKERS.items():
        if kernel in only:
            yield from make(setup, shapes)


DEFAULT_MODEL = "qwen3-0.6b"
_READ_BYTES = 16 << 20
"""Bytes read per bandwidth measurement, from a buffer as large as the working set."""
_MIN_SAMPLE_S = 1e-4
_MIN_SAMPLES, _MAX_SAMPLES = 5, 200
_NUM_WARM_UP = 3
_PEAK_S = 1e-3
_CACHE_FACTOR = 4
_LEAST_WORKING_SET = 64 << 20


@dataclass(frozen=True, slots=True)
class KernelFigure:
    """One kernel at one shape.

    Times and rates are those of the fastest tenth of the samples, for the kernel and for the machine's peaks: other programs
    slow down single samples of either.

    seconds          of a call; median_seconds: the median
    bandwidth_share  bytes per second relative to plain reads between the calls; above 1 if a cache helps
    compute_share    operations per second relative to products in registers between the calls; 0: not counted
    """

    kernel: str
    number_format: str
    shape: str
    seconds: float
    median_seconds: float
    bytes_per_s: float
    operations_per_s: float
    bandwidth_share: float
    compute_share: float
    machine_bytes_per_s: float
    machine_operations_per_s: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """The results of a run and their provenance."""

    model: str
    isa: str
    num_threads: int
    working_set_bytes: int
    results: tuple[KernelFigure, ...]
    provenance: Provenance

    def describe(self) -> str:
        """Return the results as a readable table."""
        wide = max([len(result.shape) for result in self.results], default=0)
        lines = [
            f"{self.model}, {self.isa}, {self.num_threads} threads; {self.provenance.machine}, {self.provenance.commit}",
            f"{'kernel':<11}{'format':<7}{'shape':<{wide}}{'time':>12}{'GB/s':>8}{'of reads':>9}{'GFLOP/s':>9}{'of peak':>9}",
        ]
        for result in self.results:
            share = f"{result.compute_share:.0%}" if result.compute_share else "-"
            lines.append(
                f"{result.kernel:<11}{result.number_format:<7}{result.shape:<{wide}}{result.seconds * 1e6:>9.1f} us"
                f"{result.bytes_per_s / 1e9:>8.1f}{result.bandwidth_share:>9.0%}"
                f"{result.operations_per_s / 1e9:>9.1f}{share:>9}"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self), indent=2)


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What to measure. Raises ConfigError.

    model              a folder, a hub id or a bundled model whose shapes are used; DEFAULT_MODEL: needs no files
    isa                instruction set; None: the one of this process
    num_threads        None: torch's
    only               kernels, of KERNELS
    rows, lengths      see kernel_setup.Setup
    seconds            per kernel and shape
    working_set_bytes  None: four times the largest cache, at least 64 MiB
    """

    model: str = DEFAULT_MODEL
    isa: str | None = None
    num_threads: int | None = None
    only: tuple[str, ...] = KERNELS
    rows: tuple[int, ...] = (1, 4, 16, 64, 512)
    lengths: tuple[int, ...] = (128, 1024, 4096)
    seconds: float = 0.3
    working_set_bytes: int | None = None

    def __post_init__(self) -> None:
        numbers: dict[str, tuple[int | None, ...]] = {"rows": self.rows, "lengths": self.lengths}
        numbers |= {"working_set_bytes": (self.working_set_bytes,)}
        for name, values in numbers.items():
            if not values or any(value is not None and value < 1 for value in values):
                raise ConfigError(f"{name} must be at least 1, got {values}")
        check_num_threads("threads", self.num_threads)
        if not self.seconds > 0:
            raise ConfigError(f"seconds must be positive, got {self.seconds}")
        unknown = sorted(set(self.only) - set(KERNELS))
        if unknown:
            raise ConfigError(f"only takes {', '.join(KERNELS)}, got {', '.join(unknown)}")


def measure_kernels(options: KernelOptions, show_progress: bool = False) -> KernelRecord:
    """Measure every case. Raises ConfigError if the native kernels are missing, and the errors of reading a model."""
    native = load_native()
    if native is None or not hasattr(native, "peak"):
        raise ConfigError(
            "`quire bench kernels` measures the native kernels, which are not built with their component `peak` here; "
            "install quire from its source, and leave QUIRE_NATIVE unset"
        )
    isa = options.isa or native.isa()
    if isa not in native.supported_isas():
        raise ConfigError(f"isa must be one of {', '.join(native.supported_isas())} on this machine, got {isa!r}")
    shapes = _shapes(options.model)
    num_threads = options.num_threads or torch.get_num_threads()
    working_set = options.working_set_bytes or default_working_set()
    setup = Setup(native, isa, num_threads, working_set, options.rows, options.lengths)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        meter = Meter(setup)
        cases = make_cases(setup, shapes, options.only)
        results = tuple(meter.measure(case, options.seconds) for case in _progress(cases, show_progress))
        provenance = find_provenance()
    finally:
        torch.set_num_threads(before)
    return KernelRecord(options.model, isa, num_threads, working_set, results, provenance)


def _shapes(model: str) -> ModelShapes:
    return QWEN3_0_6B if model == DEFAULT_MODEL else shapes_of(read_model_spec(resolve_model(model, None)))


def default_working_set(caches: Path = CACHES) -> int:
    """Return four times the size of the largest cache of this machine, at least 64 MiB."""
    return max(_LEAST_WORKING_SET, _CACHE_FACTOR * largest_cache_bytes(caches))


class Meter:
    """Measures kernels, and the machine's peaks between their calls: other programs slow down both alike."""

    def __init__(self, setup: Setup) -> None:
        self._native, self._num_threads = setup.native, setup.num_threads
        self._window = min(_READ_BYTES, setup.working_set_bytes // 256 * 256 or 256)
        size = -(-setup.working_set_bytes // self._window) * self._window
        # On huge pages if the system grants them, like the packed weights.
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._buffer = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
        self._at = 0
        self._iterations = {kind: self._calibrate(kind) for kind in ("f32", "bf16", "u8")}

    def _calibrate(self, kind: str) -> int:
        """Return the number of iterations that take about _PEAK_S."""
        iterations = 1000
        while True:
            begin = time.perf_counter()
            self._native.peak(kind, self._num_threads, iterations)
            elapsed = time.perf_counter() - begin
            if elapsed >= _PEAK_S / 2:
                return max(1, int(iterations * _PEAK_S / elapsed))
            iterations *= 2

    def _seconds_per_byte(self) -> float:
        """Return the time per byte of reading the next part of the buffer."""
        begin = time.perf_counter()
        self._native.read_memory(self._buffer.data_ptr() + self._at, self._window, self._num_threads)
        elapsed = time.perf_counter() - begin
        self._at = (self._at + self._window) % len(self._buffer)
        return elapsed / self._window

    def _seconds_per_operation(self, kind: str) -> float:
        begin = time.perf_counter()
        num_operations = self._native.peak(kind, self._num_threads, self._iterations[kind])
        return (time.perf_counter() - begin) / num_operations

    def measure(self, case: KernelCase, seconds: float) -> KernelFigure:
        """Call a kernel on its copies in turn for about `seconds`."""
        numbers = self._copies(case.num_copies)
        first = min(self._call(case, numbers, 1) for _ in range(_NUM_WARM_UP))
        calls = max(1, int(_MIN_SAMPLE_S / first))
        each = first * calls + _PEAK_S + self._window * self._seconds_per_byte()
        num_samples = min(_MAX_SAMPLES, max(_MIN_SAMPLES, int(seconds / each)))
        times: list[float] = []
        reads: list[float] = []
        peaks: list[float] = []
        for _ in range(num_samples):
            times.append(self._call(case, numbers, calls) / calls)
            reads.append(self._seconds_per_byte())
            peaks.append(self._seconds_per_operation(case.peak_kind))
        took, read, peak = _fastest_tenth(times), 1 / _fastest_tenth(reads), 1 / _fastest_tenth(peaks)
        return KernelFigure(
            kernel=case.kernel,
            number_format=case.number_format,
            shape=case.shape,
            seconds=took,
            median_seconds=statistics.median(times),
            bytes_per_s=case.num_bytes / took,
            operations_per_s=case.num_operations / took,
            bandwidth_share=case.num_bytes / took / read,
            compute_share=case.num_operations / took / peak,
            machine_bytes_per_s=read,
            machine_operations_per_s=peak,
            num_samples=num_samples,
        )

    @staticmethod
    def _copies(count: int) -> Iterator[int]:
        while True:
            yield from range(count)

    @staticmethod
    def _call(case: KernelCase, numbers: Iterator[int], calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            case.run(next(numbers))
        return time.perf_counter() - begin


def _fastest_tenth(values: list[float]) -> float:
    """Return the value below which a tenth of the values lie."""
    return sorted(values)[len(values) // 10]


def _progress(cases: Iterable[KernelCase], is_shown: bool) -> Iterable[KernelCase]:
    if not is_shown:
        return cases
    from tqdm import tqdm

    return tqdm(cases, desc="Kernels", unit="case", dynamic_ncols=True)
