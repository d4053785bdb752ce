// Sixteen lanes on AVX-512 (F, BW, DQ, VL, VNNI, BF16, VBMI): one 512-bit register each. See simd.h for what each function means.
#pragma once
#include <immintrin.h>

#include "float8.h"
#include "simd_types.h"

namespace quire::QUIRE_ISA {
namespace {

struct F32 { __m512 v; };
struct I32 { __m512i v; };
struct I64 { __m512i a, b; };
struct Bytes { __m512i v; };
struct Mask { __mmask16 v; };

#define QUIRE_INLINE static inline __attribute__((always_inline))

QUIRE_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
QUIRE_INLINE void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
QUIRE_INLINE Mask mask_of(u32 m) { return {static_cast<__mmask16>(m)}; }
QUIRE_INLINE Mask first_lanes(int n) { return {static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << (n < 0 ? 0 : n)) - 1u)}; }
QUIRE_INLINE F32 load(const float* p, Mask m) { return {_mm512_maskz_loadu_ps(m.v, p)}; }
QUIRE_INLINE void store(float* p, F32 a, Mask m) { _mm512_mask_storeu_ps(p, m.v, a.v); }
QUIRE_INLINE F32 set1(float x) { return {_mm512_set1_ps(x)}; }
QUIRE_INLINE F32 zero() { return {_mm512_setzero_ps()}; }
QUIRE_INLINE F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
QUIRE_INLINE F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
QUIRE_INLINE F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
QUIRE_INLINE F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
QUIRE_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
QUIRE_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
QUIRE_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
QUIRE_INLINE F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
QUIRE_INLINE F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
QUIRE_INLINE F32 round(F32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
QUIRE_INLINE Mask operator<(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
QUIRE_INLINE Mask operator<=(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
QUIRE_INLINE Mask operator>(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
QUIRE_INLINE Mask operator>=(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
QUIRE_INLINE Mask operator==(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
QUIRE_INLINE Mask is_nan(F32 a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
QUIRE_INLINE Mask operator&(Mask a, Mask b) { return {static_cast<__mmask16>(a.v & b.v)}; }
QUIRE_INLINE Mask operator|(Mask a, Mask b) { return {static_cast<__mmask16>(a.v | b.v)}; }
QUIRE_INLINE u32 bits(Mask m) { return m.v; }
QUIRE_INLINE F32 select(Mask m, F32 yes, F32 no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
QUIRE_INLINE F32 zero_below(F32 limit, F32 x, F32 y) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), y.v)};
}
// Compressed in a register: the instruction that compresses to memory takes over a hundred cycles on some machines.
QUIRE_INLINE int compress_store(float* p, Mask m, F32 a) {
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(m.v, a.v));
    return __builtin_popcount(m.v);
}
QUIRE_INLINE int compress_store(i32* p, Mask m, I32 a) {
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(m.v, a.v));
    return __builtin_popcount(m.v);
}

QUIRE_INLINE I32 load(const i32* p) { return {_mm512_loadu_si512(p)}; }
QUIRE_INLINE void store(i32* p, I32 a) { _mm512_storeu_si512(p, a.v); }
QUIRE_INLINE I32 load(const i32* p, Mask m) { return {_mm512_maskz_loadu_epi32(m.v, p)}; }
QUIRE_INLINE I32 set1(i32 x) { return {_mm512_set1_epi32(x)}; }
QUIRE_INLINE I32 iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
QUIRE_INLINE I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
QUIRE_INLINE I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
QUIRE_INLINE I32 operator*(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
QUIRE_INLINE I32 operator&(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
QUIRE_INLINE I32 operator|(I32 a, I32 b) { return {_mm512_or_si512(a.v, b.v)}; }
QUIRE_INLINE I32 operator^(I32 a, I32 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N> QUIRE_INLINE I32 shift_left(I32 a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> QUIRE_INLINE I32 shift_right(I32 a) { return {_mm512_srli_epi32(a.v, N)}; }
template <int N> QUIRE_INLINE I32 shift_right_signed(I32 a) { return {_mm512_srai_epi32(a.v, N)}; }
QUIRE_INLINE I32 min(I32 a, I32 b) { return {_mm512_min_epi32(a.v, b.v)}; }
QUIRE_INLINE I32 max(I32 a, I32 b) { return {_mm512_max_epi32(a.v, b.v)}; }
QUIRE_INLINE I32 select(Mask m, I32 yes, I32 no) { return {_mm512_mask_blend_epi32(m.v, no.v, yes.v)}; }
QUIRE_INLINE Mask operator==(I32 a, I32 b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
QUIRE_INLINE Mask operator<(I32 a, I32 b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
QUIRE_INLINE F32 to_f32(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
QUIRE_INLINE I32 to_i32(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }
QUIRE_INLINE I32 to_i32_up(F32 a) { return {_mm512_cvt_roundps_epi32(a.v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC)}; }
// For each sixteen of n: the value at its start and at its end, and the last n of the first. In registers: a gather is slow here.
struct Steps { __m512 first[2], last[2]; __m512i change[2]; };
QUIRE_INLINE Steps make_steps(const float* values) {
    float first[32], last[32];
    i32 change[32];
    for (i32 i = 0; i < 32; ++i) {
        // A permutation takes the low five bits of its index: n from 0 on comes first.
        const i32 start = 16 * (i < 16 ? i : i - 32);
        const float* at = values + 256 + start;
        i32 same = 1;
        while (same < 16 && at[same] == at[0]) ++same;
        first[i] = at[0], last[i] = at[15], change[i] = start + same - 1;
    }
    return {{_mm512_loadu_ps(first), _mm512_loadu_ps(first + 16)}, {_mm512_loadu_ps(last), _mm512_loadu_ps(last + 16)},
            {_mm512_loadu_si512(change), _mm512_loadu_si512(change + 16)}};
}
QUIRE_INLINE F32 at_step(const Steps& s, I32 n) {
    const __m512i i = _mm512_srai_epi32(n.v, 4), change = _mm512_permutex2var_epi32(s.change[0], i, s.change[1]);
    const __m512 first = _mm512_permutex2var_ps(s.first[0], i, s.first[1]),
                 last = _mm512_permutex2var_ps(s.last[0], i, s.last[1]);
    return {_mm512_mask_blend_ps(_mm512_cmpgt_epi32_mask(n.v, change), first, last)};
}
QUIRE_INLINE F32 times_power(F32 x, F32 n) { return {_mm512_scalef_ps(x.v, n.v)}; }
QUIRE_INLINE F32 as_f32(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
QUIRE_INLINE I32 as_i32(F32 a) { return {_mm512_castps_si512(a.v)}; }

QUIRE_INLINE I32 multiply_even(I32 a, I32 b) { return {_mm512_mul_epu32(a.v, b.v)}; }
QUIRE_INLINE I32 odd_to_even(I32 a) { return {_mm512_srli_epi64(a.v, 32)}; }
QUIRE_INLINE I32 min_unsigned(I32 a, I32 b) { return {_mm512_min_epu32(a.v, b.v)}; }
QUIRE_INLINE I32 xor3(I32 a, I32 b, I32 c) { return {_mm512_ternarylogic_epi32(a.v, b.v, c.v, 0x96)}; }
QUIRE_INLINE I64 zero_i64() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
QUIRE_INLINE I64 to_i64(F32 a) {
    return {_mm512_cvtps_epi64(_mm512_castps512_ps256(a.v)), _mm512_cvtps_epi64(_mm512_extractf32x8_ps(a.v, 1))};
}
QUIRE_INLINE I64 operator+(I64 x, I64 y) { return {_mm512_add_epi64(x.a, y.a), _mm512_add_epi64(x.b, y.b)}; }
QUIRE_INLINE i64 sum_lanes(I64 x) { return _mm512_reduce_add_epi64(_mm512_add_epi64(x.a, x.b)); }

QUIRE_INLINE F32 load_bf16(const u16* p) {
    return {_mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
QUIRE_INLINE F32 load_bf16(const u16* p, Mask m) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m.v, p)), 16))};
}
// Round to nearest even; NaN stays NaN. Done in integers: the machine's own conversion flushes denormals.
QUIRE_INLINE __m256i round_bf16(F32 a) {
    __m512i u = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    r = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), r, _mm512_or_si512(u, _mm512_set1_epi32(0x400000)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}
QUIRE_INLINE void store_bf16(u16* p, F32 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(a)); }
QUIRE_INLINE void store_bf16(u16* p, F32 a, Mask m) { _mm256_mask_storeu_epi16(p, m.v, round_bf16(a)); }
QUIRE_INLINE void store_bf16_flushed(u16* p, F32 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)));
}
QUIRE_INLINE I32 dot_words(F32 a, F32 b) { return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v))}; }
QUIRE_INLINE F32 load_f16(const u16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
QUIRE_INLINE F32 load_f16(const u16* p, Mask m) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m.v, p))}; }
QUIRE_INLINE void store_f16(u16* p, F32 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

QUIRE_INLINE Bytes load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
QUIRE_INLINE void store_bytes(void* p, Bytes a) { _mm512_storeu_si512(p, a.v); }
QUIRE_INLINE Bytes set1_bytes(u32 x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
QUIRE_INLINE Bytes keep_or(Bytes a, u32 mask, Bytes b) {
    return {_mm512_ternarylogic_epi32(a.v, _mm512_set1_epi32(static_cast<int>(mask)), b.v, 0xea)};
}
QUIRE_INLINE Bytes select_bits(u32 mask, Bytes a, Bytes b) {
    return {_mm512_ternarylogic_epi32(_mm512_set1_epi32(static_cast<int>(mask)), a.v, b.v, 0xca)};
}
QUIRE_INLINE Bytes put_half(Bytes a, int place, u16 value) {
    return {_mm512_mask_set1_epi16(a.v, 1u << place, static_cast<short>(value))};
}
QUIRE_INLINE Bytes rotate_words(Bytes a) { return {_mm512_ror_epi32(a.v, 4)}; }
QUIRE_INLINE F32 dot_bf16(F32 acc, Bytes a, Bytes b) {
    return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
}
// In assembly: from the intrinsic GCC 12 spills accumulators.
QUIRE_INLINE I32 dot_u8s8(I32 acc, Bytes w, Bytes x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
    return acc;
}
QUIRE_INLINE F32 load_s8(const i8* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
QUIRE_INLINE F32 load_s8(const i8* p, Mask m) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(m.v, p)))};
}
QUIRE_INLINE void store_s8(i8* p, I32 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v)); }
QUIRE_INLINE Bytes load_quarters(const i8* a, const i8* b, const i8* c, const i8* d) {
    auto part = [](const i8* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
    __m512i r = _mm512_castsi128_si512(part(a));
    r = _mm512_inserti32x4(r, part(b), 1);
    r = _mm512_inserti32x4(r, part(c), 2);
    return {_mm512_inserti32x4(r, part(d), 3)};
}
// By table: through f32 it would take twice the instructions.
struct CodeTable {
    __m512i low[2], high[2];  // the bytes of bf16(c), 0 <= c < 128
    __m512i order;            // of the codes, so that unpacking halves of 16-byte lanes leaves the results in order
};
QUIRE_INLINE CodeTable code_table() {
    alignas(64) static constexpr struct Tables {
        u8 low[128], high[128], order[64];
        constexpr Tables() : low(), high(), order() {
            for (int c = 1; c < 128; ++c) {
                int power = 0;
                while (c >> (power + 1) != 0) ++power;
                const int bits = (127 + power) << 7 | ((c << 7 >> power) & 127);
                low[c] = static_cast<u8>(bits & 255);
                high[c] = static_cast<u8>(bits >> 8);
            }
            for (int i = 0; i < 64; ++i) {
                const int lane = i / 16, is_second = i / 8 % 2, pair = lane * 4 + i % 8 / 2;
                order[i] = static_cast<u8>(is_second * 32 + i % 2 * 16 + pair);
            }
        }
    } tables;
    return {{_mm512_load_si512(tables.low), _mm512_load_si512(tables.low + 64)},
            {_mm512_load_si512(tables.high), _mm512_load_si512(tables.high + 64)},
            _mm512_load_si512(tables.order)};
}
QUIRE_INLINE void widen_codes(const CodeTable& table, Bytes codes, Bytes& first, Bytes& second) {
    // vpermi2b reads seven bits of an index: |codes| is at most 128, whose seven bits are those of 0. Codes are never -128.
    const __m512i ordered = _mm512_permutexvar_epi8(table.order, codes.v), magnitude = _mm512_abs_epi8(ordered);
    const __m512i low = _mm512_permutex2var_epi8(table.low[0], magnitude, table.low[1]);
    const __m512i unsigned_high = _mm512_permutex2var_epi8(table.high[0], magnitude, table.high[1]);
    const __m512i high = _mm512_ternarylogic_epi32(unsigned_high, ordered, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    first.v = _mm512_unpacklo_epi8(low, high);
    second.v = _mm512_unpackhi_epi8(low, high);
}
using Pairs = Bytes;
QUIRE_INLINE Pairs pairs_of(Bytes line) { return line; }
QUIRE_INLINE F32 dot_pairs(F32 acc, Pairs w, Bytes x) { return dot_bf16(acc, w, x); }
QUIRE_INLINE F32 lower(Pairs w) { return {_mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16))}; }
QUIRE_INLINE F32 upper(Pairs w) {
    return {_mm512_castsi512_ps(_mm512_and_si512(w.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
struct Float8Table {
    __m512i low[2], high[2];  // the bytes of bf16_of_float8(c), 0 <= c < 128
    __m512i order;            // as in CodeTable
};
QUIRE_INLINE Float8Table float8_table() {
    alignas(64) static constexpr struct Tables {
        u8 low[128], high[128], order[64];
        constexpr Tables() : low(), high(), order() {
            for (int c = 0; c < 128; ++c) {
                low[c] = static_cast<u8>(bf16_of_float8(static_cast<u8>(c)) & 255);
                high[c] = static_cast<u8>(bf16_of_float8(static_cast<u8>(c)) >> 8);
            }
            for (int i = 0; i < 64; ++i) order[i] = static_cast<u8>(i / 8 % 2 * 32 + float8_place(i / 16 * 4 + i % 8 / 2, i));
        }
    } tables;
    return {{_mm512_load_si512(tables.low), _mm512_load_si512(tables.low + 64)},
            {_mm512_load_si512(tables.high), _mm512_load_si512(tables.high + 64)},
            _mm512_load_si512(tables.order)};
}
struct Float8Line { Bytes first, second; };
QUIRE_INLINE Float8Line load_float8(const Float8Table& table, const u8* codes) {
    // vpermi2b reads seven bits of an index: the sign is put beside.
    const __m512i ordered = _mm512_permutexvar_epi8(table.order, _mm512_loadu_si512(codes));
    const __m512i low = _mm512_permutex2var_epi8(table.low[0], ordered, table.low[1]);
    const __m512i unsigned_high = _mm512_permutex2var_epi8(table.high[0], ordered, table.high[1]);
    const __m512i high = _mm512_ternarylogic_epi32(unsigned_high, ordered, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    return {{_mm512_unpacklo_epi8(low, high)}, {_mm512_unpackhi_epi8(low, high)}};
}
template <int LINE> QUIRE_INLINE Bytes float8_bytes(const Float8Line& line) { return LINE == 0 ? line.first : line.second; }
QUIRE_INLINE Bytes load_table(const u8* table) {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)))};
}
QUIRE_INLINE void unpack_nibbles(Bytes packed, Bytes table, Bytes& low, Bytes& high) {
    const __m512i mask = _mm512_set1_epi8(15);
    low.v = _mm512_shuffle_epi8(table.v, _mm512_and_si512(packed.v, mask));
    high.v = _mm512_shuffle_epi8(table.v, _mm512_and_si512(_mm512_srli_epi16(packed.v, 4), mask));
}
struct LevelTable { __m512i of; };
QUIRE_INLINE LevelTable level_table(const u16* levels) {
    return {_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(levels)))};
}
// vpermw reads five bits of an index, and both halves of the table are the same.
QUIRE_INLINE I32 level_pairs(const LevelTable& table, I32 indices) { return {_mm512_permutexvar_epi16(indices.v, table.of)}; }
QUIRE_INLINE I32 load_u8(const u8* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
QUIRE_INLINE I32 load_u8(const u8* p, Mask m) { return {_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(m.v, p))}; }
template <int N> QUIRE_INLINE F32 swap_lanes(F32 x) {
    if constexpr (N == 8) return {_mm512_shuffle_f32x4(x.v, x.v, 0x4e)};
    if constexpr (N == 4) return {_mm512_shuffle_f32x4(x.v, x.v, 0xb1)};
    return {_mm512_permute_ps(x.v, N == 2 ? 0x4e : 0xb1)};
}
// The first half of a transposition: fours[i + w], 128-bit lane l, is word 4l + w of rows i .. i + 3.
template <int N>
QUIRE_INLINE void join_fours(const I32* rows, __m512i (&fours)[N]) {
    __m512i pairs[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i].v, rows[i + 1].v);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i].v, rows[i + 1].v);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; i += 4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
}
// The same for at most eight rows.
QUIRE_INLINE void store_few_columns(u32* to, i64 stride, const I32* rows, int num_rows, int num_words) {
    __m512i fours[8];
    join_fours(rows, fours);
    const __mmask8 kept = static_cast<__mmask8>((1u << num_rows) - 1u);
    const auto put = [&](int w, __m256i column) {
        if (w < num_words) _mm256_mask_storeu_epi32(to + w * stride, kept, column);
    };
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), last = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
        const __m512i columns = _mm512_permutex2var_epi64(fours[w], first, fours[4 + w]);
        put(w, _mm512_castsi512_si256(columns));
        put(4 + w, _mm512_extracti64x4_epi64(columns, 1));
        if (8 + w >= num_words) continue;
        const __m512i more = _mm512_permutex2var_epi64(fours[w], last, fours[4 + w]);
        put(8 + w, _mm512_castsi512_si256(more));
        put(12 + w, _mm512_extracti64x4_epi64(more, 1));
    }
}
// A transposition in registers: pairs of rows, then fours, then the 128-bit lanes of all. One row is not worth it.
QUIRE_INLINE void store_columns(u32* to, i64 stride, const I32 (&rows)[16], int num_rows, int num_words) {
    if (num_rows == 1) {
        if (stride == 1) return _mm512_mask_storeu_epi32(to, first_lanes(num_words).v, rows[0].v);
        i32 words[16];
        store(words, rows[0]);
        for (int w = 0; w < num_words; ++w) to[w * stride] = static_cast<u32>(words[w]);
        return;
    }
    if (num_rows <= 8) return store_few_columns(to, stride, rows, num_rows, num_words);
    __m512i fours[16];
    join_fours(rows, fours);
    const __mmask16 kept = first_lanes(num_rows).v;
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
        const __m512i even_a = _mm512_shuffle_i32x4(fours[w], fours[4 + w], 0x88),
                      odd_a = _mm512_shuffle_i32x4(fours[w], fours[4 + w], 0xdd);
        const __m512i even_b = _mm512_shuffle_i32x4(fours[8 + w], fours[12 + w], 0x88),
                      odd_b = _mm512_shuffle_i32x4(fours[8 + w], fours[12 + w], 0xdd);
        if (w < num_words) _mm512_mask_storeu_epi32(to + w * stride, kept, _mm512_shuffle_i32x4(even_a, even_b, 0x88));
        if (4 + w < num_words) _mm512_mask_storeu_epi32(to + (4 + w) * stride, kept, _mm512_shuffle_i32x4(odd_a, odd_b, 0x88));
        if (8 + w < num_words) _mm512_mask_storeu_epi32(to + (8 + w) * stride, kept, _mm512_shuffle_i32x4(even_a, even_b, 0xdd));
        if (12 + w < num_words) _mm512_mask_storeu_epi32(to + (12 + w) * stride, kept, _mm512_shuffle_i32x4(odd_a, odd_b, 0xdd));
    }
}
QUIRE_INLINE float sum_lanes(F32 a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
QUIRE_INLINE float max_lanes(F32 a) { return _mm512_reduce_max_ps(a.v); }
QUIRE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
QUIRE_INLINE void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace
}  // namespace quire::QUIRE_ISA
