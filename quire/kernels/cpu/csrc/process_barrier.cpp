// The barrier between ranks: see process_barrier.h.
#include "process_barrier.h"

#include <sched.h>
#include <string.h>
#include <time.h>

#include "machine.h"
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {
namespace {

constexpr u32 YIELDS_PER_HEARTBEAT = 4;
// Where others want the core, one yield takes milliseconds: a wait then sleeps after this time, and sees when it is over.
constexpr i64 MAX_YIELD_NS = 5 * 1000 * 1000;

bool has_reached(u32 value, u32 least) { return static_cast<i32>(value - least) >= 0; }

u32 load(const SharedCounter* counter) { return __atomic_load_n(&counter->value, __ATOMIC_ACQUIRE); }

// Sleep until the counter is woken, while it has `value`, for at most ns. Not FUTEX_PRIVATE: other processes wake it.
void sleep_on(SharedCounter* counter, u32 value, i64 ns) {
    const timespec limit = {static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
#if defined(__linux__)
    syscall(SYS_futex, &counter->value, FUTEX_WAIT, value, &limit, nullptr, 0);
#else
    (void)counter, (void)value;
    const timespec step = {0, ns < 100000 ? static_cast<long>(ns) : 100000};
    (void)limit;
    nanosleep(&step, nullptr);
#endif
}

void wake_sleepers(SharedCounter* counter) {
#if defined(__linux__)
    syscall(SYS_futex, &counter->value, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
#else
    (void)counter;
#endif
}

}  // namespace

i64 monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<i64>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

void initialise_barrier(BarrierState* state, int num_ranks, u32 num_spins, u32 num_yields, u32 message_yield_ns) {
    memset(static_cast<void*>(state), 0, sizeof(*state));
    state->num_ranks = static_cast<u32>(num_ranks);
    state->num_spins = num_spins;
    state->num_yields = num_yields;
    state->message_yield_ns = message_yield_ns;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

namespace {

WaitResult sleep_for_counter(BarrierState* state, int rank, SharedCounter* counter, u32 least, i64 timeout_ns) {
    const i64 end_ns = timeout_ns < 0 ? 0 : monotonic_ns() + timeout_ns;
    for (;;) {
        raise_heartbeat(state, rank);
        // Announce the sleeper before the last check: advance_counter stores the value before it checks for sleepers.
        __atomic_fetch_add(&counter->num_sleepers, 1, __ATOMIC_SEQ_CST);
        const u32 value = __atomic_load_n(&counter->value, __ATOMIC_SEQ_CST);
        const bool is_done = has_reached(value, least), is_aborted = read_abort_word(state) != 0;
        const i64 left_ns = timeout_ns < 0 ? FUTEX_SLEEP_NS : end_ns - monotonic_ns();
        if (!is_done && !is_aborted && left_ns > 0) sleep_on(counter, value, left_ns < FUTEX_SLEEP_NS ? left_ns : FUTEX_SLEEP_NS);
        __atomic_fetch_sub(&counter->num_sleepers, 1, __ATOMIC_SEQ_CST);
        if (has_reached(load(counter), least)) return WaitResult::done;
        if (read_abort_word(state) != 0) return WaitResult::aborted;
        if (left_ns <= 0) return WaitResult::timed_out;
    }
}

}  // namespace

WaitResult wait_for_counter(BarrierState* state, int rank, SharedCounter* counter, u32 least, i64 timeout_ns, bool spins) {
    if (has_reached(load(counter), least)) return WaitResult::done;
    for (u32 spin = 0; spins && spin < state->num_spins; ++spin) {
        if (has_reached(load(counter), least)) return WaitResult::done;
        if (read_abort_word(state) != 0) return WaitResult::aborted;
        pause_briefly();
    }
    const i64 yield_ns = timeout_ns >= 0 && timeout_ns < MAX_YIELD_NS ? timeout_ns : MAX_YIELD_NS;
    const i64 end_ns = spins ? monotonic_ns() + yield_ns : 0;
    for (u32 turn = 0; spins && turn < state->num_yields; ++turn) {
        if (has_reached(load(counter), least)) return WaitResult::done;
        if (read_abort_word(state) != 0) return WaitResult::aborted;
        if (turn % YIELDS_PER_HEARTBEAT == 0) {
            raise_heartbeat(state, rank);
            if (monotonic_ns() >= end_ns) break;
        }
        sched_yield();
    }
    return sleep_for_counter(state, rank, counter, least, timeout_ns);
}

WaitResult wait_for_message(BarrierState* state, int rank, SharedCounter* counter, u32 least, i64 timeout_ns, bool spins) {
    if (spins && state->message_yield_ns > 0) {
        const i64 end_ns = monotonic_ns() + state->message_yield_ns;
        for (u32 turn = 0;; ++turn) {
            if (has_reached(load(counter), least)) return WaitResult::done;
            if (read_abort_word(state) != 0) return WaitResult::aborted;
            if (turn < state->num_spins) {
                pause_briefly();
                continue;
            }
            if (turn % YIELDS_PER_HEARTBEAT == 0) {
                raise_heartbeat(state, rank);
                if (monotonic_ns() >= end_ns) break;
            }
            sched_yield();
        }
    }
    return wait_for_counter(state, rank, counter, least, timeout_ns, spins && state->message_yield_ns == 0);
}

void advance_counter(SharedCounter* counter, u32 value) {
    __atomic_store_n(&counter->value, value, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&counter->num_sleepers, __ATOMIC_SEQ_CST) != 0) wake_sleepers(counter);
}

void arrive_at_barrier(BarrierState* state, int rank) {
    SharedCounter* arrived = &state->ranks[rank].arrived;
    advance_counter(arrived, __atomic_load_n(&arrived->value, __ATOMIC_RELAXED) + 1);
}

namespace {

WaitResult wait_for_others(BarrierState* state, int rank, int size, u32 wanted, i64 end_ns, bool spins) {
    for (int other = 0; other < size; ++other) {
        if (other == rank) continue;
        i64 left_ns = -1;
        if (end_ns >= 0) {
            left_ns = end_ns - monotonic_ns();
            if (left_ns < 0) left_ns = 0;
        }
        const WaitResult result = wait_for_counter(state, rank, &state->ranks[other].arrived, wanted, left_ns, spins);
        if (result != WaitResult::done) return result;
    }
    return WaitResult::done;
}

}  // namespace

WaitResult wait_for_barrier(BarrierState* state, int rank, int size, i64 timeout_ns, bool spins) {
    const u32 wanted = __atomic_load_n(&state->ranks[rank].arrived.value, __ATOMIC_RELAXED);
    bool is_late = false;
    for (int other = 0; other < size && !is_late; ++other) is_late = !has_reached(load(&state->ranks[other].arrived), wanted);
    if (!is_late) return WaitResult::done;
    const i64 began_ns = monotonic_ns();
    const WaitResult result = wait_for_others(state, rank, size, wanted, timeout_ns < 0 ? -1 : began_ns + timeout_ns, spins);
    count_wait(state, rank, monotonic_ns() - began_ns, result == WaitResult::timed_out ? 0 : 1);
    return result;
}

bool process_barrier_wait(BarrierState* state, int rank, int size) {
    arrive_at_barrier(state, rank);
    return wait_for_barrier(state, rank, size, -1) == WaitResult::done;
}

int find_missing_rank(const BarrierState* state, int rank, int size) {
    const u32 wanted = load(&state->ranks[rank].arrived);
    for (int other = 0; other < size; ++other)
        if (!has_reached(load(&state->ranks[other].arrived), wanted)) return other;
    return -1;
}

bool abort_group(BarrierState* state, int rank, AbortReason reason) {
    u32 expected = 0;
    const u32 word = static_cast<u32>(reason) << 16 | static_cast<u32>(rank + 1);
    const bool is_first =
        __atomic_compare_exchange_n(&state->abort_word, &expected, word, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    for (u32 other = 0; other < state->num_ranks && other < static_cast<u32>(MAX_RANKS); ++other)
        wake_sleepers(&state->ranks[other].arrived);
    return is_first;
}

}  // namespace quire
