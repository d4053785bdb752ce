"""Norms, activations and the placing of heads against the torch references."""

import pytest
import torch

from quire.base.errors import InvariantError, UnsupportedError
from quire.contracts.model_spec import AttentionSpec, NormSpec, RopeSpec
from quire.kernels.reference import norm as reference
from quire.kernels.reference.activation import ACTIVATIONS
from quire.kernels.reference.attention import AttentionMetadata, store_kv
from quire.kernels.reference.norm import normalize as normalize_ref
from quire.kernels.reference.rope import cos_sin, inverse_frequencies, rotate
from quire.kernels.triton import qk_rope_store
from quire.kernels.triton.activation import activate
from quire.kernels.triton.attention import KvCache, attend
from quire.kernels.triton.norm import Norm, add_and_normalize, normalize, normalize_unweighted
from quire.kernels.triton.qk_rope_store import Projections, Rope, place_heads, rope_table
from quire.kernels.triton.step import DeviceAttentionMetadata
from tests.unit.kernels.gpu.conftest import draw

F16 = pytest.param(torch.float16, marks=pytest.mark.slow, id="f16")
DTYPES = pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="f32"), pytest.param(torch.bfloat16, id="bf16"), F16])
NORMS = {
    "rms": NormSpec("rms", 1e-6),
    "rms-late": NormSpec("rms", 1e-5, late_cast=True),
    "gemma": NormSpec("rms", 1e-6, offset=1, late_cast=True),
    "offset": NormSpec("rms", 1e-6, offset=1),
    "layer": NormSpec("layer", 1e-5, has_bias=True),
}


def assert_close(found, expected, f32=2e-6):
    """Assert equality up to the last bits: of f32, or of one rounding to a half type where two sums differ."""
    steps = {torch.float32: f32, torch.bfloat16: 2**-7, torch.float16: 2**-10}[expected.dtype]
    torch.testing.assert_close(found.cpu(), expected, atol=steps, rtol=steps)
    assert (found.cpu() == expected).float().mean() > (0.2 if expected.dtype == torch.float32 else 0.9)


def make_norm(spec, width, dtype, seed=1):
    bias = draw(width, dtype=dtype, seed=seed + 1) if spec.has_bias else None
    return spec, draw(width, dtype=dtype, seed=seed), bias


def on(device, norm):
    return Norm(norm[0], norm[1].to(device), None if norm[2] is None else norm[2].to(device))


@DTYPES
@pytest.mark.covering
@pytest.mark.parametrize("spec", NORMS.values(), ids=NORMS.keys())
@pytest.mark.parametrize("width", [1, 37, pytest.param(1024, marks=pytest.mark.slow)])
def test_normalize_rounds_like_the_reference(spec, width, dtype, device):
    x = 3 * draw(5, 2 * width, dtype=dtype)[:, :width]
    norm = make_norm(spec, width, dtype)
    found = normalize(x.to(device), on(device, norm))
    if width == 1 and spec.kind == "rms":
        torch.testing.assert_close(found.cpu(), normalize_ref(x, *norm), atol=1e-2, rtol=1e-2)
    else:
        assert_close(found, normalize_ref(x, *norm))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_row_over_its_size_has_the_same_bits_alone_as_among_others(kind, device):
    x = draw(7, 3, 300).bfloat16().to(device)[..., :256]
    found = normalize_unweighted(x, NormSpec(kind, 1e-5))
    torch.testing.assert_close(found, reference.normalize_unweighted(x, NormSpec(kind, 1e-5)))
    assert torch.equal(normalize_unweighted(x[4:5, 1:2], NormSpec(kind, 1e-5)), found[4:5, 1:2])


@DTYPES
@pytest.mark.covering
@pytest.mark.parametrize("branch_spec", [None, NORMS["gemma"]], ids=["plain", "sandwich"])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_add_and_normalize_changes_the_residual_stream_and_returns_its_norm(branch_spec, scale, dtype, device):
    x, branch = draw(3, 96, dtype=dtype), draw(3, 96, dtype=dtype, seed=5)
    norm = make_norm(NORMS["rms"], 96, dtype)
    branch_norm = None if branch_spec is None else make_norm(branch_spec, 96, dtype, seed=7)
    added = branch if branch_norm is None else normalize_ref(branch, *branch_norm)
    total = x + (added if scale == 1.0 else added * scale)
    stream = x.to(device)
    found = add_and_normalize(
        stream, branch.to(device), on(device, norm), None if branch_norm is None else on(device, branch_norm), scale
    )
    assert_close(stream, total)
    assert_close(found, normalize_ref(total, *norm))


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate_multiplies_the_rounded_activation_with_the_other_half(activation, dtype, device):
    both = 3 * draw(3, 2 * 1037, dtype=dtype)
    gate, up = both.to(device).chunk(2, dim=-1)
    expected = ACTIVATIONS[activation](both[:, :1037])
    assert_close(activate(gate, None, activation), expected, f32=1e-5)
    assert_close(activate(gate, up, activation), expected * both[:, 1037:], f32=1e-5)


def test_activate_refuses_activations_it_does_not_have(device):
    x = torch.zeros(1, 4, device=device)
    with pytest.raises(UnsupportedError, match="silu"):
        activate(x, x, "swoosh")


ROPES = {
    "none": None,
    "whole": RopeSpec(48, 1e4),
    "part-f32": RopeSpec(24, 1e4, is_f32=True),
}


