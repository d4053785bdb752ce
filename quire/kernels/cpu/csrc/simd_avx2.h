// Sixteen lanes on AVX2 + FMA + F16C: two 256-bit registers each; level avx_vnni has products of bytes, too. See simd.h for what
// each function means.
#pragma once
#include <immintrin.h>

#include "float8.h"
#include "simd_types.h"

namespace quire::QUIRE_ISA {
namespace {

struct F32 { __m256 a, b; };
struct I32 { __m256i a, b; };
struct I64 { __m256i a, b, c, d; };
struct Bytes { __m256i a, b; };
struct Mask { u32 v; };

#define QUIRE_INLINE static inline __attribute__((always_inline))

QUIRE_INLINE __m256i lane_mask(u32 m) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(m)), bit), bit);
}
QUIRE_INLINE __m256i low_lanes(Mask m) { return lane_mask(m.v & 255); }
QUIRE_INLINE __m256i high_lanes(Mask m) { return lane_mask(m.v >> 8); }

QUIRE_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
QUIRE_INLINE void store(float* p, F32 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
QUIRE_INLINE Mask mask_of(u32 m) { return {m}; }
QUIRE_INLINE Mask first_lanes(int n) { return {n >= 16 ? 0xffffu : (1u << (n < 0 ? 0 : n)) - 1u}; }
QUIRE_INLINE F32 load(const float* p, Mask m) {
    return {_mm256_maskload_ps(p, low_lanes(m)), _mm256_maskload_ps(p + 8, high_lanes(m))};
}
QUIRE_INLINE void store(float* p, F32 x, Mask m) {
    _mm256_maskstore_ps(p, low_lanes(m), x.a);
    _mm256_maskstore_ps(p + 8, high_lanes(m), x.b);
}
QUIRE_INLINE F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
QUIRE_INLINE F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
QUIRE_INLINE F32 operator+(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
QUIRE_INLINE F32 operator-(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
QUIRE_INLINE F32 operator*(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
QUIRE_INLINE F32 operator/(F32 x, F32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
QUIRE_INLINE F32 fma(F32 x, F32 y, F32 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
QUIRE_INLINE F32 max(F32 x, F32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
QUIRE_INLINE F32 min(F32 x, F32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
QUIRE_INLINE F32 abs(F32 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
QUIRE_INLINE F32 sqrt(F32 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
QUIRE_INLINE F32 round(F32 x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
QUIRE_INLINE Mask join(__m256 a, __m256 b) {
    return {static_cast<u32>(_mm256_movemask_ps(a)) | static_cast<u32>(_mm256_movemask_ps(b)) << 8};
}
QUIRE_INLINE Mask operator<(F32 x, F32 y) {
    return join(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ));
}
QUIRE_INLINE Mask operator<=(F32 x, F32 y) {
    return join(_mm256_cmp_ps(x.a, y.a, _CMP_LE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LE_OQ));
}
QUIRE_INLINE Mask operator>(F32 x, F32 y) {
    return join(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ));
}
QUIRE_INLINE Mask operator>=(F32 x, F32 y) {
    return join(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
}
QUIRE_INLINE Mask operator==(F32 x, F32 y) {
    return join(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ));
}
QUIRE_INLINE Mask is_nan(F32 x) { return join(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)); }
QUIRE_INLINE Mask operator&(Mask x, Mask y) { return {x.v & y.v}; }
QUIRE_INLINE Mask operator|(Mask x, Mask y) { return {x.v | y.v}; }
QUIRE_INLINE u32 bits(Mask m) { return m.v; }
QUIRE_INLINE F32 select(Mask m, F32 yes, F32 no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_castsi256_ps(low_lanes(m))),
            _mm256_blendv_ps(no.b, yes.b, _mm256_castsi256_ps(high_lanes(m)))};
}
QUIRE_INLINE F32 zero_below(F32 limit, F32 x, F32 y) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_NLT_UQ), y.a),
        _mm256_and_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_NLT_UQ), y.b)};
}
template <class T, class V> QUIRE_INLINE int compress_lanes(T* p, Mask m, V x) {
    T lanes[16];
    store(lanes, x);
    int count = 0;
    for (u32 left = m.v; left != 0; left &= left - 1) p[count++] = lanes[__builtin_ctz(left)];
    return count;
}

