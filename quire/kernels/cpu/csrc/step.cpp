// Runs a plan: every thread of the team executes all layers, with barriers where results of other threads are needed.
#include <string.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <stdexcept>

#include "step_latent.h"

namespace quire {

namespace {

// Tokens of a step whose cache slots are prefetched: their lines should stay in the CPU caches until they are written.
constexpr i32 MAX_FETCHED_TOKENS = 64;

}  // namespace

// One thread's execution of a step. All threads execute the same code; shared data is in the plan.
struct Stepper : StepLatent {
    // The rank with a token's row of the embedding writes it for all.
    void embed_sharded() {
        const Weight& embed = plan.embed_->weight;
        each(in.batch.num_tokens, [&](i64 row) {
            const i64 token = in.token_ids[row] - plan.group_.first_output;
            if (token < 0 || token >= embed.n) return;
            kernels.linear->unpack_row(embed, static_cast<i32>(token), extra(row));
            if (plan.embed_scale_ != 1.0f) kernels.elementwise->scale_and_cap(extra(row), plan.hidden_, plan.embed_scale_, 0.0f);
        });
        for (i64 row = 0; worker.rank == 0 && row < in.batch.num_tokens; ++row) {
            const i64 token = in.token_ids[row] - plan.group_.first_output;
            if (token >= 0 && token < embed.n) wrote(extra(row), 1, hidden_stride(), plan.hidden_);
        }
        rank_barrier();
        each(in.batch.num_tokens, [&](i64 row) {
            memcpy(x(row), extra(row), sizeof(float) * plan.hidden_);
            finish_embedding(row);
        });
    }

    void finish_embedding(i64 row) const {
        if (plan.position_embed_) {
            kernels.linear->unpack_row(plan.position_embed_->weight, static_cast<i32>(in.positions[row]), own_row());
            kernels.elementwise->add_scaled(x(row), own_row(), 1.0f, plan.hidden_);
        }
        if (plan.embed_norm.is_present) kernels.elementwise->norm(plan.embed_norm.job, x(row), x(row));
    }

    void embed() {
        if (plan.is_sharded()) return embed_sharded();
        each(in.batch.num_tokens, [&](i64 row) {
            kernels.linear->unpack_row(plan.embed_->weight, static_cast<i32>(in.token_ids[row]), x(row));
            if (plan.embed_scale_ != 1.0f) kernels.elementwise->scale_and_cap(x(row), plan.hidden_, plan.embed_scale_, 0.0f);
            finish_embedding(row);
        });
    }

    float* beside(i64 row) const { return plan.beside_ + row * row_stride(plan.beside_size_); }

    // Rows of a draft head: see Entry.
    void enter() {
        const i64 hidden = plan.hidden_;
        const bool is_joined = plan.entry_ == Entry::joined, is_wide = in.feature_size != plan.hidden_;
        each(in.batch.num_tokens, [&](i64 row) {
            float* to = beside(row);
            kernels.linear->unpack_row(plan.embed_->weight, static_cast<i32>(in.token_ids[row]), to);
            if (plan.embed_scale_ != 1.0f) kernels.elementwise->scale_and_cap(to, plan.hidden_, plan.embed_scale_, 0.0f);
            if (plan.embed_norm.is_present) kernels.elementwise->norm(plan.embed_norm.job, to, to);
            const float* features = in.features + row * in.feature_size;
            if (is_joined && plan.feature_norm.is_present)
                kernels.elementwise->norm(plan.feature_norm.job, features, to + hidden);
            else if (is_joined)
                memcpy(to + hidden, features, sizeof(float) * hidden);
            else if (!is_wide)
                memcpy(x(row), features, sizeof(float) * hidden);
        });
        if (!is_joined && !is_wide) return;
        if (is_joined)
            pack_all(plan.fuse_site_, plan.beside_, row_stride(plan.beside_size_));
        else
            pack_all(plan.fuse_site_, in.features, in.feature_size);
        const Packed input = packed(plan.fuse_site_, 0, num_rows);
        const LinearJob fuse = job(*plan.fuse_, input, Finish::store, plan.x_, hidden_stride());
        run(&fuse, 1);
    }

