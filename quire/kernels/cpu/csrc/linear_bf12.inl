// bf16 in twelve bits (Window in weight.h): tiles that expand lines during the product, and whole panels and rows as bf16.
namespace quire::QUIRE_ISA {
namespace {

// Line `line` of a unit of bf12 as bf16 pairs: see Window. May read one line past the unit.
template <int LINE>
QUIRE_INLINE Bytes unit_line(const u8* unit) {
    const Bytes high = set1_bytes(0x38003800);  // the upper bits of exponents from WINDOW_START on
    if constexpr (LINE < 3) return keep_or(load_bytes(unit + LINE * 64), 0x87ff87ff, high);
    // A byte further on is eight bits lower.
    const Bytes parts = select_bits(0x78007800, load_bytes(unit + 128), load_bytes(unit + 1));
    return keep_or(load_bytes(unit + 65), 0x00780078, keep_or(rotate_words(parts), 0x87878787, high));
}

// A whole unit.
QUIRE_INLINE void expand_unit(const u8* unit, u8* lines) {
    store_bytes(lines, unit_line<0>(unit));
    store_bytes(lines + 64, unit_line<1>(unit));
    store_bytes(lines + 128, unit_line<2>(unit));
    store_bytes(lines + 192, unit_line<3>(unit));
}

// Insert the exceptions of a unit, from number `met` on; return the number of the next.
QUIRE_INLINE i32 put_exceptions(const Window& window, i32 met, i64 unit, u8* lines) {
    for (; met < window.count && window.exceptions[met].unit == unit; ++met)
        __builtin_memcpy(lines + 2 * window.exceptions[met].place, &window.exceptions[met].value, 2);
    return met;
}

// Products with one line of a unit while the next line is expanded, to hide the latency.
template <int R, int P, int LINE>
QUIRE_INLINE void dot_unit_line(const Tile& t, i64 unit, Bytes (&next)[P], const u32* x, F32 (&acc)[P][R]) {
    Bytes w[P];
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p) {
        w[p] = next[p];
        next[p] = unit_line<(LINE + 1) % 4>(t.panels[p] + (LINE < 3 ? unit : unit + 1) * UNIT_BYTES);
    }
    dot_line<R, P>(w, x + LINE * R, acc);
}

// Products with one line of a unit in which panels have exceptions: from number `met` on.
template <int R, int P, int LINE>
QUIRE_INLINE void dot_broken_line(const Tile& t, i64 unit, i32 (&met)[P], const u32* x, F32 (&acc)[P][R]) {
    Bytes w[P];
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p) {
        const Window& window = *t.windows[p];
        w[p] = unit_line<LINE>(t.panels[p] + unit * UNIT_BYTES);
        for (; met[p] < window.count; ++met[p]) {
            const Exception& e = window.exceptions[met[p]];
            if (e.unit != unit || e.place / 32 != LINE) break;
            w[p] = put_half(w[p], e.place % 32, e.value);
        }
    }
    dot_line<R, P>(w, x + LINE * R, acc);
}

// Units of bf12, with a stop where a panel has an exception.
template <int R, int P>
void tile_bf12(const Tile& t) {
    F32 acc[P][R];
#pragma GCC unroll 32
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) acc[p][r] = zero();
    i32 met[P] = {};
    const u32* x = t.input;
    for (i64 unit = 0;;) {
        i64 stop = t.steps;
        Bytes next[P];
#pragma GCC unroll 32
        for (int p = 0; p < P; ++p) {
            const Window& window = *t.windows[p];
            if (met[p] < window.count && window.exceptions[met[p]].unit < stop) stop = window.exceptions[met[p]].unit;
            next[p] = unit_line<0>(t.panels[p] + unit * UNIT_BYTES);
        }
        for (; unit < stop; ++unit, x += UNIT_LINES * R) {
#pragma GCC unroll 32
            for (int p = 0; p < P; ++p) {
                prefetch_l2(t.ahead[p] + unit * UNIT_BYTES);
                prefetch_l2(t.ahead[p] + unit * UNIT_BYTES + 64);
                prefetch_l2(t.ahead[p] + unit * UNIT_BYTES + 128);
            }
            dot_unit_line<R, P, 0>(t, unit, next, x, acc);
            dot_unit_line<R, P, 1>(t, unit, next, x, acc);
            dot_unit_line<R, P, 2>(t, unit, next, x, acc);
            dot_unit_line<R, P, 3>(t, unit, next, x, acc);
        }
        if (unit == t.steps) break;
        // In registers for few rows; for many rows this would slow the loop above more than it saves.
        if constexpr (R <= 4) {
            dot_broken_line<R, P, 0>(t, unit, met, x, acc);
            dot_broken_line<R, P, 1>(t, unit, met, x, acc);
            dot_broken_line<R, P, 2>(t, unit, met, x, acc);
            dot_broken_line<R, P, 3>(t, unit, met, x, acc);
            x += UNIT_LINES * R;
        } else {
            alignas(64) u8 lines[P][UNIT_LINES * 64];
            for (int p = 0; p < P; ++p) {
                expand_unit(t.panels[p] + unit * UNIT_BYTES, lines[p]);
                met[p] = put_exceptions(*t.windows[p], met[p], unit, lines[p]);
            }
            for (int line = 0; line < UNIT_LINES; ++line, x += R) {
                Bytes w[P];
#pragma GCC unroll 32
                for (int p = 0; p < P; ++p) w[p] = load_bytes(lines[p] + line * 64);
                dot_line<R, P>(w, x, acc);
            }
        }
        ++unit;
    }
    store_tile<R, P>(t, acc);
}

// A panel of bf12 as one of bf16: for many rows.
void expand_panel(const Weight& w, i32 panel, u8* lines) {
    const u8* from = w.data + panel * w.panel_bytes;
    const i64 units = w.k / UNIT_INPUTS;
    for (i64 unit = 0; unit < units; ++unit) expand_unit(from + unit * UNIT_BYTES, lines + unit * UNIT_LINES * 64);
    const Window& window = w.windows[panel];
    for (i32 met = 0; met < window.count;) {
        const i64 unit = window.exceptions[met].unit;
        met = put_exceptions(window, met, unit, lines + unit * UNIT_LINES * 64);
    }
}

void unpack_units(const Weight& w, i32 n, float* out) {
    const u8* panel = w.data + (n / 16) * w.panel_bytes;
    const Window& window = w.windows[n / 16];
    const float scale = w.column_scale[n];
    for (i32 unit = 0, met = 0; unit < w.k / UNIT_INPUTS; ++unit) {
        alignas(64) u8 lines[UNIT_LINES * 64];
        expand_unit(panel + static_cast<i64>(unit) * UNIT_BYTES, lines);
        met = put_exceptions(window, met, unit, lines);
        for (i32 i = 0; i < UNIT_INPUTS; ++i) {
            u32 word = 0;
            __builtin_memcpy(reinterpret_cast<u8*>(&word) + 2, lines + (i / 2) * 64 + (n % 16) * 4 + (i % 2) * 2, 2);
            float value;
            __builtin_memcpy(&value, &word, 4);
            const i32 k = unit * UNIT_INPUTS + i;
            out[w.columns == nullptr ? k : w.columns[k]] = value * scale;
        }
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
