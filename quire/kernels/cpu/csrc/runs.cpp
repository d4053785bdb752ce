// The positions of the tokens of runs.
#include "runs.h"

#include <algorithm>
#include <stdexcept>

namespace quire {

Placement::Placement(const TokenRuns& runs, i32 block_size, const std::vector<i32>& room) {
    const i32 count = runs.count();
    const size_t sequences = static_cast<size_t>(count), num_tokens = runs.token_ids.size();
    if (runs.starts.size() != sequences + 1 || runs.origins.size() != sequences || runs.tables.size() != sequences ||
        (!room.empty() && room.size() != sequences) || runs.starts[0] != 0 ||
        static_cast<size_t>(runs.starts[count]) != num_tokens)
        throw std::invalid_argument("runs of tokens contradict each other");
    const i32 max_blocks = runs.has_windows ? runs.max_blocks / 2 : runs.max_blocks;
    const auto last_place = [&](i32 s) { return runs.ends[s] + (room.empty() ? 0 : room[s]); };
    for (i32 s = 0; s < count; ++s) {
        const i32 size = runs.starts[s + 1] - runs.starts[s];
        if (size < 1 || runs.origins[s] < 0 || runs.origins[s] % block_size != 0 || runs.ends[s] - size < runs.origins[s])
            throw std::invalid_argument("a run of tokens begins before its table does");
        if (last_place(s) > static_cast<i64>(max_blocks) * block_size)
            throw std::invalid_argument("a run of tokens leaves its table");
        stride = std::max<i64>(stride, ceil_div(last_place(s) - runs.origins[s], block_size));
    }
    positions.resize(num_tokens);
    slots.resize(num_tokens);
    lengths.resize(sequences);
    tables.resize(sequences * stride);
    if (runs.has_windows) {
        window_slots.resize(num_tokens);
        window_tables.resize(sequences * stride);
    }
    for (i32 s = 0; s < count; ++s) {
        const i64* table = reinterpret_cast<const i64*>(runs.tables[s]);
        const i32 begin = runs.starts[s], size = runs.starts[s + 1] - begin, first = runs.ends[s] - size;
        for (i32 i = 0; i < size; ++i) {
            const i32 position = first + i;
            positions[begin + i] = position;
            slots[begin + i] = table[position / block_size] * block_size + position % block_size;
        }
        const i32 first_block = runs.origins[s] / block_size, num_blocks = ceil_div(last_place(s), block_size) - first_block;
        for (i32 b = 0; b < num_blocks; ++b) tables[s * stride + b] = static_cast<i32>(table[first_block + b]);
        lengths[s] = runs.ends[s] - runs.origins[s];
        if (!runs.has_windows) continue;
        const i64* windows = table + max_blocks;
        for (i32 i = 0; i < size; ++i)
            window_slots[begin + i] = windows[(first + i) / block_size] * block_size + (first + i) % block_size;
        for (i32 b = 0; b < num_blocks; ++b) window_tables[s * stride + b] = static_cast<i32>(windows[first_block + b]);
    }
}

void Placement::fill(StepInput& input, const TokenRuns& runs) const {
    input.token_ids = runs.token_ids.data();
    input.positions = positions.data();
    input.slots = slots.data();
    input.batch.num_sequences = runs.count();
    input.batch.num_tokens = static_cast<i32>(runs.token_ids.size());
    input.batch.query_starts = runs.starts.data();
    input.batch.context_lens = lengths.data();
    input.batch.block_tables = tables.data();
    input.batch.table_stride = stride;
    input.window_slots = runs.has_windows ? window_slots.data() : nullptr;
    input.window_tables = runs.has_windows ? window_tables.data() : nullptr;
}

}  // namespace quire
