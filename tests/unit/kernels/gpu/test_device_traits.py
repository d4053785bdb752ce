"""What kernels do on other GPUs than Hopper, with the tiles that these have."""

import dataclasses
import logging

import pytest
import torch
import torch.nn.functional as F

from quire.base.errors import ConfigError
from quire.contracts.config import EngineConfig
from quire.contracts.model_spec import AttentionSpec, MlpSpec, MoeSpec
from quire.kernels.reference.moe import mixture_of_experts as mixture_ref
from quire.kernels.triton import tiles
from quire.kernels.triton.attention import KvCache, attend
from quire.kernels.triton.device_traits import HOPPER, DeviceTraits, device_traits, using_traits
from quire.kernels.triton.float8 import suits_float8
from quire.kernels.triton.linear import dequantize, multiply
from quire.kernels.triton.moe import mixture_of_experts
from quire.kernels.triton.quantized_weights import pack_float8
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.kernels.triton.tile_table import active_table, using
from quire.worker.device import build
from tests.unit.kernels.gpu.paged_cases import dense_attention, make_case

FLOAT8 = torch.float8_e4m3fn


@pytest.fixture(params=[86, 120])
def traits(request):
    with using_traits(DeviceTraits.of_arch(request.param)):
        yield device_traits()


def test_what_gpus_have_follows_from_their_capability():
    found = {arch: DeviceTraits.of_arch(arch) for arch in (80, 86, 89, 90, 100, 120)}
    assert [arch for arch, each in found.items() if each.has_dependent_launch] == [90, 100, 120]
    assert [arch for arch, each in found.items() if not each.has_float8] == [80, 86]
    assert [arch for arch, each in found.items() if each.matrix_instruction == "mma"] == [80, 86, 89, 120]
    assert [(each.arch, each.name) for each in found.values()][-1] == (120, "12.0")
    assert found[90] == HOPPER
    assert HOPPER.is_hopper
    assert not found[100].is_hopper
    with pytest.raises(ConfigError, match="compute capabilities 8.0, 8.6, .* got 7.5"):
        DeviceTraits.of_arch(75)


def test_tiles_are_smaller_where_there_is_less_shared_memory_or_another_matrix_instruction(traits):
    long = tiles.prefill_attention_tile(256, torch.bfloat16, torch.bfloat16)
    experts = tiles.expert_tile(8, 128, torch.bfloat16)
    with using_traits(DeviceTraits.of_arch(90)):
        assert tiles.prefill_attention_tile(256, torch.bfloat16, torch.bfloat16).rows == 2 * long.rows
        assert tiles.expert_tile(8, 128, torch.bfloat16).num_stages == experts.num_stages + 1
    with using_traits(DeviceTraits.of_arch(80)):
        assert tiles.prefill_attention_tile(256, torch.bfloat16, torch.bfloat16) == long
        assert tiles.expert_tile(8, 128, torch.bfloat16).num_stages == experts.num_stages + 1


@pytest.mark.parametrize("arch", [89, 90])
def test_an_engine_takes_the_traits_of_its_gpu_and_says_when_no_such_gpu_has_run_the_kernels(arch, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    monkeypatch.setattr(DeviceTraits, "of", lambda device: DeviceTraits.of_arch(arch))
    with using_traits(HOPPER), using(active_table()), caplog.at_level(logging.WARNING):
        build.choose_tiles(EngineConfig(model="demo"), torch.device("cuda", 0))
        assert device_traits().arch == arch
    assert ("has not been run on a GPU of compute capability 8.9" in caplog.text) is (arch == 89)


def all_codes():
    """Return every float8 number, and NaN, in rows of 64 columns."""
    return torch.arange(256, dtype=torch.uint8).view(4, 64).view(FLOAT8)


def test_every_float8_code_has_the_same_value_on_every_gpu(traits, device):
    codes = all_codes()
    weight = pack_float8(codes.to(device), torch.ones(4, 1, device=device), (1, 64))
    assert weight.readable_codes.dtype == (FLOAT8 if traits.has_float8 else torch.uint8)
    found, expected = dequantize(weight, torch.float32).cpu(), codes.float()
    if traits.has_float8:  # the interpreter makes numbers of NaN
        found = torch.where(expected.isnan(), expected, found)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert suits_float8(torch.empty(100, 64, dtype=torch.bfloat16), weight) is traits.has_float8


def test_products_with_float8_weights_have_the_same_bits_with_and_without_its_conversion(device):
    generator = torch.Generator().manual_seed(2)
    codes = torch.randn(70, 192, generator=generator).to(FLOAT8).to(device)
    weight = pack_float8(codes, torch.rand(2, 3, generator=generator).to(device), (64, 64))
    x = torch.randn(3, 192, generator=generator).bfloat16().to(device)
    found = []
    for arch in (80, 120):
        with using_traits(DeviceTraits.of_arch(arch)):
            found.append(multiply(x, weight))
    assert torch.equal(*found)


@pytest.mark.covering
@pytest.mark.parametrize("is_in_order", [False, True])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_attention_of_prompts_and_decode_steps_equals_a_dense_loop(is_in_order, head_dim, traits, device):
    spec = AttentionSpec(4, 2, head_dim, head_dim**-0.5)
    case = make_case([90, 1, 300], [40, 1, 1], spec, 16, torch.bfloat16)
    cache = KvCache(case.k_cache.to(device), case.v_cache.to(device))
    step = DeviceAttentionMetadata.of(case.step, device)
    found = attend(case.q.to(device), cache, step, spec, is_in_order=is_in_order).cpu()
    torch.testing.assert_close(found.double(), dense_attention(case, spec), atol=2e-2, rtol=2e-2)


@pytest.mark.covering
@pytest.mark.parametrize("is_quantised", [False, True], ids=["bf16", "fp8"])
def test_experts_equal_the_reference(is_quantised, traits, device):
    spec = MoeSpec(3, 2, MlpSpec(32, "silu"))
    generator = torch.Generator().manual_seed(3)
    x, router = torch.randn(80, 64, generator=generator).bfloat16(), torch.randn(3, 64, generator=generator).bfloat16()
    codes = [torch.randn(3 * rows, columns, generator=generator).to(FLOAT8) for rows, columns in ((64, 64), (64, 32))]
    dense = [part.bfloat16().view(3, 64, -1) for part in codes]
    weights = [part.to(device) for part in dense]
    if is_quantised:
        scales = [torch.ones(len(part) // 32, part.shape[1] // 32, device=device) for part in codes]
        weights = [pack_float8(part.to(device), scale, (32, 32)) for part, scale in zip(codes, scales, strict=True)]
    exact = dataclasses.replace(spec, is_weight_f32=True)
    expected = mixture_ref(x.double(), exact, router.double(), *(part.double() for part in dense))
    found = mixture_of_experts(x.to(device), F.linear(x, router).to(device), spec, *weights).cpu()
    has_float8_inputs = is_quantised and traits.has_float8  # rounded to three bits
    assert (found.double() - expected).norm() / expected.norm() < (6e-2 if has_float8_inputs else 1e-2)
