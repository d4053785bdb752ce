// Runs a plan: every thread of the team executes all layers, with barriers where results of other threads are needed.
#include <string.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <stdexcept>

#include "step_block.h"

namespace quire {

namespace {

// Tokens of a step whose cache slots are prefetched: their lines should stay in the CPU caches until they are written.
constexpr i32 MAX_FETCHED_TOKENS = 64;

}  // namespace

// One thread's execution of a step. All threads execute the same code; shared data is in the plan.
struct Stepper : StepBlock {
    // A result in extra_ that has still to join the residual (norm null: none), and the factors on it and on the residual after that.
    struct Waiting {
        const Norm* norm = nullptr;
        float scale = 1.0f, output_scale = 1.0f;
    };


    // Prefetch the cache lines that a new token is written to, of some heads, as there are many.
    void fetch_cache(const PlanLayer& l, i64 row, i32 first_head, i32 num_heads) const {
        const KvFormat key = key_format(l.kv.format), value = value_format(l.kv.format);
        const i64 run = RUN * static_cast<i64>(l.head_dim), slot = slots_of(l)[row];
        for (i32 head = first_head; head < first_head + num_heads; ++head) {
            const i64 at = run_element(l.kv, slot / l.kv.block_size, head, static_cast<i32>(slot % l.kv.block_size));
            const u8* const keys = static_cast<const u8*>(l.kv.keys) + bytes_of(key, at);
            const u8* const values = static_cast<const u8*>(l.kv.values) + bytes_of(value, at);
            for (i64 line = 0; line < bytes_of(key, run); line += 64) __builtin_prefetch(keys + line, 1, 2);
            for (i64 line = 0; line < bytes_of(value, run); line += 64) __builtin_prefetch(values + line, 1, 2);
        }
    }

    void project(const PlanLayer& l, bool has_few) {
        const i32 q_size = l.num_heads * l.head_dim, kv_size = l.num_kv_heads * l.head_dim;
        const i64 width = row_stride(qkv_size(l));
        if (!l.k) return ask(l, has_few);
        const Packed q = packed(l.attn_site, l.q_form, num_rows), k = packed(l.attn_site, l.k_form, num_rows), v = packed(l.attn_site, l.v_form, num_rows);
        const LoraSums sums(lora, attention_modules(l, has_few));
        LinearJob jobs[4] = {adapted(job(*l.k, k, Finish::store, plan.qkv_ + q_size, width), sums[0]),
                             adapted(job(*l.v, v, Finish::store, plan.qkv_ + q_size + kv_size, width), sums[1]),
                             adapted(job(*l.q, q, Finish::store, plan.qkv_, width), sums[2])};
        const Packed gate = packed(l.attn_site, l.attn_gate_form, num_rows);
        if (l.attn_gate) jobs[3] = adapted(gate_job(l, gate), sums[3]);
        run(jobs, has_few ? 2 : l.attn_gate ? 4 : 3);
        if (has_few) ask(l, true);
        if (l.has_block() && l.block.q.in) adapt_heads(l, sums);
    }

    // Make the queries; has_few: of rows that are wanted only.
    void ask(const PlanLayer& l, bool has_few) {
        if (has_few) pack_wanted_rows(l);
        if (num_rows == 0) return;
        const Packed input = packed(l.attn_site, l.q_form, num_rows);
        const LoraSums sums(lora, query_modules(l));
        LinearJob jobs[2] = {adapted(job(*l.q, input, Finish::store, plan.qkv_, row_stride(qkv_size(l))), sums[0])};
        const Packed gate = packed(l.attn_site, l.attn_gate_form, num_rows);
        if (l.attn_gate) jobs[1] = adapted(gate_job(l, gate), sums[1]);
        run(jobs, l.attn_gate ? 2 : 1);
    }

    LinearJob gate_job(const PlanLayer& l, const Packed& input) const {
        return job(*l.attn_gate, input, Finish::store, plan.gate_rows_, row_stride(plan.gate_size_));
    }

    void pack_wanted_rows(const PlanLayer& l) {
        // Keys and values of all rows, and questions of those that are wanted, which go on alone.
        const bool is_beside = plan.entry_ == Entry::beside;  // its input is twice as wide, and at most half of the rows are wanted
        float* const input = is_beside ? plan.beside_ : plan.normed_;
        const i64 input_stride = is_beside ? row_stride(plan.beside_size_) : hidden_stride();
        keep_wanted_rows(input, input, is_beside ? plan.normed_ : free_rows(), input_stride);
        if (num_rows > 0) pack_all(l.attn_site, input, input_stride, query_modules(l));
    }

