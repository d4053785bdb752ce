// Row-wise kernels for Python and for tests. Rows are shared by num_threads threads; pointers are integers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <string.h>

#include <stdexcept>
#include <string>

#include "binding.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace quire;

namespace {

const ElementwiseTable& table_of(const std::string& isa) {
    return *kernels_for(isa).elementwise;
}

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Call body(row) for each row, shared by the threads of a team.
template <class Body>
void each_row(i64 rows, int num_threads, const Body& body) {
    struct Share {
        i64 rows;
        const Body* body;
    } share = {rows, &body};
    run_team(
        num_threads,
        [](void* argument, Worker& worker) {
            const Share& share = *static_cast<Share*>(argument);
            const i64 stop = share_start(share.rows, worker.rank + 1, worker.size);
            for (i64 row = share_start(share.rows, worker.rank, worker.size); row < stop; ++row) (*share.body)(row);
        },
        &share);
}

void norm(uintptr_t x, uintptr_t out, i64 rows, i32 size, float eps, bool is_layer_norm, uintptr_t weight, uintptr_t bias,
          int num_threads, const std::string& isa) {
    const ElementwiseTable& table = table_of(isa);
    const NormJob job = {is_layer_norm, size, eps, at<const float>(weight), at<const float>(bias)};
    each_row(rows, num_threads, [&](i64 row) { table.norm(job, at<const float>(x) + row * size, at<float>(out) + row * size); });
}

void rotate(uintptr_t x, i64 rows, i32 heads, i32 head_dim, i32 dim, uintptr_t cosine, uintptr_t sine, int num_threads,
            const std::string& isa) {
    const ElementwiseTable& table = table_of(isa);
    each_row(rows, num_threads, [&](i64 row) {
        for (i64 head = row * heads; head < (row + 1) * heads; ++head)
            table.rotate(at<float>(x) + head * head_dim, dim, at<const float>(cosine) + row * (dim / 2),
                at<const float>(sine) + row * (dim / 2));
    });
}

void turn_heads(uintptr_t x, i64 rows, i32 heads, i32 head_dim, i32 dim, uintptr_t cosine, uintptr_t sine, float eps,
    bool is_layer_norm, uintptr_t weight, uintptr_t bias, const std::string& isa) {
    const ElementwiseTable& table = table_of(isa);
    const NormJob job = {is_layer_norm, head_dim, eps, at<const float>(weight), at<const float>(bias)};
    for (i64 row = 0; row < rows; ++row)
        table.turn_heads(weight == 0 ? nullptr : &job, at<float>(x) + row * heads * head_dim, heads, head_dim,
            at<const float>(cosine) + row * (dim / 2), at<const float>(sine) + row * (dim / 2), dim / 2);
}

void share_of_largest(uintptr_t x, i64 rows, i32 size, uintptr_t largest, float factor, uintptr_t out, const std::string& isa) {
    const ElementwiseTable& table = table_of(isa);
    for (i64 row = 0; row < rows; ++row)
        at<float>(out)[row] =
            table.share_of_largest(at<const float>(x) + row * size, size, at<const float>(largest)[row], factor);
}

void add_scaled(uintptr_t y, uintptr_t x, float factor, i64 rows, i64 size, int num_threads, const std::string& isa) {
    const ElementwiseTable& table = table_of(isa);
    each_row(rows, num_threads,
        [&](i64 row) { table.add_scaled(at<float>(y) + row * size, at<const float>(x) + row * size, factor, size); });
}

void scale_and_cap(uintptr_t y, i64 rows, i64 size, float factor, float cap, int num_threads, const std::string& isa) {
    const ElementwiseTable& table = table_of(isa);
    each_row(rows, num_threads, [&](i64 row) { table.scale_and_cap(at<float>(y) + row * size, size, factor, cap); });
}

void activate(i32 kind, uintptr_t y, uintptr_t up, i64 rows, i64 size, int num_threads, const std::string& isa) {
    const ElementwiseTable& table = table_of(isa);
    if (kind < 0 || kind > static_cast<i32>(Activation::relu2))
        throw std::invalid_argument("kind: got " + std::to_string(kind) + ", allowed are 0 to 3");
    each_row(rows, num_threads, [&](i64 row) {
        table.activate(
            static_cast<Activation>(kind), at<float>(y) + row * size, up == 0 ? nullptr : at<const float>(up) + row * size, size);
    });
}

void gate(uintptr_t y, uintptr_t gates, i64 rows, i64 size, int num_threads, const std::string& isa) {
    const ElementwiseTable& table = table_of(isa);
    each_row(
        rows, num_threads, [&](i64 row) { table.gate(at<float>(y) + row * size, at<const float>(gates) + row * size, size); });
}

void route(uintptr_t logits, i64 rows, i32 num_experts, i32 top_k, bool is_renormalized, uintptr_t chosen, uintptr_t weights,
           int num_threads, const std::string& isa, const Routing* routing) {
    const ElementwiseTable& table = table_of(isa);
    if (top_k < 1 || top_k > num_experts)
        throw std::invalid_argument("top_k: got " + std::to_string(top_k) + ", allowed are 1 to " + std::to_string(num_experts));
    const Routing plain;
    const RouteJob job = (routing == nullptr ? plain : *routing).of(num_experts, top_k, is_renormalized);
    each_row(rows, num_threads, [&](i64 row) {
        table.route(job, at<float>(logits) + row * num_experts, at<i32>(chosen) + row * top_k, at<float>(weights) + row * top_k);
    });
}

// Run one operation of simd.h `count` times over contiguous arrays; outside of a team, so denormals are not flushed.
void simd(const std::string& name, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t out, i64 count, const std::string& isa) {
    const ElementwiseTable& table = table_of(isa);
    for (i32 i = 0; i < table.num_simd; ++i) {
        const SimdOperation& operation = table.simd[i];
        if (name != operation.name) continue;
        for (i64 j = 0; j < count; ++j)
            operation.run(at<const u8>(a) + j * operation.a_bytes, at<const u8>(b) + j * operation.b_bytes,
                          at<const u8>(c) + j * operation.c_bytes, at<u8>(out) + j * operation.out_bytes);
        return;
    }
    throw std::invalid_argument("operation: got '" + name + "', which simd_operations.inl does not list");
}

using Released = nb::call_guard<nb::gil_scoped_release>;

}  // namespace

