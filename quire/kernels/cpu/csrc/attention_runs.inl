// Reading and writing the cache's layout: runs are converted to the layout of the products, and tokens are stored. Included by
// attention.inl.
#pragma once
#include "attention_rotation.inl"

namespace quire::QUIRE_ISA {
namespace {

// The place of the token at `offset` of a block among the scales.
QUIRE_INLINE i64 scale_element(const KvLayer& kv, i64 block, i32 head, i32 offset) {
    return (block * kv.kv_heads + head) * kv.block_size + offset;
}

// The bits of x rounded to bf16, in the upper half of each lane; the lower half is undefined.
QUIRE_INLINE I32 round_bits(F32 x) {
    const I32 u = as_i32(x);
    return select(is_nan(x), u | set1(0x400000), u + (shift_right<16>(u) & set1(1)) + set1(0x7fff));
}

QUIRE_INLINE I32 upper_half(I32 x) { return x & set1(static_cast<i32>(0xffff0000u)); }

QUIRE_INLINE void split_pair(I32 pair, F32& low, F32& high) {
    low = as_f32(shift_left<16>(pair));
    high = as_f32(upper_half(pair));
}

// The values of codes of f8, one in each lane, none NaN. Read as a number with a leading one, x = m / 8 * 2^-6 of exponent 0 becomes
// 2^-7 + x / 2, which is below 2^-6: the sum is x. No comparisons: masks are slow where they are not registers of their own.
QUIRE_INLINE F32 float8_values(I32 codes) {
    const F32 normal = as_f32(shift_left<20>(codes & set1(0x7f)) + set1((127 - 7) << 23));
    const F32 value = normal + min(normal - set1(0x1p-6f), zero());
    return as_f32(as_i32(value) | shift_left<24>(codes & set1(0x80)));
}

// The codes of x, |x| <= 448 or NaN, rounded to nearest even; that of NaN is 0.
QUIRE_INLINE I32 float8_codes(F32 x) {
    const I32 u = as_i32(x), magnitude = u & set1(0x7fffffff);
    const I32 least = to_i32(abs(x) * set1(0x1p9f));
    const I32 normal = shift_right<20>(magnitude + (shift_right<20>(u) & set1(1)) + set1(0x7ffff)) + set1(-8 * (127 - 7));
    const I32 code = select(abs(x) < set1(0x1p-6f), least, normal) | (shift_right<24>(u) & set1(0x80));
    return select(is_nan(x), set1(0), code);
}

// Two numbers per lane in the form of Kind: one vector of pairs, or two vectors `stride` bytes apart.
template <class Kind, KvFormat FORMAT>
QUIRE_INLINE void put_two(u8* to, i64 stride, F32 low, F32 high) {
    if constexpr (Kind::is_bf16 && (FORMAT == KvFormat::i8 || FORMAT == KvFormat::f8)) {  // eight bits need no rounding
        store(reinterpret_cast<i32*>(to), shift_right<16>(as_i32(low)) | as_i32(high));
    } else if constexpr (Kind::is_bf16) {
        store(reinterpret_cast<i32*>(to), shift_right<16>(round_bits(low)) | upper_half(round_bits(high)));
    } else {
        store(reinterpret_cast<float*>(to), low);
        store(reinterpret_cast<float*>(to + stride), high);
    }
}

// Two rows of 16 numbers of FORMAT, `apart` elements from each other, of which the first `count` are read.
template <KvFormat FORMAT>
QUIRE_INLINE void get_two(const u8* from, i64 at, i64 apart, i32 count, F32& low, F32& high) {
    const Mask lanes = first_lanes(count);
    if constexpr (FORMAT == KvFormat::f32) {
        low = load(reinterpret_cast<const float*>(from) + at, lanes);
        high = load(reinterpret_cast<const float*>(from) + at + apart, lanes);
    } else if constexpr (FORMAT == KvFormat::f8) {
        const u8 *first = from + at, *second = first + apart;
        low = float8_values(count >= 16 ? load_u8(first) : load_u8(first, lanes));
        high = float8_values(count >= 16 ? load_u8(second) : load_u8(second, lanes));
    } else {
        low = load_s8(reinterpret_cast<const i8*>(from) + at, lanes);
        high = load_s8(reinterpret_cast<const i8*>(from) + at + apart, lanes);
    }
}

// Prefetch, while run `run` of a group is converted, its part of the next group.
struct AheadOfRun {
    Ahead ahead;
    int run;
};

// Keys of a run: [dim][16] or [dim / 2][16][2] of FORMAT into those of Kind.
template <class Kind, KvFormat FORMAT>
static void convert_keys(const u8* from, const AheadOfRun& next, i32 head_dim, u8* to) {
    i64 line = next.run * (bytes_of(FORMAT, RUN * head_dim) / 64);
    i32 d = 0;
    if constexpr (Kind::is_bf16 && FORMAT == KvFormat::i8) {
        const CodeTable table = code_table();
        for (; d + 4 <= head_dim; d += 4, to += 128) {
            Bytes first, second;
            widen_codes(table, load_bytes(from + d * RUN), first, second);
            store_bytes(to, first);
            store_bytes(to + 64, second);
            fetch<1>(next.ahead, line++);
        }
    }
    for (; d < head_dim; d += 2, to += 64 * 2 / Kind::units) {
        F32 low, high;
        if constexpr (FORMAT == KvFormat::bf16)
            split_pair(load(reinterpret_cast<const i32*>(from) + d / 2 * RUN), low, high);
        else
            get_two<FORMAT>(from, static_cast<i64>(d) * RUN, RUN, 16, low, high);
        put_two<Kind, FORMAT>(to, 64, low, high);
        if (bytes_of(FORMAT, 2) > 2 || d % 4 == 0) fetch<1>(next.ahead, line++);
        if (FORMAT == KvFormat::f32) fetch<1>(next.ahead, line++);
    }
}

// Values of a run into those of Kind, in whole vectors per step: values past head_dim are 0.
template <class Kind, KvFormat FORMAT>
static void convert_values(const u8* from, const AheadOfRun& next, i32 head_dim, u8* to) {
    const i64 stride = round_up(head_dim, 16) * 4;
    i64 line = next.run * (bytes_of(FORMAT, RUN * head_dim) / 64);
    for (int token = 0; token < RUN; token += 2, to += stride * 2 / Kind::units) {
        const i64 pair = static_cast<i64>(token) * head_dim;
        for (i64 byte = 0; byte < bytes_of(FORMAT, 2 * head_dim); byte += 64) fetch<1>(next.ahead, line++);
        i32 d = 0;
        if constexpr (Kind::is_bf16 && FORMAT == KvFormat::i8) {
            const CodeTable table = code_table();
            for (; d + 32 <= head_dim; d += 32) {
                const i8* codes = reinterpret_cast<const i8*>(from) + pair + d;
                Bytes first, second;
                widen_codes(table, load_quarters(codes, codes + head_dim, codes + 16, codes + head_dim + 16), first, second);
                store_bytes(to + d * 4, first);
                store_bytes(to + d * 4 + 64, second);
            }
        }
        for (; d < head_dim; d += 16) {
            F32 low, high;
            if constexpr (FORMAT == KvFormat::bf16)
                split_pair(load(reinterpret_cast<const i32*>(from) + pair / 2 + d, first_lanes(head_dim - d)), low, high);
            else
                get_two<FORMAT>(from, pair + d, head_dim, head_dim - d, low, high);
            put_two<Kind, FORMAT>(to + d * 4, stride, low, high);
        }
    }
}

// The same of r4.
template <class Kind>
static void convert_level_keys(const u8* from, const AheadOfRun& next, i32 head_dim, u8* to) {
    const LevelTable table = level_table(LEVELS);
    i64 line = next.run * (bytes_of(KvFormat::r4, RUN * head_dim) / 64);
    for (i32 d = 0; d < head_dim; d += 2, from += RUN, to += 64 * 2 / Kind::units) {
        const I32 codes = load_u8(from);
        put_pairs<Kind>(to, 64, level_pairs(table, (codes | shift_left<12>(codes)) & set1(0x000f000f)), 16);
        if (d % 8 == 0) fetch<1>(next.ahead, line++);
    }
}

template <class Kind>
static void convert_level_values(const u8* from, const AheadOfRun& next, i32 head_dim, u8* to) {
    const LevelTable table = level_table(LEVELS);
    const I32 mask = set1(0x000f000f);
    const i32 half = head_dim / 2;
    const i64 stride = round_up(head_dim, 16) * 4;
    i64 line = next.run * (bytes_of(KvFormat::r4, RUN * head_dim) / 64);
    for (int token = 0; token < RUN; token += 2, from += head_dim, to += stride * 2 / Kind::units) {
        for (i64 byte = 0; byte < head_dim; byte += 64) fetch<1>(next.ahead, line++);
        if (head_dim % 16 != 0) put_pairs<Kind>(to + stride - 64, stride, set1(0), 16);
        for (i32 d = 0; d < half; d += 16) {
            const int count = smaller(16, half - d);
            const u8 *first = from + d, *second = first + half;
            const I32 codes = count == 16 ? load_u8(first) | shift_left<16>(load_u8(second))
                                          : load_u8(first, first_lanes(count)) | shift_left<16>(load_u8(second, first_lanes(count)));
            put_pairs<Kind>(to + d * 4, stride, level_pairs(table, codes & mask), count);
            put_pairs<Kind>(to + (half + d) * 4, stride, level_pairs(table, shift_right<4>(codes) & mask), count);
        }
    }
}

// format: of the keys.
template <class Kind>
static void convert_keys(KvFormat format, const u8* from, const AheadOfRun& next, i32 head_dim, u8* to) {
    if (format == KvFormat::bf16) return convert_keys<Kind, KvFormat::bf16>(from, next, head_dim, to);
    if (format == KvFormat::f32) return convert_keys<Kind, KvFormat::f32>(from, next, head_dim, to);
    if (format == KvFormat::r4) return convert_level_keys<Kind>(from, next, head_dim, to);
    if (format == KvFormat::f8) return convert_keys<Kind, KvFormat::f8>(from, next, head_dim, to);
    convert_keys<Kind, KvFormat::i8>(from, next, head_dim, to);
}

// format: of the values.
template <class Kind>
static void convert_values(KvFormat format, const u8* from, const AheadOfRun& next, i32 head_dim, u8* to) {
    if (format == KvFormat::bf16) return convert_values<Kind, KvFormat::bf16>(from, next, head_dim, to);
    if (format == KvFormat::f32) return convert_values<Kind, KvFormat::f32>(from, next, head_dim, to);
    if (format == KvFormat::r4) return convert_level_values<Kind>(from, next, head_dim, to);
    if (format == KvFormat::f8) return convert_values<Kind, KvFormat::f8>(from, next, head_dim, to);
    convert_values<Kind, KvFormat::i8>(from, next, head_dim, to);
}

// N words of every step of values, from word `first` of a step on, see turn_keys. at: the vectors of keys.
template <class Kind, int N, class At>
QUIRE_INLINE void turn_words(const At& at, i64 first, i64 stride, u32* to) {
    I32 rows[RUN];
    if constexpr (Kind::is_bf16) {
        // Word 2p of row r becomes word first + r of step p, word 2p + 1 that of the step's second half.
        const Mask even = mask_of(0x5555);
        const auto swapped = [](I32 x) QUIRE_BODY { return as_i32(swap_lanes<1>(as_f32(x))); };
        QUIRE_UNROLL for (int row = 0; row < N; row += 2) {
            const I32 x = at((first + row) / 2), y = at((stride + first + row) / 2);
            const I32 a = select(even, x, swapped(y)), b = select(even, swapped(x), y);
            rows[row] = (a & set1(0xffff)) | shift_left<16>(b);
            rows[row + 1] = shift_right<16>(a) | upper_half(b);
        }
    } else {
        QUIRE_UNROLL for (int row = 0; row < N; ++row) rows[row] = at(first + row);
    }
    store_columns(to + first, stride, rows, N, RUN);
}

// Keys of a run as its values, both in the form of Kind: values past head_dim are 0. next: null, or what to prefetch.
template <class Kind>
static void turn_keys(const u8* from, const AheadOfRun* next, i32 head_dim, u8* to) {
    const i64 count = head_dim / Kind::units, stride = round_up(head_dim, 16) / Kind::units;
    const auto at = [&](i64 vector) QUIRE_BODY {
        if (vector >= count) return set1(0);
        if (next != nullptr) fetch<1>(next->ahead, next->run * count + vector);
        return load(reinterpret_cast<const i32*>(from) + vector * RUN);
    };
    u32* const words = reinterpret_cast<u32*>(to);
    i64 first = 0;
    for (; first + RUN <= stride; first += RUN) turn_words<Kind, RUN>(at, first, stride, words);
    if (first < stride) turn_words<Kind, RUN / 2>(at, first, stride, words);
}

// Whether the values of a run, in the form of Kind, are finite.
template <class Kind>
static bool is_finite_run(const u8* values, i64 stride) {
    const I32 exponent = set1(0x7f800000);
    u32 found = 0;
    for (i64 at = 0; at < stride * Kind::run_steps; at += 64) {
        const I32 x = load(reinterpret_cast<const i32*>(values + at));
        found |= bits((x & exponent) == exponent);
        if (Kind::is_bf16) found |= bits((shift_left<16>(x) & exponent) == exponent);
    }
    return found == 0;
}

// Copy a run of values with zeros in the tokens outside `seen`, which count from the run's start.
template <class Kind>
static void copy_seen(const u8* from, i64 stride, Span seen, u8* to) {
    for (int step = 0; step < Kind::run_steps; ++step, from += stride, to += stride) {
        u32 keep = 0;
        for (int unit = 0; unit < Kind::units; ++unit) {
            const int token = step * Kind::units + unit;
            if (seen.begin <= token && token < seen.end) keep |= (Kind::is_bf16 ? 0xffffu : 0xffffffffu) << 16 * unit;
        }
        const I32 kept = set1(static_cast<i32>(keep));
        for (i64 at = 0; at < stride; at += 64)
            store(reinterpret_cast<i32*>(to + at), load(reinterpret_cast<const i32*>(from + at)) & kept);
    }
}

// Store one head of one token. `keys` and `values` are the starts of its run, `token` its place in there.
static void store_bf16_key(i32 dim, int token, u16* keys, const float* k) {
    alignas(64) u16 rounded[16];
    for (i32 d = 0; d < dim; d += 16) {
        const int count = smaller(16, dim - d);
        store_bf16(rounded, load(k + d, first_lanes(count)));
        u16* key = keys + d / 2 * RUN * 2 + token * 2;
        for (int i = 0; i < count; i += 2) __builtin_memcpy(key + i / 2 * RUN * 2, rounded + i, 4);
    }
}

static void store_bf16_value(i32 dim, int token, u16* values, const float* v) {
    alignas(64) u16 rounded[16];
    for (i32 d = 0; d < dim; d += 16) {
        const int count = smaller(16, dim - d);
        store_bf16(rounded, load(v + d, first_lanes(count)));
        u16* value = values + (token / 2 * dim + d) * 2 + token % 2;
        for (int i = 0; i < count; ++i) value[i * 2] = rounded[i];
    }
}

static void store_f32_key(i32 dim, int token, float* keys, const float* k) {
    for (i32 d = 0; d < dim; ++d) keys[d * RUN + token] = k[d];
}

static void store_f32_value(i32 dim, int token, float* values, const float* v) {
    for (i32 d = 0; d < dim; d += 16) {
        const Mask dims = first_lanes(dim - d);
        store(values + token * dim + d, load(v + d, dims), dims);
    }
}

// Write x as codes of i8, or of f8, `step` apart, and return their scale: 0 for zeros, NaN if x has a NaN.
static float store_codes(KvFormat format, i32 dim, u8* codes, i64 step, const float* x) {
    const float largest = format == KvFormat::f8 ? 448.0f : 127.0f;
    F32 highest = zero();
    u32 nans = 0;
    for (i32 d = 0; d < dim; d += 16) {
        const F32 part = load(x + d, first_lanes(dim - d));
        highest = max(abs(part), highest);
        nans |= bits(is_nan(part));
    }
    const float scale = nans != 0 ? __builtin_nanf("") : max_lanes(highest) / largest;
    alignas(64) i32 rounded[16];
    for (i32 d = 0; d < dim; d += 16) {
        const int count = smaller(16, dim - d);
        // A scale that is flushed to 0 must not give 0 / 0.
        F32 part = scale == 0.0f ? zero() : load(x + d, first_lanes(count)) / set1(scale);
        part = max(set1(-largest), min(set1(largest), part));
        store(rounded, format == KvFormat::f8 ? float8_codes(part) : to_i32(part));
        for (int i = 0; i < count; ++i) codes[(d + i) * step] = static_cast<u8>(rounded[i]);
    }
    return scale;
}

static float store_level_key(i32 dim, int token, u8* keys, const float* x) {
    u8 codes[MAX_ROTATED_DIM];
    const float scale = choose_levels(dim, x, codes);
    for (i32 d = 0; d < dim; d += 2) keys[d / 2 * RUN + token] = static_cast<u8>(codes[d] | codes[d + 1] << 4);
    return scale;
}

static float store_level_value(i32 dim, int token, u8* values, const float* x) {
    u8 codes[MAX_ROTATED_DIM];
    const i32 half = dim / 2;
    const float scale = choose_levels(dim, x, codes);
    for (i32 d = 0; d < half; ++d) values[token * half + d] = static_cast<u8>(codes[d] | codes[half + d] << 4);
    return scale;
}

// Copy the key of a token of one run to a place of another; `from` and `to` are the runs' starts, format is that of the keys.
static void copy_key(KvFormat format, i32 dim, const u8* from, int from_token, u8* to, int to_token) {
    if (has_scales(format)) {
        for (i32 d = 0; d < bytes_of(format, dim); ++d) to[d * RUN + to_token] = from[d * RUN + from_token];
        return;
    }
    const i32 units = format == KvFormat::bf16 ? dim / 2 : dim;
    for (i32 unit = 0; unit < units; ++unit) __builtin_memcpy(to + (unit * RUN + to_token) * 4, from + (unit * RUN + from_token) * 4, 4);
}

// The same of its value; format is that of the values.
static void copy_value(KvFormat format, i32 dim, const u8* from, int from_token, u8* to, int to_token) {
    if (format == KvFormat::bf16) {
        from += (from_token / 2 * dim * 2 + from_token % 2) * 2;
        to += (to_token / 2 * dim * 2 + to_token % 2) * 2;
        for (i32 d = 0; d < dim; ++d) __builtin_memcpy(to + d * 4, from + d * 4, 2);
        return;
    }
    const i64 bytes = bytes_of(format, dim);
    __builtin_memcpy(to + to_token * bytes, from + from_token * bytes, static_cast<size_t>(bytes));
}

static void move_token(const KvLayer& kv, i64 from, i64 to) {
    if (from == to) return;
    const KvFormat key = key_format(kv.format), value = value_format(kv.format);
    const i32 from_offset = static_cast<i32>(from % kv.block_size), to_offset = static_cast<i32>(to % kv.block_size);
    u8 *keys = static_cast<u8*>(kv.keys), *values = static_cast<u8*>(kv.values);
    for (i32 head = 0; head < kv.kv_heads; ++head) {
        const i64 source = run_element(kv, from / kv.block_size, head, from_offset);
        const i64 target = run_element(kv, to / kv.block_size, head, to_offset);
        copy_key(key, kv.head_dim, keys + bytes_of(key, source), from_offset % RUN, keys + bytes_of(key, target), to_offset % RUN);
        if (!kv.is_joined()) copy_value(value, kv.head_dim, values + bytes_of(value, source), from_offset % RUN, values + bytes_of(value, target), to_offset % RUN);
        if (!has_scales(kv.format)) continue;
        const i64 scale = scale_element(kv, from / kv.block_size, head, from_offset);
        const i64 place = scale_element(kv, to / kv.block_size, head, to_offset);
        kv.key_scales[place] = kv.key_scales[scale];
        kv.value_scales[place] = kv.value_scales[scale];
    }
}

static void store_token(const KvLayer& kv, i64 slot, i32 first_head, i32 num_heads, const float* keys, const float* values) {
    const i64 block = slot / kv.block_size;
    const i32 offset = static_cast<i32>(slot % kv.block_size), dim = kv.head_dim;
    const int token = offset % RUN;
    for (i32 head = first_head; head < first_head + num_heads; ++head, keys += dim, values += dim) {
        const i64 run = run_element(kv, block, head, offset);
        if (kv.format == KvFormat::bf16) {
            store_bf16_key(dim, token, static_cast<u16*>(kv.keys) + run, keys);
            if (!kv.is_joined()) store_bf16_value(dim, token, static_cast<u16*>(kv.values) + run, values);
        } else if (kv.format == KvFormat::f32) {
            store_f32_key(dim, token, static_cast<float*>(kv.keys) + run, keys);
            if (!kv.is_joined()) store_f32_value(dim, token, static_cast<float*>(kv.values) + run, values);
        } else {
            const i64 scale = scale_element(kv, block, head, offset);
            const KvFormat key_kind = key_format(kv.format), value_kind = value_format(kv.format);
            u8* const key = static_cast<u8*>(kv.keys) + bytes_of(key_kind, run);
            u8* const value = static_cast<u8*>(kv.values) + bytes_of(value_kind, run);
            kv.key_scales[scale] = key_kind == KvFormat::r4 ? store_level_key(dim, token, key, keys)
                                                            : store_codes(key_kind, dim, key + token, RUN, keys);
            if (kv.is_joined()) continue;
            kv.value_scales[scale] = value_kind == KvFormat::r4 ? store_level_value(dim, token, value, values)
                                                                : store_codes(value_kind, dim, value + token * dim, 1, values);
        }
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
