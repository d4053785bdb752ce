// The cache format r4: a vector is rotated, and each value becomes one of sixteen levels. kernels/reference/kv_formats.py defines
// it. Included by attention.inl.
//
// Rotations keep inner products: queries are rotated in place of the keys, and the sum of the values is rotated back. All sums
// are in an order that depends on D only.
#pragma once
#include "attention_tile.inl"

namespace quire::QUIRE_ISA {
namespace {

// The levels, in bf16, and the positive half of them.
constexpr u16 LEVELS[16] = {0xc02c, 0xc008, 0xbfd4, 0xbfa1, 0xbf6b, 0xbf1f, 0xbeb8, 0xbdf1, 0x3df1, 0x3eb8, 0x3f1f, 0x3f6b,
    0x3fa1, 0x3fd4, 0x4008, 0x402c};
constexpr float POSITIVE_LEVELS[8] = {0.11767578125f, 0.359375f, 0.62109375f, 0.91796875f, 1.2578125f, 1.65625f, 2.125f, 2.6875f};

alignas(64) static constexpr struct RotationSigns {
    float of[MAX_ROTATED_DIM];
    constexpr RotationSigns() : of() {
        for (u32 d = 0; d < MAX_ROTATED_DIM; ++d) {
            u32 bits = (d + 1) * 0x9e3779b1u;
            bits = (bits ^ bits >> 15) * 0x85ebca77u;
            of[d] = bits >> 31 ? -1.0f : 1.0f;
        }
    }
} rotation_signs;

// For N = 1, 2, 4, 8: lanes i and i ^ N get their sum and their difference.
template <int N>
QUIRE_INLINE F32 add_and_subtract(F32 x) {
    alignas(64) static constexpr struct Signs {
        float of[16];
        constexpr Signs() : of() { for (int i = 0; i < 16; ++i) of[i] = i & N ? -1.0f : 1.0f; }
    } signs;
    return fma(x, load(signs.of), swap_lanes<N>(x));
}

// The normalised Hadamard transform, in place, of every block of values; a block is the largest power of two that divides `dim`.
static void transform(float* x, i32 dim) {
    const i32 block = dim & -dim;
    float factor = 1.0f;
    i32 left = block;
    for (; left >= 4; left /= 4) factor *= 0.5f;
    if (left == 2) factor *= 0.70710678f;
    for (i32 d = 0; d < dim; d += 16) {
        const Mask lanes = first_lanes(dim - d);
        F32 values = load(x + d, lanes) * set1(factor);
        if (block > 1) values = add_and_subtract<1>(values);
        if (block > 2) values = add_and_subtract<2>(values);
        if (block > 4) values = add_and_subtract<4>(values);
        if (block > 8) values = add_and_subtract<8>(values);
        store(x + d, values, lanes);
    }
    for (i32 half = 16; half < block; half *= 2) {
        for (i32 first = 0; first < dim; first += 2 * half) {
            for (i32 d = first; d < first + half; d += 16) {
                const F32 low = load(x + d), high = load(x + d + half);
                store(x + d, low + high);
                store(x + d + half, low - high);
            }
        }
    }
}

static void rotate_vector(i32 dim, const float* x, float* to) {
    for (i32 d = 0; d < dim; d += 16) {
        const Mask lanes = first_lanes(dim - d);
        store(to + d, load(x + d, lanes) * load(rotation_signs.of + d), lanes);
    }
    transform(to, dim);
}

static void rotate_back(i32 dim, float* x) {
    transform(x, dim);
    for (i32 d = 0; d < dim; d += 16) {
        const Mask lanes = first_lanes(dim - d);
        store(x + d, load(x + d, lanes) * load(rotation_signs.of + d), lanes);
    }
}

// The number of thresholds, which are halfway between levels, below each value.
QUIRE_INLINE I32 level_indices(F32 x) {
    const I32 one = set1(1), none = set1(0);
    I32 index = select(x > zero(), one, none);
    QUIRE_UNROLL for (int i = 0; i < 7; ++i) {
        const float threshold = (POSITIVE_LEVELS[i] + POSITIVE_LEVELS[i + 1]) / 2;
        index = index + select(x > set1(threshold), one, none) + select(x > set1(-threshold), one, none);
    }
    return index;
}

// Write the code of each value of x, a byte, and return their scale: 0 for zeros, NaN if x has a NaN or an infinity.
static float choose_levels(i32 dim, const float* x, u8* codes) {
    F32 highest = zero();
    u32 nans = 0;
    for (i32 d = 0; d < dim; d += 16) {
        const F32 part = load(x + d, first_lanes(dim - d));
        highest = max(abs(part), highest);
        nans |= bits(is_nan(part));
    }
    const float largest = max_lanes(highest);
    if (nans != 0 || largest == 0.0f) {
        __builtin_memset(codes, 8, static_cast<size_t>(dim));
        return nans != 0 ? __builtin_nanf("") : 0.0f;
    }
    // Divided first, so that squares neither overflow nor vanish.
    alignas(64) float rotated[MAX_ROTATED_DIM];
    for (i32 d = 0; d < dim; d += 16) store(rotated + d, load(x + d, first_lanes(dim - d)) / set1(largest));
    rotate_vector(dim, rotated, rotated);
    F32 squares = zero(), level_squares = zero(), products = zero();
    for (i32 d = 0; d < dim; d += 16) {
        const F32 part = load(rotated + d, first_lanes(dim - d));
        squares = fma(part, part, squares);
    }
    const F32 factor = sqrt(set1(static_cast<float>(dim)) / set1(sum_lanes(squares)));
    const LevelTable table = level_table(LEVELS);
    alignas(64) i32 indices[16];
    for (i32 d = 0; d < dim; d += 16) {
        const int count = dim - d < 16 ? dim - d : 16;
        const F32 part = load(rotated + d, first_lanes(count));
        const I32 index = level_indices(part * factor);
        const F32 level = select(first_lanes(count), as_f32(shift_left<16>(level_pairs(table, index))), zero());
        level_squares = fma(level, level, level_squares);
        products = fma(part, level, products);
        store(indices, index);
        for (int i = 0; i < count; ++i) codes[d + i] = static_cast<u8>(indices[i]);
    }
    return largest * (sum_lanes(products) / sum_lanes(level_squares));  // has the least squared error
}

// Two numbers per lane, as put_two puts them, of which the first `count` are written.
template <class Kind>
QUIRE_INLINE void put_pairs(u8* to, i64 stride, I32 pairs, int count) {
    const F32 low = as_f32(shift_left<16>(pairs)), high = as_f32(pairs & set1(static_cast<i32>(0xffff0000u)));
    if (count >= 16 && Kind::is_bf16) {
        store(reinterpret_cast<i32*>(to), pairs);
    } else if (Kind::is_bf16) {
        store(reinterpret_cast<float*>(to), as_f32(pairs), first_lanes(count));
    } else {
        store(reinterpret_cast<float*>(to), low, first_lanes(count));
        store(reinterpret_cast<float*>(to + stride), high, first_lanes(count));
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
