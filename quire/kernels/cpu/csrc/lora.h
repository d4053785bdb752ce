// LoRA adapters of a plan: low-rank products that are added to the outputs of linear layers, for rows that have an adapter.
#pragma once
#include <memory>
#include <vector>

#include "native_weight.h"

namespace quire {

// The linear layers that can be adapted. With latent attention, k is the projection to the cached row. The head's pair is that of
// the layer after the last one.
enum class LoraModule : i32 { q, k, v, o, q_a, gate, up, down, shared_gate, shared_up, shared_down, head };
constexpr i32 NUM_LORA_MODULES = 12;
// Modules that read the same rows and are computed together.
constexpr i32 MAX_LORA_OUTPUTS = 3;
// Rows of an adapter that one thread multiplies with its first matrix.
constexpr i32 MAX_LORA_ROWS = 4;

// b includes the scale of the adapter.
struct LoraAdapter {
    std::vector<LowRankWeights> weights;  // by layers, then modules
    std::vector<std::shared_ptr<NativeWeight>> matrices;  // that `weights` points to
    i32 num_layers, rank = 0;  // the largest

    explicit LoraAdapter(i32 count) : weights((static_cast<size_t>(count) + 1) * NUM_LORA_MODULES), num_layers(count) {}
    // Set a pair. Throws std::invalid_argument for matrices that do not fit together.
    void set(i32 layer, i32 module, std::shared_ptr<NativeWeight> a, std::shared_ptr<NativeWeight> b);
    static i32 index(i32 layer, LoraModule module) { return layer * NUM_LORA_MODULES + static_cast<i32>(module); }
};

// Up to MAX_LORA_ROWS rows of one adapter.
struct LoraTile {
    const LowRankWeights* weights;
    i32 count, rows[MAX_LORA_ROWS];
};

// The adapters of some rows. tables: of each row the weights of its adapter, null: it has none; used: those of all rows, each once; tiles:
// the rows of an adapter, which rise, together.
struct LoraRows {
    std::vector<const LowRankWeights*> tables, used;
    std::vector<LoraTile> tiles;

    void clear();
    bool is_empty() const { return used.empty(); }
};

// The adapters of a plan, the rows of the current step, and the memory of their products.
struct LoraState {
    std::vector<std::shared_ptr<LoraAdapter>> adapters;  // by number; null: the number is free
    std::vector<i32> numbers, kept_numbers;  // adapter of each token of the last step, and of each row that it kept; -1: none
    // Of all tokens, of the wanted rows, and of rows that get logits.
    LoraRows all, wanted, logit;
    Memory shrunk{0};  // results of the first matrices: [rows][MAX_LORA_OUTPUTS][padded_rank] f32
    i32 padded_rank = 0;  // the largest of the adapters, a multiple of 16

    // Group rows by their adapters' numbers.
    void group(const std::vector<i32>& row_numbers, LoraRows& found) const;
    // Take memory for this many rows.
    void reserve(i32 num_rows);
    i64 stride() const { return static_cast<i64>(MAX_LORA_OUTPUTS) * padded_rank; }
};

}  // namespace quire
