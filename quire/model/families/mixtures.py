"""Shared code of mixture-of-experts families: reading the routing, and finding the stored experts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from quire.contracts.model_spec import ExpertGroups, MlpSpec, ModelSpec, MoeSpec
from quire.model.families.blocks import read_activation
from quire.model.families.config_view import ConfigView
from quire.model.families.sources import Piece, Source, Sources

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
LEAST_SUM = 1e-20
"""Added to the sum of weights before dividing by it, in DeepSeek-V3 and later models."""


def read_moe(
    config: ConfigView,
    inner: str,
    counts: tuple[str, ...] = _COUNTS,
    top_k: str = "num_experts_per_tok",
    activation: str = "hidden_act",
) -> MoeSpec:
    """Return a mixture of experts of the intermediate size under key `inner`; renormalised weights of a softmax.

    counts, top_k  the keys of how many experts there are, and how many a token takes
    activation     the key of their function
    """
    num_experts, num_chosen = config.integer(*counts), config.integer(top_k)
    if num_chosen > num_experts:
        raise config.error(top_k, num_chosen, f"at most the number of experts ({num_experts})")
    return MoeSpec(num_experts, num_chosen, MlpSpec(config.integer(inner), read_activation(config, activation)))


def read_shared_expert(config: ConfigView, moe: MoeSpec, key: str) -> MlpSpec | None:
    """Return the shared expert, whose width is a multiple (under the given key) of an expert's; None if that is 0."""
    count = 0 if config.raw(key) is None else config.integer(key, minimum=0)
    return None if count == 0 else replace(moe.expert, intermediate_size=count * moe.expert.intermediate_size)


def read_groups(config: ConfigView, moe: MoeSpec, num_best: int) -> ExpertGroups | None:
    """Return the groups of `n_group` and `topk_group`; None if all groups are used."""
    count = config.nullable_integer("n_group") or 1
    num_chosen = config.nullable_integer("topk_group") or 1
    if moe.num_experts % count:
        raise config.error("n_group", count, f"a divisor of the number of experts ({moe.num_experts})")
    if num_chosen > count:
        raise config.error("topk_group", num_chosen, f"at most n_group ({count})")
    if count > 1 and moe.num_experts // count < num_best:
        raise config.error("n_group", count, f"such that a group has {num_best} experts at least")
    if moe.top_k > moe.num_experts // count * num_chosen:
        raise config.error("topk_group", num_chosen, f"such that the groups hold num_experts_per_tok ({moe.top_k}) experts")
    return ExpertGroups(count, num_chosen, num_best) if count > num_chosen else None


def read_sigmoid_moe(config: ConfigView, shared: str = "n_shared_experts") -> MoeSpec:
    """Return the mixture of DeepSeek-V3: sigmoid scores in groups, chosen with a correction, and shared experts.

    shared  the key of how many there are
    """
    config.refuse_other("scoring_func", "sigmoid")
    config.refuse_other("topk_method", "noaux_tc")
    moe = read_moe(config, "moe_intermediate_size")
    return replace(
        moe,
        scoring="sigmoid",
        has_correction=True,
        is_renormalized=config.boolean("norm_topk_prob"),
        is_weight_f32=True,
        is_router_f32=True,
        least_sum=LEAST_SUM,
        routed_scale=config.number("routed_scaling_factor"),
        groups=read_groups(config, moe, num_best=2),
        shared=read_shared_expert(config, moe, shared),
    )


def read_sparse_steps(config: ConfigView) -> list[bool]:
    """Return for each layer whether it is a mixture, by `mlp_only_layers` and `decoder_sparse_step`."""
    dense_layers, step = config.integers("mlp_only_layers"), config.integer("decoder_sparse_step")
    return [index not in dense_layers and (index + 1) % step == 0 for index in range(config.integer("num_hidden_layers"))]


def read_sparse_layers(config: ConfigView) -> list[bool]:
    """Return for each layer whether it is a mixture: by `mlp_layer_types`, or all after `first_k_dense_replace`."""
    num_layers = config.integer("num_hidden_layers")
    config.refuse_other("moe_layer_freq", 1)
    types = config.strings("mlp_layer_types")
    if types is None:
        first = config.integer("first_k_dense_replace", minimum=0)
        return [index >= first for index in range(num_layers)]
    if len(types) != num_layers or not {*types} <= {"dense", "sparse"}:
        raise config.error("mlp_layer_types", types, f"{num_layers} times 'dense' or 'sparse'")
    return [name == "sparse" for name in types]


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """The stored names of a mixture below its layer.

    block         the module that holds it
    router        below that; correction: of the choice; expert: modules of one, gate, up, down
    has_correction_rows  the correction is stored as one row of a matrix (ERNIE)
    shared        the module of the shared expert, with the same modules; shared_scale: its gate of one output
    """

    block: str = "mlp"
    router: str = "gate.weight"
    correction: tuple[str, ...] = ("gate.e_score_correction_bias",)
    has_correction_rows: bool = False
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    shared_scale: str = "shared_expert_gate.weight"