    void rotate_and_store(const PlanLayer& l, bool has_few) {
        const i32 q_size = l.num_heads * l.head_dim, kv_size = l.num_kv_heads * l.head_dim;
        const bool is_whole = l.q_norm.is_present && l.is_qk_norm_whole;
        if (l.clip > 0.0f) clip_heads(l);
        if (is_whole && plan.shards_heads()) {
            norm_whole_heads(l);
        } else if (is_whole) {
            each(in.batch.num_tokens, [&](i64 row) {
                float* q = plan.qkv_ + row * row_stride(qkv_size(l));
                if (row < num_rows) kernels.elementwise->norm(l.q_norm.job, q, q);
                if (l.k) kernels.elementwise->norm(l.k_norm.job, q + q_size, q + q_size);
            });
        }
        // With too few rows for all threads, the work is divided by heads.
        const i32 parts = in.batch.num_tokens < 4 * worker.size ? l.num_kv_heads : 1;
        const i32 kv_heads = l.num_kv_heads / parts, heads = l.num_heads / parts;
        each(static_cast<i64>(l.k ? in.batch.num_tokens : num_rows) * parts, [&](i64 item) {
            const i64 row = item / parts;
            const i32 part = static_cast<i32>(item % parts);
            if (l.k && in.batch.num_tokens <= MAX_FETCHED_TOKENS && !plan.has_context()) fetch_cache(l, row, part * kv_heads, kv_heads);
            float* q = plan.qkv_ + row * row_stride(qkv_size(l)) + part * heads * l.head_dim;
            float* key = plan.qkv_ + row * row_stride(qkv_size(l)) + q_size + part * kv_heads * l.head_dim;
            if (row < num_rows) {
                const i64 position = in.positions[has_few ? in.wanted_rows[row] : row];
                turn_heads(l, {&l.q_norm, !is_whole, l.first_head + part * heads}, q, heads, position);
                scale_queries(l, q, heads, position);
            }
            if (!l.k) return;
            if (l.v_norm.is_present) kernels.elementwise->turn_heads(&l.v_norm.job, key + kv_size, kv_heads, l.head_dim, nullptr, nullptr, 0);
            turn_heads(l, {&l.k_norm, !is_whole, l.first_kv_head + part * kv_heads}, key, kv_heads, in.positions[row]);
            const float* const given = plan.qkv_ + row * row_stride(qkv_size(l)) + q_size + kv_size + part * kv_heads * l.value_size();
            store(l, row, part * kv_heads, kv_heads, key, l.has_plain_values() ? given : spread_values(l, given, kv_heads));
        });
        if (l.k) finish_stores(l);
    }

    // Return, in this thread's row, the values of consecutive heads as the cache has them: scaled, with zeros after smaller ones.
    const float* spread_values(const PlanLayer& l, const float* given, i32 count) const {
        float* const rows = own_row();
        memset(rows, 0, sizeof(float) * count * l.head_dim);
        for (i32 head = 0; head < count; ++head)
            for (i32 d = 0; d < l.value_size(); ++d) rows[head * l.head_dim + d] = given[head * l.value_size() + d] * l.value_scale;
        return rows;
    }

    // Norm q and k of all ranks' heads together; each rank takes its own of the result.
    void norm_whole_heads(const PlanLayer& l) {
        const i64 dim = l.head_dim, q_size = l.num_heads * dim, kv_size = l.num_kv_heads * dim, total_q = l.total_heads * dim;
        const i64 width = row_stride(plan.whole_qk_size_);
        const auto whole_q = [&](i64 row) { return plan.whole_qk_ + row * width; };
        each(in.batch.num_tokens, [&](i64 row) {
            const float* own = plan.qkv_ + row * row_stride(qkv_size(l));
            if (row < num_rows) memcpy(whole_q(row) + l.first_head * dim, own, sizeof(float) * q_size);
            memcpy(whole_q(row) + total_q + l.first_kv_head * dim, own + q_size, sizeof(float) * kv_size);
        });
        wrote(whole_q(0) + l.first_head * dim, num_rows, width, q_size);
        wrote(whole_q(0) + total_q + l.first_kv_head * dim, in.batch.num_tokens, width, kv_size);
        rank_barrier();
        each(in.batch.num_tokens, [&](i64 row) {
            float* const own = plan.qkv_ + row * row_stride(qkv_size(l));
            if (row < num_rows) {
                kernels.elementwise->norm(l.q_norm.job, whole_q(row), own_row());
                memcpy(own, own_row() + l.first_head * dim, sizeof(float) * q_size);
            }
            kernels.elementwise->norm(l.k_norm.job, whole_q(row) + total_q, own_row());
            memcpy(own + q_size, own_row() + l.first_kv_head * dim, sizeof(float) * kv_size);
        });
    }

