// Attention over the paged cache, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <new>
#include <stdexcept>
#include <string>

#include "binding.h"

namespace nb = nanobind;
using namespace quire;

namespace {

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

const AttentionTable& attention_of(const std::string& isa) {
    return *kernels_for(isa).attention;
}

KvFormat format_of(const std::string& name) {
    if (name == "bf16") return KvFormat::bf16;
    if (name == "f32") return KvFormat::f32;
    if (name == "i8") return KvFormat::i8;
    if (name == "r4") return KvFormat::r4;
    if (name == "k8v4") return KvFormat::k8v4;
    if (name == "f8") return KvFormat::f8;
    throw std::invalid_argument("cache format '" + name + "' is not one of bf16, f32, i8, r4, k8v4, f8");
}

void init_layer(KvLayer* layer, const std::string& format, i32 block_size, i32 kv_heads, i32 head_dim, uintptr_t keys,
                uintptr_t values, uintptr_t key_scales, uintptr_t value_scales) {
    const KvFormat kind = format_of(format);
    if (block_size < 16 || block_size % 16 != 0)
        throw std::invalid_argument("block_size is " + std::to_string(block_size) + "; it must be a multiple of 16");
    if (head_dim < 2 || head_dim % 2 != 0)
        throw std::invalid_argument("head_dim is " + std::to_string(head_dim) + "; it must be even and positive");
    if (kv_heads < 1) throw std::invalid_argument("kv_heads is " + std::to_string(kv_heads) + "; it must be positive");
    if (has_scales(kind) && (key_scales == 0 || value_scales == 0))
        throw std::invalid_argument("a cache of " + format + " needs key_scales and value_scales");
    if (value_format(kind) == KvFormat::r4 && head_dim > MAX_ROTATED_DIM)
        throw std::invalid_argument("head_dim is " + std::to_string(head_dim) + "; a cache of " + format + " allows at most " + std::to_string(MAX_ROTATED_DIM));
    if (kind == KvFormat::k8v4 && values == keys) throw std::invalid_argument("rows that are both key and value have one format, got " + format);
    new (layer) KvLayer{kind, block_size, kv_heads, head_dim, pointer<void>(keys), pointer<void>(values),
                        pointer<float>(key_scales), pointer<float>(value_scales)};
}

void init_batch(Batch* batch, i32 num_sequences, i32 num_tokens, uintptr_t query_starts, uintptr_t context_lens,
                uintptr_t block_tables, i64 table_stride, uintptr_t num_drafts, uintptr_t ancestors) {
    if ((num_drafts == 0) != (ancestors == 0)) throw std::invalid_argument("a batch has both num_drafts and ancestors, or neither");
    new (batch) Batch{num_sequences, num_tokens, pointer<const i32>(query_starts), pointer<const i32>(context_lens),
                      pointer<const i32>(block_tables), table_stride, pointer<const i32>(num_drafts), pointer<const u64>(ancestors)};
}

void init_job(AttentionJob* job, const KvLayer& kv, i32 num_heads, float scale, i32 window, float softcap, uintptr_t sinks,
              bool is_bf16, i32 first_value) {
    if (num_heads < 1 || num_heads % kv.kv_heads != 0)
        throw std::invalid_argument("num_heads is " + std::to_string(num_heads) + "; it must be a multiple of kv_heads, " +
                                    std::to_string(kv.kv_heads));
    if (window < 0) throw std::invalid_argument("window is " + std::to_string(window) + "; it must be positive, or 0 for none");
    new (job) AttentionJob{};
    job->kv = kv;
    job->num_heads = num_heads;
    job->scale = scale;
    job->window = window;
    job->softcap = softcap;
    job->sinks = pointer<const float>(sinks);
    job->is_bf16 = is_bf16;
    job->first_value = first_value;
}

void set_rows(AttentionJob& job, uintptr_t q, i64 q_stride, uintptr_t out, i64 out_stride, uintptr_t scratch) {
    job.q = pointer<const float>(q);
    job.q_stride = q_stride;
    job.out = pointer<float>(out);
    job.out_stride = out_stride;
    job.scratch = pointer<u8>(scratch);
}

i64 attention_scratch_bytes(const AttentionJob& job, const Batch& batch, int num_threads, const std::string& isa) {
    return attention_of(isa).scratch_bytes(job, batch, num_threads);
}

void attend(const AttentionJob& job, const Batch& batch, int num_threads, const std::string& isa) {
    struct Call {
        const AttentionTable& table;
        const AttentionJob& job;
        const Batch& batch;
    } call = {attention_of(isa), job, batch};
    run_team(
        num_threads,
        [](void* argument, Worker& worker) {
            const Call& c = *static_cast<Call*>(argument);
            c.table.attend(worker, c.job, c.batch);
        },
        &call);
}

struct Rows {
    uintptr_t slots, keys, values;
    i64 num_tokens;
};

void store_kv(const KvLayer& kv, uintptr_t slots, i64 num_tokens, uintptr_t keys, uintptr_t values, int num_threads,
              const std::string& isa) {
    struct Call {
        const AttentionTable& table;
        const KvLayer& kv;
        Rows rows;
    } call = {attention_of(isa), kv, {slots, keys, values, num_tokens}};
    run_team(
        num_threads,
        [](void* argument, Worker& worker) {
            const Call& c = *static_cast<Call*>(argument);
            const i64 width = static_cast<i64>(c.kv.kv_heads) * c.kv.head_dim;
            const i64 end = share_start(c.rows.num_tokens, worker.rank + 1, worker.size);
            for (i64 token = share_start(c.rows.num_tokens, worker.rank, worker.size); token < end; ++token)
                c.table.store(c.kv, pointer<const i64>(c.rows.slots)[token], 0, c.kv.kv_heads, pointer<const float>(c.rows.keys) + token * width,
                              pointer<const float>(c.rows.values) + token * width);
        },
        &call);
}

void move_kv(const KvLayer& kv, uintptr_t from_slots, uintptr_t to_slots, i64 num_tokens, const std::string& isa) {
    const AttentionTable& table = attention_of(isa);
    for (i64 i = 0; i < num_tokens; ++i) table.move(kv, pointer<const i64>(from_slots)[i], pointer<const i64>(to_slots)[i]);
}

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<KvLayer>(m, "KvLayer", "One layer's paged keys and values; attention.h documents the layout. Does not own the memory.")
        .def("__init__", &init_layer, nb::arg("format"), nb::arg("block_size"), nb::arg("kv_heads"), nb::arg("head_dim"),
             nb::arg("keys"), nb::arg("values"), nb::arg("key_scales") = 0, nb::arg("value_scales") = 0);
    nb::class_<Batch>(m, "AttentionBatch",
                      "Where the tokens of one step stand: i32 arrays by address, but u64 for ancestors; see attention.h. Does not own the memory.")
        .def("__init__", &init_batch, nb::arg("num_sequences"), nb::arg("num_tokens"), nb::arg("query_starts"),
             nb::arg("context_lens"), nb::arg("block_tables"), nb::arg("table_stride"), nb::arg("num_drafts") = 0,
             nb::arg("ancestors") = 0);
    nb::class_<AttentionJob>(m, "AttentionJob", "Attention of one layer; set_rows gives q, out and scratch. Does not own the memory.")
        .def("__init__", &init_job, nb::arg("kv"), nb::arg("num_heads"), nb::arg("scale"), nb::arg("window") = 0,
             nb::arg("softcap") = 0.0f, nb::arg("sinks") = 0, nb::arg("is_bf16") = true, nb::arg("first_value") = 0)
        .def("set_rows", &set_rows, nb::arg("q"), nb::arg("q_stride"), nb::arg("out"), nb::arg("out_stride"), nb::arg("scratch"),
             "Set the addresses of q and out [num_tokens][stride] f32, and of 64-aligned scratch of attention_scratch_bytes.");
    m.def("attention_scratch_bytes", &attention_scratch_bytes, nb::arg("job"), nb::arg("batch"), nb::arg("num_threads"),
          nb::arg("isa") = "", "Return the bytes of scratch that attend needs.");
    m.def("attend", &attend, nb::arg("job"), nb::arg("batch"), nb::arg("num_threads"), nb::arg("isa") = "",
          nb::call_guard<nb::gil_scoped_release>(), "Write the attention of every row of q to out.");
    m.def("store_kv", &store_kv, nb::arg("kv"), nb::arg("slots"), nb::arg("num_tokens"), nb::arg("keys"), nb::arg("values"),
          nb::arg("num_threads"), nb::arg("isa") = "", nb::call_guard<nb::gil_scoped_release>(),
          "Write the keys and values [num_tokens][kv_heads * head_dim] f32 of tokens to their slots, i64.");
    m.def("move_kv", &move_kv, nb::arg("kv"), nb::arg("from_slots"), nb::arg("to_slots"), nb::arg("num_tokens"), nb::arg("isa") = "",
          nb::call_guard<nb::gil_scoped_release>(), "Copy tokens of one layer to other slots, i64, one after the other.");
}
