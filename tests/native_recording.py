"""Records the calls that build a native decoder's plan and run it; tests/native/replay_plan.cpp repeats them elsewhere."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from quire.kv.pool import KvPool

_SOURCE_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "bf12": 2}
"""Of a value that is packed; one of all other formats."""


class Recording:
    """Stands for the extension module: makes its objects, on one instruction set, and writes what is called to a file."""

    def __init__(self, native: ModuleType, isa: str, path: Path) -> None:
        self.native, self._isa = native, isa
        self._file = path.open("wb")
        self._pools: dict[int, tuple[int, int]] = {}
        self.num_weights = self.num_layers = 0

    def write(self, name: str, *values: object, parts: Sequence[bytes] = ()) -> None:
        """Write a call: a line, and after it data."""
        texts = [value if isinstance(value, str) else float(value).hex() for value in values]
        self._file.write(" ".join((name, *texts)).encode() + b"\n" + b"".join(parts))

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def add_pool(self, kv: KvPool) -> None:
        """Note the memory that plans may be given as caches."""
        for tensor in (*kv.k, *kv.v, *(scale for scales in kv.scales for scale in scales)):
            self._pools.setdefault(tensor.data_ptr(), (len(self._pools), tensor.nbytes))

    def pool_at(self, address: int) -> tuple[int, int]:
        """Return the number and the bytes of a cache; -1, 0 for no address."""
        return self._pools[address] if address else (-1, 0)

    def Weight(self, *args: Any) -> RecordedWeight:
        """Make a weight: format, n, k, group, input_group."""
        return RecordedWeight(self, *args)

    def Plan(self, hidden: int, vocab: int, is_bf16: bool, num_threads: int) -> RecordedPlan:
        """Make a plan of this instruction set."""
        self.write("plan", hidden, vocab, is_bf16)
        return RecordedPlan(self, vocab, self.native.Plan(hidden, vocab, is_bf16, num_threads, self._isa))

    def PlanLayer(self) -> RecordedLayer:
        """Make a layer."""
        return RecordedLayer(self)

    def Routing(self) -> RecordedRouting:
        """Make the numbers of a router."""
        return RecordedRouting(self.native.Routing())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)  # functions that keep nothing


class RecordedWeight:
    """A packed weight and its number in the file."""

    def __init__(self, to: Recording, name: str, n: int, k: int, group: int = 0, input_group: int = 0) -> None:
        self.real = to.native.Weight(name, n, k, group, input_group)
        self.index, self._to, self._name, self._n, self._k, self._group = to.num_weights, to, name, n, k, group
        to.num_weights += 1
        to.write("weight", name, n, k, group, input_group)

    def pack(
        self, source: int, stride: int, first: int, count: int, levels: int = 0, num_levels: int = 0, **options: Any
    ) -> None:
        """Record the rows, and pack them."""
        data = _bytes_at(source, ((count - 1) * stride + self._k) * _SOURCE_BYTES.get(self._name, 1))
        parts = (data, _bytes_at(levels, num_levels))
        self._to.write("pack", self.index, stride, first, count, num_levels, len(data), parts=parts)
        self.real.pack(source, stride, first, count, levels, num_levels, **options)

    def set_extras(self, *addresses: int) -> None:
        """Record scales, offsets, scales of columns, biases, the order of columns, and scales of blocks."""
        width = -(-self._n // 16) * 16
        num_groups = -(-self._k // self._group) if self._group else 1
        counts = 2 * width * num_groups, 2 * width * num_groups, 4 * width, 4 * width, 4 * self._k, 4 * width * num_groups
        parts = [_bytes_at(address, size if address else 0) for address, size in zip(addresses, counts, strict=True)]
        self._to.write("extras", self.index, *map(len, parts), parts=parts)
        self.real.set_extras(*addresses)

    @property
    def num_bytes(self) -> int:
        """Bytes of the real weight."""
        return self.real.num_bytes


class RecordedNorm:
    """A norm of a layer, or with owner -1 of the plan."""

    def __init__(self, to: Recording, owner: int, name: str, real: Any) -> None:
        self._to, self._owner, self._name, self._real = to, owner, name, real

    def set(self, is_layer_norm: bool, size: int, eps: float, weight: int, bias: int, num_heads: int) -> None:
        """Record the weights, and set them."""
        parts = _bytes_at(weight, 4 * size * num_heads), _bytes_at(bias, 4 * size * num_heads if bias else 0)
        self._to.write("norm", self._owner, self._name, is_layer_norm, size, eps, num_heads, bool(bias), parts=parts)
        self._real.set(is_layer_norm, size, eps, weight, bias, num_heads)


class RecordedRouting:
    """The numbers of a router, which are written when a layer gets them."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def set(self, *groups: int, least_sum: float, scale: float, threshold: float, correction: list[float]) -> None:
        """Keep the numbers, and set them."""
        self.numbers, self.correction = (*groups, least_sum, scale, threshold), correction
        self.real.set(*groups, least_sum=least_sum, scale=scale, threshold=threshold, correction=correction)


