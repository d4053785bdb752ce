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

// Accumulators of a tile: R * P of them, with room for the weights in the machine's registers (32 of 512 bits, 16 of 256 bits).
#if QUIRE_LEVEL == 2
constexpr int MAX_ACCUMULATORS = 28;
#elif QUIRE_LEVEL == 1
constexpr int MAX_ACCUMULATORS = 6;
#else
constexpr int MAX_ACCUMULATORS = 4;
#endif
constexpr int MAX_PANELS = 4;
// How far ahead of use weights are asked for, in bytes of a panel: with few rows memory is the limit.
constexpr int PREFETCH_BYTES = 2048;

struct Tile {
    const u8* panels[MAX_PANELS];
    const u16* scales[MAX_PANELS];
    const u16* offsets[MAX_PANELS];
    const u8* table;
    const u32* input;
    const float* input_scales;
    const i32* starts;
    const float* sums;
    i32 steps;        // 64-byte lines of a panel
    i32 group_steps;  // lines of a group
    float* out;       // [P][R][16]
};

using TileFunction = void (*)(const Tile&);

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
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) {
            w[p] = load_bytes(t.panels[p] + s * 64);
            if (R <= 16) prefetch(t.panels[p] + s * 64 + PREFETCH_BYTES);
        }
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) {
            const Bytes b = set1_bytes(x[r]);
#pragma GCC unroll 32
            for (int p = 0; p < P; ++p) acc[p][r] = dot_bf16(acc[p][r], w[p], b);
        }
    }
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) store(t.out + (p * R + r) * 16, acc[p][r]);
}

template <int R, int P>
void tile_f32(const Tile& t) {
    F32 acc[P][R];
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) acc[p][r] = zero();
    const float* x = reinterpret_cast<const float*>(t.input);
    for (i64 s = 0; s < t.steps; ++s, x += R) {
        F32 w[P];
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) {
            w[p] = load(reinterpret_cast<const float*>(t.panels[p] + s * 64));
            if (R <= 16) prefetch(t.panels[p] + s * 64 + PREFETCH_BYTES);
        }
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) {
            const F32 b = set1(x[r]);
#pragma GCC unroll 32
            for (int p = 0; p < P; ++p) acc[p][r] = fma(w[p], b, acc[p][r]);
        }
    }
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) store(t.out + (p * R + r) * 16, acc[p][r]);
}

// The end of a group: integers become f32 and join the sum of the groups before, which rests in t.out.
template <int R, int P>
QUIRE_INLINE void add_group(const Tile& t, i32 g, const I32 (&acc)[P][R]) {
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p) {
        const bool has_scale = t.scales[p] != nullptr, has_offset = t.offsets[p] != nullptr;
        const F32 scale = has_scale ? load_f16(t.scales[p] + g * 16) : set1(1.0f);
        const F32 offset = has_offset ? load_f16(t.offsets[p] + g * 16) : zero();
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) {
            float* out = t.out + (p * R + r) * 16;
            const F32 before = g == 0 ? zero() : load(out);
            F32 sum = fma(to_f32(acc[p][r]) * scale, set1(t.input_scales[g * R + r]), before);
            if (has_offset) sum = fma(offset, set1(t.sums[g * R + r]), sum);
            store(out, sum);
        }
    }
}

template <int R, int P>
void tile_u8(const Tile& t) {
    const u32* x = t.input;
    i32 g = 0;
    for (i64 begin = 0; begin < t.steps; begin += t.group_steps, ++g) {
        const i64 end = begin + t.group_steps < t.steps ? begin + t.group_steps : t.steps;
        I32 acc[P][R];
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
            for (int r = 0; r < R; ++r) acc[p][r] = set1(t.starts[g * R + r]);
        for (i64 s = begin; s < end; ++s, x += R) {
            Bytes w[P];
#pragma GCC unroll 32
            for (int p = 0; p < P; ++p) {
                w[p] = load_bytes(t.panels[p] + s * 64);
                if (R <= 16) prefetch(t.panels[p] + s * 64 + PREFETCH_BYTES);
            }
#pragma GCC unroll 32
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 32
                for (int p = 0; p < P; ++p) acc[p][r] = dot_u8s8(acc[p][r], w[p], x + r);
        }
        add_group<R, P>(t, g, acc);
    }
}

