"""Sources: describe how each canonical parameter is built from the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from quire.contracts.model_spec import LayerSpec, ModelSpec
from quire.model.parameters import parameter_shapes


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored tensor, or some rows of it: from start on every step-th one before stop.

    is_transposed  it is stored [in, out]; the rows are counted after transposing
    entry          it is a stack, of which this is one entry; None: it is none
    num_entries    the stack is a matrix, whose rows are divided among so many entries; None: the stack has three dimensions
    """

    name: str
    rows: tuple[int, int] | None = None
    is_transposed: bool = False
    entry: int | None = None
    step: int = 1
    num_entries: int | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """How to build one parameter: the pieces of a group joined along their rows.

    is_stacked  the groups become the entries of a new first dimension; otherwise there is one group
    factor      the rows are multiplied by this matrix [stored columns, columns] (OPT-350m); None: they are not
    is_unit     each row is divided by its L2 norm (Baichuan 2)
    """

    groups: tuple[tuple[Piece, ...], ...]
    is_stacked: bool = False
    factor: Piece | None = None
    is_unit: bool = False

    @property
    def is_computed(self) -> bool:
        """Whether the parameter has other values than the stored tensors."""
        return self.is_unit or self.factor is not None

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


def pair_halves(spec: ModelSpec, sources: Sources) -> Sources:
    """Return sources for rotating element i with i + dim / 2, given those of a model that rotates 2i with 2i + 1.

    The rows of each head of q and k are reordered, and the weights of its norms: the scores stay the same.
    """

    def order(layer: LayerSpec) -> list[tuple[int, int, int]]:
        dim = 0 if layer.attention.rope is None else layer.attention.rope.dim
        return [(0, dim, 2), (1, dim, 2), (dim, layer.attention.head_dim, 1)]

    return _reorder_heads(spec, sources, order)


def swap_halves(spec: ModelSpec, sources: Sources) -> Sources:
    """Return sources whose q and k rotate forward, given those of a model that rotates backward (nanochat)."""

    def order(layer: LayerSpec) -> list[tuple[int, int, int]]:
        head_dim = layer.attention.head_dim
        return [(head_dim // 2, head_dim, 1), (0, head_dim // 2, 1)]

    return _reorder_heads(spec, sources, order)


def _reorder_heads(spec: ModelSpec, sources: Sources, order: Callable[[LayerSpec], list[tuple[int, int, int]]]) -> Sources:
    """Return sources whose heads of q and k have their elements in another order: runs (start, stop, step) of a head."""
    found = dict(sources)
    for index, layer in enumerate(spec.layers):
        head_dim, runs = layer.attention.head_dim, [run for run in order(layer) if run[0] < run[1]]
        for name, num_heads in (("q", layer.attention.num_heads), ("k", layer.attention.num_kv_heads)):
            for kind in ("weight", "bias"):
                for module, count in ((name, num_heads), (f"{name}_norm", 1)):
                    key = f"layers.{index}.{module}.{kind}"
                    if key in sources:
                        is_each = layer.attention.qk_norm_over == "each" and module != name
                        found[key] = (_each_head if is_each else _heads)(
                            sources[key], num_heads if is_each else count, head_dim, runs
                        )
    return found


def _heads(source: Source, num_heads: int, head_dim: int, runs: list[tuple[int, int, int]]) -> Source:
    ((piece,),) = source.groups
    first = 0 if piece.rows is None else piece.rows[0]
    starts = [first + head * head_dim for head in range(num_heads)]
    pieces = [replace(piece, rows=(start + begin, start + end), step=step) for start in starts for begin, end, step in runs]
    return Source((tuple(pieces),))


def _each_head(source: Source, num_heads: int, _head_dim: int, runs: list[tuple[int, int, int]]) -> Source:
    ((piece,),) = source.groups
    heads = [
        tuple(replace(piece, rows=(begin, end), step=step, entry=head) for begin, end, step in runs)
        for head in range(num_heads)
    ]
    return Source.stack_pieces(heads)


def join_rows(sources: Sources, names: Mapping[str, int], stored: str) -> None:
    """Make parameters the rows of one stored tensor, one after the other: name -> number of rows."""
    start = 0
    for name, count in names.items():
        sources[name] = Source.of(stored, (start, start + count))
        start += count


def join_qkv(sources: Sources, spec: ModelSpec, stored: str, *, by_group: bool = False) -> None:
    """Make q, k and v of each layer, with the biases that it has, the rows of one stored tensor.

    stored    its name without the last part, with {} for the number of the layer
    by_group  the rows are for each head of keys its query heads, it, and its value head; otherwise all of q, then k, then v
    """
    for index, layer in enumerate(spec.layers):
        attention = layer.attention
        num_groups = attention.num_kv_heads if by_group else 1
        num_queries, num_keys = attention.num_heads // num_groups, attention.num_kv_heads // num_groups
        group_rows = (num_queries + 2 * num_keys) * attention.head_dim
        for kind in ("weight", "bias") if attention.has_qkv_bias else ("weight",):
            name, first = f"{stored.format(index)}.{kind}", 0
            for part, count in (("q", num_queries), ("k", num_keys), ("v", num_keys)):
                last = first + count * attention.head_dim
                starts = range(0, num_groups * group_rows, group_rows)
                pieces = tuple(Piece(name, (start + first, start + last)) for start in starts)
                sources[f"layers.{index}.{part}.{kind}"] = Source((pieces,))
                first = last
