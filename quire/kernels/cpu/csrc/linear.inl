// Linear layers over packed weights: one accumulation order per output, whatever the number of rows.
//
// A tile is R rows by P panels of 16 outputs; its accumulators stay in registers while it reads the inputs. The tile shape
// decides only how often weights are read, never the order of a sum. Few rows use more panels at once (more memory
// streams); many rows use two, so that a broadcast input is used twice.
#include "simd.h"

#include "activation.h"
#include "tables.h"
// The included parts, each after those that it uses.
#include "linear_tile.inl"
#include "linear_bf12.inl"
#if QUIRE_HAS_256
#include "linear_dots_avx2.inl"
#elif QUIRE_HAS_128
#include "linear_dots_neon.inl"
#endif
#include "linear_float8.inl"
#include "linear_integer.inl"
#include "linear_pack.inl"
#include "linear_unpack.inl"
#include "linear_select.inl"
#include "linear_prefilter.inl"
#include "linear_low_rank.inl"
#include "linear_finish.inl"

namespace quire::QUIRE_ISA {
namespace {

// One unit of work: `count` panels from `first`, over all rows.
struct Unit {
    const Worker& worker;
    const LinearJob& job;
    i32 first, count;
    u8* expanded;  // buffer for the panels of a step as bf16, for a short format with many rows; otherwise null
    i64 groups;    // of a panel, or blocks
    i32 num_passes, pass_shift;  // over a panel, by tiles of rows, and how many bits that has
    bool is_near, is_direct;
    i32 first_row = 0, last_row = 0;  // the rows that are computed now
    u32* wide = nullptr;              // their inputs widened (Tile), or null

    i64 expanded_bytes() const { return static_cast<i64>(job.weight->k) * 32; }
};

// The panels that a unit computes side by side: slot i of step s. Each slot takes panels that follow one another in memory, so
// that a prefetch past the end of one is the beginning of the next.
struct PanelOrder {
    i32 first, count, steps;