    void enter_or_embed() {
        if (!plan.is_first_stage_) return;  // the rows come from the previous stage
        if (plan.entry_ == Entry::token)
            embed();
        else
            enter();
        if (plan.per_layer_embed_) make_per_layer_inputs();
    }

    // See PerLayerInputs: the inputs of all layers lie side by side.
    void make_per_layer_inputs() {
        const Weight& embed = plan.per_layer_embed_->weight;
        const i32 width = plan.per_layer_projection_->weight.n, size = plan.per_layer_size_;
        pack_all(plan.per_layer_site_, plan.x_, hidden_stride());
        const Packed input = packed(plan.per_layer_site_, 0, num_rows);
        const LinearJob project = job(*plan.per_layer_projection_, input, Finish::store, plan.per_layer_, row_stride(width));
        run(&project, 1);
        each(num_rows, [&](i64 row) {
            float *const to = plan.per_layer_ + row * row_stride(width), *const own = own_row();
            const i64 token = in.token_ids[row];
            kernels.linear->unpack_row(embed, token < embed.n ? static_cast<i32>(token) : 0, own);
            kernels.elementwise->scale_and_cap(own, width, plan.per_layer_embed_scale_, 0.0f);
            kernels.elementwise->scale_and_cap(to, width, plan.per_layer_projection_scale_, 0.0f);
            for (i32 at = 0; at < width; at += size) kernels.elementwise->norm(plan.per_layer_norm.job, to + at, to + at);
            kernels.elementwise->add_scaled(to, own, 1.0f, width);
            kernels.elementwise->scale_and_cap(to, width, plan.per_layer_sum_scale_, 0.0f);
        });
    }

    // See PerLayerGate. has_wanted: only rows that are wanted are left.
    void add_per_layer(const PlanLayer& l, bool has_wanted) {
        static const Norm none;
        const i64 size = plan.per_layer_size_, stride = row_stride(plan.per_layer_projection_->weight.n);
        norm_and_pack(l.per_layer_site, none, waiting_mlp(l), l.residual_scale, false, -1);
        const Packed input = packed(l.per_layer_site, 0, num_rows);
        const LinearJob gate = job(*l.per_layer_gate, input, Finish::store, plan.gated_, row_stride(size));
        run(&gate, 1);
        each(num_rows, [&](i64 row) {
            const i64 token = has_wanted ? in.wanted_rows[row] : row;
            kernels.elementwise->activate(l.activation, plan.gated_ + row * row_stride(size), plan.per_layer_ + token * stride + l.index * size, size);
        });
        pack_all(l.per_layer_up_site, plan.gated_, row_stride(size));
        run_to_residual(l, *l.per_layer_up, packed(l.per_layer_up_site, 0, num_rows), &l.per_layer_norm);
    }

    // The input of the first attention of an EAGLE-3 head: the normed embedding, concatenated with the normed features.
    void pack_beside(const PlanLayer& l) {
        const i64 hidden = plan.hidden_;
        each(num_rows, [&](i64 row) {
            norm_row(l.attn_in, row, beside(row) + hidden);
            if (plan.is_residual_normed_) memcpy(x(row), beside(row) + hidden, sizeof(float) * hidden);
        });
        pack_all(l.attn_site, plan.beside_, row_stride(plan.beside_size_));
    }

    // Prefetch the cache lines that a new token is written to, of some heads, as there are many.
    void fetch_cache(const PlanLayer& l, i64 row, i32 first_head, i32 num_heads) const {
        const i64 width = element_bytes(l.kv.format), run = RUN * l.head_dim * width, slot = in.slots[row];
        for (i32 head = first_head; head < first_head + num_heads; ++head) {
            const i64 at = run_element(l.kv, slot / l.kv.block_size, head, static_cast<i32>(slot % l.kv.block_size)) * width;
            for (i64 line = 0; line < run; line += 64) {
                __builtin_prefetch(static_cast<const u8*>(l.kv.keys) + at + line, 1, 2);
                __builtin_prefetch(static_cast<const u8*>(l.kv.values) + at + line, 1, 2);
            }
        }
    }

