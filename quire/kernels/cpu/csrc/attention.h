// Attention over the paged cache, and the cache's layout.
#pragma once
#include "team.h"

namespace quire {

// One layer's keys or values: blocks of block_size tokens (a multiple of 16), in a block the heads one after the other, in a head
// runs of 16 tokens. The runs are laid out for the kernels, not as [token][dim]:
//   keys    bf16 [D / 2][16][2]   f32 [D][16]    i8, f8 [D][16]   r4 [D / 2][16]
//   values  bf16 [8][D][2]        f32 [16][D]    i8, f8 [16][D]   r4 [16][D / 2]    (bf16: pairs of tokens)
// i8, f8 (e4m3): value = scale * code. r4: rotated values = scale * level of code, see attention_rotation.inl, D at most MAX_ROTATED_DIM; a byte holds
// the codes of two dims, the first in its low half: of keys d and d + 1, of values d and d + D / 2. k8v4: keys of i8, values of r4.
// All of these have one f32 scale per token and head in key_scales / value_scales [num_blocks][kv_heads][block_size].
// D is even. Where a token's row is both its key and its value (latent attention), it is stored once, as a key: values are then keys, and
// value_scales key_scales. The format is not k8v4.
enum class KvFormat : i32 { bf16 = 0, f32 = 1, i8 = 2, r4 = 3, k8v4 = 4, f8 = 5 };
constexpr i32 MAX_ROTATED_DIM = 2048;

static inline KvFormat key_format(KvFormat format) { return format == KvFormat::k8v4 ? KvFormat::i8 : format; }
static inline KvFormat value_format(KvFormat format) { return format == KvFormat::k8v4 ? KvFormat::r4 : format; }
static inline bool has_scales(KvFormat format) { return format != KvFormat::bf16 && format != KvFormat::f32; }

struct KvLayer {
    KvFormat format = KvFormat::bf16;
    i32 block_size = 16, kv_heads = 1, head_dim = 2;
    void* keys = nullptr;
    void* values = nullptr;
    float* key_scales = nullptr;
    float* value_scales = nullptr;

    bool is_joined() const { return values == keys; }
};

// Tokens of a run.
constexpr int RUN = 16;

// Bytes of elements of keys or of values, a whole number of runs or tokens of them.
static inline i64 bytes_of(KvFormat format, i64 elements) {
    return format == KvFormat::r4 ? elements / 2 : elements * (format == KvFormat::bf16 ? 2 : format == KvFormat::f32 ? 4 : 1);
}

// The first element of the run that holds the token at `offset` of a block.
static inline i64 run_element(const KvLayer& kv, i64 block, i32 head, i32 offset) {
    return ((block * kv.kv_heads + head) * kv.block_size + offset / RUN * RUN) * kv.head_dim;
}

// Positions of the tokens of one step: sequence s owns rows [query_starts[s], query_starts[s + 1]) of q and the cached tokens
// [0, context_lens[s]), of which its rows are the last. block_tables [num_sequences][table_stride].
//
// num_drafts null: attention is causal. Otherwise the last num_drafts[s] cached tokens of s, at most 64, form a draft tree, whose last
// tokens are rows: bit i of ancestors[row] is set if draft i is an ancestor of that row or the row itself; rows outside of a tree have 0.
// The position of a draft follows from the number of its ancestors, not from its slot.
struct Batch {
    i32 num_sequences = 0;
    i32 num_tokens = 0;
    const i32* query_starts = nullptr;
    const i32* context_lens = nullptr;
    const i32* block_tables = nullptr;
    i64 table_stride = 0;
    const i32* num_drafts = nullptr;
    const u64* ancestors = nullptr;  // [num_tokens]
};

// Bounds of the keys of one sequence, by which its rows skip runs, see attention_bounds.inl: those from position `first` on do not read runs,
// but for the first one and those of the last NEAR_TOKENS, whose scores are all more than `gap` below the row's highest.
// layers: null: it reads all; else for each layer [chunk of 16 runs][kv_heads][head_dim][2: least, greatest][16 runs] f32. Runs
// [0, num_known) are there; those up to num_runs, all but the last NEAR_TOKENS tokens, are written when the layer is computed.
struct KeyBounds {
    i32 first = 0;
    float gap = 0.0f;
    i32 num_known = 0, num_runs = 0;
    float* const* layers = nullptr;
};
constexpr i32 NEAR_TOKENS = 64;  // no more drafts follow a known token: what has bounds is not written again

// is_bf16: q, keys, values and the softmax's weights are rounded to bf16 before they are multiplied; otherwise all is f32.
// window 0: none; else a token sees itself and the window - 1 tokens before. softcap 0: none. sinks [num_heads] or null: attention
// sinks, a logit per head that is only added to the softmax's denominator. slopes [num_heads] or null: what a score loses for each token
// between query and key (ALiBi). value_dim 0: values are as large as keys; else a value is the first value_dim numbers of its row, and so
// is what a head gives. first_value: the values before it are not asked for; not of r4.
struct AttentionJob {
    KvLayer kv;
    i32 num_heads = 1;
    float scale = 1.0f;
    i32 window = 0;
    float softcap = 0.0f;
    const float *sinks = nullptr, *slopes = nullptr;
    i32 value_dim = 0;
    bool is_bf16 = true;
    i32 first_value = 0;
    const KeyBounds* bounds = nullptr;  // [num_sequences], or null: all read everything, as with a window
    i32 layer = 0;                      // of the bounds
    i64* run_counts = nullptr;          // with bounds: runs of a kv head that might be skipped, and that were
    const float* q = nullptr;  // [num_tokens][num_heads * head_dim] f32
    i64 q_stride = 0;
    float* out = nullptr;  // [num_tokens][num_heads * value_size()] f32
    i64 out_stride = 0;
    u8* scratch = nullptr;  // scratch_bytes(...) bytes, 64-aligned, shared by the team