HEAD_NORMS = {"no-norm": None, "rms": NORMS["rms"], "gemma": NORMS["gemma"]}
FAST_HEADS = [("none", "no-norm"), ("whole", "rms"), ("part-f32", "gemma")]


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16, F16], ids=str)
@pytest.mark.parametrize(
    "rope, norm_spec",
    [
        pytest.param(
            ROPES[rope], HEAD_NORMS[norm], id=f"{rope}-{norm}", marks=() if (rope, norm) in FAST_HEADS else pytest.mark.slow
        )
        for rope in ROPES
        for norm in HEAD_NORMS
    ],
)
@pytest.mark.parametrize("few_tokens", [2, 64], ids=["many-heads", "one-head"])
def test_place_heads_equals_norm_rope_and_store_one_after_the_other(few_tokens, norm_spec, rope, dtype, device, monkeypatch):
    monkeypatch.setattr(qk_rope_store, "_FEW_TOKENS", few_tokens)
    num_tokens, num_heads, num_kv_heads, head_dim, block_size = 3, 6, 3, 48, 4
    qkv = draw(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    positions = torch.arange(num_tokens) * 7 % 90
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(2))[:num_tokens]
    slots[1] = -1
    norms = None if norm_spec is None else (make_norm(norm_spec, head_dim, dtype), make_norm(norm_spec, head_dim, dtype, 4))
    frequencies = None if rope is None else inverse_frequencies(rope, 100)

    q, k, v = qkv.view(num_tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    if norms is not None:
        q, k = normalize_ref(q, *norms[0]), normalize_ref(k, *norms[1])
    if rope is not None:
        angles = cos_sin(rope, frequencies, positions, dtype)
        q, k = rotate(q, *angles), rotate(k, *angles)
    shape = (20, num_kv_heads, block_size, head_dim)
    k_cache, v_cache = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    store_kv(k[slots >= 0], v[slots >= 0], k_cache, v_cache, slots[slots >= 0])

    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    parts = (part.unflatten(1, (-1, head_dim)) for part in qkv.to(device).split(sizes, 1))
    cache = KvCache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
    found = place_heads(
        Projections(*parts),
        cache,
        slots.to(device),
        positions.to(device),
        None if rope is None else rope_table(rope, frequencies.to(device), 100, dtype),
        None if norms is None else (on(device, norms[0]), on(device, norms[1])),
    )
    assert_close(found, q)
    assert_close(cache.k, k_cache)
    assert torch.equal(cache.v.cpu(), v_cache)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_place_heads_quantises_each_head_of_a_token_by_its_largest_value(stored, device):
    k, v = draw(5, 2, 40), 1e-3 * draw(5, 2, 40, seed=3)
    v[2, 1] = 0.0
    slots = torch.tensor([3, 0, 7, 9, -5])
    shape = (3, 2, 4)
    cache = KvCache(
        *(torch.zeros(*shape, 40, dtype=stored, device=device) for _ in range(2)),
        *(torch.full(shape, 7.0, device=device) for _ in range(2)),
    )
    projected = Projections(*(part.to(device) for part in (draw(5, 4, 40), k, v)))
    place_heads(projected, cache, slots.to(device), torch.zeros(5, dtype=torch.int64, device=device), None)
    for dense, values, scales in ((k, cache.k, cache.k_scales), (v, cache.v, cache.v_scales)):
        largest = 127 if stored == torch.int8 else 448
        for token, slot in enumerate(slots[:4].tolist()):
            size = dense[token].abs().amax(-1)
            torch.testing.assert_close(scales[slot // 4, :, slot % 4].cpu(), size / largest)
            back = values[slot // 4, :, slot % 4].cpu().float() * scales[slot // 4, :, slot % 4].cpu()[:, None]
            error = (back - dense[token]).abs()
            assert bool((error <= (0.51 * size / 127)[:, None] if stored == torch.int8 else error <= size[:, None] / 28).all())
        assert int((scales == 7.0).sum()) == 24 - 8


@pytest.mark.covering
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("part", ["k", "v"])
def test_a_nan_is_one_for_all_that_attend_to_it_when_keys_and_values_are_quantised(stored, part, device):
    """Else a failed sequence would go on with wrong tokens."""
    parts = {"q": draw(2, 2, 16), "k": draw(2, 1, 16), "v": draw(2, 1, 16)}
    parts[part][0, 0, 3] = torch.nan
    cache = KvCache(
        *(torch.zeros(2, 1, 4, 16, dtype=stored, device=device) for _ in range(2)),
        *(torch.zeros(2, 1, 4, device=device) for _ in range(2)),
    )
    step = DeviceAttentionMetadata.of(
        AttentionMetadata(torch.tensor([0, 4]), [0, 1, 2], [1, 1], torch.tensor([[0], [1]])), device
    )
    projected = Projections(*(tensor.to(device) for tensor in parts.values()))
    q = place_heads(projected, cache, step.slots, torch.zeros(2, dtype=torch.int64, device=device), None)
    out = attend(q, cache, step, AttentionSpec(2, 1, 16, 0.25))
    assert bool(out[0].isnan().all())
    assert bool(out[1].isfinite().all())


def test_place_heads_refuses_what_it_would_misread(device):
    q, k, v = (torch.zeros(2, 2, 32, device=device) for _ in range(3))
    cache = KvCache(*(torch.zeros(4, 2, 4, 32, device=device) for _ in range(2)))
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(InvariantError, match="slots"):
        place_heads(Projections(q, k, v), cache, slots.int(), slots, None)
    with pytest.raises(InvariantError, match="v must be"):
        place_heads(Projections(q, k, v[:, :1]), cache, slots, slots, None)
    rope = Rope(RopeSpec(16, 1e4), torch.zeros(9, 32, device=device))
    with pytest.raises(InvariantError, match="rope table"):
        place_heads(Projections(q, k, v), cache, slots, slots, rope)
