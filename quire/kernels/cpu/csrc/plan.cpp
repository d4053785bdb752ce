// Building a plan, and the memory of its steps.
#include "plan.h"

#include <string.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace quire {

void Norm::set(bool is_layer_norm, i32 size, float eps, uintptr_t weight_address, uintptr_t bias_address, i32 num_heads) {
    is_present = true;
    const float* w = reinterpret_cast<const float*>(weight_address);
    const float* b = reinterpret_cast<const float*>(bias_address);
    const i64 count = static_cast<i64>(size) * num_heads;
    weight.assign(w, w + count);
    if (b != nullptr) bias.assign(b, b + count);
    job.is_layer_norm = is_layer_norm;
    job.size = size;
    job.eps = eps;
    job.weight = weight.data();
    job.bias = b == nullptr ? nullptr : bias.data();
}

void Routing::set(i32 scoring, i32 num_groups, i32 top_groups, i32 group_best, float least_sum, float scale, float threshold, std::vector<float> values) {
    if (scoring < 0 || scoring > static_cast<i32>(Scoring::sparse)) throw std::invalid_argument("scoring must be from 0 to 2");
    if (num_groups < 1 || num_groups > MAX_EXPERT_GROUPS || top_groups < 1 || top_groups > num_groups || group_best < 1 || group_best > MAX_GROUP_BEST)
        throw std::invalid_argument("groups of experts: at most " + std::to_string(MAX_EXPERT_GROUPS) + ", of which one at least is taken, by its best one or two");
    correction = std::move(values);
    job.scoring = static_cast<Scoring>(scoring);
    job.num_groups = num_groups;
    job.top_groups = top_groups;
    job.group_best = group_best;
    job.least_sum = least_sum;
    job.scale = scale;
    job.threshold = threshold;
}

RouteJob Routing::of(i32 num_experts, i32 top_k, bool is_renormalized) const {
    if (num_experts > MAX_EXPERTS) throw std::invalid_argument("at most " + std::to_string(MAX_EXPERTS) + " experts are supported");
    if (!correction.empty() && static_cast<i32>(correction.size()) != num_experts) throw std::invalid_argument("a correction has a value for each expert");
    if (num_experts % job.num_groups != 0 || num_experts / job.num_groups < job.group_best || num_experts / job.num_groups * job.top_groups < top_k)
        throw std::invalid_argument("the groups of experts must be equal, and those that are taken hold top_k experts");
    RouteJob found = job;
    found.num_experts = num_experts;
    found.top_k = top_k;
    found.is_renormalized = is_renormalized;
    found.correction = correction.empty() ? nullptr : correction.data();
    return found;
}

i32 Site::add(const Weight& weight) {
    const Format kind = input_kind(weight.format);
    for (size_t i = 0; i < forms.size(); ++i) {
        const InputForm& form = forms[i];
        const bool same_columns = form.columns == weight.columns ||
                                  (form.columns != nullptr && weight.columns != nullptr && form.k == weight.k &&
                                   memcmp(form.columns, weight.columns, sizeof(i32) * weight.k) == 0);
        if (form.kind == kind && form.k == weight.k && form.group == weight.group && form.input_group == weight.input_group && same_columns) return static_cast<i32>(i);
    }
    forms.push_back({kind, weight.k, weight.group, weight.input_group, weight.columns});
    return static_cast<i32>(forms.size()) - 1;
}

Plan::Plan(const Kernels& table, i32 hidden, i32 vocab, bool is_bf16, int threads)
    : num_threads(threads), kernels_used(&table), hidden_(hidden), vocab_(vocab), is_bf16_(is_bf16) {}

void Plan::set_embedding(std::shared_ptr<NativeWeight> embed, std::shared_ptr<NativeWeight> positions, float scale) {
    embed_ = std::move(embed);
    position_embed_ = std::move(positions);
    embed_scale_ = scale;
}

void Plan::set_head(std::shared_ptr<NativeWeight> head, float logit_scale, float softcap) {
    head_ = std::move(head);
    logit_scale_ = logit_scale;
    softcap_ = softcap;
}

i64 Plan::make_int8_head() {
    if (!suits_int8_head(*head_)) return 0;
    int8_head_ = std::make_unique<Int8Head>(*kernels_used, *head_, num_threads);
    if (!int8_head_->is_bounded) int8_head_ = nullptr;
    return int8_head_ == nullptr ? 0 : int8_head_->num_bytes();
}

void Plan::set_entry(i32 entry, std::shared_ptr<NativeWeight> fuse, bool is_residual_normed, bool recycles_normed) {
    entry_ = static_cast<Entry>(entry);
    fuse_ = std::move(fuse);
    is_residual_normed_ = is_residual_normed;
    recycles_normed_ = recycles_normed;
}

void Plan::keep_inputs(std::vector<i32> layers) {
    const std::lock_guard<std::mutex> lock(guard_);
    kept_layers_ = std::move(layers);
    capacity_ = 0;  // the memory of the next step is reallocated
}

