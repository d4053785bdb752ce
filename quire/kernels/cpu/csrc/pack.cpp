#include "pack.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace quire {
namespace {

constexpr i64 HUGE_PAGE = 2 << 20;

i64 rounded(i64 bytes) { return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE; }

// [16 rows][K] of W-byte elements to [K / per_word][16] words of 4 bytes, zeros past the end.
template <int W>
void interleave(const u8* source, i64 stride_bytes, i32 rows, i32 k, i32 words, u8* panel) {
    constexpr int PER_WORD = 4 / W;
    const i32 whole = k / PER_WORD;
    for (i32 r = 0; r < 16; ++r) {
        const u8* row = source + r * stride_bytes;
        u8* out = panel + 4 * r;
        const i32 used = r < rows ? whole : 0;
        for (i32 s = 0; s < used; ++s) memcpy(out + static_cast<i64>(s) * 64, row + static_cast<i64>(s) * 4, 4);
        for (i32 s = used; s < words; ++s) memset(out + static_cast<i64>(s) * 64, 0, 4);
        if (r < rows && whole * PER_WORD < k)
            memcpy(out + static_cast<i64>(whole) * 64, row + static_cast<i64>(whole) * 4, (k - whole * PER_WORD) * W);
    }
}

// [16 rows][K] of 2-byte elements to [K padded to 2][16], zeros past the end.
void transpose_halves(const u16* source, i64 stride, i32 rows, i32 k, u16* panel) {
    for (i32 r = 0; r < 16; ++r) {
        for (i32 j = 0; j < k; ++j) panel[static_cast<i64>(j) * 16 + r] = r < rows ? source[r * stride + j] : 0;
        if (k % 2 != 0) panel[static_cast<i64>(k) * 16 + r] = 0;
    }
}

// The same value in both halves of a word.
constexpr u32 twice(u32 half) { return half << 16 | half; }

constexpr u32 EXPONENT = twice(0x7f80), LOW_EXPONENT = twice(0x0780), REST = twice(0x807f);
constexpr i32 UNIT_WORDS = UNIT_LINES * 16;

// The smallest exponent of the window that contains most values of a panel's lines; at least 1, since 0 has no leading one.
i32 window_of(const u32* lines, i64 words) {
    i32 counts[256] = {};
    for (i64 i = 0; i < words; i += 64)
        for (i64 j = i; j < i + 16; ++j) {
            ++counts[lines[j] >> 7 & 255];
            ++counts[lines[j] >> 23 & 255];
        }
    i32 sum = 0, best = 0, start = 1;
    for (i32 last = 1; last < 255; ++last) {
        sum += counts[last] - (last > WINDOW_SIZE ? counts[last - WINDOW_SIZE] : 0);
        // Of equal windows the middle one would be best; the first has more room above.
        if (sum > best) best = sum, start = last >= WINDOW_SIZE ? last - WINDOW_SIZE + 1 : 1;
    }
    return start;
}

// Write a unit; return whether all its exponents lie in the window that begins at `start`. Other values are written wrongly.
bool encode_unit(const u32* lines, i32 start, u8* unit) {
    const u32 least = twice(static_cast<u32>(start) << 7);
    u32 outside = 0, kept[UNIT_WORDS], words[3][16];
    for (i32 i = 0; i < UNIT_WORDS; ++i) {
        // A bit above prevents a borrow from the lower half; if it is used, the value is outside.
        const u32 exponents = (((lines[i] & EXPONENT) | twice(0x8000)) - least) ^ twice(0x8000);
        outside |= exponents & ~LOW_EXPONENT;
        kept[i] = (lines[i] & REST) | (exponents & LOW_EXPONENT);
    }
    for (i32 i = 0; i < 16; ++i) {
        const u32 last = kept[48 + i];
        words[0][i] = kept[i] | (last & twice(7)) << 12 | last >> 31 << 11 | (last >> 15 & 1) << 27;
        words[1][i] = kept[16 + i] | (last & twice(0x78)) << 8;
        words[2][i] = kept[32 + i] | (last & LOW_EXPONENT) << 4;
    }
    memcpy(unit, words, UNIT_BYTES);
    return outside == 0;
}

// Divide a bf16 value by 2^(start - WINDOW_START); false where that is no normal value.
bool divide_half(u32 half, i32 start, u32& result) {
    const i32 exponent = static_cast<i32>(half >> 7 & 255), moved = exponent - start + WINDOW_START;
    result = half;
    if (start == WINDOW_START || (half & 0x7fff) == 0 || exponent == 255) return true;
    if (exponent == 0 || moved < 1 || moved > 254) return false;
    result = (half & 0x807f) | static_cast<u32>(moved) << 7;
    return true;
}

// Record the values of a unit that are outside of the window; false if one cannot be divided.
bool note_exceptions(const u32* lines, i32 unit, i32 start, std::vector<Exception>& exceptions) {
    for (i32 place = 0; place < 2 * UNIT_WORDS; ++place) {
        const u32 half = lines[place / 2] >> 16 * (place % 2) & 0xffff;
        const i32 exponent = static_cast<i32>(half >> 7 & 255);
        if (exponent >= start && exponent < start + WINDOW_SIZE) continue;
        u32 value;
        if (!divide_half(half, start, value)) return false;
        exceptions.push_back({unit, static_cast<u16>(place), static_cast<u16>(value)});
    }
    return true;
}

// Up to 16 rows as lines of bf16 pairs. Rows past the end repeat the first: their results are unused.
void lines_of(const u16* rows, i64 stride, i32 used, i32 k, std::vector<u32>& lines) {
    lines.resize(static_cast<size_t>(k) / 2 * 16);
    interleave<2>(reinterpret_cast<const u8*>(rows), stride * 2, used, k, k / 2, reinterpret_cast<u8*>(lines.data()));
    for (size_t line = 0; line < lines.size(); line += 16)
        for (i32 r = used; r < 16; ++r) lines[line + static_cast<size_t>(r)] = lines[line];
}

// Write a panel whose window begins at `start`; return false where an exception cannot be divided.
bool encode_panel(const std::vector<u32>& lines, i32 start, u8* panel, std::vector<Exception>& exceptions) {
    exceptions.clear();
    const i32 units = static_cast<i32>(lines.size() / UNIT_WORDS);
    for (i32 unit = 0; unit < units; ++unit) {
        const u32* from = lines.data() + static_cast<i64>(unit) * UNIT_WORDS;
        if (encode_unit(from, start, panel + static_cast<i64>(unit) * UNIT_BYTES)) continue;
        if (!note_exceptions(from, unit, start, exceptions)) return false;
    }
    return true;
}

}  // namespace