    void clip_heads(const PlanLayer& l) {
        const i64 q_size = static_cast<i64>(l.num_heads) * l.head_dim;
        each(in.batch.num_tokens, [&](i64 row) {
            float* const values = plan.qkv_ + row * row_stride(qkv_size(l));
            // NaN is kept: no comparison with it is true.
            for (i64 i = row < num_rows ? 0 : q_size; i < qkv_size(l); ++i) {
                if (values[i] > l.clip) values[i] = l.clip;
                if (values[i] < -l.clip) values[i] = -l.clip;
            }
        });
    }

    // The norm of consecutive heads, of which `first` is the first one's index in the whole layer.
    struct HeadNorm {
        const Norm* norm;
        bool is_used;
        i32 first;
    };

    // Norm (if heads have norms) and rotate consecutive heads.
    void turn_heads(const PlanLayer& l, const HeadNorm& norm, float* heads, i32 count, i64 position) const {
        const ElementwiseTable& table = *kernels.elementwise;
        const NormJob* const job = norm.norm->is_present && norm.is_used ? &norm.norm->job : nullptr;
        const Plan::Angles none, &a = l.rope < 0 ? none : plan.angles_[l.rope];
        const float *const cosine = a.cosine + position * a.half, *const sine = a.sine + position * a.half;
        if (job == nullptr || (!l.is_qk_norm_each && !l.is_qk_norm_last)) return table.turn_heads(job, heads, count, l.head_dim, cosine, sine, a.half);
        if (l.is_qk_norm_last) table.turn_heads(nullptr, heads, count, l.head_dim, cosine, sine, a.half);
        for (i32 head = 0; head < count; ++head, heads += l.head_dim) {
            NormJob own = *job;
            const i64 offset = l.is_qk_norm_each ? static_cast<i64>(norm.first + head) * l.head_dim : 0;
            own.weight += offset;
            if (own.bias != nullptr) own.bias += offset;
            table.turn_heads(&own, heads, 1, l.head_dim, cosine, sine, l.is_qk_norm_last ? 0 : a.half);
        }
    }

    // See QueryScaling.
    void scale_queries(const PlanLayer& l, float* heads, i32 count, i64 position) const {
        const i64 steps = (position + l.query_offset) / l.query_max;
        if (l.query_beta == 0.0f || steps == 0) return;
        const float factor = 1.0f + l.query_beta * std::log1p(static_cast<float>(steps));
        kernels.elementwise->scale_and_cap(heads, static_cast<i64>(count) * l.head_dim, factor, 0.0f);
    }

    void attend(const PlanLayer& l, const Batch& batch) {
        AttentionJob a;
        a.kv = l.kv;
        a.num_heads = l.num_heads;
        a.scale = l.scale;
        a.window = l.window;
        a.softcap = l.softcap;
        a.sinks = l.sinks.empty() ? nullptr : l.sinks.data();
        a.slopes = l.slopes.empty() ? nullptr : l.slopes.data();
        a.value_dim = l.value_size();
        a.is_bf16 = plan.is_bf16_;
        if (value_format(l.kv.format) != KvFormat::r4) a.first_value = l.latent.rope;
        if (!plan.step_bounds_.empty() && l.window == 0) {
            a.bounds = plan.step_bounds_.data();
            a.layer = l.index;
            a.run_counts = plan.run_counts_;
        }
        a.q = plan.qkv_;
        a.q_stride = row_stride(qkv_size(l));
        a.out = plan.attended_ + l.first_head * l.value_size();
        a.out_stride = row_stride(l.total_heads * l.value_size());
        a.scratch = plan.attention_scratch_.data;
        if (plan.has_context()) {
            attend_shared(a, l, batch);
            return rank_barrier();
        }
        Batch own = batch;
        if (l.is_windowed) own.block_tables = in.window_tables;
        if (l.attends_chosen())
            attend_chosen(a, l);
        else
            kernels.attention->attend(worker, a, own);
        if (l.attn_gate) {
            each(num_rows, [&](i64 row) {
                float* const heads = a.out + row * a.out_stride;
                const float* const gates = plan.gate_rows_ + row * row_stride(plan.gate_size_);
                if (!l.has_head_gate) return kernels.elementwise->gate(heads, gates, l.num_heads * l.head_dim);
                for (i32 head = 0; head < l.num_heads; ++head) {
                    const float softplus = gates[head] > 20.0f ? gates[head] : std::log1p(std::exp(gates[head]));
                    kernels.elementwise->scale_and_cap(heads + head * l.head_dim, l.head_dim, softplus, 0.0f);
                }
            });
        }
        wrote(a.out, num_rows, a.out_stride, static_cast<i64>(l.num_heads) * l.value_size());
        rank_barrier();
    }

    // Rows as wide as x_ that are unused at the last attention; private to a rank.
    float* free_rows() const { return plan.is_sharded() ? plan.spare_ : plan.extra_; }

