#include "team.h"

#include <omp.h>
#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

// Each counter on lines of its own: false sharing would cost more than the barrier.
struct Team {
    alignas(128) i32 arrived;
    alignas(128) u32 phase;
    alignas(128) i64 taken;
    int size;
};

namespace {

constexpr int SPINS_BEFORE_YIELD = 4000;

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

}  // namespace

void barrier(Worker& worker) {
    Team& team = *worker.team;
    if (team.size == 1) {
        team.taken = 0;
        return;
    }
    const u32 phase = __atomic_load_n(&team.phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&team.arrived, 1, __ATOMIC_ACQ_REL) == team.size) {
        __atomic_store_n(&team.arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team.taken, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team.phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    // A thread that shares its core with another process must not burn the time that the others wait for.
    for (int spins = 0; __atomic_load_n(&team.phase, __ATOMIC_ACQUIRE) == phase; ++spins) {
        if (spins < SPINS_BEFORE_YIELD)
            pause();
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
    // The load keeps the counter from running away when threads ask again after the end.
    if (__atomic_load_n(&team.taken, __ATOMIC_RELAXED) >= count) return count;
    return __atomic_fetch_add(&team.taken, grain, __ATOMIC_RELAXED);
}

void run_team(int num_threads, void (*body)(void*, Worker&), void* argument) {
    Team team = {};
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp single
        team.size = omp_get_num_threads();
#if defined(__x86_64__)
        const unsigned before = _mm_getcsr();
        _mm_setcsr(before | 0x8040);
#endif
        Worker worker = {omp_get_thread_num(), team.size, &team};
        body(argument, worker);
#if defined(__x86_64__)
        _mm_setcsr(before);
#endif
    }
}

}  // namespace quire
