// Attention over the paged cache: a step's rows are split into tiles and tiles into chunks, and the chunks' results are merged.
//
// The softmax of a row is computed in chunks of CHUNK cached tokens at absolute positions, and the chunks are merged in order. The
// result therefore does not depend on the thread that computes a chunk, nor on the other rows of the tile.
#pragma once
#include "attention_tree.inl"

namespace quire::QUIRE_ISA {
namespace {

static void reset(const Partial& total, i64 num_values) {
    for (int row = 0; row < MAX_ROWS; ++row) total.max[row] = LOWEST, total.sum[row] = 0.0f;
    __builtin_memset(total.values, 0, static_cast<size_t>(num_values) * 4);
}

// Merge `chunk` into `total`; both are rescaled to the higher maximum.
static void merge(const Partial& total, const Partial& chunk, int num_rows, i32 padded_dim, float* factors) {
    for (int row = 0; row < num_rows; row += 16) {
        const F32 before = load(total.max + row), now = load(chunk.max + row), highest = max(before, now);
        const F32 keep = exp_negative(before - highest), add = exp_negative(now - highest);
        store(total.max + row, highest);
        store(total.sum + row, fma(load(total.sum + row), keep, load(chunk.sum + row) * add));
        store(factors + row, keep);
        store(factors + MAX_ROWS + row, add);
    }
    for (int row = 0; row < num_rows; ++row) {
        const F32 keep = set1(factors[row]), add = set1(factors[MAX_ROWS + row]);
        float* to = total.values + static_cast<i64>(row) * padded_dim;
        const float* from = chunk.values + static_cast<i64>(row) * padded_dim;
        for (i32 d = 0; d < padded_dim; d += 16) store(to + d, fma(load(to + d), keep, load(from + d) * add));
    }
}

// Add the sinks to the sums, divide, and write the tile's rows of out.
static void finish(const AttentionJob& job, const Shape& shape, const Tile& tile, const Partial& total, float* factors) {
    const i32 dim = job.value_size();
    const bool is_rotated = value_format(job.kv.format) == KvFormat::r4;
    alignas(64) float whole[MAX_ROTATED_DIM];
    for (int row = 0; row < MAX_ROWS; ++row) factors[row] = 1.0f;
    if (job.sinks != nullptr) {
        for (int row = 0; row < MAX_ROWS; ++row) factors[row] = job.sinks[tile.first_head + row % tile.num_heads];
        for (int row = 0; row < tile.num_rows; row += 16) {
            const F32 sink = load(factors + row), highest = max(load(total.max + row), sink);
            const F32 keep = exp_negative(load(total.max + row) - highest);
            store(total.sum + row, fma(load(total.sum + row), keep, exp_negative(sink - highest)));
            store(factors + row, keep);
        }
    }
    for (int row = 0; row < tile.num_rows; ++row) {
        const i32 token = row / tile.num_heads, head = tile.first_head + row % tile.num_heads;
        const F32 keep = set1(factors[row]), sum = set1(total.sum[row]);
        const float* from = total.values + static_cast<i64>(row) * shape.padded_dim;
        float* to = job.out + (tile.first_token + token) * job.out_stride + static_cast<i64>(head) * dim;
        float* const values = is_rotated ? whole : to;
        const i32 size = is_rotated ? job.kv.head_dim : dim;
        for (i32 d = 0; d < size; d += 16) store(values + d, load(from + d) * keep / sum, first_lanes(size - d));
        if (!is_rotated) continue;
        rotate_back(size, values);
        __builtin_memcpy(to, values, static_cast<size_t>(dim) * 4);
    }
}

// How the rows of one sequence are cut: for each unit (some heads of a kv head) tiles of rows, for each tile parts of its chunks.
struct Share {
    i32 tile_tokens, num_tiles, chunks, parts;  // chunks: at most so many in a tile
    i64 cost;                                   // of a tile
    i64 items;
    i64 partial_bytes;  // 0 unless tiles are cut in parts
};

// target: a tile that costs more is cut in parts; 0: none is.
static Share share_of(const AttentionJob& job, const Shape& shape, const Batch& batch, i32 sequence, i64 target) {
    const i32 num_tokens = batch.query_starts[sequence + 1] - batch.query_starts[sequence];
    const i32 heads = smaller(shape.group, MAX_HEADS);
    Share share;
    share.tile_tokens = larger(1, smaller(num_tokens, MAX_ROWS / heads));
    share.num_tiles = (num_tokens + share.tile_tokens - 1) / share.tile_tokens;
    // The range of positions that the tokens of a tile may span.
    const i32 spread = share.tile_tokens + (batch.num_drafts == nullptr ? 0 : batch.num_drafts[sequence]);
    i32 seen = batch.context_lens[sequence];
    share.chunks = (seen + CHUNK - 1) / CHUNK;
    if (job.window > 0 && job.window < seen - spread) {
        seen = job.window + spread - 1;
        share.chunks = smaller(share.chunks, (seen + CHUNK - 2) / CHUNK + 1);
    }
    // A row costs its products; that the tile's keys and values are read costs as much as some rows.
    share.cost = static_cast<i64>(seen) * (share.tile_tokens * heads + 8);
    const i64 parts = target > 0 ? (share.cost + target - 1) / target : 1;
    share.parts = larger(1, parts < share.chunks ? static_cast<i32>(parts) : share.chunks);
    share.items = static_cast<i64>(shape.units) * share.num_tiles * share.parts;
    share.partial_bytes = share.parts > 1 ? share.items / share.parts * share.chunks * shape.partial_bytes : 0;
    return share;
}

// The cost above which a tile would keep the other threads waiting.
static i64 target_cost(const AttentionJob& job, const Shape& shape, const Batch& batch, int num_threads) {
    if (num_threads == 1) return 0;
    i64 total = 0;
    for (i32 sequence = 0; sequence < batch.num_sequences; ++sequence) {
        const Share share = share_of(job, shape, batch, sequence, 0);
        total += share.cost * share.items;
    }
    return total / (4 * num_threads) + 1;
}

// A thread takes its next item early while more items than this are left for each thread.
constexpr i64 RESERVED_ITEMS = 4;

// A step's work, which every thread goes through in order.
struct Work {
    const AttentionJob* job;
    const Batch* batch;
    Shape shape;
    i64 target;
    i64 items, cut_tiles, partial_bytes;  // of all sequences; cut_tiles: tiles that are done in parts
};

static Work work_of(const AttentionJob& job, const Batch& batch, int num_threads) {
    Work work = {&job, &batch, shape_of(job), 0, 0, 0, 0};
    work.target = target_cost(job, work.shape, batch, num_threads);
    for (i32 sequence = 0; sequence < batch.num_sequences; ++sequence) {
        const Share share = share_of(job, work.shape, batch, sequence, work.target);
        work.items += share.items;
        work.cut_tiles += share.parts > 1 ? share.items / share.parts : 0;
        work.partial_bytes += share.partial_bytes;
    }
    return work;
}

// The sequence that holds an item. Items may only be sought in rising order.
struct SequenceCursor {
    const Work* work;
    i32 sequence;
    Share share;
    i64 first_item;
    u8* partials;
    bool is_merging;  // items are tiles that were cut, not their parts

