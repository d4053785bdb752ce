"""Random packed linear layers with their f64 results, and the error that each format may make."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

UNIT = 2.0**-24  # half of f32's step at 1: what one rounding changes at most, relatively
SMALLEST = 2.0**-126  # what is smaller counts as 0 inside a kernel, in inputs and in results
LINEAR_LEVELS = tuple(range(-8, 8))
DENSE_DTYPES = {"bf16": torch.bfloat16, "bf12": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}
_ROWS_AT_ONCE = 48
UNEVEN_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Layer:
    """A packed weight `native` and what was packed: codes [N, K] f64 in packed order (dense formats: the weights), the rest as
    in weight.h, per row n."""

    native: object
    format: str
    codes: Tensor
    group: int
    scale: Tensor | None
    offset: Tensor | None
    column_scale: Tensor | None
    bias: Tensor | None
    columns: Tensor | None

    @property
    def is_quantized(self) -> bool:
        return self.format in ("u8", "u4")

    def weights(self) -> Tensor:
        """Return the weights [N, K] f64 in the natural order of the inputs, without bias."""
        weights = self.codes
        if self.is_quantized:
            repeated = [None if part is None else self._by_input(part) for part in (self.scale, self.offset)]
            weights = weights if repeated[0] is None else weights * repeated[0]
            weights = weights if repeated[1] is None else weights + repeated[1]
        if self.column_scale is not None:
            weights = weights * self.column_scale[:, None]
        if self.columns is None:
            return weights
        natural = torch.empty_like(weights)
        natural[:, self.columns] = weights
        return natural

    def _by_input(self, parts: Tensor) -> Tensor:
        return parts.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]

    def apply(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y [M, N] f64 for x [M, K] f32, and how far from it a kernel may be."""
        x = x if self.columns is None else x[:, self.columns]
        y, error = self._apply_codes(x) if self.is_quantized else self._apply_dense(x)
        if self.column_scale is not None:
            y, error = y * self.column_scale, error * self.column_scale.abs()
        if self.bias is not None:
            y = y + self.bias
        return y, error + 2 * UNIT * y.abs() + 2 * UNIT * (0 if self.bias is None else self.bias.abs()) + SMALLEST

    def _apply_dense(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # bf16: inputs are rounded to bf16; products of two bf16 are exact in f32. Then, as in f32 and f16, one rounding per
        # product (where the machine does not fuse) and one per sum, each of at most the sum of the sizes so far.
        values = x.bfloat16().double() if self.format == "bf16" else x.double()
        num_inputs = x.shape[1]
        error = 2 * (num_inputs + 1) * UNIT * (values.abs() @ self.codes.abs().T)
        lost = SMALLEST * (num_inputs + values.abs().sum(1, keepdim=True) + self.codes.abs().sum(1))
        return values @ self.codes.T, error + lost

    def _apply_codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Given the codes of the inputs, sums within a group are exact integers (one rounding to f32 where they pass 2^24); then
        # come two products and a sum per group for the scale, and two products and a sum for the offset. Twice that is allowed.
        y = error = torch.zeros(len(x), len(self.codes), dtype=torch.float64)
        for g, first in enumerate(range(0, x.shape[1], self.group)):
            inputs, step = quantize(x[:, first : first + self.group])
            term = (inputs @ self.codes[:, first : first + self.group].T) * step
            term = term if self.scale is None else term * self.scale[:, g]
            shift = 0 * term if self.offset is None else inputs.sum(1, keepdim=True) * step * self.offset[:, g]
            y = y + term + shift
            error = error + 2 * UNIT * (4 * term.abs() + 3 * shift.abs() + y.abs()) + 8 * SMALLEST
        return y, error


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [M, G] f64, whole numbers up to 127, and the step [M, 1] f64 of one group of inputs x [M, G] f32."""
    x = torch.where(x.abs() < SMALLEST, torch.zeros_like(x), x)
    peak = x.abs().amax(1, keepdim=True)
    inverse = torch.where(peak > 0, 127.0 / peak, torch.zeros_like(peak))
    step = peak / 127.0
    step = torch.where(step < SMALLEST, torch.zeros_like(step), step)
    # 127 / peak overflows where the step is 0 anyway.
    return torch.round(x * inverse).nan_to_num(0.0).clamp(-127, 127).double(), step.double()


def pad_rows(values: Tensor) -> Tensor:
    """Return [N, ...] with N padded to a multiple of 16 by values that must not be seen."""
    padding = torch.full((-len(values) % 16, *values.shape[1:]), float("nan"), dtype=values.dtype)
    return torch.cat((values, padding)).contiguous()


def make_layer(native, format, n, k, group=0, *, seed=0, options=(), levels=None, num_threads=1) -> Layer:
    """Return a random layer. options: any of scales, offsets, column_scale, bias, columns. group 0: the whole row."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    is_quantized = format in ("u8", "u4")
    group = (group or k) if is_quantized else 0
    packed = native.Weight(format, n, k, group)
    if format == "u4":
        levels = torch.tensor(levels or LINEAR_LEVELS, dtype=torch.int8)
        codes = levels[torch.randint(0, len(levels), (n, k), generator=generator)].contiguous()
        packed.pack(codes.data_ptr(), k, 0, n, levels=levels.data_ptr(), num_levels=len(levels), num_threads=num_threads)
    else:
        codes = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8) if is_quantized else randn(n, k)
        codes = codes.to({"bf16": torch.bfloat16, "f16": torch.float16}.get(format, codes.dtype))
        packed.pack(codes.data_ptr(), k, 0, n, num_threads=num_threads)
    num_groups = -(-k // group) if is_quantized else 0
    # Stored formats have scales of either sign, and of 0.
    scale = (randn(n, num_groups) / 100).half() if "scales" in options else None
    offset = randn(n, num_groups).half() if "offsets" in options else None
    column_scale = randn(n).abs() * 10 if "column_scale" in options else None
    bias = randn(n) if "bias" in options else None
    columns = torch.randperm(k, generator=generator).to(torch.int32) if "columns" in options else None
    if scale is not None:
        scale[::7] = 0
    extras = {
        "group_scales": None if scale is None else to_panels(scale),
        "group_offsets": None if offset is None else to_panels(offset),
        "column_scale": None if column_scale is None else pad_rows(column_scale),
        "bias": None if bias is None else pad_rows(bias),
        "columns": columns,
    }
    packed.set_extras(**{name: tensor.data_ptr() for name, tensor in extras.items() if tensor is not None})
    doubles = (None if part is None else part.double() for part in (scale, offset, column_scale, bias))
    return Layer(packed, format, codes.double(), group, *doubles, None if columns is None else columns.long())


def pack_dense(native, format: str, weight: Tensor, bias: Tensor | None = None):
    """Return a packed weight [N, K] of a dense format, some rows at a time, as a loader packs them."""
    n, k = weight.shape
    rows = weight.to(DENSE_DTYPES[format]).contiguous()
    packed = native.Weight(format, n, k)
    for first in range(0, n, _ROWS_AT_ONCE):
        packed.pack(rows[first].data_ptr(), k, first, min(_ROWS_AT_ONCE, n - first), num_threads=2)
    padded = None if bias is None else pad_rows(bias)
    packed.set_extras(bias=0 if padded is None else padded.data_ptr())
    return packed


def constant_layer(native, bias: Tensor) -> Layer:
    """Return a layer whose result is its bias."""
    weight = torch.zeros(len(bias), 8)
    return Layer(pack_dense(native, "f32", weight, bias), "f32", weight.double(), 0, None, None, None, bias, None)


def to_panels(values: Tensor) -> Tensor:
    """Return [N, G] as [N / 16, G, 16]."""
    padded = pad_rows(values)
    return padded.view(-1, 16, values.shape[1]).transpose(1, 2).contiguous()


def make_inputs(m, k, seed=0) -> Tensor:
    """Return rows [m, k] f32 of very different sizes, some with zeros and values too small for f32's normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    sizes = (1.0, 1e-3, 100.0, 1e30, 1e-30, 1e-39, 0.0)
    x = x * torch.tensor([sizes[row % len(sizes)] for row in range(m)])[:, None]
    if k > 2:
        x[1::3, ::3] = 0.0
        x[::3, 1::5] = 1e-41
        x[2::4, k // 2] *= 1000.0
    return x.contiguous()


def run_apart(code: str, **environment: str) -> None:
    """Run code in a process of its own, in the checkout."""
    root = Path(__file__).resolve().parents[4]
    paths = os.pathsep.join((str(root), os.environ.get("PYTHONPATH", "")))
    options = {"env": {**os.environ, "PYTHONPATH": paths, **environment}, "cwd": root}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, result.stderr[-600:]
