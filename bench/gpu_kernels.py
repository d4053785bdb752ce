"""Single kernels on a GPU, for bench/gpu.py: each in a graph, beside the roofline of the card."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec, MlpSpec, MoeSpec, NormSpec, RopeSpec
from quire.kernels.cpu.sampling import DrawOptions
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.reference.rope import inverse_frequencies
from quire.kernels.triton.activation import activate_launch
from quire.kernels.triton.attention import KvCache, attend_launches
from quire.kernels.triton.launching import Launch, run_all
from quire.kernels.triton.linear import in_order_launches
from quire.kernels.triton.moe import expert_launches
from quire.kernels.triton.norm import Norm, add_and_normalize_launch
from quire.kernels.triton.qk_rope_store import Projections, place_heads_launch, rope_table
from quire.kernels.triton.sampling import Choices, row_options, sample_launches
from quire.kernels.triton.step import DeviceAttentionMetadata

_CACHE_BYTES = 120 << 20
_MAX_COPIES = 16
_REPLAYS = 20
_PAGE = 64

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed: `make` returns the launches on fresh tensors; num_bytes and num_flops are those of one run."""

    name: str
    make: Callable[[], list[Launch]]
    num_bytes: int
    num_flops: int = 0


class Shapes:
    """Makes cases on a device; sizes are those of Qwen3-8B, or tiny ones."""

    def __init__(self, device: torch.device, is_tiny: bool) -> None:
        self.device, self.is_tiny = device, is_tiny
        self.spec = AttentionSpec(4, 2, 32, 32**-0.5) if is_tiny else AttentionSpec(32, 8, 128, 128**-0.5)
        self.hidden, self.inner = (96, 160) if is_tiny else (4096, 12288)

    def random(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        """Return normal values."""
        return torch.randn(shape, device=self.device).to(dtype)

    def decode(self, num_sequences: int, length: int) -> Case:
        """One token for each of some sequences."""
        return self._attention(f"attend decode {num_sequences} x {length}", num_sequences, length, 1)

    def prefill(self, num_tokens: int, length: int) -> Case:
        """The last tokens of one sequence."""
        return self._attention(f"attend prefill {num_tokens} of {length}", 1, length, num_tokens)

    def with_float8_cache(self, num_sequences: int, length: int) -> Case:
        """One token for each of some sequences, keys and values in float8 with a scale per token and head."""
        name = f"attend decode {num_sequences} x {length}, fp8 cache"
        return self._attention(name, num_sequences, length, 1, torch.float8_e4m3fn)

    def with_window(self, num_sequences: int, length: int, count: int, window: int) -> Case:
        """The last tokens of some sequences, each of which sees those of a window."""
        name = f"attend {count} of {num_sequences} x {length}, window {window}"
        return self._attention(name, num_sequences, length, count, BF16, window)

    def _attention(
        self, name: str, num_sequences: int, length: int, count: int, kv_dtype: torch.dtype = BF16, window: int | None = None
    ) -> Case:
        spec = replace(self.spec, window=window)

        def make() -> list[Launch]:
            q, cache, step = self.attention_inputs(num_sequences, length, count, kv_dtype)
            return attend_launches(torch.empty_like(q), q, cache, step, spec)

        kept_bytes = 2 * (spec.head_dim * kv_dtype.itemsize + (0 if kv_dtype == BF16 else 4))
        seen_keys = length if window is None else min(length, window + count - 1)
        num_bytes = num_sequences * (seen_keys * spec.num_kv_heads * kept_bytes + count * spec.num_heads * 4 * spec.head_dim)
        ends = range(length - count + 1, length + 1)
        seen = sum(ends) if window is None else sum(min(end, window) for end in ends)
        return Case(name, make, num_bytes, 4 * num_sequences * seen * spec.num_heads * spec.head_dim)

    def attention_inputs(
        self, num_sequences: int, length: int, count: int, kv_dtype: torch.dtype = BF16, page: int = _PAGE
    ) -> tuple[Tensor, KvCache, DeviceAttentionMetadata]:
        """Return q, keys and values, and the step, of the last `count` tokens of each of some sequences."""
        num_blocks, spec = -(-length // page), self.spec
        shape = (num_sequences * num_blocks, spec.num_kv_heads, page, spec.head_dim)
        tables = torch.randperm(shape[0]).view(num_sequences, num_blocks)
        starts = [count * index for index in range(num_sequences + 1)]
        step = AttentionMetadata(torch.zeros(starts[-1]), starts, [length] * num_sequences, tables)
        stored = [self.random(*shape, dtype=kv_dtype) for _ in "kv"]
        scales = [torch.rand(shape[:3], device=self.device) for _ in "kv"] if kv_dtype != BF16 else []
        q = self.random(starts[-1], spec.num_heads, spec.head_dim)
        return q, KvCache(*stored, *scales), DeviceAttentionMetadata.of(step, self.device)

    def norm(self, num_tokens: int) -> Case:
        """The residual stream and its norm."""

        def make() -> list[Launch]:
            x, branch = self.random(num_tokens, self.hidden), self.random(num_tokens, self.hidden)
            norm = Norm(NormSpec("rms", 1e-6), self.random(self.hidden))
            return [add_and_normalize_launch(torch.empty_like(x), x, x, branch, norm)]

        return Case(f"add and normalize {num_tokens}", make, 8 * num_tokens * self.hidden)

    def heads(self, num_tokens: int) -> Case:
        """Norm, rope and store."""
        spec, rope = self.spec, RopeSpec(self.spec.head_dim, 1e6)
        counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]

        def make() -> list[Launch]:
            qkv = self.random(num_tokens, sum(counts), spec.head_dim)
            cache = KvCache(*(self.random(-(-num_tokens // _PAGE), spec.num_kv_heads, _PAGE, spec.head_dim) for _ in "kv"))
            norm = Norm(NormSpec("rms", 1e-6), self.random(spec.head_dim))
            places = torch.arange(num_tokens, device=self.device)
            table = rope_table(rope, inverse_frequencies(rope, num_tokens).to(self.device), num_tokens, BF16)
            parts = Projections(*qkv.split(counts, 1))
            out = self.random(num_tokens, spec.num_heads, spec.head_dim)
            return [place_heads_launch(out, parts, cache, places, places, table, (norm, norm))]

        return Case(f"place heads {num_tokens}", make, 4 * num_tokens * sum(counts) * spec.head_dim)

    def activation(self, num_tokens: int) -> Case:
        """silu(gate) * up."""

        def make() -> list[Launch]:
            gate, up = self.random(num_tokens, 2 * self.inner).chunk(2, -1)
            return [activate_launch(self.random(num_tokens, self.inner), gate, up, "silu")]

        return Case(f"activate {num_tokens}", make, 6 * num_tokens * self.inner)

    def sampler(self, num_rows: int, has_cuts: bool) -> Case:
        """A token per row."""
        vocab_size = 999 if self.is_tiny else 151936
        draw = DrawOptions(1.25, False, 50 if has_cuts else 0, 0.9 if has_cuts else 1.0, float("-inf"), 7, 11)

        def make() -> list[Launch]:
            options = row_options([draw._replace(seed=row) for row in range(num_rows)], vocab_size, self.device)
            tokens = torch.empty(num_rows, dtype=torch.int64, device=self.device)
            logits = 3 * self.random(num_rows, vocab_size, dtype=torch.float32)
            return sample_launches(Choices(tokens, tokens.int()), logits, options, has_cuts)

        name = "top-k, top-p" if has_cuts else "temperature"
        return Case(f"sample {num_rows}, {name}", make, 4 * num_rows * vocab_size)

    def experts(self, num_tokens: int) -> Case:
        """The experts of Qwen3-30B-A3B."""
        num_experts, top_k, inner, width = (4, 2, 48, 64) if self.is_tiny else (128, 8, 768, 2048)
        spec = MoeSpec(num_experts, top_k, MlpSpec(inner, "silu"))

        def make() -> list[Launch]:
            x, logits = self.random(num_tokens, width), self.random(num_tokens, num_experts)
            weights = self.random(num_experts, 2 * inner, width), self.random(num_experts, width, inner)
            return expert_launches(torch.empty_like(x), x, logits, spec, *weights)

        used = min(num_experts, num_tokens * top_k)
        return Case(f"experts {num_tokens}", make, 6 * used * inner * width, 6 * num_tokens * top_k * inner * width)

    def linear_in_order(self, num_tokens: int) -> Case:
        """A linear layer with bf16 weights whose sums have one order."""
        num_rows, num_columns = self.inner, self.hidden

        def make() -> list[Launch]:
            x, weight = self.random(num_tokens, num_columns), self.random(num_rows, num_columns)
            return in_order_launches(self.random(num_tokens, num_rows), x, weight)

        flops = 2 * num_tokens * num_rows * num_columns
        return Case(f"linear in order {num_tokens}", make, 2 * num_rows * num_columns, flops)

    def all(self) -> list[Case]:
        """Return the cases, what matters most first."""
        if self.is_tiny:
            return [
                self.decode(2, 300), self.prefill(20, 90), self.norm(3), self.heads(3), self.activation(3),
                self.sampler(2, False), self.sampler(2, True), self.experts(1), self.experts(9), self.linear_in_order(3),
                self.with_float8_cache(2, 300), self.with_window(1, 90, 5, 20),
            ]  # fmt: skip
        cases = [self.decode(num, length) for num, length in ((1, 1024), (1, 32768), (64, 1024), (64, 4096), (256, 600))]
        cases += [self.prefill(num, length) for num, length in ((2048, 2048), (8192, 8192), (2048, 32768))]
        cases += [self.with_float8_cache(num, length) for num, length in ((1, 32768), (64, 1024), (64, 4096))]
        cases += [self.with_window(64, 4096, 1, 1024), self.with_window(1, 8192, 8192, 1024)]
        cases += [self.sampler(num, has_cuts) for num in (1, 64, 256) for has_cuts in (False, True)]
        cases += [case(num) for num in (1, 64, 4096) for case in (self.norm, self.heads, self.activation)]
        cases += [self.experts(num) for num in (1, 8, 64, 1024, 4096)]
        return [*cases, self.prefill(32, 32768), *(self.linear_in_order(num) for num in (1, 64, 256, 4096))]


def time_case(case: Case) -> tuple[float, float]:
    """Return the median and the spread (third quartile less first), in us, of one run of a case in a graph.

    Inputs take turns, so that they do not stay in the L2 cache where they would not in a model.
    """
    copies = max(1, min(_MAX_COPIES, -(-_CACHE_BYTES // max(case.num_bytes, 1))))
    sets = [case.make() for _ in range(copies)]
    return time_runs([partial(run_all, launches) for launches in sets])


def time_runs(runs: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Return the median and the spread (third quartile less first), in us, of one of several runs that one graph has."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 1000 / len(runs))
    quartiles = statistics.quantiles(times, n=4)
    return statistics.median(times), quartiles[2] - quartiles[0]


def _seconds(run: Callable[[], object], times: int) -> float:
    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    run()
    wait()
    start = time.perf_counter()
    for _ in range(times):
        run()
    wait()
    return (time.perf_counter() - start) / times


def environment(device: torch.device) -> dict[str, object]:
    """Return what the figures were measured on."""
    found: dict[str, object] = {"torch": torch.__version__, "triton": triton.__version__}
    if device.type != "cuda":
        return found
    properties = torch.cuda.get_device_properties(device)
    return found | {"device": properties.name, "multiprocessors": properties.multi_processor_count}


def measure_roofline(device: torch.device) -> dict[str, float]:
    """Return the bandwidths of copying and of reading, TB/s, and the rate of bf16 matrix products, TFLOP/s."""
    is_tiny = device.type != "cuda"
    big = torch.empty(1 << (12 if is_tiny else 30), dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(big)
    copy_s, read_s = _seconds(lambda: target.copy_(big), 10), _seconds(lambda: big.sum(), 10)
    size = 64 if is_tiny else 8192
    a, b = (torch.randn(size, size, device=device, dtype=BF16) for _ in range(2))
    return {
        "copy_tbs": 2 * big.nbytes / copy_s / 1e12,
        "read_tbs": big.nbytes / read_s / 1e12,
        "bf16_tflops": 2 * size**3 / _seconds(lambda: a @ b, 10) / 1e12,
    }


def case_rows(
    section: str, cases: Iterable[Case], is_smoke: bool, peaks: tuple[float, float], until_s: float
) -> Iterator[dict[str, object]]:
    """Yield the times of kernels, with their share of the roofline; is_smoke: run each once, tiny."""
    for case in cases:
        if time.perf_counter() > until_s:
            return
        if is_smoke:
            run_all(case.make())
            yield {"section": section, "name": case.name}
            continue
        median_us, spread_us = time_case(case)
        bound_us = max(case.num_bytes / peaks[0], case.num_flops / peaks[1]) * 1e6
        yield {"section": section, "name": case.name, "us": median_us, "spread_us": spread_us, "share": bound_us / median_us}
        torch.cuda.empty_cache()
