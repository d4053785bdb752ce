// Row-wise kernels: norms, rotary embedding, activations, routing.
#pragma once
#include <vector>

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

// How scores of experts are computed from the router's logits. sparse: each of the top_k is the best remaining one, and its
// weight is its share among the remaining ones within `threshold` of it (SparseMixer, https://arxiv.org/abs/2310.00811).
enum class Scoring : i32 { softmax = 0, sigmoid = 1, sparse = 2 };

// The routing of one layer. Experts are chosen by their scores, plus `correction` where that is given; the weights are the
// scores.
struct RouteJob {
    i32 num_experts = 0, top_k = 0;
    Scoring scoring = Scoring::softmax;
    bool is_renormalized = true;
    // Only experts of the best top_groups of num_groups equal groups are chosen; a group counts by the sum of its group_best best
    // scores.
    i32 num_groups = 1, top_groups = 1, group_best = 1;
    float least_sum = 0.0f;  // lower bound of the sum by which weights are renormalised
    float scale = 1.0f;      // multiplies the weights in the end
    float threshold = 0.0f;
    const float* correction = nullptr;  // [num_experts] or null

    // Whether route chooses by the logits and leaves these as they are; otherwise it overwrites them by scores.
    bool has_logits() const {
        return scoring == Scoring::sparse || (scoring == Scoring::softmax && correction == nullptr && num_groups <= top_groups);
    }
};
// Limits of the kernels' stack arrays.
constexpr i32 MAX_EXPERTS = 4096, MAX_EXPERT_GROUPS = 64, MAX_GROUP_BEST = 2, MAX_HEAD_DIM = 4096;

// A RouteJob that owns its correction. set throws std::invalid_argument for impossible values.
struct Routing {
    RouteJob job;
    std::vector<float> correction;

    void set(i32 scoring, i32 num_groups, i32 top_groups, i32 group_best, float least_sum, float scale, float threshold,
        std::vector<float> values);
    // The job of so many experts.
    RouteJob of(i32 num_experts, i32 top_k, bool is_renormalized) const;
};

struct SimdOperation;

struct ElementwiseTable {
    // out = norm(x); out may be x, size >= 1. Sums in f32, in one fixed order.
    void (*norm)(const NormJob& job, const float* x, float* out);
    // Rotate pairs (i, i + dim / 2) of one head in place; cosine and sine [dim / 2].
    void (*rotate)(float* head, i32 dim, const float* cosine, const float* sine);
    // Norm consecutive heads of `dim` values, if `job` is not null, and rotate the first 2 * half values of each as above.
    // The same bits as norm and rotate, head by head.
    void (*turn_heads)(const NormJob* job, float* heads, i32 count, i32 dim, const float* cosine, const float* sine, i32 half);
    // y += factor * x, n values.
    void (*add_scaled)(float* y, const float* x, float factor, i64 n);
    // y *= factor, then, where cap > 0, y = cap * tanh(y / cap).
    void (*scale_and_cap)(float* y, i64 n, float factor, float cap);
    // y = activation(y), then, where up is not null, y *= up; n values.
    void (*activate)(Activation kind, float* y, const float* up, i64 n);
    // y *= sigmoid(gate); n values.
    void (*gate)(float* y, const float* gate, i64 n);
    // y = xielu(y) with its two numbers; n values.
    void (*apply_xielu)(float* y, float positive, float negative, i64 n);
    // The top_k experts of a row, in descending order of the selection scores (ties: lower index first), and their weights;
    // logits [num_experts] are overwritten. A NaN among the logits makes all weights NaN; chosen stays distinct and valid.
    void (*route)(const RouteJob& job, float* logits, i32* chosen, float* weights);
    // Put the first `size` values of `count` heads of `dim` values in another order: those with even places, then the others.
    void (*split_pairs)(float* heads, i32 count, i32 dim, i32 size);
    // 1 / (the sum of e^((x - largest) * factor)), n values of which `largest` is that; NaN where one is.
    float (*share_of_largest)(const float* x, i32 n, float largest, float factor);
    // The functions of simd.h, individually, for tests on every instruction set.
    const SimdOperation* simd;
    i32 num_simd;
};

// One step of an operation: sixteen lanes or 64 bytes in, and this many bytes out.
struct SimdOperation {
    const char* name;
    i32 a_bytes, b_bytes, c_bytes, out_bytes;
    void (*run)(const void* a, const void* b, const void* c, void* out);
};

}  // namespace quire
