"""KvSpec: the shape of the paged key-value cache, and of the recurrent states next to it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quire.base.errors import ConfigError, InvariantError
from quire.contracts.mixer_spec import StateShape
from quire.contracts.model_spec import DTYPE_BYTES, AttentionSpec, Dtype, ModelSpec

KvDtype = Dtype | Literal["int8", "fp8", "turboquant_4bit", "k8v4"]

QUANTIZED_KV_BITS: dict[str, tuple[int, int]] = {"int8": (8, 8), "fp8": (8, 8), "turboquant_4bit": (4, 4), "k8v4": (8, 4)}
"""Bits of an element of K and of V in the quantised formats. Each token and head has one scale in f32 for K and one for V."""

_SCALE_BYTES = 4

MAX_ROTATED_DIM = 2048
"""The largest vector that the native kernels rotate: they have a table of the signs."""


def can_rotate_on_gpu(dim: int) -> bool:
    """Return whether the kernels of GPUs rotate vectors of this size: powers of two from 16 on."""
    return 16 <= dim <= MAX_ROTATED_DIM and dim & (dim - 1) == 0


def head_dims_of(spec: ModelSpec) -> tuple[int, ...]:
    """Return the sizes of the heads that have keys and values, each once, ascending."""
    return tuple(sorted({layer.attention.head_dim for layer in spec.layers if layer.attention.num_kv_heads}))


def check_kv_format(kv_format: str, head_dims: Collection[int], has_recurrent_state: bool, is_gpu: bool) -> None:
    """Raise ConfigError for a quantised KV format that a model with such heads cannot have on such a device.

    head_dims  see head_dims_of; other formats than those of QUANTIZED_KV_BITS are not quantised, and always there
    """
    bits = QUANTIZED_KV_BITS.get(kv_format)
    if bits is None:
        return
    if has_recurrent_state:
        raise ConfigError(f"kv_cache_dtype {kv_format!r} is not supported where layers have a recurrent state; choose 'auto'")
    if 4 not in bits:
        return
    for dim in head_dims:
        if is_gpu and not can_rotate_on_gpu(dim):
            raise ConfigError(
                f"kv_cache_dtype {kv_format!r} needs, on a GPU, heads of a power of two of values from 16 on, but this model "
                f"has heads of {dim}; choose 'auto', 'int8' or 'fp8'"
            )
        if dim > MAX_ROTATED_DIM:
            raise ConfigError(
                f"kv_cache_dtype {kv_format!r} allows heads of at most {MAX_ROTATED_DIM} values, but this model has heads of "
                f"{dim}; choose 'auto', 'int8' or 'fp8'"
            )


MAX_DEFAULT_BLOCKS = 1 << 18
"""Blocks of a pool whose size nobody gave: the scheduler's own record of a block takes time and memory too."""


