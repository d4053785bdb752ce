# ruff: noqa: E402 - the interpreter is chosen, and the source tree found, before anything of either is imported
"""Test and time the GPU's kernels and whole models, from the source tree, in one run: `python bench/gpu.py --out gpu.json`.

Sections in the order of what they are worth; each result is written as soon as it is there, so that a run that is cut off has
them too. --smoke runs tiny shapes once wherever the kernels run, the interpreter included, and times nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
if "--smoke" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

import torch
from gpu_model import Place, Row, model_sections
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec, MlpSpec, MoeSpec, NormSpec, RopeSpec
from quire.kernels.cpu.sampling import DrawOptions
from quire.kernels.reference.attention import AttentionInput
from quire.kernels.reference.rope import inverse_frequencies
from quire.kernels.triton.activation import activate_launch
from quire.kernels.triton.attention import KvCache, attend_launches
from quire.kernels.triton.heads import Projections, place_heads_launch, rope_table
from quire.kernels.triton.launching import Launch, run_all
from quire.kernels.triton.linear import multiply_launches
from quire.kernels.triton.moe import expert_launches
from quire.kernels.triton.narrow_weights import pack_integers
from quire.kernels.triton.norm import Norm, add_and_normalize_launch
from quire.kernels.triton.sampling import Choices, row_options, sample_launches
from quire.kernels.triton.step import DeviceStep

_CACHE_BYTES = 120 << 20
_MAX_COPIES = 16
_REPLAYS = 20
_PAGE = 64
_SHARE_OF_KERNELS = 0.3
"""Of the time that is left after the tests, for single kernels."""

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

    def _attention(self, name: str, num_sequences: int, length: int, count: int) -> Case:
        spec = self.spec
        num_blocks = -(-length // _PAGE)
        shape = (num_sequences * num_blocks, spec.num_kv_heads, _PAGE, spec.head_dim)

        def make() -> list[Launch]:
            tables = torch.randperm(shape[0]).view(num_sequences, num_blocks)
            starts = [count * index for index in range(num_sequences + 1)]
            step = AttentionInput(torch.zeros(starts[-1]), starts, [length] * num_sequences, tables)
            q = self.random(starts[-1], spec.num_heads, spec.head_dim)
            cache = KvCache(self.random(*shape), self.random(*shape))
            return attend_launches(torch.empty_like(q), q, cache, DeviceStep.of(step, self.device), spec)

        row_bytes = 2 * spec.head_dim * 2
        num_bytes = num_sequences * (length * spec.num_kv_heads * row_bytes + count * spec.num_heads * row_bytes)
        seen = count * length - count * (count - 1) // 2
        return Case(name, make, num_bytes, 4 * num_sequences * seen * spec.num_heads * spec.head_dim)

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

    def linear(self, num_tokens: int, num_bits: int) -> Case:
        """A linear layer with integer weights."""
        num_rows, num_columns, limit = self.inner, -(-self.hidden // 128) * 128, 1 << (num_bits - 1)

        def make() -> list[Launch]:
            codes = torch.randint(-limit, limit, (num_rows, num_columns), dtype=torch.int8)
            weight = pack_integers(codes, torch.rand(num_rows, num_columns // 128))
            moved = {name: getattr(weight, name).to(self.device) for name in ("codes", "scales")}
            x = self.random(num_tokens, num_columns)
            out = self.random(num_tokens, num_rows)
            return multiply_launches(out, x, type(weight)(**moved, **_rest_of(weight)))

        flops = 2 * num_tokens * num_rows * num_columns
        return Case(f"linear int{num_bits} {num_tokens}", make, num_rows * num_columns * num_bits // 8, flops)

    def all(self) -> list[Case]:
        """Return the cases, what matters most first."""
        if self.is_tiny:
            return [
                self.decode(2, 300), self.prefill(20, 90), self.norm(3), self.heads(3), self.activation(3),
                self.sampler(2, False), self.sampler(2, True), self.experts(1), self.experts(9), self.linear(2, 4),
            ]  # fmt: skip
        cases = [self.decode(num, length) for num, length in ((1, 1024), (1, 32768), (64, 1024), (64, 4096), (256, 600))]
        cases += [self.prefill(num, length) for num, length in ((2048, 2048), (8192, 8192), (2048, 32768))]
        cases += [self.sampler(num, has_cuts) for num in (1, 64, 256) for has_cuts in (False, True)]
        cases += [case(num) for num in (1, 64, 4096) for case in (self.norm, self.heads, self.activation)]
        cases += [self.experts(num) for num in (1, 8, 64, 1024, 4096)]
        return cases + [self.linear(num, bits) for bits in (4, 8) for num in (1, 16, 64)]


def _rest_of(weight: object) -> dict[str, object]:
    return {name: getattr(weight, name) for name in ("offsets", "group_size", "scale_rows", "run", "base")}


def time_case(case: Case) -> tuple[float, float]:
    """Return the median and the spread (third quartile less first), in us, of one run of a case in a graph.

    Inputs take turns, so that they do not stay in the L2 cache where they would not in a model.
    """
    copies = max(1, min(_MAX_COPIES, -(-_CACHE_BYTES // max(case.num_bytes, 1))))
    sets = [case.make() for _ in range(copies)]
    for launches in sets:
        run_all(launches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launches in sets:
            run_all(launches)
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 1000 / copies)
    quartiles = statistics.quantiles(times, n=4)
    return statistics.median(times), quartiles[2] - quartiles[0]


def _seconds(run: Callable[[], object], times: int) -> float:
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def measure_roofline() -> dict[str, float]:
    """Return the bandwidths of copying and of reading, TB/s, and the rate of bf16 matrix products, TFLOP/s."""
    big = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(big)
    copy_s, read_s = _seconds(lambda: target.copy_(big), 10), _seconds(lambda: big.sum(), 10)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    return {
        "copy_tbs": 2 * big.nbytes / copy_s / 1e12,
        "read_tbs": big.nbytes / read_s / 1e12,
        "bf16_tflops": 2 * 8192**3 / _seconds(lambda: a @ b, 10) / 1e12,
    }


def run_tests(limit_s: float) -> dict[str, object]:
    """Run the kernels' tests on this device; returns the exit code and the end of the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/unit/kernels/gpu", "-m", "slow or not slow"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        return {"returncode": None, "tail": f"stopped after {error.timeout} s"}
    return {"returncode": done.returncode, "tail": (done.stdout + done.stderr)[-3000:]}


