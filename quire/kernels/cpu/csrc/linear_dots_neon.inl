// Products of integers with registers of 128 bits: bytes with one sign (sdot), or unsigned by signed ones, two steps of two rows
// and two outputs at a time (usmmla). All sums are exact, so that tiles of any number of rows give the same bits.
namespace quire::QUIRE_ISA {
namespace {

// How the codes of a tile are read: eight bits, nibbles with a table of levels, or nibbles that are the levels up to a constant,
// which start_group adds.
enum class Codes { bytes, levels, nibbles };

// Sixteen bytes of a line as numbers that are multiplied.
#if QUIRE_HAS_I8MM
using Codes16 = uint8x16_t;
QUIRE_INLINE Codes16 codes_of(uint8x16_t x) { return x; }
QUIRE_INLINE uint8x16_t levels_of(const u8* table) { return vld1q_u8(table); }
QUIRE_INLINE int32x4_t dot_codes(int32x4_t acc, Codes16 w, int8x16_t x) { return vusdotq_s32(acc, w, x); }
#else
using Codes16 = int8x16_t;
QUIRE_INLINE Codes16 codes_of(uint8x16_t x) { return vreinterpretq_s8_u8(veorq_u8(x, vdupq_n_u8(0x80))); }
QUIRE_INLINE uint8x16_t levels_of(const u8* table) { return veorq_u8(vld1q_u8(table), vdupq_n_u8(0x80)); }
QUIRE_INLINE int32x4_t dot_codes(int32x4_t acc, Codes16 w, int8x16_t x) { return vdotq_s32(acc, w, x); }
#endif
template <class To> QUIRE_INLINE To as_codes(uint8x16_t x) {
    if constexpr (QUIRE_HAS_I8MM)
        return x;
    else
        return vreinterpretq_s8_u8(x);
}

// The numbers of a quarter of a line for its first, and for nibbles its second step.
template <Codes CODES, bool IS_SECOND>
QUIRE_INLINE Codes16 quarter_of(const u8* line, uint8x16_t table) {
    const uint8x16_t both = vld1q_u8(line);
    if constexpr (CODES == Codes::bytes) return codes_of(both);
    const uint8x16_t nibbles = IS_SECOND ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
    return as_codes<Codes16>(CODES == Codes::levels ? vqtbl1q_u8(table, nibbles) : nibbles);
}

QUIRE_INLINE int8x16_t word_of(const u32* x) { return vreinterpretq_s8_u32(vld1q_dup_u32(x)); }

// Add the products of one step of rows [FIRST, R), whose inputs are x[FIRST .. R).
template <int R, int FIRST, Codes CODES, bool IS_SECOND>
QUIRE_INLINE void add_step(const u8* line, uint8x16_t table, const u32* x, I32 (&acc)[R]) {
    const Codes16 a = quarter_of<CODES, IS_SECOND>(line, table), b = quarter_of<CODES, IS_SECOND>(line + 16, table);
    const Codes16 c = quarter_of<CODES, IS_SECOND>(line + 32, table), d = quarter_of<CODES, IS_SECOND>(line + 48, table);
#pragma GCC unroll 32
    for (int r = FIRST; r < R; ++r) {
        const int8x16_t input = word_of(x + r);
        acc[r] = {dot_codes(acc[r].a, a, input), dot_codes(acc[r].b, b, input), dot_codes(acc[r].c, c, input),
            dot_codes(acc[r].d, d, input)};
    }
}

template <int P, bool IS_NEAR>
QUIRE_INLINE void fetch_lines(const Tile& t, i64 s) {
    if constexpr (IS_NEAR)
        prefetch_near<P>(t, s);
    else
        prefetch_ahead<P>(t, s);
}

// Lines [begin, end) of all panels, one step after the other.
template <int R, int P, Codes CODES, bool IS_NEAR>
QUIRE_INLINE void dot_lines(const Tile& t, uint8x16_t table, i64 begin, i64 end, const u32* x, I32 (&acc)[P][R]) {
    for (i64 s = begin; s < end; ++s, x += (CODES == Codes::bytes ? 1 : 2) * R) {
        fetch_lines<P, IS_NEAR>(t, s);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) {
            add_step<R, 0, CODES, false>(t.panels[p] + s * 64, table, x, acc[p]);
            if constexpr (CODES != Codes::bytes) add_step<R, 0, CODES, true>(t.panels[p] + s * 64, table, x + R, acc[p]);
        }
    }
}

#if QUIRE_HAS_I8MM
// Sums of two rows and sixteen outputs: of register i those of outputs 2i and 2i + 1, each of both rows.
struct RowPair { int32x4_t v[8]; };

QUIRE_INLINE uint8x16_t zip_low(uint8x16_t x, uint8x16_t y) {
    return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(x), vreinterpretq_u32_u8(y)));
}
QUIRE_INLINE uint8x16_t zip_high(uint8x16_t x, uint8x16_t y) {
    return vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(x), vreinterpretq_u32_u8(y)));
}

// Two rows' inputs of two steps: eight bytes of the first row, then of the second.
QUIRE_INLINE int8x16_t input_pair(const u32* first, const u32* second) {
    u64 x, y;
    __builtin_memcpy(&x, first, 8), __builtin_memcpy(&y, second, 8);
    return vreinterpretq_s8_u32(vzip1q_u32(vreinterpretq_u32_u64(vdupq_n_u64(x)), vreinterpretq_u32_u64(vdupq_n_u64(y))));
}

