// The base of all parts of a step: rows that threads share, packed inputs, norms and linear layers.
#pragma once
#include <string.h>

#include <vector>

#include "step_lora.h"

namespace quire {

// Up to this many rows are packed in parts of this many inputs.
constexpr i32 MAX_CUT_ROWS = 64, CUT_INPUTS = 512;

// Whether the panels of two weights can be computed side by side: one tile reads them with one table and one kind of scales.
static inline bool are_alike(const Weight& a, const Weight& b) {
    return a.format == b.format && a.k == b.k && a.group == b.group && a.input_group == b.input_group && a.block == b.block &&
        (a.group_scales == nullptr) == (b.group_scales == nullptr) &&
        (a.group_offsets == nullptr) == (b.group_offsets == nullptr) && memcmp(a.table, b.table, sizeof(a.table)) == 0;
}

// One thread's state of a step: see Stepper.
struct StepRows {
    Plan& plan;
    const StepInput& in;
    const Kernels& kernels;
    Worker& worker;
    i32 num_rows;  // rows of x_ that are computed: all tokens, and after the last attention perhaps only those with logits
    StepLora lora;         // those of the rows that have an adapter
    bool is_home = false;  // only the rows of this rank's sequences, of which it has all heads: no other rank takes part

    // Call body(item) for every item and wait for all.
    template <class Body>
    void each(i64 count, Body body) {
        each_item(worker, count, body);
    }

    // Rows that one thread packs: those of a tile, whose words are adjacent, if there are enough tiles.
    i64 pack_grain(const Site& site) const {
        return num_rows > MAX_CUT_ROWS ? kernels.linear->tile_rows(site.forms[0].kind, num_rows) : 1;
    }

    // Where the keys and values of each token of the step are stored.
    const i64* slots_of(const PlanLayer& l) const { return l.is_windowed ? in.window_slots : in.slots; }
    i64 hidden_stride() const { return row_stride(plan.hidden_); }
    float* x(i64 row) const { return plan.x_ + row * hidden_stride(); }
    float* extra(i64 row) const { return plan.extra_ + row * hidden_stride(); }
    float* own_row() const { return plan.row_ + worker.rank * row_stride(plan.own_row_size_); }

    // Wait until all ranks have arrived; no effect with one rank. In an aborted group it returns at once: `layers` ends the step.
    void rank_barrier() {
        if (!plan.is_sharded() || is_home) return;
        if (worker.rank == 0) plan.group_.meet();
        barrier(worker);
    }

    // Record the shared rows that this rank has written since the last barrier: `count` times `width` values, `stride` apart.
    void wrote(float* first, i64 count, i64 stride, i64 width) const {
        if (worker.rank == 0 && plan.is_sharded() && !is_home) plan.group_.wrote(first, count, stride, width);
    }
    static i64 qkv_size(const PlanLayer& l) { return static_cast<i64>(l.num_heads + 2 * l.num_kv_heads) * l.head_dim; }

    // Where `rows` rows of one form of a site are packed: the forms of a site lie one after the other. Every thread packs a
    // single row for itself: that is faster than waiting for another thread and reading its result.
    Packed packed(const Site& site, i32 form_index, i32 rows) const {
        i64 words = rows == 1 ? worker.rank * own_stride(plan.packed_words_) : 0;
        i64 groups = rows == 1 ? worker.rank * own_stride(plan.packed_groups_) : 0;
        for (i32 i = 0; i < form_index; ++i) {
            words += static_cast<i64>(steps_of(site.forms[i].kind, site.forms[i].k)) * rows;
            groups += static_cast<i64>(groups_of(site.forms[i].k, site.forms[i].group)) * rows;
        }
        return packed_at(site.forms[form_index], rows, words, groups);
    }

    Packed packed_at(const InputForm& form, i32 rows, i64 words, i64 groups) const {
        Packed p;
        p.kind = form.kind;
        p.m = rows;
        p.k = form.k;
        p.group = form.group;
        p.input_group = form.input_group;
        p.columns = form.columns;
        p.tile_rows = kernels.linear->tile_rows(form.kind, rows > 0 ? rows : 1);
        p.data = plan.packed_data_ + words;
        p.scales = plan.packed_scales_ + groups;
        p.sums = plan.packed_sums_ + groups;
        p.starts = plan.packed_starts_ + groups;
        return p;
    }

