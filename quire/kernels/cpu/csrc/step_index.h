// Attention to the keys that an indexer chooses, within a step: see KeyIndexer in plan.h.
#pragma once
#include "step_experts.h"

namespace quire {

// Tokens whose scores are one item of work.
constexpr i32 SCORED_TOKENS = 1024;

struct StepIndex : StepExperts {
    float* index_heads(i64 row) const { return plan.index_heads_ + row * row_stride(plan.index_heads_size_); }
    float* index_key(i64 row) const { return plan.index_keys_ + row * row_stride(plan.index_size_); }
    float* index_weights(i64 row) const { return plan.index_weights_ + row * row_stride(plan.index_num_heads_); }

    // Rotate the first values of heads of `size` values by a row's position.
    void turn_first(const PlanLayer& l, float* heads, i32 count, i32 size, bool is_interleaved, i64 position) const {
        if (l.rope < 0) return;
        if (is_interleaved) kernels.elementwise->split_pairs(heads, count, size, l.latent.rope);
        const Plan::Angles& a = plan.angles_[l.rope];
        kernels.elementwise->turn_heads(
            nullptr, heads, count, size, a.cosine + position * a.half, a.sine + position * a.half, a.half);
    }

    // Norm and rotate what a row's indexer projects.
    void finish_index(const PlanLayer& l, i64 row) const {
        const KeyIndexer& indexer = l.latent.indexer;
        const i64 position = in.positions[row];
        turn_first(l, index_heads(row), indexer.num_heads, indexer.head_dim, indexer.is_interleaved, position);
        kernels.elementwise->norm(indexer.k_norm.job, index_key(row), index_key(row));
        turn_first(l, index_key(row), 1, indexer.head_dim, indexer.is_interleaved, position);
        kernels.elementwise->scale_and_cap(
            index_weights(row), indexer.num_heads, 1.0f / std::sqrt(static_cast<float>(indexer.num_heads)), 0.0f);
    }

    // Attention of all rows, piece after piece; ends with a barrier of the team. Without an indexer, to what the last one has
    // chosen.
    void attend_chosen(AttentionJob a, const PlanLayer& l) {
        const KeyChoice& choice = plan.choice_;
        const IndexedKv kv = l.indexed_kv();
        a.kv = choice.gathered(kv.format);
        for (i32 first = 0; first < choice.num_pieces(); first += GATHERED_PIECES) {
            const i32 count = std::min(GATHERED_PIECES, choice.num_pieces() - first);
            const i64 parts = ceil_div(choice.max_end(), SCORED_TOKENS);
            if (parts > 0 && l.has_indexer())
                each(count * parts, [&](i64 item) {
                    score_part(l, kv, first, static_cast<i32>(item / parts), static_cast<i32>(item % parts) * SCORED_TOKENS);
                });
            if (l.has_indexer())
                each(count, [&](i64 place) {
                    if (choice.pieces[first + place].is_alone)
                        choice.choose(first + static_cast<i32>(place), static_cast<i32>(place));
                });
            each(static_cast<i64>(count) * choice.num_runs(), [&](i64 item) {
                const i32 place = static_cast<i32>(item / choice.num_runs()),
                          token = static_cast<i32>(item % choice.num_runs()) * RUN;
                const i32 left = choice.num_tokens(first + place) - token;
                if (left <= 0) return;
                const KeyPiece& piece = choice.pieces[first + place];
                kernels.attention->gather(kv, blocks_of(piece), piece.is_alone ? choice.tokens(first + place) + token : nullptr,
                    token, std::min(left, RUN), a.kv, item);
            });
            kernels.attention->attend(worker, a, choice.batch(first, count));
        }
    }

private:
    const i32* blocks_of(const KeyPiece& piece) const { return in.batch.block_tables + piece.sequence * in.batch.table_stride; }

    void score_part(const PlanLayer& l, const IndexedKv& kv, i32 first, i32 place, i32 token) const {
        const KeyPiece& piece = plan.choice_.pieces[first + place];
        if (!plan.choice_.is_choosing(first + place) || !piece.is_alone || token >= piece.end()) return;
        const KeyIndexer& indexer = l.latent.indexer;
        const float scale = 1.0f / std::sqrt(static_cast<float>(indexer.head_dim));
        const IndexQuery query = {
            indexer.num_heads, scale, index_heads(piece.first_row), index_weights(piece.first_row), blocks_of(piece)};
        kernels.attention->score_keys(kv, query, token, std::min(piece.end(), token + SCORED_TOKENS), plan.choice_.scores(place));
    }
};

}  // namespace quire
