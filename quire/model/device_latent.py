"""Multi-head latent attention on a GPU: the projections into and out of the space of the cached rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import AttentionSpec, IndexerSpec
from quire.kernels.triton.attention import KvCache, attend
from quire.kernels.triton.head_products import multiply_heads
from quire.kernels.triton.indexer import IndexInputs, attend_chosen, choose_keys
from quire.kernels.triton.norm import Norm, normalize
from quire.kernels.triton.qk_rope_store import Projections, Rope, place_heads
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.model.device_context import LayerContext
from quire.model.device_heads import turn_heads
from quire.model.device_linear import DeviceLinear


class LatentAttention:
    """Attention over latent rows, absorbed: queries are projected into the space of the rows, and outputs back.

    spec         with the heads of this rank
    own          the layer's dense parameters: the norms of latent rows, and kv_b.weight
    is_in_order  batch-invariant: a row has the same bits for any number of rows
    prefix       of the layer's canonical names
    context      where the rows of a sequence lie on several ranks; None: all are on this one
    """

    def __init__(
        self,
        spec: AttentionSpec,
        own: Mapping[str, Tensor],
        rope: Rope | None,
        is_in_order: bool,
        prefix: str,
        context: LayerContext | None = None,
    ) -> None:
        if spec.latent is None:
            raise InvariantError("latent attention of a layer that has none")
        self._prefix, self._context = prefix, context
        self._spec, self._latent, self._rope, self._is_in_order = spec, spec.latent, rope, is_in_order
        self._q_norm = None if self._latent.q_rank is None else Norm(self._latent.norm, own["q_a_norm.weight"])
        self._row_norm = Norm(self._latent.norm, own["kv_a_norm.weight"])
        up = own["kv_b.weight"].view(spec.num_heads, -1, self._latent.kv_rank)
        indexer = self._latent.indexer
        self._indexer = None
        if indexer is not None and not indexer.is_shared:
            self._indexer = _Indexer(indexer, self._latent.rope_dim, own, rope, is_in_order)
        self._into, self._out_of = up[:, : self._latent.nope_dim], up[:, self._latent.nope_dim :].transpose(1, 2)

    def attend(
        self,
        y: Tensor,
        product: Callable[[str, Tensor], Tensor],
        positions: Tensor,
        step: DeviceAttentionMetadata,
        cache: KvCache,
    ) -> Tensor:
        """Return what the heads give [T, num_heads * value_dim], for o; the latent rows of y [T, hidden_size] are stored.

        product    of a linear layer by its name, "q_a", "qkv" (the queries) or "kv_a", with its inputs
        positions  [T] i64
        """
        spec, latent = self._spec, self._latent
        read = y if self._q_norm is None else normalize(product("q_a", y), self._q_norm)
        nope, q_rope = product("qkv", read).unflatten(1, (spec.num_heads, -1)).split((latent.nope_dim, latent.rope_dim), -1)
        row, k_rope = product("kv_a", y).split((latent.kv_rank, latent.rope_dim), -1)
        row = normalize(row.contiguous(), self._row_norm)
        q_row, name, lora = multiply_heads(nope, self._into, self._is_in_order), f"{self._prefix}kv_b", step.lora
        q_row = q_row if lora is None else lora.add_to_keys(q_row, nope, name)
        q = torch.cat((self._halves(q_rope), q_row), -1)
        k = torch.cat((self._halves(k_rope), row), -1)[:, None]
        q = q if self._context is None else self._context.gather_queries(q)
        heads, rope = Projections(q, k, k), self._rope
        if spec.query_scaling is not None:
            heads, rope = turn_heads(heads, spec, positions, rope, None), None
        q = place_heads(heads, cache, step.slots, positions, rope, None, self._is_in_order)
        if step.exchange is not None:
            step.exchange(cache)
        if self._context is not None:
            attended = self._context.attend(q, cache, step, None, self._is_in_order)
        elif latent.indexer is None:
            attended = attend(q, cache, step, spec, None, self._is_in_order)
        else:
            if self._indexer is not None:
                index = self._indexer.inputs(y, read, positions, step, cache, self._prefix)
                step.chosen[:] = choose_keys(index, cache.k.shape[2], step, latent.indexer)
            attended = attend_chosen(q, step.chosen, cache.k, spec, self._is_in_order)
        values = multiply_heads(attended, self._out_of, self._is_in_order)
        return (values if lora is None else lora.add_to_values(values, attended, name)).flatten(1)

    def _halves(self, x: Tensor) -> Tensor:
        return _halves(x) if self._latent.is_interleaved else x


def _halves(x: Tensor) -> Tensor:
    """Return values [..., rope_dim], of which 2i is rotated with 2i + 1, so that i is rotated with i + rope_dim / 2."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class _Indexer:
    """The projections of an indexer; `own` as in LatentAttention."""

    def __init__(
        self, spec: IndexerSpec, rope_dim: int, own: Mapping[str, Tensor], rope: Rope | None, is_in_order: bool
    ) -> None:
        self.spec, self._rope_dim, self._rope, self._is_in_order = spec, rope_dim, rope, is_in_order
        self._q, self._k, self._weights = (
            DeviceLinear((own[f"index_{name}.weight"],), None, is_in_order) for name in ("q", "k", "weights")
        )
        self._norm = Norm(spec.norm, own["index_k_norm.weight"], own.get("index_k_norm.bias"))

    def inputs(
        self, y: Tensor, q_latent: Tensor, positions: Tensor, step: DeviceAttentionMetadata, cache: KvCache, prefix: str
    ) -> IndexInputs:
        """Store the keys of the tokens in the cache, and return what scores all keys.

        y, q_latent  [T, K], what the layer reads, and what queries are made of
        prefix       of the layer's canonical names
        """
        if cache.index is None:
            raise InvariantError("the cache has no room for the keys of an indexer")

        def adapted(out: Tensor, x: Tensor, name: str) -> Tensor:
            return out if step.lora is None else step.lora.add_to(out, x, prefix + name)

        q = self._turned(adapted(self._q(q_latent), q_latent, "index_q").unflatten(1, (self.spec.num_heads, -1)))
        k = self._turned(normalize(adapted(self._k(y), y, "index_k"), self._norm)[:, None])
        index = KvCache(cache.index, cache.index)
        q = place_heads(Projections(q, k, k), index, step.slots, positions, self._rope, None, self._is_in_order)
        weights = adapted(self._weights(y), y, "index_weights").float() * self.spec.num_heads**-0.5
        return IndexInputs(q, weights, cache.index)

    def _turned(self, heads: Tensor) -> Tensor:
        """Return heads [..., D] whose first rope_dim values are in the order of `_halves`."""
        if not self.spec.is_interleaved:
            return heads
        return torch.cat((_halves(heads[..., : self._rope_dim]), heads[..., self._rope_dim :]), -1)
