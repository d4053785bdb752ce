// Which instruction sets this machine and its system can run, and the kernels of the best one.
#include <stdlib.h>
#include <string.h>

#include "tables.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace quire {
namespace {

enum Level { PORTABLE = 0, AVX2 = 1, AVX512 = 2 };

#if defined(__x86_64__)
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

Level find_best_level() {
    const Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
    if (!has(basic.c, 27)) return PORTABLE;  // OSXSAVE
    const u64 saved = saved_registers();
    const bool avx2 = (saved & 0x6) == 0x6 && has(basic.c, 28) && has(basic.c, 12) && has(basic.c, 29) && has(extended.b, 5);
    if (!avx2) return PORTABLE;
    const bool avx512 = (saved & 0xe6) == 0xe6 && has(extended.b, 16) && has(extended.b, 17) && has(extended.b, 30) &&
                        has(extended.b, 31) && has(extended.c, 1) && has(extended.c, 11) && has(more.a, 5);
    return avx512 ? AVX512 : AVX2;
}
#else
Level find_best_level() { return PORTABLE; }
#endif

// Cached: in a virtual machine each cpuid traps to the hypervisor.
Level best_level() {
    static const Level best = find_best_level();
    return best;
}

#define KERNELS(isa) \
    {#isa, &isa::linear_table, &isa::attention_table, &isa::elementwise_table, &isa::sampler_table, &isa::quantize_table, &isa::peak_table, \
     &isa::recurrence_table}

const Kernels all_kernels[] = {
    KERNELS(portable),
#if defined(__x86_64__)
    KERNELS(avx2),
    KERNELS(avx512),
#endif
};

int level_named(const char* name) {
    for (int level = 0; level < static_cast<int>(sizeof(all_kernels) / sizeof(all_kernels[0])); ++level)
        if (strcmp(all_kernels[level].name, name) == 0) return level;
    return -1;
}

}  // namespace

const Kernels* kernels_named(const char* name) {
    const int level = level_named(name);
    return level < 0 || level > best_level() ? nullptr : &all_kernels[level];
}

const Kernels& kernels() {
    static const Kernels* chosen = [] {
        const int best = best_level();
        const char* name = getenv("QUIRE_CPU_ISA");
        const int wanted = name == nullptr ? best : level_named(name);
        return &all_kernels[wanted >= 0 && wanted < best ? wanted : best];
    }();
    return *chosen;
}

}  // namespace quire
