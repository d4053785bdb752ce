// Linear layers over packed weights: one accumulation order per output, whatever the number of rows.
//
// A tile is R rows by P panels of 16 outputs; its accumulators stay in registers while it walks the inputs. Which tile computes an
// output decides only how often weights are read, never the order of its sum. Few rows take more panels at once (more streams from
// memory), many rows take two, so that a broadcast input is used twice.
#include "simd.h"

#include "activation.h"
#include "tables.h"

namespace quire::QUIRE_ISA {
namespace {

// Accumulators of a tile, R * P of them at most, with room for weights in the machine's registers (32 of 512 bits, 16 of 256 bits).
// Integer tiles keep two sets: integers of a group and the f32 sum. Where a group is long, the sums may be in memory and the tile
// twice as large (MAX_LONG_INTEGERS).
#if QUIRE_LEVEL == 2
constexpr int MAX_FLOATS = 28, MAX_INTEGERS = 12, MAX_LONG_INTEGERS = 24;
#elif QUIRE_LEVEL == 1
constexpr int MAX_FLOATS = 6, MAX_INTEGERS = 3, MAX_LONG_INTEGERS = 3;
#else
constexpr int MAX_FLOATS = 4, MAX_INTEGERS = 4, MAX_LONG_INTEGERS = 4;
#endif
constexpr int MAX_PANELS = 4;
// How far ahead of use weights are asked for, in bytes of all panels that are read side by side: as many as are on their way while
// memory answers. With many rows a line lasts longer and fewer would do, but an early line does not hurt in the second cache.
constexpr i64 PREFETCH_BYTES = 4096;

// How far ahead inputs are asked for, in 32-bit words.
constexpr i64 INPUT_WORDS_AHEAD = 128;

struct Tile {
    const u8* panels[MAX_PANELS];
    const u8* ahead[MAX_PANELS];  // prefetched line by line, every 2^ahead_shift steps a new one
    const u16* scales[MAX_PANELS];
    const u16* offsets[MAX_PANELS];
    const u8* table;
    const u32* input;
    const float* input_scales;
    const i32* starts;
    const float* sums;
    i32 steps;               // 64-byte lines of a panel; f16: half lines
    i32 group_steps;         // lines of a group
    i32 groups_per_scale;    // groups that share a scale of the input
    i32 ahead_shift;
    float* out;  // [P][R][16]
};

QUIRE_INLINE i32 smaller(i32 a, i32 b) { return a < b ? a : b; }

using TileFunction = void (*)(const Tile&);

template <int P>
QUIRE_INLINE void prefetch_ahead(const Tile& t, i64 s) {
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p) prefetch_l2(t.ahead[p] + (s >> t.ahead_shift) * 64);
}

template <int R, int P>
QUIRE_INLINE void store_tile(float* out, const F32 (&acc)[P][R]) {
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) store(out + (p * R + r) * 16, acc[p][r]);
}

template <int R, int P>
void tile_bf16(const Tile& t) {
    F32 acc[P][R];
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) acc[p][r] = zero();
    const u32* x = t.input;
    for (i64 s = 0; s < t.steps; ++s, x += R) {
        Bytes w[P];
        prefetch_ahead<P>(t, s);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) w[p] = load_bytes(t.panels[p] + s * 64);
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) {
            const Bytes b = set1_bytes(x[r]);
#pragma GCC unroll 32
            for (int p = 0; p < P; ++p) acc[p][r] = dot_bf16(acc[p][r], w[p], b);
        }
    }
    store_tile<R, P>(t.out, acc);
}

template <int R, int P, bool IS_HALF>
QUIRE_INLINE void tile_floats(const Tile& t) {
    F32 acc[P][R];
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) acc[p][r] = zero();
    const float* x = reinterpret_cast<const float*>(t.input);
    for (i64 s = 0; s < t.steps; ++s, x += R) {
        F32 w[P];
        prefetch_ahead<P>(t, IS_HALF ? s / 2 : s);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p)
            w[p] = IS_HALF ? load_f16(reinterpret_cast<const u16*>(t.panels[p] + s * 32)) : load(reinterpret_cast<const float*>(t.panels[p] + s * 64));
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) {
            const F32 b = set1(x[r]);
#pragma GCC unroll 32
            for (int p = 0; p < P; ++p) acc[p][r] = fma(w[p], b, acc[p][r]);
        }
    }
    store_tile<R, P>(t.out, acc);
}

template <int R, int P>
void tile_f32(const Tile& t) { tile_floats<R, P, false>(t); }
template <int R, int P>
void tile_f16(const Tile& t) { tile_floats<R, P, true>(t); }