template <int R, int P>
void tile_u4(const Tile& t) {
    const u32* x = t.input;
    const Bytes table = load_table(t.table);
    i32 g = 0;
    for (i64 begin = 0; begin < t.steps; begin += t.group_steps, ++g) {
        const i64 end = begin + t.group_steps < t.steps ? begin + t.group_steps : t.steps;
        I32 acc[P][R];
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
            for (int r = 0; r < R; ++r) acc[p][r] = set1(t.starts[g * R + r]);
        for (i64 s = begin; s < end; ++s, x += 2 * R) {
#pragma GCC unroll 32
            for (int p = 0; p < P; ++p) {
                Bytes low, high;
                unpack_nibbles(load_bytes(t.panels[p] + s * 64), table, low, high);
                if (R <= 16) prefetch(t.panels[p] + s * 64 + PREFETCH_BYTES);
#pragma GCC unroll 32
                for (int r = 0; r < R; ++r) acc[p][r] = dot_u8s8(acc[p][r], low, x + r);
#pragma GCC unroll 32
                for (int r = 0; r < R; ++r) acc[p][r] = dot_u8s8(acc[p][r], high, x + R + r);
            }
        }
        add_group<R, P>(t, g, acc);
    }
}

// Functions for 1 .. MAX_ACCUMULATORS / P rows.
template <int P>
struct Functions {
    TileFunction by_rows[4][MAX_ACCUMULATORS / P + 1];
};

template <int P, int R>
constexpr void fill(Functions<P>& functions) {
    if constexpr (R > 0) {
        functions.by_rows[static_cast<int>(Format::bf16)][R] = tile_bf16<R, P>;
        functions.by_rows[static_cast<int>(Format::f32)][R] = tile_f32<R, P>;
        functions.by_rows[static_cast<int>(Format::u8)][R] = tile_u8<R, P>;
        functions.by_rows[static_cast<int>(Format::u4)][R] = tile_u4<R, P>;
        fill<P, R - 1>(functions);
    }
}

// Constant expressions: nothing of an instruction set may run when the library is loaded.
template <int P>
constexpr Functions<P> make_functions() {
    Functions<P> functions = {};
    fill<P, MAX_ACCUMULATORS / P>(functions);
    return functions;
}

constexpr Functions<1> one_panel = make_functions<1>();
constexpr Functions<2> two_panels = make_functions<2>();
constexpr Functions<4> four_panels = make_functions<4>();

QUIRE_INLINE int panels_for(i32 rows) { return rows * 4 <= MAX_ACCUMULATORS ? 4 : rows * 2 <= MAX_ACCUMULATORS ? 2 : 1; }

i32 tile_rows(Format, i32 m) {
    // Up to all accumulators one pass over the weights is worth more than reusing inputs.
    if (m <= MAX_ACCUMULATORS) return m;
    const i32 tiles = ceil_div(m, MAX_ACCUMULATORS / 2);
    return ceil_div(m, tiles);
}

QUIRE_INLINE void run_tile(int panels, Format format, i32 rows, const Tile& tile) {
    const int f = static_cast<int>(format);
    (panels == 4 ? four_panels.by_rows[f][rows] : panels == 2 ? two_panels.by_rows[f][rows] : one_panel.by_rows[f][rows])(tile);
}

struct TilePlace {
    i32 first_row, rows;
};

QUIRE_INLINE void set_input(Tile& tile, const Packed& x, TilePlace place) {
    const i64 words = steps_of(x.kind, x.k), groups = groups_of(x.k, x.group);
    tile.input = x.data + place.first_row * words;
    tile.input_scales = x.scales + place.first_row * groups;
    tile.starts = x.starts + place.first_row * groups;
    tile.sums = x.sums + place.first_row * groups;
}

QUIRE_INLINE void set_panel(Tile& tile, int slot, const Weight& w, i32 panel) {
    const i64 groups = groups_of(w.k, w.group);
    tile.panels[slot] = w.data + panel * w.panel_bytes;
    tile.scales[slot] = w.group_scales == nullptr ? nullptr : w.group_scales + panel * groups * 16;
    tile.offsets[slot] = w.group_offsets == nullptr ? nullptr : w.group_offsets + panel * groups * 16;
}

