// Runs that rows do not read because of bounds of their scores (Quest, arXiv 2406.10774). Included by attention.inl.
//
// Which runs a row skips depends on its position, its query and the keys before it only: neither on the tile, nor on the thread, nor on
// how the step is cut. It is at least `gap` above the bounds of these in a run that it reads in any case: the first one, its own, and the
// one before that. A tile does not touch runs that all of its rows skip; of others the rows that skip them have no weight.
#pragma once
#include "attention_chunk.inl"

namespace quire::QUIRE_ISA {
namespace {

// Write the least and the greatest value of each dimension of the keys of one run and head, without bounds where one is NaN.
static void bound_run(const AttentionJob& job, const i32* blocks, i32 run, i32 head, Space& space, float* to) {
    const KvLayer& kv = job.kv;
    const i32 block = blocks[run * RUN / kv.block_size], offset = run * RUN % kv.block_size;
    const KvFormat format = key_format(kv.format);
    const u8* from = static_cast<const u8*>(kv.keys) + bytes_of(format, run_element(kv, block, head, offset));
    convert_keys<KindF32>(format, from, {{{from, from, from, from}}, 0}, kv.head_dim, space.keys);
    const F32 scales = has_scales(kv.format) ? load(kv.key_scales + scale_element(kv, block, head, offset)) : set1(1.0f);
    for (i32 d = 0; d < kv.head_dim; ++d, to += 2 * CHUNK_RUNS) {
        const F32 keys = load(reinterpret_cast<const float*>(space.keys) + d * RUN) * scales;
        const bool has_nan = bits(is_nan(keys)) != 0;
        to[run % CHUNK_RUNS] = has_nan ? -__builtin_inff() : -max_lanes(zero() - keys);
        to[CHUNK_RUNS + run % CHUNK_RUNS] = has_nan ? __builtin_inff() : max_lanes(keys);
    }
}

QUIRE_INLINE float* bounds_at(const AttentionJob& job, const KeyBounds& bounds, i32 chunk, i32 head) {
    return bounds.layers[job.layer] + (static_cast<i64>(chunk) * job.kv.kv_heads + head) * job.kv.head_dim * 2 * CHUNK_RUNS;
}

// Write the bounds of the runs that have become full, and wait for all threads.
static void bound_new_runs(Worker& worker, const AttentionJob& job, const Batch& batch, Space& space) {
    i64 item = 0;
    for (i32 sequence = 0; sequence < batch.num_sequences; ++sequence) {
        const KeyBounds& bounds = job.bounds[sequence];
        if (bounds.layers == nullptr) continue;
        const i32* blocks = batch.block_tables + sequence * batch.table_stride;
        for (i32 chunk = bounds.num_known / CHUNK_RUNS; chunk * CHUNK_RUNS < bounds.num_runs; ++chunk)
            for (i32 head = 0; head < job.kv.kv_heads; ++head) {
                if (item++ % worker.size != worker.rank) continue;
                const i32 end = smaller(bounds.num_runs, (chunk + 1) * CHUNK_RUNS);
                for (i32 run = larger(bounds.num_known, chunk * CHUNK_RUNS); run < end; ++run)
                    bound_run(job, blocks, run, head, space, bounds_at(job, bounds, chunk, head));
            }
    }
    barrier(worker);
}

// Products of a row with keys, or bounds of them, as the softmax compares them.
QUIRE_INLINE F32 finished_scores(const AttentionJob& job, F32 products) {
    const F32 scores = products * set1(job.scale), cap = set1(job.softcap);
    return job.softcap == 0.0f ? scores : tanh(scores / cap) * cap;
}

// Find for each row the highest score in the runs that it reads in any case.
template <class Kind>
static void find_floors(const AttentionJob& job, const Shape& shape, Tile tile, Space& space) {
    tile.following = nullptr;
    const i32 last = (space.spans[tile.num_rows - 1].end - 1) / RUN;
    for (int row = 0; row < MAX_ROWS; ++row) space.floors[row] = LOWEST;
    for (i32 run = 0; run <= last; run = run == 0 ? larger(1, (space.spans[0].end - 1) / RUN - 1) : run + 1) {
        Chunk chunk;
        const i32 place = run % CHUNK_RUNS;
        chunk.start = (run - place) * RUN;
        chunk.runs = {place, place + 1};
        find_runs(job, tile, (run + 1) * RUN, chunk);
        score_chunk<Kind>(job, shape, tile, chunk, space);
        for (int row = 0; row < tile.num_rows; ++row) {
            const i32 end = space.spans[row].end;
            if (end <= run * RUN || (run > 0 && run < (end - 1) / RUN - 1)) continue;
            F32 products = load(space.scores + row * SCORE_STRIDE + place * RUN);
            if (has_scales(job.kv.format)) products = products * load(chunk.key_scales[place]);
            const F32 scores = select(first_lanes(end - run * RUN), finished_scores(job, products), set1(LOWEST));
            const float highest = max_lanes(scores);
            if (highest > space.floors[row]) space.floors[row] = highest;
        }
    }
}

// Find the runs of a chunk that each row skips, and those that no row reads; false: all of them.
template <class Kind>
static bool find_skips(const AttentionJob& job, const Shape& shape, const Tile& tile, Space& space, Chunk& chunk) {
    if (tile.bounds == nullptr) return true;
    const i32 dim = job.kv.head_dim;
    const float* const bounds = bounds_at(job, *tile.bounds, chunk.start / CHUNK, tile.kv_head);
    u32 looked = 0;
    chunk.skipped = (1u << CHUNK_RUNS) - 1;
    for (int row = 0; row < tile.num_rows; ++row) {
        const i32 end = space.spans[row].end, far = larger(0, end - NEAR_TOKENS) / RUN - chunk.start / RUN;
        u32 runs = end > tile.bounds->first && far > 0 ? (1u << smaller(far, CHUNK_RUNS)) - 1 : 0;
        if (chunk.start == 0) runs &= ~1u;
        if (row == 0) looked = runs;
        if (runs != 0) {
            F32 highest = zero();
            const u8* q = space.q + row * shape.q_stride;
            for (i32 d = 0; d < dim; ++d) {
                float value;
                if constexpr (Kind::is_bf16) {
                    const u32 word = static_cast<u32>(reinterpret_cast<const u16*>(q)[d]) << 16;
                    __builtin_memcpy(&value, &word, 4);
                } else {
                    value = reinterpret_cast<const float*>(q)[d];
                }
                highest = fma(set1(value), load(bounds + d * 2 * CHUNK_RUNS + (value > 0.0f ? CHUNK_RUNS : 0)), highest);
            }
            runs &= bits(finished_scores(job, highest) < set1(space.floors[row] - tile.bounds->gap));
        }
        space.skipped[row] = runs;
        chunk.skipped &= runs;
    }
    __atomic_fetch_add(job.run_counts, __builtin_popcount(looked), __ATOMIC_RELAXED);
    __atomic_fetch_add(job.run_counts + 1, __builtin_popcount(chunk.skipped), __ATOMIC_RELAXED);
    const i32 read = next_read(chunk, chunk.runs).begin;
    if (read >= chunk.runs.end) return false;
    // What is not read is not prefetched either.
    for (i32 run = chunk.runs.begin; run < CHUNK_RUNS + GROUP; ++run) {
        if (run < chunk.runs.end && !(chunk.skipped >> run & 1)) continue;
        chunk.keys[run] = chunk.keys[read];
        if (run < CHUNK_RUNS) chunk.values[run] = chunk.values[read];
    }
    return true;
}

template <class Kind>
static void attend_chunk(const AttentionJob& job, const Shape& shape, const Tile& tile, i32 index, Space& space,
                         const Partial& out) {
    Chunk chunk;
    chunk.start = index * CHUNK;
    chunk.runs = runs_of(space, 0, tile.num_rows - 1, chunk.start);
    find_runs(job, tile, space.spans[tile.num_rows - 1].end, chunk);
    clear(shape, tile, out);
    if (!find_skips<Kind>(job, shape, tile, space, chunk)) {
        for (int row = 0; row < tile.num_rows; ++row) out.max[row] = LOWEST, out.sum[row] = 0.0f;
        return;
    }
    score_chunk<Kind>(job, shape, tile, chunk, space);
    weigh_rows<Kind>(job, tile, chunk, space, out, 0, tile.num_rows);
    sum_chunk<Kind>(job, shape, tile, chunk, space, out);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
