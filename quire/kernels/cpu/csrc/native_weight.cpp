// Packing of weights, by the threads of a team, and the memory of packed rows.
#include "native_weight.h"

#include <string.h>

#include <algorithm>
#include <exception>
#include <mutex>

#include "thread_binding.h"

namespace quire {

namespace {

constexpr i32 ROWS_PER_SHARE = 64;
constexpr i64 SLAB_BYTES = 64 << 20;
// For bf12, one line after the last panel is read but not used.
constexpr i64 PAST_PANELS = 64;
constexpr i64 PAGE_BYTES = 4096;

// The first exception of a team: exceptions must not leave the OpenMP region.
struct Failure {
    std::mutex guard;
    std::exception_ptr first;

    void note() noexcept {
        const std::lock_guard<std::mutex> lock(guard);
        if (first == nullptr) first = std::current_exception();
    }
    void raise() const {
        if (first != nullptr) std::rethrow_exception(first);
    }
};

struct Packing {
    NativeWeight* weight;
    const void* source;
    i64 stride;
    i32 first, count;
    const i8* levels;
    i32 num_levels;
    bool is_mapped;
    std::vector<Exception>* found;  // bf12: of every panel that is packed
    bool places_pages;              // before anything is packed, by threads that are bound to NUMA nodes
    Failure failure;
};

void pack_share(const Packing& job, i64 share) {
    const Weight& w = job.weight->weight;
    const i64 width = w.format == Format::f32                                             ? 4
        : w.format == Format::bf16 || w.format == Format::f16 || w.format == Format::bf12 ? 2
                                                                                          : 1;
    const i32 row = static_cast<i32>(share) * ROWS_PER_SHARE;
    const i32 rows = job.count - row < ROWS_PER_SHARE ? job.count - row : ROWS_PER_SHARE;
    const u8* source = static_cast<const u8*>(job.source) + row * job.stride * width;
    u8* panels = job.weight->memory.data;
    if (w.format == Format::bf12) {
        NativeWeight& weight = *job.weight;
        float* scales = reinterpret_cast<float*>(weight.column_scales.data);
        pack_bf12(reinterpret_cast<const u16*>(source), job.stride, w.n, w.k, job.first + row, rows, panels, scales,
            job.found + row / 16);
    } else if (w.format == Format::u8 || w.format == Format::u4)
        pack_codes(w.format, reinterpret_cast<const i8*>(source), job.stride, w.n, w.k, job.first + row, rows, job.levels,
            job.num_levels, panels);
    else if (is_float8(w.format))
        pack_float8(source, job.stride, w.n, w.k, job.first + row, rows, panels);
    else
        pack_dense(w.format, source, job.stride, w.n, w.k, job.first + row, rows, panels);
    if (job.is_mapped) forget_pages(source, rows * job.stride * width);
}

// Write to each page of the panels that this thread will read, those of next_of_share: Linux places a page on the node of the
// thread that writes it first. What is packed already stays.
void place_pages(const NativeWeight& weight, const Worker& worker) {
    const i64 panels = panels_of(weight.weight), bytes = weight.weight.panel_bytes;
    volatile u8* const end = weight.memory.data + share_start(panels, worker.rank + 1, worker.size) * bytes;
    for (volatile u8* at = weight.memory.data + share_start(panels, worker.rank, worker.size) * bytes; at < end; at += PAGE_BYTES)
        *at = *at;
}

// Each thread takes the shares that are left. There is no barrier inside, so a thread may end early.
void try_to_pack(Packing& job, Worker& worker) {
    try {
        const i64 shares = ceil_div(job.count, ROWS_PER_SHARE);
        for (i64 share = next(worker, shares, 1); share < shares; share = next(worker, shares, 1)) pack_share(job, share);
    } catch (...) {
        job.failure.note();
    }
}

void pack_shares(void* argument, Worker& worker) {
    Packing& job = *static_cast<Packing*>(argument);
    if (job.places_pages) {
        place_pages(*job.weight, worker);
        barrier(worker);
    }
    try_to_pack(job, worker);
}

Format format_named(const std::string& name) {
    if (name == "bf16") return Format::bf16;
    if (name == "bf12") return Format::bf12;
    if (name == "f32") return Format::f32;
    if (name == "f16") return Format::f16;
    if (name == "u8") return Format::u8;
    if (name == "u4") return Format::u4;
    if (name == "f8") return Format::f8;
    if (name == "f8_wide") return Format::f8_wide;
    throw std::invalid_argument("format must be bf16, bf12, f16, f32, u8, u4, f8 or f8_wide, got " + name);
}

}  // namespace

i32 best_of(const float* values, const i32* indices, i32 count, float& value) {
    i32 best = -1;
    for (i32 i = 0; i < count; ++i) {
        if (indices[i] < 0) continue;
        const bool is_nan = values[i] != values[i], was_nan = best >= 0 && value != value;
        const bool is_lower = indices[i] < best && (values[i] == value || (is_nan && was_nan));
        if (best < 0 || (is_nan && !was_nan) || values[i] > value || is_lower) value = values[i], best = indices[i];
    }
    return best;
}

void PackedMemory::prepare(const LinearTable& table, const Weight& w, i32 m) {
    packed.kind = input_kind(w.format);
    packed.m = m;
    packed.k = w.k;
    packed.group = w.group;
    packed.input_group = w.input_group;
    packed.tile_rows = table.tile_rows(packed.kind, m);
    packed.columns = w.columns;
    const auto grow = [m](auto& memory, i64 row) { memory.resize(std::max(memory.size(), static_cast<size_t>(row) * m)); };
    const i64 groups = groups_of(w.k, w.group);
    grow(words, steps_of(packed.kind, w.k));
    grow(scales, groups);
    grow(starts, groups);
    grow(sums, groups);
    packed.data = words.data();
    packed.scales = scales.data();
    packed.starts = starts.data();
    packed.sums = sums.data();
}

NativeWeight::NativeWeight(const std::string& format, i32 n, i32 k, i32 group, i32 input_group) {
    weight.format = format_named(format);
    const bool is_quantized = weight.format == Format::u8 || weight.format == Format::u4;
    const i32 step = weight.format == Format::u4 ? 8 : 4;
    if (n < 1 || k < 1) throw std::invalid_argument("a weight has at least one row and one column");
    if (is_quantized && (group < 1 || (group % step != 0 && group < k)))
        throw std::invalid_argument("group must be a multiple of " + std::to_string(step));
    if (input_group == 0) input_group = group;
    if (is_quantized && (input_group < group || (input_group % group != 0 && input_group < k)))
        throw std::invalid_argument("input_group must be a multiple of group or the whole row");
    if (is_quantized && k > 60000)
        throw std::invalid_argument("a quantised weight has at most 60000 columns, got " + std::to_string(k));
    if (weight.format == Format::bf12 && k % UNIT_INPUTS != 0)
        throw std::invalid_argument(
            "bf12 needs a multiple of " + std::to_string(UNIT_INPUTS) + " columns, got " + std::to_string(k));
    const bool is_short_float = is_float8(weight.format);
    if (is_short_float && k % 4 != 0)
        throw std::invalid_argument("float8 needs a multiple of 4 columns, got " + std::to_string(k));
    if (is_short_float && (group < 0 || (group % 4 != 0 && group < k)))
        throw std::invalid_argument("blocks of float8 must be a multiple of 4 columns, got " + std::to_string(group));
    weight.n = n;
    weight.k = k;
    weight.block = is_short_float && group < k ? group : 0;
    const i32 whole = (k + 7) / 8 * 8;
    weight.group = is_quantized ? (group >= k ? whole : group) : 0;
    weight.input_group =
        is_quantized ? (input_group >= k ? (whole + weight.group - 1) / weight.group * weight.group : input_group) : 0;
    weight.panel_bytes = panel_lines(weight.format, k) * 64;
    memory = Part::of(panels_of(weight) * weight.panel_bytes + (weight.format == Format::bf12 ? PAST_PANELS : 0));
    weight.data = memory.data;
    if (weight.format != Format::bf12) return;
    windows.resize(static_cast<size_t>(panels_of(weight)));
    weight.windows = windows.data();
    column_scales = Part::of(panels_of(weight) * 16 * static_cast<i64>(sizeof(float)));
    weight.column_scale = reinterpret_cast<const float*>(column_scales.data);
}

void NativeWeight::pack(
    uintptr_t source, i64 stride, i32 first, i32 count, uintptr_t levels, int num_levels, bool is_mapped, int num_threads) {
    if (first % 16 != 0 || first < 0 || count < 1 || first + count > weight.n)
        throw std::invalid_argument("rows to pack are outside the weight");
    if (weight.format == Format::u4) {
        if (num_levels < 1 || num_levels > 16) throw std::invalid_argument("u4 needs 1 to 16 levels");
        for (int i = 0; i < num_levels; ++i) weight.table[i] = static_cast<u8>(reinterpret_cast<const i8*>(levels)[i] + 128);
    }
    std::vector<std::vector<Exception>> found(weight.format == Format::bf12 ? static_cast<size_t>(ceil_div(count, 16)) : 0);
    const bool places_pages = first == 0 && are_teams_bound(num_threads);  // a weight is packed from its first row on
    Packing job = {this, reinterpret_cast<const void*>(source), stride, first, count, reinterpret_cast<const i8*>(levels),
        num_levels, is_mapped, found.data(), places_pages, {}};
    run_team(num_threads, pack_shares, &job);
    job.failure.raise();
    if (weight.format == Format::bf12) take_exceptions(static_cast<size_t>(first) / 16, found);
}

// Joined to one stream, so that a panel's data is prefetched. Without memory for it, nothing changes.
void NativeWeight::take_exceptions(size_t first_panel, const std::vector<std::vector<Exception>>& found) {
    std::vector<Exception> all;
    std::vector<i64> starts;
    for (size_t panel = 0; panel < windows.size(); ++panel) {
        starts.push_back(static_cast<i64>(all.size()));
        if (panel >= first_panel && panel < first_panel + found.size()) {
            const std::vector<Exception>& own = found[panel - first_panel];
            all.insert(all.end(), own.begin(), own.end());
        } else {
            all.insert(all.end(), windows[panel].exceptions, windows[panel].exceptions + windows[panel].count);
        }
    }
    all.shrink_to_fit();
    starts.push_back(static_cast<i64>(all.size()));
    exceptions = std::move(all);
    for (size_t panel = 0; panel < windows.size(); ++panel)
        windows[panel] = {exceptions.data() + starts[panel], static_cast<i32>(starts[panel + 1] - starts[panel])};
}

void NativeWeight::set_extras(uintptr_t group_scales, uintptr_t group_offsets, uintptr_t column_scale, uintptr_t bias,
    uintptr_t columns, uintptr_t block_scale) {
    const i64 width = panels_of(weight) * 16, groups = groups_of(weight.k, weight.group);
    const auto copy = [](Part& to, uintptr_t from, auto& pointer, i64 count) {
        using Value = std::remove_const_t<std::remove_pointer_t<std::remove_reference_t<decltype(pointer)>>>;
        pointer = nullptr;
        if (from == 0) return;
        to = Part::of(count * static_cast<i64>(sizeof(Value)));
        memcpy(to.data, reinterpret_cast<const void*>(from), to.bytes);
        pointer = reinterpret_cast<const Value*>(to.data);
    };
    copy(scales, group_scales, weight.group_scales, width * groups);
    copy(offsets, group_offsets, weight.group_offsets, width * groups);
    if ((block_scale != 0) != (weight.block != 0))
        throw std::invalid_argument("scales of blocks are for float8 in blocks, which needs them");
    copy(block_scales, block_scale, weight.block_scales, width * groups_of(weight.k, weight.block));
    if (weight.format != Format::bf12)
        copy(column_scales, column_scale, weight.column_scale, width);
    else if (column_scale != 0)
        throw std::invalid_argument("bf12 has scales of its own");
    copy(biases, bias, weight.bias, width);
    copy(column_order, columns, weight.columns, weight.k);
}

// The slab for new weights. It lives as long as its weights.
Part Part::of(i64 size) {
    static std::mutex guard;
    static std::weak_ptr<Memory> current;
    static i64 used = 0;
    const std::lock_guard<std::mutex> lock(guard);
    std::shared_ptr<Memory> slab = current.lock();
    if (slab == nullptr || used + size > slab->bytes) {
        slab = std::make_shared<Memory>(std::max(size, SLAB_BYTES));
        current = slab;
        used = 0;
    }
    const Part part = {slab, slab->data + used, size};
    used += (size + 127) / 128 * 128;
    return part;
}

i64 NativeWeight::num_bytes() const {
    return static_cast<i64>(exceptions.size() * sizeof(Exception)) + memory.bytes + scales.bytes + offsets.bytes +
           block_scales.bytes + column_scales.bytes + biases.bytes + column_order.bytes;
}

}  // namespace quire
