"""MiniMax-M3 (2026), text: in some layers an indexer chooses the blocks of keys; clamped gates, a shared expert."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import AttentionSpec, GateClamp, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec
from quire.contracts.sparse_spec import BlockIndexerSpec
from quire.model.families.blocks import assemble, read_attention, read_head_dim, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import MixtureNames, find_mixture_sources
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_rope
from quire.model.families.sources import PRE_NORM_LAYER, Source, Sources, rename

MODEL_TYPE = "minimax_m3_vl_text"

_SPARSE, _FULL = "minimax_m3_sparse", "full_attention"
_GATES = ("silu", "swigluoai")
"""Names of the clamped gate, which the numbers swiglu_alpha and swiglu_limit describe."""
_OLD_NAMES = {
    **{
        "index_n_heads": "sparse_num_index_heads",
        "index_head_dim": "sparse_index_dim",
        "index_block_size": "sparse_block_size",
    },
    **{"index_topk_blocks": "sparse_topk_blocks", "index_local_blocks": "sparse_local_block"},
}
"""Keys of sparse_attention_config in the published files."""
_ONLY = {
    **{"use_qk_norm": True, "qk_norm_type": "per_head", "use_gemma_norm": True, "attention_output_gate": False},
    **{"scoring_func": "sigmoid", "use_routing_bias": True, "n_shared_experts": 1},
}
_ONLY_SPARSE = {"sparse_score_type": "max", "sparse_init_block": 0}
"""What the published files say, and transformers takes for granted."""
_LAYER = {
    **PRE_NORM_LAYER,
    **{f"index_{one}": f"self_attn.index_{one}_proj" for one in "qk"},
    **{f"index_{one}_norm": f"self_attn.index_{one}_norm" for one in "qk"},
}
_MIXTURE = MixtureNames("block_sparse_moe", correction=("e_score_correction_bias",), expert=("w1", "w3", "w2"))


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a MiniMax-M3 model."""
    norm = read_rms_norm(config, offset=1, late_cast=True)
    _refuse_others(config)
    rope = read_rope(config, read_head_dim(config), can_be_partial=True)
    full = replace(read_attention(config, rope), qk_norm=norm)
    kinds = _read_kinds(config, "layer_types", "sparse_attention_freq", (_FULL, _SPARSE))
    attention = {_FULL: full, _SPARSE: _with_indexer(config, full, norm) if _SPARSE in kinds else full}
    mlp = {"dense": _read_mlp(config, "dense_intermediate_size"), "sparse": _read_moe(config)}
    layers = [
        LayerSpec(attention[kind], mlp[block], attn_in=norm, mlp_in=norm)
        for kind, block in zip(
            kinds, _read_kinds(config, "mlp_layer_types", "moe_layer_freq", ("dense", "sparse")), strict=True
        )
    ]
    return assemble(config, layers, norm, has_own_layer_types=True)


def _refuse_others(config: ConfigView) -> None:
    for view, keys in ((config, _ONLY), (config.nested("sparse_attention_config"), _ONLY_SPARSE)):
        for key, value in keys.items():
            view.refuse_other(key, value)


def _read_kinds(config: ConfigView, key: str, old: str, kinds: tuple[str, str]) -> list[str]:
    """Return the kind of each layer: by `key`, by a list of 0 and 1 under an old key, or by transformers' default."""
    num_layers, found = config.integer("num_hidden_layers"), config.strings(key)
    given = config.table("sparse_attention_config").get(old) if key == "layer_types" else config.raw(old)
    if given is not None:
        if not isinstance(given, list) or not {*given} <= {0, 1}:
            raise config.error(old, given, "a list of 0 and 1")
        named = [kinds[flag] for flag in given]
        if found not in (None, named):
            raise config.error(key, found, f"of the same kinds as {old}: {named}")
        found = named
    if found is None:
        return [_FULL if key == "layer_types" else "sparse"] * num_layers
    if len(found) != num_layers or not {*found} <= {*kinds}:
        raise config.error(key, found, f"{num_layers} times {' or '.join(map(repr, kinds))}")
    return found


def _with_indexer(config: ConfigView, attention: AttentionSpec, norm: NormSpec) -> AttentionSpec:
    table, sizes = config.table("sparse_attention_config"), dict[str, int]()
    for name, old in _OLD_NAMES.items():
        is_old, least = old in table, 0 if name == "index_local_blocks" else 1
        sizes[name] = (config.nested("sparse_attention_config") if is_old else config).integer(
            old if is_old else name, minimum=least
        )
    num_heads, head_dim, block_size, top_blocks, num_local = sizes.values()
    if attention.num_heads % num_heads:
        raise config.error("index_n_heads", num_heads, f"a divisor of num_attention_heads ({attention.num_heads})")
    if attention.rope is not None and head_dim < attention.rope.dim:
        raise config.error("index_head_dim", head_dim, f"at least the rotated values of a head ({attention.rope.dim})")
    if num_local > top_blocks:
        raise UnsupportedError(f"index_local_blocks {num_local} is not supported: at most index_topk_blocks ({top_blocks})")
    return replace(attention, block_indexer=BlockIndexerSpec(num_heads, head_dim, block_size, top_blocks, num_local, norm))


def _read_mlp(config: ConfigView, size: str) -> MlpSpec:
    if config.string("hidden_act") not in _GATES:
        raise UnsupportedError(f"hidden_act {config.string('hidden_act')!r} is not supported; supported: {', '.join(_GATES)}")
    clamp = GateClamp(config.number("swiglu_limit"), config.number("swiglu_alpha"))
    return MlpSpec(config.integer(size), "silu", clamp=clamp)


def _read_moe(config: ConfigView) -> MoeSpec:
    num_experts, top_k = config.integer("num_local_experts"), config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise config.error("num_experts_per_tok", top_k, f"at most num_local_experts ({num_experts})")
    return MoeSpec(
        num_experts,
        top_k,
        _read_mlp(config, "intermediate_size"),
        is_weight_f32=True,
        scoring="sigmoid",
        has_correction=True,
        routed_scale=config.number("routed_scaling_factor"),
        shared=_read_mlp(config, "shared_intermediate_size"),
    )


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    sources = rename(spec, _LAYER) | find_mixture_sources(spec, stored, _MIXTURE)
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, MoeSpec):
            block = f"layers.{index}.block_sparse_moe.shared_experts"
            names = {f"{ours}_proj": f"layers.{index}.shared.{ours}.weight" for ours in ("gate", "up", "down")}
            sources |= {ours: Source.of(f"{block}.{name}.weight") for name, ours in names.items()}
    return sources


PAGE = FamilyPage(("MiniMaxM3VLForCausalLM",), read_spec, find_sources)
