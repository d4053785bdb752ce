// One tile of attention: some rows of q against one chunk of cached tokens. Included by attention.inl.
//
// A row is (token, query head). The result of a row never depends on the other rows of its tile: each product is one chain of
// sums, and tokens that a row does not attend to add exact zeros.
#pragma once
#include "attention.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int CHUNK_RUNS = 16;   // runs of a chunk, the block of the softmax
constexpr int CHUNK = RUN * CHUNK_RUNS;
constexpr int GROUP = 4;         // runs whose keys or values stay in the L1 cache for all rows
constexpr int MAX_ROWS = 48;     // rows of a tile
constexpr float LOWEST = -3.40282347e38f;
// The largest magnitude of scaled scores for softmax_row_roughly: differences between two of them must be finite.
constexpr float MAX_ROUGH = 1e30f;
// In units of 16 lanes, one row of weights or scores, plus one line, so that rows do not map to the same cache sets.
constexpr i64 SCORE_STRIDE = CHUNK + 16;
// Rows and vectors of a register tile.
constexpr int TILE_ROWS = QUIRE_HAS_512 ? 6 : QUIRE_HAS_256 || QUIRE_HAS_128 ? 4 : 2;
constexpr int tile_vectors(int rows) { return QUIRE_HAS_512 ? 4 : (QUIRE_HAS_256 || QUIRE_HAS_128) && rows <= 2 ? 2 : 1; }

QUIRE_INLINE i64 round_up(i64 n, i64 unit) { return (n + unit - 1) / unit * unit; }
QUIRE_INLINE i32 smaller(i32 a, i32 b) { return a < b ? a : b; }
QUIRE_INLINE i32 larger(i32 a, i32 b) { return a > b ? a : b; }

// e^x for x <= 0; 0 below -86; NaN stays. The sum with 1.5 * 2^23 leaves x / ln 2, rounded, in the low bits.
QUIRE_INLINE F32 exp_negative(F32 x) {
    const F32 magic = set1(12582912.0f), bounded = max(set1(-86.0f), x);
    const F32 shifted = fma(bounded, set1(1.44269504f), magic);
    const F32 n = shifted - magic;
    F32 r = fma(n, set1(-0.693359375f), bounded);
    r = fma(n, set1(2.12194440e-4f), r);
    F32 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r + set1(1.0f));
    return zero_below(set1(-86.0f), x, as_f32(as_i32(p) + shift_left<23>(as_i32(shifted))));
}

// Products of a number type: a unit is 4 bytes, one f32 or a pair of bf16, and a step uses one unit of every row.
struct KindBf16 {
    static constexpr bool is_bf16 = true;
    static constexpr int units = 2;                // numbers of a unit
    static constexpr int run_steps = RUN / units;  // steps over the tokens of a run
    static constexpr KvFormat format = KvFormat::bf16;
    QUIRE_INLINE F32 multiply_add(F32 sum, const u8* vector, const u8* scalar) {
        u32 unit;
        __builtin_memcpy(&unit, scalar, 4);
        return dot_bf16(sum, load_bytes(vector), set1_bytes(unit));
    }
    QUIRE_INLINE void put(u8* p, F32 x) { store_bf16_flushed(reinterpret_cast<u16*>(p), x); }
};
struct KindF32 {
    static constexpr bool is_bf16 = false;
    static constexpr int units = 1;
    static constexpr int run_steps = RUN;
    static constexpr KvFormat format = KvFormat::f32;
    QUIRE_INLINE F32 multiply_add(F32 sum, const u8* vector, const u8* scalar) {
        float unit;
        __builtin_memcpy(&unit, scalar, 4);
        return fma(load(reinterpret_cast<const float*>(vector)), set1(unit), sum);
    }
    QUIRE_INLINE void put(u8* p, F32 x) { store(reinterpret_cast<float*>(p), x); }
};

#define QUIRE_UNROLL _Pragma("GCC unroll 32")

// The runs of the next group, prefetched line by line, alternating between them: runs are scattered in memory, and
// several streams together are faster than one.
struct Ahead {
    const u8* runs[GROUP];
};

