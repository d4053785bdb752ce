// Drafting by a plan whose rows begin with features: a step, and then as many as there are drafts, each behind what the last one said.
#include <string.h>

#include <algorithm>
#include <stdexcept>

#include "plan.h"

namespace quire {

void Plan::draft(const StepInput& first, const DraftRun& drafts) {
    const i32 count = first.batch.num_sequences, total = drafts.num_drafts;
    std::vector<float> logits(static_cast<size_t>(count) * vocab_), features(static_cast<size_t>(count) * hidden_);
    std::vector<i64> tokens(count), positions(count), slots(count);
    std::vector<i32> starts(count + 1), lengths(count), rows(count);
    StepInput in = first;
    in.logits = logits.data();
    in.num_wanted_rows = in.num_logit_rows = count;
    in.keeps_all = false;
    for (i32 s = 0; s < count; ++s) {
        starts[s + 1] = s + 1;
        rows[s] = first.batch.query_starts[s + 1] - 1;
        positions[s] = first.positions[rows[s]];
        lengths[s] = first.batch.context_lens[s];
    }
    in.wanted_rows = rows.data();
    for (i32 i = 0;; ++i) {
        step(in);
        for (i32 s = 0; s < count; ++s) {
            const float* row = logits.data() + static_cast<size_t>(s) * vocab_;
            const i32 best = static_cast<i32>(std::max_element(row, row + vocab_) - row);
            tokens[s] = drafts.vocabulary == nullptr ? best : drafts.vocabulary[best];
            drafts.tokens[static_cast<i64>(s) * total + i] = tokens[s];
        }
        if (i + 1 >= total) return;
        recycled(count, features.data());
        for (i32 s = 0; s < count; ++s) {
            const i32 size = layers_[0]->kv.block_size;
            // A sequence that has its drafts goes on in its last slot, until the others have theirs.
            if (i + 1 < drafts.counts[s]) {
                ++lengths[s];
                ++positions[s];
            }
            const i32 place = lengths[s] - 1;
            slots[s] = static_cast<i64>(first.batch.block_tables[s * first.batch.table_stride + place / size]) * size + place % size;
            rows[s] = s;
        }
        in.token_ids = tokens.data();
        in.positions = positions.data();
        in.slots = slots.data();
        in.batch.num_tokens = count;
        in.batch.query_starts = starts.data();
        in.batch.context_lens = lengths.data();
        in.features = features.data();
        in.feature_size = hidden_;
    }
}

void Plan::recycled(i32 count, float* out) {
    if (recycles_normed_) {
        std::vector<i32> rows(count);
        for (i32 i = 0; i < count; ++i) rows[i] = i;
        hidden_states(rows.data(), count, out);
        return;
    }
    const std::lock_guard<std::mutex> lock(guard_);
    if (count > capacity_) throw std::invalid_argument("more rows than the last step had");
    for (i32 i = 0; i < count; ++i) memcpy(out + static_cast<i64>(i) * hidden_, x_ + i * row_stride(hidden_), sizeof(float) * hidden_);
}

void Plan::layer_inputs(const i32* rows, i32 count, float* out) {
    const std::lock_guard<std::mutex> lock(guard_);
    const i64 width = static_cast<i64>(kept_layers_.size()) * hidden_;
    for (i32 i = 0; i < count; ++i) {
        if (rows[i] >= capacity_) throw std::invalid_argument("more rows than the last step had");
        memcpy(out + i * width, kept_ + rows[i] * width, sizeof(float) * width);
    }
}

}  // namespace quire
