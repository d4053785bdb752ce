"""ModelShard: which rows of which weight a tensor-parallel rank has.

Every weight is sharded by its outputs, so that a rank computes whole sums over all inputs and nothing is summed across ranks:
results are gathered, and have the same bits for any number of ranks. This is the column-parallel half of Megatron-LM
(https://arxiv.org/abs/1909.08053), applied to every weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from quire.base.errors import ConfigError
from quire.contracts.kv_spec import KvDtype, KvSpec
from quire.contracts.mixer_spec import MixerSpec
from quire.contracts.model_spec import NO_ATTENTION, LayerSpec, ModelSpec, MoeSpec
from quire.model.mixer_shards import mixer_heads, mixer_part
from quire.model.parameters import Shape, mixer_shapes
from quire.parallel.expert_placement import ExpertPlacement
from quire.parallel.shards import OUTPUT_MULTIPLE, HeadRange, ShardRange, head_range, shard_range

_NO_HEADS = HeadRange(ShardRange(0, 0), ShardRange(0, 0))
_WHOLE_OF_MIXERS = frozenset({"mamba.norm.weight", "mamba.x.weight"})
"""Parameters of mixers that every rank has whole although they have a size of all heads."""


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """The experts of a layer that an expert-parallel rank holds whole.

    experts     in ascending order
    num_copies  of each expert of the layer: how many ranks hold it
    own_copies  of each: which of its copies this rank holds, -1: none
    """

    experts: tuple[int, ...]
    num_copies: tuple[int, ...]
    own_copies: tuple[int, ...]

    @classmethod
    def of(cls, placement: ExpertPlacement, rank: int) -> ExpertShard:
        """Return the part of a rank."""
        return cls(placement.ranks[rank], placement.num_copies, placement.own_copies(rank))


@dataclass(frozen=True, slots=True)
class LayerShard:
    """The part of a layer that a rank has.

    heads    its query heads, and the key and value heads that they read
    inner    its intermediate columns of the feed-forward block, or of every expert; with expert parallelism all of them
    shared_inner  the same of the shared expert
    outputs  its columns of the residual stream: rows of o and down
    expert_outputs     those of the experts, which may give latent rows
    attention_outputs  those of o only, where ranks of a home divide them
    total_heads, total_kv_heads  of all ranks together
    experts  with expert parallelism; None: every expert is sharded by its outputs, or there are none
    context  with decode context parallelism: the heads of all ranks that share the tokens of sequences, which its KV cache has
    writes_kv_heads  the first of the ranks that have its key and value heads
    num_up_parts     of a matrix of experts that read their input: 2, gate and up, or 1
    mixer, mixer_heads  its part of a mixer with a recurrent state, and which heads or channels these are (see mixer_heads);
                     None: the layer has no mixer
    """

    heads: HeadRange
    inner: ShardRange
    shared_inner: ShardRange
    outputs: ShardRange
    expert_outputs: ShardRange
    total_heads: int
    total_kv_heads: int
    experts: ExpertShard | None = None
    context: HeadRange | None = None
    writes_kv_heads: bool = True
    attention_outputs: ShardRange | None = None
    num_up_parts: int = 2
    mixer: MixerSpec | None = None
    mixer_heads: HeadRange | None = None

    @property
    def o_outputs(self) -> ShardRange:
        """Its rows of o."""
        return self.outputs if self.attention_outputs is None else self.attention_outputs

    @property
    def cached_kv_heads(self) -> ShardRange:
        """The key and value heads in its KV cache."""
        return (self.heads if self.context is None else self.context).kv_heads

    @classmethod
    def of(
        cls,
        layer: LayerSpec,
        hidden_size: int,
        rank: int,
        shares: Sequence[float],
        placement: ExpertPlacement | None = None,
        home_size: int = 0,
    ) -> LayerShard:
        """Return the part of a rank; placement: of the experts, with expert parallelism; home_size: see ModelShard.of."""
        attention, inner = layer.attention, _inner_size(layer)
        place, group = rank, shares  # among the ranks that divide the heads
        if home_size:
            place, group = rank % home_size, shares[rank // home_size * home_size :][:home_size]
        is_attending = attention != NO_ATTENTION
        own = None if layer.mixer is None else mixer_heads(layer.mixer, rank, shares)
        return cls(
            head_range(attention.num_heads, attention.num_kv_heads, place, group) if is_attending else _NO_HEADS,
            _output_range(inner, rank, shares) if placement is None else ShardRange(0, inner),
            _output_range(_shared_inner_size(layer), rank, shares),
            _output_range(hidden_size, rank, shares),
            _output_range(_expert_width(layer) or hidden_size, rank, shares),
            attention.num_heads,
            attention.num_kv_heads,
            None if placement is None else ExpertShard.of(placement, rank),
            attention_outputs=_output_range(hidden_size, place, group) if home_size else None,
            num_up_parts=1 if isinstance(layer.mlp, MoeSpec) and not layer.mlp.expert.is_gated else 2,
            mixer=None if layer.mixer is None or own is None else mixer_part(layer.mixer, own),
            mixer_heads=own,
        )


def _with_context(shard: LayerShard, rank: int, shares: Sequence[float], size: int) -> LayerShard:
    """Return a layer of a rank, of which `size` consecutive ranks share the tokens of sequences. Raises ConfigError where the
    groups of ranks would have other numbers of heads."""
    ranges = [head_range(shard.total_heads, shard.total_kv_heads, other, shares) for other in range(len(shares))]
    groups = [
        HeadRange(
            ShardRange(ranges[first].heads.start, ranges[first + size - 1].heads.stop),
            ShardRange(ranges[first].kv_heads.start, ranges[first + size - 1].kv_heads.stop),
        )
        for first in range(0, len(shares), size)
    ]
    sizes = {(group.heads.size, group.kv_heads.size) for group in groups}
    num_heads, num_kv_heads = next(iter(sizes))
    if len(sizes) > 1 or (num_kv_heads > 1 and num_heads * shard.total_kv_heads != shard.total_heads * num_kv_heads):
        raise ConfigError(
            f"decode_context_parallel_size is {size} and tensor_parallel_size {len(shares)}: the groups of {size} ranks must "
            f"have equal numbers of attention heads, but {shard.total_heads} heads with {shard.total_kv_heads} key and value "
            "heads cannot be divided so; choose decode_context_parallel_size equal to tensor_parallel_size, or other sizes"
        )
    is_first = rank == 0 or ranges[rank - 1].kv_heads.stop <= ranges[rank].kv_heads.start
    return replace(shard, context=groups[rank // size], writes_kv_heads=is_first)


def _inner_size(layer: LayerSpec) -> int:
    return layer.mlp.expert.intermediate_size if isinstance(layer.mlp, MoeSpec) else layer.mlp.intermediate_size


def _shared_inner_size(layer: LayerSpec) -> int:
    shared = layer.mlp.shared if isinstance(layer.mlp, MoeSpec) else None
    return _inner_size(layer) if shared is None else shared.intermediate_size


def _expert_width(layer: LayerSpec) -> int | None:
    """Return the size of the latent rows that experts give; None: they give the residual's."""
    return layer.mlp.latent_size if isinstance(layer.mlp, MoeSpec) else None