// Fetch N lines from the one counted `line` on; `line` is a multiple of N.
template <int N>
QUIRE_INLINE void fetch(const Ahead& ahead, i64 line) {
    QUIRE_UNROLL for (int n = 0; n < N; ++n) {
        if constexpr (N == GROUP)
            prefetch_l2(ahead.runs[n] + line * (64 / GROUP));
        else
            prefetch_l2(ahead.runs[(line + n) % GROUP] + (line + n) / GROUP * 64);
    }
}

// Fetch the lines [begin, end).
QUIRE_INLINE void fetch_lines(const Ahead& ahead, i64 begin, i64 end) {
    for (i64 line = begin; line < end; ++line) fetch<1>(ahead, line);
}

// A product of a block of rows with the vectors of up to GROUP runs. Strides are in bytes, but for out.
struct Product {
    const u8* runs[GROUP];
    Ahead ahead;
    int num_runs;
    i64 steps;               // scores: units of a row of q
    i64 run_stride;          // sums: bytes of one step of a run of values
    i64 first;               // sums: of these, the first that are added up, a multiple of 64
    const u8* rows;          // the rows' units, one row after the other
    i64 row_stride;
    float* out;
    i64 out_stride;
};

// out[row][run * 16 ...] = the dot products of R rows of q with the keys of N runs.
template <class Kind, int R, int N>
static void score_tile(const Product& product, int first_run) {
    const u8* rows[R];
    const u8* runs[N];
    F32 sums[R][N];
    QUIRE_UNROLL for (int n = 0; n < N; ++n) runs[n] = product.runs[first_run + n];
    QUIRE_UNROLL for (int r = 0; r < R; ++r) {
        rows[r] = product.rows + r * product.row_stride;
        QUIRE_UNROLL for (int n = 0; n < N; ++n) sums[r][n] = zero();
    }
    for (i64 step = 0; step < product.steps; ++step) {
        fetch<N>(product.ahead, (N == GROUP ? 0 : first_run * product.steps) + step * N);
        QUIRE_UNROLL for (int r = 0; r < R; ++r)
            QUIRE_UNROLL for (int n = 0; n < N; ++n)
                sums[r][n] = Kind::multiply_add(sums[r][n], runs[n] + step * 64, rows[r] + step * 4);
    }
    QUIRE_UNROLL for (int r = 0; r < R; ++r)
        QUIRE_UNROLL for (int n = 0; n < N; ++n) store(product.out + r * product.out_stride + (first_run + n) * RUN, sums[r][n]);
}

// out[row][16 * N dims] += the sums of R rows of weights times the values of the runs, from byte `offset` of every step.
template <class Kind, int R, int N>
static void sum_tile(const Product& product, i64 offset) {
    F32 sums[R][N];
    float* out = product.out + offset / 4;
    QUIRE_UNROLL for (int r = 0; r < R; ++r)
        QUIRE_UNROLL for (int n = 0; n < N; ++n) sums[r][n] = load(out + r * product.out_stride + n * 16);
    i64 line = offset / 64 * Kind::run_steps * GROUP;
    for (int run = 0; run < product.num_runs; ++run) {
        const u8* values = product.runs[run] + offset;
        const u8* rows = product.rows + run * Kind::run_steps * 4;
        for (int step = 0; step < Kind::run_steps; ++step) {
            fetch<N>(product.ahead, line);
            QUIRE_UNROLL for (int r = 0; r < R; ++r)
                QUIRE_UNROLL for (int n = 0; n < N; ++n)
                    sums[r][n] = Kind::multiply_add(sums[r][n], values + n * 64, rows + r * product.row_stride);
            values += product.run_stride;
            line += N;
            rows += 4;
        }
    }
    QUIRE_UNROLL for (int r = 0; r < R; ++r)
        QUIRE_UNROLL for (int n = 0; n < N; ++n) store(out + r * product.out_stride + n * 16, sums[r][n]);
}

