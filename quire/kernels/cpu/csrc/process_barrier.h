// A barrier between ranks, in memory that all of them map: processes of one host, or threads of one process.
//
// Every rank counts the barriers it has arrived at. A rank has passed its n-th barrier when every rank has arrived at n or more,
// so nothing is ever reset and a missing rank is identified. A wait spins, then yields its core, then sleeps on a futex for at
// most 50 ms at a time; between these it looks at the abort word and raises the heartbeat of its rank.
//
// The types hold plain numbers, changed only by the functions below; all zeros is a valid state before initialise_barrier. Every
// function here may be called from files of any instruction set: all are compiled once, without ISA flags.
#pragma once
#include "simd_types.h"

namespace quire {

constexpr int MAX_RANKS = 64;
constexpr i64 FUTEX_SLEEP_NS = 50 * 1000 * 1000;

// A counter that one rank increases and others wait for. Compared as signed differences, so it may wrap.
struct SharedCounter {
    u32 value;
    u32 num_sleepers;
};

struct alignas(128) RankState {
    SharedCounter arrived;  // barriers that this rank has arrived at
    // On a separate cache line: written in waits, and by the loop of a worker, while others read `arrived`.
    alignas(64) u32 heartbeat;
    u32 location;      // where the rank is, for messages: a layer's number + 1, 0 for none. Set by the computing thread
    // increased by a thread of the rank's process, independent of the rank's work; constant in a stopped process
    u32 process_beat;
    i32 pid;
    // Written by the rank's thread that waits, read by the leader for metrics.
    u64 num_waits;  // barriers at which another rank was missing when this one arrived
    u64 wait_ns;    // of these; a barrier that all have reached reads no clock
    u64 num_bytes;  // of rows that this rank wrote for the others
};

// Why a group ends. The abort word is reason << 16 | rank + 1; 0 while the group runs.
enum class AbortReason : u32 { none = 0, ended = 1, failed = 2, stalled = 3, closed = 4 };

struct alignas(128) BarrierState {
    u32 abort_word;
    u32 num_ranks;
    u32 num_spins;   // before a wait yields
    u32 num_yields;  // before it sleeps
    u32 message_yield_ns;  // how long the reader of messages yields before it sleeps, see wait_for_message
    RankState ranks[MAX_RANKS];
};

enum class WaitResult { done = 0, aborted = 1, timed_out = 2 };

// Set up a state before any rank uses it. With more ranks than cores spin little: the missing rank needs the core.
void initialise_barrier(BarrierState* state, int num_ranks, u32 num_spins, u32 num_yields, u32 message_yield_ns = 0);

// Arrive at the next barrier and wait until all ranks have. False: the group was aborted (see abort_word) while a rank is
// missing, and the writes of other ranks are undefined. A barrier that all have reached is passed even in an aborted group, so
// that all ranks agree; the next barrier with a missing rank ends. All that a rank wrote before is visible to the others after.
bool process_barrier_wait(BarrierState* state, int rank, int size);

// The two halves. A wait may be repeated after it timed out, and need not spin then; timeout_ns < 0: no limit.
void arrive_at_barrier(BarrierState* state, int rank);
WaitResult wait_for_barrier(BarrierState* state, int rank, int size, i64 timeout_ns, bool spins = true);

// The first rank that has arrived at fewer barriers than `rank`; -1 if there is none.
int find_missing_rank(const BarrierState* state, int rank, int size);

// Wait until a counter has reached `least`; succeeds even in an aborted group if it has.
WaitResult wait_for_counter(BarrierState* state, int rank, SharedCounter* counter, u32 least, i64 timeout_ns, bool spins = true);
// The same for a message, which may arrive later, since another rank does other work: yields for message_yield_ns before it
// sleeps, so that a message soon after the previous one needs no wake-up.
WaitResult wait_for_message(BarrierState* state, int rank, SharedCounter* counter, u32 least, i64 timeout_ns, bool spins = true);
// Set this rank's counter, after all its earlier writes, and wake the sleepers on it.
void advance_counter(SharedCounter* counter, u32 value);

// End the group: every wait for something that has not come returns `aborted`, those that sleep at once or after 50 ms. Only the
// first call counts; returns whether this was it.
bool abort_group(BarrierState* state, int rank, AbortReason reason);

static inline u32 read_abort_word(const BarrierState* state) { return __atomic_load_n(&state->abort_word, __ATOMIC_ACQUIRE); }

// Signal that the rank is alive. Called by waits, and by loops that compute for long without one.
static inline void raise_heartbeat(BarrierState* state, int rank) {
    __atomic_fetch_add(&state->ranks[rank].heartbeat, 1, __ATOMIC_RELAXED);
}

static inline void add_count(u64* count, u64 more) {
    __atomic_store_n(count, __atomic_load_n(count, __ATOMIC_RELAXED) + more, __ATOMIC_RELAXED);
}

// Count a wait of a rank for others, by its own thread; count 0: one that continues.
static inline void count_wait(BarrierState* state, int rank, i64 ns, u64 count = 1) {
    add_count(&state->ranks[rank].num_waits, count);
    add_count(&state->ranks[rank].wait_ns, static_cast<u64>(ns));
}

// Nanoseconds of the monotonic clock.
i64 monotonic_ns();

static inline void set_location(BarrierState* state, int rank, u32 location) {
    __atomic_store_n(&state->ranks[rank].location, location, __ATOMIC_RELAXED);
}

}  // namespace quire
