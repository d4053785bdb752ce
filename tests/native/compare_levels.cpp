// Runs kernels on small inputs on each instruction set that supported_kernels() lists, and compares the bits with those of the
// portable level, compiled with fused multiply-adds (see test_emulated_levels.py). Without Python, so that it can be cross-compiled
// and run in an emulator. Prints a line per difference and a summary; exits with 1 if there is a difference.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <functional>
#include <string>
#include <vector>

#include "pack.h"
#include "tables.h"

using namespace quire;

namespace {

// The results of a case as 32-bit words; NaN of any payload is the same.
using Words = std::vector<u32>;
struct Case {
    std::string name;
    std::function<Words(const Kernels&)> run;
};

u64 state = 1;
u32 random_bits() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<u32>(state >> 32);
}
float as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
u32 as_word(float x) { u32 y; memcpy(&y, &x, 4); return y; }
// About normal, mean 0.
float random_value() {
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(random_bits() >> 8) * 0x1p-24f - 0.5f;
    return sum;
}
std::vector<float> random_values(size_t count, float scale = 1.0f) {
    std::vector<float> values(count);
    for (float& value : values) value = random_value() * scale;
    return values;
}
u16 bf16_of(float x) { return static_cast<u16>(as_word(x) >> 16); }
u16 f16_of(float x) {  // truncated, normal numbers only
    const u32 u = as_word(x);
    return static_cast<u16>((u >> 16 & 0x8000) | (((u & 0x7fffffff) - (112u << 23)) >> 13));
}
Words words_of(const float* values, size_t count) {
    Words words(count);
    for (size_t i = 0; i < count; ++i) words[i] = values[i] != values[i] ? 0x7fc00000u : as_word(values[i]);
    return words;
}
void append(Words& to, const Words& more) { to.insert(to.end(), more.begin(), more.end()); }
template <class Body> void run_alone(Body body) {
    run_team(1, [](void* argument, Worker& worker) { (*static_cast<Body*>(argument))(worker); }, &body);
}

// --- simd.h ---

bool has_suffix(const std::string& name, const char* suffix) { return name.size() >= strlen(suffix) && name.compare(name.size() - strlen(suffix), std::string::npos, suffix) == 0; }

// Operand 0, 1 or 2 of an operation: any bits, or what its contract allows.
void fill_operand(const std::string& name, int operand, std::vector<u8>& bytes) {
    static const u32 edges[] = {0, 0x80000000u, 0x3f800000u, 0x3fc00000u, 0x40200000u, 1,
                                0x007fffffu, 0x00800000u, 0x7f7fffffu, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x4f000000u, 0xcf000000u, 0x477fefffu, 0x33000001u};
    for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
        u32 word = random_bits();
        const u32 kind = random_bits() % 4;
        if (kind == 0) word = edges[random_bits() % 16];
        if (kind == 1) word = as_word(random_value() * 8);
        const bool is_mask = (operand == 0 && (name == "select" || name == "select_i32")) || (operand == 1 && (name == "load_u8" || name.compare(0, 8, "compress") == 0));
        if (is_mask) word &= 1;
        if ((operand == 0 && name == "first_lanes") || (operand == 1 && has_suffix(name, "_masked"))) word = random_bits() % 17;
        if (name == "level_pairs" && operand == 0) word &= 0x000f000f;
        if (name == "at_step") word = operand == 0 ? static_cast<u32>(static_cast<i32>(random_bits() % 512) - 256) : static_cast<u32>(i / 64);
        if (name == "times_power") word = as_word(operand == 1 ? static_cast<float>(static_cast<i32>(random_bits() % 200) - 100) : random_value());
        if (name == "store_bf16_flushed" && (word & 0x7f800000u) == 0) word = 0;  // denormals may become 0
        if (name == "max_lanes" && (word & 0x7f800000u) == 0x7f800000u) word = 0;  // which lane wins next to NaN is not defined
        if (name == "dot_u8s8" && operand == 2) for (int j = 0; j < 32; j += 8) if ((word >> j & 255) == 128) word ^= 1u << j;
        memcpy(&bytes[i], &word, 4);
    }
}