    void project(const PlanLayer& l, bool has_few) {
        const i32 q_size = l.num_heads * l.head_dim, kv_size = l.num_kv_heads * l.head_dim;
        const i64 width = row_stride(qkv_size(l));
        if (!l.k) return ask(l, has_few);
        const Packed q = packed(l.attn_site, l.q_form, num_rows), k = packed(l.attn_site, l.k_form, num_rows), v = packed(l.attn_site, l.v_form, num_rows);
        const LinearJob jobs[3] = {job(*l.k, k, Finish::store, plan.qkv_ + q_size, width), job(*l.v, v, Finish::store, plan.qkv_ + q_size + kv_size, width),
                                   job(*l.q, q, Finish::store, plan.qkv_, width)};
        run(jobs, has_few ? 2 : 3);
        if (has_few) ask(l, true);
    }

    // Make the queries; has_few: of rows that are wanted only.
    void ask(const PlanLayer& l, bool has_few) {
        if (has_few) pack_wanted_rows(l);
        if (num_rows == 0) return;
        const Packed input = packed(l.attn_site, l.q_form, num_rows);
        const LinearJob job_of_q = job(*l.q, input, Finish::store, plan.qkv_, row_stride(qkv_size(l)));
        run(&job_of_q, 1);
    }

    void pack_wanted_rows(const PlanLayer& l) {
        // Keys and values of all rows, and questions of those that are wanted, which go on alone.
        const bool is_beside = plan.entry_ == Entry::beside;  // its input is twice as wide, and at most half of the rows are wanted
        float* const input = is_beside ? plan.beside_ : plan.normed_;
        const i64 input_stride = is_beside ? row_stride(plan.beside_size_) : hidden_stride();
        keep_wanted_rows(input, input, is_beside ? plan.normed_ : free_rows(), input_stride);
        if (num_rows > 0) pack_all(l.attn_site, input, input_stride);
    }

    void rotate_and_store(const PlanLayer& l, bool has_few) {
        const i32 q_size = l.num_heads * l.head_dim, kv_size = l.num_kv_heads * l.head_dim;
        const bool is_whole = l.q_norm.is_present && l.is_qk_norm_whole;
        if (l.clip > 0.0f) clip_heads(l);
        if (is_whole && plan.is_sharded()) {
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
            if (l.k && in.batch.num_tokens <= MAX_FETCHED_TOKENS) fetch_cache(l, row, part * kv_heads, kv_heads);
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
            kernels.attention->store(l.kv, in.slots[row], part * kv_heads, kv_heads, key, key + kv_size);
        });
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
        a.is_bf16 = plan.is_bf16_;
        a.q = plan.qkv_;
        a.q_stride = row_stride(qkv_size(l));
        a.out = plan.attended_ + l.first_head * l.head_dim;
        a.out_stride = row_stride(l.total_heads * l.head_dim);
        a.scratch = plan.attention_scratch_.data;
        kernels.attention->attend(worker, a, batch);
        wrote(a.out, num_rows, a.out_stride, static_cast<i64>(l.num_heads) * l.head_dim);
        rank_barrier();
    }

    // Rows as wide as x_ that are unused at the last attention; private to a rank.
    float* free_rows() const { return plan.is_sharded() ? plan.spare_ : plan.extra_; }

    // No later block mixes rows: the wanted rows of x_, and of `beside`, move to the front (of `target`) and continue without the
    // others.
    void keep_wanted_rows(const float* beside, float* target, float* free, i64 width) {
        if (worker.rank == 0) {
            const auto gather = [&](const float* values, float* to, float* between, i64 size) {
                for (i32 i = 0; i < in.num_wanted_rows; ++i) memcpy(between + i * size, values + in.wanted_rows[i] * size, sizeof(float) * size);
                if (to != between) memcpy(to, between, sizeof(float) * size * in.num_wanted_rows);
            };
            gather(plan.x_, plan.x_, free_rows(), hidden_stride());
            gather(beside, target, free, width);
        }
        num_rows = in.num_wanted_rows;
        barrier(worker);
    }

