// Several residual streams within a step: see LayerStreams and Streams in plan.h.
#pragma once
#include <string.h>

#include <algorithm>
#include <cmath>

#include "step_entry.h"

namespace quire {

// Sums of n values in sixteen parts, which the compiler can compute side by side: always in the same order.
template <class Term>
static inline float sum_of(i64 n, Term term) {
    constexpr i64 PARTS = 16;
    float sums[PARTS] = {}, total = 0.0f;
    i64 i = 0;
    for (; i + PARTS <= n; i += PARTS)
        for (i64 part = 0; part < PARTS; ++part) sums[part] += term(i + part);
    for (; i < n; ++i) sums[i % PARTS] += term(i);
    for (float sum : sums) total += sum;
    return total;
}

static inline float mean_square(const float* x, i64 n) {
    return sum_of(n, [&](i64 i) { return x[i] * x[i]; }) / static_cast<float>(n);
}

// Make values how far they are above the mean plus `quantile` standard deviations, 0 below: see MlpSpec.sparsity. NaN is kept.
static inline void cut_gate(float* values, i64 n, float quantile) {
    const float mean = sum_of(n, [&](i64 i) { return values[i]; }) / static_cast<float>(n);
    const float variance = sum_of(n, [&](i64 i) { return (values[i] - mean) * (values[i] - mean); }) / static_cast<float>(n);
    const float cut = mean + quantile * std::sqrt(variance);
    for (i64 i = 0; i < n; ++i) values[i] = values[i] - cut < 0.0f ? 0.0f : values[i] - cut;
}

struct StepStreams : StepEntry {
    // Streams keep the rows of all tokens, also where only those that are wanted are left.
    i64 token_of(i64 row, bool has_wanted) const { return has_wanted ? in.wanted_rows[row] : row; }
    float* stream(i64 token, i32 index) const {
        return plan.stream_rows_ + (token * plan.streams_.count + index) * hidden_stride();
    }

    // What a stream is multiplied by to be as large as another one.
    float size_ratio(const float* x, float wanted) const {
        return std::sqrt(wanted) / std::sqrt(std::max(mean_square(x, plan.hidden_), 1e-5f));
    }

    // Make all streams of the embeddings.
    void split_streams() {
        const Plan::Streams& streams = plan.streams_;
        pack_all(streams.split_site, plan.x_, hidden_stride());
        for (i32 index = 1; index < streams.count; ++index) {
            const Packed input = packed(streams.split_site, streams.split_forms[index - 1], num_rows);
            const LinearJob split =
                job(*streams.split[index - 1], input, Finish::store, stream(0, index), streams.count * hidden_stride());
            run(&split, 1);
        }
        each(num_rows, [&](i64 row) {
            const float wanted = mean_square(x(row), plan.hidden_);
            memcpy(stream(row, 0), x(row), sizeof(float) * plan.hidden_);
            for (i32 index = 1; index < streams.count; ++index)
                kernels.elementwise->scale_and_cap(
                    stream(row, index), plan.hidden_, size_ratio(stream(row, index), wanted), 0.0f);
        });
    }

    // Make x_ the mean of all streams.
    void join_streams(bool has_wanted) {
        const Plan::Streams& streams = plan.streams_;
        each(num_rows, [&](i64 row) { memcpy(x(row), stream(token_of(row, has_wanted), 0), sizeof(float) * plan.hidden_); });
        for (i32 index = 1; index < streams.count; ++index) {
            each(num_rows, [&](i64 row) {
                memcpy(
                    plan.normed_ + row * hidden_stride(), stream(token_of(row, has_wanted), index), sizeof(float) * plan.hidden_);
            });
            pack_all(streams.join_site, plan.normed_, hidden_stride());
            const Packed input = packed(streams.join_site, streams.join_forms[index - 1], num_rows);
            const LinearJob join = job(*streams.join[index - 1], input, Finish::store, plan.extra_, hidden_stride());
            run(&join, 1);
            each(num_rows, [&](i64 row) {
                const float wanted = mean_square(stream(token_of(row, has_wanted), 0), plan.hidden_);
                kernels.elementwise->add_scaled(x(row), extra(row), size_ratio(extra(row), wanted), plan.hidden_);
            });
        }
        each(num_rows, [&](i64 row) {
            kernels.elementwise->scale_and_cap(x(row), plan.hidden_, 1.0f / static_cast<float>(streams.count), 0.0f);
        });
    }

    // Compute the products of the layer's router with rows of x_.
    void ask_stream_router(const PlanLayer& l) {
        norm_and_pack(l.streams.router_site, l.streams.norm, nullptr, 1.0f, false, -1);
        const Packed input = packed(l.streams.router_site, 0, num_rows);
        const LinearJob router = job(*l.streams.router, input, Finish::store, plan.stream_routes_, plan.streams_.count);
        run(&router, 1);
    }