Words run_operation(const Kernels& kernels, i32 index) {
    const SimdOperation& operation = kernels.elementwise->simd[index];
    Words all;
    for (u64 round = 0; round < 200; ++round) {
        state = round * 977 + index;
        std::vector<u8> a(operation.a_bytes), b(operation.b_bytes), c(operation.c_bytes), out(operation.out_bytes);
        fill_operand(operation.name, 0, a), fill_operand(operation.name, 1, b), fill_operand(operation.name, 2, c);
        operation.run(a.data(), b.data(), c.data(), out.data());
        std::vector<float> values((out.size() + 3) / 4);
        memcpy(values.data(), out.data(), out.size());
        append(all, words_of(values.data(), values.size()));
    }
    return all;
}

// --- linear layers ---

struct WeightMemory {
    Weight w;
    std::vector<u8> panels;
    std::vector<u16> scales, offsets;
    std::vector<float> columns, biases, blocks;
    std::vector<Exception> exceptions;
    std::vector<Window> windows;
    std::vector<i32> order;
};

struct LinearShape {
    const char* name;
    Format format;
    i32 n, k, group, input_group;
    bool has_group_scales, has_offsets, has_extras;
    bool is_linear = true;  // the levels of u4
};

void make_weight(WeightMemory& m, const LinearShape& s) {
    Weight& w = m.w;
    w.format = s.format, w.n = s.n, w.k = s.k;
    const bool is_quantized = s.format == Format::u8 || s.format == Format::u4;
    const i32 whole = (s.k + 7) / 8 * 8, width = panels_of(w) * 16;
    if (is_quantized) w.group = s.group >= s.k ? whole : s.group, w.input_group = s.input_group >= s.k ? (whole + w.group - 1) / w.group * w.group : s.input_group;
    w.panel_bytes = panel_lines(s.format, s.k) * 64;
    m.panels.assign(panels_of(w) * w.panel_bytes + 4096, 0);
    w.data = m.panels.data();
    i8 levels[16];
    for (int i = 0; i < 16; ++i) levels[i] = static_cast<i8>(s.is_linear ? i - 8 : (i - 8) * (i < 8 ? 15 : 17) + 1), w.table[i] = static_cast<u8>(levels[i] + 128);
    const size_t count = static_cast<size_t>(s.n) * s.k;
    if (is_quantized) {
        std::vector<i8> codes(count);
        for (i8& code : codes) code = s.format == Format::u4 ? levels[random_bits() % 16] : static_cast<i8>(random_bits() % 255 - 127);
        pack_codes(s.format, codes.data(), s.k, s.n, s.k, 0, s.n, levels, 16, m.panels.data());
    } else if (is_float8(s.format)) {
        std::vector<u8> codes(count);
        for (u8& code : codes) do code = static_cast<u8>(random_bits()); while ((code & 127) == 127);
        pack_float8(codes.data(), s.k, s.n, s.k, 0, s.n, m.panels.data());
        w.block = s.group < s.k ? s.group : 0;
        if (w.block != 0) m.blocks = random_values(static_cast<size_t>(width) * groups_of(s.k, w.block)), w.block_scales = m.blocks.data();
    } else if (s.format == Format::f32) {
        pack_dense(s.format, random_values(count).data(), s.k, s.n, s.k, 0, s.n, m.panels.data());
    } else {
        std::vector<u16> halves(count);
        for (u16& half : halves) half = s.format == Format::f16 ? f16_of(random_value()) : bf16_of(random_value());
        if (s.format == Format::bf12) {
            std::vector<std::vector<Exception>> found(panels_of(w));
            m.columns.assign(width, 1.0f), m.windows.resize(found.size());
            pack_bf12(halves.data(), s.k, s.n, s.k, 0, s.n, m.panels.data(), m.columns.data(), found.data());
            for (const auto& panel : found) m.exceptions.insert(m.exceptions.end(), panel.begin(), panel.end());
            size_t start = 0;
            for (size_t p = 0; p < found.size(); start += found[p++].size()) m.windows[p] = {m.exceptions.data() + start, static_cast<i32>(found[p].size())};
            w.windows = m.windows.data(), w.column_scale = m.columns.data();
        } else {
            pack_dense(s.format, halves.data(), s.k, s.n, s.k, 0, s.n, m.panels.data());
        }
    }
    const auto halves = [&](std::vector<u16>& to) {
        to.resize(static_cast<size_t>(width) * groups_of(s.k, w.group));
        for (u16& value : to) value = f16_of(0.01f + fabsf(random_value()));
        return to.data();
    };
    if (s.has_group_scales) w.group_scales = halves(m.scales);
    if (s.has_offsets) w.group_offsets = halves(m.offsets);
    if (!s.has_extras) return;
    if (s.format != Format::bf12) m.columns = random_values(width), w.column_scale = m.columns.data();
    m.biases = random_values(width), w.bias = m.biases.data();
    for (i32 j = 0; j < s.k; ++j) m.order.push_back((j * 7 + 3) % s.k);  // k has no factor 7
    w.columns = m.order.data();
}