// Integer products over steps [begin, end) of all panels: a group. x points at the inputs of step begin.
template <int R, int P, bool IS_NIBBLES>
QUIRE_INLINE void dot_group(const Tile& t, i64 begin, i64 end, const u32* x, const Bytes& table, I32 (&acc)[P][R]) {
    i64 s = begin;
    do {  // A group is never empty, and a loop that may be skipped costs copies of all integers.
        prefetch_ahead<P>(t, s);
        // A long panel and its inputs do not fit into the first-level cache together.
        if (R > 2) prefetch(x + INPUT_WORDS_AHEAD);
        if constexpr (IS_NIBBLES) {
#pragma GCC unroll 32
            for (int p = 0; p < P; ++p) {
                Bytes low, high;
                unpack_nibbles(load_bytes(t.panels[p] + s * 64), table, low, high);
#pragma GCC unroll 32
                for (int r = 0; r < R; ++r) acc[p][r] = dot_u8s8(acc[p][r], low, set1_bytes(x[r]));
#pragma GCC unroll 32
                for (int r = 0; r < R; ++r) acc[p][r] = dot_u8s8(acc[p][r], high, set1_bytes(x[R + r]));
            }
            x += 2 * R;
        } else {
            Bytes w[P];
#pragma GCC unroll 32
            for (int p = 0; p < P; ++p) w[p] = load_bytes(t.panels[p] + s * 64);
#pragma GCC unroll 32
            for (int r = 0; r < R; ++r) {
                const Bytes b = set1_bytes(x[r]);
#pragma GCC unroll 32
                for (int p = 0; p < P; ++p) acc[p][r] = dot_u8s8(acc[p][r], w[p], b);
            }
            x += R;
        }
    } while (++s < end);
}

template <int R, int P>
QUIRE_INLINE void start_group(const Tile& t, i64 g, I32 (&acc)[P][R]) {
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) acc[p][r] = set1(t.starts[g * R + r]);
}

// One scale per output: y = sum over groups of input_scale * integers.
template <int R, int P, bool IS_NIBBLES>
QUIRE_INLINE void tile_rowwise(const Tile& t) {
    const Bytes table = IS_NIBBLES ? load_table(t.table) : set1_bytes(0);
    F32 sum[P][R];
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) sum[p][r] = zero();
    i64 g = 0;
    for (i64 begin = 0; begin < t.steps; begin += t.group_steps, ++g) {
        I32 acc[P][R];
        start_group<R, P>(t, g, acc);
        const i64 end = begin + t.group_steps < t.steps ? begin + t.group_steps : t.steps;
        dot_group<R, P, IS_NIBBLES>(t, begin, end, t.input + begin * R * (IS_NIBBLES ? 2 : 1), table, acc);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
            for (int r = 0; r < R; ++r) sum[p][r] = fma(to_f32(acc[p][r]), set1(t.input_scales[g * R + r]), sum[p][r]);
    }
    store_tile<R, P>(t.out, sum);
}

// The same with the sums in t.out. A group's is a function of its own: beside another loop GCC 12 finds no registers for the integers.
template <int R, int P>
__attribute__((noinline)) void add_long_group(const Tile& t, i64 g) {
    const i64 begin = g * t.group_steps, end = begin + t.group_steps < t.steps ? begin + t.group_steps : t.steps;
    const float* scales = t.input_scales + g * R;
    I32 acc[P][R];
    start_group<R, P>(t, g, acc);
    dot_group<R, P, false>(t, begin, end, t.input + begin * R, set1_bytes(0), acc);
    float* out = t.out;
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r, out += 16) store(out, fma(to_f32(acc[p][r]), set1(scales[r]), load(out)));
}

template <int R, int P>
void tile_long(const Tile& t) {
    for (i64 i = 0; i < R * P; ++i) store(t.out + i * 16, zero());
    const i64 num_groups = (t.steps + t.group_steps - 1) / t.group_steps;
    for (i64 g = 0; g < num_groups; ++g) add_long_group<R, P>(t, g);
}

