"""A layer of a decode step as five fused kernels, compared with separate kernels and with torch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from quire.base.errors import InvariantError
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, RopeSpec
from quire.kernels.reference.activation import ACTIVATIONS
from quire.kernels.reference.norm import normalize
from quire.kernels.reference.rope import inverse_frequencies
from quire.kernels.triton import fused_attention
from quire.kernels.triton.attention import KvCache, attend
from quire.kernels.triton.fused_attention import ProjectedAttention
from quire.kernels.triton.fused_linear import FEW_TOKENS, Epilogue, fused_linear_launch
from quire.kernels.triton.launching import Launch
from quire.kernels.triton.norm import Norm
from quire.kernels.triton.pdl import has_dependent_launch
from quire.kernels.triton.qk_rope_store import Projections, place_heads, rope_table
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.kernels.triton.tiles import FusedAttentionTile
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_layers import reason_not_to_fuse
from quire.model.device_linear import DeviceLinear
from quire.model.parameters import parameter_shapes
from tests.unit.kernels.gpu.conftest import HAS_GPU, draw

RMS, GEMMA = NormSpec("rms", 1e-6), NormSpec("rms", 1e-6, offset=1, late_cast=True)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def empty(*shape, dtype, device):
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


# Rows, columns: less than a tile of either, several tiles with a part left over, columns that are no multiple of 16 bytes.
SHAPES = {"small": (6, 48), "tall": (38, 136), "long": (10, 2056), "odd": (14, 1031)}


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("num_tokens, norm_spec", [(1, RMS), (3, GEMMA), (16, None)], ids=["1 rms", "3 gemma", "16 plain"])
def test_products_are_those_of_torch_with_a_norm_before_and_a_gate_behind(num_tokens, norm_spec, shape, dtype, device):
    x, weight = draw(num_tokens, shape[1] + 7, dtype=dtype)[:, :-7], draw(*shape, dtype=dtype, seed=1) / shape[1] ** 0.5
    norm = None if norm_spec is None else Norm(norm_spec, draw(shape[1], dtype=dtype, seed=2).to(device))
    out = empty(num_tokens, shape[0] // 2, dtype=dtype, device=device)
    epilogue = Epilogue(activation="silu", is_gated=True)
    fused_linear_launch(out, x.to(device), weight.to(device), norm, epilogue).run()
    normed = x if norm is None else normalize(x, norm.spec, norm.weight.cpu())
    gate, up = F.linear(normed, weight).chunk(2, 1)
    expected = ACTIVATIONS["silu"](gate) * up
    torch.testing.assert_close(out.cpu(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_residual_stream_gets_the_product_with_its_bias(dtype, scale, device):
    x, weight, bias = draw(5, 200, dtype=dtype), draw(9, 200, dtype=dtype, seed=1) / 14, draw(9, dtype=dtype, seed=2)
    stream = draw(5, 9, dtype=dtype, seed=3)
    found = stream.clone().to(device)
    fused_linear_launch(found, x.to(device), weight.to(device), None, Epilogue(bias.to(device), residual_scale=scale)).run()
    expected = stream + F.linear(x, weight, bias) * scale
    torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_a_block_without_a_gate_is_activated(activation, device):
    x, weight = draw(2, 70), draw(11, 70, seed=1) / 8
    out = empty(2, 11, dtype=torch.float32, device=device)
    fused_linear_launch(out, x.to(device), weight.to(device), None, Epilogue(activation=activation)).run()
    torch.testing.assert_close(out.cpu(), ACTIVATIONS[activation](F.linear(x, weight)), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_bits_of_a_row_do_not_change_with_the_rows_beside_it(dtype, device):
    x, weight = draw(16, 1100, dtype=dtype, device=device), draw(22, 1100, dtype=dtype, seed=1, device=device)
    norm = Norm(RMS, draw(1100, dtype=dtype, seed=2, device=device))

    def product(rows):
        out = empty(len(rows), 22, dtype=dtype, device=device)
        fused_linear_launch(out, rows, weight, norm).run()
        return out

    for most, parts in ((8, (slice(3, 5), slice(1, 4), slice(2, 8))), (16, (slice(0, 9), slice(4, 15)))):
        all_rows = product(x[:most])
        for rows in parts:
            assert torch.equal(product(x[rows]), all_rows[rows])


def test_products_refuse_what_they_would_misread():
    x, weight = draw(17, 16), draw(4, 16)
    with pytest.raises(InvariantError, match=f"1 to {FEW_TOKENS}"):
        fused_linear_launch(draw(17, 4), x, weight)
    with pytest.raises(InvariantError, match="gate"):
        fused_linear_launch(draw(1, 2), x[:1], weight, None, Epilogue(is_gated=True))
    with pytest.raises(InvariantError, match="only RMSNorm"):
        fused_linear_launch(draw(1, 4), x[:1], weight, Norm(NormSpec("layer", 1e-5), draw(16)))


def test_nothing_begins_before_its_predecessor_ends_where_kernels_are_interpreted():
    assert not has_dependent_launch(torch.device("cpu"))
    assert HAS_GPU or not has_dependent_launch(torch.device("meta"))


def attention_case(spec, lengths, kv_dtype, dtype, device, block_size=16):
    """Return a step of one token for each sequence, its projections, and caches of what came before, NaN elsewhere."""
    num_blocks = sum(-(-length // block_size) for length in lengths) + 1
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5)).tolist()
    tables = torch.zeros(len(lengths), -(-max(lengths) // block_size), dtype=torch.int32)
    slots = []
    shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
    cached = [torch.full(shape, torch.nan, dtype=dtype) for _ in "kv"]
    for index, length in enumerate(lengths):
        blocks = [order.pop() for _ in range(-(-length // block_size))]
        tables[index, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for place in range(length - 1):
            for tensor, seed in zip(cached, (1, 2), strict=True):
                row = draw(spec.num_kv_heads, spec.head_dim, dtype=dtype, seed=1000 * index + 2 * place + seed)
                tensor[blocks[place // block_size], :, place % block_size] = row
        slots.append(blocks[-1] * block_size + (length - 1) % block_size if length else -1)
    scales = ()
    if kv_dtype != dtype:
        largest = 448.0 if kv_dtype == torch.float8_e4m3fn else 127.0
        scales = tuple(tensor.float().abs().amax(-1) / largest for tensor in cached)
        wide = [tensor.float() / scale[..., None] for tensor, scale in zip(cached, scales, strict=True)]
        cached = [
            tensor.round().nan_to_num().to(kv_dtype) if kv_dtype == torch.int8 else tensor.to(kv_dtype) for tensor in wide
        ]
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    parts = (torch.tensor(slots), starts, torch.tensor(lengths, dtype=torch.int32), tables)
    places = [tensor.to(device) for tensor in parts]
    step = DeviceAttentionMetadata.of_decode(*places, max(lengths))
    qkv = draw(len(lengths), (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, dtype=dtype, seed=9, device=device)
    return step, qkv, KvCache(*(tensor.to(device) for tensor in (*cached, *scales)))


def copy_of(cache):
    return KvCache(*(None if tensor is None else tensor.clone() for tensor in cache))


def both_ways(spec, lengths, device, norm=None, kv_dtype=None, dtype=torch.float32, num_times=1):
    """Return (out, cache) of one launch and of the separate ones, and the counts of arrived programs."""
    step, qkv, cache = attention_case(spec, lengths, kv_dtype or dtype, dtype, device)
    positions = (step.context_lens.long() - 1).clamp(min=0)
    rope = None
    if spec.rope is not None:
        rope = rope_table(spec.rope, inverse_frequencies(spec.rope, 2048).to(device), 2048, dtype)
    weights = None
    if norm is not None:
        weights = tuple(Norm(norm, draw(spec.head_dim, dtype=dtype, seed=seed, device=device)) for seed in (3, 4))
    arrived = torch.zeros(8, spec.num_kv_heads, dtype=torch.int32, device=device)
    mine, its = copy_of(cache), copy_of(cache)
    for _ in range(num_times):
        out = empty(len(lengths), spec.num_heads * spec.head_dim, dtype=dtype, device=device)
        ProjectedAttention(spec, rope, weights, arrived).launch(out, qkv, mine, step, positions).run()
    sizes = [heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    parts = Projections(*(part.unflatten(1, (-1, spec.head_dim)) for part in qkv.split(sizes, 1)))
    q = place_heads(parts, its, step.slots, positions, rope, weights)
    return (out, mine), (attend(q, its, step, spec).flatten(1), its), arrived


def set_chunk(monkeypatch, chunk):
    monkeypatch.setattr(fused_attention, "fused_attention_tile", lambda num_kv_heads, head_dim: FusedAttentionTile(chunk, 2))


SPECS = {
    "grouped": AttentionSpec(4, 2, 16, 0.25, RopeSpec(16, 1e4)),
    "partly rotated": AttentionSpec(3, 1, 24, 0.2, RopeSpec(8, 1e4, is_f32=True)),
    "window": AttentionSpec(4, 2, 16, 0.25, RopeSpec(16, 1e4), window=37),
    "softcap": AttentionSpec(2, 2, 16, 0.25, None, softcap=5.0),
    "seven": AttentionSpec(7, 1, 112, 0.1, RopeSpec(112, 1e4), window=37),
    "wide": AttentionSpec(10, 2, 192, 0.07, RopeSpec(96, 1e4), softcap=5.0),
}
LARGE = ("seven", "wide")


@pytest.mark.covering
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in SPECS])
@pytest.mark.parametrize("norm", [None, RMS, GEMMA], ids=["plain", "rms", "gemma"])
def test_attention_from_the_projections_on_is_that_of_separate_launches(name, norm, device, monkeypatch):
    set_chunk(monkeypatch, 32)
    (out, mine), (expected, its), arrived = both_ways(SPECS[name], [1, 70, 0, 32, 33], device, norm)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
    assert not out[2].any()
    for stored, other in zip(mine, its, strict=True):
        assert other is None or torch.equal(stored.nan_to_num(), other.nan_to_num())
    assert not arrived.any()


def test_chunks_are_merged_and_counts_are_zeros_again_when_a_step_is_run_twice(device):
    (out, _), (expected, _), arrived = both_ways(SPECS["grouped"], [600, 5], device, RMS, num_times=2)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
    assert not arrived.any()


def test_chunks_grow_when_a_context_would_have_more_than_there_may_be(device, monkeypatch):
    set_chunk(monkeypatch, 32)
    monkeypatch.setattr(fused_attention, "most_chunks", lambda num_kv_heads: 2)
    (out, _), (expected, _), _ = both_ways(SPECS["grouped"], [150, 40], device)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=["bf16", "int8", "fp8"])
def test_attention_in_bf16_stores_and_reads_caches_of_every_type(kv_dtype, device, monkeypatch):
    set_chunk(monkeypatch, 64)
    (out, mine), (expected, its), _ = both_ways(SPECS["grouped"], [130, 7], device, RMS, kv_dtype, torch.bfloat16)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    for stored, other in zip(mine, its, strict=True):
        assert other is None or torch.equal(stored.float().nan_to_num(), other.float().nan_to_num())


def test_bits_of_a_sequence_do_not_change_with_its_neighbours(device, monkeypatch):
    set_chunk(monkeypatch, 32)
    spec, lengths = SPECS["grouped"], [70, 1, 100]
    step, qkv, cache = attention_case(spec, lengths, torch.float32, torch.float32, device)
    positions = step.context_lens.long() - 1
    rope = rope_table(spec.rope, inverse_frequencies(spec.rope, 128).to(device), 128, torch.float32)
    attention = ProjectedAttention(spec, rope, None, torch.zeros(8, 2, dtype=torch.int32, device=device))

    def attended(rows, most):
        starts = step.query_starts[: rows.stop - rows.start + 1]
        part = DeviceAttentionMetadata.of_decode(
            step.slots[rows], starts, step.context_lens[rows], step.block_tables[rows], most
        )
        out = empty(rows.stop - rows.start, spec.num_heads * spec.head_dim, dtype=torch.float32, device=device)
        attention.launch(out, qkv[rows], copy_of(cache), part, positions[rows]).run()
        return out

    together = attended(slice(0, 3), 100)
    assert torch.equal(attended(slice(0, 1), 70), together[:1])
    assert torch.equal(attended(slice(1, 3), 999), together[1:])


def test_attention_refuses_steps_with_several_tokens_of_a_sequence(device):
    spec = SPECS["grouped"]
    step, qkv, cache = attention_case(spec, [4, 5], torch.float32, torch.float32, device)
    attention = ProjectedAttention(spec, None, None, torch.zeros(8, 2, dtype=torch.int32, device=device))
    several = replace(step, query_counts=(2,))
    with pytest.raises(InvariantError, match="one token of each"):
        attention.launch(torch.empty(2, 64), qkv, cache, several, step.slots)
    with pytest.raises(InvariantError, match="arrive in 1 places"):
        replace(attention, arrived=attention.arrived[:1, :1].contiguous()).launch(
            torch.empty(2, 64, device=device), qkv, cache, step, step.slots
        )


QWEN = LayerSpec(
    AttentionSpec(4, 2, 16, 0.25, RopeSpec(16, 1e4), qk_norm=RMS, has_qkv_bias=True, has_o_bias=True),
    MlpSpec(40, "silu"), attn_in=RMS, mlp_in=RMS,
)  # fmt: skip
LAYERNORM = NormSpec("layer", 1e-5, has_bias=True)
REASONS = {
    "": [QWEN, replace(QWEN, residual_scale=0.5, attn_in=None), replace(QWEN, mlp=MlpSpec(40, "gelu", is_gated=False))],
    "experts": [replace(QWEN, mlp=MoeSpec(4, 2, MlpSpec(40, "silu")))],
    "norm after": [replace(QWEN, attn_out=RMS), replace(QWEN, mlp_out=RMS)],
    "no RMSNorm": [replace(QWEN, attn_in=LAYERNORM), replace(QWEN, mlp_in=LAYERNORM)],
    "all heads": [replace(QWEN, attention=replace(QWEN.attention, qk_norm_over="all"))],
}  # fmt: skip


def test_layers_with_other_pieces_say_why_they_are_not_fused():
    for reason, layers in REASONS.items():
        for layer in layers:
            found = reason_not_to_fuse(layer, {"o": DeviceLinear((draw(4, 4),))})
            assert found is None if not reason else reason in found
    assert "quantised" in reason_not_to_fuse(QWEN, {"o": DeviceLinear((draw(4, 4), draw(4, 4)))})
    assert "one order" in reason_not_to_fuse(QWEN, {"o": DeviceLinear((draw(4, 4),), None, is_in_order=True)})


@pytest.fixture
def names_of_launches(monkeypatch):
    found, run = [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: (found.append(launch.kernel.fn.__name__), run(launch))[1])
    return found


def make_decoder(layers, device):
    spec = ModelSpec("test", "float32", 61, 48, layers, RMS, 64)
    generator = torch.Generator().manual_seed(0)
    parameters = {
        key: 0.2 * torch.randn(shape, generator=generator) + (1.0 if "norm" in key or "_in." in key else 0.0)
        for key, shape in parameter_shapes(spec).items()
    }
    return DeviceDecoder(spec, parameters, 64, device)


def logits_of_steps(decoder, device, num_sequences, num_steps):
    """Return the logits of decode steps from nothing on, and the greedy tokens that they go on with."""
    pool = DeviceKvPool(KvSpec.of(decoder.spec, 4, "float32"), 3 * num_sequences, device)
    tables = torch.arange(3 * num_sequences, dtype=torch.int32, device=device).view(num_sequences, 3)
    ids = (torch.arange(num_sequences, device=device) * 5 + 1) % decoder.spec.vocab_size
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=device)
    found = []
    for place in range(num_steps):
        lengths = torch.full((num_sequences,), place + 1, dtype=torch.int32, device=device)
        positions = torch.full((num_sequences,), place, device=device)
        slots = tables[:, place // 4].long() * 4 + place % 4
        step = DeviceAttentionMetadata.of_decode(slots, starts, lengths, tables, place + 1)
        logits = decoder.logits(decoder.forward(ids, positions, step, pool))
        ids = logits.argmax(-1)
        found.append((logits, ids.tolist()))
    return found


@pytest.mark.parametrize(
    "layers",
    [(QWEN,), (replace(QWEN, mlp_out=RMS), replace(QWEN, residual_scale=0.5))],
    ids=["all fused", "one not"],
)
def test_greedy_tokens_are_those_of_the_separate_launches(layers, device, names_of_launches):
    decoder = make_decoder(layers, device)
    num_fused = sum(layer.mlp_out is None for layer in layers)
    assert f"{num_fused} of {len(layers)} layers are 5 launches each" in decoder.fusion
    fused = logits_of_steps(decoder, device, 2, 3)
    assert names_of_launches.count("fused_linear") == 4 * num_fused * 3
    assert names_of_launches.count("attend_projected") == num_fused * 3
    if num_fused == len(layers):
        assert len(names_of_launches) == (5 * num_fused + 1) * 3
    decoder.is_fused = False
    names_of_launches.clear()
    separate = logits_of_steps(decoder, device, 2, 3)
    assert "fused_linear" not in names_of_launches
    for (mine, my_tokens), (its, its_tokens) in zip(fused, separate, strict=True):
        torch.testing.assert_close(mine, its, atol=3e-5, rtol=3e-5)
        assert my_tokens == its_tokens


def test_steps_of_more_sequences_than_few_take_the_separate_launches(device, names_of_launches):
    logits_of_steps(make_decoder((QWEN,), device), device, FEW_TOKENS + 1, 1)
    assert names_of_launches
    assert "fused_linear" not in names_of_launches
