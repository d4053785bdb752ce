// One token per row from its logits, without sorting the vocabulary.
#pragma once
#include "team.h"

namespace quire {

// The noise is keyed by (seed, position, token) as in kernels/reference/noise.py, bit for bit.
struct SampleRow {
    const float* logits = nullptr;  // [vocab]; after processors
    float inverse_temperature = 1.0f;
    bool is_greedy = true;
    i32 top_k = 0;       // 0: off
    float top_p = 1.0f;  // 1: off
    float min_p = 0.0f;  // 0: off
    u64 seed = 0;
    u32 position = 0;
};

struct SampleResult {
    i32 token = -1;  // -1: none, see status
    i32 status = 0;  // 0: fine, 1: a logit is NaN, 2: a logit is +inf, 3: all are -inf, 4: no finite logit after temperature
    float max_logit = 0.0f;
    float log_sum = 0.0f;  // log of the sum of exp over the raw logits, for log probabilities
};

struct SamplerTable {
    // Called by every thread; rows are shared out. scratch: scratch_bytes(vocab) per thread.
    i64 (*scratch_bytes)(i32 vocab);
    void (*sample)(Worker& worker, const SampleRow* rows, i32 num_rows, i32 vocab, SampleResult* results, u8* scratch);
};

}  // namespace quire
