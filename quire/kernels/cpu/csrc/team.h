// A team of threads inside one OpenMP region: a barrier and shared work, for kernels that are called by every thread of a step.
#pragma once
#include "simd_types.h"

namespace quire {

struct Team;

// One thread's view of a team. Kernels are called by all threads of the team with the same arguments and split the work by
// rank, or by `next`.
struct Worker {
    int rank;
    int size;
    Team* team;
};

// Wait until every thread of the team has arrived. Resets the counter of `next`.
void barrier(Worker& worker);

// Return the first of `grain` items for this thread, or a value >= count if none are left. Items are handed out in
// order, each once, between two barriers; a thread that is slow or descheduled takes fewer.
i64 next(Worker& worker, i64 count, i64 grain);

struct Range {
    i64 first, last;
};

// Return some of `count` items for this thread, none when all are taken: each item once between two barriers. Every thread has a
// contiguous share, which it takes from the front, and then what is left of others' from their ends. At most `most` at a time,
// and fewer if little is left, so that all threads end together; a single thread gets all. A share has less than 2^22 items.
Range next_of_share(Worker& worker, i64 count, i64 most);

// Call body(item) for every item, shared by the threads of a team, and wait for all. A thread has the same share every time, so
// its earlier writes are in its caches.
template <class Body>
static inline void each_item(Worker& worker, i64 count, Body body) {
    for (Range range = next_of_share(worker, count, count); range.first < range.last; range = next_of_share(worker, count, count))
        for (i64 item = range.first; item < range.last; ++item) body(item);
    barrier(worker);
}

// Call body(argument, worker) on num_threads threads and return when all have returned. Denormals are flushed inside (FTZ, DAZ);
// the callers' setting is restored.
void run_team(int num_threads, void (*body)(void* argument, Worker& worker), void* argument);

// Memory of the calling thread, of at least this many bytes, kept until the thread ends; its content is lost when it grows. Null
// if there is none.
u8* thread_scratch(i64 bytes);

// The contiguous share of thread `rank` of `count` items: [share_start, share_start of rank + 1).
static inline i64 share_start(i64 count, int rank, int size) { return count * rank / size; }

}  // namespace quire