class RecordedLayer:
    """A layer: what is assigned is recorded by the name of its field."""

    def __init__(self, to: Recording) -> None:
        kept = {"real": to.native.PlanLayer(), "index": to.num_layers, "to": to, "weights": {}}
        self.__dict__.update(kept)
        to.num_layers += 1
        to.write("layer")

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, RecordedWeight):
            self.weights[name] = value
            self.to.write("use", self.index, name, value.index)
        elif isinstance(value, RecordedRouting):
            parts = (np.array(value.correction, np.float32).tobytes(),)
            self.to.write("routing", self.index, *value.numbers, len(value.correction), parts=parts)
        elif isinstance(value, list):
            self.to.write("values", self.index, name, len(value), parts=(np.array(value, np.float32).tobytes(),))
        else:
            self.to.write("number", self.index, name, value)
        is_object = isinstance(value, RecordedWeight | RecordedRouting)
        setattr(self.real, name, value.real if is_object else value)

    def __getattr__(self, name: str) -> Any:
        if name in self.weights:
            return self.weights[name]
        if name.endswith("norm") or name.startswith(("attn_", "mlp_")):
            return RecordedNorm(self.to, self.index, name, getattr(self.real, name))
        raise AttributeError(f"calls of {name} are not recorded")

    def set_activation(self, activation: int) -> None:
        """Record and set it."""
        self.to.write("activation", self.index, activation)
        self.real.set_activation(activation)

    def add_expert(self, *parts: RecordedWeight | None) -> None:
        """Record and add it."""
        self.to.write("expert", self.index, *map(_index, parts))
        self.real.add_expert(*map(_real, parts))

    def set_latent(self, rank: int, nope: int, rope: int, value: int, is_interleaved: bool, q_a: RecordedWeight | None) -> None:
        """Record and set it."""
        self.to.write("latent", self.index, rank, nope, rope, value, is_interleaved, _index(q_a))
        self.real.set_latent(rank, nope, rope, value, is_interleaved, _real(q_a))

    def add_latent_head(self, *parts: RecordedWeight) -> None:
        """Record and add it."""
        self.to.write("latent_head", self.index, *map(_index, parts))
        self.real.add_latent_head(*map(_real, parts))

    def set_cache(self, kind: int, block_size: int, *memory: int) -> None:
        """Record and set it; memory: keys, values and their scales, and whether the layer has blocks of its own."""
        *addresses, is_windowed = memory
        if is_windowed:
            raise ValueError("layers with blocks of their own are not recorded")
        self.to.write("cache", self.index, kind, block_size, *(x for each in addresses for x in self.to.pool_at(each)))
        self.real.set_cache(kind, block_size, *addresses, is_windowed)


class RecordedPlan:
    """A plan: how it is built, and its steps of `run`, with the logits that the real one returns."""

    def __init__(self, to: Recording, vocab_size: int, real: Any) -> None:
        self.__dict__.update({"to": to, "vocab_size": vocab_size, "real": real})

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "is_near":
            self.to.write("near", value)
        elif name != "num_threads":
            raise AttributeError(f"{name} is not recorded")
        setattr(self.real, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("norm"):
            return RecordedNorm(self.to, -1, name, getattr(self.real, name))
        if name in ("has_plain_logits", "scratch_bytes", "num_layers"):
            return getattr(self.real, name)
        raise AttributeError(f"calls of {name} are not recorded")

    def set_embedding(self, embed: RecordedWeight, positions: RecordedWeight | None, scale: float) -> None:
        """Record and set it."""
        self.to.write("embedding", _index(embed), _index(positions), scale)
        self.real.set_embedding(_real(embed), _real(positions), scale)

    def set_per_layer_inputs(self, embed: RecordedWeight, projection: RecordedWeight, size: int, *scales: float) -> None:
        """Record and set them."""
        self.to.write("per_layer_inputs", _index(embed), _index(projection), size, *scales)
        self.real.set_per_layer_inputs(_real(embed), _real(projection), size, *scales)

    def set_head(self, head: RecordedWeight, scale: float, softcap: float) -> None:
        """Record and set it."""
        self.to.write("head", _index(head), scale, softcap)
        self.real.set_head(_real(head), scale, softcap)

    def make_int8_head(self) -> int:
        """Record the call, and return the bytes of the copy."""
        self.to.write("make_int8_head")
        return self.real.make_int8_head()

    def add_layer(self, layer: RecordedLayer) -> None:
        """Record and add it."""
        self.to.write("add_layer", layer.index)
        self.real.add_layer(layer.real)

    def finish(self) -> None:
        """Record the end of the plan."""
        self.to.write("finish")
        self.real.finish()

    def set_angles(self, index: int, cosine: int, sine: int, count: int, half: int) -> None:
        """Record and set them."""
        parts = _bytes_at(cosine, 4 * count * half), _bytes_at(sine, 4 * count * half)
        self.to.write("angles", index, count, half, parts=parts)
        self.real.set_angles(index, cosine, sine, count, half)

    def run(
        self,
        token_ids: list[int],
        starts: list[int],
        ends: list[int],
        tables: list[int],
        max_blocks: int,
        rows: list[int],
        num_logit_rows: int,
        *rest: Any,
        row_adapters: int,
    ) -> list[int]:
        """Run a step of plain tokens whose best are wanted, and record it with its logits."""
        keeps_all, wants_best, logits, *places = rest
        if not wants_best or any(places) or row_adapters or num_logit_rows != len(rows):
            raise ValueError("only steps of plain tokens whose best are wanted are recorded")
        best = self.real.run(
            token_ids, starts, ends, tables, max_blocks, rows, num_logit_rows, keeps_all, True, logits, row_adapters=0
        )
        numbers = [np.array(token_ids, np.int64), np.array(starts, np.int32), np.array(ends, np.int32)]
        parts = [part.tobytes() for part in numbers] + [_bytes_at(table, 8 * max_blocks) for table in tables]
        parts.append(np.array(rows, np.int32).tobytes())
        parts.append(_bytes_at(logits, 4 * len(rows) * self.vocab_size if logits else 0))
        self.to.write("step", len(token_ids), len(ends), max_blocks, len(rows), keeps_all, bool(logits), parts=parts)
        return best


def _index(weight: RecordedWeight | None) -> int:
    return -1 if weight is None else weight.index


def _real(weight: RecordedWeight | None) -> Any:
    return None if weight is None else weight.real


def _bytes_at(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size) if size else b""
