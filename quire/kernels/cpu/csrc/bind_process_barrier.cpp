// The barrier between ranks, from Python. A state is given by its address in memory that every rank maps.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "process_barrier.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace quire;

namespace {

// The time between checks of Python's signals in a wait, so that Ctrl-C works.
constexpr i64 SIGNAL_CHECK_NS = 100 * 1000 * 1000;

BarrierState* state_at(uintptr_t address) { return reinterpret_cast<BarrierState*>(address); }
SharedCounter* counter_at(uintptr_t address) { return reinterpret_cast<SharedCounter*>(address); }

void check_rank(int rank, int size) {
    if (size < 1 || size > MAX_RANKS)
        throw std::invalid_argument("size: got " + std::to_string(size) + ", allowed are 1 to " + std::to_string(MAX_RANKS));
    if (rank < 0 || rank >= size)
        throw std::invalid_argument("rank: got " + std::to_string(rank) + ", allowed are 0 to " + std::to_string(size - 1));
}

// Call wait(ns) without the GIL in short pieces until it is done, aborted or timeout_s (< 0: none) is over.
template <class Wait>
int wait_in_pieces(double timeout_s, Wait wait) {
    i64 left_ns = timeout_s < 0 ? -1 : static_cast<i64>(timeout_s * 1e9);
    for (bool spins = true;; spins = false) {
        const i64 piece_ns = left_ns < 0 || left_ns > SIGNAL_CHECK_NS ? SIGNAL_CHECK_NS : left_ns;
        WaitResult result;
        {
            nb::gil_scoped_release release;
            result = wait(piece_ns, spins);
        }
        if (result != WaitResult::timed_out) return static_cast<int>(result);
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (left_ns >= 0) {
            left_ns -= piece_ns;
            if (left_ns <= 0) return static_cast<int>(WaitResult::timed_out);
        }
    }
}

// The nanoseconds of each of `count` barriers, for benchmarks; fewer where the group was aborted.
std::vector<i64> time_barriers(uintptr_t state, int rank, int size, int count) {
    check_rank(rank, size);
    std::vector<i64> times;
    for (int i = 0; i < count; ++i) {
        const i64 began_ns = monotonic_ns();
        if (!process_barrier_wait(state_at(state), rank, size)) break;
        times.push_back(monotonic_ns() - began_ns);
    }
    return times;
}

void bind_waits(nb::module_& m) {
    m.def("time_barriers", &time_barriers, "state"_a, "rank"_a, "size"_a, "count"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Pass barriers; return the nanoseconds of each.");
    m.def("arrive_at_barrier", [](uintptr_t state, int rank) { arrive_at_barrier(state_at(state), rank); }, "state"_a, "rank"_a,
          "Arrive at the next barrier, without waiting.");
    m.def(
        "wait_for_barrier",
        [](uintptr_t state, int rank, int size, double timeout_s) {
            check_rank(rank, size);
            return wait_in_pieces(
                timeout_s, [&](i64 ns, bool spins) { return wait_for_barrier(state_at(state), rank, size, ns, spins); });
        },
        "state"_a, "rank"_a, "size"_a, "timeout_s"_a = -1.0,
        "Wait for all ranks at the barrier that this rank has arrived at: 0 done, 1 aborted, 2 timed out.");
    m.def("process_barrier_wait", [](uintptr_t state, int rank, int size) {
        check_rank(rank, size);
        nb::gil_scoped_release release;
        return process_barrier_wait(state_at(state), rank, size);
    }, "state"_a, "rank"_a, "size"_a, "Arrive and wait, as a native step does; False: the group was aborted.");
    m.def(
        "wait_for_counter",
        [](uintptr_t state, int rank, uintptr_t counter, u32 least, double timeout_s) {
            return wait_in_pieces(timeout_s, [&](i64 ns, bool spins) {
                return wait_for_counter(state_at(state), rank, counter_at(counter), least, ns, spins);
            });
        },
        "state"_a, "rank"_a, "counter"_a, "least"_a, "timeout_s"_a = -1.0,
        "Wait until a counter has reached a value: 0 done, 1 aborted, 2 timed out.");
    m.def(
        "wait_for_message",
        [](uintptr_t state, int rank, uintptr_t counter, u32 least, double timeout_s) {
            return wait_in_pieces(timeout_s, [&](i64 ns, bool spins) {
                return wait_for_message(state_at(state), rank, counter_at(counter), least, ns, spins);
            });
        },
        "state"_a, "rank"_a, "counter"_a, "least"_a, "timeout_s"_a = -1.0,
        "The same for the counter of messages: yields longer before it sleeps.");
    m.def(
        "advance_counter", [](uintptr_t counter, u32 value) { advance_counter(counter_at(counter), value); }, "counter"_a,
        "value"_a, "Set a counter and wake those who sleep on it.");
    m.def(
        "read_counter", [](uintptr_t counter) { return __atomic_load_n(&counter_at(counter)->value, __ATOMIC_ACQUIRE); },
        "counter"_a);
}

}  // namespace

void bind_process_barrier(nb::module_& m) {
    m.attr("MAX_RANKS") = MAX_RANKS;
    m.attr("BARRIER_STATE_BYTES") = sizeof(BarrierState);
    m.attr("SHARED_COUNTER_BYTES") = sizeof(SharedCounter);
    m.def(
        "initialise_barrier",
        [](uintptr_t state, int num_ranks, u32 num_spins, u32 num_yields, u32 message_yield_ns) {
            check_rank(0, num_ranks);
            initialise_barrier(state_at(state), num_ranks, num_spins, num_yields, message_yield_ns);
        },
        "state"_a, "num_ranks"_a, "num_spins"_a, "num_yields"_a, "message_yield_ns"_a = 0,
        "Set up a state before any rank uses it.");
    bind_waits(m);
    m.def(
        "num_barriers",
        [](uintptr_t state, int rank) { return __atomic_load_n(&state_at(state)->ranks[rank].arrived.value, __ATOMIC_ACQUIRE); },
        "state"_a, "rank"_a, "The barriers that a rank has arrived at, modulo 2**32.");
    m.def("rank_counts", [](uintptr_t state, int rank) {
        const RankState& counted = state_at(state)->ranks[rank];
        const auto read = [](const u64& value) { return __atomic_load_n(&value, __ATOMIC_RELAXED); };
        return std::make_tuple(read(counted.num_waits), read(counted.wait_ns), read(counted.num_bytes));
    }, "state"_a, "rank"_a, "(barriers at which a rank has waited, nanoseconds of that, bytes it has written for the others).");
    m.def(
        "find_missing_rank", [](uintptr_t state, int rank, int size) { return find_missing_rank(state_at(state), rank, size); },
        "state"_a, "rank"_a, "size"_a, "The first rank that has arrived at fewer barriers than this one, -1: none.");
    m.def(
        "abort_group",
        [](uintptr_t state, int rank, u32 reason) {
            return abort_group(state_at(state), rank, static_cast<AbortReason>(reason));
        },
        "state"_a, "rank"_a, "reason"_a, "End the group because of a rank; returns whether this call was the first.");
    m.def(
        "read_abort_word", [](uintptr_t state) { return read_abort_word(state_at(state)); }, "state"_a,
        "0, or reason << 16 | rank + 1.");
    m.def("raise_heartbeat", [](uintptr_t state, int rank) { raise_heartbeat(state_at(state), rank); }, "state"_a, "rank"_a);
    m.def(
        "heartbeat",
        [](uintptr_t state, int rank) { return __atomic_load_n(&state_at(state)->ranks[rank].heartbeat, __ATOMIC_RELAXED); },
        "state"_a, "rank"_a);
    m.def(
        "raise_process_beat",
        [](uintptr_t state, int rank) { __atomic_fetch_add(&state_at(state)->ranks[rank].process_beat, 1, __ATOMIC_RELAXED); },
        "state"_a, "rank"_a);
    m.def(
        "process_beat",
        [](uintptr_t state, int rank) { return __atomic_load_n(&state_at(state)->ranks[rank].process_beat, __ATOMIC_RELAXED); },
        "state"_a, "rank"_a);
    m.def(
        "set_location", [](uintptr_t state, int rank, u32 location) { set_location(state_at(state), rank, location); }, "state"_a,
        "rank"_a, "location"_a);
    m.def(
        "location",
        [](uintptr_t state, int rank) { return __atomic_load_n(&state_at(state)->ranks[rank].location, __ATOMIC_RELAXED); },
        "state"_a, "rank"_a);
    m.def(
        "set_pid",
        [](uintptr_t state, int rank, i32 pid) { __atomic_store_n(&state_at(state)->ranks[rank].pid, pid, __ATOMIC_RELEASE); },
        "state"_a, "rank"_a, "pid"_a);
    m.def(
        "pid", [](uintptr_t state, int rank) { return __atomic_load_n(&state_at(state)->ranks[rank].pid, __ATOMIC_ACQUIRE); },
        "state"_a, "rank"_a, "0 until a rank has set it.");
}
