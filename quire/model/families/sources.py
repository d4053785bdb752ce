"""Sources: where each canonical parameter lies among the tensors of a checkpoint, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.contracts.model_spec import ModelSpec
from quire.model.parameters import parameter_shapes


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored tensor, or some rows of it: from start on every step-th one before stop.

    is_transposed  it is stored [in, out]; the rows are counted after transposing
    entry          it is a stack, of which this is one entry; None: it is none
    """

    name: str
    rows: tuple[int, int] | None = None
    is_transposed: bool = False
    entry: int | None = None
    step: int = 1


@dataclass(frozen=True, slots=True)
class Source:
    """How to build one parameter: the pieces of a group joined along their rows.

    is_stacked  the groups become the entries of a new first dimension; otherwise there is one group
    """

    groups: tuple[tuple[Piece, ...], ...]
    is_stacked: bool = False

    @classmethod
    def of(cls, name: str, rows: tuple[int, int] | None = None, is_transposed: bool = False) -> Source:
        """Return the source of a parameter that is a stored tensor or a part of one."""
        return cls(((Piece(name, rows, is_transposed),),))

    @classmethod
    def stack(cls, groups: list[tuple[str, ...]]) -> Source:
        """Return the source of a stack: names of a group are joined along rows, groups are stacked."""
        return cls.stack_pieces([tuple(Piece(name) for name in names) for names in groups])

    @classmethod
    def stack_pieces(cls, groups: list[tuple[Piece, ...]]) -> Source:
        """Return the source of a stack: pieces of a group are joined along rows, groups are stacked."""
        return cls(tuple(groups), is_stacked=True)


Sources = dict[str, Source]

TOP = {"embed": "embed_tokens", "final_norm": "norm", "lm_head": "lm_head"}
PRE_NORM_LAYER = {
    "attn_in": "input_layernorm",
    "mlp_in": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
SANDWICH_LAYER = PRE_NORM_LAYER | {
    "attn_out": "post_attention_layernorm",
    "mlp_in": "pre_feedforward_layernorm",
    "mlp_out": "post_feedforward_layernorm",
}


def rename(spec: ModelSpec, layer: Mapping[str, str], top: Mapping[str, str] = TOP, layers: str = "layers") -> Sources:
    """Return sources of all parameters whose module has a stored name in `layer` or `top`.

    layer   module -> stored name below `{layers}.{i}.`
    top     module -> stored name of what is outside the layers
    """
    sources = {}
    for name in parameter_shapes(spec):
        module, _, kind = name.rpartition(".")
        if module.startswith("layers."):
            _, index, module = module.split(".", 2)
            if module in layer:
                sources[name] = Source.of(f"{layers}.{index}.{layer[module]}.{kind}")
        elif module in top:
            sources[name] = Source.of(f"{top[module]}.{kind}")
    return sources