    i64 items() const { return !is_merging ? share.items : share.parts > 1 ? share.items / share.parts : 0; }
    void enter() { share = share_of(*work->job, work->shape, *work->batch, sequence, work->target); }
    void seek(i64 item) {
        while (item >= first_item + items()) {
            first_item += items();
            partials += share.partial_bytes;
            ++sequence;
            enter();
        }
    }
};

static SequenceCursor cursor_of(const Work& work, u8* partials, bool is_merging) {
    SequenceCursor cursor = {&work, 0, {}, 0, partials, is_merging};
    if (work.batch->num_sequences > 0) cursor.enter();
    return cursor;
}

// The tile at `place`, the last tokens first: they see most, and the end of a step shall not wait for a long one.
static Tile tile_at(const SequenceCursor& cursor, i64 place, i32& position) {
    const AttentionJob& job = *cursor.work->job;
    const Batch& batch = *cursor.work->batch;
    const Shape& shape = cursor.work->shape;
    const i32 unit = static_cast<i32>(place / cursor.share.num_tiles);
    const i32 index = cursor.share.num_tiles - 1 - static_cast<i32>(place % cursor.share.num_tiles);
    const i32 start = batch.query_starts[cursor.sequence], stop = batch.query_starts[cursor.sequence + 1];
    const i32 first = start + index * cursor.share.tile_tokens, last = smaller(first + cursor.share.tile_tokens, stop);
    const i32 slice = unit % shape.slices * MAX_HEADS;
    Tile tile;
    tile.blocks = batch.block_tables + cursor.sequence * batch.table_stride;
    tile.first_token = first;
    tile.kv_head = unit / shape.slices;
    tile.first_head = tile.kv_head * shape.group + slice;
    tile.num_heads = smaller(MAX_HEADS, shape.group - slice);
    tile.num_rows = (last - first) * tile.num_heads;
    const i32 num_drafts = batch.num_drafts == nullptr ? 0 : batch.num_drafts[cursor.sequence];
    tile.ancestors = num_drafts == 0 ? nullptr : batch.ancestors + first;
    tile.tree_start = batch.context_lens[cursor.sequence] - num_drafts;
    position = batch.context_lens[cursor.sequence] - (stop - first);
    i32 least = position + 1, end = position + last - first;
    if (tile.ancestors != nullptr) {
        least = end = seen_end(tile, position, 0);
        for (i32 token = 1; token < last - first; ++token) {
            least = smaller(least, seen_end(tile, position, token));
            end = larger(end, seen_end(tile, position, token));
        }
    }
    tile.begin = job.window > 0 ? larger(0, least - job.window) : 0;
    tile.chunks = {tile.begin / CHUNK, (end + CHUNK - 1) / CHUNK};
    tile.following = nullptr;
    tile.bounds = job.bounds == nullptr || tile.ancestors != nullptr ? nullptr : job.bounds + cursor.sequence;
    if (tile.bounds != nullptr && (tile.bounds->layers == nullptr || end <= tile.bounds->first || end < NEAR_TOKENS + 2 * RUN)) tile.bounds = nullptr;
    return tile;
}

// The chunks of a tile that a part of it takes.
static Span part_of(const SequenceCursor& cursor, const Tile& tile, i64 item) {
    const int part = static_cast<int>((item - cursor.first_item) % cursor.share.parts);
    const i32 count = tile.chunks.end - tile.chunks.begin;
    return {static_cast<i32>(share_start(count, part, cursor.share.parts)), static_cast<i32>(share_start(count, part + 1, cursor.share.parts))};
}

// The keys that an item reads first.
static Ahead first_keys(const SequenceCursor& cursor, i64 item) {
    const KvLayer& kv = cursor.work->job->kv;
    i32 position;
    const Tile tile = tile_at(cursor, (item - cursor.first_item) / cursor.share.parts, position);
    const i32 first = larger(tile.begin / RUN * RUN, (tile.chunks.begin + part_of(cursor, tile, item).begin) * CHUNK);
    const i32 length = cursor.work->batch->context_lens[cursor.sequence];
    Ahead ahead;
    for (i32 i = 0; i < GROUP; ++i) {
        const i32 token = smaller(first + i * RUN, (length - 1) / RUN * RUN);
        const i64 element = run_element(kv, tile.blocks[token / kv.block_size], tile.kv_head, token % kv.block_size);
        ahead.runs[i] = static_cast<const u8*>(kv.keys) + bytes_of(key_format(kv.format), element);
    }
    return ahead;
}

QUIRE_INLINE Partial partial_of(const SequenceCursor& cursor, i64 place, i32 chunk) {
    return partial_at(cursor.partials + (place * cursor.share.chunks + chunk) * cursor.work->shape.partial_bytes);
}

template <class Kind>
static void attend_chunk_of(const AttentionJob& job, const Shape& shape, const Tile& tile, i32 index, Space& space,
                            const Partial& out) {
    if (tile.ancestors == nullptr)
        attend_chunk<Kind>(job, shape, tile, index, space, out);
    else
        attend_tree_chunk<Kind>(job, shape, tile, index, space, out);
}

// A whole tile, or a part of its chunks into partial results.
template <class Kind>
static void attend_item(const SequenceCursor& cursor, i64 item, Space& space, const Ahead* following) {
    const AttentionJob& job = *cursor.work->job;
    const Shape& shape = cursor.work->shape;
    const i64 place = (item - cursor.first_item) / cursor.share.parts;
    i32 position;
    Tile tile = tile_at(cursor, place, position);
    tile.following = following;
    const auto [begin, end] = part_of(cursor, tile, item);
    if (begin == end) return;
    prepare_rows<Kind>(job, shape, tile, position, space);
    if (tile.bounds != nullptr) find_floors<Kind>(job, shape, tile, space);
    if (cursor.share.parts > 1) {
        for (i32 chunk = begin; chunk < end; ++chunk)
            attend_chunk_of<Kind>(job, shape, tile, tile.chunks.begin + chunk, space, partial_of(cursor, place, chunk));
        return;
    }
    reset(space.total, static_cast<i64>(tile.num_rows) * shape.padded_dim);
    for (i32 chunk = begin; chunk < end; ++chunk) {
        attend_chunk_of<Kind>(job, shape, tile, tile.chunks.begin + chunk, space, space.chunk);
        merge(space.total, space.chunk, tile.num_rows, shape.padded_dim, space.merge);
    }
    finish(job, shape, tile, space.total, space.merge);
}

static void merge_item(const SequenceCursor& cursor, i64 item, Space& space) {
    const Shape& shape = cursor.work->shape;
    const i64 place = item - cursor.first_item;
    i32 position;
    const Tile tile = tile_at(cursor, place, position);
    reset(space.total, static_cast<i64>(tile.num_rows) * shape.padded_dim);
    for (i32 chunk = 0; chunk < tile.chunks.end - tile.chunks.begin; ++chunk)
        merge(space.total, partial_of(cursor, place, chunk), tile.num_rows, shape.padded_dim, space.merge);
    finish(*cursor.work->job, shape, tile, space.total, space.merge);
}

static i64 scratch_bytes(const AttentionJob& job, const Batch& batch, int num_threads) {
    // A team may be smaller than requested; then fewer tiles are split, and less memory is needed.
    const Work work = work_of(job, batch, num_threads);
    return work.shape.space_bytes * num_threads + work.partial_bytes;
}

static void attend(Worker& worker, const AttentionJob& job, const Batch& batch) {
    const Work work = work_of(job, batch, worker.size);
    Space space = space_at(job.scratch + worker.rank * work.shape.space_bytes, job, work.shape);
    u8* partials = job.scratch + worker.size * work.shape.space_bytes;
    if (job.bounds != nullptr) bound_new_runs(worker, job, batch, space);
    SequenceCursor cursor = cursor_of(work, partials, false);
    SequenceCursor before = cursor;
    for (i64 item = next(worker, work.items, 1), then; item < work.items; item = then) {
        // Near the end no thread takes an item early: another thread might be idle.
        const bool is_known = item + RESERVED_ITEMS * worker.size < work.items;
        then = is_known ? next(worker, work.items, 1) : work.items;
        Ahead ahead;
        const bool has_ahead = then < work.items;
        if (has_ahead) {
            before.seek(then);
            ahead = first_keys(before, then);
        }
        cursor.seek(item);
        if (job.is_bf16)
            attend_item<KindBf16>(cursor, item, space, has_ahead ? &ahead : nullptr);
        else
            attend_item<KindF32>(cursor, item, space, has_ahead ? &ahead : nullptr);
        if (!is_known) then = next(worker, work.items, 1);
    }
    barrier(worker);
    if (work.cut_tiles == 0) return;
    cursor = cursor_of(work, partials, true);
    for (i64 item; (item = next(worker, work.cut_tiles, 1)) < work.cut_tiles;) {
        cursor.seek(item);
        merge_item(cursor, item, space);
    }
    barrier(worker);
}

}  // namespace
}  // namespace quire::QUIRE_ISA

#include "attention_context.inl"
#include "attention_index.inl"

namespace quire::QUIRE_ISA {

extern const AttentionTable attention_table = {scratch_bytes, attend, context_bytes, attend_context, store_token, move_token, store_indexed, move_indexed, score_keys, gather_run};

}  // namespace quire::QUIRE_ISA
