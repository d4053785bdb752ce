"""Tuning: find the fastest tiles for the kernels on a GPU, and write them as a table that engines then load."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.contracts.model_spec import AttentionSpec, MlpSpec, MoeSpec, NormSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.triton.attention import KvCache, attend_launches
from quire.kernels.triton.compiling import CompiledKernel, compile_launch
from quire.kernels.triton.device_traits import DeviceTraits, choose_traits, device_traits
from quire.kernels.triton.float8 import float8_launches
from quire.kernels.triton.fused_attention import ProjectedAttention
from quire.kernels.triton.fused_linear import Epilogue, fused_linear_launch
from quire.kernels.triton.fused_quantized import fused_quantized_launch
from quire.kernels.triton.hopper_linear import large_batch_launches, tile_of
from quire.kernels.triton.launching import Launch
from quire.kernels.triton.linear import dequantize, multiply_launches
from quire.kernels.triton.moe import expert_launches
from quire.kernels.triton.norm import Norm
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight, pack_float8, pack_integers
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.kernels.triton.tile_table import Number, TileRule, TileTable, choose_table, user_path, using
from quire.model.device_linear import DEQUANTIZE_FROM

logger = get_logger(__name__)

_LEAST_GAIN = 0.03
"""Minimum improvement of a tile over the present one: less may be chance."""

_PAGE = 64
_CACHE_BYTES = 128 << 20  # more than a GPU's L2 cache
_REPLAYS = 15
_MANY_TOKENS = 1 << 30
_NOT_RUN = ("linear-large-batch",)
"""Kernels that are tuned only where they are named: they have not run on a GPU, which a fault in their barriers would stop."""

Tile = Mapping[str, int | bool]


class DequantizedProduct(NamedTuple):
    """A product by a library, of a weight that is dequantised first; run as a Launch is."""

    out: Tensor
    x: Tensor
    weight: DeviceQuantizedWeight

    def run(self) -> None:
        """Write x @ weight^T to out."""
        torch.mm(self.x, dequantize(self.weight, self.x.dtype).t(), out=self.out)


class TuningCase(NamedTuple):
    """One entry of a table: the kernel, the shapes that it applies to, launches of one of them, and the tiles to try.

    make  returns the launches with the table in use, on tensors that may be reused between calls
    """

    kernel: str
    when: Mapping[str, Number]
    make: Callable[[], Sequence[Launch | DequantizedProduct]]
    candidates: Sequence[Tile]


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a program; tiles that spill registers are refused if there is one that does not."""

    max_shared_bytes: int


def tune(
    cases: Iterable[TuningCase],
    base: TileTable,
    limits: Limits,
    measure: Callable[[Sequence[Launch | DequantizedProduct]], float],
    inspect: Callable[[Launch], CompiledKernel],
    save: Callable[[TileTable], object] = lambda table: None,
) -> TileTable:
    """Return a table with the fastest tile for each case. Tiles that do not compile or run are left out, with a warning.

    base     the table with the present tile of each case, and of kernels that are not tuned; tiles that were found count for
             the cases after theirs
    measure  returns the seconds that launches take
    inspect  compiles a launch: tiles over the limits are not run
    save     gets the table after each case
    """
    rules: dict[str, list[TileRule]] = {}
    for case in cases:
        present = _present_tile(case, base)
        best, best_s, first_s = present, float("inf"), float("inf")
        for tile in [present, *(tile for tile in case.candidates if tile != present)]:
            with using(_table(base, {case.kernel: [TileRule({}, tile)]}).over(_table(base, rules)).over(base)):
                try:
                    launches = case.make()
                    if not _is_within(launches, limits, inspect):
                        continue
                    seconds = measure(launches)
                except Exception as error:  # noqa: BLE001 - the compiler's are of many types
                    kind = type(error).__name__
                    logger.warning("the tile %s of %s is left out: %s: %s", dict(tile), case.kernel, kind, error)
                    continue
            if tile is present:
                first_s = seconds
            if seconds < min(best_s, first_s * (1 - _LEAST_GAIN)) or tile is present:
                best, best_s = tile, seconds
        if best_s == float("inf"):
            logger.warning("no tile of %s for %s runs within the limits of %s", case.kernel, dict(case.when), base.device)
            continue
        logger.info("%s %s: %s, %.1f us, before %.1f us", case.kernel, dict(case.when), dict(best), best_s * 1e6, first_s * 1e6)
        rules.setdefault(case.kernel, []).append(TileRule(case.when, best))
        save(_table(base, rules))
    return _table(base, rules)


