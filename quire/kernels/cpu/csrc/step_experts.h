// A mixture of experts within a step: rows are sent to the experts that the router chooses, and their outputs are summed.
#pragma once
#include <string.h>

#include <algorithm>
#include <cmath>

#include "step_context.h"

namespace quire {

struct StepExperts : StepContext {
    // The modules that read the input of the block after attention.
    static LoraModules mlp_modules(const PlanLayer& l) {
        LoraModules found = own_mlp_modules(l);
        if (l.latent_in) found.modules[found.count++] = LoraModule::latent_in;
        return found;
    }
    static LoraModules own_mlp_modules(const PlanLayer& l) {
        if (l.router && l.shared_scale)
            return {l.index, {LoraModule::router, LoraModule::shared_gate, LoraModule::shared_up, LoraModule::shared_scale}};
        if (l.router && l.shared_up) return {l.index, {LoraModule::router, LoraModule::shared_gate, LoraModule::shared_up}};
        if (l.router) return {l.index, {LoraModule::router}};
        return {l.index, {LoraModule::gate, LoraModule::up}};
    }

    // Sort the (row, choice) pairs by expert, rows in order: expert e has places [expert_start_[e], expert_start_[e + 1]).
    void group_by_expert(const PlanLayer& l) const {
        const i32 num_experts = static_cast<i32>(l.experts.size()), pairs = num_rows * l.top_k;
        i32* start = plan.expert_start_;
        memset(start, 0, sizeof(i32) * (num_experts + 1));
        for (i32 i = 0; i < pairs; ++i)
            if (plan.chosen_[i] >= 0) ++start[plan.chosen_[i] + 1];
        for (i32 e = 0; e < num_experts; ++e) start[e + 1] += start[e];
        for (i32 i = 0; i < pairs; ++i) {
            plan.pair_of_[i] = -1;
            if (plan.chosen_[i] < 0) continue;  // left out, see lossy_routing.h
            const i32 place = start[plan.chosen_[i]]++;
            plan.pair_row_[place] = i / l.top_k;
            plan.pair_of_[i] = place;
            if (!l.expert_scale.empty()) plan.route_weights_[i] *= l.expert_scale[plan.chosen_[i]];
            plan.pair_weight_[place] = plan.route_weights_[i];
        }
        memmove(start + 1, start, sizeof(i32) * num_experts);
        start[0] = 0;
        for (i32 e = 0; e < num_experts; ++e) plan.expert_tokens_[l.index][e] += start[e + 1] - start[e];
        if (plan.lossy_.bias_rate > 0.0f) adapt_bias(l);
        find_own_places(l);
    }

    // Lower the selection scores of experts with more tokens than the mean, and raise the others'.
    void adapt_bias(const PlanLayer& l) const {
        const LossyRouting& lossy = plan.lossy_;
        const i32 num_experts = static_cast<i32>(l.experts.size());
        std::vector<float>& corrections = plan.corrections_[l.index];
        const float mean = static_cast<float>(plan.expert_start_[num_experts]) / static_cast<float>(num_experts);
        for (i32 e = 0; e < num_experts; ++e) {
            const float base = l.routing.correction.empty() ? 0.0f : l.routing.correction[e];
            const float count = static_cast<float>(plan.expert_start_[e + 1] - plan.expert_start_[e]);
            const float step = count > mean ? -lossy.bias_rate : count < mean ? lossy.bias_rate : 0.0f;
            corrections[e] = base + std::clamp(corrections[e] - base + step, -lossy.bias_limit, lossy.bias_limit);
        }
    }

    // How the layer's experts are chosen in this step.
    RouteJob route_job(const PlanLayer& l) const {
        RouteJob job = l.routing.of(static_cast<i32>(l.experts.size()), l.top_k, l.is_renormalized);
        if (plan.lossy_.bias_rate > 0.0f) job.correction = plan.corrections_[l.index].data();
        return job;
    }