// Scales (and offsets) per group of the weight; groups_per_scale groups share a scale of the input, and their sum rests in registers
// before it joins the result in t.out.
template <int R, int P, bool IS_NIBBLES>
QUIRE_INLINE void tile_grouped(const Tile& t) {
    const Bytes table = IS_NIBBLES ? load_table(t.table) : set1_bytes(0);
    const bool has_offsets = t.offsets[0] != nullptr;
    const i64 num_groups = (t.steps + t.group_steps - 1) / t.group_steps;
    for (i64 first = 0, block = 0; first < num_groups; first += t.groups_per_scale, ++block) {
        const i64 last = first + t.groups_per_scale < num_groups ? first + t.groups_per_scale : num_groups;
        F32 sum[P][R];
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
            for (int r = 0; r < R; ++r) sum[p][r] = zero();
        for (i64 g = first; g < last; ++g) {
            I32 acc[P][R];
            start_group<R, P>(t, g, acc);
            const i64 begin = g * t.group_steps, end = begin + t.group_steps < t.steps ? begin + t.group_steps : t.steps;
#pragma GCC unroll 32
            for (int p = 0; p < P; ++p) prefetch(t.scales[p] + (g + 8) * 16);
            dot_group<R, P, IS_NIBBLES>(t, begin, end, t.input + begin * R * (IS_NIBBLES ? 2 : 1), table, acc);
#pragma GCC unroll 32
            for (int p = 0; p < P; ++p) {
                const F32 scale = t.scales[p] == nullptr ? set1(1.0f) : load_f16(t.scales[p] + g * 16);
#pragma GCC unroll 32
                for (int r = 0; r < R; ++r) sum[p][r] = fma(to_f32(acc[p][r]), scale, sum[p][r]);
            }
            if (!has_offsets) continue;
#pragma GCC unroll 32
            for (int p = 0; p < P; ++p) {
                const F32 offset = load_f16(t.offsets[p] + g * 16);
#pragma GCC unroll 32
                for (int r = 0; r < R; ++r) sum[p][r] = fma(offset, set1(t.sums[g * R + r]), sum[p][r]);
            }
        }
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
            for (int r = 0; r < R; ++r) {
                float* out = t.out + (p * R + r) * 16;
                const F32 before = block == 0 ? zero() : load(out);
                store(out, fma(sum[p][r], set1(t.input_scales[block * R + r]), before));
            }
    }
}

template <int R, int P, bool IS_NIBBLES>
void tile_integer(const Tile& t) {
    if (t.scales[0] == nullptr && t.offsets[0] == nullptr)
        tile_rowwise<R, P, IS_NIBBLES>(t);
    else
        tile_grouped<R, P, IS_NIBBLES>(t);
}

template <int R, int P>
void tile_u8(const Tile& t) {
    if constexpr (R * P <= MAX_INTEGERS)
        tile_integer<R, P, false>(t);
    else
        tile_long<R, P>(t);
}
template <int R, int P>
void tile_u4(const Tile& t) { tile_integer<R, P, true>(t); }

// Functions for 1 .. MAX / P rows.
template <int P>
struct Functions {
    TileFunction by_rows[5][MAX_FLOATS / P + 1];
};

template <int P, int R>
constexpr void fill(Functions<P>& functions) {
    if constexpr (R > 0) {
        functions.by_rows[static_cast<int>(Format::bf16)][R] = tile_bf16<R, P>;
        functions.by_rows[static_cast<int>(Format::f32)][R] = tile_f32<R, P>;
        functions.by_rows[static_cast<int>(Format::f16)][R] = tile_f16<R, P>;
        if constexpr (R <= MAX_INTEGERS && R * P <= MAX_LONG_INTEGERS) functions.by_rows[static_cast<int>(Format::u8)][R] = tile_u8<R, P>;
        if constexpr (R * P <= MAX_INTEGERS) functions.by_rows[static_cast<int>(Format::u4)][R] = tile_u4<R, P>;
        fill<P, R - 1>(functions);
    }
}

// Constant expressions: nothing of an instruction set may run when the library is loaded.
template <int P>
constexpr Functions<P> make_functions() {
    Functions<P> functions = {};
    fill<P, MAX_FLOATS / P>(functions);
    return functions;
}

constexpr Functions<1> one_panel = make_functions<1>();
constexpr Functions<2> two_panels = make_functions<2>();
constexpr Functions<4> four_panels = make_functions<4>();

QUIRE_INLINE bool is_integer(Format format) { return format == Format::u8 || format == Format::u4; }
// Rows of a tile of one panel.
QUIRE_INLINE int max_rows(Format kind) { return is_integer(kind) ? MAX_INTEGERS : MAX_FLOATS; }
QUIRE_INLINE int max_accumulators(const Weight& w) {
    const bool is_long = w.format == Format::u8 && w.group_scales == nullptr && w.group_offsets == nullptr;
    return is_long ? MAX_LONG_INTEGERS : max_rows(w.format);
}

QUIRE_INLINE int panels_for(const Weight& w, i32 rows) {
    const int most = max_accumulators(w);
    return rows * 4 <= most ? 4 : rows * 2 <= most ? 2 : 1;
}