template <class Kind, int R, int N>
static void score_runs(const Product& product, int first_run) {
    for (; product.num_runs - first_run >= N; first_run += N) score_tile<Kind, R, N>(product, first_run);
    if constexpr (N > 1)
        if (first_run < product.num_runs) score_runs<Kind, R, N - 1>(product, first_run);
}

template <class Kind, int R, int N>
static void sum_dims(const Product& product, i64 offset) {
    for (; product.run_stride - offset >= 64 * N; offset += 64 * N) sum_tile<Kind, R, N>(product, offset);
    if constexpr (N > 1)
        if (offset < product.run_stride) sum_dims<Kind, R, N - 1>(product, offset);
}

// Prefetch the lines of the next group that products of fewer runs than a group have not prefetched.
static void fetch_rest_of_scores(const Product& product) { fetch_lines(product.ahead, product.num_runs * product.steps, GROUP * product.steps); }

template <class Kind>
static void fetch_rest_of_sums(const Product& product, int num_rows) {
    const i64 vectors = product.run_stride / 64;
    for (i64 first = 0, count; first < vectors && product.num_runs < GROUP; first += count) {
        count = vectors - first < tile_vectors(num_rows) ? vectors - first : tile_vectors(num_rows);
        const i64 line = first * Kind::run_steps * GROUP, lines = count * Kind::run_steps;
        fetch_lines(product.ahead, line + product.num_runs * lines, line + GROUP * lines);
    }
}

template <class Kind, int R = TILE_ROWS>
static void score_rows(const Product& product, int num_rows) {
    if constexpr (R > 1)
        if (num_rows < R) return score_rows<Kind, R - 1>(product, num_rows);
    score_runs<Kind, R, tile_vectors(R)>(product, 0);
}

template <class Kind, int R = TILE_ROWS>
static void sum_rows(const Product& product, int num_rows) {
    if constexpr (R > 1)
        if (num_rows < R) return sum_rows<Kind, R - 1>(product, num_rows);
    sum_dims<Kind, R, tile_vectors(R)>(product, product.first);
}

// The tokens [begin, end) that something attends to.
struct Span {
    i32 begin, end;
};

// Whether a span holds the whole run that starts at `token`.
QUIRE_INLINE bool holds_run(Span span, i32 token) { return span.begin <= token && token + RUN <= span.end; }

QUIRE_INLINE F32 hide(F32 x, Span seen, i32 token, F32 hidden) {
    x = select(first_lanes(seen.end - token), x, hidden);
    return select(first_lanes(seen.begin - token), hidden, x);
}

// One row of a chunk's softmax. Tokens count from the chunk's start.
struct SoftmaxRow {
    float* scores;  // in: dot products; out: the weights, in the form of Kind
    Span seen;      // tokens that the row attends to
    Span runs;      // runs whose weights are read
    float max, sum;
    u32 skipped;   // runs that it skips, a bit each
    float slope;   // of ALiBi, 0: none
    i32 position;  // of the row
};

