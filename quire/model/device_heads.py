"""Attention heads that the fused GPU kernel does not support: torch normalises and rotates them. Weights for norms without
any."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.contracts.model_spec import AttentionSpec, ModelSpec, NormSpec, RopeSpec
from quire.kernels.reference.norm import normalize
from quire.kernels.reference.rope import inverse_frequencies, query_factors, rotate
from quire.kernels.triton.norm import Norm, normalize_unweighted
from quire.kernels.triton.qk_rope_store import Projections, Rope, rope_table


def needs_separate_heads(spec: AttentionSpec) -> bool:
    """Return whether attention needs operations on q and k that `place_heads` does not support."""
    by_head = None if spec.qk_norm_over == "all" else spec.qk_norm
    is_odd = by_head is not None and (spec.is_qk_norm_last or spec.qk_norm_over == "each" or by_head.kind != "rms")
    return is_odd or spec.query_scaling is not None


def turn_heads(
    heads: Projections, spec: AttentionSpec, positions: Tensor, rope: Rope | None, norms: tuple[Norm, Norm] | None
) -> Projections:
    """Return q, k and v for attention, with q and k normalised, rotated and scaled; rope and norms as in place_heads."""
    q, k = heads.q, heads.k
    if norms is not None and not spec.is_qk_norm_last:
        q, k = _normalize(q, norms[0]), _normalize(k, norms[1])
    if rope is not None:
        table = rope.table[positions][:, None].to(torch.float32 if rope.spec.is_f32 else q.dtype)
        half = rope.spec.dim // 2
        q, k = (rotate(x, table[..., :half], table[..., half:]) for x in (q, k))
    if norms is not None and spec.is_qk_norm_last:
        q, k = _normalize(q, norms[0]), _normalize(k, norms[1])
    if spec.query_scaling is not None:
        q = q * query_factors(spec.query_scaling, positions, q.dtype)
    return Projections(q.contiguous(), k.contiguous(), heads.v)


def _normalize(x: Tensor, norm: Norm) -> Tensor:
    return normalize(x, norm.spec, norm.weight, norm.bias, normalize_unweighted)


def fill_missing_weights(tensors: dict[str, Tensor], spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Add weights of one for norms without weights, because the kernels always multiply by a weight, and slopes of ALiBi."""

    def fill(name: str, norm: NormSpec | None, size: int) -> None:
        if norm is not None and not norm.has_weight:
            tensors[f"{name}.weight"] = torch.ones(size, dtype=dtype, device=device)

    fill("embed_norm", spec.embed_norm, spec.hidden_size)
    fill("final_norm", spec.final_norm, spec.hidden_size)
    for index, layer in enumerate(spec.layers):
        prefix = f"layers.{index}."
        for name in ("attn_in", "attn_out", "mlp_in", "mlp_out"):
            fill(prefix + name, getattr(layer, name), spec.hidden_size)
        for name in ("q_norm", "k_norm"):
            fill(prefix + name, layer.attention.qk_norm, layer.attention.head_dim)
        if layer.attention.alibi_slopes:
            tensors[f"{prefix}slopes"] = torch.tensor(layer.attention.alibi_slopes, dtype=torch.float32, device=device)


def rope_of(spec: RopeSpec, max_model_len: int, switch_len: int | None, dtype: torch.dtype, device: torch.device) -> Rope:
    """Return the table of a rope; with switch_len, the rows of that many positions of its short variant come last."""
    long = rope_table(spec, inverse_frequencies(spec, max_model_len).to(device), max_model_len, dtype)
    if switch_len is None:
        return long
    frequencies = inverse_frequencies(spec, spec.original_max if spec.depends_on_length else max_model_len)
    short = rope_table(spec, frequencies.to(device), switch_len, dtype)
    return Rope(spec, torch.cat((long.table, short.table)))
