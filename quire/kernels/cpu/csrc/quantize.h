// Quantising float weights by rows or groups of columns; the formulas are in quire/quant/quantize.py, whose torch version gives
// the same bits. This needs denormals: the caller must not flush them.
#pragma once
#include "simd_types.h"

namespace quire {

constexpr i32 MAX_QUANTIZED_GROUP = 128;
// Floats of scratch: sixteen groups, their codes, and partial sums.
constexpr i32 QUANTIZE_SCRATCH = 16 * (2 * MAX_QUANTIZED_GROUP + MAX_QUANTIZED_GROUP / 8);

enum class Quantization : i32 { int8, linear, table, affine };

struct QuantizeJob {
    Quantization kind;
    bool is_bf16;          // the source's elements; otherwise f32
    const void* source;    // [rows, k], `stride` elements a row
    i64 stride;
    i64 rows;
    i32 k;
    i32 size;              // columns that share a scale: a multiple of 8, at most 128; k for int8
    const float* clips;    // [num_clips]; affine: already divided by the number of steps
    i32 num_clips;
    float lowest;          // the level farthest from zero: linear, table
    const float* table;    // [512] the level nearest to y by ceil(2 y) + 256: table
    float* scale;          // [rows, k / size]
    float* offset;         // the same: affine
    i8* codes;             // [rows, k]
};

struct QuantizeTable {
    // Write scales and offsets, not rounded, of the groups [first, first + count), counted over all rows. scratch
    // [QUANTIZE_SCRATCH].
    void (*search)(const QuantizeJob& job, i64 first, i64 count, float* scratch);
    // Write the codes of rows [first, first + count), from scales and offsets.
    void (*encode)(const QuantizeJob& job, i64 first, i64 count);
};

}  // namespace quire
