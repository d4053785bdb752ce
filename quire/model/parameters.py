"""The canonical parameters of a model: their names and shapes, whatever the checkpoint calls them."""

from __future__ import annotations

from quire.contracts.mixer_spec import GatedDeltaSpec, MixerSpec
from quire.contracts.model_spec import (
    NO_ATTENTION,
    AltUpSpec,
    AttentionSpec,
    IndexerSpec,
    LatentSpec,
    LaurelSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PerLayerGate,
)

Shape = tuple[int, ...]


def parameter_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return name -> shape of every parameter that a spec needs, in the order of execution. Linear weights are [out, in].

    A tied model has no lm_head.weight. Experts lie in one tensor: experts.gate_up.weight [E, 2 * I, hidden] with the gate
    rows first, experts.down.weight [E, hidden, I]; biases of experts are [E, 2 * I] and [E, hidden]. Sinks are [heads]. The two
    numbers of xielu, before the softplus that makes them positive, are xielu_positive.weight and xielu_negative.weight, [1].
    What alternating updates make of the embeddings, and the reverse, are stacks: altup_split.weight, altup_join.weight.
    Multi-head latent attention has kv_a.weight, the latent rows first, and kv_b.weight, for each head those of its key first.
    """
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {"embed.weight": (spec.vocab_size, hidden), **_norm("embed_norm", spec.embed_norm, hidden)}
    if spec.num_learned_positions:
        shapes["pos.weight"] = (spec.num_learned_positions, hidden)
    if spec.per_layer_inputs is not None:
        inputs, width = spec.per_layer_inputs, spec.per_layer_inputs.size * len(spec.layers)
        shapes |= {"per_layer_embed.weight": (inputs.vocab_size, width), **_linear("per_layer_proj", width, hidden, False)}
        shapes |= _norm("per_layer_norm", inputs.norm, inputs.size)
    if spec.altup is not None:
        stack = (spec.altup.num_streams - 1, hidden, hidden)
        shapes |= {"altup_split.weight": stack, "altup_join.weight": stack}
    for index, layer in enumerate(spec.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer(layer, hidden).items()}
    shapes |= _norm("final_norm", spec.final_norm, hidden)
    if not spec.is_tied:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    if spec.has_head_bias:
        shapes["lm_head.bias"] = (spec.vocab_size,)
    return shapes


def float32_parameters(spec: ModelSpec) -> frozenset[str]:
    """Return the names of parameters that are float32 whatever the model's dtype is: what decides between close experts."""
    names: set[str] = set()
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, MoeSpec):
            names |= {f"layers.{index}.correction.bias"} if layer.mlp.has_correction else set()
            names |= {f"layers.{index}.router.weight"} if layer.mlp.is_router_f32 else set()
    return frozenset(names)


def _layer(layer: LayerSpec, hidden: int) -> dict[str, Shape]:
    mlp = _moe(layer.mlp, hidden) if isinstance(layer.mlp, MoeSpec) else _mlp(layer.mlp, hidden)
    return {
        **({} if layer.altup is None else _altup(layer.altup, hidden)),
        **_norm("attn_in", layer.attn_in, hidden),
        **({} if layer.laurel is None else _laurel(layer.laurel, hidden)),
        **({} if layer.attention == NO_ATTENTION else _attention(layer.attention, hidden)),
        **({} if layer.mixer is None else _mixer(layer.mixer, hidden)),
        **_norm("attn_out", layer.attn_out, hidden),
        **_norm("mlp_in", layer.mlp_in, hidden),
        **mlp,
        **_norm("mlp_out", layer.mlp_out, hidden),
        **({} if layer.per_layer_gate is None else _per_layer_gate(layer.per_layer_gate, hidden)),
        **({"layer_scale.weight": (1,)} if layer.has_scale else {}),
    }


def _altup(spec: AltUpSpec, hidden: int) -> dict[str, Shape]:
    count = spec.num_streams
    return {
        **_linear("altup.predict", count**2, count, False),
        **_linear("altup.correct", count, count, False),
        **_linear("altup.router", count, hidden, False),
        **_norm("altup.norm", spec.norm, hidden),
        **({"altup.scale.weight": (hidden,)} if spec.has_scale else {}),
    }


def _laurel(spec: LaurelSpec, hidden: int) -> dict[str, Shape]:
    return {
        **_linear("laurel.left", spec.rank, hidden, False),
        **_linear("laurel.right", hidden, spec.rank, False),
        **_norm("laurel.norm", spec.norm, hidden),
    }


def _per_layer_gate(spec: PerLayerGate, hidden: int) -> dict[str, Shape]:
    return {
        **_linear("per_layer.gate", spec.size, hidden, False),
        **_linear("per_layer.up", hidden, spec.size, False),
        **_norm("per_layer.norm", spec.norm, hidden),
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
    kv: dict[str, Shape] = {}
    if spec.kv_source is None:
        modules = ("k",) if spec.is_v_from_k else ("k", "v")
        kv = {name: shape for module in modules for name, shape in _linear(module, kv_size, hidden, spec.has_qkv_bias).items()}
    return {
        **_linear("q", q_size, hidden, spec.has_qkv_bias),
        **kv,
        **_head_norm("q_norm", spec, spec.num_heads),
        **({} if spec.kv_source is not None else _head_norm("k_norm", spec, spec.num_kv_heads)),
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
        **({} if spec.branch_norm is None else {"router_in.weight": (hidden,)}),
        **{
            name: shape
            for module in ("experts_in", "experts_out", "shared_out")
            for name, shape in _norm(module, spec.branch_norm, hidden).items()
        },
        **({"expert_scale.weight": (spec.num_experts,)} if spec.has_expert_scale else {}),
    }
