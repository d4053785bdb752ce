"""Products of few tokens with quantised weights, with a norm before and an epilogue behind, compared with torch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from quire.base.errors import InvariantError
from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from quire.kernels.reference.activation import ACTIVATIONS
from quire.kernels.reference.norm import normalize
from quire.kernels.triton.fused_linear import Epilogue
from quire.kernels.triton.fused_quantized import MOST_TOKENS, fused_quantized_launch, reason_not_to_fuse_weight
from quire.kernels.triton.launching import Launch
from quire.kernels.triton.linear import dequantize
from quire.kernels.triton.norm import Norm
from quire.kernels.triton.quantized_weights import FLOAT4_LEVELS, pack_float4, pack_float8, pack_integers
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.parameters import parameter_shapes
from quire.quant.policy import DEVICE_POLICIES
from tests.unit.kernels.gpu.conftest import draw
from tests.unit.kernels.gpu.test_triton_fused import GEMMA, RMS, TOLERANCES
from tests.unit.kernels.gpu.test_triton_linear import on

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def integers(low, high, *shape):
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(3)).to(torch.int8)


def scales(*shape, largest):
    return torch.rand(shape, generator=torch.Generator().manual_seed(4)) / largest + 0.1 / largest


def float8(rows, columns, block):
    scale = scales(-(-rows // block[0]), -(-columns // min(block[1], columns)), largest=100)
    return pack_float8((draw(rows, columns, seed=3) * 50).to(torch.float8_e4m3fn), scale, block)


def four_bits(rows, columns, group, has_offset=False, low=-8):
    scale = scales(rows, columns // group, largest=8)
    offset = draw(rows, columns // group, seed=5) / 8 if has_offset else None
    return pack_integers(integers(low, low + 15, rows, columns), scale, offset, (low, low + 15))


def float4(rows, columns, group):
    levels = torch.tensor(FLOAT4_LEVELS, dtype=torch.int8)
    codes = levels[integers(0, len(levels) - 1, rows, columns).long()]
    return pack_float4(codes, scales(rows, columns // group, largest=12))


WEIGHTS = {
    "float8 blocks": lambda rows, columns: float8(rows, columns, (16, 64)),
    "float8 rows": lambda rows, columns: float8(rows, columns, (1, columns)),
    "float8 tensor": lambda rows, columns: float8(rows, columns, (rows, columns)),
    "int8": lambda rows, columns: pack_integers(integers(-127, 127, rows, columns), scales(rows, 1, largest=127)),
    "int4 of 32": lambda rows, columns: four_bits(rows, columns, 32),
    "int4 of 64 with offsets": lambda rows, columns: four_bits(rows, columns, 64, True, 0),
    "float4 of 32": lambda rows, columns: float4(rows, columns, 32),
}


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("num_tokens, norm_spec", [(1, RMS), (1, None), (3, GEMMA), (MOST_TOKENS, RMS)])
@pytest.mark.parametrize("shape", [(6, 64), (38, 448)], ids=["small", "tall"])
def test_products_are_those_of_torch_with_a_norm_before_and_a_gate_behind(num_tokens, norm_spec, weight, shape, dtype, device):
    packed = WEIGHTS[weight](*shape)
    x = draw(num_tokens, shape[1] + 8, dtype=dtype)[:, :-8]
    norm = None if norm_spec is None else Norm(norm_spec, draw(shape[1], dtype=dtype, seed=2).to(device))
    out = torch.full((num_tokens, shape[0] // 2), torch.nan, dtype=dtype, device=device)
    epilogue = Epilogue(activation="silu", is_gated=True)
    fused_quantized_launch(out, x.to(device), on(device, packed), norm, epilogue).run()
    normed = x if norm is None else normalize(x, norm.spec, norm.weight.cpu())
    gate, up = F.linear(normed.float(), dequantize(on(device, packed), torch.float32).cpu()).to(dtype).chunk(2, 1)
    expected = ACTIVATIONS["silu"](gate) * up
    size = expected.abs().max().item()
    torch.testing.assert_close(out.cpu(), expected, atol=TOLERANCES[dtype] * size, rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_residual_stream_gets_the_product_with_its_bias(num_tokens, scale, device):
    x, weight, bias = draw(num_tokens, 192), four_bits(9, 192, 32), draw(9, seed=2)
    stream = draw(num_tokens, 9, seed=3).bfloat16()
    found, bias, x = stream.clone().to(device), bias.bfloat16().to(device), x.bfloat16().to(device)
    fused_quantized_launch(found, x, on(device, weight), None, Epilogue(bias, residual_scale=scale)).run()
    product = F.linear(x.float().cpu(), dequantize(on(device, weight), torch.float32).cpu())
    expected = stream + (product + bias.cpu().float()).bfloat16() * scale
    torch.testing.assert_close(found.cpu(), expected, atol=5e-2, rtol=3e-2)


def test_bits_of_a_row_do_not_change_with_the_rows_beside_it(device):
    x, weight = draw(8, 256, dtype=torch.bfloat16).to(device), on(device, float8(24, 256, (1, 256)))
    norm = Norm(RMS, draw(256, dtype=torch.bfloat16, seed=2).to(device))

    def product(rows):
        out = torch.empty(len(rows), 24, dtype=torch.bfloat16, device=device)
        fused_quantized_launch(out, rows, weight, norm).run()
        return out

    all_rows = product(x)
    for rows in (slice(3, 5), slice(1, 7), slice(3, 8)):
        assert torch.equal(product(x[rows]), all_rows[rows])


def test_products_refuse_what_they_would_misread():
    x, weight = draw(9, 64, dtype=torch.bfloat16), four_bits(4, 64, 32)
    out = draw(9, 4, dtype=torch.bfloat16)
    with pytest.raises(InvariantError, match=f"1 to {MOST_TOKENS}"):
        fused_quantized_launch(out, x, weight)
    with pytest.raises(InvariantError, match="gate"):
        fused_quantized_launch(out[:1, :2], x[:1], weight, None, Epilogue(is_gated=True))
    with pytest.raises(InvariantError, match="in order"):
        fused_quantized_launch(out[:1], x[:1], replace(weight, columns=torch.arange(64)))
    assert "float32" in reason_not_to_fuse_weight(weight, torch.float32)
    assert "reordered" in reason_not_to_fuse_weight(replace(weight, columns=torch.arange(64)), torch.bfloat16)
    assert reason_not_to_fuse_weight(weight, torch.bfloat16) is None


LAYER = LayerSpec(
    AttentionSpec(4, 2, 16, 0.25, qk_norm=RMS, rope=RopeSpec(16, 1e4)), MlpSpec(32, "silu"), attn_in=RMS, mlp_in=RMS
)  # fmt: skip


def logits_of_steps(decoder, device, num_sequences, ids_of_steps):
    """Return the logits of decode steps from nothing on, [step, sequence, vocabulary]."""
    pool = DeviceKvPool(KvSpec.of(decoder.spec, 4, decoder.spec.dtype), num_sequences, device)
    tables = torch.arange(num_sequences, dtype=torch.int32, device=device)[:, None]
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=device)
    found = []
    for place, ids in enumerate(ids_of_steps):
        lengths = torch.full((num_sequences,), place + 1, dtype=torch.int32, device=device)
        step = DeviceAttentionMetadata.of_decode(tables[:, 0].long() * 4 + place, starts, lengths, tables, place + 1)
        positions = torch.full((num_sequences,), place, device=device)
        found.append(decoder.logits(decoder.forward(ids[:num_sequences].to(device), positions, step, pool)).float().cpu())
    return torch.stack(found)


@pytest.mark.parametrize("method", ["fp8", "int4"])
def test_layers_with_quantised_weights_are_five_launches_with_the_results_of_separate_ones(method, device, monkeypatch):
    spec = ModelSpec("test", "bfloat16", 61, 64, (LAYER,), RMS, 64)
    parameters = {
        name: draw(*shape, seed=seed).bfloat16() * (0.02 if "norm" in name else 0.2) + (1.0 if "norm" in name else 0.0)
        for seed, (name, shape) in enumerate(parameter_shapes(spec).items())
    }
    decoder = DeviceDecoder(spec, parameters, 64, device, DEVICE_POLICIES[method])
    assert decoder.fusion.endswith("in decode steps of up to 8 sequences")
    names, run = [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: (names.append(launch.kernel.fn.__name__), run(launch))[1])
    ids = draw(1, 3, seed=7).abs().mul(20).long() % 61
    for num_sequences, kernel in ((1, "fused_quantized_gemv"), (3, "fused_quantized_gemm")):
        names.clear()
        decoder.is_fused = True
        fused = logits_of_steps(decoder, device, num_sequences, ids)
        # k and v of small models have 8 bits beside q's 4.
        assert names.count(kernel) == (5 if method == "int4" else 4) * len(ids)
        assert names.count("attend_projected") == len(ids)
        decoder.is_fused = False
        separate = logits_of_steps(decoder, device, num_sequences, ids)
        assert (fused - separate).abs().max() <= 0.03 * separate.abs().max()
