// Drafting by a plan: a step, and then as many as there are drafts, each behind what the last one said.
#include <string.h>

#include <algorithm>
#include <stdexcept>

#include "plan.h"

namespace quire {

namespace {

struct BestCall {
    const SamplerTable& table;
    const std::vector<SampleRow>& rows;
    i32 vocab;
    SampleResult* results;
    u8* scratch;
};

// Logits are multiplied with it: where two tokens are nearly as likely the greedy one may be either, but where one is twice as
// likely as the other it seldom is that one. Plain probabilities would say little; DRAFT_SHARPNESS in reference_head.py.
constexpr float SHARPNESS = 4.0f;

}  // namespace

void best_tokens(const Kernels& kernels, const float* logits, i64 stride, i32 num_rows, i32 vocab, int num_threads, i32* tokens) {
    // Kept from call to call: fresh pages cost as much as a row. One per calling thread.
    thread_local std::vector<SampleRow> rows;
    thread_local std::vector<SampleResult> results;
    thread_local std::vector<u8> scratch;
    const int size = std::max(1, std::min(num_threads, num_rows));
    rows.assign(num_rows, SampleRow());
    results.assign(num_rows, SampleResult());
    for (i32 i = 0; i < num_rows; ++i) rows[i].logits = logits + i * stride;
    const i64 num_bytes = size * kernels.sampler->scratch_bytes(vocab);
    if (static_cast<i64>(scratch.size()) < num_bytes) scratch.resize(num_bytes);
    BestCall call = {*kernels.sampler, rows, vocab, results.data(), scratch.data()};
    run_team(size, [](void* argument, Worker& worker) {
        const BestCall& c = *static_cast<BestCall*>(argument);
        c.table.sample(worker, c.rows.data(), static_cast<i32>(c.rows.size()), c.vocab, c.results, c.scratch);
    }, &call);
    for (i32 i = 0; i < num_rows; ++i) tokens[i] = results[i].status == SAMPLE_FINE ? results[i].token : -1;
}

void Plan::draft(const StepInput& first, const DraftRun& drafts) {
    const i32 count = first.batch.num_sequences, total = drafts.num_drafts, size = block_size();
    const bool needs_logits = drafts.least_share > 0 || !has_plain_logits();
    if (needs_logits) draft_logits_.resize(static_cast<size_t>(count) * vocab_);
    std::vector<float> features(entry_ == Entry::token ? 0 : static_cast<size_t>(count) * hidden_);
    std::vector<i64> tokens(count), positions(count), slots(count);
    std::vector<i32> starts(count + 1), lengths(count), rows(count), best(count);
    StepInput in = first;
    in.logits = needs_logits ? draft_logits_.data() : nullptr;
    in.best = needs_logits ? nullptr : best.data();
    in.num_wanted_rows = in.num_logit_rows = count;
    in.keeps_all = false;
    for (i32 s = 0; s < count; ++s) {
        starts[s + 1] = s + 1;
        rows[s] = first.batch.query_starts[s + 1] - 1;
        positions[s] = first.positions[rows[s]];
        lengths[s] = first.batch.context_lens[s];
    }
    in.wanted_rows = rows.data();
    std::vector<float> shares(count, 1.0f);
    std::vector<i32> num_kept(drafts.counts, drafts.counts + count);
    const auto is_done = [&](i32 made) {
        for (i32 s = 0; s < count; ++s) {
            if (made < num_kept[s]) return false;
        }
        return true;
    };
    for (i32 i = 0;; ++i) {
        step(in);
        if (needs_logits) best_tokens(*kernels_used, draft_logits_.data(), vocab_, count, vocab_, num_threads, best.data());
        for (i32 s = 0; s < count; ++s) {
            // A model that drafts may fail without harm: any token does as a draft.
            const i32 token = std::max(best[s], 0);
            tokens[s] = drafts.vocabulary == nullptr ? token : drafts.vocabulary[token];
            drafts.tokens[static_cast<i64>(s) * total + i] = tokens[s];
            if (drafts.least_share <= 0 || i >= num_kept[s]) continue;
            const float* logits = draft_logits_.data() + static_cast<i64>(s) * vocab_;
            shares[s] *= best[s] < 0 ? 0 : kernels_used->elementwise->share_of_largest(logits, vocab_, logits[best[s]], SHARPNESS);
            if (!(shares[s] >= drafts.least_share)) num_kept[s] = i;
        }
        if (is_done(i + 1)) break;
        if (entry_ != Entry::token) recycled(count, features.data());
        for (i32 s = 0; s < count; ++s) {
            // A sequence that has its drafts goes on in its last slot, until the others have theirs.
            if (i + 1 < drafts.counts[s]) {
                ++lengths[s];
                ++positions[s];
            }
            const i32 place = lengths[s] - 1;
            slots[s] = static_cast<i64>(first.batch.block_tables[s * first.batch.table_stride + place / size]) * size + place % size;
            rows[s] = s;
        }
        in.token_ids = tokens.data();
        in.positions = positions.data();
        in.slots = slots.data();
        in.batch.num_tokens = count;
        in.batch.query_starts = starts.data();
        in.batch.context_lens = lengths.data();
        in.features = features.data();
        in.feature_size = hidden_;
    }
    if (drafts.num_kept != nullptr) std::copy(num_kept.begin(), num_kept.end(), drafts.num_kept);
}

void Plan::recycled(i32 count, float* out) {
    if (recycles_normed_) {
        std::vector<i32> rows(count);
        for (i32 i = 0; i < count; ++i) rows[i] = i;
        hidden_states(rows.data(), count, out);
        return;
    }
    const std::lock_guard<std::mutex> lock(guard_);
    if (count > capacity_) throw std::invalid_argument("more rows than the last step had");
    for (i32 i = 0; i < count; ++i) memcpy(out + static_cast<i64>(i) * hidden_, x_ + i * row_stride(hidden_), sizeof(float) * hidden_);
}

void Plan::layer_inputs(const i32* rows, i32 count, float* out) {
    const std::lock_guard<std::mutex> lock(guard_);
    const i64 width = static_cast<i64>(kept_layers_.size()) * hidden_;
    for (i32 i = 0; i < count; ++i) {
        if (rows[i] >= capacity_) throw std::invalid_argument("more rows than the last step had");
        memcpy(out + i * width, kept_ + rows[i] * width, sizeof(float) * width);
    }
}

}  // namespace quire