def find_mixture_sources(spec: ModelSpec, stored: Collection[str], names: MixtureNames | None = None) -> Sources:
    """Return sources of routers, experts and shared experts.

    stored  names in the checkpoint: transformers 5 may write all experts in one tensor, which is then the canonical one
    """
    names = names or MixtureNames()
    sources: Sources = {}
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, MoeSpec):
            found = _find_mixture(layer.mlp, f"layers.{index}.{names.block}", stored, names)
            sources |= {f"layers.{index}.{name}": source for name, source in found.items()}
    return sources


def _find_mixture(moe: MoeSpec, block: str, stored: Collection[str], names: MixtureNames) -> Sources:
    gate, up, down = names.expert
    experts = [f"{block}.experts.{expert}" for expert in range(moe.num_experts)]
    sources = {
        "router.weight": Source.of(f"{block}.{names.router}"),
        "experts.gate_up.weight": Source.stack([(f"{expert}.{gate}.weight", f"{expert}.{up}.weight") for expert in experts]),
        "experts.down.weight": Source.stack([(f"{expert}.{down}.weight",) for expert in experts]),
    }
    if f"{block}.experts.gate_up_proj" in stored:
        sources["experts.gate_up.weight"] = Source.of(f"{block}.experts.gate_up_proj")
        sources["experts.down.weight"] = Source.of(f"{block}.experts.down_proj")
    if moe.has_correction:
        known = [f"{block}.{name}" for name in names.correction]
        name = next((name for name in known if name in stored), known[0])
        sources["correction.bias"] = Source(((Piece(name, entry=0 if names.has_correction_rows else None),),))
    if moe.shared is not None:
        for ours, module in zip(("gate", "up", "down"), names.expert, strict=True):
            kinds = ("weight", "bias") if moe.shared.has_bias else ("weight",)
            sources |= {f"shared.{ours}.{kind}": Source.of(f"{block}.{names.shared}.{module}.{kind}") for kind in kinds}
    if moe.has_shared_gate:
        sources["shared_scale.weight"] = Source.of(f"{block}.{names.shared_scale}")
    return sources


def read_llama4_moe(config: ConfigView) -> MoeSpec:
    """Return the mixture of Llama 4: sigmoid scores, by which the inputs of experts are multiplied, and a shared expert."""
    moe = read_moe(config, "intermediate_size", counts=("num_local_experts",))
    return replace(moe, scoring="sigmoid", is_renormalized=False, weighs_inputs=True, shared=moe.expert)


def transposed_experts(name: str, count: int) -> Source:
    """Return the source of experts that are stored as one stack of [in, out]."""
    return Source.stack_pieces([(Piece(name, is_transposed=True, entry=expert),) for expert in range(count)])


def find_llama4_sources(spec: ModelSpec, stored: Collection[str] = ()) -> Sources:
    """Return sources of the mixtures of a Llama 4 model, whose experts are stacks of [in, out], in GGUF files a matrix each."""
    sources: Sources = {}
    for index, layer in enumerate(spec.layers):
        if not isinstance(layer.mlp, MoeSpec):
            continue
        block, ours, count = f"layers.{index}.feed_forward", f"layers.{index}", layer.mlp.num_experts
        sources[f"{ours}.router.weight"] = Source.of(f"{block}.router.weight")
        is_apart = f"{block}.experts.0.gate_proj.weight" in stored
        if is_apart:
            found = _find_mixture(layer.mlp, block, stored, MixtureNames(router="router.weight", shared="shared_expert"))
            sources |= {f"{ours}.{name}": source for name, source in found.items()}
        for name in () if is_apart else ("gate_up", "down"):
            sources[f"{ours}.experts.{name}.weight"] = transposed_experts(f"{block}.experts.{name}_proj", count)
        for name in ("gate", "up", "down"):
            sources[f"{ours}.shared.{name}.weight"] = Source.of(f"{block}.shared_expert.{name}_proj.weight")
    return sources
