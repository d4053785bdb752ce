"""A whole model on the device against the torch reference, step by step over one cache."""

from dataclasses import replace

import pytest
import torch

from quire.contracts.kv_spec import KvSpec
from quire.contracts.model_spec import (
    AttentionSpec,
    ExpertGroups,
    GateClamp,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    QueryScaling,
    RopeSpec,
)
from quire.kernels.reference.attention import AttentionMetadata, TreeInput
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.kv.device_pool import DeviceKvPool
from quire.kv.pool import KvPool
from quire.model.decoder import Decoder
from quire.model.device_decoder import DeviceDecoder
from quire.model.parameters import parameter_shapes

RMS, GEMMA = NormSpec("rms", 1e-6), NormSpec("rms", 1e-6, offset=1, late_cast=True)
ROPE = RopeSpec(16, 1e4)
COMMAND, BARE = NormSpec("layer", 1e-5, late_cast=True), NormSpec("rms", 1e-5, has_weight=False)


def attention(**options):
    return AttentionSpec(4, 2, 16, 0.25, **({"rope": ROPE} | options))


MODELS = {
    "qwen3": [LayerSpec(attention(qk_norm=RMS, has_qkv_bias=True), MlpSpec(40, "silu"), attn_in=RMS, mlp_in=RMS)] * 2,
    "clamped": [LayerSpec(attention(), MlpSpec(40, "silu", clamp=GateClamp(0.2, 1.702)), attn_in=RMS, mlp_in=RMS)] * 2,
    "gemma": [
        LayerSpec(
            attention(window=window, softcap=20.0),
            MlpSpec(40, "gelu_tanh"),
            attn_in=GEMMA,
            attn_out=GEMMA,
            mlp_in=GEMMA,
            mlp_out=GEMMA,
        )
        for window in (6, None)
    ],
    "olmo": [LayerSpec(attention(qk_norm=RMS, qk_norm_over="all"), MlpSpec(40, "silu"), attn_out=RMS, mlp_out=RMS)] * 2,
    "gpt": [
        LayerSpec(
            attention(rope=None, has_qkv_bias=True, has_o_bias=True),
            MlpSpec(40, "gelu", is_gated=False, has_bias=True),
            attn_in=NormSpec("layer", 1e-5, has_bias=True),
            mlp_in=NormSpec("layer", 1e-5, has_bias=True),
            residual_scale=0.5,
        )
    ]
    * 2,
    "gpt-oss": [
        LayerSpec(
            attention(window=window, has_sinks=True, has_qkv_bias=True, has_o_bias=True),
            MoeSpec(4, 2, MlpSpec(40, "silu", has_bias=True, clamp=GateClamp(0.2, 1.702)), has_router_bias=True),
            attn_in=NormSpec("rms", 1e-5, late_cast=True),
            mlp_in=NormSpec("rms", 1e-5, late_cast=True),
        )
        for window in (6, None)
    ],
    "command": [
        LayerSpec(
            attention(rope=rope, window=window, qk_norm=COMMAND, qk_norm_over="each"),
            MlpSpec(40, "silu"),
            attn_in=COMMAND,
            is_parallel=True,
        )
        for rope, window in ((ROPE, 6), (None, None))
    ],
    "late": [
        LayerSpec(
            attention(
                rope=RopeSpec(8, 1e4, is_f32=True), qk_norm=qk_norm, is_qk_norm_last=True, query_scaling=QueryScaling(0.5, 3, 1)
            ),
            MlpSpec(40, activation, is_gated=False),
            attn_in=BARE,
            mlp_in=BARE,
            is_parallel=is_parallel,
        )
        for qk_norm, activation, is_parallel in ((RMS, "xielu", True), (BARE, "relu2", False))
    ],
    "nemotron": [
        LayerSpec(
            attention(rope=RopeSpec(8, 1e4), clip_qkv=0.4),
            MlpSpec(40, "relu2", is_gated=False),
            attn_in=NormSpec("layer", 1e-5, offset=1, has_bias=True),
            mlp_in=NormSpec("layer", 1e-5, has_weight=False),
        )
    ]
    * 2,
    "shared-experts": [
        LayerSpec(
            attention(),
            MoeSpec(
                8,
                3,
                MlpSpec(40, "silu"),
                scoring="sigmoid",
                has_correction=True,
                groups=ExpertGroups(4, 2, 2),
                least_sum=1e-20,
                routed_scale=1.7,
                is_router_f32=True,
                is_weight_f32=True,
                shared=MlpSpec(24, "silu"),
                has_shared_gate=True,
            ),
            attn_in=RMS,
            mlp_in=RMS,
        )
    ]
    * 2,
    "latent": [
        LayerSpec(
            AttentionSpec(
                4, 1, 28, 0.25, rope=RopeSpec(8, 1e4), latent=LatentSpec(q_rank, 20, 12, 8, 16, RMS, is_interleaved=is_first)
            ),
            MoeSpec(4, 2, MlpSpec(40, "silu"), scoring="sigmoid", weighs_inputs=is_first),
            attn_in=RMS,
            mlp_in=RMS,
        )
        for q_rank, is_first in ((None, True), (24, False))
    ],
    "relu2-experts": [
        LayerSpec(
            attention(),
            MoeSpec(4, 2, MlpSpec(40, "relu2", is_gated=False), latent_size=20, shared=MlpSpec(24, "relu2", is_gated=False)),
            attn_in=RMS,
            mlp_in=RMS,
        )
    ],
    "experts": [LayerSpec(attention(), MoeSpec(4, 2, MlpSpec(40, "silu")), attn_in=RMS, mlp_in=RMS)] * 2,
}