struct Input {
    Packed packed;
    std::vector<u32> words;
    std::vector<float> scales, sums;
    std::vector<i32> starts;

    Input(const Kernels& kernels, const Weight& w, i32 m, const float* x) {
        packed.kind = input_kind(w.format), packed.m = m, packed.k = w.k, packed.group = w.group, packed.input_group = w.input_group;
        packed.tile_rows = kernels.linear->tile_rows(packed.kind, m), packed.columns = w.columns;
        const size_t groups = static_cast<size_t>(groups_of(w.k, w.group)) * m;
        words.resize(static_cast<size_t>(steps_of(packed.kind, w.k)) * m), scales.resize(groups), sums.resize(groups), starts.resize(groups);
        packed.data = words.data(), packed.scales = scales.data(), packed.sums = sums.data(), packed.starts = starts.data();
        kernels.linear->pack_rows(packed, 0, m, x, w.k, 0, w.k);
    }
};

Words run_linear(const Kernels& kernels, const LinearShape& shape) {
    Words all;
    state = shape.n * 31 + shape.k;
    WeightMemory first, second;
    make_weight(first, shape), make_weight(second, shape);
    for (const i32 m : {1, 2, 3, 5, 6, 7, 13}) {
        const std::vector<float> x = random_values(static_cast<size_t>(m) * shape.k);
        for (const Finish finish : {Finish::store, Finish::gate, Finish::best}) {
            std::vector<float> out(static_cast<size_t>(m) * shape.n, as_float(0x7fc00000u)), best(m, -INFINITY);
            std::vector<i32> index(m, -1);
            run_alone([&](Worker& worker) {
                const Input input(kernels, first.w, m, x.data());
                LinearJob job;
                job.weight = &first.w, job.second = &second.w, job.input = &input.packed, job.finish = finish, job.is_near = m == 2;
                job.out = out.data(), job.out_stride = shape.n, job.best_value = best.data(), job.best_index = index.data();
                kernels.linear->linear(worker, &job, 1);
                barrier(worker);
            });
            if (finish != Finish::best) append(all, words_of(out.data(), out.size()));
            else for (i32 r = 0; r < m; ++r) all.push_back(as_word(best[r])), all.push_back(static_cast<u32>(index[r]));
        }
    }
    std::vector<float> row(shape.k);
    kernels.linear->unpack_row(first.w, shape.n - 1, row.data());
    append(all, words_of(row.data(), row.size()));
    return all;
}

const LinearShape linear_shapes[] = {
    {"f32", Format::f32, 40, 50, 0, 0, false, false, true},
    {"bf16", Format::bf16, 72, 51, 0, 0, false, false, true},
    {"f16", Format::f16, 40, 50, 0, 0, false, false, false},
    {"bf12", Format::bf12, 40, 64, 0, 0, false, false, false},
    {"f8", Format::f8, 40, 48, 16, 0, false, false, false},
    {"f8_whole", Format::f8, 40, 48, 48, 0, false, false, true},
    {"f8_wide", Format::f8_wide, 40, 48, 16, 0, false, false, false},
    {"u8_rows", Format::u8, 72, 61, 61, 61, false, false, true},
    {"u8_groups", Format::u8, 40, 104, 32, 64, true, false, false},
    {"u8_odd_groups", Format::u8, 40, 60, 12, 12, true, true, false},
    {"u4_groups", Format::u4, 72, 104, 32, 32, true, false, true},
    {"u4_offsets", Format::u4, 40, 104, 32, 104, true, true, false},
    {"u4_levels", Format::u4, 40, 72, 24, 24, true, false, false, false},
    {"u4_rows", Format::u4, 40, 70, 70, 70, false, false, false, false},
};

// --- attention ---

