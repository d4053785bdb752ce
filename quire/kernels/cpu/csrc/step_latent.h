// Multi-head latent attention within a step: see Latent in plan.h.
#pragma once
#include <string.h>

#include "step_index.h"

namespace quire {

struct StepLatent : StepIndex {
    // The modules that read the input of an attention. has_few: queries are of other rows.
    static LoraModules attention_modules(const PlanLayer& l, bool has_few) {
        if (!l.has_attention()) return mixer_modules(l);
        if (l.latent.rank > 0) return latent_modules(l);
        if (!l.k) return query_modules(l);
        if (l.has_block() && l.block.q.in)
            return {l.index,
                {LoraModule::k, LoraModule::v, LoraModule::q, LoraModule::block_q_in, LoraModule::block_k_in,
                    LoraModule::block_v_in}};
        if (has_few) return {l.index, {LoraModule::k, LoraModule::v}};
        if (l.attn_gate) return {l.index, {LoraModule::k, LoraModule::v, LoraModule::q, LoraModule::attn_gate}};
        return {l.index, {LoraModule::k, LoraModule::v, LoraModule::q}};
    }
    static LoraModules latent_modules(const PlanLayer& l) {
        const LoraModule query = l.latent.q_a ? LoraModule::q_a : LoraModule::q;
        if (!l.has_indexer()) return {l.index, {LoraModule::k, query}};
        if (l.latent.q_a) return {l.index, {LoraModule::k, query, LoraModule::index_k, LoraModule::index_weights}};
        return {l.index, {LoraModule::k, query, LoraModule::index_k, LoraModule::index_weights, LoraModule::index_q}};
    }
    // Of those, the ones that read the latent row of queries.
    static LoraModules latent_query_modules(const PlanLayer& l) {
        return l.has_indexer() ? LoraModules{l.index, {LoraModule::q, LoraModule::index_q}}
                               : LoraModules{l.index, {LoraModule::q}};
    }
    static LoraModules query_modules(const PlanLayer& l) {
        return l.attn_gate ? LoraModules{l.index, {LoraModule::q, LoraModule::attn_gate}} : LoraModules{l.index, {LoraModule::q}};
    }

    // Multi-head latent attention: cached rows into latent_, and queries in the latent space into qkv_.
    // scale(heads, position) multiplies a row's queries by the factor of their position.
    template <class Scale>
    void project_latent(const PlanLayer& l, Scale scale) {
        const Latent& latent = l.latent;
        const i32 head_size = latent.nope + latent.rope;
        const i64 row_width = row_stride(plan.latent_size_), width = row_stride(plan.question_size_),
                  rank_width = row_stride(plan.question_rank_);
        const Packed k_input = packed(l.attn_site, l.k_form, num_rows);
        const Packed q_input = packed(l.attn_site, latent.q_a ? l.q_a_form : l.q_form, num_rows);
        const LoraSums sums(lora, attention_modules(l, false));
        const LinearJob query = latent.q_a ? job(*latent.q_a, q_input, Finish::store, plan.question_a_, rank_width)
                                           : job(*l.q, q_input, Finish::store, plan.question_, width);
        LinearJob jobs[5] = {
            adapted(job(*l.k, k_input, Finish::store, plan.latent_, row_width), sums[0]), adapted(query, sums[1])};
        const KeyIndexer& indexer = l.latent.indexer;
        Packed index_inputs[3];  // of k, weights and q
        if (l.has_indexer()) {
            index_inputs[0] = packed(l.attn_site, indexer.k_form, num_rows);
            index_inputs[1] = packed(l.attn_site, indexer.weights_form, num_rows);
            index_inputs[2] = packed(l.attn_site, indexer.q_form, num_rows);
            jobs[2] =
                adapted(job(*indexer.k, index_inputs[0], Finish::store, plan.index_keys_, row_stride(plan.index_size_)), sums[2]);
            jobs[3] = adapted(
                job(*indexer.weights, index_inputs[1], Finish::store, plan.index_weights_, row_stride(plan.index_num_heads_)),
                sums[3]);
            if (!latent.q_a) jobs[4] = adapted(index_job(indexer, index_inputs[2]), sums[4]);
        }
        run(jobs, !l.has_indexer() ? 2 : latent.q_a ? 4 : 5);
        if (latent.q_a) {
            each(num_rows, [&](i64 row) {
                float* const values = plan.question_a_ + row * rank_width;
                kernels.elementwise->norm(latent.q_norm.job, values, values);
            });
            const LoraModules read = latent_query_modules(l);
            pack_all(l.q_site, plan.question_a_, rank_width, read);
            const Packed input = packed(l.q_site, l.q_form, num_rows), index_input = packed(l.q_site, indexer.q_form, num_rows);
            const LoraSums second_sums(lora, read);
            LinearJob seconds[2] = {adapted(job(*l.q, input, Finish::store, plan.question_, width), second_sums[0])};
            if (l.has_indexer()) seconds[1] = adapted(index_job(indexer, index_input), second_sums[1]);
            run(seconds, l.has_indexer() ? 2 : 1);
        }
        if (l.has_indexer()) each(num_rows, [&](i64 row) { finish_index(l, row); });
        each(num_rows, [&](i64 row) { store_latent(l, row); });
        const i64 q_width = row_stride(qkv_size(l));
        each(num_rows, [&](i64 row) {
            float* const heads = plan.qkv_ + row * q_width;
            const float* const from = plan.question_ + row * width;
            for (i32 head = 0; head < l.num_heads; ++head)
                memcpy(heads + static_cast<i64>(head) * l.head_dim, from + static_cast<i64>(head) * head_size + latent.nope,
                    sizeof(float) * latent.rope);
            turn_first(l, heads, l.num_heads, l.head_dim, latent.is_interleaved, in.positions[row]);
        });
        run_heads(l, l.key_up_site, HeadModule::key_up, latent.nope, plan.question_, width, head_size,
            [&](const LatentHead& head, i32 index, const Packed& input) {
                return job(
                    *head.key_up, input, Finish::store, plan.qkv_ + static_cast<i64>(index) * l.head_dim + latent.rope, q_width);
            });
        each(num_rows, [&](i64 row) { scale(plan.qkv_ + row * q_width, in.positions[row]); });
        finish_stores(l);
    }

