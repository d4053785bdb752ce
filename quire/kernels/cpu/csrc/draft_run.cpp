// Drafting with a plan: a step, then one step per draft, each after the token of the previous one.
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

// Logits are multiplied by it to estimate whether the target's greedy token is the same: of two tokens with similar probabilities
// it may be either, but rarely one that is half as likely. Plain probabilities would be too low; DRAFT_SHARPNESS in
// reference_head.py.
constexpr float SHARPNESS = 4.0f;

}  // namespace

void best_tokens(const Kernels& kernels, const float* logits, i64 stride, i32 num_rows, i32 vocab, int num_threads, i32* tokens) {
    // Reused across calls, because fresh pages cost as much as a row. One per calling thread.
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
    if (has_windows() || has_states_)
        throw std::invalid_argument("a plan that drafts has no windowed layers, and no recurrent states");
    const i32 count = first.batch.num_sequences, total = drafts.num_drafts, size = block_size();
    const i64 stride = first.batch.table_stride;
    const bool needs_logits = drafts.least_share > 0 || !has_plain_logits();
    if (needs_logits) draft_logits_.resize(static_cast<size_t>(count) * vocab_);
    std::vector<float> features(entry_ == Entry::token ? 0 : static_cast<size_t>(count) * hidden_);
    std::vector<i64> tokens(count), positions(count), slots(count);
    std::vector<i32> starts(count + 1), lengths(count), rows(count), best(count), sequences(count), tables;
    StepInput in = first;
    in.logits = needs_logits ? draft_logits_.data() : nullptr;
    in.best = needs_logits ? nullptr : best.data();
    in.num_wanted_rows = in.num_logit_rows = count;
    in.keeps_all = false;
    for (i32 s = 0; s < count; ++s) {
        sequences[s] = s;
        starts[s + 1] = s + 1;
        rows[s] = first.batch.query_starts[s + 1] - 1;
        positions[s] = first.positions[rows[s]];
        lengths[s] = first.batch.context_lens[s];
    }
    in.wanted_rows = rows.data();
    std::vector<float> shares(count, 1.0f);
    std::vector<i32> num_kept(drafts.counts, drafts.counts + count);
    i32 num_rows = count;  // of the sequences that continue, in order; one with all its drafts writes nothing more
    for (i32 i = 0;; ++i) {
        step(in);
        if (needs_logits) best_tokens(*kernels_used, draft_logits_.data(), vocab_, num_rows, vocab_, num_threads, best.data());
        i32 num_left = 0;
        for (i32 row = 0; row < num_rows; ++row) {
            const i32 s = sequences[row];
            // A draft model may fail without harm: any token is a valid draft.
            const i32 token = std::max(best[row], 0);
            const i64 said = drafts.vocabulary == nullptr ? token : drafts.vocabulary[token];
            drafts.tokens[static_cast<i64>(s) * total + i] = said;
            if (drafts.least_share > 0) {
                const float* logits = draft_logits_.data() + static_cast<i64>(row) * vocab_;
                shares[s] *=
                    best[row] < 0 ? 0 : kernels_used->elementwise->share_of_largest(logits, vocab_, logits[best[row]], SHARPNESS);
                if (!(shares[s] >= drafts.least_share)) num_kept[s] = i;
            }
            if (i + 1 >= num_kept[s]) continue;
            const i32 place = lengths[row];
            sequences[num_left] = s;
            tokens[num_left] = said;
            positions[num_left] = positions[row] + 1;
            lengths[num_left] = place + 1;
            slots[num_left] = static_cast<i64>(first.batch.block_tables[s * stride + place / size]) * size + place % size;
            rows[num_left++] = row;
        }
        if (num_left == 0) break;
        if (entry_ != Entry::token) recycled(num_rows, features.data());
        if (num_left < num_rows) {
            tables.resize(static_cast<size_t>(num_left) * stride);
            for (i32 row = 0; row < num_left; ++row) {
                memcpy(tables.data() + row * stride, first.batch.block_tables + sequences[row] * stride, sizeof(i32) * stride);
                if (!features.empty() && rows[row] > row)
                    memcpy(&features[row * hidden_], &features[rows[row] * hidden_], sizeof(float) * hidden_);
            }
            in.batch.block_tables = tables.data();
        }
        num_rows = num_left;
        for (i32 row = 0; row < num_rows; ++row) rows[row] = row;
        in.token_ids = tokens.data();
        in.positions = positions.data();
        in.slots = slots.data();
        in.batch.num_tokens = in.batch.num_sequences = in.num_wanted_rows = in.num_logit_rows = num_rows;
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
    for (i32 i = 0; i < count; ++i)
        memcpy(out + static_cast<i64>(i) * hidden_, x_ + i * row_stride(hidden_), sizeof(float) * hidden_);
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