i32 tile_rows(Format kind, i32 m) {
    // Up to all accumulators one pass over the weights is worth more than reusing inputs; beyond, f32 tiles are two panels wide.
    const i32 most = max_rows(kind);
    if (m <= most) return m;
    const i32 wide = is_integer(kind) ? most : most / 2;
    return ceil_div(m, ceil_div(m, wide));
}

QUIRE_INLINE void run_tile(int panels, Format format, i32 rows, const Tile& tile) {
    const int f = static_cast<int>(format);
    (panels == 4 ? four_panels.by_rows[f][rows] : panels == 2 ? two_panels.by_rows[f][rows] : one_panel.by_rows[f][rows])(tile);
}

struct TilePlace {
    i32 first_row, rows;
};

QUIRE_INLINE void set_input(Tile& tile, const Packed& x, TilePlace place) {
    const i64 words = steps_of(x.kind, x.k), groups = groups_of(x.k, x.group), scales = groups_of(x.k, x.input_group);
    tile.input = x.data + place.first_row * words;
    tile.input_scales = x.scales + place.first_row * scales;
    tile.starts = x.starts + place.first_row * groups;
    tile.sums = x.sums + place.first_row * groups;
}

QUIRE_INLINE void set_weight(Tile& tile, const Weight& w) {
    tile.table = w.table;
    tile.steps = w.format == Format::f16 ? w.k : w.format == Format::u8 ? ceil_div(w.k, 4) : static_cast<i32>(w.panel_bytes / 64);
    tile.group_steps = w.format == Format::u8 ? ceil_div(w.group, 4) : ceil_div(w.group, 8);
    tile.groups_per_scale = w.group == 0 ? 1 : ceil_div(w.input_group, w.group);
}

QUIRE_INLINE F32 scaled(const Weight& w, i32 panel, const float* tile) {
    F32 y = load(tile);
    if (w.column_scale != nullptr) y = y * load(w.column_scale + panel * 16);
    if (w.bias != nullptr) y = y + load(w.bias + panel * 16);
    return y;
}

void keep_best(const LinearJob& job, i64 at, i32 panel, Mask lanes, F32 y) {
    float values[16];
    store(values, y);
    float best = job.best_value[at];
    i32 index = job.best_index[at];
    // NaN beats all, so that whoever looks at the value sees it; of equal values the lower index, whichever came first.
    for (int i = 0; i < 16; ++i) {
        if (!(bits(lanes) >> i & 1)) continue;
        const i32 n = panel * 16 + i;
        const bool is_better = values[i] > best || (values[i] == best && n < index) || (values[i] != values[i] && best == best);
        if (is_better || index < 0) best = values[i], index = n;
    }
    job.best_value[at] = best;
    job.best_index[at] = index;
}

// The place of a row: its tile's first row and number of rows, and its own number there.
struct RowPlace {
    i32 first, rows, r;
};

QUIRE_INLINE RowPlace place_of(const Packed& x, i32 row) {
    const i32 first = row / x.tile_rows * x.tile_rows;
    return {first, x.tile_rows < x.m - first ? x.tile_rows : x.m - first, row - first};
}

// Where a word of a row goes.
QUIRE_INLINE u32* word_at(const Packed& x, RowPlace place, i32 word) {
    return x.data + static_cast<i64>(place.first) * steps_of(x.kind, x.k) + static_cast<i64>(word) * place.rows + place.r;
}

// Finish one panel of a tile whose result is the input of the next layer: as pack_rows would write it from `out`.
void pack_panel(const LinearJob& job, i32 panel, TilePlace place, const float* y, const float* y2) {
    const Packed& to = *job.packed;
    const i32 word = panel * 8, num_words = smaller(steps_of(to.kind, to.k) - word, 8);
    const Mask lanes = first_lanes(job.weight->n - panel * 16);
    I32 words[16] = {};
    for (i32 r = 0, together; r < place.rows; r += together) {
        const RowPlace at = place_of(to, place.first_row + r);
        together = smaller(smaller(at.rows - at.r, 16), place.rows - r);
        for (i32 i = 0; i < together; ++i) {
            F32 value = activate(job.activation, scaled(*job.weight, panel, y + (r + i) * 16));
            if (job.finish == Finish::gate) value = value * scaled(*job.second, panel, y2 + (r + i) * 16);
            words[i] = bf16_words(select(lanes, value, zero()), zero());
        }
        store_columns(word_at(to, at, word), at.rows, words, together, num_words);
    }
}

