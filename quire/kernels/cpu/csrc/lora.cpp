// The LoRA adapters of a plan, and the grouping of a step's rows by them.
#include "lora.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "plan.h"

namespace quire {

void LoraAdapter::set(i32 layer, i32 module, std::shared_ptr<NativeWeight> a, std::shared_ptr<NativeWeight> b) {
    const bool is_head = module == static_cast<i32>(LoraModule::head);
    if (module < 0 || module >= NUM_LORA_MODULES || layer < 0 || layer > num_layers || is_head != (layer == num_layers))
        throw std::invalid_argument("there is no module " + std::to_string(module) + " of layer " + std::to_string(layer));
    put(index(layer, static_cast<LoraModule>(module)), std::move(a), std::move(b));
}

void LoraAdapter::set_expert(
    i32 layer, i32 expert, i32 module, std::shared_ptr<NativeWeight> a, std::shared_ptr<NativeWeight> b) {
    if (module < 0 || module >= NUM_EXPERT_MODULES || layer < 0 || layer >= num_layers || expert < 0 || expert >= num_experts)
        throw std::invalid_argument("there is no module " + std::to_string(module) + " of expert " + std::to_string(expert) +
            " of layer " + std::to_string(layer));
    put(expert_index(num_layers, num_experts, layer, expert, static_cast<ExpertModule>(module)), std::move(a), std::move(b));
    adapts_experts = true;
}

void LoraAdapter::set_head(i32 layer, i32 head, i32 module, std::shared_ptr<NativeWeight> a, std::shared_ptr<NativeWeight> b) {
    if (module < 0 || module >= NUM_HEAD_MODULES || layer < 0 || layer >= num_layers || head < 0 || head >= num_heads)
        throw std::invalid_argument("there is no module " + std::to_string(module) + " of head " + std::to_string(head) +
            " of layer " + std::to_string(layer));
    put(head_index(num_layers, num_experts, num_heads, layer, head, static_cast<HeadModule>(module)), std::move(a), std::move(b));
    adapts_heads = true;
}

void LoraAdapter::put(i32 index, std::shared_ptr<NativeWeight> a, std::shared_ptr<NativeWeight> b) {
    const Weight &first = a->weight, &second = b->weight;
    const bool is_dense = first.format == Format::bf16 || first.format == Format::f16 || first.format == Format::f32;
    if (first.n != second.k || !is_dense || first.format != second.format || first.columns != nullptr ||
        second.columns != nullptr)
        throw std::invalid_argument("the matrices of an adapter must be dense, [rank][in] and [out][rank], in one format");
    rank = std::max(rank, first.n);
    weights[index] = {&first, &second};
    matrices.push_back(std::move(a));
    matrices.push_back(std::move(b));
}

void LoraRows::clear() {
    tables.clear();
    next.clear();
    used.clear();
    tiles.clear();
}

void LoraPlaces::clear(i32 num_places) {
    tables.assign(num_places, nullptr);
    next.assign(num_places, -1);
    used.clear();
    first_used.assign(1, 0);
    tile_experts.clear();
    tiles.clear();
    sums.clear();
}

void LoraState::group(const std::vector<i32>& row_numbers, LoraRows& found) const {
    found.clear();
    std::vector<std::vector<i32>> rows_of(adapters.size());
    for (size_t row = 0; row < row_numbers.size(); ++row) {
        const i32 number = row_numbers[row];
        const bool has_adapter = number >= 0 && adapters[number] != nullptr;
        found.tables.push_back(has_adapter ? adapters[number]->weights.data() : nullptr);
        found.next.push_back(-1);
        if (!has_adapter) continue;
        if (rows_of[number].empty())
            found.used.push_back(found.tables.back());
        else
            found.next[rows_of[number].back()] = static_cast<i32>(row);
        rows_of[number].push_back(static_cast<i32>(row));
    }
    for (const std::vector<i32>& rows : rows_of) {
        for (size_t at = 0; at < rows.size(); at += MAX_LORA_ROWS) {
            LoraTile tile = {found.tables[rows[at]], static_cast<i32>(std::min<size_t>(MAX_LORA_ROWS, rows.size() - at)), {}};
            std::copy_n(rows.begin() + at, tile.count, tile.rows);
            found.tiles.push_back(tile);
        }
    }
}

void LoraState::group_places(i32 layer, const LoraRows& rows, const i32* pair_rows, i32 num_places, i32 count, const i32* experts,
    const i32* firsts, const i32* counts) {
    places.clear(num_places);
    for (i32 at = 0; at < count; ++at) {
        const i32 index = expert_index(layer, experts[at], 0);
        const auto is_adapted = [&](const LowRankWeights* weights) {
            return std::any_of(weights + index, weights + index + NUM_EXPERT_MODULES,
                [](const LowRankWeights& pair) { return pair.a != nullptr; });
        };
        for (const LowRankWeights* weights : rows.used) {
            LoraTile tile = {weights, 0, {}};
            i32 before = -1;
            const auto end_tile = [&] {
                places.tiles.push_back(tile);
                places.tile_experts.push_back(at);
                tile.count = 0;
            };
            for (i32 place = firsts[at]; is_adapted(weights) && place < firsts[at] + counts[at]; ++place) {
                if (rows.tables[pair_rows[place]] != weights) continue;
                places.tables[place] = weights;
                if (before >= 0) places.next[before] = place - firsts[at];
                before = place;
                tile.rows[tile.count++] = place;
                if (tile.count == MAX_LORA_ROWS) end_tile();
            }
            if (tile.count > 0) end_tile();
            if (before >= 0) places.used.push_back(weights);
        }
        places.first_used.push_back(static_cast<i32>(places.used.size()));
    }
    for (i32 at = 0; at < count; ++at) {
        for (i32 module = 0; module < NUM_EXPERT_MODULES; ++module) {
            LowRankSum sum;
            sum.rows = places.tables.data() + firsts[at];
            sum.next = places.next.data() + firsts[at];
            sum.used = places.used.data() + places.first_used[at];
            sum.num_used = places.first_used[at + 1] - places.first_used[at];
            sum.index = expert_index(layer, experts[at], module);
            sum.shrunk =
                reinterpret_cast<const float*>(shrunk.data) + firsts[at] * stride() + static_cast<i64>(module) * padded_rank;
            sum.stride = stride();
            places.sums.push_back(sum);
        }
    }
}

void LoraState::reserve(i32 num_rows, i32 num_tokens) {
    i32 rank = 0;
    bool has_heads = false;
    for (const auto& adapter : adapters) {
        if (!adapter) continue;
        rank = std::max(rank, adapter->rank);
        has_heads = has_heads || adapter->adapts_heads;
    }
    padded_rank = (rank + 15) / 16 * 16;
    head_sums.resize(num_heads);
    const i64 bytes = std::max(num_rows * stride(), has_heads ? num_tokens * head_stride() : 0) * static_cast<i64>(sizeof(float));
    if (bytes <= shrunk.bytes) return;
    shrunk = Memory(0);
    shrunk = Memory(bytes);
}

void Plan::set_adapter(i32 number, std::shared_ptr<LoraAdapter> adapter) {
    if (divides_rows() || entry_ != Entry::token)
        throw std::invalid_argument("a rank that divides rows or a draft head takes no adapters");
    if (number < 0) throw std::invalid_argument("the number of an adapter is at least 0");
    if (adapter &&
        (adapter->num_layers != num_layers() || adapter->num_experts != max_experts_ || adapter->num_heads != max_latent_heads_))
        throw std::invalid_argument("the adapter is for another number of layers, experts or heads");
    if (adapter && adapter->rank == 0 && !is_stage_) throw std::invalid_argument("the adapter has no matrices");
    const std::lock_guard<std::mutex> lock(guard_);
    if (number >= static_cast<i32>(lora_.adapters.size())) lora_.adapters.resize(static_cast<size_t>(number) + 1);
    lora_.num_layers = num_layers();
    lora_.num_experts = max_experts_;
    lora_.num_heads = max_latent_heads_;
    const bool has_mixers =
        std::any_of(layers_.begin(), layers_.end(), [](const auto& layer) { return layer->mixer != nullptr; });
    lora_.num_outputs = has_mixers || choice_.top_k > 0 || expert_latent_size_ > 0 ? MAX_LORA_OUTPUTS : 4;
    lora_.adapters[number] = std::move(adapter);
}

void Plan::begin_lora(const StepInput& input) {
    lora_.numbers.clear();
    lora_.all.clear();
    lora_.wanted.clear();
    lora_.logit.clear();
    if (lora_.adapts_experts) lora_.places.clear(0);
    lora_.adapts_experts = false;
    if (input.row_adapters == nullptr) return;
    lora_.numbers.assign(input.row_adapters, input.row_adapters + input.batch.num_tokens);
    for (const i32 number : lora_.numbers)
        if (number >= static_cast<i32>(lora_.adapters.size()) || (number >= 0 && lora_.adapters[number] == nullptr)) {
            lora_.numbers.clear();
            throw std::invalid_argument("adapter " + std::to_string(number) + " is not loaded");
        }
    lora_.group(lora_.numbers, lora_.all);
    std::vector<i32> wanted;
    for (i32 i = 0; i < input.num_wanted_rows; ++i) wanted.push_back(lora_.numbers[input.wanted_rows[i]]);
    lora_.kept_numbers = input.keeps_all ? lora_.numbers : wanted;
    if (!input.keeps_all) lora_.group(wanted, lora_.wanted);
    wanted.resize(input.num_logit_rows);
    lora_.group(wanted, lora_.logit);
    const i32 head = LoraAdapter::index(num_layers(), LoraModule::head);
    const bool has_head = std::any_of(
        lora_.all.used.begin(), lora_.all.used.end(), [&](const LowRankWeights* weights) { return weights[head].a != nullptr; });
    if (has_head && input.best != nullptr)
        throw std::invalid_argument("the best tokens of a head with adapters are found in its logits");
    for (const i32 number : lora_.numbers)
        lora_.adapts_experts = lora_.adapts_experts || (number >= 0 && lora_.adapters[number]->adapts_experts);
    const i32 num_places = lora_.adapts_experts ? input.batch.num_tokens * max_top_k_ : 0;
    if (!lora_.all.is_empty())
        lora_.reserve(std::max({input.batch.num_tokens, input.num_logit_rows, num_places}), input.batch.num_tokens);
}

void Plan::begin_lora_logits(const i32* rows, i32 count) {
    lora_.logit.clear();
    if (lora_.numbers.empty()) return;
    std::vector<i32> numbers;
    for (i32 i = 0; i < count; ++i)
        numbers.push_back(rows[i] < static_cast<i32>(lora_.kept_numbers.size()) ? lora_.kept_numbers[rows[i]] : -1);
    lora_.group(numbers, lora_.logit);
    if (!lora_.logit.is_empty()) lora_.reserve(count, 0);
}

}  // namespace quire
