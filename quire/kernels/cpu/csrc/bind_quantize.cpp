// Quantising rows of float weights for Python. Pointers are integers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "binding.h"
#include "machine.h"
#include "pack.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace quire;

namespace {

constexpr i64 WEIGHTS_PER_SHARE = 1 << 15;

struct Quantizing {
    const QuantizeTable* table;
    QuantizeJob job;
    bool is_mapped;
};

// The results equal torch's, which keeps denormals; run_team restores the callers' setting.
void keep_denormals() { set_float_mode(float_mode() & ~FLUSH_DENORMALS); }

i64 rows_per_share(const QuantizeJob& job) { return job.k < WEIGHTS_PER_SHARE ? WEIGHTS_PER_SHARE / job.k : 1; }

void search_shares(void* argument, Worker& worker) {
    keep_denormals();
    const Quantizing& call = *static_cast<Quantizing*>(argument);
    alignas(64) float scratch[QUANTIZE_SCRATCH];
    const i64 groups = call.job.k / call.job.size, grain = rows_per_share(call.job);
    for (i64 row = next(worker, call.job.rows, grain); row < call.job.rows; row = next(worker, call.job.rows, grain)) {
        const i64 rows = call.job.rows - row < grain ? call.job.rows - row : grain;
        call.table->search(call.job, row * groups, rows * groups, scratch);
    }
}

void encode_shares(void* argument, Worker& worker) {
    keep_denormals();
    const Quantizing& call = *static_cast<Quantizing*>(argument);
    const i64 grain = rows_per_share(call.job), stride_bytes = call.job.stride * (call.job.is_bf16 ? 2 : 4);
    for (i64 row = next(worker, call.job.rows, grain); row < call.job.rows; row = next(worker, call.job.rows, grain)) {
        const i64 rows = call.job.rows - row < grain ? call.job.rows - row : grain;
        call.table->encode(call.job, row, rows);
        if (call.is_mapped) forget_pages(static_cast<const u8*>(call.job.source) + row * stride_bytes, rows * stride_bytes);
    }
}

// Rows of a weight and their quantisation: the arguments of both steps.
struct Rows {
    QuantizeJob job = {};

    Rows(const std::string& kind, bool is_bf16, uintptr_t source, i64 stride, i64 rows, i32 k, i32 size) {
        job.kind = kind_named(kind);
        job.is_bf16 = is_bf16;
        job.source = reinterpret_cast<const void*>(source);
        job.stride = stride;
        job.rows = rows;
        job.k = k;
        job.size = size;
        if (rows < 1 || k < 1 || stride < 0)
            throw std::invalid_argument("a weight has at least one row and one column, and rows in order");
        const bool fits = job.kind == Quantization::int8 ? size == k : (size == 32 || size == 64 || size == 128) && k % size == 0;
        if (!fits)
            throw std::invalid_argument("size: got " + std::to_string(size) + " for " + std::to_string(k) +
                                        " columns; allowed are all columns for int8, else 32, 64 or 128 that divide them");
    }

    static Quantization kind_named(const std::string& name) {
        if (name == "int8") return Quantization::int8;
        if (name == "linear") return Quantization::linear;
        if (name == "nonlinear") return Quantization::table;
        if (name == "affine") return Quantization::affine;
        throw std::invalid_argument("kind must be int8, linear, nonlinear or affine, got " + name);
    }

    void set_levels(uintptr_t clips, i32 num_clips, float lowest, uintptr_t table) {
        job.clips = reinterpret_cast<const float*>(clips);
        job.num_clips = num_clips;
        job.lowest = lowest;
        job.table = reinterpret_cast<const float*>(table);
        if (job.kind != Quantization::table) return;
        if (job.table == nullptr) throw std::invalid_argument("nonlinear levels need their table");
        for (i32 start = 0; start < 512; start += 16) {
            i32 changes = 0;
            for (i32 i = 1; i < 16; ++i) changes += job.table[start + i] != job.table[start + i - 1];
            if (changes > 1) throw std::invalid_argument("levels must lie at least 8 apart");
        }
    }
};

const QuantizeTable* table_of(const std::string& isa) {
    return kernels_for(isa).quantize;
}

void search(const Rows& rows, uintptr_t scale, uintptr_t offset, int num_threads, const std::string& isa) {
    Quantizing call = {table_of(isa), rows.job, false};
    call.job.scale = reinterpret_cast<float*>(scale);
    call.job.offset = reinterpret_cast<float*>(offset);
    run_team(num_threads, search_shares, &call);
}

void encode(const Rows& rows, uintptr_t scale, uintptr_t offset, uintptr_t codes, bool is_mapped, int num_threads,
    const std::string& isa) {
    Quantizing call = {table_of(isa), rows.job, is_mapped};
    call.job.scale = reinterpret_cast<float*>(scale);
    call.job.offset = reinterpret_cast<float*>(offset);
    call.job.codes = reinterpret_cast<i8*>(codes);
    run_team(num_threads, encode_shares, &call);
}

}  // namespace

void bind_quantize(nb::module_& m) {
    using Released = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Rows>(m, "QuantizeRows")
        .def(nb::init<const std::string&, bool, uintptr_t, i64, i64, i32, i32>(), "kind"_a, "is_bf16"_a, "source"_a, "stride"_a,
            "rows"_a, "k"_a, "size"_a,
            "Rows [rows, k] of a weight in bf16 or f32, `stride` elements apart; size: columns that share a scale.")
        .def("set_levels", &Rows::set_levels, "clips"_a, "num_clips"_a, "lowest"_a, "table"_a = 0,
            "f32 clips, the level farthest from zero, and f32 [512] the level nearest to y by ceil(2 y) + 256. The memory must "
            "stay.");
    m.def("quantize_search", search, "rows"_a, "scale"_a, "offset"_a = 0, "num_threads"_a = 1, "isa"_a = "", Released(),
          "Write f32 scales [rows, k / size] and, of affine, offsets, before they are rounded.");
    m.def("quantize_encode", encode, "rows"_a, "scale"_a, "offset"_a, "codes"_a, "is_mapped"_a = false, "num_threads"_a = 1,
        "isa"_a = "", Released(), "Write int8 codes [rows, k] from the scales; is_mapped: give the pages of the source back.");
}