    // List what this rank computes: all places of its experts. Those of an expert that several ranks hold are divided among
    // these, by the choices and positions of the step only, so that all ranks divide alike.
    void find_own_places(const PlanLayer& l) const {
        plan.num_own_experts_ = plan.num_own_places_ = 0;
        for (i32 e = 0; e < static_cast<i32>(l.experts.size()); ++e) {
            i32 first = plan.expert_start_[e], last = plan.expert_start_[e + 1];
            if (!l.expert_copies.empty()) {
                const i32 copy = l.own_copies[e];
                if (copy < 0) continue;
                const i64 copies = l.expert_copies[e], count = last - first;
                // The remainder goes to other copies at other positions: single tokens take turns.
                const i64 turn = count > 0 ? in.positions[plan.pair_row_[first]] % copies : 0;
                last = first + static_cast<i32>(copy + 1 == copies ? count : (count * (copy + 1) + turn) / copies);
                first += static_cast<i32>(copy == 0 ? 0 : (count * copy + turn) / copies);
            }
            const i32 at = plan.num_own_experts_++;
            plan.own_experts_[at] = e;
            plan.own_first_[at] = first;
            plan.own_count_[at] = last - first;
            for (i32 place = first; place < last; ++place) plan.own_places_[plan.num_own_places_++] = place;
        }
    }

    // The index of the rank's own expert that has a place.
    i32 own_expert_at(i32 place) const {
        const i32 *begin = plan.own_first_, *end = begin + plan.num_own_experts_;
        return static_cast<i32>(std::upper_bound(begin, end, place) - begin) - 1;
    }

    // The input of the rank's own expert `at`.
    Packed expert_input(const InputForm& form, i32 at) const {
        const i64 first = plan.own_first_[at], words = steps_of(form.kind, form.k), groups = groups_of(form.k, form.group);
        return packed_at(form, plan.own_count_[at], first * words, first * groups);
    }

    // Pack row values(place) of every pair of this rank into its expert's input, then run one linear layer per expert: the
    // modules [first_module, first_module + num_modules).
    template <class Values, class Make> void run_experts(
        const PlanLayer& l, const InputForm& form, ExpertModule first_module, i32 num_modules, Values values, Make make) {
        const i32 num_own = plan.num_own_experts_, first = static_cast<i32>(first_module);
        const i64 num_products = lora.num_expert_items(num_modules);
        each(num_products + plan.num_own_places_, [&](i64 i) {
            const i64 item = i - num_products;
            if (item < 0)
                return lora.shrink_expert(*kernels.linear, i, l.index, plan.own_experts_, {first, num_modules},
                    l.weighs_inputs ? 1 : MAX_LORA_ROWS, values);
            const i32 place = plan.own_places_[item], at = own_expert_at(place);
            kernels.linear->pack_row(expert_input(form, at), place - plan.own_first_[at], values(place), 0, form.k);
        });
        if (worker.rank == 0) {
            for (i32 at = 0; at < num_own; ++at) {
                plan.packs_[at] = expert_input(form, at);
                plan.jobs_[at] = make(l.experts[plan.own_experts_[at]], plan.packs_[at], static_cast<i64>(plan.own_first_[at]));
                plan.jobs_[at].low_rank = lora.expert_sum(at, first);
                if (num_modules == 2) plan.jobs_[at].second_low_rank = lora.expert_sum(at, first + 1);
            }
        }
        barrier(worker);
        run(plan.jobs_.data(), num_own);
    }

    // The shared expert, into shared_out_, and the logits of its factors into shared_scales_.
    void shared_expert(const PlanLayer& l) {
        const i64 inner = row_stride(l.total_shared_inner);
        float* const own = plan.inner_ + l.first_shared_inner;
        const LoraSums sums(lora, mlp_modules(l));
        if (l.shared_scale) {
            const Packed input = packed(l.mlp_site, l.shared_scale_form, num_rows);
            const LinearJob scale = adapted(job(*l.shared_scale, input, Finish::store, plan.shared_scales_, 1), sums[3]);
            run(&scale, 1);
        }
        const Packed up_input = packed(l.mlp_site, l.shared_up_form, num_rows),
                     gate_input = packed(l.mlp_site, l.shared_gate_form, num_rows);
        const bool is_joint =
            l.shared_gate && l.shared_gate_form == l.shared_up_form && are_alike(l.shared_gate->weight, l.shared_up->weight);
        LinearJob gate = adapted(job(l.shared_gate ? *l.shared_gate : *l.shared_up, l.shared_gate ? gate_input : up_input,
                                     is_joint ? Finish::gate : Finish::activate, own, inner),
            sums[l.shared_gate ? 1 : 2]);
        gate.second = is_joint ? &l.shared_up->weight : nullptr;
        gate.second_low_rank = is_joint ? sums[2] : nullptr;
        gate.activation = l.activation;
        run(&gate, 1);
        if (l.shared_gate && !is_joint) {
            const LinearJob up = adapted(job(*l.shared_up, up_input, Finish::multiply, own, inner), sums[2]);
            run(&up, 1);
        }
        wrote(own, num_rows, inner, l.shared_up->weight.n);
        rank_barrier();
        const LoraModules read = {l.index, {LoraModule::shared_down}};
        pack_all(l.shared_site, plan.inner_, inner, read);
        store_shared(l, *l.shared_down, packed(l.shared_site, 0, num_rows), LoraSums(lora, read), plan.shared_out_);
        // All ranks are here: the experts also write to inner_.
    }

