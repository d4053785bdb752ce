// A mixture of experts within a step: rows are sent to the experts that the router chooses, and their outputs are summed.
#pragma once
#include <string.h>

#include <algorithm>
#include <cmath>

#include "step_rows.h"

namespace quire {

struct StepExperts : StepRows {
    // Sort the (row, choice) pairs by expert, rows in order: expert e has places [expert_start_[e], expert_start_[e + 1]).
    void group_by_expert(const PlanLayer& l) const {
        const i32 num_experts = static_cast<i32>(l.experts.size()), pairs = num_rows * l.top_k;
        i32* start = plan.expert_start_;
        memset(start, 0, sizeof(i32) * (num_experts + 1));
        for (i32 i = 0; i < pairs; ++i) ++start[plan.chosen_[i] + 1];
        for (i32 e = 0; e < num_experts; ++e) start[e + 1] += start[e];
        for (i32 i = 0; i < pairs; ++i) {
            const i32 place = start[plan.chosen_[i]]++;
            plan.pair_row_[place] = i / l.top_k;
            plan.pair_of_[i] = place;
            plan.pair_weight_[place] = plan.route_weights_[i];
        }
        memmove(start + 1, start, sizeof(i32) * num_experts);
        start[0] = 0;
    }

    i32 expert_at(const PlanLayer& l, i64 place) const {
        const i32 *begin = plan.expert_start_, *end = begin + l.experts.size() + 1;
        return static_cast<i32>(std::upper_bound(begin, end, static_cast<i32>(place)) - begin) - 1;
    }

    Packed expert_input(const InputForm& form, i32 expert) const {
        const i64 first = plan.expert_start_[expert], words = steps_of(form.kind, form.k), groups = groups_of(form.k, form.group);
        return packed_at(form, plan.expert_start_[expert + 1] - static_cast<i32>(first), first * words, first * groups);
    }

    // Pack row values(place) of every pair into its expert's input, then run one linear layer per expert.
    template <class Values, class Make>
    void run_experts(const PlanLayer& l, const InputForm& form, Values values, Make make) {
        each(static_cast<i64>(num_rows) * l.top_k, [&](i64 place) {
            const i32 e = expert_at(l, place);
            kernels.linear->pack_row(expert_input(form, e), static_cast<i32>(place) - plan.expert_start_[e], values(place), 0, form.k);
        });
        const i32 num_experts = static_cast<i32>(l.experts.size());
        if (worker.rank == 0) {
            for (i32 e = 0; e < num_experts; ++e) {
                plan.packs_[e] = expert_input(form, e);
                plan.jobs_[e] = make(l.experts[e], plan.packs_[e], static_cast<i64>(plan.expert_start_[e]));
            }
        }
        barrier(worker);
        run(plan.jobs_.data(), num_experts);
    }

    // The shared expert, into shared_out_, and the logits of its factors into shared_scales_.
    void shared_expert(const PlanLayer& l) {
        const i64 inner = row_stride(l.total_shared_inner);
        float* const own = plan.inner_ + l.first_shared_inner;
        if (l.shared_scale) {
            const Packed input = packed(l.mlp_site, l.shared_scale_form, num_rows);
            const LinearJob scale = job(*l.shared_scale, input, Finish::store, plan.shared_scales_, 1);
            run(&scale, 1);
        }
        const Packed up_input = packed(l.mlp_site, l.shared_up_form, num_rows), gate_input = packed(l.mlp_site, l.shared_gate_form, num_rows);
        const bool is_joint = l.shared_gate_form == l.shared_up_form && are_alike(l.shared_gate->weight, l.shared_up->weight);
        LinearJob gate = job(*l.shared_gate, gate_input, is_joint ? Finish::gate : Finish::activate, own, inner);
        gate.second = is_joint ? &l.shared_up->weight : nullptr;
        gate.activation = l.activation;
        run(&gate, 1);
        if (!is_joint) {
            const LinearJob up = job(*l.shared_up, up_input, Finish::multiply, own, inner);
            run(&up, 1);
        }
        wrote(own, num_rows, inner, l.shared_up->weight.n);
        rank_barrier();
        pack_all(l.shared_site, plan.inner_, inner);
        const Packed down_input = packed(l.shared_site, 0, num_rows);
        const LinearJob down = job(*l.shared_down, down_input, Finish::store, plan.shared_out_ + l.first_output, hidden_stride());
        run(&down, 1);
        wrote(plan.shared_out_ + l.first_output, num_rows, hidden_stride(), l.shared_down->weight.n);
        rank_barrier();  // the experts also write to inner_
    }

