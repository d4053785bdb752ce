// Building and running plans from Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "binding.h"
#include "parallel_heads.h"
#include "plan.h"
#include "runs.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {
using namespace quire;

// The description of a call's tokens, by the addresses of arrays.
StepInput describe_tokens(uintptr_t token_ids, uintptr_t positions, uintptr_t slots, i32 num_tokens, i32 num_sequences, uintptr_t query_starts,
                          uintptr_t context_lens, uintptr_t block_tables, i64 table_stride) {
    StepInput in;
    in.token_ids = reinterpret_cast<const i64*>(token_ids);
    in.positions = reinterpret_cast<const i64*>(positions);
    in.slots = reinterpret_cast<const i64*>(slots);
    in.batch.num_sequences = num_sequences;
    in.batch.num_tokens = num_tokens;
    in.batch.query_starts = reinterpret_cast<const i32*>(query_starts);
    in.batch.context_lens = reinterpret_cast<const i32*>(context_lens);
    in.batch.block_tables = reinterpret_cast<const i32*>(block_tables);
    in.batch.table_stride = table_stride;
    return in;
}

// The rows of recurrent states of a call, see StepInput: of each sequence the source, and the saves in any order.
using StateSaves = std::vector<std::vector<std::pair<i32, i32>>>;

struct StateRows {
    std::vector<i32> starts, saves;

    StateRows(const Plan& plan, StepInput& in, const std::vector<i32>& sources, const StateSaves& all) : starts(1, 0) {
        if (!plan.has_states()) return;
        const size_t count = static_cast<size_t>(in.batch.num_sequences);
        if (sources.size() != count || all.size() != count) throw std::invalid_argument("a step of recurrent layers has rows of states for each of its sequences");
        for (size_t s = 0; s < count; ++s) {
            std::vector<std::pair<i32, i32>> sorted = all[s];
            std::sort(sorted.begin(), sorted.end());
            for (const auto& [tokens, row] : sorted) {
                if (tokens < 0 || tokens > in.batch.query_starts[s + 1] - in.batch.query_starts[s])
                    throw std::invalid_argument("a state is saved after " + std::to_string(tokens) + " tokens, which its sequence has not");
                saves.insert(saves.end(), {tokens, row});
            }
            starts.push_back(static_cast<i32>(saves.size() / 2));
        }
        in.state_sources = sources.data();
        in.save_starts = starts.data();
        in.saves = saves.data();
    }
};

using PlanClass = nb::class_<Plan>;