Words run_attention(const Kernels& kernels, KvFormat format, bool is_bf16, i32 window, float softcap, bool has_sinks) {
    constexpr i32 HEADS = 6, KV_HEADS = 2, DIM = 32, BLOCK = 16, BLOCKS = 8, CONTEXT[2] = {70, 21}, QUERIES[2] = {1, 9};
    state = 5;
    const size_t elements = static_cast<size_t>(BLOCKS) * KV_HEADS * BLOCK * DIM;
    std::vector<u8> keys(elements * 4 + 64), values(elements * 4 + 64);
    std::vector<float> key_scales(BLOCKS * KV_HEADS * BLOCK), value_scales(key_scales.size());
    AttentionJob job;
    job.kv = {format, BLOCK, KV_HEADS, DIM, keys.data(), values.data(), key_scales.data(), value_scales.data()};
    const std::vector<i32> starts = {0, QUERIES[0], QUERIES[0] + QUERIES[1]}, contexts = {CONTEXT[0], CONTEXT[1]}, tables = {3, 0, 5, 1, 6, 7, 2, 0, 0, 0};
    const i32 num_tokens = starts[2];
    const std::vector<float> q = random_values(static_cast<size_t>(num_tokens) * HEADS * DIM), sinks = random_values(HEADS);
    std::vector<float> out(q.size(), as_float(0x7fc00000u));
    run_alone([&](Worker& worker) {
        for (i32 s = 0; s < 2; ++s)
            for (i32 t = 0; t < contexts[s]; ++t) {
                const std::vector<float> k = random_values(KV_HEADS * DIM), v = random_values(KV_HEADS * DIM);
                kernels.attention->store(job.kv, tables[s * 5 + t / BLOCK] * BLOCK + t % BLOCK, 0, KV_HEADS, k.data(), v.data());
            }
        kernels.attention->move(job.kv, 3 * BLOCK + 2, 3 * BLOCK + 5);
        job.num_heads = HEADS, job.scale = 0.2f, job.window = window, job.softcap = softcap, job.sinks = has_sinks ? sinks.data() : nullptr;
        job.is_bf16 = is_bf16, job.q = q.data(), job.q_stride = HEADS * DIM, job.out = out.data(), job.out_stride = HEADS * DIM;
        Batch batch;
        batch.num_sequences = 2, batch.num_tokens = num_tokens, batch.query_starts = starts.data(), batch.context_lens = contexts.data();
        batch.block_tables = tables.data(), batch.table_stride = 5;
        std::vector<u8> scratch(kernels.attention->scratch_bytes(job, batch, 1) + 64);
        job.scratch = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
        kernels.attention->attend(worker, job, batch);
    });
    return words_of(out.data(), out.size());
}

// --- norms, routing, sampler, quantisation, recurrences ---

Words run_elementwise(const Kernels& kernels) {
    state = 9;
    const ElementwiseTable& table = *kernels.elementwise;
    Words all;
    for (const i32 size : {1, 31, 64}) {
        const std::vector<float> x = random_values(size * 4), weight = random_values(size), bias = random_values(size), angles = random_values(size);
        std::vector<float> y = x;
        NormJob norm = {size % 2 == 0, size, 1e-5f, weight.data(), bias.data()};
        table.norm(norm, x.data(), y.data());
        append(all, words_of(y.data(), y.size()));
        if (size == 64) table.turn_heads(&norm, y.data(), 4, 64, angles.data(), weight.data(), 16), table.split_pairs(y.data(), 4, 64, 32);
        for (i32 kind = 0; kind < 5; ++kind) table.activate(static_cast<Activation>(kind), y.data(), kind % 2 == 0 ? x.data() : nullptr, size);
        table.scale_and_cap(y.data(), size, 3.0f, 2.0f), table.add_scaled(y.data(), x.data(), 0.3f, size);
        y.push_back(table.share_of_largest(x.data(), size, 2.0f, 0.7f));
        append(all, words_of(y.data(), y.size()));
    }
    for (const Scoring scoring : {Scoring::softmax, Scoring::sigmoid, Scoring::sparse}) {
        std::vector<float> logits = random_values(40), weights(4);
        std::vector<i32> chosen(4);
        RouteJob route;
        route.num_experts = 40, route.top_k = 4, route.scoring = scoring, route.threshold = 0.1f;
        table.route(route, logits.data(), chosen.data(), weights.data());
        append(all, words_of(weights.data(), 4));
        for (const i32 expert : chosen) all.push_back(static_cast<u32>(expert));
    }
    return all;
}

