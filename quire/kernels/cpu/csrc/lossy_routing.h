// Measures that even out the load of experts and change results. All are off by default.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "elementwise.h"

namespace quire {

struct LossyRouting {
    // An expert takes at most this many times the mean of a step; what is over goes to the row's next best expert that has room.
    // 0: off.
    float capacity_factor = 0.0f;
    // After each step the selection scores of experts with more tokens than the mean fall by this, and those of others rise. 0:
    // off.
    float bias_rate = 0.0f;
    float bias_limit = 0.0f;  // the largest absolute value of these biases
    float min_share = 0.0f;   // choices with less than this share of the weight of the row's best one are left out. 0: off

    bool is_on() const { return capacity_factor > 0.0f || bias_rate > 0.0f || min_share > 0.0f; }
};

// What lossy routing has done in one layer so far.
struct RoutingCounts {
    i64 moved = 0, dropped = 0, weak = 0;  // choices that got another expert, or none, as experts were full; and weak ones
    double capacity_use = 0.0;             // demand of the busiest expert of a step / capacity: mean of about the last 100 steps
};

// Experts always take this many tokens in a step: in small steps a share of the mean would be one or two.
constexpr i32 MIN_EXPERT_CAPACITY = 4;

// Limits the choices of the rows of one layer. chosen and weights: [num_rows][top_k]; a choice that is left out becomes -1.
struct ChoiceLimiter {
    const RouteJob& job;
    const LossyRouting& lossy;
    i32 num_rows;
    const float* scores;  // [num_rows][num_experts], as route leaves them: logits, or the scores of which weights are made
    i32* chosen;
    float* weights;
    RoutingCounts& counts;
    std::vector<i32> room = {};  // of each expert

    void run() {
        if (lossy.min_share > 0.0f) drop_weak();
        if (lossy.capacity_factor > 0.0f) limit_load();
    }

    void leave_out(i32 pair, i64& count) {
        chosen[pair] = -1;
        weights[pair] = 0.0f;
        ++count;
    }

    void drop_weak() {
        for (i32 row = 0; row < num_rows; ++row) {
            const i32 first = row * job.top_k, last = first + job.top_k;
            const float least = lossy.min_share * *std::max_element(weights + first, weights + last);
            for (i32 pair = first; pair < last; ++pair)
                if (weights[pair] < least) leave_out(pair, counts.weak);
        }
    }

    // Give each expert the choices of the largest weight, as many as it has room for, and the others to other experts.
    void limit_load() {
        const i32 pairs = num_rows * job.top_k;
        const double mean = static_cast<double>(pairs) / job.num_experts;
        const i32 capacity = std::max(MIN_EXPERT_CAPACITY, static_cast<i32>(std::ceil(lossy.capacity_factor * mean - 1e-6)));
        std::vector<i32> demand(job.num_experts, 0), order;
        for (i32 pair = 0; pair < pairs; ++pair) {
            if (chosen[pair] < 0) continue;
            ++demand[chosen[pair]];
            order.push_back(pair);
        }
        const i32 peak = *std::max_element(demand.begin(), demand.end());
        counts.capacity_use += 0.01 * (static_cast<double>(peak) / capacity - counts.capacity_use);
        if (peak <= capacity) return;
        const auto key = [this](i32 pair) { return weights[pair] == weights[pair] ? weights[pair] : 0.0f; };  // NaN has no order
        std::stable_sort(order.begin(), order.end(), [&](i32 a, i32 b) { return key(a) > key(b); });
        room.assign(job.num_experts, capacity);
        for (i32 pair : order) {
            i32& left = room[chosen[pair]];
            if (left > 0)
                --left;
            else
                move(pair);
        }
    }

    // Give a choice to the best expert that has room and that its row has not chosen.
    void move(i32 pair) {
        const i32 row = pair / job.top_k;
        const float* own = scores + static_cast<i64>(row) * job.num_experts;
        const i32 *begin = chosen + row * job.top_k, *end = begin + job.top_k;
        i32 best = -1;
        float best_score = 0.0f;
        for (i32 e = 0; e < job.num_experts; ++e) {
            if (room[e] == 0 || std::find(begin, end, e) != end) continue;
            const float score = job.correction == nullptr ? own[e] : own[e] + job.correction[e];
            if (best >= 0 && !(score > best_score)) continue;
            best = e;
            best_score = score;
        }
        if (best < 0) return leave_out(pair, counts.dropped);
        // The other weights of the row stay as they are: this one is in the proportion of its score.
        const float before = own[chosen[pair]];
        weights[pair] *= job.has_logits() ? std::exp(own[best] - before) : before > 0.0f ? own[best] / before : 0.0f;
        chosen[pair] = best;
        --room[best];
        ++counts.moved;
    }
};

}  // namespace quire
