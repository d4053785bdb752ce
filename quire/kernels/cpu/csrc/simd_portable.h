// Sixteen lanes in plain C++: loops that any compiler understands. See simd.h for what each function means.
#pragma once
#include <math.h>
#include <string.h>

#include "float8.h"
#include "simd_types.h"

namespace quire::QUIRE_ISA {
namespace {

struct F32 { float v[16]; };
struct I32 { i32 v[16]; };
struct I64 { i64 v[16]; };
struct Bytes { u8 v[64]; };
struct Mask { u32 v; };

#define QUIRE_INLINE static inline
#define QUIRE_EACH for (int i = 0; i < 16; ++i)

QUIRE_INLINE float f32_of(u32 x) { float y; memcpy(&y, &x, 4); return y; }
QUIRE_INLINE u32 bits_of(float x) { u32 y; memcpy(&y, &x, 4); return y; }
QUIRE_INLINE bool has(Mask m, int i) { return m.v >> i & 1; }

QUIRE_INLINE F32 load(const float* p) { F32 r; memcpy(r.v, p, 64); return r; }
QUIRE_INLINE void store(float* p, F32 a) { memcpy(p, a.v, 64); }
QUIRE_INLINE Mask mask_of(u32 m) { return {m}; }
QUIRE_INLINE Mask first_lanes(int n) { return {n >= 16 ? 0xffffu : (1u << (n < 0 ? 0 : n)) - 1u}; }
QUIRE_INLINE F32 load(const float* p, Mask m) { F32 r = {}; QUIRE_EACH if (has(m, i)) r.v[i] = p[i]; return r; }
QUIRE_INLINE void store(float* p, F32 a, Mask m) { QUIRE_EACH if (has(m, i)) p[i] = a.v[i]; }
QUIRE_INLINE F32 set1(float x) { F32 r; QUIRE_EACH r.v[i] = x; return r; }
QUIRE_INLINE F32 zero() { return set1(0.0f); }
QUIRE_INLINE F32 operator+(F32 a, F32 b) { QUIRE_EACH a.v[i] += b.v[i]; return a; }
QUIRE_INLINE F32 operator-(F32 a, F32 b) { QUIRE_EACH a.v[i] -= b.v[i]; return a; }
QUIRE_INLINE F32 operator*(F32 a, F32 b) { QUIRE_EACH a.v[i] *= b.v[i]; return a; }
QUIRE_INLINE F32 operator/(F32 a, F32 b) { QUIRE_EACH a.v[i] /= b.v[i]; return a; }
// Fused where that is one instruction: always on ARM, whose levels all give the same bits.
#if defined(__FP_FAST_FMAF) || defined(__aarch64__)
QUIRE_INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
QUIRE_INLINE float multiply_add(float a, float b, float c) { return c + a * b; }
#endif
QUIRE_INLINE F32 fma(F32 a, F32 b, F32 c) { QUIRE_EACH c.v[i] = multiply_add(a.v[i], b.v[i], c.v[i]); return c; }
// As the machines do it: the second operand where either is NaN.
QUIRE_INLINE F32 max(F32 a, F32 b) { QUIRE_EACH b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return b; }
QUIRE_INLINE F32 min(F32 a, F32 b) { QUIRE_EACH b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return b; }
QUIRE_INLINE F32 abs(F32 a) { QUIRE_EACH a.v[i] = fabsf(a.v[i]); return a; }
QUIRE_INLINE F32 sqrt(F32 a) { QUIRE_EACH a.v[i] = sqrtf(a.v[i]); return a; }
QUIRE_INLINE F32 round(F32 a) { QUIRE_EACH a.v[i] = nearbyintf(a.v[i]); return a; }
#define QUIRE_COMPARE(op) { Mask m = {0}; QUIRE_EACH m.v |= static_cast<u32>(a.v[i] op b.v[i]) << i; return m; }
QUIRE_INLINE Mask operator<(F32 a, F32 b) QUIRE_COMPARE(<)
QUIRE_INLINE Mask operator<=(F32 a, F32 b) QUIRE_COMPARE(<=)
QUIRE_INLINE Mask operator>(F32 a, F32 b) QUIRE_COMPARE(>)
QUIRE_INLINE Mask operator>=(F32 a, F32 b) QUIRE_COMPARE(>=)
QUIRE_INLINE Mask operator==(F32 a, F32 b) QUIRE_COMPARE(==)
QUIRE_INLINE Mask operator==(I32 a, I32 b) QUIRE_COMPARE(==)
QUIRE_INLINE Mask operator<(I32 a, I32 b) QUIRE_COMPARE(<)
#undef QUIRE_COMPARE
QUIRE_INLINE Mask is_nan(F32 a) { Mask m = {0}; QUIRE_EACH m.v |= static_cast<u32>(a.v[i] != a.v[i]) << i; return m; }
QUIRE_INLINE Mask operator&(Mask a, Mask b) { return {a.v & b.v}; }
QUIRE_INLINE Mask operator|(Mask a, Mask b) { return {a.v | b.v}; }
QUIRE_INLINE u32 bits(Mask m) { return m.v; }
QUIRE_INLINE F32 select(Mask m, F32 yes, F32 no) { QUIRE_EACH if (has(m, i)) no.v[i] = yes.v[i]; return no; }
QUIRE_INLINE F32 zero_below(F32 limit, F32 x, F32 y) { QUIRE_EACH if (x.v[i] < limit.v[i]) y.v[i] = 0.0f; return y; }
QUIRE_INLINE int compress_store(float* p, Mask m, F32 a) { int n = 0; QUIRE_EACH if (has(m, i)) p[n++] = a.v[i]; return n; }
QUIRE_INLINE int compress_store(i32* p, Mask m, I32 a) { int n = 0; QUIRE_EACH if (has(m, i)) p[n++] = a.v[i]; return n; }

QUIRE_INLINE I32 load(const i32* p) { I32 r; memcpy(r.v, p, 64); return r; }
QUIRE_INLINE void store(i32* p, I32 a) { memcpy(p, a.v, 64); }
QUIRE_INLINE I32 load(const i32* p, Mask m) { I32 r = {}; QUIRE_EACH if (has(m, i)) r.v[i] = p[i]; return r; }
QUIRE_INLINE I32 set1(i32 x) { I32 r; QUIRE_EACH r.v[i] = x; return r; }
QUIRE_INLINE I32 iota() { I32 r; QUIRE_EACH r.v[i] = i; return r; }
// Sums and products wrap, as the machines' do; signed overflow would be undefined.
QUIRE_INLINE i32 wrapped(u32 x) { i32 y; memcpy(&y, &x, 4); return y; }
#define QUIRE_WRAP(op) { QUIRE_EACH a.v[i] = wrapped(static_cast<u32>(a.v[i]) op static_cast<u32>(b.v[i])); return a; }
QUIRE_INLINE I32 operator+(I32 a, I32 b) QUIRE_WRAP(+)
QUIRE_INLINE I32 operator-(I32 a, I32 b) QUIRE_WRAP(-)
QUIRE_INLINE I32 operator*(I32 a, I32 b) QUIRE_WRAP(*)
QUIRE_INLINE I32 operator&(I32 a, I32 b) QUIRE_WRAP(&)
QUIRE_INLINE I32 operator|(I32 a, I32 b) QUIRE_WRAP(|)
QUIRE_INLINE I32 operator^(I32 a, I32 b) QUIRE_WRAP(^)
#undef QUIRE_WRAP
template <int N> QUIRE_INLINE I32 shift_left(I32 a) { QUIRE_EACH a.v[i] = wrapped(static_cast<u32>(a.v[i]) << N); return a; }
template <int N> QUIRE_INLINE I32 shift_right(I32 a) { QUIRE_EACH a.v[i] = wrapped(static_cast<u32>(a.v[i]) >> N); return a; }
template <int N> QUIRE_INLINE I32 shift_right_signed(I32 a) { QUIRE_EACH a.v[i] >>= N; return a; }
QUIRE_INLINE I32 min(I32 a, I32 b) { QUIRE_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
QUIRE_INLINE I32 max(I32 a, I32 b) { QUIRE_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
QUIRE_INLINE I32 select(Mask m, I32 yes, I32 no) { QUIRE_EACH if (has(m, i)) no.v[i] = yes.v[i]; return no; }
QUIRE_INLINE F32 to_f32(I32 a) { F32 r; QUIRE_EACH r.v[i] = static_cast<float>(a.v[i]); return r; }
QUIRE_INLINE i32 nearest(float x) {
    return x >= -2147483648.0f && x < 2147483648.0f ? static_cast<i32>(lrintf(x)) : wrapped(0x80000000u);
}
QUIRE_INLINE I32 to_i32(F32 a) { I32 r; QUIRE_EACH r.v[i] = nearest(a.v[i]); return r; }
// Without ceilf: a call for each value, where the machine has no instruction for it.
QUIRE_INLINE i32 next_up(float x) {
    const float y = x >= -2147483648.0f && x < 2147483648.0f ? x : -2147483648.0f;
    const i32 t = static_cast<i32>(y);
    return t + (static_cast<float>(t) < y ? 1 : 0);
}
QUIRE_INLINE I32 to_i32_up(F32 a) { I32 r; QUIRE_EACH r.v[i] = next_up(a.v[i]); return r; }
struct Steps { const float* values; };
QUIRE_INLINE Steps make_steps(const float* values) { return {values + 256}; }
QUIRE_INLINE F32 at_step(const Steps& steps, I32 n) { F32 r; QUIRE_EACH r.v[i] = steps.values[n.v[i]]; return r; }
QUIRE_INLINE F32 as_f32(I32 a) { F32 r; memcpy(r.v, a.v, 64); return r; }
QUIRE_INLINE I32 as_i32(F32 a) { I32 r; memcpy(r.v, a.v, 64); return r; }

QUIRE_INLINE I32 multiply_even(I32 a, I32 b) {
    I32 r;
    for (int i = 0; i < 16; i += 2) {
        const u64 product = static_cast<u64>(static_cast<u32>(a.v[i])) * static_cast<u32>(b.v[i]);
        r.v[i] = wrapped(static_cast<u32>(product));
        r.v[i + 1] = wrapped(static_cast<u32>(product >> 32));
    }
    return r;
}
QUIRE_INLINE I32 odd_to_even(I32 a) { QUIRE_EACH a.v[i] = i & 1 ? 0 : a.v[i + 1]; return a; }
QUIRE_INLINE I32 min_unsigned(I32 a, I32 b) {
    QUIRE_EACH a.v[i] = static_cast<u32>(a.v[i]) < static_cast<u32>(b.v[i]) ? a.v[i] : b.v[i];
    return a;
}
QUIRE_INLINE I32 xor3(I32 a, I32 b, I32 c) { return a ^ b ^ c; }
QUIRE_INLINE I64 zero_i64() { return {}; }
QUIRE_INLINE I64 to_i64(F32 a) { I64 r; QUIRE_EACH r.v[i] = static_cast<i64>(nearbyintf(a.v[i])); return r; }
QUIRE_INLINE I64 operator+(I64 a, I64 b) { QUIRE_EACH a.v[i] += b.v[i]; return a; }
QUIRE_INLINE i64 sum_lanes(I64 a) { i64 sum = 0; QUIRE_EACH sum += a.v[i]; return sum; }

QUIRE_INLINE F32 load_bf16(const u16* p) { F32 r; QUIRE_EACH r.v[i] = f32_of(static_cast<u32>(p[i]) << 16); return r; }
QUIRE_INLINE F32 load_bf16(const u16* p, Mask m) {
    F32 r = {};
    QUIRE_EACH if (has(m, i)) r.v[i] = f32_of(static_cast<u32>(p[i]) << 16);
    return r;
}
QUIRE_INLINE u16 round_bf16(float x) {
    const u32 u = bits_of(x);
    return static_cast<u16>((x != x ? u | 0x400000u : u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
QUIRE_INLINE void store_bf16(u16* p, F32 a) { QUIRE_EACH p[i] = round_bf16(a.v[i]); }
QUIRE_INLINE void store_bf16(u16* p, F32 a, Mask m) { QUIRE_EACH if (has(m, i)) p[i] = round_bf16(a.v[i]); }
QUIRE_INLINE void store_bf16_flushed(u16* p, F32 a) { store_bf16(p, a); }
QUIRE_INLINE I32 dot_words(F32 a, F32 b) {
    u16 halves[32];
    store_bf16(halves, a);
    store_bf16(halves + 16, b);
    I32 r;
    __builtin_memcpy(r.v, halves, sizeof(halves));
    return r;
}
QUIRE_INLINE float from_f16(u16 h) {
    const u32 sign = static_cast<u32>(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 0) return f32_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));
    if (exponent == 31) return f32_of(sign | 0x7f800000u | fraction << 13 | (fraction != 0 ? 0x400000u : 0));
    return f32_of(sign | (exponent + 112) << 23 | fraction << 13);
}
QUIRE_INLINE u16 to_f16(float x) {
    const u32 u = bits_of(x), sign = u >> 16 & 0x8000;
    const float a = fabsf(x);
    if (x != x) return static_cast<u16>(sign | 0x7e00 | (u >> 13 & 0x1ff));
    if (a >= 65520.0f) return static_cast<u16>(sign | 0x7c00);
    if (a < 0x1p-14f) return static_cast<u16>(sign | static_cast<u32>(nearbyintf(a * 0x1p24f)));
    const u32 b = bits_of(a);
    return static_cast<u16>(sign | (((b + 0xfff + (b >> 13 & 1)) >> 13) - (112u << 10)));
}
QUIRE_INLINE F32 load_f16(const u16* p) { F32 r; QUIRE_EACH r.v[i] = from_f16(p[i]); return r; }
QUIRE_INLINE F32 load_f16(const u16* p, Mask m) { F32 r = {}; QUIRE_EACH if (has(m, i)) r.v[i] = from_f16(p[i]); return r; }
QUIRE_INLINE void store_f16(u16* p, F32 a) { QUIRE_EACH p[i] = to_f16(a.v[i]); }

QUIRE_INLINE Bytes load_bytes(const void* p) { Bytes r; memcpy(r.v, p, 64); return r; }
QUIRE_INLINE void store_bytes(void* p, Bytes a) { memcpy(p, a.v, 64); }
QUIRE_INLINE Bytes keep_or(Bytes a, u32 mask, Bytes b) {
    u32 x[16], y[16];
    memcpy(x, a.v, 64), memcpy(y, b.v, 64);
    QUIRE_EACH x[i] = (x[i] & mask) | y[i];
    return load_bytes(x);
}
QUIRE_INLINE Bytes select_bits(u32 mask, Bytes a, Bytes b) {
    u32 x[16], y[16];
    memcpy(x, a.v, 64), memcpy(y, b.v, 64);
    QUIRE_EACH x[i] = (x[i] & mask) | (y[i] & ~mask);
    return load_bytes(x);
}
QUIRE_INLINE Bytes put_half(Bytes x, int place, u16 value) {
    u8 bytes[64];
    store_bytes(bytes, x);
    __builtin_memcpy(bytes + 2 * place, &value, 2);
    return load_bytes(bytes);
}
QUIRE_INLINE Bytes rotate_words(Bytes a) {
    u32 x[16];
    memcpy(x, a.v, 64);
    QUIRE_EACH x[i] = x[i] >> 4 | x[i] << 28;
    return load_bytes(x);
}
QUIRE_INLINE Bytes set1_bytes(u32 x) { Bytes r; QUIRE_EACH memcpy(r.v + 4 * i, &x, 4); return r; }
QUIRE_INLINE F32 dot_bf16(F32 acc, Bytes a, Bytes b) {
    u32 x[16], y[16];
    memcpy(x, a.v, 64);
    memcpy(y, b.v, 64);
    QUIRE_EACH acc.v[i] = multiply_add(f32_of(x[i] & 0xffff0000u), f32_of(y[i] & 0xffff0000u), acc.v[i]);
    QUIRE_EACH acc.v[i] = multiply_add(f32_of(x[i] << 16), f32_of(y[i] << 16), acc.v[i]);
    return acc;
}
QUIRE_INLINE I32 dot_u8s8(I32 acc, Bytes w, Bytes x) {
    QUIRE_EACH for (int j = 0; j < 4; ++j) acc.v[i] += static_cast<i32>(w.v[4 * i + j]) * static_cast<i8>(x.v[4 * i + j]);
    return acc;
}
QUIRE_INLINE F32 load_s8(const i8* p) { F32 r; QUIRE_EACH r.v[i] = p[i]; return r; }
QUIRE_INLINE F32 load_s8(const i8* p, Mask m) { F32 r = {}; QUIRE_EACH if (has(m, i)) r.v[i] = p[i]; return r; }
QUIRE_INLINE void store_s8(i8* p, I32 a) {
    QUIRE_EACH p[i] = static_cast<i8>(a.v[i] < -128 ? -128 : a.v[i] > 127 ? 127 : a.v[i]);
}
QUIRE_INLINE Bytes load_quarters(const i8* a, const i8* b, const i8* c, const i8* d) {
    Bytes r;
    memcpy(r.v, a, 16);
    memcpy(r.v + 16, b, 16);
    memcpy(r.v + 32, c, 16);
    memcpy(r.v + 48, d, 16);
    return r;
}
struct CodeTable {};
QUIRE_INLINE CodeTable code_table() { return {}; }
QUIRE_INLINE void widen_codes(CodeTable, Bytes codes, Bytes& first, Bytes& second) {
    i8 c[64];
    memcpy(c, codes.v, 64);
    for (int i = 0; i < 16; ++i) {
        const u16 pairs[4] = {round_bf16(c[i]), round_bf16(c[16 + i]), round_bf16(c[32 + i]), round_bf16(c[48 + i])};
        memcpy(first.v + 4 * i, pairs, 4);
        memcpy(second.v + 4 * i, pairs + 2, 4);
    }
}
using Pairs = Bytes;
QUIRE_INLINE Pairs pairs_of(const Bytes& line) { return line; }
QUIRE_INLINE F32 dot_pairs(F32 acc, const Pairs& w, const Bytes& x) { return dot_bf16(acc, w, x); }
QUIRE_INLINE F32 lower(const Pairs& w) {
    u32 x[16];
    F32 r;
    memcpy(x, w.v, 64);
    QUIRE_EACH r.v[i] = f32_of(x[i] << 16);
    return r;
}
QUIRE_INLINE F32 upper(const Pairs& w) {
    u32 x[16];
    F32 r;
    memcpy(x, w.v, 64);
    QUIRE_EACH r.v[i] = f32_of(x[i] & 0xffff0000u);
    return r;
}
struct Float8Table { const u16* halves; };
QUIRE_INLINE Float8Table float8_table() {
    static constexpr struct Halves {
        u16 of[256];
        constexpr Halves() : of() { for (int c = 0; c < 256; ++c) of[c] = bf16_of_float8(static_cast<u8>(c)); }
    } halves;
    return {halves.of};
}
struct Float8Line { Float8Table table; const u8* codes; };
QUIRE_INLINE Float8Line load_float8(Float8Table table, const u8* codes) { return {table, codes}; }
template <int LINE> QUIRE_INLINE Bytes float8_bytes(const Float8Line& line) {
    u16 halves[32];
    for (int i = 0; i < 32; ++i) halves[i] = line.table.halves[line.codes[LINE * 32 + float8_place(i / 2, i)]];
    return load_bytes(halves);
}
QUIRE_INLINE Bytes load_table(const u8* table) { Bytes r; for (int i = 0; i < 64; ++i) r.v[i] = table[i & 15]; return r; }
QUIRE_INLINE void unpack_nibbles(Bytes packed, Bytes table, Bytes& low, Bytes& high) {
    for (int i = 0; i < 64; ++i) low.v[i] = table.v[packed.v[i] & 15], high.v[i] = table.v[packed.v[i] >> 4];
}
struct LevelTable { const u16* levels; };
QUIRE_INLINE LevelTable level_table(const u16* levels) { return {levels}; }
QUIRE_INLINE I32 level_pairs(LevelTable table, I32 indices) {
    QUIRE_EACH indices.v[i] =
        wrapped(table.levels[indices.v[i] & 15] | static_cast<u32>(table.levels[indices.v[i] >> 16 & 15]) << 16);
    return indices;
}
QUIRE_INLINE I32 load_u8(const u8* p) { I32 r; QUIRE_EACH r.v[i] = p[i]; return r; }
QUIRE_INLINE I32 load_u8(const u8* p, Mask m) { I32 r = {}; QUIRE_EACH if (has(m, i)) r.v[i] = p[i]; return r; }
template <int N> QUIRE_INLINE F32 swap_lanes(F32 x) { F32 r; QUIRE_EACH r.v[i] = x.v[i ^ N]; return r; }
QUIRE_INLINE void store_columns(u32* to, i64 stride, const I32 (&rows)[16], int num_rows, int num_words) {
    for (int r = 0; r < num_rows; ++r) {
        i32 words[16];
        store(words, rows[r]);
        for (int w = 0; w < num_words; ++w) to[w * stride + r] = static_cast<u32>(words[w]);
    }
}
QUIRE_INLINE float sum_lanes(F32 a) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
    return a.v[0];
}
QUIRE_INLINE float max_lanes(F32 a) {
    float m = a.v[0];
    for (int i = 1; i < 16; ++i) m = a.v[i] > m ? a.v[i] : m;
    return m;
}
QUIRE_INLINE void prefetch(const void*) {}
QUIRE_INLINE void prefetch_l2(const void*) {}

#undef QUIRE_EACH

}  // namespace
}  // namespace quire::QUIRE_ISA
