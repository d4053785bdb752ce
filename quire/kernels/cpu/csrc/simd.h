// Sixteen lanes, the same on every machine: kernels are written once against these and compiled once per instruction set.
//
// A source that is compiled for one set defines QUIRE_ISA (a name below) and includes its kernel, which includes this file;
// CMakeLists.txt writes these sources. Everything lives in namespace quire::QUIRE_ISA and has internal linkage: the linker must
// never keep the AVX-512 copy of a function for a machine without it. For the same reason no std:: templates are used here or in
// kernels.
//
//   F32, I32          16 floats, 16 32-bit integers (sums and products wrap)
//   Bytes             64 bytes: 16 x 4 int8, 16 pairs of bf16
//   Mask              chosen lanes; bits, mask_of: to and from a bit per lane; first_lanes(n): the first n, 0 <= n <= 16. Masked
//                     loads give 0 elsewhere and touch no other memory; masked stores write no other memory
//   fma(a, b, c)      a * b + c, fused where the machine can
//   max, min          the second operand where either is NaN
//   round, to_i32     to nearest, ties to even
//   times_power(x, n) x * 2^n, n whole, -252 < n < 254, and the result normal, 0 or infinite
//   zero_below(limit, x, y)  y, or 0 in lanes where x < limit; y where x is NaN
//   load_bf16, store_bf16  16 values; the store rounds to nearest even and keeps denormals
//   store_bf16_flushed     the same and faster; denormals may become 0
//   dot_words(a, b)        a and then b as pairs of bf16 for dot_bf16: values that it flushes may be 0
//   dot_bf16(acc, a, b)    per lane acc + a[2i + 1] * b[2i + 1], then + a[2i] * b[2i]. AVX-512 flushes denormals
//   dot_u8s8(acc, w, x)    per lane acc + sum of w[4i + j] * x[4i + j], j < 4, w unsigned, x signed, |x| <= 127. Exact
//   keep_or, select_bits   (a & mask) | b, (a & mask) | (b & ~mask), of every 32-bit word; rotate_words: right by four bits
//   put_half          16 bits of 32 places get a value
//   unpack_nibbles         table lookups of the low and the high nibble of 64 bytes; load_table takes 16 entries
//   I64               16 64-bit integers. to_i64 rounds to nearest, ties to even, |x| < 2^51
//   multiply_even     the 64-bit products of the even lanes, unsigned: low halves in the even lanes, high halves in the odd
//   odd_to_even       lane 2i gets lane 2i + 1; odd lanes 0
//   min_unsigned      of lanes taken as unsigned;  xor3  a ^ b ^ c
//   widen_codes            64 int8, none -128, to bf16: first = the pairs (c[i], c[16 + i]), second = (c[32 + i], c[48 + i]); the
//                          table is code_table(), made once. load_quarters: 64 bytes from four places
//   Pairs             16 pairs of values that are exact in bf16, as products take them: pairs_of 64 bytes of bf16. dot_pairs: as
//                          dot_bf16. lower, upper: the first, the second of each pair
//   load_float8            64 codes of f8 (two lines, see weight.h), of which float8_bytes<0>, <1> are the lines as pairs of
//                          bf16, divided by FLOAT8_DIVISOR; the table is float8_table(), made once
//   level_pairs            a pair of bf16 from a table of sixteen in each lane: the second index of four bits stands 16 bits
//                          higher, other bits are 0. level_table is made once, and takes 16 values
//   load_u8           16 bytes to the lanes, as load_s8;  swap_lanes<N>  lane i gets lane i ^ N, N = 1, 2, 4 or 8
//   store_columns(to, stride, rows, num_rows, num_words)  word w of row r to to[w * stride + r]; rows past num_rows may be
//                                                         anything
//   sum_lanes         in a fixed order: halves folded 16 -> 8 -> 4 -> 2 -> 1
//   to_i32_up         to the next integer that is not below
//   Steps, at_step    f(n) of integers -256 <= n < 256 that changes at most once in each [16i, 16i + 16); make_steps takes its
//                     512 values
//   prefetch, prefetch_l2  into the first, the second cache; more lines can be on their way to the second
//   compress_store    writes the chosen lanes one after the other and returns their number; may write anything behind them, 16
//                     values in all
#pragma once

