// Weights of float8: converted exactly, in pairs, during the product; for many rows whole panels are first converted to bf16.
namespace quire::QUIRE_ISA {
namespace {

// Products with one line of pairs, of inputs that are bf16 pairs, or f32 (is_wide).
template <int R, int P, bool IS_WIDE>
QUIRE_INLINE void dot_pairs_of(const Pairs& w, int p, const u32* x, F32 (&acc)[P][R]) {
    if constexpr (IS_WIDE) {
        const float* values = reinterpret_cast<const float*>(x);
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) acc[p][r] = fma(upper(w), set1(values[R + r]), fma(lower(w), set1(values[r]), acc[p][r]));
    } else {
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) acc[p][r] = dot_pairs(acc[p][r], w, set1_bytes(x[r]));
    }
}

// Products with four inputs: two lines of pairs, from codes or from a panel that was expanded.
template <int R, int P, bool IS_EXPANDED, bool IS_WIDE>
QUIRE_INLINE void dot_four_inputs(const Tile& t, i64 s, const Float8Table& table, const u32* x, F32 (&acc)[P][R]) {
    const u32* next = x + (IS_WIDE ? 2 : 1) * R;
    if constexpr (QUIRE_HAS_512 && !IS_WIDE) {
        // Inputs in the outer loop: with panels outside, GCC keeps all inputs of a line in registers, and half of the sums in
        // memory.
        Bytes first[P], second[P];
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) {
            if constexpr (IS_EXPANDED) {
                first[p] = load_bytes(t.panels[p] + s * 128), second[p] = load_bytes(t.panels[p] + s * 128 + 64);
            } else {
                const Float8Line line = load_float8(table, t.panels[p] + s * 64);
                first[p] = float8_bytes<0>(line), second[p] = float8_bytes<1>(line);
            }
        }
        dot_line<R, P>(first, x, acc);
        dot_line<R, P>(second, next, acc);
    } else if constexpr (IS_EXPANDED) {
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) dot_pairs_of<R, P, IS_WIDE>(pairs_of(load_bytes(t.panels[p] + s * 128)), p, x, acc);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) dot_pairs_of<R, P, IS_WIDE>(pairs_of(load_bytes(t.panels[p] + s * 128 + 64)), p, next, acc);
    } else {
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) {
            const Float8Line line = load_float8(table, t.panels[p] + s * 64);
            dot_pairs_of<R, P, IS_WIDE>(pairs_of(float8_bytes<0>(line)), p, x, acc);
            dot_pairs_of<R, P, IS_WIDE>(pairs_of(float8_bytes<1>(line)), p, next, acc);
        }
    }
}

// Add the scaled sums of block g to those of the earlier blocks, which are kept in t.out.
template <int R, int P>
QUIRE_INLINE void add_block(const Tile& t, i64 g, const F32 (&acc)[P][R]) {
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p) {
        const F32 scale = load(t.block_scales[p] + g * 16);
        prefetch(t.block_scales[p] + (g + 8) * 16);
        float* out = t.out + p * t.panel_stride;
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r, out += t.row_stride)
            store(out, g == 0 ? acc[p][r] * scale : fma(acc[p][r], scale, load(out)));
    }
}

template <int R, int P, bool IS_EXPANDED, bool IS_WIDE>
void tile_float8(const Tile& t) {
    const Float8Table table = float8_table();
    const bool has_blocks = t.block_scales[0] != nullptr;
    const i64 block_steps = has_blocks ? t.group_steps : t.steps;
    const u32* x = t.input;
    for (i64 s = 0, g = 0; s < t.steps; ++g) {
        F32 acc[P][R];
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
            for (int r = 0; r < R; ++r) acc[p][r] = zero();
        const i64 end = s + block_steps < t.steps ? s + block_steps : t.steps;
        do {
            prefetch_ahead<P>(t, s);
            dot_four_inputs<R, P, IS_EXPANDED, IS_WIDE>(t, s, table, x, acc);
            x += (IS_WIDE ? 4 : 2) * R;
        } while (++s < end);
        if (!has_blocks) return store_tile<R, P>(t, acc);
        add_block<R, P>(t, g, acc);
    }
}

// A panel of codes as one of bf16.
void expand_float8(const Weight& w, i32 panel, u8* lines) {
    const Float8Table table = float8_table();
    const u8* from = w.data + panel * w.panel_bytes;
    for (i64 s = 0; s < w.k / 4; ++s) {
        const Float8Line line = load_float8(table, from + s * 64);
        store_bytes(lines + s * 128, float8_bytes<0>(line));
        store_bytes(lines + s * 128 + 64, float8_bytes<1>(line));
    }
}

void unpack_float8(const Weight& w, i32 n, float* out) {
    const u8* codes = w.data + (n / 16) * w.panel_bytes + float8_place(n % 16, 0);
    const i32 blocks = w.block == 0 ? 1 : ceil_div(w.k, w.block), block = w.block == 0 ? w.k : w.block;
    const float column = w.column_scale == nullptr ? 1.0f : w.column_scale[n];
    for (i32 k = 0; k < w.k; ++k) {
        const u32 word = static_cast<u32>(bf16_of_float8(codes[static_cast<i64>(k / 2) * 32 + k % 2])) << 16;
        float value;
        __builtin_memcpy(&value, &word, 4);
        const float scale =
            w.block_scales == nullptr ? column : w.block_scales[(static_cast<i64>(n / 16) * blocks + k / block) * 16 + n % 16];
        out[w.columns == nullptr ? k : w.columns[k]] = value * scale;
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
