"""Mistral 4: multi-head latent attention with queries scaled by position, a softmax over experts, a shared expert."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec, QueryScaling
from quire.model.families.blocks import assemble, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView, is_number
from quire.model.families.latent import find_sources, interleaved, read_latent_attention
from quire.model.families.mixtures import LEAST_SUM, read_groups, read_moe, read_shared_expert, read_sparse_layers
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope

MODEL_TYPE = "mistral4"


def _read_scaling(config: ConfigView) -> QueryScaling | None:
    values = config.table("rope_scaling") or config.table("rope_parameters")
    beta, period = values.get("llama_4_scaling_beta"), values.get("original_max_position_embeddings")
    if beta is None:
        return None
    if not is_number(beta) or not is_number(period) or not period >= 1:
        raise config.error("rope_parameters.llama_4_scaling_beta", beta, "a number, with original_max_position_embeddings")
    return QueryScaling(float(beta), int(period))


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Mistral 4 model."""
    norm, dense = read_rms_norm(config), read_mlp(config)
    rope_dim = config.integer("qk_rope_head_dim", minimum=2)
    rope = read_rope(config, config.integer("qk_nope_head_dim") + rope_dim, can_be_partial=True, rotary_dim=rope_dim)
    attention = interleaved(read_latent_attention(config, rope), config.boolean("rope_interleave"))
    attention = replace(attention, query_scaling=_read_scaling(config))
    moe = read_moe(config, "moe_intermediate_size")
    moe = replace(
        moe,
        is_renormalized=config.boolean("norm_topk_prob"),
        least_sum=LEAST_SUM,
        is_weight_f32=False,
        routed_scale=config.number("routed_scaling_factor"),
        groups=read_groups(config, moe, num_best=2),
        shared=read_shared_expert(config, moe, "n_shared_experts"),
    )
    layers = [
        LayerSpec(attention, moe if is_sparse else dense, attn_in=norm, mlp_in=norm) for is_sparse in read_sparse_layers(config)
    ]
    return assemble(config, layers, norm)


PAGE = FamilyPage(("Mistral4ForCausalLM",), read_spec, find_sources)
