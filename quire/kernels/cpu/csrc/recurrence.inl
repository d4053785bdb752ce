// Recurrent states of tokens. See recurrence.h.
#include "simd.h"

#include "recurrence.h"
#include "tables.h"

namespace quire::QUIRE_ISA {
namespace {

// Columns of one head: W times sixteen lanes, of which the last may have fewer.
template <int W>
struct Columns {
    i32 first, count;
    Mask lanes[W];
};

template <int W>
QUIRE_INLINE Columns<W> columns_of(i32 first, i32 count) {
    Columns<W> columns;
    columns.first = first;
    columns.count = count;
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) columns.lanes[w] = first_lanes(count - 16 * w);
    return columns;
}

template <int W>
void load_state(const Columns<W>& columns, const float* from, i32 rows, i32 stride, float* state) {
    for (i32 r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w)
            store(state + (r * W + w) * 16,
                from == nullptr ? zero() : load(from + static_cast<i64>(r) * stride + columns.first + 16 * w, columns.lanes[w]));
}

template <int W>
void save_state(const Columns<W>& columns, float* to, i32 rows, i32 stride, const float* state) {
    for (i32 r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w)
            store(to + static_cast<i64>(r) * stride + columns.first + 16 * w, load(state + (r * W + w) * 16), columns.lanes[w]);
}

// One token. decay: of the head for Decay::head, else where its values are.
template <int W, Decay KIND, bool IS_DELTA> QUIRE_INLINE void update(i32 rows, const float* q, const float* k, const F32* v,
    const float* decay, const F32* steps, const float* rates, i32 stride, const Mask* lanes, F32 beta, float* state, F32* out) {
    F32 found[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) found[w] = zero();
    const F32 factor = KIND == Decay::head ? set1(*decay) : zero();
    for (i32 r = 0; r < rows; ++r) {
        const F32 key = set1(k[r]), query = set1(q[r]);
        const F32 row_factor = KIND == Decay::row ? set1(decay[r]) : factor;
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
            float* at = state + (r * W + w) * 16;
            const F32 kept = KIND == Decay::channel
                ? exp(load(rates + static_cast<i64>(r) * stride + 16 * w, lanes[w]) * steps[w])
                : row_factor;
            F32 s = load(at) * kept;
            if (!IS_DELTA) s = fma(key, v[w], s);
            found[w] = fma(s, IS_DELTA ? key : query, found[w]);
            store(at, s);
        }
    }
    if (!IS_DELTA) {
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) out[w] = found[w];
        return;
    }
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
        found[w] = (v[w] - found[w]) * beta;
        out[w] = zero();
    }
    for (i32 r = 0; r < rows; ++r) {
        const F32 key = set1(k[r]), query = set1(q[r]);
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
            float* at = state + (r * W + w) * 16;
            const F32 s = fma(key, found[w], load(at));
            store(at, s);
            out[w] = fma(s, query, out[w]);
        }
    }
}

template <int W, Decay KIND, bool IS_DELTA>
void run_columns(const RecurrenceJob& job, const RecurrenceRun& run, i32 head, i32 first, i32 count) {
    alignas(64) float state[MAX_STATE_ROWS * W * 16];
    const Columns<W> columns = columns_of<W>(first, count);
    const i32 rows = job.k_dim, width = job.v_dim, key_head = head / (job.v_heads / job.k_heads);
    const i64 place = static_cast<i64>(head) * rows * width;
    load_state<W>(columns, run.source == nullptr ? nullptr : run.source + place, rows, width, state);
    i32 saved = 0;
    for (; saved < run.num_saves && run.saves[saved].count == 0; ++saved)
        save_state<W>(columns, run.saves[saved].to + place, rows, width, state);
    const i32 decays = KIND == Decay::head ? 1 : KIND == Decay::row ? rows : width;
    const float* rates = KIND == Decay::channel ? job.rates + place + first : nullptr;
    for (i64 t = 0; t < run.num_tokens; ++t) {
        const i64 token = run.first + t, key_place = (token * job.k_heads + key_head) * rows,
                  head_place = token * job.v_heads + head;
        const float* decay = job.decay + head_place * decays;
        F32 v[W], steps[W], out[W];
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
            v[w] = load(job.v + head_place * width + first + 16 * w, columns.lanes[w]);
            steps[w] = KIND == Decay::channel ? load(decay + first + 16 * w, columns.lanes[w]) : zero();
        }
        const F32 beta = IS_DELTA ? set1(job.beta[head_place]) : zero();
        update<W, KIND, IS_DELTA>(
            rows, job.q + key_place, job.k + key_place, v, decay, steps, rates, width, columns.lanes, beta, state, out);
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) store(job.out + head_place * width + first + 16 * w, out[w], columns.lanes[w]);
        for (; saved < run.num_saves && run.saves[saved].count == t + 1; ++saved)
            save_state<W>(columns, run.saves[saved].to + place, rows, width, state);
    }
}

