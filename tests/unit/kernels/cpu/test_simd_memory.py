"""simd.h on every instruction set of this machine: masks, loads, stores and conversions, against torch and numpy."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch

from tests.native_lanes import EDGES, assert_same_bits, lanes, native, random_floats, run


def all_masks() -> np.ndarray:
    """[65536, 16] i32 of 0 and 1: every mask of sixteen lanes."""
    return (np.arange(65536, dtype=np.int32)[:, None] >> np.arange(16, dtype=np.int32)) & 1


def test_select_takes_the_chosen_lanes_when_given_every_mask(isa: str):
    mask = all_masks().ravel()
    yes, no = np.random.default_rng(23).standard_normal((2, mask.size)).astype(np.float32)
    np.testing.assert_array_equal(lanes("select", isa, mask, yes, no), np.where(mask, yes, no))
    yes, no = yes.view(np.int32), no.view(np.int32)
    np.testing.assert_array_equal(lanes("select_i32", isa, mask, yes, no, dtype=np.int32), np.where(mask, yes, no))


@pytest.mark.parametrize("dtype", [np.float32, np.int32], ids=["f32", "i32"])
def test_compress_store_writes_the_chosen_lanes_alone_when_given_every_mask(isa: str, dtype: type):
    masks = all_masks()
    values = np.random.default_rng(25).integers(-1000, 1000, masks.shape).astype(dtype)
    name = "compress_store" if dtype is np.float32 else "compress_store_i32"
    got = run(name, isa, values, masks, out=np.full(masks.shape, 7777, dtype), count=len(masks))
    # The header allows what lies behind the written values to change within sixteen, but not which values come first.
    count = masks.sum(-1)
    rows = np.argsort(1 - masks, axis=-1, kind="stable")
    packed = np.take_along_axis(values, rows, -1)
    is_written = np.arange(16) < count[:, None]
    np.testing.assert_array_equal(got[is_written], packed[is_written])
    if dtype is np.float32:
        counts = run("compress_count", isa, values, masks, out=np.zeros(len(masks), np.uint32), count=len(masks))
        np.testing.assert_array_equal(counts, count)


def test_first_lanes_is_clamped_when_the_number_is_out_of_range(isa: str):
    numbers = np.array([-(2**31), -1, *range(18), 2**31 - 1], dtype=np.int32)
    got = run("first_lanes", isa, numbers, out=np.zeros(numbers.size, np.uint32), count=numbers.size)
    np.testing.assert_array_equal(got, (1 << np.clip(numbers, 0, 16).astype(np.int64)) - 1)


MASKED_LOADS = [
    ("load_masked", np.float32),
    ("load_i32_masked", np.int32),
    ("load_bf16_masked", np.uint16),
    ("load_f16_masked", np.uint16),
    ("load_s8_masked", np.int8),
]


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize(("name", "dtype"), MASKED_LOADS, ids=[name for name, _ in MASKED_LOADS])
@pytest.mark.parametrize("number", range(17))
def test_masked_load_touches_nothing_else_when_memory_ends(isa: str, name: str, dtype: type, number: int):
    # The values end where a page ends; a load of one more byte would be a fault.
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    values = np.arange(1, number + 1).astype(dtype) if dtype != np.uint16 else (0x3C00 + np.arange(number)).astype(np.uint16)
    address = start + mmap.PAGESIZE - values.nbytes
    ctypes.memmove(address, values.ctypes.data, values.nbytes)
    out, count = np.full(16, np.nan, np.float32), np.array([number], np.int32)
    out = out.view(np.int32) if dtype == np.int32 else out
    native.simd(name, address, count.ctypes.data, 0, out.ctypes.data, 1, isa)
    if name == "load_bf16_masked":
        want = (values.astype(np.uint32) << 16).view(np.float32)
    else:
        want = (values.view(np.float16) if name == "load_f16_masked" else values).astype(out.dtype)
    np.testing.assert_array_equal(out, np.concatenate([want, np.zeros(16 - number, out.dtype)]))


@pytest.mark.parametrize("number", range(17))
def test_masked_store_writes_nothing_else_when_lanes_are_left_out(isa: str, number: int):
    values, count = np.arange(1, 17, dtype=np.float32), np.array([number], np.int32)
    out = run("store_masked", isa, values, count, out=np.full(16, -1, np.float32), count=1)
    np.testing.assert_array_equal(out, np.where(np.arange(16) < number, values, -1))
    half = run("store_bf16_masked", isa, values, count, out=np.full(16, 0xABCD, np.uint16), count=1)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(half, np.where(np.arange(16) < number, bf16, 0xABCD))


ALL_HALVES = np.arange(65536, dtype=np.uint32).astype(np.uint16)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)], ids=["bf16", "f16"])
def test_widening_gives_the_bits_of_torch_when_given_every_pattern(isa: str, name: str, dtype: torch.dtype):
    want = torch.from_numpy(ALL_HALVES.view(np.int16).copy()).view(dtype).float().numpy()
    got = run(f"load_{name}", isa, ALL_HALVES, out=np.full(65536, np.nan, np.float32), count=4096)
    assert_same_bits(got, want)
    all_lanes = np.full(4096, 16, np.int32)
    masked = run(f"load_{name}_masked", isa, ALL_HALVES, all_lanes, out=np.full(65536, np.nan, np.float32), count=4096)
    np.testing.assert_array_equal(masked.view(np.uint32), got.view(np.uint32))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)], ids=["bf16", "f16"])
def test_rounding_gives_the_bits_of_torch_when_given_ties_and_denormals(isa: str, name: str, dtype: torch.dtype):
    # Every pattern itself, the tie above it and both neighbours of the tie, and random floats.
    wide = torch.from_numpy(ALL_HALVES.view(np.int16).copy()).view(dtype).float().numpy().view(np.uint32)
    shift = 16 if name == "bf16" else 13
    ties = np.concatenate([wide + np.uint32((1 << (shift - 1)) + d) for d in (-1, 0, 1)])
    x = np.concatenate([wide, ties, random_floats(1 << 18, 27).view(np.uint32), EDGES.view(np.uint32)]).view(np.float32)
    # Denormals of f16 have ties at other bits: sums of halves of the least one.
    x = np.concatenate([x, np.arange(-4096, 4096, dtype=np.float32) * np.float32(2.0**-25), np.zeros(-x.size % 16, np.float32)])
    got = run(f"store_{name}", isa, x, out=np.zeros(x.size, np.uint16), count=x.size // 16)
    want = torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16)
    is_nan = np.isnan(x)
    np.testing.assert_array_equal(got[~is_nan], want[~is_nan])
    # A NaN keeps its sign and the head of its payload, and is quiet.
    bits = x.view(np.uint32)[is_nan]
    head = bits >> 16 | 0x40 if name == "bf16" else (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x1FF)
    np.testing.assert_array_equal(got[is_nan], head)


def test_flushed_rounding_differs_from_the_plain_one_when_denormal_alone(isa: str):
    x = np.concatenate([random_floats(1 << 16, 45), EDGES])
    plain = run("store_bf16", isa, x, out=np.zeros(x.size, np.uint16), count=x.size // 16)
    flushed = run("store_bf16_flushed", isa, x, out=np.zeros(x.size, np.uint16), count=x.size // 16)
    is_denormal = np.abs(x) < np.float32(1.1754944e-38)
    np.testing.assert_array_equal(flushed[~is_denormal], plain[~is_denormal])
    is_zero = flushed & 0x7FFF == 0
    np.testing.assert_array_equal(flushed[~is_zero], plain[~is_zero])


def test_store_s8_saturates_when_out_of_range(isa: str):
    x = np.concatenate([np.arange(-300, 292), [2**31 - 1, -(2**31), 40000, -40000] * 4]).astype(np.int32)
    got = run("store_s8", isa, x, out=np.zeros(x.size, np.int8), count=x.size // 16)
    np.testing.assert_array_equal(got, np.clip(x, -128, 127))


def test_load_s8_keeps_the_sign_when_given_every_byte(isa: str):
    x = np.arange(-128, 128).astype(np.int8)
    np.testing.assert_array_equal(run("load_s8", isa, x, out=np.zeros(256, np.float32), count=16), x.astype(np.float32))
