// The noise of kernels/reference/noise.py, bit for bit.
#pragma once
#include "sampler_row.inl"

namespace quire::QUIRE_ISA {
namespace {

constexpr u32 MULTIPLIER_0 = 0xD2511F53, MULTIPLIER_1 = 0xCD9E8D57;

i32 as_i32(u32 x) { return static_cast<i32>(x); }
u32 high(u64 x) { return static_cast<u32>(x >> 32); }

// The keys of the ten rounds, and what of the first two is the same for all tokens of a row.
struct Key {
    i32 k0[10], k1[10];
    i32 second_0, second_2, second_3;
};

Key make_key(u64 seed, u32 position) {
    Key key;
    u32 k0 = static_cast<u32>(seed), k1 = high(seed);
    for (int r = 0; r < 10; ++r, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) key.k0[r] = as_i32(k0), key.k1[r] = as_i32(k1);
    // Stream 0 makes the second product of the first round 0.
    const u64 product = static_cast<u64>(MULTIPLIER_0) * (position ^ static_cast<u32>(key.k0[0]));
    key.second_0 = key.k0[1];
    key.second_2 = as_i32(high(product)) ^ key.k1[1];
    key.second_3 = as_i32(static_cast<u32>(product));
    return key;
}

// Philox4x32-10 of eight quads of tokens, in the even lanes; the odd lanes hold nothing of use, before and after.
QUIRE_INLINE void philox(const Key& key, I32 quads, I32* words) {
    const I32 m0 = set1(as_i32(MULTIPLIER_0)), m1 = set1(as_i32(MULTIPLIER_1));
    const I32 first = multiply_even(quads, m0);
    const I32 second = multiply_even(odd_to_even(first) ^ set1(key.k1[0]), m1);
    I32 c0 = odd_to_even(second) ^ set1(key.second_0), c1 = second;
    I32 c2 = first ^ set1(key.second_2), c3 = set1(key.second_3);
#pragma GCC unroll 10
    for (int r = 2; r < 10; ++r) {
        const I32 p0 = multiply_even(c0, m0), p1 = multiply_even(c2, m1);
        c0 = xor3(odd_to_even(p1), c1, set1(key.k0[r]));
        c2 = xor3(odd_to_even(p0), c3, set1(key.k1[r]));
        c1 = p1;
        c3 = p0;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// The words of a block: [half of the block][word of the quad].
QUIRE_INLINE void block_words(const Key& key, i32 block, I32 (*words)[4]) {
    const I32 quads = shift_right<1>(iota()) + set1(block * (BLOCK / 4));
    philox(key, quads, words[0]);
    philox(key, quads + set1(8), words[1]);
}

// P and LN of kernels/reference/noise.py; nothing is fused.
QUIRE_INLINE F32 log_polynomial(F32 f, F32 e) {
    const F32 z = f * f;
    F32 y = set1(7.0376836292e-2f);
    y = y * f + set1(-1.1514610310e-1f);
    y = y * f + set1(1.1676998740e-1f);
    y = y * f + set1(-1.2420140846e-1f);
    y = y * f + set1(1.4249322787e-1f);
    y = y * f + set1(-1.6668057665e-1f);
    y = y * f + set1(2.0000714765e-1f);
    y = y * f + set1(-2.4999993993e-1f);
    y = y * f + set1(3.3333331174e-1f);
    y = (y * f) * z;
    y = y + e * set1(-2.12194440e-4f);
    y = y - z * set1(0.5f);
    return (f + y) + e * set1(0.693359375f);
}

QUIRE_INLINE void split(F32 x, F32& fraction, F32& exponent) {
    const I32 whole = as_i32(x), e = shift_right_signed<23>(whole - set1(0x3F3504F3));
    fraction = as_f32(whole - shift_left<23>(e)) - set1(1.0f);
    exponent = to_f32(e);
}

QUIRE_INLINE F32 gumbel(I32 words) {
    // Both halves are exact, so the sum is the word rounded once.
    const F32 word = to_f32(shift_right<16>(words)) * set1(65536.0f) + to_f32(words & set1(0xffff));
    const F32 v = min((word + set1(0.5f)) * set1(0x1p-32f), set1(1.0f - 0x1p-24f));
    F32 fraction, exponent;
    split(set1(1.0f) - v, fraction, exponent);
    const Mask direct = v <= set1(0.29289323091506958f);
    const F32 log_rest = log_polynomial(select(direct, zero() - v, fraction), select(direct, zero(), exponent));
    split(zero() - log_rest, fraction, exponent);
    return zero() - log_polynomial(fraction, exponent);
}

// The noise of the tokens of a block, in their order.
void block_noise(const Key& key, i32 block, float* noise) {
    I32 words[2][4];
    block_words(key, block, words);
    i32 ordered[BLOCK];
    for (int half = 0; half < 2; ++half)
        for (int word = 0; word < 4; ++word) {
            i32 lanes[16];
            store(lanes, words[half][word]);
            for (int quad = 0; quad < 8; ++quad) ordered[half * 32 + quad * 4 + word] = lanes[2 * quad];
        }
    for (int i = 0; i < BLOCK; i += 16) store(noise + i, gumbel(load(ordered + i)));
}

}  // namespace
}  // namespace quire::QUIRE_ISA
