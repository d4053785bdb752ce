// Products with sixteen registers of 256 bits and no products of bf16, and except on level avx_vnni none of four bytes. Integers:
// eight outputs at a time, for all rows of the tile. bf16: as floats, with the input converted in advance if it is read often.
namespace quire::QUIRE_ISA {
namespace {

// Tiles of at most this many accumulators read their panels line by line, in memory order. Larger ones walk BLOCK_LINES of one
// half of their panel, which stay in the L1 cache, before the other half.
constexpr int MAX_STREAMED = 4;
constexpr i64 BLOCK_LINES = 16;
// Lines of nibbles whose products are summed in 16 bits: eight products of pairs, each at most 2 * 15 * 127.
constexpr i64 NIBBLE_LINES = 4;

enum class Codes { bytes, levels, bounded_levels, nibbles };

// How the codes of a tile are read: eight bits, nibbles with a table of levels (bounded: none is -128), or nibbles that are the
// levels up to a constant, which start_group adds.
template <int R, Codes CODES>
struct Dots {
    static constexpr int WORDS = CODES == Codes::bytes ? 1 : 2;  // of the input of a row, for a line
    static constexpr bool IS_16_BITS = CODES == Codes::nibbles && !QUIRE_HAS_AVX_VNNI;  // the sums of NIBBLE_LINES

    QUIRE_INLINE __m256i start(__m256i sum) { return IS_16_BITS ? _mm256_setzero_si256() : sum; }
    QUIRE_INLINE __m256i finish(__m256i sum, __m256i before) {
        return IS_16_BITS ? add_pairs(before, sum) : sum;
    }

    // Add the products of half a line, eight outputs; table: of levels.
    QUIRE_INLINE void add(__m256i table, const u8* half, const u32* x, __m256i (&sums)[R]) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half)), mask = _mm256_set1_epi8(15);
        if constexpr (QUIRE_HAS_AVX_VNNI) {
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
            add_unsigned(CODES == Codes::bytes ? both : looked_up(table, _mm256_and_si256(both, mask)), x, sums);
            if constexpr (CODES != Codes::bytes) add_unsigned(looked_up(table, high), x + R, sums);
        } else if constexpr (CODES == Codes::bytes) {
            add_signed(_mm256_xor_si256(both, _mm256_set1_epi8(static_cast<char>(0x80))), x, sums);
        } else if constexpr (CODES == Codes::bounded_levels) {
            add_bounded(_mm256_shuffle_epi8(table, _mm256_and_si256(both, mask)), x, sums);
            add_bounded(_mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both, 4), mask)), x + R, sums);
        } else if constexpr (CODES == Codes::levels) {
            add_signed(_mm256_shuffle_epi8(table, _mm256_and_si256(both, mask)), x, sums);
            add_signed(_mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both, 4), mask)), x + R, sums);
        } else {
            add_small(_mm256_and_si256(both, mask), x, sums);
            add_small(_mm256_and_si256(_mm256_srli_epi16(both, 4), mask), x + R, sums);
        }
    }

    QUIRE_INLINE __m256i word(const u32* x) { return _mm256_set1_epi32(static_cast<int>(*x)); }
    QUIRE_INLINE __m256i add_pairs(__m256i sum, __m256i pairs) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }

    QUIRE_INLINE __m256i looked_up(__m256i table, __m256i nibbles) {
        return CODES == Codes::levels ? _mm256_shuffle_epi8(table, nibbles) : nibbles;
    }

    // Keep the order of rows: otherwise GCC interleaves more of them than there are registers.
    QUIRE_INLINE void in_order(const u32*& x, __m256i& sum) {
        if constexpr (R > MAX_STREAMED) asm("" : "+r"(x), "+x"(sum));
    }

    QUIRE_INLINE void add_unsigned(__m256i w, const u32* x, __m256i (&sums)[R]) {
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) {
            sums[r] = dot_half(sums[r], w, word(x + r));
            in_order(x, sums[r]);
        }
    }
    // |w| <= 128 and |x| <= 127, so that two products stay below 2^15. Summing them in 32 bits at once, with inputs in 16 bits,
    // would take one instruction less, but two more on the limiting port.
    QUIRE_INLINE void add_signed(__m256i w, const u32* x, __m256i (&sums)[R]) {
        const __m256i size = _mm256_abs_epi8(w);
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) {
            sums[r] = add_pairs(sums[r], _mm256_maddubs_epi16(size, _mm256_sign_epi8(word(x + r), w)));
            in_order(x, sums[r]);
        }
    }
    // The same for one row and |w| <= 127: the size of an input serves all panels.
    QUIRE_INLINE void add_bounded(__m256i w, const u32* x, __m256i (&sums)[R]) {
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r)
            sums[r] = add_pairs(sums[r], _mm256_maddubs_epi16(_mm256_abs_epi8(word(x + r)), _mm256_sign_epi8(w, word(x + r))));
    }
    QUIRE_INLINE void add_small(__m256i w, const u32* x, __m256i (&sums)[R]) {
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) {
            sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(w, word(x + r)));
            in_order(x, sums[r]);
        }
    }
};

