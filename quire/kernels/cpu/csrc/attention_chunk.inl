// One chunk of one tile: scores, softmax and sums, from the cache to a partial result. Included by attention.inl.
#pragma once
#include "attention_runs.inl"

namespace quire::QUIRE_ISA {
namespace {

constexpr int PATH_RUNS = 5;   // that 64 drafts and the tokens before them in a run can touch
constexpr int MAX_HEADS = 32;  // query heads of a tile; more heads of one kv head make more tiles

// The chunk's, or the whole, softmax of a tile's rows: the sum of weights * values is `values` / `sum`.
struct Partial {
    float* max;     // [MAX_ROWS]
    float* sum;     // [MAX_ROWS]
    float* values;  // [rows][padded head_dim]
};

// One thread's memory.
struct Space {
    u8* q;
    float* scores;
    u8* keys;    // GROUP runs, converted
    u8* values;  // GROUP runs, converted
    u8* seen;    // GROUP runs, with zeros where a row does not see
    float* merge;
    Span* spans;  // [MAX_ROWS]: the cached tokens that a row sees
    float* floors;  // [MAX_ROWS], see find_floors
    u32* skipped;   // [MAX_ROWS]: the runs of a chunk that a row skips, a bit each
    u8* path;     // PATH_RUNS runs of keys or values, and then their scales: see attention_tree.inl
    Partial chunk, total;
    bool is_tree;  // rows are those of a tree: what they see does not grow from row to row
};

// Sizes that follow from a job.
struct Shape {
    i32 padded_dim;   // head_dim in whole vectors
    i64 q_stride;     // bytes of a row of q in scratch
    i64 value_stride;  // bytes of a step of converted values
    i64 partial_bytes, space_bytes;
    i32 group, slices, units;  // query heads per kv head, slices of those, kv_heads * slices
};

// Bytes of a run of keys or of values, whichever takes more.
QUIRE_INLINE i64 path_run_bytes(const KvLayer& kv) {
    const i64 elements = static_cast<i64>(RUN) * kv.head_dim, keys = bytes_of(key_format(kv.format), elements);
    const i64 values = bytes_of(value_format(kv.format), elements);
    return keys > values ? keys : values;
}

static Shape shape_of(const AttentionJob& job) {
    Shape shape;
    const i64 padded = round_up(job.kv.head_dim, 16);
    shape.padded_dim = static_cast<i32>(padded);
    shape.q_stride = padded * (job.is_bf16 ? 2 : 4) + 64;
    shape.value_stride = padded * 4;
    shape.partial_bytes = (2 * MAX_ROWS + MAX_ROWS * padded) * 4;
    const i64 run_bytes = RUN * padded * (job.is_bf16 ? 2 : 4);
    shape.space_bytes = MAX_ROWS * (shape.q_stride + SCORE_STRIDE * 4) + 3 * GROUP * run_bytes + 2 * shape.partial_bytes +
                        4 * MAX_ROWS * 4 + MAX_ROWS * static_cast<i64>(sizeof(Span)) +
                        PATH_RUNS * (path_run_bytes(job.kv) + RUN * 2 * 4);
    shape.space_bytes = round_up(shape.space_bytes, 128);
    shape.group = job.num_heads / job.kv.kv_heads;
    shape.slices = (shape.group + MAX_HEADS - 1) / MAX_HEADS;
    shape.units = job.kv.kv_heads * shape.slices;
    return shape;
}

QUIRE_INLINE Partial partial_at(u8* memory) {
    float* numbers = reinterpret_cast<float*>(memory);
    return {numbers, numbers + MAX_ROWS, numbers + 2 * MAX_ROWS};
}

static Space space_at(u8* memory, const AttentionJob& job, const Shape& shape) {
    const i64 run_bytes = GROUP * RUN * static_cast<i64>(shape.padded_dim) * (job.is_bf16 ? 2 : 4);
    Space space;
    auto take = [&memory](i64 bytes) {
        u8* taken = memory;
        memory += bytes;
        return taken;
    };
    space.keys = take(run_bytes);
    space.values = take(run_bytes);
    space.seen = take(run_bytes);
    space.scores = reinterpret_cast<float*>(take(MAX_ROWS * SCORE_STRIDE * 4));
    space.chunk = partial_at(take(shape.partial_bytes));
    space.total = partial_at(take(shape.partial_bytes));
    space.merge = reinterpret_cast<float*>(take(2 * MAX_ROWS * 4));
    space.q = take(MAX_ROWS * shape.q_stride);
    space.spans = reinterpret_cast<Span*>(take(MAX_ROWS * static_cast<i64>(sizeof(Span))));
    space.floors = reinterpret_cast<float*>(take(MAX_ROWS * 4));
    space.skipped = reinterpret_cast<u32*>(take(MAX_ROWS * 4));
    space.path = memory;
    space.is_tree = false;
    return space;
}

// Consecutive tokens of one sequence with some of the query heads of one kv head. Row r is token r / num_heads, head r % num_heads.
struct Tile {
    const i32* blocks;
    i64 first_token;  // row of q
    i32 num_rows, num_heads, kv_head, first_head;
    Span chunks;      // chunks that any row sees
    // Null unless its sequence has a tree: the ancestors of each token, and the position of draft 0.
    const u64* ancestors;
    i32 tree_start;
    i32 begin;                // the first position that any row sees
    const Ahead* following;   // the first keys of what this thread does next, to be fetched, or null
    const KeyBounds* bounds;  // null unless some of its rows may skip runs
};

// The end of the tokens that a token sees; for a draft, its ancestors count as if they were consecutive.
QUIRE_INLINE i32 seen_end(const Tile& tile, i32 position, i32 token) {
    const i32 end = position + token + 1;
    return tile.ancestors == nullptr ? end : smaller(end, tile.tree_start) + __builtin_popcountll(tile.ancestors[token]);
}

// One chunk of a tile: where its runs are. Tokens and runs count from the chunk's start.
struct Chunk {
    i32 start;  // position of its first token
    Span runs;  // that any row sees
    u32 skipped = 0;  // those that no row reads, a bit each
    const u8* keys[CHUNK_RUNS + GROUP];  // and the first ones of the next chunk, to be fetched
    const u8* values[CHUNK_RUNS];
    const float* key_scales[CHUNK_RUNS];
    const float* value_scales[CHUNK_RUNS];
};

// The first runs of a span that are read, one after the other; empty: there are none.
QUIRE_INLINE Span next_read(const Chunk& chunk, Span left) {
    if (chunk.skipped == 0) return left;
    while (left.begin < left.end && (chunk.skipped >> left.begin & 1)) ++left.begin;
    Span found = {left.begin, left.begin};
    while (found.end < left.end && !(chunk.skipped >> found.end & 1)) ++found.end;
    return found;
}

QUIRE_INLINE Span seen_in_chunk(Span span, i32 start) {
    const Span seen = {larger(span.begin - start, 0), smaller(span.end - start, CHUNK)};
    return seen.begin < seen.end ? seen : Span{0, 0};
}

// What any of rows [first, last] sees, from its first token to its last.
QUIRE_INLINE Span seen_by_any(const Space& space, int first, int last) {
    // Later rows never see less of the end nor more of the start.
    Span seen = {space.spans[first].begin, space.spans[last].end};
    if (!space.is_tree) return seen;
    for (int row = first; row <= last; ++row) {
        seen.begin = smaller(seen.begin, space.spans[row].begin);
        seen.end = larger(seen.end, space.spans[row].end);
    }
    return seen;
}

// What each of `count` rows sees.
QUIRE_INLINE Span seen_by_all(const Space& space, int count) {
    Span seen = {space.spans[count - 1].begin, space.spans[0].end};
    if (!space.is_tree) return seen;
    for (int row = 0; row < count; ++row) {
        seen.begin = larger(seen.begin, space.spans[row].begin);
        seen.end = smaller(seen.end, space.spans[row].end);
    }
    return seen;
}

// The runs of rows [first, last] in a chunk.
QUIRE_INLINE Span runs_of(const Space& space, int first, int last, i32 start) {
    const Span seen = seen_in_chunk(seen_by_any(space, first, last), start);
    return {seen.begin / RUN, (seen.end + RUN - 1) / RUN};
}

// `end`: the first token that no row of the tile sees.
static void find_runs(const AttentionJob& job, const Tile& tile, i32 end, Chunk& chunk) {
    const KvLayer& kv = job.kv;
    const KvFormat key = key_format(kv.format), value = value_format(kv.format);
    const i32 stop = smaller((end - chunk.start + RUN - 1) / RUN, CHUNK_RUNS + GROUP);
    for (i32 run = chunk.runs.begin; run < stop; ++run) {
        const i32 token = chunk.start + run * RUN, offset = token % kv.block_size;
        const i64 block = tile.blocks[token / kv.block_size];
        const i64 element = run_element(kv, block, tile.kv_head, offset), scale = scale_element(kv, block, tile.kv_head, offset);
        chunk.keys[run] = static_cast<const u8*>(kv.keys) + bytes_of(key, element);
        if (run >= CHUNK_RUNS) continue;
        chunk.values[run] = static_cast<const u8*>(kv.values) + bytes_of(value, element);
        chunk.key_scales[run] = has_scales(kv.format) ? kv.key_scales + scale : nullptr;
        chunk.value_scales[run] = has_scales(kv.format) ? kv.value_scales + scale : nullptr;
    }
    for (i32 run = stop; run < CHUNK_RUNS + GROUP; ++run) chunk.keys[run] = chunk.keys[stop - 1];
    if (stop > CHUNK_RUNS || tile.following == nullptr) return;
    for (i32 i = 0; i < GROUP; ++i) chunk.keys[CHUNK_RUNS + i] = tile.following->runs[i];
}

// Round q to Kind's numbers, with zeros past head_dim, and find what each row sees.
template <class Kind>
static void prepare_rows(const AttentionJob& job, const Shape& shape, const Tile& tile, i32 position, Space& space) {
    const i32 dim = job.kv.head_dim;
    space.is_tree = tile.ancestors != nullptr;
    for (int row = 0; row < tile.num_rows; ++row) {
        const i32 token = row / tile.num_heads, head = tile.first_head + row % tile.num_heads;
        const float* q = job.q + (tile.first_token + token) * job.q_stride + static_cast<i64>(head) * dim;
        u8* to = space.q + row * shape.q_stride;
        alignas(64) float rotated[MAX_ROTATED_DIM];
        if (key_format(job.kv.format) == KvFormat::r4) {
            rotate_vector(dim, q, rotated);
            q = rotated;
        }
        for (i32 d = 0; d < dim; d += 16) {
            const F32 x = load(q + d, first_lanes(dim - d));
            if constexpr (Kind::is_bf16)
                store_bf16(reinterpret_cast<u16*>(to) + d, x);
            else
                store(reinterpret_cast<float*>(to) + d, x);
        }
        const i32 end = seen_end(tile, position, token);
        space.spans[row] = {job.window > 0 ? larger(0, end - job.window) : 0, end};
    }
}

// The runs of one group that rows [first, first + count) see, and the product's rows.
QUIRE_INLINE Span group_runs(const Space& space, const Chunk& chunk, int group, int first, int count) {
    const Span runs = runs_of(space, first, first + count - 1, chunk.start);
    return {larger(larger(runs.begin, chunk.runs.begin), group * GROUP), smaller(smaller(runs.end, chunk.runs.end), (group + 1) * GROUP)};
}

// The runs of a group, `runs` being those of a chunk; in place of runs that are not in `span`, the nearest one.
QUIRE_INLINE Ahead ahead_at(const u8* const* runs, Span span, int group) {
    Ahead ahead;
    for (int i = 0; i < GROUP; ++i) ahead.runs[i] = runs[larger(span.begin, smaller(group * GROUP + i, span.end - 1))];
    return ahead;
}

// What is read after the keys, or the values, of a group: the next group, then the values, then the next chunk's keys.
QUIRE_INLINE Ahead after_keys(const Chunk& chunk, int group) {
    const bool is_last = (group + 1) * GROUP >= chunk.runs.end;
    return is_last ? ahead_at(chunk.values, chunk.runs, chunk.runs.begin / GROUP) : ahead_at(chunk.keys, chunk.runs, group + 1);
}
QUIRE_INLINE Ahead after_values(const Chunk& chunk, int group) {
    const bool is_last = (group + 1) * GROUP >= chunk.runs.end;
    return is_last ? ahead_at(chunk.keys, {CHUNK_RUNS, CHUNK_RUNS + GROUP}, CHUNK_RUNS / GROUP)
                   : ahead_at(chunk.values, chunk.runs, group + 1);
}

template <class Kind>
static void score_chunk(const AttentionJob& job, const Shape& shape, const Tile& tile, const Chunk& chunk, Space& space) {
    const i32 dim = job.kv.head_dim;
    const bool is_converted = job.kv.format != Kind::format;
    const i64 run_bytes = static_cast<i64>(RUN) * dim * 4 / Kind::units;
    for (int group = chunk.runs.begin / GROUP; group * GROUP < chunk.runs.end; ++group) {
        const u8* keys[GROUP] = {};
        for (int i = 0; i < GROUP; ++i) {
            const int run = group * GROUP + i;
            if (run < chunk.runs.begin || run >= chunk.runs.end || (chunk.skipped >> run & 1)) continue;
            keys[i] = chunk.keys[run];
            if (!is_converted) continue;
            keys[i] = space.keys + i * run_bytes;
            convert_keys<Kind>(key_format(job.kv.format), chunk.keys[run], {after_keys(chunk, group), i}, dim, space.keys + i * run_bytes);
        }
        for (int row = 0; row < tile.num_rows; row += TILE_ROWS) {
            const int count = smaller(TILE_ROWS, tile.num_rows - row);
            const Span all = group_runs(space, chunk, group, row, count);
            for (Span runs = next_read(chunk, all); runs.begin < runs.end; runs = next_read(chunk, {runs.end, all.end})) {
                Product product = {};
                product.num_runs = runs.end - runs.begin;
                for (int i = 0; i < product.num_runs; ++i) product.runs[i] = keys[runs.begin - group * GROUP + i];
                product.ahead = ahead_at(product.runs, {0, product.num_runs}, 0);
                const bool is_fetching = row == 0 && !is_converted;
                if (is_fetching) product.ahead = after_keys(chunk, group);
                product.steps = dim / Kind::units;
                product.rows = space.q + row * shape.q_stride;
                product.row_stride = shape.q_stride;
                product.out = space.scores + row * SCORE_STRIDE + runs.begin * RUN;
                product.out_stride = SCORE_STRIDE;
                score_rows<Kind>(product, count);
                if (is_fetching) fetch_rest_of_scores(product);
            }
        }
    }
}

// Compute the softmax of rows [begin, end).
template <class Kind>
static void weigh_rows(const AttentionJob& job, const Tile& tile, const Chunk& chunk, Space& space, const Partial& out, int begin,
                       int end) {
    for (int row = begin; row < end; ++row) {
        const int first = row / TILE_ROWS * TILE_ROWS, last = smaller(first + TILE_ROWS, tile.num_rows) - 1;
        SoftmaxRow softmax = {space.scores + row * SCORE_STRIDE, seen_in_chunk(space.spans[row], chunk.start),
                              runs_of(space, first, last, chunk.start), LOWEST, 0.0f, tile.bounds == nullptr ? 0 : space.skipped[row],
                              job.slopes == nullptr ? 0.0f : job.slopes[tile.first_head + row % tile.num_heads],
                              space.spans[row].end - 1 - chunk.start};
        if (has_scales(job.kv.format))
            softmax_row<Kind, true>(job, softmax, chunk.key_scales, chunk.value_scales);
        else
            softmax_row<Kind, false>(job, softmax, nullptr, nullptr);
        out.max[row] = softmax.max;
        out.sum[row] = softmax.sum;
    }
}

// Compute the sums of one row at a time, for values that are not finite and that some rows do not see: 0 * NaN must not reach a row.
template <class Kind>
static void sum_apart(const Space& space, const Shape& shape, Product product, int row, int count, i32 token) {
    for (int r = 0; r < count; ++r) {
        Product alone = product;
        alone.rows += r * product.row_stride;
        alone.out += r * product.out_stride;
        for (int i = 0; i < product.num_runs; ++i) {
            const i32 start = token + i * RUN;
            const Span seen = {space.spans[row + r].begin - start, space.spans[row + r].end - start};
            u8* copy = space.seen + i * Kind::run_steps * shape.value_stride;
            copy_seen<Kind>(product.runs[i], shape.value_stride, seen, copy);
            alone.runs[i] = copy;
        }
        sum_rows<Kind>(alone, 1);
    }
}

template <class Kind>
QUIRE_INLINE bool is_values_converted(const AttentionJob& job, const Shape& shape) {
    return job.kv.format != Kind::format || job.kv.head_dim != shape.padded_dim || job.kv.is_joined();
}

// A run of values of the cache into one of Kind. keys: memory for a run of keys.
template <class Kind>
static void convert_run(const KvLayer& kv, const u8* from, const AheadOfRun& next, u8* keys, u8* to) {
    if (!kv.is_joined()) return convert_values<Kind>(value_format(kv.format), from, next, kv.head_dim, to);
    if (kv.format == Kind::format) return turn_keys<Kind>(from, &next, kv.head_dim, to);
    convert_keys<Kind>(kv.format, from, next, kv.head_dim, keys);
    turn_keys<Kind>(keys, nullptr, kv.head_dim, to);
}

// The values of a group of runs as Kind holds them, and whether each is free of NaN and infinities or wholly seen by every row.
struct GroupValues {
    const u8* runs[GROUP];
    bool is_clean[GROUP];
};

template <class Kind>
static GroupValues group_values(const AttentionJob& job, const Shape& shape, const Tile& tile, const Chunk& chunk,
                                const Space& space, int group) {
    const Span by_all = seen_by_all(space, tile.num_rows);
    const bool is_converted = is_values_converted<Kind>(job, shape);
    GroupValues values = {};
    for (int i = 0; i < GROUP; ++i) {
        const int run = group * GROUP + i;
        if (run < chunk.runs.begin || run >= chunk.runs.end || (chunk.skipped >> run & 1)) continue;
        values.runs[i] = chunk.values[run];
        if (is_converted) {
            u8* copy = space.values + i * Kind::run_steps * shape.value_stride;
            convert_run<Kind>(job.kv, chunk.values[run], {after_values(chunk, group), i}, space.keys, copy);
            values.runs[i] = copy;
        }
        values.is_clean[i] =
            holds_run(by_all, chunk.start + run * RUN) || is_finite_run<Kind>(values.runs[i], shape.value_stride);
    }
    return values;
}

// Add the weighted values to `out`.
template <class Kind>
static void sum_chunk(const AttentionJob& job, const Shape& shape, const Tile& tile, const Chunk& chunk, const Space& space,
                      const Partial& out) {
    const bool is_converted = is_values_converted<Kind>(job, shape);
    for (int group = chunk.runs.begin / GROUP; group * GROUP < chunk.runs.end; ++group) {
        const GroupValues values = group_values<Kind>(job, shape, tile, chunk, space, group);
        for (int row = 0; row < tile.num_rows; row += TILE_ROWS) {
            const int count = smaller(TILE_ROWS, tile.num_rows - row);
            const Span all = group_runs(space, chunk, group, row, count);
            for (Span runs = next_read(chunk, all); runs.begin < runs.end; runs = next_read(chunk, {runs.end, all.end})) {
                Product product = {};
                bool is_clean = true;
                product.num_runs = runs.end - runs.begin;
                for (int i = 0; i < product.num_runs; ++i) {
                    product.runs[i] = values.runs[runs.begin - group * GROUP + i];
                    is_clean &= values.is_clean[runs.begin - group * GROUP + i];
                }
                product.ahead = ahead_at(product.runs, {0, product.num_runs}, 0);
                const bool is_fetching = row == 0 && !is_converted;
                if (is_fetching) product.ahead = after_values(chunk, group);
                product.run_stride = shape.value_stride;
                product.first = job.first_value / 16 * 64;
                product.rows = reinterpret_cast<const u8*>(space.scores + row * SCORE_STRIDE) + runs.begin * Kind::run_steps * 4;
                product.row_stride = SCORE_STRIDE * 4;
                product.out = out.values + static_cast<i64>(row) * shape.padded_dim;
                product.out_stride = shape.padded_dim;
                if (is_fetching) fetch_rest_of_sums<Kind>(product, count);
                if (is_clean)
                    sum_rows<Kind>(product, count);
                else
                    sum_apart<Kind>(space, shape, product, row, count, chunk.start + runs.begin * RUN);
            }
        }
    }
}

static void clear(const Shape& shape, const Tile& tile, const Partial& out) {
    for (int row = tile.num_rows; row < MAX_ROWS; ++row) out.max[row] = LOWEST, out.sum[row] = 0.0f;
    __builtin_memset(out.values, 0, static_cast<size_t>(tile.num_rows) * shape.padded_dim * 4);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