def _table(base: TileTable, rules: Mapping[str, Sequence[TileRule]]) -> TileTable:
    return TileTable(base.device, base.capability, {kernel: tuple(found) for kernel, found in rules.items()})


def _present_tile(case: TuningCase, base: TileTable) -> Tile:
    # A bound is itself within the bound.
    shape = {name.partition("_")[2] if name.startswith(("max_", "min_")) else name: value for name, value in case.when.items()}
    return base.find(case.kernel, shape)


def _is_within(
    launches: Sequence[Launch | DequantizedProduct], limits: Limits, inspect: Callable[[Launch], CompiledKernel]
) -> bool:
    compiled = [inspect(launch) for launch in launches if not isinstance(launch, DequantizedProduct)]
    return all(kernel.shared_bytes <= limits.max_shared_bytes and kernel.stack_bytes == 0 for kernel in compiled)


def tune_device(output: Path | None, kernels: Sequence[str] | None = None) -> Path:
    """Tune the kernels on the current GPU, write the table, and return its path.

    output   None: where engines on this device look for it, see tile_table.user_path
    kernels  None: all that have run on a GPU

    Raises ConfigError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError(f"tiles are measured on a GPU, and torch {torch.__version__} finds none here; run this where one is")
    device = torch.device("cuda", torch.cuda.current_device())
    name, traits = torch.cuda.get_device_name(device), DeviceTraits.of(device)
    choose_traits(traits)
    base = TileTable(name, traits.name, choose_table(name, traits.name, is_strict=False).rules)
    limits = Limits(traits.shared_bytes)
    cases = choose_cases(tuning_cases(device), kernels, name)
    inspected: dict[str, CompiledKernel] = {}

    def inspect(launch: Launch) -> CompiledKernel:
        absent = [name for name, value in launch.arguments.items() if value is None]
        key = repr((launch.kernel.fn.__name__, absent, launch.constants, launch.options))
        if key not in inspected:
            inspected[key] = compile_launch(launch, traits.arch)
        return inspected[key]

    path = user_path(name) if output is None else output
    path.parent.mkdir(parents=True, exist_ok=True)

    def save(table: TileTable) -> None:
        path.write_text(json.dumps(table.to_json(), indent=1) + "\n", encoding="utf-8")

    save(tune(cases, base, limits, _measure_on_gpu, inspect, save))
    return path


def choose_cases(cases: Sequence[TuningCase], kernels: Sequence[str] | None, device: str) -> list[TuningCase]:
    """Return the cases of these kernels, or of all that have run on a GPU. Raises ConfigError for a name that no case has."""
    known = list(dict.fromkeys(case.kernel for case in cases))
    chosen = [kernel for kernel in known if kernel not in _NOT_RUN] if kernels is None else kernels
    if unknown := [kernel for kernel in chosen if kernel not in known]:
        raise ConfigError(f"--kernel must be one of {', '.join(known)} on {device}, got {', '.join(unknown)}")
    return [case for case in cases if case.kernel in chosen]


def _measure_on_gpu(launches: Sequence[Launch | DequantizedProduct]) -> float:
    for launch in launches:
        launch.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch.run()
    flushed = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(_REPLAYS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()  # a model's other layers would have replaced the cache contents
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1000)
    return statistics.median(times)


def tuning_cases(device: torch.device, is_tiny: bool = False) -> list[TuningCase]:
    """Return the cases of the GPU in use: bf16 activations in the shapes of Qwen3-8B and 30B-A3B; tiny ones have few tokens."""
    shapes, traits = _Shapes(device, is_tiny), device_traits()
    cases = [
        shapes.attention("attention-decode" if is_decode else "attention-prefill", head_dim, kv_dtype)
        for is_decode in (True, False)
        for head_dim in (64, 128, 256)
        for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn if traits.has_float8 else torch.int8)
    ]
    if traits.is_hopper:
        cases += [shapes.prompts(head_dim) for head_dim in (64, 128)]
    sizes = [shapes.fused_sizes[0]] if is_tiny else shapes.fused_sizes
    cases += [shapes.fused_linear(*size, num_tokens) for size in sizes for num_tokens in (1, 8, 16)]
    cases.append(shapes.fused_attention())
    cases += [shapes.linear(most) for most in (16, 32, _MANY_TOKENS)]
    if traits.is_hopper:
        cases += [shapes.large_batch(most) for most in (128, DEQUANTIZE_FROM - 1, 512, _MANY_TOKENS)]
    cases += [
        shapes.fused_quantized(most, is_packed, has_norm)
        for most in (1, 8)
        for is_packed in (False, True)
        for has_norm in (True, False)
    ]
    if traits.has_float8:
        cases += [shapes.float8(most) for most in (256, _MANY_TOKENS)]
    return cases + [shapes.experts(most) for most in (8, 32, 64, _MANY_TOKENS)]


class _Shapes:
    def __init__(self, device: torch.device, is_tiny: bool) -> None:
        self._device, self._is_tiny = device, is_tiny
        self._rows, self._columns = (96, 256) if is_tiny else (12288, 4096)

    def attention(self, kernel: str, head_dim: int, kv_dtype: torch.dtype) -> TuningCase:
        is_decode = kernel == "attention-decode"
        spec = (
            AttentionSpec(4, 2, head_dim, head_dim**-0.5) if self._is_tiny else AttentionSpec(32, 8, head_dim, head_dim**-0.5)
        )
        num_sequences, length = (64, 2048) if is_decode else (1, 4096)
        if self._is_tiny:
            num_sequences, length = 1, 70
        count = 1 if is_decode else length
        num_blocks = -(-length // _PAGE)
        q = self._random(num_sequences * count, spec.num_heads, head_dim)
        shape = (num_sequences * num_blocks, spec.num_kv_heads, _PAGE, head_dim)
        is_quantised = kv_dtype != torch.bfloat16
        scales = [torch.ones(shape[:3], device=self._device)] * 2 if is_quantised else []
        cache = KvCache(self._random(*shape).to(kv_dtype), self._random(*shape).to(kv_dtype), *scales)
        starts = [count * index for index in range(num_sequences + 1)]
        tables = torch.arange(shape[0]).view(num_sequences, num_blocks)
        step = AttentionMetadata(torch.zeros(starts[-1]), starts, [length] * num_sequences, tables)

        def make() -> list[Launch]:
            return attend_launches(torch.empty_like(q), q, cache, DeviceAttentionMetadata.of(step, self._device), spec)

        when = {"dtype": "bfloat16", "head_dim": head_dim, "is_quantised": is_quantised}
        keys, stages = (32, 64, 128), (2, 3)
        if is_decode:
            found = _grid(keys=keys, num_warps=(2, 4, 8), num_stages=(*stages, 4))
            return TuningCase(
                kernel, {**when, "group": spec.num_heads // spec.num_kv_heads, "is_even_group": True}, make, found
            )
        return TuningCase(kernel, when, make, _grid(rows=(64, 128), keys=keys, num_warps=(4, 8), num_stages=stages))

    def prompts(self, head_dim: int) -> TuningCase:
        # After the tiles of the kernel that is used otherwise.
        case = self.attention("attention-prefill", head_dim, torch.bfloat16)
        found = _grid(is_specialized=(True,), keys=(64, 128), num_stages=(2, 3), takes_turns=(False, True))
        return case._replace(kernel="attention-prefill-hopper", candidates=found)

    fused_sizes = (
        (6144, 1024, True), (4096, 1024, False), (1024, 2048, False), (1024, 3072, False),
        (24576, 4096, True), (6144, 4096, False), (4096, 4096, False), (4096, 12288, False),
    )  # fmt: skip
    """Rows and columns of the linear layers of Qwen3-0.6B and 8B, and whether they are of gate and up."""

    def fused_linear(self, num_rows: int, num_columns: int, is_gated: bool, num_tokens: int) -> TuningCase:
        when = {"dtype": "bfloat16", "tokens": num_tokens, "rows": num_rows, "columns": num_columns}
        if self._is_tiny:
            num_rows, num_columns = 48, 96
        count = max(2, min(16, _CACHE_BYTES // (2 * num_rows * num_columns)))  # so that launches overlap as in a model
        weights = [self._random(num_rows, num_columns) for _ in range(2 if self._is_tiny else count)]
        x, norm = self._random(num_tokens, num_columns), Norm(NormSpec("rms", 1e-6), self._random(num_columns))
        out = self._random(num_tokens, num_rows // 2 if is_gated else num_rows)
        epilogue = Epilogue(None, "silu", True) if is_gated else Epilogue()
        has_norm = num_rows > num_columns

        def make() -> list[Launch]:
            return [fused_linear_launch(out, x, weight, norm if has_norm else None, epilogue) for weight in weights]

        if num_tokens == 1:
            found = _grid(rows=(4, 8), columns=(1024,), splits=(1,), early=(1, 2, 4), num_warps=(4, 8), num_stages=(2, 3))
        else:
            found = _grid(
                rows=(8,) * (num_tokens == 16), columns=(512, 1024), splits=(4,), early=(2, 6), num_warps=(4,), num_stages=(2,)
            )
            found += _grid(rows=(16, 32), columns=(1024,), splits=(8,), early=(1, 3), num_warps=(8,), num_stages=(2,))
            found += _grid(rows=(16, 32), columns=(1024,), splits=(4,), early=(1,), num_warps=(4,), num_stages=(2,))
            found += _grid(rows=(32, 64), columns=(512,), splits=(4,), early=(1, 2), num_warps=(8,), num_stages=(2, 3))
            found += _grid(rows=(16, 32), columns=(256,), splits=(4,), early=(1, 2), num_warps=(4,), num_stages=(4,))
            found += _grid(rows=(64,), columns=(128,), splits=(2,), early=(1, 2), num_warps=(4,), num_stages=(4,))
        return TuningCase("fused-linear", when, make, found)

    def fused_attention(self) -> TuningCase:
        spec = AttentionSpec(4, 2, 32, 0.2) if self._is_tiny else AttentionSpec(16, 8, 128, 128**-0.5)
        length = 70 if self._is_tiny else 960
        num_blocks = -(-length // _PAGE)
        arrived = torch.zeros(16, spec.num_kv_heads, dtype=torch.int32, device=self._device)
        attention = ProjectedAttention(spec, None, None, arrived)
        cache = KvCache(*(self._random(16 * num_blocks, spec.num_kv_heads, _PAGE, spec.head_dim) for _ in "kv"))
        tables = torch.arange(16 * num_blocks).view(16, num_blocks)

        def make() -> list[Launch]:
            launches = []
            for count in (1, 16):  # one choice for both, as it decides the order of sums
                places = AttentionMetadata(
                    torch.full((count,), length - 1), [*range(count + 1)], [length] * count, tables[:count]
                )
                step = DeviceAttentionMetadata.of(places, self._device)
                qkv = self._random(count, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
                out = self._random(count, spec.num_heads * spec.head_dim)
                launches.append(attention.launch(out, qkv, cache, step, step.slots))
            return launches

        found = _grid(chunk=(64, 128, 256), num_stages=(2, 3))
        return TuningCase("fused-attention", {"num_kv_heads": 8, "head_dim": 128}, make, found)

    def linear(self, most: int) -> TuningCase:
        weight = self._integers(self._rows, self._columns)
        x = self._random(self._num_tokens(most, 128), self._columns)

        def make() -> list[Launch]:
            return multiply_launches(self._random(len(x), self._rows), x, weight)

        tokens = [tokens for tokens in (16, 32, 64, 128) if tokens <= max(most, 16)]
        candidates = _grid(rows=(64, 128), tokens=tokens, num_warps=(4, 8), num_stages=(3, 4, 5))
        return TuningCase("linear", {"dtype": "bfloat16", "max_tokens": most, "has_offsets": False}, make, candidates)

    def large_batch(self, most: int) -> TuningCase:
        weight, num_tokens = self._integers(self._rows, self._columns), self._num_tokens(most, 2048)
        x, out = (self._random(num_tokens, size) for size in (self._columns, self._rows))

        def make() -> Sequence[Launch | DequantizedProduct]:
            tile = tile_of(x, weight)
            if tile is not None:
                return large_batch_launches(out, x, weight, tile)
            return [DequantizedProduct(out, x, weight)] if num_tokens >= DEQUANTIZE_FROM else multiply_launches(out, x, weight)

        found = _grid(is_specialized=(True,), tokens=(64, 128), num_stages=(3, 4))
        found += _grid(is_specialized=(True,), tokens=(256,), num_stages=(2, 3))
        return TuningCase("linear-large-batch", {"dtype": "bfloat16", "max_tokens": most}, make, found)

    def fused_quantized(self, most: int, is_packed: bool, has_norm: bool) -> TuningCase:
        """A fused product of few tokens: norm, gate and up of weights with many rows, or down."""
        num_rows, num_columns = (2 * self._rows, self._columns) if has_norm else (self._columns, self._rows)
        weight = self._integers(num_rows, num_columns) if is_packed else self._float8(num_rows, num_columns)
        x = self._random(min(most, 5) if self._is_tiny else most, num_columns)
        norm = Norm(NormSpec("rms", 1e-6), self._random(num_columns)) if has_norm else None
        epilogue = Epilogue(activation="silu", is_gated=True) if has_norm else Epilogue(residual_scale=1.0)

        def make() -> list[Launch]:
            out = self._random(len(x), num_rows // 2 if has_norm else num_rows)
            return [fused_quantized_launch(out, x, weight, norm, epilogue)]

        fetched_bytes = (0, 16 << 10, 64 << 10)
        candidates = _grid(rows=(16, 32, 64), bytes=(0,), num_warps=(4, 8), num_stages=(3, 4, 6), fetched_bytes=fetched_bytes)
        if most == 1:
            candidates += _grid(
                rows=(4, 8, 16), bytes=(1024, 2048, 4096), num_warps=(4, 8), num_stages=(3,), fetched_bytes=fetched_bytes
            )
        when = {"max_tokens": most, "is_packed": is_packed, "has_norm": has_norm}
        return TuningCase("fused-quantized", when, make, candidates)

    def float8(self, most: int) -> TuningCase:
        weight, x = self._float8(self._rows, self._columns), self._random(self._num_tokens(most, 2048), self._columns)

        def make() -> list[Launch]:
            return float8_launches(self._random(len(x), self._rows), x, weight)

        candidates = _grid(rows=(64, 128, 256), tokens=(64, 128), num_warps=(4, 8, 16), num_stages=(3, 4))
        return TuningCase("float8", {"max_tokens": most}, make, candidates)

    def experts(self, most: int) -> TuningCase:
        num_experts, top_k, inner, width = (4, 2, 48, 64) if self._is_tiny else (128, 8, 768, 2048)
        spec = MoeSpec(num_experts, top_k, MlpSpec(inner, "silu"))
        num_tokens = self._num_tokens(most * num_experts // top_k, 4096)
        x, logits = self._random(num_tokens, width), self._random(num_tokens, num_experts)
        weights = self._random(num_experts, 2 * inner, width), self._random(num_experts, width, inner)

        def make() -> list[Launch]:
            return expert_launches(torch.empty_like(x), x, logits, spec, *weights)

        pairs = [pairs for pairs in (16, 32, 64, 128) if pairs <= 2 * most]
        options = {"rows": (64, 128), "columns": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4)}
        candidates = _grid(pairs=pairs, is_swapped=(False, True), **options)
        return TuningCase("experts", {"dtype": "bfloat16", "max_pairs_per_expert": most}, make, candidates)

    def _integers(self, num_rows: int, num_columns: int) -> DeviceQuantizedWeight:
        codes = torch.randint(-8, 8, (num_rows, num_columns), dtype=torch.int8)
        group_size = 32 if self._is_tiny else 128
        return pack_integers(codes.to(self._device), torch.rand(num_rows, num_columns // group_size).to(self._device))

    def _float8(self, num_rows: int, num_columns: int) -> DeviceQuantizedWeight:
        codes = self._random(num_rows, num_columns).to(torch.float8_e4m3fn)
        scale = torch.ones(-(-num_rows // 128), -(-num_columns // 128), device=self._device)
        return pack_float8(codes, scale, (128, 128))

    def _num_tokens(self, most: int, otherwise: int) -> int:
        return 5 if self._is_tiny else min(most, otherwise)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).bfloat16()


def _grid(**options: Iterable[int | bool]) -> list[Tile]:
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
