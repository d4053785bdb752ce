"""Norms, rope and experts against their definitions."""

import math

import pytest
import torch
import torch.nn.functional as F

from quire.contracts.model_spec import MlpSpec, MoeSpec, NormSpec, RopeSpec
from quire.kernels.reference.moe import mixture_of_experts
from quire.kernels.reference.norm import normalize
from quire.kernels.reference.rope import cos_sin, inverse_frequencies, rotate


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("late_cast", [False, True])
def test_rms_norm_in_f32_equals_its_definition(offset, late_cast):
    x, weight = randn(5, 7), randn(7, seed=1)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (weight + offset)
    spec = NormSpec("rms", 1e-3, offset, late_cast=late_cast)
    torch.testing.assert_close(normalize(x, spec, weight), expected, atol=1e-6, rtol=1e-5)


def test_rms_norm_rounds_once_or_twice_as_the_spec_says():
    x, weight = randn(64, 96).bfloat16(), randn(96, seed=1).bfloat16()
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    twice, once = weight * wide.bfloat16(), (wide * weight.float()).bfloat16()
    assert not torch.equal(twice, once)
    assert torch.equal(normalize(x, NormSpec("rms", 1e-6), weight), twice)
    assert torch.equal(normalize(x, NormSpec("rms", 1e-6, late_cast=True), weight), once)


def test_layer_norm_has_mean_and_bias():
    x, weight, bias = randn(3, 9), randn(9, seed=1), randn(9, seed=2)
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-2).sqrt() * weight + bias
    spec = NormSpec("layer", 1e-2, has_bias=True)
    torch.testing.assert_close(normalize(x, spec, weight, bias), expected, atol=1e-6, rtol=1e-5)


def test_rotation_keeps_the_part_beyond_dim_and_depends_on_distance_only():
    spec = RopeSpec(dim=6, theta=100.0)
    frequencies = inverse_frequencies(spec, 64)
    q, k = randn(1, 2, 10), randn(1, 2, 10, seed=1)

    def at(x, position):
        return rotate(x, *cos_sin(spec, frequencies, torch.tensor([position]), torch.float32))

    assert torch.equal(at(q, 9)[..., 6:], q[..., 6:])
    assert torch.equal(at(q, 0), q)
    near, far = (at(q, 5) * at(k, 2)).sum(-1), (at(q, 45) * at(k, 42)).sum(-1)
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)
    pair = at(q, 3)[0, 0, [0, 3]]
    angle = torch.tensor(3.0)
    expected = torch.stack(
        (
            q[0, 0, 0] * angle.cos() - q[0, 0, 3] * angle.sin(),
            q[0, 0, 3] * angle.cos() + q[0, 0, 0] * angle.sin(),
        )
    )
    torch.testing.assert_close(pair, expected)


def test_dynamic_rope_stretches_only_beyond_the_original_length():
    spec = RopeSpec(dim=8, theta=1e4, kind="dynamic", factor=4.0, original_max=32)
    plain = inverse_frequencies(RopeSpec(dim=8, theta=1e4), 32)
    torch.testing.assert_close(inverse_frequencies(spec, 32), plain)
    theta = 1e4 * (4 * 64 / 32 - 3) ** (8 / 6)
    torch.testing.assert_close(inverse_frequencies(spec, 64), theta ** -(torch.arange(0, 8, 2) / 8))


def test_longrope_chooses_its_divisors_by_the_length_of_the_engine():
    spec = RopeSpec(dim=4, theta=1e4, kind="longrope", original_max=32, short=(1.0, 2.0), long=(3.0, 4.0))
    base = 1e4 ** -(torch.arange(0, 4, 2) / 4)
    torch.testing.assert_close(inverse_frequencies(spec, 32), base / torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(inverse_frequencies(spec, 33), base / torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("is_renormalized", [True, False])
def test_mixture_of_experts_equals_a_loop_over_tokens(is_renormalized):
    spec = MoeSpec(5, 2, MlpSpec(6, "silu"), is_renormalized)
    x, router, gate_up, down = randn(9, 4), randn(5, 4, seed=1), randn(5, 12, 4, seed=2), randn(5, 4, 6, seed=3)
    out = mixture_of_experts(x, spec, router, gate_up, down)
    for row in range(9):
        weights = (router @ x[row]).softmax(-1)
        best = weights.argsort(descending=True)[:2].tolist()
        total = sum(weights[e] for e in best) if is_renormalized else 1.0
        expected = torch.zeros(4)
        for expert in best:
            hidden = gate_up[expert] @ x[row]
            expected += weights[expert] / total * (down[expert] @ (F.silu(hidden[:6]) * hidden[6:]))
        torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-4)
    assert math.isfinite(float(out.sum()))


def test_rotated_neighbours_are_apart_in_the_result():
    rope = randn(5, 6, seed=21)
    cos, sin = rope.cos()[:, None], rope.sin()[:, None]
    heads = randn(5, 3, 17, seed=22)
    expected = heads.clone()
    even, odd = heads[..., :12:2], heads[..., 1:12:2]
    expected[..., :12:2], expected[..., 1:12:2] = even * cos - odd * sin, odd * cos + even * sin
    found = rotate(heads, cos, sin, is_interleaved=True)
    torch.testing.assert_close(found[..., :6], expected[..., :12:2])
    torch.testing.assert_close(found[..., 6:12], expected[..., 1:12:2])
    assert torch.equal(found[..., 12:], heads[..., 12:])
