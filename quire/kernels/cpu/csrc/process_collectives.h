// Collectives of ranks that share memory. Every rank of a group makes the same calls in the same order, with sizes that agree.
//
// Shared memory of a group: `size` slots of slot_bytes, one written by each rank, and one more for results. Data larger than a
// slot is processed in rounds. Each round is: write the own slot, barrier, read the others' slots, barrier; so a slot is never
// written while another rank reads it, in any order of calls.
#pragma once
#include "process_barrier.h"

namespace quire {

enum class SumType : i32 { f32 = 0, bf16 = 1 };

// A pair of ranks has one for each direction: a piece of a message, written when `read` has reached `written`.
struct alignas(128) Mailbox {
    SharedCounter written;  // pieces, by the sender
    alignas(64) SharedCounter read;  // pieces, by the receiver
};

struct CollectiveGroup {
    BarrierState* state;
    int rank, size;
    u8* slots;        // (size + 1) * slot_bytes, at a multiple of 64
    i64 slot_bytes;   // a multiple of 64 * size
    // How this group waits, so that a caller can check signals in between; false: aborted.
    bool (*wait_barrier)(CollectiveGroup& group);
    bool (*wait_counter)(CollectiveGroup& group, SharedCounter* counter, u32 least, int peer);
    void* context;
};

// All return false in a group that was aborted; the outputs are then undefined.

// Replace x by the sum of the ranks' x, added in f32 in the order of ranks, rounded once at the end. The same bits on every rank.
bool all_reduce(CollectiveGroup& group, void* x, i64 count, SumType type);
// x: counts[0] + counts[1] + ... elements, a part for each rank; out: the sum of this rank's part, as in all_reduce.
bool reduce_scatter(CollectiveGroup& group, void* out, const void* x, const i64* counts, SumType type);
// out: the parts of all ranks one after the other; part_bytes: of each rank.
bool all_gather(CollectiveGroup& group, void* out, const void* part, const i64* part_bytes);
// x: a part for each rank, of in_bytes; out: what each rank sent here, of out_bytes. *mismatch: a rank whose sizes differ from
// these, -1: none; nothing is exchanged then.
bool all_to_all(CollectiveGroup& group, void* out, const i64* out_bytes, const void* x, const i64* in_bytes, int* mismatch);
bool broadcast(CollectiveGroup& group, void* x, i64 bytes, int source);

// Between two ranks; the others take no part. A message of at most mailbox_bytes is sent without waiting for its receiver, unless
// the one before has not been received.
bool send_message(CollectiveGroup& group, Mailbox* mailbox, i64 mailbox_bytes, const void* x, i64 bytes, int peer);
bool receive_message(CollectiveGroup& group, Mailbox* mailbox, i64 mailbox_bytes, void* x, i64 bytes, int peer);

// For rows that lie in shared memory already: parts[r] = parts + r * part_stride (elements) of count elements each. Sums this
// rank's slice of them in the order of ranks into `out`, which all ranks share, between two barriers.
bool ordered_sum(BarrierState* state, int rank, int size, const void* parts, i64 part_stride, void* out, i64 count, SumType type);

}  // namespace quire
