// The kernels of one instruction set, as pointers: chosen once when the library is loaded.
#pragma once
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "quantize.h"
#include "peak.h"
#include "recurrence.h"
#include "sampler.h"
#include "team.h"
#include "weight.h"

namespace quire {

struct LinearTable {
    // Rows of a tile for m rows of an input of this kind.
    i32 (*tile_rows)(Format kind, i32 m);
    // Write inputs [begin, end) of row `row` of a packed input from its k f32 values (before `columns`); both are multiples of 16
    // and of the input group, or end is k.
    void (*pack_row)(const Packed& packed, i32 row, const float* values, i32 begin, i32 end);
    // The same for `count` rows from `first` on, whose values lie `stride` apart.
    void (*pack_rows)(const Packed& packed, i32 first, i32 count, const float* values, i64 stride, i32 begin, i32 end);
    // Run linear layers side by side; called by every thread, no barrier inside.
    void (*linear)(Worker& worker, const LinearJob* jobs, i32 num_jobs);
    // Write row n of a weight as f32 (an embedding lookup).
    void (*unpack_row)(const Weight& weight, i32 n, float* out);
    // Copy panels [first, last) of a head in bytes.
    void (*copy_panels)(const Weight& head, i32 first, i32 last, const Int8HeadPanels& to);
    // The length and the error of a row that was packed as bytes from `values`; kind: the form in which the head reads it. See
    // argmax_prefilter.h.
    void (*measure_row)(const Packed& bytes, i32 row, const float* values, Format kind, float* size, float* error);
    // Write a x of `count` rows x[i], f32, for the outputs of a panel of a dense weight without scales: 16 floats to out[i].
    void (*shrink)(const Weight& a, i32 panel, i32 count, const float* const* x, float* const* out);
    // Take the best output of some panels into best_value[at], best_index[at] of a job of one row.
    void (*best_of_panels)(const Worker& worker, const LinearJob& job, const i32* panels, i32 count, i64 at);
};

struct Kernels {
    const char* name;
    const LinearTable* linear;
    const AttentionTable* attention;
    const ElementwiseTable* elementwise;
    const SamplerTable* sampler;
    const QuantizeTable* quantize;
    const PeakTable* peak;
    const RecurrenceTable* recurrence;
};

// The best set that this machine and system can run, or the one that QUIRE_CPU_ISA names if they can run it.
const Kernels& kernels();
// The sets that they can run, from the lowest.
std::vector<const Kernels*> supported_kernels();
// A set by name, or null if the machine cannot run it.
const Kernels* kernels_named(const char* name);

#define QUIRE_DECLARE(isa)                       \
    namespace isa {                              \
    extern const LinearTable linear_table;       \
    extern const AttentionTable attention_table; \
    extern const ElementwiseTable elementwise_table; \
    extern const SamplerTable sampler_table;     \
    extern const QuantizeTable quantize_table;   \
    extern const PeakTable peak_table;           \
    extern const RecurrenceTable recurrence_table; \
    }
QUIRE_DECLARE(portable)
#if defined(__x86_64__)
QUIRE_DECLARE(avx2)
namespace avx_vnni {
extern const LinearTable linear_table;
extern const PeakTable peak_table;
}
QUIRE_DECLARE(avx512)
#elif defined(__aarch64__)
QUIRE_DECLARE(neon)
QUIRE_DECLARE(neon_i8mm_bf16)
#endif
#undef QUIRE_DECLARE

}  // namespace quire
