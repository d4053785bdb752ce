"""The canonical parameters of a model: names and shapes, independent of the checkpoint's names."""

from __future__ import annotations

from quire.contracts.mixer_spec import GatedDeltaSpec, MixerSpec
from quire.contracts.model_spec import (
    NO_ATTENTION,
    AttentionSpec,
    IndexerSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
)

Shape = tuple[int, ...]


def parameter_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return name -> shape of every parameter that a spec needs, in the order of execution. Linear weights are [out, in].

    A tied model has no lm_head.weight. Experts lie in one tensor: experts.gate_up.weight [E, 2 * I, hidden] with the gate
    rows first, experts.down.weight [E, hidden, I]; biases of experts are [E, 2 * I] and [E, hidden]. Sinks are [heads]. The two
    numbers of xielu, before the softplus that makes them positive, are xielu_positive.weight and xielu_negative.weight, [1].
    Multi-head latent attention has kv_a.weight, the latent rows first, and kv_b.weight, for each head those of its key first.
    """
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {"embed.weight": (spec.vocab_size, hidden), **_norm("embed_norm", spec.embed_norm, hidden)}
    if spec.num_learned_positions:
        shapes["pos.weight"] = (spec.num_learned_positions, hidden)
    for index, layer in enumerate(spec.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer(layer, hidden).items()}
    shapes |= _norm("final_norm", spec.final_norm, hidden)
    if not spec.is_tied:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    if spec.has_head_bias:
        shapes["lm_head.bias"] = (spec.vocab_size,)
    return shapes


def float32_parameters(spec: ModelSpec) -> frozenset[str]:
    """Return the names of parameters that are always float32, since they decide between experts with close scores."""
    names: set[str] = set()
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, MoeSpec):
            names |= {f"layers.{index}.correction.bias"} if layer.mlp.has_correction else set()
            names |= {f"layers.{index}.router.weight"} if layer.mlp.is_router_f32 else set()
    return frozenset(names)


def _layer(layer: LayerSpec, hidden: int) -> dict[str, Shape]:
    mlp = _moe(layer.mlp, hidden) if isinstance(layer.mlp, MoeSpec) else _mlp(layer.mlp, hidden)
    return {
        **_norm("attn_in", layer.attn_in, hidden),
        **({} if layer.attention == NO_ATTENTION else _attention(layer.attention, hidden)),
        **({} if layer.mixer is None else _mixer(layer.mixer, hidden)),
        **_norm("attn_out", layer.attn_out, hidden),
        **_norm("mlp_in", layer.mlp_in, hidden),
        **mlp,
        **_norm("mlp_out", layer.mlp_out, hidden),
    }


def _norm(name: str, norm: NormSpec | None, size: int) -> dict[str, Shape]:
    if norm is None:
        return {}
    kinds = [kind for kind, is_there in (("weight", norm.has_weight), ("bias", norm.has_bias)) if is_there]
    return {f"{name}.{kind}": (size,) for kind in kinds}


def _head_norm(name: str, spec: AttentionSpec, num_heads: int) -> dict[str, Shape]:
    """Return the norm of q or k, which has so many heads."""
    if spec.qk_norm_over == "each":
        return {key: (num_heads, *shape) for key, shape in _norm(name, spec.qk_norm, spec.head_dim).items()}
    return _norm(name, spec.qk_norm, spec.head_dim * (num_heads if spec.qk_norm_over == "all" else 1))


def _linear(name: str, rows: int, columns: int, has_bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if has_bias else {})


def _attention(spec: AttentionSpec, hidden: int) -> dict[str, Shape]:
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if spec.latent is not None:
        return _latent_attention(spec, spec.latent, hidden)
    return {
        **_linear("q", q_size, hidden, spec.has_qkv_bias),
        **_linear("k", kv_size, hidden, spec.has_qkv_bias),
        **_linear("v", kv_size, hidden, spec.has_qkv_bias),
        **_head_norm("q_norm", spec, spec.num_heads),
        **_head_norm("k_norm", spec, spec.num_kv_heads),
        **({"sinks.weight": (spec.num_heads,)} if spec.has_sinks else {}),
        **(_linear("attn_gate", q_size, hidden, spec.has_qkv_bias) if spec.has_output_gate else {}),
        **_linear("o", hidden, q_size, spec.has_o_bias),
    }


def _latent_attention(spec: AttentionSpec, latent: LatentSpec, hidden: int) -> dict[str, Shape]:
    q_size, rank = spec.num_heads * (latent.nope_dim + latent.rope_dim), latent.kv_rank
    q = _linear("q", q_size, latent.q_rank or hidden, False)
    if latent.q_rank is not None:
        q = {**_linear("q_a", latent.q_rank, hidden, latent.has_bias), **_norm("q_a_norm", latent.norm, latent.q_rank), **q}
    return {
        **q,
        **_linear("kv_a", rank + latent.rope_dim, hidden, latent.has_bias),
        **_norm("kv_a_norm", latent.norm, rank),
        **_linear("kv_b", spec.num_heads * (latent.nope_dim + latent.value_dim), rank, False),
        **({} if latent.indexer is None else _indexer(latent.indexer, latent.q_rank or hidden, hidden)),
        **_linear("o", hidden, spec.output_size, spec.has_o_bias),
    }


def _mixer(spec: MixerSpec, hidden: int) -> dict[str, Shape]:
    """Return the parameters of a mixer; weights of convolutions are [channels, 1, taps], as they are stored."""
    if isinstance(spec, GatedDeltaSpec):
        value_size = spec.num_v_heads * spec.v_dim
        return {
            **_linear("delta.qkv", spec.conv_channels, hidden, False),
            **_linear("delta.z", value_size, hidden, False),
            **_linear("delta.b", spec.num_v_heads, hidden, False),
            **_linear("delta.a", spec.num_v_heads, hidden, False),
            "conv.weight": (spec.conv_channels, 1, spec.conv_size),
            "delta.a.step": (spec.num_v_heads,),
            "delta.a.log": (spec.num_v_heads,),
            "delta.norm.weight": (spec.v_dim,),
            **_linear("delta.o", hidden, value_size, False),
        }
    return {
        **_linear("conv.in", 3 * spec.channels, hidden, spec.has_bias),
        "conv.weight": (spec.channels, 1, spec.conv_size),
        **({"conv.bias": (spec.channels,)} if spec.has_bias else {}),
        **_linear("conv.out", hidden, spec.channels, spec.has_bias),
    }


def _indexer(spec: IndexerSpec, query_size: int, hidden: int) -> dict[str, Shape]:
    return {
        **_linear("index_q", spec.num_heads * spec.head_dim, query_size, False),
        **_linear("index_k", spec.head_dim, hidden, False),
        **_norm("index_k_norm", spec.norm, spec.head_dim),
        **_linear("index_weights", spec.num_heads, hidden, False),
    }


def _mlp(spec: MlpSpec, hidden: int) -> dict[str, Shape]:
    gate = _linear("gate", spec.intermediate_size, hidden, spec.has_bias) if spec.is_gated else {}
    up = _linear("up", spec.intermediate_size, hidden, spec.has_bias)
    is_learned = spec.activation == "xielu"
    learned = {f"xielu_{part}.weight": (1,) for part in ("positive", "negative")} if is_learned else {}
    return {**gate, **up, **learned, **_linear("down", hidden, spec.intermediate_size, spec.has_bias)}


def _moe(spec: MoeSpec, hidden: int) -> dict[str, Shape]:
    inner, has_bias = spec.expert.intermediate_size, spec.expert.has_bias
    return {
        **_linear("router", spec.num_experts, hidden, spec.has_router_bias),
        **({"correction.bias": (spec.num_experts,)} if spec.has_correction else {}),
        "experts.gate_up.weight": (spec.num_experts, 2 * inner, hidden),
        **({"experts.gate_up.bias": (spec.num_experts, 2 * inner)} if has_bias else {}),
        "experts.down.weight": (spec.num_experts, hidden, inner),
        **({"experts.down.bias": (spec.num_experts, hidden)} if has_bias else {}),
        **({} if spec.shared is None else {f"shared.{name}": shape for name, shape in _mlp(spec.shared, hidden).items()}),
        **(_linear("shared_scale", 1, hidden, False) if spec.has_shared_gate else {}),
    }