// Finish one panel of a tile: y and, for gate, y2 are [R][16].
void finish_panel(const Worker& worker, const LinearJob& job, i32 panel, TilePlace place, const float* y, const float* y2) {
    if (job.packed != nullptr) return pack_panel(job, panel, place, y, y2);
    const Weight& w = *job.weight;
    const Mask lanes = first_lanes(w.n - panel * 16);
    for (i32 r = 0; r < place.rows; ++r) {
        const F32 value = scaled(w, panel, y + r * 16);
        const i32 row = place.first_row + r;
        if (job.finish == Finish::best) {
            const i64 at = static_cast<i64>(row) * worker.size + worker.rank;
            // Almost every panel holds nothing better.
            const Mask better = (value > set1(job.best_value[at])) | is_nan(value);
            if (job.best_index[at] < 0 || bits(better & lanes) != 0 || job.best_index[at] > panel * 16)
                keep_best(job, at, panel, lanes, value);
            continue;
        }
        float* out = job.out + row * job.out_stride + panel * 16;
        F32 result = value;
        if (job.finish == Finish::add) result = fma(set1(job.factor), value, load(out, lanes));
        if (job.finish == Finish::multiply) result = value * load(out, lanes);
        if (job.finish == Finish::activate) result = activate(job.activation, value);
        if (job.finish == Finish::gate) result = activate(job.activation, value) * scaled(*job.second, panel, y2 + r * 16);
        store(out, result, lanes);
    }
}

// One unit of work: `count` panels from `first`, over all rows.
struct Unit {
    const Worker& worker;
    const LinearJob& job;
    i32 first, count;
};

// The panels that a unit computes side by side: slot i of step s. Each slot walks panels that follow one another in memory, so that
// what is prefetched past the end of one is the beginning of the next.
struct Walk {
    i32 first, count, steps;

    i32 panel(int slot, i32 step) const { return first + slot * steps + step; }
};

// Put panel p of a weight into a slot of the tile. With one pass over the panel the lines ahead are fetched; several passes over the
// same panels share the fetching of the ones that follow.
QUIRE_INLINE void set_panel(const Unit& unit, Tile& tile, int slot, int num_slots, const Weight& w, i32 p, i32 pass) {
    const i64 groups = groups_of(w.k, w.group);
    const i32 num_passes = ceil_div(unit.job.input->m, unit.job.input->tile_rows);
    tile.panels[slot] = w.data + p * w.panel_bytes;
    tile.scales[slot] = w.group_scales == nullptr ? nullptr : w.group_scales + p * groups * 16;
    tile.offsets[slot] = w.group_offsets == nullptr ? nullptr : w.group_offsets + p * groups * 16;
    if (num_passes == 1) {
        tile.ahead[slot] = tile.panels[slot] + PREFETCH_BYTES / num_slots;
        tile.ahead_shift = 0;
        return;
    }
    i32 shift = 0;
    while ((1 << shift) < num_passes) ++shift;
    tile.ahead[slot] = tile.panels[slot] + w.panel_bytes + ((w.panel_bytes / 64) >> shift) * pass * 64;
    tile.ahead_shift = shift;
}

// Compute the panels of a step for the rows of a tile into `out` [width][R][16].
void run_panels(const Unit& unit, Tile& tile, const Weight& w, const Walk& walk, i32 step, int width, TilePlace place, i32 pass, float* out) {
    for (int i = 0; i < width; ++i) set_panel(unit, tile, i, width, w, walk.panel(i, step), pass);
    tile.out = out;
    run_tile(width, w.format, place.rows, tile);
}

// Ask for what the end of a step reads: a panel has a line of it, which no stream brings in, and its first rows of the result,
// which another thread may have written.
QUIRE_INLINE void prefetch_finish(const LinearJob& job, const Weight& w, i32 panel) {
    if (w.column_scale != nullptr) prefetch(w.column_scale + panel * 16);
    if (w.bias != nullptr) prefetch(w.bias + panel * 16);
    if (job.out == nullptr || job.packed != nullptr) return;
    const i32 rows = job.input->m < MAX_FLOATS ? job.input->m : 0;
    for (i32 row = 0; row < rows; ++row) prefetch(job.out + row * job.out_stride + panel * 16);
}