void Plan::copy_queries(std::vector<i32> rows, float* out) {
    const std::lock_guard<std::mutex> lock(guard_);
    if (is_sharded() || is_stage_) throw std::invalid_argument("a rank or a pipeline stage has a part of the queries only");
    for (const auto& layer : layers_)
        if (layer->latent.rank > 0 || !layer->has_attention()) throw std::invalid_argument("queries are copied where all layers have attention, and none latent attention");
    query_rows_ = std::move(rows);
    queries_out_ = out;
}

void Plan::set_per_layer_inputs(std::shared_ptr<NativeWeight> embed, std::shared_ptr<NativeWeight> projection, i32 size, float embed_scale, float projection_scale,
                                float sum_scale) {
    if (is_sharded() || is_stage_) throw std::invalid_argument("a shard or a stage of a model has no per-layer inputs");
    per_layer_embed_ = std::move(embed);
    per_layer_projection_ = std::move(projection);
    per_layer_size_ = size;
    per_layer_embed_scale_ = embed_scale;
    per_layer_projection_scale_ = projection_scale;
    per_layer_sum_scale_ = sum_scale;
}

void Plan::set_streams(i32 active, std::vector<std::shared_ptr<NativeWeight>> split, std::vector<std::shared_ptr<NativeWeight>> join) {
    if (is_sharded() || is_stage_) throw std::invalid_argument("a shard or a stage of a model has one residual stream");
    if (split.empty() || split.size() != join.size()) throw std::invalid_argument("residual streams are at least two, and each but the first is made and brought back");
    streams_.count = static_cast<i32>(split.size()) + 1;
    streams_.active = active;
    if (active < 0 || active >= streams_.count) throw std::invalid_argument("there is no residual stream " + std::to_string(active));
    streams_.split = std::move(split);
    streams_.join = std::move(join);
}

void Plan::add_layer(std::shared_ptr<PlanLayer> layer) { layers_.push_back(std::move(layer)); }

void Plan::set_angles(i32 index, const float* cosine, const float* sine, i64 count, i32 half) {
    if (static_cast<i32>(angles_.size()) <= index) angles_.resize(index + 1);
    angles_[index] = {cosine, sine, count, half};
}

void Plan::set_rank_group(BarrierState* barrier, int rank, int size, i32 first_output, int file) {
    if (entry_ != Entry::token) throw std::invalid_argument("heads that draft are not sharded");
    group_.barrier = barrier;
    group_.rank = rank;
    group_.size = size;
    group_.first_output = first_output;
    group_.rows.set_file(file);
}

void Plan::divide_rows(BarrierState* barrier, int rank, int size, int file) {
    if (entry_ != Entry::token) throw std::invalid_argument("heads that draft do not divide rows");
    row_group_.barrier = barrier;
    row_group_.rank = rank;
    row_group_.size = size;
    row_group_.rows.set_file(file);
}

void Plan::set_exchange(std::function<bool(u8*, const std::vector<WrittenBlock>&)> exchange) {
    if (is_sharded() && divides_rows()) throw std::invalid_argument("ranks that divide rows and shard a model share memory");
    (divides_rows() ? row_group_ : group_).exchange = std::move(exchange);
}

void Plan::set_layer(u32 layer) {
    for (const RankGroup* group : {&group_, &row_group_})
        if (group->barrier != nullptr) set_location(group->barrier, group->rank, layer);
}

void Plan::set_homes(i32 home_size, i32 num_local_blocks) {
    if (!is_sharded() || has_context() || num_local_blocks < 1 || home_size < 1 || group_.size % home_size != 0)
        throw std::invalid_argument("homes are ranks that shard a model, or groups of as many, each with blocks of its own");
    group_.home_size = home_size;
    group_.num_local_blocks = num_local_blocks;
}

void Plan::set_context(i32 place, i32 num_places, i32 num_local_blocks) {
    if (!is_sharded() || num_places < 1 || group_.size % num_places != 0 || group_.rank % num_places != place || num_local_blocks < 1)
        throw std::invalid_argument("rank " + std::to_string(group_.rank) + " of " + std::to_string(group_.size) +
                                    " at place " + std::to_string(place) + " of " + std::to_string(num_places));
    group_.place = place;
    group_.num_places = num_places;
    group_.num_local_blocks = num_local_blocks;
}

void Plan::set_stage(bool is_first, bool is_last, i32 first_layer) {
    if (entry_ != Entry::token || divides_rows() || has_homes() || group_.exchange)
        throw std::invalid_argument("a draft head, a rank that computes some of the rows or one without shared memory has no pipeline stages");
    is_stage_ = true;
    first_layer_ = first_layer;
    is_first_stage_ = is_first;
    is_last_stage_ = is_last;
}

void Plan::use_rows(float* rows, const i32* adapters, i32 count) {
    if (!is_stage_ || rows == nullptr) throw std::invalid_argument("rows of the caller are those of a pipeline stage");
    const std::lock_guard<std::mutex> lock(guard_);
    x_ = rows;
    lora_.numbers.assign(adapters, adapters + count);
    lora_.kept_numbers = lora_.numbers;
}

void Plan::measure(const Site& site, i64 rows) {
    i64 words = 0, groups = 0;
    for (const InputForm& form : site.forms) {
        words += steps_of(form.kind, form.k) * rows;
        groups += groups_of(form.k, form.group) * rows;
    }
    packed_words_ = std::max(packed_words_, words);
    packed_groups_ = std::max(packed_groups_, groups);
}

