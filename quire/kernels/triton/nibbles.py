"""Device code that converts packed 4-bit codes to floats.

Converting integers takes several instructions a code, too many while codes are read. Here the bits of a code replace the lowest
ones of a power of two, which is then subtracted. The interpreter, without inline assembly, converts integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import INTERPRETED, cast_to


def _to_f32(*order: int) -> tl.constexpr:
    """Return the assembly that converts four bytes ($8): the low bits of each, then the high bits of each, go to $`order`.

    A number is (2**23 + code * 2**s) / 2**s - 2**(23 - s).
    """
    lines = "{\n.reg .b32 w, b;\nshr.u32 w, $8, 16;\n"
    for place, target in enumerate(order):
        source, shift = "w" if place & 2 else "$8", 8 * (place & 1) + 4 * (place >> 2)
        lines += f"lop3.b32 b, {source}, 0x{15 << shift:08x}, 0x4b000000, 0xea; "
        lines += f"fma.rn.f32 ${target}, b, 0f{(127 - shift) << 23:08x}, 0f{(256 + 150 - shift) << 23:08x};\n"
    return tl.constexpr(lines + "}")


_TO_F32 = _to_f32(0, 1, 2, 3, 4, 5, 6, 7)
PAIRS_TO_F32 = _to_f32(0, 2, 1, 3, 4, 6, 5, 7)
"""Of two pairs of bytes: the low bits of both first bytes, those of both second bytes, then the high bits likewise."""


def _to_halves(power: str, one: str, kind: str) -> tl.constexpr:
    """Return the assembly that converts four bytes ($4) to two registers of pairs each for the low and the high bits.

    power, one  the 16 bits of the power of two, and of 1; $5 has what is added, twice
    kind        of the pairs
    """
    convert = f"0x000f000f, 0x{power}{power}, 0xea"
    return tl.constexpr(
        f"""{{
    .reg .b32 o, t, u, v, w;
    mov.b32 o, 0x{one}{one};
    prmt.b32 t, $4, 0, 0x4140;
    prmt.b32 u, $4, 0, 0x4342;
    shr.u32 v, t, 4;
    shr.u32 w, u, 4;
    lop3.b32 t, t, {convert};
    lop3.b32 u, u, {convert};
    lop3.b32 v, v, {convert};
    lop3.b32 w, w, {convert};
    fma.rn.{kind} $0, t, o, $5;
    fma.rn.{kind} $1, u, o, $5;
    fma.rn.{kind} $2, v, o, $5;
    fma.rn.{kind} $3, w, o, $5;
    }}"""
    )


_TO_BF16, _TO_F16 = _to_halves("4300", "3f80", "bf16x2"), _to_halves("6400", "3c00", "f16x2")


@triton.jit
def numbers_of(nibbles: tl.tensor, BASE: tl.constexpr) -> tl.tensor:
    """Return the values of 4-bit codes, f32: code + BASE; BASE None: floats (e2m1), doubled."""
    if BASE is None:
        # The bits are moved to those of an f16, whose exponent bias is 14 higher; the result is exact.
        codes = nibbles.to(tl.int32)
        halves = ((codes & 7) << 9 | (codes & 8) << 12).to(tl.uint16).to(tl.float16, bitcast=True)
        numbers = halves.to(tl.float32) * 32768.0
    else:
        numbers = (nibbles.to(tl.int32) + BASE).to(tl.float32)
    return numbers


@triton.jit
def split_codes(codes: tl.tensor, BASE: tl.constexpr) -> tl.tuple:
    """Return the low and the high bits of packed codes, u8, as f32: 0 to 15; BASE None: floats (e2m1), doubled."""
    if BASE is not None and not INTERPRETED:
        low, high = tl.inline_asm_elementwise(
            _TO_F32, "=r,=r,=r,=r,=r,=r,=r,=r,r", [codes], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
        )
    else:
        ZERO: tl.constexpr = None if BASE is None else 0
        low, high = numbers_of(codes & 15, ZERO), numbers_of(codes >> 4, ZERO)
    return low, high


@triton.jit
def split_operands(codes: tl.tensor, BASE: tl.constexpr, dtype: tl.constexpr) -> tl.tuple:
    """Return the low and the high bits of packed codes, u8, in dtype, exact: code + BASE; BASE None: floats (e2m1), doubled."""
    if BASE is not None and dtype != tl.float32 and not INTERPRETED:
        # What is added is exact in both types.
        if dtype == tl.bfloat16:
            added = tl.full([1], BASE - 128.0, tl.float32).to(tl.uint32, bitcast=True) >> 16
        else:
            added = tl.full([1], BASE - 1024.0, tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        added = tl.broadcast_to(tl.reshape(added | added << 16, [1] * len(codes.shape)), codes.shape)
        if dtype == tl.bfloat16:
            low, high = tl.inline_asm_elementwise(
                _TO_BF16, "=r,=r,=r,=r,r,r,r,r,r", [codes, added], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            low, high = tl.inline_asm_elementwise(
                _TO_F16, "=r,=r,=r,=r,r,r,r,r,r", [codes, added], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
    else:
        low, high = split_codes(codes, BASE)
        if BASE is not None:
            low, high = low + BASE, high + BASE
        low, high = cast_to(low, dtype), cast_to(high, dtype)
    return low, high
