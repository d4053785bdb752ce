"""DeepSeek-V2 (2024) and its lite: multi-head latent attention, a softmax over experts in groups, shared experts."""

from __future__ import annotations

from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import LayerSpec, ModelSpec, MoeSpec
from quire.model.families.blocks import assemble, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.latent import find_sources, interleaved, read_latent_attention
from quire.model.families.mixtures import read_groups, read_moe, read_shared_expert, read_sparse_layers
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope

MODEL_TYPE = "deepseek_v2"
_METHODS = ("greedy", "group_limited_greedy")


def _read_moe(config: ConfigView) -> MoeSpec:
    method = config.string("topk_method")
    if method not in _METHODS:
        raise UnsupportedError(f"topk_method {method!r} is not supported; supported: {', '.join(_METHODS)}")
    config.refuse_other("norm_topk_prob", False)
    config.refuse_other("scoring_func", "softmax")
    moe = read_moe(config, "moe_intermediate_size")
    return replace(
        moe,
        is_renormalized=False,
        is_weight_f32=True,
        is_router_f32=True,
        routed_scale=config.number("routed_scaling_factor"),
        groups=read_groups(config, moe, num_best=1) if method == "group_limited_greedy" else None,
        shared=read_shared_expert(config, moe, "n_shared_experts"),
    )


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a DeepSeek-V2 model."""
    norm, dense = read_rms_norm(config), read_mlp(config, has_bias=config.boolean("mlp_bias"))
    rope = read_rope(config, config.integer("qk_rope_head_dim", minimum=2), is_f32=True)
    attention = interleaved(read_latent_attention(config, rope))
    is_sparse = read_sparse_layers(config)
    moe = _read_moe(config) if any(is_sparse) else None
    if moe is not None and dense.has_bias:
        raise UnsupportedError("mlp_bias true is not supported together with experts in a 'deepseek_v2' model")
    layers = [
        LayerSpec(attention, moe if sparse and moe is not None else dense, attn_in=norm, mlp_in=norm) for sparse in is_sparse
    ]
    return assemble(config, layers, norm)


PAGE = FamilyPage(("DeepseekV2ForCausalLM",), read_spec, find_sources)
