"""Packing for the native kernels: what comes out of a packed weight is what went in."""

import pytest
import torch

pytest.importorskip("quire.kernels.cpu._native")

from quire.kernels.native import load_native
from quire.model.native_weights import WeightPacker
from quire.quant.weight import QuantizedWeight


def unpacked(weight: QuantizedWeight) -> torch.Tensor:
    packed = WeightPacker(load_native(), torch.float32).pack(weight)
    rows = torch.full(weight.shape, float("nan"))
    for index, row in enumerate(rows):
        packed.unpack_row(index, row.data_ptr())
    return rows


@pytest.mark.parametrize("scale", [1e-6, 0.0, 1.0, 1e4])
def test_offsets_are_kept_when_scales_are_small(scale):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (17, 64), generator=generator, dtype=torch.int8)
    offset = torch.rand(17, 2, generator=generator) - 0.5
    weight = QuantizedWeight(codes, torch.full((17, 2), scale), offset, levels=tuple(range(16)))
    # Scales and offsets are f16 beside their row: half a unit in the eleventh place of each.
    budget = 2.0**-11 * (scale * 15 + 0.5) + 1e-7
    assert (unpacked(weight) - weight.dequantize()).abs().max() <= budget


@pytest.mark.parametrize(("is_short", "columns", "share"), [(True, 512, 0.78), (False, 512, 1.0), (True, 508, 1.0)])
def test_bfloat16_takes_three_quarters_when_it_is_kept_short(is_short, columns, share):
    weight = (torch.randn(64, columns, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    packer = WeightPacker(load_native(), torch.bfloat16, is_short)
    packed, row = packer.pack(weight), torch.empty(columns)
    for index in range(64):
        packed.unpack_row(index, row.data_ptr())
        assert row.equal(weight[index].float())
    assert packer.num_bytes <= share * 2 * weight.numel() + 64


def test_other_dtypes_are_kept_as_they_are_when_bfloat16_is_short():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    packed = WeightPacker(load_native(), torch.bfloat16, is_short=True).pack(weight.bfloat16(), dtype=torch.float32)
    assert packed.num_bytes >= 4 * weight.numel()


def test_weight_goes_dense_and_says_so_once_when_a_scale_is_not_finite(caplog):
    codes = torch.ones(16, 32, dtype=torch.int8)
    weight = QuantizedWeight(codes, torch.full((16, 1), float("inf")))
    packer = WeightPacker(load_native(), torch.float32)
    with caplog.at_level("WARNING", logger="quire"):
        packer.pack(weight)
        packer.pack(weight)
    assert sum("do not fit the native layouts" in record.message for record in caplog.records) == 1


@pytest.mark.slow
def test_step_after_one_that_found_no_memory_is_sound(tiny_model):
    import subprocess
    import sys

    code = f"""
import resource, torch
from pathlib import Path
from quire.kernels.native import load_native
from quire.model.build import whole_prompt_logits
from quire.model.checkpoint import load_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
folder = Path({str(tiny_model)!r})
spec = read_model_spec(folder)
decoder = NativeDecoder(load_native(), spec, load_parameters(folder, spec), 256)
want = whole_prompt_logits(decoder, [1, 2, 3])
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), -1))
try:
    whole_prompt_logits(decoder, [5] * 60000)
    raise SystemExit("the step found memory")
except (RuntimeError, MemoryError):
    pass
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert torch.equal(whole_prompt_logits(decoder, [1, 2, 3]), want)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-600:]
