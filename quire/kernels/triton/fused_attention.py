"""Attention of small decode steps in one launch, starting from the joint qkv projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import AttentionSpec
from quire.kernels.triton.arithmetic import LOG2_E
from quire.kernels.triton.attention import IS_FUSED, KvCache
from quire.kernels.triton.fused_attention_kernels import attend_projected
from quire.kernels.triton.launching import ELEMENT_TYPES, FLOATS, Launch, check_contiguous, check_tensor
from quire.kernels.triton.norm import Norm
from quire.kernels.triton.pdl import has_dependent_launch
from quire.kernels.triton.qk_rope_store import LARGEST_OF, Rope
from quire.kernels.triton.sizes import power_of_two
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.kernels.triton.tiles import ROWS_OF_DECODE, decode_attention_tile, fused_attention_tile

_MERGED_NUMBERS = 2048


def most_chunks(num_kv_heads: int) -> int:
    """Return the maximum number of chunks of a context: enough for one sequence to fill the device."""
    return max(32, power_of_two(256 // num_kv_heads))


@dataclass(frozen=True, slots=True)
class ProjectedAttention:
    """Attention together with the operations before it in a layer.

    rope     None: no rotation
    norms    of q and of k, RMSNorm over head_dim; None: none
    arrived  [sequences, kv heads] i32 zeros, for the maximum number of sequences; shared by all layers, which never overlap
    """

    spec: AttentionSpec
    rope: Rope | None
    norms: tuple[Norm, Norm] | None
    arrived: Tensor

    def launch(self, out: Tensor, qkv: Tensor, cache: KvCache, step: DeviceAttentionMetadata, positions: Tensor) -> Launch:
        """Return the launch that stores the KV of one new token per sequence and attends it to its sequence's keys.

        out        [S, H * D], zeros for padding sequences
        qkv        [S, (H + 2 * K) * D], contiguous: q, k and v of each sequence
        positions  [S] i64 or i32, rows of rope's table

        Raises InvariantError for shapes and dtypes that do not match, and for steps with several tokens of a sequence.
        """
        spec, norms = self.spec, self.norms
        self._check(out, qkv, cache, step, positions)
        num_sequences, group = len(qkv), spec.num_heads // spec.num_kv_heads
        tile = decode_attention_tile(spec.head_dim, group, qkv.dtype, cache.k.dtype)
        chosen = fused_attention_tile(spec.num_kv_heads, spec.head_dim)
        num_parts, chunk = most_chunks(spec.num_kv_heads), max(chosen.chunk, tile.keys)
        longest = step.max_context_len if spec.window is None else min(step.max_context_len, spec.window + chunk)
        parts = (num_sequences, spec.num_kv_heads, num_parts, group)
        block_d = power_of_two(spec.head_dim, 16)
        block_g = power_of_two(group)
        is_quantised = cache.k_scales is not None
        compute = torch.float16 if is_quantised and qkv.dtype != torch.float32 else qkv.dtype
        is_pdl = has_dependent_launch(qkv.device)
        arguments = {
            "qkv_ptr": qkv,
            "out_ptr": out,
            "k_ptr": cache.k,
            "v_ptr": cache.v,
            "k_scales_ptr": cache.k_scales,
            "v_scales_ptr": cache.v_scales,
            "slots_ptr": step.slots,
            "positions_ptr": positions,
            "table_ptr": None if self.rope is None else self.rope.table,
            "q_weight_ptr": None if norms is None else norms[0].weight,
            "k_weight_ptr": None if norms is None else norms[1].weight,
            "context_lens_ptr": step.context_lens,
            "block_tables_ptr": step.block_tables,
            "partial_ptr": torch.empty(*parts, spec.head_dim, dtype=torch.float32, device=qkv.device),
            "log_sums_ptr": torch.empty(parts, dtype=torch.float32, device=qkv.device),
            "arrived_ptr": self.arrived,
            "scale": spec.scale * (1.0 if spec.softcap else LOG2_E.value),
            "table_stride": step.block_tables.stride(0),
        }
        constants = {
            "NUM_KV_HEADS": spec.num_kv_heads,
            "GROUP": group,
            "HEAD_DIM": spec.head_dim,
            "BLOCK_SIZE": cache.k.shape[2],
            "BLOCK_M": power_of_two(group, ROWS_OF_DECODE),
            "BLOCK_N": tile.keys,
            "BLOCK_D": block_d,
            "BLOCK_G": block_g,
            "BLOCK_C": max(1, min(16, _MERGED_NUMBERS // (block_g * block_d))),
            "CHUNK": chunk,
            "MOST_CHUNKS": num_parts,
            "WINDOW": spec.window or 0,
            "SOFTCAP": spec.softcap or 0.0,
            "COMPUTE": ELEMENT_TYPES[compute],
            "ROPE_DIM": 0 if self.rope is None else self.rope.spec.dim,
            "IS_ROPE_F32": self.rope is not None and self.rope.spec.is_f32,
            "EPS": 0.0 if norms is None else norms[0].spec.eps,
            "OFFSET": 0.0 if norms is None else float(norms[0].spec.offset),
            "CASTS_LATE": norms is not None and norms[0].spec.late_cast,
            "LARGEST": LARGEST_OF.get(cache.k.dtype, 0.0),
            "THREADS": 32 * tile.num_warps,
            "CAN_FETCH": self._can_fetch(cache),
            "IS_PDL": is_pdl,
        }
        grid = (num_sequences, spec.num_kv_heads, min(num_parts, max(1, -(-longest // chunk))))
        return Launch(attend_projected, grid, arguments, constants, tile.num_warps, chosen.num_stages, IS_FUSED, is_pdl)

    def _can_fetch(self, cache: KvCache) -> bool:
        """Return whether rows of a head can be prefetched: they begin at multiples of 16 bytes."""
        rope_dim = 0 if self.rope is None else self.rope.spec.dim
        return cache.k.shape[2] * self.spec.head_dim * cache.k.itemsize % 16 == 0 and rope_dim % 4 == 0

    def _check(self, out: Tensor, qkv: Tensor, cache: KvCache, step: DeviceAttentionMetadata, positions: Tensor) -> None:
        spec, num_sequences = self.spec, len(qkv)
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        check_contiguous("qkv", qkv, (None, num_heads * spec.head_dim), *FLOATS)
        check_contiguous("out", out, (num_sequences, spec.num_heads * spec.head_dim), qkv.dtype)
        if not step.is_decode or step.query_counts is None or len(step.query_counts) != num_sequences:
            raise InvariantError(f"a decode step has one token of each sequence, got {step.query_counts} for {num_sequences}")
        check_contiguous("k cache", cache.k, (None, spec.num_kv_heads, None, spec.head_dim), qkv.dtype, *LARGEST_OF)
        check_contiguous("v cache", cache.v, tuple(cache.k.shape), cache.k.dtype)
        for name, scales in (("k_scales", cache.k_scales), ("v_scales", cache.v_scales)):
            if (scales is None) == (cache.k.dtype in LARGEST_OF):
                raise InvariantError(f"{name} are only used with quantised keys and values, got {cache.k.dtype}")
            if scales is not None:
                check_contiguous(name, scales, tuple(cache.k.shape[:3]), torch.float32)
        check_contiguous("slots", step.slots, (num_sequences,), torch.int64)
        check_contiguous("positions", positions, (num_sequences,), torch.int64, torch.int32)
        check_contiguous("arrived", self.arrived, (None, None), torch.int32)
        if self.arrived.numel() < num_sequences * spec.num_kv_heads:
            raise InvariantError(
                f"{num_sequences} sequences of {spec.num_kv_heads} heads arrive in {self.arrived.numel()} places"
            )
        if self.rope is not None:
            check_tensor("rope table", self.rope.table, (None, self.rope.spec.dim), torch.float32)
        for norm in self.norms or ():
            check_contiguous("weight of q's or k's norm", norm.weight, (spec.head_dim,), qkv.dtype)
