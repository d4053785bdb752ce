"""MiniMax-Text-01 and M1 (2025): lightning attention, and full attention on some layers; what a block reads is its residual."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import replace

from quire.contracts.mixer_spec import LightningSpec
from quire.contracts.model_spec import NO_ATTENTION, LayerSpec, ModelSpec
from quire.model.families.blocks import assemble, read_attention, read_head_dim, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.layer_kinds import read_layer_kinds
from quire.model.families.mamba_blocks import check_silu, mixer_sources
from quire.model.families.mixtral import MIXTURE, STORED_MIXTURE
from quire.model.families.mixtures import find_mixture_sources, read_moe
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename
from quire.model.parameters import parameter_shapes

MODEL_TYPE = "minimax"
TEXT_01_MODEL_TYPE, M1_MODEL_TYPE = "minimax_text_01", "minimax_m1"

_OLD_NAMES = {
    f"layernorm_{old}_{kind}": f"{new}_{kind}_factor"
    for old, new in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
    for kind in ("alpha", "beta")
}
"""Keys of the files of the models' authors."""
_MIXER = {"delta.qkv.weight": "qkv_proj.weight", "delta.z.weight": "output_gate.weight", "delta.norm.weight": "norm.weight"}
_MIXER["delta.o.weight"] = "out_proj.weight"
_NORM_EPS = 1e-6
"""Of the norm of lightning attention, independent of rms_norm_eps."""


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a MiniMax model."""
    config = config.renamed(_OLD_NAMES)
    for key, supported in (("sliding_window", None), ("postnorm", True), ("shared_intermediate_size", 0)):
        config.refuse_other(key, supported)
    check_silu(config, "hidden_act")
    flags, num_layers = config.integers("attn_type_list"), config.integer("num_hidden_layers")
    if flags and len(flags) != num_layers:
        raise config.error("the length of attn_type_list", len(flags), f"num_hidden_layers ({num_layers})")
    head_dim, norm = read_head_dim(config), read_rms_norm(config)
    rotary_dim = config.integer("rotary_dim") if config.has("rotary_dim") else None
    rope = read_rope(config, head_dim, can_be_partial=rotary_dim is not None, rotary_dim=rotary_dim)
    attention, moe = read_attention(config, rope), replace(read_moe(config, "intermediate_size"), is_weight_f32=True)
    moe = replace(moe, output_scale=config.number("mlp_beta_factor"))
    layers = [
        LayerSpec(
            NO_ATTENTION if is_linear else attention,
            moe,
            attn_in=norm,
            mlp_in=norm,
            mixer=LightningSpec(head_dim, _decays(attention.num_heads, index, num_layers), _NORM_EPS) if is_linear else None,
            attention_out_scale=config.number("full_attn_beta_factor"),
            mixer_out_scale=config.number("linear_attn_beta_factor"),
            kept=(
                config.number("linear_attn_alpha_factor" if is_linear else "full_attn_alpha_factor"),
                config.number("mlp_alpha_factor"),
            ),
        )
        for index, is_linear in enumerate(
            read_layer_kinds(config, "linear_attention", lambda i: not flags[i] if flags else i % 2 == 1, "attn_type_list")
        )
    ]
    return assemble(config, layers, norm, has_own_layer_types=True)


def _decays(num_heads: int, index: int, num_layers: int) -> tuple[float, ...]:
    """Return what the states of the heads of a layer are multiplied by for each token: less is lost in later layers."""
    share = 1 - index / (num_layers - 1 + 1e-5) + 1e-5
    return tuple(math.exp(-share * 2.0 ** (-8 * (head + 1) / num_heads)) for head in range(num_heads))


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    names = MIXTURE if "layers.0.mlp.gate.weight" in stored else STORED_MIXTURE
    mixers = mixer_sources(spec, parameter_shapes(spec), _MIXER, "self_attn")
    return rename(spec, PRE_NORM_LAYER) | mixers | find_mixture_sources(spec, stored, names)


PAGE = FamilyPage(
    ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
    read_spec,
    find_sources,
    ignored=re.compile(r"layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)"),
)
