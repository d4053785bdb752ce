"""Mixtures of experts against the torch reference."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from quire.base.errors import InvariantError, UnsupportedError
from quire.contracts import expert_options
from quire.contracts.model_spec import GateClamp, MlpSpec, MoeSpec
from quire.kernels.reference.moe import ExpertExtras as BiasesOfReference
from quire.kernels.reference.moe import mixture_of_experts as mixture_ref
from quire.kernels.triton import moe
from quire.kernels.triton.float8 import quantize
from quire.kernels.triton.launching import run_all
from quire.kernels.triton.linear import dequantize
from quire.kernels.triton.moe import ExpertBiases, ExpertExtras, expert_launches, mixture_of_experts
from quire.kernels.triton.quantized_weights import FLOAT4_LEVELS, pack_float4, pack_float8, pack_integers
from quire.kernels.triton.tiles import ExpertTile

SPEC = MoeSpec(num_experts=6, top_k=2, expert=MlpSpec(40, "silu"))


def make(spec, num_tokens, width=72, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, width), (spec.num_experts, width)]
    shapes += [(spec.num_experts, 2 * spec.expert.intermediate_size, width)]
    shapes += [(spec.num_experts, width, spec.expert.intermediate_size)]
    return [
        (torch.randn(shape, generator=generator) * (width**-0.5 if index else 1)).to(dtype)
        for index, shape in enumerate(shapes)
    ]


def run(x, router, gate_up, down, spec, device):
    logits = F.linear(x, router)
    return mixture_of_experts(x.to(device), logits.to(device), spec, gate_up.to(device), down.to(device)).cpu()


@pytest.mark.covering
@pytest.mark.parametrize("num_tokens", [1, 3, 20], ids=["pair-tiles", "pairs-of-all", "sorted"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"is_renormalized": False, "is_weight_f32": True}, id="not-renormalized", marks=pytest.mark.slow),
        pytest.param({"top_k": 1, "expert": MlpSpec(33, "gelu_tanh")}, id="one"),
    ],
)
def test_experts_equal_the_reference_in_f32(num_tokens, options, device):
    spec = dataclasses.replace(SPEC, **options)
    x, router, gate_up, down = make(spec, num_tokens)
    expected = mixture_ref(x, spec, router, gate_up, down)
    torch.testing.assert_close(run(x, router, gate_up, down, spec, device), expected, atol=1e-5, rtol=1e-5)


CLAMPED = dataclasses.replace(
    SPEC, expert=MlpSpec(33, "silu", has_bias=True, clamp=GateClamp(0.6, 1.702)), has_router_bias=True
)


def make_biases(spec, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(11)
    shapes = ((spec.num_experts,), (spec.num_experts, 2 * spec.expert.intermediate_size), (spec.num_experts, width))
    return BiasesOfReference(*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes))


@pytest.mark.covering
@pytest.mark.parametrize("is_in_order", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["any-order", "in-order"])
@pytest.mark.parametrize("num_tokens", [1, pytest.param(20, marks=pytest.mark.slow)], ids=["pair-tiles", "sorted"])
def test_experts_with_biases_and_a_clamped_gate_equal_the_reference(num_tokens, is_in_order, device):
    x, router, gate_up, down = make(CLAMPED, num_tokens)
    x[0] *= 10  # beyond the limit on both sides
    biases = make_biases(CLAMPED, x.shape[1])
    expected = mixture_ref(x, CLAMPED, router, gate_up, down, biases)
    logits = F.linear(x, router, biases.router)
    tensors = [tensor.to(device) for tensor in (x, logits, gate_up, down, biases.gate_up, biases.down)]
    extra = ExpertExtras(ExpertBiases(*tensors[4:]))
    found = mixture_of_experts(*tensors[:2], CLAMPED, *tensors[2:4], is_in_order=is_in_order, extra=extra)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_clamped_experts_are_close_to_float64_in_bf16_and_keep_nan(device):
    spec = dataclasses.replace(CLAMPED, expert=dataclasses.replace(CLAMPED.expert, intermediate_size=40))
    x, router, gate_up, down = make(spec, 9, 64, torch.bfloat16)
    biases = make_biases(spec, 64, torch.bfloat16)
    wide = BiasesOfReference(*(part.double() for part in (biases.router, biases.gate_up, biases.down)))
    exact = dataclasses.replace(spec, is_weight_f32=True)
    expected = mixture_ref(x.double(), exact, *(tensor.double() for tensor in (router, gate_up, down)), wide)
    logits = F.linear(x, router, biases.router).to(device)
    x[4] = torch.nan
    weights = gate_up.to(device), down.to(device)
    on_device = ExpertBiases(biases.gate_up.to(device), biases.down.to(device))
    found = mixture_of_experts(x.to(device), logits, spec, *weights, extra=ExpertExtras(on_device)).cpu()
    assert found[4].isnan().all()
    clean = [row for row in range(9) if row != 4]
    assert (found[clean].double() - expected[clean]).norm() / expected[clean].norm() < 1.5e-2


@pytest.mark.covering
@pytest.mark.parametrize("is_swapped", [False, True], ids=["plain", "swapped"])
@pytest.mark.parametrize("width", [pytest.param(64, id="even", marks=pytest.mark.slow), pytest.param(72, id="odd")])
def test_experts_are_close_to_float64_in_bf16(is_swapped, width, device, monkeypatch):
    monkeypatch.setattr(moe, "expert_tile", lambda *_: ExpertTile(16, 32, 32, is_swapped, 4, 2))
    x, router, gate_up, down = make(SPEC, 9, width, torch.bfloat16)
    wide = [tensor.double() for tensor in (router, gate_up, down)]
    # The reference chooses by logits in bf16, as the model does.
    expected = mixture_ref(x.double(), dataclasses.replace(SPEC, is_weight_f32=True), *wide)
    found = run(x, router, gate_up, down, SPEC, device)
    assert (found.double() - expected).norm() / expected.norm() < 1e-2


def test_a_row_does_not_depend_on_others(device):
    x, router, gate_up, down = (tensor.to(device) for tensor in make(SPEC, 20))
    logits = F.linear(x, router)
    together = mixture_of_experts(x, logits, SPEC, gate_up, down)
    for row in (0, 7, 19):
        rows = slice(row, row + 1)
        assert torch.equal(mixture_of_experts(x[rows], logits[rows], SPEC, gate_up, down), together[rows])


@pytest.mark.covering
@pytest.mark.parametrize("num_tokens", [1, pytest.param(3, marks=pytest.mark.slow), 20])
@pytest.mark.parametrize(
    "kind",
    [
        *("int4", "int4-offset", "float8"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "mxfp4", "clamped-int4")),
    ],
)
def test_narrow_experts_are_those_of_their_numbers(kind, num_tokens, device):
    spec = dataclasses.replace(SPEC, expert=MlpSpec(32, "silu"))
    if kind in ("mxfp4", "clamped-int4"):
        spec = dataclasses.replace(CLAMPED, expert=dataclasses.replace(CLAMPED.expert, intermediate_size=32))
    x, router, *_ = make(spec, num_tokens, width=64)
    generator = torch.Generator().manual_seed(7)
    weights = []
    for rows, columns in ((spec.num_experts * 64, 64), (spec.num_experts * 64, 32)):
        if kind == "float8":
            codes = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
            weights.append(pack_float8(codes, torch.rand(rows // 32, columns // 32, generator=generator), (32, 32)))
        elif kind == "mxfp4":
            levels = torch.tensor(FLOAT4_LEVELS, dtype=torch.int8)
            codes = levels[torch.randint(0, len(levels), (rows, columns), generator=generator)]
            weights.append(pack_float4(codes, torch.randn(rows, columns // 32, generator=generator) / 12))
        else:
            low, high = (-127, 127) if kind == "int8" else (-8, 7)
            codes = torch.randint(low, high + 1, (rows, columns), generator=generator, dtype=torch.int8)
            scale, offset = (torch.randn(rows, columns // 32, generator=generator) / high for _ in range(2))
            weights.append(pack_integers(codes, scale, offset if kind == "int4-offset" else None))
    moved = [
        dataclasses.replace(
            weight,
            codes=weight.codes.to(device),
            scales=weight.scales.to(device),
            offsets=None if weight.offsets is None else weight.offsets.to(device),
        )
        for weight in weights
    ]
    dense = [dequantize(weight, torch.float32).cpu().view(spec.num_experts, 64, -1) for weight in moved]
    biases = make_biases(spec, 64) if spec.expert.has_bias else None
    expected = mixture_ref(x, spec, router, *dense, biases)
    logits = F.linear(x, router, None if biases is None else biases.router)
    theirs = None if biases is None else ExpertBiases(biases.gate_up.to(device), biases.down.to(device))
    found = mixture_of_experts(x.to(device), logits.to(device), spec, *moved, extra=ExpertExtras(theirs)).cpu()
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("group_size", [32, pytest.param(1 << 16, marks=pytest.mark.slow)], ids=["blocks", "tensor"])
def test_many_tokens_are_rounded_for_float8_experts_before_or_after_they_are_sent(group_size, device, monkeypatch):
    monkeypatch.setattr(expert_options, "FLOAT8_PAIRS", 4)  # more than six tokens are many
    spec = MoeSpec(3, 2, MlpSpec(32, "silu"))
    generator = torch.Generator().manual_seed(7)
    weights, dense = [], []
    for columns in (64, 32):
        codes = torch.randn(3 * 64, columns, generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand(3 * 64 // 32, -(-columns // group_size), generator=generator)
        packed = pack_float8(codes, scale, (32, group_size))
        weights.append(dataclasses.replace(packed, codes=codes.to(device), scales=scale.to(device)))
        dense.append(dequantize(weights[-1], torch.float32).cpu().view(3, 64, columns))
    x, logits = (torch.randn(9, columns, generator=generator).bfloat16().to(device) for columns in (64, 3))
    routes = moe.route_pairs(logits, spec, x.dtype, ExpertExtras())

    def rounded(rows, width):
        codes, scales = (part.cpu().float() for part in quantize(rows.to(device), width))
        return codes * scales.repeat_interleave(width, 1)[:, : rows.shape[1]]

    expected = torch.zeros(9, 64)
    pairs = (part.cpu() for part in routes)
    for pair, (share, expert) in enumerate(zip(*pairs, strict=True)):
        gate, up = (rounded(x[pair // 2, None], min(group_size, 64)) @ dense[0][expert].T).bfloat16().chunk(2, 1)
        inner = rounded(F.silu(gate) * up, min(group_size, 32))
        expected[pair // 2] += share * (inner @ dense[1][expert].T)[0]
    found = mixture_of_experts(x, logits, spec, *weights)
    assert (found.cpu() - expected).norm() < 6e-3 * expected.norm()
    sent = moe.pack_inputs(x, 9, spec, *weights)
    assert sent.shape == (9, 80)
    assert torch.equal(moe.add_pairs(moe.multiply_pairs(sent, routes, spec, *weights, dtype=x.dtype), 2), found)
    exact = mixture_of_experts(x, logits, spec, *weights, is_in_order=True)
    assert 0.01 < (found - exact).float().norm() / exact.float().norm() < 0.08
    assert torch.equal(mixture_of_experts(x[:6], logits[:6], spec, *weights), exact[:6])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_a_row_has_the_same_bits_at_any_number_of_rows_when_sums_are_in_order(dtype, device):
    x, router, gate_up, down = (tensor.to(device) for tensor in make(SPEC, 200, dtype=dtype))
    logits = F.linear(x, router)
    together = mixture_of_experts(x, logits, SPEC, gate_up, down, is_in_order=True)
    for count in (1, 30, 130):
        alone = mixture_of_experts(x[:count], logits[:count], SPEC, gate_up, down, is_in_order=True)
        assert torch.equal(alone, together[:count])


@pytest.mark.covering
@pytest.mark.parametrize("is_renormalized", [False, True], ids=["shares", "renormalized"])
@pytest.mark.parametrize("num_nan", [1, 6], ids=["one", "all"])
def test_a_row_with_nan_stays_with_the_experts_that_there_are_and_spoils_no_other(num_nan, is_renormalized, device):
    """Weights beyond the last expert, which a maximum over NaN may name, would be read from anywhere."""
    spec = dataclasses.replace(SPEC, is_renormalized=is_renormalized)
    x, router, gate_up, down = (tensor.to(device) for tensor in make(spec, 3))
    logits = F.linear(x, router)
    alone = mixture_of_experts(x[1:], logits[1:], spec, gate_up, down)
    logits[0, -num_nan:] = torch.nan
    out = torch.empty_like(x)
    launches = expert_launches(out, x, logits, spec, gate_up, down)
    run_all(launches)
    assert torch.equal(out[1:], alone)
    assert out[0].isnan().all()
    experts = launches[0].arguments["experts_ptr"].view(3, spec.top_k)
    for row in experts.tolist():
        assert len(set(row)) == spec.top_k
        assert set(row) <= set(range(spec.num_experts))


def test_experts_that_are_not_covered_are_refused(device):
    x, router, gate_up, down = make(SPEC, 2)
    bare = dataclasses.replace(SPEC, expert=MlpSpec(40, "xielu"))
    with pytest.raises(UnsupportedError, match="must have one of"):
        run(x, router, gate_up, down, bare, device)
    with pytest.raises(InvariantError, match="down"):
        run(x, router, gate_up, down[:, :, :8], SPEC, device)
    biased = dataclasses.replace(SPEC, expert=dataclasses.replace(SPEC.expert, has_bias=True))
    with pytest.raises(InvariantError, match="biases"):
        run(x, router, gate_up, down, biased, device)
