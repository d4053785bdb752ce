"""Row-wise kernels on every instruction set of this machine, against torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.reference.rope import rotate as rotate_reference

native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
if not hasattr(native, "norm"):
    pytest.skip("built without the elementwise component", allow_module_level=True)

# Around one vector of 16, four accumulators of 16, and sizes of models.
SIZES = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 80, 127, 129, 576, 1000, 4099]
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def guarded(x: Tensor, fill: float = float("nan")) -> tuple[Tensor, Tensor]:
    """Return a copy of x and, around it, the memory whose ends must stay as they are."""
    memory = torch.full((x.numel() + 32,), fill, dtype=x.dtype)
    view = memory[16 : 16 + x.numel()].view(x.shape)
    view.copy_(x)
    return view, memory


def assert_ends_untouched(memory: Tensor) -> None:
    assert memory[:16].isnan().all()
    assert memory[-16:].isnan().all()


def run_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, isa: str, *, is_layer: bool, eps: float = 1e-6, threads: int = 1
) -> Tensor:
    out, memory = guarded(torch.full_like(x, float("nan")))
    bias_address = 0 if bias is None else bias.data_ptr()
    native.norm(x.data_ptr(), out.data_ptr(), *x.shape, eps, is_layer, weight.data_ptr(), bias_address, threads, isa)
    assert_ends_untouched(memory)
    return out


def norm_f64(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_layer: bool, eps: float = 1e-6) -> Tensor:
    x = x.double()
    if is_layer:
        return F.layer_norm(x, x.shape[-1:], weight.double(), None if bias is None else bias.double(), eps)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
    return y if bias is None else y + bias.double()


# There are 64 partial sums, so the relative error of a sum is at most (size / 64 + 8) roundings of 2^-24; the root halves that.
# Six roundings follow, and with a mean those of x - mean, relative to the largest x.
def norm_budget(x: Tensor) -> float:
    return (x.shape[-1] / 64 + 16) * 2.0**-24


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_norm_matches_f64_when_the_size_is_odd(isa: str, size: int, is_layer: bool, has_bias: bool):
    x, weight = random(3, size, seed=size) * 3 + 1, random(size, seed=1)
    bias = random(size, seed=2) if has_bias else None
    want = norm_f64(x, weight, bias, is_layer=is_layer)
    scale = want.abs().amax(-1, keepdim=True).clamp(min=1.0) * 8
    error = (run_norm(x, weight, bias, isa, is_layer=is_layer).double() - want).abs() / scale
    # One value has no variance: its difference from the mean is 0, and all that is left is the bias.
    assert error.max() <= norm_budget(x)


@pytest.mark.parametrize("is_layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e17], ids=str)
def test_norm_matches_f64_when_values_are_small_or_large(isa: str, is_layer: bool, scale: float):
    x, weight = random(5, 321, seed=3) * scale, random(321, seed=4)
    want = norm_f64(x, weight, None, is_layer=is_layer)
    torch.testing.assert_close(
        run_norm(x, weight, None, isa, is_layer=is_layer).double(), want, rtol=2e-6, atol=2e-6 * want.abs().max()
    )


def test_layer_norm_keeps_its_precision_when_the_mean_is_far_from_zero(isa: str):
    # A sum of squares less the square of the sum would leave nothing of a variance of 1 beside 4096^2.
    x, weight = random(4, 513, seed=5) + 4096, torch.ones(513)
    want = norm_f64(x, weight, None, is_layer=True)
    # The mean is rounded to 2^-12, and so is every x.
    torch.testing.assert_close(run_norm(x, weight, None, isa, is_layer=True).double(), want, rtol=0, atol=5e-4)


@pytest.mark.parametrize("is_layer", [False, True], ids=["rms", "layer"])
def test_norm_gives_zero_when_all_values_are_zero_or_denormal(isa: str, is_layer: bool):
    x, weight = torch.tensor([[0.0] * 21, [1e-44, -1e-44, 0.0] * 7]), torch.ones(21)
    assert (run_norm(x, weight, None, isa, is_layer=is_layer) == 0).all()


@pytest.mark.parametrize("is_layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("place", [0, 63, 64, 98], ids=str)
def test_norm_is_nan_in_that_row_alone_when_a_value_is_nan(isa: str, is_layer: bool, place: int):
    x = random(3, 99, seed=6)
    x[1, place] = float("nan")
    out = run_norm(x, torch.ones(99), None, isa, is_layer=is_layer)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("is_layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("size", [7, 64, 200])
def test_norm_gives_the_same_bits_when_in_place_or_shared_by_threads(isa: str, is_layer: bool, size: int):
    x, weight, bias = random(37, size, seed=7), random(size, seed=8), random(size, seed=9)
    want = run_norm(x, weight, bias, isa, is_layer=is_layer)
    for threads in (2, 3):
        assert torch.equal(run_norm(x, weight, bias, isa, is_layer=is_layer, threads=threads), want)
    alone = torch.cat([run_norm(row[None].clone(), weight, bias, isa, is_layer=is_layer) for row in x])
    assert torch.equal(alone, want)
    y = x.clone()
    native.norm(y.data_ptr(), y.data_ptr(), *y.shape, 1e-6, is_layer, weight.data_ptr(), bias.data_ptr(), 1, isa)
    assert torch.equal(y, want)


@pytest.mark.parametrize(
    ("heads", "head_dim", "dim"), [(1, 2, 2), (3, 64, 64), (2, 80, 80), (2, 96, 24), (4, 128, 128), (1, 34, 34)], ids=str
)
def test_rotate_gives_the_bits_of_the_reference_when_half_is_not_a_multiple_of_16(
    isa: str, heads: int, head_dim: int, dim: int
):
    x = random(5, heads, head_dim, seed=10)
    angles = torch.arange(5)[:, None] * torch.logspace(0, -4, dim // 2)
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    want = rotate_reference(x, cos[:, None], sin[:, None])
    for threads in (1, 3):
        y, memory = guarded(x)
        native.rotate(y.data_ptr(), *x.shape, dim, cos.data_ptr(), sin.data_ptr(), threads, isa)
        # Two products and their difference, each rounded: there is one answer.
        assert torch.equal(y, want)
        assert_ends_untouched(memory)


@pytest.mark.parametrize("kind", ["none", "rms", "layer", "bias"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "dim"),
    [(1, 64, 64), (6, 64, 64), (16, 128, 128), (21, 32, 32), (5, 128, 64), (3, 80, 64), (4, 80, 80), (2, 34, 34), (7, 48, 0)],
)
def test_turned_heads_have_the_bits_of_norm_and_rotate(isa: str, kind: str, heads: int, head_dim: int, dim: int):
    x, weight = random(5, heads, head_dim, seed=14), 1 + random(head_dim, seed=15)
    bias = random(head_dim, seed=16) if kind == "bias" else None
    x[0, 0], x[1, -1, 3] = 0.0, float("nan")
    angles = torch.arange(5)[:, None] * torch.logspace(0, -4, max(1, dim // 2))[: dim // 2]
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    places = {"weight": weight.data_ptr(), "bias": 0 if bias is None else bias.data_ptr(), "is_layer_norm": kind != "rms"}
    want = x.clone()
    if kind != "none":
        native.norm(want.data_ptr(), want.data_ptr(), 5 * heads, head_dim, 1e-5, isa=isa, **places)
    if dim > 0:
        native.rotate(want.data_ptr(), *x.shape, dim, cos.data_ptr(), sin.data_ptr(), 1, isa)
    y, memory = guarded(x)
    options = {} if kind == "none" else {"eps": 1e-5, **places}
    native.turn_heads(y.data_ptr(), *x.shape, dim, cos.data_ptr(), sin.data_ptr(), isa=isa, **options)
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.nan_to_num(), want.nan_to_num())
    assert_ends_untouched(memory)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("spread", "factor"), [(1.0, 1.0), (3.0, 4.0), (300.0, 4.0)])
def test_the_share_of_the_largest_is_that_of_the_softmax(isa: str, size: int, spread: float, factor: float):
    x = random(3, size, seed=17) * spread
    x[1, size // 2] = float("-inf") if size > 1 else 0.0
    y, memory = guarded(x)
    largest, out = x.max(-1).values.contiguous(), torch.full((3,), float("nan"))
    native.share_of_largest(y.data_ptr(), 3, size, largest.data_ptr(), factor, out.data_ptr(), isa)
    # e^x to 2 ulp of an exponent that was rounded twice, up to 32, and what is too small to be added.
    torch.testing.assert_close(out.double(), (x.double() * factor).softmax(-1).max(-1).values, rtol=8e-6, atol=0)
    assert_ends_untouched(memory)
    y[2, 0] = float("nan")
    native.share_of_largest(y.data_ptr(), 3, size, largest.data_ptr(), factor, out.data_ptr(), isa)
    assert out.isnan().tolist() == [False, False, True]


@pytest.mark.parametrize("size", SIZES)
def test_add_scaled_adds_when_the_size_is_odd(isa: str, size: int):
    x, y = random(2, size, seed=11), random(2, size, seed=12)
    out, memory = guarded(y)
    native.add_scaled(out.data_ptr(), x.data_ptr(), 0.37, 2, size, 1, isa)
    factor = torch.tensor(0.37).double()
    want = y.double() + factor * x.double()
    # One rounding where products are fused, two where not.
    assert ((out.double() - want).abs() <= 2.0**-24 * (want.abs() + (factor * x).abs()) + 1e-45).all()
    assert_ends_untouched(memory)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("factor", "cap"), [(0.5, 0.0), (1.0, 30.0), (0.0625, 50.0)], ids=str)
def test_scale_and_cap_matches_f64_when_the_size_is_odd(isa: str, size: int, factor: float, cap: float):
    x = random(2, size, seed=13) * 200
    out, memory = guarded(x)
    native.scale_and_cap(out.data_ptr(), 2, size, factor, cap, 1, isa)
    want = x.double() * factor
    if cap:
        want = cap * torch.tanh(want / cap)
    # tanh to 2 ulp, and a rounding each for the quotient and the product.
    torch.testing.assert_close(out.double(), want, rtol=2.5e-7 * (2 if cap else 0) + 1e-12, atol=0)
    assert_ends_untouched(memory)


def test_scale_and_cap_keeps_infinity_within_the_cap_when_a_logit_is_masked(isa: str):
    x = torch.tensor([[float("-inf"), float("inf"), float("nan"), 0.0]])
    native.scale_and_cap(x.data_ptr(), 1, 4, 2.0, 30.0, 1, isa)
    torch.testing.assert_close(x, torch.tensor([[-30.0, 30.0, float("nan"), 0.0]]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 16, 37])
def test_gate_multiplies_by_the_sigmoid(isa, size):
    generator = torch.Generator().manual_seed(size)
    y, gates = (10 * torch.randn(3, size, generator=generator) for _ in range(2))
    gates[0, 0] = -200.0
    want = y.double() * gates.double().sigmoid()
    native.gate(y.data_ptr(), gates.data_ptr(), 3, size, 1, isa)
    torch.testing.assert_close(y.double(), want, rtol=2e-6, atol=1e-6)


def run_activate(kind: str, x: Tensor, up: Tensor | None, isa: str, threads: int = 1) -> Tensor:
    out, memory = guarded(x)
    address = 0 if up is None else up.data_ptr()
    native.activate(list(ACTIVATIONS).index(kind), out.data_ptr(), address, *x.shape, threads, isa)
    assert_ends_untouched(memory)
    return out


@pytest.mark.parametrize("kind", list(ACTIVATIONS))
def test_activation_matches_f64_when_swept(isa: str, kind: str):
    x = torch.cat([torch.linspace(-30, 30, 60001), torch.logspace(-30, 30, 3000), -torch.logspace(-30, 30, 3000)])[None]
    want = ACTIVATIONS[kind](x.double())
    # gelu: the fit to 1e-7 and e^(-x^2 / 2) with its rounded argument; silu and gelu_tanh: e^x to 2 ulp, a sum and a quotient.
    torch.testing.assert_close(run_activate(kind, x, None, isa).double(), want, rtol=1e-6, atol=3e-7)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activation_keeps_relative_precision_when_its_value_is_tiny(isa: str, kind: str):
    # Left of zero a form like (1 + erf) / 2 would cancel to nothing. The error is that of the argument of e^, up to 57 for
    # gelu_tanh at -8.5: four roundings of 2^-24 where products are not fused, 57 * 4 * 2^-24 = 1.4e-5.
    x = torch.linspace(-8.5, -1.0, 10001)[None]
    wide = x.double()
    if kind == "gelu":
        want = wide * torch.special.erfc(-wide / 2**0.5) / 2
    elif kind == "silu":
        want = wide * torch.sigmoid(wide)
    else:
        want = wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    torch.testing.assert_close(run_activate(kind, x, None, isa).double(), want, rtol=1.5e-5, atol=1e-37)


@pytest.mark.covering(strength=2, keep=False)
@pytest.mark.parametrize("kind", list(ACTIVATIONS))
@pytest.mark.parametrize("size", SIZES)
def test_activation_is_multiplied_when_there_is_an_up_projection(isa: str, kind: str, size: int):
    x, up = random(3, size, seed=14), random(3, size, seed=15)
    want = ACTIVATIONS[kind](x.double()) * up.double()
    torch.testing.assert_close(run_activate(kind, x, up, isa).double(), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(run_activate(kind, x, up, isa, threads=3), run_activate(kind, x, up, isa))


@pytest.mark.parametrize("kind", list(ACTIVATIONS))
def test_activation_stays_nan_and_large_when_given_nan_and_infinity(isa: str, kind: str):
    out = run_activate(kind, torch.tensor([[float("nan"), float("inf"), 3e38, -3e38, 0.0]]), None, isa)[0]
    assert out[0].isnan()
    assert out[1] == float("inf")
    assert out[2] == torch.tensor(3e38)
    assert out[3] == 0
    assert out[4] == 0


def test_an_unknown_activation_is_refused_when_asked_for():
    with pytest.raises(ValueError, match="kind: got 9"):
        native.activate(9, 0, 0, 0, 0)


def run_route(
    logits: Tensor, top_k: int, isa: str, *, is_renormalized: bool = False, threads: int = 1
) -> tuple[Tensor, Tensor]:
    chosen = torch.full((len(logits), top_k), -7, dtype=torch.int32)
    weights, memory = guarded(torch.full((len(logits), top_k), float("nan")))
    native.route(logits.data_ptr(), *logits.shape, top_k, is_renormalized, chosen.data_ptr(), weights.data_ptr(), threads, isa)
    assert_ends_untouched(memory)
    return chosen.long(), weights


ROUTES = [(1, 1), (2, 1), (8, 2), (16, 16), (17, 3), (60, 4), (64, 6), (128, 8), (160, 20), (513, 33)]


@pytest.mark.parametrize(("num_experts", "top_k"), ROUTES, ids=str)
@pytest.mark.parametrize("is_renormalized", [False, True], ids=["plain", "renormalized"])
def test_route_matches_f64_when_experts_are_not_a_multiple_of_16(isa: str, num_experts: int, top_k: int, is_renormalized: bool):
    logits = random(33, num_experts, seed=16) * 5
    chosen, weights = run_route(logits, top_k, isa, is_renormalized=is_renormalized)
    want = logits.double().softmax(-1)
    picked, order = want.topk(top_k, dim=-1)
    assert torch.equal(chosen, order)
    if is_renormalized:
        picked = picked / picked.sum(-1, keepdim=True)
    # e^x to 2 ulp twice, the rounded difference of logits up to 40, and sums of at most 513 / 64 + 8 (or 33) roundings.
    torch.testing.assert_close(weights.double(), picked, rtol=8e-6, atol=1e-30)
    other = run_route(logits, top_k, isa, is_renormalized=is_renormalized, threads=2)
    assert torch.equal(other[0], chosen)
    assert torch.equal(other[1], weights)


def test_route_takes_the_lower_index_when_logits_tie(isa: str):
    generator = torch.Generator().manual_seed(17)
    logits = torch.randint(-1, 3, (200, 70), generator=generator).float()
    logits[logits == 0] *= -1  # zeros of both signs are equal
    logits[::2] = logits[::2].abs()
    chosen, _ = run_route(logits, 9, isa)
    assert torch.equal(chosen, logits.sort(dim=-1, descending=True, stable=True).indices[:, :9])


def test_route_gives_no_weight_when_a_logit_is_minus_infinity(isa: str):
    logits = torch.full((1, 20), float("-inf"))
    logits[0, 13] = 1.0
    chosen, weights = run_route(logits, 3, isa)
    assert chosen.tolist() == [[13, 0, 1]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("is_renormalized", [False, True], ids=["plain", "renormalized"])
@pytest.mark.parametrize("places", [[0], [39], [3, 17, 38], list(range(40))], ids=["first", "last", "some", "all"])
def test_route_gives_nan_and_distinct_experts_when_a_logit_is_nan(isa: str, is_renormalized: bool, places: list[int]):
    logits = random(2, 40, seed=18)
    logits[1, places] = float("nan")
    chosen, weights = run_route(logits, 5, isa, is_renormalized=is_renormalized)
    assert weights[0].isfinite().all()
    assert weights[1].isnan().all()
    assert len(set(chosen[1].tolist())) == 5
    assert chosen.min() >= 0
    assert chosen.max() < 40


@pytest.mark.parametrize("value", [float("inf"), float("-inf")], ids=str)
def test_route_gives_nan_as_softmax_does_when_all_logits_are_infinite(isa: str, value: float):
    chosen, weights = run_route(torch.full((1, 9), value), 4, isa)
    assert chosen.tolist() == [[0, 1, 2, 3]]
    assert weights.isnan().all()


@pytest.mark.parametrize("top_k", [0, 5])
def test_route_is_refused_when_top_k_is_out_of_range(top_k: int):
    with pytest.raises(ValueError, match="top_k: got"):
        native.route(0, 0, 4, top_k, False, 0, 0)
