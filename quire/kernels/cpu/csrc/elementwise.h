// Row-wise kernels: norms, rotary embedding, routing.
#pragma once
#include "simd_types.h"

namespace quire {

struct NormJob {
    bool is_layer_norm = false;  // with mean; otherwise root mean square
    i32 size = 0;
    float eps = 0.0f;
    const float* weight = nullptr;  // f32, the spec's offset already added
    const float* bias = nullptr;    // or null
};

struct ElementwiseTable {
    // out = norm(x); out may be x. Sums in f32, in one fixed order.
    void (*norm)(const NormJob& job, const float* x, float* out);
    // Rotate pairs (i, i + dim / 2) of one head in place; cosine and sine [dim / 2].
    void (*rotate)(float* head, i32 dim, const float* cosine, const float* sine);
    // y += factor * x, n values.
    void (*add_scaled)(float* y, const float* x, float factor, i64 n);
    // y *= factor, then, where cap > 0, y = cap * tanh(y / cap).
    void (*scale_and_cap)(float* y, i64 n, float factor, float cap);
    // Softmax over num_experts logits and its top_k entries in falling order (ties: lower index first); weights divided by their
    // sum if is_renormalized.
    void (*route)(const float* logits, i32 num_experts, i32 top_k, bool is_renormalized, i32* chosen, float* weights);
};

}  // namespace quire
