// The machine's peaks: products in registers and reads from memory, the two sides of a roofline.
#pragma once
#include "weight.h"

namespace quire {

struct PeakTable {
    // Run `rounds` of independent products of one format, all in registers, and return the operations that they were: a product
    // and a sum are two. u4 is u8. The result goes to `sink` [16], so that no compiler can leave the work out.
    i64 (*compute)(Format format, i64 rounds, float* sink);
    // Read bytes (a multiple of 256) in four streams, as a product of few rows reads four panels; returns a sum of them.
    i32 (*read)(const u8* data, i64 bytes);
};

}  // namespace quire
