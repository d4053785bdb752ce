"""The attention of prompts by libraries beside our own on a GPU, for bench/gpu.py; one that is not installed says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_kernels import BF16, Shapes

from quire.base.errors import ConfigError
from quire.kernels.triton.attention import attend
from quire.kernels.triton.libraries import load_library
from quire.kernels.triton.step import AttentionLibrary

Row = dict[str, object]
_PAGE = 256  # the least that FlashAttention 2 takes
_CALLS = 20


def library_rows(
    device: torch.device, is_tiny: bool, until_s: float, load: Callable[..., AttentionLibrary | None] = load_library
) -> Iterator[Row]:
    """Yield the times of prompts by our kernels and by each library, launched one by one, and how much the results differ."""
    shapes = Shapes(device, is_tiny)
    spec = shapes.spec
    libraries: dict[str, AttentionLibrary] = {}
    for name in ("flash_attn", "flashinfer"):
        try:
            found = load(name, [spec], BF16, BF16, _PAGE)
            libraries |= {} if found is None else {name: found}
        except ConfigError as error:
            yield {"section": "libraries", "library": name, "skipped": str(error)}
    for num_tokens, length in [(20, 90)] if is_tiny else [(512, 512), (2048, 2048), (8192, 8192), (2048, 32768)]:
        q, cache, step = shapes.attention_inputs(1, length, num_tokens, page=_PAGE)
        ways = {name: partial(library.attend, q, cache.k, cache.v, step, spec) for name, library in libraries.items()}
        own = attend(q, cache, step, spec).float()
        for name, run in {"own": partial(attend, q, cache, step, spec), **ways}.items():
            if time.perf_counter() > until_s:
                return
            row: Row = {"section": "libraries", "library": name, "tokens": num_tokens, "context": length}
            row["difference"] = ((run().float() - own).norm() / own.norm()).item()
            if not is_tiny:
                seconds = _device_seconds(run)
                flops = 4 * num_tokens * (length - (num_tokens - 1) / 2) * spec.num_heads * spec.head_dim
                row |= {"us": seconds * 1e6, "tflops": flops / seconds / 1e12}
            yield row


def _device_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of a call, of so many one behind the other."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(_CALLS):
        run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000 / _CALLS