void bind_layer(nb::module_& m) {
    nb::class_<Norm>(m, "Norm").def("set", &Norm::set, "is_layer_norm"_a, "size"_a, "eps"_a, "weight"_a, "bias"_a = 0, "num_heads"_a = 1,
                                    "Copy f32 weights (any offset already added) from their addresses.");
    nb::class_<Routing>(m, "Routing").def(nb::init<>()).def("set", &Routing::set, "scoring"_a = 0, "num_groups"_a = 1, "top_groups"_a = 1, "group_best"_a = 1,
                                                             "least_sum"_a = 0.0f, "scale"_a = 1.0f, "threshold"_a = 0.0f, "correction"_a = std::vector<float>{},
                                                             "How experts are chosen and weighed; see RouteJob in elementwise.h.");
    nb::class_<ExpertBranch>(m, "ExpertBranch")
        .def_rw("router_in", &ExpertBranch::router_in)
        .def_rw("experts_in", &ExpertBranch::experts_in)
        .def_rw("experts_out", &ExpertBranch::experts_out)
        .def_rw("shared_out", &ExpertBranch::shared_out);
    nb::class_<LayerStreams>(m, "LayerStreams")
        .def_rw("router", &LayerStreams::router)
        .def_rw("laurel_left", &LayerStreams::laurel_left)
        .def_rw("laurel_right", &LayerStreams::laurel_right)
        .def_rw("norm", &LayerStreams::norm)
        .def_rw("laurel_norm", &LayerStreams::laurel_norm)
        .def_rw("predict", &LayerStreams::predict)
        .def_rw("correct", &LayerStreams::correct)
        .def_rw("scale", &LayerStreams::scale);
    nb::class_<PlanLayer> layer(m, "PlanLayer");
    layer.def(nb::init<>());
#define QUIRE_FIELD(name) layer.def_rw(#name, &PlanLayer::name)
    QUIRE_FIELD(attn_in); QUIRE_FIELD(attn_out); QUIRE_FIELD(mlp_in); QUIRE_FIELD(mlp_out); QUIRE_FIELD(q_norm); QUIRE_FIELD(k_norm);
    QUIRE_FIELD(v_norm); QUIRE_FIELD(per_layer_gate); QUIRE_FIELD(per_layer_up); QUIRE_FIELD(per_layer_norm); QUIRE_FIELD(output_scale);
    QUIRE_FIELD(attn_gate); QUIRE_FIELD(has_head_gate); QUIRE_FIELD(mixer); QUIRE_FIELD(mixer_in); QUIRE_FIELD(attention_out_scale); QUIRE_FIELD(mixer_out_scale); QUIRE_FIELD(gate_scale); QUIRE_FIELD(down_scale);
    QUIRE_FIELD(is_expert_gated); QUIRE_FIELD(q); QUIRE_FIELD(k); QUIRE_FIELD(v); QUIRE_FIELD(o); QUIRE_FIELD(gate); QUIRE_FIELD(up); QUIRE_FIELD(down); QUIRE_FIELD(router);
    QUIRE_FIELD(num_heads); QUIRE_FIELD(num_kv_heads); QUIRE_FIELD(head_dim); QUIRE_FIELD(window); QUIRE_FIELD(rope);
    QUIRE_FIELD(scale); QUIRE_FIELD(softcap); QUIRE_FIELD(residual_scale); QUIRE_FIELD(is_qk_norm_whole); QUIRE_FIELD(top_k); QUIRE_FIELD(is_renormalized);
    QUIRE_FIELD(is_qk_norm_each); QUIRE_FIELD(is_qk_norm_last); QUIRE_FIELD(is_parallel); QUIRE_FIELD(clip); QUIRE_FIELD(query_beta); QUIRE_FIELD(query_max);
    QUIRE_FIELD(query_offset); QUIRE_FIELD(positive); QUIRE_FIELD(negative);
    QUIRE_FIELD(gate_limit); QUIRE_FIELD(gate_slope); QUIRE_FIELD(sinks); QUIRE_FIELD(slopes); QUIRE_FIELD(value_dim); QUIRE_FIELD(value_scale);
    QUIRE_FIELD(latent_in); QUIRE_FIELD(latent_out); QUIRE_FIELD(shared_gate); QUIRE_FIELD(shared_up); QUIRE_FIELD(shared_down); QUIRE_FIELD(shared_scale); QUIRE_FIELD(routing); QUIRE_FIELD(weighs_inputs);
    QUIRE_FIELD(expert_scale); QUIRE_FIELD(branch); QUIRE_FIELD(streams); QUIRE_FIELD(is_sparse); QUIRE_FIELD(sparse_quantile);
    QUIRE_FIELD(expert_copies); QUIRE_FIELD(own_copies);
    QUIRE_FIELD(first_shared_inner); QUIRE_FIELD(total_shared_inner);
    QUIRE_FIELD(first_head); QUIRE_FIELD(first_kv_head); QUIRE_FIELD(first_inner); QUIRE_FIELD(first_output); QUIRE_FIELD(first_o_output); QUIRE_FIELD(first_expert_output);
    QUIRE_FIELD(total_heads); QUIRE_FIELD(total_kv_heads); QUIRE_FIELD(total_inner);
    QUIRE_FIELD(first_context_head); QUIRE_FIELD(num_context_heads); QUIRE_FIELD(first_context_kv_head); QUIRE_FIELD(num_context_kv_heads); QUIRE_FIELD(writes_kv_heads);
#undef QUIRE_FIELD
    layer.def("set_activation", [](PlanLayer& l, i32 activation) { l.activation = static_cast<Activation>(activation); })
        .def("add_expert", [](PlanLayer& l, std::shared_ptr<NativeWeight> gate, std::shared_ptr<NativeWeight> up, std::shared_ptr<NativeWeight> down) {
            l.experts.push_back({std::move(gate), std::move(up), std::move(down)});
        }, "gate"_a.none(), "up"_a.none(), "down"_a.none(), "Add an expert; None: another rank has it.")
        .def("set_latent", [](PlanLayer& l, i32 rank, i32 nope, i32 rope, i32 value, bool is_interleaved, std::shared_ptr<NativeWeight> q_a) {
            l.latent.is_interleaved = is_interleaved;
            l.latent.rank = rank;
            l.latent.nope = nope;
            l.latent.rope = rope;
            l.latent.value = value;
            l.latent.q_a = std::move(q_a);
        }, "rank"_a, "nope"_a, "rope"_a, "value"_a, "is_interleaved"_a, "q_a"_a.none(), "Make the layer one of multi-head latent attention; see Latent in plan.h.")
        .def("add_latent_head", [](PlanLayer& l, std::shared_ptr<NativeWeight> key_up, std::shared_ptr<NativeWeight> value_up) {
            l.latent.heads.push_back({std::move(key_up), std::move(value_up)});
        })
        .def("set_indexer", [](PlanLayer& l, i32 num_heads, i32 head_dim, i32 top_k, bool is_interleaved, std::shared_ptr<NativeWeight> q, std::shared_ptr<NativeWeight> k,
                               std::shared_ptr<NativeWeight> weights) {
            KeyIndexer& indexer = l.latent.indexer;
            indexer.num_heads = num_heads;
            indexer.head_dim = head_dim;
            indexer.top_k = top_k;
            indexer.is_interleaved = is_interleaved;
            indexer.q = std::move(q);
            indexer.k = std::move(k);
            indexer.weights = std::move(weights);
        }, "num_heads"_a, "head_dim"_a, "top_k"_a, "is_interleaved"_a, "q"_a, "k"_a, "weights"_a, "Let queries attend to the keys that an indexer chooses; see KeyIndexer in plan.h.")
        .def("share_choice", [](PlanLayer& l, i32 top_k) { l.latent.indexer.top_k = top_k; }, "top_k"_a, "Let queries attend to the keys that the last indexer before them has chosen.")
        .def("set_block", [](PlanLayer& l, std::shared_ptr<NativeWeight> out) { l.block.out = std::move(out); }, "out"_a,
             "Let attention and the feed-forward block be a block before the mixer; see SharedBlock in plan.h.")
        .def("set_block_adapter", [](PlanLayer& l, const std::string& name, std::shared_ptr<NativeWeight> in, std::shared_ptr<NativeWeight> out) {
            SharedBlock& block = l.block;
            BlockAdapter& adapter = name == "q" ? block.q : name == "k" ? block.k : name == "v" ? block.v : name == "gate" ? block.gate : block.up;
            adapter.in = std::move(in);
            adapter.out = std::move(out);
        }, "name"_a, "in"_a, "out"_a, "Set the adapter of q, k, v, gate or up of a block.")
        .def_prop_ro("index_k_norm", [](PlanLayer& l) -> Norm& { return l.latent.indexer.k_norm; }, nb::rv_policy::reference_internal)
        .def_prop_ro("latent_q_norm", [](PlanLayer& l) -> Norm& { return l.latent.q_norm; }, nb::rv_policy::reference_internal)
        .def_prop_ro("latent_kv_norm", [](PlanLayer& l) -> Norm& { return l.latent.kv_norm; }, nb::rv_policy::reference_internal)
        .def("set_cache", [](PlanLayer& l, i32 format, i32 block_size, uintptr_t keys, uintptr_t values, uintptr_t key_scales, uintptr_t value_scales,
                            bool is_windowed) {
            l.is_windowed = is_windowed;
            l.kv = {static_cast<KvFormat>(format), block_size, l.cached_heads(), l.head_dim, reinterpret_cast<void*>(keys), reinterpret_cast<void*>(values),
                    reinterpret_cast<float*>(key_scales), reinterpret_cast<float*>(value_scales)};
        }, "format"_a, "block_size"_a, "keys"_a, "values"_a, "key_scales"_a, "value_scales"_a, "is_windowed"_a = false);
}