    // No later block mixes rows: the wanted rows of x_, and of `beside` if there are any, move to the front (of `target`) and continue without the
    // others.
    void keep_wanted_rows(const float* beside, float* target, float* free, i64 width) {
        if (worker.rank == 0) {
            const auto gather = [&](const float* values, float* to, float* between, i64 size) {
                for (i32 i = 0; i < in.num_wanted_rows; ++i) memcpy(between + i * size, values + in.wanted_rows[i] * size, sizeof(float) * size);
                if (to != between) memcpy(to, between, sizeof(float) * size * in.num_wanted_rows);
            };
            if (!is_home) gather(plan.x_, plan.x_, free_rows(), hidden_stride());
            if (beside != nullptr) gather(beside, target, free, width);
        }
        num_rows = in.num_wanted_rows;
        if (lora.lora != nullptr) lora.lora = &plan.lora_.wanted;
        barrier(worker);
    }

    // See Plan::copy_queries.
    void copy_queries(const PlanLayer& l) {
        const i64 count = static_cast<i64>(plan.query_rows_.size()), size = static_cast<i64>(l.num_heads) * l.head_dim;
        float* to = plan.queries_out_;
        for (const auto& layer : plan.layers_) {
            if (layer.get() == &l) break;
            to += count * layer->num_heads * layer->head_dim;
        }
        each(count, [&](i64 i) { memcpy(to + i * size, plan.qkv_ + plan.query_rows_[i] * row_stride(qkv_size(l)), sizeof(float) * size); });
    }

    // Whether the last layer has queries only of the rows that are wanted.
    bool has_few(const PlanLayer& l, bool is_last) const { return is_last && plan.has_last_ask_ && l.latent.rank == 0; }

    // Results of heads in rows of `total` values, `stride` apart; those of this rank are `count` of them, from `first` on.
    struct HeadRows {
        float* values;
        i64 stride, total, first, count;
    };

    // Attention up to its last linear layer, whose input is returned. num_rows may be 0 afterwards.
    HeadRows attend_heads(const PlanLayer& l, bool is_last) {
        const i64 size = l.value_size(), width = row_stride(l.total_heads * size);
        const bool is_latent = l.latent.rank > 0, has_few = this->has_few(l, is_last);
        if (is_latent) {
            project_latent(l, [&](float* heads, i64 position) { scale_queries(l, heads, l.num_heads, position); });
        } else {
            project(l, has_few);
            rotate_and_store(l, has_few);
            if (!plan.query_rows_.empty()) copy_queries(l);
        }
        // Even without rows, bounds of the new keys are written.
        if (num_rows > 0 || !plan.step_bounds_.empty()) attend(l, has_few ? plan.last_ask_ : in.batch);
        if (num_rows == 0) return {};
        float* attended = plan.attended_;
        if (is_last && !in.keeps_all && !has_few) {
            if (plan.is_sharded()) attended = plan.spare_;  // other ranks still read the shared rows
            keep_wanted_rows(plan.attended_, attended, plan.is_sharded() ? attended : plan.qkv_, width);
        }
        const i64 first = l.first_head, count = l.num_heads;
        if (!is_latent) return {attended, width, l.total_heads * size, first * size, count * size};
        leave_latent(l, attended + first * size, width);
        return {plan.answer_, row_stride(plan.answer_size_), l.total_heads * l.latent.value, first * l.latent.value, count * l.latent.value};
    }

    void attention(const PlanLayer& l, bool is_last) {
        const HeadRows heads = attend_heads(l, is_last);
        if (num_rows == 0) return;
        pack_all(l.o_site, heads.values, heads.stride, {l.index, {LoraModule::o}});
        const LoraSums sums(lora, {l.index, {LoraModule::o}});
        run_to_residual(l, *l.o, packed(l.o_site, l.o_form, num_rows), waiting_attention(l), sums[0], l.attention_scale());
    }

    // Attention of the rows of this rank's sequences up to its last linear layer. Of a Stepper of plan.home_input_, as the next one.
    HeadRows attend_at_home(const PlanLayer& l, bool is_last) {
        each(num_rows, [&](i64 row) { norm_row(l.attn_in, plan.divided_.rows[row], plan.normed_ + row * hidden_stride()); });
        pack_all(l.attn_site, plan.normed_, hidden_stride());
        return attend_heads(l, is_last);
    }

    // The last linear layer of attention, into home_out_.
    void leave_home(const PlanLayer& l, const HeadRows& heads) {
        pack_all(l.o_site, heads.values, heads.stride);
        const Packed input = packed(l.o_site, l.o_form, num_rows);
        const LinearJob last = job(*l.o, input, Finish::store, plan.home_out_, hidden_stride());
        run(&last, 1);
    }

