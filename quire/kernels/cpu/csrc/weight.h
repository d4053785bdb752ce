// Packed weights and packed inputs of linear layers.
#pragma once
#include "float8.h"
#include "simd_types.h"

namespace quire {

// Weights are stored in panels of 16 outputs, so that one 64-byte line holds the weights of 16 outputs:
//   bf16  [N / 16][K / 2][16][2]   pairs of inputs, for dot_bf16
//   bf12  [N / 16][K / 8][192 bytes]: bf16 without loss in 12 bits, see Window; K is a multiple of 8
//   f32   [N / 16][K][16]
//   f16   [N / 16][K][16], read as f32; a line holds two inputs
//   u8    [N / 16][K / 4][16][4]   code + 128, for dot_u8s8
//   f8    [N / 16][K / 2][32]      codes of float8 e4m3fn, pairs of inputs, see float8_place; K is a multiple of 4. f8_wide: the
//                                same beside f32 inputs
//   u4    [N / 16][K / 8][16][4]   a byte holds inputs 8j + i (low nibble) and 8j + 4 + i (high); table[nibble] = level + 128
// N is padded to 16 and K to the step of the format, with weights of value 0.
enum class Format : i32 { bf16 = 0, f32 = 1, u8 = 2, u4 = 3, f16 = 4, bf12 = 5, f8 = 6, f8_wide = 7 };
constexpr i32 NUM_FORMATS = 8;

// In one matrix nearly all exponents are within 16 of each other, so that four bits encode them. A unit of bf12 is eight inputs
// of a panel, four lines A, B, C, D of bf16 pairs, in three lines of memory. Values are divided by a power of two, the
// column_scale of the panel, that makes the smallest exponent of the panel's window 112. Of each value the sign (bit 15),
// mantissa (0 - 6) and the low four bits of the exponent (7 - 10) remain: those of A, B and C are in line 0, 1 and 2. Bits 11 -
// 14 of both halves of a word are free:
//   line 0   11: the sign of the OTHER half of D; 12 - 14: bits 0 - 2 of D
//   line 1   bits 3 - 6 of D
//   line 2   bits 7 - 10 of D
// A value whose exponent is outside of the window is an exception, stored separately and divided too.
constexpr i32 UNIT_INPUTS = 8, UNIT_BYTES = 192, UNIT_LINES = 4;
constexpr i32 WINDOW_START = 112, WINDOW_SIZE = 16;

struct Exception {
    i32 unit;
    u16 place;  // in the unit's four lines, in halves of words
    u16 value;
};

// The exceptions of a panel, by units. Those of the next panel follow in memory.
struct Window {
    const Exception* exceptions = nullptr;
    i32 count = 0;
};

// One linear weight: y[n] = column_scale[n] * sum over groups g of (scale[g][n] * sum_k code[n][k] x[k] + offset[g][n] * sum_k
// x[k]).
//   group           inputs that share a scale of the weight; the last may be shorter. 0 for bf16, f32
//   input_group     inputs that share a scale when they are quantised: a multiple of group, or all
//   group_scales    f16 [N / 16][groups][16] or null: 1
//   group_offsets   f16 [N / 16][groups][16] or null: 0
//   column_scale    f32 [N padded to 16] or null: 1
//   bias            f32 [N padded to 16] or null
//   block_scales    f8: f32 [N / 16][blocks][16] or null: 1; `block` inputs of an output share one, the last block may be shorter
//   columns         i32 [K] or null: packed input j is input columns[j] of the layer
struct Weight {
    Format format = Format::bf16;
    i32 n = 0, k = 0;
    i32 group = 0, input_group = 0;
    const u8* data = nullptr;
    i64 panel_bytes = 0;
    const u16* group_scales = nullptr;
    const u16* group_offsets = nullptr;
    const float* column_scale = nullptr;
    const float* bias = nullptr;
    const i32* columns = nullptr;
    const Window* windows = nullptr;  // bf12: [N / 16]
    const float* block_scales = nullptr;
    i32 block = 0;
    u8 table[16] = {128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128};  // of unused nibbles level 0
};

// The rows of an input in the layout of the kernels: tiles of `tile_rows` rows (the last has what is left, m - t * tile_rows),
// and in a tile of R rows the values of one input step side by side:
//   bf16  [K / 2][R] pairs     f32  [K][R]     u8, u4  [K / 4][R] four signed bytes
// and for the last, per input group scales [input groups][R] f32, per group starts [groups][R] i32 = -128 * sum of its bytes, and
// sums [groups][R] f32 = that sum. A tile of R rows takes R * steps words of data, R * groups entries of the others.
struct Packed {
    Format kind = Format::bf16;  // see input_kind
    i32 m = 0, k = 0, group = 0, input_group = 0, tile_rows = 1;
    const i32* columns = nullptr;
    u32* data = nullptr;
    float* scales = nullptr;
    i32* starts = nullptr;
    float* sums = nullptr;
};

static inline i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }
static inline i32 panels_of(const Weight& w) { return ceil_div(w.n, 16); }
// The form in which a weight reads its inputs.
static inline Format input_kind(Format format) {
    switch (format) {
        case Format::u4: return Format::u8;
        case Format::f16: case Format::f8_wide: return Format::f32;
        case Format::bf12: case Format::f8: return Format::bf16;
        default: return format;
    }
}
static inline bool is_float8(Format format) { return format == Format::f8 || format == Format::f8_wide; }
// 32-bit words of one row of a packed input.
static inline i32 steps_of(Format kind, i32 k) {
    return kind == Format::bf16 ? ceil_div(k, 2) : kind == Format::f32 ? k : 2 * ceil_div(k, 8);
}
static inline i32 groups_of(i32 k, i32 group) { return group == 0 ? 0 : ceil_div(k, group); }

