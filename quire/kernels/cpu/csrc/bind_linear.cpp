// Packed weights and single linear layers for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <string.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding.h"
#include "native_weight.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

namespace {

struct LinearCall {
    const Kernels* kernels;
    const float* x;
    i64 x_stride;
    LinearJob job;
    Packed packed;
    LinearJob following;  // of what the job packs, where it does
    int num_threads;  // the actual number, possibly fewer than requested
};

void pack_call(void* argument, Worker& worker) {
    const LinearCall& call = *static_cast<LinearCall*>(argument);
    const i32 rows = call.packed.m, tile = call.packed.tile_rows;
    for (i64 row = next(worker, rows, tile); row < rows; row = next(worker, rows, tile))
        call.kernels->linear->pack_rows(call.packed, static_cast<i32>(row),
            rows - row < tile ? rows - static_cast<i32>(row) : tile, call.x + row * call.x_stride, call.x_stride, 0,
            call.packed.k);
    barrier(worker);
}

void linear_call(void* argument, Worker& worker) {
    LinearCall& call = *static_cast<LinearCall*>(argument);
    const LinearTable& table = *call.kernels->linear;
    if (worker.rank == 0) call.num_threads = worker.size;
    pack_call(&call, worker);
    table.linear(worker, &call.job, 1);
    barrier(worker);
    if (call.job.packed == nullptr) return;
    table.linear(worker, &call.following, 1);
    barrier(worker);
}

void pack_inputs(const NativeWeight& weight, uintptr_t x, i64 x_stride, i32 m, i32 num_threads, const std::string& isa) {
    LinearCall call = {};
    call.kernels = &kernels_for(isa);
    call.x = reinterpret_cast<const float*>(x);
    call.x_stride = x_stride;
    PackedMemory memory(*call.kernels->linear, weight.weight, m);
    call.packed = memory.packed;
    run_team(num_threads, pack_call, &call);
}

void run_linear(const NativeWeight& weight, const NativeWeight* second, uintptr_t x, i64 x_stride, i32 m, uintptr_t out,
    i64 out_stride, i32 finish, i32 activation, float factor, uintptr_t best_index, const NativeWeight* following,
    i32 num_threads, const std::optional<std::string>& isa, float limit, float slope) {
    LinearCall call = {};
    call.kernels = &kernels_for(isa.value_or(""));
    call.x = reinterpret_cast<const float*>(x);
    call.x_stride = x_stride;
    const Weight& w = weight.weight;
    PackedMemory memory(*call.kernels->linear, w, m);
    call.packed = memory.packed;
    call.job.weight = &w;
    call.job.second = second == nullptr ? nullptr : &second->weight;
    call.job.input = &call.packed;
    call.job.finish = static_cast<Finish>(finish);
    call.job.activation = static_cast<Activation>(activation);
    call.job.factor = factor;
    call.job.limit = limit;
    call.job.slope = slope;
    call.job.out = reinterpret_cast<float*>(out);
    call.job.out_stride = out_stride;
    std::optional<PackedMemory> between;
    if (following != nullptr) {
        if (input_kind(following->weight.format) != Format::bf16 || following->weight.columns != nullptr ||
            following->weight.k != w.n)
            throw std::invalid_argument("the following weight must be bf16, in order, and read all results");
        between.emplace(*call.kernels->linear, following->weight, m);
        call.following = call.job;
        call.following.weight = &following->weight;
        call.following.second = nullptr;
        call.following.input = call.job.packed = &between->packed;
        call.following.finish = Finish::store;
    }
    std::vector<float> values(static_cast<size_t>(m) * num_threads, -__builtin_inff());
    std::vector<i32> indices(static_cast<size_t>(m) * num_threads, -1);
    call.job.best_value = values.data();
    call.job.best_index = indices.data();
    run_team(num_threads, linear_call, &call);
    if (call.job.finish != Finish::best) return;
    for (i32 row = 0; row < m; ++row) {
        float value;
        reinterpret_cast<i32*>(best_index)[row] =
            best_of(values.data() + row * call.num_threads, indices.data() + row * call.num_threads, call.num_threads, value);
    }
}

}  // namespace

}  // namespace quire

void bind_linear(nb::module_& m) {
    using namespace quire;
    nb::class_<NativeWeight>(m, "Weight")
        .def(nb::init<const std::string&, i32, i32, i32, i32>(), "format"_a, "n"_a, "k"_a, "group"_a = 0, "input_group"_a = 0,
            "An empty packed weight [n, k]: format bf16, bf12, f16, f32, u8, u4, f8 or f8_wide; group (of float8: block, 0: "
            "none), input_group (0: group): see Weight in weight.h.")
        .def("pack", &NativeWeight::pack, "source"_a, "stride"_a, "first"_a, "count"_a, "levels"_a = 0, "num_levels"_a = 0,
            "is_mapped"_a = false, "num_threads"_a = 1, nb::call_guard<nb::gil_scoped_release>(),
            "Pack rows [first, first + count) from their address; levels: address of the int8 levels of u4.")
        .def("set_extras", &NativeWeight::set_extras, "group_scales"_a = 0, "group_offsets"_a = 0, "column_scale"_a = 0,
            "bias"_a = 0, "columns"_a = 0, "block_scales"_a = 0,
            "Copy f16 [N / 16][groups][16] scales and offsets, f32 [N padded] column scales and bias, int32 [k] columns, f32 [N "
            "/ 16][blocks][16] scales of float8.")
        .def_prop_ro("num_bytes", &NativeWeight::num_bytes)
        .def_prop_ro("n", [](const NativeWeight& w) { return w.weight.n; })
        .def_prop_ro("k", [](const NativeWeight& w) { return w.weight.k; })
        .def(
            "unpack_row",
            [](const NativeWeight& w, i32 n, uintptr_t out, std::optional<std::string> isa) {
                kernels_for(isa.value_or("")).linear->unpack_row(w.weight, n, reinterpret_cast<float*>(out));
            },
            "n"_a, "out"_a, "isa"_a = nb::none());
    m.def(
        "float8_divisor", [] { return FLOAT8_DIVISOR; },
        "What codes of float8 are divided by when they are read: scales are multiplied by it.");
    m.def(
        "suits_bf12",
        [](uintptr_t source, i64 stride, i32 count, i32 k) {
            return suits_bf12(reinterpret_cast<const u16*>(source), stride, count, k);
        },
        "source"_a, "stride"_a, "count"_a, "k"_a,
        "Whether bf16 rows [count, k] can be kept in 12 bits with few exceptions, judged by some of them.");
    m.def("pack_inputs", &pack_inputs, "weight"_a, "x"_a, "x_stride"_a, "m"_a, "num_threads"_a = 1, "isa"_a = "",
        nb::call_guard<nb::gil_scoped_release>(),
        "Pack f32 rows [m, k] as the weight reads them and drop them again: what `linear` does first, to be measured.");
    m.def("linear", &run_linear, "weight"_a, "second"_a.none(), "x"_a, "x_stride"_a, "m"_a, "out"_a, "out_stride"_a,
        "finish"_a = 0, "activation"_a = 0, "factor"_a = 1.0f, "best_index"_a = 0, "following"_a = nb::none(),
        "num_threads"_a = 1, "isa"_a = nb::none(), "limit"_a = 0.0f, "slope"_a = 1.0f, nb::call_guard<nb::gil_scoped_release>(),
        "Run one linear layer over f32 rows [m, k], and `following` on what it packs; see LinearJob in weight.h.");
}
