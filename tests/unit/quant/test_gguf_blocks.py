"""GGUF blocks of random bytes against the reference formulas in numpy."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.base.gguf_file import BLOCK_SIZES, GgufTensor
from quire.kernels.native import load_native
from quire.model.native_weights import WeightPacker
from quire.quant.gguf_blocks import check_is_weight, packed_bytes, unpack_blocks

FORMULAS = Path(__file__).resolve().parents[4] / "shared" / "design" / "quant_dequant.py"
# Type -> bytes of a block at which an f16 lies.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
LEVELS = {
    "Q4_0": tuple(range(-8, 8)),
    "Q4_1": tuple(range(16)),
    "Q4_K": tuple(range(16)),
    "Q2_K": tuple(range(4)),
    "Q3_K": tuple(range(-4, 4)),
    "IQ4_NL": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "IQ4_XS": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "MXFP4": (-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12),
}
GROUP_SIZES = {"Q2_K": 16, "Q3_K": 16, "Q6_K": 16}


@pytest.fixture(scope="module")
def formulas():
    """Type name -> function from blocks [n, bytes] to values [n, elements]."""
    if not FORMULAS.is_file():
        pytest.skip(f"{FORMULAS} is absent")
    spec = importlib.util.spec_from_file_location("quant_dequant", FORMULAS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name.upper(): formula for name, _, _, formula in module.GGUF.values()}


def random_blocks(type_name, num_rows, num_blocks, seed=0):
    """Return [num_rows, num_blocks * bytes] of random bytes whose scales are finite."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (num_rows * num_blocks, BLOCK_SIZES[type_name][1]), dtype=np.uint8)
    for start in HALVES[type_name]:
        scale = generator.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scale.view(np.uint8).reshape(-1, 2)
    if type_name == "MXFP4":
        blocks[:, 0] %= 255
        blocks[:2, 0] = (0, 254)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("type_name", HALVES)
def test_weights_are_exactly_those_of_the_formula(formulas, type_name):
    packed = random_blocks(type_name, 37, 3)
    weight = unpack_blocks(type_name, torch.from_numpy(packed), "w")
    elements, num_bytes = BLOCK_SIZES[type_name]
    with np.errstate(over="ignore"):
        want = formulas[type_name](packed.reshape(-1, num_bytes)).reshape(37, 3 * elements)
    # Some formulas multiply in f64, where the product is exact; rounding it once is what f32 does.
    assert np.array_equal(weight.dequantize().numpy(), want.astype(np.float32))
    assert weight.shape == want.shape
    assert weight.group_size == GROUP_SIZES.get(type_name, 32)
    assert weight.levels == LEVELS.get(type_name)
    if weight.levels is not None:
        assert set(weight.codes.unique().tolist()) == set(weight.levels)


def test_mxfp4_is_exactly_float4_times_its_power_of_two():
    """An oracle of torch's own types: every byte of a scale but the one that is no number, every byte of codes."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat([magnitudes, -magnitudes])
    scale = torch.arange(255, dtype=torch.uint8)
    octets = torch.randint(0, 256, (255, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    octets[:16] = torch.arange(256, dtype=torch.uint8).view(16, 16)
    weight = unpack_blocks("MXFP4", torch.cat([scale[:, None], octets], 1), "w")
    values = torch.cat([numbers[(octets & 15).int()], numbers[(octets >> 4).int()]], 1)
    assert torch.equal(weight.dequantize(), values * scale.view(torch.float8_e8m0fnu).float()[:, None])


@pytest.mark.parametrize("type_name", HALVES)
def test_chunks_give_the_same_weight(monkeypatch, type_name):
    packed = torch.from_numpy(random_blocks(type_name, 11, 2))
    whole = unpack_blocks(type_name, packed, "w")
    monkeypatch.setattr("quire.quant.gguf_blocks._CHUNK_ELEMENTS", 3 * whole.shape[1])
    assert torch.equal(unpack_blocks(type_name, packed, "w").dequantize(), whole.dequantize())


@pytest.mark.parametrize("type_name", HALVES)
def test_scales_that_are_not_finite_are_refused(type_name):
    packed = random_blocks(type_name, 2, 1)
    for start in HALVES[type_name]:
        damaged = packed.copy()
        # An element of zero scale or minimum would make a product of 0 * inf, not finite either.
        damaged[1, start : start + 2] = np.array([np.inf], np.float16).view(np.uint8)
        with pytest.raises(ModelFormatError, match="not finite"):
            unpack_blocks(type_name, torch.from_numpy(damaged), "blk.0.attn_q.weight")
    if type_name == "MXFP4":
        packed[0, 0] = 255
        with pytest.raises(ModelFormatError, match="not finite"):
            unpack_blocks(type_name, torch.from_numpy(packed), "w")


@pytest.mark.parametrize("type_name", HALVES)
def test_bytes_of_a_weight_are_known_before_it_is_packed(type_name):
    native = load_native()
    if native is None:
        pytest.skip("the native kernels are not built")
    blocks, elements = random_blocks(type_name, 64, 16), 16 * BLOCK_SIZES[type_name][0]
    tensor = GgufTensor("w", type_name, (64, elements), Path(), 0, blocks.size)
    packer = WeightPacker(native, torch.float32)
    packer.pack(unpack_blocks(type_name, torch.from_numpy(blocks), "w"))
    # And a scale for each row.
    assert packed_bytes([tensor], 4) == packer.num_bytes - 4 * 64


def test_bytes_of_floats_are_those_of_the_dtype():
    assert packed_bytes([GgufTensor("w", "F32", (3, 5), Path(), 0, 60)], 2) == 30


@pytest.mark.parametrize("type_name", ["I8", "I32", "I64"])
def test_types_that_are_no_weights_are_refused_by_name(type_name):
    with pytest.raises(UnsupportedError, match=f"{type_name}.*Q4_K"):
        check_is_weight(type_name, "w")
    check_is_weight("Q4_K", "w")
    check_is_weight("BF16", "w")