    i32 panel(int slot, i32 step) const { return first + slot * steps + step; }
};

// Put panel p of a weight into a slot of the tile. With one pass over the panel the lines ahead are fetched; several passes over
// the same panels share the fetching of the ones that follow. `place`: of the panel among the expanded ones.
QUIRE_INLINE void set_panel(const Unit& unit, Tile& tile, int slot, int num_slots, const Weight& w, i32 p, i32 pass, int place) {
    const i64 groups = unit.groups;
    const u8* panel = w.data + p * w.panel_bytes;
    tile.panels[slot] = unit.expanded == nullptr ? panel : unit.expanded + place * unit.expanded_bytes();
    if (w.windows != nullptr) {
        tile.windows[slot] = w.windows + p;
        prefetch(w.windows + p + 4);
        prefetch(w.windows[p].exceptions + w.windows[p].count + 4);
    }
    tile.scales[slot] = w.group_scales == nullptr ? nullptr : w.group_scales + p * groups * 16;
    tile.offsets[slot] = w.group_offsets == nullptr ? nullptr : w.group_offsets + p * groups * 16;
    tile.block_scales[slot] = w.block_scales == nullptr ? nullptr : w.block_scales + p * groups * 16;
    if (unit.num_passes == 1) {
        tile.ahead[slot] = panel + PREFETCH_BYTES / num_slots;
        tile.ahead_shift = 0;
        return;
    }
    tile.ahead[slot] = panel + w.panel_bytes + ((w.panel_bytes / 64) >> unit.pass_shift) * pass * 64;
    tile.ahead_shift = unit.pass_shift;
}

QUIRE_INLINE TileKind tile_kind(const Unit& unit) { return {unit.job.weight->format, unit.is_near, unit.expanded != nullptr}; }

// Make a tile write [P][rows][16].
QUIRE_INLINE void set_dense(Tile& tile, float* out, i32 rows) {
    tile.out = out;
    tile.panel_stride = static_cast<i64>(rows) * 16;
    tile.row_stride = 16;
}

// Compute the panels of a step for the rows of a tile into `out` [width][R][16], or where they belong; is_second: of the second
// weight.
void run_panels(const Unit& unit, Tile& tile, bool is_second, const PanelOrder& order, i32 step, int width, TilePlace place,
    i32 pass, float* out) {
    const Weight& w = is_second ? *unit.job.second : *unit.job.weight;
    for (int i = 0; i < width; ++i) set_panel(unit, tile, i, width, w, order.panel(i, step), pass, is_second ? width + i : i);
    if (unit.is_direct) {
        const LinearJob& job = unit.job;
        tile.out = job.out + place.first_row * job.out_stride + order.panel(0, step) * 16;
        tile.panel_stride = static_cast<i64>(order.steps) * 16;
        tile.row_stride = job.out_stride;
    } else {
        set_dense(tile, out, place.rows);
    }
    run_tile(width, tile_kind(unit), place.rows, tile);
}

QUIRE_INLINE void expand(const Weight& w, i32 panel, u8* lines) {
    if (is_float8(w.format))
        expand_float8(w, panel, lines);
    else
        expand_panel(w, panel, lines);
}

// Convert the panels of a step to bf16.
void expand_step(const Unit& unit, const PanelOrder& order, i32 step, int width) {
    for (int i = 0; i < width; ++i) {
        expand(*unit.job.weight, order.panel(i, step), unit.expanded + i * unit.expanded_bytes());
        if (unit.job.finish == Finish::gate)
            expand(*unit.job.second, order.panel(i, step), unit.expanded + (width + i) * unit.expanded_bytes());
    }
}

// Prefetch the data for the end of a step: one line per panel, which no stream fetches, and the first rows of the result,
// which another thread may have written.
QUIRE_INLINE void prefetch_finish(const Worker& worker, const LinearJob& job, const Weight& w, i32 panel) {
    if (w.column_scale != nullptr) prefetch(w.column_scale + panel * 16);
    if (w.bias != nullptr) prefetch(w.bias + panel * 16);
    if (job.out == nullptr || job.packed != nullptr || worker.size == 1) return;
    const i32 rows = job.input->m < MAX_FLOATS ? job.input->m : 0;
    for (i32 row = 0; row < rows; ++row) prefetch(job.out + row * job.out_stride + panel * 16);
}

// All rows of a few panels: one or more passes, after the first from the caches.
void run_step(const Unit& unit, Tile& tile, const PanelOrder& order, i32 step, int width) {
    alignas(64) float buffer[2 * MAX_ACCUMULATORS * 16];
    const LinearJob& job = unit.job;
    const Packed& x = *job.input;
    const bool is_gated = job.finish == Finish::gate;
    for (int i = 0; i < width; ++i) {
        prefetch_finish(unit.worker, job, *job.weight, order.panel(i, step));
        if (is_gated) prefetch_finish(unit.worker, job, *job.second, order.panel(i, step));
        prefetch_low_rank(job.low_rank, order.panel(i, step));
        prefetch_low_rank(job.second_low_rank, order.panel(i, step));
    }
    if (unit.expanded != nullptr) expand_step(unit, order, step, width);
    for (i32 row = unit.first_row, pass = row / x.tile_rows; row < unit.last_row; row += x.tile_rows, ++pass) {
        const TilePlace place = {row, smaller(x.tile_rows, x.m - row)};
        set_input(tile, x, place);
        tile.wide =
            unit.wide == nullptr ? nullptr : unit.wide + 2 * static_cast<i64>(row - unit.first_row) * steps_of(x.kind, x.k);
        const i64 half = static_cast<i64>(width) * place.rows * 16;
        if (is_gated && 2 * width <= MAX_PANELS && is_tile(*job.weight, place.rows, 2 * width, unit.expanded != nullptr)) {
            // Gate and up side by side: twice the streams from memory.
            for (int i = 0; i < width; ++i)
                set_panel(unit, tile, width + i, 2 * width, *job.second, order.panel(i, step), pass, width + i);
            for (int i = 0; i < width; ++i) set_panel(unit, tile, i, 2 * width, *job.weight, order.panel(i, step), pass, i);
            set_dense(tile, buffer, place.rows);
            run_tile(2 * width, tile_kind(unit), place.rows, tile);
        } else {
            run_panels(unit, tile, false, order, step, width, place, pass, buffer);
            if (is_gated) run_panels(unit, tile, true, order, step, width, place, pass, buffer + half);
        }
        for (int i = 0; i < width && !unit.is_direct; ++i)
            finish_panel(
                unit.worker, job, order.panel(i, step), place, buffer + i * place.rows * 16, buffer + half + i * place.rows * 16);
    }
}

// Whether several passes read the panels of a unit of work, so that they are brought to bf16 first.
QUIRE_INLINE bool is_expanded(const LinearJob& job) {
    return is_short(job.weight->format) && job.input->m > job.input->tile_rows;
}

// Panels that a tile of the job computes side by side.
QUIRE_INLINE i32 width_of(const LinearJob& job, bool is_expanded) {
    const i32 width = panels_for(*job.weight, job.input->tile_rows, is_expanded);
    return job.finish == Finish::gate && width > 1 ? width / 2 : width;
}

// Panels of a unit of work: those of a tile, as long as a sequence of units is one stream from memory.
QUIRE_INLINE i32 unit_panels(const LinearJob& job) { return width_of(job, is_expanded(job)); }

// All panels of a unit, for the rows that are computed now.
void run_panels_of(const Unit& unit, Tile& tile, i32 width) {
    i32 done = 0;
    for (; width > 0; width /= 2) {
        const PanelOrder order = {unit.first + done, unit.count - done, (unit.count - done) / width};
        for (i32 step = 0; step < order.steps; ++step) run_step(unit, tile, order, step, width);
        done += order.steps * width;
    }
}

void run_unit(const Worker& worker, const LinearJob& job, i32 first, i32 count) {
    Tile tile;
    set_weight(tile, *job.weight);
    i32 width = unit_panels(job);
    const i32 group = is_float8(job.weight->format) ? job.weight->block : job.weight->group;
    Unit unit = {worker, job, first, count, nullptr, groups_of(job.weight->k, group),
        ceil_div(job.input->m, job.input->tile_rows), 0, false, is_direct(job)};
    while ((1 << unit.pass_shift) < unit.num_passes) ++unit.pass_shift;
    unit.is_near = job.is_near && job.input->m <= MAX_NEAR_ROWS && unit.num_passes == 1 &&
        (job.weight->format == Format::bf16 || job.weight->format == Format::u8);
    const Packed& x = *job.input;
    i32 rows = x.m;  // at once
    const i64 expanded_bytes = is_expanded(job) ? 2 * width * unit.expanded_bytes() : 0;
    i64 wide_bytes = 0;
#if QUIRE_HAS_256
    const i32 widened = wide_rows(job);
    if (widened > 0) rows = smaller(rows, widened), wide_bytes = static_cast<i64>(steps_of(x.kind, x.k)) * 8 * rows;
#endif
    if (expanded_bytes + wide_bytes > 0) {
        u8* const scratch = thread_scratch(expanded_bytes + wide_bytes);
        if (scratch != nullptr && expanded_bytes > 0) unit.expanded = scratch;
        if (scratch != nullptr && wide_bytes > 0) unit.wide = reinterpret_cast<u32*>(scratch + expanded_bytes);
    }
    // Without memory every pass repeats the conversion.
    if (unit.expanded == nullptr) width = width_of(job, false);
    if (unit.expanded != nullptr && job.weight->format == Format::bf12) tile.steps = job.weight->k / 2;
    for (; unit.first_row < x.m; unit.first_row = unit.last_row) {
        unit.last_row = smaller(x.m, unit.first_row + rows);
#if QUIRE_HAS_256
        const i64 words = steps_of(x.kind, x.k);
        if (unit.wide != nullptr)
            widen_input(x.data + unit.first_row * words, (unit.last_row - unit.first_row) * words, unit.wide);
#endif
        run_panels_of(unit, tile, width);
    }
}

QUIRE_INLINE i64 num_units(const LinearJob& job) {
    return job.input->m > 0 ? ceil_div(panels_of(*job.weight), unit_panels(job)) : 0;
}

// Panels that a thread takes at once: long streams while much work is left.
constexpr i32 MAX_UNIT_PANELS = 16;

void linear(Worker& worker, const LinearJob* jobs, i32 num_jobs) {
    i64 total = 0;
    for (i32 j = 0; j < num_jobs; ++j) total += num_units(jobs[j]);
    for (;;) {
        const Range range = next_of_share(worker, total, num_jobs > 0 ? MAX_UNIT_PANELS / unit_panels(jobs[0]) : 1);
        if (range.first == range.last) return;
        i64 start = 0;
        for (i32 j = 0; j < num_jobs && start < range.last; ++j) {
            const i64 units = num_units(jobs[j]), first = range.first > start ? range.first - start : 0;
            const i64 last = range.last - start < units ? range.last - start : units;
            start += units;
            if (first >= last) continue;
            const i32 width = unit_panels(jobs[j]), panels = panels_of(*jobs[j].weight);
            run_unit(worker, jobs[j], static_cast<i32>(first) * width,
                smaller(panels, static_cast<i32>(last) * width) - static_cast<i32>(first) * width);
        }
    }
}

void best_of_panels(const Worker& worker, const LinearJob& job, const i32* panels, i32 count, i64 at) {
    const Weight& w = *job.weight;
    const Unit unit = {worker, job, 0, 0, nullptr, groups_of(w.k, w.group), 1, 0, false, false};
    alignas(64) float out[MAX_PANELS * 16];
    Tile tile;
    set_weight(tile, w);
    set_input(tile, *job.input, {0, 1});
    set_dense(tile, out, 1);
    i32 width = panels_for(w, 1, false);
    for (i32 done = 0; done < count; done += width) {
        while (width > count - done) width /= 2;
        for (i32 i = 0; i < width; ++i) set_panel(unit, tile, i, width, w, panels[done + i], 0, i);
        run_tile(width, tile_kind(unit), 1, tile);
        for (i32 i = 0; i < width; ++i) {
            const i32 panel = panels[done + i];
            note_best(job, at, panel, first_lanes(w.n - panel * 16), scaling_of(w, panel)(out + i * 16));
        }
    }
}

}  // namespace

extern const LinearTable linear_table = {
    tile_rows, pack_row, pack_rows, linear, unpack_row, copy_panels, measure_row, shrink, best_of_panels};

}  // namespace quire::QUIRE_ISA