// The epilogue of a linear layer for its result y[m, n] (after scale and bias).
enum class Finish : i32 {
    store = 0,  // out[m][n] = y
    add = 1,    // out[m][n] += factor * y
    gate = 2,   // out[m][n] = activation(y) * y2, y2 from `second`; with a limit: clamped_gate(y, y2)
    activate = 3,  // out[m][n] = activation(y)
    multiply = 4,  // out[m][n] *= y
    best = 5,   // no out: the largest y of each row and its n, the lowest of equal ones
    // no out: the panels that may hold the best output of the head that the weight is a copy of, see PrefilterRows
    prefilter = 6,
};
enum class Activation : i32 { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3, relu2 = 4, xielu = 5 };

// A panel that may contain the best output of a row, and the upper bound of this output.
struct Candidate {
    i32 panel;
    float most;
};
// The prefilter's (argmax_prefilter.h) data of outputs, f32 [N padded to 16], and of rows [m], and keeps by row and thread: the
// least that the best output can be, and the candidates [room], `count` of them; -1: none, as there is no room for all, or no
// bound holds for the row.
struct PrefilterRows {
    const float *error, *size;
    const float *row_size, *row_error;
    float* least;
    i32* count;
    i32 room;
    Candidate* kept;
};

// The destination of a head's copy, panel by panel: codes as of u8, and f32 [N padded to 16] of the rest; `lines` has room for a
// panel of bf16.
struct Int8HeadPanels {
    u8* codes;
    i64 panel_bytes;
    i32 group;
    float *scale, *error, *size;
    u8* lines;
};

// What a LoRA adapter adds to the outputs of a linear layer: b (a x). a [rank][in], b [out][rank]. Null: nothing.
struct LowRankWeights {
    const Weight *a = nullptr, *b = nullptr;
};

// The second products of the adapters of a linear layer's rows, which its epilogue adds. rows: of each row the weights of its
// adapter, null: it has none; next: of each row the next one with the same adapter, -1: none; used: the weights of all rows, each
// once; index: of the layer in them. a x of row m is [rank] at shrunk + m * stride.
struct LowRankSum {
    const LowRankWeights* const* rows = nullptr;
    const i32* next = nullptr;
    const LowRankWeights* const* used = nullptr;
    i32 num_used = 0, index = 0;
    const float* shrunk = nullptr;
    i64 stride = 0;
};

// One linear layer over packed rows. Best needs best_value, best_index of
// [m][num_threads]. With `packed` the result of gate or activate goes there, the input of the layer that follows, and not to
// `out`: a bf16 one of as many rows, whose inputs are not permuted.
struct LinearJob {
    const Weight* weight = nullptr;
    const Weight* second = nullptr;
    const Packed* input = nullptr;
    Finish finish = Finish::store;
    Activation activation = Activation::silu;
    float limit = 0.0f, slope = 1.0f;       // of a clamped gate; limit 0: it is not clamped
    float positive = 0.0f, negative = 0.0f;  // the numbers of xielu
    float factor = 1.0f;
    const Packed* packed = nullptr;
    bool is_near = false;  // the weight is expected in a cache
    float* out = nullptr;
    i64 out_stride = 0;
    float* best_value = nullptr;
    i32* best_index = nullptr;
    const PrefilterRows* prefilter = nullptr;
    // added to the results of `weight` and `second`; null: nothing
    const LowRankSum *low_rank = nullptr, *second_low_rank = nullptr;
};

}  // namespace quire
