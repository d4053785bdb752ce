"""The kernels and shapes that `quire bench kernels` measures, with separate data for consecutive calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quire.bench.attention_cases import attention_cases, store_cases
from quire.bench.expert_cases import expert_cases
from quire.bench.kernel_setup import KernelCase, ModelShapes, Setup
from quire.bench.linear_cases import best_cases, linear_cases
from quire.bench.quantize_cases import pack_cases, quantize_cases
from quire.bench.recurrence_cases import recurrence_cases
from quire.bench.row_cases import norm_cases, sampler_cases, turn_cases

_MAKERS: dict[str, Callable[[Setup, ModelShapes], Iterator[KernelCase]]] = {
    "linear": linear_cases,
    "best": best_cases,
    "experts": expert_cases,
    "pack": pack_cases,
    "quantize": quantize_cases,
    "attention": attention_cases,
    "store": store_cases,
    "norm": norm_cases,
    "turn": turn_cases,
    "sampler": sampler_cases,
    "recurrence": recurrence_cases,
}
KERNELS = tuple(_MAKERS)


def make_cases(setup: Setup, shapes: ModelShapes, only: tuple[str, ...] = KERNELS) -> Iterator[KernelCase]:
    """Yield the cases; each one's data is freed when the next one is requested."""
    for kernel, make in _MAKERS.items():
        if kernel in only:
            yield from make(setup, shapes)
