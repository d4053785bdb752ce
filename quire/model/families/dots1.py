"""dots.llm1 (2025): DeepSeek-V3's mixture with Qwen3's attention; a window, where there is one, from max_window_layers on."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import qwen3_moe
from quire.model.families.blocks import assemble, read_is_sliding, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import read_sigmoid_moe, read_sparse_layers
from quire.model.families.page import FamilyPage
from quire.model.families.qwen3 import read_normed_attention

MODEL_TYPE = "dots1"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a dots.llm1 model."""
    norm, attention, window = read_rms_norm(config), read_normed_attention(config), config.nullable_integer("sliding_window")
    first = config.integer("max_window_layers", minimum=0)
    is_sliding = read_is_sliding(config, lambda index: window is not None and index >= first)
    if any(is_sliding) and window is None:
        raise config.error("sliding_window", None, "an integer >= 1, as some layers have a window")
    dense, moe = read_mlp(config), read_sigmoid_moe(config)
    layers = [
        LayerSpec(replace(attention, window=window if slides else None), moe if is_sparse else dense, attn_in=norm, mlp_in=norm)
        for slides, is_sparse in zip(is_sliding, read_sparse_layers(config), strict=True)
    ]
    return assemble(config, layers, norm)


PAGE = FamilyPage(("Dots1ForCausalLM",), read_spec, qwen3_moe.find_sources)