def run_models(place: Place, deadline: float) -> Iterator[Row]:
    """Yield, and print, what whole models do; a section that fails says so, and the next one begins."""
    for section in model_sections(place):
        if time.monotonic() > deadline:
            return
        try:
            for row in section(time.perf_counter() + deadline - time.monotonic()):
                print(row, flush=True)
                yield row
        except Exception as error:  # noqa: BLE001 - the device is lent for minutes: the other sections are to be had all the same
            print(f"a section failed: {error}", flush=True)
            yield {"section": "failed", "error": f"{type(error).__name__}: {error}"}
        gc.collect()
        if place.device.type == "cuda":
            torch.cuda.empty_cache()


def measure(budget_s: float, out: Path) -> None:
    """Run every section and write the results so far after each."""
    deadline = time.monotonic() + budget_s
    properties = torch.cuda.get_device_properties(0)
    environment = {"torch": torch.__version__, "device": properties.name, "multiprocessors": properties.multi_processor_count}
    roofline = measure_roofline()
    kernels: list[dict[str, object]] = []
    found: dict[str, object] = {"env": environment, "roofline": roofline, "kernels": kernels}
    found["tests"] = run_tests(budget_s / 3)
    print(f"{environment}\n{roofline}\n{found['tests']}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Place(
            "cuda", torch.device("cuda", 0), roofline["read_tbs"] * 1e12, roofline["bf16_tflops"] * 1e12, Path(folder)
        )
        found["models"] = models = []
        kept_s = _SHARE_OF_KERNELS * (deadline - time.monotonic())
        for row in run_models(place, deadline - kept_s):
            models.append(row)
            out.write_text(json.dumps(found, indent=1))
    for case in Shapes(torch.device("cuda"), is_tiny=False).all():
        if time.monotonic() > deadline:
            found["cut_off_at"] = case.name
            break
        try:
            median_us, spread_us = time_case(case)
        except Exception as error:  # noqa: BLE001 - as in run_models
            kernels.append({"name": case.name, "error": f"{type(error).__name__}: {error}"})
            print(f"{case.name} failed: {error}", flush=True)
            continue
        bound_us = max(case.num_bytes / roofline["read_tbs"], case.num_flops / roofline["bf16_tflops"]) / 1e6
        row = {"name": case.name, "us": median_us, "spread_us": spread_us, "share": bound_us / median_us}
        kernels.append(row)
        out.write_text(json.dumps(found, indent=1))
        print(f"{case.name:32} {median_us:9.1f} us  +- {spread_us:6.1f}  {row['share']:5.2f} of the roofline", flush=True)
        torch.cuda.empty_cache()
    out.write_text(json.dumps(found, indent=1))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Test and time the GPU kernels.")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="where the results are written, as JSON")
    parser.add_argument("--budget", type=float, default=470.0, help="seconds after which no further case is begun")
    parser.add_argument("--smoke", action="store_true", help="run tiny shapes once, without a GPU, and time nothing")
    options = parser.parse_args()
    if options.smoke:
        for case in Shapes(torch.device("cpu"), is_tiny=True).all():
            run_all(case.make())
            print(case.name)
        with tempfile.TemporaryDirectory() as folder:
            place = Place("interpreter", torch.device("cpu"), 1e10, 1e10, Path(folder))
            rows = list(run_models(place, time.monotonic() + options.budget))
        sys.exit(any(row["section"] == "failed" for row in rows))
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --smoke tries the script without one")
    measure(options.budget, options.out)


if __name__ == "__main__":
    main()
