// Row-wise kernels, one row, head or run of values per call. Each output depends only on its own row.
#include "simd.h"

#include "activation.h"
#include "simd_operations.inl"
#include "tables.h"

namespace quire::QUIRE_ISA {
namespace {

// A compile-time tag for full vectors: masked stores are slow on some machines with AVX2.
struct AllLanes {};
QUIRE_INLINE F32 load(const float* p, AllLanes) { return load(p); }
QUIRE_INLINE void store(float* p, F32 x, AllLanes) { store(p, x); }
QUIRE_INLINE F32 select(AllLanes, F32 yes, F32) { return yes; }

// Call body(j, lanes) for each sixteen values, the last with fewer lanes.
template <class Body>
QUIRE_INLINE void each_sixteen(i64 n, Body body) {
    i64 j = 0;
    for (; j + 16 <= n; j += 16) body(j, AllLanes{});
    if (j < n) body(j, first_lanes(static_cast<int>(n - j)));
}

// Sum of term(x[j]) in the same order on every machine: lane l of accumulator c takes the values with j / 16 % 4 == c, j % 16 ==
// l.
template <class Term>
QUIRE_INLINE float sum_terms(const float* x, i32 size, Term term) {
    F32 acc[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) acc[c] = zero();
    i32 j = 0;
    for (; j + 64 <= size; j += 64)
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) acc[c] = term(acc[c], load(x + j + 16 * c));
    if (j == size) return sum_lanes((acc[0] + acc[1]) + (acc[2] + acc[3]));
    // No branch per accumulator: it would spill them to the stack. With zero lanes nothing is read.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const Mask lanes = first_lanes(size - j - 16 * c);
        acc[c] = select(lanes, term(acc[c], load(x + j + 16 * c, lanes)), acc[c]);
    }
    return sum_lanes((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

void norm(const NormJob& job, const float* x, float* out) {
    const F32 size = set1(static_cast<float>(job.size));
    F32 mean = zero();
    if (job.is_layer_norm) mean = set1(sum_terms(x, job.size, [](F32 acc, F32 v) QUIRE_BODY { return acc + v; })) / size;
    // The mean first, then the squares about it: a sum of squares less a square would cancel.
    const float squares = sum_terms(x, job.size, [mean](F32 acc, F32 v) QUIRE_BODY { return fma(v - mean, v - mean, acc); });
    const F32 inverse = set1(1.0f) / sqrt(set1(squares) / size + set1(job.eps));
    const float* weight = job.weight;
    const float* bias = job.bias;
    if (bias == nullptr) {
        each_sixteen(job.size, [=](i64 j, auto lanes) QUIRE_BODY {
            store(out + j, (load(x + j, lanes) - mean) * inverse * load(weight + j, lanes), lanes);
        });
        return;
    }
    each_sixteen(job.size, [=](i64 j, auto lanes) QUIRE_BODY {
        store(out + j, fma((load(x + j, lanes) - mean) * inverse, load(weight + j, lanes), load(bias + j, lanes)), lanes);
    });
}

void rotate(float* head, i32 dim, const float* cosine, const float* sine) {
    const i32 half = dim / 2;
    each_sixteen(half, [=](i64 j, auto lanes) QUIRE_BODY {
        const F32 a = load(head + j, lanes), b = load(head + half + j, lanes);
        const F32 c = load(cosine + j, lanes), s = load(sine + j, lanes);
        // Each product rounded: the same bits on every machine, and as the formula is written.
        store(head + j, a * c - b * s, lanes);
        store(head + half + j, b * c + a * s, lanes);
    });
}

// The inverse root mean squares of up to sixteen heads: vectorised, since a root or quotient of one takes as long as of sixteen.
QUIRE_INLINE void inverse_roots(const NormJob& job, const float* heads, i32 count, float* inverses) {
    float squares[16] = {};
    for (i32 h = 0; h < count; ++h)
        squares[h] =
            sum_terms(heads + static_cast<i64>(h) * job.size, job.size, [](F32 acc, F32 v) QUIRE_BODY { return fma(v, v, acc); });
    store(inverses, set1(1.0f) / sqrt(load(squares) / set1(static_cast<float>(job.size)) + set1(job.eps)));
}

void turn_heads(const NormJob* job, float* heads, i32 count, i32 dim, const float* cosine, const float* sine, i32 half) {
    const bool is_plain = job != nullptr && !job->is_layer_norm && job->bias == nullptr && half % 16 == 0 && dim % 16 == 0;
    if (!is_plain) {
        for (float* head = heads; head < heads + static_cast<i64>(count) * dim; head += dim) {
            if (job != nullptr) norm(*job, head, head);
            if (half > 0) rotate(head, 2 * half, cosine, sine);
        }
        return;
    }
    const float* weight = job->weight;
    for (i32 first = 0; first < count; first += 16, heads += static_cast<i64>(16) * dim) {
        const i32 together = count - first < 16 ? count - first : 16;
        float inverses[16];
        inverse_roots(*job, heads, together, inverses);
        for (i32 h = 0; h < together; ++h) {
            float* const head = heads + static_cast<i64>(h) * dim;
            const F32 inverse = set1(inverses[h]);
            for (i32 j = 0; j < half; j += 16) {
                const F32 a = load(head + j) * inverse * load(weight + j),
                          b = load(head + half + j) * inverse * load(weight + half + j);
                const F32 c = load(cosine + j), s = load(sine + j);
                store(head + j, a * c - b * s);
                store(head + half + j, b * c + a * s);
            }
            for (i32 j = 2 * half; j < dim; j += 16) store(head + j, load(head + j) * inverse * load(weight + j));
        }
    }
}

void add_scaled(float* y, const float* x, float factor, i64 n) {
    each_sixteen(
        n, [=](i64 j, auto lanes) QUIRE_BODY { store(y + j, fma(set1(factor), load(x + j, lanes), load(y + j, lanes)), lanes); });
}

void scale_and_cap(float* y, i64 n, float factor, float cap) {
    if (cap > 0.0f) {
        each_sixteen(n, [=](i64 j, auto lanes) QUIRE_BODY {
            store(y + j, set1(cap) * tanh(load(y + j, lanes) * set1(factor) / set1(cap)), lanes);
        });
        return;
    }
    each_sixteen(n, [=](i64 j, auto lanes) QUIRE_BODY { store(y + j, load(y + j, lanes) * set1(factor), lanes); });
}

template <class Function>
QUIRE_INLINE void activate_all(float* y, const float* up, i64 n, Function function) {
    if (up == nullptr) {
        each_sixteen(n, [=](i64 j, auto lanes) QUIRE_BODY { store(y + j, function(load(y + j, lanes)), lanes); });
        return;
    }
    each_sixteen(
        n, [=](i64 j, auto lanes) QUIRE_BODY { store(y + j, function(load(y + j, lanes)) * load(up + j, lanes), lanes); });
}

void activate(Activation kind, float* y, const float* up, i64 n) {
    switch (kind) {
        case Activation::silu: return activate_all(y, up, n, [](F32 x) QUIRE_BODY { return silu(x); });
        case Activation::gelu: return activate_all(y, up, n, [](F32 x) QUIRE_BODY { return gelu(x); });
        case Activation::gelu_tanh: return activate_all(y, up, n, [](F32 x) QUIRE_BODY { return gelu_tanh(x); });
        case Activation::relu: return activate_all(y, up, n, [](F32 x) QUIRE_BODY { return relu(x); });
        case Activation::relu2: return activate_all(y, up, n, [](F32 x) QUIRE_BODY { return relu2(x); });
        case Activation::xielu: return;  // it has numbers, see apply_xielu; the binding refuses it
    }
}

void gate(float* y, const float* gate, i64 n) {
    each_sixteen(n, [=](i64 j, auto lanes) QUIRE_BODY {
        store(y + j, load(y + j, lanes) / (set1(1.0f) + exp_unflushed(zero() - load(gate + j, lanes))), lanes);
    });
}

void apply_xielu(float* y, float positive, float negative, i64 n) {
    activate_all(y, nullptr, n, [=](F32 x) QUIRE_BODY { return xielu(x, positive, negative); });
}

// Keep the top_k largest so far in descending order. Only a larger logit overtakes an earlier one, so equal ones stay in order;
// NaN counts as the smallest, so that comparisons are total.
void choose(const float* logits, i32 num_experts, i32 top_k, i32* chosen, float* values) {
    const float least = -__builtin_inff();
    i32 count = 0;
    for (i32 i = 0; i < num_experts; ++i) {
        const float value = logits[i] == logits[i] ? logits[i] : least;
        if (count == top_k && !(value > values[top_k - 1])) continue;
        i32 place = count < top_k ? count++ : top_k - 1;
        for (; place > 0 && value > values[place - 1]; --place) {
            values[place] = values[place - 1];
            chosen[place] = chosen[place - 1];
        }
        values[place] = value;
        chosen[place] = i;
    }
}

// Softmax over all experts, in place.
void softmax(float* logits, i32 num_experts) {
    float peak = logits[0];
    for (i32 i = 1; i < num_experts; ++i) peak = logits[i] > peak ? logits[i] : peak;
    F32 partial = zero();
    each_sixteen(num_experts, [=, &partial](i64 j, auto lanes) QUIRE_BODY {
        partial = partial + select(lanes, exp(load(logits + j, lanes) - set1(peak)), zero());
    });
    const float total = sum_lanes(partial);
    each_sixteen(num_experts, [=](i64 j, auto lanes) QUIRE_BODY {
        store(logits + j, exp(load(logits + j, lanes) - set1(peak)) / set1(total), lanes);
    });
}

// The weights of the top_k of all experts by their logits, in softmax.
void route_softmax(const RouteJob& job, const float* logits, i32* chosen, float* weights) {
    choose(logits, job.num_experts, job.top_k, chosen, weights);
    const F32 peak = set1(weights[0]);
    F32 partial = zero();
    each_sixteen(job.num_experts, [=, &partial](i64 j, auto lanes) QUIRE_BODY {
        partial = partial + select(lanes, exp(load(logits + j, lanes) - peak), zero());
    });
    const float total = sum_lanes(partial);
    each_sixteen(job.top_k, [=](i64 j, auto lanes) QUIRE_BODY {
        store(weights + j, exp(load(weights + j, lanes) - peak) / set1(total), lanes);
    });
}

// Keep the values of experts in the best groups, and set the others to the minimum.
void keep_best_groups(const RouteJob& job, float* values) {
    const float least = -__builtin_inff();
    const i32 size = job.num_experts / job.num_groups;
    float scores[MAX_EXPERT_GROUPS], best[MAX_EXPERT_GROUPS], largest[MAX_GROUP_BEST];
    i32 groups[MAX_EXPERT_GROUPS], places[MAX_GROUP_BEST];
    for (i32 g = 0; g < job.num_groups; ++g) {
        choose(values + g * size, size, job.group_best, places, largest);
        scores[g] = largest[0];
        for (i32 i = 1; i < job.group_best; ++i) scores[g] += largest[i];
    }
    choose(scores, job.num_groups, job.top_groups, groups, best);
    u64 kept = 0;
    for (i32 i = 0; i < job.top_groups; ++i) kept |= u64{1} << groups[i];
    for (i32 i = 0; i < job.num_experts; ++i)
        if ((kept >> (i / size) & 1) == 0) values[i] = least;
}

// Choose by selection scores; the scores themselves are the weights of the chosen experts.
void route_scores(const RouteJob& job, float* logits, i32* chosen, float* weights) {
    if (job.scoring == Scoring::softmax)
        softmax(logits, job.num_experts);
    else
        each_sixteen(job.num_experts, [=](i64 j, auto lanes) QUIRE_BODY {
            store(logits + j, set1(1.0f) / (set1(1.0f) + exp_unflushed(zero() - load(logits + j, lanes))), lanes);
        });
    float values[MAX_EXPERTS];
    for (i32 i = 0; i < job.num_experts; ++i) values[i] = job.correction == nullptr ? logits[i] : logits[i] + job.correction[i];
    if (job.num_groups > job.top_groups) keep_best_groups(job, values);
    choose(values, job.num_experts, job.top_k, chosen, weights);
    for (i32 i = 0; i < job.top_k; ++i) weights[i] = logits[chosen[i]];
}

void route_sparse(const RouteJob& job, const float* logits, i32* chosen, float* weights) {
    choose(logits, job.num_experts, job.top_k, chosen, weights);
    for (i32 k = 0; k < job.top_k; ++k) {
        const float best = logits[chosen[k]];
        float sum = 0.0f;
        for (i32 i = 0; i < job.num_experts; ++i) {
            bool is_left = true;
            for (i32 before = 0; before < k; ++before) is_left = is_left && chosen[before] != i;
            const float size = logits[i] < 0.0f ? -logits[i] : logits[i], factor = size > best ? size : best;
            if (!is_left || (best - logits[i]) / factor > job.threshold) continue;
            float share[16];
            store(share, exp(set1(logits[i] - best)));
            sum += share[0];
        }
        weights[k] = 1.0f / sum;
    }
}

void route(const RouteJob& job, float* logits, i32* chosen, float* weights) {
    bool has_nan = false;
    for (i32 i = 0; i < job.num_experts; ++i) has_nan = has_nan || logits[i] != logits[i];
    if (job.scoring == Scoring::sparse)
        route_sparse(job, logits, chosen, weights);
    else if (job.has_logits())
        route_softmax(job, logits, chosen, weights);
    else
        route_scores(job, logits, chosen, weights);
    if (has_nan)
        for (i32 i = 0; i < job.top_k; ++i) weights[i] = __builtin_nanf("");
    const i32 top_k = job.top_k;
    if (job.is_renormalized) {
        float sum = 0.0f;
        for (i32 j = 0; j < top_k; ++j) sum += weights[j];
        if (sum < job.least_sum) sum = job.least_sum;
        each_sixteen(
            top_k, [=](i64 j, auto lanes) QUIRE_BODY { store(weights + j, load(weights + j, lanes) / set1(sum), lanes); });
    }
    if (job.scale != 1.0f)
        for (i32 j = 0; j < top_k; ++j) weights[j] *= job.scale;
}

void split_pairs(float* heads, i32 count, i32 dim, i32 size) {
    float odd[MAX_HEAD_DIM / 2];
    for (i32 h = 0; h < count; ++h, heads += dim) {
        for (i32 i = 0; i < size / 2; ++i) {
            odd[i] = heads[2 * i + 1];
            heads[i] = heads[2 * i];
        }
        for (i32 i = 0; i < size / 2; ++i) heads[size / 2 + i] = odd[i];
    }
}

// Terms this much smaller than the largest do not change an f32 sum, for any number of them.
constexpr float LEAST_SHARE_EXPONENT = -32.0f;

float share_of_largest(const float* x, i32 n, float largest, float factor) {
    F32 sum = zero();
    each_sixteen(n, [=, &sum](i64 j, auto lanes) QUIRE_BODY {
        const F32 exponent = (load(x + j, lanes) - set1(largest)) * set1(factor);
        if (bits((exponent > set1(LEAST_SHARE_EXPONENT)) | is_nan(exponent)) == 0) return;
        sum = sum + select(lanes, exp(exponent), zero());
    });
    return 1.0f / sum_lanes(sum);
}

}  // namespace

extern const ElementwiseTable elementwise_table = {
    norm, rotate, turn_heads, add_scaled, scale_and_cap, activate, gate, apply_xielu, route, split_pairs, share_of_largest,
    simd_operations, sizeof(simd_operations) / sizeof(simd_operations[0]),
};

}  // namespace quire::QUIRE_ISA
