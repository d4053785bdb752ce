"""The language model of Qwen3-VL: Qwen3 without a window. For text its three-part positions are plain ones."""

from __future__ import annotations

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.qwen3 import read_normed_attention

MODEL_TYPE = "qwen3_vl_text"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of the language model of Qwen3-VL."""
    norm = read_rms_norm(config)
    return repeat_layer(config, LayerSpec(read_normed_attention(config), read_mlp(config), attn_in=norm, mlp_in=norm), norm)


PAGE = FamilyPage(("Qwen3VLTextModel",), read_spec, llama.find_sources)