QUIRE_INLINE void set_weight(Tile& tile, const Weight& w) {
    tile.table = w.table;
    tile.steps = w.format == Format::bf16 ? ceil_div(w.k, 2)
                 : w.format == Format::f32 ? w.k
                                           : ceil_div(w.k, 8) * (w.format == Format::u8 ? 2 : 1);
    tile.group_steps = w.format == Format::u8 ? ceil_div(w.group, 4) : ceil_div(w.group, 8);
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

// Finish one panel of a tile: y and, for gate, y2 are [R][16].
void finish_panel(const Worker& worker, const LinearJob& job, i32 panel, TilePlace place, const float* y, const float* y2) {
    const Weight& w = *job.weight;
    const Mask lanes = first_lanes(w.n - panel * 16);
    for (i32 r = 0; r < place.rows; ++r) {
        const F32 value = scaled(w, panel, y + r * 16);
        const i32 row = job.rows == nullptr ? place.first_row + r : job.rows[place.first_row + r];
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

// `count` panels from `first`, over all rows. A tile of inputs stays in the first-level cache while the panels pass.
void run_panels(const Worker& worker, const LinearJob& job, i32 first, i32 count) {
    alignas(64) float buffer[2 * MAX_ACCUMULATORS * 16];
    const Packed& x = *job.input;
    const bool is_gated = job.finish == Finish::gate;
    Tile tile;
    set_weight(tile, *job.weight);
    for (i32 row = 0; row < x.m; row += x.tile_rows) {
        const TilePlace place = {row, x.tile_rows < x.m - row ? x.tile_rows : x.m - row};
        set_input(tile, x, place);
        const i64 panel_floats = place.rows * 16;
        for (i32 p = first; p < first + count;) {
            const i32 left = first + count - p;
            int width = panels_for(place.rows);
            if (is_gated && width > 1) width /= 2;
            while (width > left) width /= 2;
            tile.out = buffer;
            for (int i = 0; i < width; ++i) set_panel(tile, i, *job.weight, p + i);
            const bool is_joint = is_gated && 2 * width * place.rows <= MAX_ACCUMULATORS;
            for (int i = 0; is_joint && i < width; ++i) set_panel(tile, width + i, *job.second, p + i);
            run_tile(is_joint ? 2 * width : width, job.weight->format, place.rows, tile);
            if (is_gated && !is_joint) {
                tile.out = buffer + width * panel_floats;
                for (int i = 0; i < width; ++i) set_panel(tile, i, *job.second, p + i);
                run_tile(width, job.weight->format, place.rows, tile);
            }
            for (int i = 0; i < width; ++i)
                finish_panel(worker, job, p + i, place, buffer + i * panel_floats, buffer + (width + i) * panel_floats);
            p += width;
        }
    }
}

i32 unit_panels(const LinearJob& job) { return job.input->m > MAX_ACCUMULATORS ? 8 : job.finish == Finish::gate ? 2 : 4; }

void linear(Worker& worker, const LinearJob* jobs, i32 num_jobs) {
    i64 total = 0;
    for (i32 j = 0; j < num_jobs; ++j)
        if (jobs[j].input->m > 0) total += ceil_div(panels_of(*jobs[j].weight), unit_panels(jobs[j]));
    for (i64 unit = next(worker, total, 1); unit < total; unit = next(worker, total, 1)) {
        i64 left = unit;
        i32 j = 0;
        for (;; ++j) {
            if (jobs[j].input->m == 0) continue;
            const i64 units = ceil_div(panels_of(*jobs[j].weight), unit_panels(jobs[j]));
            if (left < units) break;
            left -= units;
        }
        const i32 step = unit_panels(jobs[j]), first = static_cast<i32>(left) * step, panels = panels_of(*jobs[j].weight);
        run_panels(worker, jobs[j], first, step < panels - first ? step : panels - first);
    }
}

// Sixteen inputs from j on, in the order of the packed weight, 0 past the end.
QUIRE_INLINE F32 inputs_at(const Packed& x, const float* values, i32 j) {
    if (x.columns == nullptr) return load(values + j, first_lanes(x.k - j));
    float lanes[16] = {};
    for (int i = 0; i < 16 && j + i < x.k; ++i) lanes[i] = values[x.columns[j + i]];
    return load(lanes);
}

void pack_quantized(const Packed& x, const float* values, u32* data, i64 base, i32 rows, i32 r) {
    const i32 words = steps_of(Format::u8, x.k), group_words = ceil_div(x.group, 4);
    i32 g = 0;
    for (i32 begin = 0; begin < words; begin += group_words, ++g) {
        const i32 end = begin + group_words < words ? begin + group_words : words;
        const i32 stop = 4 * end < x.k ? 4 * end : x.k;
        F32 peak = zero();
        Mask broken = {0};
        for (i32 j = 4 * begin; j < stop; j += 16) {
            const F32 v = select(first_lanes(stop - j), inputs_at(x, values, j), zero());
            broken = broken | is_nan(v);
            peak = max(peak, abs(v));
        }
        const float largest = max_lanes(peak);
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        i32 sum = 0;
        for (i32 j = 4 * begin; j < 4 * end; j += 16) {
            i8 codes[16];
            const F32 v = j < stop ? select(first_lanes(stop - j), inputs_at(x, values, j), zero()) : zero();
            // At most 127 in size also where 127 / largest overflows or the product rounds up.
            store_s8(codes, to_i32(max(set1(-127.0f), min(set1(127.0f), v * set1(inverse)))));
            for (int w = 0; w < 4 && j / 4 + w < end; ++w) {
                u32 word;
                __builtin_memcpy(&word, codes + 4 * w, 4);
                data[static_cast<i64>(j / 4 + w) * rows + r] = word;
                sum += codes[4 * w] + codes[4 * w + 1] + codes[4 * w + 2] + codes[4 * w + 3];
            }
        }
        const i64 at = base + static_cast<i64>(g) * rows + r;
        const float scale = bits(broken) != 0 ? __builtin_nanf("") : largest / 127.0f;
        x.scales[at] = scale;
        x.starts[at] = -128 * sum;
        x.sums[at] = scale * static_cast<float>(sum);
    }
}

void pack_row(const Packed& x, i32 row, const float* values) {
    const i32 first = row / x.tile_rows * x.tile_rows, r = row - first;
    const i32 rows = x.tile_rows < x.m - first ? x.tile_rows : x.m - first;
    u32* data = x.data + static_cast<i64>(first) * steps_of(x.kind, x.k);
    if (x.kind == Format::u8 || x.kind == Format::u4) {
        pack_quantized(x, values, data, static_cast<i64>(first) * groups_of(x.k, x.group), rows, r);
        return;
    }
    for (i32 j = 0; j < x.k; j += 16) {
        const F32 v = inputs_at(x, values, j);
        u32 words[16];
        const bool is_bf16 = x.kind == Format::bf16;
        if (is_bf16)
            store_bf16(reinterpret_cast<u16*>(words), v);
        else
            store(reinterpret_cast<float*>(words), v);
        const i32 step = is_bf16 ? j / 2 : j, count = is_bf16 ? ceil_div(x.k - j < 16 ? x.k - j : 16, 2) : (x.k - j < 16 ? x.k - j : 16);
        for (i32 i = 0; i < count; ++i) data[static_cast<i64>(step + i) * rows + r] = words[i];
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
    if (w.format == Format::f32 || w.format == Format::bf16) {
        for (i32 k = 0; k < w.k; ++k) {
            u32 word = 0;
            if (w.format == Format::f32)
                __builtin_memcpy(&word, panel + static_cast<i64>(k) * 64 + lane * 4, 4);
            else
                __builtin_memcpy(reinterpret_cast<u8*>(&word) + 2, panel + static_cast<i64>(k / 2) * 64 + lane * 4 + (k % 2) * 2, 2);
            __builtin_memcpy(out + k, &word, 4);
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

extern const LinearTable linear_table = {tile_rows, pack_row, linear, unpack_row};

}  // namespace quire::QUIRE_ISA