// Add the products of two steps; second: the line of the second step, of nibbles the same as the first.
template <int R, Codes CODES>
QUIRE_INLINE void add_two_steps(const u8* first, const u8* second, uint8x16_t table, const u32* x, RowPair (&acc)[R / 2]) {
    int8x16_t input[R / 2];
#pragma GCC unroll 32
    for (int i = 0; i < R / 2; ++i) input[i] = input_pair(x + 2 * i, x + R + 2 * i);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
        const uint8x16_t one = quarter_of<CODES, false>(first + 16 * q, table),
                         two = quarter_of<CODES, true>(second + 16 * q, table);
        const uint8x16_t low = zip_low(one, two), high = zip_high(one, two);
#pragma GCC unroll 32
        for (int i = 0; i < R / 2; ++i) {
            acc[i].v[2 * q] = vusmmlaq_s32(acc[i].v[2 * q], low, input[i]);
            acc[i].v[2 * q + 1] = vusmmlaq_s32(acc[i].v[2 * q + 1], high, input[i]);
        }
    }
}

QUIRE_INLINE void add_rows_of(const RowPair& sums, I32& x, I32& y) {
    const int32x4_t* v = sums.v;
    x = x + I32{vuzp1q_s32(v[0], v[1]), vuzp1q_s32(v[2], v[3]), vuzp1q_s32(v[4], v[5]), vuzp1q_s32(v[6], v[7])};
    y = y + I32{vuzp2q_s32(v[0], v[1]), vuzp2q_s32(v[2], v[3]), vuzp2q_s32(v[4], v[5]), vuzp2q_s32(v[6], v[7])};
}

// The same lines for two rows or more: all pairs of rows and of steps, then what is left of both.
template <int R, int P, Codes CODES, bool IS_NEAR>
QUIRE_INLINE void dot_row_pairs(const Tile& t, uint8x16_t table, i64 begin, i64 end, const u32* x, I32 (&acc)[P][R]) {
    constexpr int LINES = CODES == Codes::bytes ? 2 : 1;  // of two steps
    RowPair sums[P][R / 2] = {};
    i64 s = begin;
    for (; s + LINES <= end; s += LINES, x += 2 * R) {
        fetch_lines<P, IS_NEAR>(t, s);
        if constexpr (LINES == 2) fetch_lines<P, IS_NEAR>(t, s + 1);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) {
            const u8* line = t.panels[p] + s * 64;
            const u8* second = line + (LINES - 1) * 64;
            add_two_steps<R, CODES>(line, second, table, x, sums[p]);
            if constexpr (R % 2 != 0) {
                add_step<R, R - 1, CODES, false>(line, table, x, acc[p]);
                add_step<R, R - 1, CODES, true>(second, table, x + R, acc[p]);
            }
        }
    }
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 32
        for (int i = 0; i < R / 2; ++i) add_rows_of(sums[p][i], acc[p][2 * i], acc[p][2 * i + 1]);
        if (s < end) add_step<R, 0, Codes::bytes, false>(t.panels[p] + s * 64, table, x, acc[p]);
    }
}
#endif

template <int R, int P, Codes CODES, bool IS_NEAR>
QUIRE_INLINE void dot_codes_of(const Tile& t, uint8x16_t table, i64 begin, i64 end, const u32* x, I32 (&acc)[P][R]) {
#if QUIRE_HAS_I8MM
    if constexpr (R > 1) return dot_row_pairs<R, P, CODES, IS_NEAR>(t, table, begin, end, x, acc);
#endif
    dot_lines<R, P, CODES, IS_NEAR>(t, table, begin, end, x, acc);
}

// Integer products over steps [begin, end) of all panels: a group. x points at the inputs of step begin. Not inlined: no
// registers are free next to the sums of the tile.
template <int R, int P, bool IS_NIBBLES, bool IS_NEAR = false>
__attribute__((noinline)) void dot_group(const Tile& t, i64 begin, i64 end, const u32* x, const Bytes&, I32 (&acc)[P][R]) {
    I32 sums[P][R];
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) sums[p][r] = acc[p][r];
    if constexpr (!IS_NIBBLES)
        dot_codes_of<R, P, Codes::bytes, IS_NEAR>(t, vdupq_n_u8(0), begin, end, x, sums);
    else if (t.is_linear)
        dot_codes_of<R, P, Codes::nibbles, IS_NEAR>(t, vdupq_n_u8(0), begin, end, x, sums);
    else
        dot_codes_of<R, P, Codes::levels, IS_NEAR>(t, levels_of(t.table), begin, end, x, sums);
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) acc[p][r] = sums[p][r];
}

// The initial integers of a group: starts is -128 times the sum of the inputs. Codes are unsigned where they can be multiplied
// so.
template <int R, int P>
QUIRE_INLINE void start_group(const Tile& t, i64 g, I32 (&acc)[P][R]) {
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
        const i32 start = t.starts[g * R + r];
        const I32 first = set1(t.is_linear ? -(start >> 7) * (t.table[0] - 128) : QUIRE_HAS_I8MM ? start : 0);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) acc[p][r] = first;
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