#if !defined(QUIRE_ISA)
#error "define QUIRE_ISA"
#endif

#define QUIRE_JOIN_(a, b) a##b
#define QUIRE_JOIN(a, b) QUIRE_JOIN_(a, b)

#define QUIRE_IS_portable 0
#define QUIRE_IS_avx2 1
#define QUIRE_IS_avx_vnni 2
#define QUIRE_IS_avx512 3
#define QUIRE_IS_neon 4
#define QUIRE_IS_neon_i8mm_bf16 5
#define QUIRE_LEVEL QUIRE_JOIN(QUIRE_IS_, QUIRE_ISA)

// What a level has. Registers: 32 of 512 bits, 16 of 256 bits, or 32 of 128 bits.
#define QUIRE_HAS_512 (QUIRE_LEVEL == 3)
#define QUIRE_HAS_256 (QUIRE_LEVEL == 1 || QUIRE_LEVEL == 2)
#define QUIRE_HAS_128 (QUIRE_LEVEL == 4 || QUIRE_LEVEL == 5)
#define QUIRE_HAS_AVX_VNNI (QUIRE_LEVEL == 2)
#define QUIRE_HAS_I8MM (QUIRE_LEVEL == 5)
#define QUIRE_HAS_BF16 (QUIRE_LEVEL == 5)

// For lambdas that are loop bodies, which the compiler would otherwise call for each sixteen values.
#define QUIRE_BODY __attribute__((always_inline))

#if QUIRE_HAS_512
#include "simd_avx512.h"
#elif QUIRE_HAS_256
#include "simd_avx2.h"
#elif QUIRE_HAS_128
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

#if !QUIRE_HAS_512
// As 2^(n - h) * 2^h, h = n / 2, so that 128 does not overflow.
QUIRE_INLINE F32 times_power(F32 x, F32 n) {
    const I32 whole = to_i32(n), half = shift_right_signed<1>(whole), bias = set1(127);
    return x * as_f32(shift_left<23>(whole - half + bias)) * as_f32(shift_left<23>(half + bias));
}
#endif

// e^x to about 2 ulp: 2^n * p(r), r = x - n ln 2, |r| <= ln 2 / 2 (Cody and Waite's split of ln 2). Any denormal or 0 below
// -87.3, inf above 88.7; NaN stays.
QUIRE_INLINE F32 exp_unflushed(F32 x) {
    const F32 bounded = max(set1(-104.0f), min(set1(89.0f), x));
    const F32 n = round(bounded * set1(1.44269504f));
    F32 r = fma(n, set1(-0.693359375f), bounded);
    r = fma(n, set1(2.12194440e-4f), r);
    F32 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r + set1(1.0f));
    return times_power(p, n);
}

// The same, and 0 below -87.3.
QUIRE_INLINE F32 exp(F32 x) { return select(x < set1(-87.33654f), zero(), exp_unflushed(x)); }

// tanh through e^(-2|x|); a polynomial near 0, where that cancels.
QUIRE_INLINE F32 tanh(F32 x) {
    const F32 a = abs(x), e = exp(a * set1(-2.0f));
    const F32 far = (set1(1.0f) - e) / (set1(1.0f) + e);
    const F32 s = x * x;
    F32 p = set1(-5.70498872745e-3f);
    p = fma(p, s, set1(2.06390887954e-2f));
    p = fma(p, s, set1(-5.37397155531e-2f));
    p = fma(p, s, set1(1.33314422036e-1f));
    p = fma(p, s, set1(-3.33332819422e-1f));
    const F32 near = fma(p * s, x, x);
    const F32 wide = select(x < zero(), zero() - far, far);
    return select(is_nan(x), x, select(a < set1(0.625f), near, wide));
}

}  // namespace
}  // namespace quire::QUIRE_ISA
