// Which tokens of a step a rank computes: with prefill context parallelism in all layers, with attention data parallelism in
// attention.
#pragma once
#include <vector>

#include "step_input.h"

namespace quire {

// Runs of fewer tokens than this are computed by one rank.
constexpr i32 MIN_DIVIDED_TOKENS = 64;

// A rank's part of a step, as a step of its own. A long run of tokens is cut in two pieces for each rank; a rank takes a piece
// near the start and the one as near to the end, so that all attend to equally many tokens. The others go to the rank with the
// fewest tokens. All ranks make the same division of the same step.
struct DividedRows {
    std::vector<i64> token_ids, positions, slots, window_slots;
    std::vector<i32> starts, lengths, tables, window_tables, drafts;
    std::vector<u64> ancestors;
    std::vector<i32> wanted;         // of the rank's rows
    std::vector<i32> rows;           // of all tokens: the place of each row of this rank
    std::vector<i32> wanted_places;  // in StepInput::wanted_rows, of each of `wanted`

    // Make the part of rank `rank` of `size`; the result has addresses in this object. `in` is a step of sequences' tokens.
    StepInput take(const StepInput& in, int rank, int size);
    // Make the part of the sequences at home on a rank: those whose first block is one of blocks [home * num_blocks, (home + 1) *
    // num_blocks). Its slots and tables count from the first of these.
    StepInput take_home(const StepInput& in, int home, i32 num_blocks, i32 block_size);

private:
    StepInput finish(const StepInput& in);
    void add(const StepInput& in, i32 sequence, i32 first, i32 last);
};

}  // namespace quire
