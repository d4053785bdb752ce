#include "key_choice.h"

#include <string.h>

#include <algorithm>
#include <functional>

namespace quire {

namespace {

// A number that is as high as a float is, with NaN of either sign above all.
u32 rank_of(float x) {
    if (x != x) return ~u32{0};
    u32 bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits ^ (bits >> 31 ? ~u32{0} : u32{1} << 31);
}

}  // namespace

i32 KeyPiece::position(i32 index) const {
    if (ancestors == 0 || index < tree_start) return index;
    u64 left = ancestors;
    for (i32 i = tree_start; i < index; ++i) left &= left - 1;
    return tree_start + __builtin_ctzll(left);
}

void KeyChoice::add(const KeyPiece& piece, i32 length, i32 num_drafts, i32 end_row) {
    pieces.push_back(piece);
    lengths_.push_back(length);
    drafts_.push_back(num_drafts);
    starts_.push_back(end_row);
    num_runs_ = std::max(num_runs_, (length + RUN - 1) / RUN);
    if (piece.is_alone && piece.num_seen > top_k) max_end_ = std::max(max_end_, (piece.end() + RUN - 1) / RUN * RUN);
}

void KeyChoice::take(const Batch& batch) {
    pieces.clear();
    lengths_.clear();
    drafts_.clear();
    starts_.assign(1, 0);
    num_runs_ = max_end_ = 0;
    has_trees_ = batch.num_drafts != nullptr;
    ancestors_ = batch.ancestors;
    for (i32 s = 0; s < batch.num_sequences; ++s) {
        const i32 begin = batch.query_starts[s], end = batch.query_starts[s + 1], length = batch.context_lens[s];
        const i32 num_drafts = has_trees_ ? batch.num_drafts[s] : 0, tree_start = length - num_drafts;
        if (length <= top_k) {
            add({s, begin, length, false, 0, 0}, length, num_drafts, end);
            continue;
        }
        // Rows of a tree, the last ones, attend to tokens of their own.
        const i32 first = length - (end - begin);  // the position of the first row
        const i32 num_plain = std::max(0, std::min(end - begin, tree_start - first));
        const i32 num_whole = std::max(0, std::min(num_plain, top_k - first));
        if (num_whole > 0) add({s, begin, first + num_whole, false, 0, 0}, first + num_whole, 0, begin + num_whole);
        for (i32 row = begin + num_whole; row < end; ++row) {
            KeyPiece piece = {s, row, first + row - begin + 1, true, 0, 0};
            if (row >= begin + num_plain) {
                piece.tree_start = tree_start;
                piece.ancestors = batch.ancestors[row];
                piece.num_seen = tree_start + __builtin_popcountll(piece.ancestors);
            }
            add(piece, std::min(piece.num_seen, top_k), 0, row + 1);
        }
    }
}

void KeyChoice::reserve(KvFormat format) {
    const i64 places = std::min(num_pieces(), GATHERED_PIECES), tokens = places * num_runs_ * RUN;
    const i64 cache_bytes = (bytes_of(format, tokens * row_size) + 127) / 128 * 128,
              score_bytes = (places * max_end_ * 4 + 127) / 128 * 128;
    const i64 num_bytes = cache_bytes + 2 * score_bytes + (is_shared ? num_pieces() : places) * num_runs_ * RUN * 4;
    if (num_bytes > memory_.bytes) {
        memory_ = Memory(0);
        memory_ = Memory(num_bytes);
    }
    keys_ = memory_.data;
    scores_ = reinterpret_cast<float*>(keys_ + cache_bytes);
    order_ = reinterpret_cast<u32*>(keys_ + cache_bytes + score_bytes);
    tokens_ = reinterpret_cast<i32*>(keys_ + cache_bytes + 2 * score_bytes);
    tables_.resize(static_cast<size_t>(places) * num_runs_);
    for (size_t i = 0; i < tables_.size(); ++i) tables_[i] = static_cast<i32>(i);
}

Batch KeyChoice::batch(i32 first, i32 count) const {
    Batch found;
    found.num_sequences = count;
    found.num_tokens = starts_[first + count] - starts_[first];
    found.query_starts = starts_.data() + first;
    found.context_lens = lengths_.data() + first;
    found.block_tables = tables_.data();
    found.table_stride = num_runs_;
    found.num_drafts = has_trees_ ? drafts_.data() + first : nullptr;
    found.ancestors = ancestors_;
    return found;
}

KvLayer KeyChoice::gathered(KvFormat format) const { return {format, RUN, 1, row_size, keys_, keys_, nullptr, nullptr}; }

void KeyChoice::choose(i32 piece, i32 place) const {
    const KeyPiece& own = pieces[piece];
    i32* const to = tokens(piece);
    i32 num_found = 0;
    if (!is_choosing(piece)) {
        for (i32 i = 0; i < own.num_seen; ++i) to[i] = own.position(i);
        return;
    }
    const float* const values = scores(place);
    u32* const order = order_ + static_cast<i64>(place) * max_end_;
    for (i32 i = 0; i < own.num_seen; ++i) order[i] = rank_of(values[own.position(i)]);
    std::nth_element(order, order + top_k - 1, order + own.num_seen, std::greater<u32>());
    const u32 least = order[top_k - 1];
    i32 num_equal = top_k - static_cast<i32>(std::count_if(order, order + top_k, [&](u32 rank) { return rank > least; }));
    for (i32 i = 0; i < own.num_seen; ++i) {
        const i32 position = own.position(i);
        const u32 rank = rank_of(values[position]);
        if (rank > least || (rank == least && num_equal-- > 0)) to[num_found++] = position;
    }
}

}  // namespace quire
