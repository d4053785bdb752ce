"""SmolLM3: Llama in which each fourth layer has no rotary embedding; no_rope_layers has a 1 where there is one."""

from __future__ import annotations

from dataclasses import replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.families import llama
from quire.model.families.blocks import assemble, read_attention, read_is_sliding, read_mlp, read_rms_norm, window_of
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage

MODEL_TYPE = "smollm3"


def read_has_rope(config: ConfigView) -> list[bool]:
    """Return for each layer whether it has a rotary embedding."""
    num_layers, interval = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval")
    flags = config.integers("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(num_layers)]
    if len(flags) != num_layers:
        raise config.error("the length of no_rope_layers", len(flags), f"num_hidden_layers ({num_layers})")
    return [flag != 0 for flag in flags]


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a SmolLM3 model."""
    norm, mlp = read_rms_norm(config), read_mlp(config, has_bias=config.boolean("mlp_bias"))
    attention = read_attention(config, has_bias=config.boolean("attention_bias"))
    has_rope = read_has_rope(config)
    has_window = config.boolean("use_sliding_window") and config.nullable_integer("sliding_window") is not None
    is_sliding = [slides and has_window for slides in read_is_sliding(config, lambda index: not has_rope[index])]
    window = window_of(config, is_sliding)
    layers = [
        LayerSpec(
            replace(attention, rope=attention.rope if has_rope[index] else None, window=window if slides else None),
            mlp,
            attn_in=norm,
            mlp_in=norm,
        )
        for index, slides in enumerate(is_sliding)
    ]
    return assemble(config, layers, norm)


PAGE = FamilyPage(("SmolLM3ForCausalLM",), read_spec, llama.find_sources)
