"""The levels of ARM in an emulator, and AVX-VNNI with its instruction in plain C++.

tests/native/compare_levels.cpp compares the bits of a level with those of the portable kernels, compiled with fused
multiply-adds. Each test compiles one kernel for two levels; tests share what is compiled, see tests/emulated.py.
"""

from __future__ import annotations

import platform

import pytest

from tests.emulated import (
    ARM_LEVELS,
    FLAGS,
    KERNELS,
    NativeBuild,
    Source,
    build_folder,
    kernel_source,
    need,
    plain_source,
    program_source,
    run,
    table_list,
)

pytestmark = pytest.mark.slow

VPDPBUSD = """
#include <immintrin.h>
static inline __m256i dpbusd_in_cpp(__m256i acc, __m256i w, __m256i x) {
    alignas(32) int sums[8];
    alignas(32) unsigned char codes[32];
    alignas(32) signed char inputs[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums), acc);
    _mm256_store_si256(reinterpret_cast<__m256i*>(codes), w);
    _mm256_store_si256(reinterpret_cast<__m256i*>(inputs), x);
    for (int i = 0; i < 32; ++i) sums[i / 4] += codes[i] * inputs[i];
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(sums));
}
#define _mm256_dpbusd_avx_epi32 dpbusd_in_cpp
"""
AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
# What dispatch.cpp refers to, without kernels.
EMPTY_TABLES = "\n".join(
    f"namespace quire {{ namespace {level} {{ extern const {kernel.title()}Table {kernel}_table; "
    f"const {kernel.title()}Table {kernel}_table = {{}}; }} }}"
    for level in ARM_LEVELS
    for kernel in KERNELS
)
LIST = f"""
#include <stdio.h>
#include "tables.h"
{EMPTY_TABLES}
int main() {{ for (const quire::Kernels* each : quire::supported_kernels()) puts(each->name); }}
"""


def comparison(kernel: str, portable: tuple[str, ...], level: str, flags: tuple[str, ...], prefix: str = "") -> list[Source]:
    """Return the sources of the program that compares a kernel of a level with the portable one."""
    own = kernel_source(kernel, level, flags)
    kernels = [kernel_source(kernel, "portable", portable), Source(own.name, prefix + own.text, flags)]
    others = [plain_source("pack"), plain_source("team"), program_source("compare_levels")]
    return [*kernels, *others, table_list(("portable", level), (kernel,))]


@pytest.fixture(scope="session")
def arm_build(tmp_path_factory: pytest.TempPathFactory) -> NativeBuild:
    """Compiles for ARM."""
    return NativeBuild(need("aarch64-linux-gnu-g++"), build_folder(tmp_path_factory))


def test_levels_of_arm_are_those_of_the_processor(arm_build):
    # Found at run time: ARMv8.0-A, ARMv8.2-A with dot products, and all.
    program, emulator = arm_build.link([plain_source("dispatch"), Source("levels", LIST)]), need("qemu-aarch64")
    for cpu, expected in {"cortex-a53": ["portable"], "cortex-a76": ["portable", "neon"], "max": list(ARM_LEVELS)}.items():
        assert run(emulator, "-cpu", cpu, program).split() == expected


# The second level has few instructions that the first has not: it has all kernels, and the first those with products.
LEVELS = [(kernel, "neon_i8mm_bf16") for kernel in KERNELS] + [(kernel, "neon") for kernel in ("linear", "attention")]


@pytest.mark.parametrize(("kernel", "level"), LEVELS)
def test_levels_of_arm_give_the_bits_of_the_portable_kernels(arm_build, kernel, level):
    program = arm_build.link(comparison(kernel, (), level, ARM_LEVELS[level]))
    assert run(need("qemu-aarch64"), "-cpu", "max", program).endswith(" 0 different\n")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64")
@pytest.mark.parametrize("kernel", ["linear", "peak"])
def test_avx_vnni_gives_the_bits_of_the_portable_kernels_when_its_instruction_is_plain_cpp(tmp_path_factory, kernel):
    compiler = need("g++")
    # With the instruction it has to compile, too.
    if kernel == "peak":
        text = kernel_source(kernel, "avx_vnni", ()).text
        run(compiler, *FLAGS, *AVX2_FLAGS, "-mavxvnni", "-x", "c++", "-fsyntax-only", "-", input=text)
    build = NativeBuild(compiler, build_folder(tmp_path_factory))
    program = build.link(comparison(kernel, ("-mfma",), "avx_vnni", AVX2_FLAGS, VPDPBUSD))
    assert run(program).endswith(" 0 different\n")
