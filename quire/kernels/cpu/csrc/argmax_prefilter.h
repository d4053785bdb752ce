// Greedy argmax of an LM head with an int8 prefilter: an int8 copy of the head gives every logit with a bounded error, and exact
// logits are computed only for the outputs that may be the maximum.
//
// For a row x and an output w . x, with codes q and scale s of the output and codes p and scales t of the row,
//   |w . x - (s q) . (t p)| <= |w - s q| |x| + |s q| |x - t p|                                            (Cauchy and Schwarz)
// The norms of w - s q and s q are stored with the copy; those of x and x - t p are computed when a row is quantised. A bound on
// the rounding of the sums, of at most k terms, is added to both. Candidates are computed in falling order of their upper bounds
// until the best of them exceeds the bounds of all others. The result is therefore the argmax of the exact logits, bit for bit.
#pragma once
#include <vector>

#include "native_weight.h"

namespace quire {

// Rows that are processed at once; each needs ten kilobytes of memory.
constexpr i32 MAX_PREFILTER_ROWS = 128;

// The int8 copy of a head. error, size: f32 [N padded to 16], the factors of a row's norm and of its quantisation error in the
// error bound of an output.
struct Int8Head {
    NativeWeight weight;
    Part errors, sizes;
    float *error = nullptr, *size = nullptr;
    bool is_bounded = true;  // else something in it is infinite, not a number, or huge: it cannot be used

    // Raises std::invalid_argument where `head` cannot be copied: see suits_int8_head.
    Int8Head(const Kernels& kernels, const NativeWeight& head, int num_threads);
    i64 num_bytes() const { return weight.num_bytes() + errors.bytes + sizes.bytes; }
};

// Whether a head can have an int8 copy: it must be dense and have no bias.
bool suits_int8_head(const NativeWeight& head);

// Rows of a head's input, and where their best outputs go by row and thread, as of Finish::best.
struct HeadRows {
    const float* values;
    i64 stride;
    i32 count;
    bool is_near;
    float* best_value;
    i32* best_index;
};

// Finds the best outputs of the rows of a step; its memory is kept from step to step.
class ArgmaxPrefilter {
public:
    // Prepare for `num_rows` rows; called before a team begins.
    void begin(const Kernels& kernels, const NativeWeight& head, const Int8Head& int8_head, i32 num_rows, int num_threads);
    // Called by every thread of the team, with the rows' best still -inf and -1; all have come to the end when it returns.
    void find(Worker& worker, const HeadRows& rows);
    // Update the statistics after the team has ended.
    void end();
    // Whether to use the copy in the next step: false if too many rows of recent steps had to be computed in full.
    bool is_wanted();
    // Rows of the last step that were computed in full.
    i32 num_redone() const { return static_cast<i32>(redone_.size()); }

private:
    void measure(const HeadRows& rows, i32 row, int num_threads);
    void choose(const Worker& worker, const HeadRows& rows, i32 row);
    void redo(Worker& worker, const HeadRows& rows);
    bool is_redone(i32 row, int num_threads) const;
    LinearJob job(const Weight& weight, const Packed& input, Finish finish, const HeadRows& rows) const;

    const Kernels* kernels_ = nullptr;
    const NativeWeight* head_ = nullptr;
    const Int8Head* int8_head_ = nullptr;
    i32 num_rows_ = 0;
    PackedMemory bytes_, whole_;       // rows as the copy reads them, and those that are computed as a whole
    std::vector<PackedMemory> alone_;  // one row, by thread
    std::vector<float> row_size_, row_error_, least_;
    std::vector<i32> count_;
    std::vector<Candidate> kept_;
    PrefilterRows state_ = {};
    std::vector<std::vector<Candidate>> left_;  // by thread, of the row that it looks at
    std::vector<i32> redone_;
    std::vector<float> redone_value_;
    std::vector<i32> redone_index_;
    i32 sleep_left_ = 0, num_failures_ = 0;
};

}  // namespace quire
