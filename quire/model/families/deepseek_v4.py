"""DeepSeek-V4 (2026): one row is key and value; a window, and compressed rows of all before it, of which an indexer chooses;
hyper-connections; mixtures, the first of which choose experts by the token.

The published files have names of their own, which transformers keeps but for a few.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.base.errors import UnsupportedError
from quire.contracts.model_spec import (
    AttentionSpec,
    GateClamp,
    HyperSpec,
    IndexerSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
)
from quire.contracts.sparse_spec import CompressionSpec, SharedKvSpec
from quire.model.families.blocks import assemble, read_rms_norm
from quire.model.families.config_view import ConfigView
from quire.model.families.mixtures import LEAST_SUM, MixtureNames, find_mixture_sources, read_moe
from quire.model.families.page import FamilyPage
from quire.model.families.rope_config import read_named_rope
from quire.model.families.sources import Source, Sources
from quire.model.parameters import parameter_shapes

MODEL_TYPE = "deepseek_v4"

_WINDOW, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATIO = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}
_RATES = {_SPARSE: 4, _HEAVY: 128}
_OLD_RATES = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
_SCORES = {"sqrtsoftplus": "sqrt_softplus", "softmax": "softmax", "sigmoid": "sigmoid"}
_ROTATED_SHARE = 64 / 512
_ONLY = {"norm_topk_prob": True, "n_shared_experts": 1, "attention_bias": False, "mlp_bias": False, "num_key_value_heads": 1}
"""What transformers takes for granted."""

_LAYER = {
    **{"attn_in": "attn_norm", "mlp_in": "ffn_norm", "q_a": "attn.wq_a", "q_a_norm": "attn.q_norm", "q": "attn.wq_b"},
    **{"kv": "attn.wkv", "kv_norm": "attn.kv_norm", "o_a": "attn.wo_a", "o": "attn.wo_b"},
    **{"index_q": "attn.indexer.wq_b", "index_weights": "attn.indexer.weights_proj"},
    **{
        f"{ours}.{name}": f"attn.{theirs}.{stored}"
        for ours, theirs in (("entry", "compressor"), ("index", "indexer.compressor"))
        for name, stored in (("kv", "wkv"), ("gate", "wgate"), ("norm", "norm"))
    },
}
_WHOLE = {
    **{"sinks.weight": "attn.attn_sink", "entry.table.weight": "attn.compressor.ape"},
    **{"index.table.weight": "attn.indexer.compressor.ape", "token_experts.weight": "ffn.gate.tid2eid"},
    **{
        f"{ours}_hyper.{kind}": f"hc_{theirs}_{stored}"
        for ours, theirs in (("attn", "attn"), ("mlp", "ffn"))
        for kind, stored in (("weight", "fn"), ("bias", "base"), ("scale", "scale"))
    },
}
_TOP = {
    **{"embed.weight": "embed.weight", "final_norm.weight": "norm.weight", "lm_head.weight": "lm_head.weight"},
    **{"hyper.weight": "hc_head_fn", "hyper.bias": "hc_head_base", "hyper.scale": "hc_head_scale"},
}
_SAVED_BY_TRANSFORMERS = {"embed.": "embed_tokens.", "hc_head_": "hc_head.hc_", "attn.kv_norm.": "attn.norm."}
_MIXTURE = MixtureNames(block="ffn", correction=("gate.bias",), expert=("w1", "w3", "w2"))


def read_spec(config: ConfigView) -> ModelSpec:
    """Return the spec of a DeepSeek-V4 model."""
    for key, value in _ONLY.items():
        config.refuse_other(key, value)
    norm = read_rms_norm(config, late_cast=True)
    plain_norm = replace(norm, has_weight=False, late_cast=False)
    hyper = HyperSpec(config.integer("hc_mult"), config.integer("hc_sinkhorn_iters"), config.number("hc_eps"), norm=plain_norm)
    types = _read_layer_types(config)
    attention = {kind: _read_attention(config, kind, norm) for kind in dict.fromkeys(types)}
    moe = {is_hashed: _read_moe(config, is_hashed) for is_hashed in (False, True)}
    layers = [
        LayerSpec(attention[kind], moe[is_hashed], attn_in=norm, mlp_in=norm, hyper=hyper)
        for kind, is_hashed in zip(types, _read_is_hashed(config), strict=True)
    ]
    return assemble(config, layers, norm, has_own_layer_types=True)


def _read_layer_types(config: ConfigView) -> list[str]:
    num_layers, types = config.integer("num_hidden_layers"), config.strings("layer_types")
    if types is None and config.has("compress_ratios"):
        ratios = config.integers("compress_ratios")
        if not {*ratios} <= {*_BY_RATIO}:
            raise UnsupportedError(f"compress_ratios {sorted({*ratios})} are not supported; supported: {list(_BY_RATIO)}")
        types = [_BY_RATIO[ratio] for ratio in ratios]
    if types is None:
        types = [_HEAVY, _HEAVY, *(_SPARSE if index % 2 else _HEAVY for index in range(num_layers))]
    if unknown := {*types} - {*_BY_RATIO.values()}:
        raise UnsupportedError(f"layer_types {sorted(unknown)} are not supported; supported: {', '.join(_BY_RATIO.values())}")
    if len(types) < num_layers:
        raise config.error("the length of layer_types or compress_ratios", len(types), f"num_hidden_layers ({num_layers})")
    return types[:num_layers]


def _read_is_hashed(config: ConfigView) -> list[bool]:
    num_layers, types = config.integer("num_hidden_layers"), config.strings("mlp_layer_types")
    if types is None:
        num_hashed = config.integer("num_hash_layers", minimum=0)
        return [index < num_hashed for index in range(num_layers)]
    if len(types) != num_layers or not {*types} <= {"hash_moe", "moe"}:
        raise config.error("mlp_layer_types", types, f"{num_layers} times 'hash_moe' or 'moe'")
    return [name == "hash_moe" for name in types]


def _read_attention(config: ConfigView, kind: str, norm: NormSpec) -> AttentionSpec:
    num_heads, head_dim, num_groups = (config.integer(key) for key in ("num_attention_heads", "head_dim", "o_groups"))
    if num_heads % num_groups:
        raise config.error("o_groups", num_groups, f"a divisor of num_attention_heads ({num_heads})")
    rope = _read_rope(config, kind, head_dim)
    compression = None if kind == _WINDOW else CompressionSpec(_read_rate(config, kind), has_overlap=kind == _SPARSE)
    if kind == _SPARSE and compression is not None:
        size = config.integer("index_head_dim")
        if size < rope.dim:
            raise config.error("index_head_dim", size, f"at least the rotated values of a head ({rope.dim})")
        indexer = IndexerSpec(config.integer("index_n_heads"), size, config.integer("index_topk"), norm, is_interleaved=True)
        compression = replace(compression, indexer=indexer)
    return AttentionSpec(
        num_heads,
        num_kv_heads=1,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        window=config.integer("sliding_window"),
        has_sinks=True,
        shared_kv=SharedKvSpec(config.integer("q_lora_rank"), num_groups, config.integer("o_lora_rank"), norm, compression),
    )


def _read_rate(config: ConfigView, kind: str) -> int:
    given, old = config.table("compress_rates").get(kind), config.raw(_OLD_RATES[kind])
    rate = old if old is not None else _RATES[kind] if given is None else given
    if type(rate) is not int or not 1 <= rate <= 1 << 20:
        raise config.error(f"compress_rates.{kind}", rate, "an integer from 1 to 2**20")
    return rate


def _read_rope(config: ConfigView, kind: str, head_dim: int) -> RopeSpec:
    """Return the rope of layers of a kind: those with entries have another base than the others, and may be scaled."""
    share = config.raw("partial_rotary_factor")
    if share is None:
        share = config.integer("qk_rope_head_dim") / head_dim if config.has("qk_rope_head_dim") else _ROTATED_SHARE
    nested, scaling = config.table("rope_parameters"), config.table("rope_scaling")
    label = "main" if kind == _WINDOW else "compress"
    own, values = nested.get(label), scaling or nested
    if isinstance(nested.get("main"), dict) and isinstance(nested.get("compress"), dict) and isinstance(own, dict):
        values = {"partial_rotary_factor": share, **own}
    elif kind == _WINDOW:
        values = {"partial_rotary_factor": share, "rope_theta": config.number("rope_theta")}
    else:
        values = {"attention_factor": 1.0, **values, "rope_theta": config.number("compress_rope_theta")}
        values["partial_rotary_factor"] = share
    rope = read_named_rope(config, f"rope_parameters.{label}", {**values, "truncate": True}, head_dim)
    if rope.depends_on_length:
        raise UnsupportedError(f"rope type {rope.kind!r} is not supported in a 'deepseek_v4' model; supported: default, yarn")
    return replace(rope, is_f32=True, is_table_rounded=True)


def _read_moe(config: ConfigView, is_hashed: bool) -> MoeSpec:
    scores, method = config.string("scoring_func"), config.raw("topk_method")
    if scores not in _SCORES or method not in (None, "noaux_tc"):
        raise UnsupportedError(
            f"scoring_func {scores!r} with topk_method {method!r} is not supported in a 'deepseek_v4' model; supported: "
            f"{', '.join(_SCORES)} with 'noaux_tc'"
        )
    moe = read_moe(config, "moe_intermediate_size", ("n_routed_experts", "num_local_experts"))
    expert = replace(moe.expert, clamp=GateClamp(config.number("swiglu_limit"), slope=None))
    return replace(
        moe,
        expert=expert,
        shared=expert,
        scoring=_SCORES[scores],
        has_correction=not is_hashed,
        has_token_table=is_hashed,
        least_sum=LEAST_SUM,
        routed_scale=config.number("routed_scaling_factor"),
        is_score_f32=False,
    )


def find_sources(spec: ModelSpec, stored: Collection[str]) -> Sources:
    """Return where each parameter is stored."""
    sources: Sources = {}
    for name in parameter_shapes(spec):
        found = _stored_name(name)
        if found is not None:
            sources[name] = Source.of(_as_saved(found, stored))
    return sources | find_mixture_sources(spec, stored, _MIXTURE)


def _stored_name(name: str) -> str | None:
    """Return the published name of a parameter; None for those of mixtures."""
    if not name.startswith("layers."):
        return _TOP[name]
    _, index, own = name.split(".", 2)
    module, _, kind = own.rpartition(".")
    found = _WHOLE.get(own, f"{_LAYER[module]}.{kind}" if module in _LAYER else None)
    return None if found is None else f"layers.{index}.{found}"


def _as_saved(name: str, stored: Collection[str]) -> str:
    """Return a published name, or that which transformers has made of it where that is stored."""
    for published, saved in _SAVED_BY_TRANSFORMERS.items():
        if name not in stored and name.replace(published, saved, 1) in stored:
            return name.replace(published, saved, 1)
    return name


PAGE = FamilyPage(("DeepseekV4ForCausalLM",), read_spec, find_sources, head="head")
