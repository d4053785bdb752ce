// Context parallelism within a step: keys and values that other ranks need, and rows that other ranks have computed.
#pragma once
#include <string.h>

#include "step_rows.h"

namespace quire {

struct StepContext : StepRows {
    int turn = 0;  // which of the two buffers of divided keys and values the next layer uses

    // Keep a part of the keys and values of a row, heads [first, first + count) of this rank, or hand them to finish_stores.
    void store(const PlanLayer& l, i64 row, i32 first, i32 count, const float* keys, const float* values) const {
        const i64 dim = l.head_dim, size = sizeof(float) * count * dim;
        float* to;
        i64 apart;  // from keys to values
        if (plan.divides_rows()) {
            to = divided_row(plan.divided_.rows[row]) + first * dim;
            apart = l.num_kv_heads * dim;
        } else if (plan.has_context()) {
            if (!l.writes_kv_heads) return;
            to = context_row(row) + (l.total_heads + l.first_kv_head + first) * dim;
            apart = l.total_kv_heads * dim;
        } else {
            return kernels.attention->store(l.kv, slots_of(l)[row], first, count, keys, values);
        }
        memcpy(to, keys, size);
        memcpy(to + apart, values, size);
    }

    // After `store` was called for all rows, and qkv_ has their queries: exchange what other ranks need, and store what they gave.
    void finish_stores(const PlanLayer& l) {
        if (plan.has_context()) share_heads(l);
        if (plan.divides_rows()) share_rows(l);
    }

    // Attention over the chunks of all ranks that share the tokens of sequences; ends with a barrier of the team.
    void attend_shared(AttentionJob a, const PlanLayer& l, const Batch& batch) {
        a.num_heads = l.num_context_heads;
        a.q = context_row(0) + static_cast<i64>(l.first_context_head) * l.head_dim;
        a.q_stride = row_stride(plan.context_row_size_);
        a.out = plan.attended_ + static_cast<i64>(l.first_context_head) * l.value_size();
        Batch own = batch;
        own.block_tables = plan.local_tables_.data();
        ContextJob context;
        context.place = plan.group_.place;
        context.size = plan.group_.num_places;
        context.num_local_blocks = plan.group_.num_local_blocks;
        context.block_tables = batch.block_tables;
        for (int i = 0; i < 2; ++i) context.buffers[i] = plan.context_buffers_[i];
        context.buffer_bytes = plan.context_buffer_bytes_;
        context.argument = &plan.group_;
        context.meet = [](void* group) { static_cast<RankGroup*>(group)->meet(); };
        context.wrote = [](void* group, float* first, i64 count, i64 stride, i64 width) { static_cast<RankGroup*>(group)->wrote(first, count, stride, width); };
        kernels.attention->attend_context(worker, a, own, context);
    }

    // A step of a rank that computes no tokens of it.
    void follow_layers(size_t count) {
        for (size_t i = 0; i < count && !plan.is_aborted(); ++i) {
            const PlanLayer& l = *plan.layers_[in.layers == nullptr ? i : static_cast<size_t>(in.layers[i])];
            if (l.k) finish_stores(l);
        }
    }

    // Bring the rows that all ranks have computed to rank 0: `given` is the whole step, and x_ is then that of one rank.
    void gather_rows(const StepInput& given) {
        const i64 stride = hidden_stride();
        const std::vector<i32>& places = given.keeps_all ? plan.divided_.rows : plan.divided_.wanted_places;
        const i64 count = num_rows < static_cast<i64>(places.size()) ? num_rows : static_cast<i64>(places.size());
        each(count, [&](i64 row) { memcpy(plan.divided_x_ + places[row] * stride, x(row), sizeof(float) * plan.hidden_); });
        if (worker.rank == 0) {
            for (i64 row = 0; row < count; ++row) plan.row_group_.wrote(plan.divided_x_ + places[row] * stride, 1, 0, plan.hidden_);
            plan.share_expert_tokens();
        }
        divided_barrier();
        if (!plan.computes_results()) return;
        num_rows = given.keeps_all ? given.batch.num_tokens : given.num_wanted_rows;
        each(num_rows, [&](i64 row) { memcpy(x(row), plan.divided_x_ + row * stride, sizeof(float) * plan.hidden_); });
    }

private:
    float* context_row(i64 row) const { return plan.context_rows_ + row * row_stride(plan.context_row_size_); }
    float* divided_row(i64 row) const { return plan.divided_kv_[turn] + row * row_stride(plan.divided_kv_size_); }

    void divided_barrier() {
        if (worker.rank == 0) plan.row_group_.meet();
        barrier(worker);
    }

    // Every rank writes its heads of q, k and v, and stores those of all heads of the tokens in its blocks.
    void share_heads(const PlanLayer& l) {
        const i64 dim = l.head_dim, width = row_stride(plan.context_row_size_), own_width = row_stride(qkv_size(l));
        const i64 first_key = l.total_heads * dim, first_value = first_key + l.total_kv_heads * dim, num_tokens = in.batch.num_tokens;
        each(num_rows, [&](i64 row) { memcpy(context_row(row) + l.first_head * dim, plan.qkv_ + row * own_width, sizeof(float) * l.num_heads * dim); });
        wrote(context_row(0) + l.first_head * dim, num_rows, width, l.num_heads * dim);
        for (const i64 first : {first_key, first_value})
            if (l.writes_kv_heads) wrote(context_row(0) + first + l.first_kv_head * dim, num_tokens, width, l.num_kv_heads * dim);
        rank_barrier();
        const i64 num_slots = static_cast<i64>(plan.group_.num_local_blocks) * l.kv.block_size, first_slot = plan.group_.place * num_slots;
        each(num_tokens, [&](i64 row) {
            const i64 slot = in.slots[row] - first_slot;
            if (slot < 0 || slot >= num_slots) return;
            const float* const from = context_row(row) + l.first_context_kv_head * dim;
            kernels.attention->store(l.kv, slot, 0, l.num_context_kv_heads, from + first_key, from + first_value);
        });
    }

    // Every rank has written the keys and values of its rows, and stores those of all.
    void share_rows(const PlanLayer& l) {
        const i64 size = static_cast<i64>(l.num_kv_heads) * l.head_dim;
        if (worker.rank == 0)
            for (const i32 row : plan.divided_.rows) plan.row_group_.wrote(divided_row(row), 1, 0, 2 * size);
        divided_barrier();
        const i64* const slots = l.is_windowed ? plan.given_.window_slots : plan.given_.slots;
        each(plan.given_.batch.num_tokens, [&](i64 row) { kernels.attention->store(l.kv, slots[row], 0, l.num_kv_heads, divided_row(row), divided_row(row) + size); });
        turn = 1 - turn;
    }
};

}  // namespace quire
