// Sixteen lanes on ARM: NEON with dot products of bytes (ARMv8.2-A), four 128-bit registers each; level neon_i8mm_bf16 has
// products of unsigned by signed bytes and of bf16, too (ARMv8.6-A). See simd.h for what each function means.
#pragma once
#include <arm_neon.h>

#include "float8.h"
#include "simd_types.h"

namespace quire::QUIRE_ISA {
namespace {

struct F32 { float32x4_t a, b, c, d; };
struct I32 { int32x4_t a, b, c, d; };
struct I64 { int64x2_t v[8]; };
struct Bytes { uint8x16_t a, b, c, d; };
struct Mask { uint32x4_t a, b, c, d; };  // all bits of a lane, or none

#define QUIRE_INLINE static inline __attribute__((always_inline))
// An instruction on each quarter of one, two or three operands.
#define QUIRE_QUARTERS1(f) {f(x.a), f(x.b), f(x.c), f(x.d)}
#define QUIRE_QUARTERS2(f) {f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)}
#define QUIRE_QUARTERS3(f) {f(x.a, y.a, z.a), f(x.b, y.b, z.b), f(x.c, y.c, z.c), f(x.d, y.d, z.d)}

QUIRE_INLINE uint32x4_t lanes_of_bits(u32 m, u32 first) {
    const u32 of_lanes[4] = {first, first << 1, first << 2, first << 3};
    return vtstq_u32(vdupq_n_u32(m), vld1q_u32(of_lanes));
}
QUIRE_INLINE Mask mask_of(u32 m) {
    return {lanes_of_bits(m, 1), lanes_of_bits(m, 16), lanes_of_bits(m, 256), lanes_of_bits(m, 4096)};
}
QUIRE_INLINE u32 bits(Mask m) {
    const u32 of_lanes[4] = {1, 2, 4, 8};
    const uint32x4_t low = vld1q_u32(of_lanes);
    const uint32x4_t ab = vorrq_u32(vandq_u32(m.a, low), vandq_u32(m.b, vshlq_n_u32(low, 4)));
    const uint32x4_t cd = vorrq_u32(vandq_u32(m.c, vshlq_n_u32(low, 8)), vandq_u32(m.d, vshlq_n_u32(low, 12)));
    return vaddvq_u32(vorrq_u32(ab, cd));
}
QUIRE_INLINE Mask first_lanes(int n) { return mask_of(n >= 16 ? 0xffffu : (1u << (n < 0 ? 0 : n)) - 1u); }
QUIRE_INLINE Mask operator&(Mask x, Mask y) { return QUIRE_QUARTERS2(vandq_u32); }
QUIRE_INLINE Mask operator|(Mask x, Mask y) { return QUIRE_QUARTERS2(vorrq_u32); }
// Most masks have all lanes.
template <class T> QUIRE_INLINE void copy_lanes(T* to, const T* from, Mask m) {
    const u32 chosen = bits(m);
    if (chosen == 0xffff) {
        __builtin_memcpy(to, from, 16 * sizeof(T));
        return;
    }
    for (u32 left = chosen; left != 0; left &= left - 1) to[__builtin_ctz(left)] = from[__builtin_ctz(left)];
}

QUIRE_INLINE F32 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
QUIRE_INLINE void store(float* p, F32 x) {
    vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d);
}
QUIRE_INLINE F32 load(const float* p, Mask m) {
    float lanes[16] = {};
    copy_lanes(lanes, p, m);
    return load(lanes);
}
QUIRE_INLINE void store(float* p, F32 x, Mask m) {
    float lanes[16];
    store(lanes, x);
    copy_lanes(p, lanes, m);
}
QUIRE_INLINE F32 set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
QUIRE_INLINE F32 zero() { return set1(0.0f); }
QUIRE_INLINE F32 operator+(F32 x, F32 y) { return QUIRE_QUARTERS2(vaddq_f32); }
QUIRE_INLINE F32 operator-(F32 x, F32 y) { return QUIRE_QUARTERS2(vsubq_f32); }
QUIRE_INLINE F32 operator*(F32 x, F32 y) { return QUIRE_QUARTERS2(vmulq_f32); }
QUIRE_INLINE F32 operator/(F32 x, F32 y) { return QUIRE_QUARTERS2(vdivq_f32); }
QUIRE_INLINE F32 fma(F32 x, F32 y, F32 z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
// The instructions for max and min give NaN where an operand is NaN.
QUIRE_INLINE float32x4_t larger_of(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
QUIRE_INLINE float32x4_t smaller_of(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
QUIRE_INLINE F32 max(F32 x, F32 y) { return QUIRE_QUARTERS2(larger_of); }
QUIRE_INLINE F32 min(F32 x, F32 y) { return QUIRE_QUARTERS2(smaller_of); }
QUIRE_INLINE F32 abs(F32 x) { return QUIRE_QUARTERS1(vabsq_f32); }
QUIRE_INLINE F32 sqrt(F32 x) { return QUIRE_QUARTERS1(vsqrtq_f32); }
QUIRE_INLINE F32 round(F32 x) { return QUIRE_QUARTERS1(vrndnq_f32); }
QUIRE_INLINE Mask operator<(F32 x, F32 y) { return QUIRE_QUARTERS2(vcltq_f32); }
QUIRE_INLINE Mask operator<=(F32 x, F32 y) { return QUIRE_QUARTERS2(vcleq_f32); }
QUIRE_INLINE Mask operator>(F32 x, F32 y) { return QUIRE_QUARTERS2(vcgtq_f32); }
QUIRE_INLINE Mask operator>=(F32 x, F32 y) { return QUIRE_QUARTERS2(vcgeq_f32); }
QUIRE_INLINE Mask operator==(F32 x, F32 y) { return QUIRE_QUARTERS2(vceqq_f32); }
QUIRE_INLINE Mask is_nan(F32 x) {
    return {vmvnq_u32(vceqq_f32(x.a, x.a)), vmvnq_u32(vceqq_f32(x.b, x.b)), vmvnq_u32(vceqq_f32(x.c, x.c)),
        vmvnq_u32(vceqq_f32(x.d, x.d))};
}
QUIRE_INLINE F32 select(Mask x, F32 y, F32 z) { return QUIRE_QUARTERS3(vbslq_f32); }
QUIRE_INLINE float32x4_t zero_below_quarter(float32x4_t limit, float32x4_t x, float32x4_t y) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, limit)));
}
QUIRE_INLINE F32 zero_below(F32 x, F32 y, F32 z) { return QUIRE_QUARTERS3(zero_below_quarter); }

