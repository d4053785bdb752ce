"""Keys of kernels in Triton's cache that do not depend on which kernel was launched first."""

from __future__ import annotations

import triton

from quire.kernels.triton.arithmetic import INTERPRETED

_SETTLED: set[int] = set()


def settle_key(kernel: triton.JITFunction) -> None:
    """Make Triton hash a kernel after everything that it calls; call before it is launched or compiled.

    Triton 3.6 omits the constants of a function that is not hashed yet from the cache key of its caller. The key of the
    compiled code would then depend on which kernel was launched first, and could differ from that of the precompiled code.
    """
    if not INTERPRETED.value:
        _settle(kernel, set())


def _settle(kernel: triton.JITFunction, begun: set[int]) -> None:
    """Do so unless it is begun: a name in its code may be that of an attribute, and of the function itself."""
    if id(kernel) in _SETTLED or id(kernel) in begun:
        return
    begun.add(id(kernel))
    scope = kernel.fn.__globals__
    for name in kernel.fn.__code__.co_names:
        called = scope.get(name)
        if isinstance(called, triton.JITFunction):
            _settle(called, begun)
    _ = kernel.cache_key
    _SETTLED.add(id(kernel))  # last: another thread that finds it there launches at once
