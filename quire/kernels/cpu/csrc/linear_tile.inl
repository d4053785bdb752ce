// A tile of a linear layer: the arguments of its functions, and the rows and panels that fit into the registers.
namespace quire::QUIRE_ISA {
namespace {

// Accumulators of a tile, R * P of them at most, with room for weights in the machine's registers.
// Integer tiles keep two sets: integers of a group and the f32 sum. Where a group is long, the sums may be in memory and the tile
// twice as large (MAX_LONG_INTEGERS).
#if QUIRE_HAS_512
constexpr int MAX_FLOATS = 28, MAX_INTEGERS = 12, MAX_LONG_INTEGERS = 24;
#elif QUIRE_HAS_256
constexpr int MAX_FLOATS = 6, MAX_INTEGERS = 8, MAX_LONG_INTEGERS = 8;  // of several panels 4
#elif QUIRE_HAS_128
constexpr int MAX_FLOATS = 6, MAX_INTEGERS = 6, MAX_LONG_INTEGERS = 6;
#else
constexpr int MAX_FLOATS = 4, MAX_INTEGERS = 4, MAX_LONG_INTEGERS = 4;
#endif
constexpr int MAX_ACCUMULATORS = MAX_FLOATS > MAX_INTEGERS ? MAX_FLOATS : MAX_INTEGERS;
constexpr int MAX_PANELS = 4;
// Whether a tile of integers exists; most: MAX_INTEGERS or MAX_LONG_INTEGERS.
constexpr bool is_integer_tile(int rows, int panels, int most) {
    return rows * panels <= (QUIRE_HAS_256 && panels > 1 ? 4 : most);
}
// Rows of a tile of bf12 or float8, which holds two lines of every panel.
constexpr int max_unit_rows(int panels) {
    const int rows = MAX_FLOATS / panels;
    if (QUIRE_HAS_128 && panels > 1) return panels == 2 ? rows - 1 : 0;
    return !QUIRE_HAS_512 || panels == 1 ? rows : rows - 2;
}
// The prefetch distance of weights, in bytes of all panels that are read side by side: the bytes in flight during the memory
// latency.
// With many rows a line lasts longer and less would be enough, but early lines do no harm in the L2 cache.
constexpr i64 PREFETCH_BYTES = 4096;
// The same for weights in a cache, prefetched into L1, of which this is at most a quarter, and the maximum number of rows: with
// more rows a line lasts longer than its latency.
constexpr i64 NEAR_PREFETCH_BYTES = 8192;
constexpr int MAX_NEAR_ROWS = 16;

// The prefetch distance of inputs, in 32-bit words.
constexpr i64 INPUT_WORDS_AHEAD = 128;

struct Tile {
    const u8* panels[MAX_PANELS];
    const u8* ahead[MAX_PANELS];  // prefetched line by line, every 2^ahead_shift steps a new one
    const u16* scales[MAX_PANELS];
    const u16* offsets[MAX_PANELS];
    const Window* windows[MAX_PANELS];
    const float* block_scales[MAX_PANELS];  // all null or none
    const u8* table;
    bool is_linear;          // u4: whether table[n] is table[0] + n
    const u32* input;
    const u32* wide = nullptr;  // bf16: the input as floats, two for each word; or null
    const float* input_scales;
    const i32* starts;
    const float* sums;
    i32 steps;               // 64-byte lines of a panel; f16: half lines; bf12: units
    i32 group_steps;         // lines of a group, or of a block of float8
    i32 groups_per_scale;    // groups that share a scale of the input
    i32 ahead_shift;
    float* out;              // [P][R][16], sixteen outputs of a row side by side
    i64 panel_stride, row_stride;  // of out, where a tile need not be dense
};

QUIRE_INLINE i32 smaller(i32 a, i32 b) { return a < b ? a : b; }

using TileFunction = void (*)(const Tile&);

template <int P>
QUIRE_INLINE void prefetch_ahead(const Tile& t, i64 s) {
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p) prefetch_l2(t.ahead[p] + (s >> t.ahead_shift) * 64);
}

// The same from a cache, in one pass.
template <int P>
QUIRE_INLINE void prefetch_near(const Tile& t, i64 s) {
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p) prefetch(t.panels[p] + NEAR_PREFETCH_BYTES / P + s * 64);
}

#if QUIRE_HAS_256 || QUIRE_HAS_128
// Add the products of sixteen weights with an input of every row, one row after the other: GCC would interleave more of them than
// there are registers. value: a row's input, given its address.
template <int R, class T, class Value>
QUIRE_INLINE void add_rows(F32 w, const T*& x, Value value, F32 (&acc)[R]) {
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
        acc[r] = fma(w, value(x + r), acc[r]);
        in_order(x, acc[r]);
    }
}
#endif

// Products of one line of the panels, pairs of bf16, with a pair of every row.
template <int R, int P>
QUIRE_INLINE void dot_line(const Bytes (&w)[P], const u32* x, F32 (&acc)[P][R]) {
#if QUIRE_HAS_256 || (QUIRE_HAS_128 && !QUIRE_HAS_BF16)
    if constexpr (R * P > 4) {
        // First one input of all pairs, then the other, read again: otherwise GCC needs more registers than there are.
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) {
            Bytes line = w[p];
            add_rows<R>(high_halves(line), x, [](const u32* pair) { return high_halves(set1_bytes(*pair)); }, acc[p]);
            in_order(line);
            add_rows<R>(low_halves(line), x, [](const u32* pair) { return low_halves(set1_bytes(*pair)); }, acc[p]);
        }
        return;
    }
#endif
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
        const Bytes b = set1_bytes(x[r]);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) acc[p][r] = dot_bf16(acc[p][r], w[p], b);
    }
}

template <int R, int P>
QUIRE_INLINE void store_tile(const Tile& t, const F32 (&acc)[P][R]) {
    float* const out = t.out;
    const i64 panel_stride = t.panel_stride, row_stride = t.row_stride;
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) store(out + p * panel_stride + r * row_stride, acc[p][r]);
}

QUIRE_INLINE bool is_integer(Format format) { return format == Format::u8 || format == Format::u4; }

// The place of a row: its tile's first row and number of rows, and its own number there.
struct RowPlace {
    i32 first, rows, r;
};

QUIRE_INLINE RowPlace place_of(const Packed& x, i32 row) {
    const i32 first = row / x.tile_rows * x.tile_rows;
    return {first, x.tile_rows < x.m - first ? x.tile_rows : x.m - first, row - first};
}

// The destination of a word of a row.
QUIRE_INLINE u32* word_at(const Packed& x, RowPlace place, i32 word) {
    return x.data + static_cast<i64>(place.first) * steps_of(x.kind, x.k) + static_cast<i64>(word) * place.rows + place.r;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
