"""InternLM 2 (code of its own): Llama whose q, k and v lie in one matrix, those of each group of heads together."""

from __future__ import annotations

from collections.abc import Collection

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families.blocks import read_attention, read_mlp, read_rms_norm, repeat_layer
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import Sources, join_qkv, rename

MODEL_TYPE = "internlm2"


_TOP = {"embed": "tok_embeddings", "final_norm": "norm", "lm_head": "lm_head"}
_LAYER = {
    "attn_in": "attention_norm",
    "mlp_in": "ffn_norm",
    "o": "attention.wo",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of an InternLM 2 model; `bias` is that of q, k, v and o."""
    norm = read_rms_norm(config)
    attention = read_attention(config, has_bias=config.boolean("bias"))
    return repeat_layer(config, LayerSpec(attention, read_mlp(config), attn_in=norm, mlp_in=norm), norm)


def find_sources(spec: ModelSpec, _stored: Collection[str]) -> Sources:
    """Return where each parameter is stored: rows of wqkv are, for each key head, its query heads, it, and its value head."""
    sources = rename(spec, _LAYER, _TOP)
    join_qkv(sources, spec, "layers.{}.attention.wqkv", by_group=True)
    return sources


PAGE = FamilyPage(("InternLM2ForCausalLM",), read_spec, find_sources, head="output")
