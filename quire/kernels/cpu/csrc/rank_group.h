// The ranks that hold shards of one model (tensor parallelism), and the rows that they share.
//
// Every weight is sharded by its outputs: a rank forms the whole sum of each of its outputs, in the order that one rank alone takes, and
// writes it to its columns of rows in memory that all ranks map. After a barrier every rank reads whole rows. So nothing is summed
// across ranks, and logits have the same bits at any number of ranks.
#pragma once
#include "process_barrier.h"

namespace quire {

// Memory of a file that all ranks map; it grows, at the same steps and to the same size in every rank.
class SharedRows {
public:
    SharedRows() = default;
    SharedRows(const SharedRows&) = delete;
    SharedRows& operator=(const SharedRows&) = delete;
    ~SharedRows();

    // The file, which the caller keeps open.
    void set_file(int file) { file_ = file; }
    // Map at least so many bytes. What was in them is still there. Throws std::runtime_error where the system has no memory.
    u8* reserve(i64 num_bytes);
    i64 num_bytes() const { return num_bytes_; }

private:
    int file_ = -1;
    u8* data_ = nullptr;
    i64 num_bytes_ = 0;
};

struct RankGroup {
    BarrierState* barrier = nullptr;  // null: one rank has the whole model
    int rank = 0, size = 1;
    i32 first_output = 0;  // of the vocabulary: of the embedding's rows and the head's outputs
    SharedRows rows;
    u64 num_barriers = 0;
    bool is_aborted = false;
};

}  // namespace quire
