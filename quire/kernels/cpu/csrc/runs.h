// Runs of tokens of sequences, and the arrays of a step that are made of them.
#pragma once
#include <vector>

#include "plan.h"

namespace quire {

// Sequence s owns tokens [starts[s], starts[s + 1]), whose positions end before ends[s]. Its block table is an i64 array at the
// address tables[s], of max_blocks blocks; attention reads it from the position origins[s] on, a multiple of the block size.
// With has_windows, a second table of as many blocks follows it, that of windowed layers, and max_blocks counts both.
struct TokenRuns {
    std::vector<i64> token_ids;
    std::vector<i32> starts, ends, origins;
    std::vector<uintptr_t> tables;
    i32 max_blocks = 0;
    bool has_windows = false;

    i32 count() const { return static_cast<i32>(ends.size()); }
};

// The arrays of a StepInput. Throws invalid_argument if runs are inconsistent or exceed their tables.
struct Placement {
    std::vector<i64> positions, slots;
    std::vector<i32> lengths, tables;
    std::vector<i64> window_slots;
    std::vector<i32> window_tables;
    i64 stride = 0;

    // room: positions after the end of each run that its table must have, or empty: none.
    Placement(const TokenRuns& runs, i32 block_size, const std::vector<i32>& room);
    // Set the fields of the tokens.
    void fill(StepInput& input, const TokenRuns& runs) const;
};

}  // namespace quire