// All rows of a few panels: one or more passes, after the first from the caches.
void run_step(const Unit& unit, Tile& tile, const Walk& walk, i32 step, int width) {
    alignas(64) float buffer[2 * MAX_FLOATS * 16];
    const LinearJob& job = unit.job;
    const Packed& x = *job.input;
    const bool is_gated = job.finish == Finish::gate;
    for (int i = 0; i < width; ++i) {
        prefetch_finish(job, *job.weight, walk.panel(i, step));
        if (is_gated) prefetch_finish(job, *job.second, walk.panel(i, step));
    }
    for (i32 row = 0, pass = 0; row < x.m; row += x.tile_rows, ++pass) {
        const TilePlace place = {row, x.tile_rows < x.m - row ? x.tile_rows : x.m - row};
        set_input(tile, x, place);
        const i64 half = static_cast<i64>(width) * place.rows * 16;
        if (is_gated && 2 * width * place.rows <= max_accumulators(*job.weight)) {
            // Gate and up side by side: twice the streams from memory.
            for (int i = 0; i < width; ++i) set_panel(unit, tile, width + i, 2 * width, *job.second, walk.panel(i, step), pass);
            for (int i = 0; i < width; ++i) set_panel(unit, tile, i, 2 * width, *job.weight, walk.panel(i, step), pass);
            tile.out = buffer;
            run_tile(2 * width, job.weight->format, place.rows, tile);
        } else {
            run_panels(unit, tile, *job.weight, walk, step, width, place, pass, buffer);
            if (is_gated) run_panels(unit, tile, *job.second, walk, step, width, place, pass, buffer + half);
        }
        for (int i = 0; i < width; ++i)
            finish_panel(unit.worker, job, walk.panel(i, step), place, buffer + i * place.rows * 16, buffer + half + i * place.rows * 16);
    }
}

void run_unit(const Unit& unit) {
    Tile tile;
    set_weight(tile, *unit.job.weight);
    int width = panels_for(*unit.job.weight, unit.job.input->tile_rows);
    if (unit.job.finish == Finish::gate && width > 1) width /= 2;
    i32 done = 0;
    for (; width > 0; width /= 2) {
        const Walk walk = {unit.first + done, unit.count - done, (unit.count - done) / width};
        for (i32 step = 0; step < walk.steps; ++step) run_step(unit, tile, walk, step, width);
        done += walk.steps * width;
    }
}

// Panels of a unit of work: those that a tile computes side by side, as long as a sequence of units is one stream from memory.
QUIRE_INLINE i32 unit_panels(const LinearJob& job) {
    const i32 width = panels_for(*job.weight, job.input->tile_rows);
    return job.finish == Finish::gate && width > 1 ? width / 2 : width;
}

QUIRE_INLINE i64 num_units(const LinearJob& job) { return job.input->m > 0 ? ceil_div(panels_of(*job.weight), unit_panels(job)) : 0; }

// Panels that a thread takes at once: long streams while there is much to do.
constexpr i32 MAX_UNIT_PANELS = 16;

void linear(Worker& worker, const LinearJob* jobs, i32 num_jobs) {
    i64 total = 0;
    for (i32 j = 0; j < num_jobs; ++j) total += num_units(jobs[j]);
    for (;;) {
        const Range range = next_of_share(worker, total, num_jobs > 0 ? MAX_UNIT_PANELS / unit_panels(jobs[0]) : 1);
        if (range.first == range.last) return;
        i64 start = 0;
        for (i32 j = 0; j < num_jobs && start < range.last; ++j) {
            const i64 units = num_units(jobs[j]), first = range.first > start ? range.first - start : 0;
            const i64 last = range.last - start < units ? range.last - start : units;
            start += units;
            if (first >= last) continue;
            const i32 width = unit_panels(jobs[j]), panels = panels_of(*jobs[j].weight);
            run_unit({worker, jobs[j], static_cast<i32>(first) * width, smaller(panels, static_cast<i32>(last) * width) - static_cast<i32>(first) * width});
        }
    }
}

// Sixteen inputs from j on, in the order of the packed weight, 0 past the end.
QUIRE_INLINE F32 inputs_at(const Packed& x, const float* values, i32 j) {
    if (x.columns == nullptr) return load(values + j, first_lanes(x.k - j));
    float lanes[16] = {};
    for (int i = 0; i < 16 && j + i < x.k; ++i) lanes[i] = values[x.columns[j + i]];
    return load(lanes);
}