    void attention(const PlanLayer& l, bool is_last) {
        const i64 width = row_stride(l.total_heads * l.head_dim);
        const bool is_latent = l.latent.rank > 0, has_few = is_last && plan.has_last_ask_ && !is_latent;
        if (is_latent) {
            project_latent(l, [&](float* heads, i64 position) { scale_queries(l, heads, l.num_heads, position); });
        } else {
            project(l, has_few);
            rotate_and_store(l, has_few);
        }
        if (num_rows == 0) return;
        attend(l, has_few ? plan.last_ask_ : in.batch);
        float* attended = plan.attended_;
        if (is_last && !in.keeps_all && !has_few) {
            if (plan.is_sharded()) attended = plan.spare_;  // other ranks still read the shared rows
            keep_wanted_rows(plan.attended_, attended, plan.is_sharded() ? attended : plan.qkv_, width);
        }
        if (is_latent) {
            leave_latent(l, attended + static_cast<i64>(l.first_head) * l.head_dim, width);
            pack_all(l.o_site, plan.answer_, row_stride(plan.answer_size_));
        } else {
            pack_all(l.o_site, attended, width);
        }
        run_to_residual(l, *l.o, packed(l.o_site, l.o_form, num_rows), waiting_attention(l));
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
        const bool is_joint = l.gate && l.gate_form == l.up_form && are_alike(l.gate->weight, l.up->weight);
        LinearJob first = job(l.gate ? *l.gate : *l.up, l.gate ? gate_input : up_input, is_joint ? Finish::gate : Finish::activate, own, inner);
        first.second = is_joint ? &l.up->weight : nullptr;
        first.activation = l.activation;
        first.limit = l.gate_limit;
        first.slope = l.gate_slope;
        first.positive = l.positive;
        first.negative = l.negative;
        Packed result = packed(l.down_site, l.down_form, num_rows);
        if (is_packed_at_once(l, is_joint)) {
            // Not in place of the rows that the layer reads.
            result.data = reinterpret_cast<u32*>(plan.inner_);
            first.packed = &result;
            run(&first, 1);
            return result;
        }
        run(&first, 1);
        if (l.gate && !is_joint) {
            const LinearJob second = job(*l.up, up_input, Finish::multiply, own, inner);
            run(&second, 1);
        }
        wrote(own, num_rows, inner, l.up->weight.n);
        rank_barrier();
        pack_all(l.down_site, plan.inner_, inner);
        return result;
    }

    void feed_forward(const PlanLayer& l) {
        if (l.is_parallel)
            norm_and_pack_beside(l.mlp_site, l.mlp_in.is_present ? l.mlp_in : l.attn_in, l.attn_out, l.residual_scale);
        else
            norm_and_pack(l.mlp_site, l.mlp_in, waiting_attention(l), l.residual_scale, l.router != nullptr, -1);
        if (l.router) {
            mixture(l);
            return;
        }
        const Packed input = activate(l);
        run_to_residual(l, *l.down, input, waiting_mlp(l));
    }

    void layers() {
        const size_t count = in.layers == nullptr ? plan.layers_.size() : static_cast<size_t>(in.num_layers);
        const auto layer = [&](size_t i) -> const PlanLayer& { return *plan.layers_[in.layers == nullptr ? i : static_cast<size_t>(in.layers[i])]; };
        for (size_t i = 0; i < count; ++i) {
            const PlanLayer& l = layer(i);
            const PlanLayer* before = i > 0 ? &layer(i - 1) : nullptr;
            if (plan.is_sharded() && worker.rank == 0) set_location(plan.group_.barrier, plan.group_.rank, static_cast<u32>(i) + 1);
            if (i == 0 && plan.entry_ == Entry::beside)
                pack_beside(l);
            else
                norm_and_pack(l.attn_site, l.attn_in, before ? waiting_last(*before) : nullptr, before ? before->residual_scale : 1.0f, false, l.index,
                              before ? before->output_scale : 1.0f);
            attention(l, i + 1 == count);
            if (num_rows == 0) return;
            feed_forward(l);
            if (l.per_layer_gate) add_per_layer(l, i + 1 == count && !in.keeps_all);
            if (plan.group_.is_aborted) return;
        }
        const PlanLayer& last = layer(count - 1);
        if (const Norm* waiting = waiting_last(last)) each(num_rows, [&](i64 row) { add_result(*waiting, last.residual_scale, row, last.output_scale); });
    }