// Lines [begin, begin + lines) of all panels, line by line.
template <int R, int P, Codes CODES, bool IS_NEAR>
QUIRE_INLINE void dot_streams(const Tile& t, __m256i table, i64 begin, i64 lines, const u32* x, I32 (&acc)[P][R]) {
    __m256i low[P][R], high[P][R];
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r)
            low[p][r] = Dots<R, CODES>::start(acc[p][r].a), high[p][r] = Dots<R, CODES>::start(acc[p][r].b);
    for (i64 s = begin; s < begin + lines; ++s, x += R * Dots<R, CODES>::WORDS) {
        if constexpr (IS_NEAR)
            prefetch_near<P>(t, s);
        else
            prefetch_ahead<P>(t, s);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) {
            Dots<R, CODES>::add(table, t.panels[p] + s * 64, x, low[p]);
            Dots<R, CODES>::add(table, t.panels[p] + s * 64 + 32, x, high[p]);
        }
    }
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r)
            acc[p][r] = {Dots<R, CODES>::finish(low[p][r], acc[p][r].a), Dots<R, CODES>::finish(high[p][r], acc[p][r].b)};
}

// The same lines of one panel, half by half.
template <int R, Codes CODES>
QUIRE_INLINE void dot_block(const Tile& t, __m256i table, i64 begin, i64 lines, const u32* x, I32 (&acc)[R]) {
    for (i64 line = 0; line < lines; ++line) prefetch_ahead<1>(t, begin + line);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        __m256i sums[R];
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) sums[r] = Dots<R, CODES>::start(half == 0 ? acc[r].a : acc[r].b);
        const u8* codes = t.panels[0] + begin * 64 + half * 32;
        const u32* input = x;
        for (i64 line = 0; line < lines; ++line, codes += 64, input += R * Dots<R, CODES>::WORDS)
            Dots<R, CODES>::add(table, codes, input, sums);
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r)
            (half == 0 ? acc[r].a : acc[r].b) = Dots<R, CODES>::finish(sums[r], half == 0 ? acc[r].a : acc[r].b);
    }
}

template <int R, int P, Codes CODES, bool IS_NEAR>
QUIRE_INLINE void dot_lines(const Tile& t, __m256i table, i64 begin, i64 end, const u32* x, I32 (&acc)[P][R]) {
    constexpr bool IS_STREAMED = R * P <= MAX_STREAMED;
    const i64 most = Dots<R, CODES>::IS_16_BITS ? NIBBLE_LINES : IS_STREAMED ? end - begin : BLOCK_LINES;
    for (i64 s = begin; s < end; s += most, x += most * R * Dots<R, CODES>::WORDS) {
        const i64 lines = end - s < most ? end - s : most;
        if constexpr (IS_STREAMED)
            dot_streams<R, P, CODES, IS_NEAR>(t, table, s, lines, x, acc);
        else
            dot_block<R, CODES>(t, table, s, lines, x, acc[0]);
    }
}

