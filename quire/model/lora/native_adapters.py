"""NativeAdapters: the LoRA adapters of a native decoder, packed for its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quire.contracts.mixer_spec import GatedDeltaSpec
from quire.contracts.model_spec import ModelSpec
from quire.model.lora.adapter import Adapter
from quire.model.lora.experts import LowRankPair, is_expert
from quire.model.lora.latent import is_absorbed, split_heads
from quire.model.lora.numbers import AdapterNumbers
from quire.model.native_mixers import mixer_ranges
from quire.model.native_weights import WeightPacker
from quire.model.tensor_shards import ModelShard
from quire.parallel.shards import ShardRange

_MODULES = {
    "q": (0,),
    "k": (1,),
    "kv_a": (1,),
    "v": (2,),
    "o": (3,),
    "q_a": (4,),
    "gate": (5,),
    "up": (6,),
    "down": (7,),
    "router": (8,),
    "shared.gate": (9,),
    "shared.up": (10,),
    "shared.down": (11,),
    "shared_scale": (12,),
    "attn_gate": (24,),
    "index_q": (25,),
    "index_k": (26,),
    "index_weights": (27,),
    "latent_in": (28,),
    "latent_out": (29,),
    "block_out": (30,),
    **{f"adapters.{name}_in": (31 + place,) for place, name in enumerate(("q", "k", "v"))},
    **{f"adapters.{name}_out": (34 + place,) for place, name in enumerate(("q", "k", "v"))},
    **{f"adapters.{name}_in": (37 + place,) for place, name in enumerate(("gate", "up"))},
    **{f"adapters.{name}_out": (39 + place,) for place, name in enumerate(("gate", "up"))},
}
"""Canonical name of a layer's module -> LoraModule in csrc/lora.h."""
_EXPERT_MODULES = {"gate": 0, "up": 1, "down": 2}
"""Module of an expert -> ExpertModule in csrc/lora.h."""
_KEYS_AND_VALUES = (1, 2)
_MIXER_PARTS = {
    "delta.qkv": 13,
    "conv.in": 13,
    "mamba.in": 13,
    "delta.z_in": 16,
    "delta.b": 17,
    "delta.a_in": 18,
    "mamba.x": 21,
    "mamba.step": 22,
    **dict.fromkeys(("delta.o", "conv.out", "mamba.out"), 23),
}
"""Canonical name of a mixer's module -> LoraModule of its first part; see Mixer in csrc/plan.h."""
_HEAD = 41


class NativeAdapters:
    """Implements AdapterHolder for a native plan, which adds their products to the outputs of its linear layers.

    plan   finished
    shard  the part of the model that it runs; None: all of it. The first matrices are whole on each tensor-parallel rank, and
           the second ones are sharded by outputs, as the weights are
    """

    def __init__(self, native: ModuleType, plan: Any, spec: ModelSpec, shard: ModelShard | None = None) -> None:
        self._native, self._plan, self._spec, self._shard = native, plan, spec, shard
        self.numbers = AdapterNumbers()
        self._with_head: set[str] = set()

    def load(self, adapter: Adapter) -> None:
        """See AdapterHolder."""
        if adapter.key in self.numbers:
            return
        packer = WeightPacker(self._native, getattr(torch, self._spec.dtype))
        packed = self._native.LoraAdapter(self._plan.num_layers, self._plan.num_experts, self._plan.num_latent_heads)
        for name, pair in adapter.pairs.items():
            if self._set_mixer(packed, packer, name, pair):
                continue
            own = pair.b
            if self._shard is not None:
                rows = self._shard.output_rows(name, len(pair.b))
                own = pair.b[rows.start : rows.stop]
            pair = LowRankPair(pair.a, own)
            if is_absorbed(name):
                self._set_heads(packed, packer, int(name.split(".")[1]), pair)
                continue
            a, b = (packer.pack(matrix.contiguous(), may_be_short=False) for matrix in pair)
            if is_expert(name):
                _, index, _, expert, module = name.split(".")
                packed.set_expert(int(index), int(expert), _EXPERT_MODULES[module], a, b)
                continue
            layer, modules = self._place(name)
            for module in modules:
                packed.set(layer, module, a, b)
        number = self.numbers.next_number
        self._plan.set_adapter(number, packed)
        self.numbers.set(adapter.key, number)
        if "lm_head" in adapter.pairs:
            self._with_head.add(adapter.key)

    def _set_mixer(self, packed: Any, packer: WeightPacker, name: str, pair: LowRankPair) -> bool:
        """Set the parts of a pair of a linear layer of a mixer; return whether it is one."""
        _, index, module = name.split(".", 2) if name != "lm_head" else ("", "0", "")
        spec, layer = self._spec.layers[int(index)].mixer, None if self._shard is None else self._shard.layers[int(index)]
        if spec is None or not module.startswith(("delta.", "conv.", "mamba.")):
            return False
        is_low = isinstance(spec, GatedDeltaSpec) and spec.gate_rank is not None
        first = {"delta.z": 19 if is_low else 16, "delta.a": 20 if is_low else 18, **_MIXER_PARTS}[module]
        ranges = mixer_ranges(spec, None if layer is None else layer.mixer_heads).get(module)
        if ranges is None:
            is_last = layer is not None and first == _MIXER_PARTS["mamba.out"]
            ranges = [layer.outputs if is_last and layer is not None else ShardRange(0, len(pair.b))]
        a = packer.pack(pair.a.contiguous(), may_be_short=False)
        for part, rows in enumerate(ranges):
            b = packer.pack(pair.b[rows.start : rows.stop].contiguous(), may_be_short=False)
            packed.set(int(index), first + part, a, b)
        return True

    def _set_heads(self, packed: Any, packer: WeightPacker, layer: int, pair: LowRankPair) -> None:
        """Set the pairs of the products of each head with latent attention that `pair`, of kv_b and the rank's heads, makes."""
        latent = self._spec.layers[layer].attention.latent
        assert latent is not None
        heads = split_heads(pair, latent)

        def pack(matrix: Tensor) -> Any:
            return packer.pack(matrix.contiguous(), may_be_short=False)

        key_b, value_a = pack(pair.a.t()), pack(pair.a)
        for head, (keys, values) in enumerate(zip(heads.keys, heads.values, strict=True)):
            packed.set_head(layer, head, 0, pack(keys.t()), key_b)
            packed.set_head(layer, head, 1, value_a, pack(values))

    def unload(self, key: str) -> None:
        """See AdapterHolder."""
        self._plan.set_adapter(self.numbers.remove(key), None)
        self._with_head.discard(key)

    def adapts_head(self, keys: Sequence[str] | None) -> bool:
        """Return whether one of these adapters adds to the logits; "" and None: none."""
        return bool(self._with_head) and keys is not None and not self._with_head.isdisjoint(keys)

    def _place(self, name: str) -> tuple[int, tuple[int, ...]]:
        """Return the index of the layer, and the modules, that a canonical name stands for."""
        if name == "lm_head":
            return self._plan.num_layers, (_HEAD,)
        _, index, module = name.split(".", 2)
        attention = self._spec.layers[int(index)].attention
        if module == "k" and attention.is_v_from_k:
            return int(index), _KEYS_AND_VALUES
        return int(index), _MODULES[module]