    i32 value_size() const { return value_dim > 0 ? value_dim : kv.head_dim; }
};

// Of a rank that holds the keys and values of some chunks of every sequence, see attention_context.inl. The block tables of the batch
// have the rank's own blocks, and any of them where another rank has the block; block_tables, of the same shape, say who has it:
// block b is block b % num_local_blocks of the rank at place b / num_local_blocks. The blocks of a chunk are on one rank.
constexpr i32 CONTEXT_CHUNK = 256;  // tokens of a chunk
struct ContextJob {
    int place = 0, size = 1;
    i32 num_local_blocks = 1;
    const i32* block_tables = nullptr;
    u8* buffers[2] = {nullptr, nullptr};  // of buffer_bytes each, 64-aligned, which all these ranks map
    i64 buffer_bytes = 0;                 // at least those of context_bytes; the same on all ranks
    // Wait for all ranks, and record `count` times `width` floats, `stride` apart, that were written; called by thread 0.
    void (*meet)(void* argument) = nullptr;
    void (*wrote)(void* argument, float* first, i64 count, i64 stride, i64 width) = nullptr;
    void* argument = nullptr;
};

// The cache of a layer whose queries attend to the keys that an indexer chooses (IndexerSpec): a row for each token, both key and value
// [num_blocks][block_size][row_size], and the indexer's keys, which lie as those of a KvLayer with one head. format: of both, bf16 or
// f32. The sizes are even.
struct IndexedKv {
    KvFormat format = KvFormat::bf16;
    i32 block_size = 16, row_size = 2, key_size = 2;
    void *rows = nullptr, *keys = nullptr;
};
constexpr i32 MAX_INDEX_SIZE = 512;  // of the indexer's keys

// What the indexer asks of a token's keys, in the blocks of its sequence: the score of a key is the sum over heads of
// weight * max(0, scale * q.k).
struct IndexQuery {
    i32 num_heads = 0;
    float scale = 1.0f;
    const float *heads = nullptr, *weights = nullptr;  // [num_heads][key_size], [num_heads]
    const i32* blocks = nullptr;
};

struct AttentionTable {
    i64 (*scratch_bytes)(const AttentionJob& job, const Batch& batch, int num_threads);
    // Called by every thread; ends with a barrier: then out is complete.
    void (*attend)(Worker& worker, const AttentionJob& job, const Batch& batch);
    // The bytes of a buffer of ContextJob, at most `limit` if a tile fits into that.
    i64 (*context_bytes)(const AttentionJob& job, const Batch& batch, i64 limit);
    // As attend, with keys on several ranks; job.heads are those of all of them. Other ranks have written parts of out before they come
    // to the next barrier of the ranks. No sequence may have a draft tree.
    void (*attend_context)(Worker& worker, const AttentionJob& job, const Batch& batch, const ContextJob& context);
    // Write key and value heads [first_head, first_head + num_heads) of one token ([num_heads * head_dim] f32 each) into
    // slot = block * block_size + offset. Of a joined cache the values are not read.
    void (*store)(const KvLayer& kv, i64 slot, i32 first_head, i32 num_heads, const float* keys, const float* values);
    // Copy keys and values of one token, all heads, to another slot.
    void (*move)(const KvLayer& kv, i64 from, i64 to);
    // The same of an indexed cache: a row and a key of one token.
    void (*store_indexed)(const IndexedKv& kv, i64 slot, const float* row, const float* key);
    void (*move_indexed)(const IndexedKv& kv, i64 from, i64 to);
    // Write the scores of the tokens [first, last), first a multiple of RUN; scores has room for whole runs. A score does not depend on
    // first and last.
    void (*score_keys)(const IndexedKv& kv, const IndexQuery& query, i32 first, i32 last, float* scores);
    // Write the rows of `count` tokens, at most RUN, as run `run` of a joined cache of one head: `tokens` of the blocks of a sequence, or those
    // from `first` on where that is null.
    void (*gather)(const IndexedKv& kv, const i32* blocks, const i32* tokens, i32 first, i32 count, const KvLayer& to, i64 run);
};

}  // namespace quire
