// One token per row from its logits, and log probabilities, without sorting the vocabulary.
#pragma once
#include "team.h"

namespace quire {

// The noise is keyed by (seed, position, token) as in kernels/reference/noise.py, bit for bit; the masses of top_p are whole
// numbers as in kernels/reference/mass.py, so that their sums do not depend on an order; the cuts are those of
// sampling/truncation.py: top_k, top_p, min_p, ties at a cut stay.
struct SampleRow {
    const float* logits = nullptr;  // [vocab], not changed
    float inverse_temperature = 1.0f;
    bool is_greedy = true;   // the best logit, the lowest id of ties; nothing below is read
    i32 top_k = 0;           // 0: off
    double top_p = 1.0;      // 1: off
    float log_min_p = 0.0f;  // -inf: off
    u64 seed = 0;
    u32 position = 0;
    const u32* mask = nullptr;  // [ceil(vocab / 32)] a bit per token, the lowest first: 0 forbids it; nullptr: none is forbidden
};

enum SampleStatus : i32 {
    SAMPLE_FINE = 0,
    SAMPLE_NAN = 1,        // a logit is NaN
    SAMPLE_INFINITE = 2,   // a logit is +inf
    SAMPLE_NOTHING = 3,    // all logits are -inf
    SAMPLE_OVERFLOW = 4,   // the best logit over the temperature is beyond f32
    SAMPLE_UNDERFLOW = 5,  // the same, negative
};

struct SampleResult {
    i32 token = -1;  // -1: none, see status
    i32 status = SAMPLE_FINE;
};

// The terms of log probabilities: log p(i) = (logits[i] - peak) - log_sum.
struct LogprobRow {
    const float* logits = nullptr;  // [vocab], not changed
    i32 token = 0;
    i32 num_top = 0;               // 0 <= num_top <= vocab
    i32* top_tokens = nullptr;     // [num_top] out: the best tokens; equal logits by token
    float* top_values = nullptr;   // [num_top] out: their log probabilities
    float logprob = 0.0f;          // out
    i32 rank = 0;                  // out: 1 + the number of larger logits
    bool is_finite = false;        // out: whether the best logit is; else nothing was written
};

struct SamplerTable {
    i64 (*scratch_bytes)(i32 vocab);
    // Called by every thread, after a barrier: rows are shared out by `next`. scratch: scratch_bytes(vocab) for each thread, one
    // after the other. A row's result depends only on the row. Denormals are kept here, independent of the caller's setting.
    void (*sample)(Worker& worker, const SampleRow* rows, i32 num_rows, i32 vocab, SampleResult* results, u8* scratch);
    void (*logprobs)(Worker& worker, LogprobRow* rows, i32 num_rows, i32 vocab, u8* scratch);
    // Write the noise of tokens 0, 1, ... vocab - 1 (tests).
    void (*noise)(u64 seed, u32 position, i32 vocab, float* out);
    // Write the noise of 32-bit words (tests); n is a multiple of 16.
    void (*noise_of_words)(const i32* words, i64 n, float* out);
};

}  // namespace quire
