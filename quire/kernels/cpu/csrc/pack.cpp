#include "pack.h"

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
        if (r < rows && whole * PER_WORD < k) memcpy(out + static_cast<i64>(whole) * 64, row + static_cast<i64>(whole) * 4, (k - whole * PER_WORD) * W);
    }
}

// [16 rows][K] of 2-byte elements to [K padded to 2][16], zeros past the end.
void transpose_halves(const u16* source, i64 stride, i32 rows, i32 k, u16* panel) {
    for (i32 r = 0; r < 16; ++r) {
        for (i32 j = 0; j < k; ++j) panel[static_cast<i64>(j) * 16 + r] = r < rows ? source[r * stride + j] : 0;
        if (k % 2 != 0) panel[static_cast<i64>(k) * 16 + r] = 0;
    }
}

}  // namespace

u8* allocate(i64 bytes) {
    // Mapped with a page more than asked for, so that it can start on a huge page; what is too much goes back.
    const i64 size = rounded(bytes > 0 ? bytes : 1);
    void* mapped = mmap(nullptr, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    u8* begin = static_cast<u8*>(mapped);
    const i64 skip = (HUGE_PAGE - reinterpret_cast<i64>(begin) % HUGE_PAGE) % HUGE_PAGE;
    if (skip > 0) munmap(begin, skip);
    munmap(begin + skip + size, HUGE_PAGE - skip);
    if (bytes >= HUGE_PAGE) madvise(begin + skip, size, MADV_HUGEPAGE);
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
        case Format::u8: return 2 * ceil_div(k, 8);
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

void pack_codes(Format format, const i8* source, i64 stride, i32 n, i32 k, i32 first, i32 count, const i8* levels, i32 num_levels, u8* panels) {
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

void forget_pages(const void* begin, i64 bytes) {
    const i64 page = sysconf(_SC_PAGESIZE), address = reinterpret_cast<i64>(begin);
    const i64 first = (address + page - 1) / page * page, last = (address + bytes) / page * page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace quire