Words run_sampler(const Kernels& kernels) {
    constexpr i32 VOCAB = 1003;
    state = 11;
    const SamplerTable& table = *kernels.sampler;
    const std::vector<float> logits = random_values(VOCAB, 4.0f);
    std::vector<u32> mask((VOCAB + 31) / 32);
    for (u32& word : mask) word = random_bits();
    std::vector<SampleRow> rows(24);
    for (size_t i = 0; i < rows.size(); ++i)
        rows[i] = {logits.data(), 1.25f, i % 8 == 0, i % 2 == 1 ? 20 : 0,
                   i % 3 == 1 ? 0.8 : 1.0, i % 4 == 3 ? -3.0f : -INFINITY, i * 77, static_cast<u32>(i), i % 5 == 0 ? mask.data() : nullptr};
    std::vector<SampleResult> results(rows.size());
    std::vector<u8> scratch(table.scratch_bytes(VOCAB) + 64);
    u8* const aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
    std::vector<i32> top(5);
    std::vector<float> top_values(5), noise((VOCAB + 63) / 64 * 64);
    LogprobRow row;
    row.logits = logits.data(), row.token = 17, row.num_top = 5, row.top_tokens = top.data(), row.top_values = top_values.data();
    run_alone([&](Worker& worker) { table.sample(worker, rows.data(), 24, VOCAB, results.data(), aligned); });
    run_alone([&](Worker& worker) { table.logprobs(worker, &row, 1, VOCAB, aligned); });
    table.noise(7, 3, VOCAB, noise.data());
    Words all = words_of(noise.data(), VOCAB);
    append(all, words_of(top_values.data(), 5)), append(all, words_of(&row.logprob, 1));
    for (const i32 token : top) all.push_back(static_cast<u32>(token));
    for (const SampleResult& result : results) all.push_back(static_cast<u32>(result.token)), all.push_back(static_cast<u32>(result.status));
    return all;
}

Words run_quantize(const Kernels& kernels, Quantization kind, bool is_bf16) {
    constexpr i32 ROWS = 21, K = 64, SIZE = 32;
    state = 13;
    const std::vector<float> weights = random_values(ROWS * K), clips = {1.0f, 0.9f, 0.75f};
    std::vector<u16> halves(weights.size());
    for (size_t i = 0; i < halves.size(); ++i) halves[i] = bf16_of(weights[i]);
    std::vector<float> affine_clips = clips, table(512), scale(ROWS * K), offset(ROWS * K), scratch(QUANTIZE_SCRATCH + 16);
    for (float& clip : affine_clips) clip /= 15.0f;
    for (int i = 0; i < 512; ++i) table[i] = static_cast<float>(i < 140 ? -120 : i < 256 ? -40 : i < 400 ? 30 : 110);
    std::vector<i8> codes(ROWS * K);
    const bool is_rowwise = kind == Quantization::int8, is_affine = kind == Quantization::affine;
    QuantizeJob job = {kind, is_bf16,
                       is_bf16 ? static_cast<const void*>(halves.data()) : weights.data(), K, ROWS, K, is_rowwise ? K : SIZE, is_affine ? affine_clips.data() : clips.data(), 3,
                       kind == Quantization::table ? -120.0f : -8.0f, table.data(), scale.data(), offset.data(), codes.data()};
    float* const aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64 / 4;
    kernels.quantize->search(job, 0, static_cast<i64>(ROWS) * K / job.size, aligned);
    kernels.quantize->encode(job, 0, ROWS);
    Words all = words_of(scale.data(), scale.size());
    append(all, words_of(offset.data(), offset.size()));
    for (const i8 code : codes) all.push_back(static_cast<u8>(code));
    return all;
}

