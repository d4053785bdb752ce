"""Checks of memory in Triton's interpreter, which reads and writes wherever it is told to.

Every load, store and atomic operation must stay within the tensor argument whose pointer its address was computed from. A
tensor that merely lies next to it does not count: each pointer carries the number of its argument in its high bits, which
arithmetic with offsets keeps and which is taken off before memory is touched.

Memory that torch.empty returns is filled with NaN, and with large integers, as a GPU may well return such.
"""

import inspect
from collections import Counter
from functools import wraps

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

_TAG_SHIFT = np.uint64(48)
_ADDRESS = np.uint64((1 << 48) - 1)
_NO_TENSOR = 0


class OutOfBoundsError(Exception):
    """A kernel touched memory outside of the tensors of its launch."""


def extent_bytes(tensor):
    """Return how many bytes lie between the first and the last element of a strided tensor, both included."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def tensors_in(argument):
    """Yield the tensors of a launch's argument in the order in which the interpreter makes pointers of them."""
    if isinstance(argument, tuple):
        for part in argument:
            yield from tensors_in(part)
    elif isinstance(argument, interpreter.TensorDescriptor):
        yield argument.base
    elif hasattr(argument, "data_ptr"):
        yield argument


class AddressCheck:
    """The addresses of the launches that run while it is installed.

    num_launches  by kernel
    errors        what was found, the first of each launch
    """

    def __init__(self):
        self.num_launches = Counter()
        self.errors = []
        self._reset()

    def _reset(self):
        # The first entry is what no tensor has: every address with that tag is out of bounds.
        self._tagged_starts, self._sizes = [np.uint64(0)], [0]
        self._launch = None

    def install(self, patch):
        """Check all launches until the monkeypatch is undone."""
        patch.setattr(interpreter, "_implicit_cvt", self._tagging(interpreter._implicit_cvt))
        patch.setattr(GridExecutor, "__call__", self._around(GridExecutor.__call__))
        for name, verb, place in (
            ("create_masked_load", "loads", 1),
            ("create_masked_store", "stores", 2),
            ("create_atomic_rmw", "updates", 3),
            ("create_atomic_cas", "updates", None),
        ):
            patch.setattr(InterpreterBuilder, name, self._checking(getattr(InterpreterBuilder, name), verb, place))

    def take_errors(self):
        """Return the errors since the last call."""
        errors, self.errors = self.errors, []
        return errors

    def _around(self, run):
        @wraps(run)
        def checked(executor, *args, **kwargs):
            self._reset()
            self._launch = executor, args, kwargs
            self.num_launches[executor.fn.__name__] += 1
            try:
                run(executor, *args, **kwargs)
            finally:
                self._reset()

        return checked

    def _tagging(self, convert):
        @wraps(convert)
        def tagged(argument):
            found = convert(argument)
            if not hasattr(argument, "data_ptr"):  # of tuples and descriptors the parts are converted by this, too
                return found
            tagged = found.handle.data | (np.uint64(len(self._sizes)) << _TAG_SHIFT)
            self._tagged_starts.append(tagged[0])
            self._sizes.append(extent_bytes(interpreter._unwrap_tensor(argument)))
            found.handle.data = tagged
            return found

        return tagged

    def _checking(self, touch, verb, mask_place):
        """Return an operation of the builder that checks its addresses; mask_place: of its arguments after the builder."""

        @wraps(touch)
        def checked(builder, *args, **options):
            pointers = args[1] if touch.__name__ == "create_atomic_rmw" else args[0]
            mask = None if mask_place is None else np.asarray(getattr(args[mask_place], "data", args[mask_place]))
            addresses = self.check(pointers, mask, verb)
            plain = TensorHandle(addresses, pointers.dtype)
            return touch(builder, *(plain if argument is pointers else argument for argument in args), **options)

        return checked

    def check(self, pointers, mask, verb):
        """Return the addresses without tags. Raises OutOfBoundsError unless those under the mask are within their tensors."""
        tagged = np.asarray(pointers.data)
        num_bytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        # Mostly all addresses are of one tensor and within it: another tag, or a place before it, is a very large offset.
        tag = self._tag_of(tagged.flat[0]) if tagged.size else _NO_TENSOR
        offsets = tagged - self._tagged_starts[tag]
        if tagged.size and offsets.max() > self._sizes[tag] - num_bytes:
            self._check_each(tagged, mask, num_bytes, verb)
        return np.asarray(tagged & _ADDRESS)

    def _tag_of(self, pointer):
        tag = int(pointer >> _TAG_SHIFT)
        return tag if tag < len(self._sizes) else _NO_TENSOR

    def _check_each(self, tagged, mask, num_bytes, verb):
        tags = (tagged >> _TAG_SHIFT).astype(np.intp)
        tags = np.where(tags < len(self._sizes), tags, _NO_TENSOR)
        offsets = (tagged - np.array(self._tagged_starts, np.uint64)[tags]).view(np.int64)
        is_bad = (offsets < 0) | (offsets > np.array(self._sizes, np.int64)[tags] - num_bytes)
        if mask is not None:
            is_bad = is_bad & mask
        if is_bad.any():
            self._refuse(tags, offsets, is_bad, num_bytes, verb)

    def _refuse(self, tags, offsets, is_bad, num_bytes, verb):
        executor, args, kwargs = self._launch
        given = {name: value for name, value in kwargs.items() if name in inspect.signature(executor.fn).parameters}
        arguments = inspect.getcallargs(executor.fn, *args, **given)
        names = ["no tensor"] + [
            name for name, value in arguments.items() if name not in executor.constexprs for _ in tensors_in(value)
        ]
        first = tuple(np.argwhere(is_bad)[0])
        tag, offset = int(tags[first]), int(offsets[first])
        text = (
            f"{executor.fn.__name__} {verb} outside of {names[tag]}: {int(is_bad.sum())} of {is_bad.size} addresses, the first "
            f"at byte {offset} of {self._sizes[tag]}, {num_bytes} bytes wide, in program "
            f"{interpreter.interpreter_builder.grid_idx}"
        )
        self.errors.append(text)
        raise OutOfBoundsError(text)


def fill_unset(tensor):
    """Fill a new tensor with values that must not be read: NaN if its type has it, otherwise a large number; return it."""
    if tensor.device.type == "cpu" and tensor.numel():
        # All bits set are NaN in every float type that kernels know. Integers become large ones: no block, slot or token.
        bits = 0xFF if tensor.is_floating_point() else 0x7F
        tensor.untyped_storage().fill_(1 if tensor.dtype == torch.bool else bits)
    return tensor


def install_unset_memory(patch):
    """Have torch.empty and its kin return memory that holds nothing useful."""

    def filling(make):
        @wraps(make)
        def made(*args, **kwargs):
            return fill_unset(make(*args, **kwargs))

        return made

    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        patch.setattr(place, name, filling(getattr(place, name)))
