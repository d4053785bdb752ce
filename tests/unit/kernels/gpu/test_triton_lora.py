"""The products of LoRA adapters against torch: any grouping of rows, several parts, odd sizes."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from quire.contracts.model_spec import AttentionSpec, GateClamp, LatentSpec, MlpSpec, MoeSpec, NormSpec
from quire.kernels.reference.moe import mixture_of_experts as mixture_ref
from quire.kernels.triton.launching import collected_launches
from quire.kernels.triton.linear import dequantize
from quire.kernels.triton.lora import add_low_rank, expand, group_heads, group_pairs, group_rows, shrink
from quire.kernels.triton.moe import ExpertExtras, mixture_of_experts
from quire.kernels.triton.quantized_weights import pack_integers
from quire.model.lora.device_heads import HeadMatrices
from quire.model.lora.experts import LowRankPair
from tests.unit.kernels.gpu.conftest import draw

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
ROWS = {
    "one": [2],
    "few": [1, -1, 0],
    "none": [-1] * 9,
    "grouped": [0] * 20 + [-1] * 3 + [2] * 17,
    "mixed": [0, 1, 2, -1, 2, 1, 0, 0, -1, 2, 2, 2] * 3,
}


def random(*shape, dtype, device, seed):
    return (0.3 * draw(*shape, seed=seed)).to(dtype).to(device)


def sizes(device, dtype, rank=5, widths=(37, 70), num_columns=50, num_adapters=3):
    a = random(num_adapters, len(widths) * rank, num_columns, dtype=dtype, device=device, seed=1)
    return a, [random(num_adapters, width, rank, dtype=dtype, device=device, seed=2 + width) for width in widths]


def reference(y, x, a, b, adapters):
    out, rank = y.clone(), a.shape[1] // len(b)
    for row, adapter in enumerate(adapters):
        if adapter < 0:
            continue
        shrunk = a[adapter] @ x[row]
        parts = [part[adapter] @ shrunk[index * rank : (index + 1) * rank] for index, part in enumerate(b)]
        out[row] += torch.cat(parts)
    return out


@DTYPES
@pytest.mark.parametrize("adapters", ROWS.values(), ids=ROWS)
def test_products_are_those_of_torch(adapters, dtype, device):
    a, b = sizes(device, dtype)
    x = random(len(adapters), 50, dtype=dtype, device=device, seed=3)
    y = random(len(adapters), 107, dtype=dtype, device=device, seed=4)
    want = reference(y, x, a, b, adapters)
    found = y.clone()
    add_low_rank(found, x, a, b, group_rows(torch.tensor(adapters, dtype=torch.int32, device=device), 3))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, want, atol=tolerance, rtol=tolerance)
    base = torch.tensor(adapters) < 0
    assert torch.equal(found[base], y[base])


def test_a_row_has_the_same_bits_in_any_step(device):
    adapters = ROWS["mixed"]
    a, b = sizes(device, torch.bfloat16, rank=20, widths=(70,), num_columns=300)
    x = random(len(adapters), 300, dtype=torch.bfloat16, device=device, seed=3)
    found = torch.zeros(len(adapters), 70, dtype=torch.bfloat16, device=device)
    add_low_rank(found, x, a, b, group_rows(torch.tensor(adapters, dtype=torch.int32, device=device), 3))
    for row in (0, 3, 7, 35):
        alone = torch.zeros(1, 70, dtype=torch.bfloat16, device=device)
        groups = group_rows(torch.tensor(adapters[row : row + 1], dtype=torch.int32, device=device), 3)
        add_low_rank(alone, x[row : row + 1], a, b, groups)
        assert torch.equal(alone[0], found[row])


MIXTURE = MoeSpec(num_experts=4, top_k=2, expert=MlpSpec(32, "silu"))
MIXTURES = {
    "plain": MIXTURE,
    "clamped": dataclasses.replace(MIXTURE, expert=MlpSpec(32, "silu", clamp=GateClamp(0.6, 1.702))),
    "weighed": dataclasses.replace(MIXTURE, weighs_inputs=True),
    "ungated": dataclasses.replace(MIXTURE, expert=MlpSpec(32, "relu2", is_gated=False)),
    "packed": MIXTURE,
}


def merged(weight, a, b, adapter):
    """Return the weights [E, O, K] of all experts with the products of an adapter added."""
    own = slice(adapter * len(weight), (adapter + 1) * len(weight))
    return weight + torch.cat([second[own] @ first for first, second in zip(a[own].chunk(len(b), 1), b, strict=True)], 1)


@pytest.mark.covering
@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("num_tokens", [2, 16], ids=["pair-tiles", "sorted"])
def test_adapters_of_experts_give_what_merged_experts_give(kind, num_tokens, device):
    """Two adapters of experts, one without any, and rows without an adapter."""
    spec, width, rank, num_adapters = MIXTURES[kind], 64, 5, 3
    num_parts = 2 if spec.expert.is_gated else 1
    shapes = (4, num_parts * 32, width), (4, width, 32)
    dense = [random(*shape, dtype=torch.float32, device=device, seed=index) for index, shape in enumerate(shapes)]
    weights = dense
    if kind == "packed":
        codes = [(100 * weight).round().clamp(-127, 127).to(torch.int8).flatten(0, 1) for weight in dense]
        weights = [
            pack_integers(each, each.new_full((len(each), each.shape[1] // 32), 1).float() / 100, None) for each in codes
        ]
        dense = [dequantize(each, torch.float32).view(shape) for each, shape in zip(weights, shapes, strict=True)]
    count = num_adapters * spec.num_experts
    matrices = {
        "gate_up": sizes(device, torch.float32, rank, (32,) * num_parts, width, count),
        "down": sizes(device, torch.float32, rank, (width,), 32, count),
    }
    numbers = torch.tensor([0, -1, 1, 0, 2, 1, -1, 1] * 2, dtype=torch.int32, device=device)[:num_tokens]
    has_experts = torch.tensor([1, 1, 0], dtype=torch.int32, device=device)

    def of_pairs(experts):
        groups = group_pairs(numbers, has_experts, experts, spec.num_experts)

        def added(name, x, num_slots):
            out = x.new_zeros(len(experts), sum(part.shape[1] for part in matrices[name][1]))
            add_low_rank(out, x, *matrices[name], groups, num_slots)
            return out

        return added

    x, router = (random(rows, width, dtype=torch.float32, device=device, seed=9) for rows in (num_tokens, 4))
    found = mixture_of_experts(x, F.linear(x, router), spec, *weights, extra=ExpertExtras(adapters=of_pairs))
    for adapter in (-1, 0, 1, 2):
        own = dense
        if adapter in (0, 1):
            own = [merged(weight, *matrices[name], adapter) for weight, name in zip(dense, matrices, strict=True)]
        expected, rows = mixture_ref(x.cpu(), spec, router.cpu(), *(each.cpu() for each in own)), numbers == adapter
        torch.testing.assert_close(found[rows].cpu(), expected[rows.cpu()], atol=1e-4, rtol=1e-4)


@DTYPES
def test_heads_of_latent_attention_get_what_a_merged_projection_gives(dtype, device):
    num_heads, rank, kv_rank, nope, value = 3, 5, 40, 20, 24
    latent = LatentSpec(None, kv_rank, nope, 8, value, NormSpec("rms", 1e-6))
    spec = AttentionSpec(num_heads, 1, kv_rank + 8, 1.0, latent=latent)
    holder = HeadMatrices.zeros(3, 8, spec, dtype, device)
    pairs = [
        LowRankPair(
            random(rank, kv_rank, dtype=dtype, device=device, seed=5 + number),
            random(num_heads * (nope + value), rank, dtype=dtype, device=device, seed=9 + number),
        )
        for number in range(3)
    ]
    for number, pair in enumerate([pairs[2], None, pairs[1]]):
        holder.set(number, pairs[number], spec)
        holder.set(number, pair, spec)
    adapters = [0, -1, 2, 1, 0, 0, 2] * 3
    groups = group_heads(torch.tensor(adapters, dtype=torch.int32, device=device), 3, num_heads)
    q = random(len(adapters), num_heads, nope + 8, dtype=dtype, device=device, seed=3)[..., :nope]
    attended = random(len(adapters), num_heads, kv_rank, dtype=dtype, device=device, seed=4)
    y_keys, y_values = torch.ones_like(attended), q.new_ones(len(adapters), num_heads, value)
    found = holder.add_to_keys(y_keys.clone(), q, groups), holder.add_to_values(y_values.clone(), attended, groups)
    for row, adapter in enumerate(adapters):
        pair = {0: pairs[2], 2: pairs[1]}.get(adapter)
        up = q.new_zeros(num_heads, nope + value, kv_rank) if pair is None else (pair.b @ pair.a).view(num_heads, -1, kv_rank)
        want = torch.einsum("hn,hnr->hr", q[row], up[:, :nope]), torch.einsum("hr,hvr->hv", attended[row], up[:, nope:])
        tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
        torch.testing.assert_close(found[0][row], y_keys[row] + want[0], **tolerance)
        torch.testing.assert_close(found[1][row], y_values[row] + want[1], **tolerance)


def test_the_heads_of_a_long_prompt_are_not_more_than_a_grid_may_have():
    pairs, a, b = (torch.empty(*shape, device="meta") for shape in ((1 << 20, 512), (128, 16, 512), (1, 512, 16)))
    with collected_launches() as launches:
        groups = group_heads(torch.empty(1 << 13, dtype=torch.int32, device="meta"), 1, 128)
        expand(pairs, shrink(pairs, a, groups.by_head), b, groups.by_adapter)
    assert [launch for launch in launches if max(launch.grid[1:], default=1) >= 1 << 16] == []