def make_models(name, device):
    layers = tuple(MODELS[name])
    final = layers[0].attn_in or RMS
    spec = ModelSpec("test", "float32", 61, 48, layers, final, 64, num_learned_positions=64 if name == "gpt" else 0)
    if name == "late":
        spec = replace(spec, embed_norm=BARE, has_head_bias=True)
    generator = torch.Generator().manual_seed(0)
    parameters = {
        key: 0.2 * torch.randn(shape, generator=generator) + (1.0 if "norm" in key or "_in." in key else 0.0)
        for key, shape in parameter_shapes(spec).items()
    }
    return Decoder(spec, dict(parameters), 64), DeviceDecoder(spec, dict(parameters), 64, device)


QUICK = ("qwen3", "gpt-oss", "late", "shared-experts", "clamped")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS])
def test_logits_are_those_of_the_reference_over_chunks_decode_steps_and_trees(name, device):
    reference, model = make_models(name, device)
    host = KvPool(KvSpec.of(reference.spec, 4, "float32"), 12)
    pool = DeviceKvPool(KvSpec.on_device(reference.spec, 4, "float32"), 12, device)
    for cache in pool.caches:
        cache.k.fill_(torch.nan), cache.v.fill_(torch.nan)  # what was never stored is never read
    tables = torch.tensor([[3, 9, 1, 0, 0], [2, 4, 8, 10, 5]])
    ancestors = torch.tensor([0, 0, 0b1, 0b10, 0b101])
    steps = [
        ([[0, 1, 2], [0, 1, 2, 3, 4]], None),
        ([[3], [5, 6, 7]], None),
        ([[4], [8]], None),
        ([[5], [9, 10, 10, 11]], TreeInput(torch.tensor([0, 3], dtype=torch.int32), ancestors)),
    ]
    lengths = [0, 0]
    for runs, trees in steps:
        lengths = [length + len(run) for length, run in zip(lengths, runs, strict=True)]
        positions = torch.tensor(runs[0] + runs[1])
        places = [
            table[place // 4] * 4 + place % 4
            for table, length, run in zip(tables, lengths, runs, strict=True)
            for place in range(length - len(run), length)
        ]
        step = AttentionMetadata(torch.stack(places), [0, len(runs[0]), len(positions)], lengths, tables, trees)
        token_ids = (positions * 7 + torch.arange(len(positions)) * 3) % 61
        rows = list(range(len(positions)))
        expected = reference.step(token_ids, positions, step, host, rows)
        hidden = model.forward(token_ids.to(device), positions.to(device), DeviceAttentionMetadata.of(step, device), pool)
        found = model.logits(hidden)
        torch.testing.assert_close(found.cpu(), expected, atol=3e-5, rtol=3e-5)


def test_a_layer_with_sinks_is_not_fused(device):
    layer = LayerSpec(attention(has_sinks=True), MlpSpec(40, "silu"), attn_in=RMS, mlp_in=RMS)
    spec = ModelSpec("test", "float32", 61, 48, (layer,), RMS, 64)
    parameters = {name: torch.ones(shape) for name, shape in parameter_shapes(spec).items()}
    assert DeviceDecoder(spec, dict(parameters), 64, device).fusion.startswith("0 of 1 layers")