void Plan::finish_attention(PlanLayer& l) {
    for (const auto* numbers : {&l.sinks, &l.slopes})
        if (!numbers->empty() && static_cast<i32>(numbers->size()) != l.attended_heads()) throw std::invalid_argument("sinks and slopes are one for each head of a layer");
    if (!l.has_plain_values() && (l.value_size() > l.head_dim || l.latent.rank > 0 || l.attn_gate || l.v_norm.is_present || l.has_block() || l.clip > 0.0f || !l.v))
        throw std::invalid_argument("values that are smaller than keys, or scaled, are those of plain attention");
    if (!l.has_plain_values()) own_row_size_ = std::max(own_row_size_, l.num_kv_heads * l.head_dim);
    if (l.total_heads == 0) l.total_heads = l.num_heads;
    if (l.total_kv_heads == 0) l.total_kv_heads = l.num_kv_heads;
    if (has_context() != (l.num_context_heads > 0)) throw std::invalid_argument("the heads of all ranks are known where these share the tokens of sequences");
    if (has_context()) context_row_size_ = std::max(context_row_size_, (l.total_heads + 2 * l.total_kv_heads) * l.head_dim);
    if (divides_rows()) divided_kv_size_ = std::max(divided_kv_size_, 2 * l.num_kv_heads * l.head_dim);
    if (l.is_qk_norm_whole && l.q_norm.is_present && shards_heads()) whole_qk_size_ = std::max(whole_qk_size_, (l.total_heads + l.total_kv_heads) * l.head_dim);
    if (group_.home_size > 1) {
        if (l.is_qk_norm_whole && l.q_norm.is_present) throw std::invalid_argument("the ranks of a home do not norm all heads of q and k together");
        home_row_size_ = std::max<i64>(home_row_size_, l.total_heads * std::max(l.head_dim, l.latent.value));
    }
    if (l.k) l.k_form = l.attn_site.add(l.k->weight);
    if (l.attn_gate) {
        if (has_homes() || has_context() || l.latent.rank > 0)
            throw std::invalid_argument("latent attention, that of homes and that of ranks that share the tokens of sequences have no gate");
        l.attn_gate_form = l.attn_site.add(l.attn_gate->weight);
        gate_size_ = std::max(gate_size_, l.attn_gate->weight.n);
    }
    l.o_form = l.o_site.add(l.o->weight);
    measure(l.o_site, 1);
    qkv_size_ = std::max(qkv_size_, (l.num_heads + 2 * l.num_kv_heads) * l.head_dim);
    attention_size_ = std::max(attention_size_, l.total_heads * l.head_dim);
    if (l.latent.rank > 0) return finish_latent(l);
    l.q_form = l.attn_site.add(l.q->weight);
    if (l.v) l.v_form = l.attn_site.add(l.v->weight);
    measure(l.attn_site, 1);
}

void Plan::finish_latent(PlanLayer& l) {
    Latent& latent = l.latent;
    if (static_cast<i32>(latent.heads.size()) != l.num_heads || l.head_dim != latent.rank + latent.rope || l.num_kv_heads != 1)
        throw std::invalid_argument("multi-head latent attention has a weight for each head, and one head of rank + rope values in the cache");
    if (latent.q_a) l.q_a_form = l.attn_site.add(latent.q_a->weight);
    l.q_form = (latent.q_a ? l.q_site : l.attn_site).add(l.q->weight);
    if (l.attends_chosen()) finish_indexer(l);
    for (const LatentHead& head : latent.heads) {
        l.key_up_site.add(head.key_up->weight);
        l.value_up_site.add(head.value_up->weight);
    }
    if (l.key_up_site.forms.size() != 1 || l.value_up_site.forms.size() != 1) throw std::invalid_argument("the heads of a layer must have one format");
    measure(l.attn_site, 1);
    measure(l.q_site, 1);
    measure(l.key_up_site, l.num_heads);
    measure(l.value_up_site, l.num_heads);
    max_latent_heads_ = std::max(max_latent_heads_, l.num_heads);
    latent_size_ = std::max(latent_size_, l.head_dim);
    question_size_ = std::max(question_size_, l.num_heads * (latent.nope + latent.rope));
    answer_size_ = std::max(answer_size_, l.total_heads * latent.value);
    if (latent.q_a) question_rank_ = std::max(question_rank_, latent.q_a->weight.n);
}

