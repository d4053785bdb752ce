// LoRA adapters of a plan: low-rank products that are added to the outputs of linear layers, for rows that have an adapter.
#pragma once
#include <memory>
#include <vector>

#include "native_weight.h"

namespace quire {

// The linear layers that can be adapted. With latent attention, k is the projection to the cached row. The head's pair is that of
// the layer after the last one. A mixer has mix_in and up to five further parts of its inputs, see Mixer in plan.h.
enum class LoraModule : i32 {
    q, k, v, o, q_a, gate, up, down, router, shared_gate, shared_up, shared_down, shared_scale,
    mix_in, mix_low_z = 19, mix_low_a, mix_read, mix_step, mix_out, attn_gate,
    index_q, index_k, index_weights, latent_in, latent_out, block_out, block_q_in, block_k_in, block_v_in, block_q_out,
    block_k_out, block_v_out,
    block_gate_in, block_up_in, block_gate_out, block_up_out, head,
};
constexpr i32 NUM_LORA_MODULES = 42;
// What an adapter of kv_b adds to the two products of a head of latent attention, see Latent in plan.h.
enum class HeadModule : i32 { key_up, value_up };
constexpr i32 NUM_HEAD_MODULES = 2;
// The linear layers of an expert that can be adapted.
enum class ExpertModule : i32 { gate, up, down };
constexpr i32 NUM_EXPERT_MODULES = 3;
// Modules that read the same rows and are computed together.
constexpr i32 MAX_LORA_OUTPUTS = 6;
// Rows of an adapter that one thread multiplies with its first matrix.
constexpr i32 MAX_LORA_ROWS = 8;

// b includes the scale of the adapter. num_experts, num_heads: the most that a layer of the model has, of heads with latent
// attention.
struct LoraAdapter {
    // by layers, then modules; after these, of the experts by layers, experts, then modules; then of heads
    std::vector<LowRankWeights> weights;
    std::vector<std::shared_ptr<NativeWeight>> matrices;  // that `weights` points to
    i32 num_layers, num_experts, num_heads, rank = 0;  // the largest
    bool adapts_experts = false, adapts_heads = false;

    LoraAdapter(i32 layers, i32 experts, i32 heads)
        : weights(head_index(layers, experts, heads, layers, 0, HeadModule::key_up)), num_layers(layers), num_experts(experts),
          num_heads(heads) {}
    // Set a pair. Throws std::invalid_argument for matrices that do not fit together.
    void set(i32 layer, i32 module, std::shared_ptr<NativeWeight> a, std::shared_ptr<NativeWeight> b);
    void set_expert(i32 layer, i32 expert, i32 module, std::shared_ptr<NativeWeight> a, std::shared_ptr<NativeWeight> b);
    void set_head(i32 layer, i32 head, i32 module, std::shared_ptr<NativeWeight> a, std::shared_ptr<NativeWeight> b);
    static i32 index(i32 layer, LoraModule module) { return layer * NUM_LORA_MODULES + static_cast<i32>(module); }
    static i32 expert_index(i32 layers, i32 experts, i32 layer, i32 expert, ExpertModule module) {
        return (layers + 1) * NUM_LORA_MODULES + (layer * experts + expert) * NUM_EXPERT_MODULES + static_cast<i32>(module);
    }
    static i32 head_index(i32 layers, i32 experts, i32 heads, i32 layer, i32 head, HeadModule module) {
        return expert_index(layers, experts, layers, 0, ExpertModule::gate) + (layer * heads + head) * NUM_HEAD_MODULES +
            static_cast<i32>(module);
    }

private:
    void put(i32 index, std::shared_ptr<NativeWeight> a, std::shared_ptr<NativeWeight> b);
};

// Up to MAX_LORA_ROWS rows of one adapter.
struct LoraTile {
    const LowRankWeights* weights;
    i32 count, rows[MAX_LORA_ROWS];
};

// The adapters of some rows. tables, next, used: rows, next and used of LowRankSum; tiles: the rows of an adapter, which rise,
// together.
struct LoraRows {
    std::vector<const LowRankWeights*> tables, used;
    std::vector<i32> next;
    std::vector<LoraTile> tiles;

    void clear();
    bool is_empty() const { return used.empty(); }
};

// The adapters of the rows that a mixture sends to its experts, by places: as LoraRows, with the tiles of one expert after the
// other. used: of the expert at index `at`, those in [first_used[at], first_used[at + 1]); tile_experts: the index of each tile's
// expert.
struct LoraPlaces {
    std::vector<const LowRankWeights*> tables, used;
    std::vector<i32> next, first_used, tile_experts;  // next: counted from the expert's first place
    std::vector<LoraTile> tiles;
    std::vector<LowRankSum> sums;  // of gate, up and down of each expert

    void clear(i32 num_places);
};

// The adapters of a plan, the rows of the current step, and the memory of their products.
struct LoraState {
    std::vector<std::shared_ptr<LoraAdapter>> adapters;  // by number; null: the number is free
    std::vector<i32> numbers, kept_numbers;  // adapter of each token of the last step, and of each row that it kept; -1: none
    // Of all tokens, of the wanted rows, and of rows that get logits.
    LoraRows all, wanted, logit;
    i32 num_layers = 0, num_experts = 0, num_heads = 0;  // of the adapters
    bool adapts_experts = false;          // in this step
    LoraPlaces places;                    // of the mixture that is computed
    std::vector<LowRankSum> head_sums;    // of the heads whose products are computed
    Memory shrunk{0};  // results of the first matrices: [rows][num_outputs, or num_heads][padded_rank] f32
    i32 padded_rank = 0;  // the largest of the adapters, a multiple of 16
    i32 num_outputs = 0;  // the most modules of the model that read the same rows

    // Group rows by their adapters' numbers.
    void group(const std::vector<i32>& row_numbers, LoraRows& found) const;
    // Take memory for this many rows, of which num_tokens have heads.
    void reserve(i32 num_rows, i32 num_tokens);
    i64 stride() const { return static_cast<i64>(num_outputs) * padded_rank; }
    i64 head_stride() const { return static_cast<i64>(num_heads) * padded_rank; }
    i32 head_index(i32 layer, i32 head, HeadModule module) const {
        return LoraAdapter::head_index(num_layers, num_experts, num_heads, layer, head, module);
    }
    // Group the places of a layer's experts by the adapters of their rows: place p has row pair_rows[p], and the count experts of
    // this rank have places [firsts[i], firsts[i] + counts[i]).
    void group_places(i32 layer, const LoraRows& rows, const i32* pair_rows, i32 num_places, i32 count, const i32* experts,
        const i32* firsts, const i32* counts);
    i32 expert_index(i32 layer, i32 expert, i32 module) const {
        return LoraAdapter::expert_index(num_layers, num_experts, layer, expert, static_cast<ExpertModule>(module));
    }
};

}  // namespace quire