void bind_lora(nb::module_& m, PlanClass& plan) {
    nb::class_<LoraAdapter>(m, "LoraAdapter")
        .def(nb::init<i32, i32, i32>(), "num_layers"_a, "num_experts"_a, "num_heads"_a)
        .def("set", &LoraAdapter::set, "layer"_a, "module"_a, "a"_a, "b"_a, "Set what is added to a module's outputs, see LoraModule in lora.h.")
        .def("set_expert", &LoraAdapter::set_expert, "layer"_a, "expert"_a, "module"_a, "a"_a, "b"_a, "The same of an expert, see ExpertModule in lora.h.")
        .def("set_head", &LoraAdapter::set_head, "layer"_a, "head"_a, "module"_a, "a"_a, "b"_a, "The same of a head of latent attention, see HeadModule in lora.h.");
    plan.def_prop_ro("num_layers", &Plan::num_layers).def_prop_ro("num_experts", &Plan::num_experts, "The most that a layer has.")
        .def_prop_ro("num_latent_heads", &Plan::num_latent_heads, "The most that a layer with latent attention has.")
        .def("set_adapter", &Plan::set_adapter, "number"_a, "adapter"_a.none(), "Set the adapter of a number; None: the number is free.");
}

void bind_setup(PlanClass& plan) {
    plan.def("__init__", [](Plan* self, i32 hidden, i32 vocab, bool is_bf16, int num_threads, const std::string& isa) {
            new (self) Plan(kernels_for(isa), hidden, vocab, is_bf16, num_threads);
        }, "hidden"_a, "vocab"_a, "is_bf16"_a, "num_threads"_a, "isa"_a = "")
        .def_rw("final_norm", &Plan::final_norm)
        .def_rw("embed_norm", &Plan::embed_norm)
        .def_rw("feature_norm", &Plan::feature_norm)
        .def_rw("per_layer_norm", &Plan::per_layer_norm)
        .def_rw("num_threads", &Plan::num_threads)
        .def_rw("is_near", &Plan::is_near)
        .def_rw("uses_int8_head", &Plan::uses_int8_head)
        .def_ro("num_prefiltered", &Plan::num_prefiltered)
        .def("set_embedding", &Plan::set_embedding, "embed"_a, "positions"_a.none(), "scale"_a)
        .def("set_per_layer_inputs", &Plan::set_per_layer_inputs, "embed"_a, "projection"_a, "size"_a, "embed_scale"_a, "projection_scale"_a, "sum_scale"_a)
        .def("set_streams", &Plan::set_streams, "active"_a, "split"_a, "join"_a)
        .def("set_head", &Plan::set_head, "head"_a, "logit_scale"_a, "softcap"_a)
        .def("make_int8_head", &Plan::make_int8_head, nb::call_guard<nb::gil_scoped_release>(),
             "Keep a copy of the head that finds its best tokens, before finish; return its bytes, 0: there is none.")
        .def("add_layer", &Plan::add_layer, "layer"_a)
        .def("set_angles", [](Plan& p, i32 index, uintptr_t cosine, uintptr_t sine, i64 count, i32 half) {
            p.set_angles(index, reinterpret_cast<const float*>(cosine), reinterpret_cast<const float*>(sine), count, half);
        }, "index"_a, "cosine"_a, "sine"_a, "count"_a, "half"_a)
        .def("set_rank_group", [](Plan& p, uintptr_t barrier, int rank, int size, i32 first_output, int file) {
            if (size < 2 || size > MAX_RANKS || rank < 0 || rank >= size) throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size));
            p.set_rank_group(reinterpret_cast<BarrierState*>(barrier), rank, size, first_output, file);
        }, "barrier"_a, "rank"_a, "size"_a, "first_output"_a, "file"_a, "Make the plan that of one rank of several; see RankGroup in rank_group.h.")
        .def("set_homes", &Plan::set_homes, "home_size"_a, "num_local_blocks"_a, "Let each home of home_size ranks attend to its own sequences; after set_rank_group.")
        .def("divide_rows", [](Plan& p, uintptr_t barrier, int rank, int size, int file) {
            if (size < 2 || size > MAX_RANKS || rank < 0 || rank >= size) throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size));
            p.divide_rows(reinterpret_cast<BarrierState*>(barrier), rank, size, file);
        }, "barrier"_a, "rank"_a, "size"_a, "file"_a, "Let each rank compute some of the tokens of a step; see Plan::divide_rows.")
        .def("set_context", &Plan::set_context, "place"_a, "num_places"_a, "num_local_blocks"_a,
             "Let groups of consecutive ranks share the tokens of sequences; after set_rank_group. See ContextJob in attention.h.")
        .def("set_stage", &Plan::set_stage, "is_first"_a, "is_last"_a, "first_layer"_a, "Make the plan that of a pipeline stage, before finish.")
        .def_static("row_stride", &row_stride, "size"_a, "Return the floats from one row to the next of rows of this size.")
        .def("set_exchange", [](Plan& p, nb::callable call) {
            p.set_exchange([call = std::move(call)](u8* base, const std::vector<WrittenBlock>& written) {
                const nb::gil_scoped_acquire acquire;
                std::vector<std::tuple<i64, i64, i64, i64>> blocks;
                for (const WrittenBlock& block : written) blocks.emplace_back(block.data - base, block.count, block.stride, block.num_bytes);
                return nb::cast<bool>(call(reinterpret_cast<uintptr_t>(base), blocks));
            });
        }, "call"_a, "Where ranks do not share memory: call(base, [(offset, count, stride, bytes)]) at every barrier, which must not raise; see RankGroup::exchange.")
        .def_prop_ro("num_barriers", &Plan::num_barriers)
        .def("expert_tokens", &Plan::expert_tokens, nb::call_guard<nb::gil_scoped_release>(), "Return how many tokens each expert of each layer has got, on all ranks together.")
        .def("set_lossy_routing", [](Plan& p, float capacity_factor, float bias_rate, float bias_limit, float min_share) {
            p.set_lossy_routing({capacity_factor, bias_rate, bias_limit, min_share});
        }, "capacity_factor"_a, "bias_rate"_a, "bias_limit"_a, "min_share"_a, "Change how experts are chosen, after finish; see LossyRouting.")
        .def("routing_counts", [](Plan& p) {
            std::vector<std::tuple<i64, i64, i64, double>> found;
            for (const RoutingCounts& each : p.routing_counts()) found.emplace_back(each.moved, each.dropped, each.weak, each.capacity_use);
            return found;
        }, "Return of each layer what lossy routing has done: choices moved, dropped, and dropped as weak, and the mean use of the busiest expert's capacity.")
        .def("place_experts", [](Plan& p, i32 layer, const std::vector<std::tuple<i32, std::shared_ptr<NativeWeight>, std::shared_ptr<NativeWeight>, std::shared_ptr<NativeWeight>>>& added,
                                 std::vector<i32> copies, std::vector<i32> own_copies) {
            std::vector<std::pair<i32, Expert>> experts;
            for (const auto& [index, gate, up, down] : added) experts.emplace_back(index, Expert{gate, up, down});
            p.place_experts(layer, experts, std::move(copies), std::move(own_copies));
        }, "layer"_a, "added"_a, "copies"_a, "own_copies"_a, "Give the rank another placement of a layer's experts, between two steps: (expert, gate, up, down) that it gets.")
        .def("copy_expert_tokens", [](Plan& p, uintptr_t to, i64 count) {
            i64* next = reinterpret_cast<i64*>(to);
            const std::vector<std::vector<i64>> all = p.expert_tokens();
            for (const auto& counts : all) count -= static_cast<i64>(counts.size());
            if (count != 0) throw std::invalid_argument("the memory of counts has not as many as there are experts");
            for (const auto& counts : all) next = std::copy(counts.begin(), counts.end(), next);
        }, "to"_a, "count"_a, "Write the tokens that the experts have got so far, one layer after the other, i64, to an address.")
        .def("set_entry", &Plan::set_entry, "entry"_a, "fuse"_a, "is_residual_normed"_a, "recycles_normed"_a)
        .def("keep_inputs", &Plan::keep_inputs, "layers"_a)
        .def("copy_queries", [](Plan& p, std::vector<i32> rows, uintptr_t out) {
            p.copy_queries(std::move(rows), reinterpret_cast<float*>(out));
        }, "rows"_a, "out"_a, "Write the queries of these rows of the next step to an address, layer by layer [rows][num_heads * head_dim] f32.")
        .def("finish", &Plan::finish)
        .def_prop_ro("has_plain_logits", &Plan::has_plain_logits)
        .def_prop_ro("scratch_bytes", &Plan::scratch_bytes);
}

