// What a step computes.
#pragma once
#include <vector>

#include "attention.h"

namespace quire {

// Which sequences of a step skip runs, see KeyBounds. keys: under which the plan keeps the bounds of each, 0: it reads all.
struct BoundsRequest {
    std::vector<i64> keys;
    std::vector<i32> firsts;
    std::vector<float> gaps;
};

// The inputs of one step, as addresses; see contracts in kernels/reference/attention.py.
struct StepInput {
    const i64* token_ids = nullptr;
    const i64* positions = nullptr;
    const i64* slots = nullptr;
    Batch batch;
    // Slots and block tables of layers that are windowed; the tables have the stride of those of `batch`. Null: no layer is.
    const i64* window_slots = nullptr;
    const i32* window_tables = nullptr;
    // Rows with results, first those that get logits. Unless keeps_all, only these are computed past the last
    // attention: no later block mixes rows. If they are few and end their sequences, only they have queries there.
    const i32* wanted_rows = nullptr;
    i32 num_wanted_rows = 0, num_logit_rows = 0;
    bool keeps_all = false;
    float* logits = nullptr;  // [num_logit_rows][vocab], or null with `best`
    // [num_logit_rows], instead of logits, see best_tokens. Only with has_plain_logits.
    i32* best = nullptr;
    // The layers to run, in order; null: all. Keys and values of the others are not written.
    const i32* layers = nullptr;
    i32 num_layers = 0;
    // Of a plan whose entry is not token: [num_tokens][feature_size].
    const float* features = nullptr;
    i32 feature_size = 0;
    // The number of each token's adapter, -1: none; null: no token has one. See Plan::set_adapter.
    const i32* row_adapters = nullptr;
    // Of a plan with recurrent states, for each sequence: the row of the states from which it starts, -1: zeros; and where its
    // saves begin [num_sequences + 1], which are pairs: a number of its tokens, in rising order, and the row that gets the state
    // after them.
    const i32* state_sources = nullptr;
    const i32* save_starts = nullptr;
    const i32* saves = nullptr;
    const BoundsRequest* bounds = nullptr;  // null: none
    // Of a pipeline stage: the residual stream [num_tokens][row_stride(hidden)], in memory of the caller. The first stage writes
    // the embeddings there, and every other stage continues with the rows of the previous one, in place.
    float* rows = nullptr;
};

}  // namespace quire