    // Return what the router says of a row, made of the products.
    float* modalities(i64 row) const {
        float* const routes = plan.stream_routes_ + row * plan.streams_.count;
        for (i32 i = 0; i < plan.streams_.count; ++i) routes[i] = std::tanh(routes[i] / static_cast<float>(plan.hidden_));
        return routes;
    }

    // A coefficient of a row: weights [count] times its modalities.
    float coefficient(const float* weights, const float* modalities) const {
        float sum = 0.0f;
        for (i32 i = 0; i < plan.streams_.count; ++i) sum += weights[i] * modalities[i];
        return sum;
    }

    // Predict the streams that a layer begins with, of which x_ is the active one, and compute its low-rank residual.
    void begin_streams(const PlanLayer& l) {
        const i32 count = plan.streams_.count, active = plan.streams_.active;
        each(num_rows, [&](i64 row) {
            memcpy(x(row), stream(row, active), sizeof(float) * plan.hidden_);
            keep_input(l.index, row);
        });
        ask_stream_router(l);
        each(num_rows, [&](i64 row) {
            float *const own = own_row(), *const routes = modalities(row);
            memcpy(own, stream(row, 0), sizeof(float) * count * hidden_stride());
            for (i32 to = 0; to < count; ++to)
                for (i32 from = 0; from < count; ++from)
                    kernels.elementwise->add_scaled(own + to * hidden_stride(), stream(row, from),
                        coefficient(&l.streams.predict[(to * count + from) * count], routes), plan.hidden_);
            memcpy(stream(row, 0), own, sizeof(float) * count * hidden_stride());
            memcpy(x(row), stream(row, active), sizeof(float) * plan.hidden_);
        });
        compute_laurel(l);
    }

    // Of all rows, into laurels_: what the low-rank residual adds to the attention's input, and that.
    void compute_laurel(const PlanLayer& l) {
        const LayerStreams& s = l.streams;
        const i64 width = row_stride(plan.laurel_rank_);
        norm_and_pack(s.left_site, l.attn_in, nullptr, 1.0f, true, -1);
        const Packed input = packed(s.left_site, 0, num_rows);
        const LinearJob left = job(*s.laurel_left, input, Finish::store, plan.laurel_inner_, width);
        run(&left, 1);
        pack_all(s.right_site, plan.laurel_inner_, width);
        const Packed inner = packed(s.right_site, 0, num_rows);
        const LinearJob right = job(*s.laurel_right, inner, Finish::store, plan.laurels_, hidden_stride());
        run(&right, 1);
        each(num_rows, [&](i64 row) {
            float* const laurel = plan.laurels_ + row * hidden_stride();
            kernels.elementwise->norm(s.laurel_norm.job, laurel, laurel);
            kernels.elementwise->add_scaled(laurel, plan.normed_ + row * hidden_stride(), 1.0f, plan.hidden_);
        });
    }

    // After attention: let its result, which waits, and the low-rank residual join x_.
    void add_laurel(const PlanLayer& l, bool has_wanted) {
        each(num_rows, [&](i64 row) {
            add_result(l.attn_out, l.residual_scale, row);
            kernels.elementwise->add_scaled(
                x(row), plan.laurels_ + token_of(row, has_wanted) * hidden_stride(), 1.0f, plan.hidden_);
            kernels.elementwise->scale_and_cap(x(row), plan.hidden_, std::sqrt(0.5f), 0.0f);
        });
    }

    // After the feed-forward block, whose result waits: correct all streams, and add the per-layer inputs to all but the first.
    void end_streams(const PlanLayer& l, bool has_wanted) {
        const i32 count = plan.streams_.count;
        each(num_rows, [&](i64 row) { add_result(l.mlp_out, l.residual_scale, row); });
        ask_stream_router(l);
        each(num_rows, [&](i64 row) {
            const i64 token = token_of(row, has_wanted);
            const float* const active = stream(token, plan.streams_.active);
            float *const change = own_row(), *const routes = modalities(row);
            memcpy(change, x(row), sizeof(float) * plan.hidden_);
            kernels.elementwise->add_scaled(change, active, -1.0f, plan.hidden_);
            for (i32 to = 0; to < count; ++to)
                kernels.elementwise->add_scaled(
                    stream(token, to), change, coefficient(&l.streams.correct[to * count], routes) + 1.0f, plan.hidden_);
            memcpy(x(row), active, sizeof(float) * plan.hidden_);
            for (size_t i = 0; i < l.streams.scale.size(); ++i) x(row)[i] *= l.streams.scale[i];
        });
        add_per_layer(l, has_wanted);
        each(num_rows, [&](i64 row) {
            kernels.elementwise->norm(l.per_layer_norm.job, extra(row), own_row());
            for (i32 to = 1; to < count; ++to)
                kernels.elementwise->add_scaled(stream(token_of(row, has_wanted), to), own_row(), 1.0f, plan.hidden_);
        });
    }
};

}  // namespace quire