    // Hidden states after the final norm of `count` rows of x_.
    void hidden_states(const i32* rows, i32 count, float* out) {
        each(count, [&](i64 i) { norm_row(plan.final_norm, rows[i], out + i * plan.hidden_); });
    }

    // Norm and pack `count` rows of x_ for the head; rows null: the first ones.
    Packed pack_for_head(const i32* rows, i32 count) {
        num_rows = count;
        const auto norm_to = [&](i64 i, float* to) { norm_row(plan.final_norm, rows == nullptr ? i : rows[i], to); };
        if (count == 1)
            norm_to(0, own_row());
        else
            each(count, [&](i64 i) { norm_to(i, plan.normed_ + i * hidden_stride()); });
        pack_all(plan.head_site_, count == 1 ? own_row() : plan.normed_, hidden_stride());
        return packed(plan.head_site_, 0, count);
    }

    // The best token of `count` rows for each thread.
    void best(const i32* rows, i32 count) {
        if (plan.is_screening_) {
            each(count, [&](i64 i) { norm_row(plan.final_norm, rows == nullptr ? i : rows[i], plan.normed_ + i * hidden_stride()); });
            return plan.screening_.find(worker, {plan.normed_, hidden_stride(), count, plan.is_near, plan.best_values_.data(), plan.best_indices_.data()});
        }
        const Packed input = pack_for_head(rows, count);
        LinearJob head = job(*plan.head_, input, Finish::best, nullptr, 0);
        head.best_value = plan.best_values_.data();
        head.best_index = plan.best_indices_.data();
        run(&head, 1);
    }

    // Logits of `count` rows.
    void logits(const i32* rows, i32 count, float* out) {
        const Packed input = pack_for_head(rows, count);
        float* const own = plan.is_sharded() ? plan.shared_logits_ + plan.group_.first_output : out;
        const LinearJob head = job(*plan.head_, input, Finish::store, own, plan.vocab_);
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
    int num_threads = 0;  // the actual number, possibly fewer than requested
};

void step_body(void* argument, Worker& worker) {
    Call& call = *static_cast<Call*>(argument);
    if (worker.rank == 0) call.num_threads = worker.size;
    const StepInput& in = *call.input;
    Stepper stepper = {*call.plan, in, *call.plan->kernels_used, worker, in.batch.num_tokens};
    stepper.enter_or_embed();
    stepper.layers();
    if (in.num_logit_rows == 0 || call.plan->is_aborted()) return;
    const i32* rows = in.keeps_all ? in.wanted_rows : nullptr;
    if (in.best != nullptr)
        stepper.best(rows, in.num_logit_rows);
    else
        stepper.logits(rows, in.num_logit_rows, in.logits);
}

void logits_body(void* argument, Worker& worker) {
    const Call& call = *static_cast<Call*>(argument);
    Stepper stepper = {*call.plan, *call.input, *call.plan->kernels_used, worker, call.count};
    stepper.logits(call.rows, call.count, call.out);
}

void hidden_body(void* argument, Worker& worker) {
    const Call& call = *static_cast<Call*>(argument);
    Stepper stepper = {*call.plan, *call.input, *call.plan->kernels_used, worker, call.count};
    stepper.hidden_states(call.rows, call.count, call.out);
}

}  // namespace