    // Where a home is several ranks: exchange the results of their heads. places: of the rows among those of all homes.
    void share_heads(i64 count, const HeadRows& heads, const std::vector<i32>& places) {
        const auto shared = [&](i64 row) { return plan.home_rows_ + places[row] * row_stride(plan.home_row_size_); };
        each(count, [&](i64 row) { memcpy(shared(row) + heads.first, heads.values + row * heads.stride + heads.first, sizeof(float) * heads.count); });
        for (i64 row = 0; worker.rank == 0 && row < count; ++row) wrote(shared(row) + heads.first, 1, 0, heads.count);
        rank_barrier();
        each(count, [&](i64 row) { memcpy(heads.values + row * heads.stride, shared(row), sizeof(float) * heads.total); });
    }

    // Attention data parallelism: every home computes the attention of its own sequences, whose results then wait in extra_.
    void attention_of_homes(const PlanLayer& l, const PlanLayer* before, bool is_last) {
        const Norm* const waiting = before != nullptr ? waiting_last(*before) : nullptr;
        each(num_rows, [&](i64 row) {
            if (waiting != nullptr) add_result(*waiting, before->last_scale(), row, before->output_scale);
            keep_input(l.index, row);
        });
        if (before == nullptr || waiting != nullptr) rank_barrier();  // until then other ranks read extra_
        Stepper own = {plan, plan.home_input_, kernels, worker, plan.home_input_.batch.num_tokens, {lora.state, nullptr}, true};
        HeadRows heads = {};
        if (own.num_rows > 0) heads = own.attend_at_home(l, is_last);
        const bool has_wanted = is_last && !in.keeps_all;
        const std::vector<i32>& places = has_wanted ? plan.divided_.wanted_places : plan.divided_.rows;
        if (plan.group_.home_size > 1) share_heads(own.num_rows, heads, places);
        if (own.num_rows > 0) own.leave_home(l, heads);
        const i64 first = l.first_o_output, count = l.o->weight.n;
        each(own.num_rows, [&](i64 row) { memcpy(extra(places[row]) + first, plan.home_out_ + row * hidden_stride(), sizeof(float) * count); });
        for (i64 row = 0; worker.rank == 0 && row < own.num_rows; ++row) wrote(extra(places[row]) + first, 1, 0, count);
        if (has_wanted) keep_wanted_rows(nullptr, nullptr, nullptr, 0);
        rank_barrier();
    }

    // Whether the activation can be written as the input of the last layer of the block: no group scale must be computed first.
    bool is_packed_at_once(const PlanLayer& l, bool is_joint) const {
        const InputForm& form = l.down_site.forms[0];
        return !plan.is_sharded() && (!l.gate || is_joint) && l.down_site.forms.size() == 1 && form.kind == Format::bf16 && form.columns == nullptr && form.k == l.up->weight.n;
    }

    // Return the input of the last layer: what the activation wrote, or else is packed here.
    Packed activate(const PlanLayer& l) {
        const i64 inner = row_stride(l.total_inner);
        float* const own = plan.inner_ + l.first_inner;
        const Packed up_input = packed(l.mlp_site, l.up_form, num_rows), gate_input = packed(l.mlp_site, l.gate_form, num_rows);
        const bool is_stored = l.is_sparse || l.gate_scale != 1.0f;  // the gate, before its activation
        const bool is_joint = l.gate && !is_stored && l.gate_form == l.up_form && are_alike(l.gate->weight, l.up->weight);
        LinearJob first = job(l.gate ? *l.gate : *l.up, l.gate ? gate_input : up_input, is_joint ? Finish::gate : is_stored ? Finish::store : Finish::activate, own, inner);
        const LoraSums sums(lora, mlp_modules(l));
        first.low_rank = sums[l.gate ? 0 : 1];
        first.second = is_joint ? &l.up->weight : nullptr;
        first.second_low_rank = is_joint ? sums[1] : nullptr;
        first.activation = l.activation;
        first.limit = l.gate_limit;
        first.slope = l.gate_slope;
        first.positive = l.positive;
        first.negative = l.negative;
        Packed result = packed(l.down_site, l.down_form, num_rows);
        if (is_packed_at_once(l, is_joint) && !lora.is_adapted(l.index, LoraModule::down)) {
            // Not in place of the rows that the layer reads.
            result.data = reinterpret_cast<u32*>(plan.inner_);
            first.packed = &result;
            run(&first, 1);
            return result;
        }
        run(&first, 1);
        if (is_stored) {
            each(num_rows, [&](i64 row) {
                if (l.gate_scale != 1.0f) kernels.elementwise->scale_and_cap(own + row * inner, l.gate->weight.n, l.gate_scale, 0.0f);
                if (l.is_sparse) cut_gate(own + row * inner, l.gate->weight.n, l.sparse_quantile);
                kernels.elementwise->activate(l.activation, own + row * inner, nullptr, l.gate->weight.n);
            });
        }
        if (l.gate && !is_joint) {
            const LinearJob second = adapted(job(*l.up, up_input, Finish::multiply, own, inner), sums[1]);
            run(&second, 1);
        }
        wrote(own, num_rows, inner, l.up->weight.n);
        rank_barrier();
        pack_all(l.down_site, plan.inner_, inner, {l.index, {LoraModule::down}});
        return result;
    }

