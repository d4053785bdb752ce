// Output heads that all read the same hidden state, each after its own residual blocks (Medusa).
#pragma once
#include <memory>
#include <vector>

#include "native_weight.h"
#include "tables.h"

namespace quire {

class ParallelHeads {
public:
    // blocks: x += silu(block(x)), one after the other; all weights read rows of `hidden` values.
    void add(std::vector<std::shared_ptr<NativeWeight>> blocks, std::shared_ptr<NativeWeight> output);
    // The logits of the first `count` heads for rows of hidden values: [count][num_rows][vocab].
    void speak(const float* hidden, i64 stride, i32 num_rows, i32 count, float* logits, int num_threads) const;
    // The best token of each head for every row: [num_rows][count]; token 0 if there is none. vocabulary: of each of
    // the heads' tokens the model's, or null.
    std::vector<std::vector<i32>> best(
        const float* hidden, i64 stride, i32 num_rows, i32 count, const i32* vocabulary, int num_threads) const;

    i32 vocab() const { return heads_.empty() ? 0 : heads_[0].output->weight.n; }

    bool is_near = false;  // the weights are expected in a cache

private:
    // Run the first `count` heads; finish(head, job) sets the destination of a head's results. Return the number of threads.
    template <class Finishing>
    int run(const float* hidden, i64 stride, i32 num_rows, i32 count, int num_threads, Finishing finish) const;

    struct Head {
        std::vector<std::shared_ptr<NativeWeight>> blocks;
        std::shared_ptr<NativeWeight> output;
    };
    std::vector<Head> heads_;
};

}  // namespace quire
