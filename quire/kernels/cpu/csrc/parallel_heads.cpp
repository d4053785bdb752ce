// Heads that all read the same hidden state, run in one call.
#include "parallel_heads.h"

#include <string.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "plan.h"

namespace quire {

namespace {

// A linear layer of rows with the memory of its packed input.
struct Linear {
    const NativeWeight* weight;
    PackedMemory memory;
    LinearJob job;

    Linear(const Kernels& kernels, const NativeWeight& from, i32 num_rows)
        : weight(&from), memory(*kernels.linear, from.weight, num_rows) {
        job.weight = &from.weight;
    }
};

struct Call {
    const Kernels& kernels;
    std::vector<std::vector<Linear>>& heads;  // the last one of each is its output
    const float* hidden;
    i64 stride;
    i32 num_rows;
    std::vector<float>&x, &added;
    int num_threads = 0;  // the actual number, possibly fewer than requested
};

void run(const Call& call, Worker& worker, Linear& linear, const float* values, i64 stride) {
    const LinearTable& table = *call.kernels.linear;
    const i32 tile = linear.memory.packed.tile_rows, rows = call.num_rows;
    for (i64 row = next(worker, rows, tile); row < rows; row = next(worker, rows, tile))
        table.pack_rows(linear.memory.packed, static_cast<i32>(row), std::min<i32>(tile, rows - static_cast<i32>(row)),
            values + row * stride, stride, 0, linear.memory.packed.k);
    barrier(worker);
    table.linear(worker, &linear.job, 1);
    barrier(worker);
}

void body(void* argument, Worker& worker) {
    Call& call = *static_cast<Call*>(argument);
    if (worker.rank == 0) call.num_threads = worker.size;
    const i64 size = call.heads[0].back().weight->weight.k;
    for (std::vector<Linear>& head : call.heads) {
        const float* values = call.hidden;
        i64 stride = call.stride;
        for (size_t i = 0; i + 1 < head.size(); ++i) {
            run(call, worker, head[i], values, stride);
            for (i64 row = next(worker, call.num_rows, 1); row < call.num_rows; row = next(worker, call.num_rows, 1)) {
                float* x = call.x.data() + row * size;
                if (i == 0) memcpy(x, values + row * stride, sizeof(float) * size);
                call.kernels.elementwise->add_scaled(x, call.added.data() + row * size, 1.0f, size);
            }
            barrier(worker);
            values = call.x.data();
            stride = size;
        }
        run(call, worker, head.back(), values, stride);
    }
}

}  // namespace

void ParallelHeads::add(std::vector<std::shared_ptr<NativeWeight>> blocks, std::shared_ptr<NativeWeight> output) {
    const i32 size = output->weight.k;
    bool is_fitting = heads_.empty() || (heads_[0].output->weight.k == size && heads_[0].output->weight.n == output->weight.n);
    for (const auto& block : blocks) is_fitting = is_fitting && block->weight.k == size && block->weight.n == size;
    if (!is_fitting) throw std::invalid_argument("the heads and their blocks must have one size");
    heads_.push_back({std::move(blocks), std::move(output)});
}

template <class Finishing>
int ParallelHeads::run(const float* hidden, i64 stride, i32 num_rows, i32 count, int num_threads, Finishing finish) const {
    if (count < 1 || count > static_cast<i32>(heads_.size()) || num_rows < 1)
        throw std::invalid_argument("there are not so many heads, or no rows");
    const Kernels& table = kernels();
    const i64 size = heads_[0].output->weight.k;
    std::vector<float> x(num_rows * size), added(num_rows * size);
    std::vector<std::vector<Linear>> linears(count);
    for (i32 h = 0; h < count; ++h) {
        linears[h].reserve(heads_[h].blocks.size() + 1);
        for (const auto& block : heads_[h].blocks) {
            Linear& linear = linears[h].emplace_back(table, *block, num_rows);
            linear.job.finish = Finish::activate;
            linear.job.activation = Activation::silu;
            linear.job.out = added.data();
            linear.job.out_stride = size;
        }
        finish(h, linears[h].emplace_back(table, *heads_[h].output, num_rows).job);
        for (Linear& linear : linears[h]) {
            linear.job.input = &linear.memory.packed;
            linear.job.is_near = is_near;
        }
    }
    Call call = {table, linears, hidden, stride, num_rows, x, added};
    run_team(num_threads, body, &call);
    return call.num_threads;
}

void ParallelHeads::speak(const float* hidden, i64 stride, i32 num_rows, i32 count, float* logits, int num_threads) const {
    run(hidden, stride, num_rows, count, num_threads, [&](i32 head, LinearJob& job) {
        job.out = logits + static_cast<i64>(head) * num_rows * vocab();
        job.out_stride = vocab();
    });
}

std::vector<std::vector<i32>> ParallelHeads::best(
    const float* hidden, i64 stride, i32 num_rows, i32 count, const i32* vocabulary, int num_threads) const {
    const i64 most = std::max(num_threads, 1), num_said = static_cast<i64>(std::max(count, 0)) * std::max(num_rows, 0);
    std::vector<float> values(num_said * most, -__builtin_inff());
    std::vector<i32> indices(num_said * most, -1);
    const int size = run(hidden, stride, num_rows, count, num_threads, [&](i32 head, LinearJob& job) {
        job.finish = Finish::best;
        job.best_value = values.data() + head * num_rows * most;
        job.best_index = indices.data() + head * num_rows * most;
    });
    const auto best_at = [&](i32 head, i32 row) {
        float value = 0.0f;
        const i64 first = head * num_rows * most + static_cast<i64>(row) * size;
        const i32 token = best_of(values.data() + first, indices.data() + first, size, value);
        return std::isfinite(value) ? token : 0;
    };
    std::vector<std::vector<i32>> found(num_rows, std::vector<i32>(count));
    for (i32 row = 0; row < num_rows; ++row) {
        for (i32 h = 0; h < count; ++h) {
            const i32 token = best_at(h, row);
            found[row][h] = vocabulary == nullptr ? token : vocabulary[token];
        }
    }
    return found;
}

}  // namespace quire
