// Building and running plans from Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "plan.h"

namespace nb = nanobind;
using namespace nb::literals;

void bind_plan(nb::module_& m) {
    using namespace quire;
    nb::class_<Norm>(m, "Norm").def("set", &Norm::set, "is_layer_norm"_a, "size"_a, "eps"_a, "weight"_a, "bias"_a = 0,
                                    "Copy f32 weights (any offset already added) from their addresses.");
    nb::class_<PlanLayer> layer(m, "PlanLayer");
    layer.def(nb::init<>());
#define QUIRE_FIELD(name) layer.def_rw(#name, &PlanLayer::name)
    QUIRE_FIELD(attn_in); QUIRE_FIELD(attn_out); QUIRE_FIELD(mlp_in); QUIRE_FIELD(mlp_out); QUIRE_FIELD(q_norm); QUIRE_FIELD(k_norm);
    QUIRE_FIELD(q); QUIRE_FIELD(k); QUIRE_FIELD(v); QUIRE_FIELD(o); QUIRE_FIELD(gate); QUIRE_FIELD(up); QUIRE_FIELD(down); QUIRE_FIELD(router);
    QUIRE_FIELD(num_heads); QUIRE_FIELD(num_kv_heads); QUIRE_FIELD(head_dim); QUIRE_FIELD(window); QUIRE_FIELD(rope);
    QUIRE_FIELD(scale); QUIRE_FIELD(softcap); QUIRE_FIELD(residual_scale); QUIRE_FIELD(is_qk_norm_whole); QUIRE_FIELD(top_k); QUIRE_FIELD(is_renormalized);
#undef QUIRE_FIELD
    layer.def("set_activation", [](PlanLayer& l, i32 activation) { l.activation = static_cast<Activation>(activation); })
        .def("add_expert", [](PlanLayer& l, std::shared_ptr<NativeWeight> gate, std::shared_ptr<NativeWeight> up, std::shared_ptr<NativeWeight> down) {
            l.experts.push_back({std::move(gate), std::move(up), std::move(down)});
        })
        .def("set_cache", [](PlanLayer& l, i32 format, i32 block_size, uintptr_t keys, uintptr_t values, uintptr_t key_scales, uintptr_t value_scales) {
            l.kv = {static_cast<KvFormat>(format), block_size, l.num_kv_heads, l.head_dim, reinterpret_cast<void*>(keys), reinterpret_cast<void*>(values),
                    reinterpret_cast<float*>(key_scales), reinterpret_cast<float*>(value_scales)};
        });
    nb::class_<Plan>(m, "Plan")
        .def(nb::init<i32, i32, bool, int>(), "hidden"_a, "vocab"_a, "is_bf16"_a, "num_threads"_a)
        .def_rw("final_norm", &Plan::final_norm)
        .def_rw("embed_norm", &Plan::embed_norm)
        .def_rw("feature_norm", &Plan::feature_norm)
        .def_rw("num_threads", &Plan::num_threads)
        .def("set_embedding", &Plan::set_embedding, "embed"_a, "positions"_a.none(), "scale"_a)
        .def("set_head", &Plan::set_head, "head"_a, "logit_scale"_a, "softcap"_a)
        .def("add_layer", &Plan::add_layer, "layer"_a)
        .def("set_angles", [](Plan& p, i32 index, uintptr_t cosine, uintptr_t sine, i64 count, i32 half) {
            p.set_angles(index, reinterpret_cast<const float*>(cosine), reinterpret_cast<const float*>(sine), count, half);
        }, "index"_a, "cosine"_a, "sine"_a, "count"_a, "half"_a)
        .def("set_entry", &Plan::set_entry, "entry"_a, "fuse"_a, "is_residual_normed"_a, "recycles_normed"_a)
        .def("keep_inputs", &Plan::keep_inputs, "layers"_a)
        .def("finish", &Plan::finish)
        .def_prop_ro("scratch_bytes", &Plan::scratch_bytes)
        .def("step", [](Plan& p, uintptr_t token_ids, uintptr_t positions, uintptr_t slots, i32 num_tokens, i32 num_sequences, uintptr_t query_starts,
                        uintptr_t context_lens, uintptr_t block_tables, i64 table_stride, uintptr_t wanted_rows, i32 num_wanted_rows, i32 num_logit_rows, bool keeps_all, uintptr_t logits,
                        uintptr_t num_drafts, uintptr_t ancestors, uintptr_t layers, i32 num_layers) {
            StepInput in;
            in.token_ids = reinterpret_cast<const i64*>(token_ids);
            in.positions = reinterpret_cast<const i64*>(positions);
            in.slots = reinterpret_cast<const i64*>(slots);
            in.batch = {num_sequences, num_tokens, reinterpret_cast<const i32*>(query_starts), reinterpret_cast<const i32*>(context_lens),
                        reinterpret_cast<const i32*>(block_tables), table_stride, reinterpret_cast<const i32*>(num_drafts),
                        reinterpret_cast<const u64*>(ancestors)};
            in.wanted_rows = reinterpret_cast<const i32*>(wanted_rows);
            in.num_wanted_rows = num_wanted_rows;
            in.num_logit_rows = num_logit_rows;
            in.keeps_all = keeps_all;
            in.logits = reinterpret_cast<float*>(logits);
            in.layers = reinterpret_cast<const i32*>(layers);
            in.num_layers = num_layers;
            p.step(in);
        }, "token_ids"_a, "positions"_a, "slots"_a, "num_tokens"_a, "num_sequences"_a, "query_starts"_a, "context_lens"_a, "block_tables"_a,
            "table_stride"_a, "wanted_rows"_a, "num_wanted_rows"_a, "num_logit_rows"_a, "keeps_all"_a, "logits"_a, "num_drafts"_a = 0, "ancestors"_a = 0,
            "layers"_a = 0, "num_layers"_a = 0, nb::call_guard<nb::gil_scoped_release>(), "Run all layers over the tokens of a step; see StepInput in plan.h.")
        .def("draft", [](Plan& p, uintptr_t token_ids, uintptr_t positions, uintptr_t slots, i32 num_tokens, i32 num_sequences, uintptr_t query_starts,
                         uintptr_t context_lens, uintptr_t block_tables, i64 table_stride, uintptr_t features, i32 feature_size, i32 num_drafts, uintptr_t counts, uintptr_t vocabulary,
                         uintptr_t tokens) {
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
            in.features = reinterpret_cast<const float*>(features);
            in.feature_size = feature_size;
            p.draft(in, {num_drafts, reinterpret_cast<const i32*>(counts), reinterpret_cast<const i32*>(vocabulary), reinterpret_cast<i64*>(tokens)});
        }, nb::call_guard<nb::gil_scoped_release>(), "Compute tokens and draft behind them; see DraftRun in plan.h.")
        .def("enter", [](Plan& p, uintptr_t token_ids, uintptr_t positions, uintptr_t slots, i32 num_tokens, i32 num_sequences, uintptr_t query_starts,
                         uintptr_t context_lens, uintptr_t block_tables, i64 table_stride, uintptr_t features, i32 feature_size, uintptr_t wanted_rows, i32 num_wanted_rows,
                         uintptr_t logits) {
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
            in.features = reinterpret_cast<const float*>(features);
            in.feature_size = feature_size;
            in.wanted_rows = reinterpret_cast<const i32*>(wanted_rows);
            in.num_wanted_rows = in.num_logit_rows = num_wanted_rows;
            in.logits = reinterpret_cast<float*>(logits);
            p.step(in);
        }, nb::call_guard<nb::gil_scoped_release>(), "A step of a plan whose entry is not token.")
        .def("recycled", [](Plan& p, i32 count, uintptr_t out) {
            p.recycled(count, reinterpret_cast<float*>(out));
        }, nb::call_guard<nb::gil_scoped_release>(), "count"_a, "out"_a)
        .def("layer_inputs", [](Plan& p, uintptr_t rows, i32 count, uintptr_t out) {
            p.layer_inputs(reinterpret_cast<const i32*>(rows), count, reinterpret_cast<float*>(out));
        }, nb::call_guard<nb::gil_scoped_release>(), "rows"_a, "count"_a, "out"_a)
        .def("move_tokens", [](Plan& p, uintptr_t from_slots, uintptr_t to_slots, i32 count) {
            p.move_tokens(reinterpret_cast<const i64*>(from_slots), reinterpret_cast<const i64*>(to_slots), count);
        }, nb::call_guard<nb::gil_scoped_release>(), "from_slots"_a, "to_slots"_a, "count"_a)
        .def("logits", [](Plan& p, uintptr_t rows, i32 count, uintptr_t out) {
            p.logits(reinterpret_cast<const i32*>(rows), count, reinterpret_cast<float*>(out));
        }, nb::call_guard<nb::gil_scoped_release>(), "rows"_a, "count"_a, "out"_a)
        .def("hidden_states", [](Plan& p, uintptr_t rows, i32 count, uintptr_t out) {
            p.hidden_states(reinterpret_cast<const i32*>(rows), count, reinterpret_cast<float*>(out));
        }, nb::call_guard<nb::gil_scoped_release>(), "rows"_a, "count"_a, "out"_a);
}