def peak_window_blocks(window_tokens: int, num_step_tokens: int, block_size: int) -> int:
    """Return the most blocks of the window group that a sequence holds which computes num_step_tokens in a step.

    The window may begin and end within a block, and one more token is kept, see WindowBlocks.first_needed.
    """
    return -(-(window_tokens + num_step_tokens) // block_size) + 2


def window_blocks_of(window_tokens: int, num_tokens: int, block_size: int) -> int:
    """Return the most blocks of the window group that a sequence of num_tokens holds which computes one token at a time."""
    return min(-(-num_tokens // block_size), -(-window_tokens // block_size) + 2)


@dataclass(frozen=True, slots=True)
class PoolDivision:
    """Divides memory between the pools of the full group and of the window group.

    The window group has the blocks that max_num_seqs sequences and one step need, and as many again for cached prefixes, but
    never more than the full group would have if all layers kept all tokens. So no load that fitted before does not fit now.

    takes_all  the memory is for nothing else, as that of a GPU: what max_num_seqs sequences of max_model_len do not need goes
               to both pools, for cached prefixes. Otherwise it is not taken
    """

    window_tokens: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    takes_all: bool = False

    @property
    def _peak(self) -> int:
        num_step_tokens = min(self.max_num_batched_tokens, self.max_model_len)
        return peak_window_blocks(self.window_tokens, num_step_tokens, self.block_size)

    def num_window_blocks(self, num_blocks: int) -> int:
        """Return the blocks of the window group. num_blocks: for which the memory suffices if all layers keep all tokens."""
        per_sequence = window_blocks_of(self.window_tokens, self.max_model_len, self.block_size)
        wanted = 2 * self.max_num_seqs * per_sequence - (-self.max_num_batched_tokens // self.block_size)
        return min(num_blocks, max(self._peak, wanted))

    def divide(self, num_blocks: int, bytes_per_block: float, window_bytes_per_block: float) -> tuple[int, int]:
        """Return the blocks of the full group and of the window group in the memory of num_blocks blocks of all layers."""
        num_window_blocks = self.num_window_blocks(num_blocks)
        needed = min(MAX_DEFAULT_BLOCKS, self.max_num_seqs * -(-self.max_model_len // self.block_size))
        if num_window_blocks < self._peak:
            return num_blocks, num_blocks  # a sequence could need more: it needs no more than the full group has
        spare = (num_blocks - num_window_blocks) * window_bytes_per_block
        if self.takes_all:
            needed = max(needed, num_window_blocks)
            return self._divide_all(num_blocks, num_window_blocks, needed, bytes_per_block, window_bytes_per_block)
        most = max(num_blocks, needed)
        # Where every layer has a window, the blocks of the full group take no memory.
        num_full = min(most, num_blocks + int(spare // bytes_per_block)) if bytes_per_block > 0 else most
        return num_full, num_window_blocks

    def _divide_all(
        self, num_blocks: int, num_window: int, needed: int, bytes_per_block: float, window_bytes_per_block: float
    ) -> tuple[int, int]:
        """Return what `divide` does, with all of the memory in use; num_window: the blocks that the window group needs."""
        both = bytes_per_block + window_bytes_per_block
        rest = num_blocks * both - num_window * window_bytes_per_block - needed * bytes_per_block
        if rest < 0:
            return needed + int(rest // bytes_per_block), num_window
        num_more = int(rest // both)
        return min(MAX_DEFAULT_BLOCKS, needed + num_more), min(MAX_DEFAULT_BLOCKS, num_window + num_more)


def _entry_caches(attentions: Sequence[AttentionSpec], block_size: int) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """Return the shapes that have room for the entries of a block in each layer, and KvSpec.value_sizes.

    K of an entry cache has the entries, or the keys of a block indexer, V the entries of the indexer. V of a layer with
    compression has the gates of what entries are made of; where key and value are one row there is nothing else in it.
    """
    own = [one.cached_size - one.head_dim if one.shared_kv is not None else one.cached_size for one in attentions]
    shapes, values = list[tuple[int, int]](), list[int]()
    for one in attentions:
        compression, keys = one.compression, one.block_indexer
        indexer = None if compression is None else compression.indexer
        sizes = one.head_dim, 0 if indexer is None else indexer.head_dim
        count = 0 if compression is None else compression.entries_per_block(block_size)
        size, num_values = (-(-count * size // block_size) for size in sizes)
        shapes.append((1, keys.head_dim) if keys is not None else (min(1, size), size))
        values.append(num_values)
    return shapes, (*own, *values)


@dataclass(frozen=True, slots=True)
class KvSpec:
    """The cache of one model: per layer K and V of [num_blocks, kv_heads, block_size, head_dim].

    dtype         the model's, or a quantised format with a scale in f32 per token and head: "int8"; "fp8" (e4m3);
                  "turboquant_4bit": rotated, sixteen levels; "k8v4": keys as in "int8", values as in "turboquant_4bit".
                  See kernels/reference/kv_formats.py. Joined rows have one format: "int8" in place of "k8v4"
    layer_shapes  (kv_heads, head_dim) of each layer; (0, 0) for one without attention, or that reads the cache of
                  another layer. Where layers have compressed entries (CompressionSpec), as many more follow: those of the
                  entries of each layer, which are not in the window group. A block has the entries whose last tokens it has.
                  Where they choose blocks (BlockIndexerSpec), the same for the indexer's keys
    state_shapes  of the recurrent state of each layer; empty where no layer has one
    window_tokens the layers of the window group keep only so many last tokens of a sequence, and a few more; their blocks are
                  those of a pool of their own. None: all layers are in one group, the full group
    is_windowed   of each layer, whether it is in the window group; empty if there is none
    layer_dtypes  of each layer, where they are not all `dtype`; empty if they are
    is_joined     keys and values are one tensor, whose rows are latent (LatentSpec)
    index_dims    of each layer, the size of the key that an indexer (IndexerSpec) has of a token beside a joined row, in
                  `dtype`, or on a GPU one of blocks beside keys and values; empty if there is none
    value_sizes   of each of layer_shapes, the size of a row of V where layers have entries; otherwise it is that of K
    """

    block_size: int
    dtype: KvDtype
    layer_shapes: tuple[tuple[int, int], ...]
    state_shapes: tuple[tuple[StateShape, ...], ...] = ()
    window_tokens: int | None = None
    is_windowed: tuple[bool, ...] = ()
    layer_dtypes: tuple[KvDtype, ...] = ()
    is_joined: bool = False
    index_dims: tuple[int, ...] = ()
    value_sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, spec: ModelSpec, block_size: int, dtype: KvDtype, limits_windows: bool = False) -> KvSpec:
        """Return the cache shape that a model needs; limits_windows: with a window group, if a layer has a window."""
        attentions = [layer.attention for layer in spec.layers]
        shapes = tuple((0, 0) if one.kv_source is not None else (one.num_kv_heads, one.cached_size) for one in attentions)
        value_sizes: tuple[int, ...] = ()
        if any(one.compression is not None or one.block_indexer is not None for one in attentions):
            entries, value_sizes = _entry_caches(attentions, block_size)
            shapes += tuple(entries)
        joined = {one.latent is not None for one in attentions if one.num_kv_heads}
        if len(joined) > 1:
            raise InvariantError("a model has latent attention in some layers and keys apart from values in others")
        found = cls(block_size, "int8" if dtype == "k8v4" and True in joined else dtype, shapes, is_joined=True in joined)
        if spec.has_recurrent_state:
            return replace(
                found, state_shapes=tuple(() if one.mixer is None else one.mixer.state_shapes for one in spec.layers)
            )
        latent = [one.latent for one in attentions]
        index_dims = tuple(0 if one is None or one.indexer is None else one.indexer.key_size for one in latent)
        found = replace(found, index_dims=index_dims if any(index_dims) else (), value_sizes=value_sizes)
        return found._with_windows(spec) if limits_windows else found

    @classmethod
    def on_device(cls, spec: ModelSpec, block_size: int, dtype: KvDtype, limits_windows: bool = False) -> KvSpec:
        """Return the cache shape on a GPU, where keys of block indexers are beside those of their layers; see `of`."""
        found = cls.of(spec, block_size, dtype, limits_windows)
        indexers = [layer.attention.block_indexer for layer in spec.layers]
        if not any(indexers):
            return found
        dims = tuple(0 if one is None else one.head_dim for one in indexers)
        return replace(found, layer_shapes=found.layer_shapes[: len(dims)], value_sizes=(), index_dims=dims)

    def _with_windows(self, spec: ModelSpec) -> KvSpec:
        """Return the shape with a window group of the layers whose cache is read with a window only."""
        windows: dict[int, list[int | None]] = {}
        for index, layer in enumerate(spec.layers):
            source = layer.attention.kv_source
            windows.setdefault(index if source is None else source, []).append(layer.attention.kept_window)
        flags = [None not in windows.get(index, [None]) and shape != (0, 0) for index, shape in enumerate(self.layer_shapes)]
        largest = [window for index, flag in enumerate(flags) if flag for window in windows[index] if window is not None]
        return replace(self, window_tokens=max(largest), is_windowed=tuple(flags)) if largest else self

    def part(self, first: int, last: int) -> KvSpec:
        """Return the shape of the cache of the layers [first, last); the group of each is the same."""
        return replace(
            self,
            layer_shapes=self.layer_shapes[first:last],
            state_shapes=self.state_shapes[first:last],
            is_windowed=self.is_windowed[first:last],
            layer_dtypes=self.layer_dtypes[first:last],
            index_dims=self.index_dims[first:last],
            value_sizes=self.value_sizes[first:last],
        )

    def with_layers(self, layers: Collection[int], dtype: KvDtype) -> KvSpec:
        """Return the shape where these layers have another dtype."""
        return replace(
            self, layer_dtypes=tuple(dtype if i in layers else self.dtype_of(i) for i in range(len(self.layer_shapes)))
        )

    def with_dtypes(self, layer_dtypes: tuple[KvDtype, ...]) -> KvSpec:
        """Return the shape with these dtypes of its layers; none: all are `dtype`."""
        return replace(self, layer_dtypes=layer_dtypes)

    def dtype_of(self, layer: int) -> KvDtype:
        """Return how the cache of a layer keeps keys and values."""
        return self.layer_dtypes[layer] if self.layer_dtypes else self.dtype

    @property
    def format_name(self) -> str:
        """Return the dtype, and the layers that have another one, for people and fingerprints."""
        others: dict[KvDtype, list[int]] = {}
        for layer, dtype in enumerate(self.layer_dtypes):
            if dtype != self.dtype:
                others.setdefault(dtype, []).append(layer)
        named = (f"{dtype} in layers {', '.join(map(str, layers))}" for dtype, layers in others.items())
        return "; ".join((self.dtype, *named))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return sum(map(self.layer_bytes_per_token, range(len(self.layer_shapes))))

    @property
    def num_layers(self) -> int:
        """Layers of the model, or of its part; layer_shapes has entries as well."""
        return len(self.layer_shapes) // 2 if self.value_sizes else len(self.layer_shapes)

    def value_size(self, layer: int) -> int:
        """Return the values of a head of V of a token, or of the indexer's key that is in its place; 0: there are none."""
        if self.is_joined:
            return self.index_dims[layer] if self.index_dims else 0
        return self.value_sizes[layer] if self.value_sizes else self.layer_shapes[layer][1]

    def layer_bytes_per_token(self, layer: int) -> int:
        """Return the bytes of one token in one of layer_shapes."""
        (heads, dim), dtype = self.layer_shapes[layer], self.dtype_of(layer)
        bits, scale_bytes = (QUANTIZED_KV_BITS[dtype], _SCALE_BYTES) if dtype in QUANTIZED_KV_BITS else (None, 0)
        bits = bits or (8 * DTYPE_BYTES[dtype],) * 2
        sizes = zip((dim, self.value_size(layer)), bits, strict=True)
        beside = self.index_dims[layer] if self.index_dims and not self.is_joined else 0
        return heads * sum(size * width // 8 + scale_bytes for size, width in sizes if size) + beside * bits[0] // 8

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, without those of the window group; 0 where none has attention."""
        return self.bytes_per_token * self.block_size - self.window_bytes_per_block

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of the host tier: of a block or, where no layer has attention, of a recurrent state."""
        return self.bytes_per_block or self.bytes_per_state

    @property
    def window_bytes_per_block(self) -> int:
        """Bytes of one block over the layers of the window group."""
        layers = (layer for layer, flag in enumerate(self.is_windowed) if flag)
        return sum(map(self.layer_bytes_per_token, layers)) * self.block_size

    def block_arrays(self) -> list[tuple[str, int, int]]:
        """Return the arrays of a block on the CPU, in the order of KvPool.arrays: "k", "v" or a scale of them, the layer, and
        the bytes of a key and value head."""
        rows: list[tuple[str, int, int]] = []
        scales: list[tuple[str, int, int]] = []
        for place, name in enumerate(("k", "v")):
            for layer, (heads, dim) in enumerate(self.layer_shapes):
                dtype = self.dtype_of(layer)
                bits = QUANTIZED_KV_BITS[dtype][place] if dtype in QUANTIZED_KV_BITS else 8 * DTYPE_BYTES[dtype]
                size = self.value_size(layer) if place == 1 else dim
                if heads * size > 0:
                    rows.append((name, layer, self.block_size * size * bits // 8))
                if heads * size > 0 and dtype in QUANTIZED_KV_BITS:
                    scales.append((f"{name}_scale", layer, self.block_size * _SCALE_BYTES))
        return rows + sorted(scales, key=lambda scale: (scale[1], scale[0]))

    def pool_bytes(self, num_blocks: int, num_window_blocks: int) -> int:
        """Bytes of the pools of both groups."""
        return num_blocks * self.bytes_per_block + num_window_blocks * self.window_bytes_per_block

    def window_blocks_per_sequence(self, max_model_len: int) -> int:
        """Return the most blocks of the window group that a sequence holds which computes one token at a time; 0: there is no
        such group."""
        if self.window_tokens is None:
            return 0
        return window_blocks_of(self.window_tokens, max_model_len, self.block_size)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the recurrent state of one sequence over all layers; 0: there is none."""
        shapes = (shape for layer in self.state_shapes for shape in layer)
        return sum(math.prod(one.shape) * (4 if one.is_f32 else DTYPE_BYTES[self.dtype]) for one in shapes)