// Steps of tokens, described by addresses and by runs.
void bind_steps(PlanClass& plan) {
    plan.def("step", [](Plan& p, uintptr_t token_ids, uintptr_t positions, uintptr_t slots, i32 num_tokens, i32 num_sequences, uintptr_t query_starts,
                        uintptr_t context_lens, uintptr_t block_tables, i64 table_stride, uintptr_t wanted_rows, i32 num_wanted_rows, i32 num_logit_rows, bool keeps_all, uintptr_t logits,
                        uintptr_t num_drafts, uintptr_t ancestors, uintptr_t layers, i32 num_layers, uintptr_t row_adapters, const std::vector<i32>& state_sources,
                        const StateSaves& state_saves) {
            StepInput in = describe_tokens(token_ids, positions, slots, num_tokens, num_sequences, query_starts, context_lens, block_tables, table_stride);
            in.batch.num_drafts = reinterpret_cast<const i32*>(num_drafts);
            in.batch.ancestors = reinterpret_cast<const u64*>(ancestors);
            in.wanted_rows = reinterpret_cast<const i32*>(wanted_rows);
            in.num_wanted_rows = num_wanted_rows;
            in.num_logit_rows = num_logit_rows;
            in.keeps_all = keeps_all;
            in.logits = reinterpret_cast<float*>(logits);
            in.layers = reinterpret_cast<const i32*>(layers);
            in.num_layers = num_layers;
            in.row_adapters = reinterpret_cast<const i32*>(row_adapters);
            const StateRows states(p, in, state_sources, state_saves);
            p.step(in);
        }, "token_ids"_a, "positions"_a, "slots"_a, "num_tokens"_a, "num_sequences"_a, "query_starts"_a, "context_lens"_a, "block_tables"_a,
            "table_stride"_a, "wanted_rows"_a, "num_wanted_rows"_a, "num_logit_rows"_a, "keeps_all"_a, "logits"_a, "num_drafts"_a = 0, "ancestors"_a = 0,
            "layers"_a = 0, "num_layers"_a = 0, "row_adapters"_a = 0, "state_sources"_a = std::vector<i32>{}, "state_saves"_a = StateSaves{},
             nb::call_guard<nb::gil_scoped_release>(), "Run all layers over the tokens of a step; see StepInput in plan.h.");
    plan.def("run", [](Plan& p, const std::vector<i64>& token_ids, const std::vector<i32>& starts, const std::vector<i32>& ends, const std::vector<uintptr_t>& tables,
                       i32 max_blocks, const std::vector<i32>& wanted_rows, i32 num_logit_rows, bool keeps_all, bool wants_best, uintptr_t logits, uintptr_t positions,
                       uintptr_t num_drafts, uintptr_t ancestors, uintptr_t rows, uintptr_t row_adapters, const std::vector<i32>& state_sources, const StateSaves& state_saves,
                       const std::vector<i64>& bound_keys, const std::vector<i32>& bound_firsts, const std::vector<float>& bound_gaps) {
            const BoundsRequest bounds = {bound_keys, bound_firsts, bound_gaps};
            const TokenRuns runs = {token_ids, starts, ends, std::vector<i32>(ends.size()), tables, max_blocks, p.has_windows()};
            const Placement placement(runs, p.block_size(), {});
            StepInput in;
            placement.fill(in, runs);
            if (positions != 0) in.positions = reinterpret_cast<const i64*>(positions);
            in.batch.num_drafts = reinterpret_cast<const i32*>(num_drafts);
            in.batch.ancestors = reinterpret_cast<const u64*>(ancestors);
            in.wanted_rows = wanted_rows.data();
            in.num_wanted_rows = static_cast<i32>(wanted_rows.size());
            in.num_logit_rows = num_logit_rows;
            in.keeps_all = keeps_all;
            in.rows = reinterpret_cast<float*>(rows);
            in.bounds = &bounds;
            in.row_adapters = reinterpret_cast<const i32*>(row_adapters);
            in.logits = reinterpret_cast<float*>(logits);
            const StateRows states(p, in, state_sources, state_saves);
            std::vector<i32> best(wants_best ? num_logit_rows : 0);
            if (logits == 0 && num_logit_rows > 0) {
                if (!wants_best) throw std::invalid_argument("logits have no place");
                in.best = best.data();
            }
            p.step(in);
            if (wants_best && in.best == nullptr && p.gives_results()) best_tokens(*p.kernels_used, in.logits, p.vocab(), num_logit_rows, p.vocab(), p.num_threads, best.data());
            return best;
        }, "token_ids"_a, "starts"_a, "ends"_a, "tables"_a, "max_blocks"_a, "wanted_rows"_a, "num_logit_rows"_a, "keeps_all"_a, "wants_best"_a, "logits"_a, "positions"_a = 0,
            "num_drafts"_a = 0, "ancestors"_a = 0, "rows"_a = 0, "row_adapters"_a = 0, "state_sources"_a = std::vector<i32>{}, "state_saves"_a = StateSaves{},
            "bound_keys"_a = std::vector<i64>{}, "bound_firsts"_a = std::vector<i32>{}, "bound_gaps"_a = std::vector<float>{},
             nb::call_guard<nb::gil_scoped_release>(),
            "Run all layers over runs of tokens (TokenRuns in runs.h) and return, if wanted, the best token of every row of logits, -1 for none. logits 0: these alone.");
}

