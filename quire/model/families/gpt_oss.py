"""gpt-oss: attention with sinks and a window on every other layer, biases everywhere, experts with a clamped gate."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.model_spec import GateClamp, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from quire.model.families.blocks import assemble, read_activation, read_attention, read_is_sliding, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.page import FamilyPage
from quire.model.families.sources import PRE_NORM_LAYER, Piece, Source, Sources, rename

MODEL_TYPE = "gpt_oss"


def _read_moe(config: ConfigView) -> MoeSpec:
    """Return the experts. A softmax over the chosen logits alone is the softmax over all of them, renormalised."""
    num_experts, top_k = config.integer("num_local_experts", "num_experts"), config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise config.error("num_experts_per_tok", top_k, f"at most the number of experts ({num_experts})")
    if read_activation(config) != "silu":
        raise config.error("hidden_act", config.raw("hidden_act"), "silu, which the clamped gate is made of")
    clamp = GateClamp(config.number("swiglu_limit"), config.number("swiglu_alpha"))
    expert = MlpSpec(config.integer("intermediate_size"), "silu", has_bias=True, clamp=clamp)
    return MoeSpec(num_experts, top_k, expert, has_router_bias=True)


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a gpt-oss model."""
    norm = read_rms_norm(config, late_cast=True)
    attention = read_attention(config, has_bias=config.boolean("attention_bias"))
    attention = replace(attention, has_sinks=True, is_softmax_f32=False)
    window = config.nullable_integer("sliding_window")
    is_sliding = read_is_sliding(config, lambda index: index % 2 == 0)
    if any(is_sliding) and window is None:
        raise config.error("sliding_window", None, "an integer >= 1, as some layers have a window")
    moe = _read_moe(config)
    layers = [
        LayerSpec(replace(attention, window=window if slides else None), moe, attn_in=norm, mlp_in=norm)
        for slides in is_sliding
    ]
    return assemble(config, layers, norm)


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored.

    In checkpoints rows of gate and up take turns, and experts of floats are stored [in, out]. In GGUF files gate and up lie
    apart, and every matrix is [out, in].
    """
    sources = rename(spec, PRE_NORM_LAYER)
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, MoeSpec):
            sources[f"layers.{index}.sinks.weight"] = Source.of(f"layers.{index}.self_attn.sinks")
            sources |= _find_moe(f"layers.{index}.mlp", f"layers.{index}.", layer.mlp, stored)
    return sources


def _find_moe(block: str, prefix: str, moe: MoeSpec, stored: Collection[str]) -> Sources:
    is_apart = any(f"{block}.experts.0.{matrix}_proj.weight" in stored for matrix in ("gate", "up", "down"))
    experts = _find_apart(f"{block}.experts", moe) if is_apart else _find_joined(f"{block}.experts", moe, stored)
    return {
        **{f"{prefix}router.{kind}": Source.of(f"{block}.router.{kind}") for kind in ("weight", "bias")},
        **{f"{prefix}experts.{name}": source for name, source in experts.items()},
    }


def _find_joined(experts: str, moe: MoeSpec, stored: Collection[str]) -> Sources:
    num_rows = 2 * moe.expert.intermediate_size

    def piece(name: str, expert: int, first: int | None = None) -> Piece:
        rows, step = (None, 1) if first is None else ((first, num_rows), 2)
        if f"{name}.{expert}" in stored:  # one of MXFP4
            return Piece(f"{name}.{expert}", rows, step=step)
        return Piece(name, rows, is_transposed=not name.endswith("_bias"), entry=expert, step=step)

    def halves(name: str) -> Source:
        return Source.stack_pieces([(piece(name, e, 0), piece(name, e, 1)) for e in range(moe.num_experts)])

    down = [(piece(f"{experts}.down_proj", expert),) for expert in range(moe.num_experts)]
    return {
        "gate_up.weight": halves(f"{experts}.gate_up_proj"),
        "gate_up.bias": halves(f"{experts}.gate_up_proj_bias"),
        "down.weight": Source.stack_pieces(down),
        "down.bias": Source.of(f"{experts}.down_proj_bias"),
    }


def _find_apart(experts: str, moe: MoeSpec) -> Sources:
    def stack(*matrices: str) -> Source:
        return Source.stack([tuple(f"{experts}.{e}.{name}_proj.weight" for name in matrices) for e in range(moe.num_experts)])

    biases = [tuple(Piece(f"{experts}.{name}_proj.bias", entry=e) for name in ("gate", "up")) for e in range(moe.num_experts)]
    return {
        "gate_up.weight": stack("gate", "up"),
        "gate_up.bias": Source.stack_pieces(biases),
        "down.weight": stack("down"),
        "down.bias": Source.of(f"{experts}.down_proj.bias"),
    }


PAGE = FamilyPage(("GptOssForCausalLM",), read_spec, find_sources)
