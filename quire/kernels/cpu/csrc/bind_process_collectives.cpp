// Collectives over shared memory, from Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "process_collectives.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace quire;

namespace {

// The time between checks of Python's signals in a wait, so that Ctrl-C works in a collective.
constexpr i64 SIGNAL_CHECK_NS = 100 * 1000 * 1000;
constexpr int CHECKS_PER_WARNING = 50;

SumType sum_type(const std::string& name) {
    if (name == "f32") return SumType::f32;
    if (name == "bf16") return SumType::bf16;
    throw std::invalid_argument("type to sum: got '" + name + "', allowed are f32 and bf16");
}

// A group of ranks over shared memory; `on_slow(peer, seconds)` is called every 5 s that this rank waits for a peer.
struct NativeCollectives {
    CollectiveGroup group;
    nb::object on_slow;
    i64 mailbox_bytes;
    uintptr_t mailboxes;  // [from, to], each sizeof(Mailbox) + mailbox_bytes

    // Wait in intervals, with checks of Python's signals in between. Throws the exception of a signal handler.
    template <class Wait, class Missing>
    bool wait(Wait wait_ns, Missing missing) {
        for (int checks = 1;; ++checks) {
            const WaitResult result = wait_ns(SIGNAL_CHECK_NS, checks == 1);
            if (result != WaitResult::timed_out) return result == WaitResult::done;
            nb::gil_scoped_acquire acquire;
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
            if (checks % CHECKS_PER_WARNING == 0 && !on_slow.is_none()) on_slow(missing(), checks * (SIGNAL_CHECK_NS / 1e9));
        }
    }

