// What ends a step: the results of all ranks, and the best tokens; and moves of cached tokens.
#include <string.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "plan.h"

namespace quire {

bool Plan::has_windows() const {
    return std::any_of(
        layers_.begin(), layers_.end(), [](const std::shared_ptr<PlanLayer>& layer) { return layer->is_windowed; });
}

void Plan::share_best(const StepInput& input, int num_threads_used) {
    for (i32 row = 0; row < input.num_logit_rows; ++row) {
        const i64 first = static_cast<i64>(row) * num_threads_used, place = static_cast<i64>(row) * group_.size + group_.rank;
        const i32 found =
            best_of(best_values_.data() + first, best_indices_.data() + first, num_threads_used, rank_best_values_[place]);
        rank_best_indices_[place] = found < 0 ? -1 : found + group_.first_output;
    }
    group_.wrote(rank_best_values_ + group_.rank, input.num_logit_rows, group_.size, 1);
    group_.wrote(reinterpret_cast<float*>(rank_best_indices_) + group_.rank, input.num_logit_rows, group_.size, 1);
    if (is_prefiltering_) prefilter_.end();
}

void Plan::meet_ranks() {
    set_location(group_.barrier, group_.rank, 0);
    group_.meet();
    if (is_aborted()) throw std::runtime_error("the group of ranks is aborted");
}

void Plan::take_results(i32 num_rows, float* logits, i32* best) {
    if (group_.rank != 0 && (best == nullptr || !is_stage_)) return;
    if (best == nullptr) {
        if (num_rows > 0) memcpy(logits, shared_logits_, sizeof(float) * num_rows * vocab_);
        return;
    }
    for (i32 row = 0; row < num_rows; ++row) {
        const i64 first = static_cast<i64>(row) * group_.size;
        float value = 0.0f;
        const i32 found = best_of(rank_best_values_ + first, rank_best_indices_ + first, group_.size, value);
        best[row] = std::isfinite(value) ? found : -1;
    }
}

void Plan::begin_best(i32 num_rows) {
    const size_t places = static_cast<size_t>(num_rows) * num_threads;
    best_values_.assign(places, -__builtin_inff());
    best_indices_.assign(places, -1);
    is_prefiltering_ =
        uses_int8_head && int8_head_ != nullptr && num_rows > 0 && num_rows <= MAX_PREFILTER_ROWS && prefilter_.is_wanted();
    num_prefiltered += is_prefiltering_;
    if (is_prefiltering_) prefilter_.begin(*kernels_used, *head_, *int8_head_, num_rows, num_threads);
}

void Plan::move_tokens(const i64* from, const i64* to, i32 count, bool is_windowed) {
    if (has_context()) throw std::invalid_argument("ranks that share the tokens of sequences move none");
    const std::lock_guard<std::mutex> lock(guard_);
    for (const std::shared_ptr<PlanLayer>& layer : layers_) {
        const i64 num_slots = static_cast<i64>(group_.num_local_blocks) * layer->kv.block_size,
                  first = group_.rank / std::max(group_.home_size, 1) * num_slots;
        for (i32 i = 0; layer->k && layer->is_windowed == is_windowed && i < count; ++i) {
            if (layer->attends_chosen())
                kernels_used->attention->move_indexed(layer->indexed_kv(), from[i], to[i]);
            else if (!has_homes())
                kernels_used->attention->move(layer->kv, from[i], to[i]);
            else if (from[i] >= first && from[i] < first + num_slots)
                kernels_used->attention->move(layer->kv, from[i] - first, to[i] - first);
        }
    }
}

void Plan::begin_bounds(const StepInput& input) {
    step_bounds_.clear();
    if (input.bounds == nullptr || input.bounds->keys.empty()) return;
    const BoundsRequest& asked = *input.bounds;
    const size_t count = static_cast<size_t>(input.batch.num_sequences);
    if (asked.keys.size() != count || asked.firsts.size() != count || asked.gaps.size() != count || has_homes() ||
        has_context() || divides_rows())
        throw std::invalid_argument("bounds are given for each sequence, whose keys are all on this rank");
    constexpr i32 chunk_runs = CONTEXT_CHUNK / RUN;
    step_bounds_.resize(count);
    for (size_t s = 0; s < count; ++s) {
        if (asked.keys[s] == 0) continue;
        SequenceBounds& kept = bounds_[asked.keys[s]];
        const i32 num_runs = std::max(kept.num_runs, (input.batch.context_lens[s] - NEAR_TOKENS) / RUN);
        kept.values.resize(layers_.size());
        kept.layers.resize(layers_.size());
        for (size_t i = 0; i < layers_.size(); ++i) {
            const PlanLayer& l = *layers_[i];
            if (!l.has_attention() || l.window > 0) continue;
            const size_t size =
                static_cast<size_t>(ceil_div(num_runs, chunk_runs)) * l.kv.kv_heads * l.kv.head_dim * 2 * chunk_runs;
            if (kept.values[i].size() < size) kept.values[i].resize(size);
            kept.layers[i] = kept.values[i].data();
        }
        step_bounds_[s] = {asked.firsts[s], asked.gaps[s], kept.num_runs, num_runs, kept.layers.data()};
    }
}

void Plan::keep_bounds(const StepInput& input) {
    for (size_t s = 0; s < step_bounds_.size(); ++s)
        if (step_bounds_[s].layers != nullptr) bounds_[input.bounds->keys[s]].num_runs = step_bounds_[s].num_runs;
}

void Plan::forget_bounds(const std::vector<i64>& keys) {
    const std::lock_guard<std::mutex> lock(guard_);
    for (const i64 key : keys) bounds_.erase(key);
}

}  // namespace quire
