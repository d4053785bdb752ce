"""Whole models on ARM, in an emulator: greedy tokens are those of transformers, and logits have the bits of x86-64.

The plan and the steps of a native decoder are recorded on this machine, and a cross-compiled program repeats them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.kernels.native import load_native
from quire.kv.pool import KvPool, KvSpec
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.native_decoder import NativeDecoder
from quire.model.token_runs import TokenRuns, address_of
from quire.quant.policy import POLICIES, parameter_quantizer
from tests.emulated import (
    ARM_LEVELS,
    NativeBuild,
    build_folder,
    kernel_source,
    need,
    plain_source,
    program_source,
    run,
    table_list,
)
from tests.golden.greedy import greedy_choices
from tests.golden.make_checkpoints import reference_model
from tests.native_recording import Recording

native = load_native()
pytestmark = [
    pytest.mark.golden,
    pytest.mark.slow,
    pytest.mark.skipif(native is None, reason="the native kernels are not built"),
    pytest.mark.skipif(native is not None and "avx2" not in native.supported_isas(), reason="compares with AVX2"),
]

# Of a plan; the last two are of ranks.
SOURCES = ("team", "pack", "native_weight", "plan", "step", "step_results", "draft_run", "runs", "lora", "divided_rows")
SOURCES += ("mixer", "key_choice", "argmax_prefilter", "rank_group", "process_barrier")
KERNELS = ("linear", "attention", "elementwise", "sampler")
BLOCK_SIZE, NUM_BLOCKS = 16, 4
PROMPT = torch.randint(3, 131, (37,), generator=torch.Generator().manual_seed(37)).tolist()
CHUNKS, NUM_STEPS = (23, 14), 16
"""Tokens of the steps of the prompt, and tokens that are generated."""

# Grouped and single key heads, norms of heads, windows (of all layers, and of some), experts, shared experts, sinks,
# latent attention.
CASES = ("llama", "llama-mqa", "qwen3", "mistral-window", "gemma2", "qwen3-moe", "qwen2-moe", "gpt-oss", "deepseek-v3")
# (dtype, quantisation): those whose kernels are others.
NUMBERS = {"bfloat16": None, "int8": "int8", "int4": "int4"}


@pytest.fixture(scope="session")
def arm_build(tmp_path_factory: pytest.TempPathFactory) -> NativeBuild:
    """Compiles for ARM."""
    return NativeBuild(need("aarch64-linux-gnu-g++"), build_folder(tmp_path_factory))


@pytest.fixture(scope="session")
def programs(arm_build):
    """Return a function level -> the program with the kernels of this level."""

    def link(level: str) -> Path:
        sources = [kernel_source(kernel, level, ARM_LEVELS[level]) for kernel in KERNELS]
        sources += [plain_source(name) for name in SOURCES]
        return arm_build.link([*sources, table_list((level,), KERNELS), program_source("replay_plan")])

    return link


def record(folder: Path, path: Path, dtype: str = "auto", quantization: str | None = None) -> list[int]:
    """Write the calls of greedy steps on AVX2, whose fused operations are those of ARM, and return their tokens."""
    recording = Recording(native, "avx2", path)
    spec = read_model_spec(folder, dtype)
    parameters = open_parameters(folder, spec)
    policy = None if quantization is None else POLICIES[quantization]
    quantize = None if policy is None else parameter_quantizer(parameters, spec, policy).quantized
    decoder = NativeDecoder(recording, spec, parameters, spec.max_positions, quantize)
    kv = KvPool(KvSpec.of(spec, BLOCK_SIZE, spec.dtype), NUM_BLOCKS)
    recording.add_pool(kv)
    table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).numpy()
    tokens, end, given = [], 0, [PROMPT[: CHUNKS[0]], PROMPT[CHUNKS[0] :]]
    for step in range(len(CHUNKS) + NUM_STEPS - 1):
        new = given[step] if step < len(CHUNKS) else tokens[-1:]
        end += len(new)
        runs = TokenRuns(new, [0, len(new)], [end], [table], [address_of(table)])
        rows = [] if step < len(CHUNKS) - 1 else [len(new) - 1]
        _, best = decoder.run(runs, kv, rows, wants_best=True, needs_logits=step % 2 == 1)
        tokens += best or []
    recording.close()
    return tokens


def replay(program: Path, level: str, path: Path) -> tuple[list[int], str]:
    """Return the tokens that the emulated program has found, and its summary."""
    *lines, summary = run(need("qemu-aarch64"), "-cpu", "max", program, level, path).splitlines()
    return [int(token) for line in lines for token in line.split()[1:]], summary


@pytest.mark.parametrize("name", SOURCES)
def test_sources_of_steps_compile_for_arm_without_warnings(arm_build, name):
    assert arm_build.compile(plain_source(name)).stat().st_size > 0


@pytest.mark.parametrize("case", CASES)
def test_tokens_on_arm_are_those_of_transformers(programs, checkpoint, tmp_path, case):
    folder, level = checkpoint(case), "neon_i8mm_bf16"
    expected = record(folder, tmp_path / "calls")
    tokens, summary = replay(programs(level), level, tmp_path / "calls")
    assert tokens == greedy_choices(reference_model(folder), PROMPT, tokens)
    assert tokens == expected
    assert len(tokens) == NUM_STEPS
    assert " 0 of " in summary


@pytest.mark.covering
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("case", ["llama", "qwen3-moe"])
def test_bits_on_arm_are_those_of_x86_when_weights_are_short(programs, checkpoint, tmp_path, case, numbers):
    level = "neon_i8mm_bf16"
    expected = record(checkpoint(case), tmp_path / "calls", "bfloat16", NUMBERS[numbers])
    tokens, summary = replay(programs(level), level, tmp_path / "calls")
    assert tokens == expected
    assert " 0 of " in summary