// Integer products over steps [begin, end) of all panels: a group. x points at the inputs of step begin. Not inlined: no
// registers are free next to the sums of the tile.
template <int R, int P, bool IS_NIBBLES, bool IS_NEAR = false>
__attribute__((noinline)) void dot_group(const Tile& t, i64 begin, i64 end, const u32* x, const Bytes&, I32 (&acc)[P][R]) {
    static_assert(P == 1 || R * P <= MAX_STREAMED);
    if constexpr (!IS_NIBBLES)
        return dot_lines<R, P, Codes::bytes, IS_NEAR>(t, _mm256_setzero_si256(), begin, end, x, acc);
    else if (t.is_linear)
        return dot_lines<R, P, Codes::nibbles, IS_NEAR>(t, _mm256_setzero_si256(), begin, end, x, acc);
    const __m256i table = load_table(t.table).a;
    const __m256i levels = QUIRE_HAS_AVX_VNNI ? table : _mm256_xor_si256(table, _mm256_set1_epi8(static_cast<char>(0x80)));
    if constexpr (R == 1 && !QUIRE_HAS_AVX_VNNI) {
        const bool is_bounded = _mm256_movemask_epi8(_mm256_cmpeq_epi8(table, _mm256_setzero_si256())) == 0;
        if (is_bounded) return dot_lines<R, P, Codes::bounded_levels, IS_NEAR>(t, levels, begin, end, x, acc);
    }
    dot_lines<R, P, Codes::levels, IS_NEAR>(t, levels, begin, end, x, acc);
}

// A word of an input of bf16, widened.
struct WidePair {
    float upper, lower;
};

// Add the products of sixteen weights with one input of every row, in the order of rows and in the registers of the sums: GCC
// would interleave more rows than there are registers, and copy sums to other registers and back.
template <int R>
QUIRE_INLINE void add_products(F32 w, const WidePair*& x, float WidePair::*half, F32 (&acc)[R]) {
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
        const __m256 input = _mm256_broadcast_ss(&(x[r].*half));
        asm("vfmadd231ps %3, %5, %0\n\tvfmadd231ps %4, %5, %1"
            : "+&x"(acc[r].a), "+&x"(acc[r].b), "+r"(x)
            : "x"(w.a), "x"(w.b), "x"(input));
    }
}

// Products of bf16 with widened inputs: the first of a pair is the upper half of its word.
template <int R>
void tile_wide_bf16(const Tile& t) {
    F32 acc[1][R];
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) acc[0][r] = zero();
    const WidePair* x = reinterpret_cast<const WidePair*>(t.wide);
    const u8* line = t.panels[0];
    for (i64 s = 0; s < t.steps; ++s, x += R, line += 64) {
        prefetch_ahead<1>(t, s);
        add_products<R>(high_halves(load_bytes(line)), x, &WidePair::upper, acc[0]);
        asm("" : "+r"(line));  // read again: otherwise GCC stores the line on the stack
        add_products<R>(low_halves(load_bytes(line)), x, &WidePair::lower, acc[0]);
    }
    store_tile<R, 1>(t, acc);
}

// Make two floats of every word of a packed input of bf16, the one of the upper half first.
void widen_input(const u32* x, i64 words, u32* wide) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    i64 i = 0;
    for (; i + 8 <= words; i += 8) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
        const __m256i high = _mm256_and_si256(pairs, mask), low = _mm256_slli_epi32(pairs, 16);
        const __m256i first = _mm256_unpacklo_epi32(high, low), second = _mm256_unpackhi_epi32(high, low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(wide + 2 * i), _mm256_permute2x128_si256(first, second, 0x20));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(wide + 2 * i + 8), _mm256_permute2x128_si256(first, second, 0x31));
    }
    for (; i < words; ++i) wide[2 * i] = x[i] & 0xffff0000u, wide[2 * i + 1] = x[i] << 16;
}

// The initial integers of a group: starts is -128 times the sum of the inputs. Weights are signed here, except nibbles used
// directly, and all of level avx_vnni.
template <int R, int P>
QUIRE_INLINE void start_group(const Tile& t, i64 g, I32 (&acc)[P][R]) {
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
        const I32 start = set1(t.is_linear ? -(t.starts[g * R + r] >> 7) * (t.table[0] - 128)
                : QUIRE_HAS_AVX_VNNI       ? t.starts[g * R + r]
                                           : 0);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) acc[p][r] = start;
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