    void mixture(const PlanLayer& l) {
        const i32 num_experts = static_cast<i32>(l.experts.size());
        const i64 hidden = hidden_stride(), inner = row_stride(l.total_inner);
        const Packed router_input = packed(l.mlp_site, l.router_form, num_rows);
        const LinearJob router = job(*l.router, router_input, Finish::store, plan.route_logits_, num_experts);
        run(&router, 1);
        if (l.shared_up) shared_expert(l);
        const RouteJob route = l.routing.of(num_experts, l.top_k, l.is_renormalized);
        each(num_rows, [&](i64 row) {
            kernels.elementwise->route(route, plan.route_logits_ + row * num_experts, plan.chosen_ + row * l.top_k, plan.route_weights_ + row * l.top_k);
        });
        if (worker.rank == 0) group_by_expert(l);
        barrier(worker);
        run_experts(
            l, l.expert_site.forms[0], [&](i64 place) { return expert_row(l, place); },
            [&](const Expert& expert, const Packed& input, i64 first) {
                LinearJob j = job(*expert.gate, input, Finish::gate, plan.inner_ + first * inner + l.first_inner, inner);
                j.second = &expert.up->weight;
                j.activation = l.activation;
                j.limit = l.gate_limit;
                j.slope = l.gate_slope;
                return j;
            });
        const i64 pairs = static_cast<i64>(num_rows) * l.top_k;
        wrote(plan.inner_ + l.first_inner, pairs, inner, l.experts[0].up->weight.n);
        rank_barrier();
        run_experts(
            l, l.down_site.forms[0], [&](i64 place) { return plan.inner_ + place * inner; },
            [&](const Expert& expert, const Packed& input, i64 first) {
                return job(*expert.down, input, Finish::store, plan.pair_out_ + first * hidden + l.first_output, hidden);
            });
        wrote(plan.pair_out_ + l.first_output, pairs, hidden, l.experts[0].down->weight.n);
        rank_barrier();
        each(num_rows, [&](i64 row) { add_experts(l, row); });
    }

    // The input of a pair's expert.
    const float* expert_row(const PlanLayer& l, i64 place) const {
        const float* row = plan.normed_ + static_cast<i64>(plan.pair_row_[place]) * hidden_stride();
        if (!l.weighs_inputs) return row;
        float* const weighed = own_row();
        memcpy(weighed, row, sizeof(float) * plan.hidden_);
        kernels.elementwise->scale_and_cap(weighed, plan.hidden_, plan.pair_weight_[place], 0.0f);
        return weighed;
    }

    // The weighted sum of a row's experts, in the order in which they were chosen, joins the residual.
    void add_experts(const PlanLayer& l, i64 row) const {
        float* sum = own_row();
        memset(sum, 0, sizeof(float) * plan.hidden_);
        for (i64 at = row * l.top_k; at < (row + 1) * l.top_k; ++at)
            kernels.elementwise->add_scaled(sum, plan.pair_out_ + plan.pair_of_[at] * hidden_stride(), l.weighs_inputs ? 1.0f : plan.route_weights_[at], plan.hidden_);
        if (l.shared_up) {
            const float factor = l.shared_scale ? 1.0f / (1.0f + std::exp(-plan.shared_scales_[row])) : 1.0f;
            kernels.elementwise->add_scaled(sum, plan.shared_out_ + row * hidden_stride(), factor, plan.hidden_);
        }
        if (l.mlp_out.is_present) kernels.elementwise->norm(l.mlp_out.job, sum, sum);
        kernels.elementwise->add_scaled(x(row), sum, l.residual_scale, plan.hidden_);
    }
};

}  // namespace quire
