"""Spares Triton's interpreter what it does again for every operation of a kernel, which takes most of its time.

The types, shapes and patches are the ones that it would make: they are only made once.
"""

import functools
import inspect
from dataclasses import replace

import numpy as np


def install(patch):
    """Have the interpreter reuse what it has made, until the monkeypatch is undone."""
    from triton.language import core
    from triton.runtime import interpreter

    patch.setattr(core.block_type, "__init__", reused_attributes(core.block_type.__init__, core.constexpr))
    patch.setattr(core.tensor, "__init__", quick_tensor(core))
    patch.setattr(core.tuple, "__init__", quick_tuple(core.tuple_type))
    patch.setattr(core.tuple, "type", lazy_type(core), raising=False)
    semantic = interpreter.TritonSemantic
    patch.setattr(semantic, "broadcast_impl_value", quick_broadcast(semantic.broadcast_impl_value))
    patch.setattr(interpreter, "_get_np_dtype", reused_dtypes(interpreter._get_np_dtype))
    patch.setattr(interpreter, "_patch_builtin", patcher_that_looks_once(interpreter._patch_attr, core.is_builtin))
    options = interpreter.interpreter_builder.options
    if not options.debug:  # else sums of integers are computed again in 64 bits, for a check that is made with `debug` alone
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
    patch.setattr(interpreter, "_patch_lang", OncePatched(interpreter._patch_lang, (interpreter.tl, core)))


def reused_attributes(initialize, constexpr):
    """Return an initializer of types of blocks that gives those of equal elements and shapes the same attributes."""
    known = {}

    def reuse(self, element_ty, shape):
        place = getattr(element_ty, "address_space", None)  # what the name of a pointer does not tell
        key = element_ty.name, place, *[size.value if isinstance(size, constexpr) else size for size in shape]
        found = known.get(key)
        if found is None:
            initialize(self, element_ty, shape)
            known[key] = vars(self).copy()
        else:
            vars(self).update(found)

    return reuse


def quick_tensor(core):
    """Return an initializer of tensors: those of equal shapes share the shape."""

    @functools.cache
    def sizes(*shape):
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(int(np.prod(shape, dtype=np.int64)))

    def initialize(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes(*type.shape) if type.is_block() else sizes()

    return initialize


def quick_tuple(tuple_type):
    """Return an initializer of tuples that makes a type only of types that are given, see lazy_type."""

    def initialize(self, args, type=None):
        self.values = list(args)
        self._known_type = type if type is None or isinstance(type, tuple_type) else tuple_type(type)

    return initialize


def lazy_type(core):
    """Return the property that is the type of a tuple: of the types of its values, which hardly anything asks for."""

    def find(self):
        if self._known_type is None:
            self._known_type = core._type_for_tuple_values(self.values)
        return self._known_type

    def give(self, type):
        self._known_type = type

    return property(find, give)


def quick_broadcast(broadcast):
    """Return a function that brings two tensors to one shape, at once where they have it."""

    def bring(self, lhs, rhs):
        first, second = lhs.type, rhs.type
        if first.is_block() and second.is_block() and first.shape.values == second.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return bring


def reused_dtypes(find):
    """Return a function that has looked up the NumPy type of each of Triton's before."""
    known = {}

    def reuse(type):
        name = type.scalar.name
        if name not in known:
            known[name] = find(type)
        return known[name]

    return reuse


def patcher_that_looks_once(patch_attribute, is_builtin):
    """Return the interpreter's _patch_builtin, which looks for the builtins of a module or class only at its first time."""

    @functools.cache
    def builtins_of(place):
        return [(name, member) for name, member in inspect.getmembers(place) if is_builtin(member)]

    def patch_builtins(place, *rest):
        for name, member in builtins_of(place):
            if getattr(place, name) is member:  # else it is patched already
                patch_attribute(place, name, member, *rest)

    return patch_builtins


class OncePatched:
    """The interpreter's _patch_lang: nothing is patched again for the functions that a kernel calls."""

    def __init__(self, patch_language, languages):
        self._patch_language = patch_language
        self._languages = languages
        self._patched = frozenset()
        self._names_of = functools.cache(self._find)

    def _find(self, function):
        return frozenset(
            place
            for value in function.__globals__.values()
            for place, language in enumerate(self._languages)
            if value is language
        )

    def __call__(self, function):
        before, wanted = self._patched, self._names_of(function)
        if wanted and wanted <= before:
            return None  # what a call of a function within a kernel does not restore
        scope = self._patch_language(function)
        restore = scope.restore

        def restore_and_forget():
            restore()
            self._patched = before

        scope.restore = restore_and_forget
        self._patched = before | wanted
        return scope
