// The sampler: the cuts become one threshold on the logits, and noise is made only where it can win.
//
// The largest logits of blocks of 64 tokens are found first. They bound everything after: the k-th best block bounds the k-th
// best token, blocks below a threshold are not read again, and a block's best logit says how rare a noise it would need.
#include "machine.h"
#include "sampler_cuts.inl"
#include "sampler_noise.inl"
#include "tables.h"

namespace quire::QUIRE_ISA {
namespace {

// run_team flushes denormals, which would make different logits equal. Returns the argument for `set_float_mode` to restore that.
u64 keep_denormals() {
    const u64 before = float_mode();
    set_float_mode(before & ~FLUSH_DENORMALS);
    return before;
}

struct Winner {
    float score;
    i32 token;
};

__attribute__((noinline)) void consider_block(const Row& row, const Key& key, float floor, i32 block, Winner& winner) {
    float noise[BLOCK];
    block_noise(key, block, noise);
    for (i32 i = 0; i < BLOCK; i += 16) {
        const i32 first = block * BLOCK + i;
        const F32 value = load_scaled(row, first);
        const F32 score = select(value >= set1(floor), value + load(noise + i), set1(NEVER));
        const float best = max_lanes(score);
        if (best < winner.score || best == NEVER) continue;
        const i32 token = first + __builtin_ctz(bits(score == set1(best)));
        if (best > winner.score || token < winner.token) winner = {best, token};
    }
}

// For 16 blocks the largest word whose noise could win, as a float, or -1 where none could. A token wins only with noise of at
// least need = winner's score - its value, less a margin for the rounding of the noise and of both sums, and noise >= need needs
// a word < 2^32 * e^-need.
QUIRE_INLINE void bound_words(const Row& row, float floor, float score, i32 block, float* bounds) {
    const F32 value = max(load(row.maxima + block) * set1(row.inverse), set1(LOWEST)), best = set1(score);
    const F32 need = (best - value) - ((abs(best) + abs(value)) * set1(0x1p-20f) + set1(0.01f));
    const F32 bound = exp(zero() - need) * set1(0x1.001p32f) + set1(2.0f);
    store(bounds, select((value < set1(floor)) | (need > set1(22.9f)), set1(-1.0f), bound));
}

QUIRE_INLINE bool has_word_within(const Key& key, i32 block, u32 limit) {
    I32 w[2][4];
    block_words(key, block, w);
    const I32 least0 = min_unsigned(min_unsigned(w[0][0], w[0][1]), min_unsigned(w[0][2], w[0][3]));
    const I32 least1 = min_unsigned(min_unsigned(w[1][0], w[1][1]), min_unsigned(w[1][2], w[1][3]));
    const I32 least = min_unsigned(least0, least1);
    return (bits(min_unsigned(least, set1(as_i32(limit))) == least) & 0x5555) != 0;
}

// The token >= floor whose logit plus noise is the largest; of equal ones the lowest.
i32 draw(const Row& row, float floor, const Key& key) {
    Winner winner = {NEVER, -1};
    i32 peak_block = 0;
    while (row.maxima[peak_block] * row.inverse < row.peak) ++peak_block;
    consider_block(row, key, floor, peak_block, winner);
    for (i32 first = 0; first < row.num_blocks; first += 16) {
        float bounds[16];
        bound_words(row, floor, winner.score, first, bounds);
        const i32 last = first + 16 < row.num_blocks ? first + 16 : row.num_blocks;
        for (i32 b = first; b < last; ++b) {
            const float bound = bounds[b - first];
            if (bound < 0.0f) continue;
            const u32 limit = bound < 4294967040.0f ? static_cast<u32>(bound) : ~0u;  // NaN: no bound is known
            if (has_word_within(key, b, limit)) consider_block(row, key, floor, b, winner);
        }
    }
    return winner.token;
}

SampleResult refuse(SampleStatus status) { return {-1, status}; }

__attribute__((noinline)) SampleResult sample_row(const SampleRow& options, i32 vocab, u8* scratch) {
    Row row = make_row(options.logits, options.mask, vocab, scratch);
    bool has_nan;
    const float best = scan(row, has_nan);
    if (has_nan) return refuse(SAMPLE_NAN);
    if (best > FLT_MAX) return refuse(SAMPLE_INFINITE);
    if (best < LOWEST) return refuse(SAMPLE_NOTHING);
    if (options.is_greedy) return {find_first(row, best), SAMPLE_FINE};
    row.inverse = options.inverse_temperature;
    row.peak = best * row.inverse;
    if (row.peak > FLT_MAX) return refuse(SAMPLE_OVERFLOW);
    if (row.peak < LOWEST) return refuse(SAMPLE_UNDERFLOW);
    return {draw(row, floor_of(row, options), make_key(options.seed, options.position)), SAMPLE_FINE};
}

i64 scratch_bytes(i32 vocab) { return 4 * (padded_maxima(vocab) + 2 * padded_values(vocab)); }

void sample(Worker& worker, const SampleRow* rows, i32 num_rows, i32 vocab, SampleResult* results, u8* scratch) {
    const u64 mode = keep_denormals();
    scratch += worker.rank * scratch_bytes(vocab);
    for (i64 i = next(worker, num_rows, 1); i < num_rows; i = next(worker, num_rows, 1))
        results[i] = sample_row(rows[i], vocab, scratch);
    set_float_mode(mode);
}

i32 count_above(const Row& row, float value) {
    i32 count = 0;
    for (i32 b = 0; b < row.num_blocks; ++b) {
        if (!(row.maxima[b] > value)) continue;
        for (i32 token = b * BLOCK; token < (b + 1) * BLOCK; token += 16)
            count += __builtin_popcount(bits(load_logits(row.logits + token, row.vocab - token) > set1(value)));
    }
    return count;
}

// Whether the first of two tokens comes after the second.
bool is_after(float value_a, i32 token_a, float value_b, i32 token_b) {
    return value_a < value_b || (value_a == value_b && token_a > token_b);
}

void sift_down(float* values, i32* tokens, i32 at, i32 n) {
    const float value = values[at];
    const i32 token = tokens[at];
    for (i32 child = 2 * at + 1; child < n; child = 2 * at + 1) {
        if (child + 1 < n && is_after(values[child + 1], tokens[child + 1], values[child], tokens[child])) ++child;
        if (!is_after(values[child], tokens[child], value, token)) break;
        values[at] = values[child];
        tokens[at] = tokens[child];
        at = child;
    }
    values[at] = value;
    tokens[at] = token;
}

// Write the num_top best tokens and their logits, in order: a heap whose root is the last of those found so far.
void find_top(const Row& row, i32 num_top, i32* tokens, float* values) {
    const float floor = num_top < row.vocab ? top_k_floor(row, num_top) : NEVER;
    const bool has_room = floor <= LOWEST;  // -inf may be among the best
    i32 n = 0;
    for (i32 b = 0; b < row.num_blocks; ++b) {
        if (!has_room && row.maxima[b] < floor) continue;
        const i32 last = (b + 1) * BLOCK < row.vocab ? (b + 1) * BLOCK : row.vocab;
        for (i32 token = b * BLOCK; token < last; ++token) {
            const float value = row.logits[token];
            if (!has_room && value < floor) continue;
            if (n < num_top) {
                values[n] = value;
                tokens[n] = token;
                if (++n == num_top)
                    for (i32 at = n / 2 - 1; at >= 0; --at) sift_down(values, tokens, at, n);
            } else if (is_after(values[0], tokens[0], value, token)) {
                values[0] = value;
                tokens[0] = token;
                sift_down(values, tokens, 0, n);
            }
        }
    }
    for (i32 end = n - 1; end > 0; --end) {
        const float value = values[0];
        const i32 token = tokens[0];
        values[0] = values[end], tokens[0] = tokens[end];
        values[end] = value, tokens[end] = token;
        sift_down(values, tokens, 0, end);
    }
}

__attribute__((noinline)) void logprobs_row(LogprobRow& out, i32 vocab, u8* scratch) {
    Row row = make_row(out.logits, nullptr, vocab, scratch);
    bool has_nan;
    row.peak = scan(row, has_nan);
    out.is_finite = !has_nan && row.peak >= LOWEST && row.peak <= FLT_MAX;
    if (!out.is_finite) return;
    const float log_sum = static_cast<float>(log(static_cast<double>(total_mass(row)) * 0x1p-44));
    out.logprob = (out.logits[out.token] - row.peak) - log_sum;
    out.rank = 1 + count_above(row, out.logits[out.token]);
    if (out.num_top == 0) return;
    find_top(row, out.num_top, out.top_tokens, out.top_values);
    for (i32 i = 0; i < out.num_top; ++i) out.top_values[i] = (out.top_values[i] - row.peak) - log_sum;
}

void logprobs(Worker& worker, LogprobRow* rows, i32 num_rows, i32 vocab, u8* scratch) {
    const u64 mode = keep_denormals();
    scratch += worker.rank * scratch_bytes(vocab);
    for (i64 i = next(worker, num_rows, 1); i < num_rows; i = next(worker, num_rows, 1)) logprobs_row(rows[i], vocab, scratch);
    set_float_mode(mode);
}

void noise(u64 seed, u32 position, i32 vocab, float* out) {
    const Key key = make_key(seed, position);
    for (i32 b = 0; b < count_blocks(vocab); ++b) {
        float values[BLOCK];
        block_noise(key, b, values);
        for (i32 i = 0; i < BLOCK && b * BLOCK + i < vocab; ++i) out[b * BLOCK + i] = values[i];
    }
}

void noise_of_words(const i32* words, i64 n, float* out) {
    for (i64 i = 0; i < n; i += 16) store(out + i, gumbel(load(words + i)));
}

}  // namespace

extern const SamplerTable sampler_table;
const SamplerTable sampler_table = {scratch_bytes, sample, logprobs, noise, noise_of_words};

}  // namespace quire::QUIRE_ISA