Words run_recurrence(const Kernels& kernels, Decay kind, bool has_beta) {
    constexpr i32 T = 5, K_HEADS = 1, V_HEADS = 2, K_DIM = 24, V_DIM = 40;
    state = 17;
    const std::vector<float> q = random_values(T * K_HEADS * K_DIM), k = random_values(q.size()), v = random_values(T * V_HEADS * V_DIM), beta = random_values(T * V_HEADS);
    std::vector<float> decay = random_values(T * V_HEADS * V_DIM), rates = random_values(V_HEADS * K_DIM * V_DIM), out(v.size()), saved(V_HEADS * K_DIM * V_DIM);
    for (float& value : decay) value = kind == Decay::channel ? fabsf(value) : 0.5f + fabsf(value) * 0.2f;
    for (float& value : rates) value = -fabsf(value);
    const RecurrenceJob job = {K_HEADS, V_HEADS, K_DIM, V_DIM, kind, q.data(), k.data(), v.data(), decay.data(),
                               kind == Decay::channel ? rates.data() : nullptr, has_beta ? beta.data() : nullptr, out.data()};
    const StateSave save = {T, saved.data()};
    const RecurrenceRun run = {0, T, nullptr, &save, 1};
    for (i32 head = 0; head < V_HEADS; ++head) kernels.recurrence->run(job, run, head, 0, V_DIM);
    Words all = words_of(out.data(), out.size());
    append(all, words_of(saved.data(), saved.size()));
    return all;
}

Words run_peak(const Kernels& kernels) {
    std::vector<float> sink(16, 1.0f);
    const std::vector<u8> data(1024, 3);
    Words all;
    for (const Format format : {Format::f32, Format::bf16, Format::u8}) all.push_back(kernels.peak->compute(format, 2, sink.data()) > 0);
    all.push_back(static_cast<u32>(kernels.peak->read(data.data(), 1024)));
    return all;
}

// Of the kernels that the program has: the pointers of others are null.
std::vector<Case> all_cases(const Kernels& portable) {
    std::vector<Case> cases;
    if (portable.elementwise != nullptr) {
        for (i32 i = 0; i < portable.elementwise->num_simd; ++i)
            cases.push_back({std::string("simd ") + portable.elementwise->simd[i].name, [i](const Kernels& kernels) { return run_operation(kernels, i); }});
        cases.push_back({"elementwise", run_elementwise});
    }
    if (portable.linear != nullptr)
        for (const LinearShape& shape : linear_shapes) cases.push_back({std::string("linear ") + shape.name, [&shape](const Kernels& kernels) { return run_linear(kernels, shape); }});
    const char* const formats[] = {"bf16", "f32", "i8", "r4", "k8v4", "f8"};
    for (int format = 0; format < 6 && portable.attention != nullptr; ++format)
        for (int variant = 0; variant < 3; ++variant)
            cases.push_back({std::string("attention ") + formats[format] + " " + std::to_string(variant), [=](const Kernels& kernels) {
                return run_attention(kernels, static_cast<KvFormat>(format), format == 0 || (format > 1 && variant != 1), variant == 1 ? 17 : 0, variant == 2 ? 5.0f : 0.0f, variant != 0);
            }});
    if (portable.sampler != nullptr) cases.push_back({"sampler", run_sampler});
    for (int kind = 0; kind < 4 && portable.quantize != nullptr; ++kind)
        cases.push_back({"quantize " + std::to_string(kind), [=](const Kernels& kernels) { return run_quantize(kernels, static_cast<Quantization>(kind), kind % 2 == 0); }});
    for (int kind = 0; kind < 3 && portable.recurrence != nullptr; ++kind)
        cases.push_back({"recurrence " + std::to_string(kind), [=](const Kernels& kernels) { return run_recurrence(kernels, static_cast<Decay>(kind), kind == 0); }});
    if (portable.peak != nullptr) cases.push_back({"peak", run_peak});
    return cases;
}

}  // namespace

int main() {
    const std::vector<const Kernels*> levels = supported_kernels();
    int num_cases = 0, num_wrong = 0;
    for (const Case& one : all_cases(*levels[0])) {
        const Words want = one.run(*levels[0]);
        for (size_t level = 1; level < levels.size(); ++level, ++num_cases) {
            const Words got = one.run(*levels[level]);
            size_t at = 0, wrong = want.size() != got.size();
            for (size_t i = 0; i < want.size() && i < got.size(); ++i)
                if (want[i] != got[i] && wrong++ == 0) at = i;
            if (wrong == 0) continue;
            ++num_wrong;
            printf("DIFFERENT %s on %s: %zu of %zu words, the first at %zu: %08x (%g), portable %08x (%g)\n", one.name.c_str(), levels[level]->name, wrong, want.size(), at,
                   got[at], as_float(got[at]), want[at],
                   as_float(want[at]));
        }
    }
    printf("%d comparisons, %d different\n", num_cases, num_wrong);
    return num_wrong == 0 && num_cases > 0 ? 0 : 1;
}
