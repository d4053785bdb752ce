// Which instruction sets this machine and its system can run, and the kernels of the best one.
#include <stdlib.h>
#include <string.h>

#include "tables.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace quire {
namespace {

// A bit for each entry of all_kernels.
using Levels = u32;

#if defined(__x86_64__)
#if defined(QUIRE_WITHOUT_AVX2)  // a build of the slowest and the fastest level: the others are never chosen
#define MIDDLE portable
#define VNNI portable
constexpr Levels PORTABLE = 1, AVX2 = 0, AVX_VNNI = 0, AVX512 = 8;
#elif defined(QUIRE_WITHOUT_AVX_VNNI)  // the compiler has no such instructions: the level is never chosen
#define MIDDLE avx2
#define VNNI avx2
constexpr Levels PORTABLE = 1, AVX2 = 2, AVX_VNNI = 0, AVX512 = 8;
#else
#define MIDDLE avx2
#define VNNI avx_vnni
constexpr Levels PORTABLE = 1, AVX2 = 2, AVX_VNNI = 4, AVX512 = 8;
#endif

struct Registers { unsigned a, b, c, d; };

Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r = {0, 0, 0, 0};
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
    return r;
}

// XCR0: which registers the system saves at a switch of threads. A CPU can have AVX-512 without support by the operating system.
u64 saved_registers() {
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<u64>(high) << 32 | low;
}

bool has(unsigned word, int bit) { return word >> bit & 1; }

Levels find_levels() {
    const Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
    if (!has(basic.c, 27)) return PORTABLE;  // OSXSAVE
    const u64 saved = saved_registers();
    const bool avx2 = (saved & 0x6) == 0x6 && has(basic.c, 28) && has(basic.c, 12) && has(basic.c, 29) && has(extended.b, 5);
    if (!avx2) return PORTABLE;
    const bool avx512 = (saved & 0xe6) == 0xe6 && has(extended.b, 16) && has(extended.b, 17) && has(extended.b, 30) &&
                        has(extended.b, 31) && has(extended.c, 1) && has(extended.c, 11) && has(more.a, 5);
    return PORTABLE | AVX2 | (has(more.a, 4) ? AVX_VNNI : 0) | (avx512 ? AVX512 : 0);
}
#elif defined(__aarch64__)
constexpr Levels PORTABLE = 1, NEON = 2, NEON_I8MM_BF16 = 4;

Levels levels_of(bool has_dot_products, bool has_i8mm, bool has_bf16) {
    if (!has_dot_products) return PORTABLE;
    return PORTABLE | NEON | (has_i8mm && has_bf16 ? NEON_I8MM_BF16 : 0);
}

#if defined(__APPLE__)
bool has_feature(const char* name) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

Levels find_levels() {
    return levels_of(has_feature("hw.optional.arm.FEAT_DotProd"), has_feature("hw.optional.arm.FEAT_I8MM"),
        has_feature("hw.optional.arm.FEAT_BF16"));
}
#elif defined(__linux__)
// The kernel's numbers, which older headers lack. Atomics (ARMv8.1-A) are part of the level, as the compiler may use them.
constexpr unsigned long ATOMICS = 1ul << 8, DOT_PRODUCTS = 1ul << 20, I8MM = 1ul << 13, BF16 = 1ul << 14;

Levels find_levels() {
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    return levels_of((first & ATOMICS) != 0 && (first & DOT_PRODUCTS) != 0, (second & I8MM) != 0, (second & BF16) != 0);
}
#else
Levels find_levels() { return levels_of(false, false, false); }
#endif
#else
constexpr Levels PORTABLE = 1;
Levels find_levels() { return PORTABLE; }
#endif

// Cached: in a virtual machine each cpuid traps to the hypervisor.
Levels supported_levels() {
    static const Levels levels = find_levels();
    return levels;
}

#define KERNELS_OF(isa, products) \
    &products::linear_table, &isa::attention_table, &isa::elementwise_table, &isa::sampler_table, &isa::quantize_table, \
    &products::peak_table, &isa::recurrence_table
#define KERNELS(isa) \
    {#isa, KERNELS_OF(isa, isa)}

// From the slowest.
const Kernels all_kernels[] = {
    KERNELS(portable),
#if defined(__x86_64__)
    {"avx2", KERNELS_OF(MIDDLE, MIDDLE)},
    {"avx_vnni", KERNELS_OF(MIDDLE, VNNI)},
    KERNELS(avx512),
#elif defined(__aarch64__)
    KERNELS(neon),
    KERNELS(neon_i8mm_bf16),
#endif
};

}  // namespace

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> found;
    for (size_t level = 0; level < sizeof(all_kernels) / sizeof(all_kernels[0]); ++level)
        if ((supported_levels() >> level & 1) != 0) found.push_back(&all_kernels[level]);
    return found;
}

const Kernels* kernels_named(const char* name) {
    for (const Kernels* found : supported_kernels())
        if (strcmp(found->name, name) == 0) return found;
    return nullptr;
}

const Kernels& kernels() {
    static const Kernels* chosen = [] {
        const char* name = getenv("QUIRE_CPU_ISA");
        const Kernels* wanted = name == nullptr ? nullptr : kernels_named(name);
        return wanted == nullptr ? supported_kernels().back() : wanted;
    }();
    return *chosen;
}

}  // namespace quire
