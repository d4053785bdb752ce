#include "divided_rows.h"

#include <algorithm>

namespace quire {

void DividedRows::add(const StepInput& in, i32 sequence, i32 first, i32 last) {
    const Batch& batch = in.batch;
    for (i32 row = first; row < last; ++row) {
        rows.push_back(row);
        token_ids.push_back(in.token_ids[row]);
        positions.push_back(in.positions[row]);
        slots.push_back(in.slots[row]);
        if (in.window_slots != nullptr) window_slots.push_back(in.window_slots[row]);
        if (batch.num_drafts != nullptr) ancestors.push_back(batch.ancestors[row]);
    }
    starts.push_back(static_cast<i32>(rows.size()));
    lengths.push_back(batch.context_lens[sequence] - (batch.query_starts[sequence + 1] - last));
    const i64 at = sequence * batch.table_stride;
    tables.insert(tables.end(), batch.block_tables + at, batch.block_tables + at + batch.table_stride);
    if (in.window_tables != nullptr)
        window_tables.insert(window_tables.end(), in.window_tables + at, in.window_tables + at + batch.table_stride);
    if (batch.num_drafts != nullptr) drafts.push_back(batch.num_drafts[sequence]);
}

StepInput DividedRows::take(const StepInput& in, int rank, int size) {
    *this = DividedRows();
    starts.push_back(0);
    const Batch& batch = in.batch;
    std::vector<i64> loads(size, 0);
    for (i32 s = 0; s < batch.num_sequences; ++s) {
        const i64 begin = batch.query_starts[s], count = batch.query_starts[s + 1] - begin;
        const auto piece = [&](i64 index) { return static_cast<i32>(begin + count * index / (2 * size)); };
        if (count < MIN_DIVIDED_TOKENS || (batch.num_drafts != nullptr && batch.num_drafts[s] > 0)) {
            const auto least = std::min_element(loads.begin(), loads.end());
            *least += count;
            if (least - loads.begin() == rank) add(in, s, static_cast<i32>(begin), static_cast<i32>(begin + count));
            continue;
        }
        for (const i64 index : {static_cast<i64>(rank), static_cast<i64>(2 * size - 1 - rank)})
            if (piece(index) < piece(index + 1)) add(in, s, piece(index), piece(index + 1));
        for (int other = 0; other < size; ++other)
            loads[other] += piece(other + 1) - piece(other) + piece(2 * size - other) - piece(2 * size - 1 - other);
    }
    return finish(in);
}

StepInput DividedRows::take_home(const StepInput& in, int home, i32 num_blocks, i32 block_size) {
    *this = DividedRows();
    starts.push_back(0);
    const Batch& batch = in.batch;
    for (i32 s = 0; s < batch.num_sequences; ++s)
        if (batch.block_tables[s * batch.table_stride] / num_blocks == home)
            add(in, s, batch.query_starts[s], batch.query_starts[s + 1]);
    for (i64& slot : slots) slot -= static_cast<i64>(home) * num_blocks * block_size;
    for (i32& block : tables) block = block / num_blocks == home ? block % num_blocks : 0;  // entries past the context may be any
    return finish(in);
}

// Set what is wanted of the rows that were added, and return them as a step.
StepInput DividedRows::finish(const StepInput& in) {
    const Batch& batch = in.batch;
    for (i32 i = 0; i < in.num_wanted_rows && !in.keeps_all; ++i) {
        const auto found = std::lower_bound(rows.begin(), rows.end(), in.wanted_rows[i]);
        if (found == rows.end() || *found != in.wanted_rows[i]) continue;
        wanted.push_back(static_cast<i32>(found - rows.begin()));
        wanted_places.push_back(i);
    }
    StepInput own = in;
    own.token_ids = token_ids.data();
    own.positions = positions.data();
    own.slots = slots.data();
    own.window_slots = in.window_slots == nullptr ? nullptr : window_slots.data();
    own.window_tables = in.window_tables == nullptr ? nullptr : window_tables.data();
    own.batch.num_sequences = static_cast<i32>(lengths.size());
    own.batch.num_tokens = static_cast<i32>(rows.size());
    own.batch.query_starts = starts.data();
    own.batch.context_lens = lengths.data();
    own.batch.block_tables = tables.data();
    own.batch.num_drafts = batch.num_drafts == nullptr ? nullptr : drafts.data();
    own.batch.ancestors = batch.num_drafts == nullptr ? nullptr : ancestors.data();
    own.wanted_rows = wanted.data();
    own.num_wanted_rows = static_cast<i32>(wanted.size());
    return own;
}

}  // namespace quire
