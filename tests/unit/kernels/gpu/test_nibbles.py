"""The assembly that converts 4-bit codes, executed here line by line: the interpreter does not run it."""

import re

import numpy as np
import pytest

from quire.kernels.triton import nibbles

BYTES = np.arange(256, dtype=np.uint32)
WORDS = BYTES | BYTES[::-1] << 8 | (BYTES * 7 % 256) << 16 | (BYTES * 31 % 256) << 24
CODES = [WORDS >> 8 * place & 255 for place in range(4)]


def permuted(a, b, selector):
    both = a.astype(np.uint64) | np.uint64(b) << np.uint64(32)
    chosen = [both >> np.uint64(8 * (selector >> 4 * place & 15)) & np.uint64(255) for place in range(4)]
    return sum(byte << np.uint64(8 * place) for place, byte in enumerate(chosen)).astype(np.uint32)


def halves(bits, kind):
    """Return two numbers of 16 bits for each register, f32."""
    parts = [bits & 0xFFFF, bits >> 16]
    if kind == "f16x2":
        return [part.astype(np.uint16).view(np.float16).astype(np.float32) for part in parts]
    return [(part << 16).astype(np.uint32).view(np.float32) for part in parts]


def run(assembly, registers):
    """Execute the instructions; a register is u32, or what was computed as numbers."""

    def value(text):
        if text.startswith("0f"):
            return np.array([int(text[2:], 16)], np.uint32).view(np.float32)[0]
        return registers[text] if text in registers else int(text, 0)

    for line in re.findall(r"[^;{}]+;", assembly):
        name, *operands = re.split(r"[ ,]+", line.strip(" \n;"))
        if name == ".reg":
            continue
        target, sources = operands[0], [value(operand) for operand in operands[1:]]
        if name == "shr.u32":
            found = sources[0] >> sources[1]
        elif name == "lop3.b32":
            assert sources[3] == 0xEA  # (a & b) | c
            found = (sources[0] & sources[1] | sources[2]).astype(np.uint32)
        elif name == "prmt.b32":
            found = permuted(*sources)
        elif name == "mov.b32":
            found = np.full(256, sources[0], np.uint32)
        elif name == "fma.rn.f32":
            found = (sources[0].view(np.float32).astype(np.float64) * sources[1] + sources[2]).astype(np.float32)
        else:
            kind = name.removeprefix("fma.rn.")
            assert kind in ("f16x2", "bf16x2")
            found = [a * b + c for a, b, c in zip(*(halves(source, kind) for source in sources), strict=True)]
        registers[target] = found
    return registers


def test_codes_become_f32():
    found = run(nibbles._TO_F32.value, {"$8": WORDS})
    for place, codes in enumerate(CODES):
        assert np.array_equal(found[f"${place}"], codes & 15)
        assert np.array_equal(found[f"${4 + place}"], codes >> 4)
    found = run(nibbles.PAIRS_TO_F32.value, {"$8": WORDS})
    for codes, target in zip(CODES, (0, 2, 1, 3), strict=True):
        assert np.array_equal(found[f"${target}"], codes & 15)
        assert np.array_equal(found[f"${4 + target}"], codes >> 4)


@pytest.mark.parametrize("kind, one, bits", [("_TO_BF16", 128, 16), ("_TO_F16", 1024, 0)])
@pytest.mark.parametrize("base", [-8, 0, -127])
def test_codes_become_pairs_of_16_bits(kind, one, bits, base):
    added = np.float32(base - one).view(np.uint32) >> 16 if bits else np.float16(base - one).view(np.uint16).astype(np.uint32)
    found = run(getattr(nibbles, kind).value, {"$4": WORDS, "$5": np.full(256, added | added << 16, np.uint32)})
    for place, codes in enumerate(CODES):
        for first, expected in ((0, codes & 15), (2, codes >> 4)):
            assert np.array_equal(found[f"${first + place // 2}"][place % 2], expected.astype(np.float32) + base)