    void pack(const Site& site, i64 row, const float* values) const {
        for (size_t f = 0; f < site.forms.size(); ++f)
            kernels.linear->pack_row(
                packed(site, static_cast<i32>(f), num_rows), static_cast<i32>(row), values, 0, site.forms[f].k);
    }

    // Pack all rows, with a barrier, and compute the first products of the adapters of modules that read them. The words of a
    // tile's rows are adjacent: few rows are divided by inputs, so that no two threads write to one line.
    void pack_all(const Site& site, const float* values, i64 stride, const LoraModules& read = {}) {
        const i64 num_products = lora.num_items(read);
        const auto product = [&](i64 item) { lora.shrink(*kernels.linear, item, read, values, stride); };
        if (num_rows == 1) {
            if (num_products > 0) each(num_products, product);
            return pack(site, 0, values);
        }
        bool is_cut = num_rows <= MAX_CUT_ROWS;
        for (const InputForm& form : site.forms) is_cut = is_cut && (form.input_group == 0 || CUT_INPUTS % form.input_group == 0);
        if (!is_cut) {
            const i64 rows = pack_grain(site);
            each(num_products + (num_rows + rows - 1) / rows, [&](i64 item) {
                const i64 tile = item - num_products;
                if (tile < 0) return product(item);
                const i32 first = static_cast<i32>(tile * rows),
                          count = num_rows - first < rows ? num_rows - first : static_cast<i32>(rows);
                for (size_t f = 0; f < site.forms.size(); ++f)
                    kernels.linear->pack_rows(packed(site, static_cast<i32>(f), num_rows), first, count, values + first * stride,
                        stride, 0, site.forms[f].k);
            });
            return;
        }
        const i32 k = site.forms[0].k;
        each(num_products + ceil_div(k, CUT_INPUTS), [&](i64 item) {
            const i64 part = item - num_products;
            if (part < 0) return product(item);
            const i32 begin = static_cast<i32>(part) * CUT_INPUTS, end = k - begin < CUT_INPUTS ? k : begin + CUT_INPUTS;
            for (size_t f = 0; f < site.forms.size(); ++f) {
                const Packed input = packed(site, static_cast<i32>(f), num_rows);
                kernels.linear->pack_rows(input, 0, num_rows, values, stride, begin, end);
            }
        });
    }

    // Norm every row into normed_, after the result of the block before has joined it, and pack it: what layer `kept` reads
    // (none: -1). One row is normed by every thread for itself, unless others read it from normed_. before: of a result that
    // waits in extra_; output_scale: of the residual after that; read: see pack_all.
    void norm_and_pack(const Site& site, const Norm& norm, const Norm* before, float scale, bool is_shared, i32 kept,
        float output_scale = 1.0f, const LoraModules& read = {}) {
        const bool is_own = num_rows == 1 && !is_shared, has_before = before != nullptr;
        if (!is_own || has_before) {
            each(num_rows, [&](i64 row) {
                if (has_before) add_result(*before, scale, row, output_scale);
                if (is_own) return;
                keep_input(kept, row);
                norm_row(norm, row, plan.normed_ + row * hidden_stride());
            });
        }
        if (is_own && worker.rank == 0) keep_input(kept, 0);
        if (is_own) norm_row(norm, 0, own_row());
        pack_all(site, is_own ? own_row() : plan.normed_, hidden_stride(), read);
    }

    // Norm every row into normed_ and pack it, and let a result that waits in extra_ join the residual after that: blocks side by
    // side.
    void norm_and_pack_beside(const Site& site, const Norm& norm, const Norm& before, float scale, const LoraModules& read) {
        each(num_rows, [&](i64 row) {
            norm_row(norm, row, plan.normed_ + row * hidden_stride());
            add_result(before, scale, row);
        });
        pack_all(site, plan.normed_, hidden_stride(), read);
    }