template <Decay KIND, bool IS_DELTA>
void run_kind(const RecurrenceJob& job, const RecurrenceRun& run, i32 head, i32 first, i32 count) {
    if (count <= 16) return run_columns<1, KIND, IS_DELTA>(job, run, head, first, count);
    if (count <= 32) return run_columns<2, KIND, IS_DELTA>(job, run, head, first, count);
    return run_columns<4, KIND, IS_DELTA>(job, run, head, first, count);
}

void run(const RecurrenceJob& job, const RecurrenceRun& run, i32 head, i32 first, i32 count) {
    const bool is_delta = job.beta != nullptr;
    if (job.kind == Decay::head && is_delta) return run_kind<Decay::head, true>(job, run, head, first, count);
    if (job.kind == Decay::head) return run_kind<Decay::head, false>(job, run, head, first, count);
    if (job.kind == Decay::row && is_delta) return run_kind<Decay::row, true>(job, run, head, first, count);
    if (job.kind == Decay::row) return run_kind<Decay::row, false>(job, run, head, first, count);
    return run_kind<Decay::channel, false>(job, run, head, first, count);
}

// The inputs of sixteen channels that a state keeps.
QUIRE_INLINE F32 load_input(const ConvJob& job, const u8* state, i64 place, Mask lanes) {
    if (job.is_bf16) return load_bf16(reinterpret_cast<const u16*>(state) + place, lanes);
    return load(reinterpret_cast<const float*>(state) + place, lanes);
}

void save_inputs(const ConvJob& job, const F32* inputs, u8* to, i32 channel, Mask lanes) {
    for (i32 tap = 0; tap < job.taps - 1; ++tap) {
        const i64 place = static_cast<i64>(tap) * job.channels + channel;
        if (job.is_bf16)
            store_bf16(reinterpret_cast<u16*>(to) + place, inputs[tap], lanes);
        else
            store(reinterpret_cast<float*>(to) + place, inputs[tap], lanes);
    }
}

QUIRE_INLINE F32 rounded_bf16(F32 x) {
    u16 halves[16];
    store_bf16(halves, x);
    return load_bf16(halves);
}

void convolve_lanes(const ConvJob& job, const ConvRun& run, i32 channel, Mask lanes) {
    F32 weight[MAX_CONV_TAPS], before[MAX_CONV_TAPS];
    const i32 width = job.taps - 1;
    for (i32 tap = 0; tap < job.taps; ++tap)
        weight[tap] = load(job.weight + static_cast<i64>(tap) * job.channels + channel, lanes);
    for (i32 tap = 0; tap < width; ++tap)
        before[tap] =
            run.source == nullptr ? zero() : load_input(job, run.source, static_cast<i64>(tap) * job.channels + channel, lanes);
    const F32 base = job.bias == nullptr ? zero() : load(job.bias + channel, lanes);
    i32 saved = 0;
    for (; saved < run.num_saves && run.saves[saved].count == 0; ++saved)
        save_inputs(job, before, run.saves[saved].to, channel, lanes);
    for (i64 t = 0; t < run.num_tokens; ++t) {
        F32 x = load(job.x + (run.first + t) * job.stride + channel, lanes);
        if (job.is_bf16) x = rounded_bf16(x);
        before[width] = x;
        F32 total = before[0] * weight[0];
        for (i32 tap = 1; tap <= width; ++tap) total = fma(before[tap], weight[tap], total);
        store(job.out + (run.first + t) * job.out_stride + channel, total + base, lanes);
        for (i32 tap = 0; tap < width; ++tap) before[tap] = before[tap + 1];
        for (; saved < run.num_saves && run.saves[saved].count == t + 1; ++saved)
            save_inputs(job, before, run.saves[saved].to, channel, lanes);
    }
}

void convolve(const ConvJob& job, const ConvRun& run, i32 first, i32 count) {
    for (i32 at = 0; at < count; at += 16) convolve_lanes(job, run, first + at, first_lanes(count - at < 16 ? count - at : 16));
}

}  // namespace

extern const RecurrenceTable recurrence_table = {run, convolve};

}  // namespace quire::QUIRE_ISA
