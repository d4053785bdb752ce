// Attention over keys that several ranks hold (decode context parallelism). Included by attention.inl.
//
// Each chunk of cached tokens is on one rank. A rank computes the partial results of its chunks into memory that all ranks map, and
// after a barrier of the ranks each of them merges all chunks of some tiles, in the order of their positions, as one rank does. So the
// bits do not depend on the number of ranks. Tiles that do not fit into the buffer together are computed in rounds.
#pragma once
#include "attention_bounds.inl"

namespace quire::QUIRE_ISA {
namespace {

static_assert(CHUNK == CONTEXT_CHUNK);

// A place in the list of the tiles of a step, and where the partial results of its chunks are in the buffer of its round.
struct TileCursor {
    SequenceCursor outer;
    i64 place = 0;   // of the tile in its sequence
    i64 offset = 0;  // in the buffer

    i64 num_tiles() const { return outer.share.items / outer.share.parts; }
    bool is_end() const { return outer.sequence >= outer.work->batch->num_sequences; }
    i64 chunk_bytes() const {
        const i64 rows = static_cast<i64>(outer.share.tile_tokens) * smaller(outer.work->shape.group, MAX_HEADS);
        return (2 * MAX_ROWS + rows * outer.work->shape.padded_dim) * 4;
    }
    i64 tile_bytes() const { return outer.share.chunks * chunk_bytes(); }
    Partial partial(u8* buffer, i32 chunk) const { return partial_at(buffer + offset + chunk * chunk_bytes()); }
    void advance() {
        offset += tile_bytes();
        if (++place < num_tiles()) return;
        place = 0;
        do {
            if (++outer.sequence >= outer.work->batch->num_sequences) return;
            outer.enter();
        } while (num_tiles() == 0);
    }
};

static Work context_work(const AttentionJob& job, const Batch& batch) { return {&job, &batch, shape_of(job), 0, 0, 0, 0}; }

static TileCursor first_tile(const Work& work) {
    TileCursor cursor = {cursor_of(work, nullptr, false)};
    while (!cursor.is_end() && cursor.num_tiles() == 0)
        if (++cursor.outer.sequence < work.batch->num_sequences) cursor.outer.enter();
    return cursor;
}

// The bytes of one of the two buffers: those of all tiles, at most `limit`, but at least those of the largest tile.
static i64 context_bytes(const AttentionJob& job, const Batch& batch, i64 limit) {
    const Work work = context_work(job, batch);
    i64 all = 0, most = 0;
    for (TileCursor cursor = first_tile(work); !cursor.is_end();) {
        const i64 bytes = cursor.tile_bytes(), count = cursor.num_tiles();
        all += bytes * count;
        most = bytes > most ? bytes : most;
        cursor.place = count - 1;
        cursor.advance();
    }
    all = all < limit ? all : limit;
    return all > most ? all : most;
}

// The first tile of the next round, which starts at the front of the other buffer.
static TileCursor end_of_round(TileCursor cursor, i64 buffer_bytes) {
    while (!cursor.is_end() && cursor.offset + cursor.tile_bytes() <= buffer_bytes) cursor.advance();
    return cursor;
}

static bool is_before(const TileCursor& a, const TileCursor& b) {
    return a.outer.sequence < b.outer.sequence || (a.outer.sequence == b.outer.sequence && a.place < b.place);
}

// The chunks of a round's tiles that this rank holds, into the buffer.
template <class Kind>
static void attend_own_chunks(Worker& worker, const AttentionJob& job, const ContextJob& context, TileCursor cursor, const TileCursor& end,
                              u8* buffer, Space& space) {
    i64 count = 0;
    for (TileCursor at = cursor; is_before(at, end); at.advance()) count += at.outer.share.chunks;
    const Shape& shape = cursor.outer.work->shape;
    const Batch& batch = *cursor.outer.work->batch;
    i64 item = 0, claimed = next(worker, count, 1);
    for (; is_before(cursor, end) && claimed < count; cursor.advance()) {
        const i32 chunks = cursor.outer.share.chunks;
        if (claimed >= item + chunks) {
            item += chunks;
            continue;
        }
        i32 position;
        const Tile tile = tile_at(cursor.outer, cursor.place, position);
        const i32* owners = context.block_tables + cursor.outer.sequence * batch.table_stride;
        bool is_prepared = false;
        for (i32 chunk = 0; chunk < chunks; ++chunk, ++item) {
            if (item != claimed) continue;
            claimed = next(worker, count, 1);
            const i32 index = tile.chunks.begin + chunk;
            if (index >= tile.chunks.end || owners[index * (CHUNK / job.kv.block_size)] / context.num_local_blocks != context.place) continue;
            if (!is_prepared) prepare_rows<Kind>(job, shape, tile, position, space);
            is_prepared = true;
            attend_chunk<Kind>(job, shape, tile, index, space, cursor.partial(buffer, chunk));
        }
    }
}

// Tell what this rank has written of a round, in the same order as it is computed.
static void tell_own_chunks(const AttentionJob& job, const ContextJob& context, TileCursor cursor, const TileCursor& end, u8* buffer) {
    const Shape& shape = cursor.outer.work->shape;
    const Batch& batch = *cursor.outer.work->batch;
    for (; is_before(cursor, end); cursor.advance()) {
        i32 position;
        const Tile tile = tile_at(cursor.outer, cursor.place, position);
        const i32* owners = context.block_tables + cursor.outer.sequence * batch.table_stride;
        for (i32 index = tile.chunks.begin; index < tile.chunks.end; ++index)
            if (owners[index * (CHUNK / job.kv.block_size)] / context.num_local_blocks == context.place)
                context.wrote(context.argument, cursor.partial(buffer, index - tile.chunks.begin).max, 1, 0,
                              2 * MAX_ROWS + static_cast<i64>(tile.num_rows) * shape.padded_dim);
    }
}

// Merge the chunks of those tiles of a round that are this rank's.
static void merge_tiles(Worker& worker, const AttentionJob& job, const ContextJob& context, TileCursor cursor, const TileCursor& end,
                        u8* buffer, Space& space) {
    const Shape& shape = cursor.outer.work->shape;
    i64 count = 0;
    for (TileCursor at = cursor; is_before(at, end); at.advance()) ++count;
    i64 claimed = next(worker, count, 1);
    for (i64 item = 0; item < count && claimed < count; ++item, cursor.advance()) {
        if (item != claimed) continue;
        claimed = next(worker, count, 1);
        if (item % context.size != context.place) continue;
        i32 position;
        const Tile tile = tile_at(cursor.outer, cursor.place, position);
        reset(space.total, static_cast<i64>(tile.num_rows) * shape.padded_dim);
        for (i32 chunk = 0; chunk < tile.chunks.end - tile.chunks.begin; ++chunk)
            merge(space.total, cursor.partial(buffer, chunk), tile.num_rows, shape.padded_dim, space.merge);
        finish(job, shape, tile, space.total, space.merge);
    }
}

// Tell what merge_tiles has written.
static void tell_tiles(const AttentionJob& job, const ContextJob& context, TileCursor cursor, const TileCursor& end) {
    for (i64 item = 0; is_before(cursor, end); ++item, cursor.advance()) {
        if (item % context.size != context.place) continue;
        i32 position;
        const Tile tile = tile_at(cursor.outer, cursor.place, position);
        float* out = job.out + tile.first_token * job.out_stride + static_cast<i64>(tile.first_head) * job.value_size();
        context.wrote(context.argument, out, tile.num_rows / tile.num_heads, job.out_stride, static_cast<i64>(tile.num_heads) * job.value_size());
    }
}

static void attend_context(Worker& worker, const AttentionJob& job, const Batch& batch, const ContextJob& context) {
    const Work work = context_work(job, batch);
    Space space = space_at(job.scratch + worker.rank * work.shape.space_bytes, job, work.shape);
    int round = 0;
    for (TileCursor cursor = first_tile(work); !cursor.is_end(); ++round) {
        // A rank that still merges a round reads a buffer that no other rank writes before the barrier after the next round.
        u8* buffer = context.buffers[round % 2];
        cursor.offset = 0;
        const TileCursor end = end_of_round(cursor, context.buffer_bytes);
        if (job.is_bf16)
            attend_own_chunks<KindBf16>(worker, job, context, cursor, end, buffer, space);
        else
            attend_own_chunks<KindF32>(worker, job, context, cursor, end, buffer, space);
        barrier(worker);
        if (worker.rank == 0) {
            tell_own_chunks(job, context, cursor, end, buffer);
            context.meet(context.argument);
        }
        barrier(worker);
        merge_tiles(worker, job, context, cursor, end, buffer, space);
        barrier(worker);
        if (worker.rank == 0) tell_tiles(job, context, cursor, end);
        cursor = end;
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
