// Loops with only the operation that limits a kernel. See peak.h.
#include "simd.h"

#include "peak.h"
#include "tables.h"

namespace quire::QUIRE_ISA {
namespace {

// Independent sums: enough to hide the latency of a product (six cycles, two a cycle), and few enough to stay in registers.
#if QUIRE_HAS_512
constexpr int CHAINS = 24;
#elif QUIRE_HAS_256
constexpr int CHAINS = 4;  // of two registers each
#elif QUIRE_HAS_128
constexpr int CHAINS = 6;  // of four registers each
#else
constexpr int CHAINS = 3;
#endif
constexpr int STREAMS = 4;
constexpr int PREFETCH_BYTES = 2048;

// Inputs come from memory that the compiler cannot know, so that no round is removed.
#define QUIRE_KEEP __asm__ volatile("" ::: "memory")

i64 compute_f32(i64 rounds, const u32* x, float* sink) {
    F32 acc[CHAINS];
#pragma GCC unroll 32
    for (int c = 0; c < CHAINS; ++c) acc[c] = set1(sink[c % 16] + static_cast<float>(c));
    const F32 w = load(sink);
    for (i64 i = 0; i < rounds; ++i) {
        QUIRE_KEEP;
        const F32 b = as_f32(set1(static_cast<i32>(*x)));
#pragma GCC unroll 32
        for (int c = 0; c < CHAINS; ++c) acc[c] = fma(w, b, acc[c]);
    }
#pragma GCC unroll 32
    for (int c = 1; c < CHAINS; ++c) acc[0] = acc[0] + acc[c];
    store(sink, acc[0]);
    return rounds * CHAINS * 32;
}

i64 compute_bf16(i64 rounds, const u32* x, float* sink) {
    F32 acc[CHAINS];
#pragma GCC unroll 32
    for (int c = 0; c < CHAINS; ++c) acc[c] = set1(sink[c % 16] + static_cast<float>(c));
    const Bytes w = load_bytes(sink);
    for (i64 i = 0; i < rounds; ++i) {
        QUIRE_KEEP;
        const Bytes b = set1_bytes(*x);
#pragma GCC unroll 32
        for (int c = 0; c < CHAINS; ++c) acc[c] = dot_bf16(acc[c], w, b);
    }
#pragma GCC unroll 32
    for (int c = 1; c < CHAINS; ++c) acc[0] = acc[0] + acc[c];
    store(sink, acc[0]);
    return rounds * CHAINS * 64;
}

i64 compute_u8(i64 rounds, const u32* x, float* sink) {
    I32 acc[CHAINS];
#pragma GCC unroll 32
    for (int c = 0; c < CHAINS; ++c) acc[c] = set1(c);
    const Bytes w = load_bytes(sink);
    for (i64 i = 0; i < rounds; ++i) {
        QUIRE_KEEP;
        const Bytes b = set1_bytes(*x);
#pragma GCC unroll 32
        for (int c = 0; c < CHAINS; ++c) acc[c] = dot_u8s8(acc[c], w, b);
    }
#pragma GCC unroll 32
    for (int c = 1; c < CHAINS; ++c) acc[0] = acc[0] + acc[c];
    store(sink, to_f32(acc[0]));
    return rounds * CHAINS * 128;
}

i64 compute(Format format, i64 rounds, float* sink) {
    // A pair of bf16 (0.0049, 0.0049), a small float, or four small bytes: sums stay far from infinity.
    const u32 x = 0x3ba03ba0;
    if (format == Format::f32) return compute_f32(rounds, &x, sink);
    if (format == Format::bf16) return compute_bf16(rounds, &x, sink);
    return compute_u8(rounds, &x, sink);
}

i32 read(const u8* data, i64 bytes) {
    const i64 part = bytes / STREAMS;
    I32 sums[STREAMS];
#pragma GCC unroll 32
    for (int s = 0; s < STREAMS; ++s) sums[s] = set1(0);
    for (i64 at = 0; at < part; at += 64) {
#pragma GCC unroll 32
        for (int s = 0; s < STREAMS; ++s) {
            const u8* line = data + s * part + at;
            prefetch(line + PREFETCH_BYTES);
            sums[s] = sums[s] + load(reinterpret_cast<const i32*>(line));
        }
    }
    i32 lanes[16];
    store(lanes, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    i32 total = 0;
    for (int i = 0; i < 16; ++i) total ^= lanes[i];
    return total;
}

}  // namespace

extern const PeakTable peak_table = {compute, read};

}  // namespace quire::QUIRE_ISA
