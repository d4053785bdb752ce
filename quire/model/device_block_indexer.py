"""An indexer of blocks of keys on a GPU: its projections, and the attention to what it chooses."""

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


class BlockAttention:
    """Attention of a layer to the blocks that its indexer chooses; every rank has the whole indexer.

    spec  with the heads of this rank; own: the layer's dense parameters
    """

    def __init__(
        self, spec: AttentionSpec, own: Mapping[str, Tensor], rope: Rope | None, heads: HeadsOfRank, is_in_order: bool
    ) -> None:
        indexer = spec.block_indexer
        if indexer is None:
            raise InvariantError("attention to blocks of a layer that has no indexer")
        self._spec, self._rope, self._heads, self._is_in_order = spec, rope, heads, is_in_order
        names = ("index_q", "index_k")
        self._linears = {name: DeviceLinear((own[f"{name}.weight"],), None, is_in_order) for name in names}
        q_norm, k_norm = (Norm(indexer.norm, own[f"{name}_norm.weight"]) for name in names)
        self._norms = q_norm, k_norm
        self._dim = indexer.head_dim

    def attend(
        self,
        q: Tensor,
        y: Tensor,
        positions: Tensor,
        step: DeviceAttentionMetadata,
        cache: KvCache,
        adapted: Callable[[Tensor, Tensor, str], Tensor],
    ) -> Tensor:
        """Return what the heads give [T, H, D], and store the indexer's keys of y [T, hidden_size].

        q        [T, H, D], rotated; keys and values are already stored
        adapted  returns the output of a linear layer with what adapters add, given its input and its name
        """
        if cache.index is None:
            raise InvariantError("the cache has no room for the keys of an indexer")
        heads, keys = (adapted(one(y), y, name).unflatten(1, (-1, self._dim)) for name, one in self._linears.items())
        index = KvCache(cache.index, cache.index)
        projected = Projections(heads, keys, keys)
        heads = place_heads(projected, index, step.slots, positions, self._rope, self._norms, self._is_in_order)
        inputs = IndexInputs(heads, None, cache.index)
        return attend_blocks(q, inputs, cache, step, self._spec, self._heads, self._is_in_order)
