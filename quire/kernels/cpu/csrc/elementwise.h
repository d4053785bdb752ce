// Row-wise kernels: norms, rotary embedding, activations, routing.
#pragma once
#include "simd_types.h"
#include "weight.h"

namespace quire {

struct NormJob {
    bool is_layer_norm = false;  // with mean; otherwise root mean square
    i32 size = 0;
    float eps = 0.0f;
    const float* weight = nullptr;  // f32, the spec's offset already added
    const float* bias = nullptr;    // or null
};

struct SimdOperation;

struct ElementwiseTable {
    // out = norm(x); out may be x, size >= 1. Sums in f32, in one fixed order.
    void (*norm)(const NormJob& job, const float* x, float* out);
    // Rotate pairs (i, i + dim / 2) of one head in place; cosine and sine [dim / 2].
    void (*rotate)(float* head, i32 dim, const float* cosine, const float* sine);
    // Norm heads of `dim` values that follow one another, where `job` is not null, and rotate the first 2 * half values of each as above.
    // The same bits as norm and rotate, head by head.
    void (*turn_heads)(const NormJob* job, float* heads, i32 count, i32 dim, const float* cosine, const float* sine, i32 half);
    // y += factor * x, n values.
    void (*add_scaled)(float* y, const float* x, float factor, i64 n);
    // y *= factor, then, where cap > 0, y = cap * tanh(y / cap).
    void (*scale_and_cap)(float* y, i64 n, float factor, float cap);
    // y = activation(y), then, where up is not null, y *= up; n values.
    void (*activate)(Activation kind, float* y, const float* up, i64 n);
    // Softmax over num_experts logits and its top_k entries in falling order (ties: lower index first), 1 <= top_k <= num_experts;
    // weights divided by their sum if is_renormalized. A NaN among the logits makes all weights NaN; chosen stays distinct and valid.
    void (*route)(const float* logits, i32 num_experts, i32 top_k, bool is_renormalized, i32* chosen, float* weights);
    // 1 / (the sum of e^((x - largest) * factor)), n values of which `largest` is that; NaN where one is.
    float (*share_of_largest)(const float* x, i32 n, float largest, float factor);
    // The functions of simd.h one by one, for their tests: what they promise must hold on every instruction set.
    const SimdOperation* simd;
    i32 num_simd;
};

// One step of an operation: sixteen lanes or 64 bytes in, as many bytes out as said here.
struct SimdOperation {
    const char* name;
    i32 a_bytes, b_bytes, c_bytes, out_bytes;
    void (*run)(const void* a, const void* b, const void* c, void* out);
};

}  // namespace quire