QUIRE_INLINE I32 load(const i32* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
QUIRE_INLINE void store(i32* p, I32 x) {
    vst1q_s32(p, x.a), vst1q_s32(p + 4, x.b), vst1q_s32(p + 8, x.c), vst1q_s32(p + 12, x.d);
}
QUIRE_INLINE I32 load(const i32* p, Mask m) {
    i32 lanes[16] = {};
    copy_lanes(lanes, p, m);
    return load(lanes);
}
template <class T, class V> QUIRE_INLINE int compress_lanes(T* p, Mask m, V x) {
    T lanes[16];
    store(lanes, x);
    int count = 0;
    for (u32 left = bits(m); left != 0; left &= left - 1) p[count++] = lanes[__builtin_ctz(left)];
    return count;
}
QUIRE_INLINE int compress_store(float* p, Mask m, F32 x) { return compress_lanes(p, m, x); }
QUIRE_INLINE int compress_store(i32* p, Mask m, I32 x) { return compress_lanes(p, m, x); }
QUIRE_INLINE I32 set1(i32 x) { return {vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}; }
QUIRE_INLINE I32 iota() {
    static constexpr i32 lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(lanes);
}
QUIRE_INLINE I32 operator+(I32 x, I32 y) { return QUIRE_QUARTERS2(vaddq_s32); }
QUIRE_INLINE I32 operator-(I32 x, I32 y) { return QUIRE_QUARTERS2(vsubq_s32); }
QUIRE_INLINE I32 operator*(I32 x, I32 y) { return QUIRE_QUARTERS2(vmulq_s32); }
QUIRE_INLINE I32 operator&(I32 x, I32 y) { return QUIRE_QUARTERS2(vandq_s32); }
QUIRE_INLINE I32 operator|(I32 x, I32 y) { return QUIRE_QUARTERS2(vorrq_s32); }
QUIRE_INLINE I32 operator^(I32 x, I32 y) { return QUIRE_QUARTERS2(veorq_s32); }
template <int N> QUIRE_INLINE I32 shift_left(I32 x) {
    return {vshlq_n_s32(x.a, N), vshlq_n_s32(x.b, N), vshlq_n_s32(x.c, N), vshlq_n_s32(x.d, N)};
}
template <int N> QUIRE_INLINE int32x4_t shift_right_quarter(int32x4_t x) {
    return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), N));
}
template <int N> QUIRE_INLINE I32 shift_right(I32 x) { return QUIRE_QUARTERS1(shift_right_quarter<N>); }
template <int N> QUIRE_INLINE I32 shift_right_signed(I32 x) {
    return {vshrq_n_s32(x.a, N), vshrq_n_s32(x.b, N), vshrq_n_s32(x.c, N), vshrq_n_s32(x.d, N)};
}
QUIRE_INLINE I32 min(I32 x, I32 y) { return QUIRE_QUARTERS2(vminq_s32); }
QUIRE_INLINE I32 max(I32 x, I32 y) { return QUIRE_QUARTERS2(vmaxq_s32); }
QUIRE_INLINE I32 select(Mask x, I32 y, I32 z) { return QUIRE_QUARTERS3(vbslq_s32); }
QUIRE_INLINE Mask operator==(I32 x, I32 y) { return QUIRE_QUARTERS2(vceqq_s32); }
QUIRE_INLINE Mask operator<(I32 x, I32 y) { return QUIRE_QUARTERS2(vcltq_s32); }
QUIRE_INLINE F32 to_f32(I32 x) { return QUIRE_QUARTERS1(vcvtq_f32_s32); }
// The conversions saturate: what is too large, or NaN, becomes the smallest integer, as elsewhere.
QUIRE_INLINE int32x4_t smallest_unless_below(float32x4_t x, int32x4_t converted) {
    return vbslq_s32(vcltq_f32(x, vdupq_n_f32(2147483648.0f)), converted, vdupq_n_s32(static_cast<i32>(0x80000000u)));
}
QUIRE_INLINE int32x4_t nearest_quarter(float32x4_t x) { return smallest_unless_below(x, vcvtnq_s32_f32(x)); }
QUIRE_INLINE int32x4_t next_up_quarter(float32x4_t x) { return smallest_unless_below(x, vcvtpq_s32_f32(x)); }
QUIRE_INLINE I32 to_i32(F32 x) { return QUIRE_QUARTERS1(nearest_quarter); }
QUIRE_INLINE I32 to_i32_up(F32 x) { return QUIRE_QUARTERS1(next_up_quarter); }
struct Steps { const float* values; };
QUIRE_INLINE Steps make_steps(const float* values) { return {values + 256}; }
QUIRE_INLINE F32 at_step(const Steps& steps, I32 n) {
    i32 at[16];
    float values[16];
    store(at, n);
    for (int i = 0; i < 16; ++i) values[i] = steps.values[at[i]];
    return load(values);
}
QUIRE_INLINE F32 as_f32(I32 x) { return QUIRE_QUARTERS1(vreinterpretq_f32_s32); }
QUIRE_INLINE I32 as_i32(F32 x) { return QUIRE_QUARTERS1(vreinterpretq_s32_f32); }

