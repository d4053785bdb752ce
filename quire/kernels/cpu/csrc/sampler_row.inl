// A row of logits, seen as blocks of 64 tokens whose largest logits are found first.
#pragma once
#include <float.h>

#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr i32 BLOCK = 64;
constexpr float NEVER = -__builtin_inff();
// Thresholds are at least this: what is -inf is no candidate.
constexpr float LOWEST = -FLT_MAX;

struct Row {
    const float* logits;
    const u32* mask;  // a bit per token, nullptr: all are allowed
    i32 vocab, num_blocks;
    float inverse;   // the logits are multiplied with it
    float peak;      // the largest product
    float* maxima;   // [num_blocks, padded to 16 with -inf] the largest logit of each block
    float* values;   // [vocab, padded] candidates
    float* weights;  // [vocab, padded] their masses
};

i32 count_blocks(i32 vocab) { return (vocab + BLOCK - 1) / BLOCK; }
i64 padded_maxima(i32 vocab) { return (count_blocks(vocab) + 31) / 16 * 16; }
i64 padded_values(i32 vocab) { return (count_blocks(vocab) + 1) * static_cast<i64>(BLOCK); }

QUIRE_INLINE F32 load_logits(const float* p, i32 left) {
    if (left >= 16) return load(p);
    return select(first_lanes(left), load(p, first_lanes(left)), set1(NEVER));
}

// The 16 values of the tokens from `token`, a multiple of 16, on: -inf for those that the mask forbids.
QUIRE_INLINE F32 keep_allowed(const Row& row, i32 token, F32 values) {
    if (row.mask == nullptr || token >= row.vocab) return values;
    const Mask allowed = mask_of(row.mask[token / 32] >> (token & 16) & 0xffffu);
    return select(allowed, values, set1(NEVER));
}

QUIRE_INLINE F32 load_allowed(const Row& row, i32 token) {
    return keep_allowed(row, token, load_logits(row.logits + token, row.vocab - token));
}

QUIRE_INLINE F32 load_scaled(const Row& row, i32 token) { return load_allowed(row, token) * set1(row.inverse); }

// Fill the maxima and return the largest; has_nan where a logit is NaN (the maxima then mean nothing).
float scan(Row& row, bool& has_nan) {
    F32 peak = set1(NEVER);
    Mask nan = first_lanes(0);
    for (i32 b = 0; b < row.num_blocks; ++b) {
        const i32 first = b * BLOCK;
        const float* p = row.logits + first;
        const i32 left = row.vocab - first;
        const F32 x0 = load_logits(p, left), x1 = load_logits(p + 16, left - 16);
        const F32 x2 = load_logits(p + 32, left - 32), x3 = load_logits(p + 48, left - 48);
        nan = nan | is_nan(x0) | is_nan(x1) | is_nan(x2) | is_nan(x3);
        const F32 best = max(max(keep_allowed(row, first, x0), keep_allowed(row, first + 16, x1)),
                             max(keep_allowed(row, first + 32, x2), keep_allowed(row, first + 48, x3)));
        peak = max(peak, best);
        row.maxima[b] = max_lanes(best);
    }
    for (i64 b = row.num_blocks; b < padded_maxima(row.vocab); ++b) row.maxima[b] = NEVER;
    has_nan = bits(nan) != 0;
    return max_lanes(peak);
}

// The first token whose logit is `best`, the largest of the row.
i32 find_first(const Row& row, float best) {
    i32 b = 0;
    while (row.maxima[b] < best) ++b;
    for (i32 token = b * BLOCK;; token += 16) {
        const u32 found = bits(load_allowed(row, token) == set1(best));
        if (found != 0) return token + __builtin_ctz(found);
    }
}

Row make_row(const float* logits, const u32* mask, i32 vocab, u8* scratch) {
    float* maxima = reinterpret_cast<float*>(scratch);
    float* values = maxima + padded_maxima(vocab);
    return {logits, mask, vocab, count_blocks(vocab), 1.0f, 0.0f, maxima, values, values + padded_values(vocab)};
}

}  // namespace
}  // namespace quire::QUIRE_ISA