    // waiting: what has still to join the residual.
    void feed_forward(const PlanLayer& l, const Waiting& waiting) {
        if (l.is_parallel)
            norm_and_pack_beside(l.mlp_site, l.mlp_in.is_present ? l.mlp_in : l.attn_in, l.attn_out, l.attention_scale(), mlp_modules(l));
        else
            norm_and_pack(l.mlp_site, l.mlp_in, waiting.norm, waiting.scale, l.router != nullptr || lora.has_rows(), l.is_mlp_only() ? l.index : -1, waiting.output_scale,
                          mlp_modules(l));
        if (l.router) {
            mixture(l);
            return;
        }
        const Packed input = activate(l);
        const LoraSums sums(lora, {l.index, {LoraModule::down}});
        run_to_residual(l, *l.down, input, waiting_mlp(l), sums[0], l.last_scale());
    }

    void layers() {
        const size_t count = in.layers == nullptr ? plan.layers_.size() : static_cast<size_t>(in.num_layers);
        const auto layer = [&](size_t i) -> const PlanLayer& { return *plan.layers_[in.layers == nullptr ? i : static_cast<size_t>(in.layers[i])]; };
        for (size_t i = 0; i < count; ++i) {
            const PlanLayer& l = layer(i);
            const PlanLayer* before = i > 0 ? &layer(i - 1) : nullptr;
            if (worker.rank == 0) plan.set_layer(static_cast<u32>(plan.first_layer_) + static_cast<u32>(i) + 1);
            const bool has_wanted = i + 1 == count && !in.keeps_all;
            if (l.has_streams()) begin_streams(l);
            const Waiting earlier = before ? Waiting{waiting_last(*before), before->last_scale(), before->output_scale} : Waiting{};
            if (l.has_block())
                enter_block(l, earlier.norm, earlier.scale, earlier.output_scale);
            else if (i == 0 && plan.entry_ == Entry::beside)
                pack_beside(l);
            else if (!plan.has_homes() && !l.is_mlp_only())
                norm_and_pack(l.attn_site, l.attn_in, earlier.norm, earlier.scale, lora.has_rows(), l.has_streams() ? -1 : l.index, earlier.output_scale,
                              attention_modules(l, has_few(l, i + 1 == count && !l.mixer)));
            if (plan.has_homes())
                attention_of_homes(l, before, i + 1 == count);
            else if (l.has_attention())
                attention(l, i + 1 == count && !l.mixer);
            if (l.has_block())
                leave_block(l);
            else if (l.is_mixed())
                norm_and_pack_beside(l.beside_site, l.mixer_in, l.attn_out, l.attention_scale(), mixer_modules(l));
            if (l.mixer) mix(l, i + 1 == count);
            if (num_rows == 0) return;
            if (l.has_streams()) add_laurel(l, has_wanted);
            if (l.has_mlp()) feed_forward(l, l.is_mlp_only() ? earlier : Waiting{l.has_streams() ? nullptr : waiting_mixing(l), l.mixer ? l.mixer_scale() : l.attention_scale(), 1.0f});
            if (l.has_streams())
                end_streams(l, has_wanted);
            else if (l.per_layer_gate)
                add_per_layer(l, has_wanted);
            if (plan.is_aborted()) return;
        }
        const PlanLayer& last = layer(count - 1);
        if (last.has_streams()) join_streams(!in.keeps_all);
        if (const Norm* waiting = waiting_last(last)) each(num_rows, [&](i64 row) { add_result(*waiting, last.last_scale(), row, last.output_scale); });
        if (!in.keeps_all && (last.mixer || last.is_mlp_only())) keep_wanted_rows(nullptr, nullptr, nullptr, 0);
    }

    // All layers over the rows of the step; a rank that divides rows with others may have none.
    void all_layers() {
        if (plan.divides_rows() && in.batch.num_tokens == 0)
            return follow_layers(in.layers == nullptr ? plan.layers_.size() : static_cast<size_t>(in.num_layers));
        enter_or_embed();
        if (plan.streams_.count > 1) split_streams();
        if (plan.has_blocks_) keep_embeddings();
        layers();
    }