void Plan::step(const StepInput& input) {
    if (input.layers != nullptr && input.num_layers < 1) throw std::invalid_argument("a step runs one layer at least");
    for (i32 i = 0; input.layers != nullptr && i < input.num_layers; ++i)
        if (input.layers[i] < 0 || input.layers[i] >= static_cast<i32>(layers_.size()))
            throw std::invalid_argument("there is no layer " + std::to_string(input.layers[i]));
    if (input.best != nullptr && !has_plain_logits()) throw std::invalid_argument("the best tokens of a plan with scaled logits are found in these");
    if (is_stage_ != (input.rows != nullptr)) throw std::invalid_argument("a pipeline stage, and nothing else, computes in rows of the caller");
    if (!is_last_stage_ && (!input.keeps_all || input.num_wanted_rows > 0)) throw std::invalid_argument("the last stage alone has wanted rows");
    const std::lock_guard<std::mutex> lock(guard_);
    find_last_ask(input);
    reserve(input.batch.num_tokens, input.batch);
    if (is_stage_) x_ = input.rows;
    if (is_sharded()) reserve_shared(input.batch.num_tokens, input.num_logit_rows);
    if (input.best != nullptr) begin_best(input.num_logit_rows);
    Call call = {this, &input, nullptr, 0, nullptr};
    run_team(num_threads, step_body, &call);
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
    if (input.best != nullptr && is_screening_) screening_.end();
}

void Plan::share_best(const StepInput& input, int num_threads_used) {
    for (i32 row = 0; row < input.num_logit_rows; ++row) {
        const i64 first = static_cast<i64>(row) * num_threads_used, place = static_cast<i64>(row) * group_.size + group_.rank;
        const i32 found = best_of(best_values_.data() + first, best_indices_.data() + first, num_threads_used, rank_best_values_[place]);
        rank_best_indices_[place] = found < 0 ? -1 : found + group_.first_output;
    }
    group_.wrote(rank_best_values_ + group_.rank, input.num_logit_rows, group_.size, 1);
    group_.wrote(reinterpret_cast<float*>(rank_best_indices_) + group_.rank, input.num_logit_rows, group_.size, 1);
    if (is_screening_) screening_.end();
}

void Plan::meet_ranks() {
    set_location(group_.barrier, group_.rank, 0);
    group_.meet();
    if (group_.is_aborted) throw std::runtime_error("the group of ranks is aborted");
}

void Plan::take_results(i32 num_rows, float* logits, i32* best) {
    if (group_.rank != 0) return;
    if (best == nullptr) {
        if (num_rows > 0) memcpy(logits, shared_logits_, sizeof(float) * num_rows * vocab_);
        return;
    }
    for (i32 row = 0; row < num_rows; ++row) {
        const i64 first = static_cast<i64>(row) * group_.size;
        float value = 0.0f;
        const i32 found = best_of(rank_best_values_ + first, rank_best_indices_ + first, group_.size, value);
        best[row] = std::isfinite(value) ? found : -1;
    }
}

void Plan::begin_best(i32 num_rows) {
    const size_t places = static_cast<size_t>(num_rows) * num_threads;
    best_values_.assign(places, -__builtin_inff());
    best_indices_.assign(places, -1);
    is_screening_ = screens && screen_ != nullptr && num_rows > 0 && num_rows <= MAX_SCREENED_ROWS && screening_.is_wanted();
    num_screened += is_screening_;
    if (is_screening_) screening_.begin(*kernels_used, *head_, *screen_, num_rows, num_threads);
}

void Plan::logits(const i32* rows, i32 count, float* out) {
    const std::lock_guard<std::mutex> lock(guard_);
    if (count > capacity_) throw std::invalid_argument("more rows than the last step had");
    if (is_sharded()) reserve_shared(0, count);
    const StepInput none;
    Call call = {this, &none, rows, count, out};
    run_team(std::min(num_threads, row_threads_), logits_body, &call);
    if (!is_sharded()) return;
    meet_ranks();
    take_results(count, out, nullptr);
}

void Plan::move_tokens(const i64* from, const i64* to, i32 count) {
    const std::lock_guard<std::mutex> lock(guard_);
    for (const std::shared_ptr<PlanLayer>& layer : layers_)
        for (i32 i = 0; layer->k && i < count; ++i) kernels_used->attention->move(layer->kv, from[i], to[i]);
}

void Plan::hidden_states(const i32* rows, i32 count, float* out) {
    const std::lock_guard<std::mutex> lock(guard_);
    if (count > capacity_) throw std::invalid_argument("more rows than the last step had");
    const StepInput none;
    Call call = {this, &none, rows, count, out};
    run_team(num_threads, hidden_body, &call);
}

}  // namespace quire