QUIRE_INLINE I32 load(const i32* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
QUIRE_INLINE void store(i32* p, I32 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
QUIRE_INLINE int compress_store(float* p, Mask m, F32 x) { return compress_lanes(p, m, x); }
QUIRE_INLINE int compress_store(i32* p, Mask m, I32 x) { return compress_lanes(p, m, x); }
QUIRE_INLINE I32 load(const i32* p, Mask m) {
    return {_mm256_maskload_epi32(p, low_lanes(m)), _mm256_maskload_epi32(p + 8, high_lanes(m))};
}
QUIRE_INLINE I32 set1(i32 x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
QUIRE_INLINE I32 iota() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }
QUIRE_INLINE I32 operator+(I32 x, I32 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
QUIRE_INLINE I32 operator-(I32 x, I32 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
QUIRE_INLINE I32 operator*(I32 x, I32 y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
QUIRE_INLINE I32 operator&(I32 x, I32 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
QUIRE_INLINE I32 operator|(I32 x, I32 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
QUIRE_INLINE I32 operator^(I32 x, I32 y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N> QUIRE_INLINE I32 shift_left(I32 x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> QUIRE_INLINE I32 shift_right(I32 x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
template <int N> QUIRE_INLINE I32 shift_right_signed(I32 x) { return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)}; }
QUIRE_INLINE I32 min(I32 x, I32 y) { return {_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b)}; }
QUIRE_INLINE I32 max(I32 x, I32 y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
QUIRE_INLINE I32 select(Mask m, I32 yes, I32 no) {
    return {_mm256_blendv_epi8(no.a, yes.a, low_lanes(m)), _mm256_blendv_epi8(no.b, yes.b, high_lanes(m))};
}
QUIRE_INLINE Mask operator==(I32 x, I32 y) {
    return join(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x.a, y.a)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(x.b, y.b)));
}
QUIRE_INLINE Mask operator<(I32 x, I32 y) {
    return join(_mm256_castsi256_ps(_mm256_cmpgt_epi32(y.a, x.a)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(y.b, x.b)));
}
QUIRE_INLINE F32 to_f32(I32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
QUIRE_INLINE I32 to_i32(F32 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
QUIRE_INLINE I32 to_i32_up(F32 x) { return {_mm256_cvtps_epi32(_mm256_ceil_ps(x.a)), _mm256_cvtps_epi32(_mm256_ceil_ps(x.b))}; }
struct Steps { const float* values; };
QUIRE_INLINE Steps make_steps(const float* values) { return {values + 256}; }
QUIRE_INLINE F32 at_step(const Steps& steps, I32 n) {
    return {_mm256_i32gather_ps(steps.values, n.a, 4), _mm256_i32gather_ps(steps.values, n.b, 4)};
}
QUIRE_INLINE F32 as_f32(I32 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
QUIRE_INLINE I32 as_i32(F32 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }

QUIRE_INLINE I32 multiply_even(I32 x, I32 y) { return {_mm256_mul_epu32(x.a, y.a), _mm256_mul_epu32(x.b, y.b)}; }
QUIRE_INLINE I32 odd_to_even(I32 x) { return {_mm256_srli_epi64(x.a, 32), _mm256_srli_epi64(x.b, 32)}; }
QUIRE_INLINE I32 min_unsigned(I32 x, I32 y) { return {_mm256_min_epu32(x.a, y.a), _mm256_min_epu32(x.b, y.b)}; }
QUIRE_INLINE I32 xor3(I32 x, I32 y, I32 z) { return x ^ y ^ z; }
QUIRE_INLINE I64 zero_i64() {
    return {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
}
// Added to 1.5 * 2^52, a number keeps no fraction: its integer stands in the low bits.
QUIRE_INLINE __m256i to_i64_quarter(__m128 x) {
    const __m256d magic = _mm256_set1_pd(6755399441055744.0);
    return _mm256_sub_epi64(_mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(x), magic)), _mm256_castpd_si256(magic));
}
QUIRE_INLINE I64 to_i64(F32 x) {
    return {to_i64_quarter(_mm256_castps256_ps128(x.a)), to_i64_quarter(_mm256_extractf128_ps(x.a, 1)),
            to_i64_quarter(_mm256_castps256_ps128(x.b)), to_i64_quarter(_mm256_extractf128_ps(x.b, 1))};
}
QUIRE_INLINE I64 operator+(I64 x, I64 y) {
    return {_mm256_add_epi64(x.a, y.a), _mm256_add_epi64(x.b, y.b), _mm256_add_epi64(x.c, y.c), _mm256_add_epi64(x.d, y.d)};
}
QUIRE_INLINE i64 sum_lanes(I64 x) {
    const __m256i sum = _mm256_add_epi64(_mm256_add_epi64(x.a, x.b), _mm256_add_epi64(x.c, x.d));
    const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    return _mm_cvtsi128_si64(half) + _mm_extract_epi64(half, 1);
}

QUIRE_INLINE F32 load_bf16(const u16* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)), 16))};
}
template <class T> QUIRE_INLINE void copy_lanes(T* to, const T* from, Mask m) {
    for (u32 left = m.v; left != 0; left &= left - 1) to[__builtin_ctz(left)] = from[__builtin_ctz(left)];
}
QUIRE_INLINE F32 load_bf16(const u16* p, Mask m) {
    u16 lanes[16] = {};
    copy_lanes(lanes, p, m);
    return load_bf16(lanes);
}
QUIRE_INLINE __m256i round_half(__m256 x) {
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    r = _mm256_blendv_epi8(r, _mm256_or_si256(u, _mm256_set1_epi32(0x400000)), _mm256_castps_si256(nan));
    return _mm256_srli_epi32(r, 16);
}
QUIRE_INLINE void store_bf16(u16* p, F32 x) {
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(round_half(x.a), round_half(x.b)), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
QUIRE_INLINE void store_bf16(u16* p, F32 x, Mask m) {
    u16 lanes[16];
    store_bf16(lanes, x);
    copy_lanes(p, lanes, m);
}
QUIRE_INLINE void store_bf16_flushed(u16* p, F32 x) { store_bf16(p, x); }
QUIRE_INLINE I32 dot_words(F32 x, F32 y) {
    alignas(64) u16 halves[32];
    store_bf16(halves, x);
    store_bf16(halves + 16, y);
    return load(reinterpret_cast<const i32*>(halves));
}
QUIRE_INLINE F32 load_f16(const u16* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
QUIRE_INLINE F32 load_f16(const u16* p, Mask m) {
    u16 lanes[16] = {};
    copy_lanes(lanes, p, m);
    return load_f16(lanes);
}
QUIRE_INLINE void store_f16(u16* p, F32 x) {
    __m128i* q = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}

QUIRE_INLINE Bytes load_bytes(const void* p) {
    const __m256i* q = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
QUIRE_INLINE void store_bytes(void* p, Bytes x) {
    __m256i* q = static_cast<__m256i*>(p);
    _mm256_storeu_si256(q, x.a);
    _mm256_storeu_si256(q + 1, x.b);
}
QUIRE_INLINE Bytes set1_bytes(u32 x) { return {_mm256_set1_epi32(static_cast<int>(x)), _mm256_set1_epi32(static_cast<int>(x))}; }
QUIRE_INLINE Bytes keep_or(Bytes x, u32 mask, Bytes y) {
    const __m256i m = _mm256_set1_epi32(static_cast<int>(mask));
    return {_mm256_or_si256(_mm256_and_si256(x.a, m), y.a), _mm256_or_si256(_mm256_and_si256(x.b, m), y.b)};
}
QUIRE_INLINE Bytes select_bits(u32 mask, Bytes x, Bytes y) {
    const __m256i m = _mm256_set1_epi32(static_cast<int>(mask));
    return {_mm256_or_si256(_mm256_and_si256(x.a, m), _mm256_andnot_si256(m, y.a)),
            _mm256_or_si256(_mm256_and_si256(x.b, m), _mm256_andnot_si256(m, y.b))};
}
QUIRE_INLINE Bytes put_half(Bytes x, int place, u16 value) {
    u8 bytes[64];
    store_bytes(bytes, x);
    __builtin_memcpy(bytes + 2 * place, &value, 2);
    return load_bytes(bytes);
}
QUIRE_INLINE Bytes rotate_words(Bytes x) {
    return {_mm256_or_si256(_mm256_srli_epi32(x.a, 4), _mm256_slli_epi32(x.a, 28)),
        _mm256_or_si256(_mm256_srli_epi32(x.b, 4), _mm256_slli_epi32(x.b, 28))};
}
QUIRE_INLINE __m256 high_half(__m256i x) {
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
QUIRE_INLINE __m256 low_half(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
QUIRE_INLINE F32 high_halves(Bytes x) { return {high_half(x.a), high_half(x.b)}; }
QUIRE_INLINE F32 low_halves(Bytes x) { return {low_half(x.a), low_half(x.b)}; }
QUIRE_INLINE F32 dot_bf16(F32 acc, Bytes x, Bytes y) {
    return fma(low_halves(x), low_halves(y), fma(high_halves(x), high_halves(y), acc));
}
#if QUIRE_HAS_AVX_VNNI
QUIRE_INLINE __m256i dot_half(__m256i acc, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
#else
// |w| <= 128 and |x| <= 127, so the 16-bit sums of two products stay below 2^15.
QUIRE_INLINE __m256i dot_signed(__m256i acc, __m256i w, __m256i x) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// The machine has no exact u8 x s8 product of four: w = signed + 128 is split, and 128 * sum(x) added from x alone.
QUIRE_INLINE __m256i dot_half(__m256i acc, __m256i w, __m256i x) {
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
    const __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), x), _mm256_set1_epi16(128));
    return dot_signed(_mm256_add_epi32(acc, sum), _mm256_xor_si256(w, flip), x);
}
#endif
QUIRE_INLINE I32 dot_u8s8(I32 acc, Bytes w, Bytes x) { return {dot_half(acc.a, w.a, x.a), dot_half(acc.b, w.b, x.b)}; }
QUIRE_INLINE F32 load_s8(const i8* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
QUIRE_INLINE F32 load_s8(const i8* p, Mask m) {
    i8 lanes[16] = {};
    copy_lanes(lanes, p, m);
    return load_s8(lanes);
}
QUIRE_INLINE void store_s8(i8* p, I32 x) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(p), _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
QUIRE_INLINE Bytes load_quarters(const i8* a, const i8* b, const i8* c, const i8* d) {
    auto two = [](const i8* low, const i8* high) {
        return _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(high), reinterpret_cast<const __m128i*>(low));
    };
    return {two(a, b), two(c, d)};
}
struct CodeTable {};
QUIRE_INLINE CodeTable code_table() { return {}; }
QUIRE_INLINE __m256i widen_pair(__m128i low, __m128i high) {
    const __m256 a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)), b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high));
    return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(a), 16), _mm256_castps_si256(b));
}
QUIRE_INLINE Bytes widen_half(__m256i codes) {
    const __m128i low = _mm256_castsi256_si128(codes), high = _mm256_extracti128_si256(codes, 1);
    return {widen_pair(low, high), widen_pair(_mm_srli_si128(low, 8), _mm_srli_si128(high, 8))};
}
QUIRE_INLINE void widen_codes(CodeTable, Bytes codes, Bytes& first, Bytes& second) {
    first = widen_half(codes.a);
    second = widen_half(codes.b);
}
struct Pairs { F32 first, second; };
QUIRE_INLINE Pairs pairs_of(Bytes line) { return {low_halves(line), high_halves(line)}; }
QUIRE_INLINE F32 dot_pairs(F32 acc, const Pairs& w, Bytes x) {
    return fma(w.first, low_halves(x), fma(w.second, high_halves(x), acc));
}
QUIRE_INLINE F32 lower(const Pairs& w) { return w.first; }
QUIRE_INLINE F32 upper(const Pairs& w) { return w.second; }
struct Float8Table {
    __m256i high;            // the upper byte of bf16 by the upper nibble of a code, for codes of normal numbers
    __m256i least[2];        // what has to change in both bytes, the lower first, for codes below 16, by the lower nibble
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
    const auto table = [](const u8* bytes) {
        return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    };
    return {table(tables.high), {table(tables.least[0]), table(tables.least[1])}};
}
struct Float8Line { const Float8Table& table; const u8* codes; };
QUIRE_INLINE Float8Line load_float8(const Float8Table& table, const u8* codes) { return {table, codes}; }
// A nibble of the code gives a byte of bf16: shifts alone where the number is normal. To an index with its upper bit a lookup
// says 0.
template <int LINE> QUIRE_INLINE Bytes float8_bytes(const Float8Line& line) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line.codes) + LINE);
    const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f)),
                  is_least = _mm256_add_epi8(magnitude, _mm256_set1_epi8(0x70));
    const __m256i upper_nibble = _mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
    const __m256i lower_nibble = _mm256_and_si256(_mm256_slli_epi16(codes, 4), _mm256_set1_epi8(static_cast<char>(0xf0)));
    const __m256i high =
        _mm256_xor_si256(_mm256_shuffle_epi8(line.table.high, upper_nibble), _mm256_shuffle_epi8(line.table.least[1], is_least));
    const __m256i low = _mm256_xor_si256(lower_nibble, _mm256_shuffle_epi8(line.table.least[0], is_least));
    return {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
}
QUIRE_INLINE Bytes load_table(const u8* table) {
    __m256i x = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {x, x};
}
QUIRE_INLINE void unpack_nibbles(Bytes packed, Bytes table, Bytes& low, Bytes& high) {
    const __m256i mask = _mm256_set1_epi8(15);
    low = {_mm256_shuffle_epi8(table.a, _mm256_and_si256(packed.a, mask)),
        _mm256_shuffle_epi8(table.b, _mm256_and_si256(packed.b, mask))};
    high = {_mm256_shuffle_epi8(table.a, _mm256_and_si256(_mm256_srli_epi16(packed.a, 4), mask)),
            _mm256_shuffle_epi8(table.b, _mm256_and_si256(_mm256_srli_epi16(packed.b, 4), mask))};
}
// The low bytes of sixteen levels, and their high bytes.
struct LevelTable { __m256i low, high; };
QUIRE_INLINE LevelTable level_table(const u16* levels) {
    u8 low[16], high[16];
    for (int i = 0; i < 16; ++i) low[i] = static_cast<u8>(levels[i] & 255), high[i] = static_cast<u8>(levels[i] >> 8);
    return {load_table(low).a, load_table(high).a};
}
QUIRE_INLINE __m256i level_pairs_half(const LevelTable& table, __m256i indices) {
    // To an index with its upper bit a lookup says 0.
    const __m256i low = _mm256_or_si256(indices, _mm256_set1_epi32(static_cast<int>(0x80008000u)));
    const __m256i high = _mm256_or_si256(_mm256_slli_epi32(indices, 8), _mm256_set1_epi32(0x00800080));
    return _mm256_or_si256(_mm256_shuffle_epi8(table.low, low), _mm256_shuffle_epi8(table.high, high));
}
QUIRE_INLINE I32 level_pairs(const LevelTable& table, I32 indices) {
    return {level_pairs_half(table, indices.a), level_pairs_half(table, indices.b)};
}
QUIRE_INLINE I32 load_u8(const u8* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
QUIRE_INLINE I32 load_u8(const u8* p, Mask m) {
    u8 lanes[16] = {};
    copy_lanes(lanes, p, m);
    return load_u8(lanes);
}
template <int N> QUIRE_INLINE F32 swap_lanes(F32 x) {
    if constexpr (N == 8) return {x.b, x.a};
    if constexpr (N == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    constexpr int order = N == 2 ? 0x4e : 0xb1;
    return {_mm256_permute_ps(x.a, order), _mm256_permute_ps(x.b, order)};
}
// Eight words of eight rows, transposed in registers: pairs of rows, then fours, then the 128-bit lanes.
QUIRE_INLINE void store_eight_columns(u32* to, i64 stride, const __m256i (&rows)[8]) {
    __m256i pairs[8], fours[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const int first = i / 2 * 4 + i % 2;
        fours[i / 2 * 4 + i % 2 * 2] = _mm256_unpacklo_epi64(pairs[first], pairs[first + 2]);
        fours[i / 2 * 4 + i % 2 * 2 + 1] = _mm256_unpackhi_epi64(pairs[first], pairs[first + 2]);
    }
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + w * stride), _mm256_permute2x128_si256(fours[w], fours[4 + w], 0x20));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (4 + w) * stride), _mm256_permute2x128_si256(fours[w], fours[4 + w], 0x31));
    }
}
QUIRE_INLINE void store_columns(u32* to, i64 stride, const I32 (&rows)[16], int num_rows, int num_words) {
    if (num_rows % 8 == 0 && num_words == 16) {
        for (int r = 0; r < num_rows; r += 8) {
            __m256i low[8], high[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) low[i] = rows[r + i].a, high[i] = rows[r + i].b;
            store_eight_columns(to + r, stride, low);
            store_eight_columns(to + 8 * stride + r, stride, high);
        }
        return;
    }
    for (int r = 0; r < num_rows; ++r) {
        i32 words[16];
        store(words, rows[r]);
        for (int w = 0; w < num_words; ++w) to[w * stride + r] = static_cast<u32>(words[w]);
    }
}
QUIRE_INLINE float sum_lanes(F32 x) {
    __m256 b = _mm256_add_ps(x.a, x.b);
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
QUIRE_INLINE float max_lanes(F32 x) {
    __m256 b = _mm256_max_ps(x.a, x.b);
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
QUIRE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
QUIRE_INLINE void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
// Keep what comes before in the order of the source: otherwise GCC interleaves more rows than there are registers.
template <class T> QUIRE_INLINE void in_order(const T*& x, F32& acc) { asm("" : "+r"(x), "+x"(acc.a), "+x"(acc.b)); }
QUIRE_INLINE void in_order(Bytes& x) { asm("" : "+x"(x.a), "+x"(x.b)); }

}  // namespace
}  // namespace quire::QUIRE_ISA