    LinearJob job(
        const NativeWeight& weight, const Packed& input, Finish finish, float* out, i64 stride, float factor = 1.0f) const {
        LinearJob j;
        j.weight = &weight.weight;
        j.input = &input;
        j.finish = finish;
        j.out = out;
        j.out_stride = stride;
        j.factor = factor;
        j.is_near = plan.is_near;
        return j;
    }

    // The same with what adapters add; null: nothing.
    LinearJob adapted(LinearJob j, const LowRankSum* sum) const {
        j.low_rank = sum;
        return j;
    }

    void run(const LinearJob* jobs, i32 count) {
        kernels.linear->linear(worker, jobs, count);
        barrier(worker);
    }

    // A linear layer of all rows, whose outputs all ranks write to the rows of `out`, hidden_stride() apart.
    void store_shared(const PlanLayer& l, const NativeWeight& weight, const Packed& input, const LoraSums& sums, float* out) {
        const LinearJob one = adapted(job(weight, input, Finish::store, out + l.first_output, hidden_stride()), sums[0]);
        run(&one, 1);
        wrote(out + l.first_output, num_rows, hidden_stride(), weight.weight.n);
        rank_barrier();
    }

    // Keep a row of the input of layer i, if requested.
    void keep_input(i32 layer, i64 row) const {
        const std::vector<i32>& kept = plan.kept_layers_;
        const i64 count = static_cast<i64>(kept.size());
        for (i64 i = 0; i < count; ++i)
            if (kept[i] == layer) memcpy(plan.kept_ + (row * count + i) * plan.hidden_, x(row), sizeof(float) * plan.hidden_);
    }

    // The norm of a result that waits in extra_, where a norm comes between or other ranks have parts of it; null where the
    // result has joined the residual already.
    const Norm* waiting_attention(const PlanLayer& l) const {
        return plan.is_sharded() || l.attn_out.is_present || l.is_parallel || l.is_mixed() ? &l.attn_out : nullptr;
    }
    const Norm* waiting_mlp(const PlanLayer& l) const {
        return !l.router && (plan.is_sharded() || l.mlp_out.is_present) ? &l.mlp_out : nullptr;
    }

    const Norm* waiting_mixer(const PlanLayer& l) const {
        return plan.is_sharded() || l.attn_out.is_present ? &l.attn_out : nullptr;
    }

    // The same of attention and the mixer together.
    const Norm* waiting_mixing(const PlanLayer& l) const { return l.mixer ? waiting_mixer(l) : waiting_attention(l); }

    // The same of the last result of a layer; several residual streams have taken it up.
    const Norm* waiting_last(const PlanLayer& l) const {
        return l.has_streams() ? nullptr
            : !l.has_mlp()     ? waiting_mixing(l)
            : l.per_layer_gate ? &l.per_layer_norm
                               : waiting_mlp(l);
    }

    // A block's result joins the residual. extra_ is not changed: other ranks read it.
    void add_result(const Norm& norm, float scale, i64 row, float output_scale = 1.0f) const {
        if (norm.is_present) kernels.elementwise->norm(norm.job, extra(row), own_row());
        kernels.elementwise->add_scaled(x(row), norm.is_present ? own_row() : extra(row), scale, plan.hidden_);
        if (output_scale != 1.0f) kernels.elementwise->scale_and_cap(x(row), plan.hidden_, output_scale, 0.0f);
    }

    void norm_row(const Norm& norm, i64 row, float* to) const {
        if (norm.is_present)
            kernels.elementwise->norm(norm.job, x(row), to);
        else
            memcpy(to, x(row), sizeof(float) * plan.hidden_);
    }

    // A linear layer whose result times a factor is added to the residual, or goes to extra_ where it waits. sum: what adapters
    // add.
    void run_to_residual(const PlanLayer& l, const NativeWeight& weight, const Packed& input, const Norm* waiting,
        const LowRankSum* sum, float factor) {
        LinearJob j = waiting != nullptr ? job(weight, input, Finish::store, plan.extra_ + l.first_output, hidden_stride())
                                               : job(weight, input, Finish::add, plan.x_, hidden_stride(), factor);
        j.low_rank = sum;
        run(&j, 1);
        if (waiting != nullptr) wrote(plan.extra_ + l.first_output, num_rows, hidden_stride(), weight.weight.n);
        rank_barrier();
    }
};

}  // namespace quire
