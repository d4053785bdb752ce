// A transformer block before a mixer, whose weights several layers share, within a step: see SharedBlock in plan.h.
#pragma once
#include <string.h>

#include <initializer_list>

#include "step_mixer.h"

namespace quire {

struct StepBlock : StepMixer {
    float* embeddings(i64 row) const { return plan.block_embeddings_ + row * hidden_stride(); }
    float* upper(i64 row) const { return plan.block_up_ + row * row_stride(plan.inner_size_); }

    // Keep the embeddings, which blocks read beside the residual.
    void keep_embeddings() {
        each(num_rows, [&](i64 row) { memcpy(embeddings(row), x(row), sizeof(float) * plan.hidden_); });
    }

    // Norm and pack what the attention of a block reads. before: of a result that waits in extra_, see norm_and_pack.
    void enter_block(const PlanLayer& l, const Norm* before, float scale, float output_scale) {
        each(num_rows, [&](i64 row) {
            if (before != nullptr) add_result(*before, scale, row, output_scale);
            keep_input(l.index, row);
            float* const to = beside(row);
            memcpy(to, x(row), sizeof(float) * plan.hidden_);
            memcpy(to + plan.hidden_, embeddings(row), sizeof(float) * plan.hidden_);
            kernels.elementwise->norm(l.attn_in.job, to, to);
        });
        pack_all(l.attn_site, plan.beside_, row_stride(plan.beside_size_), attention_modules(l, false));
    }

    // Where an adapter adds its results: rows `stride` apart.
    struct Adapted {
        const BlockAdapter* adapter;
        float* to;
        i64 stride;
        LoraModule out;
    };

    // Add what low-rank adapters give to the results of linear layers that read the same site; sums: of their first matrices.
    void add_adapters(
        const PlanLayer& l, const Site& site, std::initializer_list<Adapted> all, const LoraSums& sums, i32 first_sum) {
        const i64 stride = row_stride(plan.block_rank_), apart = stride * num_rows;
        Packed inputs[MAX_ADAPTED];
        LinearJob jobs[MAX_ADAPTED];
        i32 count = 0;
        for (const Adapted& one : all) {
            inputs[count] = packed(site, one.adapter->in_form, num_rows);
            jobs[count] = adapted(job(*one.adapter->in, inputs[count], Finish::store, plan.block_low_ + count * apart, stride),
                sums[first_sum + count]);
            ++count;
        }
        run(jobs, count);
        count = 0;
        for (const Adapted& one : all) {
            const LoraModules read = {l.index, {one.out}};
            pack_all(one.adapter->out_site, plan.block_low_ + count++ * apart, stride, read);
            const LoraSums own(lora, read);
            const Packed input = packed(one.adapter->out_site, 0, num_rows);
            const LinearJob out = adapted(job(*one.adapter->out, input, Finish::add, one.to, one.stride), own[0]);
            run(&out, 1);
        }
    }

    // Those of q, k and v.
    void adapt_heads(const PlanLayer& l, const LoraSums& sums) {
        const i64 width = row_stride(qkv_size(l)), q_size = static_cast<i64>(l.num_heads) * l.head_dim,
                  kv_size = static_cast<i64>(l.num_kv_heads) * l.head_dim;
        add_adapters(l, l.attn_site,
                     {{&l.block.q, plan.qkv_, width, LoraModule::block_q_out},
                      {&l.block.k, plan.qkv_ + q_size, width, LoraModule::block_k_out},
                      {&l.block.v, plan.qkv_ + q_size + kv_size, width, LoraModule::block_v_out}},
                     sums, 3);
    }

    // After its attention, whose result is in extra_: the rest of a block, and the input of the mixer.
    void leave_block(const PlanLayer& l) {
        const LoraModules read = {
            l.index, {LoraModule::gate, LoraModule::up, LoraModule::block_gate_in, LoraModule::block_up_in}};
        each(num_rows,
            [&](i64 row) { kernels.elementwise->norm(l.mlp_in.job, extra(row), plan.normed_ + row * hidden_stride()); });
        pack_all(l.mlp_site, plan.normed_, hidden_stride(), read);
        activate_block(l, LoraSums(lora, read));
        const LoraModules down = {l.index, {LoraModule::down}}, out = {l.index, {LoraModule::block_out}};
        pack_all(l.down_site, plan.inner_, row_stride(l.total_inner), down);
        store_shared(l, *l.down, packed(l.down_site, l.down_form, num_rows), LoraSums(lora, down), plan.extra_);
        pack_all(l.block.out_site, plan.extra_, hidden_stride(), out);
        barrier(worker);
        rank_barrier();  // until then others read extra_
        store_shared(l, *l.block.out, packed(l.block.out_site, 0, num_rows), LoraSums(lora, out), plan.extra_);
        each(num_rows, [&](i64 row) {
            float* const sum = own_row();
            memcpy(sum, x(row), sizeof(float) * plan.hidden_);
            kernels.elementwise->add_scaled(sum, extra(row), 1.0f, plan.hidden_);
            kernels.elementwise->norm(l.mixer_in.job, sum, plan.normed_ + row * hidden_stride());
        });
        pack_all(l.beside_site, plan.normed_, hidden_stride(), mixer_modules(l));
    }

private:
    static constexpr i32 MAX_ADAPTED = 3;

    // The gated activation, with what adapters add before it.
    void activate_block(const PlanLayer& l, const LoraSums& sums) {
        const i64 inner = row_stride(l.total_inner), upper_stride = row_stride(plan.inner_size_), count = l.up->weight.n;
        float* const own = plan.inner_ + l.first_inner;
        const Packed gate_input = packed(l.mlp_site, l.gate_form, num_rows), up_input = packed(l.mlp_site, l.up_form, num_rows);
        const LinearJob jobs[2] = {adapted(job(*l.gate, gate_input, Finish::store, own, inner), sums[0]),
            adapted(job(*l.up, up_input, Finish::store, plan.block_up_, upper_stride), sums[1])};
        run(jobs, 2);
        add_adapters(l, l.mlp_site,
            {{&l.block.gate, own, inner, LoraModule::block_gate_out},
                {&l.block.up, plan.block_up_, upper_stride, LoraModule::block_up_out}},
            sums, 2);
        each(num_rows, [&](i64 row) { kernels.elementwise->activate(l.activation, own + row * inner, upper(row), count); });
        wrote(own, num_rows, inner, count);
        rank_barrier();
    }
};

}  // namespace quire