u8* allocate(i64 bytes) {
    // Mapped with an additional page, so that it can start on a huge page; the rest is unmapped.
    const i64 size = rounded(bytes > 0 ? bytes : 1);
    void* mapped = mmap(nullptr, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    u8* begin = static_cast<u8*>(mapped);
    const i64 skip = (HUGE_PAGE - reinterpret_cast<i64>(begin) % HUGE_PAGE) % HUGE_PAGE;
    if (skip > 0) munmap(begin, skip);
    munmap(begin + skip + size, HUGE_PAGE - skip);
#if defined(MADV_HUGEPAGE)
    if (bytes >= HUGE_PAGE) madvise(begin + skip, size, MADV_HUGEPAGE);
#endif
    return begin + skip;
}

void release(u8* memory, i64 bytes) {
    if (memory != nullptr) munmap(memory, rounded(bytes > 0 ? bytes : 1));
}

i64 panel_lines(Format format, i32 k) {
    switch (format) {
        case Format::bf16: return ceil_div(k, 2);
        case Format::f32: return k;
        case Format::f16: return ceil_div(k, 2);
        case Format::bf12: return k / UNIT_INPUTS * (UNIT_BYTES / 64);
        case Format::u8: return 2 * ceil_div(k, 8);
        case Format::f8: case Format::f8_wide: return k / 4;
        default: return ceil_div(k, 8);
    }
}

void pack_dense(Format format, const void* source, i64 stride, i32 n, i32 k, i32 first, i32 count, u8* panels) {
    const i64 lines = panel_lines(format, k), width = format == Format::f32 ? 4 : 2;
    for (i32 row = 0; row < count; row += 16) {
        const u8* rows = static_cast<const u8*>(source) + row * stride * width;
        u8* panel = panels + (first + row) / 16 * lines * 64;
        const i32 used = n - first - row < 16 ? n - first - row : 16;
        if (format == Format::f16)
            transpose_halves(reinterpret_cast<const u16*>(rows), stride, used, k, reinterpret_cast<u16*>(panel));
        else if (format == Format::bf16)
            interleave<2>(rows, stride * 2, used, k, static_cast<i32>(lines), panel);
        else
            interleave<4>(rows, stride * 4, used, k, static_cast<i32>(lines), panel);
    }
}

void pack_bf12(const u16* source, i64 stride, i32 n, i32 k, i32 first, i32 count, u8* panels, float* scales,
    std::vector<Exception>* exceptions) {
    std::vector<u32> lines;
    for (i32 row = 0; row < count; row += 16) {
        const i32 panel = (first + row) / 16;
        u8* to = panels + panel * panel_lines(Format::bf12, k) * 64;
        lines_of(source + row * stride, stride, n - first - row < 16 ? n - first - row : 16, k, lines);
        i32 start = window_of(lines.data(), static_cast<i64>(lines.size()));
        if (!encode_panel(lines, start, to, exceptions[row / 16])) {
            // Without a division; values outside are stored unchanged.
            start = WINDOW_START;
            encode_panel(lines, start, to, exceptions[row / 16]);
        }
        for (i32 i = 0; i < 16; ++i) scales[panel * 16 + i] = ldexpf(1.0f, start - WINDOW_START);
    }
}

bool suits_bf12(const u16* source, i64 stride, i32 count, i32 k) {
    constexpr i32 MOST_PANELS = 8, LEAST_UNITS_PER_EXCEPTION = 8;
    if (k % UNIT_INPUTS != 0 || k == 0 || count < 1) return false;
    std::vector<u32> lines;
    std::vector<u8> panel(static_cast<size_t>(panel_lines(Format::bf12, k)) * 64);
    std::vector<Exception> exceptions;
    const i32 panels = ceil_div(count, 16), looks = panels < MOST_PANELS ? panels : MOST_PANELS;
    i64 found = 0;
    for (i32 look = 0; look < looks; ++look) {
        const i32 row = static_cast<i32>(static_cast<i64>(panels) * look / looks) * 16;
        lines_of(source + row * stride, stride, count - row < 16 ? count - row : 16, k, lines);
        if (!encode_panel(lines, window_of(lines.data(), static_cast<i64>(lines.size())), panel.data(), exceptions)) return false;
        found += static_cast<i64>(exceptions.size());
    }
    return found * LEAST_UNITS_PER_EXCEPTION <= static_cast<i64>(looks) * (k / UNIT_INPUTS);
}

void pack_codes(Format format, const i8* source, i64 stride, i32 n, i32 k, i32 first, i32 count, const i8* levels, i32 num_levels,
    u8* panels) {
    const i64 lines = panel_lines(format, k);
    u8 index_of[256] = {};
    for (i32 i = 0; i < num_levels; ++i) index_of[static_cast<u8>(levels[i])] = static_cast<u8>(i);
    // Padding multiplies inputs that are 0; its code only has to be a valid one.
    for (i32 row = 0; row < count; row += 16) {
        u8* panel = panels + (first + row) / 16 * lines * 64;
        const i32 used = n - first - row < 16 ? n - first - row : 16;
        memset(panel, format == Format::u8 ? 128 : 0, lines * 64);
        for (i32 r = 0; r < used; ++r) {
            const i8* codes = source + (row + r) * stride;
            u8* out = panel + 4 * r;
            if (format == Format::u8) {
                for (i32 j = 0; j < k; ++j) out[static_cast<i64>(j / 4) * 64 + j % 4] = static_cast<u8>(codes[j] + 128);
                continue;
            }
            for (i32 j = 0; j < k; ++j) {
                const u8 nibble = index_of[static_cast<u8>(codes[j])];
                out[static_cast<i64>(j / 8) * 64 + j % 4] |= static_cast<u8>(j % 8 < 4 ? nibble : nibble << 4);
            }
        }
    }
}

void pack_float8(const u8* source, i64 stride, i32 n, i32 k, i32 first, i32 count, u8* panels) {
    constexpr i32 TOGETHER = 32;  // pairs of inputs: one kilobyte for sixteen rows, which stays in the L1 cache
    for (i32 row = 0; row < count; row += 16) {
        u8* panel = panels + (first + row) / 16 * panel_lines(Format::f8, k) * 64;
        const i32 used = n - first - row < 16 ? n - first - row : 16, pairs = k / 2;
        for (i32 begin = 0; begin < pairs; begin += TOGETHER) {
            const i32 end = pairs - begin < TOGETHER ? pairs : begin + TOGETHER;
            if (used < 16) memset(panel + static_cast<i64>(begin) * 32, 0, static_cast<size_t>(end - begin) * 32);
            for (i32 r = 0; r < used; ++r) {
                const u8* codes = source + (row + r) * stride;
                for (i32 pair = begin; pair < end; ++pair)
                    memcpy(panel + static_cast<i64>(pair) * 32 + float8_place(r, 0), codes + 2 * static_cast<i64>(pair), 2);
            }
        }
    }
}

void forget_pages(const void* begin, i64 bytes) {
    const i64 page = sysconf(_SC_PAGESIZE), address = reinterpret_cast<i64>(begin);
    const i64 first = (address + page - 1) / page * page, last = (address + bytes) / page * page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace quire
