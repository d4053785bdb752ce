// top_k, top_p and min_p as one threshold on the logits; no sort. The values and weights of a row are overwritten.
#pragma once
#include <math.h>

#include "sampler.h"
#include "sampler_row.inl"

namespace quire::QUIRE_ISA {
namespace {

// e^depth in units of 2^-44, a whole number; depth <= 0. Bit for bit that of kernels/reference/mass.py, so nothing is fused.
QUIRE_INLINE F32 mass_units(F32 depth) {
    const F32 x = max(depth, set1(-32.0f));
    const F32 n = round(x * set1(1.44269504f));
    const F32 r = (x - n * set1(0.693359375f)) + n * set1(2.12194440e-4f);
    F32 y = set1(1.9875691500e-4f);
    y = y * r + set1(1.3981999507e-3f);
    y = y * r + set1(8.3334519073e-3f);
    y = y * r + set1(4.1665795894e-2f);
    y = y * r + set1(1.6666665459e-1f);
    y = y * r + set1(5.0000001201e-1f);
    y = y * (r * r) + (r + set1(1.0f));
    return round(y * as_f32(shift_left<23>(to_i32(n) + set1(127 + 44))));
}
constexpr float NO_MASS_DEPTH = -32.0f;

// The mass of the whole row over that of its best token.
i64 total_mass(const Row& row) {
    const F32 peak = set1(row.peak);
    I64 total = zero_i64();
    for (i32 b = 0; b < row.num_blocks; ++b) {
        if (row.maxima[b] * row.inverse - row.peak < NO_MASS_DEPTH) continue;
#pragma GCC unroll 4
        for (i32 i = 0; i < BLOCK; i += 16) total = total + to_i64(mass_units(load_scaled(row, b * BLOCK + i) - peak));
    }
    return sum_lanes(total);
}

// The median of up to 15 of the values.
float guess_middle(const float* values, i64 n) {
    float sorted[15];
    const i64 count = n < 15 ? n : 15;
    for (i64 i = 0; i < count; ++i) {
        const float value = values[i * n / count];
        i64 at = i;
        for (; at > 0 && sorted[at - 1] > value; --at) sorted[at] = sorted[at - 1];
        sorted[at] = value;
    }
    return sorted[count / 2];
}

// The largest value t such that the weights of the values >= t are `target` or more; 0 < target <= sum of the weights, which are
// whole numbers. Overwrites both arrays, which are readable for 16 entries past n.
float find_threshold(float* values, float* weights, i64 n, i64 target) {
    for (;;) {
        const float pivot = guess_middle(values, n);
        const F32 middle = set1(pivot);
        I64 above = zero_i64(), equal = zero_i64();
        for (i64 i = 0; i < n; i += 16) {
            const Mask inside = first_lanes(static_cast<int>(n - i < 16 ? n - i : 16));
            const F32 value = load(values + i), weight = load(weights + i);
            above = above + to_i64(select((value > middle) & inside, weight, zero()));
            equal = equal + to_i64(select((value == middle) & inside, weight, zero()));
        }
        const i64 sum_above = sum_lanes(above), sum_equal = sum_lanes(equal);
        const bool goes_up = sum_above >= target;
        if (!goes_up && sum_above + sum_equal >= target) return pivot;
        if (!goes_up) target -= sum_above + sum_equal;
        i64 kept = 0;
        for (i64 i = 0; i < n; i += 16) {
            const Mask inside = first_lanes(static_cast<int>(n - i < 16 ? n - i : 16));
            const F32 value = load(values + i), weight = load(weights + i);
            const Mask keep = (goes_up ? value > middle : value < middle) & inside;
            compress_store(values + kept, keep, value);
            kept += compress_store(weights + kept, keep, weight);
        }
        n = kept;
    }
}

void weigh_equally(const Row& row, i64 n) {
    for (i64 i = 0; i < n; i += 16) store(row.weights + i, set1(1.0f));
}

// Weigh the candidates by their masses; returns the sum.
i64 weigh(const Row& row, i64 n) {
    I64 total = zero_i64();
    for (i64 i = 0; i < n; i += 16) {
        const Mask inside = first_lanes(static_cast<int>(n - i < 16 ? n - i : 16));
        const F32 units = select(inside, mass_units(load(row.values + i, inside) - set1(row.peak)), zero());
        store(row.weights + i, units);
        total = total + to_i64(units);
    }
    return sum_lanes(total);
}

// Gather the candidates >= floor; returns their number.
i64 collect(const Row& row, float floor) {
    i64 n = 0;
    for (i32 b = 0; b < row.num_blocks; ++b) {
        if (row.maxima[b] * row.inverse < floor) continue;
        for (i32 i = 0; i < BLOCK; i += 16) {
            const F32 value = load_scaled(row, b * BLOCK + i);
            n += compress_store(row.values + n, value >= set1(floor), value);
        }
    }
    return n;
}

// A value that at least `count` tokens reach, if so many are finite, and few more do: the best logit of the count-th best block.
float bound_of_best(const Row& row, i64 count) {
    if (count >= row.num_blocks) return LOWEST;
    for (i32 b = 0; b < row.num_blocks; b += 16) store(row.values + b, load(row.maxima + b) * set1(row.inverse));
    weigh_equally(row, row.num_blocks);
    const float bound = find_threshold(row.values, row.weights, row.num_blocks, count);
    return bound > LOWEST ? bound : LOWEST;
}

float top_k_floor(const Row& row, i64 top_k) {
    const float bound = bound_of_best(row, top_k);
    const i64 n = collect(row, bound);
    if (n <= top_k) return bound;
    weigh_equally(row, n);
    return find_threshold(row.values, row.weights, n, top_k);
}

// A token stays where the mass before it is less than top_p of the total, in f64.
i64 nucleus_target(double top_p, i64 total) {
    const i64 target = static_cast<i64>(ceil(top_p * static_cast<double>(total)));
    return target < 1 ? 1 : target < total ? target : total;
}

// About the value that tokens below `bound` with this share of their mass reach, from every 64th vector of the row.
float guess_floor(const Row& row, float bound, double share) {
    i64 n = 0;
    for (i32 token = 0; token < row.vocab; token += 64 * 16) {
        const F32 value = load_scaled(row, token);
        n += compress_store(row.values + n, (value < set1(bound)) & (value >= set1(LOWEST)), value);
    }
    const i64 total = weigh(row, n);
    return total == 0 ? LOWEST : find_threshold(row.values, row.weights, n, nucleus_target(share, total));
}

struct Window {
    i64 n, above, inside;
};

// Gather the n tokens in [low, high) with their masses, whose sum is `inside`, and sum those in [high, bound).
Window gather_window(const Row& row, float low, float high, float bound) {
    i64 n = 0;
    I64 above = zero_i64(), inside = zero_i64();
    for (i32 b = 0; b < row.num_blocks; ++b) {
        if (row.maxima[b] * row.inverse < low) continue;
        for (i32 i = 0; i < BLOCK; i += 16) {
            const F32 value = load_scaled(row, b * BLOCK + i);
            const Mask is_low = (value >= set1(low)) & (value < set1(high));
            const Mask is_high = (value >= set1(high)) & (value < set1(bound));
            if (bits(is_low | is_high) == 0) continue;
            const F32 units = mass_units(value - set1(row.peak));
            above = above + to_i64(select(is_high, units, zero()));
            inside = inside + to_i64(select(is_low, units, zero()));
            compress_store(row.values + n, is_low, value);
            n += compress_store(row.weights + n, is_low, units);
        }
    }
    return {n, sum_lanes(above), sum_lanes(inside)};
}

// The nucleus goes on below `bound`; `target` of the `rest` of the mass there belongs to it.
float flat_top_p_floor(const Row& row, float bound, i64 target, i64 rest) {
    const double share = static_cast<double>(target) / static_cast<double>(rest), margin = 0.05;
    const float high = share > margin ? guess_floor(row, bound, share - margin) : bound;
    const float low = share < 1.0 - margin ? guess_floor(row, bound, share + margin) : LOWEST;
    Window window = gather_window(row, low, high, bound);
    if (window.above >= target || window.above + window.inside < target) window = gather_window(row, LOWEST, bound, bound);
    return find_threshold(row.values, row.weights, window.n, target - window.above);
}

float top_p_floor(const Row& row, double top_p, float floor) {
    if (floor > LOWEST) {
        const i64 n = collect(row, floor);
        const i64 total = weigh(row, n);
        return find_threshold(row.values, row.weights, n, nucleus_target(top_p, total));
    }
    const i64 total = total_mass(row), target = nucleus_target(top_p, total);
    float bound = LOWEST;
    i64 mass = 0;
    // A few blocks hold the nucleus unless the distribution is flat.
    for (i64 num_blocks = 128; num_blocks <= 1024; num_blocks *= 8) {
        bound = bound_of_best(row, num_blocks);
        const i64 n = collect(row, bound);
        mass = weigh(row, n);
        if (mass >= target) return find_threshold(row.values, row.weights, n, target);
    }
    return flat_top_p_floor(row, bound, target - mass, total - mass);
}

float floor_of(const Row& row, const SampleRow& options) {
    float floor = LOWEST;
    if (options.top_k > 0 && options.top_k < row.vocab) floor = top_k_floor(row, options.top_k);
    if (options.top_p < 1.0) floor = top_p_floor(row, options.top_p, floor);
    const float least = row.peak + options.log_min_p;
    return least > floor ? least : floor;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