// What is added to the scores of the run that starts at `token`.
QUIRE_INLINE F32 bias_of(const SoftmaxRow& row, i32 token) {
    alignas(64) static constexpr float places[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (load(places) + set1(static_cast<float>(token - row.position))) * set1(row.slope);
}

// Set to zero the weights of runs that are read but not attended to.
template <class Kind>
QUIRE_INLINE void clear_unseen(SoftmaxRow& row, int begin, int end) {
    u8* weights = reinterpret_cast<u8*>(row.scores);
    constexpr int bytes = Kind::run_steps * 4;
    for (int run = row.runs.begin; run < smaller(begin, row.runs.end); ++run) Kind::put(weights + run * bytes, zero());
    for (int run = larger(end, row.runs.begin); run < row.runs.end; ++run) Kind::put(weights + run * bytes, zero());
}

// 2^x for x <= 0 to 3e-6, a thousandth of the rounding error of bf16, and 2^0 is 1; 0 or a denormal below -126; NaN stays.
QUIRE_INLINE F32 power_roughly(F32 x) {
    const F32 bounded = max(set1(-200.0f), x);
    const F32 n = round(bounded), f = bounded - n;
    F32 p = set1(9.582853205e-03f);
    p = fma(p, f, set1(5.590642532e-02f));
    p = fma(p, f, set1(2.402409861e-01f));
    p = fma(p, f, set1(6.931241933e-01f));
    p = fma(p, f, set1(1.0f));
    return times_power(p, n);
}

// As softmax_row, if weights are rounded to bf16 and scores are plain dot products: the scale is part of the exponent. Returns
// false, without changing scores that are attended to, if scores are too large. The maximum is subtracted before scaling: the
// difference of two rounded products would have the rounding error of the large ones.
static bool softmax_row_roughly(const AttentionJob& job, SoftmaxRow& row) {
    const int begin = row.seen.begin / RUN, end = (row.seen.end + RUN - 1) / RUN;
    F32 highest = set1(LOWEST);
    for (int run = begin; run < end; ++run) {
        F32 s = load(row.scores + run * RUN);
        if (row.skipped >> run & 1) {
            s = set1(-__builtin_inff());
            store(row.scores + run * RUN, s);
        } else if (!holds_run(row.seen, run * RUN)) {
            s = hide(s, row.seen, run * RUN, set1(-__builtin_inff()));
            store(row.scores + run * RUN, s);
        }
        highest = max(s, highest);
    }
    const float best = max_lanes(highest);
    if (!(job.scale > 0.0f && best * job.scale < MAX_ROUGH && best * job.scale > -MAX_ROUGH)) return false;
    row.max = best * job.scale;
    const float factor = job.scale * 1.44269504f;
    const F32 scale = set1(factor);
    highest = set1(best);
    F32 sum = zero();
    u8* weights = reinterpret_cast<u8*>(row.scores);
    constexpr int bytes = KindBf16::run_steps * 4;
    for (int run = begin; run < end; ++run) {
        const F32 p = power_roughly((load(row.scores + run * RUN) - highest) * scale);
        sum = sum + p;
        KindBf16::put(weights + run * bytes, p);
    }
    clear_unseen<KindBf16>(row, begin, end);
    row.sum = sum_lanes(sum);
    return true;
}

// Turn a row's dot products into weights e^(s - max) and set max and sum. Tokens that are not attended to get weight 0.
template <class Kind, bool IS_SCALED>
static void softmax_row(const AttentionJob& job, SoftmaxRow& row, const float* const* key_scales,
                        const float* const* value_scales) {
    if constexpr (Kind::is_bf16 && !IS_SCALED)
        if (job.softcap == 0.0f && row.slope == 0.0f && softmax_row_roughly(job, row)) return;
    const int begin = row.seen.begin / RUN, end = (row.seen.end + RUN - 1) / RUN;
    const F32 scale = set1(job.scale), cap = set1(job.softcap);
    F32 highest = set1(LOWEST), sum = zero();
    for (int run = begin; run < end; ++run) {
        F32 s = load(row.scores + run * RUN) * scale;
        if (IS_SCALED) s = s * load(key_scales[run]);
        if (job.softcap != 0.0f) s = tanh(s / cap) * cap;
        if (row.slope != 0.0f) s = s + bias_of(row, run * RUN);
        if (row.skipped >> run & 1)
            s = set1(-__builtin_inff());
        else if (!holds_run(row.seen, run * RUN))
            s = hide(s, row.seen, run * RUN, set1(-__builtin_inff()));
        store(row.scores + run * RUN, s);
        highest = max(s, highest);
    }
    row.max = max_lanes(highest);
    highest = set1(row.max);
    u8* weights = reinterpret_cast<u8*>(row.scores);
    constexpr int bytes = Kind::run_steps * 4;
    for (int run = begin; run < end; ++run) {
        F32 p = exp_negative(load(row.scores + run * RUN) - highest);
        sum = sum + p;
        if (IS_SCALED) {
            p = p * load(value_scales[run]);
            if (!holds_run(row.seen, run * RUN)) p = hide(p, row.seen, run * RUN, zero());
        }
        Kind::put(weights + run * bytes, p);
    }
    clear_unseen<Kind>(row, begin, end);
    row.sum = sum_lanes(sum);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