// Quantise words [begin, end) of a row to data[0], data[apart] and so on: round(x * inverse), at most 127 in size also where 127 / peak
// overflows. Return the sum of the codes.
i32 pack_group(const Packed& x, const float* values, u32* data, i64 apart, i32 begin, i32 end, float inverse) {
    I32 sum = set1(0);
    for (i32 j = 4 * begin; j < 4 * end; j += 16) {
        i8 codes[16];
        const F32 v = select(first_lanes(4 * end - j), inputs_at(x, values, j), zero());
        // NaN becomes the least integer: its group has no scale, but sums must not overflow.
        const I32 code = max(set1(-128), to_i32(max(set1(-127.0f), min(set1(127.0f), v * set1(inverse)))));
        sum = sum + code;
        store_s8(codes, code);
        u32* to = data + (j / 4 - begin) * apart;
        if (apart == 1 && j + 16 <= 4 * end) {
            __builtin_memcpy(to, codes, 16);
            continue;
        }
        for (int w = 0; w < 4 && j / 4 + w < end; ++w) __builtin_memcpy(to + w * apart, codes + 4 * w, 4);
    }
    // Exact: at most 60,000 codes.
    return static_cast<i32>(sum_lanes(to_f32(sum)));
}

QUIRE_INLINE i32 first_word_of(const Packed& x, i32 begin) { return begin / x.input_group * ceil_div(x.input_group, 4); }

// Quantise inputs [begin_input, end_input) of a row to data[0], data[apart] and so on; the scales and sums go to their places.
void pack_quantized(const Packed& x, const float* values, RowPlace place, u32* data, i64 apart, i32 begin_input, i32 end_input) {
    const i64 first = place.first;
    const i32 rows = place.rows, r = place.r, first_word = first_word_of(x, begin_input);
    const i32 words = steps_of(Format::u8, x.k), group_words = ceil_div(x.group, 4), block_words = ceil_div(x.input_group, 4);
    const i32 num_blocks = groups_of(x.k, x.input_group), first_block = begin_input / x.input_group;
    const i64 first_group = static_cast<i64>(first_block) * (x.input_group / x.group);
    float* scales = x.scales + first * num_blocks + static_cast<i64>(first_block) * rows + r;
    i32* starts = x.starts + first * groups_of(x.k, x.group) + first_group * rows + r;
    float* sums = x.sums + first * groups_of(x.k, x.group) + first_group * rows + r;
    for (i32 b = first_block; b < num_blocks && b * x.input_group < end_input; ++b, scales += rows) {
        // The last group takes the padding of K, however long that makes it.
        const i32 block = b * block_words, stop = b + 1 < num_blocks ? block + block_words : words;
        const i32 used = (b + 1 < num_blocks ? stop * 4 : x.k) - block * 4, num_groups = ceil_div(used, x.group);
        F32 peak = zero();
        Mask broken = {0};
        for (i32 j = 4 * block; j < 4 * stop; j += 16) {
            const F32 v = select(first_lanes(4 * stop - j), inputs_at(x, values, j), zero());
            broken = broken | is_nan(v);
            peak = max(peak, abs(v));
        }
        const float largest = max_lanes(peak);
        *scales = bits(broken) != 0 ? __builtin_nanf("") : largest / 127.0f;
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        for (i32 g = 0; g < num_groups; ++g, starts += rows, sums += rows) {
            const i32 begin = block + g * group_words, end = g + 1 < num_groups ? begin + group_words : stop;
            const i32 sum = pack_group(x, values, data + (begin - first_word) * apart, apart, begin, end, inverse);
            *starts = -128 * sum;
            *sums = static_cast<float>(sum);
        }
    }
}

// Sixteen words from input j on of a row that is not quantised.
QUIRE_INLINE I32 words_at(const Packed& x, const float* values, i32 j) {
    if (x.kind != Format::bf16) return as_i32(inputs_at(x, values, j));
    return bf16_words(inputs_at(x, values, j), j + 16 < x.k ? inputs_at(x, values, j + 16) : zero());
}

// Up to sixteen rows of a tile: their words are turned in registers, so that those of one step are written together.
void pack_together(const Packed& x, RowPlace place, i32 count, const float* values, i64 stride, i32 begin, i32 end) {
    const i32 per_word = x.kind == Format::bf16 ? 2 : 1, stop = ceil_div(end, per_word);
    I32 words[16] = {};
    for (i32 word = begin / per_word; word < stop; word += 16) {
        for (i32 i = 0; i < count; ++i) words[i] = words_at(x, values + i * stride, word * per_word);
        store_columns(word_at(x, place, word), place.rows, words, count, stop - word < 16 ? stop - word : 16);
    }
}

