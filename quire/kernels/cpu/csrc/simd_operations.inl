// The functions of simd.h and activation.h one by one, by name, for their tests.
#include "elementwise.h"

namespace quire::QUIRE_ISA {
namespace {

QUIRE_INLINE F32 floats(const void* p) { return load(static_cast<const float*>(p)); }
QUIRE_INLINE I32 ints(const void* p) { return load(static_cast<const i32*>(p)); }
QUIRE_INLINE const u16* halves(const void* p) { return static_cast<const u16*>(p); }
// A mask travels as sixteen i32, 1 in its lanes.
QUIRE_INLINE Mask lanes_of(const void* p) { return ints(p) == set1(1); }
QUIRE_INLINE void put(void* out, F32 x) { store(static_cast<float*>(out), x); }
QUIRE_INLINE void put(void* out, I32 x) { store(static_cast<i32*>(out), x); }
QUIRE_INLINE void put(void* out, u32 x) { *static_cast<u32*>(out) = x; }
QUIRE_INLINE void put(void* out, float x) { *static_cast<float*>(out) = x; }

#define QUIRE_OPERATION(name, a_bytes, b_bytes, c_bytes, out_bytes, ...)                                         \
    {name, a_bytes, b_bytes, c_bytes, out_bytes,                                                                 \
     []([[maybe_unused]] const void* a, [[maybe_unused]] const void* b, [[maybe_unused]] const void* c, void* out) { \
         __VA_ARGS__;                                                                                             \
     }}
#define QUIRE_UNARY(name, expression) QUIRE_OPERATION(name, 64, 0, 0, 64, put(out, expression))
#define QUIRE_BINARY(name, expression) QUIRE_OPERATION(name, 64, 64, 0, 64, put(out, expression))
#define QUIRE_TEST(name, expression) QUIRE_OPERATION(name, 64, 64, 0, 4, put(out, static_cast<u32>(bits(expression))))

constexpr SimdOperation simd_operations[] = {
    QUIRE_UNARY("exp", exp(floats(a))),
    QUIRE_UNARY("tanh", tanh(floats(a))),
    QUIRE_UNARY("abs", abs(floats(a))),
    QUIRE_UNARY("sqrt", sqrt(floats(a))),
    QUIRE_UNARY("round", round(floats(a))),
    QUIRE_UNARY("to_i32", to_i32(floats(a))),
    QUIRE_UNARY("to_i32_up", to_i32_up(floats(a))),
    QUIRE_UNARY("to_f32", to_f32(ints(a))),
    QUIRE_UNARY("silu", silu(floats(a))),
    QUIRE_UNARY("gelu", gelu(floats(a))),
    QUIRE_UNARY("gelu_tanh", gelu_tanh(floats(a))),
    QUIRE_UNARY("relu", relu(floats(a))),
    QUIRE_UNARY("relu2", relu2(floats(a))),
    QUIRE_UNARY("xielu", xielu(floats(a), 0.8f, 1.3f)),
    QUIRE_UNARY("shift_left_5", shift_left<5>(ints(a))),
    QUIRE_UNARY("shift_right_5", shift_right<5>(ints(a))),
    QUIRE_UNARY("shift_right_signed_5", shift_right_signed<5>(ints(a))),
    QUIRE_UNARY("add_iota", ints(a) + iota()),
    QUIRE_BINARY("add", floats(a) + floats(b)),
    QUIRE_BINARY("sub", floats(a) - floats(b)),
    QUIRE_BINARY("mul", floats(a) * floats(b)),
    QUIRE_BINARY("div", floats(a) / floats(b)),
    QUIRE_BINARY("max", max(floats(a), floats(b))),
    QUIRE_BINARY("min", min(floats(a), floats(b))),
    QUIRE_BINARY("times_power", times_power(floats(a), floats(b))),
    QUIRE_BINARY("add_i32", ints(a) + ints(b)),
    QUIRE_BINARY("sub_i32", ints(a) - ints(b)),
    QUIRE_BINARY("mul_i32", ints(a) * ints(b)),
    QUIRE_BINARY("and_i32", ints(a) & ints(b)),
    QUIRE_BINARY("or_i32", ints(a) | ints(b)),
    QUIRE_BINARY("xor_i32", ints(a) ^ ints(b)),
    QUIRE_BINARY("max_i32", max(ints(a), ints(b))),
    QUIRE_BINARY("min_i32", min(ints(a), ints(b))),
    QUIRE_TEST("less", floats(a) < floats(b)),
    QUIRE_TEST("less_equal", floats(a) <= floats(b)),
    QUIRE_TEST("greater", floats(a) > floats(b)),
    QUIRE_TEST("greater_equal", floats(a) >= floats(b)),
    QUIRE_TEST("either_is_nan", is_nan(floats(a)) | is_nan(floats(b))),
    QUIRE_TEST("both_are_nan", is_nan(floats(a)) & is_nan(floats(b))),
    QUIRE_TEST("equal_i32", ints(a) == ints(b)),
    QUIRE_TEST("less_i32", ints(a) < ints(b)),
    QUIRE_OPERATION("fma", 64, 64, 64, 64, put(out, fma(floats(a), floats(b), floats(c)))),
    QUIRE_OPERATION("zero_below", 64, 64, 64, 64, put(out, zero_below(floats(a), floats(b), floats(c)))),
    QUIRE_OPERATION("select", 64, 64, 64, 64, put(out, select(lanes_of(a), floats(b), floats(c)))),
    QUIRE_OPERATION("select_i32", 64, 64, 64, 64, put(out, select(lanes_of(a), ints(b), ints(c)))),
    QUIRE_OPERATION("sum_lanes", 64, 0, 0, 4, put(out, sum_lanes(floats(a)))),
    QUIRE_OPERATION("max_lanes", 64, 0, 0, 4, put(out, max_lanes(floats(a)))),
    QUIRE_OPERATION("load_bf16", 32, 0, 0, 64, put(out, load_bf16(halves(a)))),
    QUIRE_OPERATION("load_f16", 32, 0, 0, 64, put(out, load_f16(halves(a)))),
    QUIRE_OPERATION("load_s8", 16, 0, 0, 64, put(out, load_s8(static_cast<const i8*>(a)))),
    QUIRE_OPERATION("store_bf16", 64, 0, 0, 32, store_bf16(static_cast<u16*>(out), floats(a))),
    QUIRE_OPERATION("store_bf16_flushed", 64, 0, 0, 32, store_bf16_flushed(static_cast<u16*>(out), floats(a))),
    QUIRE_OPERATION("store_f16", 64, 0, 0, 32, store_f16(static_cast<u16*>(out), floats(a))),
    QUIRE_OPERATION("store_s8", 64, 0, 0, 16, store_s8(static_cast<i8*>(out), ints(a))),
    // Masked: b holds the number of lanes. What a mask leaves out may lie outside of memory.
    QUIRE_OPERATION("first_lanes", 4, 0, 0, 4, put(out, static_cast<u32>(bits(first_lanes(*static_cast<const i32*>(a)))))),
    QUIRE_OPERATION("load_masked", 64, 4, 0, 64,
                    put(out, load(static_cast<const float*>(a), first_lanes(*static_cast<const i32*>(b))))),
    QUIRE_OPERATION("load_i32_masked", 64, 4, 0, 64,
                    put(out, load(static_cast<const i32*>(a), first_lanes(*static_cast<const i32*>(b))))),
    QUIRE_OPERATION("load_bf16_masked", 32, 4, 0, 64, put(out, load_bf16(halves(a), first_lanes(*static_cast<const i32*>(b))))),
    QUIRE_OPERATION("load_f16_masked", 32, 4, 0, 64, put(out, load_f16(halves(a), first_lanes(*static_cast<const i32*>(b))))),
    QUIRE_OPERATION("load_s8_masked", 16, 4, 0, 64,
                    put(out, load_s8(static_cast<const i8*>(a), first_lanes(*static_cast<const i32*>(b))))),
    QUIRE_OPERATION("store_masked", 64, 4, 0, 64,
                    store(static_cast<float*>(out), floats(a), first_lanes(*static_cast<const i32*>(b)))),
    QUIRE_OPERATION("store_bf16_masked", 64, 4, 0, 32,
                    store_bf16(static_cast<u16*>(out), floats(a), first_lanes(*static_cast<const i32*>(b)))),
    QUIRE_OPERATION("compress_store", 64, 64, 0, 64, compress_store(static_cast<float*>(out), lanes_of(b), floats(a))),
    QUIRE_OPERATION("compress_store_i32", 64, 64, 0, 64, compress_store(static_cast<i32*>(out), lanes_of(b), ints(a))),
    QUIRE_OPERATION("compress_count", 64, 64, 0, 4, float chosen[16];
                    put(out, static_cast<u32>(compress_store(chosen, lanes_of(b), floats(a))))),
    QUIRE_OPERATION("dot_bf16", 64, 64, 64, 64, put(out, dot_bf16(floats(a), load_bytes(b), load_bytes(c)))),
    QUIRE_OPERATION("dot_u8s8", 64, 64, 4, 64,
                    put(out, dot_u8s8(ints(a), load_bytes(b), set1_bytes(*static_cast<const u32*>(c))))),
    QUIRE_UNARY("swap_lanes_1", swap_lanes<1>(floats(a))),
    QUIRE_UNARY("swap_lanes_2", swap_lanes<2>(floats(a))),
    QUIRE_UNARY("swap_lanes_4", swap_lanes<4>(floats(a))),
    QUIRE_UNARY("swap_lanes_8", swap_lanes<8>(floats(a))),
    QUIRE_OPERATION("load_u8", 16, 64, 0, 64, put(out, load_u8(static_cast<const u8*>(a), lanes_of(b)))),
    QUIRE_OPERATION("level_pairs", 64, 32, 0, 64, put(out, level_pairs(level_table(halves(b)), ints(a)))),
    QUIRE_OPERATION("unpack_nibbles", 64, 16, 0, 128, Bytes low; Bytes high;
                    unpack_nibbles(load_bytes(a), load_table(static_cast<const u8*>(b)), low, high);
                    store_bytes(out, low); store_bytes(static_cast<u8*>(out) + 64, high)),
    QUIRE_OPERATION("at_step", 64, 2048, 0, 64, put(out, at_step(make_steps(static_cast<const float*>(b)), ints(a)))),
    QUIRE_OPERATION("set1_bytes", 4, 0, 0, 64, store_bytes(out, set1_bytes(*static_cast<const u32*>(a)))),
};

#undef QUIRE_OPERATION
#undef QUIRE_UNARY
#undef QUIRE_BINARY
#undef QUIRE_TEST

}  // namespace
}  // namespace quire::QUIRE_ISA