void Plan::finish_indexer(PlanLayer& l) {
    KeyIndexer& indexer = l.latent.indexer;
    if (divides_rows() || has_context() || has_homes()) throw std::invalid_argument("ranks that divide the tokens of sequences have no indexer of keys");
    if (l.has_indexer() && (!indexer.k || !indexer.weights || !indexer.k_norm.is_present || indexer.head_dim > MAX_INDEX_SIZE || indexer.head_dim % 2 != 0))
        throw std::invalid_argument("an indexer has heads of at most " + std::to_string(MAX_INDEX_SIZE) + " values, an even number, a norm of keys, and weights of heads");
    const bool is_first = &l == layers_[0].get();
    if (is_first == (choice_.top_k > 0) || (!is_first && (choice_.top_k != indexer.top_k || choice_.row_size != l.head_dim)))
        throw std::invalid_argument("all layers of a model, or none, choose equally many keys of one size");
    choice_.top_k = indexer.top_k;
    choice_.row_size = l.head_dim;
    if (!l.has_indexer()) {
        if (is_first) throw std::invalid_argument("the first layer has an indexer of its own");
        choice_.is_shared = true;
        return;
    }
    indexer.q_form = (l.latent.q_a ? l.q_site : l.attn_site).add(indexer.q->weight);
    indexer.k_form = l.attn_site.add(indexer.k->weight);
    indexer.weights_form = l.attn_site.add(indexer.weights->weight);
    index_heads_size_ = std::max(index_heads_size_, indexer.num_heads * indexer.head_dim);
    index_size_ = std::max(index_size_, indexer.head_dim);
    index_num_heads_ = std::max(index_num_heads_, indexer.num_heads);
}

void Plan::finish_mixture(PlanLayer& l) {
    if (l.has_branch() && !l.shared_up) throw std::invalid_argument("a branch of experts stands next to a shared expert");
    if (!l.expert_scale.empty() && l.expert_scale.size() != l.experts.size()) throw std::invalid_argument("the scale of experts has a value for each");
    l.router_form = (l.has_branch() ? l.router_site : l.mlp_site).add(l.router->weight);
    measure(l.router_site, 1);
    l.routing.of(static_cast<i32>(l.experts.size()), l.top_k, l.is_renormalized);  // which throws
    // Experts read rows that are gathered for each of them, all in the same form.
    if (!l.expert_copies.empty() && (l.expert_copies.size() != l.experts.size() || l.own_copies.size() != l.experts.size()))
        throw std::invalid_argument("the placement of experts has " + std::to_string(l.expert_copies.size()) + " experts, the layer " + std::to_string(l.experts.size()));
    for (size_t i = 0; i < l.experts.size(); ++i) {
        const Expert& e = l.experts[i];
        if (!l.expert_copies.empty() && l.own_copies[i] < 0) continue;
        if ((!e.gate && l.is_expert_gated) || !e.up || !e.down) throw std::invalid_argument("expert " + std::to_string(i) + " has no weights");
        if (e.gate) l.expert_site.add(e.gate->weight);
        l.expert_site.add(e.up->weight);
        l.down_site.add(e.down->weight);
    }
    if (l.expert_site.forms.size() != 1 || l.down_site.forms.size() != 1) throw std::invalid_argument("the experts of a layer must have one format");
    measure(l.expert_site, l.top_k);
    measure(l.down_site, l.top_k);
    max_experts_ = std::max(max_experts_, static_cast<i32>(l.experts.size()));
    max_top_k_ = std::max(max_top_k_, l.top_k);
    inner_size_ = std::max(inner_size_, static_cast<i32>(row_stride(l.total_inner)) * l.top_k);
    pair_size_ = std::max(pair_size_, hidden_);
    if (l.latent_in) {
        if (!l.latent_out || l.has_branch() || l.latent_out->weight.k != l.latent_in->weight.n) throw std::invalid_argument("experts in a latent space are no branch, and are projected back from it");
        l.latent_in_form = l.mlp_site.add(l.latent_in->weight);
        l.latent_site.add(l.latent_out->weight);
        measure(l.latent_site, 1);
        expert_latent_size_ = std::max(expert_latent_size_, l.latent_in->weight.n);
        pair_size_ = std::max(pair_size_, expert_latent_size_);
    }
    if (!l.shared_up) return;
    if (l.total_shared_inner == 0) l.total_shared_inner = l.shared_up->weight.n;
    if (l.shared_gate) l.shared_gate_form = l.mlp_site.add(l.shared_gate->weight);
    l.shared_up_form = l.mlp_site.add(l.shared_up->weight);
    if (l.shared_scale) l.shared_scale_form = l.mlp_site.add(l.shared_scale->weight);
    l.shared_site.add(l.shared_down->weight);
    measure(l.shared_site, 1);
    inner_size_ = std::max(inner_size_, l.total_shared_inner);
    has_shared_ = true;
}

void Plan::finish_streams(PlanLayer& l) {
    LayerStreams& s = l.streams;
    const size_t count = static_cast<size_t>(streams_.count);
    if (l.has_streams() != (streams_.count > 1)) throw std::invalid_argument("all layers of a model have as many residual streams");
    if (!l.has_streams()) return;
    if (!l.per_layer_gate || l.router || l.is_parallel || !l.attn_out.is_present || !l.mlp_out.is_present || !s.laurel_left || !s.laurel_right)
        throw std::invalid_argument("a layer with several residual streams has per-layer inputs, a low-rank residual, norms of its results, and no experts");
    if (s.predict.size() != count * count * count || s.correct.size() != count * count || (!s.scale.empty() && static_cast<i32>(s.scale.size()) != hidden_))
        throw std::invalid_argument("coefficients of residual streams");
    s.router_site.add(s.router->weight);
    s.left_site.add(s.laurel_left->weight);
    s.right_site.add(s.laurel_right->weight);
    for (const Site* site : {&s.router_site, &s.left_site, &s.right_site}) measure(*site, 1);
    laurel_rank_ = std::max(laurel_rank_, s.laurel_left->weight.n);
}

