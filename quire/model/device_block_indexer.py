"""Attention to the blocks that an indexer chooses, on a GPU, with the projections of the indexer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import AttentionSpec
from quire.kernels.triton.attention import KvCache
from quire.kernels.triton.block_indexer import HeadsOfRank, attend_blocks
from quire.kernels.triton.indexer import IndexInputs
from quire.kernels.triton.norm import Norm
from quire.kernels.triton.qk_rope_store import Projections, Rope, place_heads
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.model.device_linear import DeviceLinear
from quire.model.device_ranks import LayerRanks

_NAMES = "index_q", "index_k"


class BlockAttention:
    """Of a layer; spec: with the heads of this rank; own: its dense parameters; ranks: those that divide the heads."""

    def __init__(
        self, spec: AttentionSpec, own: Mapping[str, Tensor], rope: Rope | None, ranks: LayerRanks | None, is_in_order: bool
    ) -> None:
        assert spec.block_indexer is not None
        heads = HeadsOfRank(0, spec.num_heads) if ranks is None else HeadsOfRank(ranks.first_head, ranks.num_heads)
        self._spec, self._rope, self._heads, self._is_in_order = spec, rope, heads, is_in_order
        self._linears = {name: DeviceLinear((own[f"{name}.weight"],), None, is_in_order) for name in _NAMES}
        q_norm, k_norm = (Norm(spec.block_indexer.norm, own[f"{name}_norm.weight"]) for name in _NAMES)
        self._norms = q_norm, k_norm

    def attend(
        self,
        q: Tensor,
        y: Tensor,
        positions: Tensor,
        step: DeviceAttentionMetadata,
        cache: KvCache,
        adapted: Callable[[Tensor, Tensor, str], Tensor],
    ) -> Tensor:
        """Return what heads give for q [T, H, D], rotated, and store the indexer's keys of y [T, hidden_size], its input.

        adapted  returns the output of a linear layer with what adapters add, given its input and its name
        """
        if cache.index is None:
            raise InvariantError("the cache has no room for the keys of an indexer")
        size, index = cache.index.shape[3], KvCache(cache.index, cache.index)
        heads, keys = (adapted(one(y), y, name).unflatten(1, (-1, size)) for name, one in self._linears.items())
        placed = Projections(heads, keys, keys), index, step.slots, positions, self._rope, self._norms, self._is_in_order
        inputs = IndexInputs(place_heads(*placed), None, cache.index)
        return attend_blocks(q, inputs, cache, step, self._spec, self._heads, self._is_in_order)
