// Names of number types. bf16 and f16 are passed as their 16 bits.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace quire {
using u8 = uint8_t;
using i8 = int8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;
}  // namespace quire