void Plan::finish_block(PlanLayer& l) {
    SharedBlock& block = l.block;
    if (is_stage_ || !l.is_mixed() || l.latent.rank > 0 || l.attn_gate || !l.k || !l.gate || l.router || l.is_sparse || l.gate_scale != 1.0f || !l.attn_in.is_present ||
        !l.mlp_in.is_present || !l.mixer_in.is_present)
        throw std::invalid_argument("a block before a mixer has plain attention and a gated feed-forward block, and runs on one pipeline stage");
    for (BlockAdapter* adapter : {&block.q, &block.k, &block.v, &block.gate, &block.up}) {
        const bool is_head = adapter != &block.gate && adapter != &block.up;
        if (!adapter->in && is_head && !block.q.in) continue;
        if (!adapter->in || !adapter->out) throw std::invalid_argument("a block before a mixer has adapters of gate and up, and of all of q, k and v or of none");
        adapter->in_form = (is_head ? l.attn_site : l.mlp_site).add(adapter->in->weight);
        adapter->out_site.add(adapter->out->weight);
        measure(adapter->out_site, 1);
        block_rank_ = std::max(block_rank_, adapter->in->weight.n);
    }
    block.out_site.add(block.out->weight);
    for (const Site* site : {&block.out_site, &l.attn_site, &l.mlp_site}) measure(*site, 1);
    has_blocks_ = true;
    beside_size_ = 2 * hidden_;
}

void Plan::finish_layer(PlanLayer& l) {
    if (l.is_sparse && (is_sharded() || !l.gate)) throw std::invalid_argument("a gate that is cut by its mean is whole");
    if (l.total_inner == 0 && !l.expert_copies.empty()) throw std::invalid_argument("a placement of experts is that of a rank of several");
    if (!l.has_attention() && l.mixer == nullptr && !l.has_mlp()) throw std::invalid_argument("a layer without any block");
    if (l.total_inner == 0 && (l.has_mlp() || l.has_block())) l.total_inner = l.router ? l.experts[0].up->weight.n : l.up->weight.n;
    if (l.mixer) finish_mixer(l);
    if (l.has_attention()) finish_attention(l);
    if (l.router) {
        finish_mixture(l);
    } else if (l.down) {
        if (l.gate) l.gate_form = l.mlp_site.add(l.gate->weight);
        l.up_form = l.mlp_site.add(l.up->weight);
        l.down_form = l.down_site.add(l.down->weight);
        measure(l.down_site, 1);
        inner_size_ = std::max(inner_size_, l.total_inner);
    }
    if (l.has_block()) finish_block(l);
    if (l.per_layer_gate) {
        l.per_layer_site.add(l.per_layer_gate->weight);
        l.per_layer_up_site.add(l.per_layer_up->weight);
        measure(l.per_layer_site, 1);
        measure(l.per_layer_up_site, 1);
    }
    measure(l.mlp_site, 1);
    finish_streams(l);
    own_row_size_ = std::max(std::max({own_row_size_, hidden_, pair_size_}), std::max(whole_qk_size_, latent_size_));
}

void Plan::finish() {
    for (auto& layer : layers_) finish_layer(*layer);
    routing_counts_.resize(layers_.size());
    for (size_t i = 0; i < layers_.size(); ++i) {
        layers_[i]->index = static_cast<i32>(i);
        expert_tokens_.emplace_back(layers_[i]->experts.size(), 0);
    }
    if (per_layer_embed_) {
        per_layer_site_.add(per_layer_projection_->weight);
        measure(per_layer_site_, 1);
        own_row_size_ = std::max(own_row_size_, per_layer_projection_->weight.n);
    }
    if (streams_.count > 1) {
        for (const auto& weight : streams_.split) streams_.split_forms.push_back(streams_.split_site.add(weight->weight));
        for (const auto& weight : streams_.join) streams_.join_forms.push_back(streams_.join_site.add(weight->weight));
        measure(streams_.split_site, 1);
        measure(streams_.join_site, 1);
        own_row_size_ = std::max(own_row_size_, static_cast<i32>(streams_.count * row_stride(hidden_)));
    }
    if (is_last_stage_) {
        head_site_.add(head_->weight);
        measure(head_site_, 1);
    }
    if (entry_ != Entry::token) {
        fuse_site_.add(fuse_->weight);
        measure(fuse_site_, 1);
        beside_size_ = 2 * hidden_;
    }
    jobs_.resize(std::max(max_experts_, max_latent_heads_));
    packs_.resize(std::max(max_experts_, max_latent_heads_));
}

