// Rows of a draft tree against one chunk. Included by attention.inl.
// A draft attends to the same tokens as in a chain of its ancestors: in the runs from draft 0 on, its keys and values are gathered
// into the order of that chain. Its row is then the chain's, bit for bit. All rows share the earlier runs.
#pragma once
#include "attention_bounds.inl"

namespace quire::QUIRE_ISA {
namespace {

// The rows of one token of a tile.
struct Path {
    Tile tile;
    Space space;
    Partial out;
    Chunk chunk;  // runs: those from draft 0 on
    u64 ancestors;
};

// The first run, counted from a chunk's start, that rows do not share.
QUIRE_INLINE i32 first_path_run(const Tile& tile, i32 start) { return (tile.tree_start / RUN * RUN - start) / RUN; }

// `chunk` with the runs that all rows share.
static Path path_of(const Shape& shape, const Tile& tile, const Chunk& chunk, const Space& space, const Partial& out, int token) {
    const int row = token * tile.num_heads;
    Path path = {tile, space, {out.max + row, out.sum + row, out.values + static_cast<i64>(row) * shape.padded_dim}, chunk,
                 tile.ancestors[token]};
    path.tile.num_rows = tile.num_heads;
    path.space.q += row * shape.q_stride;
    path.space.scores += row * SCORE_STRIDE;
    path.space.spans += row;
    path.chunk.runs = runs_of(space, row, row, chunk.start);
    path.chunk.runs.begin = larger(path.chunk.runs.begin, first_path_run(tile, chunk.start));
    return path;
}

// The runs of a path in the cache, and the buffer in which they are gathered if its tokens are elsewhere.
struct PathRun {
    const u8* run;
    const float *key_scales, *value_scales;
    u8* copy;
    float *key_copy, *value_copy;
};

static PathRun path_run(const AttentionJob& job, const Path& path, i32 position, bool is_keys, i32 index) {
    const KvLayer& kv = job.kv;
    const KvFormat format = is_keys ? key_format(kv.format) : value_format(kv.format);
    const i64 run_bytes = path_run_bytes(kv);
    const i32 block = path.tile.blocks[position / kv.block_size], offset = position % kv.block_size;
    const i64 element = run_element(kv, block, path.tile.kv_head, offset / RUN * RUN);
    const i64 scale = scale_element(kv, block, path.tile.kv_head, offset / RUN * RUN);
    float* scales = reinterpret_cast<float*>(path.space.path + PATH_RUNS * run_bytes) + 2 * RUN * index;
    return {static_cast<const u8*>(is_keys ? kv.keys : kv.values) + bytes_of(format, element),
            has_scales(kv.format) ? kv.key_scales + scale : nullptr, has_scales(kv.format) ? kv.value_scales + scale : nullptr,
            path.space.path + run_bytes * index, scales, scales + RUN};
}

// Find the runs of keys, with the scales of both, or of values of a path.
static void gather_path(const AttentionJob& job, Path& path, bool is_keys) {
    const KvLayer& kv = job.kv;
    Chunk& chunk = path.chunk;
    const KvFormat format = is_keys ? key_format(kv.format) : value_format(kv.format);
    const auto copy_token = is_keys || kv.is_joined() ? copy_key : copy_value;
    const u8** runs = is_keys ? chunk.keys : chunk.values;
    u64 left = path.ancestors;
    i32 position = path.tile.tree_start;
    for (i32 run = chunk.runs.begin; run < chunk.runs.end; ++run) {
        const i32 first = chunk.start + run * RUN, stop = smaller(path.space.spans[0].end, first + RUN);
        PathRun place = path_run(job, path, first, is_keys, run - chunk.runs.begin);
        bool is_copied = false;
        for (; position < stop; ++position, left &= left - 1) {
            const i32 slot = path.tile.tree_start + __builtin_ctzll(left);
            if (position < first || slot == position) continue;
            if (!is_copied) {
                __builtin_memcpy(place.copy, place.run, static_cast<size_t>(bytes_of(format, static_cast<i64>(RUN) * kv.head_dim)));
                place.run = place.copy;
            }
            const PathRun source = path_run(job, path, slot, is_keys, 0);
            copy_token(format, kv.head_dim, source.run, slot % RUN, place.copy, position % RUN);
            if (has_scales(kv.format)) {
                if (!is_copied) {
                    __builtin_memcpy(place.key_copy, place.key_scales, RUN * 4);
                    __builtin_memcpy(place.value_copy, place.value_scales, RUN * 4);
                    place.key_scales = place.key_copy;
                    place.value_scales = place.value_copy;
                }
                place.key_copy[position % RUN] = source.key_scales[slot % RUN];
                place.value_copy[position % RUN] = source.value_scales[slot % RUN];
            }
            is_copied = true;
        }
        runs[run] = place.run;
        if (!is_keys) continue;
        chunk.values[run] = place.run;  // only prefetched, which is harmless
        chunk.key_scales[run] = place.key_scales;
        chunk.value_scales[run] = place.value_scales;
    }
    for (i32 run = CHUNK_RUNS; run < CHUNK_RUNS + GROUP; ++run) chunk.keys[run] = runs[chunk.runs.begin];
}

template <class Kind>
static void attend_tree_chunk(const AttentionJob& job, const Shape& shape, const Tile& tile, i32 index, Space& space,
                              const Partial& out) {
    Chunk chunk;
    chunk.start = index * CHUNK;
    chunk.runs = runs_of(space, 0, tile.num_rows - 1, chunk.start);
    chunk.runs.end = smaller(chunk.runs.end, first_path_run(tile, chunk.start));
    const bool is_shared = chunk.runs.begin < chunk.runs.end;
    if (is_shared) {
        find_runs(job, tile, tile.tree_start / RUN * RUN, chunk);
        score_chunk<Kind>(job, shape, tile, chunk, space);
    }
    const int num_tokens = tile.num_rows / tile.num_heads;
    for (int token = 0; token < num_tokens; ++token) {
        Path path = path_of(shape, tile, chunk, space, out, token);
        if (path.chunk.runs.begin < path.chunk.runs.end) {
            gather_path(job, path, true);
            score_chunk<Kind>(job, shape, path.tile, path.chunk, path.space);
        }
        weigh_rows<Kind>(job, tile, path.chunk, space, out, token * tile.num_heads, (token + 1) * tile.num_heads);
    }
    clear(shape, tile, out);
    if (is_shared) sum_chunk<Kind>(job, shape, tile, chunk, space, out);
    for (int token = 0; token < num_tokens; ++token) {
        Path path = path_of(shape, tile, chunk, space, out, token);
        if (path.chunk.runs.begin >= path.chunk.runs.end) continue;
        gather_path(job, path, false);
        sum_chunk<Kind>(job, shape, path.tile, path.chunk, path.space, path.out);
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
