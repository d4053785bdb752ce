// The int8 copy of a head, and the argmax of rows with it as a prefilter.
#include "argmax_prefilter.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <new>
#include <stdexcept>

namespace quire {

namespace {

// Lengths from which on sums might be infinite.
constexpr float MAX_LENGTH = 1e15f;
// Inputs that share a scale, of the copy and of rows.
constexpr i32 GROUP = 256;
// Panels that a thread copies at once.
constexpr i64 PANELS_PER_SHARE = 16;
// Candidates of a row for which there is room, of all threads and of each at least. Half of it is left for those that come when
// what is out of the question was forgotten: of 152 k random outputs of 1,024 inputs some 200 remain, of a trained head a few.
constexpr i32 ROOM = 1024, LEAST_ROOM = 128;
// Candidates that are computed together.
constexpr i32 TOGETHER = 4;
// Steps in which too many rows had to be computed as a whole, one after the other, until the next pause is no longer than the
// last one.
constexpr i32 MOST_FAILURES = 8;

struct Copying {
    const Kernels& kernels;
    const Weight& head;
    Int8HeadPanels to;
    std::atomic<bool> has_memory{true};
};

void copy_shares(void* argument, Worker& worker) {
    Copying& copying = *static_cast<Copying*>(argument);
    Int8HeadPanels to = copying.to;
    to.lines = thread_scratch(static_cast<i64>(copying.head.k + UNIT_INPUTS) * 32);
    if (to.lines == nullptr) {
        copying.has_memory = false;
        return;
    }
    const i64 panels = panels_of(copying.head);
    for (i64 first = next(worker, panels, PANELS_PER_SHARE); first < panels; first = next(worker, panels, PANELS_PER_SHARE))
        copying.kernels.linear->copy_panels(
            copying.head, static_cast<i32>(first), static_cast<i32>(std::min(panels, first + PANELS_PER_SHARE)), to);
}

bool is_less(const Candidate& a, const Candidate& b) { return a.most < b.most; }

}  // namespace

bool suits_int8_head(const NativeWeight& head) {
    const Weight& w = head.weight;
    const bool is_dense =
        w.format == Format::bf16 || w.format == Format::bf12 || w.format == Format::f32 || w.format == Format::f16;
    return is_dense && w.bias == nullptr && w.columns == nullptr && w.k <= 60000;
}

Int8Head::Int8Head(const Kernels& kernels, const NativeWeight& head, int num_threads)
    : weight("u8", head.weight.n, head.weight.k, std::min(GROUP, head.weight.k), std::min(GROUP, head.weight.k)) {
    if (!suits_int8_head(head)) throw std::invalid_argument("a head with an int8 copy is dense and has no bias");
    const i64 bytes = panels_of(head.weight) * 16 * static_cast<i64>(sizeof(float));
    weight.column_scales = Part::of(bytes);
    errors = Part::of(bytes);
    sizes = Part::of(bytes);
    error = reinterpret_cast<float*>(errors.data);
    size = reinterpret_cast<float*>(sizes.data);
    float* const scale = reinterpret_cast<float*>(weight.column_scales.data);
    weight.weight.column_scale = scale;
    Copying copying = {
        kernels, head.weight, {weight.memory.data, weight.weight.panel_bytes, weight.weight.group, scale, error, size, nullptr}};
    run_team(num_threads, copy_shares, &copying);
    if (!copying.has_memory) throw std::bad_alloc();
    for (i32 n = 0; n < head.weight.n; ++n) is_bounded = is_bounded && error[n] + size[n] < MAX_LENGTH;
}

void ArgmaxPrefilter::begin(
    const Kernels& kernels, const NativeWeight& head, const Int8Head& int8_head, i32 num_rows, int num_threads) {
    kernels_ = &kernels;
    head_ = &head;
    int8_head_ = &int8_head;
    num_rows_ = num_rows;
    const size_t size = static_cast<size_t>(num_rows), places = size * num_threads;
    const i32 room = std::max(LEAST_ROOM, ROOM / num_threads);
    bytes_.prepare(*kernels.linear, int8_head.weight.weight, num_rows);
    alone_.resize(std::max(alone_.size(), static_cast<size_t>(num_threads)));
    for (PackedMemory& one : alone_) one.prepare(*kernels.linear, head.weight, 1);
    row_size_.assign(size, 0.0f);
    row_error_.assign(size, 0.0f);
    least_.assign(places, -__builtin_inff());
    count_.assign(places, 0);
    if (kept_.size() < places * room) kept_.resize(places * room);
    left_.resize(alone_.size());
    for (std::vector<Candidate>& one : left_) one.reserve(static_cast<size_t>(room) * num_threads);
    // Nothing is allocated while a team runs.
    redone_.clear();
    redone_.reserve(size);
    redone_value_.reserve(places);
    redone_index_.reserve(places);
    whole_.prepare(*kernels.linear, head.weight, num_rows);
    state_ = {
        int8_head.error, int8_head.size, row_size_.data(), row_error_.data(), least_.data(), count_.data(), room, kept_.data()};
}

LinearJob ArgmaxPrefilter::job(const Weight& weight, const Packed& input, Finish finish, const HeadRows& rows) const {
    LinearJob j;
    j.weight = &weight;
    j.input = &input;
    j.finish = finish;
    j.is_near = rows.is_near;
    j.best_value = rows.best_value;
    j.best_index = rows.best_index;
    j.prefilter = &state_;
    return j;
}

bool ArgmaxPrefilter::is_redone(i32 row, int num_threads) const {
    const i32* const counts = count_.data() + static_cast<i64>(row) * num_threads;
    return std::any_of(counts, counts + num_threads, [](i32 count) { return count < 0; });
}

void ArgmaxPrefilter::measure(const HeadRows& rows, i32 row, int num_threads) {
    kernels_->linear->measure_row(
        bytes_.packed, row, rows.values + row * rows.stride, input_kind(head_->weight.format), &row_size_[row], &row_error_[row]);
    if (row_size_[row] < MAX_LENGTH && row_error_[row] < MAX_LENGTH) return;
    std::fill_n(count_.data() + static_cast<i64>(row) * num_threads, num_threads, -1);
}

// Compute the candidates of a row in falling order of their upper bounds, until none of the rest can be the maximum.
void ArgmaxPrefilter::choose(const Worker& worker, const HeadRows& rows, i32 row) {
    if (is_redone(row, worker.size)) return;
    std::vector<Candidate>& left = left_[worker.rank];
    const i64 first = static_cast<i64>(row) * worker.size;
    const float least = *std::max_element(least_.data() + first, least_.data() + first + worker.size);
    left.clear();
    for (i64 at = first; at < first + worker.size; ++at) {
        const Candidate* const kept = kept_.data() + at * state_.room;
        std::copy_if(
            kept, kept + count_[at], std::back_inserter(left), [least](const Candidate& one) { return one.most >= least; });
    }
    std::make_heap(left.begin(), left.end(), is_less);
    const Packed& input = alone_[worker.rank].packed;
    kernels_->linear->pack_row(input, 0, rows.values + row * rows.stride, 0, input.k);
    const LinearJob head = job(head_->weight, input, Finish::best, rows);
    while (!left.empty() && !(left.front().most < rows.best_value[first])) {
        i32 panels[TOGETHER], count = 0;
        for (; count < TOGETHER && !left.empty(); left.pop_back()) {
            std::pop_heap(left.begin(), left.end(), is_less);
            panels[count++] = left.back().panel;
        }
        kernels_->linear->best_of_panels(worker, head, panels, count, first);
    }
}

// Compute all outputs of the rows that have too many candidates or no usable bounds.
void ArgmaxPrefilter::redo(Worker& worker, const HeadRows& rows) {
    const i32 k = head_->weight.k;
    if (worker.rank == 0) {
        for (i32 row = 0; row < rows.count; ++row)
            if (is_redone(row, worker.size)) redone_.push_back(row);
        const size_t places = redone_.size() * static_cast<size_t>(worker.size);
        redone_value_.assign(places, -__builtin_inff());
        redone_index_.assign(places, -1);
        if (!redone_.empty()) whole_.prepare(*kernels_->linear, head_->weight, num_redone());
    }
    barrier(worker);
    if (redone_.empty()) return;
    each_item(worker, num_redone(), [&](i64 i) {
        kernels_->linear->pack_row(whole_.packed, static_cast<i32>(i), rows.values + redone_[i] * rows.stride, 0, k);
    });
    LinearJob head = job(head_->weight, whole_.packed, Finish::best, rows);
    head.best_value = redone_value_.data();
    head.best_index = redone_index_.data();
    kernels_->linear->linear(worker, &head, 1);
    barrier(worker);
    each_item(worker, num_redone(), [&](i64 i) {
        const i64 from = i * worker.size, to = redone_[i] * static_cast<i64>(worker.size);
        std::copy_n(redone_value_.data() + from, worker.size, rows.best_value + to);
        std::copy_n(redone_index_.data() + from, worker.size, rows.best_index + to);
    });
}

void ArgmaxPrefilter::find(Worker& worker, const HeadRows& rows) {
    // All rows of some inputs: words of a tile's rows lie side by side, and no two threads should write to one line.
    const i32 k = bytes_.packed.k;
    each_item(worker, ceil_div(k, GROUP), [&](i64 item) {
        const i32 part = static_cast<i32>(item);
        kernels_->linear->pack_rows(
            bytes_.packed, 0, rows.count, rows.values, rows.stride, part * GROUP, std::min(k, (part + 1) * GROUP));
    });
    each_item(worker, rows.count, [&](i64 row) { measure(rows, static_cast<i32>(row), worker.size); });
    const LinearJob copy = job(int8_head_->weight.weight, bytes_.packed, Finish::prefilter, rows);
    kernels_->linear->linear(worker, &copy, 1);
    barrier(worker);
    each_item(worker, rows.count, [&](i64 row) { choose(worker, rows, static_cast<i32>(row)); });
    redo(worker, rows);
}

void ArgmaxPrefilter::end() {
    if (num_redone() * 4 <= num_rows_) {
        num_failures_ = 0;
        return;
    }
    num_failures_ = std::min(num_failures_ + 1, MOST_FAILURES);
    sleep_left_ = 1 << num_failures_;
}

bool ArgmaxPrefilter::is_wanted() {
    if (sleep_left_ == 0) return true;
    --sleep_left_;
    return false;
}

}  // namespace quire