// In a step without drafts, with few wanted rows, which are the last ones of their sequences, in order.
void Plan::find_last_ask(const StepInput& input) {
    const Batch& batch = input.batch;
    has_last_ask_ = !input.keeps_all && query_rows_.empty() && batch.num_drafts == nullptr && input.num_wanted_rows <= batch.num_tokens / 2;
    if (!has_last_ask_) return;
    last_starts_.assign(1, 0);
    i32 next = 0;
    for (i32 s = 0; s < batch.num_sequences && has_last_ask_; ++s) {
        const i32 end = batch.query_starts[s + 1];
        const i32 first = next < input.num_wanted_rows ? input.wanted_rows[next] : end;
        for (i32 row = first; row < end && has_last_ask_; ++row, ++next) has_last_ask_ = next < input.num_wanted_rows && input.wanted_rows[next] == row;
        last_starts_.push_back(next);
    }
    has_last_ask_ = has_last_ask_ && next == input.num_wanted_rows;
    last_ask_ = batch;
    last_ask_.num_tokens = next;
    last_ask_.query_starts = last_starts_.data();
}

void Plan::reserve_attention(const Batch& batch) {
    i64 attention = 64;
    for (const auto& l : layers_) {
        if (!l->has_attention()) continue;
        AttentionJob job;
        job.kv = l->kv;
        job.num_heads = l->attended_heads();
        job.window = l->window;
        job.is_bf16 = is_bf16_;
        attention = std::max(attention, kernels_used->attention->scratch_bytes(job, batch, num_threads));
    }
    if (attention > attention_bytes_) {
        attention_scratch_ = Memory(attention);
        attention_bytes_ = attention;
    }
}

void Plan::reserve_choice(const Batch& batch) {
    choice_.take(batch);
    choice_.reserve(layers_[0]->kv.format);
    for (i32 first = 0; first < choice_.num_pieces(); first += GATHERED_PIECES) reserve_attention(choice_.batch(first, std::min(GATHERED_PIECES, choice_.num_pieces() - first)));
}

// Assign addresses to arrays that lie behind each other. `arrays` calls the function that it is given with a pointer and a number of values
// for each; twice, first to add up the sizes, for which `reserve` then returns the memory.
template <typename Arrays, typename Reserve>
void lay_out(const Arrays& arrays, const Reserve& reserve) {
    u8* base = nullptr;
    for (int pass = 0; pass < 2; ++pass) {
        i64 used = 0;
        arrays([&](auto& pointer, i64 count) {
            using Value = std::remove_pointer_t<std::remove_reference_t<decltype(pointer)>>;
            pointer = base == nullptr ? nullptr : reinterpret_cast<Value*>(base + used);
            used += (count * static_cast<i64>(sizeof(Value)) + 127) / 128 * 128;
        });
        if (pass == 0) base = reserve(used);
    }
}

void Plan::reserve(i32 num_tokens, const Batch& batch) {
    reserve_attention(batch);
    if (has_last_ask_) reserve_attention(last_ask_);
    if (num_tokens <= capacity_ && num_threads <= row_threads_) return;
    const i64 rows = std::max(num_tokens, num_tokens <= capacity_ ? capacity_ : std::min(2 * capacity_, 4096));
    const i64 pairs = rows * max_top_k_;
    // No address is valid until all are new: after a failed allocation the plan makes them again.
    capacity_ = 0;
    row_threads_ = 0;
    const auto arrays = [&](const auto& take) {
        take(own_x_, computes_in_place() ? 0 : rows * row_stride(hidden_));
        take(qkv_, rows * row_stride(qkv_size_));
        if (is_sharded()) {  // see reserve_shared
            take(spare_, rows * row_stride(std::max(hidden_, attention_size_)));
            take(home_out_, has_homes() ? rows * row_stride(hidden_) : 0);
        } else {
            take(inner_, rows * row_stride(inner_size_));
            take(extra_, rows * row_stride(hidden_));
            take(pair_out_, pairs * row_stride(pair_size_));
            take(shared_out_, has_shared_ ? rows * row_stride(hidden_) : 0);
            take(mix_shared_, has_states_ ? rows * row_stride(mix_shared_size_) : 0);
        }
        if (has_states_) {
            take(mix_in_, rows * row_stride(mix_in_size_));
            take(mix_conv_, rows * row_stride(mix_conv_size_));
            take(mix_low_, rows * row_stride(mix_low_size_));
            take(mix_normed_, rows * row_stride(mix_shared_size_));
            for (float** keys : {&mix_q_, &mix_k_}) take(*keys, rows * mix_keys_);
            for (float** values : {&mix_v_, &mix_out_}) take(*values, rows * mix_values_);
            take(mix_decay_, rows * mix_decays_);
            take(mix_beta_, rows * mix_heads_);
        }
        take(gate_rows_, gate_size_ == 0 ? 0 : rows * row_stride(gate_size_));
        if (!shards_heads()) {
            take(attended_, rows * row_stride(attention_size_));
            take(answer_, answer_size_ == 0 ? 0 : rows * row_stride(answer_size_));
        }
        take(shared_scales_, has_shared_ ? rows : 0);
        take(latent_, latent_size_ == 0 ? 0 : rows * row_stride(latent_size_));
        take(question_, question_size_ == 0 ? 0 : rows * row_stride(question_size_));
        take(question_a_, question_rank_ == 0 ? 0 : rows * row_stride(question_rank_));
        take(block_embeddings_, has_blocks_ ? rows * row_stride(hidden_) : 0);
        take(block_low_, has_blocks_ ? 3 * rows * row_stride(block_rank_) : 0);
        take(block_up_, has_blocks_ ? rows * row_stride(inner_size_) : 0);
        take(expert_latents_, expert_latent_size_ == 0 ? 0 : rows * row_stride(expert_latent_size_));
        take(index_heads_, index_heads_size_ == 0 ? 0 : rows * row_stride(index_heads_size_));
        take(index_keys_, index_size_ == 0 ? 0 : rows * row_stride(index_size_));
        take(index_weights_, index_num_heads_ == 0 ? 0 : rows * row_stride(index_num_heads_));
        take(normed_, rows * row_stride(hidden_));
        take(row_, num_threads * row_stride(own_row_size_));
        take(beside_, beside_size_ == 0 ? 0 : rows * row_stride(beside_size_));
        take(per_layer_, per_layer_embed_ ? rows * row_stride(per_layer_projection_->weight.n) : 0);
        take(gated_, per_layer_embed_ ? rows * row_stride(per_layer_size_) : 0);
        if (streams_.count > 1) {
            take(stream_rows_, rows * streams_.count * row_stride(hidden_));
            take(stream_routes_, rows * streams_.count);
            take(laurel_inner_, rows * row_stride(laurel_rank_));
            take(laurels_, rows * row_stride(hidden_));
        }
        take(kept_, rows * static_cast<i64>(kept_layers_.size()) * hidden_);
        take(route_logits_, rows * max_experts_);
        take(route_weights_, pairs);
        take(pair_weight_, pairs);
        take(chosen_, pairs);
        take(pair_row_, pairs);
        take(pair_of_, pairs);
        take(expert_start_, max_experts_ + 1);
        take(own_experts_, max_experts_);
        take(own_first_, max_experts_);
        take(own_count_, max_experts_);
        take(own_places_, pairs);
        const i64 packed_rows = std::max(rows, static_cast<i64>(num_threads));
        take(packed_data_, packed_rows * own_stride(packed_words_) + 64);
        take(packed_scales_, packed_rows * own_stride(packed_groups_) + 64);
        take(packed_sums_, packed_rows * own_stride(packed_groups_) + 64);
        take(packed_starts_, packed_rows * own_stride(packed_groups_) + 64);
    };
    lay_out(arrays, [&](i64 num_bytes) {
        arena_ = Memory(0);
        arena_ = Memory(num_bytes);
        return arena_.data;
    });
    x_ = own_x_;
    capacity_ = static_cast<i32>(rows);
    row_threads_ = num_threads;
}