// Steps that draft.
void bind_drafts(PlanClass& plan) {
    plan.def("draft", [](Plan& p, const std::vector<i64>& token_ids, const std::vector<i32>& starts, const std::vector<i32>& ends, const std::vector<i32>& origins,
                         const std::vector<uintptr_t>& tables, i32 max_blocks, uintptr_t features, i32 feature_size, const std::vector<i32>& counts, uintptr_t vocabulary,
                         float least_share) {
            if (counts.empty() || counts.size() != ends.size() || *std::min_element(counts.begin(), counts.end()) < 1)
                throw std::invalid_argument("a run of drafts needs a count for each sequence, at least 1");
            std::vector<i32> room(counts.size());
            for (size_t s = 0; s < room.size(); ++s) room[s] = counts[s] - 1;
            const i32 most = *std::max_element(counts.begin(), counts.end());
            const TokenRuns runs = {token_ids, starts, ends, origins, tables, max_blocks};
            const Placement placement(runs, p.block_size(), room);
            StepInput in;
            placement.fill(in, runs);
            in.features = reinterpret_cast<const float*>(features);
            in.feature_size = feature_size;
            std::vector<i64> tokens(counts.size() * most);
            std::vector<i32> kept(counts.size());
            p.draft(in, {most, counts.data(), reinterpret_cast<const i32*>(vocabulary), tokens.data(), least_share, kept.data()});
            std::vector<std::vector<i64>> found(counts.size());
            for (size_t s = 0; s < found.size(); ++s) found[s].assign(tokens.begin() + s * most, tokens.begin() + s * most + kept[s]);
            return found;
        }, "token_ids"_a, "starts"_a, "ends"_a, "origins"_a, "tables"_a, "max_blocks"_a, "features"_a, "feature_size"_a, "counts"_a, "vocabulary"_a,
            "least_share"_a = 0.0f, nb::call_guard<nb::gil_scoped_release>(), "Compute runs of tokens and return counts[s] drafts behind each, or fewer; see DraftRun in plan.h.");
    plan.def("enter", [](Plan& p, uintptr_t token_ids, uintptr_t positions, uintptr_t slots, i32 num_tokens, i32 num_sequences, uintptr_t query_starts,
                         uintptr_t context_lens, uintptr_t block_tables, i64 table_stride, uintptr_t features, i32 feature_size, uintptr_t wanted_rows, i32 num_wanted_rows,
                         uintptr_t logits, uintptr_t num_drafts, uintptr_t ancestors) {
            StepInput in = describe_tokens(token_ids, positions, slots, num_tokens, num_sequences, query_starts, context_lens, block_tables, table_stride);
            in.batch.num_drafts = reinterpret_cast<const i32*>(num_drafts);
            in.batch.ancestors = reinterpret_cast<const u64*>(ancestors);
            in.features = reinterpret_cast<const float*>(features);
            in.feature_size = feature_size;
            in.wanted_rows = reinterpret_cast<const i32*>(wanted_rows);
            in.num_wanted_rows = in.num_logit_rows = num_wanted_rows;
            in.logits = reinterpret_cast<float*>(logits);
            p.step(in);
        }, nb::call_guard<nb::gil_scoped_release>(), "A step of a plan whose entry is not token.");
}

