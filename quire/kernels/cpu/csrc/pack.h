// Rearranging weights into panels, once at load. The sources are row-major [N, K] with `stride` elements a row.
#pragma once
#include <vector>

#include "weight.h"

namespace quire {

// Memory of whole huge pages if the system has them; zeroed. Null if there is none.
u8* allocate(i64 bytes);
void release(u8* memory, i64 bytes);

// 64-byte lines of a panel, and its size: lines * 64.
i64 panel_lines(Format format, i32 k);

// Write rows [first, first + count) of a weight of n rows into panels; first is a multiple of 16. Rows past n become zeros (the
// code of value 0) in the last panel.
void pack_dense(Format format, const void* source, i64 stride, i32 n, i32 k, i32 first, i32 count, u8* panels);
// The same for bf12: with scales [N padded to 16], and the exceptions of each written panel into `exceptions`.
void pack_bf12(const u16* source, i64 stride, i32 n, i32 k, i32 first, i32 count, u8* panels, float* scales,
    std::vector<Exception>* exceptions);
// Whether few units of a weight are exceptions, judged by some of its rows; `count` of them are there.
bool suits_bf12(const u16* source, i64 stride, i32 count, i32 k);
// codes int8. u8: code + 128. u4: index of the code in `levels` (num_levels ascending), which contain every code.
void pack_codes(Format format, const i8* source, i64 stride, i32 n, i32 k, i32 first, i32 count, const i8* levels, i32 num_levels,
    u8* panels);

// Codes of float8, as they are.
void pack_float8(const u8* source, i64 stride, i32 n, i32 k, i32 first, i32 count, u8* panels);

// Tell the system that whole pages of a mapped file within [begin, begin + bytes) are not needed in memory.
void forget_pages(const void* begin, i64 bytes);

}  // namespace quire
