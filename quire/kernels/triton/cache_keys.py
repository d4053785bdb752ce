"""Keys of kernels in Triton's cache that do not depend on which kernel was launched first."""

from __future__ import annotations

import triton

from quire.kernels.triton.arithmetic import INTERPRETED

_HASHED: set[int] = set()


def hash_callees(kernel: triton.JITFunction) -> None:
    """Make Triton hash a kernel after everything that it calls; call before it is launched or compiled.

    Triton 3.6 omits the constants of a function that is not hashed yet from the cache key of its caller. So a key would depend
    on which kernel was launched first, and could differ from that of the precompiled code.
    """
    if not INTERPRETED.value:
        _hash_after_callees(kernel, set())


def _hash_after_callees(kernel: triton.JITFunction, begun: set[int]) -> None:
    """Do so unless it is begun: a name in its code may be that of an attribute, and of the function itself."""
    if id(kernel) in _HASHED or id(kernel) in begun:
        return
    begun.add(id(kernel))
    scope = kernel.fn.__globals__
    for name in kernel.fn.__code__.co_names:
        called = scope.get(name)
        if isinstance(called, triton.JITFunction):
            _hash_after_callees(called, begun)
    _ = kernel.cache_key
    _HASHED.add(id(kernel))  # last: another thread that finds it there launches at once
