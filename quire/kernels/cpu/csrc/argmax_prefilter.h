// Finding the best output of a head without computing all of them: a copy of the head in bytes gives every output but for a known error,
// and only outputs that may be the best are computed as they are.
//
// For a row x and an output w . x, with codes q and scale s of the output and codes p and scales t of the row,
//   |w . x - (s q) . (t p)| <= |w - s q| |x| + |s q| |x - t p|                                            (Cauchy and Schwarz)
// The lengths of w - s q and s q are kept with the copy, those of x and x - t p are taken of each row as it was rounded. Rounding of the
// sums themselves, of k terms at most, is added to both. Candidates are computed those first that may be most, until the best of them is
// more than any other can be. So what is found is the best of what the head computes, to the bit.
#pragma once
#include <vector>

#include "native_weight.h"

namespace quire {

// Rows whose best outputs are found at once: what is kept of each takes ten kilobytes.
constexpr i32 MAX_SCREENED_ROWS = 128;

// The copy of a head. error, size: f32 [N padded to 16], what an output is off at most for each of a row's size, and of its error.
struct Screen {
    NativeWeight weight;
    Part errors, sizes;
    float *error = nullptr, *size = nullptr;
    bool is_bounded = true;  // else something in it is infinite, not a number, or huge: it cannot be used

    // Raises std::invalid_argument where `head` cannot be copied: see suits_screen.
    Screen(const Kernels& kernels, const NativeWeight& head, int num_threads);
    i64 num_bytes() const { return weight.num_bytes() + errors.bytes + sizes.bytes; }
};

// Whether a head can be screened: dense, and without a bias.
bool suits_screen(const NativeWeight& head);

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
class Screening {
public:
    // Make ready for so many rows, before a team begins.
    void begin(const Kernels& kernels, const NativeWeight& head, const Screen& screen, i32 num_rows, int num_threads);
    // Called by every thread of the team, with the rows' best still -inf and -1; all have come to the end when it returns.
    void find(Worker& worker, const HeadRows& rows);
    // Take in that the team has ended.
    void end();
    // Whether the next step is to be screened: not where too many rows of late ones had to be computed as a whole.
    bool is_wanted();
    // Rows of the last step that were computed as a whole.
    i32 num_redone() const { return static_cast<i32>(redone_.size()); }

private:
    void measure(const HeadRows& rows, i32 row, int num_threads);
    void choose(const Worker& worker, const HeadRows& rows, i32 row);
    void redo(Worker& worker, const HeadRows& rows);
    bool is_redone(i32 row, int num_threads) const;
    LinearJob job(const Weight& weight, const Packed& input, Finish finish, const HeadRows& rows) const;

    const Kernels* kernels_ = nullptr;
    const NativeWeight* head_ = nullptr;
    const Screen* screen_ = nullptr;
    i32 num_rows_ = 0;
    PackedMemory bytes_, whole_;       // rows as the copy reads them, and those that are computed as a whole
    std::vector<PackedMemory> alone_;  // one row, by thread
    std::vector<float> row_size_, row_error_, least_;
    std::vector<i32> count_;
    std::vector<Candidate> kept_;
    ScreenRows state_ = {};
    std::vector<std::vector<Candidate>> left_;  // by thread, of the row that it looks at
    std::vector<i32> redone_;
    std::vector<float> redone_value_;
    std::vector<i32> redone_index_;
    i32 sleep_left_ = 0, num_failures_ = 0;
};

}  // namespace quire