    // Compute the logits of all experts. Those of a branch read other rows than the shared expert, which has read its own before.
    void ask_router(const PlanLayer& l) {
        const LoraModules own = {l.index, {LoraModule::router}};
        if (l.has_branch()) {
            each(num_rows, [&](i64 row) { norm_row(l.branch.router_in, row, plan.normed_ + row * hidden_stride()); });
            pack_all(l.router_site, plan.normed_, hidden_stride(), own);
        }
        const Packed input = packed(l.has_branch() ? l.router_site : l.mlp_site, l.router_form, num_rows);
        const LoraSums sums(lora, l.has_branch() ? own : mlp_modules(l));
        const LinearJob router =
            adapted(job(*l.router, input, Finish::store, plan.route_logits_, static_cast<i32>(l.experts.size())), sums[0]);
        run(&router, 1);
        if (l.has_branch())
            each(num_rows, [&](i64 row) { norm_row(l.branch.experts_in, row, plan.normed_ + row * hidden_stride()); });
    }

    void mixture(const PlanLayer& l) {
        const i32 num_experts = static_cast<i32>(l.experts.size());
        const i64 apart = row_stride(plan.pair_size_), inner = row_stride(l.total_inner),
                  width = l.latent_in ? l.latent_in->weight.n : plan.hidden_;
        if (l.has_branch()) shared_expert(l);
        ask_router(l);
        if (l.latent_in) enter_latent(l);
        if (l.shared_up && !l.has_branch()) shared_expert(l);
        const RouteJob route = route_job(l);
        each(num_rows, [&](i64 row) {
            kernels.elementwise->route(
                route, plan.route_logits_ + row * num_experts, plan.chosen_ + row * l.top_k, plan.route_weights_ + row * l.top_k);
        });
        if (worker.rank == 0) {
            if (plan.lossy_.is_on())
                ChoiceLimiter{route, plan.lossy_, num_rows, plan.route_logits_, plan.chosen_, plan.route_weights_,
                    plan.routing_counts_[l.index]}
                    .run();
            group_by_expert(l);
            if (plan.lora_.adapts_experts && lora.has_rows())
                plan.lora_.group_places(l.index, *lora.lora, plan.pair_row_, num_rows * l.top_k, plan.num_own_experts_,
                    plan.own_experts_, plan.own_first_, plan.own_count_);
            else if (plan.lora_.adapts_experts)
                plan.lora_.places.clear(0);  // those of the layer before: no row that is left has an adapter
        }
        barrier(worker);
        run_experts(
            l, l.expert_site.forms[0], l.is_expert_gated ? ExpertModule::gate : ExpertModule::up, l.is_expert_gated ? 2 : 1,
            [&](i64 place) { return expert_row(l, place); },
            [&](const Expert& expert, const Packed& input, i64 first) {
                LinearJob j = job(expert.gate ? *expert.gate : *expert.up, input, expert.gate ? Finish::gate : Finish::activate,
                    plan.inner_ + first * inner + l.first_inner, inner);
                j.second = expert.gate ? &expert.up->weight : nullptr;
                j.activation = l.activation;
                j.limit = l.gate_limit;
                j.slope = l.gate_slope;
                return j;
            });
        const i64 pairs = static_cast<i64>(num_rows) * l.top_k;
        // by outputs; otherwise a rank has whole experts, whose inner values it alone reads
        const bool is_sharded = l.expert_copies.empty();
        if (is_sharded) {
            wrote(plan.inner_ + l.first_inner, pairs, inner, l.experts[0].up->weight.n);
            rank_barrier();
        }
        const i64 first_output = is_sharded ? l.first_expert_output : 0;
        run_experts(
            l, l.down_site.forms[0], ExpertModule::down, 1, [&](i64 place) { return plan.inner_ + place * inner; },
            [&](const Expert& expert, const Packed& input, i64 first) {
                return job(*expert.down, input, Finish::store, plan.pair_out_ + first * apart + first_output, apart);
            });
        if (is_sharded) {
            wrote(plan.pair_out_ + first_output, pairs, apart, l.experts[0].down->weight.n);
        } else {
            for (i32 at = 0; at < plan.num_own_experts_; ++at)
                wrote(plan.pair_out_ + plan.own_first_[at] * apart, plan.own_count_[at], apart, width);
        }
        rank_barrier();
        if (l.latent_in) leave_latent_experts(l);
        each(num_rows, [&](i64 row) { add_experts(l, row); });
    }