// The results of a step.
void bind_results(PlanClass& plan) {
    plan.def("recycled", [](Plan& p, i32 count, uintptr_t out) {
            p.recycled(count, reinterpret_cast<float*>(out));
        }, nb::call_guard<nb::gil_scoped_release>(), "count"_a, "out"_a)
        .def("layer_inputs", [](Plan& p, const std::vector<i32>& rows, uintptr_t out) {
            p.layer_inputs(rows.data(), static_cast<i32>(rows.size()), reinterpret_cast<float*>(out));
        }, nb::call_guard<nb::gil_scoped_release>(), "rows"_a, "out"_a)
        .def("use_rows", [](Plan& p, uintptr_t rows, uintptr_t adapters, i32 count) {
            p.use_rows(reinterpret_cast<float*>(rows), reinterpret_cast<const i32*>(adapters), count);
        }, "rows"_a, "adapters"_a = 0, "count"_a = 0, "Take the rows of an earlier step of a pipeline stage for what logits and hidden_states compute next.")
        .def("forget_bounds", &Plan::forget_bounds, "keys"_a, "Let the bounds of sequences go.")
        .def("run_counts", &Plan::run_counts, "Return how many runs of keys steps with bounds might have skipped, and how many they have.")
        .def("move_tokens", [](Plan& p, uintptr_t from_slots, uintptr_t to_slots, i32 count, bool is_windowed) {
            p.move_tokens(reinterpret_cast<const i64*>(from_slots), reinterpret_cast<const i64*>(to_slots), count, is_windowed);
        }, nb::call_guard<nb::gil_scoped_release>(), "from_slots"_a, "to_slots"_a, "count"_a, "is_windowed"_a = false)
        .def("logits", [](Plan& p, uintptr_t rows, i32 count, uintptr_t out) {
            p.logits(reinterpret_cast<const i32*>(rows), count, reinterpret_cast<float*>(out));
        }, nb::call_guard<nb::gil_scoped_release>(), "rows"_a, "count"_a, "out"_a)
        .def("hidden_states", [](Plan& p, const std::vector<i32>& rows, uintptr_t out) {
            p.hidden_states(rows.data(), static_cast<i32>(rows.size()), reinterpret_cast<float*>(out));
        }, nb::call_guard<nb::gil_scoped_release>(), "rows"_a, "out"_a);
}

