// The inputs of a step's layers: embeddings, the rows of a draft head, and the inputs that some models give each layer.
#pragma once
#include <string.h>

#include "step_latent.h"

namespace quire {

struct StepEntry : StepLatent {
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

    // The rows come from the previous stage. The first rank of the stage changes them in place, after the others have copied
    // them.
    void enter_stage() {
        if (!plan.computes_in_place())
            each(in.batch.num_tokens,
                [&](i64 row) { memcpy(x(row), in.rows + row * hidden_stride(), sizeof(float) * plan.hidden_); });
        rank_barrier();
    }

    void enter_or_embed() {
        if (!plan.is_first_stage_) return enter_stage();
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
        norm_and_pack(l.per_layer_site, none, l.has_streams() ? nullptr : waiting_mlp(l), l.residual_scale, false, -1);
        const Packed input = packed(l.per_layer_site, 0, num_rows);
        const LinearJob gate = job(*l.per_layer_gate, input, Finish::store, plan.gated_, row_stride(size));
        run(&gate, 1);
        each(num_rows, [&](i64 row) {
            const i64 token = has_wanted ? in.wanted_rows[row] : row;
            kernels.elementwise->activate(
                l.activation, plan.gated_ + row * row_stride(size), plan.per_layer_ + token * stride + l.index * size, size);
        });
        pack_all(l.per_layer_up_site, plan.gated_, row_stride(size));
        run_to_residual(
            l, *l.per_layer_up, packed(l.per_layer_up_site, 0, num_rows), &l.per_layer_norm, nullptr, l.residual_scale);
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
};

}  // namespace quire
