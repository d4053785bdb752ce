// What differs between processors outside of the kernels: the handling of denormals, and the hint of a waiting loop.
#pragma once
#include "simd_types.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace quire {

// The calling thread's register of float settings, and the bits in it that make denormal inputs and results 0.
#if defined(__x86_64__)
constexpr u64 FLUSH_DENORMALS = 0x8040;  // FTZ and DAZ
static inline u64 float_mode() { return _mm_getcsr(); }
static inline void set_float_mode(u64 mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
constexpr u64 FLUSH_DENORMALS = u64{1} << 24;  // FZ
static inline u64 float_mode() {
    u64 mode;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void set_float_mode(u64 mode) { __asm__ __volatile__("msr fpcr, %0" : : "r"(mode)); }
#else
constexpr u64 FLUSH_DENORMALS = 0;
static inline u64 float_mode() { return 0; }
static inline void set_float_mode(u64) {}
#endif

// Tell the processor that this is a waiting loop.
static inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

}  // namespace quire