QUIRE_INLINE uint32x2_t even_lanes(int32x4_t x) { return vmovn_u64(vreinterpretq_u64_s32(x)); }
QUIRE_INLINE int32x4_t multiply_even_quarter(int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_u64(vmull_u32(even_lanes(x), even_lanes(y)));
}
QUIRE_INLINE I32 multiply_even(I32 x, I32 y) { return QUIRE_QUARTERS2(multiply_even_quarter); }
QUIRE_INLINE int32x4_t odd_to_even_quarter(int32x4_t x) {
    return vreinterpretq_s32_u64(vshrq_n_u64(vreinterpretq_u64_s32(x), 32));
}
QUIRE_INLINE I32 odd_to_even(I32 x) { return QUIRE_QUARTERS1(odd_to_even_quarter); }
QUIRE_INLINE int32x4_t min_unsigned_quarter(int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_u32(vminq_u32(vreinterpretq_u32_s32(x), vreinterpretq_u32_s32(y)));
}
QUIRE_INLINE I32 min_unsigned(I32 x, I32 y) { return QUIRE_QUARTERS2(min_unsigned_quarter); }
QUIRE_INLINE I32 xor3(I32 x, I32 y, I32 z) { return x ^ y ^ z; }
QUIRE_INLINE I64 zero_i64() { return {}; }
QUIRE_INLINE int64x2_t to_i64_eighth(float32x2_t x) { return vcvtnq_s64_f64(vcvt_f64_f32(x)); }
QUIRE_INLINE I64 to_i64(F32 x) {
    return {{to_i64_eighth(vget_low_f32(x.a)), to_i64_eighth(vget_high_f32(x.a)), to_i64_eighth(vget_low_f32(x.b)),
        to_i64_eighth(vget_high_f32(x.b)), to_i64_eighth(vget_low_f32(x.c)), to_i64_eighth(vget_high_f32(x.c)),
        to_i64_eighth(vget_low_f32(x.d)), to_i64_eighth(vget_high_f32(x.d))}};
}
QUIRE_INLINE I64 operator+(I64 x, I64 y) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) x.v[i] = vaddq_s64(x.v[i], y.v[i]);
    return x;
}
QUIRE_INLINE i64 sum_lanes(I64 x) {
#pragma GCC unroll 8
    for (int i = 1; i < 8; ++i) x.v[0] = vaddq_s64(x.v[0], x.v[i]);
    return vgetq_lane_s64(x.v[0], 0) + vgetq_lane_s64(x.v[0], 1);
}

