// The cache of layers whose keys are chosen by an indexer: storing, scoring the indexer's keys, and gathering what is chosen.
// Included by attention.inl.
#pragma once
#include "attention_runs.inl"

namespace quire::QUIRE_ISA {
namespace {

QUIRE_INLINE KvLayer index_keys(const IndexedKv& kv) {
    return {kv.format, kv.block_size, 1, kv.key_size, kv.keys, nullptr, nullptr, nullptr};
}

// The bytes of a token's row.
QUIRE_INLINE u8* indexed_row(const IndexedKv& kv, i64 slot) {
    return static_cast<u8*>(kv.rows) + bytes_of(kv.format, slot * kv.row_size);
}

// The run of the indexer's keys that holds the token at `offset` of a block.
QUIRE_INLINE u8* index_run(const IndexedKv& kv, i64 block, i32 offset) {
    return static_cast<u8*>(kv.keys) + bytes_of(kv.format, run_element(index_keys(kv), block, 0, offset));
}

static void store_indexed(const IndexedKv& kv, i64 slot, const float* row, const float* key) {
    const i32 offset = static_cast<i32>(slot % kv.block_size);
    u8 *const to = indexed_row(kv, slot), *const run = index_run(kv, slot / kv.block_size, offset);
    if (kv.format == KvFormat::f32) {
        __builtin_memcpy(to, row, static_cast<size_t>(kv.row_size) * 4);
        for (i32 d = 0; d < kv.key_size; ++d) reinterpret_cast<float*>(run)[d * RUN + offset % RUN] = key[d];
        return;
    }
    alignas(64) u16 rounded[16];
    for (i32 d = 0; d < kv.row_size; d += 16) {
        const int count = smaller(16, kv.row_size - d);
        store_bf16(rounded, load(row + d, first_lanes(count)));
        __builtin_memcpy(to + d * 2, rounded, static_cast<size_t>(count) * 2);
    }
    store_bf16_key(kv.key_size, offset % RUN, reinterpret_cast<u16*>(run), key);
}

static void move_indexed(const IndexedKv& kv, i64 from, i64 to) {
    if (from == to) return;
    __builtin_memcpy(indexed_row(kv, to), indexed_row(kv, from), static_cast<size_t>(bytes_of(kv.format, kv.row_size)));
    const i32 from_offset = static_cast<i32>(from % kv.block_size), to_offset = static_cast<i32>(to % kv.block_size);
    const u8* const source = index_run(kv, from / kv.block_size, from_offset);
    copy_key(kv.format, kv.key_size, source, from_offset % RUN, index_run(kv, to / kv.block_size, to_offset), to_offset % RUN);
}

template <class Kind>
static void score_keys_of(const IndexedKv& kv, const IndexQuery& query, i32 first, i32 last, float* scores) {
    alignas(64) u8 rows[TILE_ROWS * MAX_INDEX_SIZE * 4];
    alignas(64) float products[TILE_ROWS * GROUP * RUN];
    const i64 stride = round_up(kv.key_size, 16) * 4 / Kind::units;
    const F32 scale = set1(query.scale);
    for (i32 token = first; token < last; token += RUN) store(scores + token, zero());
    for (i32 head = 0; head < query.num_heads; head += TILE_ROWS) {
        const int count = smaller(TILE_ROWS, query.num_heads - head);
        for (int row = 0; row < count; ++row) {
            const float* const q = query.heads + static_cast<i64>(head + row) * kv.key_size;
            for (i32 d = 0; d < kv.key_size; d += 16) {
                const F32 x = load(q + d, first_lanes(kv.key_size - d));
                if constexpr (Kind::is_bf16)
                    store_bf16(reinterpret_cast<u16*>(rows + row * stride) + d, x);
                else
                    store(reinterpret_cast<float*>(rows + row * stride) + d, x);
            }
        }
        for (i32 token = first; token < last; token += GROUP * RUN) {
            Product product = {};
            product.num_runs = smaller(GROUP, (last - token + RUN - 1) / RUN);
            for (int i = 0; i < product.num_runs; ++i) {
                const i32 at = token + i * RUN;
                product.runs[i] = index_run(kv, query.blocks[at / kv.block_size], at % kv.block_size);
            }
            product.ahead = ahead_at(product.runs, {0, product.num_runs}, 0);
            product.steps = kv.key_size / Kind::units;
            product.rows = rows;
            product.row_stride = stride;
            product.out = products;
            product.out_stride = GROUP * RUN;
            score_rows<Kind>(product, count);
            for (int i = 0; i < product.num_runs; ++i) {
                float* const to = scores + token + i * RUN;
                F32 sum = load(to);
                for (int row = 0; row < count; ++row)
                    // NaN stays
                    sum =
                        fma(max(zero(), load(products + (row * GROUP + i) * RUN) * scale), set1(query.weights[head + row]), sum);
                store(to, sum);
            }
        }
    }
}

static void score_keys(const IndexedKv& kv, const IndexQuery& query, i32 first, i32 last, float* scores) {
    if (kv.format == KvFormat::bf16)
        score_keys_of<KindBf16>(kv, query, first, last, scores);
    else
        score_keys_of<KindF32>(kv, query, first, last, scores);
}

static void gather_run(
    const IndexedKv& kv, const i32* blocks, const i32* tokens, i32 first, i32 count, const KvLayer& to, i64 run) {
    const i32 dim = kv.row_size;
    const auto row_of = [&](i32 i) {
        const i32 token = tokens == nullptr ? first + i : tokens[i];
        return indexed_row(kv, static_cast<i64>(blocks[token / kv.block_size]) * kv.block_size + token % kv.block_size);
    };
    u8* const keys = static_cast<u8*>(to.keys) + bytes_of(kv.format, run * RUN * dim);
    const i32 units = kv.format == KvFormat::bf16 ? dim / 2 : dim;
    for (i32 i = 0; i < count; ++i) {
        const u8* const row = row_of(i);
        for (i32 unit = 0; unit < units; ++unit) __builtin_memcpy(keys + (unit * RUN + i) * 4, row + unit * 4, 4);
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
