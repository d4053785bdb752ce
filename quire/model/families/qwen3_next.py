"""Qwen3-Next, Qwen3.5 and 3.6, text: three gated delta nets for each layer of attention, whose output has a gate."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.contracts.mixer_spec import GatedDeltaSpec
from quire.contracts.model_spec import NO_ATTENTION, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from quire.model.families.blocks import assemble, read_activation, read_attention, read_head_dim, read_mlp, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.layer_kinds import read_layer_kinds
from quire.model.families.mixtures import MixtureNames, find_mixture_sources, read_moe, read_sparse_steps
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import PRE_NORM_LAYER, Piece, Source, Sources, rename

MODEL_TYPE = "qwen3_next"
DENSE_MODEL_TYPE = "qwen3_5_text"
MOE_MODEL_TYPE = "qwen3_5_moe_text"

_MIXTURE = MixtureNames(shared="shared_expert")
_RECURRENT = "linear_attention"


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Qwen3-Next model: mixtures with a shared expert, but on layers that mlp_only_layers names."""
    moe, dense = replace(_read_moe(config), is_renormalized=config.boolean("norm_topk_prob")), read_mlp(config)
    return _read(config, [moe if is_sparse else dense for is_sparse in read_sparse_steps(config)])


def read_dense_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a dense Qwen3.5 model."""
    return _read(config, [read_mlp(config)] * config.integer("num_hidden_layers"))


def read_moe_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a Qwen3.5 mixture of experts."""
    return _read(config, [_read_moe(config)] * config.integer("num_hidden_layers"))


def _read_moe(config: ConfigView) -> MoeSpec:
    moe = read_moe(config, "moe_intermediate_size")
    shared = replace(moe.expert, intermediate_size=config.integer("shared_expert_intermediate_size"))
    return replace(moe, shared=shared, has_shared_gate=True)


def _read(config: ConfigView, mlps: list[MlpSpec | MoeSpec]) -> ModelSpec:
    norm = read_rms_norm(config, offset=1, late_cast=True)
    rope = read_rope(config, read_head_dim(config), can_be_partial=True)
    attention = read_attention(config, rope, config.boolean("attention_bias"))
    attention = replace(attention, qk_norm=norm, has_output_gate=True)
    delta, interval = _read_delta(config), config.integer("full_attention_interval")
    kinds = read_layer_kinds(config, _RECURRENT, lambda index: (index + 1) % interval != 0)
    layers = [
        LayerSpec(NO_ATTENTION, mlp, attn_in=norm, mlp_in=norm, mixer=delta)
        if is_recurrent
        else LayerSpec(attention, mlp, attn_in=norm, mlp_in=norm)
        for is_recurrent, mlp in zip(kinds, mlps, strict=True)
    ]
    return assemble(config, layers, norm, has_own_layer_types=True)


def _read_delta(config: ConfigView) -> GatedDeltaSpec:
    num_k_heads, num_v_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if num_v_heads % num_k_heads:
        raise config.error("linear_num_value_heads", num_v_heads, f"a multiple of linear_num_key_heads ({num_k_heads})")
    if read_activation(config) != "silu":
        raise config.error("hidden_act", config.string("hidden_act"), "'silu', which the gated delta net has")
    dims = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    taps = config.integer("linear_conv_kernel_dim", minimum=2)
    return GatedDeltaSpec(num_k_heads, num_v_heads, *dims, conv_size=taps, norm_eps=config.number("rms_norm_eps"))


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    sources = rename(spec, PRE_NORM_LAYER) | find_mixture_sources(spec, stored, _MIXTURE)
    for index, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{index}", f"layers.{index}.linear_attn"
        if isinstance(layer.mixer, GatedDeltaSpec):
            sources |= {
                f"{ours}.conv.weight": Source.of(f"{theirs}.conv1d.weight"),
                f"{ours}.delta.a.step": Source.of(f"{theirs}.dt_bias"),
                f"{ours}.delta.a.log": Source.of(f"{theirs}.A_log"),
                f"{ours}.delta.norm.weight": Source.of(f"{theirs}.norm.weight"),
                f"{ours}.delta.o.weight": Source.of(f"{theirs}.out_proj.weight"),
            }
            packed, plain = _packed_inputs(layer.mixer, ours, theirs), _plain_inputs(ours, theirs)
            for names, joined in ((("qkv", "z"), "in_proj_qkvz"), (("b", "a"), "in_proj_ba")):
                found = packed if f"{theirs}.{joined}.weight" in stored else plain
                sources |= {(name := f"{ours}.delta.{one}.weight"): found[name] for one in names}
        else:
            sources |= _gated_queries(layer, ours)
    return sources


def _plain_inputs(ours: str, theirs: str) -> Sources:
    return {f"{ours}.delta.{name}.weight": Source.of(f"{theirs}.in_proj_{name}.weight") for name in ("qkv", "z", "b", "a")}


def _packed_inputs(spec: GatedDeltaSpec, ours: str, theirs: str) -> Sources:
    """Return sources in matrices that have the rows of each key head together: q, k, its v, its z; and its b, its a."""
    num_values = spec.num_v_heads // spec.num_k_heads
    values = num_values * spec.v_dim

    def pieces(name: str, start: int, count: int, stride: int) -> tuple[Piece, ...]:
        firsts = [head * stride + start for head in range(spec.num_k_heads)]
        return tuple(Piece(f"{theirs}.{name}.weight", (first, first + count)) for first in firsts)

    size_qkvz, size_ba = 2 * spec.k_dim + 2 * values, 2 * num_values
    runs = {"q": (0, spec.k_dim), "k": (spec.k_dim, spec.k_dim), "v": (2 * spec.k_dim, values)}
    qkv = [piece for start, count in runs.values() for piece in pieces("in_proj_qkvz", start, count, size_qkvz)]
    return {
        f"{ours}.delta.qkv.weight": Source((tuple(qkv),)),
        f"{ours}.delta.z.weight": Source((pieces("in_proj_qkvz", 2 * spec.k_dim + values, values, size_qkvz),)),
        f"{ours}.delta.b.weight": Source((pieces("in_proj_ba", 0, num_values, size_ba),)),
        f"{ours}.delta.a.weight": Source((pieces("in_proj_ba", num_values, num_values, size_ba),)),
    }


def _gated_queries(layer: LayerSpec, ours: str) -> Sources:
    """Return sources of q and of the gate of the output, which lie together, head by head."""
    attention, sources = layer.attention, Sources()
    dim = attention.head_dim
    for kind in ("weight", "bias") if attention.has_qkv_bias else ("weight",):
        for name, start in (("q", 0), ("attn_gate", dim)):
            firsts = [2 * dim * head + start for head in range(attention.num_heads)]
            pieces = tuple(Piece(f"{ours}.self_attn.q_proj.{kind}", (first, first + dim)) for first in firsts)
            sources[f"{ours}.{name}.{kind}"] = Source((pieces,))
    return sources


PAGE = FamilyPage(("Qwen3NextForCausalLM",), read_spec, find_sources)
DENSE_PAGE = FamilyPage(("Qwen3_5ForCausalLM", "Qwen3_5TextModel"), read_dense_spec, find_sources)
MOE_PAGE = FamilyPage(("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"), read_moe_spec, find_sources)
