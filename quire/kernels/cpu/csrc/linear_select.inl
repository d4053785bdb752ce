// Selection of tiles: tiles of floats, the tables of all tiles, and their descriptions of inputs and weights.
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
        dot_line<R, P>(w, x, acc);
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
            w[p] = IS_HALF ? load_f16(reinterpret_cast<const u16*>(t.panels[p] + s * 32))
                           : load(reinterpret_cast<const float*>(t.panels[p] + s * 64));
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
    TileFunction by_rows[NUM_FORMATS][MAX_ACCUMULATORS / P + 1];
    // float8 of which the panels were brought to bf16: beside bf16 inputs, f32 inputs
    TileFunction expanded_by_rows[2][MAX_FLOATS / P + 1];
    TileFunction near_by_rows[2][MAX_NEAR_ROWS + 1];  // bf16, u8
};

template <int P, int R>
constexpr void fill(Functions<P>& functions) {
    if constexpr (R > 0) {
        if constexpr (R * P <= MAX_FLOATS) {
            functions.by_rows[static_cast<int>(Format::bf16)][R] = tile_bf16<R, P>;
            functions.by_rows[static_cast<int>(Format::f32)][R] = tile_f32<R, P>;
            functions.by_rows[static_cast<int>(Format::f16)][R] = tile_f16<R, P>;
            if constexpr (R <= MAX_NEAR_ROWS) functions.near_by_rows[0][R] = tile_bf16<R, P, true>;
            functions.expanded_by_rows[0][R] = tile_float8<R, P, true, false>;
            functions.expanded_by_rows[1][R] = tile_float8<R, P, true, true>;
        }
        if constexpr (R <= max_unit_rows(P)) {
            functions.by_rows[static_cast<int>(Format::bf12)][R] = tile_bf12<R, P>;
            functions.by_rows[static_cast<int>(Format::f8)][R] = tile_float8<R, P, false, false>;
            functions.by_rows[static_cast<int>(Format::f8_wide)][R] = tile_float8<R, P, false, true>;
        }
        if constexpr (R <= MAX_NEAR_ROWS) {
            if constexpr (R <= MAX_INTEGERS && is_integer_tile(R, P, MAX_LONG_INTEGERS))
                functions.near_by_rows[1][R] = tile_u8<R, P, true>;
        }
        if constexpr (R <= MAX_INTEGERS && is_integer_tile(R, P, MAX_LONG_INTEGERS))
            functions.by_rows[static_cast<int>(Format::u8)][R] = tile_u8<R, P>;
        if constexpr (is_integer_tile(R, P, MAX_INTEGERS)) functions.by_rows[static_cast<int>(Format::u4)][R] = tile_u4<R, P>;
        fill<P, R - 1>(functions);
    }
}

// Constant expressions: no code of an instruction set may run when the library is loaded.
template <int P>
constexpr Functions<P> make_functions() {
    Functions<P> functions = {};
    fill<P, MAX_ACCUMULATORS / P>(functions);
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

// Formats that are converted to bf16, line by line or in whole panels.
QUIRE_INLINE bool is_short(Format format) { return format == Format::bf12 || is_float8(format); }

QUIRE_INLINE bool is_tile(const Weight& w, i32 rows, int panels, bool is_expanded) {
    if (is_short(w.format) && !is_expanded) return rows <= max_unit_rows(panels);
    return is_integer(w.format) ? is_integer_tile(rows, panels, max_accumulators(w)) : rows * panels <= max_accumulators(w);
}

// is_expanded: the panels were converted to bf16.
QUIRE_INLINE int panels_for(const Weight& w, i32 rows, bool is_expanded) {
    return is_tile(w, rows, 4, is_expanded) ? 4 : is_tile(w, rows, 2, is_expanded) ? 2 : 1;
}

i32 tile_rows(Format kind, i32 m) {
    // Up to all accumulators, one pass over the weights is better than reusing inputs; beyond, f32 tiles are two panels wide if
    // they fit into registers.
    const i32 most = max_rows(kind);
    if (m <= most) return m;
    const i32 wide = is_integer(kind) || QUIRE_HAS_256 || QUIRE_HAS_128 ? most : most / 2;
    return ceil_div(m, ceil_div(m, wide));
}

// The panels of a unit of work: their format, and whether they are near or expanded to bf16.
struct TileKind {
    Format format;
    bool is_near, is_expanded;
};

template <int P>
QUIRE_INLINE TileFunction function_of(const Functions<P>& functions, TileKind kind, i32 rows) {
    if (kind.is_near) return functions.near_by_rows[kind.format == Format::u8][rows];
    if (kind.is_expanded && is_float8(kind.format)) return functions.expanded_by_rows[kind.format == Format::f8_wide][rows];
    return functions.by_rows[static_cast<int>(kind.is_expanded ? Format::bf16 : kind.format)][rows];
}

#if QUIRE_HAS_256
constexpr TileFunction wide_by_rows[] = {
    nullptr, tile_wide_bf16<1>, tile_wide_bf16<2>, tile_wide_bf16<3>, tile_wide_bf16<4>, tile_wide_bf16<5>, tile_wide_bf16<6>};
static_assert(MAX_FLOATS == 6);
#endif

QUIRE_INLINE void run_tile(int panels, TileKind kind, i32 rows, const Tile& tile) {
#if QUIRE_HAS_256
    if (tile.wide != nullptr && panels == 1 && (kind.format == Format::bf16 || kind.is_expanded)) return wide_by_rows[rows](tile);
#endif
    (panels == 4   ? function_of(four_panels, kind, rows)
     : panels == 2 ? function_of(two_panels, kind, rows)
                   : function_of(one_panel, kind, rows))(tile);
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

#if QUIRE_HAS_256
// Widened inputs of a thread at once.
constexpr i64 MAX_WIDE_BYTES = 8 << 20;

// How many rows of a job have their inputs widened at once: 0 if tiles read them unconverted. One panel at a time reads them.
QUIRE_INLINE i32 wide_rows(const LinearJob& job) {
    const Packed& x = *job.input;
    const i64 tile_bytes = static_cast<i64>(steps_of(x.kind, x.k)) * 8 * x.tile_rows;
    const bool is_wide =
        x.kind == Format::bf16 && !is_float8(job.weight->format) && x.m > x.tile_rows && x.tile_rows * 2 > MAX_FLOATS;
    return !is_wide || tile_bytes > MAX_WIDE_BYTES ? 0 : x.tile_rows * static_cast<i32>(MAX_WIDE_BYTES / tile_bytes);
}
#endif

QUIRE_INLINE void set_weight(Tile& tile, const Weight& w) {
    tile.table = w.table;
    tile.is_linear = w.format == Format::u4;
    for (int level = 1; tile.is_linear && level < 16; ++level) tile.is_linear = w.table[level] == w.table[0] + level;
    tile.steps = w.format == Format::bf12 ? w.k / UNIT_INPUTS
        : w.format == Format::f16         ? w.k
        : w.format == Format::u8          ? ceil_div(w.k, 4)
                                          : static_cast<i32>(w.panel_bytes / 64);
    tile.group_steps = is_float8(w.format) ? w.block / 4 : w.format == Format::u8 ? ceil_div(w.group, 4) : ceil_div(w.group, 8);
    tile.groups_per_scale = w.group == 0 ? 1 : ceil_div(w.input_group, w.group);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
