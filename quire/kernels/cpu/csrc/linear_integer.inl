// Tiles of integers: products of a group are summed exactly, and added to an f32 sum with the scales of weight and input.
namespace quire::QUIRE_ISA {
namespace {

#if !QUIRE_HAS_256 && !QUIRE_HAS_128  // else linear_dots_avx2.inl, linear_dots_neon.inl
// Integer products over steps [begin, end) of all panels: a group. x points at the inputs of step begin.
template <int R, int P, bool IS_NIBBLES, bool IS_NEAR = false>
QUIRE_INLINE void dot_group(const Tile& t, i64 begin, i64 end, const u32* x, const Bytes& table, I32 (&acc)[P][R]) {
    i64 s = begin;
    do {  // A group is never empty, and a loop that may be skipped costs copies of all integers.
        if constexpr (IS_NEAR)
            prefetch_near<P>(t, s);
        else
            prefetch_ahead<P>(t, s);
        // A long panel and its inputs do not fit into the L1 cache together.
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
#endif

// One scale per output: y = sum over groups of input_scale * integers.
template <int R, int P, bool IS_NIBBLES, bool IS_NEAR>
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
        dot_group<R, P, IS_NIBBLES, IS_NEAR>(t, begin, end, t.input + begin * R * (IS_NIBBLES ? 2 : 1), table, acc);
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
            for (int r = 0; r < R; ++r) sum[p][r] = fma(to_f32(acc[p][r]), set1(t.input_scales[g * R + r]), sum[p][r]);
    }
    store_tile<R, P>(t, sum);
}

// The same with the sums in t.out. Each group is a separate function: next to another loop GCC 12 spills the integers.
template <int R, int P, bool IS_NEAR>
__attribute__((noinline)) void add_long_group(const Tile& t, i64 g) {
    const i64 begin = g * t.group_steps, end = begin + t.group_steps < t.steps ? begin + t.group_steps : t.steps;
    const float* scales = t.input_scales + g * R;
    I32 acc[P][R];
    start_group<R, P>(t, g, acc);
    dot_group<R, P, false, IS_NEAR>(t, begin, end, t.input + begin * R, set1_bytes(0), acc);
    float* out = t.out;
    if (g == 0) {
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
            for (int r = 0; r < R; ++r, out += 16) store(out, fma(to_f32(acc[p][r]), set1(scales[r]), zero()));
        return;
    }
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r, out += 16) store(out, fma(to_f32(acc[p][r]), set1(scales[r]), load(out)));
}

template <int R, int P, bool IS_NEAR>
void tile_long(const Tile& t) {
    const i64 num_groups = (t.steps + t.group_steps - 1) / t.group_steps;
    for (i64 g = 0; g < num_groups; ++g) add_long_group<R, P, IS_NEAR>(t, g);
}

// Scales (and offsets) per group of the weight; groups_per_scale groups share a scale of the input, and their sum stays in
// registers before it is added to the result in t.out.
template <int R, int P, bool IS_NIBBLES, bool IS_NEAR>
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
            dot_group<R, P, IS_NIBBLES, IS_NEAR>(t, begin, end, t.input + begin * R * (IS_NIBBLES ? 2 : 1), table, acc);
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

template <int R, int P, bool IS_NIBBLES, bool IS_NEAR = false>
void tile_integer(const Tile& t) {
    if (t.scales[0] == nullptr && t.offsets[0] == nullptr)
        tile_rowwise<R, P, IS_NIBBLES, IS_NEAR>(t);
    else
        tile_grouped<R, P, IS_NIBBLES, IS_NEAR>(t);
}

template <int R, int P, bool IS_NEAR = false>
void tile_u8(const Tile& t) {
    if constexpr (R * P <= MAX_INTEGERS)
        tile_integer<R, P, false, IS_NEAR>(t);
    else
        tile_long<R, P, IS_NEAR>(t);
}
template <int R, int P>
void tile_u4(const Tile& t) { tile_integer<R, P, true>(t); }

}  // namespace
}  // namespace quire::QUIRE_ISA