// The argmax prefilter, for its tests.
i32 prefiltered_best(const Int8Head& int8_head, const NativeWeight& head, uintptr_t x, i64 stride, i32 m, uintptr_t best_index, int num_threads, const std::string& isa) {
    struct Call {
        ArgmaxPrefilter prefilter;
        HeadRows rows;
        int num_threads = 0;
    } call;
    if (m < 1 || m > MAX_PREFILTER_ROWS) throw std::invalid_argument("the prefilter takes fewer rows at once");
    std::vector<float> values(static_cast<size_t>(m) * num_threads, -__builtin_inff());
    std::vector<i32> indices(static_cast<size_t>(m) * num_threads, -1);
    call.rows = {reinterpret_cast<const float*>(x), stride, m, false, values.data(), indices.data()};
    call.prefilter.begin(kernels_for(isa), head, int8_head, m, num_threads);
    run_team(num_threads, [](void* argument, Worker& worker) {
        Call& c = *static_cast<Call*>(argument);
        if (worker.rank == 0) c.num_threads = worker.size;
        c.prefilter.find(worker, c.rows);
    }, &call);
    for (i32 row = 0; row < m; ++row) {
        const i64 first = static_cast<i64>(row) * call.num_threads;
        float value = 0.0f;
        reinterpret_cast<i32*>(best_index)[row] = best_of(values.data() + first, indices.data() + first, call.num_threads, value);
    }
    return call.prefilter.num_redone();
}

