// The ranks that hold shards of one model (tensor parallelism), and the rows that they share.
//
// Every weight is sharded by its outputs: a rank computes the whole sum of each of its outputs, in the same order as a single
// rank, and writes it to its columns of rows in memory that all ranks map. After a barrier every rank reads whole rows. So
// nothing is summed across ranks, and logits have the same bits for any number of ranks.
#pragma once
#include <functional>
#include <vector>

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
    // Map at least this many bytes, keeping the content. Throws std::runtime_error if the system has no memory.
    u8* reserve(i64 num_bytes);
    i64 num_bytes() const { return num_bytes_; }
    u8* data() const { return data_; }

private:
    int file_ = -1;
    u8* data_ = nullptr;
    i64 num_bytes_ = 0;
};

// Values that a rank has written to the shared rows since its last barrier: `count` times `num_bytes`, `stride` bytes apart.
struct WrittenBlock {
    u8* data;
    i64 count, stride, num_bytes;
};

struct RankGroup {
    BarrierState* barrier = nullptr;  // null: one rank has the whole model
    int rank = 0, size = 1;
    i32 first_output = 0;  // of the vocabulary: of the embedding's rows and the head's outputs
    // Decode context parallelism: ranks [rank - place, rank - place + num_places) each hold some chunks of the keys and values of
    // every sequence, in num_local_blocks blocks.
    i32 place = 0, num_places = 1, num_local_blocks = 0;
    // Attention data parallelism: every home, of home_size consecutive ranks, has all heads, and the keys and values of its own
    // sequences, in num_local_blocks blocks. It computes the attention of these; block b of a table is at home b /
    // num_local_blocks. All else is sharded. 0: there are no homes.
    i32 home_size = 0;
    SharedRows rows;
    u64 num_barriers = 0;
    bool is_aborted = false;
    std::vector<WrittenBlock> written;
    // For ranks without shared memory (on other hosts): exchanges the written data with the other ranks, at the
    // same offsets from `base`, whose layout is the same on every rank. False: the group has ended. Empty: the memory is shared.
    std::function<bool(u8* base, const std::vector<WrittenBlock>& written)> exchange;

    // Record what the rank has written before the next barrier.
    void wrote(float* first, i64 count, i64 stride, i64 width) {
        if (barrier != nullptr && count > 0 && width > 0)
            written.push_back({reinterpret_cast<u8*>(first), count, stride * 4, width * 4});
    }
    // Wait until all ranks have arrived and their writes are visible.
    void meet();
};

}  // namespace quire