QUIRE_INLINE float32x4_t widen_bf16(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
QUIRE_INLINE F32 load_bf16(const u16* p) {
    const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
    return {widen_bf16(vget_low_u16(low)), widen_bf16(vget_high_u16(low)), widen_bf16(vget_low_u16(high)),
        widen_bf16(vget_high_u16(high))};
}
QUIRE_INLINE F32 load_bf16(const u16* p, Mask m) {
    u16 lanes[16] = {};
    copy_lanes(lanes, p, m);
    return load_bf16(lanes);
}
// Round to nearest even; NaN stays NaN. In integers, which keep denormals.
QUIRE_INLINE uint16x4_t round_quarter(float32x4_t x) {
    const uint32x4_t u = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, vorrq_u32(u, vdupq_n_u32(0x400000))), 16);
}
QUIRE_INLINE void store_bf16(u16* p, F32 x) {
    vst1q_u16(p, vcombine_u16(round_quarter(x.a), round_quarter(x.b)));
    vst1q_u16(p + 8, vcombine_u16(round_quarter(x.c), round_quarter(x.d)));
}
QUIRE_INLINE void store_bf16(u16* p, F32 x, Mask m) {
    u16 lanes[16];
    store_bf16(lanes, x);
    copy_lanes(p, lanes, m);
}
// Eight values, of which denormals may become 0.
QUIRE_INLINE uint16x8_t round_flushed(float32x4_t low, float32x4_t high) {
#if QUIRE_HAS_BF16
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
#else
    return vcombine_u16(round_quarter(low), round_quarter(high));
#endif
}
QUIRE_INLINE void store_bf16_flushed(u16* p, F32 x) {
    vst1q_u16(p, round_flushed(x.a, x.b)), vst1q_u16(p + 8, round_flushed(x.c, x.d));
}
QUIRE_INLINE I32 dot_words(F32 x, F32 y) {
    return {vreinterpretq_s32_u16(round_flushed(x.a, x.b)), vreinterpretq_s32_u16(round_flushed(x.c, x.d)),
            vreinterpretq_s32_u16(round_flushed(y.a, y.b)), vreinterpretq_s32_u16(round_flushed(y.c, y.d))};
}
QUIRE_INLINE float32x4_t widen_f16(uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
QUIRE_INLINE F32 load_f16(const u16* p) {
    const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
    return {widen_f16(vget_low_u16(low)), widen_f16(vget_high_u16(low)), widen_f16(vget_low_u16(high)),
        widen_f16(vget_high_u16(high))};
}
QUIRE_INLINE F32 load_f16(const u16* p, Mask m) {
    u16 lanes[16] = {};
    copy_lanes(lanes, p, m);
    return load_f16(lanes);
}
QUIRE_INLINE uint16x4_t round_f16(float32x4_t x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
QUIRE_INLINE void store_f16(u16* p, F32 x) {
    vst1q_u16(p, vcombine_u16(round_f16(x.a), round_f16(x.b)));
    vst1q_u16(p + 8, vcombine_u16(round_f16(x.c), round_f16(x.d)));
}

QUIRE_INLINE Bytes load_bytes(const void* p) {
    const u8* q = static_cast<const u8*>(p);
    return {vld1q_u8(q), vld1q_u8(q + 16), vld1q_u8(q + 32), vld1q_u8(q + 48)};
}
QUIRE_INLINE void store_bytes(void* p, Bytes x) {
    u8* q = static_cast<u8*>(p);
    vst1q_u8(q, x.a), vst1q_u8(q + 16, x.b), vst1q_u8(q + 32, x.c), vst1q_u8(q + 48, x.d);
}
QUIRE_INLINE uint8x16_t same_words(u32 x) { return vreinterpretq_u8_u32(vdupq_n_u32(x)); }
QUIRE_INLINE Bytes set1_bytes(u32 x) { return {same_words(x), same_words(x), same_words(x), same_words(x)}; }
QUIRE_INLINE Bytes keep_or(Bytes x, u32 mask, Bytes y) {
    const uint8x16_t m = same_words(mask);
    return {vorrq_u8(vandq_u8(x.a, m), y.a), vorrq_u8(vandq_u8(x.b, m), y.b), vorrq_u8(vandq_u8(x.c, m), y.c),
        vorrq_u8(vandq_u8(x.d, m), y.d)};
}
QUIRE_INLINE Bytes select_bits(u32 mask, Bytes x, Bytes y) {
    const uint8x16_t m = same_words(mask);
    return {vbslq_u8(m, x.a, y.a), vbslq_u8(m, x.b, y.b), vbslq_u8(m, x.c, y.c), vbslq_u8(m, x.d, y.d)};
}
QUIRE_INLINE Bytes put_half(Bytes x, int place, u16 value) {
    u8 bytes[64];
    store_bytes(bytes, x);
    __builtin_memcpy(bytes + 2 * place, &value, 2);
    return load_bytes(bytes);
}
QUIRE_INLINE uint8x16_t rotate_quarter(uint8x16_t x) {
    const uint32x4_t words = vreinterpretq_u32_u8(x);
    return vreinterpretq_u8_u32(vsriq_n_u32(vshlq_n_u32(words, 28), words, 4));
}
QUIRE_INLINE Bytes rotate_words(Bytes x) { return QUIRE_QUARTERS1(rotate_quarter); }
QUIRE_INLINE float32x4_t high_half(uint8x16_t x) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(x), vdupq_n_u32(0xffff0000u)));
}
QUIRE_INLINE float32x4_t low_half(uint8x16_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(x), 16)); }
QUIRE_INLINE F32 high_halves(Bytes x) { return QUIRE_QUARTERS1(high_half); }
QUIRE_INLINE F32 low_halves(Bytes x) { return QUIRE_QUARTERS1(low_half); }
#if QUIRE_HAS_BF16
// These two instructions round like fma on the widened numbers. Those that sum two or four products (bfdot, bfmmla) round
// differently.
QUIRE_INLINE float32x4_t dot_bf16_quarter(float32x4_t acc, uint8x16_t x, uint8x16_t y) {
    const bfloat16x8_t p = vreinterpretq_bf16_u8(x), q = vreinterpretq_bf16_u8(y);
    return vbfmlalbq_f32(vbfmlaltq_f32(acc, p, q), p, q);
}
#else
QUIRE_INLINE float32x4_t dot_bf16_quarter(float32x4_t acc, uint8x16_t x, uint8x16_t y) {
    return vfmaq_f32(vfmaq_f32(acc, high_half(x), high_half(y)), low_half(x), low_half(y));
}
#endif
QUIRE_INLINE F32 dot_bf16(F32 x, Bytes y, Bytes z) { return QUIRE_QUARTERS3(dot_bf16_quarter); }
#if QUIRE_HAS_I8MM
QUIRE_INLINE int32x4_t dot_u8s8_quarter(int32x4_t acc, uint8x16_t w, uint8x16_t x) {
    return vusdotq_s32(acc, w, vreinterpretq_s8_u8(x));
}
#else
// Bytes with one sign: w = signed + 128 is split, and 128 * sum(x) added from x alone.
QUIRE_INLINE int32x4_t dot_u8s8_quarter(int32x4_t acc, uint8x16_t w, uint8x16_t x) {
    const int8x16_t input = vreinterpretq_s8_u8(x), half = vdupq_n_s8(64);
    const int8x16_t code = vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(0x80)));
    return vdotq_s32(vdotq_s32(vdotq_s32(acc, half, input), half, input), code, input);
}
#endif
QUIRE_INLINE I32 dot_u8s8(I32 x, Bytes y, Bytes z) { return QUIRE_QUARTERS3(dot_u8s8_quarter); }
QUIRE_INLINE F32 widen_s8(int8x16_t x) {
    const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))};
}
QUIRE_INLINE F32 load_s8(const i8* p) { return widen_s8(vld1q_s8(p)); }
QUIRE_INLINE F32 load_s8(const i8* p, Mask m) {
    i8 lanes[16] = {};
    copy_lanes(lanes, p, m);
    return load_s8(lanes);
}
QUIRE_INLINE void store_s8(i8* p, I32 x) {
    const int16x8_t low = vcombine_s16(vqmovn_s32(x.a), vqmovn_s32(x.b)), high = vcombine_s16(vqmovn_s32(x.c), vqmovn_s32(x.d));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
QUIRE_INLINE Bytes load_quarters(const i8* a, const i8* b, const i8* c, const i8* d) {
    return {vreinterpretq_u8_s8(vld1q_s8(a)), vreinterpretq_u8_s8(vld1q_s8(b)), vreinterpretq_u8_s8(vld1q_s8(c)),
        vreinterpretq_u8_s8(vld1q_s8(d))};
}
struct CodeTable {};
QUIRE_INLINE CodeTable code_table() { return {}; }
// The lower half of a word from x, the upper one from y: both exact in bf16.
QUIRE_INLINE uint8x16_t join_halves(float32x4_t x, float32x4_t y) {
    return vreinterpretq_u8_u32(vsriq_n_u32(vreinterpretq_u32_f32(y), vreinterpretq_u32_f32(x), 16));
}
QUIRE_INLINE Bytes widen_pairs(uint8x16_t low, uint8x16_t high) {
    const F32 x = widen_s8(vreinterpretq_s8_u8(low)), y = widen_s8(vreinterpretq_s8_u8(high));
    return QUIRE_QUARTERS2(join_halves);
}
QUIRE_INLINE void widen_codes(CodeTable, Bytes codes, Bytes& first, Bytes& second) {
    first = widen_pairs(codes.a, codes.b);
    second = widen_pairs(codes.c, codes.d);
}
#if QUIRE_HAS_BF16
using Pairs = Bytes;
QUIRE_INLINE Pairs pairs_of(Bytes line) { return line; }
QUIRE_INLINE F32 dot_pairs(F32 acc, Pairs w, Bytes x) { return dot_bf16(acc, w, x); }
QUIRE_INLINE F32 lower(Pairs w) { return low_halves(w); }
QUIRE_INLINE F32 upper(Pairs w) { return high_halves(w); }
#else
struct Pairs { F32 first, second; };
QUIRE_INLINE Pairs pairs_of(Bytes line) { return {low_halves(line), high_halves(line)}; }
QUIRE_INLINE F32 dot_pairs(F32 acc, const Pairs& w, Bytes x) {
    return fma(w.first, low_halves(x), fma(w.second, high_halves(x), acc));
}
QUIRE_INLINE F32 lower(const Pairs& w) { return w.first; }
QUIRE_INLINE F32 upper(const Pairs& w) { return w.second; }
#endif
struct Float8Table {
    uint8x16_t high;      // the upper byte of bf16 by the upper nibble of a code, for codes of normal numbers
    uint8x16_t least[2];  // what has to change in both bytes, the lower first, for codes below 16
};
QUIRE_INLINE Float8Table float8_table() {
    alignas(16) static constexpr struct Tables {
        u8 high[16], least[2][16];
        constexpr Tables() : high(), least() {
            for (int i = 0; i < 16; ++i) {
                high[i] = static_cast<u8>(bf16_of_float8(static_cast<u8>(i << 4 | 8)) >> 8);
                const u16 bits = bf16_of_float8(static_cast<u8>(i));
                least[0][i] = static_cast<u8>((bits ^ i << 4) & 255);
                least[1][i] = static_cast<u8>(bits >> 8 ^ bf16_of_float8(8) >> 8);
            }
        }
    } tables;
    return {vld1q_u8(tables.high), {vld1q_u8(tables.least[0]), vld1q_u8(tables.least[1])}};
}
struct Float8Line { const Float8Table& table; const u8* codes; };
QUIRE_INLINE Float8Line load_float8(const Float8Table& table, const u8* codes) { return {table, codes}; }
struct Float8Bytes { uint8x16_t low, high; };
// A lookup gives 0 for an index past its sixteen entries: codes of normal numbers change nothing.
QUIRE_INLINE Float8Bytes float8_halves(const Float8Table& table, uint8x16_t codes) {
    const uint8x16_t magnitude = vandq_u8(codes, vdupq_n_u8(0x7f));
    return {veorq_u8(vshlq_n_u8(codes, 4), vqtbl1q_u8(table.least[0], magnitude)),
            veorq_u8(vqtbl1q_u8(table.high, vshrq_n_u8(codes, 4)), vqtbl1q_u8(table.least[1], magnitude))};
}
template <int LINE> QUIRE_INLINE Bytes float8_bytes(const Float8Line& line) {
    const Float8Bytes x = float8_halves(line.table, vld1q_u8(line.codes + LINE * 32)),
                      y = float8_halves(line.table, vld1q_u8(line.codes + LINE * 32 + 16));
    return {vzip1q_u8(x.low, x.high), vzip1q_u8(y.low, y.high), vzip2q_u8(x.low, x.high), vzip2q_u8(y.low, y.high)};
}
QUIRE_INLINE Bytes load_table(const u8* table) {
    const uint8x16_t x = vld1q_u8(table);
    return {x, x, x, x};
}
QUIRE_INLINE void unpack_nibbles(Bytes packed, Bytes table, Bytes& low, Bytes& high) {
    const auto low_of = [&](uint8x16_t x) QUIRE_BODY { return vqtbl1q_u8(table.a, vandq_u8(x, vdupq_n_u8(15))); };
    const auto high_of = [&](uint8x16_t x) QUIRE_BODY { return vqtbl1q_u8(table.a, vshrq_n_u8(x, 4)); };
    low = {low_of(packed.a), low_of(packed.b), low_of(packed.c), low_of(packed.d)};
    high = {high_of(packed.a), high_of(packed.b), high_of(packed.c), high_of(packed.d)};
}
// The low bytes of sixteen levels, and their high bytes.
struct LevelTable { uint8x16_t low, high; };
QUIRE_INLINE LevelTable level_table(const u16* levels) {
    const uint8x16x2_t bytes = vld2q_u8(reinterpret_cast<const u8*>(levels));
    return {bytes.val[0], bytes.val[1]};
}
QUIRE_INLINE int32x4_t level_pairs_quarter(const LevelTable& table, int32x4_t indices) {
    // An index past the sixteen entries gives 0.
    const uint32x4_t x = vreinterpretq_u32_s32(indices);
    const uint8x16_t low = vreinterpretq_u8_u32(vorrq_u32(x, vdupq_n_u32(0xff00ff00u)));
    const uint8x16_t high = vreinterpretq_u8_u32(vorrq_u32(vshlq_n_u32(x, 8), vdupq_n_u32(0x00ff00ffu)));
    return vreinterpretq_s32_u8(vorrq_u8(vqtbl1q_u8(table.low, low), vqtbl1q_u8(table.high, high)));
}
QUIRE_INLINE I32 level_pairs(const LevelTable& table, I32 x) {
    return {level_pairs_quarter(table, x.a), level_pairs_quarter(table, x.b), level_pairs_quarter(table, x.c),
        level_pairs_quarter(table, x.d)};
}
QUIRE_INLINE int32x4_t widen_u16(uint16x4_t x) { return vreinterpretq_s32_u32(vmovl_u16(x)); }
QUIRE_INLINE I32 load_u8(const u8* p) {
    const uint8x16_t x = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_u8(vget_high_u8(x));
    return {widen_u16(vget_low_u16(low)), widen_u16(vget_high_u16(low)), widen_u16(vget_low_u16(high)),
        widen_u16(vget_high_u16(high))};
}
QUIRE_INLINE I32 load_u8(const u8* p, Mask m) {
    u8 lanes[16] = {};
    copy_lanes(lanes, p, m);
    return load_u8(lanes);
}
template <int N> QUIRE_INLINE F32 swap_lanes(F32 x) {
    if constexpr (N == 8) return {x.c, x.d, x.a, x.b};
    if constexpr (N == 4) return {x.b, x.a, x.d, x.c};
    if constexpr (N == 2) return {vextq_f32(x.a, x.a, 2), vextq_f32(x.b, x.b, 2), vextq_f32(x.c, x.c, 2), vextq_f32(x.d, x.d, 2)};
    return QUIRE_QUARTERS1(vrev64q_f32);
}
QUIRE_INLINE void store_columns(u32* to, i64 stride, const I32 (&rows)[16], int num_rows, int num_words) {
    for (int r = 0; r < num_rows; ++r) {
        i32 words[16];
        store(words, rows[r]);
        for (int w = 0; w < num_words; ++w) to[w * stride + r] = static_cast<u32>(words[w]);
    }
}
QUIRE_INLINE float sum_lanes(F32 x) {
    float32x4_t sum = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    sum = vaddq_f32(sum, vextq_f32(sum, sum, 2));
    return vgetq_lane_f32(sum, 0) + vgetq_lane_f32(sum, 1);
}
QUIRE_INLINE float max_lanes(F32 x) {
    float32x4_t most = larger_of(larger_of(x.a, x.c), larger_of(x.b, x.d));
    most = larger_of(most, vextq_f32(most, most, 2));
    const float first = vgetq_lane_f32(most, 0), second = vgetq_lane_f32(most, 1);
    return first > second ? first : second;
}
QUIRE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
QUIRE_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }
// Keep what comes before in the order of the source: otherwise GCC interleaves more rows than there are registers.
template <class T> QUIRE_INLINE void in_order(const T*& x, F32& acc) {
    asm("" : "+r"(x), "+w"(acc.a), "+w"(acc.b), "+w"(acc.c), "+w"(acc.d));
}
QUIRE_INLINE void in_order(Bytes& x) { asm("" : "+w"(x.a), "+w"(x.b), "+w"(x.c), "+w"(x.d)); }

#undef QUIRE_QUARTERS1
#undef QUIRE_QUARTERS2
#undef QUIRE_QUARTERS3

}  // namespace
}  // namespace quire::QUIRE_ISA