void bind_int8_head(nb::module_& m) {
    nb::class_<Int8Head>(m, "Int8Head")
        .def("__init__", [](Int8Head* self, const NativeWeight& head, int num_threads, const std::string& isa) {
                 new (self) Int8Head(kernels_for(isa), head, num_threads);
             },
             "head"_a, "num_threads"_a = 1, "isa"_a = "", "The copy of a dense head that tells most outputs that are not the best; see argmax_prefilter.h.")
        .def_ro("is_bounded", &Int8Head::is_bounded)
        .def_prop_ro("num_bytes", &Int8Head::num_bytes)
        .def("best", &prefiltered_best, "head"_a, "x"_a, "stride"_a, "m"_a, "best_index"_a, "num_threads"_a = 1, "isa"_a = "", nb::call_guard<nb::gil_scoped_release>(),
             "Write the best output of each f32 row [m, k], as Finish::best finds it, and return of how many rows all outputs were computed.");
}

void bind_heads(nb::module_& m) {
    nb::class_<ParallelHeads>(m, "ParallelHeads")
        .def(nb::init<>())
        .def_rw("is_near", &ParallelHeads::is_near)
        .def("add", &ParallelHeads::add, "blocks"_a, "output"_a)
        .def("speak", [](const ParallelHeads& heads, uintptr_t hidden, i64 stride, i32 num_rows, i32 count, uintptr_t logits, int num_threads) {
            heads.speak(reinterpret_cast<const float*>(hidden), stride, num_rows, count, reinterpret_cast<float*>(logits), num_threads);
        }, "hidden"_a, "stride"_a, "num_rows"_a, "count"_a, "logits"_a, "num_threads"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Write the logits [count][num_rows][vocab] of the first heads.")
        .def("best", [](const ParallelHeads& heads, uintptr_t hidden, i64 stride, i32 num_rows, i32 count, uintptr_t vocabulary, int num_threads) {
            return heads.best(reinterpret_cast<const float*>(hidden), stride, num_rows, count, reinterpret_cast<const i32*>(vocabulary), num_threads);
        }, "hidden"_a, "stride"_a, "num_rows"_a, "count"_a, "vocabulary"_a, "num_threads"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Return the best tokens [num_rows][count] of the first heads, by vocabulary [vocab] i32 those of the model; 0: they are.");
    m.def("best_tokens", [](uintptr_t logits, i64 stride, i32 num_rows, i32 vocab, int num_threads) {
        std::vector<i32> found(num_rows);
        best_tokens(kernels(), reinterpret_cast<const float*>(logits), stride, num_rows, vocab, num_threads, found.data());
        return found;
    }, "logits"_a, "stride"_a, "num_rows"_a, "vocab"_a, "num_threads"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Return the best token of every row of f32 logits, the lowest of equal ones; -1 where there is none: a NaN, +inf, or all -inf.");
}
}  // namespace

void bind_plan(nb::module_& m) {
    bind_layer(m);
    PlanClass plan(m, "Plan");
    bind_setup(plan);
    bind_lora(m, plan);
    bind_steps(plan);
    bind_drafts(plan);
    bind_results(plan);
    bind_heads(m);
    bind_int8_head(m);
}
