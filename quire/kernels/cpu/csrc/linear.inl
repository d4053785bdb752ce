// Linear layers over packed weights: one accumulation order per output, whatever the number of rows.
//
// A tile is R rows by P panels of 16 outputs; its accumulators stay in registers while it walks the inputs. Which tile computes an
// output decides only how often weights are read, never the order of its sum. Few rows take more panels at once (more streams from
// memory), many rows take two, so that a broadcast input is used twice.
#include "simd.h"

#include "activation.h"
#include "tables.h"
// The parts, each after those that it uses.
#include "linear_tile.inl"
#include "linear_bf12.inl"
#include "linear_integer.inl"
#include "linear_pack.inl"
#include "linear_unpack.inl"

namespace quire::QUIRE_ISA {
namespace {

template <int R, int P, bool IS_NEAR = false>
void tile_bf16(const Tile& t) {
    F32 acc[P][R];
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) acc[p][r] = zero();
    const u32* x = t.input;
    for (i64 s = 0; s < t.steps; ++s, x += R) {
        Bytes w[P];
        if constexpr (IS_NEAR)
            prefetch_near<P>(t, s);
        else
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
    store_tile<R, P>(t, acc);
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
    store_tile<R, P>(t, acc);
}

template <int R, int P>
void tile_f32(const Tile& t) { tile_floats<R, P, false>(t); }
template <int R, int P>
void tile_f16(const Tile& t) { tile_floats<R, P, true>(t); }

// Functions for 1 .. MAX / P rows.
template <int P>
struct Functions {
    TileFunction by_rows[6][MAX_FLOATS / P + 1];
    TileFunction near_by_rows[2][MAX_NEAR_ROWS + 1];  // bf16, u8
};

template <int P, int R>
constexpr void fill(Functions<P>& functions) {
    if constexpr (R > 0) {
        functions.by_rows[static_cast<int>(Format::bf16)][R] = tile_bf16<R, P>;
        if constexpr (R <= max_unit_rows(P)) functions.by_rows[static_cast<int>(Format::bf12)][R] = tile_bf12<R, P>;
        if constexpr (R <= MAX_NEAR_ROWS) {
            functions.near_by_rows[0][R] = tile_bf16<R, P, true>;
            if constexpr (R <= MAX_INTEGERS && R * P <= MAX_LONG_INTEGERS) functions.near_by_rows[1][R] = tile_u8<R, P, true>;
        }
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

// Rows of a tile of one panel.
QUIRE_INLINE int max_rows(Format kind) { return is_integer(kind) ? MAX_INTEGERS : MAX_FLOATS; }
QUIRE_INLINE int max_accumulators(const Weight& w) {
    const bool is_long = w.format == Format::u8 && w.group_scales == nullptr && w.group_offsets == nullptr;
    return is_long ? MAX_LONG_INTEGERS : max_rows(w.format);
}

QUIRE_INLINE bool is_tile(const Weight& w, i32 rows, int panels, bool is_expanded) {
    return w.format == Format::bf12 && !is_expanded ? rows <= max_unit_rows(panels) : rows * panels <= max_accumulators(w);
}

// is_expanded: the panels were brought from bf12 to bf16.
QUIRE_INLINE int panels_for(const Weight& w, i32 rows, bool is_expanded) {
    return is_tile(w, rows, 4, is_expanded) ? 4 : is_tile(w, rows, 2, is_expanded) ? 2 : 1;
}

i32 tile_rows(Format kind, i32 m) {
    // Up to all accumulators one pass over the weights is worth more than reusing inputs; beyond, f32 tiles are two panels wide.
    const i32 most = max_rows(kind);
    if (m <= most) return m;
    const i32 wide = is_integer(kind) ? most : most / 2;
    return ceil_div(m, ceil_div(m, wide));
}

template <int P>
QUIRE_INLINE TileFunction function_of(const Functions<P>& functions, Format format, i32 rows, bool is_near) {
    return is_near ? functions.near_by_rows[format == Format::u8][rows] : functions.by_rows[static_cast<int>(format)][rows];
}

QUIRE_INLINE void run_tile(int panels, Format format, i32 rows, bool is_near, const Tile& tile) {
    (panels == 4   ? function_of(four_panels, format, rows, is_near)
     : panels == 2 ? function_of(two_panels, format, rows, is_near)
                   : function_of(one_panel, format, rows, is_near))(tile);
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
    tile.steps = w.format == Format::bf12 ? w.k / UNIT_INPUTS : w.format == Format::f16 ? w.k : w.format == Format::u8 ? ceil_div(w.k, 4) : static_cast<i32>(w.panel_bytes / 64);
    tile.group_steps = w.format == Format::u8 ? ceil_div(w.group, 4) : ceil_div(w.group, 8);
    tile.groups_per_scale = w.group == 0 ? 1 : ceil_div(w.input_group, w.group);
}

// What a panel's results are multiplied with and added to.
struct Scaling {
    bool has_scale, has_bias;
    F32 scale, bias;

    F32 operator()(const float* tile) const {
        F32 y = load(tile);
        if (has_scale) y = y * scale;
        if (has_bias) y = y + bias;
        return y;
    }
};

QUIRE_INLINE Scaling scaling_of(const Weight& w, i32 panel) {
    Scaling s = {w.column_scale != nullptr, w.bias != nullptr, zero(), zero()};
    if (s.has_scale) s.scale = load(w.column_scale + panel * 16);
    if (s.has_bias) s.bias = load(w.bias + panel * 16);
    return s;
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

// Finish one panel of a tile whose result is the input of the next layer: as pack_rows would write it from `out`.
void pack_panel(const LinearJob& job, i32 panel, TilePlace place, const float* y, const float* y2) {
    const Packed& to = *job.packed;
    const i32 word = panel * 8, num_words = smaller(steps_of(to.kind, to.k) - word, 8);
    const Mask lanes = first_lanes(job.weight->n - panel * 16);
    const Scaling scaled = scaling_of(*job.weight, panel), second = job.finish == Finish::gate ? scaling_of(*job.second, panel) : Scaling();
    I32 words[16];
    for (i32 r = 0, together; r < place.rows; r += together) {
        const RowPlace at = place_of(to, place.first_row + r);
        together = smaller(smaller(at.rows - at.r, 16), place.rows - r);
        for (i32 i = 0; i < together; ++i) {
            F32 value = activate(job.activation, scaled(y + (r + i) * 16));
            if (job.finish == Finish::gate) value = value * second(y2 + (r + i) * 16);
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
    const Scaling scaled = scaling_of(w, panel);
    float* out = job.out + place.first_row * job.out_stride + panel * 16;
    switch (job.finish) {
        case Finish::best:
            for (i32 r = 0; r < place.rows; ++r) {
                const F32 value = scaled(y + r * 16);
                const i64 at = static_cast<i64>(place.first_row + r) * worker.size + worker.rank;
                // Almost every panel holds nothing better.
                const Mask better = (value > set1(job.best_value[at])) | is_nan(value);
                if (job.best_index[at] < 0 || bits(better & lanes) != 0 || job.best_index[at] > panel * 16)
                    keep_best(job, at, panel, lanes, value);
            }
            break;
        case Finish::store:
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride) store(out, scaled(y + r * 16), lanes);
            break;
        case Finish::add:
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride) store(out, fma(set1(job.factor), scaled(y + r * 16), load(out, lanes)), lanes);
            break;
        case Finish::multiply:
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride) store(out, scaled(y + r * 16) * load(out, lanes), lanes);
            break;
        case Finish::activate:
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride) store(out, activate(job.activation, scaled(y + r * 16)), lanes);
            break;
        case Finish::gate: {
            const Scaling second = scaling_of(*job.second, panel);
            for (i32 r = 0; r < place.rows; ++r, out += job.out_stride) store(out, activate(job.activation, scaled(y + r * 16)) * second(y2 + r * 16), lanes);
            break;
        }
    }
}

// Whether tiles write the results of a job where they belong.
QUIRE_INLINE bool is_direct(const LinearJob& job) {
    const Weight& w = *job.weight;
    return job.finish == Finish::store && !is_integer(w.format) && w.column_scale == nullptr && w.bias == nullptr && w.n % 16 == 0;
}

// One unit of work: `count` panels from `first`, over all rows.
struct Unit {
    const Worker& worker;
    const LinearJob& job;
    i32 first, count;
    u8* expanded;  // bf12 with many rows: where the panels of a step are kept as bf16; else null
    i64 groups;    // of a panel
    i32 num_passes, pass_shift;  // over a panel, by tiles of rows, and how many bits that has
    bool is_near, is_direct;

    i64 expanded_bytes() const { return static_cast<i64>(job.weight->k) * 32; }
};

// The panels that a unit computes side by side: slot i of step s. Each slot walks panels that follow one another in memory, so that
// what is prefetched past the end of one is the beginning of the next.
struct Walk {
    i32 first, count, steps;

    i32 panel(int slot, i32 step) const { return first + slot * steps + step; }
};

// Put panel p of a weight into a slot of the tile. With one pass over the panel the lines ahead are fetched; several passes over the
// same panels share the fetching of the ones that follow. `place`: of the panel among the expanded ones.
QUIRE_INLINE void set_panel(const Unit& unit, Tile& tile, int slot, int num_slots, const Weight& w, i32 p, i32 pass, int place) {
    const i64 groups = unit.groups;
    const u8* panel = w.data + p * w.panel_bytes;
    tile.panels[slot] = unit.expanded == nullptr ? panel : unit.expanded + place * unit.expanded_bytes();
    if (w.windows != nullptr) {
        tile.windows[slot] = w.windows + p;
        prefetch(w.windows + p + 4);
        prefetch(w.windows[p].exceptions + w.windows[p].count + 4);
    }
    tile.scales[slot] = w.group_scales == nullptr ? nullptr : w.group_scales + p * groups * 16;
    tile.offsets[slot] = w.group_offsets == nullptr ? nullptr : w.group_offsets + p * groups * 16;
    if (unit.num_passes == 1) {
        tile.ahead[slot] = panel + PREFETCH_BYTES / num_slots;
        tile.ahead_shift = 0;
        return;
    }
    tile.ahead[slot] = panel + w.panel_bytes + ((w.panel_bytes / 64) >> unit.pass_shift) * pass * 64;
    tile.ahead_shift = unit.pass_shift;
}

QUIRE_INLINE Format tile_format(const Unit& unit) { return unit.expanded == nullptr ? unit.job.weight->format : Format::bf16; }

// Let a tile write [P][rows][16].
QUIRE_INLINE void set_dense(Tile& tile, float* out, i32 rows) {
    tile.out = out;
    tile.panel_stride = static_cast<i64>(rows) * 16;
    tile.row_stride = 16;
}

// Compute the panels of a step for the rows of a tile into `out` [width][R][16], or where they belong; is_second: of the second weight.
void run_panels(const Unit& unit, Tile& tile, bool is_second, const Walk& walk, i32 step, int width, TilePlace place, i32 pass, float* out) {
    const Weight& w = is_second ? *unit.job.second : *unit.job.weight;
    for (int i = 0; i < width; ++i) set_panel(unit, tile, i, width, w, walk.panel(i, step), pass, is_second ? width + i : i);
    if (unit.is_direct) {
        const LinearJob& job = unit.job;
        tile.out = job.out + place.first_row * job.out_stride + walk.panel(0, step) * 16;
        tile.panel_stride = static_cast<i64>(walk.steps) * 16;
        tile.row_stride = job.out_stride;
    } else {
        set_dense(tile, out, place.rows);
    }
    run_tile(width, tile_format(unit), place.rows, unit.is_near, tile);
}

// Bring the panels of a step to bf16.
void expand_step(const Unit& unit, const Walk& walk, i32 step, int width) {
    for (int i = 0; i < width; ++i) {
        expand_panel(*unit.job.weight, walk.panel(i, step), unit.expanded + i * unit.expanded_bytes());
        if (unit.job.finish == Finish::gate) expand_panel(*unit.job.second, walk.panel(i, step), unit.expanded + (width + i) * unit.expanded_bytes());
    }
}

// Ask for what the end of a step reads: a panel has a line of it, which no stream brings in, and its first rows of the result,
// which another thread may have written.
QUIRE_INLINE void prefetch_finish(const Worker& worker, const LinearJob& job, const Weight& w, i32 panel) {
    if (w.column_scale != nullptr) prefetch(w.column_scale + panel * 16);
    if (w.bias != nullptr) prefetch(w.bias + panel * 16);
    if (job.out == nullptr || job.packed != nullptr || worker.size == 1) return;
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
        prefetch_finish(unit.worker, job, *job.weight, walk.panel(i, step));
        if (is_gated) prefetch_finish(unit.worker, job, *job.second, walk.panel(i, step));
    }
    if (unit.expanded != nullptr) expand_step(unit, walk, step, width);
    for (i32 row = 0, pass = 0; row < x.m; row += x.tile_rows, ++pass) {
        const TilePlace place = {row, x.tile_rows < x.m - row ? x.tile_rows : x.m - row};
        set_input(tile, x, place);
        const i64 half = static_cast<i64>(width) * place.rows * 16;
        if (is_gated && 2 * width <= MAX_PANELS && is_tile(*job.weight, place.rows, 2 * width, unit.expanded != nullptr)) {
            // Gate and up side by side: twice the streams from memory.
            for (int i = 0; i < width; ++i) set_panel(unit, tile, width + i, 2 * width, *job.second, walk.panel(i, step), pass, width + i);
            for (int i = 0; i < width; ++i) set_panel(unit, tile, i, 2 * width, *job.weight, walk.panel(i, step), pass, i);
            set_dense(tile, buffer, place.rows);
            run_tile(2 * width, tile_format(unit), place.rows, unit.is_near, tile);
        } else {
            run_panels(unit, tile, false, walk, step, width, place, pass, buffer);
            if (is_gated) run_panels(unit, tile, true, walk, step, width, place, pass, buffer + half);
        }
        for (int i = 0; i < width && !unit.is_direct; ++i)
            finish_panel(unit.worker, job, walk.panel(i, step), place, buffer + i * place.rows * 16, buffer + half + i * place.rows * 16);
    }
}

// Whether several passes read the panels of a unit of work, so that they are brought to bf16 first.
QUIRE_INLINE bool is_expanded(const LinearJob& job) { return job.weight->format == Format::bf12 && job.input->m > job.input->tile_rows; }

// Panels that a tile of the job computes side by side.
QUIRE_INLINE i32 width_of(const LinearJob& job, bool is_expanded) {
    const i32 width = panels_for(*job.weight, job.input->tile_rows, is_expanded);
    return job.finish == Finish::gate && width > 1 ? width / 2 : width;
}

// Panels of a unit of work: those of a tile, as long as a sequence of units is one stream from memory.
QUIRE_INLINE i32 unit_panels(const LinearJob& job) { return width_of(job, is_expanded(job)); }

void run_unit(const Worker& worker, const LinearJob& job, i32 first, i32 count) {
    Tile tile;
    set_weight(tile, *job.weight);
    i32 width = unit_panels(job);
    Unit unit = {worker, job, first, count, nullptr, groups_of(job.weight->k, job.weight->group), ceil_div(job.input->m, job.input->tile_rows), 0, false, is_direct(job)};
    while ((1 << unit.pass_shift) < unit.num_passes) ++unit.pass_shift;
    unit.is_near = job.is_near && job.input->m <= MAX_NEAR_ROWS && unit.num_passes == 1 && (job.weight->format == Format::bf16 || job.weight->format == Format::u8);
    if (is_expanded(job)) unit.expanded = thread_scratch(2 * width * unit.expanded_bytes());
    // Without memory every pass does it anew.
    if (unit.expanded == nullptr) width = width_of(job, false);
    if (unit.expanded != nullptr) tile.steps = job.weight->k / 2;
    i32 done = 0;
    for (; width > 0; width /= 2) {
        const Walk walk = {unit.first + done, unit.count - done, (unit.count - done) / width};
        for (i32 step = 0; step < walk.steps; ++step) run_step(unit, tile, walk, step, width);
        done += walk.steps * width;
    }
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
            run_unit(worker, jobs[j], static_cast<i32>(first) * width, smaller(panels, static_cast<i32>(last) * width) - static_cast<i32>(first) * width);
        }
    }
}

}  // namespace

extern const LinearTable linear_table = {tile_rows, pack_row, pack_rows, linear, unpack_row};

}  // namespace quire::QUIRE_ISA
