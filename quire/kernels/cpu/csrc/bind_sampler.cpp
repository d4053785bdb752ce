// Python's entry to the sampler: columns of options in, tokens out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding.h"

namespace nb = nanobind;
using namespace quire;

namespace {

using Isa = std::optional<std::string>;

const SamplerTable& table_of(const Isa& isa) {
    return *kernels_for(isa.value_or("")).sampler;
}

// Reused across calls, because fresh pages cost as much as a row. One per calling thread.
u8* scratch_of(i64 num_bytes) {
    thread_local std::vector<u8> scratch;
    if (static_cast<i64>(scratch.size()) < num_bytes) scratch.resize(num_bytes);
    return scratch.data();
}

int team_size(int num_threads, size_t num_rows) {
    const int wanted = num_threads < static_cast<int>(num_rows) ? num_threads : static_cast<int>(num_rows);
    return wanted < 1 ? 1 : wanted;
}

struct SampleCall {
    const SamplerTable& table;
    const std::vector<SampleRow>& rows;
    i32 vocab;
    SampleResult* results;
    u8* scratch;
};

using SampleOption = std::tuple<uintptr_t, double, bool, i32, double, double, u64, u32, uintptr_t>;

std::vector<std::pair<i32, i32>> sample(const std::vector<SampleOption>& options, i32 vocab, int num_threads, const Isa& isa) {
    const SamplerTable& table = table_of(isa);
    std::vector<SampleRow> rows;
    rows.reserve(options.size());
    for (const auto& [logits, inverse_temperature, is_greedy, top_k, top_p, log_min_p, seed, position, mask] : options)
        rows.push_back({reinterpret_cast<const float*>(logits), static_cast<float>(inverse_temperature), is_greedy, top_k, top_p,
                        static_cast<float>(log_min_p), seed, position, reinterpret_cast<const u32*>(mask)});
    std::vector<SampleResult> results(rows.size());
    {
        const nb::gil_scoped_release release;
        const int size = team_size(num_threads, rows.size());
        SampleCall call = {table, rows, vocab, results.data(), scratch_of(size * table.scratch_bytes(vocab))};
        run_team(size, [](void* argument, Worker& worker) {
            const SampleCall& c = *static_cast<SampleCall*>(argument);
            c.table.sample(worker, c.rows.data(), static_cast<i32>(c.rows.size()), c.vocab, c.results, c.scratch);
        }, &call);
    }
    std::vector<std::pair<i32, i32>> found;
    found.reserve(results.size());
    for (const SampleResult& result : results) found.emplace_back(result.token, result.status);
    return found;
}

struct LogprobCall {
    const SamplerTable& table;
    std::vector<LogprobRow>& rows;
    i32 vocab;
    u8* scratch;
};

using LogprobOption = std::pair<uintptr_t, i32>;
using Logprob = std::tuple<float, i32, bool>;

std::vector<Logprob> logprobs(const std::vector<LogprobOption>& options, i32 vocab, i32 num_top, uintptr_t top_tokens,
                              uintptr_t top_values, int num_threads, const Isa& isa) {
    const SamplerTable& table = table_of(isa);
    std::vector<LogprobRow> rows(options.size());
    for (size_t i = 0; i < rows.size(); ++i) {
        rows[i].logits = reinterpret_cast<const float*>(options[i].first);
        rows[i].token = options[i].second;
        rows[i].num_top = num_top;
        rows[i].top_tokens = reinterpret_cast<i32*>(top_tokens) + i * num_top;
        rows[i].top_values = reinterpret_cast<float*>(top_values) + i * num_top;
    }
    {
        const nb::gil_scoped_release release;
        const int size = team_size(num_threads, rows.size());
        LogprobCall call = {table, rows, vocab, scratch_of(size * table.scratch_bytes(vocab))};
        run_team(size, [](void* argument, Worker& worker) {
            const LogprobCall& c = *static_cast<LogprobCall*>(argument);
            c.table.logprobs(worker, c.rows.data(), static_cast<i32>(c.rows.size()), c.vocab, c.scratch);
        }, &call);
    }
    std::vector<Logprob> found;
    found.reserve(rows.size());
    for (const LogprobRow& row : rows) found.emplace_back(row.logprob, row.rank, row.is_finite);
    return found;
}

void noise(u64 seed, u32 position, i32 vocab, uintptr_t out, const Isa& isa) {
    table_of(isa).noise(seed, position, vocab, reinterpret_cast<float*>(out));
}

void noise_of_words(uintptr_t words, i64 n, uintptr_t out, const Isa& isa) {
    table_of(isa).noise_of_words(reinterpret_cast<const i32*>(words), n, reinterpret_cast<float*>(out));
}

}  // namespace

void bind_sampler(nb::module_& m) {
    m.def("sample", &sample, nb::arg("rows"), nb::arg("vocab_size"), nb::arg("num_threads"), nb::arg("isa") = nb::none(),
        "Return (token, status) of every row; a row is (address of its f32 logits, inverse temperature, is_greedy, top_k, top_p, "
        "log of min_p, seed, position, address of its token mask or 0).");
    m.def("logprobs", &logprobs, nb::arg("rows"), nb::arg("vocab_size"), nb::arg("num_top"), nb::arg("top_tokens"),
          nb::arg("top_values"), nb::arg("num_threads"), nb::arg("isa") = nb::none(),
          "Return (log probability, rank, whether the best logit is finite) of every row; a row is (address of its f32 logits, "
          "token). The best num_top tokens and their log probabilities go to the addresses given, [rows, num_top] i32 and f32.");
    m.def("sampling_noise", &noise, nb::arg("seed"), nb::arg("position"), nb::arg("vocab_size"), nb::arg("out"),
          nb::arg("isa") = nb::none(), "Write the noise of the whole vocabulary to the f32 address given.");
    m.def("noise_of_words", &noise_of_words, nb::arg("words"), nb::arg("n"), nb::arg("out"), nb::arg("isa") = nb::none(),
          "Write the noise of n words (a multiple of 16) at an i32 address to the f32 address given.");
}
