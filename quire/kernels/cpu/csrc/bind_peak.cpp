// The machine's peaks, measured by dedicated loops: the reference of a benchmark's share.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "binding.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace quire;

namespace {

// Bytes that a thread reads at once: large enough to stream, small enough that a slow thread does not delay the others.
constexpr i64 SHARE_BYTES = 512 << 10;

const PeakTable& peak_of(const std::string& isa) {
    return *kernels_for(isa).peak;
}

Format format_of(const std::string& name) {
    if (name == "f32") return Format::f32;
    if (name == "bf16") return Format::bf16;
    if (name == "u8") return Format::u8;
    throw std::invalid_argument("kind '" + name + "' is not one of f32, bf16, u8");
}

i64 peak(const std::string& kind, int num_threads, i64 iterations, const std::string& isa) {
    struct Call {
        const PeakTable& table;
        Format format;
        i64 iterations, operations;
    } call = {peak_of(isa), format_of(kind), iterations, 0};
    run_team(
        num_threads,
        [](void* argument, Worker&) {
            Call& c = *static_cast<Call*>(argument);
            float sink[16];
            for (float& value : sink) value = 0.001f;
            __atomic_fetch_add(&c.operations, c.table.compute(c.format, c.iterations, sink), __ATOMIC_RELAXED);
        },
        &call);
    return call.operations;
}

i64 read_memory(uintptr_t address, i64 bytes, int num_threads, const std::string& isa) {
    if (bytes < 256 || bytes % 256 != 0)
        throw std::invalid_argument("bytes to read: got " + std::to_string(bytes) + ", allowed are multiples of 256");
    struct Call {
        const PeakTable& table;
        const u8* data;
        i64 bytes, total;
    } call = {peak_of(isa), reinterpret_cast<const u8*>(address), bytes, 0};
    run_team(
        num_threads,
        [](void* argument, Worker& worker) {
            Call& c = *static_cast<Call*>(argument);
            i64 total = 0;
            for (i64 at = next(worker, c.bytes, SHARE_BYTES); at < c.bytes; at = next(worker, c.bytes, SHARE_BYTES))
                total += c.table.read(c.data + at, c.bytes - at < SHARE_BYTES ? c.bytes - at : SHARE_BYTES);
            __atomic_fetch_add(&c.total, total, __ATOMIC_RELAXED);
        },
        &call);
    return call.total;
}

}  // namespace

void bind_peak(nb::module_& m) {
    m.def("peak", &peak, "kind"_a, "num_threads"_a, "iterations"_a, "isa"_a = "", nb::call_guard<nb::gil_scoped_release>(),
          "Run products of f32, bf16 or u8 in registers on every thread; returns the operations that were done, of all threads.");
    m.def("read_memory", &read_memory, "address"_a, "bytes"_a, "num_threads"_a, "isa"_a = "",
        nb::call_guard<nb::gil_scoped_release>(),
        "Read memory with all threads, as fast as the machine can; returns a sum of no meaning.");
}
