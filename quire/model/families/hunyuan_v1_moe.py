"""Hunyuan mixture of experts (Tencent, A13B): a norm on heads after they are rotated, and a shared expert."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec
from quire.model.families.blocks import assemble, read_activation, read_attention, read_head_dim, read_rms_norm
from quire.model.families.config_view import ConfigView, is_number
from quire.model.families.mixtures import MixtureNames, find_mixture_sources
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename

MODEL_TYPE = "hunyuan_v1_moe"


def read_alpha_rope(config: ConfigView) -> RopeSpec:
    """Return the rope: "dynamic" with an `alpha` has a larger theta for good, at every length (NTK)."""
    head_dim = read_head_dim(config)
    for key in ("rope_scaling", "rope_parameters"):
        values = config.table(key)
        if values:
            break
    alpha = values.get("alpha")
    if not alpha or "dynamic" not in (values.get("rope_type"), values.get("type")):
        return read_rope(config, head_dim)
    if not is_number(alpha) or not alpha > 0:
        raise config.error(f"{key}.alpha", alpha, "a positive number")
    theta = config.number("rope_theta") if values.get("rope_theta") is None else values["rope_theta"]
    if not is_number(theta) or not theta > 0:
        raise config.error(f"{key}.rope_theta", theta, "a positive number")
    if head_dim < 4:
        raise config.error("head_dim", head_dim, "at least 4 with rope type 'dynamic'")
    return RopeSpec(head_dim, float(theta) * float(alpha) ** (head_dim / (head_dim - 2)))


def _read_counts(config: ConfigView, key: str) -> list[int]:
    """Return a value of each layer; one alone is that of all."""
    num_layers, values = config.integer("num_hidden_layers"), config.integers(key)
    values = values * num_layers if len(values) == 1 else values
    if len(values) != num_layers or min(values) < 1:
        raise config.error(key, config.raw(key), f"an integer >= 1, or a list of {num_layers} of them")
    return values


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Hunyuan mixture."""
    norm = read_rms_norm(config)
    attention = read_attention(config, read_alpha_rope(config), has_bias=config.boolean("attention_bias"))
    attention = replace(attention, qk_norm=norm, is_qk_norm_last=True)
    config.refuse_other("use_qk_norm", True)
    num_experts, expert = config.integer("num_experts"), MlpSpec(config.integer("intermediate_size"), read_activation(config))
    layers = []
    for top_k in _read_counts(config, "moe_topk"):
        if top_k > num_experts:
            raise config.error("moe_topk", top_k, f"at most the number of experts ({num_experts})")
        moe = MoeSpec(num_experts, top_k, expert, is_weight_f32=True, is_router_f32=True, shared=expert)
        layers.append(LayerSpec(attention, moe, attn_in=norm, mlp_in=norm))
    return assemble(config, layers, norm)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    layer = PRE_NORM_LAYER | {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
    return rename(spec, layer) | find_mixture_sources(spec, stored, MixtureNames(router="gate.wg.weight", shared="shared_mlp"))


PAGE = FamilyPage(("HunYuanMoEV1ForCausalLM",), read_spec, find_sources)