    // Hidden states after the final norm of `count` rows of x_.
    void hidden_states(const i32* rows, i32 count, float* out) {
        each(count, [&](i64 i) { norm_row(plan.final_norm, rows[i], out + i * plan.hidden_); });
    }

    // Norm and pack `count` rows of x_ for the head; rows null: the first ones. read: see pack_all.
    Packed pack_for_head(const i32* rows, i32 count, const LoraModules& read = {}) {
        num_rows = count;
        const auto norm_to = [&](i64 i, float* to) { norm_row(plan.final_norm, rows == nullptr ? i : rows[i], to); };
        const bool is_own = count == 1 && lora.num_items(read) == 0;
        if (is_own)
            norm_to(0, own_row());
        else
            each(count, [&](i64 i) { norm_to(i, plan.normed_ + i * hidden_stride()); });
        pack_all(plan.head_site_, is_own ? own_row() : plan.normed_, hidden_stride(), read);
        return packed(plan.head_site_, 0, count);
    }

    // The best token of `count` rows for each thread.
    void best(const i32* rows, i32 count) {
        if (plan.is_prefiltering_) {
            each(count, [&](i64 i) { norm_row(plan.final_norm, rows == nullptr ? i : rows[i], plan.normed_ + i * hidden_stride()); });
            return plan.prefilter_.find(worker, {plan.normed_, hidden_stride(), count, plan.is_near, plan.best_values_.data(), plan.best_indices_.data()});
        }
        const Packed input = pack_for_head(rows, count);
        LinearJob head = job(*plan.head_, input, Finish::best, nullptr, 0);
        head.best_value = plan.best_values_.data();
        head.best_index = plan.best_indices_.data();
        run(&head, 1);
    }