    Mailbox* mailbox(int from, int to) const {
        return reinterpret_cast<Mailbox*>(
            mailboxes + (static_cast<i64>(from) * group.size + to) * (static_cast<i64>(sizeof(Mailbox)) + mailbox_bytes));
    }
};

NativeCollectives& owner(CollectiveGroup& group) { return *static_cast<NativeCollectives*>(group.context); }

bool wait_barrier(CollectiveGroup& group) {
    arrive_at_barrier(group.state, group.rank);
    return owner(group).wait([&](i64 ns, bool spins) { return wait_for_barrier(group.state, group.rank, group.size, ns, spins); },
                             [&] { return find_missing_rank(group.state, group.rank, group.size); });
}

bool wait_counter(CollectiveGroup& group, SharedCounter* counter, u32 least, int peer) {
    return owner(group).wait(
        [&](i64 ns, bool spins) { return wait_for_counter(group.state, group.rank, counter, least, ns, spins); },
        [&] { return peer; });
}

void create(NativeCollectives* self, uintptr_t state, int rank, int size, uintptr_t slots, i64 slot_bytes, uintptr_t mailboxes,
    i64 mailbox_bytes, nb::object on_slow) {
    if (size < 1 || size > MAX_RANKS)
        throw std::invalid_argument("size: got " + std::to_string(size) + ", allowed are 1 to " + std::to_string(MAX_RANKS));
    if (rank < 0 || rank >= size)
        throw std::invalid_argument("rank: got " + std::to_string(rank) + ", allowed are 0 to " + std::to_string(size - 1));
    const i64 least = 64 * static_cast<i64>(size) > 16 * MAX_RANKS ? 64 * static_cast<i64>(size) : 16 * MAX_RANKS;
    if (slot_bytes < least || slot_bytes % 64 != 0)
        throw std::invalid_argument(
            "slot_bytes: got " + std::to_string(slot_bytes) + ", allowed are multiples of 64 from " + std::to_string(least));
    if (mailbox_bytes < 64 || mailbox_bytes % 128 != 0)
        throw std::invalid_argument("mailbox_bytes: got " + std::to_string(mailbox_bytes) + ", allowed are multiples of 128");
    new (self) NativeCollectives{{reinterpret_cast<BarrierState*>(state), rank, size, reinterpret_cast<u8*>(slots), slot_bytes,
                                     &wait_barrier, &wait_counter, self},
        std::move(on_slow), mailbox_bytes, mailboxes};
}

const i64* sizes_of(const NativeCollectives& c, const std::vector<i64>& sizes) {
    if (static_cast<int>(sizes.size()) != c.group.size)
        throw std::invalid_argument("sizes: got " + std::to_string(sizes.size()) + ", allowed is one for each of the " +
            std::to_string(c.group.size) + " ranks");
    return sizes.data();
}

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

void bind_process_collectives(nb::module_& m) {
    using Released = nb::call_guard<nb::gil_scoped_release>;
    m.attr("MAILBOX_BYTES") = sizeof(Mailbox);
    nb::class_<NativeCollectives>(
        m, "NativeCollectives", "A rank's view of a group; every method returns False in a group that was aborted.")
        .def("__init__", &create, "state"_a, "rank"_a, "size"_a, "slots"_a, "slot_bytes"_a, "mailboxes"_a, "mailbox_bytes"_a,
            "on_slow"_a.none())
        .def(
            "barrier", [](NativeCollectives& c) { return c.group.wait_barrier(c.group); }, Released())
        .def(
            "all_reduce",
            [](NativeCollectives& c, uintptr_t x, i64 count, const std::string& type) {
                return all_reduce(c.group, pointer(x), count, sum_type(type));
            },
            "x"_a, "count"_a, "type"_a, Released(),
            "Replace f32 or bf16 values by the ranks' sum, added in f32 in the order of ranks.")
        .def(
            "reduce_scatter",
            [](NativeCollectives& c, uintptr_t out, uintptr_t x, const std::vector<i64>& counts, const std::string& type) {
                return reduce_scatter(c.group, pointer(out), pointer(x), sizes_of(c, counts), sum_type(type));
            },
            "out"_a, "x"_a, "counts"_a, "type"_a, Released())
        .def(
            "all_gather",
            [](NativeCollectives& c, uintptr_t out, uintptr_t part, const std::vector<i64>& part_bytes) {
                return all_gather(c.group, pointer(out), pointer(part), sizes_of(c, part_bytes));
            },
            "out"_a, "part"_a, "part_bytes"_a, Released())
        .def(
            "all_to_all",
            [](NativeCollectives& c, uintptr_t out, const std::vector<i64>& out_bytes, uintptr_t x,
                const std::vector<i64>& in_bytes) {
                int mismatch = -1;
                const bool is_done =
                    all_to_all(c.group, pointer(out), sizes_of(c, out_bytes), pointer(x), sizes_of(c, in_bytes), &mismatch);
                if (is_done && mismatch >= 0)
                    throw std::invalid_argument("all_to_all: the sizes that rank " + std::to_string(mismatch) +
                        " sends are not those that the others expect of it");
                return is_done;
            },
            "out"_a, "out_bytes"_a, "x"_a, "in_bytes"_a, Released())
        .def(
            "broadcast",
            [](NativeCollectives& c, uintptr_t x, i64 bytes, int source) {
                return broadcast(c.group, pointer(x), bytes, source);
            },
            "x"_a, "bytes"_a, "source"_a, Released())
        .def(
            "send",
            [](NativeCollectives& c, uintptr_t x, i64 bytes, int to) {
                return send_message(c.group, c.mailbox(c.group.rank, to), c.mailbox_bytes, pointer(x), bytes, to);
            },
            "x"_a, "bytes"_a, "to"_a, Released())
        .def(
            "recv",
            [](NativeCollectives& c, uintptr_t x, i64 bytes, int source) {
                return receive_message(c.group, c.mailbox(source, c.group.rank), c.mailbox_bytes, pointer(x), bytes, source);
            },
            "x"_a, "bytes"_a, "source"_a, Released());
    m.def(
        "ordered_sum",
        [](uintptr_t state, int rank, int size, uintptr_t parts, i64 part_stride, uintptr_t out, i64 count,
            const std::string& type) {
            return ordered_sum(reinterpret_cast<BarrierState*>(state), rank, size, pointer(parts), part_stride, pointer(out),
                count, sum_type(type));
        },
        "state"_a, "rank"_a, "size"_a, "parts"_a, "part_stride"_a, "out"_a, "count"_a, "type"_a, Released(),
        "Sum parts that lie in shared memory into a shared result, this rank's slice of it, between two barriers.");
}
