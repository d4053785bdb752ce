"""LoraDeltas: what the adapters of a step add to the outputs of linear layers, in torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import LatentSpec
from quire.model.lora.adapter import Adapter
from quire.model.lora.latent import split_heads


class LoraDeltas:
    """The adapters of a decoder, by their keys, and which tokens of the current step use which of them."""

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}
        self._step: list[tuple[Adapter, Tensor]] = []

    def load(self, adapter: Adapter) -> None:
        """Add an adapter, unless it is there."""
        self._adapters[adapter.key] = adapter

    def unload(self, key: str) -> None:
        """Remove an adapter that no sequence uses any more."""
        del self._adapters[key]

    def begin(self, rows: Mapping[str, Tensor] | None) -> None:
        """Set which tokens of the next step use which adapter, see `token_runs.adapter_rows`; None: all use the base model."""
        unknown = [key for key in rows or {} if key not in self._adapters]
        if unknown:
            raise InvariantError(f"a step uses the adapter {unknown[0]}, which is not loaded")
        self._step = [(self._adapters[key], tokens) for key, tokens in (rows or {}).items()]

    def add_to(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """Return the output y [T, out] of a linear layer with what the adapters add for its input x [T, in]; changes y.

        name  canonical name of the layer, without ".weight"
        """
        for adapter, tokens in self._step:
            pair = adapter.pairs.get(name)
            if pair is not None:
                y[tokens] += (x[tokens] @ pair.a.t()) @ pair.b.t()
        return y

    def add_to_keys(self, y: Tensor, x: Tensor, name: str, latent: LatentSpec) -> Tensor:
        """Return queries y [T, H, kv_rank] in the space of latent rows with what adapters of kv_b add for x [T, H, nope_dim];
        changes y. See `lora/latent.py`."""
        for adapter, tokens in self._step:
            pair = adapter.pairs.get(name)
            if pair is not None:
                y[tokens] += torch.einsum("thn,hnr->thr", x[tokens], split_heads(pair, latent).keys) @ pair.a
        return y

    def add_to_values(self, y: Tensor, x: Tensor, name: str, latent: LatentSpec) -> Tensor:
        """Return outputs y [T, H, value_dim] of attention with what adapters of kv_b add for x [T, H, kv_rank], in the
        space of latent rows; changes y."""
        for adapter, tokens in self._step:
            pair = adapter.pairs.get(name)
            if pair is not None:
                y[tokens] += torch.einsum("thr,hvr->thv", x[tokens] @ pair.a.t(), split_heads(pair, latent).values)
        return y

    def add_to_rows(self, y: Tensor, x: Tensor, rows: Tensor, name: str) -> Tensor:
        """As `add_to`, of some tokens of the step: y [R, out] and x [R, in] of the tokens `rows` [R]."""
        for adapter, tokens in self._step:
            pair = adapter.pairs.get(name)
            if pair is not None:
                places = torch.isin(rows, tokens).nonzero()[:, 0]
                y[places] += (x[places] @ pair.a.t()) @ pair.b.t()
        return y