    // Logits of `count` rows.
    void logits(const i32* rows, i32 count, float* out) {
        if (lora.lora != nullptr) lora.lora = &plan.lora_.logit;
        const LoraModules read = {plan.num_layers(), {LoraModule::head}};
        const Packed input = pack_for_head(rows, count, read);
        float* const own = plan.is_sharded() ? plan.shared_logits_ + plan.group_.first_output : out;
        const LoraSums sums(lora, read);
        const LinearJob head = adapted(job(*plan.head_, input, Finish::store, own, plan.vocab_), sums[0]);
        run(&head, 1);
        if (plan.is_sharded()) wrote(own, count, plan.vocab_, plan.head_->weight.n);
        if (plan.has_plain_logits()) return;
        each(count, [&](i64 i) { kernels.elementwise->scale_and_cap(own + i * plan.vocab_, plan.head_->weight.n, plan.logit_scale_, plan.softcap_); });
    }
};

namespace {

struct Call {
    Plan* plan;
    const StepInput* input;
    const i32* rows;
    i32 count;
    float* out;
    const LoraState* lora_state;
    const LoraRows* lora = nullptr;  // null: no row has an adapter
    const StepInput* given = nullptr;  // the whole step, of which `input` may be a rank's part
    int num_threads = 0;  // the actual number, possibly fewer than requested
};

void step_body(void* argument, Worker& worker) {
    Call& call = *static_cast<Call*>(argument);
    if (worker.rank == 0) call.num_threads = worker.size;
    const StepInput& in = *call.input;
    Stepper stepper = {*call.plan, in, *call.plan->kernels_used, worker, in.batch.num_tokens, {*call.lora_state, call.lora}};
    stepper.all_layers();
    if (call.plan->divides_rows()) {
        stepper.gather_rows(*call.given);
        if (!call.plan->computes_results()) return;
    }
    if (in.num_logit_rows == 0 || call.plan->is_aborted()) return;
    const i32* rows = in.keeps_all ? call.given->wanted_rows : nullptr;
    if (in.best != nullptr)
        stepper.best(rows, in.num_logit_rows);
    else
        stepper.logits(rows, in.num_logit_rows, in.logits);
}

void logits_body(void* argument, Worker& worker) {
    const Call& call = *static_cast<Call*>(argument);
    Stepper stepper = {*call.plan, *call.input, *call.plan->kernels_used, worker, call.count, {*call.lora_state, call.lora}};
    stepper.logits(call.rows, call.count, call.out);
}

void hidden_body(void* argument, Worker& worker) {
    const Call& call = *static_cast<Call*>(argument);
    Stepper stepper = {*call.plan, *call.input, *call.plan->kernels_used, worker, call.count, {*call.lora_state, nullptr}};
    stepper.hidden_states(call.rows, call.count, call.out);
}

}  // namespace

void Plan::check_step(const StepInput& input) const {
    if (input.window_slots == nullptr && has_windows()) throw std::invalid_argument("a step of windowed layers needs their block tables");
    if (has_states_ && (input.state_sources == nullptr || input.layers != nullptr || input.batch.num_drafts != nullptr))
        throw std::invalid_argument("a step of recurrent layers needs the rows of their states, runs all layers, and has no draft trees");
    if (input.layers != nullptr && input.num_layers < 1) throw std::invalid_argument("a step runs one layer at least");
    for (i32 i = 0; input.layers != nullptr && i < input.num_layers; ++i)
        if (input.layers[i] < 0 || input.layers[i] >= static_cast<i32>(layers_.size()))
            throw std::invalid_argument("there is no layer " + std::to_string(input.layers[i]));
    if (input.best != nullptr && !has_plain_logits()) throw std::invalid_argument("the best tokens of a plan with scaled logits are found in these");
    if (is_stage_ != (input.rows != nullptr)) throw std::invalid_argument("a pipeline stage, and nothing else, computes in rows of the caller");
    if (!is_last_stage_ && (!input.keeps_all || input.num_wanted_rows > 0)) throw std::invalid_argument("the last stage alone has wanted rows");
    if (has_context() && input.batch.num_drafts != nullptr) throw std::invalid_argument("ranks that share the tokens of sequences have no draft trees");
}

void Plan::step(const StepInput& given) {
    check_step(given);
    const std::lock_guard<std::mutex> lock(guard_);
    given_ = given;
    const StepInput input = divides_rows() ? divided_.take(given, row_group_.rank, row_group_.size) : given;
    const i32 num_results = !divides_rows() || !computes_results() ? 0 : given.keeps_all ? given.batch.num_tokens : given.num_wanted_rows;
    if (has_homes()) home_input_ = divided_.take_home(input, group_.rank / group_.home_size, group_.num_local_blocks, block_size());
    const StepInput& attended = has_homes() ? home_input_ : input;
    find_last_ask(attended);
    if (has_context()) prepare_context(input.batch);
    reserve(std::max(input.batch.num_tokens, num_results), attended.batch);
    if (choice_.top_k > 0) reserve_choice(input.batch);
    if (is_stage_) x_ = computes_in_place() ? input.rows : own_x_;
    begin_lora(input);
    if (is_sharded()) reserve_shared(input.batch.num_tokens, input.num_logit_rows);
    if (divides_rows()) reserve_divided();
    if (input.best != nullptr) begin_best(input.num_logit_rows);
    for (const i32 row : query_rows_)
        if (row < 0 || row >= input.batch.num_tokens) throw std::invalid_argument("there is no row " + std::to_string(row) + " whose queries are copied");
    Call call = {this, &input, nullptr, 0, nullptr, &lora_, lora_.all.is_empty() ? nullptr : &lora_.all, &given};
    begin_bounds(input);
    run_team(num_threads, step_body, &call);
    keep_bounds(input);
    query_rows_.clear();
    if (divides_rows()) {
        set_layer(0);
        if (is_aborted()) throw std::runtime_error("the group of ranks is aborted");
        if (!computes_results()) {
            if (input.best != nullptr && is_prefiltering_) prefilter_.end();
            return;
        }
    }
    if (is_sharded()) {
        if (input.best != nullptr) share_best(input, call.num_threads);
        meet_ranks();
        take_results(input.num_logit_rows, input.logits, input.best);
        return;
    }
    for (i32 row = 0; input.best != nullptr && row < input.num_logit_rows; ++row) {
        const i64 first = static_cast<i64>(row) * call.num_threads;
        float value = 0.0f;
        const i32 found = best_of(best_values_.data() + first, best_indices_.data() + first, call.num_threads, value);
        input.best[row] = std::isfinite(value) ? found : -1;
    }
    if (input.best != nullptr && is_prefiltering_) prefilter_.end();
}

void Plan::logits(const i32* rows, i32 count, float* out) {
    const std::lock_guard<std::mutex> lock(guard_);
    if (count > capacity_) throw std::invalid_argument("more rows than the last step had");
    if (is_stage_ && is_sharded()) meet_ranks();  // its first rank may still copy the results of the last step
    if (is_sharded()) reserve_shared(0, count);
    begin_lora_logits(rows, count);
    const StepInput none;
    Call call = {this, &none, rows, count, out, &lora_, lora_.logit.is_empty() ? nullptr : &lora_.logit};
    run_team(std::min(num_threads, row_threads_), logits_body, &call);
    if (!is_sharded()) return;
    meet_ranks();
    take_results(count, out, nullptr);
}

void Plan::hidden_states(const i32* rows, i32 count, float* out) {
    const std::lock_guard<std::mutex> lock(guard_);
    if (count > capacity_) throw std::invalid_argument("more rows than the last step had");
    const StepInput none;
    Call call = {this, &none, rows, count, out, &lora_};
    run_team(num_threads, hidden_body, &call);
}

}  // namespace quire
