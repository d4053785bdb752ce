"""The canonical parameters of a model: names and shapes, independent of the checkpoint's names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.contracts.mixer_spec import GatedDeltaSpec, LightningSpec, Mamba1Spec, Mamba2Spec, MixerSpec, ShortConvSpec
from quire.contracts.model_spec import (
    NO_ATTENTION,
    NO_MLP,
    AltUpSpec,
    AttentionSpec,
    HyperSpec,
    IndexerSpec,
    LatentSpec,
    LaurelSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PerLayerGate,
    SharedBlockSpec,
)
from quire.contracts.sparse_spec import BlockIndexerSpec, CompressionSpec, SharedKvSpec

Shape = tuple[int, ...]

_EXACT = re.compile(r"hyper\.|sinks\.|norm\.|_in\.|\.table\.")


def shapes_with_head(spec: ModelSpec, shapes: Mapping[str, Shape] | None = None) -> dict[str, Shape]:
    """Return name -> shape of parameters, with lm_head.weight first, also of a tied model; shapes: of these, None: of all."""
    head = {"lm_head.weight": (spec.vocab_size, spec.hidden_size)}
    return {**head, **(parameter_shapes(spec) if shapes is None else shapes)}


def parameter_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return name -> shape of every parameter that a spec needs, in the order of execution. Linear weights are [out, in].

    A tied model has no lm_head.weight. Experts lie in one tensor: experts.gate_up.weight [E, 2 * I, hidden] with the gate
    rows first, [E, I, hidden] where experts have no gate, and experts.down.weight [E, hidden, I]; biases of experts are
    [E, 2 * I] and [E, hidden]. Sinks are [heads]. The two numbers of xielu, before the softplus that makes them positive, are
    xielu_positive.weight and xielu_negative.weight, [1].
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
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer(layer, hidden, spec.vocab_size).items()}
    if spec.hyper is not None:
        shapes |= _connection("hyper", spec.hyper, hidden, spec.hyper.num_streams, 1)
    shapes |= _norm("final_norm", spec.final_norm, hidden)
    if not spec.is_tied:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    if spec.has_head_bias:
        shapes["lm_head.bias"] = (spec.vocab_size,)
    return shapes


def float32_parameters(spec: ModelSpec) -> frozenset[str]:
    """Return the names of parameters that are always float32: those that decide between experts with close scores, and what
    DeepSeek-V4 keeps so."""
    names: set[str] = set()
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, MoeSpec):
            names |= {f"layers.{index}.correction.bias"} if layer.mlp.has_correction else set()
            names |= {f"layers.{index}.router.weight"} if layer.mlp.is_router_f32 else set()
    if spec.hyper is not None:
        names |= {name for name in parameter_shapes(spec) if _EXACT.search(name)}
    return frozenset(names)


def integer_parameters(spec: ModelSpec) -> frozenset[str]:
    """Return the names of parameters that are int64: tables of the experts of each token."""
    return frozenset(
        f"layers.{index}.token_experts.weight"
        for index, layer in enumerate(spec.layers)
        if isinstance(layer.mlp, MoeSpec) and layer.mlp.has_token_table
    )


def _layer(layer: LayerSpec, hidden: int, vocab_size: int) -> dict[str, Shape]:
    if layer.shared_block is not None:
        return _layer_with_shared_block(layer, layer.shared_block, hidden)
    mlp = _moe(layer.mlp, hidden, vocab_size) if isinstance(layer.mlp, MoeSpec) else _mlp(layer.mlp, hidden)
    hyper: dict[str, Shape] = {}
    for block in ("attn", "mlp") if layer.hyper is not None else ():
        assert layer.hyper is not None
        hyper |= _connection(f"{block}_hyper", layer.hyper, hidden, layer.hyper.num_weights, 3)
    return {
        **hyper,
        **({} if layer.altup is None else _altup(layer.altup, hidden)),
        **_norm("attn_in", layer.attn_in, hidden),
        **({} if layer.laurel is None else _laurel(layer.laurel, hidden)),
        **({} if layer.attention == NO_ATTENTION else _attention(layer.attention, hidden)),
        **({} if layer.mixer is None else mixer_shapes(layer.mixer, hidden)),
        **_norm("attn_out", layer.attn_out, hidden),
        **_norm("mlp_in", layer.mlp_in, hidden),
        **mlp,
        **_norm("mlp_out", layer.mlp_out, hidden),
        **({} if layer.per_layer_gate is None else _per_layer_gate(layer.per_layer_gate, hidden)),
        **({"layer_scale.weight": (1,)} if layer.has_scale else {}),
    }


def _layer_with_shared_block(layer: LayerSpec, block: SharedBlockSpec, hidden: int) -> dict[str, Shape]:
    """Return the parameters of the block and the mixer; a linear layer has its adapter in adapters.{name}_in and _out."""
    assert layer.mixer is not None
    assert isinstance(layer.mlp, MlpSpec)
    width, attention, mlp = 2 * hidden, _attention(layer.attention, 2 * hidden), _mlp(layer.mlp, hidden)
    adapted = {name: (block.attention_rank, width, attention) for name in ("q", "k", "v") if block.attention_rank is not None}
    adapted |= dict.fromkeys(("gate", "up"), (block.mlp_rank, hidden, mlp))
    adapters: dict[str, Shape] = {}
    for name, (rank, num_inputs, shapes) in adapted.items():
        assert rank is not None
        adapters |= _linear(f"adapters.{name}_in", rank, num_inputs, False)
        adapters |= _linear(f"adapters.{name}_out", shapes[f"{name}.weight"][0], rank, False)
    return {
        **_norm("attn_in", layer.attn_in, width),
        **attention,
        **_linear("o", hidden, layer.attention.output_size, layer.attention.has_o_bias),
        **_norm("mlp_in", layer.mlp_in, hidden),
        **mlp,
        **adapters,
        **_linear("block_out", hidden, hidden, False),
        **_norm("mixer_in", block.mixer_in, hidden),
        **mixer_shapes(layer.mixer, hidden),
    }


def _connection(name: str, spec: HyperSpec, hidden: int, num_weights: int, num_scales: int) -> dict[str, Shape]:
    return {**_linear(name, num_weights, spec.num_streams * hidden, True), f"{name}.scale": (num_scales,)}


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
    if spec.shared_kv is not None:
        return _shared_kv(spec, spec.shared_kv, hidden)
    gate_size = spec.num_heads if spec.has_head_gate else q_size
    kv: dict[str, Shape] = {}
    if spec.kv_source is None:
        modules = ("k",) if spec.is_v_from_k else ("k", "v")
        sizes = {"k": kv_size, "v": spec.num_kv_heads * spec.value_size}
        kv = {
            name: shape
            for module in modules
            for name, shape in _linear(module, sizes[module], hidden, spec.has_qkv_bias).items()
        }
    return {
        **_linear("q", q_size, hidden, spec.has_qkv_bias),
        **kv,
        **_head_norm("q_norm", spec, spec.num_heads),
        **({} if spec.kv_source is not None else _head_norm("k_norm", spec, spec.num_kv_heads)),
        **({"sinks.weight": (spec.num_heads,)} if spec.has_sinks else {}),
        **({} if spec.block_indexer is None else _block_indexer(spec.block_indexer, hidden)),
        **(_linear("attn_gate", gate_size, hidden, spec.has_qkv_bias) if spec.has_output_gate else {}),
        **_linear("o", hidden, spec.output_size, spec.has_o_bias),
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
        **(
            {}
            if latent.indexer is None or latent.indexer.is_shared
            else _indexer(latent.indexer, latent.q_rank or hidden, hidden)
        ),
        **_linear("o", hidden, spec.output_size, spec.has_o_bias),
    }


def _shared_kv(spec: AttentionSpec, shared: SharedKvSpec, hidden: int) -> dict[str, Shape]:
    outer = shared.num_groups * shared.group_rank
    return {
        **_linear("q_a", shared.q_rank, hidden, False),
        **_norm("q_a_norm", shared.norm, shared.q_rank),
        **_linear("q", spec.num_heads * spec.head_dim, shared.q_rank, False),
        **_linear("kv", spec.head_dim, hidden, False),
        **_norm("kv_norm", shared.norm, spec.head_dim),
        "sinks.weight": (spec.num_heads,),
        **({} if shared.compression is None else _compression(shared.compression, spec.head_dim, shared, hidden)),
        **_linear("o_a", outer, spec.output_size // shared.num_groups, False),
        **_linear("o", hidden, outer, False),
    }


def _compression(spec: CompressionSpec, head_dim: int, shared: SharedKvSpec, hidden: int) -> dict[str, Shape]:
    sizes, shapes = spec.source_sizes(head_dim), {}
    for name, size in zip(("entry", "index")[: len(sizes)], sizes, strict=True):
        shapes |= _linear(f"{name}.kv", size, hidden, False) | _linear(f"{name}.gate", size, hidden, False)
        shapes |= {f"{name}.table.weight": (spec.rate, size)}
        shapes |= _norm(f"{name}.norm", shared.norm, size // 2 if spec.has_overlap else size)
    if spec.indexer is not None:
        shapes |= _linear("index_q", spec.indexer.num_heads * spec.indexer.head_dim, shared.q_rank, False)
        shapes |= _linear("index_weights", spec.indexer.num_heads, hidden, False)
    return shapes


def mixer_shapes(spec: MixerSpec, hidden: int) -> dict[str, Shape]:
    """Return the parameters of a mixer; weights of convolutions are [channels, 1, taps], as they are stored."""
    if isinstance(spec, GatedDeltaSpec):
        return _gated_delta(spec, hidden)
    if isinstance(spec, Mamba2Spec):
        return _mamba2(spec, hidden)
    if isinstance(spec, Mamba1Spec):
        return _mamba1(spec, hidden)
    if isinstance(spec, LightningSpec):
        return _lightning(spec.channels, hidden)
    return _short_conv(spec, hidden)


def _lightning(channels: int, hidden: int) -> dict[str, Shape]:
    return {
        **_linear("delta.qkv", 3 * channels, hidden, False),
        **_linear("delta.z", channels, hidden, False),
        "delta.norm.weight": (channels,),
        **_linear("delta.o", hidden, channels, False),
    }


def _gated_delta(spec: GatedDeltaSpec, hidden: int) -> dict[str, Shape]:
    value_size, rank = spec.num_v_heads * spec.v_dim, spec.gate_rank
    num_decays = spec.num_v_heads * (1 if rank is None else spec.k_dim)
    low = {} if rank is None else {f"delta.{name}_in.weight": (rank, hidden) for name in ("z", "a")}
    return {
        **_linear("delta.qkv", spec.conv_channels, hidden, False),
        **low,
        **_linear("delta.z", value_size, rank or hidden, False),
        **_linear("delta.b", spec.num_v_heads, hidden, False),
        **_linear("delta.a", num_decays, rank or hidden, False),
        "conv.weight": (spec.conv_channels, 1, spec.conv_size),
        "delta.a.step": (num_decays,),
        "delta.a.log": (spec.num_v_heads,) if rank is None else (1, 1, spec.num_v_heads, 1),  # as they are stored
        "delta.norm.weight": (spec.v_dim,),
        **_linear("delta.o", hidden, value_size, False),
    }


def _mamba2(spec: Mamba2Spec, hidden: int) -> dict[str, Shape]:
    return {
        **_linear("mamba.in", spec.channels + spec.conv_channels + spec.num_heads, hidden, spec.has_in_bias),
        "conv.weight": (spec.conv_channels, 1, spec.conv_size),
        **({"conv.bias": (spec.conv_channels,)} if spec.has_conv_bias else {}),
        "mamba.step": (spec.num_heads,),
        "mamba.log": (spec.num_heads,),
        "mamba.skip": (spec.num_heads,),
        **({} if spec.norm is None else {"mamba.norm.weight": (spec.channels,)}),
        **_linear("mamba.out", hidden, spec.channels, spec.has_out_bias),
    }


def _mamba1(spec: Mamba1Spec, hidden: int) -> dict[str, Shape]:
    sizes = {"step": spec.step_rank, "b": spec.state_size, "c": spec.state_size} if spec.has_norm_weight else {}
    return {
        **_linear("mamba.in", 2 * spec.channels, hidden, spec.has_bias),
        "conv.weight": (spec.channels, 1, spec.conv_size),
        **({"conv.bias": (spec.channels,)} if spec.has_conv_bias else {}),
        **_linear("mamba.x", spec.step_rank + 2 * spec.state_size, spec.channels, False),
        **{f"mamba.{name}_norm.weight": (size,) for name, size in sizes.items()},
        **_linear("mamba.step", spec.channels, spec.step_rank, True),
        "mamba.log": (spec.channels, spec.state_size),
        "mamba.skip": (spec.channels,),
        **_linear("mamba.out", hidden, spec.channels, spec.has_bias),
    }


def _short_conv(spec: ShortConvSpec, hidden: int) -> dict[str, Shape]:
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


def _block_indexer(spec: BlockIndexerSpec, hidden: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for name, count in (("index_q", spec.num_heads), ("index_k", 1)):
        shapes |= _linear(name, count * spec.head_dim, hidden, False) | _norm(f"{name}_norm", spec.norm, spec.head_dim)
    return shapes


def _mlp(spec: MlpSpec, hidden: int) -> dict[str, Shape]:
    if spec == NO_MLP:
        return {}
    gate = _linear("gate", spec.intermediate_size, hidden, spec.has_bias) if spec.is_gated else {}
    up = _linear("up", spec.intermediate_size, hidden, spec.has_bias)
    is_learned = spec.activation == "xielu"
    learned = {f"xielu_{part}.weight": (1,) for part in ("positive", "negative")} if is_learned else {}
    return {**gate, **up, **learned, **_linear("down", hidden, spec.intermediate_size, spec.has_bias)}


def _moe(spec: MoeSpec, hidden: int, vocab_size: int) -> dict[str, Shape]:
    inner, has_bias, read = spec.expert.intermediate_size, spec.expert.has_bias, spec.latent_size or hidden
    up_rows = (2 if spec.expert.is_gated else 1) * inner
    latent = spec.latent_size
    return {
        **_linear("router", spec.num_experts, hidden, spec.has_router_bias),
        **({"correction.bias": (spec.num_experts,)} if spec.has_correction else {}),
        **({"token_experts.weight": (vocab_size, spec.top_k)} if spec.has_token_table else {}),
        **({} if latent is None else _linear("latent_in", latent, hidden, spec.has_latent_bias)),
        "experts.gate_up.weight": (spec.num_experts, up_rows, read),
        **({"experts.gate_up.bias": (spec.num_experts, up_rows)} if has_bias else {}),
        "experts.down.weight": (spec.num_experts, read, inner),
        **({"experts.down.bias": (spec.num_experts, read)} if has_bias else {}),
        **({} if latent is None else _linear("latent_out", hidden, latent, spec.has_latent_bias)),
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