def _sharded_sizes(layer: LayerSpec, has_whole_experts: bool) -> list[int]:
    """Return the numbers of intermediate columns that the ranks divide."""
    has_shared = isinstance(layer.mlp, MoeSpec) and layer.mlp.shared is not None
    width = _expert_width(layer)
    own = [_inner_size(layer), *([] if width is None else [width])]
    return own * (not has_whole_experts) + [_shared_inner_size(layer)] * has_shared


def _output_range(total: int, rank: int, shares: Sequence[float]) -> ShardRange:
    """Return the outputs of a rank: whole panels of the kernels if there are enough; results do not depend on this."""
    return shard_range(total, rank, shares, OUTPUT_MULTIPLE if total >= OUTPUT_MULTIPLE * len(shares) else 1)


def _adapted_module(module: str) -> str:
    """Return the module whose outputs the second matrix of a low-rank adapter of a shared block has, or the module itself."""
    is_second = module.startswith("adapters.") and module.endswith("_out")
    return module.removeprefix("adapters.").removesuffix("_out") if is_second else module


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The part of a model that a rank has; norms, routers, positions, indexers of keys and the projections to latent rows are
    replicated on every rank.

    vocabulary  its rows of the embedding and of the LM head
    """

    rank: int
    size: int
    vocabulary: ShardRange
    layers: tuple[LayerShard, ...]

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        rank: int,
        shares: Sequence[float],
        placements: Mapping[int, ExpertPlacement] | None = None,
        context_size: int = 1,
        home_size: int = 0,
    ) -> ModelShard:
        """Return the part of a rank, where rank r has shares[r] of the sum of `shares`.

        placements    with expert parallelism: of the experts of each layer that has any, by its index
        context_size  consecutive ranks that share the tokens of sequences
        home_size     consecutive ranks that have the whole attention weights, for sequences of their own; 0: all ranks

        Raises ConfigError if a rank would have no part of a weight.
        """
        if spec.per_layer_inputs is not None or any(layer.attention.kv_source is not None for layer in spec.layers):
            raise ConfigError(
                f"tensor_parallel_size is {len(shares)}, but per-layer inputs and layers that read the keys and values of "
                f"another layer ({spec.model_type}) run on one rank"
            )
        layers = tuple(
            LayerShard.of(layer, spec.hidden_size, rank, shares, (placements or {}).get(index), home_size)
            for index, layer in enumerate(spec.layers)
        )
        if context_size > 1:
            layers = tuple(_with_context(layer, rank, shares, context_size) for layer in layers)
        found = cls(rank, len(shares), _output_range(spec.vocab_size, rank, shares), layers)
        least = min(
            spec.vocab_size,
            spec.hidden_size,
            *(
                size
                for layer, shard in zip(spec.layers, layers, strict=True)
                for size in _sharded_sizes(layer, shard.experts is not None)
                if size > 0  # 0: the layer has no feed-forward block
            ),
        )
        if least < len(shares):
            raise ConfigError(f"tensor_parallel_size must be at most {least} for this model, got {len(shares)}")
        return found

    def part(self, first: int, last: int) -> ModelShard:
        """Return the rank's part of the layers [first, last) only; they are numbered from 0."""
        return replace(self, layers=self.layers[first:last])

    def parameter_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the shapes of the rank's part of parameters, given the whole ones by their canonical names."""
        return {name: self._shape(name, shape) for name, shape in shapes.items()}

    def _shape(self, name: str, shape: Shape) -> Shape:
        if name.startswith(("embed.", "lm_head.")):
            return (self.vocabulary.size, *shape[1:])
        if not name.startswith("layers."):
            return shape
        _, index, *middle, _ = name.split(".")
        layer, module = self.layers[int(index)], _adapted_module(".".join(middle))
        if layer.mixer is not None:
            own = mixer_shapes(layer.mixer, 1).get(name.split(".", 2)[2])
            if own is not None:
                return self._mixer_shape(layer, name.split(".", 2)[2], own, shape)
        heads, kv_heads = layer.heads.heads.size, layer.heads.kv_heads.size
        if module == "kv_b":
            return (shape[0] // layer.total_heads * heads, *shape[1:])
        if module in ("q", "k", "v", "sinks", "attn_gate"):
            own = kv_heads if module in ("k", "v") else heads
            total = layer.total_kv_heads if module in ("k", "v") else layer.total_heads
            return (shape[0] // total * own, *shape[1:])
        if module in ("o", "down", "gate", "up", "latent_out", "block_out"):
            rows = layer.inner if module in ("gate", "up") else layer.o_outputs if module == "o" else layer.outputs
            return (rows.size, *shape[1:])
        if module.startswith("shared."):
            rows = layer.outputs if module == "shared.down" else layer.shared_inner
            return (rows.size, *shape[1:])
        if module.startswith("experts.") and layer.experts is not None:
            return (len(layer.experts.experts), *shape[1:])
        if module.startswith("experts."):
            return (
                shape[0],
                layer.num_up_parts * layer.inner.size if module == "experts.gate_up" else layer.expert_outputs.size,
                *shape[2:],
            )
        return shape

    def _mixer_shape(self, layer: LayerShard, name: str, own: Shape, shape: Shape) -> Shape:
        """Return the shape of a rank's part of a parameter; name: in the layer, own: of its part of the mixer."""
        if name.endswith((".o.weight", ".out.weight", ".out.bias")):
            return (layer.outputs.size, *shape[1:])
        return shape if name in _WHOLE_OF_MIXERS else (own[0], *shape[1:])

    def output_rows(self, name: str, num_rows: int) -> ShardRange:
        """Return which outputs of a linear layer that can have a LoRA adapter the rank computes.

        name  canonical, without ".weight"; num_rows: outputs of the whole layer
        """
        if name == "lm_head":
            return self.vocabulary
        _, index, module = name.split(".", 2)
        layer, module = self.layers[int(index)], _adapted_module(module)
        if module in ("q", "kv_b", "attn_gate", "k", "v"):
            is_kv = module in ("k", "v")
            heads, total = (layer.heads.kv_heads, layer.total_kv_heads) if is_kv else (layer.heads.heads, layer.total_heads)
            return ShardRange(heads.start * num_rows // total, heads.stop * num_rows // total)
        if module.startswith("experts."):
            if layer.experts is not None:
                return ShardRange(0, num_rows)
            module = module.rpartition(".")[2]
            if module == "down":
                return layer.expert_outputs
        ranges = {
            "o": layer.outputs,
            "down": layer.outputs,
            "latent_out": layer.outputs,
            "block_out": layer.outputs,
            "gate": layer.inner,
            "up": layer.inner,
            "shared.down": layer.outputs,
            "shared.gate": layer.shared_inner,
            "shared.up": layer.shared_inner,
        }
        return ranges.get(module, ShardRange(0, num_rows))  # projections to latent rows and indexers are whole

    def kv_spec(self, spec: ModelSpec, block_size: int, dtype: KvDtype, limits_windows: bool = False) -> KvSpec:
        """Return the shape of the rank's KV cache; see KvSpec.of."""
        shapes = tuple(
            (shard.cached_kv_heads.size, layer.attention.head_dim)
            for shard, layer in zip(self.layers, spec.layers, strict=True)
        )
        kv = replace(KvSpec.of(spec, block_size, dtype, limits_windows), layer_shapes=shapes)
        if not kv.state_shapes:
            return kv
        states = tuple(() if shard.mixer is None else shard.mixer.state_shapes for shard in self.layers)
        return replace(kv, state_shapes=states)


@dataclass(frozen=True, slots=True)
class ContextPlace:
    """A rank's place among the ranks that share the tokens of sequences (decode context parallelism), or among homes.

    num_local_blocks  in the KV cache of each of them; block b of a block table is block b % num_local_blocks of the rank at
                      place b // num_local_blocks
    """

    place: int
    size: int
    num_local_blocks: int

    def local(self, block_ids: Sequence[int]) -> list[int]:
        """Return which of some blocks this rank has, by their numbers in its cache."""
        first = self.place * self.num_local_blocks
        return [block_id - first for block_id in block_ids if 0 <= block_id - first < self.num_local_blocks]


@dataclass(frozen=True, slots=True)
class RowDivision:
    """A rank's place among ranks that have the same weights and compute some of the tokens of a step (prefill context
    parallelism): each has the whole model, or the same shard of it.

    barrier_address, rows_file  as in RankGroup, of these ranks only
    """

    rank: int
    size: int
    barrier_address: int
    rows_file: int


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A rank's place in a group of ranks on one host, for the native kernels.

    shard            of a tensor-parallel group; None: every rank has the whole model, and divides rows
    barrier_address  of the group's BarrierState (csrc/process_barrier.h) in memory that all ranks map
    rows_file        descriptor of the file for the rows that ranks share; it grows with the largest step
    exchange         the exchange at each barrier if the ranks share no memory, see RowExchange
    has_whole_vocabulary  keep the whole embedding and LM head in addition to the shards, for draft heads that read them
    context          where the ranks share the tokens of sequences, or are homes
    home_size        consecutive ranks that attend to the sequences whose blocks they have; 0: there are no homes
    division         where the rows of a step are divided. With a shard too, every tensor-parallel group computes some of them
    """

    shard: ModelShard | None
    barrier_address: int = 0
    rows_file: int = -1
    has_whole_vocabulary: bool = False
    exchange: Callable[[int, Sequence[tuple[int, int, int, int]]], bool] | None = None
    context: ContextPlace | None = None
    home_size: int = 0
    division: RowDivision | None = None

    @property
    def computes_results(self) -> bool:
        """Whether the logits of a step are computed by this rank, alone or with its tensor-parallel group."""
        return self.division is None or self.division.rank == 0

    @property
    def gives_results(self) -> bool:
        """Whether this rank gets the logits of a step."""
        return self.computes_results and (self.shard is None or self.shard.rank == 0)
