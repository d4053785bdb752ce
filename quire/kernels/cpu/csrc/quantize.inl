// Scales: one group per lane, sixteen groups at once. Codes: sixteen columns of a row at once.
#include <string.h>

#include "simd.h"

#include "tables.h"

namespace quire::QUIRE_ISA {
namespace {

QUIRE_INLINE float as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
QUIRE_INLINE u32 as_bits(float x) { u32 y; memcpy(&y, &x, 4); return y; }

QUIRE_INLINE Mask is_zero(F32 x) { return (x <= zero()) & (x >= zero()); }
QUIRE_INLINE F32 reciprocal(F32 x) { return select(is_zero(x), zero(), set1(1.0f) / x); }
// Magnitudes as integers: in the order of the floats, infinity above them and NaN above that.
QUIRE_INLINE I32 magnitude(F32 x) { return as_i32(x) & set1(0x7fffffff); }
QUIRE_INLINE Mask is_finite(I32 magnitude) { return magnitude < set1(0x7f800000); }
// The power of two that brings a magnitude into [1, 2), or close to it at both ends of the range, and the inverse.
QUIRE_INLINE I32 bounded_exponent(I32 magnitude) { return max(set1(1), min(set1(253), shift_right<23>(magnitude))); }
QUIRE_INLINE F32 unit_power(I32 exponent) { return as_f32(shift_left<23>(set1(254) - exponent)); }
QUIRE_INLINE F32 inverse_power(I32 exponent) { return as_f32(shift_left<23>(exponent)); }

// Sum of term(j) over a group, with room for size / 8 parts. The halves are added, then the halves of that, and so on.
// The terms are forced inline: otherwise each is a call, with its captures in memory.
#define QUIRE_TERM __attribute__((always_inline))
template <class Term>
QUIRE_INLINE F32 sum_group(i32 size, float* parts, Term term) {
    const i32 q = size / 8;
    for (i32 j = 0; j < q; ++j) {
        F32 a = term(j) + term(j + 4 * q);
        a = a + (term(j + 2 * q) + term(j + 6 * q));
        F32 b = term(j + q) + term(j + 5 * q);
        b = b + (term(j + 3 * q) + term(j + 7 * q));
        store(parts + 16 * j, a + b);
    }
    for (i32 half = q / 2; half > 0; half /= 2)
        for (i32 j = 0; j < half; ++j) store(parts + 16 * j, load(parts + 16 * j) + load(parts + 16 * (j + half)));
    return load(parts);
}

// The scale of sixteen groups x [size][16] with parts as sum_group takes them, whose extremes lie in [1, 2).
template <class Level>
QUIRE_INLINE F32 search_scale(const QuantizeJob& job, const float* x, float* parts, F32 extreme, Level level_of) {
    const F32 unit = set1(job.lowest) * reciprocal(extreme);
    F32 best = set1(-1.0f), scale = zero();
    for (i32 c = 0; c < job.num_clips; ++c) {
        const F32 clipped = unit * set1(job.clips[c]), doubled = clipped + clipped;
        F32 power = zero();
        const F32 fit = sum_group(job.size, parts, [&](i32 j) QUIRE_TERM {
            const F32 value = load(x + 16 * j), level = level_of(value * doubled);
            // Sums of squares of levels are below 2^24: exact in any order.
            power = fma(level, level, power);
            return value * level;
        });
        const F32 inverse = reciprocal(power), score = fit * fit * inverse;
        const Mask is_better = score > best;
        best = select(is_better, score, best);
        scale = select(is_better, fit * inverse, scale);
    }
    return scale;
}

QUIRE_INLINE F32 linear_level(F32 doubled) {
    const I32 n = to_i32_up(max(min(doubled, set1(255.0f)), set1(-256.0f)));
    return to_f32(max(set1(-8), min(set1(7), shift_right_signed<1>(n))));
}

QUIRE_INLINE F32 table_level(const Steps& steps, F32 doubled) {
    return at_step(steps, to_i32_up(max(min(doubled, set1(255.0f)), set1(-256.0f))));
}

alignas(64) constexpr float NO_TABLE[512] = {};

QUIRE_INLINE Steps steps_of(const QuantizeJob& job) { return make_steps(job.table != nullptr ? job.table : NO_TABLE); }

QUIRE_INLINE F32 rounded(F32 y, float low, float high) { return max(min(round(y), set1(high)), set1(low)); }

// The line of sixteen groups x [size][16] with room for as many codes.
QUIRE_INLINE void search_affine(const QuantizeJob& job, const float* x, float* parts, float* codes, F32& scale, F32& offset) {
    const F32 inverse_size = set1(1.0f) / set1(static_cast<float>(job.size));
    F32 low = load(x), high = low;
    for (i32 j = 1; j < job.size; ++j) low = min(low, load(x + 16 * j)), high = max(high, load(x + 16 * j));
    const F32 mean = sum_group(job.size, parts, [&](i32 j) QUIRE_TERM { return load(x + 16 * j); }) * inverse_size;
    F32 best = set1(__builtin_inff());
    scale = zero(), offset = mean;
    for (i32 c = 0; c < job.num_clips; ++c) {
        const F32 step = (high - low) * set1(job.clips[c]), inverse = reciprocal(step);
        const F32 start = (high + low) * set1(0.5f) - set1(7.5f) * step;
        F32 sum = zero();
        for (i32 j = 0; j < job.size; ++j) {
            const F32 q = rounded((load(x + 16 * j) - start) * inverse, 0.0f, 15.0f);
            store(codes + 16 * j, q);
            sum = sum + q;
        }
        const F32 middle = sum * inverse_size;
        const F32 fit = sum_group(
            job.size, parts, [&](i32 j) QUIRE_TERM { return (load(codes + 16 * j) - middle) * (load(x + 16 * j) - mean); });
        const F32 power = sum_group(job.size, parts, [&](i32 j) QUIRE_TERM {
            const F32 spread = load(codes + 16 * j) - middle;
            return spread * spread;
        });
        const F32 slope = fit * reciprocal(power), base = mean - slope * middle;
        const F32 error = sum_group(job.size, parts, [&](i32 j) QUIRE_TERM {
            const F32 miss = load(x + 16 * j) - base - slope * load(codes + 16 * j);
            return miss * miss;
        });
        const Mask is_better = error < best;
        best = select(is_better, error, best);
        scale = select(is_better, slope, scale);
        offset = select(is_better, base, offset);
    }
}

// Groups [first, first + count) of all rows, count <= 16, into x [size][16]; zeros in the other lanes.
template <bool IS_BF16>
void load_groups(const QuantizeJob& job, i64 first, i32 count, float* x) {
    const i64 groups = job.k / job.size;
    i64 row = first / groups, group = first % groups;
    if (count < 16) memset(x, 0, static_cast<size_t>(job.size) * 64);
    for (i32 lane = 0; lane < count; ++lane) {
        const i64 at = row * job.stride + group * job.size;
        const u16* halves = static_cast<const u16*>(job.source) + at;
        const u32* words = static_cast<const u32*>(job.source) + at;
        for (i32 j = 0; j < job.size; ++j) {
            const u32 bits = IS_BF16 ? static_cast<u32>(halves[j]) << 16 : words[j];
            memcpy(x + 16 * j + lane, &bits, 4);
        }
        if (++group == groups) group = 0, ++row;
    }
}

void search_groups(const QuantizeJob& job, const Steps& steps, i64 first, i32 count, float* scratch) {
    float* x = scratch;
    float* codes = x + 16 * MAX_QUANTIZED_GROUP;
    float* parts = codes + 16 * MAX_QUANTIZED_GROUP;
    if (job.is_bf16)
        load_groups<true>(job, first, count, x);
    else
        load_groups<false>(job, first, count, x);
    I32 largest = set1(0);
    F32 extreme = zero();
    for (i32 j = 0; j < job.size; ++j) {
        const F32 value = load(x + 16 * j);
        const I32 m = magnitude(value);
        const Mask is_larger = largest < m;
        extreme = select(is_larger, value, extreme);
        largest = max(largest, m);
    }
    const I32 exponent = bounded_exponent(largest);
    const F32 power = unit_power(exponent), back = inverse_power(exponent);
    for (i32 j = 0; j < job.size; ++j) store(x + 16 * j, load(x + 16 * j) * power);
    F32 scale = zero(), offset = zero();
    if (job.kind == Quantization::affine) {
        search_affine(job, x, parts, codes, scale, offset);
    } else if (job.kind == Quantization::linear) {
        scale = search_scale(job, x, parts, extreme * power, [](F32 doubled) QUIRE_TERM { return linear_level(doubled); });
    } else {
        scale =
            search_scale(job, x, parts, extreme * power, [steps](F32 doubled) QUIRE_TERM { return table_level(steps, doubled); });
    }
    // A non-finite weight must be visible in the result: its group has no valid scale.
    const F32 none = set1(__builtin_nanf(""));
    const Mask finite = is_finite(largest), lanes = first_lanes(count);
    store(job.scale + first, select(finite, scale * back, none), lanes);
    if (job.kind == Quantization::affine) store(job.offset + first, select(finite, offset * back, none), lanes);
}

template <bool IS_BF16>
QUIRE_INLINE F32 load_source(const void* row, i64 j) {
    return IS_BF16 ? load_bf16(static_cast<const u16*>(row) + j) : load(static_cast<const float*>(row) + j);
}
template <bool IS_BF16>
QUIRE_INLINE F32 load_source(const void* row, i64 j, Mask lanes) {
    return IS_BF16 ? load_bf16(static_cast<const u16*>(row) + j, lanes) : load(static_cast<const float*>(row) + j, lanes);
}

QUIRE_INLINE const void* row_of(const QuantizeJob& job, i64 row) {
    return static_cast<const u8*>(job.source) + row * job.stride * (job.is_bf16 ? 2 : 4);
}

template <bool IS_BF16>
void search_row(const QuantizeJob& job, i64 row) {
    const void* x = row_of(job, row);
    I32 largest = set1(0);
    i64 j = 0;
    for (; j + 16 <= job.k; j += 16) largest = max(largest, magnitude(load_source<IS_BF16>(x, j)));
    largest = max(largest, magnitude(load_source<IS_BF16>(x, j, first_lanes(static_cast<int>(job.k - j)))));
    i32 lanes[16], most = 0;
    store(lanes, largest);
    for (i32 i = 0; i < 16; ++i) most = lanes[i] > most ? lanes[i] : most;
    job.scale[row] = most < 0x7f800000 ? as_float(static_cast<u32>(most)) / 127.0f : __builtin_nanf("");
}

void search(const QuantizeJob& job, i64 first, i64 count, float* scratch) {
    if (job.kind == Quantization::int8) {
        for (i64 row = first; row < first + count; ++row) {
            if (job.is_bf16)
                search_row<true>(job, row);
            else
                search_row<false>(job, row);
        }
        return;
    }
    const Steps steps = steps_of(job);
    for (i64 done = 0; done < count; done += 16)
        search_groups(job, steps, first + done, static_cast<i32>(count - done < 16 ? count - done : 16), scratch);
}

// Write the codes of n columns by code_of(x), x in f32.
template <bool IS_BF16, class Code>
QUIRE_INLINE void encode_columns(const void* x, i64 begin, i32 n, i8* codes, Code code_of) {
    i32 j = 0;
    for (; j + 16 <= n; j += 16) store_s8(codes + j, to_i32(code_of(load_source<IS_BF16>(x, begin + j))));
    if (j == n) return;
    i8 last[16];
    store_s8(last, to_i32(code_of(load_source<IS_BF16>(x, begin + j, first_lanes(n - j)))));
    memcpy(codes + j, last, static_cast<size_t>(n - j));
}

template <bool IS_BF16>
void encode_row(const QuantizeJob& job, const Steps& steps, i64 row) {
    const i32 size = job.size, groups = job.k / size;
    const void* x = row_of(job, row);
    for (i32 g = 0; g < groups; ++g) {
        const float scale = job.scale[row * groups + g],
                    offset = job.kind == Quantization::affine ? job.offset[row * groups + g] : 0.0f;
        i8* codes = job.codes + row * job.k + static_cast<i64>(g) * size;
        const u32 exponent_bits = as_bits(scale) >> 23 & 255;
        const bool is_finite = exponent_bits != 255 && (as_bits(offset) >> 23 & 255) != 255;
        if (!is_finite || scale == 0.0f) {
            memset(codes, job.kind == Quantization::table ? static_cast<int>(job.table[256]) : 0, static_cast<size_t>(size));
            continue;
        }
        // Powers of two on the way keep the reciprocal of a tiny scale finite; elsewhere they change nothing.
        const u32 bounded = exponent_bits < 1 ? 1 : exponent_bits > 253 ? 253 : exponent_bits;
        const float power = as_float((254 - bounded) << 23);
        const F32 factor = set1(power), inverse = set1(1.0f / (scale * power)), moved = set1(offset);
        const i64 begin = static_cast<i64>(g) * size;
        switch (job.kind) {
            case Quantization::int8:
                encode_columns<IS_BF16>(
                    x, begin, size, codes, [=](F32 v) QUIRE_TERM { return rounded(v * factor * inverse, -127.0f, 127.0f); });
                break;
            case Quantization::linear:
                encode_columns<IS_BF16>(x, begin, size, codes, [=](F32 v) QUIRE_TERM {
                    const F32 y = v * factor * inverse;
                    return linear_level(y + y);
                });
                break;
            case Quantization::table:
                encode_columns<IS_BF16>(x, begin, size, codes, [=, &steps](F32 v) QUIRE_TERM {
                    const F32 y = v * factor * inverse;
                    return table_level(steps, y + y);
                });
                break;
            default:
                encode_columns<IS_BF16>(x, begin, size, codes,
                    [=](F32 v) QUIRE_TERM { return rounded((v - moved) * factor * inverse, 0.0f, 15.0f); });
        }
    }
}

void encode(const QuantizeJob& job, i64 first, i64 count) {
    const Steps steps = steps_of(job);
    for (i64 row = first; row < first + count; ++row) {
        if (job.is_bf16)
            encode_row<true>(job, steps, row);
        else
            encode_row<false>(job, steps, row);
    }
}

#undef QUIRE_TERM

}  // namespace

extern const QuantizeTable quantize_table;
const QuantizeTable quantize_table = {search, encode};

}  // namespace quire::QUIRE_ISA