    // The indexer's queries.
    LinearJob index_job(const KeyIndexer& indexer, const Packed& input) const {
        return job(*indexer.q, input, Finish::store, plan.index_heads_, row_stride(plan.index_heads_size_));
    }

    // Norm and rotate a row of latent_, and store it.
    void store_latent(const PlanLayer& l, i64 row) const {
        const Latent& latent = l.latent;
        float* const values = plan.latent_ + row * row_stride(plan.latent_size_);
        float* const cached = own_row();
        memcpy(cached, values + latent.rank, sizeof(float) * latent.rope);
        kernels.elementwise->norm(latent.kv_norm.job, values, cached + latent.rope);
        turn_first(l, cached, 1, l.head_dim, latent.is_interleaved, in.positions[row]);
        if (l.attends_chosen())
            return kernels.attention->store_indexed(
                l.indexed_kv(), in.slots[row], cached, l.has_indexer() ? index_key(row) : nullptr);
        store(l, row, 0, 1, cached, cached);
    }

    // Pack k values of every head of rows, from values on and `step` apart, and run a linear layer for each head.
    template <class Make> void run_heads(
        const PlanLayer& l, const Site& site, HeadModule module, i32 k, const float* values, i64 stride, i64 step, Make make) {
        const InputForm& form = site.forms[0];
        const i64 words = steps_of(form.kind, form.k) * static_cast<i64>(num_rows),
                  groups = groups_of(form.k, form.group) * static_cast<i64>(num_rows);
        const i64 num_products = lora.num_head_items(l.index, l.num_heads, module);
        each(num_products + l.num_heads, [&](i64 item) {
            const i64 head = item - num_products;
            if (head < 0) return lora.shrink_head(*kernels.linear, item, l.index, l.num_heads, module, values, stride, step);
            kernels.linear->pack_rows(
                packed_at(form, num_rows, head * words, head * groups), 0, num_rows, values + head * step, stride, 0, k);
        });
        if (worker.rank == 0) {
            for (i32 head = 0; head < l.num_heads; ++head) {
                plan.packs_[head] = packed_at(form, num_rows, head * words, head * groups);
                plan.jobs_[head] = make(l.latent.heads[head], head, plan.packs_[head]);
                if (num_products == 0) continue;
                plan.lora_.head_sums[head] = lora.head_sum(l.index, head, module);
                plan.jobs_[head].low_rank = &plan.lora_.head_sums[head];
            }
        }
        barrier(worker);
        run(plan.jobs_.data(), l.num_heads);
    }

    // Project the attention outputs out of the latent space, into answer_. attended: of the rank's heads.
    void leave_latent(const PlanLayer& l, const float* attended, i64 width) {
        const i64 to_width = row_stride(plan.answer_size_);
        float* const own = plan.answer_ + static_cast<i64>(l.first_head) * l.latent.value;
        run_heads(l, l.value_up_site, HeadModule::value_up, l.latent.rank, attended + l.latent.rope, width, l.head_dim,
            [&](const LatentHead& head, i32 index, const Packed& input) {
                return job(*head.value_up, input, Finish::store, own + static_cast<i64>(index) * l.latent.value, to_width);
            });
        wrote(own, num_rows, to_width, static_cast<i64>(l.num_heads) * l.latent.value);
        rank_barrier();
    }
};

}  // namespace quire
