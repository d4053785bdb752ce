// Recurrent states of the runs of a step, for Python. Pointers are integers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "binding.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace quire;

namespace {

using Saves = std::vector<std::vector<std::pair<i64, uintptr_t>>>;

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void check_saves(const std::vector<i64>& starts, const std::vector<uintptr_t>& sources, const Saves& saves) {
    if (starts.size() != sources.size() + 1 || saves.size() != sources.size())
        throw std::invalid_argument("starts, sources, saves: got " + std::to_string(starts.size()) + ", " +
            std::to_string(sources.size()) + " and " + std::to_string(saves.size()) + " values, allowed are S + 1, S and S");
    for (size_t s = 0; s < saves.size(); ++s) {
        i64 least = 0;
        for (const auto& [count, to] : saves[s]) {
            if (count < least || count > starts[s + 1] - starts[s])
                throw std::invalid_argument("saves: got a count of " + std::to_string(count) + ", allowed are " +
                    std::to_string(least) + " to " + std::to_string(starts[s + 1] - starts[s]) + ", in rising order");
            least = count;
        }
    }
}

void recur(const std::array<uintptr_t, 7>& tensors, const std::array<i32, 4>& shape, i32 kind, const std::vector<i64>& starts,
           const std::vector<uintptr_t>& sources, const Saves& saves, int num_threads, const std::string& isa) {
    const auto [k_heads, v_heads, k_dim, v_dim] = shape;
    if (k_heads < 1 || v_heads < k_heads || v_heads % k_heads != 0)
        throw std::invalid_argument(
            "v_heads: got " + std::to_string(v_heads) + ", allowed are multiples of k_heads (" + std::to_string(k_heads) + ")");
    if (k_dim < 1 || k_dim > MAX_STATE_ROWS || v_dim < 1)
        throw std::invalid_argument(
            "k_dim: got " + std::to_string(k_dim) + ", allowed are 1 to " + std::to_string(MAX_STATE_ROWS));
    if (kind < 0 || kind > static_cast<i32>(Decay::channel))
        throw std::invalid_argument("kind: got " + std::to_string(kind) + ", allowed are 0 to 2");
    if (kind == static_cast<i32>(Decay::channel) && tensors[5] != 0)
        throw std::invalid_argument("beta: got one with kind 2 (channel), allowed is 0");
    check_saves(starts, sources, saves);
    const RecurrenceJob job = {k_heads,
                               v_heads,
                               k_dim,
                               v_dim,
                               static_cast<Decay>(kind),
                               at<const float>(tensors[0]),
                               at<const float>(tensors[1]),
                               at<const float>(tensors[2]),
                               at<const float>(tensors[3]),
                               at<const float>(tensors[4]),
                               at<const float>(tensors[5]),
                               at<float>(tensors[6])};
    std::vector<std::vector<StateSave>> kept(saves.size());
    std::vector<RecurrenceRun> runs(saves.size());
    for (size_t s = 0; s < saves.size(); ++s) {
        for (const auto& [count, to] : saves[s]) kept[s].push_back({count, at<float>(to)});
        runs[s] = {
            starts[s], starts[s + 1] - starts[s], at<const float>(sources[s]), kept[s].data(), static_cast<i32>(kept[s].size())};
    }
    struct Call {
        const RecurrenceTable& table;
        const RecurrenceJob& job;
        const std::vector<RecurrenceRun>& runs;
    } call = {*kernels_for(isa).recurrence, job, runs};
    run_team(
        num_threads,
        [](void* argument, Worker& worker) {
            const Call& c = *static_cast<Call*>(argument);
            const i64 tiles = (c.job.v_dim + STATE_COLUMNS - 1) / STATE_COLUMNS,
                      items = static_cast<i64>(c.runs.size()) * c.job.v_heads * tiles;
            for (i64 item = next(worker, items, 1); item < items; item = next(worker, items, 1)) {
                const i32 first = static_cast<i32>(item % tiles) * STATE_COLUMNS, left = c.job.v_dim - first;
                const i64 head = item / tiles;
                c.table.run(c.job, c.runs[static_cast<size_t>(head / c.job.v_heads)], static_cast<i32>(head % c.job.v_heads),
                    first, left < STATE_COLUMNS ? left : STATE_COLUMNS);
            }
        },
        &call);
}

// x, weight, bias and out; channels and taps.
void convolve(const std::array<uintptr_t, 4>& tensors, const std::array<i32, 2>& shape, bool is_bf16,
    const std::vector<i64>& starts, const std::vector<uintptr_t>& sources, const Saves& saves, int num_threads,
    const std::string& isa) {
    const auto [channels, taps] = shape;
    if (taps < 2 || taps > MAX_CONV_TAPS)
        throw std::invalid_argument("taps: got " + std::to_string(taps) + ", allowed are 2 to " + std::to_string(MAX_CONV_TAPS));
    check_saves(starts, sources, saves);
    const ConvJob job = {channels, taps, is_bf16, at<const float>(tensors[0]), at<const float>(tensors[1]),
        at<const float>(tensors[2]), at<float>(tensors[3]), channels, channels};
    std::vector<std::vector<ConvSave>> kept(saves.size());
    std::vector<ConvRun> runs(saves.size());
    for (size_t s = 0; s < saves.size(); ++s) {
        for (const auto& [count, to] : saves[s]) kept[s].push_back({count, at<u8>(to)});
        runs[s] = {
            starts[s], starts[s + 1] - starts[s], at<const u8>(sources[s]), kept[s].data(), static_cast<i32>(kept[s].size())};
    }
    struct Call {
        const RecurrenceTable& table;
        const ConvJob& job;
        const std::vector<ConvRun>& runs;
    } call = {*kernels_for(isa).recurrence, job, runs};
    run_team(
        num_threads,
        [](void* argument, Worker& worker) {
            const Call& c = *static_cast<Call*>(argument);
            const i64 blocks = ceil_div(c.job.channels, CONV_CHANNELS);
            each_item(worker, static_cast<i64>(c.runs.size()) * blocks, [&](i64 item) {
                const i32 first = static_cast<i32>(item % blocks) * CONV_CHANNELS, left = c.job.channels - first;
                c.table.convolve(
                    c.job, c.runs[static_cast<size_t>(item / blocks)], first, left < CONV_CHANNELS ? left : CONV_CHANNELS);
            });
        },
        &call);
}

}  // namespace

void bind_recurrence(nb::module_& m) {
    m.attr("MAX_STATE_ROWS") = MAX_STATE_ROWS;
    m.def("recur", recur, "tensors"_a, "shape"_a, "kind"_a, "starts"_a, "sources"_a, "saves"_a, "num_threads"_a = 1, "isa"_a = "",
        nb::call_guard<nb::gil_scoped_release>(),
        "Take states [v_heads, k_dim, v_dim] f32 through runs of tokens, see recurrence.h. tensors: q, k, v, decay, rates, beta, "
        "out; "
        "shape: k_heads, v_heads, k_dim, v_dim; kind: of the decay, 0 head, 1 row, 2 channel; sources: a state per run, 0 is "
        "zeros; "
        "saves: per run (number of tokens, state).");
    m.def("convolve", convolve, "tensors"_a, "shape"_a, "is_bf16"_a, "starts"_a, "sources"_a, "saves"_a, "num_threads"_a = 1,
        "isa"_a = "", nb::call_guard<nb::gil_scoped_release>(),
        "Convolve channels over runs of tokens, see ConvJob. tensors: x [T, channels], weight [taps, channels], bias or 0, out; "
        "shape: channels, taps; states: "
        "[taps - 1, channels], see recur.");
}
