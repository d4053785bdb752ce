"""The mixture of Llama 4 against transformers, with torch and natively."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from quire.contracts.model_spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec
from quire.kernels.native import load_native
from quire.model.build import whole_prompt_logits
from quire.model.decoder import Decoder, DecoderLayer
from quire.model.families import config_view
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import find_llama4_sources, read_llama4_moe
from quire.model.native_decoder import NativeDecoder
from quire.model.parameters import parameter_shapes

pytestmark = pytest.mark.golden

SIZES = {"hidden_size": 48, "intermediate_size": 40, "num_local_experts": 5, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.fixture(params=[1, 2], ids=["top-1", "top-2"])
def block(request, monkeypatch):
    """A random mixture of transformers, and its spec."""
    config = AutoConfig.for_model("llama4_text", **SIZES, num_experts_per_tok=request.param)
    torch.manual_seed(0)
    block = Llama4TextMoe(config).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 48**-0.5)
    values = {**SIZES, "hidden_act": "silu", "num_experts_per_tok": request.param}
    monkeypatch.setattr(config_view, "class_defaults", lambda _: {})
    return block, read_llama4_moe(ConfigView("llama4_text", values, Path("config.json")))


def spec_of(moe):
    norm = NormSpec("rms", 1e-6)
    layer = LayerSpec(AttentionSpec(4, 2, 12, 0.3), moe, attn_in=norm, mlp_in=norm)
    return ModelSpec("test", "float32", 61, 48, (layer,), norm, 64)


def parameters_of(block, spec):
    """Return canonical parameters whose mixture is the block's, by where they are stored."""
    generator = torch.Generator().manual_seed(1)
    found = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in parameter_shapes(spec).items()}
    stored = {f"layers.0.feed_forward.{name}": tensor.detach() for name, tensor in block.state_dict().items()}
    for name, source in find_llama4_sources(spec).items():
        groups = [
            torch.cat([(stored[piece.name] if piece.entry is None else stored[piece.name][piece.entry].t()) for piece in group])
            for group in source.groups
        ]
        found[name] = (torch.stack(groups) if source.is_stacked else groups[0]).contiguous()
        assert found[name].shape == parameter_shapes(spec)[name]
    return found


def test_weighted_inputs_give_what_they_give_in_transformers(block):
    block, moe = block
    spec = spec_of(moe)
    layer = DecoderLayer(spec.layers[0], "layers.0.", parameters_of(block, spec))
    x = torch.randn(1, 30, 48)
    with torch.inference_mode():
        torch.testing.assert_close(layer._mlp(x[0], x[0]), block(x)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_weighted_inputs_give_the_same_natively(block):
    block, moe = block
    spec, token_ids = spec_of(moe), torch.arange(40).tolist()
    expected = whole_prompt_logits(Decoder(spec, parameters_of(block, spec), 64), token_ids)
    found = whole_prompt_logits(NativeDecoder(load_native(), spec, parameters_of(block, spec), 64), token_ids)
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)
