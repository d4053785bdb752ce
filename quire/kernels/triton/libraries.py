"""Attention by a library that the user has installed, on our cache and steps: FlashInfer, or FlashAttention 3 or 2.

A library is used for eager steps, mainly those with prompts. As it plans on the host, CUDA graphs use our kernels; so do draft
trees and attention sinks.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quire.base.errors import ConfigError, InvariantError
from quire.contracts.model_spec import AttentionSpec
from quire.kernels.triton.device_traits import device_traits
from quire.kernels.triton.step import AttentionLibrary, DeviceAttentionMetadata

_WORKSPACE_BYTES = 128 << 20
_PAGE_MULTIPLE = 256
_INFER_HEAD_DIMS = (64, 128, 256)
_FLASH_HEAD_DIM = 256
_NEEDED = {
    "flashinfer": ("flashinfer", "pip install flashinfer-python"),
    "flash_attn": ("flash_attn_interface or flash_attn", "pip install flash-attn"),
}


def load_library(
    name: str, specs: Sequence[AttentionSpec], dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int
) -> AttentionLibrary | None:
    """Return the library of an attention_backend; None if our kernels are used, as with "auto" and "triton".

    specs  of the layers

    Raises ConfigError if it is not installed or does not support such a model, with what to change.
    """
    if name not in _NEEDED:
        return None
    if dtype not in (torch.bfloat16, torch.float16):
        raise _refused(name, f"computes in bfloat16 or float16, not in {dtype}", "choose another dtype")
    if kv_dtype != dtype:
        raise _refused(name, f"knows no scale per token, which a cache of {kv_dtype} has", "set kv_cache_dtype to 'auto'")
    if name == "flashinfer":
        module = _import("flashinfer")
        if module is None:
            raise _missing(name)
        for spec in specs:
            if spec.head_dim not in _INFER_HEAD_DIMS:
                raise _refused(name, f"has heads of {_INFER_HEAD_DIMS}, the model has {spec.head_dim}", "")
        return FlashInfer(module)
    for spec in specs:
        if spec.head_dim > _FLASH_HEAD_DIM or spec.head_dim % 8:
            raise _refused(name, f"has heads of multiples of 8 up to {_FLASH_HEAD_DIM}, the model has {spec.head_dim}", "")
    module = _import("flash_attn_interface") if device_traits().is_hopper else None
    if module is not None:
        return FlashAttention3(module)
    module = _import("flash_attn")
    if module is None:
        raise _missing(name)
    if block_size % _PAGE_MULTIPLE:
        reason = f"of version 2 takes blocks of multiples of {_PAGE_MULTIPLE} tokens, not of {block_size}"
        raise _refused(name, reason, f"set block_size to {_PAGE_MULTIPLE}, or install version 3")
    return FlashAttention2(module)


class FlashInfer:
    """BatchPrefillWithPagedKVCacheWrapper: one for each kind of layer, planned once per step."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._workspace: Tensor | None = None
        self._planned: dict[AttentionSpec, tuple[Any, DeviceAttentionMetadata]] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: DeviceAttentionMetadata, spec: AttentionSpec) -> Tensor:
        """Return [T, H, D]; see AttentionLibrary."""
        found = self._planned.get(spec)
        if found is None or found[1] is not step:
            if self._workspace is None:
                self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            wrapper = found[0] if found else self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
            self._plan(wrapper, q, k, step, spec)
            found = self._planned[spec] = wrapper, step
        return found[0].run(q, (k, v))

    def _plan(self, wrapper: Any, q: Tensor, k: Tensor, step: DeviceAttentionMetadata, spec: AttentionSpec) -> None:
        counts, lengths = _host_counts(step)
        block_size = k.shape[2]
        pages = [-(-length // block_size) for length in lengths]
        # The positions of the entries are known on the host; their values are only on the device.
        width = step.block_tables.shape[1]
        places = [index * width + page for index, count in enumerate(pages) for page in range(count)]
        indices = step.block_tables.reshape(-1).index_select(0, torch.tensor(places).to(q.device, non_blocking=True))
        wrapper.plan(
            _starts(counts),
            _starts(pages),
            indices,
            torch.tensor([length - (count - 1) * block_size for length, count in zip(lengths, pages, strict=True)]).int(),
            num_qo_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim_qk=spec.head_dim,
            page_size=block_size,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.softcap,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )


class FlashAttention3:
    """flash_attn_with_kvcache of FlashAttention 3, which is for Hopper alone."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: DeviceAttentionMetadata, spec: AttentionSpec) -> Tensor:
        """Return [T, H, D]; see AttentionLibrary."""
        return self._module.flash_attn_with_kvcache(
            q,
            k.transpose(1, 2),
            v.transpose(1, 2),
            cache_seqlens=step.context_lens,
            page_table=step.block_tables,
            cu_seqlens_q=step.query_starts,
            max_seqlen_q=max(_host_counts(step)[0]),
            **_flash_options(spec),
        )


class FlashAttention2:
    """flash_attn_varlen_func of FlashAttention 2, with a table of blocks."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: DeviceAttentionMetadata, spec: AttentionSpec) -> Tensor:
        """Return [T, H, D]; see AttentionLibrary."""
        counts, lengths = _host_counts(step)
        return self._module.flash_attn_varlen_func(
            q,
            k.transpose(1, 2),
            v.transpose(1, 2),
            cu_seqlens_q=step.query_starts,
            cu_seqlens_k=_starts(lengths).to(q.device, non_blocking=True),
            max_seqlen_q=max(counts),
            max_seqlen_k=max(lengths),
            block_table=step.block_tables,
            **_flash_options(spec),
        )


def _flash_options(spec: AttentionSpec) -> dict[str, object]:
    window = (-1, -1) if spec.window is None else (spec.window - 1, 0)
    return {"softmax_scale": spec.scale, "causal": True, "window_size": window, "softcap": spec.softcap or 0.0}


def _host_counts(step: DeviceAttentionMetadata) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of queries of each sequence, and the context lengths."""
    if step.query_counts is None or step.host_context_lens is None:
        raise InvariantError("a library plans with the context lengths on the host, which a CUDA graph does not have")
    return step.query_counts, step.host_context_lens


def _starts(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        raise ConfigError(
            f"{name} is installed, but cannot be imported ({error}); set attention_backend to 'triton'"
        ) from error


def _missing(name: str) -> ConfigError:
    package, command = _NEEDED[name]
    return ConfigError(f"attention_backend is {name!r}, but {package} is not installed: {command}, or choose 'triton'")


def _refused(name: str, reason: str, change: str) -> ConfigError:
    return ConfigError(f"attention_backend {name!r} {reason}: {change + ', or ' if change else ''}choose 'triton'")
