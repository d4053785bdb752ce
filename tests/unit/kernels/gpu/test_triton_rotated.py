"""Keys and values in codes of four bits on the device: stored as the reference quantises them, read as what they stand for."""

import pytest
import torch

from quire.base.errors import InvariantError
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.reference.kv_formats import KV_CODES, LEVELS, dequantize, quantize, rotate
from quire.kernels.triton.attention import KvCache, attend
from quire.kernels.triton.qk_rope_store import Projections, place_heads
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.kv.device_pool import DeviceKvPool
from tests.unit.kernels.gpu.paged_cases import dense_attention, make_case

FORMATS = ("turboquant_4bit", "k8v4")


def pool_of(name, heads, dim, device, num_blocks=4, block_size=16):
    pool = DeviceKvPool(KvSpec(block_size, name, ((heads, dim),)), num_blocks, device)
    for part in pool.tensors():
        part.zero_()
    return pool


def codes_of(stored, code):
    """Return the codes [..., D] of a cache."""
    return stored if code == "int8" else torch.cat((stored & 15, stored >> 4), -1)


def pack(codes):
    low, high = codes.chunk(2, -1)
    return low | high << 4


@pytest.mark.covering
@pytest.mark.parametrize("dim", [16, 64, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
def test_heads_are_stored_as_the_reference_quantises_them_and_queries_are_rotated(name, dim, device):
    generator = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(5, heads, dim, generator=generator) * 3 for heads in (4, 2, 2))
    k[1, 0, 3] = 80.0
    v[2, 1] = 0.0
    v[3, 0, 5] = torch.nan
    pool = pool_of(name, 2, dim, device)
    cache, slots = pool.caches[0], torch.tensor([3, 0, 17, 40, -5])
    projected = Projections(*(part.to(device) for part in (q, k, v)))
    found = place_heads(projected, cache, slots.to(device), torch.zeros(5, dtype=torch.int64, device=device), None).cpu()
    is_rotated = KV_CODES[name][0] == "rotated4"
    torch.testing.assert_close(found, rotate(q) if is_rotated else q, atol=1e-5, rtol=1e-5)
    for dense, code, stored, scales in zip((k, v), KV_CODES[name], cache[:2], cache[2:4], strict=True):
        rows = [(slot // 16, slice(None), slot % 16) for slot in slots[:4].tolist()]
        codes = codes_of(torch.stack([stored.cpu()[row] for row in rows]), code)
        own = torch.stack([scales.cpu()[row] for row in rows])
        expected, expected_scales = quantize(dense[:4], code)
        torch.testing.assert_close(own, expected_scales, atol=1e-5, rtol=1e-4, equal_nan=True)
        is_there = ~dense[:4].isnan().any(-1)
        different = (codes.int() - expected.int()).abs()[is_there]
        assert different.max() <= 1
        assert (different > 0).float().mean() < 0.01  # values next to a threshold
    assert all(int((part.flatten(0, 2) != 0).any(-1).sum()) <= 8 for part in cache[:2])


@pytest.mark.covering
@pytest.mark.parametrize("q_dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("options", [{}, pytest.param({"window": 70}, marks=pytest.mark.slow)], ids=["plain", "window"])
@pytest.mark.parametrize("name", FORMATS)
def test_attention_reads_what_the_codes_stand_for(name, options, q_dtype, device):
    spec = AttentionSpec(4, 2, 64, 64**-0.5, **options)
    case = make_case([280, 40], [1, 40], spec, 16, q_dtype)
    parts, scales = [], []
    for cache, dense, code in zip((case.k_cache, case.v_cache), (case.k, case.v), KV_CODES[name], strict=True):
        codes, scale = quantize(cache.float().nan_to_num(), code)
        back = dequantize(codes, scale, code)
        parts.append(codes if code == "int8" else pack(codes))
        scales.append(scale)
        for index, blocks in enumerate(case.step.block_tables):
            dense[index] = back[blocks].transpose(1, 2).flatten(0, 1)[: len(dense[index])]
    expected = dense_attention(case, spec)
    q = rotate(case.q.float()).to(q_dtype) if KV_CODES[name][0] == "rotated4" else case.q
    cache = KvCache(*(part.to(device) for part in (*parts, *scales)))
    out = attend(q.to(device), cache, DeviceAttentionMetadata.of(case.step, device), spec).cpu()
    tolerance = 1e-5 if q_dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_levels_are_those_of_the_reference(device):
    cache = pool_of("k8v4", 1, 16, device).caches[0]
    cache.v[0, 0, 0] = pack(torch.arange(16, dtype=torch.uint8)).to(device)
    cache.v_scales.fill_(1.0)
    step = DeviceAttentionMetadata.of(AttentionMetadata(torch.tensor([0]), [0, 1], [1], torch.tensor([[0]])), device)
    out = attend(torch.zeros(1, 1, 16, device=device), cache, step, AttentionSpec(1, 1, 16, 0.25)).cpu()
    torch.testing.assert_close(rotate(out[0, 0]), torch.tensor(LEVELS), atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_and_blocks_are_moved_bit_for_bit(name, device):
    pool = pool_of(name, 2, 32, device)
    for part in pool.tensors():
        part[0] = torch.randint(1, 100, part[0].shape).to(part.dtype)
    numbers = (torch.tensor(each, device=device) for each in ([2, 3], [17, 33]))
    pool.move_tokens(*numbers, torch.tensor([0, 2], dtype=torch.int32, device=device))
    pool.copy_blocks(torch.tensor([0], device=device), torch.tensor([3], device=device))
    for part in pool.caches[0][:4]:
        assert torch.equal(part[1, :, 1], part[0, :, 2])
        assert torch.equal(part[2, :, 1], part[0, :, 3])
        assert torch.equal(part[3], part[0])
        assert int((part[1] != 0).any(0).sum() if part.dim() == 3 else (part[1] != 0).any(-1).any(0).sum()) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_heads_that_cannot_be_rotated_are_refused(name, device):
    cache = pool_of(name, 2, 48, device).caches[0]
    parts = Projections(*(torch.zeros(1, heads, 48, device=device) for heads in (4, 2, 2)))
    with pytest.raises(InvariantError, match="power of two of values from 16 on, got 48"):
        place_heads(parts, cache, *(torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)), None)
