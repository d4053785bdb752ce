"""nanochat: norms without weights, also on the embeddings and on heads after their rotation, which is backward; relu2."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import read_attention, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Sources, rename, swap_halves

MODEL_TYPE = "nanochat"


_LAYER = PRE_NORM_LAYER | {"up": "mlp.fc1", "down": "mlp.fc2"}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a nanochat model."""
    norm = replace(read_rms_norm(config), has_weight=False)
    attention = read_attention(config, has_bias=config.boolean("attention_bias"))
    attention = replace(attention, qk_norm=norm, is_qk_norm_last=True)
    layer = LayerSpec(attention, read_mlp(config, is_gated=False), attn_in=norm, mlp_in=norm)
    return repeat_layer(config, layer, norm, embed_norm=norm, final_softcap=config.nullable_number("final_logit_softcapping"))


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    return swap_halves(spec, rename(spec, _LAYER))


PAGE = FamilyPage(("NanoChatForCausalLM",), read_spec, find_sources)
