// Numbers of float8 e4m3fn.
#pragma once
#include "simd_types.h"

namespace quire {

// Codes of f8 are read as their values divided by this, which every instruction set can do without a multiplication; the scales
// are multiplied by it when the weight is packed. NaN is not supported; weights have none.
constexpr float FLOAT8_DIVISOR = 256.0f;

// The bits as bf16, exact, of a code of f8 divided so.
static constexpr u16 bf16_of_float8(u8 code) {
    const u32 sign = (code & 0x80u) << 8, magnitude = code & 0x7fu;
    if (magnitude >= 8) return static_cast<u16>(sign | ((magnitude << 4) + ((127 - 7 - 8) << 7)));
    if (magnitude == 0) return static_cast<u16>(sign);
    const u32 power = magnitude >= 4 ? 2 : magnitude >= 2 ? 1 : 0;
    return static_cast<u16>(sign | (127 - 9 - 8 + power) << 7 | ((magnitude << (7 - power)) & 0x7f));
}

// The position of a code in a line of 32 codes (16 columns by two inputs), such that unpacking halves of 16-byte lanes of 32
// bytes gives the results in order.
static constexpr i32 float8_place(i32 column, i32 input) {
    return (column >> 3 & 1) * 8 + (column >> 2 & 1) * 16 + (column & 3) * 2 + (input & 1);
}

}  // namespace quire