void Plan::reserve_shared(i32 num_tokens, i32 num_logit_rows) {
    if (num_tokens > shared_rows_) shared_rows_ = std::max(num_tokens, std::min(2 * shared_rows_, 4096));
    shared_logit_rows_ = std::max(shared_logit_rows_, num_logit_rows);
    const i64 rows = shared_rows_, pairs = rows * max_top_k_;
    const auto arrays = [&](const auto& take) {
        if (shards_heads()) {
            take(attended_, rows * row_stride(attention_size_));
            take(answer_, answer_size_ == 0 ? 0 : rows * row_stride(answer_size_));
        }
        take(inner_, rows * row_stride(inner_size_));
        take(extra_, rows * row_stride(hidden_));
        take(pair_out_, pairs * row_stride(pair_size_));
        take(shared_out_, has_shared_ ? rows * row_stride(hidden_) : 0);
        take(mix_shared_, has_states_ ? rows * row_stride(mix_shared_size_) : 0);
        take(home_rows_, home_row_size_ == 0 ? 0 : rows * row_stride(home_row_size_));
        take(whole_qk_, whole_qk_size_ == 0 ? 0 : rows * row_stride(whole_qk_size_));
        take(context_rows_, context_row_size_ == 0 ? 0 : rows * row_stride(context_row_size_));
        for (u8*& buffer : context_buffers_) {
            take(buffer, context_buffer_bytes_ * (group_.size / group_.num_places));
            buffer += context_buffer_bytes_ * (group_.rank / group_.num_places);
        }
        take(rank_best_values_, static_cast<i64>(shared_logit_rows_) * group_.size);
        take(rank_best_indices_, static_cast<i64>(shared_logit_rows_) * group_.size);
        take(shared_logits_, static_cast<i64>(shared_logit_rows_) * vocab_);
    };
    lay_out(arrays, [&](i64 num_bytes) { return group_.rows.reserve(num_bytes); });
}

// Bytes of partial results of attention that ranks exchange at once.
constexpr i64 MAX_CONTEXT_BYTES = 16 << 20;

void Plan::prepare_context(const Batch& batch) {
    for (const Batch* each : {&batch, has_last_ask_ ? &last_ask_ : &batch}) {
        for (const auto& l : layers_) {
            AttentionJob job;
            job.kv = l->kv;
            job.num_heads = l->attended_heads();
            job.window = l->window;
            job.is_bf16 = is_bf16_;
            context_buffer_bytes_ = std::max(context_buffer_bytes_, kernels_used->attention->context_bytes(job, *each, MAX_CONTEXT_BYTES));
        }
    }
    context_buffer_bytes_ = (context_buffer_bytes_ + 127) / 128 * 128;
    const i64 count = batch.num_sequences * batch.table_stride;
    local_tables_.resize(count);
    for (i64 i = 0; i < count; ++i) {
        const i32 block = batch.block_tables[i];
        local_tables_[i] = block / group_.num_local_blocks == group_.place ? block % group_.num_local_blocks : 0;
    }
}