    float* expert_latent(i64 row) const { return plan.expert_latents_ + row * row_stride(plan.expert_latent_size_); }

    // Project what the experts read.
    void enter_latent(const PlanLayer& l) {
        const Packed input = packed(l.mlp_site, l.latent_in_form, num_rows);
        const LoraModules read = mlp_modules(l);
        const LoraSums sums(lora, read);
        const LinearJob in =
            adapted(job(*l.latent_in, input, Finish::store, plan.expert_latents_, row_stride(plan.expert_latent_size_)),
                sums[read.count - 1]);
        run(&in, 1);
    }

    // Project the sum of the experts of every row back, into extra_.
    void leave_latent_experts(const PlanLayer& l) {
        const i64 stride = row_stride(plan.expert_latent_size_);
        each(num_rows, [&](i64 row) { sum_experts(l, row, expert_latent(row), l.latent_in->weight.n); });
        const LoraModules read = {l.index, {LoraModule::latent_out}};
        pack_all(l.latent_site, plan.expert_latents_, stride, read);
        store_shared(l, *l.latent_out, packed(l.latent_site, 0, num_rows), LoraSums(lora, read), plan.extra_);
    }

    // The input of a pair's expert.
    const float* expert_row(const PlanLayer& l, i64 place) const {
        const i64 own = plan.pair_row_[place], width = l.latent_in ? l.latent_in->weight.n : plan.hidden_;
        const float* row = l.latent_in ? expert_latent(own) : plan.normed_ + own * hidden_stride();
        if (!l.weighs_inputs) return row;
        float* const weighed = own_row();
        memcpy(weighed, row, sizeof(float) * width);
        kernels.elementwise->scale_and_cap(weighed, width, plan.pair_weight_[place], 0.0f);
        return weighed;
    }

    // The weighted sum of a row's experts, in the order in which they were chosen.
    void sum_experts(const PlanLayer& l, i64 row, float* sum, i64 width) const {
        memset(sum, 0, sizeof(float) * width);
        for (i64 at = row * l.top_k; at < (row + 1) * l.top_k; ++at) {
            if (plan.pair_of_[at] < 0) continue;
            kernels.elementwise->add_scaled(sum, plan.pair_out_ + plan.pair_of_[at] * row_stride(plan.pair_size_),
                l.weighs_inputs ? 1.0f : plan.route_weights_[at], width);
        }
    }

    // What a row's experts give joins the residual.
    void add_experts(const PlanLayer& l, i64 row) const {
        float* sum = own_row();
        if (l.latent_in)
            memcpy(sum, extra(row), sizeof(float) * plan.hidden_);
        else
            sum_experts(l, row, sum, plan.hidden_);
        if (l.has_branch()) {
            float* const shared = plan.normed_ + row * hidden_stride();
            kernels.elementwise->norm(l.branch.experts_out.job, sum, sum);
            kernels.elementwise->norm(l.branch.shared_out.job, plan.shared_out_ + row * hidden_stride(), shared);
            kernels.elementwise->add_scaled(sum, shared, 1.0f, plan.hidden_);
        } else if (l.shared_up) {
            const float factor = l.shared_scale ? 1.0f / (1.0f + std::exp(-plan.shared_scales_[row])) : 1.0f;
            kernels.elementwise->add_scaled(sum, plan.shared_out_ + row * hidden_stride(), factor, plan.hidden_);
        }
        if (l.mlp_out.is_present) kernels.elementwise->norm(l.mlp_out.job, sum, sum);
        kernels.elementwise->add_scaled(x(row), sum, l.last_scale(), plan.hidden_);
        if (!l.per_layer_gate && l.output_scale != 1.0f)
            kernels.elementwise->scale_and_cap(x(row), plan.hidden_, l.output_scale, 0.0f);
    }
};

}  // namespace quire