// The same for inputs that are quantised, through memory for PIECE inputs of each row, of whole input groups.
constexpr i32 PIECE = 1024;
void pack_quantized_together(const Packed& x, RowPlace place, i32 count, const float* values, i64 stride, i32 begin, i32 end) {
    alignas(64) i32 codes[16][PIECE / 4 + 32];  // and the padding of K, and what is read past the end
    const i32 piece = PIECE / x.input_group * x.input_group;
    for (; begin < end; begin += piece) {
        const i32 last = end - begin < piece ? end : begin + piece;
        const i32 first_word = begin / 4, stop = last == x.k ? steps_of(Format::u8, x.k) : last / 4;
        for (i32 i = 0; i < count; ++i)
            pack_quantized(x, values + i * stride, {place.first, place.rows, place.r + i}, reinterpret_cast<u32*>(codes[i]), 1, begin, last);
        I32 words[16] = {};
        for (i32 word = first_word; word < stop; word += 16) {
            for (i32 i = 0; i < count; ++i) words[i] = load(codes[i] + word - first_word);
            store_columns(word_at(x, place, word), place.rows, words, count, stop - word < 16 ? stop - word : 16);
        }
    }
}

void pack_row(const Packed& x, i32 row, const float* values, i32 begin, i32 end) {
    const RowPlace place = place_of(x, row);
    if (is_integer(x.kind))
        pack_quantized(x, values, place, word_at(x, place, first_word_of(x, begin)), place.rows, begin, end);
    else
        pack_together(x, place, 1, values, 0, begin, end);
}

void pack_rows(const Packed& x, i32 first, i32 count, const float* values, i64 stride, i32 begin, i32 end) {
    const bool is_apart = is_integer(x.kind) && (x.input_group > PIECE || x.input_group % 4 != 0);
    for (i32 row = first, together; row < first + count; row += together, values += together * stride) {
        const RowPlace place = place_of(x, row);
        together = place.rows - place.r < 16 ? place.rows - place.r : 16;
        if (together > first + count - row) together = first + count - row;
        if (is_apart) {
            for (i32 i = 0; i < together; ++i) pack_row(x, row + i, values + i * stride, begin, end);
        } else if (is_integer(x.kind)) {
            pack_quantized_together(x, place, together, values, stride, begin, end);
        } else {
            pack_together(x, place, together, values, stride, begin, end);
        }
    }
}

// The scale and offset of group g of output n, as f32.
QUIRE_INLINE float group_value(const u16* values, i64 groups, i32 n, i32 g, float otherwise) {
    if (values == nullptr) return otherwise;
    float lanes[16];
    store(lanes, load_f16(values + ((n / 16) * groups + g) * 16));
    return lanes[n % 16];
}

void unpack_row(const Weight& w, i32 n, float* out) {
    const u8* panel = w.data + (n / 16) * w.panel_bytes;
    const i32 lane = n % 16;
    if (!is_integer(w.format)) {
        for (i32 k = 0; k < w.k; ++k) {
            u32 word = 0;
            if (w.format == Format::f16) {
                float lanes[16];
                store(lanes, load_f16(reinterpret_cast<const u16*>(panel) + static_cast<i64>(k) * 16));
                __builtin_memcpy(&word, lanes + lane, 4);
            } else if (w.format == Format::f32)
                __builtin_memcpy(&word, panel + static_cast<i64>(k) * 64 + lane * 4, 4);
            else
                __builtin_memcpy(reinterpret_cast<u8*>(&word) + 2, panel + static_cast<i64>(k / 2) * 64 + lane * 4 + (k % 2) * 2, 2);
            __builtin_memcpy(out + (w.columns == nullptr ? k : w.columns[k]), &word, 4);
        }
        return;
    }
    const i64 groups = groups_of(w.k, w.group);
    const float column = w.column_scale == nullptr ? 1.0f : w.column_scale[n];
    for (i32 g = 0; g < groups; ++g) {
        const float scale = group_value(w.group_scales, groups, n, g, 1.0f), offset = group_value(w.group_offsets, groups, n, g, 0.0f);
        const i32 stop = (g + 1) * w.group < w.k ? (g + 1) * w.group : w.k;
        for (i32 k = g * w.group; k < stop; ++k) {
            u8 code;
            if (w.format == Format::u8) {
                code = panel[static_cast<i64>(k / 4) * 64 + lane * 4 + k % 4];
            } else {
                const u8 both = panel[static_cast<i64>(k / 8) * 64 + lane * 4 + k % 4];
                code = w.table[k % 8 < 4 ? both & 15 : both >> 4];
            }
            const float value = (scale * static_cast<float>(static_cast<i32>(code) - 128) + offset) * column;
            out[w.columns == nullptr ? k : w.columns[k]] = value;
        }
    }
}

}  // namespace

extern const LinearTable linear_table = {tile_rows, pack_row, pack_rows, linear, unpack_row};

}  // namespace quire::QUIRE_ISA
