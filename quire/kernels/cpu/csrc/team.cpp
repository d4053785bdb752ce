#include "team.h"

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <memory>
#include <vector>

#include "machine.h"
#include "pack.h"
#include "thread_binding.h"

namespace quire {

// The taken part of a thread's share: from the front, from the back, and the phase; entries of another phase count as empty.
struct alignas(128) Taken {
    u64 word;
};

// Each counter on its own cache lines: false sharing would cost more than the barrier.
struct Team {
    alignas(128) i32 arrived;
    alignas(128) u32 phase;
    alignas(128) i64 taken;
    int size;
    std::vector<Taken> shares;
};

namespace {

constexpr int COUNT_BITS = 22;
constexpr u64 MAX_COUNT = (u64{1} << COUNT_BITS) - 1;

constexpr int SPINS_BEFORE_YIELD = 4000;

}  // namespace

void barrier(Worker& worker) {
    Team& team = *worker.team;
    if (team.size == 1) {
        team.taken = 0;
        ++team.phase;
        return;
    }
    const u32 phase = __atomic_load_n(&team.phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&team.arrived, 1, __ATOMIC_ACQ_REL) == team.size) {
        __atomic_store_n(&team.arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team.taken, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team.phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    // A thread that shares its core with another process must not spin for long.
    for (int spins = 0; __atomic_load_n(&team.phase, __ATOMIC_ACQUIRE) == phase; ++spins) {
        if (spins < SPINS_BEFORE_YIELD)
            pause_briefly();
        else
            sched_yield();
    }
}

i64 next(Worker& worker, i64 count, i64 grain) {
    Team& team = *worker.team;
    if (team.size == 1) {
        const i64 first = team.taken;
        team.taken += grain;
        return first;
    }
    // The load prevents the counter from overflowing when threads call again after the end.
    if (__atomic_load_n(&team.taken, __ATOMIC_RELAXED) >= count) return count;
    return __atomic_fetch_add(&team.taken, grain, __ATOMIC_RELAXED);
}

namespace {

// Take up to half of the rest of a thread's share, from one of its ends.
Range take(Team& team, u64 phase, int rank, i64 count, i64 most, bool is_front) {
    const i64 start = share_start(count, rank, team.size), end = share_start(count, rank + 1, team.size);
    u64* shared = &team.shares[rank].word;
    u64 word = __atomic_load_n(shared, __ATOMIC_RELAXED);
    for (;;) {
        const bool is_current = word >> (2 * COUNT_BITS) == phase;
        const i64 front = is_current ? static_cast<i64>(word >> COUNT_BITS & MAX_COUNT) : 0,
                  back = is_current ? static_cast<i64>(word & MAX_COUNT) : 0;
        const i64 left = end - start - front - back;
        if (left <= 0) return {0, 0};
        const i64 half = (left + 1) / 2, taken = half < most ? half : most;
        const u64 new_front = static_cast<u64>(front + (is_front ? taken : 0)),
                  new_back = static_cast<u64>(back + (is_front ? 0 : taken));
        const u64 now = phase << (2 * COUNT_BITS) | new_front << COUNT_BITS | new_back;
        if (!__atomic_compare_exchange_n(shared, &word, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
        return is_front ? Range{start + front, start + front + taken} : Range{end - back - taken, end - back};
    }
}

}  // namespace

Range next_of_share(Worker& worker, i64 count, i64 most) {
    Team& team = *worker.team;
    if (team.size == 1) {
        // A single thread: one run, without atomic operations.
        const i64 first = team.taken;
        team.taken = count;
        return {first, count};
    }
    // From 1: only words from which nothing was taken have phase 0.
    const u64 phase = (__atomic_load_n(&team.phase, __ATOMIC_RELAXED) + u64{1}) & ((u64{1} << (64 - 2 * COUNT_BITS)) - 1);
    Range range = take(team, phase, worker.rank, count, most, true);
    for (int i = 1; i < team.size && range.first == range.last; ++i)
        range = take(team, phase, (worker.rank + i) % team.size, count, most, false);
    return range;
}

namespace {

struct Scratch {
    u8* data = nullptr;
    i64 bytes = 0;
    ~Scratch() { release(data, bytes); }
};

}  // namespace

u8* thread_scratch(i64 bytes) {
    static thread_local Scratch scratch;
    if (bytes <= scratch.bytes) return scratch.data;
    release(scratch.data, scratch.bytes);
    scratch.data = allocate(bytes);
    scratch.bytes = scratch.data == nullptr ? 0 : bytes;
    return scratch.data;
}

namespace {

void run_flushed(void (*body)(void*, Worker&), void* argument, Worker worker) {
    const u64 before = float_mode();
    set_float_mode(before | FLUSH_DENORMALS);
    body(argument, worker);
    set_float_mode(before);
}

}  // namespace

#if defined(__linux__)
namespace {

struct Binding {
    u64 number;
    std::vector<cpu_set_t> cores;  // by rank
};

// Replaced as a whole: a team that runs meanwhile keeps the one that it has.
std::shared_ptr<const Binding> current_binding;

bool is_bound(const Binding* binding, int size) { return binding != nullptr && static_cast<int>(binding->cores.size()) == size; }

bool bind_thread(const cpu_set_t& cores) { return sched_setaffinity(0, sizeof(cores), &cores) == 0; }

// What a thread of the pool is bound to. before: its cores before the first binding.
struct BoundThread {
    u64 number = 0;
    int rank = -1;
    cpu_set_t before;
};

thread_local BoundThread bound_thread;

// Threads of the pool stay bound. The caller's own thread gets its cores back after a run: threads that it starts would inherit
// them.
void bind_worker(const Binding& binding, int rank) {
    BoundThread& own = bound_thread;
    if (rank != 0 && own.number == binding.number && own.rank == rank) return;
    if (rank != 0 && own.number == 0 && sched_getaffinity(0, sizeof(own.before), &own.before) != 0) return;
    if (bind_thread(binding.cores[static_cast<size_t>(rank)]) && rank != 0) own.number = binding.number, own.rank = rank;
}

// Give a thread of the pool its cores back, when teams are bound no more.
void release_worker() {
    BoundThread& own = bound_thread;
    if (own.number != 0 && bind_thread(own.before)) own.number = 0;
}

}  // namespace

bool bind_teams(const std::vector<std::vector<int>>& cores) {
    static u64 number = 0;
    auto binding = std::make_shared<Binding>();
    binding->number = ++number;
    cpu_set_t before;
    if (sched_getaffinity(0, sizeof(before), &before) != 0) return false;
    for (const std::vector<int>& of_rank : cores) {
        cpu_set_t set;
        CPU_ZERO(&set);
        for (const int core : of_rank) {
            if (core < 0 || core >= CPU_SETSIZE || !CPU_ISSET(core, &before)) return false;
            CPU_SET(core, &set);
        }
        if (of_rank.empty()) return false;
        binding->cores.push_back(set);
    }
    std::atomic_store(&current_binding, cores.empty() ? nullptr : std::shared_ptr<const Binding>(binding));
    return true;
}

bool are_teams_bound(int num_threads) { return is_bound(std::atomic_load(&current_binding).get(), num_threads); }
#else
bool bind_teams(const std::vector<std::vector<int>>& cores) { return cores.empty(); }
bool are_teams_bound(int) { return false; }
#endif

namespace {

void run_parallel(int num_threads, void (*body)(void*, Worker&), void* argument, Team& team) {
#if defined(__linux__)
    const std::shared_ptr<const Binding> held = std::atomic_load(&current_binding);
    const Binding* binding = is_bound(held.get(), num_threads) ? held.get() : nullptr;
    cpu_set_t before;
    if (binding != nullptr && sched_getaffinity(0, sizeof(before), &before) != 0) binding = nullptr;
#endif
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp single
        team.size = omp_get_num_threads();
#if defined(__linux__)
        if (binding != nullptr && team.size == num_threads) bind_worker(*binding, omp_get_thread_num());
        if (held == nullptr) release_worker();
#endif
        run_flushed(body, argument, {omp_get_thread_num(), team.size, &team});
    }
#if defined(__linux__)
    if (binding != nullptr) bind_thread(before);
#endif
}

}  // namespace

void run_team(int num_threads, void (*body)(void*, Worker&), void* argument) {
    Team team = {};
    if (num_threads <= 1) {  // starting a parallel region takes a tenth of a small head's layer
        team.size = 1;
        run_flushed(body, argument, {0, 1, &team});
        return;
    }
    team.shares.resize(num_threads);
    run_parallel(num_threads, body, argument, team);
}

}  // namespace quire