void bind_elementwise(nb::module_& m) {
    m.def("norm", norm, "x"_a, "out"_a, "rows"_a, "size"_a, "eps"_a, "is_layer_norm"_a, "weight"_a, "bias"_a, "num_threads"_a = 1,
          "isa"_a = "", Released(), "out [rows, size] f32 = norm of each row of x; out may be x, bias 0.");
    m.def("rotate", rotate, "x"_a, "rows"_a, "heads"_a, "head_dim"_a, "dim"_a, "cosine"_a, "sine"_a, "num_threads"_a = 1,
        "isa"_a = "", Released(),
        "Rotate the first dim values of each head of x [rows, heads, head_dim] f32; cosine and sine [rows, dim / 2].");
    m.def("turn_heads", turn_heads, "x"_a, "rows"_a, "heads"_a, "head_dim"_a, "dim"_a, "cosine"_a, "sine"_a, "eps"_a = 0.0f,
        "is_layer_norm"_a = false, "weight"_a = 0, "bias"_a = 0, "isa"_a = "", Released(),
        "norm, unless weight is 0, and then rotate each head of x, in one call for a row.");
    m.def("share_of_largest", share_of_largest, "x"_a, "rows"_a, "size"_a, "largest"_a, "factor"_a, "out"_a, "isa"_a = "",
        Released(),
        "out [rows] f32 = the share of the largest value of each row of x [rows, size] f32 in the softmax of factor * x.");
    m.def("add_scaled", add_scaled, "y"_a, "x"_a, "factor"_a, "rows"_a, "size"_a, "num_threads"_a = 1, "isa"_a = "", Released(),
          "y += factor * x, [rows, size] f32.");
    m.def("scale_and_cap", scale_and_cap, "y"_a, "rows"_a, "size"_a, "factor"_a, "cap"_a, "num_threads"_a = 1, "isa"_a = "",
        Released(), "y *= factor, then, where cap > 0, y = cap * tanh(y / cap); [rows, size] f32.");
    m.def("activate", activate, "kind"_a, "y"_a, "up"_a, "rows"_a, "size"_a, "num_threads"_a = 1, "isa"_a = "", Released(),
          "y = activation(y), times up unless that is 0; [rows, size] f32. kind: 0 silu, 1 gelu, 2 gelu_tanh, 3 relu.");
    m.def("gate", gate, "y"_a, "gates"_a, "rows"_a, "size"_a, "num_threads"_a = 1, "isa"_a = "", Released(),
        "y *= sigmoid(gates); [rows, size] f32.");
    m.def("route", route, "logits"_a, "rows"_a, "num_experts"_a, "top_k"_a, "is_renormalized"_a, "chosen"_a, "weights"_a,
        "num_threads"_a = 1, "isa"_a = "", "routing"_a.none() = nb::none(), Released(),
        "chosen i32, weights f32 [rows, top_k] of logits [rows, num_experts] f32, which may be overwritten; routing None: "
        "softmax over all.");
    m.def("simd", simd, "name"_a, "a"_a, "b"_a, "c"_a, "out"_a, "count"_a, "isa"_a = "", Released(),
          "Run one operation of simd.h count times over contiguous arrays; for tests.");
}