void Plan::reserve_divided() {
    if (given_.batch.num_tokens > divided_capacity_) divided_capacity_ = std::max(given_.batch.num_tokens, std::min(2 * divided_capacity_, 4096));
    i64 num_counts = 0;
    for (const auto& counts : expert_tokens_) num_counts += static_cast<i64>(counts.size());
    const auto arrays = [&](const auto& take) {
        take(divided_expert_tokens_, num_counts * row_group_.size);  // the first: it is read between steps
        for (float*& rows : divided_kv_) take(rows, divided_capacity_ * row_stride(divided_kv_size_));
        take(divided_x_, divided_capacity_ * row_stride(hidden_));
    };
    lay_out(arrays, [&](i64 num_bytes) { return row_group_.rows.reserve(num_bytes); });
}

void Plan::share_expert_tokens() {
    i64 num_counts = 0;
    for (const auto& counts : expert_tokens_) num_counts += static_cast<i64>(counts.size());
    i64* to = divided_expert_tokens_ + num_counts * row_group_.rank;
    row_group_.wrote(reinterpret_cast<float*>(to), 1, 0, 2 * num_counts);
    for (const auto& counts : expert_tokens_) to = std::copy(counts.begin(), counts.end(), to);
}

std::vector<std::vector<i64>> Plan::expert_tokens() {
    const std::lock_guard<std::mutex> lock(guard_);
    if (!divides_rows() || divided_expert_tokens_ == nullptr) return expert_tokens_;
    std::vector<std::vector<i64>> found = expert_tokens_;
    for (auto& counts : found) std::fill(counts.begin(), counts.end(), 0);
    const i64* from = divided_expert_tokens_;
    for (int rank = 0; rank < row_group_.size; ++rank)
        for (auto& counts : found)
            for (i64& count : counts) count += *from++;
    return found;
}

void Plan::set_lossy_routing(const LossyRouting& lossy) {
    const std::lock_guard<std::mutex> lock(guard_);
    std::vector<std::vector<float>> corrections;
    for (const auto& l : layers_) {
        if (l->router && l->routing.job.scoring == Scoring::sparse) throw std::invalid_argument("lossy routing does not fit experts that are chosen by a threshold");
        corrections.push_back(l->routing.correction.empty() ? std::vector<float>(l->experts.size(), 0.0f) : l->routing.correction);
    }
    corrections_ = std::move(corrections);
    lossy_ = lossy;
}

std::vector<RoutingCounts> Plan::routing_counts() {
    const std::lock_guard<std::mutex> lock(guard_);
    return routing_counts_;
}

void Plan::place_experts(i32 layer, const std::vector<std::pair<i32, Expert>>& added, std::vector<i32> copies, std::vector<i32> own_copies) {
    const std::lock_guard<std::mutex> lock(guard_);
    if (layer < 0 || layer >= static_cast<i32>(layers_.size())) throw std::invalid_argument("there is no layer " + std::to_string(layer));
    PlanLayer& l = *layers_[layer];
    if (l.expert_copies.empty()) throw std::invalid_argument("the experts of layer " + std::to_string(layer) + " are not placed on ranks");
    if (copies.size() != l.experts.size() || own_copies.size() != l.experts.size())
        throw std::invalid_argument("the placement of experts has " + std::to_string(copies.size()) + " experts, the layer " + std::to_string(l.experts.size()));
    std::vector<Expert> experts = l.experts;
    for (const auto& [index, expert] : added) {
        if (index < 0 || index >= static_cast<i32>(experts.size()) || (!expert.gate && l.is_expert_gated) || !expert.up || !expert.down)
            throw std::invalid_argument("expert " + std::to_string(index) + " does not exist or has no weights");
        Site up = l.expert_site, down = l.down_site;
        if (expert.gate) up.add(expert.gate->weight);
        up.add(expert.up->weight);
        down.add(expert.down->weight);
        if (up.forms.size() != 1 || down.forms.size() != 1) throw std::invalid_argument("expert " + std::to_string(index) + " has another format than the others of its layer");
        experts[index] = expert;
    }
    for (size_t i = 0; i < experts.size(); ++i) {
        if (own_copies[i] < 0)
            experts[i] = {};
        else if (!experts[i].up)
            throw std::invalid_argument("expert " + std::to_string(i) + " has no weights");
    }
    l.experts = std::move(experts);
    l.expert_copies = std::move(copies);
    l.own_copies = std::move(own_copies);
}

i64 Plan::scratch_bytes() const { return choice_.num_bytes() + lora_.shrunk.bytes + arena_.bytes + attention_scratch_.bytes + group_.rows.num_bytes() + row_group_.rows.num_bytes(); }

}  // namespace quire
