// The keys that an indexer chooses for each token of a step (IndexerSpec), and the memory in which they are gathered.
#pragma once
#include <vector>

#include "attention.h"
#include "native_weight.h"

namespace quire {

// Pieces whose keys are gathered at once.
constexpr i32 GATHERED_PIECES = 8;

// Consecutive rows of a sequence that attend to all tokens up to themselves, at most top_k, or one row that attends to the chosen
// ones of the tokens that it sees. These are the first ones up to itself, or, of a row in a draft tree, those before the tree and
// its ancestors.
struct KeyPiece {
    i32 sequence = 0, first_row = 0;
    i32 num_seen = 0;
    bool is_alone = false;
    i32 tree_start = 0;
    u64 ancestors = 0;

    // The position of the seen token of an index.
    i32 position(i32 index) const;
    // Tokens up to the last one that is seen.
    i32 end() const { return num_seen == 0 ? 0 : position(num_seen - 1) + 1; }
};

// All rows of a step as pieces, in order. Each is a sequence of a batch whose caches are gathered: what a row chooses, and its
// result, depend on its own sequence up to itself only.
struct KeyChoice {
    i32 top_k = 0, row_size = 0;  // 0: the plan has no indexer
    bool is_shared = false;       // further layers attend to what one has chosen: it is kept for all pieces
    std::vector<KeyPiece> pieces;

    // Find the pieces of a batch, whose addresses must stay valid during the step.
    void take(const Batch& batch);
    // Reserve the memory for pieces of this cache format.
    void reserve(KvFormat format);
    i32 num_pieces() const { return static_cast<i32>(pieces.size()); }
    // Whether a piece has more tokens than it may attend to.
    bool is_choosing(i32 piece) const { return pieces[piece].num_seen > top_k; }
    // Pieces [first, first + count) as a batch of the gathered cache, count at most GATHERED_PIECES.
    Batch batch(i32 first, i32 count) const;
    KvLayer gathered(KvFormat format) const;
    // Of the place-th of the pieces that are gathered, scores of its tokens by position; of a piece, the positions of those that
    // it attends to.
    float* scores(i32 place) const { return scores_ + static_cast<i64>(place) * max_end_; }
    i32* tokens(i32 piece) const {
        return tokens_ + static_cast<i64>(is_shared ? piece : piece % GATHERED_PIECES) * num_runs_ * RUN;
    }
    i32 max_end() const { return max_end_; }
    i32 num_runs() const { return num_runs_; }
    i32 num_tokens(i32 piece) const { return lengths_[piece]; }
    // Write the positions of the tokens that a piece of one row attends to, in ascending order: the top_k of the highest scores,
    // of equal ones those of lower positions; a NaN is the highest. Only one thread may call it for a place.
    void choose(i32 piece, i32 place) const;
    i64 num_bytes() const { return memory_.bytes; }

private:
    void add(const KeyPiece& piece, i32 length, i32 num_drafts, i32 end_row);

    std::vector<i32> starts_, lengths_, drafts_, tables_;
    bool has_trees_ = false;
    const u64* ancestors_ = nullptr;
    i32 num_runs_ = 0, max_end_ = 0;
    Memory memory_{0};
    u8* keys_ = nullptr;
    float* scores_ = nullptr;
    u32* order_ = nullptr;
    i32* tokens_ = nullptr;
};

}  // namespace quire
