// Adapters within a step. Their first products are computed next to the packing of a linear layer's inputs, from the same rows,
// and the second ones in the layer's epilogue: a step with adapters has as many barriers as one without.
#pragma once
#include <initializer_list>

#include "plan.h"

namespace quire {

// Up to MAX_LORA_OUTPUTS modules of a layer that read the same rows.
struct LoraModules {
    i32 layer = 0, count = 0;
    LoraModule modules[MAX_LORA_OUTPUTS] = {};

    LoraModules() = default;
    LoraModules(i32 of_layer, std::initializer_list<LoraModule> all) : layer(of_layer) {
        for (const LoraModule module : all) modules[count++] = module;
    }
    i32 index(i32 i) const { return LoraAdapter::index(layer, modules[i]); }
};

// The parts of a mixer's inputs; none without one.
inline LoraModules mixer_modules(const PlanLayer& l) {
    LoraModules found;
    found.layer = l.index;
    for (size_t part = 0; l.mixer && part < l.mixer->in.size(); ++part)
        found.modules[found.count++] = static_cast<LoraModule>(static_cast<i32>(LoraModule::mix_in) + static_cast<i32>(part));
    return found;
}

// One thread's view of the adapters of the rows that are computed.
struct StepLora {
    const LoraState& state;
    const LoraRows* lora;  // null: no row has an adapter

    bool has_rows() const { return lora != nullptr && !lora->is_empty(); }

    // Whether an adapter of the rows has weights of a module.
    bool is_adapted(i32 layer, LoraModule module) const {
        for (size_t i = 0; has_rows() && i < lora->used.size(); ++i)
            if (lora->used[i][LoraAdapter::index(layer, module)].a != nullptr) return true;
        return false;
    }

    // The number of items of `shrink`.
    i64 num_items(const LoraModules& read) const {
        bool is_any = false;
        for (i32 i = 0; i < read.count; ++i) is_any = is_any || is_adapted(read.layer, read.modules[i]);
        return is_any ? static_cast<i64>(lora->tiles.size()) * read.count * (state.padded_rank / 16) : 0;
    }

    // Compute an item of the first products of modules, from rows at `values`, `stride` apart: sixteen outputs of one module for
    // a tile. Every sum is that of one row, in the same order: it does not depend on other rows.
    void shrink(const LinearTable& table, i64 item, const LoraModules& read, const float* values, i64 stride) const {
        const i64 num_panels = state.padded_rank / 16, module = item / num_panels % read.count;
        const i32 panel = static_cast<i32>(item % num_panels);
        const LoraTile& tile = lora->tiles[item / num_panels / read.count];
        const Weight* const a = tile.weights[read.index(static_cast<i32>(module))].a;
        if (a == nullptr || panel * 16 >= a->n) return;
        const float* x[MAX_LORA_ROWS];
        float* out[MAX_LORA_ROWS];
        for (i32 i = 0; i < tile.count; ++i) {
            x[i] = values + tile.rows[i] * stride;
            out[i] = results(tile.rows[i], module) + panel * 16;
        }
        table.shrink(*a, panel, tile.count, x, out);
    }

    // As num_items, shrink and sum, for the heads of a layer, each of which has inputs of its own, `step` values apart.
    i64 num_head_items(i32 layer, i32 num_heads, HeadModule module) const {
        bool is_any = false;
        for (size_t i = 0; has_rows() && i < lora->used.size(); ++i)
            is_any = is_any || lora->used[i][state.head_index(layer, 0, module)].a != nullptr;
        return is_any ? static_cast<i64>(lora->tiles.size()) * num_heads * (state.padded_rank / 16) : 0;
    }
    void shrink_head(const LinearTable& table, i64 item, i32 layer, i32 num_heads, HeadModule module, const float* values,
        i64 stride, i64 step) const {
        const i64 num_panels = state.padded_rank / 16;
        const i32 panel = static_cast<i32>(item % num_panels), head = static_cast<i32>(item / num_panels % num_heads);
        const LoraTile& tile = lora->tiles[item / num_panels / num_heads];
        const Weight* const a = tile.weights[state.head_index(layer, head, module)].a;
        if (a == nullptr || panel * 16 >= a->n) return;
        const float* x[MAX_LORA_ROWS];
        float* out[MAX_LORA_ROWS];
        for (i32 i = 0; i < tile.count; ++i) {
            x[i] = values + tile.rows[i] * stride + head * step;
            out[i] = head_results(tile.rows[i], head) + panel * 16;
        }
        table.shrink(*a, panel, tile.count, x, out);
    }
    LowRankSum head_sum(i32 layer, i32 head, HeadModule module) const {
        return sum_of(state.head_index(layer, head, module), head_results(0, head), state.head_stride());
    }

    // The number of items of `shrink_expert`.
    i64 num_expert_items(i32 num_modules) const {
        return static_cast<i64>(state.places.tiles.size()) * num_modules * (state.padded_rank / 16);
    }

    // As `shrink`, for modules [modules.first, modules.first + modules.count) of experts. values(place): the input of a place;
    // num_valid of them stay valid at once.
    struct ExpertModules {
        i32 first, count;
    };
    template <class Values> void shrink_expert(const LinearTable& table, i64 item, i32 layer, const i32* experts,
        ExpertModules modules, i32 num_valid, Values values) const {
        const i64 num_panels = state.padded_rank / 16, at = item / num_panels / modules.count;
        const i32 panel = static_cast<i32>(item % num_panels),
                  module = modules.first + static_cast<i32>(item / num_panels % modules.count);
        const LoraTile& tile = state.places.tiles[at];
        const Weight* const a = tile.weights[state.expert_index(layer, experts[state.places.tile_experts[at]], module)].a;
        if (a == nullptr || panel * 16 >= a->n) return;
        for (i32 first = 0; first < tile.count; first += num_valid) {
            const float* x[MAX_LORA_ROWS];
            float* out[MAX_LORA_ROWS];
            i32 count = 0;
            for (; count < num_valid && first + count < tile.count; ++count) {
                x[count] = values(tile.rows[first + count]);
                out[count] = results(tile.rows[first + count], module) + panel * 16;
            }
            table.shrink(*a, panel, count, x, out);
        }
    }

    // What a module of the expert at index `at` gets, after `shrink_expert`; null: nothing.
    const LowRankSum* expert_sum(i32 at, i32 module) const {
        if (state.places.sums.empty()) return nullptr;
        const LowRankSum& found = state.places.sums[static_cast<size_t>(at) * NUM_EXPERT_MODULES + module];
        return found.num_used == 0 ? nullptr : &found;
    }

    // What the epilogue of the i-th of some modules adds, after `shrink`.
    LowRankSum sum(const LoraModules& read, i32 i) const {
        return is_adapted(read.layer, read.modules[i]) ? sum_of(read.index(i), results(0, i), state.stride()) : LowRankSum();
    }

private:
    LowRankSum sum_of(i32 index, const float* shrunk, i64 stride) const {
        LowRankSum found;
        found.rows = lora->tables.data();
        found.next = lora->next.data();
        found.used = lora->used.data();
        found.num_used = static_cast<i32>(lora->used.size());
        found.index = index;
        found.shrunk = shrunk;
        found.stride = stride;
        return found;
    }
    float* head_results(i64 row, i64 head) const {
        return reinterpret_cast<float*>(state.shrunk.data) + row * state.head_stride() + head * state.padded_rank;
    }
    float* results(i64 row, i64 module) const {
        return reinterpret_cast<float*>(state.shrunk.data) + row * state.stride() + module * state.padded_rank;
    }
};

// What is added to the results of modules that read the same rows; must live until their jobs have run.
struct LoraSums {
    LowRankSum sums[MAX_LORA_OUTPUTS];

    LoraSums(const StepLora& step, const LoraModules& read) {
        for (i32 i = 0; i < read.count; ++i) sums[i] = step.sum(read, i);
    }
    const LowRankSum* operator[](i32 i) const { return sums[i].rows == nullptr ? nullptr : &sums[i]; }
};

}  // namespace quire
